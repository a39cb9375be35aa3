"""Files that hold the options of ``ratp run``: written by ``--save-config``, run by ``ratp run FILE.toml``.

A file is a table ``[run]`` with the names of the options. Paths in it are relative to the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from ratp._core.files import write_text
from ratp._core.toml import flat, read_toml, shown
from ratp.errors import ConfigError, unknown
from ratp.methods import METHODS
from ratp.streams import STREAMS, is_folder

_PATHS = ("source", "targets", "unlabelled", "data", "after", "out", "model")
_NOT_SAVED = ("save-config", "dry-run", "help")


def expand(words: Sequence[str], options: Sequence[Any]) -> list[str]:
    """Replaces a run file after ``run`` by the options in it; options on the command line come before those."""
    if len(words) < 2 or words[0] != "run":
        return list(words)
    with_value = {
        name for option in options if option.param_type_name == "option" and not option.is_flag for name in option.opts
    }
    files = [k for k, word in enumerate(words) if word.endswith(".toml") and words[k - 1] not in with_value]
    place = files[0] if files else None
    if place is None:
        return list(words)
    path = Path(words[place])
    data = read_toml(path, "file of a stream or a run")
    if "grid" in data:
        raise ConfigError(f"{path} is a study: ratp study run {path}")
    if "run" not in data:
        return list(words)  # a stream
    if others := sorted(data.keys() - {"run"}):
        raise ConfigError(f"{path} has a table [run] with the options of a run, so it cannot have {', '.join(others)}.")
    rest = [*words[1:place], *words[place + 1 :]]
    return ["run", *_words(path, data["run"], options, _given(rest, options)), *rest]


def _name(option: Any) -> str:
    """The name of an option in a file: the long one, without dashes."""
    return str(max(option.opts, key=len)).removeprefix("--")


def _given(words: Sequence[str], options: Sequence[Any]) -> set[str]:
    """The names of the options that are among the words."""
    by_word = {word: _name(option) for option in options for word in (*option.opts, *option.secondary_opts)}
    return {by_word[name] for word in words if (name := word.partition("=")[0]) in by_word}


def _words(path: Path, table: Any, options: Sequence[Any], given: set[str]) -> list[str]:
    """The words that stand for the options in a file, without those given on the command line."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [run] must be a table of options, got {shown(table)}.")
    known = {_name(option): option for option in options if _name(option) not in _NOT_SAVED}
    problems = [unknown(f"option in {path.name}:", name, known) for name in table if name not in known]
    words: list[str] = []
    for name, value in table.items():
        if name in given or name not in known:
            continue
        if program := _program(name, value):
            problems.append(
                f"{path.name} names a program, {program}. Read it, then name it on the command line: "
                f"--{'backbone' if name == 'set' else name} {program}"
            )
        elif isinstance(value, dict) and name == "set":
            words += [f"--set={key}={_text(item)}" for key, item in flat(value).items()]
        elif isinstance(value, bool):
            off = known[name].secondary_opts
            words += [f"--{name}"] if value else off[:1]
        elif isinstance(value, dict):
            problems.append(f"{path.name}: {name} must be a value, got {shown(value)}.")
        else:
            texts = [_text(item) for item in (value if isinstance(value, list) else [value])]
            texts = [_from_file(path.parent, name, text) for text in texts]
            words += texts if known[name].param_type_name == "argument" else [f"--{name}={text}" for text in texts]
    if problems:
        raise ConfigError(problems)
    return words


def _program(name: str, value: Any) -> str | None:
    """The file of Python code that an option names, if any: no file may have another one executed."""
    if name not in ("method", "backbone", "set"):
        return None
    values = [flat(value).get("network.backbone", "")] if isinstance(value, dict) else value
    texts = map(_text, values if isinstance(values, list) else [values])
    return next((text for text in texts if text.rpartition(":")[0].endswith(".py") or text.endswith(".py")), None)


def _text(value: Any) -> str:
    """A value as on the command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_path(name: str, text: str) -> bool:
    """Whether the value of an option is a path."""
    if name == "stream":
        return text not in STREAMS and (text.endswith(".toml") or is_folder(Path(text)))
    is_method = name == "method" and text not in METHODS and text.endswith(".py")
    is_weights = name == "weights" and text not in ("auto", "none", "imagenet")
    return name in _PATHS or is_method or is_weights


def _from_file(folder: Path, name: str, text: str) -> str:
    """A value as seen from the working folder."""
    is_relative = _is_path(name, text) or (name == "stream" and is_folder(folder / text) and text not in STREAMS)
    return str(folder / Path(text).expanduser()) if is_relative else text


def save(path: Path, context: typer.Context) -> None:
    """Writes the options of this command to a file, with their defaults."""
    if path.suffix != ".toml":
        raise ConfigError(f"--save-config takes a file that ends in .toml, got {path}.")
    folder = path.absolute().parent
    lines, table = ["# Options of a run; `ratp run` with this file runs it.", "[run]"], []
    for option in context.command.params:
        name, value = _name(option), context.params.get(option.name or "")
        if name in _NOT_SAVED or value is None or value == () or value == []:
            continue
        if name == "set":
            pairs = (item.partition("=") for item in value)
            table = ["", "[run.set]", *(f"{json.dumps(key.strip())} = {_toml(text)}" for key, _, text in pairs)]
            continue
        lines.append(f"{name} = {_toml(_seen_from(folder, name, value))}")
    write_text(path, "\n".join([*lines, *table, ""]))


def _seen_from(folder: Path, name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_seen_from(folder, name, item) for item in value]
    return os.path.relpath(value, folder) if _is_path(name, str(value)) else value


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value), ensure_ascii=False)
