"""Wire faults of engines that speak vLLM, as far as they differ from SGLang's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from rolloutsync import EngineHTTPError, EngineState, PoisonPromptError, ProtocolError, RetryPolicy, Sample, Status
from tests.client.kit import QUICK, error_answer, prompts
from tests.faults.kit import MakeClient, check_failed, echo_ids
from tests.faults.vllm import ABORT, COMPLETIONS, DEAD, TOKENS, VllmEngine, echo, echo_body, prompt_of
from tests.wire import Request, Script, answer, close, eventually, reset, silence, truncated


def check_echo(samples: Sequence[Sample], batch: Sequence[Sequence[int]], *, attempts: int = 1) -> None:
    """Whole samples, each its own prompt's."""
    for sample, prompt in zip(samples, batch, strict=True):
        assert sample.error is None
        assert (sample.status, sample.attempts) == (Status.TRUNCATED, attempts)
        assert sample.output_ids.tolist() == echo_ids(prompt)
        assert sample.logprobs is not None
        assert sample.logprobs.tolist() == [-0.5] * 3


@pytest.mark.parametrize(
    "steps", [[reset], [close], [truncated(b"x" * 100, 50), close]], ids=["reset", "closed", "broken"]
)
def test_a_request_that_breaks_is_aborted_by_vllms_ids(steps: Script, client_to: MakeClient) -> None:
    """Under either name that it may have there, before it runs again under another."""
    first = lambda request, number: steps if number == 0 else echo(request)  # noqa: E731
    with VllmEngine(first) as engine:
        check_echo(client_to(engine.url).generate([[5, 6]]), [[5, 6]], attempts=2)
        old, new = engine.asked()
        assert engine.aborts() == [[f"generate-tokens-{old}", f"cmpl-{old}-0"]]
        assert new != old


def test_a_request_that_breaks_where_nobody_can_abort(client_to: MakeClient) -> None:
    """vLLM ends it by itself when its connection is gone; that is no reason to put the engine away."""
    missing = (ABORT, "/inference/v1/abort_requests")
    first = lambda request, number: [reset] if number == 0 else echo(request)  # noqa: E731
    with VllmEngine(first, missing=missing) as engine:
        client = client_to(engine.url)
        check_echo(client.generate([[5, 6]]), [[5, 6]], attempts=2)
        assert client.engines()[0].state is EngineState.LIVE


FORBIDDEN = b'{"error": {"message": "Scale-out endpoints are disabled. Restart vllm serve.", "code": 403}}'
NO_MODEL = b'{"error": {"message": "The model `nope` does not exist.", "type": "NotFoundError", "code": 404}}'


@pytest.mark.parametrize(
    "refusal", [("404 Not Found", b'{"detail": "Not Found"}'), ("403 Forbidden", FORBIDDEN)], ids=["404", "403"]
)
def test_a_route_that_is_not_there(refusal: tuple[str, bytes], client_to: MakeClient) -> None:
    """The next one is taken, within the same attempt and from then on."""
    story = lambda request, _: error_answer(*refusal) if request.path == TOKENS else echo(request)  # noqa: E731
    with VllmEngine(story) as engine:
        client = client_to(engine.url)
        check_echo(client.generate([[5, 6]]), [[5, 6]])
        check_echo(client.generate(prompts(4)), prompts(4))
        assert (engine.counts()[TOKENS], engine.counts()[COMPLETIONS]) == (1, 5)


@pytest.mark.parametrize(
    "body", [NO_MODEL, b'{"error": {"message": "prompt is longer than the maximum", "code": 400}}']
)
def test_a_refusal_of_the_request_is_final(body: bytes, client_to: MakeClient) -> None:
    """A 404 may also be about the model that was asked for: no other route knows it better."""
    status = "404 Not Found" if body is NO_MODEL else "400 Bad Request"
    with VllmEngine(lambda *_: error_answer(status, body)) as engine:
        (sample,) = client_to(engine.url).generate([[5]], on_error="return")
        assert isinstance(sample.error, EngineHTTPError)
        check_failed(sample, type(sample.error), json.loads(body)["error"]["message"], attempts=1)
        assert sum(engine.counts()[path] for path in (TOKENS, COMPLETIONS)) == 1


def neighbours(request: Request) -> bytes:
    return echo_body(request).replace(b"generate-tokens-", b"generate-tokens-0")


ODD: dict[str, tuple[Callable[[Request], bytes], str]] = {
    "another's": (neighbours, "another request's id"),
    "no logprobs": (lambda request: echo_body(request, logprobs=None), "3 token_ids but no logprobs"),
    "null logprobs": (lambda request: echo_body(request).replace(b"-0.5", b"null"), "is missing"),
    "fewer tokens": (lambda request: echo_body(request, token_ids=[1]), "1 token_ids but 3 logprobs"),
    "two choices": (
        lambda request: json.dumps(
            {**json.loads(echo_body(request)), "choices": json.loads(echo_body(request))["choices"] * 2}
        ).encode(),
        "not a completion",
    ),
    "an error": (lambda _: b'{"error": {"message": "out of memory", "code": 500}}', "out of memory"),
    "text": (lambda _: b"Internal Server Error", "not JSON"),
    "no end": (lambda request: echo_body(request, finish_reason=None), "no finish_reason"),
}


@pytest.mark.parametrize("name", ODD)
def test_answers_that_cannot_be_right(name: str, client_to: MakeClient) -> None:
    """Asked for once more, and then an error in the engine's words; never tokens with a made-up logprob."""
    make, words = ODD[name]
    with VllmEngine(lambda request, _: [answer(make(request))]) as engine:
        (sample,) = client_to(engine.url).generate([[5, 6]], on_error="return")
        check_failed(sample, ProtocolError, words, attempts=2)
        assert len(set(engine.asked())) == 2
    with VllmEngine(lambda request, number: [answer(make(request))] if number == 0 else echo(request)) as engine:
        check_echo(client_to(engine.url).generate([[5, 6]]), [[5, 6]], attempts=2)


def test_503_paused_uses_no_attempt(client_to: MakeClient) -> None:
    """B29: as 0.33 words it."""
    paused = b'{"error": {"message": "Generation is paused. Please retry after it resumes.", "code": 503}}'
    with VllmEngine(lambda request, number: error_answer("503", paused) if number < 1 else echo(request)) as engine:
        check_echo(client_to(engine.url).generate([[5, 6]]), [[5, 6]])
        assert len(engine.asked()) == 2
        assert engine.aborts() == []


class Mortal(VllmEngine):
    """Its core dies of a prompt that begins with 666; the server says so, and ends after the next look at it."""

    dead = False

    def _choose(self, request: Request) -> Script:
        if self.dead and request.path == "/health":
            return [answer(b"", "503 Service Unavailable"), lambda _: self.server.die()]
        if request.path in {TOKENS, COMPLETIONS} and prompt_of(request)[0] == 666:
            self.dead = True
        return error_answer("500 Internal Server Error", DEAD) if self.dead else super()._choose(request)


def test_a_prompt_that_kills_cores(client_to: MakeClient) -> None:
    """Its requests end with a 500, not with a broken connection. A death is one all the same; the second convicts."""
    with Mortal() as one, Mortal() as two, Mortal() as three:
        client = client_to([one.url, two.url, three.url], retry=QUICK)
        batch = [[666, 1], *prompts(6)]
        bad, *good = client.generate(batch, on_error="return")
        assert isinstance(bad.error, PoisonPromptError)
        assert len(set(bad.error.engines)) == 2
        assert {sample.status for sample in good} == {Status.TRUNCATED}
        assert sum(engine.dead for engine in (one, two, three)) == 2


def test_an_internal_error_is_no_death(client_to: MakeClient) -> None:
    """The engine is well by its own word; the sample is tried again."""
    oops = error_answer("500 Internal Server Error", b'{"error": {"message": "oops", "code": 500}}')
    with VllmEngine(lambda request, number: oops if number == 0 else echo(request)) as engine:
        client = client_to(engine.url, retry=QUICK)
        (sample,) = client.generate([[5, 6]], on_error="return")
        assert (sample.attempts, engine.counts()["/health"]) == (2, 2)
        assert client.engines()[0].state is EngineState.LIVE


def test_an_abort_without_an_answer(client_to: MakeClient) -> None:
    """The sample moves on after five seconds at most; the engine comes back when it is proven idle."""
    first = lambda request, number: [reset] if number == 0 else echo(request)  # noqa: E731
    with VllmEngine(first, others={ABORT: [silence]}) as engine, VllmEngine() as other:
        client = client_to([engine.url, other.url], retry=RetryPolicy(orphan_abort_timeout_s=0.2))
        check_echo(client.generate([[5, 6]]), [[5, 6]], attempts=2)
        assert client.engines()[0].state is EngineState.QUARANTINED
        engine._others = {}
        eventually(lambda: client.engines()[0].state is EngineState.LIVE, "it is back")
