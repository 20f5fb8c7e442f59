"""What the fault tests share: answers that echo their prompt, checks of samples and of errors, elapsed time."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rolloutsync import RetryPolicy, RolloutClient, RolloutError, Sample, Status
from tests.client.kit import ScriptedEngine, body_of, completion
from tests.kernel import client_states
from tests.wire import Request, Script, WireServer, answer, eventually

MakeClient = Callable[..., RolloutClient]
IMPATIENT = RetryPolicy(backoff_base_s=0.02, backoff_cap_s=0.05)  # where five attempts are to be waited for


def echo_ids(prompt: Sequence[int]) -> list[int]:
    """The continuation that every engine here gives: nobody else's prompt has it."""
    return [prompt[0] + 1000, len(prompt), prompt[-1] + 2000]


def echo(request: Request, _: int = 0) -> Script:
    """A whole answer that says whose it is."""
    return [answer(echo_body(request))]


def echo_body(request: Request) -> bytes:
    return completion(request, ids=echo_ids(body_of(request)["input_ids"]))


def first_then(*stories: Script) -> Callable[[Request, int], Script]:
    """These steps for the first requests, then whole answers."""
    return lambda request, number: stories[number] if number < len(stories) else echo(request)


def first_of_each(*stories: Script) -> Callable[[Request, int], Script]:
    """For each of ``prompts(...)`` these steps in turn, the first time that it comes; then whole answers."""
    due = dict(enumerate(stories, start=3))  # by the first id of the prompt
    return lambda request, _: due.pop(body_of(request)["input_ids"][0], None) or echo(request)


def of_prompt(first: int, story: Callable[[Request, int], Script]) -> Callable[[Request, int], Script]:
    """A story for the prompt that begins with this id; whole answers for all others."""
    return lambda request, number: (
        story(request, number) if body_of(request)["input_ids"][0] == first else echo(request)
    )


def check(sample: Sample, prompt: Sequence[int], *, attempts: int = 1) -> None:
    """A whole sample, which is this prompt's own, after so many attempts."""
    assert sample.error is None
    assert (sample.status, sample.attempts) == (Status.TRUNCATED, attempts)
    assert sample.output_ids.tolist() == echo_ids(prompt)
    assert sample.logprobs is not None
    assert sample.logprobs.tolist() == np.full(3, -0.5, np.float32).tolist()
    assert sample.meta_info["id"] == sample.rid


def check_all(samples: Sequence[Sample], batch: Sequence[Sequence[int]], *, attempts: int | None = 1) -> None:
    """All of them, in input order; with None, after however many attempts it took."""
    for sample, prompt in zip(samples, batch, strict=True):
        check(sample, prompt, attempts=sample.attempts if attempts is None else attempts)


def check_failed(sample: Sample, kind: type[RolloutError], *words: str, attempts: int) -> None:
    """A failed sample: nothing generated, and an error that a person can use and that travels."""
    error = sample.error
    assert error is not None
    assert (sample.status, sample.attempts, len(sample.output_ids)) == (Status.FAILED, attempts, 0)
    assert sample.reward is None
    assert type(error) is kind
    text = str(error)
    counted = [f"attempts={attempts}"] if attempts else []
    for word in (*words, f"engine={sample.engine}", f"rid={sample.rid}", *counted):
        assert word in text
    assert len(text.encode()) < 2000
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, text)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block takes no longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took <= seconds, f"it took {took:.2f} s"


def unused_url() -> str:
    """A loopback URL where nobody listens."""
    with WireServer([]) as server:
        return server.url


def order_of(engine: ScriptedEngine, *paths: str) -> list[str]:
    """Requests to these paths, in the order of their arrival."""
    return [path for path in engine.server.paths() if path in paths]


def await_parting(port: int) -> None:
    """The server has ended its idle connections and the kernel has heard of it: none can be reused by mistake."""
    eventually(lambda: "ESTABLISHED" not in client_states(port), "the server's FIN has come")
