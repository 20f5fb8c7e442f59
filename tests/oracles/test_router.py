"""SGLang's own router has simulated engines as its workers, and the client follows it to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rolloutsync import (
    EngineHTTPError,
    MemberChanges,
    RolloutClient,
    Sample,
    Status,
    UnsupportedError,
    WrongServerError,
)
from rolloutsync.dialects.sglang import SAMPLING_RULES
from rolloutsync.routers import lost, read_listing
from rolloutsync.sim import SimConfig, SimFleet
from rolloutsync.sim.tokens import expected_tokens
from tests.client.kit import ENDLESS, QUICK, SHORT, ScriptedEngine, check_sample, params, prompts
from tests.real.kit import KitError
from tests.sim.kit import until

from . import router
from .router import FLAGS, LOOPBACK, Router

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
MakeClient = Callable[..., RolloutClient]
SIM: dict[str, Any] = {"tokens_per_second": 1000.0, "health_poll_s": 0.05}
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
    fields: dict[str, Any] = {**SIM, "routed_experts": (2, 2, 8), "disconnect_poll_s": 0.2}
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


# --- the client follows it ---


@pytest.fixture
def follow() -> Iterator[MakeClient]:
    """Makes clients of the engines behind a router, which are closed after the test."""
    made: list[RolloutClient] = []

    def make(url: str, **options: Any) -> RolloutClient:
        made.append(RolloutClient.from_router(url, **{"retry": QUICK, "timeouts": SHORT, "progress": False, **options}))
        return made[-1]

    yield make
    for client in made:
        assert client.close() == []


def test_the_client_speaks_to_its_engines(front: Router, engines: SimFleet, follow: MakeClient) -> None:
    """Directly: so they tell of their experts, which the router drops, and can be proven idle, which it cannot."""
    batch, client = prompts(12), follow(front.url)
    samples = client.generate(batch, params(8), n=2, return_routed_experts=True)
    for sample in samples:
        check_sample(sample, batch[sample.index])
        assert sample.engine in engines.urls
        assert sample.routed_experts is not None
    assert sum(calls(engines, "/generate")) == 24
    assert client.abort_until_idle().idle
    assert not client.refresh()


def test_a_router_given_by_mistake_is_recognised(front: Router, engines: SimFleet, make_client: MakeClient) -> None:
    """Before anything is generated through it."""
    with pytest.raises(WrongServerError, match=r"is a router, not an engine: use RolloutClient\.from_router"):
        make_client(front.url).generate(prompts(2), params(4))
    assert sum(calls(engines, "/generate")) == 0


def test_a_batch_over_engines_that_die_and_come(
    python: Path, engines: SimFleet, follow: MakeClient, report: Callable[[str], None]
) -> None:
    """One engine is killed with samples on it, one is added, one removed: each batch is whole, nothing runs twice."""
    batch = prompts(24)
    with SimFleet(configs=[SimConfig(**SIM) for _ in range(2)]) as more, Router(python, engines.urls) as front:
        client, first = follow(front.url), engines.engines[0]
        job = client.start(batch, params(600))
        until(lambda: first.state()["running"], lambda running: running >= 8, "samples are on it")
        first.kill()
        _check_all(job.result(), batch, 600)
        retried = sum(sample.attempts > 1 for sample in job.result())
        assert retried >= 8
        front.add(more[0])
        until(front.healthy, lambda healthy: more[0] in healthy, "the new one is listed")
        assert client.refresh() == MemberChanges(added=(more[0],))
        _check_all(client.generate(batch, params(8)), batch, 8)
        assert more.engines[0].state()["requests"]["/generate"] > 0
        until(front.healthy, lambda healthy: engines[0] not in healthy, "the dead one is found out")
        assert not client.refresh()  # it is still listed
        front.remove(_worker_id(front, engines[0]))
        until(front.workers, lambda workers: len(workers) == 2, "it is not listed any more")
        assert client.refresh() == MemberChanges(removed=(engines[0],))
        _check_all(client.generate(batch, params(8)), batch, 8)
        assert client.audit().orphans == ()
        first.restart()
    report(f"a batch of {len(batch)}: {retried} samples were on the engine that was killed, all came back")


def _worker_id(front: Router, url: str) -> str:
    return str(next(worker["id"] for worker in front.workers() if worker["url"] == url))


def _check_all(samples: Sequence[Sample], batch: Sequence[Sequence[int]], tokens: int) -> None:
    for sample, ids in zip(samples, batch, strict=True):
        check_sample(sample, ids, tokens)


def test_ranks_are_one_engine(python: Path, follow: MakeClient) -> None:
    """The router lists each rank; the client has one engine, and chooses ranks itself."""
    with (
        SimFleet(configs=[SimConfig(**SIM, dp_size=2)]) as fleet,
        Router(python, fleet.urls, flags=(*FLAGS, "--dp-aware")) as front,
    ):
        client = follow(front.url)
        assert [(engine.url, engine.dp_size) for engine in client.engines()] == [(fleet[0], 2)]
        samples = client.generate(prompts(8), params(8))
        assert {sample.dp_rank for sample in samples} == {0, 1}
        assert client.abort_until_idle().idle


def test_keys(python: Path, follow: MakeClient) -> None:
    """A router with a key lists nothing without it."""
    with SimFleet(configs=[SimConfig(**SIM, api_key="K")]) as fleet:
        flags = (*FLAGS, "--api-key", "K")
        with Router(python, fleet.urls, flags=flags, key="K") as front:
            assert len(follow(front.url, api_key="K").generate(prompts(2), params(4))) == 2
            assert follow(front.url, api_key="K", admin_api_key="other").engines()
            with pytest.raises(EngineHTTPError, match="GET /workers answered 401"):
                follow(front.url)


@pytest.mark.parametrize("release", [router.OLDER, router.NEWER], ids=str)
def test_other_releases(
    engines: SimFleet, follow: MakeClient, report: Callable[[str], None], release: router.Release
) -> None:
    """Their lists have other forms."""
    other, batch = router.ensure(report, release), prompts(8)
    with Router(other, engines.urls, flags=("--policy", "round_robin"), release=release) as front:
        client = follow(front.url)
        assert {engine.url for engine in client.engines()} == set(engines.urls)
        _check_all(client.generate(batch, params(8), return_routed_experts=True), batch, 8)
        assert not client.refresh()


# --- a disaggregated fleet ---


@pytest.fixture
def apart(python: Path, engines: SimFleet) -> Iterator[Router]:
    """One engine prefills, the other decodes."""
    with Router(python, engines.urls[1:], prefill=engines.urls[:1], flags=("--policy", "manual", *router.QUICK)) as it:
        yield it


def test_a_disaggregated_fleet(apart: Router, engines: SimFleet, follow: MakeClient) -> None:
    """Generates go through the router; drains, aborts by id and weights go to both engines."""
    client, batch = follow(apart.url), prompts(6)
    samples = client.generate(batch, params(8), n=2)
    for sample in samples:
        check_sample(sample, batch[sample.index])
        assert sample.engine == apart.url
    assert calls(engines, "/generate") == [12, 12]
    with client.start(batch, ENDLESS) as job:
        until(lambda: _running(engines), lambda at: at == [6, 6], "six pairs are running")
    assert {sample.status for sample in job.partials} == {Status.ABORTED}
    job = client.start(batch, ENDLESS)
    until(lambda: _running(engines), lambda at: at == [6, 6], "six pairs are running")
    assert [drain.state.value for drain in client.abort_until_idle().engines] == ["Idle", "Idle"]
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    assert not client.update_weights_from_disk("new", "2").stale
    assert {sample.weight_spans[0].version for sample in client.generate(batch, params(4))} == {"2"}
    assert client.audit().orphans == ()


def _running(engines: SimFleet) -> list[int]:
    return [engine.state()["running"] for engine in engines.engines]


def test_what_a_router_drops_is_refused(apart: Router, engines: SimFleet, follow: MakeClient) -> None:
    """Routed experts above all: they would be missing from every answer."""
    client = follow(apart.url)
    with pytest.raises(UnsupportedError, match="drops return_routed_experts without a word"):
        client.generate(prompts(2), params(4), return_routed_experts=True)
    assert calls(engines, "/generate") == [0, 0]


def test_a_newer_router_passes_routed_experts_on(
    engines: SimFleet, follow: MakeClient, report: Callable[[str], None]
) -> None:
    """Also from a disaggregated fleet."""
    other, flags = router.ensure(report, router.NEWER), ("--policy", "round_robin")
    with Router(other, engines.urls[1:], prefill=engines.urls[:1], flags=flags, release=router.NEWER) as front:
        (sample,) = follow(front.url).generate([[5, 6]], params(4), return_routed_experts=True)
        check_sample(sample, [5, 6], 4)
        assert (sample.engine, sample.routed_experts is not None) == (front.url, True)


@pytest.mark.parametrize("release", router.RELEASES, ids=str)
def test_what_each_release_drops(report: Callable[[str], None], release: router.Release) -> None:
    """Exactly what the client takes it to drop: everything that it may send is sent through, one by one."""
    interpreter = router.ensure(report, release)
    with ScriptedEngine() as worker:
        flags = ("--policy", "round_robin")
        with Router(interpreter, [worker.url], flags=flags, release=release) as front:
            kept_fields = {name for name, value in FIELDS.items() if name in _passed_on(front, worker, {name: value})}
            kept_params = {
                name
                for name, value in SAMPLING.items()
                if name in _passed_on(front, worker, {"sampling_params": {name: value}})["sampling_params"]
            }
            forwards_all = release is router.NEWER
            assert read_listing({"workers": front.workers()}).forwards_all == forwards_all
    assert set(FIELDS) - kept_fields == set(lost(FIELDS, [], forwards_all=forwards_all)) | (
        set() if forwards_all else {"session_id"}
    )
    dropped = [f"sampling_params[{name!r}]" for name in SAMPLING if name not in kept_params]
    assert dropped == lost({}, SAMPLING, forwards_all=forwards_all)


def _passed_on(front: Router, worker: ScriptedEngine, fields: dict[str, Any]) -> dict[str, Any]:
    """What arrives of a request with these fields."""
    body = {"rid": uuid4().hex, "input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}, **fields}
    answer = front.session.post(f"{front.url}/generate", json=body, timeout=30)
    assert answer.status_code == 200, (fields, answer.text)
    return worker.bodies()[-1]


FIELDS: dict[str, Any] = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 1,
    "token_ids_logprob": [3],
    "return_text_in_logprobs": True,
    "return_hidden_states": True,
    "return_routed_experts": True,
    "routed_experts_start_len": 1,
    "return_prompt_token_ids": True,
    "return_indexer_topk": True,
    "priority": 2,
    "lora_path": "l",
    "lora_id": "x",
    "session_id": "s",
    "session_params": {"id": "x"},
    "image_data": "data",
    "video_data": "data",
    "audio_data": "data",
    "modalities": ["image"],
    "extra_key": "k",
    "data_parallel_rank": 1,
    "routed_dp_rank": 1,
    "custom_logit_processor": "c",
    "log_metrics": True,
    "conversation_id": "c",
    "return_bytes": True,
    "return_entropy": True,
    "custom_labels": {"a": "b"},
    "background": True,
    "no_such_field": 1,
}
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 3,
    "min_new_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "stop": ["a"],
    "stop_token_ids": [4],
    "stop_regex": "a",
    "sampling_seed": 3,
    "ignore_eos": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stream_interval": 2,
    "logit_bias": {"3": 1.0},
    "custom_params": {"a": 1},
    "json_schema": "{}",
    "regex": "a",
    "ebnf": "a",
    "structural_tag": "a",
    "beam_width": 2,
    "watermark": {"a": 1},
    "choice": ["a"],
}


def test_every_sampling_parameter_was_tried() -> None:
    """None that the client knows is missing above."""
    assert set(SAMPLING) == set(SAMPLING_RULES)
