"""The pool of threads: every order that waits has a thread coming for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from rolloutsync import workers as module
from rolloutsync.clock import Clock, Deadline
from rolloutsync.journey import Journey, Trail
from rolloutsync.ledger import Ledger
from rolloutsync.order import Order
from rolloutsync.rollout import Rollout
from rolloutsync.sample import Sample, Status
from rolloutsync.slot import Lease
from rolloutsync.threads import start_thread
from rolloutsync.workers import Workers
from tests.unit.makers import order
from tests.wire import eventually


class Held:
    """Rollouts that end when told to."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.running = 0
        self.go = threading.Event()

    def journey(self, work: Order) -> Journey:
        return Journey(Trail(work, work.deadline))

    def set_out(self, journey: Journey, _: Callable[[], None] | None) -> bool:
        return False

    def travel(self, journey: Journey, _: Callable[[], bool]) -> Sample:
        work = journey.trail.order
        self.running += 1  # a test looks at it when all have come in
        self.entered.release()
        assert self.go.wait(10.0)
        return replace(work.blank(), status=Status.COMPLETED)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def pool(held: Held) -> Iterator[Workers]:
    made = Workers(cast("Rollout", held), capacity=lambda: 8, ledger=Ledger(), clock=Clock(), name="rolloutsync-test")
    yield made
    held.go.set()
    made.close()
    assert made.join(Deadline.after(Clock(), 10.0)) == []


def test_a_call_while_a_thread_starts_gets_threads_of_its_own(
    pool: Workers, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new thread has taken its order already, though whoever started it has not noted that yet."""
    done: list[Sample] = []

    def deliver(_: Order, sample: Sample) -> None:
        done.append(sample)

    pool.admit([order()], deliver)
    assert held.entered.acquire(timeout=10.0)
    inner = iter([[order(), order()]])

    def slow(name: str, target: Callable[[], None], **options: Any) -> threading.Thread:
        thread = start_thread(name, target, **options)
        if (more := next(inner, None)) is not None:
            assert held.entered.acquire(timeout=10.0)
            pool.admit(more, deliver)
        return thread

    monkeypatch.setattr(module, "start_thread", slow)
    pool.admit([order()], deliver)
    eventually(lambda: held.running == 4, "all four are being made")
    held.go.set()
    eventually(lambda: len(done) == 4, "all four are delivered")


def test_never_more_threads_than_capacity(pool: Workers, held: Held) -> None:
    """Twenty orders of as many calls at once: eight run, the others wait for a thread."""
    calls = [threading.Thread(target=pool.admit, args=([order()], lambda *_: None)) for _ in range(20)]
    for call in calls:
        call.start()
    for call in calls:
        call.join(10.0)
    eventually(lambda: held.running == 8, "eight run")
    assert sum(thread.name.startswith("rolloutsync-test-worker") for thread in threading.enumerate()) == 8
    held.go.set()
    eventually(lambda: held.running == 20, "all have run")


def test_who_waits_for_a_place_leaves_its_thread_to_who_has_one(
    held: Held, pool: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system gives no other thread: else both would wait for each other."""
    done: list[Order] = []
    first, second = order(index=0), order(index=1)
    asked = iter([True, False])
    travel = held.travel

    def waits_at_first(journey: Journey, gives_way: Callable[[], bool]) -> Sample | None:
        if journey.trail.order is first and next(asked):
            landed = module._Passage(pool, second, lambda one, _: done.append(one))
            landed.journey = held.journey(second)
            pool._ledger.admit([second])
            with pool._lock:
                pool._under_way += 1
            pool.land(landed, whole=False)
            assert not gives_way()  # it would have to wait for a place as well
            landed.journey.lease = cast("Lease", object())
            assert gives_way()
            return None
        return travel(journey, gives_way)

    left = [1]

    def the_last(name: str, target: Callable[[], None]) -> threading.Thread:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        return start_thread(name, target)

    monkeypatch.setattr(module, "start_thread", the_last)
    monkeypatch.setattr(held, "travel", waits_at_first)
    held.go.set()
    pool.admit([first], lambda one, _: done.append(one))
    eventually(lambda: done == [second, first], "the one with a place goes first")
