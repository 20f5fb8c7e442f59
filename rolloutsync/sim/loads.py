"""What a rank tells about its load, and how late it tells it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Load:
    """One rank's numbers at `at`, in scheduler time."""

    at: float
    running: int = 0
    prefilling: int = 0
    waiting: int = 0
    waiting_uncached_tokens: int = 0
    used_tokens: int = 0
    total_tokens: int = 0
    throughput: float = 0.0
    hit_rate: float = 0.0
    prefilled_tokens: int = 0
    prefill_busy_s: float = 0.0
    decode_steps: int = 0
    retracted: int = 0


class Snapshots:
    """The published loads of a rank; the newest one that is old enough can be read."""

    def __init__(self, first: Load, lag_s: float) -> None:
        self._lag_s = lag_s
        self._history = deque([first])
        self.phase = first.at

    @property
    def newest_at(self) -> float:
        """When the newest one was written."""
        return self._history[-1].at

    def write(self, load: Load) -> None:
        """Publishes a load."""
        self._history.append(load)
        self.phase = load.at
        self._forget(load.at)

    def due(self, now: float, period: float) -> float | None:
        """Returns when the last of the regular ones up to `now` is due, counted from `phase`, or None."""
        periods = int((now - self.phase) / period)
        return self.phase + periods * period if periods >= 1 else None

    def read(self, now: float) -> Load:
        """Returns the newest load that can be seen at `now`."""
        self._forget(now)
        return self._history[0]

    def _forget(self, now: float) -> None:
        while len(self._history) > 1 and self._history[1].at + self._lag_s <= now:
            self._history.popleft()
