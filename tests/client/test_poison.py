"""One bad prompt kills every engine that it reaches: it is found at the price of two engines, all others survive."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator

import pytest

from rolloutsync import PoisonPromptError, RetryPolicy, Sample, Status
from rolloutsync.sim import SimFleet
from tests.client.conftest import MakeClient
from tests.client.kit import ScriptedEngine, body_of, check_sample, good, params, prompts, quiet
from tests.wire import Request, Script, close, eventually, reset

BAD = 999_999  # outside every vocabulary; an engine dies of it


@pytest.fixture
def mortal() -> Iterator[SimFleet]:
    """Three engines that do not tell their vocabulary, and die of an id outside of it."""
    with SimFleet(engines=3, tokens_per_second=1000.0, max_running_requests=32) as fleet:
        yield fleet


def test_a_prompt_that_kills_engines(mortal: SimFleet, client_to: MakeClient) -> None:
    """One of 64 prompts, on three engines, with default settings: two die, 63 samples are what they must be."""
    client = client_to(mortal)
    batch = prompts(64)
    batch[20] = [5, BAD, 7]
    samples = client.generate(batch, params(8), on_error="return")
    error = samples[20].error
    assert isinstance(error, PoisonPromptError)
    assert len(set(error.engines)) == 2
    assert error.engine == error.engines[1]
    assert "sample 20/0 was on 2 engines when they died" in str(error)
    assert pickle.loads(pickle.dumps(error)).engines == error.engines
    for number, (sample, ids) in enumerate(zip(samples, batch, strict=True)):
        if number != 20:
            check_sample(sample, ids)
    eventually(lambda: [engine.alive for engine in mortal.engines].count(False) == 2, "two are dead")
    assert client.audit().balanced


class Mortal(ScriptedEngine):
    """Dies of a prompt that begins with 666, as soon as every request of the wave is there."""

    def __init__(self, wave: int = 1, **options: object) -> None:
        self.wave = wave
        self.seen: list[int] = []
        super().__init__(self._story, **options)  # type: ignore[arg-type]

    def _story(self, request: Request, number: int) -> Script:
        self.seen.append(body_of(request)["input_ids"][0])
        poisonous = 666 in self.seen
        if poisonous and len(self.seen) >= self.wave:
            return [lambda _: self.server.die(), reset]
        return quiet(request) if poisonous or self.wave > 1 else good(request)


def test_suspects_run_alone_and_are_cleared(make_client: MakeClient) -> None:
    """An engine dies by itself with eight requests on it: all eight are made elsewhere, never two at once."""
    together = Counter[str]()
    most: list[int] = []

    def counted(request: Request, number: int) -> Script:
        together["now"] += 1
        most.append(together["now"])
        return [*good(request)[:-1], lambda _: together.subtract(["now"]), good(request)[-1]]

    with Mortal(wave=8) as first, ScriptedEngine(counted) as second:
        client = make_client(first.url, engine_concurrency=8)
        batch = [*prompts(7), [666, 1, 2]]
        job = client.start(batch, params(2))
        eventually(lambda: len(first.seen) == 8, "all eight are on the first engine")
        client.add_engine(second.url)
        samples = job.result()
        assert {sample.status for sample in samples} == {Status.TRUNCATED}
        assert {sample.attempts for sample in samples} == {2}
        assert max(most) == 1
        assert len(set(second.rids())) == 8


def test_a_reset_connection_is_no_death(make_client: MakeClient) -> None:
    """The engine takes the abort of what broke: it lives, and nobody is a suspect."""

    def once(request: Request, number: int) -> Script:
        return [reset] if number == 0 else good(request)

    with ScriptedEngine(once) as engine:
        client = make_client(engine.url)
        sample = client.generate([[666, 1]], params(2))[0]
        assert (sample.status, sample.attempts) == (Status.TRUNCATED, 2)
        assert len(engine.aborted()) == 1


def test_no_death_is_counted_where_nothing_was_sent(make_client: MakeClient) -> None:
    """A refused connect says nothing about the prompt."""
    with ScriptedEngine() as gone, ScriptedEngine() as other:
        client = make_client([gone.url, other.url], engine_concurrency=1)
        client.engines()
        gone.close()
        samples = client.generate(prompts(4), params(2))
        assert {sample.attempts for sample in samples} == {1}


def test_a_closing_engine_is_no_poison(make_client: MakeClient) -> None:
    """One engine that closes every connection at once ends in five attempts and an error that says so."""

    def closes(request: Request, number: int) -> Script:
        return [close]

    with ScriptedEngine(closes) as engine:
        client = make_client(engine.url, retry=RetryPolicy(backoff_base_s=0.01, backoff_cap_s=0.02))
        sample: Sample = client.generate([[1, 2]], params(2), on_error="return")[0]
        assert sample.status is Status.FAILED
        assert not isinstance(sample.error, PoisonPromptError)
        assert sample.attempts == 5
