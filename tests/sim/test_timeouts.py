"""How long a request may wait and how long it may run, on a clock that only the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutsync.sim import SimConfig
from rolloutsync.sim.request import Phase, Refusal

from .test_scheduler import Bench

WAITED = Refusal(503, "Request waiting timeout reached.")
RAN = Refusal(503, "Request running timeout reached.")


def test_one_that_waits_too_long_is_refused_and_nothing_else() -> None:
    """Counted from the queue; what runs goes on."""
    bench = Bench(max_running_requests=1, waiting_timeout_s=0.3)
    first, second = bench.submit("runs"), bench.submit("waits")
    bench.run(0.299)
    assert (first.phase, second.phase) == (Phase.RUNNING, Phase.WAITING)
    bench.run(0.002)
    assert second.finish == WAITED
    assert second.finished == pytest.approx(50.3)
    bench.run(1.0)
    assert first.finish == {"type": "length", "length": 50}
    assert bench.scheduler.idle


def test_a_retraction_begins_the_wait_anew() -> None:
    """And the wait goes on in a pause, where the engine still looks at its queue."""
    bench = Bench(waiting_timeout_s=0.2)
    request = bench.submit("a")
    bench.run(0.3)
    bench.scheduler.pause(retract=True)
    bench.run(0.199)
    assert request.phase is Phase.WAITING
    bench.run(0.002)
    assert request.finish == WAITED


def test_one_that_runs_too_long_is_refused_where_it_is() -> None:
    """Each by its own start; its place is free for the next."""
    bench = Bench(max_running_requests=2, running_timeout_s=0.2)
    first = bench.submit("a")
    bench.run(0.1)
    second, third = bench.submit("b"), bench.submit("c", tokens=5)
    assert third.phase is Phase.WAITING
    bench.run(0.11)
    assert (first.finish, first.count) == (RAN, 20)
    assert first.finished == pytest.approx(50.2)
    assert [second.phase, third.phase] == [Phase.RUNNING] * 2
    bench.run(0.1)
    assert second.finish == RAN
    assert third.finish == {"type": "length", "length": 5}
    assert bench.scheduler.idle


def test_an_abort_comes_before_the_limit() -> None:
    """What is aborted already ends as aborted, though its last step passes the limit."""
    bench = Bench(running_timeout_s=0.2)
    request = bench.submit("a")
    bench.run(0.199)
    bench.abort("a")
    bench.run(0.1)
    assert request.finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def test_a_pause_in_place_lets_nothing_run_out_before_its_end() -> None:
    """The loop stands still: the refusal comes when it goes on."""
    bench = Bench(running_timeout_s=0.2)
    request = bench.submit("a")
    bench.run(0.1)
    bench.scheduler.pause(retract=False)
    bench.run(1.0)
    assert request.finish is None
    bench.scheduler.resume()
    bench.run(0.001)
    assert request.finish == RAN


def test_without_limits_nobody_is_hurried() -> None:
    """The defaults."""
    bench = Bench(max_running_requests=1)
    requests = [bench.submit(f"r{number}", tokens=1000) for number in range(3)]
    bench.run(40.0)
    assert [request.finish for request in requests] == [{"type": "length", "length": 1000}] * 3


@pytest.mark.parametrize("name", ["waiting_timeout_s", "running_timeout_s"])
def test_a_limit_is_a_time(name: str) -> None:
    """None is off; nothing else that is no positive number."""
    wrong: list[tuple[Any, type[Exception], str]] = [
        (-1, ValueError, "None or above 0, got -1"),
        ("soon", TypeError, "a number, got 'soon'"),
    ]
    for value, error, words in wrong:
        with pytest.raises(error, match=f"{name} must be {words}"):
            SimConfig(**{name: value})
