"""How many bytes of large answers may be in memory at once."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock

LARGE_BYTES = 1 << 20
_TICK_S = 0.25


class BodyBudget:
    """A large body is read only after its length is reserved; TCP holds the rest back. Thread-safe.

    A single body above the whole budget is let in when nothing else is, so that it can always make progress.

    Each time that a quarter of the budget was given back, it goes back to the system: glibc would keep up to 64 MiB in
    each of eight arenas per core, since freed large blocks raise the size from which on it maps blocks one by one.
    """

    def __init__(self, total_bytes: int, clock: Clock) -> None:
        self._total = total_bytes
        self._clock = clock
        self._freed = threading.Condition()  # its lock guards: _reserved, _freed_bytes
        self._reserved = 0
        self._freed_bytes = 0

    def reserve(self, size: int, given_up: Callable[[], bool]) -> bool:
        """Block until ``size`` bytes are free; False if ``given_up()`` became true first."""
        with self._freed:
            while self._reserved and self._reserved + size > self._total:
                if given_up():
                    return False
                self._clock.wait(self._freed, _TICK_S)
            self._reserved += size
            return True

    def release(self, size: int) -> None:
        """Give ``size`` bytes back."""
        with self._freed:
            self._reserved -= size
            self._freed_bytes += size
            due = self._freed_bytes >= self._total // 4
            self._freed_bytes = 0 if due else self._freed_bytes
            self._freed.notify_all()
        if due:
            _trim_heap()


def _trim_heap() -> None:
    """Give free memory of all arenas back to the system; nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
