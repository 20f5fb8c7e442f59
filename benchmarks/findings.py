"""What must not be: every way in which a soak can fail, counted, the first few of each in words."""

from __future__ import annotations

import threading
from collections import Counter

KINDS = (
    "lost samples",
    "samples out of place",
    "duplicate request ids",
    "wrong tokens or logprobs",
    "failures without a good reason",
    "samples with too many generations",
    "second copies running too long",
    "books out of balance",
    "samples open at the end",
    "orphans at the end",
    "requests running at the end",
    "engines not readmitted",
    "calls that hang",
    "calls beyond their limit",
    "unexpected errors",
    "sockets in CLOSE_WAIT",
    "sockets left after close",
    "threads left after close",
    "megabytes grown beyond the limit",
)
_SHOWN = 5


class Findings:
    """Counts by kind. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards: _counts, _words
        self._counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._words: dict[str, list[str]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, words: str, count: int = 1) -> None:
        with self._lock:
            self._counts[kind] += count
            if len(self._words[kind]) < _SHOWN:
                self._words[kind].append(words)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def lines(self) -> list[str]:
        with self._lock:
            return [f"{kind}: {words}" for kind, told in self._words.items() for words in told]

    def __bool__(self) -> bool:
        return any(self.counts().values())
