"""Spare buffers: exactly as long as asked, never two users at once, never kept for nothing."""

from __future__ import annotations

import pytest

from rolloutsync.transport.budget import _AT_ONCE, BodyBudget
from tests.background import in_thread
from tests.fakes import FakeClock

BUDGET = 2400  # of which 100 may lie about


def _budget() -> BodyBudget:
    return BodyBudget(BUDGET, FakeClock())


@pytest.mark.parametrize("length", [40, 39, 25, 21, 50])
def test_a_spare_buffer_has_the_length_that_is_wanted(length: int) -> None:
    """Shorter or longer than before; the same memory where it fits."""
    budget = _budget()
    first = budget.buffer(40)
    first[:] = b"x" * 40
    budget.recycle(first)
    second = budget.buffer(length)
    assert len(second) == length
    assert (second is first) == (length <= 40)


def test_a_buffer_that_shrank_grows_again() -> None:
    """Up to what it was."""
    budget = _budget()
    first = budget.buffer(40)
    for length in (25, 40, 30, 40):
        budget.recycle(first)
        assert budget.buffer(length) is first
        assert len(first) == length


def test_a_buffer_of_another_size_is_not_used() -> None:
    """Neither too small nor more than twice as large."""
    budget = _budget()
    for length in (19, 90):
        first = budget.buffer(40)
        budget.recycle(first)
        second = budget.buffer(length)
        assert second is not first
        assert len(second) == length


def test_two_never_have_the_same() -> None:
    """A buffer is lent once."""
    budget = _budget()
    first = budget.buffer(40)
    budget.recycle(first)
    assert budget.buffer(40) is first
    assert budget.buffer(40) is not first


def test_a_buffer_that_somebody_looks_at_is_left_to_him() -> None:
    """A view that is still alive forbids any change of size."""
    budget = _budget()
    first = budget.buffer(40)
    view = memoryview(first)
    budget.recycle(first)
    second = budget.buffer(30)
    assert second is not first
    assert (len(view), len(second)) == (40, 30)


def test_no_more_than_a_part_of_the_budget_lies_about() -> None:
    """The rest goes to the system."""
    budget = _budget()
    for _ in range(9):
        budget.recycle(bytearray(40))
    assert len(budget._spares) == 2
    budget.recycle(bytearray(101))
    assert len(budget._spares) == 2


def test_nothing_is_kept_once_nothing_is_under_way() -> None:
    """The last large answer takes all spare buffers with it."""
    budget = _budget()
    for _ in range(2):
        assert budget.reserve(40, lambda: False)
    budget.recycle(budget.buffer(40))
    budget.release(40)
    assert len(budget._spares) == 1
    budget.recycle(budget.buffer(40))
    budget.release(40)
    assert budget._spares == []


# --- a few at once ----------------------------------------------------------------------------------------------------


def _full(clock: FakeClock) -> BodyBudget:
    """One with as many bodies under way as are read at once."""
    budget = BodyBudget(BUDGET, clock)
    for _ in range(_AT_ONCE):
        assert budget.reserve(1, lambda: False)
    return budget


def test_the_next_body_waits_until_one_is_done() -> None:
    """Then it is let in at once, and has its buffer."""
    clock = FakeClock()
    budget = _full(clock)
    waiting = in_thread(lambda: budget.reserve(1, lambda: False))
    clock.await_waiters(1)
    budget.release(0)  # an answer that was small, or has failed before it was counted, makes no room
    clock.await_waiters(1)
    assert not waiting.done()
    budget.release(1)
    assert waiting.result(10.0)


def test_nobody_waits_long_for_bodies_that_come_slowly() -> None:
    """Half a second, once: from then on those count no more, until they are done."""
    clock = FakeClock(auto=True)
    budget = _full(clock)
    begun = clock.monotonic()
    for _ in range(3):
        assert budget.reserve(1, lambda: False)
        budget.release(1)
        assert clock.monotonic() - begun == pytest.approx(0.5)
    for _ in range(_AT_ONCE):
        budget.release(1)
    for _ in range(_AT_ONCE + 1):
        assert budget.reserve(1, lambda: False)
    assert clock.monotonic() - begun == pytest.approx(1.0)


def test_who_is_cut_waits_no_more() -> None:
    """And has reserved nothing."""
    clock = FakeClock(auto=True)
    budget = _full(clock)
    begun = clock.monotonic()
    assert not budget.reserve(1, lambda: True)
    assert clock.monotonic() == begun
    for _ in range(_AT_ONCE):
        budget.release(1)
    assert (budget._bodies, budget._reserved) == (0, 0)
