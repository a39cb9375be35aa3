"""Starts the command ``ratp`` and ``python -m ratp``, and handles Ctrl-C while the slow imports run."""

from __future__ import annotations

import sys

# `python -m` looks for modules in the current folder first: anything there called numpy.py would run.
if __name__ == "__main__" and not sys.flags.safe_path and __file__ != f"{sys.path[0]}/ratp/__main__.py":
    del sys.path[0]

import signal
from collections.abc import Callable

from ratp import _check_platform


def main() -> None:
    """Runs the command line. Before and after it, Ctrl-C ends the process at once, as there is nothing to save."""
    _on_interrupt(signal.SIG_DFL)
    try:
        _check_platform()
    except ImportError as error:
        sys.exit(f"error: {error}")
    from ratp.cli.main import main as run

    try:
        _on_interrupt(signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # just before the command line runs
        sys.exit(128 + signal.SIGINT)
    finally:
        _on_interrupt(signal.SIG_DFL)


def _on_interrupt(handler: Callable[..., object] | signal.Handlers) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # shells ignore SIGINT for background processes
        signal.signal(signal.SIGINT, handler)


if __name__ == "__main__":
    main()
