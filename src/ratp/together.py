"""Changes of what all threads of a process share, which last as long as one of them wants."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import Lock
from types import TracebackType


class Together:
    """A context that several threads may be in at once: the first makes a change, the last undoes it.

    Args:
        change: Makes it, and leaves with the stack how to undo it.
    """

    def __init__(self, change: Callable[[ExitStack], None]) -> None:
        self._change, self._lock = change, Lock()
        self._inside, self._back = 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                with ExitStack() as back:
                    self._change(back)
                    self._back = back.pop_all()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._back.close()
