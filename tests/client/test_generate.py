"""generate: what goes in, what comes out, in which order, and what is refused before anything is sent."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests

from rolloutsync import BatchError, ClientClosedError, EngineHTTPError, Prompt, RolloutClient, Sample, Status
from rolloutsync.sim import SimFleet
from rolloutsync.sim.tokenizer import Tokenizer
from tests.background import in_thread
from tests.client.kit import (
    ENDLESS,
    ScriptedEngine,
    calls,
    check_sample,
    error_answer,
    generations,
    good,
    params,
    prompts,
)
from tests.wire import Request, Script, WireServer, eventually

MakeClient = Callable[..., RolloutClient]


def test_order_members_and_values(fleet: SimFleet, make_client: MakeClient) -> None:
    """Prompt-major, in input order, n members each; every value is what the engines must say."""
    batch = prompts(10)
    samples = make_client(fleet).generate(batch, params(12), n=3)
    assert [(sample.index, sample.member) for sample in samples] == [(i, m) for i in range(10) for m in range(3)]
    for sample in samples:
        check_sample(sample, batch[sample.index], 12)
        assert sample.engine in list(fleet)
        assert sample.attempts == 1
        assert sample.tokens.tolist()[:5] == batch[sample.index]
        assert sample.timing.total_s >= sample.timing.engine_s > 0
    rids = [sample.rid for sample in samples]
    assert len(set(rids)) == 30
    assert all(len(rid) == 32 for rid in rids)
    assert sorted(rids) == sorted(row["rid"] for row in generations(fleet))


def test_every_form_of_an_item(fleet: SimFleet, make_client: MakeClient) -> None:
    """Text, ids in any container, the engine's words, Prompt and Sample, mixed."""
    client = make_client(fleet, tokenizer=SimpleNamespace(apply_chat_template=lambda messages, **_: [5, 6, 7]))
    ids = [5, 6, 7]
    done = client.generate([ids], params(3))[0]
    failed = Sample(Prompt(input_ids=np.array(ids, np.int32)), 0, 0, status=Status.FAILED)
    batch: list[Any] = [
        ids,
        tuple(ids),
        np.array(ids, np.int64),
        {"input_ids": ids},
        {"prompt_token_ids": ids, "metadata": {"gold": 1}},
        {"messages": [{"role": "user", "content": "hi"}]},
        Prompt(input_ids=np.array(ids, np.int32)),
        failed,
        done,
    ]
    samples = client.generate(batch, params(4))
    for sample in samples[:-1]:
        check_sample(sample, ids, 4)
    assert samples[4].metadata == {"gold": 1}
    assert samples[-1] is done
    text = client.generate(["hello", {"text": "hello"}, {"prompt": "hello"}], params(4))
    wanted = Tokenizer(32000).encode("hello")
    for sample in text:
        check_sample(sample, wanted, 4)


def test_parameters_of_items_and_objects(fleet: SimFleet, make_client: MakeClient) -> None:
    """An item's own parameters override the call's key by key; max_tokens is max_new_tokens; objects work too."""
    client = make_client(fleet)
    mine = {"max_new_tokens": 3, "ignore_eos": True}
    batch = [[5, 6], {"input_ids": [5, 6], "sampling_params": {"max_tokens": 5}}]
    samples = client.generate(batch, mine)
    assert [len(sample.output_ids) for sample in samples] == [3, 5]
    assert mine == {"max_new_tokens": 3, "ignore_eos": True}
    object_like = SimpleNamespace(max_tokens=2, ignore_eos=True, temperature=1.0)
    assert len(client.generate([[5, 6]], object_like)[0].output_ids) == 2


def test_what_is_sent(make_client: MakeClient) -> None:
    """One request per sample: the rid, the ids, the parameters, the fields, and nothing of ours besides."""
    with ScriptedEngine() as engine:
        make_client(engine.url).generate([[5, 6]], {"max_tokens": 4}, session_id="s", lora_path="a")
        assert engine.counts()["/generate"] == 1
        body = engine.bodies()[0]
    assert len(body.pop("rid")) == 32
    assert body == {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 4},
        "return_logprob": True,
        "session_id": "s",
        "lora_path": "a",
    }


def test_an_empty_batch_does_nothing(fleet: SimFleet, make_client: MakeClient) -> None:
    """No request, no thread, an empty list."""
    before = set(threading.enumerate())
    client = make_client(fleet)
    assert client.generate([]) == []
    assert client.start([]).result() == []
    assert set(threading.enumerate()) <= before
    assert all(not engine.state()["requests"] for engine in fleet.engines)


def test_the_constructor_does_nothing(make_client: MakeClient) -> None:
    """No connection, no thread, whatever is listening there."""
    before = set(threading.enumerate())
    with WireServer([]) as server:
        client = make_client([server.url, "http://host.invalid:1"])
        assert client.stats().admitted == 0
        assert server.accepted == 0
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "words"),
    [
        (["hello"], {}, TypeError, "wrap it in a list"),
        ([[5, 6, 7]], {}, TypeError, "wrap it in a list"),
        ([np.array([5, 6])], {}, TypeError, "wrap it in a list"),
        ([{"text": "a"}], {}, TypeError, "wrap it in a list"),
        ([[[]]], {}, ValueError, r"batch\[0\]: input_ids is empty"),
        ([[[5], [5, -1]]], {}, ValueError, r"batch\[1\]: input_ids\[1\] is -1"),
        ([[[5], [5, 40000]]], {}, ValueError, r"batch\[1\]: input_ids\[1\] is 40000, the vocabulary size"),
        ([[[5], [5.0]]], {}, TypeError, r"batch\[1\]: input_ids\[0\] is 5.0"),
        ([[""]], {}, ValueError, r"batch\[0\]: text is empty"),
        ([[{"text": "a", "input_ids": [1]}]], {}, ValueError, "exactly one"),
        ([[{"messages": []}]], {}, ValueError, "tokenizer"),
        ([[3.5]], {}, TypeError, "a prompt must be"),
        ([[[5]], {"n": 2}], {}, ValueError, r"pass n= to the call"),
        ([[[5]], {"temperature": float("nan")}], {}, ValueError, "temperature"),
        ([[[5]], {"max_tokens": 1, "max_new_tokens": 1}], {}, ValueError, "same thing"),
        ([[[5]], {"max_tokenz": 1}], {}, ValueError, "max_tokenz"),
        ([[[5]]], {"n": 0}, ValueError, "n must be"),
        ([[[5]]], {"n": True}, TypeError, "n must be"),
        ([[[5]]], {"timeout": 0}, ValueError, "timeout"),
        ([[[5]]], {"on_error": "ignore"}, ValueError, "on_error"),
        ([[[5]]], {"rid": "mine"}, ValueError, "rid"),
        ([[[5]]], {"stream": True}, ValueError, "stream"),
        ([[[5]]], {"priority": 1.5}, TypeError, "priority"),
        ([[[5]]], {"custom": object()}, TypeError, "custom"),
    ],
)
def test_bad_input_sends_nothing(
    fleet: SimFleet,
    make_client: MakeClient,
    arguments: list[Any],
    options: dict[str, Any],
    kind: type[Exception],
    words: str,
) -> None:
    """The error names what is wrong, and no engine has heard of it."""
    client = make_client(fleet)
    with pytest.raises(kind, match=words):
        client.generate(*arguments, **options)
    assert calls(fleet, "/generate") == 0
    assert client.stats().admitted == 0


# --- failures ---------------------------------------------------------------------------------------------------------


def fails_for(*bad: int) -> Callable[[Request, int], Script]:
    """A story in which prompts with these first ids are refused."""

    def story(request: Request, number: int) -> Script:
        return error_answer("400 Bad Request") if _first_id(request) in bad else good(request, number)

    return story


def _first_id(request: Request) -> int:
    import json

    return int(json.loads(request.body)["input_ids"][0])


@pytest.fixture
def some_fail() -> Iterator[ScriptedEngine]:
    """An engine that refuses the prompts 7 and 8."""
    with ScriptedEngine(fails_for(7, 8)) as engine:
        yield engine


def test_on_error_auto_returns_and_warns_once(
    some_fail: ScriptedEngine, make_client: MakeClient, warnings: Callable[[], list[str]]
) -> None:
    """Every sample comes back; one WARNING counts the failed ones."""
    samples = make_client(some_fail.url).generate([[6], [7], [8], [9]], n=2)
    assert [sample.status.value for sample in samples] == ["TRUNCATED"] * 2 + ["FAILED"] * 4 + ["TRUNCATED"] * 2
    assert isinstance(samples[2].error, EngineHTTPError)
    assert (samples[2].error.status, samples[2].error.message) == (400, "POST /generate answered 400: no")
    assert len(warnings()) == 1
    assert "4 of 8 samples failed" in warnings()[0]


def test_on_error_auto_raises_if_all_failed(some_fail: ScriptedEngine, make_client: MakeClient) -> None:
    """Then the set-up is wrong; the complete list is on the error."""
    with pytest.raises(BatchError, match=r"2 of 2 samples failed; the first: .*400: no") as caught:
        make_client(some_fail.url).generate([[7], [8]])
    assert [sample.index for sample in caught.value.samples] == [0, 1]
    assert caught.value.counts == {"FAILED": 2}
    again = pickle.loads(pickle.dumps(caught.value))
    assert (len(again.samples), again.counts, str(again)) == (2, {"FAILED": 2}, str(caught.value))


def test_on_error_return_never_raises_and_raise_always_does(some_fail: ScriptedEngine, make_client: MakeClient) -> None:
    """The explicit choices."""
    client = make_client(some_fail.url)
    assert [sample.status for sample in client.generate([[7]], on_error="return")] == [Status.FAILED]
    with pytest.raises(BatchError) as caught:
        client.generate([[6], [7]], on_error="raise")
    assert caught.value.counts == {"TRUNCATED": 1, "FAILED": 1}
    assert client.generate([[6]], on_error="raise")[0].status is Status.TRUNCATED


def test_failed_samples_can_be_passed_back(make_client: MakeClient) -> None:
    """B14: the failed ones of a batch go in again as they are."""
    with ScriptedEngine(lambda request, number: fails_for(7)(request, 0) if number < 2 else good(request)) as engine:
        client = make_client(engine.url)
        samples = client.generate([{"input_ids": [7], "metadata": {"a": 1}}, [6]])
        assert [sample.status.value for sample in samples] == ["FAILED", "TRUNCATED"]
        again = client.generate(samples)
        assert [sample.status.value for sample in again] == ["TRUNCATED", "TRUNCATED"]
        assert again[1] is samples[1]
        assert again[0].metadata == {"a": 1}


# --- submit, sharing, copies ------------------------------------------------------------------------------------------


def test_submit(fleet: SimFleet, make_client: MakeClient) -> None:
    """A future of one sample."""
    futures = [make_client(fleet).submit(ids, params(4)) for ids in prompts(3)]
    for ids, future in zip(prompts(3), futures, strict=True):
        check_sample(future.result(10.0), ids, 4)


def test_cancel_aborts(fleet: SimFleet, make_client: MakeClient) -> None:
    """cancel() does not wait; the result is the partial; the engine stops."""
    client = make_client(fleet)
    future = client.submit([5, 6], ENDLESS)
    eventually(lambda: any(row["tokens"] > 3 for row in generations(fleet)), "it runs")
    assert future.cancel()
    sample = future.result(5.0)
    assert sample.status is Status.ABORTED
    assert len(sample.output_ids) > 0
    assert not future.cancel()
    assert [row["state"] for row in generations(fleet)] == ["aborted"]


def test_a_pickled_client_works(fleet: SimFleet, make_client: MakeClient) -> None:
    """Settings travel, also those of a session; sockets and threads do not."""
    session = requests.Session()
    session.headers["X-Team"] = "rl"
    client = make_client(fleet, session=session, engine_concurrency=7)
    client.generate([[5]], params(2))
    copy: RolloutClient = pickle.loads(pickle.dumps(client))
    with copy:
        check_sample(copy.generate([[5]], params(2))[0], [5], 2)
        assert [status.limit for status in copy.engines()] == [7] * 4
    assert client.generate([[5]], params(2))[0].error is None


def test_stats_are_consistent_under_load(fleet: SimFleet, make_client: MakeClient) -> None:
    """At every look: admitted = open + ended; in the end the counts are the samples'."""
    client = make_client(fleet)
    running = [in_thread(lambda: client.generate(prompts(40), params(20))) for _ in range(3)]
    looks = 0
    while not all(future.done() for future in running):
        stats = client.stats()
        ended = stats.completed + stats.truncated + stats.aborted + stats.failed
        assert stats.admitted == stats.open + ended
        looks += 1
    assert looks > 3
    tokens = sum(len(sample.output_ids) for future in running for sample in future.result())
    stats = client.stats()
    assert (stats.admitted, stats.open, stats.truncated, stats.waiting, stats.tokens) == (120, 0, 120, 0, tokens)
    assert sum(engine.requests for engine in stats.engines.values()) == 120
    assert sum(engine.tokens for engine in stats.engines.values()) == tokens
    assert stats.gate == "open"


def test_threads_share_a_client(fleet: SimFleet, make_client: MakeClient) -> None:
    """Sixteen threads, each gets its own samples."""
    client = make_client(fleet)
    calls_made = [in_thread(lambda at=at: client.generate([[100 + at, 4]] * 3, params(3))) for at in range(16)]  # type: ignore[misc]
    for at, call in enumerate(calls_made):
        for sample in call.result(20.0):
            check_sample(sample, [100 + at, 4], 3)
    assert Counter(row["state"] for row in generations(fleet)) == {"finished": 48}


def test_a_closed_client(fleet: SimFleet, make_client: MakeClient) -> None:
    """Every verb says so; close is idempotent; stats still answer."""
    client = make_client(fleet)
    client.generate([[5]], params(2))
    assert client.close() == []
    assert client.close() == []
    verbs: list[Callable[[], object]] = [
        lambda: client.generate([[5]]),
        lambda: client.generate([]),
        lambda: client.start([[5]]),
        lambda: client.submit([5]),
        client.abort_until_idle,
        client.pause,
        client.resume,
        client.flush_cache,
        client.engines,
        client.loads,
        lambda: client.control("/x"),
        lambda: client.add_engine("http://127.0.0.1:1"),
        lambda: client.remove_engine(fleet[0]),
    ]
    for verb in verbs:
        with pytest.raises(ClientClosedError):
            verb()
    assert client.stats().truncated == 1


def test_a_client_closed_before_its_first_verb(make_client: MakeClient) -> None:
    """Closing what never began is fine; it stays closed."""
    client = make_client("http://127.0.0.1:1")
    assert client.close() == []
    with pytest.raises(ClientClosedError):
        client.generate([[5]])
