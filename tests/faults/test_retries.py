"""B10, B11, B13, B38: what may be sent again, how often, after how long, and what never is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from rolloutsync import (
    DeadlineExceededError,
    EngineHTTPError,
    EngineState,
    EngineUnavailableError,
    Job,
    RetryPolicy,
    RolloutClient,
    Status,
    Timeouts,
)
from tests.background import in_thread
from tests.client.kit import ScriptedEngine, body_of, error_answer, prompts, quiet
from tests.faults.engine import Journal, LiveEngine
from tests.faults.kit import (
    IMPATIENT,
    MakeClient,
    check,
    check_all,
    check_failed,
    echo,
    first_of_each,
    first_then,
    of_prompt,
    unused_url,
    within,
)
from tests.wire import Request, Script, answer, close, eventually, interim, reset, silence, wait_for

# --- B10: a copy that may be running ----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [[close], [reset]], ids=["fin", "reset"])
@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
def test_an_orphan_does_not_run_beside_its_successor(client_to: MakeClient, end: Script, reused: bool) -> None:
    """B10: two engines drop the connection of a request that runs on, unnoticed; never two copies of one prompt."""
    journal = Journal()

    def fault(request: Request, number: int) -> Script | None:
        if body_of(request)["input_ids"][0] != 7:
            return echo(request)
        return end if journal.ends(7) == [""] else None

    with (
        LiveEngine(fault, deaf=True, journal=journal) as one,
        LiveEngine(fault, deaf=True, journal=journal) as two,
    ):
        client = client_to([one.url, two.url])
        if reused:
            check_all(client.generate(prompts(4)), prompts(4))
        future = client.submit([7, 8])
        eventually(lambda: journal.ends(7) == ["aborted", ""], "the first copy is aborted, the second runs")
        one.finish()
        two.finish()
        check(future.result(5.0), [7, 8], attempts=2)
        assert journal.ends(7) == ["aborted", "finished"]
        assert journal.most_copies == 1
        assert len(one.aborted_rids() + two.aborted_rids()) == 1


def test_a_sample_that_ran_out_of_time_leaves_no_orphan(client_to: MakeClient) -> None:
    """B10: a timeout instead of a drop, at an engine that notices no disconnect: it is told to stop."""
    with LiveEngine(deaf=True) as engine:
        sample = client_to(engine.url).generate([[7, 8]], timeout=0.3, on_error="return")[0]
        check_failed(sample, DeadlineExceededError, attempts=1)
        assert (engine.aborted_rids(), engine.journal.ends()) == ([sample.rid], ["aborted"])


def test_no_engine_sees_an_id_twice(client_to: MakeClient) -> None:
    """B10: a repeated id is a 400 here; four broken attempts have four ids, and the fifth is whole."""
    stories = iter([[close], [reset], [close], [reset]])
    with LiveEngine(lambda request, _: next(stories, echo(request)), deaf=True) as engine:
        check(client_to(engine.url, retry=IMPATIENT).generate([[7, 8]])[0], [7, 8], attempts=5)
        rids = engine.rids()
        assert (len(set(rids)), {len(rid) for rid in rids}) == (5, {32})
        assert engine.aborted_rids() == rids[:4]
        assert engine.journal.most_copies == 1


def test_a_refused_connect_costs_nothing(client_to: MakeClient) -> None:
    """B10: an engine that is not there from the start: everything goes elsewhere at the first attempt."""
    with ScriptedEngine(echo) as engine:
        client = client_to([unused_url(), engine.url])
        check_all(client.generate(prompts(8)), prompts(8))
        assert [status.state for status in client.engines()] == [EngineState.DOWN, EngineState.LIVE]


def test_an_orphan_that_cannot_be_aborted_quarantines_its_engine(
    client_to: MakeClient, warnings: Callable[[], list[str]]
) -> None:
    """Its sample moves on; it is back only when abort_all was taken and its load proves it idle."""
    broken = {"/abort_request": error_answer("500 Oops")}
    with ScriptedEngine(lambda *_: [close], others=broken) as engine, ScriptedEngine(echo) as other:
        client = client_to([engine.url, other.url], engine_concurrency=1)
        check_all(client.generate(prompts(2)), prompts(2), attempts=None)
        assert [status.state for status in client.engines()] == [EngineState.QUARANTINED, EngineState.LIVE]
        assert len(warnings()) == 1


def test_a_dead_engine_comes_back_on_the_same_port(client_to: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """Killed under load: its samples move at once; restarted: it is a member again without anybody's help."""
    batch = prompts(16)
    with LiveEngine() as engine, LiveEngine(journal=engine.journal) as other:
        client = client_to([engine.url, other.url])
        job = client.start(batch)
        engine.journal.await_running(16)
        lost = engine.running()
        engine.die()
        other.finish(from_now_on=True)
        samples = job.result()
        check_all(samples, batch, attempts=None)
        assert sorted(sample.attempts for sample in samples) == [1] * (16 - lost) + [2] * lost
        assert [status.state for status in client.engines()] == [EngineState.DOWN, EngineState.LIVE]
        assert len(warnings()) == 1
        engine.server.reopen()
        eventually(lambda: client.engines()[0].state is EngineState.LIVE, "it is back")
        again = client.start(prompts(8))
        eventually(lambda: engine.running() > 0, "it has work again")
        engine.finish(from_now_on=True)
        check_all(again.result(), prompts(8))
        assert engine.journal.most_copies == 1


def test_no_live_engine(client_to: MakeClient) -> None:
    """The error names each URL and its last error; nothing counts as an attempt (60 s by default: overridden)."""
    urls = [unused_url(), unused_url()]
    client = client_to(urls, timeouts=Timeouts(engine_wait_s=0.5))
    with within(1.5):
        samples = client.generate([[5], [6]], on_error="return")
    for sample in samples:
        assert isinstance(sample.error, EngineUnavailableError)
        assert all(url in str(sample.error) for url in urls)
        assert "refused" in str(sample.error)
        assert sample.attempts == 0


@pytest.mark.parametrize("how", ["abort", "close", "drain"])
def test_waiting_for_an_engine_ends_when_it_is_called_off(client_to: MakeClient, how: str) -> None:
    """Nobody listens, and samples wait a minute for somebody (default): an abort, close(), a drain end that at once."""
    client = client_to(unused_url())
    job = client.start(prompts(64))
    eventually(lambda: client.stats().waiting == 0, "they wait")
    called_off(client, job, how)
    assert job.wait(2.0)
    assert {(sample.status, sample.attempts, sample.error) for sample in job.result()} == {(Status.ABORTED, 0, None)}


def called_off(client: RolloutClient, job: Job, how: str) -> None:
    """In one of three ways."""
    ways: dict[str, Callable[[], object]] = {
        "abort": job.abort,
        "close": client.close,
        "drain": client.abort_until_idle,
    }
    ways[how]()


def test_an_engine_that_starts_late(client_to: MakeClient) -> None:
    """Samples wait for the first engine to come up, at the cost of no attempt."""
    with ScriptedEngine(echo) as engine:
        engine.server.refuse()
        client = client_to(engine.url)
        running = in_thread(lambda: client.generate([[5, 6]]))
        eventually(lambda: client.stats().open == 1, "the sample waits")
        engine.server.reopen()
        check(running.result(10.0)[0], [5, 6])


# --- B11: refusals and overload ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status", ["400 Bad Request", "401 Unauthorized", "403 No", "404 Not Found", "422 No", "409 -"]
)
def test_refusals_are_final(client_to: MakeClient, status: str) -> None:
    """B11: exactly one attempt, the engine's words, no abort, a live engine, neighbours that complete."""
    refusal = error_answer(status, b'{"error": {"message": "too long: 9000 > 4096"}}')
    with ScriptedEngine(of_prompt(7, lambda *_: refusal)) as engine:
        client = client_to(engine.url)
        samples = client.generate([[7, 8], [5, 6]])
        error = samples[0].error
        assert isinstance(error, EngineHTTPError)
        check_failed(samples[0], type(error), f"answered {status[:3]}: too long: 9000 > 4096", attempts=1)
        check(samples[1], [5, 6])
        assert (engine.counts()["/generate"], engine.aborted()) == (2, [])
        assert [found.state for found in client.engines()] == [EngineState.LIVE]


class Breaker:
    """A router that answers 503 to everybody once it has seen three answers in a row that were not 200."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bad = 0
        self.opened = False

    def __call__(self, request: Request, _: int) -> Script:
        long = body_of(request)["input_ids"][0] == 7
        with self._lock:
            self._bad = self._bad + 1 if long else 0
            self.opened |= self._bad >= 3
            refused, open_now = long, self.opened
        if open_now:
            return error_answer("503 Unavailable", b"no_available_workers")
        return error_answer("400 Bad Request", b'{"error": "too long"}') if refused else echo(request)


def test_a_routers_breaker_never_opens(client_to: MakeClient) -> None:
    """B11: an over-long prompt is refused once, so the router goes on trusting its workers."""
    router = Breaker()
    batch = [[5, 6], [7, 8], [9, 10]] * 4
    with ScriptedEngine(router) as engine:
        samples = client_to(engine.url, engine_concurrency=1).generate(batch)
        for sample, prompt in zip(samples, batch, strict=True):
            if prompt[0] == 7:
                check_failed(sample, EngineHTTPError, "too long", attempts=1)
            else:
                check(sample, prompt)
        assert not router.opened


PAGE = b"<html><body>" + b"busy " * 2000
STATUSES = ["408 Timeout", "425 Early", "429 Too Many", "500 Oops", "502 Bad Gateway", "503 Busy", "504 Timeout"]
NONSENSE = ["Mon, 01 Jan 2001 00:00:00 GMT", "abc", "", "-5", "nan", "inf", "1e400", "Mon, 99 Foo 9999", "\u00b2"]
OVERLOADED: list[Script] = [
    *(error_answer(status, PAGE) for status in STATUSES),
    *(error_answer("503 Wait", b"", f"Retry-After: {header}") for header in NONSENSE),
]


def test_overload_is_retried(client_to: MakeClient) -> None:
    """B11, B13, B38: each refused once, with a page as long as pages are or a Retry-After that is nonsense; then all is
    well, after the default backoff of a quarter of a second to one second.
    """
    batch = prompts(len(OVERLOADED))
    with ScriptedEngine(first_of_each(*OVERLOADED)) as engine:
        samples = client_to(engine.url).generate(batch, timeout=3.0)
        check_all(samples, batch, attempts=2)
        assert all(0.2 < sample.timing.total_s < 3.0 for sample in samples)
        assert len(set(engine.rids())) == 2 * len(batch)


def test_four_bad_gateways(client_to: MakeClient) -> None:
    """B38 c: one dead worker behind a router: 4 times 502, then the fifth attempt works (default backoff: overridden).

    502 and 504 mean that a proxy gave up, which an engine may not have done: those ids are aborted.
    """
    with ScriptedEngine(first_then(*[error_answer("502 Bad Gateway", b"<html>")] * 4)) as engine:
        check(client_to(engine.url, retry=IMPATIENT).generate([[5, 6]])[0], [5, 6], attempts=5)
        assert engine.aborted() == engine.rids()[:4]


def test_one_message_for_many(client_to: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """B38 a: 64 samples meet a dead router for ever; each error has its words once, and the log stays short."""
    words = b"No available workers (all circuits open or unhealthy)"
    with ScriptedEngine(lambda *_: error_answer("503 Unavailable", words)) as engine:
        samples = client_to(engine.url, retry=IMPATIENT).generate(prompts(64), on_error="return")
        for sample in samples:
            check_failed(sample, EngineHTTPError, attempts=5)
            assert str(sample.error).count("No available workers") == 1
        assert len(warnings()) <= 1


def test_a_dead_router_ends_at_the_deadline(client_to: MakeClient) -> None:
    """B38 a: default backoff; the error says what the router said last."""
    with ScriptedEngine(lambda *_: error_answer("503 Unavailable", b"No available workers")) as engine:
        with within(1.5):
            sample = client_to(engine.url).generate([[5]], timeout=0.5, on_error="return")[0]
        assert isinstance(sample.error, DeadlineExceededError)
        assert "No available workers" in str(sample.error)


def test_the_cut_at_the_deadline_hides_no_cause(client_to: MakeClient) -> None:
    """B38 a: the last request is still on its way then; the error says what the one before it was told."""
    refusal = error_answer("503 Unavailable", b"No available workers")
    with ScriptedEngine(lambda _, number: [silence] if number else refusal) as engine:
        sample = client_to(engine.url, retry=IMPATIENT).generate([[5]], timeout=0.5, on_error="return")[0]
        assert isinstance(sample.error, DeadlineExceededError)
        assert "No available workers" in str(sample.error)
        assert sample.attempts == 2


@pytest.mark.parametrize("status", ["103 Early Hints", "102 Processing", "100 Continue"])
def test_interim_answers(client_to: MakeClient, status: str) -> None:
    """B38 d: what comes before the answer is skipped, however often."""
    with ScriptedEngine(lambda request, _: [interim(status), interim(status), *echo(request)]) as engine:
        client = client_to(engine.url)
        check_all(client.generate(prompts(4)), prompts(4))
        check_all(client.generate(prompts(4)), prompts(4))


# --- B13: Retry-After -------------------------------------------------------------------------------------------------


def test_a_long_retry_after_is_capped(client_to: MakeClient) -> None:
    """B13: an hour, an age, a date at the end of time: the cap (60 s by default: overridden) is waited, no longer.

    Less a share of a second, by which a wave is spread.
    """
    headers = ["3600", "9999999999", "Fri, 31 Dec 9999 23:59:59 GMT"]
    stories = [error_answer("503 Wait", b"", f"Retry-After: {header}") for header in headers]
    retry = RetryPolicy(backoff_base_s=0.0, retry_after_cap_s=0.4)
    with ScriptedEngine(first_of_each(*stories)) as engine:
        samples = client_to(engine.url, retry=retry).generate(prompts(3))
        check_all(samples, prompts(3), attempts=2)
        assert all(sample.timing.total_s <= 1.4 for sample in samples)


def test_a_long_retry_after_ends_at_the_deadline(client_to: MakeClient) -> None:
    """B13: the wait is never longer than the sample has."""
    with ScriptedEngine(lambda *_: error_answer("503 Wait", b"", "Retry-After: 3600")) as engine, within(1.4):
        sample = client_to(engine.url).generate([[5]], timeout=0.4, on_error="return")[0]
        check_failed(sample, DeadlineExceededError, "answered 503", attempts=1)


@pytest.mark.parametrize("how", ["abort", "close", "drain"])
def test_a_long_wait_ends_when_it_is_called_off(client_to: MakeClient, how: str) -> None:
    """B13: an abort, a drain and close() each wake a sample that rests for an hour; it is ABORTED, not FAILED."""
    with ScriptedEngine(lambda *_: error_answer("503 Wait", b"", "Retry-After: 3600")) as engine:
        client = client_to(engine.url, retry=RetryPolicy(retry_after_cap_s=3600.0))
        job = client.start([[5]])
        eventually(lambda: client.stats().engines[engine.url].retries == 1, "it rests")
        with within(3.0):
            called_off(client, job, how)
            sample = job.result()[0]
        assert (sample.status, sample.attempts, engine.aborted()) == (Status.ABORTED, 1, [])


# --- B04: waves -------------------------------------------------------------------------------------------------------


def test_a_second_wave_is_spread(client_to: MakeClient) -> None:
    """B04: everybody gets 503 first; the second wave is spread over the three quarters of a second that jitter gives
    it (a busy machine can only spread it more).
    """
    arrivals: list[float] = []
    first_wave = first_of_each(*[error_answer("503 Busy")] * 100)

    def story(request: Request, number: int) -> Script:
        if number >= 100:
            arrivals.append(time.monotonic())
        return first_wave(request, number)

    with ScriptedEngine(story) as engine:
        check_all(client_to(engine.url).generate(prompts(100)), prompts(100), attempts=2)
    arrivals.sort()
    assert arrivals[89] - arrivals[9] > 0.3


@pytest.mark.slow
def test_a_short_listen_queue_loses_nothing(client_to: MakeClient) -> None:
    """B04: 256 samples start together at a server that accepts after a while and closes every socket."""
    accepting = threading.Event()
    with ScriptedEngine(echo, backlog=8, accepting=accepting, closing=True) as engine:
        client = client_to(engine.url)
        running = in_thread(lambda: client.generate(prompts(256)))
        accepting.set()
        check_all(running.result(60.0), prompts(256), attempts=None)


# --- control calls ----------------------------------------------------------------------------------------------------


def test_control_calls_are_never_sent_again(client_to: MakeClient) -> None:
    """B29 d: a slow control call times out (10 s by default: overridden), is not repeated, and its state is unknown."""
    from rolloutsync import ControlError, TransportError

    stop = threading.Event()
    with ScriptedEngine(quiet, others={"/update_weights": [wait_for(stop), answer(b"{}")]}) as engine:
        client = client_to(engine.url, timeouts=Timeouts(control_s=0.4))
        with within(1.4), pytest.raises(ControlError, match=r"failed at 1 of 1 engines.*deadline") as caught:
            client.control("/update_weights")
        stop.set()
        assert isinstance(caught.value.errors[engine.url], TransportError)
        assert (caught.value.answers, engine.counts()["/update_weights"]) == ({}, 1)
