"""Runs the commands in the README: its shell commands, then its Python examples."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(language: str) -> list[str]:
    """The README's fenced blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)


def main() -> None:
    """Runs everything; fails with the first command that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip", action="append", default=[], help="a command that has been run already")
    skip = parser.parse_args().skip
    commands = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    for command in commands:
        if command and command not in skip:
            print(f"README: {command}", flush=True)
            subprocess.run(["bash", "-euc", f'PATH="$PWD/.venv/bin:$PATH"; {command}'], cwd=ROOT, check=True)
    for example in blocks("python"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"README: a Python example of {len(example.splitlines())} lines", flush=True)
            subprocess.run([sys.executable, "-W", "error", "-c", example], cwd=folder, check=True)


if __name__ == "__main__":
    main()
