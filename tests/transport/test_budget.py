"""Spare buffers: exactly as long as asked, never two users at once, never kept for nothing."""

from __future__ import annotations

import pytest

from rolloutsync.transport.budget import BodyBudget
from tests.fakes import FakeClock

BUDGET = 2400  # of which 100 may lie about


def _budget() -> tuple[BodyBudget, FakeClock]:
    clock = FakeClock()
    return BodyBudget(BUDGET, clock), clock


@pytest.mark.parametrize("length", [40, 39, 25, 21, 50])
def test_a_spare_buffer_has_the_length_that_is_wanted(length: int) -> None:
    """Shorter or longer than before; the same memory where it fits."""
    budget, _ = _budget()
    first = budget.buffer(40)
    first[:] = b"x" * 40
    budget.recycle(first)
    second = budget.buffer(length)
    assert len(second) == length
    assert (second is first) == (length <= 40)


def test_a_buffer_that_shrank_grows_again() -> None:
    """Up to what it was."""
    budget, _ = _budget()
    first = budget.buffer(40)
    for length in (25, 40, 30, 40):
        budget.recycle(first)
        assert budget.buffer(length) is first
        assert len(first) == length


def test_a_buffer_of_another_size_is_not_used() -> None:
    """Neither too small nor more than twice as large."""
    budget, _ = _budget()
    for length in (19, 90):
        first = budget.buffer(40)
        budget.recycle(first)
        second = budget.buffer(length)
        assert second is not first
        assert len(second) == length


def test_two_never_have_the_same() -> None:
    """A buffer is lent once."""
    budget, _ = _budget()
    first = budget.buffer(40)
    budget.recycle(first)
    assert budget.buffer(40) is first
    assert budget.buffer(40) is not first


def test_a_buffer_that_somebody_looks_at_is_left_to_him() -> None:
    """A view that is still alive forbids any change of size."""
    budget, _ = _budget()
    first = budget.buffer(40)
    view = memoryview(first)
    budget.recycle(first)
    second = budget.buffer(30)
    assert second is not first
    assert (len(view), len(second)) == (40, 30)


def test_no_more_than_a_part_of_the_budget_lies_about() -> None:
    """The rest goes to the system."""
    budget, _ = _budget()
    for _ in range(9):
        budget.recycle(bytearray(40))
    assert len(budget._spares) == 2
    budget.recycle(bytearray(101))
    assert len(budget._spares) == 2


def test_what_is_not_wanted_for_a_while_goes() -> None:
    """By the look that the registry takes four times a second."""
    budget, clock = _budget()
    budget.recycle(bytearray(10))
    clock.advance(1.5)
    budget.recycle(bytearray(10))
    budget.tidy(False)
    assert len(budget._spares) == 2
    clock.advance(1.0)
    budget.tidy(False)
    assert len(budget._spares) == 1
    clock.advance(2.0)
    budget.tidy(False)
    budget.tidy(False)
    assert len(budget._spares) == 0


def test_nothing_is_kept_where_nothing_is_under_way() -> None:
    """However short ago it was wanted."""
    budget, _ = _budget()
    budget.recycle(bytearray(10))
    budget.tidy(True)
    assert len(budget._spares) == 0
