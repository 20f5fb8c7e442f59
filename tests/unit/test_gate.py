"""The gate: who keeps it closed, in which mode, and when time stands still."""

from __future__ import annotations

from rolloutsync.clock import ActiveTime
from rolloutsync.gate import Gate, GateMode
from tests.fakes import FakeClock


def _gate() -> tuple[Gate, ActiveTime, FakeClock]:
    clock = FakeClock()
    active = ActiveTime(clock)
    return Gate(active), active, clock


def _modes(gate: Gate, *steps: tuple[str, GateMode | None]) -> list[str]:
    """The mode after each step: a token, and the mode that it closes in, or None to open."""
    modes = []
    for token, mode in steps:
        if mode is None:
            gate.open(token)
        else:
            gate.close(token, mode)
        modes.append(gate.mode.value)
    return modes


def test_it_is_open_unless_closed() -> None:
    """Opening in the name of somebody who did not close it is no error."""
    gate, _, _ = _gate()
    assert gate.mode is GateMode.OPEN
    assert _modes(gate, ("nobody", None)) == ["open"]


def test_it_opens_when_the_last_closer_opens() -> None:
    """Closers nest by name, not by count."""
    gate, _, _ = _gate()
    steps = [("a", GateMode.HOLD), ("b", GateMode.HOLD), ("a", GateMode.HOLD), ("a", None), ("b", None)]
    assert _modes(gate, *steps) == ["hold", "hold", "hold", "hold", "open"]


def test_abort_is_stronger_than_hold() -> None:
    """Whatever the order; what was asked for before holds again after."""
    gate, _, _ = _gate()
    steps = [("drain", GateMode.ABORT), ("pause", GateMode.HOLD), ("drain", None), ("drain", GateMode.ABORT)]
    assert _modes(gate, *steps) == ["abort", "abort", "hold", "abort"]


def test_a_closer_may_change_its_mind() -> None:
    """A drain that keeps the gate closed goes from abort to hold."""
    gate, active, clock = _gate()
    gate.close("drain", GateMode.ABORT)
    gate.close("drain", GateMode.HOLD)
    assert gate.mode.value == "hold"
    before = active.monotonic()
    clock.advance(5.0)
    assert active.monotonic() == before
    gate.open("drain")
    clock.advance(1.0)
    assert active.monotonic() == before + 1.0


def test_time_stands_still_while_anybody_holds() -> None:
    """Deadlines of samples do not run then, also while an abort is stronger; an abort alone stops no time."""
    gate, active, clock = _gate()
    start = active.monotonic()
    gate.close("drain", GateMode.ABORT)
    clock.advance(1.0)
    assert active.monotonic() == start + 1.0
    gate.close("pause", GateMode.HOLD)
    gate.close("update", GateMode.HOLD)
    clock.advance(10.0)
    gate.open("pause")
    clock.advance(10.0)
    assert active.monotonic() == start + 1.0
    gate.open("update")
    gate.open("update")
    clock.advance(1.0)
    assert active.monotonic() == start + 2.0
    gate.close("pause", GateMode.HOLD)
    gate.close("pause", GateMode.ABORT)
    clock.advance(1.0)
    assert active.monotonic() == start + 3.0
