"""How many bytes of large answers may be in memory at once."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import TYPE_CHECKING

from rolloutsync.clock import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock

LARGE_BYTES = 1 << 20
_TICK_S = 0.25
_AT_ONCE = max(4, os.cpu_count() or 1)  # bodies, and one more each time that they come too slowly
_PATIENCE_S = 0.5
_SPARE_SHARE = 24  # at most this part of the budget lies about in spare buffers
_HEADER_BYTES = sys.getsizeof(bytearray())


class BodyBudget:
    """A large body is read only after its length is reserved; TCP holds the rest back. Thread-safe.

    A single body above the whole budget is let in when nothing else is, so that it can always make progress.

    When many come at once, a few are read and decoded before the next, which then have their buffers: the pages of a
    new one take as long as all else that is done with a body. Nobody waits long for that, as some may come slowly.

    Each time that a quarter of the budget was given back, it goes back to the system: glibc would keep up to 64 MiB in
    each of eight arenas per core, since freed large blocks raise the size from which on it maps blocks one by one.

    A few buffers are kept for the next large bodies, while others are under way: a new one costs its pages, one by one,
    a good part of the time of reading.
    """

    def __init__(self, total_bytes: int, clock: Clock) -> None:
        self._total = total_bytes
        self._clock = clock
        lock = threading.Lock()  # guards: _reserved, _bodies, _places, _freed_bytes
        self._freed = threading.Condition(lock)
        self._left = threading.Condition(lock)
        self._reserved = 0
        self._bodies = 0
        self._places = _AT_ONCE  # for bodies
        self._freed_bytes = 0
        self._spares: list[bytearray] = []  # each use of it is one atomic step

    def buffer(self, length: int) -> bytearray:
        """A buffer of exactly ``length`` bytes, with whatever in it: a spare one, or new."""
        try:
            spare = self._spares.pop()
            if length <= sys.getsizeof(spare) - _HEADER_BYTES <= 2 * length:
                spare += bytes(max(0, length - len(spare)))
                del spare[length:]
                return spare
        except (IndexError, BufferError):  # none there, or somebody still looks at it
            pass
        return bytearray(length)

    def recycle(self, buffer: bytearray) -> None:
        """Nobody looks at this buffer any more; its share of the budget is still reserved."""
        if (len(self._spares) + 1) * len(buffer) <= self._total // _SPARE_SHARE:
            self._spares.append(buffer)

    def reserve(self, size: int, given_up: Callable[[], bool]) -> bool:
        """Block until ``size`` bytes are free; False if ``given_up()`` became true first."""
        with self._freed:
            patience = Deadline.after(self._clock, _PATIENCE_S)
            while self._bodies >= self._places:
                if given_up():
                    return False
                if patience.expired:
                    self._places = self._bodies + 1  # those that come slowly have theirs for themselves
                    break
                self._clock.wait(self._left, patience.within(_TICK_S))
            while self._reserved and self._reserved + size > self._total:
                if given_up():
                    return False
                self._clock.wait(self._freed, _TICK_S)
            self._reserved += size
            self._bodies += 1
            return True

    def release(self, size: int) -> None:
        """Give ``size`` bytes back; nothing, where nothing was reserved."""
        if not size:
            return
        with self._freed:
            self._reserved -= size
            self._bodies -= 1
            self._places = self._places if self._bodies >= _AT_ONCE else _AT_ONCE
            if not self._reserved:
                self._spares.clear()
            self._freed_bytes += size
            due = self._freed_bytes >= self._total // 4
            self._freed_bytes = 0 if due else self._freed_bytes
            self._freed.notify_all()
            self._left.notify()
        if due:
            _trim_heap()


def _trim_heap() -> None:
    """Give free memory of all arenas back to the system; nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
