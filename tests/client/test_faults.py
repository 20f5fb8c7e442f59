"""What engines and networks do wrong, and what becomes of the samples: retries, ids, refusals, dead engines."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from rolloutsync import (
    DeadlineExceededError,
    EngineAbortError,
    EngineHTTPError,
    EngineState,
    EngineUnavailableError,
    ProtocolError,
    RetryPolicy,
    RolloutClient,
    Status,
    Timeouts,
    TransportError,
)
from rolloutsync.sim import Fault, SimFleet
from tests.background import in_thread
from tests.client.kit import (
    QUICK,
    ScriptedEngine,
    body_of,
    check_sample,
    completion,
    error_answer,
    generations,
    good,
    params,
    prompts,
    quiet,
)
from tests.wire import Peer, Request, Script, WireServer, answer, close, eventually, interim, reset, truncated, wait_for

MakeClient = Callable[..., RolloutClient]


def unused_url() -> str:
    """A loopback URL where nobody listens."""
    with WireServer([]) as server:
        return server.url


def first_then(*stories: Script) -> Callable[[Request, int], Script]:
    """These steps for the first requests, then whole answers."""
    return lambda request, number: stories[number] if number < len(stories) else good(request)


def test_a_batch_of_mixed_faults(fleet: SimFleet, make_client: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """B14: 64 samples; one prompt is always reset, one always gets 500, one no JSON: the other 61 are complete."""
    batch = prompts(64)
    for engine in fleet.engines:
        engine.add_fault(Fault(kind="reset", prompt=(batch[17][0],), times=None))
        engine.add_fault(Fault(kind="status", status=500, prompt=(batch[30][0],), times=None))
        engine.add_fault(Fault(kind="error_200", body="<html>", prompt=(batch[41][0],), times=None))
    samples = make_client(fleet).generate(batch, params(8))
    assert [sample.index for sample in samples if sample.status is Status.FAILED] == [17, 30, 41]
    for index in set(range(64)) - {17, 30, 41}:
        check_sample(samples[index], batch[index])
    assert [type(samples[index].error) for index in (17, 30, 41)] == [TransportError, EngineHTTPError, ProtocolError]
    assert [samples[index].attempts for index in (17, 30, 41)] == [5, 5, 2]
    assert all(samples[index].reward is None for index in (17, 30, 41))
    assert sum("samples failed" in message for message in warnings()) == 1


def test_error_objects_with_status_200(make_client: MakeClient) -> None:
    """B09: none of these is a completion; the sample says the engine's words."""
    bodies = [
        b'{"error": {"message": "out of luck"}}',
        b'{"object": "error", "message": "out of luck"}',
        b"[]",
        b"null",
    ]
    for body in bodies:
        with ScriptedEngine(lambda *_: [answer(body)]) as engine:  # noqa: B023 - used up in this turn
            sample = make_client(engine.url).generate([[5]], on_error="return")[0]
            assert (sample.status, len(sample.output_ids), sample.attempts) == (Status.FAILED, 0, 2)
            assert isinstance(sample.error, ProtocolError)
            assert ("out of luck" in str(sample.error)) == (b"luck" in body)
            assert len(set(engine.rids())) == 2


def test_an_abort_by_the_engine_itself_is_a_failure(make_client: MakeClient) -> None:
    """B09: finish_reason abort with a status code, which nobody here asked for."""
    reason = {"type": "abort", "message": "input too long", "status_code": 400}
    with ScriptedEngine(lambda request, _: [answer(completion(request, 1, finish_reason=reason))]) as engine:
        sample = make_client(engine.url).generate([[5]], on_error="return")[0]
        assert sample.status is Status.FAILED
        assert isinstance(sample.error, EngineAbortError)
        assert "input too long" in str(sample.error)
        assert engine.counts()["/generate"] == 1


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 Unprocessable"])
def test_refusals_are_final(make_client: MakeClient, status: str) -> None:
    """B11: exactly one attempt, the engine's words, no abort, and the engine stays live."""
    with ScriptedEngine(lambda *_: error_answer(status, b'{"error": {"message": "too long"}}')) as engine:
        client = make_client(engine.url)
        sample = client.generate([[5]], on_error="return")[0]
        assert isinstance(sample.error, EngineHTTPError)
        assert (sample.error.status, sample.error.attempts) == (int(status[:3]), 1)
        assert "too long" in str(sample.error)
        assert (engine.counts()["/generate"], engine.aborted()) == (1, [])
        assert [found.state for found in client.engines()] == [EngineState.LIVE]


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable", "500 Oops", "502 Bad Gateway"])
def test_overload_is_retried(make_client: MakeClient, status: str) -> None:
    """B11, B38: three refusals for the moment, then it works; every attempt has an id of its own."""
    page = b"<html><body>" + b"busy " * 2000
    with ScriptedEngine(first_then(*[error_answer(status, page)] * 3)) as engine:
        sample = make_client(engine.url).generate([[5]])[0]
        assert (sample.status, sample.attempts) == (Status.TRUNCATED, 4)
        rids = engine.rids()
        assert (len(set(rids)), rids[-1]) == (4, sample.rid)


def test_retry_after_is_obeyed_within_its_cap(make_client: MakeClient) -> None:
    """B13: an hour, for ever, yesterday or nonsense: the sample comes soon all the same."""
    headers = ["3600", "9999999999", "Mon, 01 Jan 2001 00:00:00 GMT", "abc"]
    stories = [error_answer("503 Wait", b"", f"Retry-After: {header}") for header in headers]
    with ScriptedEngine(first_then(*stories)) as engine:
        retry = RetryPolicy(backoff_base_s=0.02, backoff_cap_s=0.05, retry_after_cap_s=0.05)
        sample = make_client(engine.url, retry=retry).generate([[5]], timeout=5.0)[0]
        assert (sample.status, sample.attempts) == (Status.TRUNCATED, 5)


def test_a_long_retry_after_ends_at_the_deadline(make_client: MakeClient) -> None:
    """B13: the wait is never longer than the sample has."""
    with ScriptedEngine(lambda *_: error_answer("503 Wait", b"", "Retry-After: 3600")) as engine:
        sample = make_client(engine.url).generate([[5]], timeout=0.4, on_error="return")[0]
        assert isinstance(sample.error, DeadlineExceededError)
        assert sample.timing.total_s < 1.4


def test_a_paused_engine_uses_no_attempt(make_client: MakeClient) -> None:
    """B29: 503 "paused" as often as there are attempts; the sample is made once, at the first attempt."""
    paused = error_answer("503 Paused", b'{"code": "paused", "retryable": true}')
    with ScriptedEngine(first_then(paused)) as engine:
        retry = RetryPolicy(max_attempts=1)
        sample = make_client(engine.url, retry=retry).generate([[5]])[0]
        assert (sample.status, sample.attempts) == (Status.TRUNCATED, 1)


def test_a_pause_that_never_ends(make_client: MakeClient) -> None:
    """B29: the sample ends at its deadline and says why."""
    with ScriptedEngine(lambda *_: error_answer("503 Paused", b'{"code": "paused"}')) as engine:
        sample = make_client(engine.url).generate([[5]], timeout=0.5, on_error="return")[0]
        assert isinstance(sample.error, DeadlineExceededError)
        assert "paused" in str(sample.error)


def test_a_broken_answer_is_aborted_before_it_is_asked_for_again(make_client: MakeClient) -> None:
    """B06, B10: the old id is aborted where it may run, before the new one is sent."""
    stories: list[Script] = [[close], [reset], [truncated(b"x" * 100, 60), close], [answer(b"<html>")]]
    for story in stories:
        with ScriptedEngine(first_then(story)) as engine:
            sample = make_client(engine.url).generate([[5]])[0]
            assert (sample.status, sample.attempts) == (Status.TRUNCATED, 2)
            first, second = engine.rids()
            assert (first != second, second == sample.rid, engine.aborted()) == (True, True, [first])
            told = [path for path in engine.server.paths() if path in {"/generate", "/abort_request"}]
            assert told == ["/generate", "/abort_request", "/generate"]


def test_another_samples_answer_is_not_taken(make_client: MakeClient, fleet: SimFleet) -> None:
    """An answer that bears another id is a broken one."""
    fleet.engines[0].add_fault(Fault(kind="wrong_id", times=1))
    sample = make_client(fleet[0]).generate([[5, 6]], params(4))[0]
    check_sample(sample, [5, 6], 4)
    assert sample.attempts == 2


def test_an_orphan_does_not_run_beside_its_successor(fleet: SimFleet, make_client: MakeClient) -> None:
    """B10: the engine drops the connection and generates on; it is told to stop before the sample runs again."""
    fleet.engines[0].add_fault(Fault(kind="drop", seconds=0.05, times=1))
    sample = make_client(fleet[0]).generate([[5, 6]], params(300))[0]
    check_sample(sample, [5, 6], 300)
    rows = generations(fleet)
    assert [row["state"] for row in rows] == ["aborted", "finished"]
    assert rows[1]["rid"] == sample.rid
    assert fleet.engines[0].state()["aborts"]["rids"] == [rows[0]["rid"]]
    assert fleet.engines[0].state()["peak_running"] == 1


def test_an_orphan_that_cannot_be_aborted_quarantines_its_engine(
    fleet: SimFleet, make_client: MakeClient, warnings: Callable[[], list[str]]
) -> None:
    """The sample moves on to another engine; the first one comes back only when it is proven idle."""
    with ScriptedEngine(lambda *_: [close], others={"/abort_request": error_answer("500 Oops")}) as engine:
        client = make_client([engine.url, fleet[0]], engine_concurrency=1)
        samples = client.generate(prompts(2), params(4))
        for sample, ids in zip(samples, prompts(2), strict=True):
            check_sample(sample, ids, 4)
        states = {status.url: status.state for status in client.engines()}
        assert states[engine.url] is EngineState.QUARANTINED
        assert len(warnings()) == 1


def test_the_keep_alive_race_is_retried_at_once_on_the_same_engine(
    fleet: SimFleet, make_client: MakeClient, warnings: Callable[[], list[str]]
) -> None:
    """B01: a reset of a reused socket; the engine is not blamed, the old id is aborted too."""
    client = make_client(fleet[0], engine_concurrency=1)
    client.generate([[5]], params(2))
    fleet.engines[0].add_fault(Fault(kind="reset", times=1))
    sample = client.generate([[5, 6]], params(4))[0]
    check_sample(sample, [5, 6], 4)
    assert len(fleet.engines[0].state()["aborts"]["rids"]) == 1
    assert [status.state for status in client.engines()] == [EngineState.LIVE]
    assert warnings() == []


def test_a_refused_connect_costs_nothing(fleet: SimFleet, make_client: MakeClient) -> None:
    """B10: an engine that is not there from the start: everything goes elsewhere at the first attempt."""
    client = make_client([unused_url(), fleet[0]])
    samples = client.generate(prompts(8), params(4))
    for sample, ids in zip(samples, prompts(8), strict=True):
        check_sample(sample, ids, 4)
    assert {sample.attempts for sample in samples} == {1}
    assert [status.state for status in client.engines()] == [EngineState.DOWN, EngineState.LIVE]


def test_an_engine_that_goes_down_is_left_and_comes_back(
    make_client: MakeClient, warnings: Callable[[], list[str]]
) -> None:
    """Killed under load: its samples move; restarted: it is a member again, without anybody's help."""
    with SimFleet(engines=2, tokens_per_second=1000.0) as fleet:
        client = make_client(fleet)
        running = in_thread(lambda: client.generate(prompts(16), params(400)))
        eventually(lambda: all(engine.state()["running"] >= 4 for engine in fleet.engines), "both run")
        fleet.engines[0].kill()
        samples = running.result(20.0)
        for sample, ids in zip(samples, prompts(16), strict=True):
            check_sample(sample, ids, 400)
        assert {sample.engine for sample in samples} <= {fleet[1]} | {fleet[0]}
        assert [status.state for status in client.engines()] == [EngineState.DOWN, EngineState.LIVE]
        assert len(warnings()) == 1
        fleet.engines[0].restart()
        eventually(lambda: client.engines()[0].state is EngineState.LIVE, "it is back")
        assert {sample.engine for sample in client.generate(prompts(8), params(4))} == set(fleet)


def test_no_live_engine(make_client: MakeClient) -> None:
    """The error names each URL and its last error, within engine_wait_s; nothing counts as an attempt."""
    urls = [unused_url(), unused_url()]
    client = make_client(urls, timeouts=Timeouts(engine_wait_s=0.5))
    samples = client.generate([[5], [6]], on_error="return")
    for sample in samples:
        assert isinstance(sample.error, EngineUnavailableError)
        assert all(url in str(sample.error) for url in urls)
        assert "refused" in str(sample.error)
        assert sample.attempts == 0
        assert sample.timing.total_s < 1.5


def test_an_engine_that_starts_late(make_client: MakeClient) -> None:
    """Samples wait for the first engine to come up."""
    fleet = SimFleet(engines=1, tokens_per_second=1000.0)
    fleet.start()
    try:
        fleet.engines[0].kill()
        client = make_client(fleet, timeouts=Timeouts(engine_wait_s=20.0))
        running = in_thread(lambda: client.generate([[5, 6]], params(4)))
        eventually(lambda: client.stats().open == 1, "the sample waits")
        fleet.engines[0].restart()
        check_sample(running.result(20.0)[0], [5, 6], 4)
    finally:
        fleet.stop()


def test_silence_ends_at_the_samples_deadline(make_client: MakeClient) -> None:
    """B02: one of 8 requests is never answered; the other 7 are delivered, the one fails in time and is aborted."""
    with ScriptedEngine(
        lambda request, _: quiet(request) if body_of(request)["input_ids"] == [7] else good(request)
    ) as engine:
        timeouts = Timeouts(sample_s=0.5, control_s=2.0)
        samples = make_client(engine.url, timeouts=timeouts).generate([[ids] for ids in range(1, 9)])
        statuses = [sample.status for sample in samples]
        assert statuses == [Status.TRUNCATED] * 6 + [Status.FAILED] + [Status.TRUNCATED]
        assert isinstance(samples[6].error, DeadlineExceededError)
        assert samples[6].timing.total_s < 1.6
        assert engine.aborted() == [samples[6].rid]


def test_interim_answers(make_client: MakeClient) -> None:
    """B38: 103 Early Hints before the answer is skipped."""
    with ScriptedEngine(lambda request, _: [interim("103 Early Hints"), *good(request)]) as engine:
        sample = make_client(engine.url).generate([[5]])[0]
        assert (sample.status, sample.attempts) == (Status.TRUNCATED, 1)


def test_redirects_are_refused(make_client: MakeClient) -> None:
    """B37: a redirect fails the sample and says where it pointed; it is never a GET elsewhere."""
    with ScriptedEngine(lambda *_: error_answer("307 Temporary", b"", "Location: /generate/")) as engine:
        sample = make_client(engine.url).generate([[5]], on_error="return")[0]
        assert "redirects are not followed" in str(sample.error)
        assert engine.counts()["/generate"] == 1
        assert "/generate/" not in engine.counts()


def test_a_list_of_one_is_accepted_and_a_longer_one_is_not(make_client: MakeClient) -> None:
    """B24: a proxy's one-element list is the answer; two answers to one request are none."""

    def story(request: Request, number: int) -> Script:
        body = completion(request)
        return [answer(b"[" + body + b"]" if number == 0 else b"[" + body + b"," + body + b"]")]

    with ScriptedEngine(story) as engine:
        client = make_client(engine.url)
        assert client.generate([[5]])[0].status is Status.TRUNCATED
        assert client.generate([[5]], on_error="return")[0].status is Status.FAILED


def test_a_second_wave_is_spread(make_client: MakeClient) -> None:
    """B04: everybody gets 503 first; the retries do not come all at once."""
    arrivals: list[float] = []
    lock = threading.Lock()
    seen: Counter[int] = Counter()

    def story(request: Request, _: int) -> Script:
        import time

        first = body_of(request)["input_ids"][0]
        with lock:
            seen[first] += 1
            if seen[first] == 1:
                return error_answer("503 Busy")
            arrivals.append(time.monotonic())
        return good(request)

    with ScriptedEngine(story) as engine:
        retry = RetryPolicy(backoff_base_s=1.0)
        samples = make_client(engine.url, retry=retry).generate(prompts(100))
        assert {sample.attempts for sample in samples} == {2}
    bins = Counter(round((at - arrivals[0]) / 0.05) for at in arrivals)
    assert max(bins.values()) <= 25


@pytest.mark.slow
def test_a_short_listen_queue_loses_nothing(make_client: MakeClient) -> None:
    """B04: 256 samples start together at a server that accepts slowly and closes every socket."""
    accepting = threading.Event()
    with ScriptedEngine(backlog=8, accepting=accepting, closing=True) as engine:
        client = make_client(engine.url, timeouts=Timeouts(), retry=QUICK)
        running = in_thread(lambda: client.generate(prompts(256)))
        accepting.set()
        samples = running.result(60.0)
    assert Counter(sample.status for sample in samples) == {Status.TRUNCATED: 256}


def test_an_abort_survives_the_keep_alive_race(make_client: MakeClient) -> None:
    """B01 on the control lane: the orphan's abort is sent again on a fresh socket, its engine stays in use."""
    broken: list[Script] = [[reset]]
    others = _Once(broken)
    with ScriptedEngine(first_then([close]), others={"/abort_request": [others]}) as engine:
        client = make_client(engine.url)
        client.flush_cache()
        sample = client.generate([[5]])[0]
        assert (sample.status, sample.attempts) == (Status.TRUNCATED, 2)
        first = engine.rids()[0]
        assert engine.aborted() == [first, first]
        assert [found.state for found in client.engines()] == [EngineState.LIVE]


class _Once:
    """Resets the first time, then answers."""

    def __init__(self, stories: list[Script]) -> None:
        self._stories = stories

    def __call__(self, peer: Peer) -> None:
        for step in self._stories.pop() if self._stories else [answer(b"")]:
            step(peer)


def test_a_413_while_sending_is_final(make_client: MakeClient) -> None:
    """B28: the early answer is the sample's error; the request is not sent again."""
    from tests.wire import play, read_bytes, read_request

    info = [play(lambda _: [answer(b"{}")])]
    early = [read_bytes(4096), answer(b"payload reached size limit", "413 Payload Too Large"), close]
    scripts = [info if number == 0 else early for number in range(3)]
    with WireServer(*scripts) as server:
        assert read_request is not None
        client = make_client(server.url)
        sample = client.generate([list(range(1_500_000))], on_error="return")[0]
        assert isinstance(sample.error, EngineHTTPError)
        assert (sample.error.status, sample.attempts) == (413, 1)
        assert "payload reached size limit" in str(sample.error)


def test_one_message_for_many(make_client: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """B38: 64 samples meet a dead router; the log stays short, the error shows its words once."""
    words = b"No available workers (all circuits open or unhealthy)"
    with ScriptedEngine(lambda *_: error_answer("503 Unavailable", words)) as engine:
        samples = make_client(engine.url).generate(prompts(64), on_error="return")
        assert {sample.attempts for sample in samples} == {5}
        assert str(samples[0].error).count("No available workers") == 1
        assert len(warnings()) <= 1


def test_control_calls_are_never_sent_again(make_client: MakeClient) -> None:
    """B29 d: a slow control call times out and is not repeated."""
    stop = threading.Event()
    slow: Script = [wait_for(stop), answer(b"{}")]
    with ScriptedEngine(others={"/flush_cache": slow}) as engine:
        client = make_client(engine.url, timeouts=Timeouts(control_s=0.4))
        with pytest.raises(Exception, match=r"flush_cache failed at 1 of 1 engines.*deadline"):
            client.flush_cache()
        stop.set()
        assert engine.counts()["/flush_cache"] == 1


def test_an_unknown_finish_reason_is_no_silent_abort(make_client: MakeClient) -> None:
    """Tried once more like a broken answer, then FAILED with the engine's word in the error."""
    reason = {"type": "retired"}
    with ScriptedEngine(lambda request, _: [answer(completion(request, 1, finish_reason=reason))]) as engine:
        (sample,) = make_client(engine.url).generate([[1, 2]], on_error="return")
    assert (sample.status, sample.attempts) == (Status.FAILED, 2)
    assert "unknown finish_reason 'retired'" in str(sample.error)
