"""Deadlines and the clock that can be held."""

from __future__ import annotations

import threading

from rolloutsync.clock import ActiveTime, Clock, Deadline
from tests.fakes import FakeClock


def test_a_deadline_runs_down_and_stays_there() -> None:
    """It is a point: what remains shrinks, is never negative, and at the point itself it has come."""
    clock = FakeClock()
    deadline = Deadline.after(clock, 3.0)
    assert (deadline.remaining(), deadline.expired) == (3.0, False)
    clock.advance(2.0)
    assert (deadline.remaining(), deadline.within(5.0), deadline.within(0.5)) == (1.0, 1.0, 0.5)
    clock.advance(1.0)
    assert (deadline.remaining(), deadline.expired) == (0.0, True)
    clock.advance(100.0)
    assert (deadline.remaining(), deadline.within(5.0)) == (0.0, 0.0)


def test_no_deadline_never_comes() -> None:
    """None stands for never."""
    clock = FakeClock()
    never = Deadline.after(clock, None)
    clock.advance(1e9)
    assert (never.remaining(), never.expired, never.within(7.0)) == (None, False, 7.0)


def test_the_sooner_of_two_deadlines() -> None:
    """A length can shorten a deadline but not prolong it."""
    clock = FakeClock()
    five, never = Deadline.after(clock, 5.0), Deadline.after(clock, None)
    assert five.or_sooner(clock, 2.0).remaining() == 2.0
    assert five.or_sooner(clock, 9.0).remaining() == 5.0
    assert five.or_sooner(clock, None).remaining() == 5.0
    assert never.or_sooner(clock, 4.0).remaining() == 4.0
    assert never.or_sooner(clock, None).remaining() is None
    assert five.remaining() == 5.0


def test_active_time_stands_still_while_held() -> None:
    """Holds nest: time runs on only when the last one is released."""
    clock = FakeClock()
    active = ActiveTime(clock)
    deadline = Deadline.after(active, 10.0)
    clock.advance(1.0)
    active.hold()
    clock.advance(5.0)
    active.hold()
    clock.advance(5.0)
    assert deadline.remaining() == 9.0
    active.release()
    clock.advance(5.0)
    assert (deadline.remaining(), deadline.expired) == (9.0, False)
    active.release()
    clock.advance(9.0)
    assert deadline.expired


def test_active_time_never_goes_back() -> None:
    """Neither at a hold nor at a release, however often."""
    clock = FakeClock()
    active = ActiveTime(clock)
    seen = [active.monotonic()]
    for _ in range(5):
        for step in (active.hold, active.release):
            step()
            seen.append(active.monotonic())
            clock.advance(0.25)
            seen.append(active.monotonic())
    assert seen == sorted(seen)
    assert seen[-1] - seen[0] == 5 * 0.25


def test_the_real_clock_waits_and_wakes() -> None:
    """A limit of zero or less does not block; a set event ends a sleep at once."""
    clock, condition, woken = Clock(), threading.Condition(), threading.Event()
    with condition:
        assert not clock.wait(condition, -1.0)
    assert not clock.sleep(-1.0, woken)
    woken.set()
    begun = clock.monotonic()
    assert clock.sleep(60.0, woken)
    assert clock.monotonic() - begun < 10.0
    assert clock.wall() > 1.7e9
