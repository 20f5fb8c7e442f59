"""Answers of real engines, recorded, and exactly what they decode to."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from rolloutsync.dialects.base import Experts, Facts, LoadKind
from rolloutsync.dialects.sglang import SGLangDialect
from rolloutsync.errors import ProtocolError
from rolloutsync.sample import Finish, Prompt, WeightSpan

from .golden import all_recorded, decoded, prompt_of, recorded
from .makers import ids

_MOE = Experts(layers=2, topk=2, count=8)
_PROMPT = [5, 30, 70, 100, 12, 44]
_DIALECT = SGLangDialect()


def _same_floats(got: object, *expected: float) -> bool:
    return isinstance(got, np.ndarray) and got.dtype == np.float32 and np.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(("version", "name"), all_recorded())
def test_every_recorded_answer_decodes_or_is_refused(version: str, name: str) -> None:
    """Nothing that an engine was ever seen to say raises anything but our own error."""
    exchange = recorded(name, version)
    if exchange.path != "/generate" or exchange.status != 200 or isinstance(exchange.answer, list):
        return
    if "experts_not_enabled" in name:
        with pytest.raises(ProtocolError, match="--enable-return-routed-experts"):
            decoded(name, version)
        return
    segment = decoded(name, version)
    raw = exchange.answer
    assert segment.output_ids.tolist() == raw["output_ids"]
    assert segment.text == raw["text"]
    assert segment.finish.type == raw["meta_info"]["finish_reason"]["type"]
    assert (segment.logprobs is None) == (not exchange.request.get("return_logprob"))
    if segment.logprobs is not None:
        rows = raw["meta_info"]["output_token_logprobs"]
        assert segment.logprobs.tolist() == np.array([row[0] for row in rows], np.float32).tolist()
    ends = [0, *(span.end for span in segment.weight_spans)]
    assert ends[-1] == len(segment.output_ids)


def test_length() -> None:
    """An ordinary answer, cut by max_new_tokens."""
    segment = decoded("length")
    raw = recorded("length").answer["meta_info"]
    assert segment.finish == Finish(type="length")
    assert len(segment.output_ids) == 8
    assert segment.output_ids.dtype == np.int32
    assert segment.weight_spans == (WeightSpan("default", 0, 8),)
    assert (segment.prompt_tokens, segment.cached_tokens, segment.dp_rank) == (6, raw["cached_tokens"], None)
    assert segment.prompt_logprobs is None
    assert all(
        getattr(segment, name) is None for name in ("routed_experts", "top_logprobs", "hidden_states", "prompt_ids")
    )
    assert segment.meta_info["e2e_latency"] == raw["e2e_latency"]
    assert segment.meta_info["id"] == raw["id"]
    assert not {"output_token_logprobs", "input_token_logprobs", "finish_reason"} & segment.meta_info.keys()


def test_stop_by_token_and_by_string() -> None:
    """The stop token is among the ids, and the text is trimmed; what matched is told."""
    by_token = decoded("stop_token")
    assert by_token.finish == Finish(type="stop", matched=376)
    assert by_token.output_ids.tolist()[-1] == 376
    by_string = decoded("stop_string")
    assert by_string.finish == Finish(type="stop", matched="e")
    assert by_string.output_ids.tolist() == [358, 226, 61, 263]
    assert by_string.text == " wor\x7fY"


def test_prompt_and_top_logprobs() -> None:
    """The first prompt token has none, which is NaN; the two likeliest at each output position."""
    segment = decoded("input_and_top_logprobs")
    assert segment.output_ids.tolist() == [345, 225, 354, 475, 104, 415, 183, 314]
    assert segment.logprobs is not None
    assert _same_floats(segment.logprobs[:2], -6.153759002685547, -6.19023323059082)
    assert segment.prompt_logprobs is not None
    assert np.isnan(segment.prompt_logprobs[0])
    assert len(segment.prompt_logprobs) == 6
    assert _same_floats(segment.prompt_logprobs[1:3], -6.267753601074219, -6.647507667541504)
    assert segment.top_logprobs is not None
    assert segment.top_logprobs.ids.tolist()[:2] == [[279, 159], [222, 211]]
    assert segment.top_logprobs.ids.shape == segment.top_logprobs.values.shape == (8, 2)
    assert segment.top_logprobs.ids.dtype == np.int32
    assert _same_floats(segment.top_logprobs.values[7], -5.864238262176514, -5.887675762176514)


def test_no_new_tokens() -> None:
    """A prefill alone: no output, and the prompt's logprobs."""
    segment = decoded("no_new_tokens")
    assert segment.finish == Finish(type="length")
    assert segment.output_ids.tolist() == []
    assert segment.logprobs is not None
    assert segment.logprobs.tolist() == []
    assert segment.weight_spans == ()
    assert segment.prompt_logprobs is not None
    assert len(segment.prompt_logprobs) == 6


def _expert_ids(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    raw = recorded(name).answer["meta_info"]["routed_experts"]
    return np.frombuffer(base64.b64decode(raw), np.int32)


def test_routed_experts() -> None:
    """One row for each token but the last: [6 + 8 - 1, layers, topk], in the narrowest type that holds the model's."""
    segment = decoded("experts", facts=Facts(experts=_MOE))
    assert segment.routed_experts is not None
    assert segment.routed_experts.shape == (13, 2, 2)
    assert segment.routed_experts.dtype == np.uint8
    assert segment.routed_experts[0].tolist() == [[7, 1], [4, 7]]
    assert segment.routed_experts[-1].tolist() == [[5, 6], [0, 1]]
    assert segment.routed_experts.ravel().tolist() == _expert_ids("experts").tolist()
    assert "routed_experts" not in segment.meta_info


def test_routed_experts_of_unknown_shape_and_type() -> None:
    """Rows are known always; where nothing else is, a row stays flat and int32."""
    flat = decoded("experts", facts=Facts()).routed_experts
    assert flat is not None
    assert (flat.shape, flat.dtype) == ((13, 4), np.dtype(np.int32))
    chosen = decoded("experts", facts=Facts(), dtype="uint16").routed_experts
    assert chosen is not None
    assert chosen.dtype == np.uint16
    with pytest.raises(ProtocolError, match="routed_experts"):
        decoded("experts", facts=Facts(experts=Experts(layers=3, topk=2)))


def test_routed_experts_from_a_later_row_on() -> None:
    """``routed_experts_start_len=4`` of 6 + 3 - 1 rows leaves four."""
    segment = decoded("experts_start", facts=Facts(experts=_MOE))
    assert segment.routed_experts is not None
    assert segment.routed_experts.shape == (4, 2, 2)
    assert segment.routed_experts[0].tolist() == [[7, 0], [5, 1]]
    flat = decoded("experts_start", facts=Facts(version="0.5.23")).routed_experts
    assert flat is not None
    assert flat.shape == (4, 4)
    with pytest.raises(ProtocolError, match="routed_experts_shape"):
        decoded("experts_start", facts=Facts())  # 16 values may be 4 rows of 4 or 8 rows of 2


def test_routed_experts_of_an_aborted_sample() -> None:
    """A running abort brings its rows along."""
    segment = decoded("experts_aborted", facts=Facts(experts=_MOE))
    assert segment.finish.type == "abort"
    assert segment.routed_experts is not None
    assert segment.routed_experts.shape == (6 + 856 - 1, 2, 2)
    assert segment.routed_experts.ravel().tolist() == _expert_ids("experts_aborted").tolist()


@pytest.mark.parametrize("version", ["0.5.23", "0.5.9"])
def test_abort_while_running(version: str) -> None:
    """HTTP 200 with what there was so far."""
    segment = decoded("abort_running", version)
    assert segment.finish == Finish(type="abort", message="Aborted", status_code=None)
    tokens = len(recorded("abort_running", version).answer["output_ids"])
    assert len(segment.output_ids) == tokens > 200
    assert segment.logprobs is not None
    assert len(segment.logprobs) == tokens
    assert segment.weight_spans == (WeightSpan("default", 0, tokens),)
    assert segment.prompt_tokens == 6


@pytest.mark.parametrize("version", ["0.5.23", "0.5.9"])
def test_abort_while_queued(version: str) -> None:
    """HTTP 200 with nothing, not even a count of prompt tokens."""
    segment = decoded("abort_queued", version)
    assert segment.finish == Finish(type="abort", message="Abort in waiting queue")
    assert segment.output_ids.tolist() == []
    assert segment.logprobs is not None
    assert segment.logprobs.tolist() == []
    assert segment.weight_spans == ()
    assert all(getattr(segment, name) is None for name in ("prompt_tokens", "cached_tokens", "prompt_logprobs"))


def test_data_parallel_rank() -> None:
    """The rank that ran it is told."""
    exchange = recorded("abort_running_dp").answer["meta_info"]
    assert decoded("abort_running_dp").dp_rank == exchange["dp_rank"]


def test_a_weight_update_in_between() -> None:
    """The spans say which weights made which tokens."""
    segment = decoded("two_weight_versions")
    assert segment.weight_spans == (WeightSpan("w-in_place", 0, 250), WeightSpan("w-retract", 250, 900))
    assert len(segment.output_ids) == 900


def test_two_answers_for_one_request_are_refused() -> None:
    """Members are separate requests: nobody asked for n=2."""
    with pytest.raises(ProtocolError, match="not a completion"):
        _DIALECT.decode_generate(recorded("n2").answer, prompt_of(recorded("n2")), "r", Facts(), "auto")


# --- load -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "kind", "counts", "stamps"),
    [
        ("loads_idle", "0.5.23", LoadKind.ZERO, (0, 0, 0), (1795963781.106301,)),
        ("loads_core_idle", "0.5.23", LoadKind.ZERO, (0, 0, 0), (1795963781.1032536,)),
        ("loads_busy", "0.5.23", LoadKind.BUSY, (4, 16, 2914), (1795963785.745735,)),
        ("loads_paused", "0.5.23", LoadKind.BUSY, (1, 0, 292), (1795963801.5997012,)),
        ("loads_idle", "0.5.9", LoadKind.ZERO, (0, 0, 0), None),
        ("loads_busy", "0.5.9", LoadKind.BUSY, (4, 8, 3318), None),
        ("loads_paused", "0.5.9", LoadKind.BUSY, (1, 0, 393), None),
        ("get_load_idle", "0.5.9", LoadKind.ZERO, (0, 0, 0), None),
        ("get_load_busy", "0.5.9", LoadKind.BUSY, (4, 4, 3346), None),
    ],
)
def test_loads(
    name: str, version: str, kind: LoadKind, counts: tuple[int, int, int], stamps: tuple[float, ...] | None
) -> None:
    """Idle, busy and paused, of both forms and both endpoints. Stamps are each rank's own, never the outer one."""
    exchange = recorded(name, version)
    call = next(call for call in _DIALECT.load_calls() if exchange.path.startswith(call.path))
    reading = _DIALECT.read_load(call, exchange.answer, 1)
    assert reading.kind is kind
    assert (reading.running, reading.tokens) == (counts[0], counts[2])
    assert (reading.waiting > 0) == (counts[1] > 0)
    assert reading.stamps == stamps


def test_loads_of_two_ranks() -> None:
    """Both are counted, both have a stamp; one alone does not do for two, two do for one that did not say."""
    answer = recorded("loads_dp2_busy").answer
    call = _DIALECT.load_calls()[0]
    reading = _DIALECT.read_load(call, answer, 2)
    ranks = answer["loads"]
    assert reading.kind is LoadKind.BUSY
    assert reading.running == sum(rank["num_running_reqs"] for rank in ranks)
    assert reading.stamps == tuple(rank["timestamp"] for rank in ranks)
    assert _DIALECT.read_load(call, {**answer, "loads": ranks[:1]}, 2).kind is LoadKind.UNKNOWN
    assert _DIALECT.read_load(call, {**answer, "loads": [ranks[0], ranks[0]]}, 2).kind is LoadKind.UNKNOWN
    assert _DIALECT.read_load(call, answer, 1).kind is LoadKind.BUSY


def test_a_load_without_ranks_proves_nothing() -> None:
    """An empty list is no zero."""
    call = _DIALECT.load_calls()[0]
    assert _DIALECT.read_load(call, recorded("loads_no_ranks").answer, 1).kind is LoadKind.UNKNOWN


# --- facts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "facts"),
    [
        ("server_info", "0.5.23", ("0.5.23", 1, 4, "tiny-llama")),
        ("server_info_dp2", "0.5.23", ("0.5.23", 2, 8, "tiny-qwen3-moe")),
        ("server_info", "0.5.9", ("0.5.9", 1, 4, "tiny-llama")),
    ],
)
def test_facts(name: str, version: str, facts: tuple[str, int, int, str]) -> None:
    """The running limit is over all ranks."""
    told = _DIALECT.read_facts(recorded(name, version).answer)
    assert (told.version, told.dp_size, told.running_limit, told.model_path) == facts
    assert told.weight_version == "default"


# --- requests ---------------------------------------------------------------------------------------------------------


def _accepted_keys(path: str) -> set[str]:
    """Body keys of recorded requests to ``path`` that an engine answered with 200."""
    bodies = [recorded(name, version) for version, name in all_recorded()]
    return {
        key for exchange in bodies if exchange.path == path and exchange.status == 200 for key in exchange.request or ()
    }


def test_generate_requests_use_only_accepted_keys() -> None:
    """All that we add ourselves was seen to be accepted by an engine; nothing is sent as null."""
    call = _DIALECT.encode_generate(
        Prompt(input_ids=ids(*_PROMPT), fields={"return_logprob": True}, sampling_params={"max_new_tokens": 8}),
        "ab" * 16,
        facts=Facts(version="0.5.23"),
        dp_rank=0,
    )
    body = json.loads(call.body or b"")
    assert body == {
        "input_ids": _PROMPT,
        "sampling_params": {"max_new_tokens": 8},
        "return_logprob": True,
        "rid": "ab" * 16,
        "routed_dp_rank": 0,
    }
    assert body.keys() <= _accepted_keys("/generate")
    assert (call.method, call.path, call.admin, call.long) == ("POST", "/generate", False, False)


@pytest.mark.parametrize(("version", "name"), all_recorded())
def test_recorded_requests_are_the_ones_we_would_send(version: str, name: str) -> None:
    """Their sampling parameters pass our check unchanged, and the body is the same but for the rid."""
    exchange = recorded(name, version)
    if exchange.path != "/generate" or exchange.status != 200 or name in {"n2", "unknown_field"}:
        return
    prompt = prompt_of(exchange)
    assert _DIALECT.check_sampling(prompt.sampling_params) == exchange.request["sampling_params"]
    call = _DIALECT.encode_generate(prompt, "r", facts=Facts(version=version), dp_rank=None)
    told = {"return_prompt_token_ids": True} if "text" in exchange.request else {}  # what a partial's resume needs
    assert json.loads(call.body or b"") == {**exchange.request, **told, "rid": "r"}


def test_control_requests_are_the_recorded_ones() -> None:
    """Method, path and body of each control call."""
    calls = {
        "abort_all": _DIALECT.abort(None),
        "abort_rid": _DIALECT.abort("Lrid1"),
        "pause_abort": _DIALECT.pause("abort"),
        "pause_in_place": _DIALECT.pause("in_place"),
        "pause_retract": _DIALECT.pause("retract"),
        "continue": _DIALECT.resume(),
        "release_memory": _DIALECT.release_memory(None),
        "resume_memory": _DIALECT.resume_memory(None),
        "loads_idle": _DIALECT.load_calls()[0],
        "server_info": _DIALECT.facts_calls()[0],
        "model_info": _DIALECT.version_call(),
    }
    for name, call in calls.items():
        exchange = recorded(name)
        assert (call.method, call.path) == (exchange.method, exchange.path), name
        assert (json.loads(call.body) if call.body else None) == exchange.request, name
        assert exchange.status == 200
    old = recorded("get_load_idle", "0.5.9")
    assert (_DIALECT.load_calls()[1].method, _DIALECT.load_calls()[1].path) == (old.method, old.path)
    assert (_DIALECT.flush.method, _DIALECT.flush.path) == ("POST", recorded("flush_cache").path)
    assert recorded("error_continue_without_body", "0.5.9").status == 400
