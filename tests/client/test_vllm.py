"""The client and vLLM: what is sent to which version, what comes back, and how an engine is told from others."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import requests

from rolloutsync import (
    EngineState,
    EngineUnavailableError,
    RolloutClient,
    Sample,
    Status,
    UnsupportedError,
    WrongServerError,
)
from rolloutsync.dialects.vllm_sampling import resumed_seed
from rolloutsync.sim import SimConfig
from rolloutsync.sim.fleet import SimEngine
from rolloutsync.sim.tokens import expected_tokens
from tests.client.kit import ENDLESS, SHORT, ScriptedEngine, check_sample, error_answer, params, prompts
from tests.client.vllmkit import COMPLETIONS, TOKENS, MakeClient, alone, await_tokens, called, endless
from tests.wire import Request, Script, answer, eventually

pytestmark = pytest.mark.usefixtures("soon_settled")


def test_samples_of_every_version(vllm: SimEngine, make_client: MakeClient) -> None:
    """Token by token what the engine said, by the route that says whose answer it is."""
    client = make_client(vllm.url)
    samples = client.generate(prompts(3), params(8), n=2)
    for sample, ids in zip(samples, [ids for ids in prompts(3) for _ in range(2)], strict=True):
        check_sample(sample, ids)
    (status,) = client.engines()
    assert (status.dialect, status.version, status.limit) == ("vllm", vllm.config.version, 80)
    knows_ids = vllm.config.release >= (0, 25, 0)
    assert called(vllm)[TOKENS if knows_ids else COMPLETIONS] == 6
    label = "default" if vllm.config.release >= (0, 32, 0) else None
    assert {span.version for sample in samples for span in sample.weight_spans} == {label}
    assert client.weight_versions() == {vllm.url: "default" if vllm.config.release >= (0, 27, 0) else None}


def test_a_text(newest: SimEngine, make_client: MakeClient) -> None:
    """By completions, which tell its ids: a partial of it goes on by them."""
    client = make_client(newest.url)
    job = client.start(["a text"], params(20_000))
    await_tokens(newest, 1)
    client.abort_until_idle(10.0, scope="own")
    (partial,) = job.result()
    assert partial.status is Status.ABORTED
    assert partial.prompt.input_ids is not None
    whole = client.generate([partial], on_error="return", timeout=0.2)[0]
    assert whole.output_ids[: len(partial.output_ids)].tolist() == partial.output_ids.tolist()
    assert called(newest)[COMPLETIONS] >= 1
    assert called(newest)[TOKENS] == 1


def test_a_partial_goes_on(vllm: SimEngine, make_client: MakeClient) -> None:
    """Over two aborts, token by token as if it had never been cut."""
    client, tokens = make_client(vllm.url), 300
    samples: list[Sample] = []
    batch: list[object] = list(prompts(2))
    for _ in range(2):
        vllm.reset()
        job = client.start(batch, params(tokens))
        await_tokens(vllm, 2)
        client.abort_until_idle(10.0, scope="own")
        samples = job.result()
        assert all(sample.status is Status.ABORTED for sample in samples)
        batch = list(samples)
    for sample, ids in zip(client.generate(batch), prompts(2), strict=True):
        check_sample(sample, ids, tokens)


def test_the_seed_of_a_partial(newest: SimEngine, make_client: MakeClient) -> None:
    """vLLM's generator begins anew with each request, so the seed is another one; it is so each time."""
    client = make_client(newest.url)
    job = client.start([[5, 6]], params(20_000, seed=7))
    await_tokens(newest, 1)
    client.abort_until_idle(10.0, scope="own")
    (partial,) = job.result()
    done = len(partial.output_ids)
    prompt = replace(partial.prompt, sampling_params=params(done + 5, sampling_seed=7))
    one, two = (client.generate([replace(partial, prompt=prompt)])[0] for _ in range(2))
    assert one.output_ids.tolist() == two.output_ids.tolist()
    assert one.output_ids[done:].tolist() == expected_tokens(partial.tokens.tolist(), 5, seed=resumed_seed(7, done))


def test_an_engine_that_was_started_without_anything(bare: SimEngine, make_client: MakeClient) -> None:
    """Completions generate where the token route is forbidden, which is asked for once."""
    check_bare(bare, make_client(bare.url))
    assert called(bare)[TOKENS] <= 2  # the first two went out together


@pytest.mark.slow
def test_an_older_one(make_client: MakeClient) -> None:
    """Where the route is missing."""
    with alone("0.31", dev_mode=False, enable_scale_out=False) as engine:
        check_bare(engine, make_client(engine.url))


def check_bare(engine: SimEngine, client: RolloutClient) -> None:
    """It serves, and a drain says what its proof rests on."""
    engine.reset()
    for _ in range(2):
        for sample, ids in zip(client.generate(prompts(2), params(8)), prompts(2), strict=True):
            check_sample(sample, ids)
            assert sample.attempts == 1
    assert called(engine)[COMPLETIONS] == 4
    job = endless(client, engine)
    report = client.abort_until_idle(10.0)
    assert (
        report.engines[0].basis == "its load is zero for 0.2 s; nobody can ask its front end; nobody can ask its core"
    )
    assert {sample.status for sample in job.result()} == {Status.ABORTED}


def test_what_vllm_lacks_is_refused_by_name(newest: SimEngine, make_client: MakeClient) -> None:
    """Not dropped, as the engine itself would; the other samples are made."""
    client = make_client(newest.url)
    batch = [
        {"input_ids": [3], "sampling_params": params(4, stop_regex="x")},
        {"input_ids": [4], "return_hidden_states": True},
        {"input_ids": [5]},
    ]
    one, two, three = client.generate(batch, params(4), on_error="return")
    for sample, name in ((one, "stop_regex"), (two, "return_hidden_states")):
        assert isinstance(sample.error, UnsupportedError)
        assert name in sample.error.message
        assert (sample.error.engine, sample.error.rid) == (newest.url, sample.rid)
    check_sample(three, [5], 4)
    assert newest.state()["started"] == 1


@pytest.mark.slow
def test_ranks_and_experts(make_client: MakeClient) -> None:
    """Ranks are told in a header and share the samples; experts come as they are."""
    with alone(dp_size=2, routed_experts=(3, 2, 8)) as engine:
        client = make_client(engine.url)
        samples = client.generate(prompts(8), params(6), return_routed_experts=True)
        for sample, ids in zip(samples, prompts(8), strict=True):
            check_sample(sample, ids, 6)
            assert sample.routed_experts is not None
            assert sample.routed_experts.shape == (len(ids) + 5, 3, 2)
        engine.reset()
        job = endless(client, engine, 6)
        told = requests.get(f"{engine.url}/metrics", timeout=5.0).text
        assert re.findall(r'^vllm:num_requests_running{engine="(.)",[^}]*} (.*)$', told, re.MULTILINE) == [
            ("0", "3.0"),
            ("1", "3.0"),
        ]
        job.abort()


def test_a_pause_by_somebody_else(vllm: SimEngine, make_client: MakeClient) -> None:
    """Whether the engine refuses what comes then or lets it wait: it is one attempt."""
    client = make_client(vllm.url)
    vllm.call("POST", "/pause")
    job = client.start(prompts(2), params(8))
    eventually(lambda: sum(called(vllm).get(path, 0) for path in (TOKENS, COMPLETIONS)) >= 2, "they have come")
    vllm.call("POST", "/resume")
    for sample, ids in zip(job.result(), prompts(2), strict=True):
        check_sample(sample, ids)
        assert sample.attempts == 1


def test_every_other_verb(newest: SimEngine, make_client: MakeClient) -> None:
    """Single samples, collects, episodes and the books know nothing of what is spoken below."""
    client = make_client(newest.url)
    check_sample(client.submit([3, 4], params(4)).result(10.0), [3, 4], 4)
    got = client.collect(iter(prompts(40)), params(4), n=2, target=5, accept=lambda group: len(group) == 2)
    assert (got.complete, len(got.groups)) == (True, 5)
    episodes = client.map(
        lambda turn, ids: turn.generate([*ids, *turn.generate(ids).output_ids]), prompts(3), sampling_params=params(4)
    )
    for episode, ids in zip(episodes, prompts(3), strict=True):
        check_sample(episode.value, [*ids, *expected_tokens(ids, 4)], 4)
    future = client.submit([9], ENDLESS)
    await_tokens(newest, 1)
    eventually(lambda: client.engines()[0].in_flight == 1, "it runs")
    future.cancel()
    assert future.result(10.0).status is Status.ABORTED
    assert client.audit().balanced
    assert client.stats().failed == 0
    assert newest.url in client.dump()


# --- what an engine is ------------------------------------------------------------------------------------------------


def test_a_dialect_that_is_given(newest: SimEngine, make_client: MakeClient) -> None:
    """Nobody is asked."""
    client = make_client(newest.url, dialect="vllm")
    check_sample(client.generate([[3]], params(4))[0], [3], 4)
    assert called(newest).get("/workers", 0) == 0
    with pytest.raises(ValueError, match="dialect must be one of"):
        RolloutClient(newest.url, dialect="tgi")


@pytest.mark.parametrize("workers", [b'{"workers": [{"url": "http://h:1"}]}', b'{"urls": ["http://h:1"]}'])
def test_a_router_is_no_engine(workers: bytes, make_client: MakeClient) -> None:
    """Every verb says so at once, with the way that leads to its engines."""
    path = "/list_workers" if b"urls" in workers else "/workers"
    with ScriptedEngine(others={path: [answer(workers)]}) as router, ScriptedEngine() as engine:
        client = make_client([engine.url, router.url])
        words = f"{router.url} is a router, not an engine: use RolloutClient.from_router"
        for verb in (lambda: client.generate([[3]]), client.flush_cache, client.abort_until_idle, client.engines):
            with pytest.raises(WrongServerError, match=words):
                verb()
        assert router.bodies() == []
        client.remove_engine(router.url)
        assert client.generate([[3]])[0].error is None
        with pytest.raises(WrongServerError, match=words):
            client.add_engine(router.url)
        assert client.generate([[3]])[0].error is None


def test_a_server_that_is_nothing_known(make_client: MakeClient) -> None:
    """It is taken for SGLang, as a mock is; its refusal says so."""
    missing = error_answer("404 Not Found", b"no such page")
    with ScriptedEngine(lambda *_: missing, others=Missing(missing)) as server:
        (sample,) = make_client(server.url).generate([[3]], on_error="return")
        assert "POST /generate answered 404: no such page; the server did not say what it is" in str(sample.error)
        assert "was taken for SGLang" in str(sample.error)


class Missing(dict[str, Script]):
    """The same steps for every path."""

    def __init__(self, steps: Script) -> None:
        super().__init__({"": steps})
        self._steps = steps

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: str) -> Script:
        return self._steps


class Gateway(ScriptedEngine):
    """Answers 503 to everything until what is behind it has come up: a vLLM engine."""

    up = False

    def _choose(self, request: Request) -> Script:
        if not self.up:
            return error_answer("503 Unavailable", b"nobody there")
        if request.path == "/version":
            return [answer(b'{"version": "0.33.0"}')]
        if request.path == TOKENS:
            return [answer(json.dumps(tokens_answer(request)).encode())]
        return error_answer("404 Not Found", b'{"detail": "Not Found"}')


def tokens_answer(request: Request) -> dict[str, object]:
    """A whole answer of the token route."""
    body = json.loads(request.body or b"{}")
    rows = [{"token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs": []}]
    choice = {"index": 0, "token_ids": [7], "finish_reason": "length", "logprobs": {"content": rows}}
    return {"request_id": f"generate-tokens-{body['request_id']}", "choices": [choice]}


def test_an_engine_that_comes_up_behind_a_gateway(make_client: MakeClient) -> None:
    """What it is was not to be known when it was asked, so it is asked again when it turns out to be no SGLang."""
    with Gateway() as gateway:
        client = make_client(gateway.url)
        job = client.start([[3, 4]], params(1))
        eventually(lambda: "/generate" in gateway.server.paths(), "it was taken for SGLang")
        gateway.up = True
        (sample,) = job.result()
        assert (sample.error, sample.output_ids.tolist()) == (None, [7])
        assert client.engines()[0].dialect == "vllm"


@pytest.mark.slow
def test_another_server_on_the_same_port(make_client: MakeClient) -> None:
    """What was SGLang is vLLM when it is back."""
    with alone() as vllm:
        port = vllm.port
        vllm.stop()
        old = SimEngine(SimConfig(port=port, tokens_per_second=1000.0))
        client = make_client(f"http://127.0.0.1:{port}")
        try:
            old.start()
            check_sample(client.generate([[3]], params(4))[0], [3], 4)
            assert client.engines()[0].dialect == "sglang"
        finally:
            old.stop()
        with pytest.raises(EngineUnavailableError):
            raise client.generate([[3]], params(4), on_error="return")[0].error or AssertionError
        vllm.start()
        eventually(lambda: client.engines()[0].state is EngineState.LIVE, "it is back")
        check_sample(client.generate([[3]], params(4))[0], [3], 4)
        assert (client.engines()[0].dialect, client.engines()[0].version) == ("vllm", "0.33.0")


def test_nothing_is_sent_before_an_engine_is_known(make_client: MakeClient) -> None:
    """One that keeps silent is probed and left alone by every verb."""
    with ScriptedEngine(others={"/version": []}) as silent, ScriptedEngine() as engine:
        client = make_client([engine.url, silent.url], timeouts=replace(SHORT, control_s=0.2))
        assert client.generate([[3]])[0].error is None
        assert [status.dialect for status in client.engines()] == ["sglang", "unknown"]
        assert str(client.loads()[engine.url]) == "0 running, 0 waiting, 0 tokens"
        assert set(silent.counts()) == {"/version"}
