"""What a study is going to do, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.markup import escape

from ratp._core.environment import device_name
from ratp.cli.console import print_json, size_text, stdout
from ratp.cli.planned import Planned, about_time, advise, seconds_of
from ratp.errors import RatpError
from ratp.executors.layout import Layout
from ratp.runs.run import Run
from ratp.studies.study import Entry, Study

# Runs whose settings have not been measured by then are taken to be like the others.
_MOST_SECONDS = 60.0


def show_study_plan(
    study: Study,
    console: Console,
    *,
    at_once: int | None,
    apart: bool,
    dry: bool,
    json_: bool,
    layout: Layout | None = None,
) -> None:
    """Prints what remains to be run, with an estimate; runs that differ in seed and order alone are measured once.

    If the runs get processes, nothing is measured here: MPS starts before this process uses the GPU.
    """
    todo = study.remaining()
    planned = _planned(todo, measuring=dry or layout is None or not layout.has_processes)
    found = [item for item in planned if item is not None and item.estimate is not None]
    unknown = len(planned) - len(found)
    seconds = seconds_of(found, at_once, apart=apart) * (1 + unknown / len(found)) if found else 0.0
    if json_:
        if dry:
            shown = [
                item.to_json() if item else {"folder": str(e.folder)} for e, item in zip(todo, planned, strict=True)
            ]
            print_json({"study": study.name, "runs": shown, "seconds": round(seconds, 1) if found else None})
        return
    out = stdout() if dry else console
    runs = "run" if len(study.entries) == 1 else "runs"
    out.print(f"{escape(study.title)}: {len(todo)} of {len(study.entries)} {runs} to execute", soft_wrap=True)
    counted = [(entry, item) for entry, item in zip(todo, planned, strict=True) if item is not None]
    for name, item in {entry.stream: item for entry, item in counted}.items():
        domains = ", ".join(f"{code} {images:,}" for code, images in item.images)
        methods = dict.fromkeys(entry.plan.method.name for entry, _ in counted if entry.stream == name)
        out.print(f"{escape(name)}: {escape(domains)} images; {escape(', '.join(methods))}", soft_wrap=True)
    if found:
        device = found[0].run.plan.device
        memory = max(item.estimate.memory for item in found if item.estimate)
        steps = sum(item.estimate.steps for item in found if item.estimate)
        others = f", {unknown} runs taken to be like the others" if unknown else ""
        out.print(f"{steps:,} steps, about {about_time(seconds)}{others}", soft_wrap=True)
        out.print(f"about {size_text(memory)} a run; {device.type}: {escape(device_name(device))}", soft_wrap=True)
        advise(found[0].run.plan, seconds, out)
    if dry and layout is not None:
        out.print(layout.text, markup=False, soft_wrap=True)


def _planned(entries: Sequence[Entry], *, measuring: bool) -> list[Planned | None]:
    """An estimate for every entry; None where there is none. Images are forgotten again.

    There is none for methods from files: their code runs only where the runs are executed.
    """
    started = time.perf_counter()
    by_settings: dict[str, Planned | None] = {}
    for entry in entries:
        if not entry.plan.is_built_in or entry.settings in by_settings or time.perf_counter() - started > _MOST_SECONDS:
            continue
        by_settings[entry.settings] = None
        run = Run(entry.plan, entry.folder, reuse_source=True, wait=True)
        with suppress(RatpError):  # the run itself reports it
            by_settings[entry.settings] = Planned(run, thorough=True, measuring=measuring)
        run.forget()
    return [by_settings.get(entry.settings) for entry in entries]
