"""Who is told how far an export is. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["report", "reporting"]

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("headrace.export.progress", default=None)


def report(stage: str) -> None:
    """One line to whoever listens; nothing where nobody does."""
    listener = _listener.get()
    if listener is not None:
        listener(stage)


@contextlib.contextmanager
def reporting(listener: Callable[[str], None] | None) -> Iterator[None]:
    """Tell ``listener`` of every stage until the end of the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
