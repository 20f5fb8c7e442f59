"""A kept engine comes back, serves what it was told to, and gives up in the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rolloutsync import EngineLaunchError, RolloutClient
from rolloutsync.errors import DeadlineExceededError
from rolloutsync.keeper import Keeper
from rolloutsync.launch import LaunchedEngine
from rolloutsync.launch_plan import LaunchPlan
from tests.fakes import FakeClock
from tests.processes import await_true

from .conftest import QUICK
from .servers import Script

pytestmark = pytest.mark.slow

Keep = Callable[..., Keeper]


class _Naps(FakeClock):
    """Sleeps at once, and tells for how long."""

    def __init__(self) -> None:
        super().__init__(auto=True)
        self.naps: list[float] = []

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        self.naps.append(seconds)
        return super().sleep(seconds, wake)

    def wait(self, condition: threading.Condition, timeout: float | None) -> bool:
        return condition.wait(timeout)


@pytest.fixture
def keep(script: Script, tmp_path: Path) -> Iterator[Keep]:
    """Keeps a scripted server, or a simulated engine; the test ends it."""
    kept: list[Keeper] = []

    def made(*args: str, kind: str = "sglang", options: dict[str, Any] | None = None, **keeping: Any) -> Keeper:
        model = "first/model"
        plan = LaunchPlan(kind=kind, model=model, args=args, env=script.env, grace=2.0, **(options or {}))
        kept.append(Keeper(LaunchedEngine(plan, tmp_path / "log"), **{"backoff_s": 0.01, **keeping}))
        return kept[-1]

    yield made
    for keeper in kept:
        keeper.stop()


def kill(keeper: Keeper) -> None:
    """Its process, and see the keeper notice."""
    before = keeper.look()
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    await_true(lambda: keeper.look().pid != before.pid or keeper.look().state == "failed", "the restart")


def serving(keeper: Keeper) -> bool:
    return keeper.look().state == "serving"


def test_it_comes_back(keep: Keep) -> None:
    """On the same URL, as another process; what it died of is told."""
    keeper = keep()
    url = keeper.url(20)
    before = keeper.look()
    assert (before.state, before.restarts, before.error, before.url) == ("serving", 0, "", url)
    kill(keeper)
    await_true(lambda: serving(keeper), lambda: str(keeper.look()))
    after = keeper.look()
    assert after.restarts == 1
    assert keeper.url(0) == url
    assert after.error.startswith("sglang was ended by SIGKILL; command: ")


def test_a_first_start_that_fails_is_final(keep: Keep) -> None:
    """Whoever waits for the URL gets the reason."""
    keeper = keep("--fail")
    with pytest.raises(EngineLaunchError, match="no such model, with many words about why"):
        keeper.url(20)
    assert keeper.look().state == "failed"
    assert keeper.look().restarts == 0


def test_it_gives_up(keep: Keep) -> None:
    """After so many ends within the window, with pauses that double; the last end's reason stays."""
    clock = _Naps()
    keeper = keep(limit=3, window_s=100.0, backoff_s=1.0, clock=clock)
    keeper.url(20)
    for _ in range(4):
        await_true(lambda: serving(keeper), lambda: str(keeper.look()))
        kill(keeper)
    await_true(lambda: keeper.look().state == "failed", lambda: str(keeper.look()))
    assert clock.naps == [0.0, 1.0, 2.0]
    with pytest.raises(EngineLaunchError, match=r"^sglang ended 4 times within 100 s and is not started again; last, "):
        keeper.url()


def test_ends_that_are_long_ago_do_not_count(keep: Keep) -> None:
    """An engine that dies once a day is brought back each time, at once."""
    clock = _Naps()
    keeper = keep(limit=1, window_s=100.0, clock=clock)
    keeper.url(20)
    for _ in range(3):
        kill(keeper)
        await_true(lambda: serving(keeper), lambda: str(keeper.look()))
        clock.advance(101.0)
    assert clock.naps == [0.0, 0.0, 0.0]


def test_restarts_that_fail_count(keep: Keep, script: Script) -> None:
    """A checkpoint that is gone by then is not tried for ever."""
    keeper = keep(limit=2)
    keeper.url(20)
    (script.folder / "modules" / "sglang" / "launch_server.py").write_text("raise SystemExit('it is broken now')")
    kill(keeper)
    await_true(lambda: keeper.look().state == "failed", lambda: str(keeper.look()))
    assert "ended 3 times within 600 s" in keeper.look().error
    assert keeper.look().error.endswith("it is broken now")


def test_it_serves_what_it_was_told(keep: Keep) -> None:
    """The running process is left alone; the next one gets other words. ``now`` does not wait for the end."""
    keeper = keep(*QUICK, kind="sim", options={"weight_version": "1"})
    with RolloutClient(keeper.url(20)) as client:
        url, pid = keeper.engine.url, keeper.look().pid
        keeper.serve("second/model", "2")
        assert keeper.look().pid == pid
        assert client.weight_versions() == {url: "1"}
        kill(keeper)
        await_true(lambda: serving(keeper), lambda: str(keeper.look()))
        assert client.weight_versions() == {url: "2"}
        assert client.control("/model_info", method="GET")[url]["model_path"] == "second/model"
        keeper.serve(None, "3", now=True)
        assert client.weight_versions() == {url: "3"}
        pid = keeper.look().pid
        keeper.serve("second/model", "3", now=True)
        assert keeper.look().pid == pid
        assert keeper.look().restarts == 2


def test_what_is_said_while_it_starts_counts(keep: Keep, script: Script) -> None:
    """The process that was started with something older is not what others see first."""
    script.answers(503)
    keeper = keep()
    await_true(lambda: script.has_told("up"), "the first process")
    with pytest.raises(DeadlineExceededError, match=r"still starting after 0.01 s"):
        keeper.url(0.01)
    keeper.serve("second/model", "2")
    script.answers(200)
    keeper.url(20)
    assert (keeper.engine.model, keeper.engine.weight_version) == ("second/model", "2")
    assert keeper.look().restarts == 1


def test_vllm_is_given_the_model_alone(keep: Keep) -> None:
    """It has no flag for a label."""
    keeper = keep(kind="vllm")
    keeper.url(20)
    keeper.serve("second/model", "2", now=True)
    assert (keeper.engine.model, keeper.engine.weight_version) == ("second/model", None)
    assert keeper.look().version == "2"


def test_stop_wakes_who_waits(keep: Keep, script: Script) -> None:
    """While it starts, too; and it is said afterwards."""
    script.answers(503)
    keeper = keep()
    await_true(lambda: script.has_told("up"), "the first process")
    keeper.stop()
    keeper.stop()
    assert keeper.look().state == "stopped"
    with pytest.raises(EngineLaunchError, match="sglang was stopped"):
        keeper.url()


@pytest.mark.parametrize(("field", "value"), [("limit", -1), ("window_s", 0.0), ("backoff_s", -0.5)])
def test_bad_numbers_are_named(field: str, value: float, tmp_path: Path) -> None:
    engine = LaunchedEngine(LaunchPlan(kind="sim"), tmp_path / "log")
    with pytest.raises(ValueError, match=f"{field} is out of range, got {value}"):
        Keeper(engine, **{field: value})  # type: ignore[arg-type]
    engine.stop()
