"""Item 10: errors and log lines that a person can use, whatever the payload."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from rolloutsync import (
    BatchError,
    DeadlineExceededError,
    EngineAbortError,
    EngineHTTPError,
    NotIdleError,
    ProtocolError,
    RolloutError,
    TransportError,
)
from rolloutsync.errors import Phase
from tests.client.kit import ScriptedEngine, completion, error_answer, prompts
from tests.faults.engine import LiveEngine
from tests.faults.kit import IMPATIENT, MakeClient, check_all, check_failed
from tests.wire import Request, Script, answer, close, head_of, send

LONG = "the engine's own words " * 10_000
REASON = {"type": "abort", "message": LONG[:10_000], "status_code": 500}

KINDS: dict[str, tuple[Callable[[Request], Script], type[RolloutError], tuple[str, ...], int]] = {
    "refused": (
        lambda _: error_answer("400 Bad Request", LONG.encode()),
        EngineHTTPError,
        ("POST /generate answered 400", "the engine's own words", "more characters"),
        1,
    ),
    "overloaded": (
        lambda _: error_answer("503 Busy", LONG.encode()),
        EngineHTTPError,
        ("POST /generate answered 503", "the engine's own words"),
        5,
    ),
    "no answer": (lambda _: [close], TransportError, ("/generate", Phase.SENT.value), 5),
    "broken off": (
        lambda _: [send(head_of(LONG.encode()) + b"the"), close],
        TransportError,
        ("/generate", Phase.BODY.value),
        5,
    ),
    "no JSON": (lambda _: [answer(LONG.encode())], ProtocolError, ("not JSON", "the engine's own words"), 2),
    "no completion": (
        lambda _: [answer(b'{"error": "%s"}' % LONG.encode())],
        ProtocolError,
        ("not a completion", "the engine's own words"),
        2,
    ),
    "aborted": (
        lambda request: [answer(completion(request, ids=[], finish_reason=REASON))],
        EngineAbortError,
        ("the engine ended the sample (500)", "the engine's own words"),
        1,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_error_says_where_what_and_how_often(client_to: MakeClient, name: str) -> None:
    """URL, phase, rid, attempts and the engine's own message, in less than 2 kB; it pickles, and so does its batch."""
    story, kind, words, attempts = KINDS[name]
    with ScriptedEngine(lambda request, _: story(request)) as engine:
        client = client_to(engine.url, retry=IMPATIENT)
        with pytest.raises(BatchError) as caught:
            client.generate([[5], [6]])
        for sample in caught.value.samples:
            check_failed(sample, kind, engine.url, *words, attempts=attempts)
        assert len(str(caught.value).encode()) < 2000
        assert engine.url in str(caught.value)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.counts) == (str(caught.value), {"FAILED": 2})
        assert len(pickle.dumps(caught.value)) < 50_000


def test_an_error_of_a_drain(client_to: MakeClient) -> None:
    """The engine, what remained, and which ids; it pickles with its report."""
    with LiveEngine(ignored_aborts=-1) as engine:
        client = client_to(engine.url)
        job = client.start(prompts(5))
        engine.journal.await_running(5)
        with pytest.raises(NotIdleError) as caught:
            client.abort_until_idle(0.3)
        job.result()
        text = str(caught.value)
        assert all(word in text for word in (engine.url, "5 running", "5 of ours in flight"))
        assert sum(rid in text for rid in engine.rids()) == 3
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), set(again.report.engines[0].rids)) == (text, set(engine.rids()))


def test_an_error_out_of_time_names_what_went_before(client_to: MakeClient) -> None:
    """A deadline in a backoff: its cause travels too."""
    with ScriptedEngine(lambda *_: error_answer("503 Busy", b'{"error": "queue full"}')) as engine:
        sample = client_to(engine.url).generate([[5]], timeout=0.2, on_error="return")[0]
        check_failed(sample, DeadlineExceededError, "queue full", attempts=1)
        assert isinstance(pickle.loads(pickle.dumps(sample.error)).__cause__, EngineHTTPError)


def test_one_warning_for_an_incident(client_to: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """An engine dies under 32 samples: one WARNING that names it; a batch without trouble: none."""
    with LiveEngine() as engine, LiveEngine(journal=engine.journal) as other:
        client = client_to([engine.url, other.url])
        job = client.start(prompts(64))
        engine.journal.await_running(64)
        assert warnings() == []
        engine.die()
        other.finish(from_now_on=True)
        check_all(job.result(), prompts(64), attempts=None)
        assert len(warnings()) == 1
        assert engine.url in warnings()[0]


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        ([{"input_ids": ["word " * 20_000]}], {}),
        ([[1, "word " * 20_000]], {}),
        ([[1]], {"input_ids": list(range(100_000))}),
        ([[1]], {"return_logprob": "x" * 100_000}),
        ([[1]], {"on_error": "x" * 100_000}),
        ([[1]], {"sampling_params": {"stop_token_ids": ["x"] * 20_000}}),
        ([[1]], {"sampling_params": {"unknown": "x" * 100_000}}),
        ([{f"key {number}": 1 for number in range(5000)}], {}),
    ],
)
def test_a_bad_argument_is_named_in_short(client_to: MakeClient, batch: Any, options: dict[str, Any]) -> None:
    """It may be a whole batch, and messages end in logs."""
    with pytest.raises((TypeError, ValueError)) as raised:
        client_to("http://127.0.0.1:9").generate(batch, **options)
    assert len(str(raised.value)) < 2000
