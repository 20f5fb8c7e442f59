"""When readings prove that an engine is idle, as sequences of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutsync.dialects.base import LoadKind, LoadReading, unknown_load
from rolloutsync.proof import FROZEN_AFTER_S, IdleProof, IdleState

IDLE, BUSY, UNKNOWN, FROZEN = IdleState.IDLE, IdleState.BUSY, IdleState.UNKNOWN, IdleState.FROZEN


def zero(*stamps: float) -> LoadReading:
    """All counts zero; without stamps, a live answer."""
    return LoadReading(kind=LoadKind.ZERO, stamps=stamps or None)


def busy(*stamps: float, running: int = 1, waiting: int = 0, tokens: int = 10) -> LoadReading:
    """Requests running."""
    return LoadReading(kind=LoadKind.BUSY, running=running, waiting=waiting, tokens=tokens, stamps=stamps or None)


def held(*stamps: float, tokens: int = 10) -> LoadReading:
    """Nothing but tokens: a request in prefill, or a session between turns."""
    return busy(*stamps, running=0, tokens=tokens)


_what = unknown_load("?")
_weak = LoadReading(kind=LoadKind.ZERO, settles_s=1.0)
_hangs = LoadReading(kind=LoadKind.UNKNOWN, frozen=True)
_void = "void"  # something of ours ended, or an abort was answered

# (what happens, at which second, what is known then)
_SEQUENCES: dict[str, list[tuple[Any, float, IdleState | None]]] = {
    "two zeros, the stamp moved": [(zero(1.0), 0.0, BUSY), (zero(2.0), 0.1, IDLE)],
    "one zero is none": [(zero(1.0), 0.0, BUSY)],
    "the same snapshot twice": [(zero(1.0), 0.0, BUSY), (zero(1.0), 0.1, BUSY), (zero(2.0), 1.0, IDLE)],
    "a clock that steps back": [(zero(9.0), 0.0, BUSY), (zero(3.0), 0.1, IDLE)],
    "busy in between": [
        (zero(1.0), 0.0, BUSY),
        (busy(2.0), 0.1, BUSY),
        (zero(3.0), 0.2, BUSY),
        (zero(4.0), 0.3, IDLE),
    ],
    "waiting is busy": [(zero(1.0), 0.0, BUSY), (busy(2.0, running=0, waiting=1), 0.1, BUSY), (zero(3.0), 0.2, BUSY)],
    "unknown in between": [
        (zero(1.0), 0.0, BUSY),
        (_what, 0.1, UNKNOWN),
        (zero(2.0), 0.2, BUSY),
        (zero(3.0), 0.3, IDLE),
    ],
    "zeros that must last": [(_weak, 0.0, BUSY), (_weak, 0.1, BUSY), (_weak, 0.9, BUSY), (_weak, 1.0, IDLE)],
    "busy while they should last": [
        (_weak, 0.0, BUSY),
        (busy(), 0.5, BUSY),
        (_weak, 1.0, BUSY),
        (_weak, 1.9, BUSY),
        (_weak, 2.0, IDLE),
    ],
    "a core that hangs": [(zero(), 0.0, BUSY), (_hangs, 0.1, FROZEN), (zero(), 0.2, BUSY), (zero(), 0.3, IDLE)],
    "never known": [(_what, float(second), UNKNOWN) for second in range(20)],
    "an abort in between": [
        (zero(1.0), 0.0, BUSY),
        (_void, 0.0, None),
        (zero(2.0), 0.1, BUSY),
        (zero(3.0), 0.2, IDLE),
    ],
    "an abort, and the snapshot from before it again": [
        (zero(1.0), 0.0, BUSY),
        (_void, 0.0, None),
        (zero(1.0), 0.1, BUSY),
        (zero(1.0), 0.2, BUSY),
        (zero(2.0), 0.3, IDLE),
    ],
    # live answers, up to 0.5.12
    "live: any second one is later": [(zero(), 0.0, BUSY), (zero(), 0.0, IDLE)],
    "live: an abort in between": [(zero(), 0.0, BUSY), (_void, 0.0, None), (zero(), 0.1, BUSY), (zero(), 0.2, IDLE)],
    "live: never frozen": [(busy(), float(second), BUSY) for second in range(20)],
    "live and stamped do not confirm each other": [
        (zero(), 0.0, BUSY),
        (zero(1.0), 0.1, BUSY),
        (zero(), 0.2, BUSY),
        (zero(), 0.3, IDLE),
    ],
    # frozen
    "frozen at zero": [
        (zero(1.0), 0.0, BUSY),
        (zero(1.0), 4.9, BUSY),
        (zero(1.0), 5.0, FROZEN),
        (zero(1.0), 500.0, FROZEN),
    ],
    "frozen while busy": [(busy(1.0), 0.0, BUSY), (busy(1.0), 4.9, BUSY), (busy(1.0), 5.0, FROZEN)],
    "thawed": [(zero(1.0), 0.0, BUSY), (zero(1.0), 6.0, FROZEN), (zero(2.0), 6.1, IDLE)],
    "thawed into work": [(zero(1.0), 0.0, BUSY), (zero(1.0), 6.0, FROZEN), (busy(2.0), 6.1, BUSY)],
    "frozen after it moved": [
        (zero(1.0), 0.0, BUSY),
        (busy(2.0), 4.0, BUSY),
        (busy(2.0), 8.9, BUSY),
        (busy(2.0), 9.0, FROZEN),
    ],
    "a failed probe does not thaw": [(zero(1.0), 0.0, BUSY), (_what, 4.0, UNKNOWN), (zero(1.0), 5.0, FROZEN)],
    # several ranks
    "every rank has moved": [(zero(1.0, 1.0), 0.0, BUSY), (zero(2.0, 2.0), 0.1, IDLE)],
    "one rank has not moved": [
        (zero(1.0, 1.0), 0.0, BUSY),
        (zero(2.0, 1.0), 0.1, BUSY),
        (zero(3.0, 1.0), 0.2, BUSY),
        (zero(3.0, 2.0), 0.3, IDLE),
    ],
    "one rank stands still for ever": [
        *[(zero(float(second), 7.0), float(second), BUSY) for second in range(5)],
        (zero(5.0, 7.0), 5.0, FROZEN),
        (zero(6.0, 7.0), 6.0, FROZEN),
        (zero(6.0, 8.0), 6.1, IDLE),
    ],
    "a rank is gone": [(zero(1.0, 1.0), 0.0, BUSY), (zero(2.0), 0.1, BUSY), (zero(3.0), 0.2, IDLE)],
    "a rank has come": [(zero(1.0), 0.0, BUSY), (zero(2.0, 2.0), 0.1, BUSY), (zero(3.0, 3.0), 0.2, IDLE)],
    # tokens alone
    "prefill: the counts grow, then it runs": [
        (held(1.0, tokens=10), 0.0, BUSY),
        (held(2.0, tokens=20), 1.0, BUSY),
        (held(3.0, tokens=30), 2.0, BUSY),
        (held(4.0, tokens=40), 3.0, BUSY),
        (held(5.0, tokens=50), 4.0, BUSY),
        (busy(6.0, tokens=60), 5.0, BUSY),
    ],
    "a session: unchanged over three later snapshots and two seconds, then the proof": [
        (held(1.0), 0.0, BUSY),
        (held(2.0), 0.7, BUSY),
        (held(3.0), 1.4, BUSY),
        (held(4.0), 2.1, BUSY),  # the first zero
        (held(5.0), 2.8, IDLE),
    ],
    "a session: three snapshots in less than two seconds": [
        (held(1.0), 0.0, BUSY),
        (held(2.0), 0.1, BUSY),
        (held(3.0), 0.2, BUSY),
        (held(4.0), 0.3, BUSY),
        (held(5.0), 0.4, BUSY),
        (held(6.0), 1.9, BUSY),
        (held(7.0), 2.0, BUSY),  # the first zero
        (held(8.0), 2.1, IDLE),
    ],
    "a session: two seconds without snapshots": [
        (held(1.0), 0.0, BUSY),
        (held(1.0), 1.0, BUSY),
        (held(1.0), 2.0, BUSY),
        (held(1.0), 3.0, BUSY),
        (held(1.0), 4.0, BUSY),
        (held(1.0), 5.0, FROZEN),
    ],
    "a session, live": [
        (held(), 0.0, BUSY),
        (held(), 0.7, BUSY),
        (held(), 1.4, BUSY),
        (held(), 2.1, BUSY),
        (held(), 2.2, IDLE),
    ],
    "a session whose count changes starts anew": [
        (held(1.0), 0.0, BUSY),
        (held(2.0), 1.0, BUSY),
        (held(3.0), 2.0, BUSY),
        (held(4.0, tokens=11), 3.0, BUSY),
        (held(5.0, tokens=11), 4.0, BUSY),
        (held(6.0, tokens=11), 5.0, BUSY),
        (held(7.0, tokens=11), 6.0, BUSY),
        (held(8.0, tokens=11), 7.0, IDLE),
    ],
    "a session, then nothing": [
        (held(1.0), 0.0, BUSY),
        (held(2.0), 1.0, BUSY),
        (zero(3.0), 2.0, BUSY),
        (zero(4.0), 3.0, IDLE),
    ],
    "a session that works in between": [
        (held(1.0), 0.0, BUSY),
        (held(2.0), 1.0, BUSY),
        (busy(3.0), 2.0, BUSY),
        (held(4.0), 3.0, BUSY),
        (held(5.0), 4.0, BUSY),
        (held(6.0), 5.0, BUSY),
        (held(7.0), 6.0, BUSY),
        (held(8.0), 7.0, IDLE),
    ],
    "a session, unknown in between": [
        (held(1.0), 0.0, BUSY),
        (held(2.0), 1.0, BUSY),
        (_what, 2.0, UNKNOWN),
        (held(3.0), 3.0, BUSY),
        (held(4.0), 4.0, BUSY),
        (held(5.0), 5.0, BUSY),
        (held(6.0), 6.0, BUSY),
        (held(7.0), 7.0, IDLE),
    ],
    "a session on a rank that publishes nothing": [
        (held(1.0, 1.0), 0.0, BUSY),
        (held(2.0, 1.0), 1.0, BUSY),
        (held(3.0, 1.0), 2.0, BUSY),
        (held(4.0, 1.0), 3.0, BUSY),
        (held(5.0, 1.0), 4.0, BUSY),
        (held(6.0, 2.0), 4.5, BUSY),  # the first later snapshot of both
        (held(7.0, 3.0), 4.6, BUSY),
        (held(8.0, 4.0), 4.7, BUSY),
        (held(9.0, 5.0), 4.8, IDLE),
    ],
    "a session after an abort": [
        (held(1.0), 0.0, BUSY),
        (_void, 0.0, None),
        (held(2.0), 1.0, BUSY),
        (held(3.0), 2.0, BUSY),
        (held(4.0), 3.0, BUSY),
        (_void, 3.0, None),
        (held(5.0), 4.0, BUSY),
        (held(6.0), 5.0, IDLE),
    ],
}


@pytest.mark.parametrize("name", _SEQUENCES)
def test_sequences(name: str) -> None:
    """Each step's state, exactly."""
    proof = IdleProof()
    for number, (what, second, state) in enumerate(_SEQUENCES[name]):
        if what == _void:
            proof.void()
        else:
            assert proof.feed(what, second) is state, f"step {number}: {what}"


def test_only_idle_and_gone_are_quiet() -> None:
    """Nothing else is ever taken for it."""
    assert [state for state in IdleState if state.quiet] == [IdleState.IDLE, IdleState.GONE]


_readings = st.one_of(
    st.just(_what),
    st.builds(zero, st.integers(1, 3).map(float)),
    st.builds(busy, st.integers(1, 3).map(float)),
    st.builds(lambda stamp, tokens: held(stamp, tokens=tokens), st.integers(1, 3).map(float), st.integers(1, 2)),
)


@given(st.lists(st.tuples(_readings | st.just(_void), st.floats(0.0, 3.0)), max_size=12))
def test_idle_needs_two_quiet_readings_with_different_stamps_since_the_last_disturbance(
    steps: list[tuple[Any, float]],
) -> None:
    """Whatever the history: no proof without them."""
    proof, now = IdleProof(), 0.0
    since: list[LoadReading] = []
    for what, after in steps:
        now += after
        if what == _void:
            proof.void()
            since = []
            continue
        state = proof.feed(what, now)
        disturbed = what.kind is LoadKind.UNKNOWN or what.running or what.waiting
        since = [] if disturbed else [*since, what]
        if state is IDLE:
            assert len({reading.stamps for reading in since}) >= 2
        if disturbed:
            assert state is not IDLE


def test_a_frozen_engine_is_told_after_five_seconds() -> None:
    """The limit that reports and docs name."""
    assert FROZEN_AFTER_S == 5.0
