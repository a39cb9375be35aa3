"""A change shared by threads is applied once and undone by the last of them."""

from __future__ import annotations

import threading
import warnings

import pytest

from ratp._core.environment import SharedContext, quietly
from ratp.errors import Note


def test_last_user_undoes_the_change():
    events = []

    def change(back):
        events.append("made")
        back.callback(events.append, "undone")

    shared, entered, leave = SharedContext(change), threading.Event(), threading.Event()

    def other():
        with shared:
            entered.set()
            leave.wait(10)

    with shared:
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
    assert events == ["made"]
    leave.set()
    thread.join()
    assert events == ["made", "undone"]
    with shared:
        pass
    assert events == ["made", "undone"] * 2


def test_failed_change_leaves_nothing_behind():
    events = []

    def change(back):
        back.callback(events.append, "undone")
        raise FileExistsError

    shared = SharedContext(change)
    for _ in range(2):
        with pytest.raises(FileExistsError), shared:
            pass
    assert events == ["undone"] * 2


def test_libraries_are_silenced_but_notes_are_shown():
    """Two at once, the first in leaving first, as threads of a study do."""
    before, entered, leave = list(warnings.filters), threading.Event(), threading.Event()

    def other():
        entered.wait(10)
        with quietly:
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quietly:
            entered.set()
            warnings.warn("chatter", UserWarning, stacklevel=1)
            warnings.warn("a note", Note, stacklevel=1)
        leave.set()
        thread.join()
        warnings.warn("later", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["a note", "later"]
    assert list(warnings.filters) == before
