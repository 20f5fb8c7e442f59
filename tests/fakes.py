"""Stand-ins that several test packages share."""

from __future__ import annotations

import threading
import time

from rolloutsync.clock import Clock

_PATIENCE_S = 10.0  # real seconds that ``await_waiters`` gives other threads


class FakeClock(Clock):
    """A clock that moves only when told to.

    ``auto``: a wait or sleep with a limit passes at once and moves the clock by that limit, for tests of one thread.
    Otherwise it blocks until notified, woken, or until another thread's ``advance`` reaches its limit. Thread-safe.
    """

    def __init__(self, now: float = 1000.0, *, auto: bool = False, epoch: float = 1_800_000_000.0) -> None:
        self._auto = auto
        self._epoch = epoch - now
        self._lock = threading.Condition()  # guards: _now, _waiting
        self._now = now
        self._waiting: list[threading.Condition] = []

    def monotonic(self) -> float:
        with self._lock:
            return self._now

    def wall(self) -> float:
        return self._epoch + self.monotonic()

    def advance(self, seconds: float) -> None:
        """Move on, and wake whoever waits to look at the time."""
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, timeout: float | None) -> bool:
        if self._auto and timeout is not None:
            self.advance(max(0.0, timeout))
            return False
        with self._lock:
            due = None if timeout is None else self._now + max(0.0, timeout)
            self._waiting.append(condition)
            self._lock.notify_all()
        try:
            if due is None or self.monotonic() < due:
                condition.wait()
        finally:
            with self._lock:
                self._waiting.remove(condition)
        return due is None or self.monotonic() < due

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        if self._auto:
            if not wake.is_set():
                self.advance(max(0.0, seconds))
            return wake.is_set()
        due = self.monotonic() + max(0.0, seconds)
        while not wake.wait(0.001):
            if self.monotonic() >= due:
                return False
        return True

    def await_waiters(self, count: int) -> None:
        """Block, in real time, until ``count`` threads are in ``wait``."""
        limit = time.monotonic() + _PATIENCE_S
        with self._lock:
            while len(self._waiting) < count:
                left = limit - time.monotonic()
                assert left > 0, f"only {len(self._waiting)} of {count} threads wait"
                self._lock.wait(left)
