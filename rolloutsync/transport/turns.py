"""Turns: how many threads decode answers at once, where the interpreter runs one thread at a time anyway."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from rolloutsync.transport.budget import LARGE_BYTES

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_MOST_LARGE = 4


def one_at_a_time() -> bool:
    """Whether this interpreter runs one thread at a time; a free-threaded one does not."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


class Turns:
    """Small answers are decoded one after the other, large ones a few at a time. Thread-safe.

    Hundreds of threads that all have an answer would wait for their turn in the interpreter itself, which wakes each of
    them every 5 ms to look; who waits for a lock sleeps. Large ones are decoded outside of the interpreter for the most
    part, but each piece of them goes back to it, which wakes whoever waits there.
    """

    def __init__(self) -> None:
        none: AbstractContextManager[object] = contextlib.nullcontext()
        few = min(_MOST_LARGE, os.cpu_count() or 1)
        self._small = threading.Lock() if one_at_a_time() else none
        self._large = threading.Semaphore(few) if one_at_a_time() else none

    def of(self, size: int) -> AbstractContextManager[object]:
        """Where to decode an answer of so many bytes; entering it blocks for one's turn."""
        return self._small if size < LARGE_BYTES else self._large
