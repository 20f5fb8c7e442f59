"""Whether one engine on which samples wait is alive: judged by more than one sign."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolloutsync.clock import Deadline
from rolloutsync.dialects.base import LoadKind, LoadReading
from rolloutsync.errors import EngineHTTPError, Phase, ProtocolError, RolloutError, TransportError

if TYPE_CHECKING:
    from rolloutsync.clock import Clock
    from rolloutsync.engine import Engine

_STANDS_STILL_S = 5.0


class Vigil:
    """The signs that one engine has given. One thread uses it.

    A generate that is silent says nothing: it may be long. So the engine is asked:

    1. For its load. No answer at all, again and again for ``dead_s``: dead.
    2. An answer whose rank timestamps move comes from a live scheduler: alive. So does one without timestamps, which
       older engines make for each call.
    3. Timestamps that stand still for five seconds, a load that makes no sense, or one that is known to lag may be of a
       frozen scheduler behind a web server that answers, of a pause by somebody else, or of a long forward pass. Then
       the scheduler itself is asked, by a call that goes through it (a paused one answers). No answer to that either
       for ``dead_s``: dead.

    Args:
        engine: To be watched.
        clock: Time.
        dead_s: Seconds without the sign of life that is due.
    """

    def __init__(self, engine: Engine, clock: Clock, dead_s: float) -> None:
        self._engine = engine
        self._clock = clock
        self._dead_s = dead_s
        self._still_s = min(_STANDS_STILL_S, dead_s / 6)
        self._silent_since: float | None = None  # when the first load probe of those without an answer began
        self._deaf_since: float | None = None  # the same for questions to the scheduler
        self._why = ""
        self._stamps: tuple[float, ...] | None = None
        self._moved_at: list[float] = []

    def reset(self) -> None:
        """Nothing waits there now, or we paused it: what was seen so far says nothing about later."""
        self._silent_since = self._deaf_since = self._stamps = None
        self._moved_at = []

    def look(self, answered_at: float | None) -> str | None:
        """Probe once; why the engine is dead, or None. Blocks for the probes, less than ``dead_s`` in all.

        Args:
            answered_at: Clock seconds of its last answer to a generate.
        """
        if answered_at is not None and answered_at > (self._silent_since or answered_at):
            self._silent_since = None
        if (
            self._engine.facts.dp_size in {1, None}
            and answered_at is not None
            and answered_at > (self._deaf_since or answered_at)
        ):
            self._deaf_since = None  # its only scheduler has just finished a request
        begun = self._clock.monotonic()
        try:
            reading = self._engine.load(deadline=self._limit(self._silent_since))
        except (EngineHTTPError, ProtocolError):
            self._silent_since = None
            return self._ask_scheduler()
        except RolloutError as error:
            if isinstance(error, TransportError) and error.phase is Phase.LOCAL:
                return None  # our own shortage says nothing about the engine
            return self._silent(begun, error)
        self._silent_since = None
        if self._shows_life(reading, begun):
            self._deaf_since = None
            return None
        return self._ask_scheduler()

    def _limit(self, since: float | None) -> Deadline:
        """For one probe: a third of ``dead_s``, and not beyond its end."""
        left = self._dead_s if since is None else since + self._dead_s - self._clock.monotonic()
        return Deadline.after(self._clock, max(0.01, min(left, self._dead_s / 3)))

    def _silent(self, begun: float, error: RolloutError) -> str | None:
        self._silent_since = begun if self._silent_since is None else self._silent_since
        seconds = self._clock.monotonic() - self._silent_since
        return None if seconds < self._dead_s else f"no answer to load probes for {seconds:.0f} s: {error.message}"

    def _shows_life(self, reading: LoadReading, now: float) -> bool:
        """Whether the scheduler must have made this reading lately."""
        if reading.kind is LoadKind.UNKNOWN:
            self._why = f"its load cannot be read ({reading.why})"
            return False
        before, self._stamps = self._stamps, reading.stamps
        if reading.stamps is None:
            self._why = "its load says nothing of its core"
            return not self._engine.dialect.load_lags
        if before is None or len(before) != len(reading.stamps):
            self._moved_at = [now] * len(reading.stamps)
            return True
        pairs = zip(reading.stamps, before, self._moved_at, strict=True)
        self._moved_at = [at if stamp == last else now for stamp, last, at in pairs]
        self._why = f"its load timestamps stand still ({reading.running} running, {reading.waiting} waiting)"
        return all(now - at < self._still_s for at in self._moved_at)

    def _ask_scheduler(self) -> str | None:
        begun = self._clock.monotonic()
        if self._engine.scheduler_answers(self._limit(self._deaf_since)):
            self._deaf_since = None
            return None
        self._deaf_since = begun if self._deaf_since is None else self._deaf_since
        seconds = self._clock.monotonic() - self._deaf_since
        words = f"{self._why}, and the scheduler has answered no question for {seconds:.0f} s"
        return None if seconds < self._dead_s else words
