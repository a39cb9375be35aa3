"""Writes the table of docs/explanation/reliability.md: every fault, what happens, which tests show it, how many passed.

The tests are those marked ``faults``; writing the table runs them. ``--check`` runs none: it fails if a fault has no
test, or if the page names other tests than there are.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = "docs/explanation/reliability.md"
PATTERN = re.compile(r"(<!-- begin faults -->\n).*?(<!-- end faults -->)", flags=re.S)

FAULTS = {
    1: "a process is killed, or the power fails, during a stage",
    2: "a process is killed while it writes a file; a file is damaged later",
    3: "a folder is not writable, or stops being writable",
    4: "the disk is full",
    5: "a checkpoint or a run from an untrusted source",
    6: "weights that are truncated, damaged or of the wrong shape",
    7: "a hostile archive",
    8: "a download is interrupted",
    9: "a web page is served instead of a file",
    10: "files among the images that are not images",
    11: "unusual images",
    12: "domains with different classes",
    13: "unusual names, links and folder trees",
    14: "NaN and infinity",
    15: "a stage that ruins the model",
    16: "too little memory on a GPU",
    17: "two processes in one folder",
    18: "Ctrl-C and SIGTERM",
    19: "mistakes in a request",
    20: "another machine; moved or changed images",
    21: "another run takes over the folder",
    22: "a lock file that ratp did not write",
    23: "pipes and devices where files belong",
    24: "the power fails after a file was saved",
    25: "cached pixels are damaged",
    26: "too little memory while images are decoded",
    27: "small files that need much memory",
    28: "a download over plain http, or one that unpacks without end",
    29: "a study that names a program",
    30: "programs in the current folder",
    31: "a hostile results file",
    32: "a domain so large that labelling it takes long",
    33: "predictions that were changed afterwards",
}


@dataclass
class Fault:
    """What the tests say about a fault.

    Attributes:
        what: What happens.
        tests: The tests, by file and name.
        cases: The names pytest has for all their cases.
    """

    what: dict[str, None] = field(default_factory=dict)
    tests: dict[str, None] = field(default_factory=dict)
    cases: dict[str, None] = field(default_factory=dict)


class Listener:
    """A plugin of pytest that records all marked tests and their outcomes."""

    def __init__(self) -> None:
        self.faults: dict[int, Fault] = {}
        self.outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Records the marked tests; the cases of one function follow one another."""
        for item in items:
            for mark in reversed(list(item.iter_markers("faults"))):
                number, what = mark.args
                fault = self.faults.setdefault(number, Fault())
                fault.what[what] = None
                fault.tests[f"{item.path.name}::{item.originalname}"] = None
                fault.cases[item.nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records the outcome of a test, which is the worst of its parts."""
        if report.outcome != "passed" or report.when == "call":
            self.outcomes[report.nodeid] = report.outcome


def words() -> list[str]:
    """Returns arguments that name only the test files with fault marks, which is quicker than collecting all."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.faults" in path.read_text()]
    return ["-m", "faults", "-p", "no:cacheprovider", *files]


def collect() -> dict[int, Fault]:
    """Returns the faults by number, as the marks in the tests describe them."""
    listener = Listener()
    with redirect_stdout(io.StringIO()) as reported:
        code = pytest.main(["--collect-only", *words()], plugins=[listener])
    missing = FAULTS.keys() ^ listener.faults.keys()
    if code or missing:
        sys.exit(f"{reported.getvalue()}\nthese faults have no test, or no name: {sorted(missing)}")
    return listener.faults


def run(jobs: str) -> dict[str, str]:
    """Runs the tests and returns the outcome of each."""
    listener = Listener()
    pytest.main(["-n", jobs, *words()], plugins=[listener])
    return listener.outcomes


def result(fault: Fault, outcomes: dict[str, str]) -> str:
    """How many cases of a fault's tests passed."""
    counts = Counter(outcomes.get(case, "not run") for case in fault.cases)
    others = [f"{count} {name}" for name, count in sorted(counts.items()) if name != "passed"]
    return ", ".join([f"{counts['passed']} of {len(fault.cases)}", *others])


def table(faults: dict[int, Fault], results: dict[int, str]) -> str:
    """The table, with one row per fault."""
    lines = ["| | fault | what happens | tests | passed |", "|---:|---|---|---|---:|"]
    for number, name in FAULTS.items():
        fault = faults[number]
        what = "<br>".join(fault.what)
        tests = ", ".join(f"`{test}`" for test in fault.tests)
        lines.append(f"| {number} | {name} | {what} | {tests} | {results.get(number, '')} |")
    return "\n".join(lines)


def read_results(text: str) -> dict[int, str]:
    """The results on a page, by the number of the fault."""
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", text, flags=re.M)
    return {int(number): passed for number, passed in rows}


def main() -> None:
    """Brings the page up to date, or with ``--check`` fails if it is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="run nothing, change nothing; fail if it is out of date")
    parser.add_argument("--jobs", default="2", help="processes to run the tests in; default: 2")
    options = parser.parse_args()
    path = ROOT / PAGE
    faults = collect()
    outcomes = {} if options.check else run(options.jobs)
    text = path.read_text(encoding="utf-8")
    fresh = {number: result(fault, outcomes) for number, fault in faults.items()}
    results = read_results(text) if options.check else fresh
    new = PATTERN.sub(lambda found: f"{found[1]}{table(faults, results)}\n{found[2]}", text)
    if new != text:
        print(f"{'out of date' if options.check else 'updated'}: {PAGE}")
        if not options.check:
            path.write_text(new, encoding="utf-8")
    failed = [number for number, passed in results.items() if re.search("failed|not run", passed)]
    if failed:
        print(f"not all tests passed of these faults: {failed}")
    sys.exit(bool(failed or (options.check and new != text)))


if __name__ == "__main__":
    main()
