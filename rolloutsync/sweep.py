"""Bringing one engine to idle: read its load, abort what runs, until its own word proves that nothing does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutsync.assurance import assured
from rolloutsync.dialects.base import LoadKind, LoadReading, unknown_load
from rolloutsync.errors import Cut, EngineHTTPError, Phase, RolloutError, TransportError, UnsupportedError
from rolloutsync.proof import IdleProof, IdleState

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.clock import Clock, Deadline
    from rolloutsync.engine import Engine

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineDrain:
    """How the drain of one engine went.

    Attributes:
        url: Of the engine.
        state: See ``IdleState``; only IDLE and GONE are quiet.
        sweeps: Load readings made.
        aborts: abort_all calls sent for what was seen there.
        seconds: From the start to the last reading.
        running: Requests that its last reading said are running.
        waiting: Requests that its last reading said are waiting.
        tokens: Tokens held by requests, by its last reading.
        rids: Requests of this client still in flight there at the end.
        detail: What was wrong, in words; empty if nothing was.
        basis: What IDLE rests on beside the engine's load, where that alone is no proof.
    """

    url: str
    state: IdleState
    sweeps: int = 0
    aborts: int = 0
    seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    tokens: int = 0
    rids: tuple[str, ...] = ()
    detail: str = ""
    basis: str = ""


class Sweep:
    """The loop for one engine. One thread runs it, once.

    Args:
        engine: To be brought to idle.
        own: Request ids of this client that are in flight there now.
        settle: Blocks until ``own()`` is empty, for at most the seconds given.
        rest: Blocks for the seconds given, less when the client closes.
        prepare: Called before each reading.
        clock: Time.
        deadline: When to give up.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        own: Callable[[], list[str]],
        settle: Callable[[float], object],
        rest: Callable[[float], object],
        prepare: Callable[[], object] = lambda: None,
        clock: Clock,
        deadline: Deadline,
    ) -> None:
        self._engine = engine
        self._own = own
        self._settle = settle
        self._rest = rest
        self._prepare = prepare
        self._clock = clock
        self._deadline = deadline
        self._proof = IdleProof()
        self._begun = clock.monotonic()
        self._pause_s = _FIRST_PAUSE_S
        self._sweeps = self._aborts = 0
        self._seen: LoadReading | None = None
        self._aborted_on: tuple[float, ...] | None = None  # stamps of the reading that led to the last abort
        self._detail = ""  # what was wrong with the last reading
        self._refusal = ""  # why the last abort failed
        self._closed = False  # the client is: no reading comes to anything any more

    def run(self) -> EngineDrain:
        """Block until the engine is proven idle, is gone, the deadline comes, or the client closes."""
        while True:
            state = self._once()
            if not state.quiet:
                self._wait(state)
            # no reading without time for it: it would hide the last one
            if state.quiet or self._closed or self._deadline.expired:
                return self._report(state)

    def _once(self) -> IdleState:
        """Read once, abort if something runs; what is known then."""
        self._prepare()
        ours = bool(self._own())
        begun_at = self._clock.monotonic()
        reading = self._read(ours=ours)
        if reading is None:
            return IdleState.GONE
        state = self._proof.feed(reading, begun_at)
        if ours:
            self._proof.void()
            state = IdleState.BUSY if state is IdleState.IDLE else state
        if state.quiet:
            return state
        if self._wants_abort(reading, ours=ours) and not self._deadline.expired:
            self._abort_all(reading)
        return state

    def _read(self, *, ours: bool) -> LoadReading | None:
        """One reading; None if nobody listens there any more."""
        self._sweeps += 1
        try:
            self._seen = self._reading(ours=ours)
        except TransportError as error:
            self._detail = error.message
            if error.phase is Phase.REFUSED:
                return None
            self._closed = error.cut is Cut.CLOSE
            self._seen = unknown_load(error.message)
        except RolloutError as error:
            self._seen = unknown_load(error.message)
            self._detail = error.message
        else:
            self._detail = self._seen.why
        return self._seen

    def _reading(self, *, ours: bool) -> LoadReading:
        """While something of ours is there no proof is wanted, and the load will do."""
        self._engine.know(self._deadline)
        if ours or not self._engine.dialect.load_lags:
            return self._engine.load(deadline=self._deadline)
        return assured(self._engine, self._clock, self._deadline)

    def _wants_abort(self, reading: LoadReading, *, ours: bool) -> bool:
        """Whether there may be work that the last abort has not already been sent for.

        The first abort goes out for whatever we have in flight there, even before the engine shows it. After that the
        engine's word counts: no further abort on a zero, none on a snapshot that may be older than the last abort
        (the engine could be idle by now, and some versions die of an abort then), none for token counts that are held.
        Where a load lags an abort may have come before the request, which shows later still: it is sent again.
        """
        if not self._aborts:
            return ours or reading.kind is LoadKind.BUSY
        if reading.kind is not LoadKind.BUSY:
            return ours and (reading.kind is LoadKind.UNKNOWN or self._engine.dialect.load_lags)
        stale = reading.stamps is not None and reading.stamps == self._aborted_on
        held = not reading.running and not reading.waiting and self._proof.watching_held
        return not stale and not held

    def _abort_all(self, reading: LoadReading) -> None:
        self._aborts += 1
        self._aborted_on = reading.stamps
        try:
            self._engine.abort(None, deadline=self._deadline)
        except EngineHTTPError as error:
            self._refusal = f"abort_all failed: {error.message}"
            if isinstance(error, UnsupportedError) and self._engine.dialect.ends_on_disconnect:
                self._abort_own()
        except RolloutError as error:
            self._refusal = f"abort_all failed: {error.message}"
        else:
            self._refusal = ""
        self._proof.void()

    def _abort_own(self) -> None:
        """One by one, where nothing ends them all."""
        for rid in self._own():
            try:
                self._engine.abort(rid, deadline=self._deadline)
            except RolloutError as error:
                self._refusal = f"abort failed: {error.message}"

    def _wait(self, state: IdleState) -> None:
        """Back off between aborts; while confirming a zero, look often: an idle engine publishes once a second."""
        confirming = state is not IdleState.UNKNOWN and self._seen is not None and self._seen.kind is LoadKind.ZERO
        if confirming and not self._own():
            self._rest(self._deadline.within(_FIRST_PAUSE_S))
            return
        if self._own():
            self._settle(self._deadline.within(self._pause_s))
        else:
            self._rest(self._deadline.within(self._pause_s))
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2)

    def _report(self, state: IdleState) -> EngineDrain:
        seen = self._seen or unknown_load("never read")
        return EngineDrain(
            url=self._engine.url,
            state=state,
            sweeps=self._sweeps,
            aborts=self._aborts,
            seconds=self._clock.monotonic() - self._begun,
            running=seen.running,
            waiting=seen.waiting,
            tokens=seen.tokens,
            rids=tuple(self._own()),
            basis=seen.basis if state is IdleState.IDLE else "",
            detail="" if state is IdleState.IDLE else "; ".join(filter(None, (self._detail, self._refusal))),
        )
