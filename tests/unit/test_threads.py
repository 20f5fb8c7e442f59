"""Threads and fan-outs: names, errors, and what happens when the system gives no more threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rolloutsync import threads
from rolloutsync.threads import Outcome, fan_out, renew_after_fork, start_thread


def test_a_thread_is_a_named_daemon_with_a_small_stack() -> None:
    """And the process's own stack size is left as it was."""
    seen: list[tuple[str, bool]] = []
    before = threading.stack_size()

    def note() -> None:
        seen.append((threading.current_thread().name, threading.current_thread().daemon))

    start_thread("rolloutsync-x", note).join(10.0)
    assert seen == [("rolloutsync-x", True)]
    assert threading.stack_size() == before


def test_all_branches_run_at_once_and_keep_their_order() -> None:
    """Each waits for all the others: one after the other would never end."""
    together = threading.Barrier(5)

    def call(number: int) -> Callable[[], int]:
        def run() -> int:
            together.wait(10.0)
            return number

        return run

    outcomes = fan_out("rolloutsync-f", [call(number) for number in range(5)])
    assert [outcome.get() for outcome in outcomes] == list(range(5))


def test_an_error_of_one_branch_is_that_ones_alone() -> None:
    """It is raised where its value is asked for."""

    def fails() -> int:
        raise KeyError("b")

    good, bad, also_good = fan_out("rolloutsync-f", [lambda: 1, fails, lambda: 3])
    assert (good.get(), also_good.get()) == (1, 3)
    assert isinstance(bad.error, KeyError)
    with pytest.raises(KeyError):
        bad.get()


def test_no_branches() -> None:
    """Nothing to do."""
    nothing: list[Callable[[], int]] = []
    assert fan_out("rolloutsync-f", nothing) == []


def test_without_threads_everything_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGAIN from the system does not lose a branch; the stack size is restored all the same."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = threading.stack_size()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    here = threading.current_thread().name
    outcomes = fan_out("rolloutsync-f", [lambda: threading.current_thread().name] * 4)
    assert [outcome.get() for outcome in outcomes] == [here] * 4
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread("rolloutsync-x", lambda: None)
    assert threading.stack_size() == before


def test_waiting_for_an_outcome_has_an_end() -> None:
    """False while it has not come."""
    outcome = Outcome(lambda: 5)
    assert not outcome.wait(0.0)
    outcome.run()
    assert outcome.wait(0.0)
    assert outcome.get() == 5


def test_a_lock_held_at_the_fork_does_not_block_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of the parent may have been starting a thread just then."""
    held = threading.Lock()
    held.acquire()
    monkeypatch.setattr(threads, "_stack_lock", held)
    renew_after_fork()
    start_thread("rolloutsync-x", lambda: None).join(10.0)
