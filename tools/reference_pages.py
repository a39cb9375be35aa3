"""Makes the reference pages of the documentation site: the Python API, the command line, all settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from inspect import getdoc, isclass
from pathlib import Path
from typing import Any

import typer.main

import ratp
from ratp.cli.main import app
from ratp.config import as_dict, switches
from ratp.methods import METHODS
from ratp.runs import DEFAULT_PRESET, QUICK
from ratp.runs.plan import preset_config, preset_sizes, resolve
from ratp.runs.request import RunRequest
from ratp.streams import STREAMS, find_stream
from ratp.training.method import Method

# Every public name, by the page that documents it.
API = {
    "Train and predict": (
        "What a program calls that uses ratp as it is.",
        "fit FitResult RollbackWarning load LoadedRun own_stream loss_method register_backbone",
    ),
    "Runs": (
        "A run step by step: from a request to a plan, a directory, a record.",
        "RunRequest resolve RunPlan Run read_run RunRecord Matrix accuracy track Stream DataOptions LabelledDomain "
        "UnlabelledDomain",
    ),
    "Models in use": ("Take over a model, put it into use, write it to a file.", "adopt Deployment export"),
    "Write a method": (
        "Base classes and parts of methods; `ratp.functional` has losses, pseudo-labels and other mathematics.",
        "NetworkMethod Method OnlineMethod Setting Phase NetworkPhase SupervisedPhase Network Memory Batch Batches "
        "SGDConfig StageSGD switch classify pack unpack",
    ),
    "Errors": (
        "Mistakes and failures that a program may want to handle.",
        "RatpError ConfigError RunDirectoryError TrainingError",
    ),
}


def pages() -> dict[Path, str]:
    """All generated pages, by their path on the site."""
    found = {_path("api", title): _api_page(title, *part) for title, part in API.items()}
    return (
        top_pages() | found | {Path("reference/methods", f"{name}.md"): _method_page(METHODS[name]) for name in METHODS}
    )


def top_pages() -> dict[Path, str]:
    """The generated pages that the front page links to."""
    return {
        Path("reference/command-line.md"): _command_line(),
        Path("reference/api.md"): _api(),
        Path("reference/streams.md"): _streams(),
    }


def _path(folder: str, title: str) -> Path:
    return Path("reference", folder, f"{title.lower().replace(' ', '-')}.md")


def _api() -> str:
    public = {*ratp.__all__} - {"__version__"}
    assert sorted(name for _, names in API.values() for name in names.split()) == sorted(public), "API is incomplete"
    lines = ["# Python API", "", "`import ratp` gives these names; everything else may change at any time."]
    for title, (about, names) in API.items():
        rows = (f"| {{py:obj}}`ratp.{name}` | {_first_line(getattr(ratp, name))} |" for name in names.split())
        lines += ["", f"## [{title}]({_path('api', title).relative_to('reference')})", "", about, ""]
        lines += ["| name | |", "|---|---|", *rows]
    return "\n".join(lines)


def _first_line(item: object) -> str:
    return markdown((getdoc(item) or "").partition("\n\n")[0].replace("\n", " "))


def _api_page(title: str, about: str, names: str) -> str:
    lines = [f"# {title}", "", about, "", "```{eval-rst}", ".. currentmodule:: ratp", ""]
    for name in names.split():
        item = getattr(ratp, name)
        lines += [f".. auto{'class' if isclass(item) else 'function'}:: {name}"]
        if isclass(item):
            lines += ["   :members:", *["   :show-inheritance:"][: _has_public_base(item)]]
        lines.append("")
    return "\n".join([*lines, "```", ""])


def _has_public_base(item: type) -> bool:
    return any(base.__name__ in ratp.__all__ or issubclass(base, Exception) for base in item.__bases__)


def markdown(docstring: str) -> str:
    """A docstring's text as Markdown."""
    text = re.sub(r"``([^`]+)``", r"`\1`", docstring)
    return re.sub(r":[a-z:]+:`~?([^`]+)`", r"`\1`", text)


def _command_line() -> str:
    command: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "Every command explains itself with `--help`. Mistakes end with exit code 2 and say what",
    ]
    lines += ["to do; [Reliability](../explanation/reliability.md#how-to-continue) lists the other exit codes.", ""]
    return "\n".join([*lines, *_commands(command, "ratp", 2)])


def _commands(command: Any, name: str, level: int) -> Iterator[str]:
    for word, inner in getattr(command, "commands", {}).items():
        whole = f"{name} {word}"
        usage = [whole, *(_argument(item) for item in inner.params if item.param_type_name == "argument")]
        yield from ("", f"{'#' * level} {whole}", "", _with_code(inner.help or ""), "")
        yield from ("```text", f"{' '.join(usage)} [OPTIONS]", "```", "")
        for item in inner.params:
            if not item.hidden:
                yield from (_option(item), f": {_with_code(item.help or '')}{_default(item)}", "")
        yield from _commands(inner, whole, level + 1)


def _with_code(text: str) -> str:
    """A help text whose options are marked as code."""
    return re.sub(r"(?<![`\w-])--[a-z][\w-]*", r"`\g<0>`", text)


def _argument(item: Any) -> str:
    name = (item.metavar or item.name).upper() + ("..." if item.nargs == -1 else "")
    return name if item.required else f"[{name}]"


def _option(item: Any) -> str:
    if item.param_type_name == "argument":
        return f"`{_argument(item)}`"
    value = "" if item.is_flag else f" {item.metavar or item.name.strip('_').upper()}"
    names = item.opts + item.secondary_opts
    return ", ".join(f"`{name}{value if name.startswith('--') else ''}`" for name in names)


def _default(item: Any) -> str:
    if item.required:
        return " Required."
    is_flag = getattr(item, "is_flag", False)
    shown = item.default not in (None, False, "") if is_flag or item.default is None else item.show_default is True
    value = item.opts[0] if is_flag else item.default
    return f" Default: `{value}`." if shown and not (is_flag and not item.secondary_opts) else ""


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _method_page(method: type[Method]) -> str:
    doc = getdoc(sys.modules[method.__module__]) or ""
    first, _, rest = doc.partition("\n\n")
    short, _, long = method.title.partition(": ")
    lines = [f"# {short}", "", f"`--method {method.name}`: {long or short}; {method.family}.", ""]
    lines += [
        "" if method.paper == "none" else f"*{method.paper}.*",
        "",
        markdown(rest or first),
        "",
        "## Settings",
        "",
    ]
    presets = {preset: preset_config(method, preset) for preset in (DEFAULT_PRESET, *method.presets)}
    lines += [f"Change one with `--set NAME=VALUE`. Presets: {', '.join(f'`{name}`' for name in presets)}.", ""]
    for name in method.presets:
        if sizes := preset_sizes(method, name):
            lines += [f"`{name}` also sets {', '.join(f'`{key}={_cell(value)}`' for key, value in sizes.items())}.", ""]
    values = {preset: as_dict(config) for preset, config in presets.items()}
    large = {key: _cell([*value] if isinstance(value, tuple) else value) for key, value in method.large.items()}
    for item in switches(presets[DEFAULT_PRESET]):
        usual = values[DEFAULT_PRESET][item.name]
        others = [f"{name}: `{_cell(found[item.name])}`" for name, found in values.items() if found[item.name] != usual]
        others += [f"large networks: `{large[item.name]}`"] if item.name in large else []
        row = f" ([row {item.doc_ref}](../../explanation/paper-and-code.md))" if item.doc_ref else ""
        lines += _setting(item, _cell(usual), others, row)
    return "\n".join(lines)


def _setting(item: Any, value: str, others: Iterable[str] = (), row: str = "") -> list[str]:
    more = f" *{'; '.join(others)}.*" if others else ""
    kind = f" ({item.kind})" if item.kind.startswith("one of") else ""
    return [f"`{item.name}` = `{value}`", f": {item.explanation}{kind}{row}.{more}", ""]


def _streams() -> str:
    specs = {name: find_stream(name) for name in STREAMS}
    lines = [
        "# Streams and common settings",
        "",
        "A stream is a labelled domain, the source, and unlabelled ones, the targets.",
        "",
    ]
    for name, spec in specs.items():
        lines += [f"## {name}", "", f"{spec.title}.", "", "| domain | what it is |", "|---|---|"]
        lines += [f"| `{code}` | {about} |" for code, about in spec.domains.items()]
        orders = [f"| `{order}` | {' > '.join(domains)} |" for order, domains in spec.orders.items()]
        lines += ["", "| order | domains |", "|---|---|", *orders, ""]
    own = {"source": "SOURCE", "targets": ("TARGET",)}
    plans = {"folders": RunRequest("folders", **own), f"folders, {QUICK}": RunRequest("folders", preset=QUICK, **own)}
    recipes = {name: spec.recipe for name, spec in specs.items()}
    recipes |= {name: resolve(replace(request, device="cpu", weights="none")).recipe for name, request in plans.items()}
    found = {name: as_dict(recipe) for name, recipe in recipes.items()}
    lines += ["## Settings of all methods", "", "`--set NAME=VALUE` changes one in a run. These are the values of"]
    lines += [f"{', '.join(f'`{name}`' for name in specs)}, and of images of your own (`folders`), for which the"]
    lines += [f"preset `{QUICK}` has others.", ""]
    for item in switches(specs["demo"].recipe):
        values = {name: _cell(recipe[item.name]) for name, recipe in found.items()}
        common = max(values.values(), key=[*values.values()].count)
        others = [f"{name}: `{value}`" for name, value in values.items() if value != common]
        lines += _setting(item, common, others)
    return "\n".join(lines)
