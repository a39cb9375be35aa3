"""The command ``ratp``, and ``python -m ratp``: what comes before the command line is loaded, which takes seconds."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable


def main() -> None:
    """Runs the command line. Before and after, Ctrl-C ends the process at once, as there is nothing to keep."""
    _on_interrupt(signal.SIG_DFL)
    from ratp.cli.main import main as run

    try:
        _on_interrupt(signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # at the last moment before it runs
        sys.exit(128 + signal.SIGINT)
    finally:
        _on_interrupt(signal.SIG_DFL)


def _on_interrupt(handler: Callable[..., object] | signal.Handlers) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as shells have it for what runs in the background
        signal.signal(signal.SIGINT, handler)


if __name__ == "__main__":
    main()
