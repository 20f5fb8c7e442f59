"""B06, B08, B09, B24, B26: answers that break off, and whole answers that cannot be right."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from rolloutsync import EngineAbortError, ProtocolError, Sample, Status, TransportError
from rolloutsync.errors import Phase
from tests.client.kit import ScriptedEngine, body_of, completion, prompts
from tests.faults.kit import (
    IMPATIENT,
    MakeClient,
    check,
    check_all,
    check_failed,
    echo,
    echo_body,
    of_prompt,
)
from tests.kernel import client_states
from tests.steps import answer_packed
from tests.wire import (
    Request,
    Script,
    answer,
    answer_chunked,
    answer_until_close,
    close,
    eventually,
    head_of,
    reset,
    send,
    truncated,
)

Broken = Callable[[Request], Script]

# What never was a whole answer on the wire.
CUT_SHORT: dict[str, Broken] = {
    "short of its length": lambda request: [truncated(echo_body(request), 60), close],
    "reset within": lambda request: [truncated(echo_body(request), 60), reset],
    "length and no body": lambda request: [truncated(echo_body(request), 0), close],
    "no last chunk": lambda request: [answer_chunked(echo_body(request), last=False), close],
    "half a chunk": lambda request: [answer_chunked(b"{", last=False), send(b"ff\r\n{"), close],
    "no chunk at all": lambda request: [send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnone\r\n"), close],
    "a head without end": lambda request: [send(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n{}"), close],
    "too many headers": lambda request: [send(b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 300 + b"\r\n{}"), close],
    "two lengths": lambda request: [
        send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\n{}"),
        close,
    ],
    "another protocol": lambda request: [send(b"SSH-2.0-OpenSSH_9.6\r\n"), close],
    "bad gzip": lambda request: [send(head_of(b"01234", "200 OK", "Content-Encoding: gzip") + b"01234"), close],
}

# Whole on the wire, as far as anybody can tell, and no answer.
NO_ANSWER: dict[str, Broken] = {
    "cut where nobody counts": lambda request: [answer_until_close(echo_body(request)[:60]), close],
    "cut gzip": lambda request: [answer_packed(echo_body(request), cut=40)],
    "a length too short": lambda request: [answer(echo_body(request), length=60)],
    "empty": lambda request: [answer(b"")],
    "no content": lambda request: [answer(b"", "204 No Content")],
    "without a bottom": lambda request: [answer(b"[" * 200_000)],
    "a page": lambda request: [answer(b"<html>Bad Gateway</html>")],
    "null": lambda request: [answer(b"null")],
    "a string": lambda request: [answer(b'"ok"')],
    "a number": lambda request: [answer(b"7")],
    "no meta_info": lambda request: [answer(b'{"text": "x", "output_ids": [1]}')],
    "empty list": lambda request: [answer(b"[]")],
    "two answers": lambda request: [answer(b"[" + echo_body(request) + b"," + echo_body(request) + b"]")],
    "another's id": lambda request: [answer(changed(request, id="0" * 32))],
    "an error": lambda request: [answer(b'{"error": {"message": "out of luck"}}')],
    "an error object": lambda request: [answer(b'{"object": "error", "message": "out of luck", "code": 400}')],
    "fewer logprobs": lambda request: [answer(changed(request, output_token_logprobs=[[-0.5, 1, None]]))],
    "no logprobs": lambda request: [answer(changed(request, output_token_logprobs=None))],
    "logprobs of others": lambda request: [answer(changed(request, output_token_logprobs=[[-0.5, 9, None]] * 3))],
    "another count": lambda request: [answer(changed(request, completion_tokens=2))],
    "unknown finish": lambda request: [answer(changed(request, finish_reason={"type": "retired"}))],
    "no finish": lambda request: [answer(changed(request, finish_reason=None))],
    "NaN": lambda request: [answer(with_logprob(request, "NaN"))],
    "-Infinity": lambda request: [answer(with_logprob(request, "-Infinity"))],
    "null logprob": lambda request: [answer(with_logprob(request, "null"))],
}
WORDS = {
    "two answers": "not a completion",
    "another's id": "another request's id",
    "an error": "out of luck",
    "an error object": "out of luck",
    "fewer logprobs": "3 output_ids but 1 output_token_logprobs",
    "logprobs of others": "other tokens",
    "another count": "completion_tokens is 2",
    "unknown finish": "unknown finish_reason 'retired'",
    "no finish": "no finish_reason",
    "NaN": "NaN",
    "-Infinity": "NaN, null or infinite",
    "null logprob": "NaN, null or infinite",
    "a page": "Bad Gateway",
}


def changed(request: Request, **meta: Any) -> bytes:
    """A whole answer with other meta_info."""
    whole = json.loads(echo_body(request))
    whole["meta_info"].update(meta)
    return json.dumps(whole).encode()


def with_logprob(request: Request, literal: str) -> bytes:
    """A whole answer whose first logprob is this literal."""
    return echo_body(request).replace(b"[[-0.5,", f"[[{literal},".encode(), 1)


@pytest.mark.parametrize("name", [*CUT_SHORT, *NO_ANSWER])
def test_a_broken_answer_is_asked_for_again(client_to: MakeClient, name: str) -> None:
    """B06, B08, B09: its id is aborted first, its socket is not used again, and the neighbour notices nothing."""
    broken = {**CUT_SHORT, **NO_ANSWER}[name]
    turns = iter([True])
    with ScriptedEngine(
        of_prompt(7, lambda request, _: broken(request) if next(turns, False) else echo(request))
    ) as engine:
        samples = client_to(engine.url).generate([[7, 8], [5, 6]])
        check(samples[0], [7, 8], attempts=2)
        check(samples[1], [5, 6])
        first, second = [body["rid"] for body in engine.bodies() if body["input_ids"] == [7, 8]]
        assert (engine.aborted(), samples[0].rid) == ([first], second)
        told = [request for request in engine.server.requests if body_of(request).get("rid") in {first, second}]
        assert [request.path for request in told] == ["/generate", "/abort_request", "/generate"]
        if "finish" not in name:  # there the id was right, so the socket is in step
            assert told[0].connection != told[2].connection


@pytest.mark.parametrize("name", CUT_SHORT)
def test_answers_that_always_break_off(client_to: MakeClient, name: str) -> None:
    """B06: five attempts (the default; its backoff overridden), all aborted, then this sample alone is FAILED."""
    with ScriptedEngine(of_prompt(7, lambda request, _: CUT_SHORT[name](request))) as engine:
        samples = client_to(engine.url, retry=IMPATIENT).generate([[7, 8], [5, 6]])
        check_failed(samples[0], TransportError, "/generate", Phase.BODY.value, attempts=5)
        check(samples[1], [5, 6])
        assert len(set(engine.aborted())) == 5
        eventually(lambda: len(client_states(engine.server.port)) <= 3, "no broken socket is kept")


@pytest.mark.parametrize("name", NO_ANSWER)
def test_answers_that_never_are_right(client_to: MakeClient, name: str) -> None:
    """B08, B09, B24: once more, then FAILED with the engine's words; nothing is padded or passed on."""
    with ScriptedEngine(of_prompt(7, lambda request, _: NO_ANSWER[name](request))) as engine:
        samples = client_to(engine.url).generate([[7, 8], [5, 6]])
        check_failed(samples[0], ProtocolError, WORDS.get(name, ""), attempts=2)
        check(samples[1], [5, 6])
        assert len(engine.rids()) == len(set(engine.rids())) == 3


def test_an_abort_by_the_engine_itself(client_to: MakeClient) -> None:
    """B09: finish_reason abort with a status code, which nobody asked for: an error, tried once, resumed never."""
    reason = {"type": "abort", "message": "input too long", "status_code": 400}
    story = of_prompt(7, lambda request, _: [answer(completion(request, ids=[1], finish_reason=reason))])
    with ScriptedEngine(story) as engine:
        samples = client_to(engine.url).generate([[7, 8], [5, 6]])
        assert (samples[0].status, samples[0].attempts) == (Status.FAILED, 1)
        assert isinstance(samples[0].error, EngineAbortError)
        assert "input too long" in str(samples[0].error)
        check(samples[1], [5, 6])
        assert engine.aborted() == []


# --- what is odd and harmless -----------------------------------------------------------------------------------------

HARMLESS: dict[str, Callable[[Request], bytes]] = {
    "a lone surrogate": lambda request: echo_body(request).replace(b'"xxx"', b'"a\\ud83d"'),
    "half a character": lambda request: echo_body(request).replace(b'"xxx"', '"\ufffd"'.encode()),
    "NaN elsewhere": lambda request: echo_body(request).replace(b'"prompt_tokens"', b'"latency": NaN, "prompt_tokens"'),
    "a byte order mark": lambda request: b"\xef\xbb\xbf" + echo_body(request),
    "a list of one": lambda request: b"[" + echo_body(request) + b"]",
    "no id": lambda request: changed(request, id=None),
    "unknown fields": lambda request: changed(request, something={"new": [1, 2]}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_is_decoded(client_to: MakeClient, name: str) -> None:
    """B08, B24: token ids are the truth; the sample can be logged, pickled and written as UTF-8 and as JSON."""
    with ScriptedEngine(lambda request, _: [answer(HARMLESS[name](request))]) as engine:
        sample = client_to(engine.url).generate([[5, 6]])[0]
        assert (sample.status, sample.attempts, sample.output_ids.tolist()) == (Status.TRUNCATED, 1, [1005, 2, 2006])
        assert sample.text.encode().decode() == sample.text
        assert pickle.loads(pickle.dumps(sample)).text == sample.text
        again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
        assert (again.text, again.output_ids.tolist()) == (sample.text, [1005, 2, 2006])
        logging.getLogger("tests").info("%s", sample)


FRAMINGS: dict[str, Callable[[bytes], Script]] = {
    "http 1.0": lambda body: [send(b"HTTP/1.0 200 OK\r\n\r\n" + body), close],
    "until close": lambda body: [answer_until_close(body), close],
    "chunked": lambda body: [answer_chunked(body[:7], body[7:])],
    "packed": lambda body: [answer_packed(body)],
    "created": lambda body: [answer(body, "201 Created")],
    "a strange length": lambda body: [send(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n" + body), close],
}


@pytest.mark.parametrize("name", FRAMINGS)
def test_every_framing_of_a_whole_answer(client_to: MakeClient, name: str) -> None:
    """B06: however it is wrapped, twice in a row."""
    with ScriptedEngine(lambda request, _: FRAMINGS[name](echo_body(request))) as engine:
        client = client_to(engine.url)
        check(client.generate([[5, 6]])[0], [5, 6])
        check(client.generate([[7, 8]])[0], [7, 8])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_nonsense_is_not_sent(client_to: MakeClient, value: float) -> None:
    """B08 e: a temperature that JSON cannot say is refused before anything is sent."""
    with ScriptedEngine(echo) as engine:
        with pytest.raises(ValueError, match="temperature"):
            client_to(engine.url).generate([[5]], {"temperature": value})
        assert engine.server.paths() == []


def test_n_inside_the_sampling_parameters(client_to: MakeClient) -> None:
    """B24: refused with a clear error; n= makes requests of their own, answered in order."""
    with ScriptedEngine(echo) as engine:
        client = client_to(engine.url)
        with pytest.raises(ValueError, match=r"sampling_params\['n'\] is 3"):
            client.generate([[5]], {"n": 3})
        samples = client.generate([[5, 6], [7, 8]], n=3)
        check_all(samples, [[5, 6]] * 3 + [[7, 8]] * 3)
        assert [(sample.index, sample.member) for sample in samples] == [(i, m) for i in range(2) for m in range(3)]
        assert len(set(engine.rids())) == 6


def test_a_batch_of_mixed_faults(client_to: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """B14: 64 samples; one prompt is always reset, one always gets 500, one no JSON: the other 61 are complete."""
    batch = prompts(64)
    stories: dict[int, Script] = {20: [reset], 33: [answer(b'{"error": "oops"}', "500 Oops")], 44: [answer(b"{")]}
    with ScriptedEngine(lambda request, _: stories.get(body_of(request)["input_ids"][0]) or echo(request)) as engine:
        client = client_to(engine.url, retry=IMPATIENT)
        samples = client.generate(batch)
        failed = [sample for sample in samples if sample.status is Status.FAILED]
        assert [(sample.index, sample.attempts) for sample in failed] == [(17, 5), (30, 5), (41, 2)]
        for sample, prompt in zip(samples, batch, strict=True):
            if sample not in failed:
                check(sample, prompt)
        assert sum("3 of 64 samples failed" in message for message in warnings()) == 1
        stories.clear()
        check_all(client.generate(failed), [batch[17], batch[30], batch[41]])
