"""A stopwatch for calls that must end in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.findings import Findings


class Stopwatch:
    """How long each kind of call took at most. Thread-safe."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._lock = threading.Lock()  # guards: _counts, _slowest
        self._counts: dict[str, int] = {}
        self._slowest: dict[str, float] = {}

    @contextmanager
    def timing(self, what: str, limit_s: float) -> Iterator[None]:
        """Take the time of the block, which must end within ``limit_s``."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            with self._lock:
                self._counts[what] = self._counts.get(what, 0) + 1
                self._slowest[what] = max(seconds, self._slowest.get(what, 0.0))
            if seconds > limit_s:
                self._findings.add("calls beyond their limit", f"{what} took {seconds:.1f} s of {limit_s:.1f} s")

    def rows(self) -> list[tuple[str, int, float]]:
        """(what, calls, the slowest in seconds)."""
        with self._lock:
            return [(what, count, self._slowest[what]) for what, count in sorted(self._counts.items())]
