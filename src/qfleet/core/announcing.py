"""Lets code far below say one line to whoever waits for a run that has not begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], object]

_listeners: list[Say] = []


@contextmanager
def heard_by(say: Say) -> Iterator[None]:
    """Let `say` be told what is announced meanwhile in this process."""
    _listeners.append(say)
    try:
        yield
    finally:
        _listeners.remove(say)


def announce(text: str) -> None:
    """Tell whoever listens; nobody may."""
    for say in _listeners:
        say(text)
