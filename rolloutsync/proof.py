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
    seconds are held by sessions. Not thread-safe; one proof belongs to one sweep.
    """

    def __init__(self) -> None:
        self._first: tuple[float, ...] | None = None  # stamps of the first zero reading
        self._has_first = False
        self._moved_at: float | None = None
        self._stamps: tuple[float, ...] | None = None
        self._held_tokens = 0
        self._held_since = 0.0
        self._held_seen = 0

    def void(self) -> None:
        """Something of ours ran, or an abort was sent: readings so far prove nothing."""
        self._has_first = False

    def feed(self, reading: LoadReading, begun_at: float) -> IdleState:
        """What is known after one more reading, which was asked for at clock time ``begun_at``."""
        news = self._is_news(reading, begun_at)
        if reading.kind is LoadKind.UNKNOWN:
            self._forget_held()
            self.void()
            return IdleState.UNKNOWN
        zero = reading.kind is LoadKind.ZERO or self._only_held(reading, begun_at, news=news)
        if reading.kind is LoadKind.ZERO:
            self._forget_held()
        if not zero:
            self.void()
        elif self._confirms(reading):
            return IdleState.IDLE
        return IdleState.FROZEN if self._stands_still(begun_at) else IdleState.BUSY

    def _is_news(self, reading: LoadReading, now: float) -> bool:
        """Whether this reading can differ from the one before: live answers always can, snapshots if they moved."""
        before, self._stamps = self._stamps, reading.stamps
        news = reading.stamps is None or reading.stamps != before
        if news or self._moved_at is None:
            self._moved_at = now
        return news

    def _stands_still(self, now: float) -> bool:
        return self._moved_at is not None and now - self._moved_at >= FROZEN_AFTER_S

    def _confirms(self, reading: LoadReading) -> bool:
        """Whether this zero reading is the second that the first one needs; else it may become the first."""
        stamps, first = reading.stamps, self._first
        if not self._has_first or (stamps is None) != (first is None) or len(stamps or ()) != len(first or ()):
            self._first, self._has_first = stamps, True
            return False
        if stamps is None or first is None:
            return True
        return all(now != then for now, then in zip(stamps, first, strict=True))

    def _only_held(self, reading: LoadReading, now: float, *, news: bool) -> bool:
        if reading.running or reading.waiting:
            self._forget_held()
            return False
        if reading.tokens != self._held_tokens:
            self._held_tokens, self._held_since, self._held_seen = reading.tokens, now, 0
            return False
        self._held_seen += news
        return self._held_seen >= _HELD_SNAPSHOTS and now - self._held_since >= _HELD_AFTER_S

    def _forget_held(self) -> None:
        self._held_tokens, self._held_seen = 0, 0

    @property
    def watching_held(self) -> bool:
        """Whether unchanged token counts are being watched, which a further abort would not change."""
        return self._held_tokens > 0
