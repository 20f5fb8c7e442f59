"""SGLang's own codec reads every answer of the simulated engine, and reads in it what the engine meant."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from rolloutsync.sim import SimConfig, SimEngine, SimFleet
from rolloutsync.sim.tokens import EOS_TOKEN_ID
from tests.sim.kit import WAIT_S, Caller, Reply, events, generation, until

from .wheel import Oracles

pytestmark = pytest.mark.slow
PROMPT = [5, 30, 70, 100]
ENDLESS = 30_000
TEXT = "once upon a time"
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "context_length": 40_000,
    "max_running_requests": 4,
    "max_total_tokens": 200_000,
    "tokens_per_second": 2000.0,
    "pause_poll_s": 0.05,
    "mean_output_tokens": 40.0,
    "report_interval": 5,
    "routed_experts": (2, 2, 8),
    "hidden_size": 3,
}
CONFIGS = {
    "new": SimConfig(**COMMON),
    "ranks": SimConfig(**COMMON, dp_size=2),
    "full": SimConfig(**{**COMMON, "max_running_requests": 1}, max_queued_requests=1),
    "0.5.18": SimConfig(**COMMON, version="0.5.18"),
    "0.5.9": SimConfig(**COMMON, version="0.5.9"),
    "0.5.3": SimConfig(**COMMON, version="0.5.3"),
}
# What the engine sends beside its contract, which lets unknown keys pass.
META_BESIDE = {
    *("num_retractions", "total_retractions", "dp_rank", "response_sent_to_client_ts", "cached_tokens_details"),
    "routed_experts",
}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, SimEngine]]:
    """All engines by name."""
    with SimFleet(configs=list(CONFIGS.values())) as fleet:
        yield dict(zip(CONFIGS, fleet.engines, strict=True))


@pytest.fixture
def before_the_guard(engines: dict[str, SimEngine], oracles: Oracles) -> None:
    """The shared engines and the files outlive a test."""


@pytest.fixture
def callers(engines: dict[str, SimEngine]) -> Iterator[dict[str, Caller]]:
    """One caller per engine; all engines are idle afterwards."""
    with ThreadPoolExecutor(max_workers=16) as pool:
        for engine in engines.values():
            engine.reset()
        made = {name: Caller(engine, pool) for name, engine in engines.items()}
        yield made
        for engine in engines.values():
            engine.call("POST", "/continue_generation", {})
            until(partial(_cleared, engine), lambda left: left == 0, "an idle engine")


def _cleared(engine: SimEngine) -> int:
    engine.call("POST", "/abort_request", {"abort_all": True})
    return int(engine.state()["live"])


@pytest.fixture
def new(callers: dict[str, Caller]) -> Caller:
    """The newest release."""
    return callers["new"]


def check(oracles: Oracles, answer: dict[str, Any]) -> dict[str, Any]:
    """The codec reads an answer and gives it back; returns its `finish_reason`."""
    codec = oracles.codec()
    read = codec.GenerateResponse.from_json_value(answer).to_json_value()
    assert answer.keys() <= set(codec.GenerateResponse.__struct_fields__)
    meta = answer["meta_info"]
    known = set(codec.GenerateMetaInfo.__struct_fields__)
    assert meta.keys() - known <= META_BESIDE
    _same(answer | {"meta_info": {name: meta[name] for name in meta.keys() & known}}, read)
    reason: dict[str, Any] = meta["finish_reason"]
    return reason


def _same(sent: Any, read: Any) -> None:
    """What was sent was read; what was sent as null or as an empty list may be left out."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            _same(value, read.get(name, [] if value == [] else None))
    elif isinstance(sent, list):
        assert len(sent) == len(read)
        for one, other in zip(sent, read, strict=True):
            _same(one, other)
    else:
        assert sent == read


def finish(oracles: Oracles, reply: Reply) -> dict[str, Any]:
    """Checks a whole answer and returns how it ended."""
    assert reply.status == 200, reply.text
    return check(oracles, reply.json)


ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "end token": ({"max_new_tokens": 1000}, "stop"),
    "length": ({"max_new_tokens": 6, "ignore_eos": True}, "length"),
    "nothing at all": ({"max_new_tokens": 0}, "length"),
    "stop string": ({"max_new_tokens": 1500, "ignore_eos": True, "stop": ["be", "ka"]}, "stop"),
    "stop ids": ({"max_new_tokens": 1900, "stop_token_ids": list(range(300, 400))}, "stop"),
    "stop regex": ({"max_new_tokens": 1500, "ignore_eos": True, "stop_regex": "b[ae]"}, "stop"),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("engine", CONFIGS)
def test_every_end(name: str, engine: str, oracles: Oracles, callers: dict[str, Caller]) -> None:
    """By the model, by the length, by a stop of any kind; in the form of every release."""
    sampling, kind = ENDS[name]
    reply = callers[engine].post("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    reason = finish(oracles, reply)
    assert reason["type"] == kind
    if name == "end token":
        assert reason["matched"] == EOS_TOKEN_ID
    assert (reason.get("matched") is not None) == (kind == "stop")


OPTIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"return_logprob": True},
    "of the prompt": {"return_logprob": True, "logprob_start_len": 0},
    "of a part": {"return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 3},
    "top": {"return_logprob": True, "top_logprobs_num": 2},
    "chosen": {"return_logprob": True, "token_ids_logprob": [7, 8]},
    "all of them, with text": {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [7],
        "return_text_in_logprobs": True,
    },
    "experts": {"return_routed_experts": True},
    "experts of a part": {"return_routed_experts": True, "routed_experts_start_len": 2},
    "prompt ids": {"return_prompt_token_ids": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("engine", CONFIGS)
def test_every_option(name: str, engine: str, oracles: Oracles, callers: dict[str, Caller]) -> None:
    """Log-probabilities in all their forms, experts, prompt ids; for ids and for text, running and in a stream."""
    fields, caller = OPTIONS[name], callers[engine]
    assert finish(oracles, caller.generate(PROMPT, 5, **fields))["type"] == "length"
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 5}, **fields}
    assert finish(oracles, caller.post("/generate", body))["type"] in {"length", "stop"}
    for event in streamed(caller.post("/generate", body | {"stream": True})):
        check(oracles, event)


def streamed(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream but for its end mark."""
    *parts, last = events(reply)
    assert last == "[DONE]"
    return parts


def test_lists(oracles: Oracles, new: Caller) -> None:
    """Batches and copies are arrays of answers; their streams carry an index."""
    batch = generation([], 4) | {"input_ids": [PROMPT, [9]], "return_logprob": True}
    copies = generation(PROMPT, 4, sampling={"n": 3})
    for body, count in ((batch, 2), (copies, 3)):
        answers = new.post("/generate", body).json
        assert [check(oracles, answer)["type"] for answer in answers] == ["length"] * count
        parts = streamed(new.post("/generate", body | {"stream": True}))
        assert {part["index"] for part in parts} == set(range(count))
        for part in parts:
            check(oracles, part)


def test_aborted_while_running(oracles: Oracles, callers: dict[str, Caller]) -> None:
    """With what there is so far, in the form of every release."""
    for caller in callers.values():
        call = caller.begin_generate(PROMPT, ENDLESS, rid="cut", return_logprob=True, return_routed_experts=True)
        caller.await_row("cut", "running")
        caller.post("/abort_request", {"rid": "cut"})
        assert finish(oracles, call.result(WAIT_S))["type"] == "abort"


def test_aborted_while_queued(oracles: Oracles, callers: dict[str, Caller]) -> None:
    """With hardly anything, and that with fewer keys; old releases leave out `output_ids`."""
    for name, caller in callers.items():
        running = [caller.begin_generate(PROMPT, ENDLESS, rid=f"run{n}", routed_dp_rank=0) for n in range(_slots(name))]
        for number in range(len(running)):
            caller.await_row(f"run{number}", "running")
        call = caller.begin_generate(PROMPT, 10, rid="queued", return_logprob=True, routed_dp_rank=0)
        caller.await_row("queued", "waiting")
        caller.post("/abort_request", {"rid": "queued"})
        reply = call.result(WAIT_S)
        assert finish(oracles, reply)["message"] in {"Abort in waiting queue", "Abort before prefill"}
        caller.post("/abort_request", {"abort_all": True})


def _slots(name: str) -> int:
    return CONFIGS[name].max_running_requests


def test_aborted_after_a_retraction(oracles: Oracles, new: Caller) -> None:
    """Queued, but with tokens."""
    call = new.begin_generate(PROMPT, ENDLESS, rid="back", return_logprob=True)
    new.await_state(lambda state: state["tokens"] >= 20, "twenty tokens")
    new.post("/pause_generation", {"mode": "retract"})
    new.post("/abort_request", {"rid": "back"})
    reply = call.result(WAIT_S)
    assert finish(oracles, reply)["type"] == "abort"
    assert reply.ids


def test_aborts_with_a_status(oracles: Oracles, callers: dict[str, Caller]) -> None:
    """In a stream, a refusal of the scheduler is an answer: HTTP is at 200 already."""
    full = callers["full"]
    full.begin_generate(PROMPT, ENDLESS, rid="run")
    full.await_row("run", "running")
    full.begin_generate(PROMPT, ENDLESS, rid="wait")
    full.await_row("wait", "waiting")
    (event,) = streamed(full.post("/generate", generation(PROMPT, 4) | {"stream": True}))
    assert check(oracles, event)["status_code"] == 503


def test_errors_in_a_stream(oracles: Oracles, new: Caller) -> None:
    """What cannot be generated."""
    (event,) = streamed(new.post("/generate", generation(PROMPT, 50_000) | {"stream": True}))
    read = oracles.codec().GenerateStreamError.from_json_value(event).to_json_value()
    assert read["error"] == {name: event["error"][name] for name in ("message", "code")}
    assert read["error"]["code"] == 400


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True}])
def test_several_weights(fields: dict[str, Any], oracles: Oracles, new: Caller) -> None:
    """Each span of tokens with the version that produced it."""
    call = new.begin_generate(PROMPT, 2000, rid="spans", **fields)
    versions = [new.get("/model_info").json["weight_version"]]
    for label in (f"{versions[0]}+1", f"{versions[0]}+2"):
        enough = int(new.engine.state()["tokens"]) + 10
        until(lambda: new.engine.state()["tokens"], partial(operator.lt, enough), "ten tokens more")
        new.post("/pause_generation", {"mode": "in_place"})
        new.post("/update_weights_from_disk", {"model_path": "m", "weight_version": label, "flush_cache": False})
        new.post("/continue_generation", {})
        versions.append(label)
    reply = call.result(WAIT_S)
    finish(oracles, reply)
    read = oracles.codec().GenerateResponse.from_json_value(reply.json)
    assert [span.version for span in read.meta_info.weight_versions] == versions
    assert read.meta_info.weight_versions[-1].end == len(reply.ids) == 2000


def test_hidden_states(oracles: Oracles, callers: dict[str, Caller]) -> None:
    """The real engine sends the prompt's rows as one list, and then one row per token; its codec wants rows alone.

    The codec is generated from the contract of the Rust front end, which knows the mode "last" only. So the answer that
    the engine really gives is refused, with exactly these words, and everything else in it is not.
    """
    codec = oracles.codec()
    answer = callers["new"].generate(PROMPT, 4, return_hidden_states=True).json
    with pytest.raises(codec.JsonContractError) as refused:
        codec.GenerateResponse.from_json_value(answer)
    assert str(refused.value) == "invalid type: sequence, expected f64"
    rows = answer["meta_info"]["hidden_states"]
    check(oracles, answer | {"meta_info": answer["meta_info"] | {"hidden_states": [*rows[0], *rows[1:]]}})
    last = callers["0.5.18"].generate(PROMPT, 4, return_hidden_states="last")
    assert finish(oracles, last)["type"] == "length"


def test_the_codec_does_refuse(oracles: Oracles, new: Caller) -> None:
    """An oracle that takes everything would judge nothing."""
    codec = oracles.codec()
    answer = new.generate(PROMPT, 4, return_logprob=True).json
    for name, wrong in (("id", 7), ("finish_reason", "length"), ("output_token_logprobs", [["a", 1, None]])):
        with pytest.raises(codec.JsonContractError):
            codec.GenerateResponse.from_json_value(answer | {"meta_info": answer["meta_info"] | {name: wrong}})
