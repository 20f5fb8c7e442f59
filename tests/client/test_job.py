"""Jobs: samples as they come, whole groups, the result, and leaving early without harm to anybody else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolloutsync import BatchError, Job, RolloutClient, Status
from rolloutsync.clock import Clock
from rolloutsync.order import Stop
from rolloutsync.sim import Fault, SimFleet
from tests.background import in_thread
from tests.client.kit import ENDLESS, calls, check_sample, generations, params, prompts
from tests.wire import eventually

MakeClient = Callable[..., RolloutClient]
CLOCK = Clock()


def lengths(*tokens: int) -> list[dict[str, object]]:
    """Prompts that take this many tokens."""
    return [{"input_ids": [5 + at], "sampling_params": params(count)} for at, count in enumerate(tokens)]


def test_samples_come_as_they_finish(fleet: SimFleet, make_client: MakeClient) -> None:
    """The short one first; iterating again starts from the first; the result is in input order."""
    job = make_client(fleet).start(lengths(600, 5, 200))
    assert len(job) == 3
    assert [sample.index for sample in job] == [1, 2, 0]
    assert [sample.index for sample in job] == [1, 2, 0]
    assert [sample.index for sample in job.result()] == [0, 1, 2]
    assert job.done


def test_groups_come_whole(fleet: SimFleet, make_client: MakeClient) -> None:
    """A group when its last member has ended, in the order of completion, members in order."""
    job = make_client(fleet).start(lengths(400, 10), n=3)
    groups = list(job.groups())
    assert [[(sample.index, sample.member) for sample in group] for group in groups] == [
        [(1, 0), (1, 1), (1, 2)],
        [(0, 0), (0, 1), (0, 2)],
    ]


def test_wait_with_a_timeout(fleet: SimFleet, make_client: MakeClient) -> None:
    """False when time ran out, which ends nothing."""
    job = make_client(fleet).start(lengths(300))
    assert not job.wait(0.01)
    assert job.wait(10.0)
    check_sample(job.result()[0], [5], 300)


def test_abort_touches_only_its_own(fleet: SimFleet, make_client: MakeClient) -> None:
    """Two jobs on the same engines: one is aborted, the other is exactly what it would have been."""
    client = make_client(fleet)
    mine, other = client.start(prompts(8), ENDLESS), client.start(prompts(8), params(600))
    eventually(lambda: sum(engine.state()["running"] for engine in fleet.engines) == 16, "all run")
    eventually(lambda: all(row["tokens"] > 0 for row in generations(fleet)), "all have tokens")
    partials = mine.abort()
    assert len(partials) == 8
    assert mine.done
    assert all(sample.status is Status.ABORTED and len(sample.output_ids) > 0 for sample in partials)
    for sample, ids in zip(other.result(), prompts(8), strict=True):
        check_sample(sample, ids, 600)
    assert sum(engine.state()["aborts"]["abort_all"] for engine in fleet.engines) == 0
    assert [sample.rid for sample in mine.result()] == [sample.rid for sample in partials]


def test_what_waits_is_aborted_unsent(fleet: SimFleet, make_client: MakeClient) -> None:
    """Samples that no engine has seen end ABORTED without a request."""
    client = make_client(fleet[0], engine_concurrency=2)
    job = client.start(prompts(10), ENDLESS)
    eventually(lambda: fleet.engines[0].state()["running"] == 2, "two run")
    assert len(job.abort()) == 10
    assert calls(fleet, "/generate") == 2
    assert sum(sample.engine is None and sample.attempts == 0 for sample in job.partials) == 8


def test_leaving_the_block_early_aborts(fleet: SimFleet, make_client: MakeClient) -> None:
    """The rest is aborted, its partials are kept, the engines are free."""
    client = make_client(fleet)
    with client.start(prompts(6), ENDLESS) as job:
        eventually(lambda: sum(row["tokens"] > 0 for row in generations(fleet)) == 6, "all run")
    assert len(job.partials) == 6
    assert {row["state"] for row in generations(fleet)} == {"aborted"}
    with pytest.raises(ZeroDivisionError), client.start(prompts(2), ENDLESS) as job:
        raise ZeroDivisionError
    assert job.done


def test_ctrl_c_waits_for_nothing_without_a_limit() -> None:
    """A sample that cannot be ended (its thread hangs in a connect) does not keep the process."""
    job = Job([None], n=1, on_error="auto", progress=False, clock=CLOCK, stop=Stop(), abort=lambda _: None)
    began = CLOCK.monotonic()
    with pytest.raises(KeyboardInterrupt), job:
        raise KeyboardInterrupt
    assert CLOCK.monotonic() - began < 1.5


def test_an_abort_that_the_engine_ignores(fleet: SimFleet, make_client: MakeClient) -> None:
    """After the time given the sockets are shut, on which the engine aborts; the samples are ABORTED."""
    fleet.engines[0].add_fault(Fault(kind="ignore_abort", times=None))
    job = make_client(fleet[0]).start(prompts(2), ENDLESS)
    eventually(lambda: fleet.engines[0].state()["running"] == 2, "both run")
    done = in_thread(lambda: job.abort(0.5))
    assert [sample.status for sample in done.result(3.0)] == [Status.ABORTED] * 2
    eventually(lambda: fleet.engines[0].state()["running"] == 0, "the engine noticed")


def test_on_error_of_a_job(fleet: SimFleet, make_client: MakeClient) -> None:
    """Judged by result(), not while iterating."""
    fleet.engines[0].add_fault(Fault(kind="status", status=400, times=None))
    job = make_client(fleet[0]).start(prompts(2), params(2))
    assert [sample.status for sample in job] == [Status.FAILED] * 2
    with pytest.raises(BatchError):
        job.result()


def test_finished_samples_pass_through(fleet: SimFleet, make_client: MakeClient) -> None:
    """They are there at once, first, untouched."""
    client = make_client(fleet)
    done = client.generate([[5]], params(2))[0]
    job = client.start([[6], done], params(2))
    assert next(iter(job)) is done
    assert job.result()[1] is done
    assert calls(fleet, "/generate") == 2


def test_progress_ends_at_n_of_n(fleet: SimFleet, make_client: MakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar counts every sample, failed ones too, and shows what it counts."""
    fleet.engines[0].add_fault(Fault(kind="status", status=400, times=1))
    make_client(fleet[0]).generate(prompts(12), params(50), progress=True)
    last = capsys.readouterr().err.strip().splitlines()[-1].rpartition("\r")[2]
    assert "12/12" in last
    assert "failed=1" in last
    assert "in_flight=0" in last


def test_no_progress_without_a_terminal(
    fleet: SimFleet, make_client: MakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default shows nothing where nobody looks."""
    make_client(fleet, progress=None).generate(prompts(2), params(2))
    assert capsys.readouterr().err == ""
