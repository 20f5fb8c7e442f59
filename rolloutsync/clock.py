"""Time, injected. The only module that imports ``time``."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Ticking(Protocol):
    """Anything that tells a monotonic time in seconds."""

    def monotonic(self) -> float:
        """Seconds since some fixed point; never goes back."""


class Clock:
    """The real clock. Tests pass one of their own. Thread-safe."""

    monotonic = staticmethod(time.monotonic)  # seconds since some fixed point; asked a dozen times for each sample

    def wall(self) -> float:
        """Seconds since the epoch, for people; steps when the host's clock is set."""
        return time.time()

    def wait(self, condition: threading.Condition, timeout: float | None) -> bool:
        """Wait on a held condition for at most ``timeout`` seconds; False if the time ran out."""
        return condition.wait(None if timeout is None else max(0.0, timeout))

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        """Sleep ``seconds``, or less if ``wake`` is set; True if woken."""
        return wake.wait(max(0.0, seconds))


class ActiveTime:
    """A clock that stands still while it is held: deadlines on it do not run during a pause.

    Holds nest. Thread-safe.
    """

    def __init__(self, clock: Ticking) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards: _holds, and changes of _state. Never held across a wait.
        self._holds = 0
        # (since when it is held or None, seconds spent held before): replaced as a whole, so read without the lock
        self._state: tuple[float | None, float] = (None, 0.0)

    def monotonic(self) -> float:
        """Seconds, less all the time spent held."""
        held_since, lost = self._state
        return (self._clock.monotonic() if held_since is None else held_since) - lost

    def hold(self) -> None:
        """Stop; call ``release`` once for each hold."""
        with self._lock:
            if self._holds == 0:
                self._state = (self._clock.monotonic(), self._state[1])
            self._holds += 1

    def release(self) -> None:
        """Run on, once every hold is released."""
        with self._lock:
            self._holds -= 1
            held_since, lost = self._state
            if self._holds == 0 and held_since is not None:
                self._state = (None, lost + self._clock.monotonic() - held_since)


class Deadline:
    """A point in time. Made once from a length at the public edge, and passed down. Immutable."""

    __slots__ = ("_at", "_clock")

    def __init__(self, clock: Ticking, at: float | None) -> None:
        self._clock = clock
        self._at = at

    @classmethod
    def after(cls, clock: Ticking, seconds: float | None) -> Deadline:
        """The point ``seconds`` from now on ``clock``; None means never."""
        return cls(clock, None if seconds is None else clock.monotonic() + seconds)

    def remaining(self) -> float | None:
        """Seconds left, at least 0.0; None if it never comes."""
        return None if self._at is None else max(0.0, self._at - self._clock.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the point has come."""
        return self._at is not None and self._clock.monotonic() >= self._at

    def within(self, seconds: float) -> float:
        """The smaller of ``seconds`` and what remains."""
        left = self.remaining()
        return seconds if left is None else min(seconds, left)

    def or_sooner(self, clock: Ticking, seconds: float | None) -> Deadline:
        """The earlier of this deadline and ``seconds`` from now; both must be on the same clock."""
        if seconds is None or (self._at is not None and self._at <= clock.monotonic() + seconds):
            return self
        return Deadline.after(clock, seconds)


def sooner(*deadlines: Deadline | None) -> float | None:
    """Seconds until the first of some deadlines; None if none of them ever comes."""
    left = [deadline.remaining() for deadline in deadlines if deadline is not None]
    told = [seconds for seconds in left if seconds is not None]
    return min(told) if told else None
