"""When load readings prove that an engine is idle. Pure; nothing here reads a clock or a socket."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from rolloutsync.dialects.base import LoadKind

if TYPE_CHECKING:
    from rolloutsync.dialects.base import LoadReading

FROZEN_AFTER_S = 5.0
_HELD_AFTER_S = 2.0
_HELD_SNAPSHOTS = 3


class IdleState(str, Enum):
    """What is known of an engine at the end of a drain."""

    IDLE = "Idle"  # proven
    BUSY = "Busy"  # something runs or waits there
    UNKNOWN = "Unknown"  # its load could not be read; never taken for idle
    FROZEN = "Frozen"  # its timestamps stand still: paused, loading or hung
    GONE = "Gone"  # refuses connections: nothing runs there

    @property
    def quiet(self) -> bool:
        """Whether nothing can be running there."""
        return self in {IdleState.IDLE, IdleState.GONE}


class IdleProof:
    """Two zero readings, both begun after everything of ours had ended, each rank's timestamp moved in between.

    An engine publishes snapshots that lag: one zero may be from before a request arrived. A request in prefill is in no
    queue and shows only in the token counts; token counts alone that stay the same over three later snapshots and two
    seconds are held by sessions. Where a reading says how long zeros must last, the two are so far apart. Not
    thread-safe; one proof belongs to one sweep.
    """

    def __init__(self) -> None:
        self._first: tuple[float, ...] | None = None  # stamps of the first zero reading
        self._has_first = False
        self._first_at = 0.0
        self._stamps: tuple[float, ...] | None = None  # of the last reading
        self._moved_at: list[float] = []  # when each rank's stamp was first seen as it is now
        self._held = 0  # tokens of the last reading, where it showed nothing else
        self._held_since = 0.0
        self._held_stamps: tuple[float, ...] | None = None  # of the last snapshot that counts as a later one
        self._held_seen = 0
        self._held_same = False

    def void(self) -> None:
        """Something of ours ran, or an abort was sent: readings so far prove nothing."""
        self._has_first = False

    def feed(self, reading: LoadReading, begun_at: float) -> IdleState:
        """What is known after one more reading, which was asked for at clock time ``begun_at``."""
        if reading.kind is LoadKind.UNKNOWN:
            self._forget_held()
            self.void()
            return IdleState.FROZEN if reading.frozen else IdleState.UNKNOWN
        self._note_stamps(reading.stamps, begun_at)
        if reading.kind is LoadKind.ZERO:
            self._forget_held()
            zero = True
        else:
            zero = self._only_held(reading, begun_at)
        if not zero:
            self.void()
        elif self._confirms(reading, begun_at):
            return IdleState.IDLE
        return IdleState.FROZEN if self._stands_still(begun_at) else IdleState.BUSY

    def _note_stamps(self, stamps: tuple[float, ...] | None, now: float) -> None:
        before, self._stamps = self._stamps, stamps
        if stamps is None or before is None or len(stamps) != len(before):
            self._moved_at = [now] * len(stamps or ())
            return
        pairs = zip(stamps, before, self._moved_at, strict=True)
        self._moved_at = [at if stamp == last else now for stamp, last, at in pairs]

    def _stands_still(self, now: float) -> bool:
        """Whether any rank's stamp has stood still for too long. A live answer has none."""
        return any(now - at >= FROZEN_AFTER_S for at in self._moved_at)

    def _confirms(self, reading: LoadReading, now: float) -> bool:
        """Whether this zero reading is the second that the first one needs; else it may become the first."""
        if not self._has_first or not _comparable(reading.stamps, self._first):
            self._first, self._has_first, self._first_at = reading.stamps, True, now
            return False
        return now - self._first_at >= reading.settles_s and _all_moved(reading.stamps, self._first)

    def _only_held(self, reading: LoadReading, now: float) -> bool:
        if reading.running or reading.waiting:
            self._forget_held()
            return False
        self._held_same = reading.tokens == self._held
        if not self._held_same or not _comparable(reading.stamps, self._held_stamps):
            self._held, self._held_since, self._held_seen = reading.tokens, now, 0
            self._held_stamps = reading.stamps
            return False
        if _all_moved(reading.stamps, self._held_stamps):
            self._held_seen += 1
            self._held_stamps = reading.stamps
        return self._held_seen >= _HELD_SNAPSHOTS and now - self._held_since >= _HELD_AFTER_S

    def _forget_held(self) -> None:
        self._held, self._held_seen, self._held_same = 0, 0, False

    @property
    def watching_held(self) -> bool:
        """Whether token counts were the same twice and are being watched: a further abort would not change them."""
        return self._held_same


def _comparable(one: tuple[float, ...] | None, other: tuple[float, ...] | None) -> bool:
    """Whether two readings have stamps of the same ranks, or are both live answers without any."""
    return (one is None) == (other is None) and len(one or ()) == len(other or ())


def _all_moved(now: tuple[float, ...] | None, then: tuple[float, ...] | None) -> bool:
    """Whether every rank has published since; a live answer is always news."""
    return all(new != old for new, old in zip(now or (), then or (), strict=True))
