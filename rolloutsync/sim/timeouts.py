"""How long a request may wait, and how long it may run: the scheduler's two limits, both off unless configured."""

from __future__ import annotations

from collections.abc import Iterable

from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.request import Refusal, SimRequest

WAITED_TOO_LONG = Refusal(503, "Request waiting timeout reached.")
RAN_TOO_LONG = Refusal(503, "Request running timeout reached.")


class Timeouts:
    """The limits of one rank. Immutable. All times are scheduler seconds.

    Waiting counts from the last time a request was queued, a retraction included; running from its first prefill. What
    was aborted already is left to its abort.
    """

    def __init__(self, config: SimConfig) -> None:
        self._waiting_s = config.waiting_timeout_s
        self._running_s = config.running_timeout_s

    def waiting_end(self, waiting: Iterable[SimRequest]) -> float | None:
        """Returns when the first of these has waited too long, or None."""
        limit = self._waiting_s
        return None if limit is None else min((request.queued_at + limit for request in waiting), default=None)

    def running_end(self, running: Iterable[SimRequest]) -> float | None:
        """Returns when the first of these has run too long, or None."""
        limit = self._running_s
        if limit is None:
            return None
        return min((request.entered_at + limit for request in running if request.cut_at is None), default=None)

    def waited(self, waiting: Iterable[SimRequest], at: float) -> list[SimRequest]:
        """Returns those that have waited too long."""
        limit = self._waiting_s
        return [] if limit is None else [request for request in waiting if request.queued_at + limit <= at]

    def ran(self, running: Iterable[SimRequest], at: float) -> list[SimRequest]:
        """Returns those that have run too long."""
        limit = self._running_s
        if limit is None:
            return []
        return [request for request in running if request.cut_at is None and request.entered_at + limit <= at]
