"""Who is next: priority, then one job after the other, in order within a job; and nobody is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutsync.admission import Admission


def _drain(waiting: Admission[str]) -> list[str]:
    return [waiting.pop() for _ in range(len(waiting))]


def test_jobs_take_turns() -> None:
    """A small job beside a large one does not wait for its end."""
    waiting: Admission[str] = Admission()
    waiting.put(["a1", "a2", "a3", "a4"], job=1, priority=0)
    waiting.put(["b1", "b2"], job=2, priority=0)
    assert _drain(waiting) == ["a1", "b1", "a2", "b2", "a3", "a4"]


def test_a_job_that_comes_later_has_its_turn_soon() -> None:
    """Behind those that wait, not behind all their items."""
    waiting: Admission[str] = Admission()
    waiting.put(["a1", "a2", "a3"], job=1, priority=0)
    assert waiting.pop() == "a1"
    waiting.put(["b1"], job=2, priority=0)
    assert [waiting.pop(), waiting.pop(), waiting.pop()] == ["a2", "b1", "a3"]


def test_priority_comes_first() -> None:
    """Higher before lower, whatever the jobs; negative ones last."""
    waiting: Admission[str] = Admission()
    waiting.put(["low"], job=1, priority=-1)
    waiting.put(["normal"], job=2, priority=0)
    waiting.put(["high1", "high2"], job=1, priority=5)
    waiting.put(["high3"], job=3, priority=5)
    assert _drain(waiting) == ["high1", "high3", "high2", "normal", "low"]


def test_more_of_a_job_goes_behind_what_it_has() -> None:
    """In order within a job."""
    waiting: Admission[str] = Admission()
    waiting.put(["a1"], job=1, priority=0)
    waiting.put(["a2"], job=1, priority=0)
    assert _drain(waiting) == ["a1", "a2"]


def test_nothing_waits() -> None:
    """Neither at first, nor after an empty put, nor at the end."""
    waiting: Admission[str] = Admission()
    waiting.put([], job=1, priority=9)
    waiting.put(iter(["a"]), job=2, priority=0)
    assert waiting.pop() == "a"
    assert len(waiting) == 0
    with pytest.raises(IndexError, match="nothing waits"):
        waiting.pop()


def test_a_job_can_be_taken_out() -> None:
    """All of it, at every priority, and nothing else."""
    waiting: Admission[str] = Admission()
    waiting.put(["a1", "a2"], job=1, priority=0)
    waiting.put(["b1"], job=2, priority=0)
    waiting.put(["a3"], job=1, priority=3)
    assert sorted(waiting.take(1)) == ["a1", "a2", "a3"]
    assert waiting.take(1) == []
    assert waiting.take(99) == []
    assert len(waiting) == 1
    assert waiting.take() == ["b1"]
    assert len(waiting) == 0


_puts = st.tuples(st.integers(0, 3), st.integers(-1, 1), st.integers(0, 3))  # job, priority, how many


@given(st.lists(_puts | st.just("pop") | st.tuples(st.just("take"), st.none() | st.integers(0, 3))))
def test_whatever_goes_in_comes_out_once(steps: list[object]) -> None:
    """In order within a job and priority, the highest priority first, and nothing is lost or doubled."""
    waiting: Admission[tuple[int, int, int]] = Admission()
    inside: list[tuple[int, int, int]] = []
    served: Counter[int] = Counter()
    number = 0
    for step in steps:
        if step == "pop":
            if not inside:
                with pytest.raises(IndexError):
                    waiting.pop()
                continue
            got = waiting.pop()
            assert got[1] == max(priority for _, priority, _ in inside)
            assert got == min(item for item in inside if item[:2] == got[:2])
            inside.remove(got)
            served[got[0]] += 1
        elif isinstance(step, tuple) and step[0] == "take":
            taken = waiting.take(step[1])
            assert sorted(taken) == sorted(item for item in inside if step[1] in {None, item[0]})
            inside = [item for item in inside if item not in taken]
        elif isinstance(step, tuple):
            job, priority, count = step
            items = [(job, priority, number + offset) for offset in range(count)]
            number += count
            waiting.put(items, job=job, priority=priority)
            inside += items
        assert len(waiting) == len(inside)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_turns_are_fair(sizes: list[int]) -> None:
    """While two jobs both wait, neither is served twice before the other."""
    waiting: Admission[int] = Admission()
    for job, size in enumerate(sizes):
        waiting.put([job] * size, job=job, priority=0)
    served = [0] * len(sizes)
    for _ in range(sum(sizes)):
        served[waiting.pop()] += 1
        still = [count for count, size in zip(served, sizes, strict=True) if count < size]
        assert not still or max(still) - min(still) <= 1
