"""Executes the unfinished runs of a study."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ratp.errors import ConfigError, Note, RatpError, RunDirectoryError, unknown
from ratp.executors.layout import Layout, check_way
from ratp.executors.local import run_all
from ratp.executors.pool import Listener, Result
from ratp.executors.ray import check_ray, run_all_on_ray
from ratp.runs.differences import differing_images
from ratp.runs.events import Event
from ratp.runs.plan import RunPlan
from ratp.runs.run import Run
from ratp.streams.stream import Report
from ratp.studies.study import Entry, Study, how_many
from ratp.training.device_cache import Placement

# Executes runs as run_all does.
Executor = Callable[..., list[Result]]


def run_study(
    study: Study,
    *,
    at_once: int | None = None,
    images: Placement = "auto",
    on_event: Listener | None = None,
    on_end: Callable[[Entry, Result], None] | None = None,
    on: Executor = run_all,
) -> None:
    """Executes all unfinished runs side by side; interrupted and failed ones continue.

    A failing run does not stop the others, and runs in progress in another process are left alone. On a CPU every run
    computes with one thread, so the same study gives the same bits however its runs are distributed.

    Args:
        study: What to run; its folder must be claimed.
        at_once: As for :func:`ratp.executors.local.run_all`.
        images: As for :class:`ratp.runs.run.Run`.
        on_event: As for :func:`ratp.executors.local.run_all`.
        on_end: Called with every result, by one thread at a time.
        on: What executes the runs (:func:`find_executor`).
    """
    todo = []
    for entry in study.entries:
        if study.state(entry) not in ("finished", "running"):
            if obstacle := entry.obstacle():
                study.note_failure(entry, obstacle)
                if on_end is not None:
                    on_end(entry, obstacle)
            else:
                todo.append(entry)
    runs = [Run(entry.plan, entry.folder, reuse_source=True, images=images, wait=True) for entry in todo]
    by_run = {id(run): entry for run, entry in zip(runs, todo, strict=True)}
    started: set[int] = set()

    def seen(run: Run, event: Event) -> None:
        if id(run) not in started:
            started.add(id(run))
            study.clear_failure(by_run[id(run)])  # from now on, only a new failure counts
        if on_event is not None:
            on_event(run, event)

    def ended(run: Run, result: Result) -> None:
        entry = by_run[id(run)]
        if not isinstance(result, RatpError):
            study.clear_failure(entry)
        elif study.state(entry) not in ("finished", "running"):  # another process may have been quicker
            study.note_failure(entry, result)
        if on_end is not None:
            on_end(entry, result)

    on(runs, at_once=at_once, one_thread=True, on_event=seen, on_end=ended)


def find_executor(
    on: str = "local",
    ray_address: str | None = None,
    devices: Sequence[torch.device] = (),
    side_by_side: str = "auto",
    on_layout: Callable[[Layout], None] | None = None,
) -> Executor:
    """The executor called ``local`` or ``ray``.

    Args:
        on: Its name.
        ray_address: Address of the Ray cluster; by default Ray looks for one.
        devices: Several devices of this machine to share the runs.
        side_by_side: How runs share a GPU, as for :func:`ratp.executors.local.run_all`.
        on_layout: Likewise.
    """
    check_way(side_by_side)
    if on not in ("local", "ray"):
        raise ConfigError(unknown("place to run on", on, ("local", "ray")))
    if on == "ray":
        if side_by_side != "auto":
            raise ConfigError("on a cluster Ray places the runs: leave out --side-by-side.")
        check_ray(ray_address)
        return partial(run_all_on_ray, address=ray_address)
    if ray_address is not None:
        raise ConfigError("an address of a Ray cluster needs --on ray.")
    return partial(run_all, devices=devices, side_by_side=side_by_side, on_layout=on_layout)


def without_stale_results(study: Study, progress: Report | None = None) -> Study:
    """The study without results from elsewhere whose images differ from today's; a note names them.

    Results count as they are where images cannot be read or are not read from files.

    Args:
        study: The study.
        progress: Reports images that have to be decoded for this (:class:`ratp.streams.stream.DataOptions`).
    """
    hashes: dict[object, Mapping[str, str]] = {}
    stale: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}
    entries = []
    for entry in study.entries:
        finished = entry.read()[0]
        record = finished or entry.result
        changed = (
            differing_images(record.config, {"data": _image_hashes(entry.plan, hashes, progress)}) if record else []
        )
        if changed:
            stale[finished is not None].setdefault(", ".join(changed), []).append(entry.title)
        entries.append(replace(entry, result=None) if changed else entry)
    if stale[True]:
        which = "; ".join(f"{how_many(titles)}: those of {names}" for names, titles in stale[True].items())
        raise RunDirectoryError(
            f"runs in {study.folder} used other images than there are now ({which}). Restore those images, or execute "
            "all runs again in another folder with --out."
        )
    for names, titles in stale[False].items():
        note = f"{how_many(titles)}: known results used other images of {names} and do not count"
        warnings.warn(note, Note, stacklevel=2)
    return replace(study, entries=tuple(entries))


def _image_hashes(plan: RunPlan, known: dict[object, Mapping[str, str]], progress: Report | None) -> Mapping[str, str]:
    """The hash of every domain's images; empty where they are not read from files, or cannot be."""
    if plan.spec.places is None:
        return {}
    recipe = plan.recipe
    shift = recipe.label_shift, recipe.label_shift_seed, recipe.missing_classes
    key = plan.spec.name, frozenset(plan.order), plan.order[0], recipe.size, recipe.hold_out, shift
    if key not in known:
        try:
            known[key] = replace(plan, data=replace(plan.data, progress=progress)).load_stream().fingerprints
        except RatpError:  # the runs that need them report it
            known[key] = {}
    return known[key]
