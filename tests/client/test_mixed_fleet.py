"""One client, one batch, SGLang and vLLM engines side by side."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rolloutsync import EngineState, IdleState, Status, UnsupportedError, WeightUpdateError
from rolloutsync.sim import Fault, SimConfig, SimFleet
from rolloutsync.sim.fleet import SimEngine
from rolloutsync.sim.tokens import expected_tokens
from tests.client.kit import ENDLESS, check_sample, params, prompts
from tests.client.vllmkit import MakeClient, await_tokens
from tests.wire import eventually


@dataclass
class Mixed:
    """An engine of each kind."""

    engines: list[SimEngine]

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]


@pytest.fixture
def mixed(fleet: SimFleet, newest: SimEngine) -> Mixed:
    """As new."""
    return Mixed([fleet.engines[0], newest])


def test_one_batch(mixed: Mixed, make_client: MakeClient) -> None:
    """Both have a share of it, and nobody can tell from the samples which."""
    client = make_client(mixed.urls)
    for sample, ids in zip(client.generate(prompts(24), params(12)), prompts(24), strict=True):
        check_sample(sample, ids, 12)
    shares = [engine.state()["started"] for engine in mixed.engines]
    assert sum(shares) == 24
    assert all(shares)
    assert [status.dialect for status in client.engines()] == ["sglang", "vllm"]


def test_a_drain_and_partials_that_change_sides(mixed: Mixed, make_client: MakeClient) -> None:
    """Each engine is proven idle in its own way; what one began the other may end."""
    client = make_client(mixed.urls)
    job = client.start(prompts(8), params(400))
    for engine in mixed.engines:
        await_tokens(engine, 4)
    report = client.abort_until_idle(10.0)
    assert [drain.state for drain in report.engines] == [IdleState.IDLE] * 2
    assert [bool(drain.basis) for drain in report.engines] == [False, True]
    partials = job.result()
    assert {sample.status for sample in partials} == {Status.ABORTED}
    client.remove_engine(mixed.urls[0])
    for sample, ids in zip(client.generate(partials), prompts(8), strict=True):
        check_sample(sample, ids, 400)


def test_what_only_one_kind_has(mixed: Mixed, make_client: MakeClient) -> None:
    """An error of those samples that come to the other, by name; modes that one lacks are refused for all."""
    client = make_client(mixed.urls)
    (served,) = client.generate(prompts(1), params(4, stop_regex="x"))
    assert served.engine == mixed.urls[0]
    with client.start(prompts(1), params(5000)):  # the first is busy, so that the next goes to the second
        eventually(lambda: client.engines()[0].in_flight == 1, "it runs")
        (sample,) = client.generate(prompts(1), params(4, stop_regex="x"), on_error="return")
    assert isinstance(sample.error, UnsupportedError)
    assert sample.error.engine == mixed.urls[1]
    for mode, kind in (("retract", "abort.*hold.*wait"), ("wait", "abort.*hold.*retract")):
        with pytest.raises(ValueError, match=rf"mode must be one of \('{kind}'\), got '{mode}'"):
            client.quiesced(mode)
    client.pause("in_place")
    assert [engine.state()["paused"] for engine in mixed.engines] == [True, True]
    client.resume()


def test_weights(mixed: Mixed, make_client: MakeClient) -> None:
    """From disk, under one label; a broadcast cannot reach both kinds, and is refused at once."""
    client = make_client(mixed.urls)
    report = client.update_weights_from_disk("ckpt/5", version="5")
    assert {engine.version for engine in report.engines} == {"5"}
    for sample, ids in zip(client.generate(prompts(4), params(4)), prompts(4), strict=True):
        assert sample.output_ids.tolist() == expected_tokens(ids, 4, version="5")
        assert [span.version for span in sample.weight_spans] == ["5"]
    with pytest.raises(WeightUpdateError, match="engines of several kinds cannot be in one weight group"):
        client.init_group("127.0.0.1", 29_500)


def test_one_that_dies(mixed: Mixed, make_client: MakeClient) -> None:
    """The other makes what it had."""
    client = make_client(mixed.urls)
    mixed.engines[1].add_fault(Fault(kind="status", status=503, times=4))
    for sample, ids in zip(client.generate(prompts(8), params(12)), prompts(8), strict=True):
        assert sample.error is None, ids
    job = client.start(prompts(2), ENDLESS)
    eventually(lambda: sum(engine.state()["running"] for engine in mixed.engines) == 2, "they run")
    job.abort()
    assert [status.state for status in client.engines()] == [EngineState.LIVE] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("sglang", "vllm"), ("vllm", "sglang")])
def test_another_kind_on_the_same_port(make_client: MakeClient, first: str, second: str) -> None:
    """It is found out by the first route that is not there; nothing fails, and drains prove idle."""
    with SimFleet(engines=1, dialect=first, tokens_per_second=1000.0) as fleet:
        port, url = fleet.engines[0].port, fleet.engines[0].url
        client = make_client(url)
        check_sample(client.generate([[5]], params(4))[0], [5], 4)
    with SimFleet(configs=[SimConfig(dialect=second, port=port, tokens_per_second=1000.0)]):
        check_sample(client.generate([[6]], params(4), timeout=20.0)[0], [6], 4)
        assert client.abort_until_idle(10.0).idle
        assert [engine.dialect for engine in client.engines()] == [second]
