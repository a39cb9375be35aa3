"""What a server says about its deployment: a page for people, and text for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import jinja2

from ratp.deploy.deployment import BASELINE, Deployment
from ratp.deploy.drift import Level
from ratp.deploy.store import read_journal
from ratp.errors import printable

# Windows that the page draws, events that it lists, and bytes of the journal that it reads.
WINDOWS, EVENTS, BYTES = 60, 20, 2**18
_INDICATORS = {
    "score": ("Score", "above 1: unlike all known domains"),
    "confidence": ("Confidence", "mean probability of the predicted class"),
    "mix": ("Class mix", "difference from the nearest known domain"),
    "distance": ("Distance", "of embeddings from the nearest known domain"),
}
_WIDTH, _HEIGHT = 240.0, 48.0


@dataclass
class Counts:
    """What a server counts.

    Attributes:
        requests: Number of requests by path and status.
        images: Number of images that were answered.
        seconds: Sum of the seconds that answered images took.
    """

    requests: dict[tuple[str, int], int] = field(default_factory=dict)
    images: int = 0
    seconds: float = 0.0

    def add(self, path: str, status: int) -> None:
        """Counts a request."""
        self.requests[path, status] = self.requests.get((path, status), 0) + 1


def html_page(model: Deployment, counts: Counts, problem: str) -> str:
    """Renders the state, the indicators of the last windows, the versions and what happened."""
    events = read_journal(model.folder, last_bytes=BYTES)
    windows = [event for event in events if event["event"] == "window"][-WINDOWS:]
    told, level = [], "fine"
    for event in events:
        is_new = event["event"] != "window" or event.get("level") != level
        level = event.get("level", level)
        if is_new and (text := _told(event)):
            told.append((_moment(event.get("time")), printable(text)))
    return _template().render(
        name=printable(model.folder.resolve().name),
        model=model,
        baseline=BASELINE,
        counts=counts,
        problem=printable(problem),
        charts=[_chart(name, windows) for name in _INDICATORS] if windows else [],
        windows=len(windows),
        causes=list(map(printable, windows[-1].get("causes", ()))) if windows and model.level != "fine" else (),
        versions=[(version, _moment(version.made)) for version in reversed(model.history())],
        told=told[: -EVENTS - 1 : -1],
    )


def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("ratp.deploy", ".")
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(
        "page.html"
    )


def _moment(time: object) -> str:
    """Formats a time of the journal for people."""
    return str(time)[:19].replace("T", " ")


def _chart(name: str, windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Places the values of an indicator on a small line chart."""
    values = [float(window.get(name, 0.0)) for window in windows]
    top = 1.0 if name == "confidence" else max([*values, 1.25 if name == "score" else 1e-9])
    step = _WIDTH / max(len(values) - 1, 1)
    points = [(k * step, _HEIGHT - min(max(value, 0.0), top) / top * _HEIGHT) for k, value in enumerate(values)]
    title, meaning = _INDICATORS[name]
    return {
        "title": title,
        "meaning": meaning,
        "last": f"{values[-1]:.0%}" if name == "confidence" else f"{values[-1]:.2f}",
        "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points),
        "end": points[-1],
        "limit": _HEIGHT - _HEIGHT / top if name == "score" else None,
        "width": _WIDTH,
        "height": _HEIGHT,
    }


def _told(event: Mapping[str, Any]) -> str:
    """Describes an event of the journal for the list of what happened; empty for those it leaves out."""
    number, domain, images = event.get("number"), event.get("domain"), event.get("images")
    match event["event"]:
        case "version":
            return f"version {number}: {event.get('why')}"
        case "rollback":
            return f"version {number} answers again"
        case "restored":
            return (
                f"version {number} answers again after {images} images: {'; '.join(map(str, event.get('reasons', ())))}"
            )
        case "stage":
            return f"stage on {domain} began, with {images} images"
        case "refused":
            return f"stage on {domain} refused: {'; '.join(map(str, event.get('reasons', ())))}"
        case "failed":
            return f"stage on {domain} failed: {event.get('why')}"
        case "window":
            return f"alarm: {event.get('level')}, score {float(event.get('score', 0)):.1f}"
    return ""


def metrics(model: Deployment, counts: Counts) -> str:
    """Returns the numbers in the text format of Prometheus."""
    windows = [event for event in read_journal(model.folder, last_bytes=2**14) if event["event"] == "window"]
    lines = []

    def add(name: str, kind: str, text: str, values: Mapping[str, float]) -> None:
        lines.extend([f"# HELP ratp_{name} {text}", f"# TYPE ratp_{name} {kind}"])
        lines.extend(f"ratp_{name}{labels} {value!r}" for labels, value in values.items())

    requests = sorted(counts.requests.items())
    add(
        "requests_total",
        "counter",
        "Requests by path and status.",
        {f'{{path="{path}",status="{status}"}}': count for (path, status), count in requests},
    )
    add("images_total", "counter", "Images answered.", {"": counts.images})
    add("image_seconds_total", "counter", "Seconds from request to answer, summed.", {"": counts.seconds})
    add("version", "gauge", "Number of the version that answers.", {"": model.version})
    add("versions", "gauge", "Number of versions.", {"": len(model.history())})
    levels = {f'{{level="{level}"}}': int(model.level == level) for level in get_args(Level)}
    add("alarm", "gauge", "1 for the level of the alarm.", levels)
    add("images_waiting", "gauge", "Recent images that a stage would train on.", {"": model.waiting})
    add("adapting", "gauge", "1 while a stage is under way.", {"": int(model.adapting)})
    for name, (_, meaning) in _INDICATORS.items() if windows else ():
        value = float(windows[-1].get(name, 0.0))
        add(f"window_{name}", "gauge", f"Of the last window: {meaning}.", {"": value})
    return "\n".join(lines) + "\n"
