"""The fake clock itself: what other tests stand on."""

from __future__ import annotations

import threading

from tests.fakes import FakeClock


def test_a_manual_wait_ends_when_the_clock_reaches_it() -> None:
    """Half the way wakes the waiter to look, the whole way ends its wait."""
    clock, condition, results = FakeClock(), threading.Condition(), []

    def waiter() -> None:
        due = clock.monotonic() + 2.0
        with condition:
            while (left := due - clock.monotonic()) > 0:
                results.append(clock.wait(condition, left))

    thread = threading.Thread(target=waiter)
    thread.start()
    for _ in range(2):
        clock.await_waiters(1)
        clock.advance(1.0)
        if clock.monotonic() < 1002.0:
            while len(results) < 1:
                threading.Event().wait(0.001)
    thread.join(10.0)
    assert not thread.is_alive()
    assert results == [True, False]


def test_a_notified_wait_is_true_and_a_set_event_ends_a_sleep() -> None:
    """Both report that they were woken, with the clock standing still."""
    clock, condition, woken = FakeClock(), threading.Condition(), threading.Event()
    results: list[bool] = []

    def waiter() -> None:
        with condition:
            results.append(clock.wait(condition, None))
        results.append(clock.sleep(5.0, woken))

    thread = threading.Thread(target=waiter)
    thread.start()
    clock.await_waiters(1)
    with condition:
        condition.notify_all()
    woken.set()
    thread.join(10.0)
    assert results == [True, True]
    assert clock.monotonic() == 1000.0


def test_an_auto_clock_passes_limits_by_itself() -> None:
    """One thread can run code that waits."""
    clock, condition = FakeClock(auto=True, epoch=50.0), threading.Condition()
    with condition:
        assert not clock.wait(condition, 3.0)
    assert not clock.sleep(2.0, threading.Event())
    assert clock.monotonic() == 1005.0
    assert clock.wall() == 55.0
