"""Real SGLang servers that die or freeze in mid-batch: every sample completes. Engines of its own: they are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from rolloutsync import EngineState, PoisonPromptError, RolloutClient, Status, Timeouts

from .kit import Kit
from .launch import RealEngine, start_all, stop_all
from .test_main_job import LONG, await_load, await_true, check_aligned, prompt, slow_down

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
BAD = 10**6  # outside the vocabulary: the scheduler dies of it


@pytest.fixture
def three(own_kit: Kit, tmp_path: Path) -> Iterator[list[RealEngine]]:
    """Three engines that nobody else uses."""
    engines = [RealEngine(own_kit, own_kit.llama, tmp_path / f"{number}.log") for number in range(3)]
    start_all(engines)
    yield engines
    stop_all(engines, grace_s=0.0)


def scheduler_of(engine: RealEngine) -> int:
    """The process id of the engine's scheduler, which is a child of the server."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                name = (folder / "cmdline").read_bytes()
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if b"scheduler" in name and parent == engine.pid:
                return int(folder.name)
    raise AssertionError(f"{engine.url} has no scheduler process")


def states(client: RolloutClient) -> list[EngineState]:
    return [engine.state for engine in client.engines()]


def post(url: str, body: object) -> None:
    answer = requests.post(url, json=body, timeout=10, headers={"Connection": "close"})
    assert answer.status_code == 200


def test_deaths_of_real_engines(
    three: list[RealEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One story, since the engines take long to start: frozen, killed, restarted, poisoned. Default settings."""
    first, second, _ = three
    with RolloutClient([first.url, second.url]) as client:
        told = [frozen(client, first), killed(client, first)]
    with RolloutClient([first.url, second.url], timeouts=Timeouts(dead_s=6.0)) as client:
        told.append(paused_by_somebody_else(client, second))
    monkeypatch.setattr("rolloutsync.core.check_vocabulary", lambda *_: None)  # as where its size cannot be known
    with RolloutClient([engine.url for engine in three]) as client:
        told.append(poisoned(client))
    with capsys.disabled():
        print("", *told, sep="\n")


def frozen(client: RolloutClient, engine: RealEngine) -> str:
    """A SIGSTOPped scheduler behind a web server that answers: its samples move, it comes back when it runs."""
    slow_down(client, 0.05)
    job = client.start([prompt(number) for number in range(8)], {**LONG, "max_new_tokens": 200})
    await_load(client, lambda load: load.running == 4)
    pid, begun = scheduler_of(engine), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        samples = job.result()
        seconds = time.monotonic() - begun
        assert [sample.status for sample in samples] == [Status.TRUNCATED] * 8
        assert {len(sample.output_ids) for sample in samples} == {200}
        assert sorted(sample.attempts for sample in samples) == [1] * 4 + [2] * 4
        check_aligned(samples)
        assert states(client) == [EngineState.QUARANTINED, EngineState.LIVE]
        reason = client.engines()[0].reason
        assert "timestamps stand still" in reason
        assert len(client.audit().orphans) == 4
    finally:
        os.kill(pid, signal.SIGCONT)
    await_true(lambda: states(client) == [EngineState.LIVE] * 2, 60.0)
    assert client.audit().orphans == ()
    return f"frozen scheduler among two: 8 of 8 samples after {seconds:.0f} s ({reason})"


def paused_by_somebody_else(client: RolloutClient, engine: RealEngine) -> str:
    """A foreign pause in place, longer than a dead engine has: nothing is touched."""
    slow_down(client, 0.05)
    job = client.start([prompt(number) for number in range(8)], {**LONG, "max_new_tokens": 100})
    await_load(client, lambda load: load.running == 4)
    post(f"{engine.url}/pause_generation", {"mode": "in_place"})
    time.sleep(3 * 6.0)  # it is the time that must do no harm
    assert states(client) == [EngineState.LIVE] * 2
    post(f"{engine.url}/continue_generation", {})
    assert {sample.attempts for sample in job.result()} == {1}
    return "paused in place by somebody else for three times dead_s: 8 of 8 samples at the first attempt"


def killed(client: RolloutClient, engine: RealEngine) -> str:
    """kill -9 of one of two in mid-batch, and its return on the same port."""
    slow_down(client, 0.02)
    job = client.start([prompt(number) for number in range(32)], {**LONG, "max_new_tokens": 50})
    await_load(client, lambda load: load.running == 4)
    begun = time.monotonic()
    engine.kill()
    samples = job.result()
    seconds = time.monotonic() - begun
    assert [sample.status for sample in samples] == [Status.TRUNCATED] * 32
    check_aligned(samples)
    assert states(client) == [EngineState.DOWN, EngineState.LIVE]
    engine.start()
    engine.wait_ready()
    await_true(lambda: states(client) == [EngineState.LIVE] * 2, 60.0)
    again = client.generate([prompt(number) for number in range(8)], {**LONG, "max_new_tokens": 8})
    assert {sample.engine for sample in again} == {status.url for status in client.engines()}
    return f"kill -9 of one of two: 32 of 32 samples {seconds:.1f} s later; restarted on its port: admitted again"


def poisoned(client: RolloutClient) -> str:
    """One out-of-vocabulary id among 64 prompts on three engines that die of it."""
    batch = [prompt(number) for number in range(64)]
    batch[20] = [5, BAD, 7]
    begun = time.monotonic()
    samples = client.generate(batch, {**LONG, "max_new_tokens": 8}, on_error="return")
    seconds = time.monotonic() - begun
    error = samples[20].error
    assert isinstance(error, PoisonPromptError)
    assert len(set(error.engines)) == 2
    good = [sample for sample in samples if sample.index != 20]
    assert {sample.status for sample in good} == {Status.TRUNCATED}
    check_aligned(good)
    assert states(client).count(EngineState.LIVE) == 1
    assert client.audit().balanced
    return f"an id outside the vocabulary among 64 prompts on three: 63 samples after {seconds:.1f} s, 1 FAILED, 2 dead"
