"""Time and memory of reading real images: checking and caching a domain, opening it again, and what that holds.

Takes the folder with ``pacs/*.zip`` and ``digits/*.zip``. Writes ``benchmarks/data.json`` with device and
versions, unless only a part of the images is used.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from PIL import Image

from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.data.cache.decoded import open_decoded
from ratp.data.decode.decode import decode
from ratp.data.read.tree import open_tree

PACS_SIZE, DIGITS_SIZE = 224, 32
MADE_IMAGES, MADE_SIZE = 100_000, 64

RESIDENT = """
import json, os, sys
from pathlib import Path
from ratp.data.cache.decoded import open_decoded

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

before = resident()
domain = open_decoded(Path(sys.argv[1]), int(sys.argv[2]), cache=Path(sys.argv[3]))
opened = resident()
for k in range(0, len(domain), len(domain) // 100):
    domain.images[k].float().mean()
numbers = {"images": len(domain), "pixels_mib": domain.images.nbytes / 2**20}
numbers |= {"opened_mib": opened - before, "looked_at_100_mib": resident() - before}
print(json.dumps({name: round(value, 1) for name, value in numbers.items()}))
"""


def seconds(work: Callable[[], object]) -> float:
    """Time a piece of work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def thinned(archives: list[Path], every: int, folder: Path) -> list[Path]:
    """The archives themselves, or copies with every so many images."""
    return archives if every == 1 else [_copy(path, every, folder) for path in archives]


def _copy(path: Path, every: int, folder: Path) -> Path:
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(folder / path.name, "w") as copy:
        for info in source.infolist()[::every]:
            copy.writestr(info, source.read(info))
    return folder / path.name


def decode_in_one_process(path: Path, side: int) -> None:
    """The plain loop: reads and decodes, checks no sums and keeps nothing."""
    tree = open_tree(path)
    for file in tree.files:
        decode(tree.read(file), (side, side))


def cache_and_compare(archives: list[Path], side: int, cache: Path) -> dict[str, float]:
    """Checks and caches every archive: right after the plain loop over it, and again in one process."""
    loop = alone = together = 0.0
    for path in archives:
        loop += seconds(lambda path=path: decode_in_one_process(path, side))
        together += seconds(lambda path=path: open_decoded(path, side, cache=cache))
        with tempfile.TemporaryDirectory(dir=cache) as other:
            alone += seconds(lambda path=path, other=other: open_decoded(path, side, cache=Path(other), workers=1))
    return {
        "loop_that_keeps_nothing_seconds": round(loop, 2),
        "check_and_cache_in_one_process_seconds": round(alone, 2),
        "check_and_cache_seconds": round(together, 2),
        "speedup_over_the_loop": round(loop / together, 2),
        "speedup_over_one_process": round(alone / together, 2),
    }


def open_again(archives: list[Path], side: int, cache: Path) -> dict[str, float]:
    """Opens all archives from the cache, several times."""
    images = sum(len(open_decoded(path, side, cache=cache)) for path in archives)
    times = [seconds(lambda: [open_decoded(path, side, cache=cache) for path in archives]) for _ in range(5)]
    return {"images": images, "open_seconds": round(median(times), 3), "open_seconds_worst": round(max(times), 3)}


def resident_memory(count: int, folder: Path) -> dict[str, float]:
    """Memory of a process that opens a synthetic domain and reads a hundred images."""
    image = io.BytesIO()
    Image.linear_gradient("L").resize((MADE_SIZE, MADE_SIZE)).convert("RGB").save(image, "PNG")
    with zipfile.ZipFile(folder / "made.zip", "w") as archive:
        for k in range(count):
            archive.writestr(f"{k % 10}/{k:06}.png", image.getvalue())
    open_decoded(folder / "made.zip", MADE_SIZE, cache=folder)
    command = [sys.executable, "-c", RESIDENT, str(folder / "made.zip"), str(MADE_SIZE), str(folder)]
    numbers: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return numbers


def main() -> None:
    """Measures, prints and keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with pacs/*.zip and digits/*.zip")
    parser.add_argument("--every", type=int, default=1, help="use only every so many images, and keep no numbers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("pacs", "digits", "made", "cache"):
            (folder / part).mkdir()
        cache = folder / "cache"
        pacs = thinned(sorted((options.data / "pacs").glob("*.zip")), options.every, folder / "pacs")
        digits = thinned(sorted((options.data / "digits").glob("*.zip")), options.every, folder / "digits")
        numbers = {
            "cores": len(os.sched_getaffinity(0)),
            "pacs": cache_and_compare(pacs, PACS_SIZE, cache) | open_again(pacs, PACS_SIZE, cache),
            "digits": cache_and_compare(digits, DIGITS_SIZE, cache) | open_again(digits, DIGITS_SIZE, cache),
            "made": resident_memory(MADE_IMAGES // options.every, folder / "made"),
        }
    if options.every == 1:
        environment = describe_environment(torch.device("cpu"))
        write_json(Path(__file__).with_suffix(".json"), {"numbers": numbers, "environment": environment})
    print(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
