"""B17 to B20, B33: aborts that fail, that are ignored, that come too late or too often, and what they bring back."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rolloutsync import IdleState, NotIdleError, RolloutClient, Status
from tests.background import in_thread
from tests.client.kit import ScriptedEngine, body_of, completion, error_answer, prompts
from tests.faults.engine import FragileEngine, LiveEngine
from tests.faults.kit import MakeClient, check, check_all, echo, echo_ids, unused_url, within
from tests.transport.kit import all_at_once
from tests.wire import Request, Script, answer, close, eventually, send, wait_for

DEADLINE_S = 0.5

# --- B17: whom the abort reaches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://127.0.0.1:9@0", "http://127.0.0.1:9@1/", "http://bob:pw@127.0.0.1:9"])
def test_a_rank_in_the_url_is_never_dialled(url: str) -> None:
    """B17: "@0" would make the host "0": refused by the constructor, which names the URL."""
    with pytest.raises(ValueError, match="has user info"):
        RolloutClient(url)


def test_a_router_that_cannot_abort(client_to: MakeClient) -> None:
    """B17: 404 for aborts and loads alike: never a silent success, and what is in flight there is cut."""
    missing = error_answer("404 Not Found", b'{"detail": "Not Found"}')
    paths = ("/abort_request", "/v1/loads", "/get_load")
    with LiveEngine(others=dict.fromkeys(paths, missing)) as router:
        client = client_to(router.url)
        job = client.start(prompts(3))
        router.journal.await_running(3)
        with within(DEADLINE_S + 1), pytest.raises(NotIdleError, match="has none of") as caught:
            client.abort_until_idle(DEADLINE_S)
        assert router.url in str(caught.value)
        assert "abort_all failed" in str(caught.value)
        assert {sample.status for sample in job.result()} == {Status.ABORTED}
        eventually(lambda: router.journal.ends() == ["lost"] * 3, "the router has noticed")


def test_an_engine_that_cannot_abort_by_id(client_to: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """B17: an orphan that cannot be aborted is told of; its sample is made all the same."""
    missing = {"/abort_request": error_answer("404 Not Found")}
    with LiveEngine(lambda request, number: [close] if number == 0 else echo(request), others=missing) as engine:
        sample = client_to(engine.url).generate([[7, 8]])[0]
        check(sample, [7, 8], attempts=2)
        assert sum("cannot abort by id" in message and engine.url in message for message in warnings()) == 1


def test_a_dead_engine_does_not_spare_the_others(client_to: MakeClient) -> None:
    """B17: one of three refuses connections: reported as gone; the others are aborted and proven idle."""
    with LiveEngine() as one, LiveEngine() as two:
        client = client_to([one.url, unused_url(), two.url])
        job = client.start(prompts(4))
        one.journal.await_running(2)
        two.journal.await_running(2)
        report = client.abort_until_idle()
        assert [drain.state for drain in report.engines] == [IdleState.IDLE, IdleState.GONE, IdleState.IDLE]
        assert (len(one.sweeps()), len(two.sweeps())) == (1, 1)
        assert {sample.status for sample in job.result()} == {Status.ABORTED}


# --- B18: aborts without effect ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0.0, DEADLINE_S])
def test_a_load_that_never_reaches_zero(client_to: MakeClient, timeout: float) -> None:
    """B18: no abort is honoured: an error in time, with URL and count; our own calls are cut and ABORTED, and the
    engine, which has not noticed, is still not idle.
    """
    with LiveEngine(ignored_aborts=-1, deaf=True) as engine:
        client = client_to(engine.url)
        job = client.start(prompts(3))
        engine.journal.await_running(3)
        with within(timeout + 1), pytest.raises(NotIdleError, match=engine.url) as caught:
            client.abort_until_idle(timeout)
        drain = caught.value.report.engines[0]
        assert (drain.url, sorted(drain.rids)) == (engine.url, sorted(engine.rids()))
        assert (drain.state, drain.running) == ((IdleState.BUSY, 3) if timeout else (IdleState.UNKNOWN, 0))
        assert drain.aborts == len(engine.sweeps()) <= timeout / 0.1 + 1
        assert [(sample.status, sample.attempts) for sample in job.result()] == [(Status.ABORTED, 1)] * 3
        assert not client.abort_until_idle(0.2, raise_on_timeout=False).idle


def test_the_fourth_abort_works(client_to: MakeClient) -> None:
    """B18: an engine that ignores three aborts is asked again."""
    with LiveEngine(ignored_aborts=3) as engine:
        client = client_to(engine.url)
        job = client.start(prompts(3))
        engine.journal.await_running(3)
        report = client.abort_until_idle()
        assert (report.idle, report.engines[0].aborts, len(engine.sweeps())) == (True, 4, 4)
        assert [sample.output_ids.tolist() for sample in job.result()] == [[p[0] + 1000] for p in prompts(3)]


def test_an_answer_that_never_comes_though_the_load_is_zero(client_to: MakeClient) -> None:
    """B18: the engine says idle while our call hangs: not believed; at the deadline the call is cut."""
    hanging = threading.Event()

    def never(request: Request) -> Script:
        return [wait_for(hanging), close]

    with LiveEngine(aborted=never) as engine:
        client = client_to(engine.url)
        job = client.start([[7, 8]])
        engine.journal.await_running(1)
        with within(DEADLINE_S + 1), pytest.raises(NotIdleError, match="1 of ours in flight") as caught:
            client.abort_until_idle(DEADLINE_S)
        rid = engine.rids()[0]
        assert caught.value.report.engines[0].rids == (rid,)
        assert (job.result()[0].status, job.result()[0].rid) == (Status.ABORTED, rid)
        hanging.set()


# --- B19: too many, too late ------------------------------------------------------------------------------------------


def test_a_fragile_engine_survives(client_to: MakeClient) -> None:
    """B19: dies of an abort for a finished id, of a flood, of an abort while idle: 64 samples, half of them complete
    while eight threads drain it at once.
    """
    batch = prompts(64)
    with FragileEngine() as engine:
        client = client_to(engine.url)
        job = client.start(batch)
        engine.journal.await_running(64)
        finishing = in_thread(lambda: engine.journal.end("finished", lambda made: made.prompt % 2 == 0))
        reports = all_at_once([client.abort_until_idle] * 8)
        assert [report.result(10.0).idle for report in reports] == [True] * 8
        samples = job.result()
        assert finishing.result(5.0) <= 32
        for sample, prompt in zip(samples, batch, strict=True):
            whole = sample.status is Status.TRUNCATED
            assert sample.output_ids.tolist() == echo_ids(prompt)[: 3 if whole else 1]
            assert whole or sample.status is Status.ABORTED
        assert Counter(engine.journal.ends()) == Counter(
            "finished" if sample.status is Status.TRUNCATED else "aborted" for sample in samples
        )
        assert (engine.offences, engine.aborted_rids()) == ([], [])
        assert 1 <= len(engine.sweeps()) <= 2


def test_a_job_is_aborted_by_its_own_ids_once_each(client_to: MakeClient) -> None:
    """B19: only what still runs is named, and each once; the job beside it is not touched."""
    with FragileEngine() as engine:
        client = client_to(engine.url)
        done, ours, theirs = client.start([[80, 8]]), client.start(prompts(6)), client.start([[90, 9]] * 2)
        engine.journal.await_running(9)
        engine.journal.end("finished", lambda made: made.prompt in {5, 80})
        check(done.result()[0], [80, 8])
        ended = next(iter(ours))
        partials = ours.abort()
        assert len(partials) == 5
        assert (ended.status, ended.output_ids[0]) == (Status.TRUNCATED, 1005)
        assert sorted(engine.aborted_rids()) == sorted(sample.rid for sample in partials)
        assert (engine.offences, engine.sweeps(), engine.running()) == ([], [], 2)
        engine.finish()
        check_all(theirs.result(), [[90, 9]] * 2)


def test_nothing_is_sent_again_after_our_own_abort(client_to: MakeClient) -> None:
    """Item 8: the engine answers the aborted calls with 503, 500 or a broken line: ABORTED, one attempt each."""
    ways: list[Script] = [error_answer("503 Busy"), error_answer("500 Oops"), [send(b"HTTP/1."), close], [close]]

    def answered(request: Request) -> Script:
        first: int = body_of(request)["input_ids"][0]
        return ways[first % 4]

    with LiveEngine(aborted=answered) as engine:
        client = client_to(engine.url)
        job = client.start(prompts(8))
        engine.journal.await_running(8)
        assert len(job.abort()) == 8
        assert {(sample.status, sample.attempts) for sample in job.result()} == {(Status.ABORTED, 1)}
        assert len(engine.rids()) == 8
        again = client.start(prompts(8))
        engine.journal.await_running(8)
        assert client.abort_until_idle().idle
        assert {(sample.status, sample.attempts) for sample in again.result()} == {(Status.ABORTED, 1)}
        assert len(engine.rids()) == 16


def test_somebody_elses_abort_all(client_to: MakeClient) -> None:
    """Item 8: another trainer's drain cuts our samples short: partials with their tokens, no errors, nothing resent."""
    with LiveEngine() as engine:
        job = client_to(engine.url).start(prompts(4))
        engine.journal.await_running(4)
        assert client_to(engine.url).abort_until_idle().idle
        for sample, prompt in zip(job.result(), prompts(4), strict=True):
            assert (sample.status, sample.error, sample.attempts) == (Status.ABORTED, None, 1)
            assert sample.output_ids.tolist() == [prompt[0] + 1000]
        assert len(engine.rids()) == 4


# --- B20: what an aborted call brings back ----------------------------------------------------------------------------


def queued(request: Request, **meta: Any) -> bytes:
    """What comes back for a request that never left the queue."""
    return completion(request, ids=[], **{"finish_reason": {"type": "abort"}, **meta})


BARE = b'{"text": "", "meta_info": {"id": "%s", "finish_reason": {"type": "abort"}}}'
BROUGHT_BACK: dict[str, tuple[Callable[[Request], bytes], int]] = {
    "next to nothing": (lambda request: BARE % body_of(request)["rid"].encode(), 0),
    "logprobs null": (lambda request: queued(request, output_token_logprobs=None), 0),
    "a plain word": (lambda request: queued(request, finish_reason="abort"), 0),
    "reason null": (lambda request: queued(request, finish_reason=None), 0),
    "no reason": (lambda request: queued(request).replace(b'"finish_reason"', b'"reason"'), 0),
    "retracted": (lambda request: completion(request, ids=[1, 2], finish_reason={"type": "abort"}), 2),
    "retracted, no reason": (lambda request: completion(request, ids=[1, 2], finish_reason=None), 2),
}


@pytest.mark.parametrize("name", BROUGHT_BACK)
def test_what_an_aborted_call_brings_back(client_to: MakeClient, name: str) -> None:
    """B20: ABORTED, with the tokens that there are and their logprobs; a weight version that is not told is unknown."""
    body, tokens = BROUGHT_BACK[name]
    with LiveEngine(aborted=lambda request: [answer(body(request))]) as engine:
        job = client_to(engine.url).start([[7, 8]])
        engine.journal.await_running(1)
        (sample,) = job.abort()
        assert (sample.status, sample.error, sample.attempts) == (Status.ABORTED, None, 1)
        assert sample.output_ids.tolist() == [1, 2][:tokens]
        assert sample.logprobs is not None
        assert len(sample.logprobs) == tokens
        assert [span.version for span in sample.weight_spans] == [None] * (tokens > 0)


# --- B33: aborts that must not wait -----------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [4, None])
def test_an_abort_does_not_wait_behind_generates(client_to: MakeClient, concurrency: int | None) -> None:
    """B33: every place is taken by a call that hangs, in a thread that blocks in generate(): the abort is there within
    a second.
    """
    count = concurrency or 100
    with LiveEngine() as engine:
        client = client_to(engine.url, engine_concurrency=concurrency)
        call = in_thread(lambda: client.generate(prompts(count + 4), on_error="return"))
        engine.journal.await_running(count)
        began = time.monotonic()
        assert client.abort_until_idle().idle
        assert engine.sweeps()[0] - began < 1.0
        samples = call.result(5.0)
        assert {sample.status for sample in samples} == {Status.ABORTED}


def test_an_idle_engine_gets_no_abort(client_to: MakeClient) -> None:
    """Item 8: nothing runs, so nothing is aborted; two readings prove it."""
    with FragileEngine() as engine, ScriptedEngine(echo) as other:
        report = client_to([engine.url, other.url]).abort_until_idle()
        assert [drain.aborts for drain in report.engines] == [0, 0]
        assert engine.counts()["/v1/loads"] == 2


@pytest.mark.parametrize("status", ["404 Not Found", "405 Method Not Allowed"])
def test_an_older_engine_without_loads(client_to: MakeClient, status: str) -> None:
    """No /v1/loads: /get_load is believed, after two readings of zero; what runs is aborted all the same."""
    with LiveEngine(others={"/v1/loads": error_answer(status)}) as engine:
        client = client_to(engine.url)
        job = client.start(prompts(3))
        engine.journal.await_running(3)
        report = client.abort_until_idle()
        assert (report.engines[0].state, report.engines[0].aborts) == (IdleState.IDLE, 1)
        assert (engine.counts()["/v1/loads"], engine.counts()["/get_load"] >= 3) == (1, True)
        assert {sample.status for sample in job.result()} == {Status.ABORTED}
