"""Runs a Python file that the user names, such as one that defines a method. Nothing else in the package runs files."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ratp.errors import ConfigError

# The names of such modules: this and the sha256 of the file.
USER_MODULE = "ratp_user_method_"


def split_file(text: str) -> tuple[Path, str] | None:
    """Splits ``FILE.py:NAME``, which names something in a file; None if it is not of this form."""
    path, _, name = text.strip().rpartition(":")
    return (Path(path), name) if path.endswith(".py") and name.isidentifier() else None


def load_file(path: Path, kind: str) -> ModuleType:
    """Loads a file as a module, named by a hash of its contents.

    Args:
        path: The file.
        kind: What it defines, for messages.
    """
    if not path.is_file():
        raise ConfigError(f"{kind} file {str(path)!r} does not exist.")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    spec = importlib.util.spec_from_file_location(f"{USER_MODULE}{digest}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ConfigError(f"{kind} file {str(path)!r} cannot be loaded: {type(error).__name__}: {error}.") from error
    return module
