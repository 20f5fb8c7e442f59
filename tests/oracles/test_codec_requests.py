"""SGLang's own codec reads every request that the client sends, as it came off the wire."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolloutsync import NotIdleError, Prompt, RolloutClient, Sample, Status
from tests.client.kit import ScriptedEngine, completion, quiet
from tests.wire import answer, eventually, wait_for

from .wheel import Oracles

pytestmark = pytest.mark.slow
MakeClient = Callable[..., RolloutClient]
IDS = [5, 6, 7]
# The engine reads these beside its contract, which does not know them.
BESIDE_THE_CONTRACT = {"return_routed_experts"}
IMAGE = "data:image/png;base64,aGVsbG8="

ITEMS: dict[str, Any] = {
    "text": "The quick brown fox",
    "no ASCII": '日本語 🦊 \n\t"quoted" \\ back',
    "ids": IDS,
    "tuple": tuple(IDS),
    "int64": np.array(IDS),
    "uint8": np.array(IDS, np.uint8),
    "strided": np.arange(20, dtype=np.int32)[5:11:2],
    "text in a dict": {"text": "hello"},
    "vLLM's word for text": {"prompt": "hello"},
    "ids in a dict": {"input_ids": IDS},
    "vLLM's word for ids": {"prompt_token_ids": np.array(IDS)},
    "messages": {"messages": [{"role": "user", "content": "hi"}]},
    "metadata": {"input_ids": IDS, "metadata": {"id": 7, "answer": "4"}},
    "own sampling": {"input_ids": IDS, "sampling_params": {"temperature": 0.5}},
    "prompt": Prompt(input_ids=np.array(IDS, np.int32)),
    "failed sample": Sample(Prompt(input_ids=np.array(IDS, np.int32)), 0, 0, status=Status.FAILED),
    "image": {"text": "What is this?", "image_data": IMAGE},
    "images": {"text": "Which is which?", "image_data": [IMAGE, "file:///b.png"]},
    "image with options": {"text": "Look", "image_data": [{"url": IMAGE, "detail": "high"}]},
}

SAMPLING: dict[str, Any] = {
    "none": None,
    "empty": {},
    "vLLM's word": {"max_tokens": 16},
    "numbers": {
        "max_new_tokens": 64,
        "min_new_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "frequency_penalty": 0.1,
        "presence_penalty": -0.1,
        "repetition_penalty": 1.1,
        "sampling_seed": 42,
    },
    "whole numbers for floats": {"temperature": 1, "top_p": 1, "repetition_penalty": 1},
    "numpy numbers": {"temperature": np.float32(0.5), "max_new_tokens": np.int64(4), "top_k": np.int32(5)},
    "greedy": {"temperature": 0.0, "top_k": -1},
    "stop string": {"stop": "\n"},
    "stop strings": {"stop": ["\n", "###"], "no_stop_trim": True},
    "stop ids": {"stop_token_ids": [1, 2]},
    "stop ids of numpy": {"stop_token_ids": np.array([1, 2])},
    "stop regex": {"stop_regex": ["a+", "b$"]},
    "flags": {"ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    "regex": {"regex": "[ab]+"},
    "schema": {"json_schema": '{"type": "object"}'},
    "grammar": {"ebnf": 'root ::= "a"'},
    "tag": {"structural_tag": "{}"},
    "choice": {"choice": ["yes", "no"]},
    "bias": {"logit_bias": {"5": 1.5, "6": -100}},
    "bias by number": {"logit_bias": {5: 1.5}},
    "custom": {"custom_params": {"any": [1, {"thing": None}]}},
    "watermark": {"watermark": {"enabled": True, "key": "k"}},
    "stream interval": {"stream_interval": 8},
    "object": SimpleNamespace(temperature=0.9, max_tokens=7, stop=None),
}

FIELDS: dict[str, dict[str, Any]] = {
    "no logprobs": {"return_logprob": False},
    "logprobs of the prompt": {"logprob_start_len": 0},
    "top logprobs": {"top_logprobs_num": 5},
    "logprobs of some": {"token_ids_logprob": [3, 4]},
    "logprobs with text": {"return_text_in_logprobs": True},
    "routed experts": {"return_routed_experts": True},
    "routed experts from": {"return_routed_experts": True, "routed_experts_start_len": 2},
    "hidden states": {"return_hidden_states": True},
    "prompt ids": {"return_prompt_token_ids": True},
    "priority": {"priority": -3},
    "LoRA": {"lora_path": "adapter-1"},
    "session": {"session_id": "s-1"},
    "old session": {"session_params": {"id": "s", "rid": None, "offset": -1}},
    "routing key": {"routing_key": "user-1"},
    "DP rank": {"routed_dp_rank": 0},
    "cache": {"extra_key": "tenant", "cache_salt": "salt"},
    "labels": {"custom_labels": {"team": "rl"}},
    "logit processor": {"custom_logit_processor": "{}"},
    "thinking": {"max_thinking_tokens": 100, "require_reasoning": True},
    "disaggregation": {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7},
    "modalities": {"modalities": ["image"]},
    "sampling mask": {"return_sampling_mask": True},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    """An engine that keeps what it was sent."""
    with ScriptedEngine() as started:
        yield started


@pytest.fixture
def before_the_guard(engine: ScriptedEngine, oracles: Oracles) -> None:
    """The shared engine and the files outlive a test."""


@pytest.fixture
def sent(engine: ScriptedEngine, make_client: MakeClient) -> Callable[..., dict[str, Any]]:
    """Generates one sample and returns the body that the client sent for it."""
    tokenizer = SimpleNamespace(apply_chat_template=lambda messages, **_: IDS)
    client = make_client(engine.url, tokenizer=tokenizer)

    def send(item: Any, sampling: Any = None, **fields: Any) -> dict[str, Any]:
        before = len(engine.bodies())
        client.generate([item], sampling, on_error="return", **fields)
        return engine.bodies()[before]

    return send


def check(oracles: Oracles, body: dict[str, Any]) -> dict[str, Any]:
    """The codec reads a body, and whatever it knows means to it what the client meant; returns what it read."""
    codec = oracles.codec()
    read: dict[str, Any] = codec.GenerateRequest.from_json_value(body).to_json_value()
    known = set(codec.GenerateRequest.__struct_fields__)
    assert body.keys() - known <= BESIDE_THE_CONTRACT
    for name in body.keys() & known - {"sampling_params"}:
        assert read[name] == body[name], name
    for name, value in body["sampling_params"].items():
        assert read["sampling_params"][name] == value, name
    return read


@pytest.mark.parametrize("name", ITEMS)
def test_every_form_of_an_item(name: str, oracles: Oracles, sent: Callable[..., dict[str, Any]]) -> None:
    """Text, ids in any container, the engines' words, images, samples."""
    read = check(oracles, sent(ITEMS[name]))
    assert len(read["rid"]) == 32
    assert ("text" in read) != ("input_ids" in read)


@pytest.mark.parametrize("name", SAMPLING)
def test_every_sampling_parameter(name: str, oracles: Oracles, sent: Callable[..., dict[str, Any]]) -> None:
    """Each key that the client lets through is one that the engine takes, and of its type."""
    check(oracles, sent(IDS, SAMPLING[name]))


def test_the_client_knows_the_keys_of_the_contract(oracles: Oracles) -> None:
    """No sampling parameter of the engine is refused for its name, but for those that the client sets."""
    from rolloutsync.dialects.sglang import SAMPLING_RULES

    assert set(oracles.codec().SamplingParams.__struct_fields__) - SAMPLING_RULES.keys() == {"n"}
    covered = {key for params in SAMPLING.values() if isinstance(params, dict) for key in params}
    assert SAMPLING_RULES.keys() - covered == {"beam_width"}


@pytest.mark.parametrize("name", FIELDS)
def test_every_request_field(name: str, oracles: Oracles, sent: Callable[..., dict[str, Any]]) -> None:
    """Fields that are sent through, for a call and for an item."""
    check(oracles, sent(IDS, **FIELDS[name]))
    check(oracles, sent({"text": "a", **FIELDS[name]}))


def test_what_only_the_openai_routes_take(oracles: Oracles, sent: Callable[..., dict[str, Any]]) -> None:
    """`return_hidden_states="last"` is in the engine's own dataclass, but its newer contract takes booleans alone."""
    codec = oracles.codec()
    with pytest.raises(codec.JsonContractError, match=r'^invalid type: string "last", expected '):
        codec.GenerateRequest.from_json_value(sent(IDS, return_hidden_states="last"))


def test_the_codec_does_refuse(oracles: Oracles) -> None:
    """An oracle that takes everything would judge nothing."""
    codec = oracles.codec()
    for wrong in ({"max_tokens": 4}, {"temperature": "hot"}, {"stop_token_ids": "1"}):
        with pytest.raises(codec.JsonContractError):
            codec.GenerateRequest.from_json_value({"input_ids": IDS, "sampling_params": wrong})
    with pytest.raises(codec.JsonContractError):
        codec.GenerateRequest.from_json_value({"input_ids": [0.5]})


def test_the_rank_that_the_client_chooses(oracles: Oracles, make_client: MakeClient) -> None:
    """A group stays on one rank, and two groups at the same time use both."""
    go = threading.Event()
    with ScriptedEngine(lambda request, _: [wait_for(go), answer(completion(request))], dp_size=2) as engine:
        job = make_client(engine.url).start([IDS, [8, 9]], n=2)
        eventually(lambda: len(engine.rids()) == 4, "all four are there")
        go.set()
        job.result()
        bodies = engine.bodies()
    ranks = [check(oracles, body)["routed_dp_rank"] for body in bodies]
    assert sorted(ranks) == [0, 0, 1, 1]


@pytest.mark.parametrize("scope", ["own", "engine"])
def test_aborts(oracles: Oracles, make_client: MakeClient, scope: str) -> None:
    """Of one's own requests by their ids, of everything without one."""
    codec = oracles.codec()
    busy = {"loads": [{"dp_rank": 0, "timestamp": 1.0, "num_running_reqs": 1, "num_waiting_reqs": 0}]}
    with ScriptedEngine(quiet, others={"/v1/loads": [answer(json.dumps(busy).encode())]}) as engine:
        client = make_client(engine.url)
        with client.start([IDS], on_error="return"):
            eventually(lambda: engine.rids() != [], "the request is there")
            with pytest.raises(NotIdleError):
                client.abort_until_idle(timeout=1.0, scope=scope)
        rids, bodies = engine.rids(), engine.bodies("/abort_request")
    read = [codec.AbortRequest.from_json_value(body).to_json_value() for body in bodies]
    wanted = {"rid": rids[0], "abort_all": False} if scope == "own" else {"rid": "", "abort_all": True}
    assert wanted in read
