"""SGLang's own router has simulated engines as its workers, and the client has the router as its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rolloutsync import NotIdleError, ProtocolError, RolloutClient, Status
from rolloutsync.sim import SimConfig, SimFleet
from rolloutsync.sim.tokens import expected_tokens
from tests.client.kit import check_sample, params, prompts
from tests.real.kit import KitError
from tests.sim.kit import until

from . import router
from .router import LOOPBACK, Router

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MakeClient = Callable[..., RolloutClient]
# The router of this release asks for loads where newer engines do not tell them any more.
VERSIONS = ("0.5.20", "0.5.23")


@pytest.fixture(scope="module")
def python(report: Callable[[str], None]) -> Path:
    """The interpreter that has the router."""
    try:
        return router.ensure(report)
    except KitError as error:
        pytest.fail(f"no router: {error}", pytrace=False)


@pytest.fixture(scope="module")
def engines() -> Iterator[SimFleet]:
    """Two engines of different releases."""
    fields: dict[str, Any] = {"tokens_per_second": 1000.0, "health_poll_s": 0.05, "routed_experts": (2, 2, 8)}
    with SimFleet(configs=[SimConfig(**fields, version=version) for version in VERSIONS]) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def front(python: Path, engines: SimFleet) -> Iterator[Router]:
    """The router before them."""
    with Router(python, engines.urls) as started:
        yield started


@pytest.fixture
def before_the_guard(front: Router, engines: SimFleet) -> None:
    """Router and engines outlive a test, which finds both engines there and their ledgers empty."""
    until(front.healthy, lambda healthy: healthy == set(engines), "two healthy engines")
    for engine in engines.engines:
        engine.reset()


def calls(engines: SimFleet, path: str) -> list[int]:
    """How often a path of each engine was called."""
    return [engine.state()["requests"].get(path, 0) for engine in engines.engines]


def post(front: Router, path: str, body: Any = None) -> Any:
    """The decoded answer to a POST, which must be a 200."""
    answer = front.session.post(front.url + path, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_nothing_of_it_can_be_reached_from_elsewhere(front: Router) -> None:
    """Neither its front nor its metrics."""
    assert front.listening() == {(LOOPBACK, port) for port in front.ports}


def test_it_takes_the_engines_for_sglang(front: Router, engines: SimFleet) -> None:
    """By their health and their infos, which it read on its own."""
    workers = front.session.get(f"{front.url}/workers", timeout=10).json()["workers"]
    assert {worker["url"] for worker in workers} == set(engines)
    assert {(worker["model_id"], worker["connection_mode"]) for worker in workers} == {("sim-model", "HTTP")}
    info = front.session.get(f"{front.url}/get_model_info", timeout=10).json()
    assert [info["model_path"], info["weight_version"]] == ["sim-model", "default"]


def test_generations_go_through(front: Router, engines: SimFleet) -> None:
    """In turns, with our ids and the engines' own tokens."""
    for number in range(6):
        ids = [3 + number, 7, 8]
        sampling = {"max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 4}
        body = {"rid": f"r{number}", "input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        answer = post(front, "/generate", body)
        assert answer["output_ids"] == expected_tokens(ids, 5, seed=4)
        assert answer["meta_info"]["id"] == f"r{number}"
        assert len(answer["meta_info"]["output_token_logprobs"]) == 5
    assert calls(engines, "/generate") == [3, 3]


def test_openai_calls_go_through(front: Router, engines: SimFleet) -> None:
    """Completions and chats, whole and streamed: the router reads and writes both."""
    completion = {"model": "sim-model", "prompt": "once", "max_tokens": 5}
    chat = {"model": "sim-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    assert post(front, "/v1/completions", completion)["usage"]["completion_tokens"] == 5
    assert post(front, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        answer = front.session.post(front.url + path, json=body | {"stream": True}, timeout=30)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith("data: [DONE]\n\n")
    assert sum(calls(engines, "/v1/completions") + calls(engines, "/v1/chat/completions")) == 4


def test_caches_and_loads_of_all(front: Router, engines: SimFleet) -> None:
    """One call reaches every engine; the newer one has no `/get_load` for it, and it says so."""
    assert post(front, "/flush_cache")["workers_flushed"] == 2
    assert calls(engines, "/flush_cache") == [1, 1]
    loads = front.session.get(f"{front.url}/get_loads", timeout=10).json()["workers"]
    assert {row["worker"]: row["load"] for row in loads} == dict(zip(engines, (0, -1), strict=True))


def test_the_client_generates_through_it(front: Router, engines: SimFleet, make_client: MakeClient) -> None:
    """Every sample is what the engines must have said; both took part."""
    batch = prompts(12)
    samples = make_client(front.url).generate(batch, params(8), n=2)
    for sample in samples:
        check_sample(sample, batch[sample.index])
        assert sample.engine == front.url
    assert sum(calls(engines, "/generate")) == 24
    assert min(calls(engines, "/generate")) > 0


def test_idle_cannot_be_proven_through_it(front: Router, make_client: MakeClient) -> None:
    """This router forwards neither loads nor aborts: what cannot be read is not idle, and the client says so."""
    client = make_client(front.url)
    client.generate(prompts(2), params(4))
    with pytest.raises(NotIdleError, match=front.url):
        client.abort_until_idle(timeout=1.0)


def test_an_engine_dies_and_comes_back(front: Router, engines: SimFleet, make_client: MakeClient) -> None:
    """The router's 500s are retried until it finds the living one; then it takes the new one in."""
    client, batch = make_client(front.url), prompts(8)
    engines.engines[0].kill()
    samples = client.generate(batch, params(8))
    for sample in samples:
        check_sample(sample, batch[sample.index])
    assert max(sample.attempts for sample in samples) > 1
    until(front.healthy, lambda healthy: healthy == {engines[1]}, "one healthy engine")
    assert {sample.attempts for sample in client.generate(batch, params(8))} == {1}
    engines.engines[0].restart()
    until(front.healthy, lambda healthy: healthy == set(engines), "both engines healthy")
    client.generate(batch, params(8))
    assert calls(engines, "/generate")[0] > 0


def test_the_router_drops_what_it_does_not_know(front: Router, engines: SimFleet, make_client: MakeClient) -> None:
    """Routed experts that were asked for and did not come are an error of the sample, never an empty array."""
    fields: dict[str, Any] = {"return_routed_experts": True, "on_error": "return"}
    (direct,) = make_client(engines[0]).generate([[5, 6]], params(4), **fields)
    assert direct.routed_experts is not None
    (sample,) = make_client(front.url).generate([[5, 6]], params(4), **fields)
    assert sample.status is Status.FAILED
    with pytest.raises(ProtocolError, match="no routed_experts in the answer"):
        raise sample.error or AssertionError(sample)
