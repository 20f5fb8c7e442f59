"""How many bytes of large answers may be in memory at once."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock

LARGE_BYTES = 1 << 20
_TICK_S = 0.25
_SPARE_SHARE = 24  # at most this part of the budget lies about in spare buffers
_SPARE_S = 2.0  # and only for as long as large answers keep coming
_HEADER_BYTES = sys.getsizeof(bytearray())


class BodyBudget:
    """A large body is read only after its length is reserved; TCP holds the rest back. Thread-safe.

    A single body above the whole budget is let in when nothing else is, so that it can always make progress.

    Each time that a quarter of the budget was given back, it goes back to the system: glibc would keep up to 64 MiB in
    each of eight arenas per core, since freed large blocks raise the size from which on it maps blocks one by one.

    A few buffers are kept for the next large bodies: a new one costs its pages, one by one, a good part of the reading.
    """

    def __init__(self, total_bytes: int, clock: Clock) -> None:
        self._total = total_bytes
        self._clock = clock
        self._freed = threading.Condition()  # its lock guards: _reserved, _freed_bytes
        self._reserved = 0
        self._freed_bytes = 0
        self._spares: deque[tuple[float, bytearray]] = deque()  # (clock seconds when it was given back, buffer)

    def buffer(self, length: int) -> bytearray:
        """A buffer of exactly ``length`` bytes, with whatever in it: a spare one, or new."""
        try:
            _, spare = self._spares.pop()
            if length <= sys.getsizeof(spare) - _HEADER_BYTES <= 2 * length:
                spare += bytes(max(0, length - len(spare)))
                del spare[length:]
                return spare
        except (IndexError, BufferError):  # none there, or somebody still looks at it
            pass
        return bytearray(length)

    def recycle(self, buffer: bytearray) -> None:
        """Nobody looks at this buffer any more."""
        if (len(self._spares) + 1) * len(buffer) <= self._total // _SPARE_SHARE:
            self._spares.append((self._clock.monotonic(), buffer))

    def tidy(self, idle: bool) -> None:
        """Let go of spare buffers that were not wanted for a while, or of all where nothing is under way."""
        before = self._clock.monotonic() - (0.0 if idle else _SPARE_S)
        with contextlib.suppress(IndexError):  # taken meanwhile
            while self._spares[0][0] <= before:
                self._spares.popleft()

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
