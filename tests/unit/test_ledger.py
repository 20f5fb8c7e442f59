"""The ledger: each sample once."""

from __future__ import annotations

import threading
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rolloutsync.ledger import Ledger
from rolloutsync.order import Order
from rolloutsync.sample import Sample, Status, begin

from .makers import ids, order


def _ended(made: Order, status: Status, *, tokens: int = 0, attempts: int = 1) -> Sample:
    blank = begin(made.prompt, made.index, made.member)
    return replace(blank, status=status, output_ids=ids(*range(tokens)), attempts=attempts)


def test_counts_by_how_it_ended() -> None:
    """Tokens delivered, and attempts beyond the first; none for a sample that was never sent."""
    ledger, orders = Ledger(), [order() for _ in range(5)]
    ledger.admit(orders)
    assert ledger.end(orders[0], _ended(orders[0], Status.COMPLETED, tokens=3))
    assert ledger.end(orders[1], _ended(orders[1], Status.TRUNCATED, tokens=4, attempts=3))
    assert ledger.end(orders[2], _ended(orders[2], Status.ABORTED, attempts=0))
    assert ledger.end(orders[3], _ended(orders[3], Status.FAILED, attempts=5))
    assert ledger.snapshot() == {
        "admitted": 5,
        "open": 1,
        "waiting": 1,
        "COMPLETED": 1,
        "TRUNCATED": 1,
        "ABORTED": 1,
        "FAILED": 1,
        "tokens": 7,
        "retries": 6,
    }


def test_waiting_until_a_thread_takes_it() -> None:
    """Never more than are open; what is dropped untaken is not waiting either."""
    ledger, orders = Ledger(), [order() for _ in range(3)]
    ledger.admit(orders)
    ledger.take(orders[0])
    assert (ledger.snapshot()["open"], ledger.snapshot()["waiting"]) == (3, 2)
    ledger.end(orders[1], _ended(orders[1], Status.ABORTED, attempts=0))
    assert (ledger.snapshot()["open"], ledger.snapshot()["waiting"]) == (2, 1)
    ledger.end(orders[0], _ended(orders[0], Status.COMPLETED))
    assert (ledger.snapshot()["open"], ledger.snapshot()["waiting"]) == (1, 1)


def test_a_second_end_is_refused() -> None:
    """So that nothing is delivered twice; neither is what was never admitted."""
    ledger, made = Ledger(), order()
    ledger.admit([made])
    assert ledger.end(made, _ended(made, Status.COMPLETED, tokens=2))
    before = ledger.snapshot()
    assert not ledger.end(made, _ended(made, Status.FAILED, tokens=9))
    stranger = order()
    assert not ledger.end(stranger, _ended(stranger, Status.COMPLETED))
    assert ledger.snapshot() == before


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(list(Status)))))
def test_the_books_always_balance(ends: list[tuple[int, Status]]) -> None:
    """Admitted is open plus all that ended."""
    ledger, orders = Ledger(), [order() for _ in range(6)]
    ledger.admit(orders)
    for number, status in ends:
        ledger.end(orders[number], _ended(orders[number], status))
        counts = ledger.snapshot()
        assert counts["admitted"] == 6 == counts["open"] + sum(counts[status.value] for status in Status)
    assert ledger.snapshot()["open"] == 6 - len({number for number, _ in ends})


def test_of_many_threads_one_ends_it() -> None:
    """A race for the same sample has one winner."""
    ledger, made, start = Ledger(), order(), threading.Barrier(8)
    ledger.admit([made])
    won: list[bool] = []

    def end() -> None:
        start.wait(10.0)
        won.append(ledger.end(made, _ended(made, Status.COMPLETED)))

    threads = [threading.Thread(target=end) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert sorted(won) == [False] * 7 + [True]
