"""A client's end, its threads, its processes: close, fork, Ctrl-C, exit, short threads, mocks."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import responses
from requests import PreparedRequest

from rolloutsync import EngineState, RolloutClient, Status
from rolloutsync.clock import Clock
from rolloutsync.sim import SimFleet
from tests.background import in_thread
from tests.client.kit import ENDLESS, ScriptedEngine, check_sample, completion, generations, params, prompts, quiet
from tests.processes import run
from tests.wire import Request, eventually

MakeClient = Callable[..., RolloutClient]
CLOCK = Clock()


# --- close ------------------------------------------------------------------------------------------------------------


def test_close_answers_every_call(fleet: SimFleet, make_client: MakeClient) -> None:
    """Whatever runs and waits ends ABORTED with what it has; the engines are told; no thread stays."""
    client = make_client(fleet[0], engine_concurrency=4)
    calls = [in_thread(lambda: client.generate(prompts(3), ENDLESS)) for _ in range(3)]
    future = client.submit([5], ENDLESS)
    eventually(lambda: fleet.engines[0].state()["running"] == 4 and client.stats().open == 10, "they run and wait")
    began = CLOCK.monotonic()
    assert client.close() == []
    assert CLOCK.monotonic() - began < 2.0
    for call in calls:
        assert {sample.status for sample in call.result(1.0)} == {Status.ABORTED}
    assert future.result(1.0).status is Status.ABORTED
    stats = client.stats()
    assert (stats.admitted, stats.open, stats.aborted) == (10, 0, 10)
    assert {row["state"] for row in generations(fleet)} == {"aborted"}
    assert not any(thread.name.startswith(_name_of(client)) for thread in threading.enumerate())


def _name_of(client: RolloutClient) -> str:
    core = client._core
    assert core is not None
    return f"{core.name}-"


def test_close_of_a_client_whose_engine_is_silent(make_client: MakeClient) -> None:
    """No abort is answered: sockets are shut, every call still gets its answer."""
    from tests.wire import silence

    with ScriptedEngine(quiet, others={"/abort_request": [silence]}) as engine:
        client = make_client(engine.url)
        call = in_thread(lambda: client.generate(prompts(5)))
        eventually(lambda: engine.counts()["/generate"] == 5, "all are sent")
        began = CLOCK.monotonic()
        assert client.close(3.0) == []
        assert CLOCK.monotonic() - began < 3.5
        assert {sample.status for sample in call.result(1.0)} == {Status.ABORTED}


def test_close_from_many_threads(fleet: SimFleet, make_client: MakeClient) -> None:
    """Idempotent, whoever comes first."""
    client = make_client(fleet)
    job = client.start(prompts(8), ENDLESS)
    closers = [in_thread(client.close) for _ in range(6)]
    assert [closer.result(10.0) for closer in closers] == [[]] * 6
    assert {sample.status for sample in job.result()} == {Status.ABORTED}


def test_twenty_batches_leave_nothing(fleet: SimFleet) -> None:
    """B34: as many descriptors after close() as before the first batch."""
    before = _descriptors()
    with RolloutClient(fleet, progress=False) as client:
        for _ in range(20):
            client.generate(prompts(16), params(2))
    eventually(lambda: _descriptors() <= before, "all descriptors are closed")


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_have_names_and_go_away(fleet: SimFleet, make_client: MakeClient) -> None:
    """Every thread of ours says whose it is and what it does; all are daemons."""
    client = make_client(fleet)
    before = set(threading.enumerate())
    job = client.start(prompts(8), ENDLESS)
    eventually(lambda: sum(engine.state()["running"] for engine in fleet.engines) == 8, "all run")
    ours = set(threading.enumerate()) - before
    prefix = _name_of(client)
    assert {thread.name.removeprefix(prefix).split("-")[0] for thread in ours} <= {
        "worker",
        "sockets",
        "learn",
        "watch",
        "usher",
    }
    assert all(thread.daemon and thread.name.startswith(prefix) for thread in ours)
    assert 1 <= sum("worker" in thread.name for thread in ours) <= 9  # the first may not have been idle yet
    job.abort()


@pytest.mark.parametrize("allowed", [1, 20])
def test_too_few_threads_complete_everything(
    fleet: SimFleet,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
    allowed: int,
) -> None:
    """B34: the system refuses threads after the first few: all samples are made by those that there are."""
    client = make_client(fleet)
    client.engines()
    eventually(lambda: not any("-learn" in thread.name for thread in threading.enumerate()), "all are known")
    start, left = threading.Thread.start, [allowed]

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("rolloutsync-"):
            if left[0] == 0:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    samples = client.generate(prompts(32), params(2))
    for sample, ids in zip(samples, prompts(32), strict=True):
        check_sample(sample, ids, 2)
    assert client.abort_until_idle(10.0).idle
    assert len(warnings()) == 1 or (allowed > 1 and not warnings())  # it takes no thread for each request
    assert all("worker threads" in words for words in warnings())


def test_an_engine_that_goes_down_without_threads_to_spare(
    fleet: SimFleet, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread for probing: nothing is lost, and a later verb starts it."""
    with ScriptedEngine() as lost:
        client = make_client([lost.url, fleet[0]])
        client.generate(prompts(4), params(2))
    start = threading.Thread.start
    refusing = [True]

    def limited(thread: threading.Thread) -> None:
        if refusing[0] and "-health" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert all(sample.error is None for sample in client.generate(prompts(4), params(2)))
    assert client.engines()[0].state is EngineState.DOWN
    assert not any("-health" in thread.name for thread in threading.enumerate())
    refusing[0] = False
    client.engines()
    assert any("-health" in thread.name for thread in threading.enumerate())


# --- processes --------------------------------------------------------------------------------------------------------

FORK = """
import os, sys
from rolloutsync import ForkedError, RolloutClient
P = {"max_new_tokens": 4, "ignore_eos": True}
client = RolloutClient(sys.argv[1], progress=False)
client.generate([[5]] * 4, P)
job = client.start([[7, n] for n in range(4)], {"max_new_tokens": 600, "ignore_eos": True})
while client.stats().engines[sys.argv[1]].requests < 8:
    pass
child = os.fork()
good = all(sample.error is None for sample in client.generate([[6, n] for n in range(50)], P))
if child == 0:
    try:
        job.result()
    except ForkedError:
        closed = client.close()
        os._exit(0 if good and closed == [] else 1)
    os._exit(2)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
mine = [len(sample.output_ids) for sample in job.result()]
print(good, code, mine, client.close())
"""


def test_fork(fleet: SimFleet) -> None:
    """B31: the child generates by itself, the parent's job goes on unharmed, nobody hangs."""
    done = run(FORK, fleet[0])
    assert done.stdout.strip() == "True 0 [600, 600, 600, 600] []", done.stdout + done.stderr
    assert Counter(row["state"] for row in generations(fleet)) == {"finished": 4 + 4 + 50 + 50}


# --- mocks ------------------------------------------------------------------------------------------------------------

MOCKED = "http://engine.test:30000"


def answered(request: PreparedRequest) -> tuple[int, dict[str, str], str]:
    body = str(request.body if isinstance(request.body, str) else (request.body or b"").decode())
    return 200, {}, completion(Request("POST", "/generate", {}, body.encode(), 0)).decode()


@responses.activate
def test_responses_with_generate_alone(make_client: MakeClient) -> None:
    """A user's test mocks /generate and nothing else."""
    responses.add_callback(responses.POST, f"{MOCKED}/generate", answered)
    samples = make_client(MOCKED).generate([[5, 6], "text"], {"max_new_tokens": 2}, n=2)
    assert [sample.output_ids.tolist() for sample in samples] == [[100, 101]] * 4
    sent = [json.loads(call.request.body or b"") for call in responses.calls if "generate" in str(call.request.url)]
    assert len({body["rid"] for body in sent}) == 4


@responses.activate
def test_responses_with_a_drain(make_client: MakeClient) -> None:
    """/v1/loads and /abort_request mocked too: abort_until_idle works, and sends no abort to an idle engine."""
    responses.add_callback(responses.POST, f"{MOCKED}/generate", answered)
    responses.get(f"{MOCKED}/v1/loads", json={"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})
    abort = responses.post(f"{MOCKED}/abort_request")
    client = make_client(MOCKED)
    assert client.generate([[5]])[0].status is Status.TRUNCATED
    assert client.abort_until_idle(5.0).idle
    assert abort.call_count == 0


@responses.activate
def test_responses_with_errors(make_client: MakeClient) -> None:
    """Mocked failures are judged like real ones."""
    responses.post(f"{MOCKED}/generate", status=500)
    responses.add_callback(responses.POST, f"{MOCKED}/generate", answered)
    responses.post(f"{MOCKED}/abort_request")
    sample = make_client(MOCKED).generate([[5]])[0]
    assert (sample.status, sample.attempts) == (Status.TRUNCATED, 2)


# --- the log ----------------------------------------------------------------------------------------------------------


def test_the_library_sets_up_no_logging() -> None:
    """A NullHandler and nothing else."""
    logger = logging.getLogger("rolloutsync")
    assert logger.level == logging.NOTSET
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
