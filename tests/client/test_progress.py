"""The tqdm bar: what it counts, where it ends, when it is shown, and two of them at once."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from rolloutsync import RolloutClient, Status
from rolloutsync.progress import Progress
from rolloutsync.sim import Fault, SimFleet
from tests.client.kit import ENDLESS, generations, params, prompts
from tests.fakes import FakeClock
from tests.wire import eventually

MakeClient = Callable[..., RolloutClient]


class Terminal(io.StringIO):
    """A stderr that says that it is one."""

    def isatty(self) -> bool:
        return True


Attach = Callable[[], Terminal]


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Attach:
    """Puts a terminal in the place of stderr. Called by the test itself: pytest replaces stderr between its phases."""

    def attach() -> Terminal:
        shown = Terminal()
        monkeypatch.setattr(sys, "stderr", shown)
        return shown

    return attach


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1].rpartition("\r")[2]


# --- when it is shown -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "at"), [(None, 2.0), (True, 0.0), (False, None)])
def test_when_a_bar_is_shown(attach: Attach, wanted: bool | None, at: float | None) -> None:
    """Asked for: at once. By default: once a blocking call has lasted two seconds, counted from its begin."""
    terminal = attach()
    clock = FakeClock()
    bar = Progress(5, wanted, clock)
    clock.advance(60.0)
    bar.begin()
    for second in range(4):
        bar.show(second, 10, {})
        assert bool(terminal.getvalue()) == (at is not None and second >= at), second
        clock.advance(1.0)
    bar.begin()  # another call that waits for the same job: a bar that is there moves on
    bar.show(5, 10, {})
    bar.close()
    assert ("| 5/5 [" in terminal.getvalue()) == (at is not None)
    before = terminal.getvalue()
    bar.show(5, 10, {})
    bar.close()
    assert terminal.getvalue() == before


def test_the_rate_is_that_of_the_whole_call(attach: Attach) -> None:
    """Tokens since it began, over the time since then."""
    terminal = attach()
    clock = FakeClock()
    bar = Progress(2, True, clock)
    clock.advance(4.0)
    bar.show(1, 200, {"in_flight": 1})
    bar.close()
    assert "tok/s=50, in_flight=1" in last_line(terminal.getvalue())


# --- what it counts ---------------------------------------------------------------------------------------------------


def test_groups_are_counted(fleet: SimFleet, make_client: MakeClient, attach: Attach) -> None:
    """Of several members, beside the samples; retries change nothing."""
    terminal = attach()
    fleet.engines[0].add_fault(Fault(kind="status", status=503, times=4))
    make_client(fleet).generate(prompts(5), params(20), n=3, progress=True)
    assert "| 15/15 [" in last_line(terminal.getvalue())
    assert "groups=5/5, in_flight=0, aborted=0, failed=0" in last_line(terminal.getvalue())


def test_an_aborted_job_ends_at_n_of_n(fleet: SimFleet, make_client: MakeClient, attach: Attach) -> None:
    """Every sample has ended; so has the same job's second half, which counts new tokens alone."""
    terminal = attach()
    client = make_client(fleet)
    with client.start(prompts(3), ENDLESS, progress=True) as job:
        eventually(lambda: [row["tokens"] > 0 for row in generations(fleet)] == [True] * 3, "all run")
    assert "| 3/3 [" in last_line(terminal.getvalue())
    assert "in_flight=0, aborted=3" in last_line(terminal.getvalue())
    job = client.start(job.partials, progress=True)
    client.abort_until_idle()
    samples = job.result()
    assert {sample.status for sample in samples} == {Status.ABORTED}
    assert "| 3/3 [" in last_line(terminal.getvalue())


def test_one_bar_for_a_job_however_it_is_waited_for(fleet: SimFleet, make_client: MakeClient, attach: Attach) -> None:
    """Polls, an iteration and the result move the same bar, which ends once."""
    terminal = attach()
    job = make_client(fleet).start(prompts(4), params(150), n=2, progress=True)
    while not job.wait(0.02):
        pass
    assert len(list(job.groups())) == 4
    assert len(job.result()) == 8
    assert terminal.getvalue().count("\n") == 1
    assert "| 8/8 [" in last_line(terminal.getvalue())


def test_an_iteration_moves_the_bar_that_was_asked_for(
    fleet: SimFleet, make_client: MakeClient, attach: Attach
) -> None:
    """To its end."""
    terminal = attach()
    client = make_client(fleet)
    assert len(list(client.start(prompts(4), params(5), n=2, progress=True).groups())) == 4
    assert "| 8/8 [" in last_line(terminal.getvalue())
    shown = terminal.getvalue()
    assert len(list(client.start(prompts(4), params(5), progress=None))) == 4
    assert terminal.getvalue() == shown


def test_two_jobs_have_two_bars(fleet: SimFleet, make_client: MakeClient, attach: Attach) -> None:
    """A collect while a generate runs: one below the other, each right at its end."""
    terminal = attach()
    client = make_client(fleet)
    with client.start(prompts(7), ENDLESS, progress=True) as evaluation:
        assert not evaluation.wait(0.01)
        assert client.collect(prompts(9), params(5), n=2, target=3, progress=True).complete
        collected = terminal.getvalue()
    assert "\n" in collected.partition("| 0/3 [")[0]  # the second bar is below the first
    assert "| 3/3 [" in collected
    assert "| 7/7 [" in last_line(terminal.getvalue())
