"""Counts the modules of the package that a command walks through.

    python tools/walk.py run demo --set epochs=2 --set steps=2 --out runs/walk

A module counts when one of its functions is called other than by an import; a hop is a pair of functions of different
modules, one calling the other.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any

IMPORT = "<frozen importlib._bootstrap>"


def module_of(frame: FrameType | None) -> str | None:
    """The module of the package that a frame runs in; None outside the package."""
    if frame is None or frame.f_code.co_filename.startswith("<"):
        return None
    name = frame.f_globals.get("__name__", "")
    return name if name == "ratp" or name.startswith("ratp.") else None


def importing(frame: FrameType | None) -> bool:
    """Whether a frame runs because a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORT:
            return True
        frame = frame.f_back
    return False


def main(arguments: list[str]) -> int:
    """Runs the command line with these arguments and prints what it walked through."""
    from ratp.__main__ import main as command

    functions: dict[CodeType, str] = {}
    hops: set[tuple[CodeType, CodeType]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if event != "call" or (module := module_of(frame)) is None:
            return
        if frame.f_code not in functions:
            if importing(frame):
                return
            functions[frame.f_code] = module
        caller = module_of(frame.f_back)
        if frame.f_back is not None and caller is not None and caller != module:
            hops.add((frame.f_back.f_code, frame.f_code))

    sys.argv = ["ratp", *arguments]
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        command()
    except SystemExit as end:
        if end.code:
            return int(end.code) if isinstance(end.code, int) else 1
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    modules = sorted(functions.values())
    for module in dict.fromkeys(modules):
        print(f"{modules.count(module):4} functions of {module}")
    print(f"{len(set(modules))} modules, {len(functions)} functions, {len(hops)} hops")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
