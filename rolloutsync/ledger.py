"""The ledger: each sample is admitted once and delivered once, and at any moment it is known which are open."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rolloutsync.order import Order
    from rolloutsync.sample import Sample


class Ledger:
    """Counts of one client's samples. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        self._admitted = 0
        self._open: dict[int, Order] = {}
        self._waiting: set[int] = set()  # of the open ones, those that no thread has taken yet
        self._ended: Counter[str] = Counter()
        self._tokens = 0
        self._retries = 0
        self._dropped = 0

    def admit(self, orders: list[Order]) -> None:
        """These samples are ours to deliver from now on."""
        with self._lock:
            self._admitted += len(orders)
            self._open.update((id(order), order) for order in orders)
            self._waiting.update(map(id, orders))

    def take(self, order: Order) -> None:
        """A thread has taken the sample's order."""
        with self._lock:
            self._waiting.discard(id(order))

    def end(self, order: Order, sample: Sample) -> bool:
        """The sample has ended; False if it had ended before, and this second one must not be delivered."""
        with self._lock:
            if self._open.pop(id(order), None) is None:
                self._dropped += 1
                return False
            self._waiting.discard(id(order))
            self._ended[sample.status] += 1
            tokens, attempts = order.news(sample)
            self._tokens += tokens
            self._retries += max(0, attempts - 1)
            return True

    def book(self) -> tuple[int, int, int, list[Order]]:
        """(admitted, ended, second endings that were dropped, open orders), all of one moment."""
        with self._lock:
            return self._admitted, sum(self._ended.values()), self._dropped, list(self._open.values())

    def snapshot(self) -> dict[str, int]:
        """All counts at one moment: admitted, open, waiting, one for each status, tokens, retries."""
        with self._lock:
            ended = {name: self._ended[name] for name in ("COMPLETED", "TRUNCATED", "ABORTED", "FAILED")}
            return {
                "admitted": self._admitted,
                "open": len(self._open),
                "waiting": len(self._waiting),
                **ended,
                "tokens": self._tokens,
                "retries": self._retries,
            }
