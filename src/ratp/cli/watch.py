"""``ratp watch``: answer images as they appear, raise the alarm, adapt."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ratp.cli.console import check_out, print_json, say, stderr
from ratp.cli.options import Json, MethodFile, OwnBackbone, Quiet
from ratp.errors import ConfigError, RatpError

if TYPE_CHECKING:
    from ratp.deploy.deployment import Deployment
    from ratp.deploy.watch import Answered, Event, StageEnded

SECONDS_BETWEEN_LINES, SECONDS_OF_RATE = 10.0, 10.0
STYLES = {"fine": "green", "watch": "yellow", "drifted": "bold red", "foreign": "bold red"}


def watch(
    folder: Annotated[
        str,
        typer.Argument(help="Folder in which images appear, or -: a list of files on standard input, one per line."),
    ],
    deployment: Annotated[
        Path, typer.Option("--deployment", "-d", help="Directory of the deployment.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the answers, .jsonl or .csv, to which the command appends; default predictions.jsonl in the "
            "deployment. It also says which images are answered already.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Answer what is there, then end.")] = False,
    adapt: Annotated[
        str | None,
        typer.Option(help="never, ask, auto or online, in place of the deployment's own setting.", show_default=False),
    ] = None,
    latency: Annotated[float, typer.Option(metavar="SEC", help="Longest wait for more images to predict at once.")] = 2,
    patience: Annotated[
        float, typer.Option(metavar="SEC", help="How long to retry a file that is no complete image.")
    ] = 10,
    method: MethodFile = None,
    backbone: OwnBackbone = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …, mps or auto.")] = "auto",
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Answer images as they appear in a folder: file, class and confidence, each once.

    Says when the images become unlike those the model knows, and adapts to them if that is wanted. Interrupted or
    killed, the same command continues: no image is lost or answered twice.
    """
    problems = [
        f"{name} takes seconds, 0 or more; got {value}."
        for name, value in (("--latency", latency), ("--patience", patience))
        if not 0 <= value < float("inf")
    ]
    if problems:
        raise ConfigError(problems)
    place = out or deployment / "predictions.jsonl"
    if out is not None:
        check_out(out)
    if folder != "-" and not Path(folder).is_dir():
        raise RatpError(f"{folder} is not a folder. Name the folder in which images appear, or - for a list.")
    from ratp.cli.progress import interruptible
    from ratp.deploy.answers import Answers
    from ratp.deploy.arrivals import FolderSource, ListSource
    from ratp.deploy.deployment import Deployment
    from ratp.deploy.watch import FolderWatch

    console = stderr()
    with (
        interruptible(console) as stop,
        Deployment(deployment, device=device, method=method, backbone=backbone) as model,
        closing(Answers(place)) as answers,
        _display(model, console, quiet=quiet or json_) as display,
    ):
        if adapt is not None:
            model.settings = replace(model.settings, adapt=adapt)  # type: ignore[arg-type]  # checked there
        if not (quiet or json_):
            level = model.level if model.is_calibrated else "off, until the first images show what is usual"
            say(f"{folder}: version {model.version} answers; alarm {level}; --adapt {model.settings.adapt}")
        source = ListSource(_lines_of_stdin()) if folder == "-" else FolderSource(Path(folder), once=once)
        with closing(FolderWatch(model, source, answers, latency=latency, patience=patience).events()) as events:
            for event in events:
                display.see(event)
                stop.check()
        found = {"answered": display.answered, "broken": display.broken, "version": model.version, "level": model.level}
    if json_:
        print_json({**found, "out": str(place)})
    elif not quiet:
        say(f"Answers: {place}")


def _lines_of_stdin() -> Iterator[bytes]:
    """Reads lines without a buffer of Python's, which could not be closed while a thread waits for it."""
    rest = b""
    while data := os.read(0, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    yield rest


@contextmanager
def _display(model: Deployment, console: Console, *, quiet: bool) -> Iterator[_Display]:
    """Shows a line that is kept up to date on a terminal, a line from time to time elsewhere."""
    if quiet or not console.is_terminal:
        yield _Display(model, console, quiet=quiet)
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield _Display(model, console, live)


class _Display:
    """Shows what a watch does; problems even if ``quiet``."""

    def __init__(self, model: Deployment, console: Console, live: Live | None = None, *, quiet: bool = False) -> None:
        self._model, self._console, self._live, self._quiet = model, console, live, quiet
        self._level, self._advised, self._stage = model.level, False, ""
        self._calibrated = model.is_calibrated
        self._shown_at = time.monotonic()
        self._counts = deque([(self._shown_at, 0)])  # of answered images, for the rate
        self._shown = self.answered = self.broken = 0

    def see(self, event: Event) -> None:
        """Takes notice of an event."""
        from ratp.deploy import watch as events

        match event:
            case events.Recalled(images, gone):
                lost = f"; {gone:,} more are gone" if gone else ""
                self._say(f"continuing; the alarm knows the last {images:,} images again{lost}")
                self._level = self._model.level
            case events.Answered():
                self._count(event)
            case events.StageStarted(images):
                self._stage = f"adapting to {images:,} images; new ones wait"
                self._say(self._stage)
            case events.StageEnded():
                self._stage = ""
                self._end_stage(event)
            case events.Waiting(note) if note:
                self._warn(note)
        self._refresh()

    def _count(self, event: Answered) -> None:
        self._counts.append((time.monotonic(), self.answered))
        self.answered += event.count
        self.broken += len(event.broken)
        for name, reason in event.broken:
            self._warn(f"no answer for {name}: {reason}")
        if event.seen is None or not event.seen.windows:
            return
        for text in event.seen.events:
            self._say(text, "green" if "adapted" in text else "yellow")
        if not self._calibrated and self._model.is_calibrated:
            self._calibrated = True
            self._say("the first images now show what is usual: the alarm is on")
        last = event.seen.windows[-1]
        if last.level != self._level:
            about = f"score {last.score:.1f}, confidence {last.confidence:.0%}, nearest {last.nearest}"
            odd = f"; least typical: {', '.join(event.seen.causes[:3])}" if event.seen.causes else ""
            self._say(f"alarm: {self._level} → {last.level} ({about}{odd})", STYLES[last.level])
            self._level = last.level
        if self._model.ready and self._model.settings.adapt == "ask" and not self._advised:
            self._advised = True
            self._say(f"{self._model.waiting:,} images are there to adapt to: repeat the command with --adapt auto")
        self._advised &= self._level != "fine"

    def _end_stage(self, event: StageEnded) -> None:
        self._level = self._model.level
        result = event.result
        if result is None:
            self._warn(f"the stage failed; version {self._model.version} goes on. {event.error}")
        elif result.accepted:
            self._say(f"accepted: version {result.version}, adapted to {result.images:,} images", "green")
        else:
            self._say(f"refused: {'; '.join(result.reasons)}. Version {result.version} goes on", "yellow")

    def _status(self) -> str:
        now = time.monotonic()
        while len(self._counts) > 1 and now - self._counts[0][0] > SECONDS_OF_RATE:
            self._counts.popleft()
        since, before = self._counts[0]
        rate = (self.answered - before) / max(now - since, 1.0)
        broken = f"  broken {self.broken:,}" if self.broken else ""
        return (
            f"version {self._model.version}  alarm {self._model.level}  images {self.answered:,}{broken}  {rate:.1f}/s"
        )

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._live is not None:
            self._live.update(Text(f"{self._status()}  {self._stage}"), refresh=True)
        elif now - self._shown_at >= SECONDS_BETWEEN_LINES and self.answered > self._shown:
            self._shown_at, self._shown = now, self.answered
            self._say(self._status())

    def _say(self, text: str, style: str = "") -> None:
        if not self._quiet:
            self._console.print(text, style=style, markup=False, soft_wrap=True)

    def _warn(self, text: str) -> None:
        self._console.print(text, style="yellow", markup=False, soft_wrap=True)
