"""What an engine has done since its start, counted as its requests end."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from rolloutsync.sim.request import SimRequest

LATENCY_BOUNDS_S = (
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400),
)


@dataclass
class Ended:
    """Sums over requests that have ended, streamed ones or others."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    latency_s: float = 0.0
    by_latency: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))

    def add(self, request: SimRequest) -> None:
        """Counts a request."""
        latency = request.finished - request.arrives
        self.requests += 1
        self.prompt_tokens += len(request.prompt)
        self.output_tokens += request.count
        self.latency_s += latency
        self.by_latency[bisect_left(LATENCY_BOUNDS_S, latency)] += 1


@dataclass
class Totals:
    """Counters of one engine; nothing resets them."""

    streamed: Ended = field(default_factory=Ended)
    unstreamed: Ended = field(default_factory=Ended)
    cached_tokens: int = 0
    aborts: int = 0

    def ended(self, request: SimRequest | None, *, stream: bool) -> None:
        """Counts a request that the scheduler ended while it ran; what ends in the queue does not count."""
        if request is None or request.finish is None or request.while_queued:
            return
        (self.streamed if stream else self.unstreamed).add(request)
        self.cached_tokens += request.cached_tokens
