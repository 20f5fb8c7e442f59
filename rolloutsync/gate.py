"""The gate: whether new requests may leave this client."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rolloutsync.clock import ActiveTime


class GateMode(str, Enum):
    """What a closed gate means for samples that wait for an engine."""

    OPEN = "open"
    HOLD = "hold"  # they wait; their deadlines and retry budgets stand still
    ABORT = "abort"  # they end ABORTED, unsent


class Turned(Enum):
    """Why an order was turned away instead of getting a lease."""

    ABORTED = "aborted"
    CLOSED = "client closed"
    UNAVAILABLE = "no live engine"
    DEADLINE = "deadline"
    ASIDE = "gave way"


class Gate:
    """Open unless somebody keeps it closed. Not thread-safe: the fleet's lock guards it.

    Closers nest; ABORT is stronger than HOLD. While it is held, ``active`` time stands still.
    """

    def __init__(self, active: ActiveTime) -> None:
        self._active = active
        self._closers: dict[object, GateMode] = {}
        self.mode = GateMode.OPEN  # the strongest wish of all closers

    def close(self, token: object, mode: GateMode) -> None:
        """Close it in ``token``'s name, or change the mode that ``token`` asked for."""
        held = self._holds
        self._closers[token] = mode
        self._account(held)

    def open(self, token: object) -> None:
        """Take ``token``'s wish back; a no-op if it had none."""
        held = self._holds
        self._closers.pop(token, None)
        self._account(held)

    @property
    def _holds(self) -> bool:
        return GateMode.HOLD in self._closers.values()

    def _account(self, held_before: bool) -> None:
        modes = set(self._closers.values())
        self.mode = GateMode.ABORT if GateMode.ABORT in modes else GateMode.HOLD if modes else GateMode.OPEN
        if self._holds and not held_before:
            self._active.hold()
        elif held_before and not self._holds:
            self._active.release()
