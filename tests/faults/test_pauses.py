"""B29: pauses. A paused engine is no fault: nothing is used up, nothing is generated twice, and it still ends."""

from __future__ import annotations

import pytest

from rolloutsync import ControlError, DeadlineExceededError, RetryPolicy, Status
from tests.client.kit import ScriptedEngine, error_answer, prompts
from tests.faults.engine import LiveEngine
from tests.faults.kit import MakeClient, check_all, check_failed, echo, first_of_each, within
from tests.wire import Script, answer, eventually

PAUSED: dict[str, bytes] = {
    "code": b'{"code": "paused", "retryable": true}',
    "words": b'{"error": {"message": "Engine is paused for a weight update"}}',
    "plain": b"generation is paused",
}


def test_503_paused_uses_no_attempt(client_to: MakeClient) -> None:
    """B29 b: each sample is generated exactly once, though it may be sent once only, in whatever words the engine says
    it; it is asked again within a second.
    """
    paused = [error_answer("503 Paused", words) for words in PAUSED.values()]
    with ScriptedEngine(first_of_each(*paused)) as engine, within(2.5):
        samples = client_to(engine.url, retry=RetryPolicy(max_attempts=1)).generate(prompts(3))
        check_all(samples, prompts(3))
        assert engine.counts()["/generate"] == 6


def test_a_pause_that_is_never_lifted(client_to: MakeClient) -> None:
    """B29 c: the sample ends at its deadline and says why, after no attempt."""
    with ScriptedEngine(lambda *_: error_answer("503 Paused", PAUSED["code"])) as engine, within(1.5):
        sample = client_to(engine.url).generate([[5]], timeout=0.5, on_error="return")[0]
        assert isinstance(sample.error, DeadlineExceededError)
        assert "paused" in str(sample.error)
        assert (sample.status, sample.attempts) == (Status.FAILED, 0)


def test_an_engine_that_holds_its_requests(client_to: MakeClient) -> None:
    """B29 a: paused in place, it says nothing until it is continued: one generation for each sample, no abort."""
    held = {"/pause_generation": [answer(b"{}")], "/continue_generation": [answer(b"{}")]}
    with LiveEngine(others=held) as engine:
        client = client_to(engine.url)
        job = client.start(prompts(4))
        engine.journal.await_running(4)
        client.pause("in_place")
        late = client.start(prompts(4))
        eventually(lambda: client.stats().open == 8, "four more wait")
        assert client.stats().gate == "hold"
        client.resume()
        engine.journal.await_running(8)
        assert engine.finish() == 8
        check_all([*job.result(), *late.result()], prompts(4) * 2)
        assert (engine.journal.ends(), engine.aborts) == (["finished"] * 8, [])


def test_time_stands_still_in_our_own_pause(client_to: MakeClient) -> None:
    """B29 a: a pause longer than the sample's deadline does not end it."""
    held = {"/pause_generation": [answer(b"{}")], "/continue_generation": [answer(b"{}")]}
    with LiveEngine(others=held, takes_s=0.1) as engine:
        client = client_to(engine.url)
        client.pause("in_place")
        job = client.start(prompts(4), timeout=1.0)
        assert not job.wait(1.2)
        client.resume()
        check_all(job.result(), prompts(4))


def test_a_pause_that_some_engine_refuses(client_to: MakeClient) -> None:
    """B29 d: told by URL; sent once each; nothing leaves until resume()."""
    fine: dict[str, Script] = {"/pause_generation": [answer(b"{}")], "/continue_generation": [answer(b"{}")]}
    with (
        ScriptedEngine(echo, others=fine) as one,
        ScriptedEngine(echo, others={**fine, "/pause_generation": error_answer("500 Oops")}) as two,
    ):
        client = client_to([one.url, two.url])
        with pytest.raises(ControlError, match="pause failed at 1 of 2 engines") as caught:
            client.pause("in_place")
        assert (list(caught.value.answers), list(caught.value.errors)) == ([one.url], [two.url])
        assert one.counts()["/pause_generation"] == two.counts()["/pause_generation"] == 1
        job = client.start(prompts(4))
        assert not job.wait(0.1)
        client.resume()
        check_all(job.result(), prompts(4))


def test_the_deadline_of_a_paused_sample_is_told_once(client_to: MakeClient) -> None:
    """B29 c for many: each fails by itself, with the engine's word, in time."""
    with ScriptedEngine(lambda *_: error_answer("503 Paused", PAUSED["words"])) as engine, within(1.6):
        samples = client_to(engine.url).generate(prompts(8), timeout=0.6, on_error="return")
        for sample in samples:
            check_failed(sample, DeadlineExceededError, "paused for a weight update", attempts=0)
