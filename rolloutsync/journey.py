"""A sample on its way: what has happened to it, and where it is. One thread at a time has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutsync.errors import TransportError
from rolloutsync.order import Doing, new_rid

if TYPE_CHECKING:
    from rolloutsync.clock import Deadline
    from rolloutsync.engine import Flight
    from rolloutsync.errors import RolloutError
    from rolloutsync.order import Order
    from rolloutsync.slot import Lease


class Trail:
    """What has happened to one sample so far. Local to the one thread that has its journey."""

    __slots__ = (
        *("attempts", "avoid", "broken_answers", "deadline", "engine", "engine_s"),
        *("fresh", "last_error", "order", "queued_s", "rid", "sent_at", "told"),
    )

    def __init__(self, order: Order, deadline: Deadline) -> None:
        self.order = order
        self.deadline = deadline
        self.rid = new_rid()
        self.attempts = 0
        self.broken_answers = 0
        self.avoid: str | None = None
        self.engine: str | None = None
        self.fresh = False
        self.queued_s: float | None = None
        self.engine_s = 0.0
        self.sent_at = 0.0
        self.last_error: RolloutError | None = None
        self.told: RolloutError | None = None  # the last one that was not our own cut, if there was any

    def learn(self, error: RolloutError) -> None:
        """A request has failed."""
        self.last_error = error
        if self.told is None or not (isinstance(error, TransportError) and error.cut is not None):
            self.told = error

    def note(self, doing: Doing, at: float) -> None:
        """Tell whoever asks how far the sample has come."""
        life = self.order.life
        life.rid, life.engine, life.attempts = self.rid, self.engine, self.attempts
        life.now(doing, at)


@dataclass(slots=True, eq=False)
class Journey:
    """Where one sample is.

    Attributes:
        lease: Its place at an engine.
        flight: A request of it that was sent there, and whose answer has not been taken.
        error: What came of that request, not judged yet.
    """

    trail: Trail
    lease: Lease | None = None
    flight: Flight | None = None
    error: RolloutError | None = None

    @property
    def at(self) -> Lease:
        """Its place, which it must have."""
        if self.lease is None:
            raise RuntimeError("the sample has no place at an engine")
        return self.lease

    def take(self) -> tuple[Flight | None, RolloutError | None]:
        """What came of its request so far; not told again."""
        flight, error, self.flight, self.error = self.flight, self.error, None, None
        return flight, error
