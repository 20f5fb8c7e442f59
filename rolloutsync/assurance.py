"""What an engine whose load lags behind says besides, so that its zero can be believed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rolloutsync.clock import Deadline
from rolloutsync.dialects.base import LoadKind, LoadReading, unknown_load
from rolloutsync.errors import Cut, EngineHTTPError, TransportError

if TYPE_CHECKING:
    from rolloutsync.clock import Clock
    from rolloutsync.engine import Engine

CORE_S = 5.0  # for an answer of the core, which comes between two steps
SETTLES_S = 1.0  # longer than a request was seen to be nowhere in the load before its first step had ended


def assured(engine: Engine, clock: Clock, deadline: Deadline) -> LoadReading:
    """A reading of the load, made after everything that was there has been aborted and the core has answered.

    A front end answers aborts by itself, at once, and its gauges are those of the core's last step. So they are read
    last: aborts and questions travel to the core in one queue, and when it has answered the aborts were carried out. A
    request that has come and not ended a step is in no gauge, but it is among what the front end aborts, and counts.

    1. Abort everything, where that is possible by one call, does no harm, and is counted. Not zero: busy.
    2. Ask the core. No answer: frozen.
    3. Read the load. Where 1 or 2 is not possible, or there are several front ends, it must say zero for ``SETTLES_S``.
    """
    held = engine.held(deadline=deadline)
    if held:
        return LoadReading(kind=LoadKind.BUSY, running=held)
    try:
        asked = engine.ask_scheduler(Deadline.after(clock, deadline.within(CORE_S)))
        if not asked:
            before = engine.load(deadline=deadline)
            if before.kind is not LoadKind.ZERO:
                return before
            engine.pass_through(Deadline.after(clock, deadline.within(CORE_S)))
    except EngineHTTPError as error:
        return unknown_load(f"its core has failed: {error.message}")
    except TransportError as error:
        if error.cut is not Cut.DEADLINE:
            raise
        return LoadReading(kind=LoadKind.UNKNOWN, frozen=True, why=f"its core does not answer: {error.message}")
    return _with_basis(engine.load(deadline=deadline), held, engine.facts.front_ends or 1, asked=asked)


def _with_basis(reading: LoadReading, held: int | None, front_ends: int, *, asked: bool) -> LoadReading:
    """Says what a zero rests on, and how long it must last if that is little."""
    if reading.kind is not LoadKind.ZERO:
        return reading
    which = "its front end holds" if front_ends == 1 else f"those of its {front_ends} front ends that were met hold"
    front = f"{which} nothing" if held is not None else "nobody can ask its front end"
    core = "its core answers" if asked else "nobody can ask its core"
    settles_s = 0.0 if held is not None and asked and front_ends == 1 else SETTLES_S
    lasting = f" for {settles_s:g} s" if settles_s else ""
    return replace(reading, settles_s=settles_s, basis=f"its load is zero{lasting}; {front}; {core}")
