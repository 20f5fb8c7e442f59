"""Answers that cannot be right are refused; answers that merely lack something are not."""

from __future__ import annotations

import base64
import copy
import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutsync.dialects.base import Experts, Facts
from rolloutsync.dialects.sglang import SGLangDialect
from rolloutsync.errors import ProtocolError
from rolloutsync.payload import parse_json
from rolloutsync.sample import Finish, Prompt, Segment, WeightSpan

from .makers import answer, ids, prompt


def _decode(given_answer: Any, *, asked: Prompt | None = None, facts: Facts | None = None, rid: str = "r") -> Segment:
    return SGLangDialect().decode_generate(given_answer, asked or prompt(), rid, facts or Facts(), "auto")


def _refusal(given_answer: Any, **how: Any) -> str:
    with pytest.raises(ProtocolError) as caught:
        _decode(given_answer, **how)
    return str(caught.value)


def _without(given_answer: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The answer without those keys, at the top or in its meta_info."""
    changed = copy.deepcopy(given_answer)
    for key in keys:
        changed.pop(key, None)
        changed["meta_info"].pop(key, None)
    return changed


# --- B09: an error that comes as 200, or nothing that is an answer ----------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": {"message": "too long for me"}}, "too long for me"),
        ({"error": "too long for me"}, "too long for me"),
        ({"object": "error", "message": "too long for me", "code": 400}, "too long for me"),
        ({"object": "error", "code": 400}, "400"),
        ([], "[]"),
        (None, "None"),
        ("", "''"),
        ("text", "'text'"),
        (7, "7"),
        ({}, "{}"),
        ({"text": "x", "output_ids": [1]}, "output_ids"),
        ({"text": "x", "meta_info": None}, "meta_info"),
        ({"text": "x", "meta_info": []}, "meta_info"),
        ([answer([1]), answer([2])], "completion"),
        ([None], "completion"),
        ([[answer([1])]], "completion"),
    ],
)
def test_what_is_no_completion_is_refused_in_its_own_words(body: Any, words: str) -> None:
    """Never a sample; the engine's text is in the error."""
    assert words in _refusal(body)


def test_a_huge_thing_that_is_no_completion_is_not_shown_whole() -> None:
    """An engine's megabytes do not go into logs."""
    assert len(_refusal(["x" * 1_000_000])) < 1000


def test_a_list_of_one_is_that_one() -> None:
    """Some proxies make a batch of it (B24)."""
    assert _decode([answer([7, 8])]).output_ids.tolist() == [7, 8]


def test_an_abort_with_a_status_keeps_it() -> None:
    """So that an engine's error is told from an abort that was asked for."""
    reason = {"type": "abort", "message": "input too long", "status_code": 400, "err_type": "BadRequestError"}
    finish = _decode(answer([4], reason=reason)).finish
    assert finish == Finish(type="abort", message="input too long", status_code=400)


# --- whose answer is it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", ["another", "", "r0", "R", 5, ["r"]])
def test_another_requests_answer_is_refused(told: Any) -> None:
    """A stray answer would give a sample its neighbour's tokens."""
    assert "id" in _refusal(answer([1], id=told))


# --- B20: what may be missing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ({"type": "stop", "matched": 2}, Finish(type="stop", matched=2)),
        ({"type": "stop", "matched": [1, 2]}, Finish(type="stop", matched=[1, 2])),
        ({"type": "length", "length": 3}, Finish(type="length")),
        ({"type": "abort"}, Finish(type="abort")),
        ("abort", Finish(type="abort")),
        ("stop", Finish(type="stop")),
        (None, Finish()),
        ({}, Finish()),
        ({"type": None}, Finish()),
        ([], Finish()),
        (5, Finish()),
    ],
)
def test_finish_reasons(reason: Any, finish: Finish) -> None:
    """A dict, a plain string, null; what it does not say stays empty."""
    got = answer([1])
    got["meta_info"]["finish_reason"] = reason
    assert _decode(got).finish == finish


def test_a_missing_finish_reason_is_empty() -> None:
    """Whoever asked decides what that means."""
    assert _decode(_without(answer([1]), "finish_reason")).finish == Finish()


@pytest.mark.parametrize("ids_key", [{}, {"output_ids": []}, {"output_ids": None}])
@pytest.mark.parametrize("meta", [{}, {"output_token_logprobs": None}, {"output_token_logprobs": []}])
def test_an_abort_from_the_queue_has_next_to_nothing(ids_key: dict[str, Any], meta: dict[str, Any]) -> None:
    """The oldest and the newest forms: no tokens, no version, no counts, no error."""
    body = {"text": "", **ids_key, "meta_info": {"id": "r", "finish_reason": {"type": "abort"}, **meta}}
    segment = _decode(body)
    assert segment.output_ids.tolist() == []
    assert segment.logprobs is not None
    assert segment.logprobs.tolist() == []
    assert segment.weight_spans == ()
    assert segment.prompt_tokens is None


def test_a_retracted_request_keeps_its_tokens() -> None:
    """Aborted in the queue, but it had run before."""
    body = _without(answer([5, 6], reason="abort"), "prompt_tokens", "weight_version", "completion_tokens")
    segment = _decode(body)
    assert segment.output_ids.tolist() == [5, 6]
    assert segment.logprobs is not None
    assert segment.logprobs.tolist() == [-0.5, -1.5]
    assert segment.weight_spans == (WeightSpan(None, 0, 2),)


def test_ids_that_are_missing_are_read_from_the_logprobs() -> None:
    """Old engines name them there alone."""
    assert _decode(_without(answer([5, 6]), "output_ids")).output_ids.tolist() == [5, 6]


def test_text_may_be_missing() -> None:
    """An engine without a tokenizer sends none; ids are the truth."""
    assert _decode(_without(answer([5]), "text")).text == ""


# --- tokens and logprobs that must agree ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens", ["12", {"a": 1}, 5, [1.0], ["1"], [True], [None], [[1]], [2**31], [-(2**31) - 1], [10**30]]
)
def test_tokens_are_a_list_of_integers(tokens: Any) -> None:
    """Nothing is rounded, cut or guessed."""
    body = answer([1])
    body["output_ids"] = tokens
    assert "output_ids" in _refusal(body)


def test_a_whole_answer_has_tokens() -> None:
    """Without ids and logprobs there is no sample."""
    assert "no output_ids" in _refusal(_without(answer([1]), "output_ids", "output_token_logprobs"))


@pytest.mark.parametrize("told", [0, 1, 3])
def test_the_count_of_tokens_agrees(told: int) -> None:
    """A cut list is not an answer."""
    assert "completion_tokens" in _refusal(answer([1, 2], completion_tokens=told))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "2 output_ids but no"),
        ([], "2 output_ids but 0"),
        ([[-1, 1, None]], "2 output_ids but 1"),
        ([[-1, 1, None]] * 3, "2 output_ids but 3"),
        ({"0": 1}, "2 output_ids but no"),
        ([[-1, 1, None], [-1, 9, None]], "other tokens"),
        ([[-1, 2, None], [-1, 1, None]], "other tokens"),
        ([[-1, 1, None], [None, 2, None]], "token 1 is NaN, null or infinite"),
        ([[math.nan, 1, None], [-1, 2, None]], "token 0 is NaN, null or infinite"),
        ([[-1, 1, None], [-math.inf, 2, None]], "token 1 is NaN, null or infinite"),
        ([[-1, 1, None], [1e300, 2, None]], "token 1 is NaN, null or infinite"),
        ([[-1, 1, None], [10**400, 2, None]], "not a list of"),
        ([[-1, 1, None], []], "not a list of"),
        ([[-1, 1, None], [-1]], "not a list of"),
        ([[-1, 1, None], None], "not a list of"),
        ([[-1, 1, None], 5], "not a list of"),
        ([[-1, 1, None], ["x", 2, None]], "not a list of"),
        ([[-1, 1, None], [[1], 2, None]], "not a list of"),
        ([[-1, 1, None], [-1, "2", None]], "of other tokens"),
    ],
)
def test_logprobs_are_those_of_the_tokens(rows: Any, words: str) -> None:
    """One each, of the same tokens, and real numbers (B08): never padded, never COMPLETED with NaN."""
    body = answer([1, 2])
    body["meta_info"]["output_token_logprobs"] = rows
    assert words in _refusal(body)


def test_logprobs_that_nobody_asked_for_are_ignored() -> None:
    """And then nothing about them can be wrong."""
    quiet = prompt(fields={"return_logprob": False})
    assert _decode(answer([1], output_token_logprobs="?"), asked=quiet).logprobs is None


def test_nan_of_the_wire_is_refused() -> None:
    """From bytes to error, as an engine of Python writes it."""
    body = parse_json(
        b'{"text":"ab","output_ids":[5,6],"meta_info":{"id":"r","finish_reason":{"type":"stop"},'
        b'"output_token_logprobs":[[NaN,5,null],[-Infinity,6,null]]}}'
    )
    assert "logprob" in _refusal(body)


def test_broken_text_does_not_matter() -> None:
    """A lone surrogate or a half character in the text: the ids are the truth (B08)."""
    body = parse_json(rb'{"text":"\ud83d","output_ids":[],"meta_info":{"id":"r","finish_reason":{"type":"stop"}}}')
    assert _decode(body).text.encode() == "\ufffd".encode()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[[-1, 5, None]]], "rows"),
        ([[[-1, 5, None]], [[-1, 5, None], [-2, 6, None]]], "unequal"),
        ([[[-1, 5, None]], None], "unequal"),
        ([[[-1, 5, None]], 7], "not a list"),
        ([[[-1, 5, None]], "ab"], "not a list"),
        ([[[-1, 5, None]], [[-1]]], "output_top_logprobs"),
        ([[[-1, 5, None]], [[-1, "5", None]]], "output_top_logprobs"),
    ],
)
def test_top_logprobs_are_a_table(rows: Any, words: str) -> None:
    """The same number at each position."""
    asked = prompt(fields={"return_logprob": True, "top_logprobs_num": 1})
    assert words in _refusal(answer([1, 2], output_top_logprobs=rows), asked=asked)


def test_top_logprobs_may_hold_impossible_tokens() -> None:
    """A likeliest token of probability zero is null on the wire, NaN here."""
    asked = prompt(fields={"return_logprob": True, "top_logprobs_num": 2})
    body = answer([1], output_top_logprobs=[[[-0.5, 1, None], [None, 2, None]]])
    top = _decode(body, asked=asked).top_logprobs
    assert top is not None
    assert top.ids.tolist() == [[1, 2]]
    assert np.isnan(top.values[0, 1])


def test_prompt_ids_are_told() -> None:
    """For text prompts; refused if they are no ids."""
    assert _decode({**answer([1]), "prompt_token_ids": [4, 5]}).prompt_ids is not None
    assert "prompt_token_ids" in _refusal({**answer([1]), "prompt_token_ids": ["4"]})


def test_hidden_states_are_rows() -> None:
    """The prefill's chunks, then one row for each decoded token."""
    asked = prompt(fields={"return_hidden_states": True})
    states = [[[1.0, 2.0], [3.0, 4.0]], [5.0, 6.0]]
    rows = _decode(answer([1, 2], hidden_states=states), asked=asked).hidden_states
    assert rows is not None
    assert rows.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert rows.dtype == np.float32
    assert "hidden_states" in _refusal(answer([1], hidden_states=[[1.0], [1.0, 2.0]]), asked=asked)
    assert "hidden_states" in _refusal(answer([1], hidden_states=["x"]), asked=asked)


# --- weight versions --------------------------------------------------------------------------------------------------


def _spans(*parts: tuple[Any, Any, Any]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in parts]


@pytest.mark.parametrize(
    ("told", "spans"),
    [
        ({"weight_version": "7"}, (WeightSpan("7", 0, 3),)),
        ({"weight_version": 7}, (WeightSpan("7", 0, 3),)),
        ({"weight_version": None}, (WeightSpan(None, 0, 3),)),
        ({"weight_versions": []}, (WeightSpan("7", 0, 3),)),
        ({"weight_versions": None}, (WeightSpan("7", 0, 3),)),
        ({"weight_versions": _spans(("1", 0, 3))}, (WeightSpan("1", 0, 3),)),
        ({"weight_versions": _spans(("1", 0, 1), (2, 1, 3))}, (WeightSpan("1", 0, 1), WeightSpan("2", 1, 3))),
        ({"weight_versions": _spans(("1", 0, 0), ("2", 0, 3))}, (WeightSpan("2", 0, 3),)),
        ({"weight_versions": _spans((None, 0, 3))}, (WeightSpan(None, 0, 3),)),
    ],
)
def test_weight_versions(told: dict[str, Any], spans: tuple[WeightSpan, ...]) -> None:
    """Spans where the engine has them, else one; unknown is None and never another sample's."""
    assert _decode(answer([1, 2, 3], **told)).weight_spans == spans


def test_an_engine_without_versions() -> None:
    """Older than 0.5.1."""
    assert _decode(_without(answer([1]), "weight_version")).weight_spans == (WeightSpan(None, 0, 1),)


@pytest.mark.parametrize(
    "spans",
    [
        _spans(("1", 0, 2)),
        _spans(("1", 0, 4)),
        _spans(("1", 1, 3)),
        _spans(("1", 0, 1), ("2", 2, 3)),
        _spans(("1", 0, 2), ("2", 1, 3)),
        _spans(("1", 0, 4), ("2", 4, 3)),
        _spans(("2", 1, 3), ("1", 0, 1)),
        _spans(("1", -1, 3)),
        _spans(("1", 0, None)),
        _spans(("1", 0, "x")),
        _spans(("1", 0, math.inf)),
        _spans(("1", 0, math.nan)),
        [{"start": 0, "end": 3}],
        ["1"],
        [None],
    ],
)
def test_spans_tile_the_output(spans: list[Any]) -> None:
    """A token belongs to one version."""
    assert "weight_versions" in _refusal(answer([1, 2, 3], weight_versions=spans))


# --- B26: routed experts ----------------------------------------------------------------------------------------------


_ROUTED = Prompt(input_ids=ids(1, 2, 3), fields={"return_logprob": True, "return_routed_experts": True})
_SHAPE = Facts(experts=Experts(layers=2, topk=2, count=64))
_TABLE = np.arange(16, dtype=np.int32).reshape(4, 2, 2)  # 3 + 2 - 1 rows


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return _b64(file.getvalue())


@pytest.mark.parametrize("sent", [_b64(_TABLE.tobytes()), _npy(_TABLE), _TABLE.tolist(), _TABLE.ravel().tolist()])
def test_experts_in_every_form(sent: Any) -> None:
    """Raw int32, a numpy file, nested lists: the same array."""
    got = _decode(answer([8, 9], routed_experts=sent), asked=_ROUTED, facts=_SHAPE).routed_experts
    assert got is not None
    assert got.dtype == np.uint8
    assert np.array_equal(got, _TABLE)
    assert got.flags.owndata


@pytest.mark.parametrize(
    "sent",
    [
        _b64(_TABLE.tobytes())[:-1],
        _b64(_TABLE.tobytes()[:-1]),
        _b64(_TABLE.tobytes()[:-4]),
        _b64(_TABLE.tobytes() + b"\0" * 16),
        _b64(_TABLE[:3].tobytes()),
        _b64(b""),
        _b64((_TABLE + 250).tobytes()),
        _b64((_TABLE - 1).tobytes()),
        _npy(_TABLE.astype(np.float32)),
        _TABLE.astype(float).tolist(),
        _TABLE[:, :, 0].tolist(),
        {"a": 1},
        7,
        "",
    ],
)
def test_experts_that_do_not_fit_are_refused(sent: Any) -> None:
    """Wrong padding, odd size, too few or too many rows, ids beyond the type: never reshaped into something."""
    words = _refusal(answer([8, 9], routed_experts=sent), asked=_ROUTED, facts=_SHAPE)
    assert words.startswith("routed_experts")
    assert len(words) < 400


@pytest.mark.parametrize("sent", [{}, {"routed_experts": None}])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_missing_experts_name_the_servers_flag(sent: dict[str, Any], reason: str) -> None:
    """On the very first answer, not hours later in the trainer."""
    words = _refusal(answer([8, 9], reason=reason, **sent), asked=_ROUTED, facts=_SHAPE)
    assert "--enable-return-routed-experts" in words


def test_an_aborted_answer_may_lack_experts() -> None:
    """One from the queue has none."""
    assert _decode(answer([8, 9], reason="abort"), asked=_ROUTED, facts=_SHAPE).routed_experts is None


def test_experts_that_nobody_asked_for_are_ignored() -> None:
    """Their value is not even looked at."""
    assert _decode(answer([8, 9], routed_experts=7)).routed_experts is None


def test_rows_are_counted_from_the_engines_own_prompt() -> None:
    """An image is one id for us and many tokens for the engine."""
    table = np.arange(4 * (50 + 2 - 1), dtype=np.int32) % 8
    body = answer([8, 9], prompt_tokens=50, routed_experts=_b64(table.tobytes()))
    got = _decode(body, asked=_ROUTED, facts=_SHAPE).routed_experts
    assert got is not None
    assert got.shape == (51, 2, 2)


def test_rows_of_a_text_prompt_need_the_engines_count() -> None:
    """Nothing else says how long it is."""
    asked = Prompt(text="a", fields=_ROUTED.fields)
    body = _without(answer([8, 9], routed_experts=_b64(_TABLE.tobytes())), "prompt_tokens")
    assert "prompt tokens" in _refusal(body, asked=asked, facts=_SHAPE)


def _from(start: Any) -> Prompt:
    return Prompt(input_ids=_ROUTED.input_ids, fields={**_ROUTED.fields, "routed_experts_start_len": start})


@pytest.mark.parametrize("facts", [_SHAPE, Facts(version="0.5.9", experts=_SHAPE.experts), Facts(version="0.5.9")])
def test_an_engine_that_ignores_the_start_has_its_first_rows_cut(facts: Facts) -> None:
    """Known by the size where the shape is known, by the version else."""
    body = answer([8, 9], routed_experts=_b64(_TABLE.tobytes()))
    got = _decode(body, asked=_from(3), facts=facts).routed_experts
    assert got is not None
    assert got.reshape(1, 4).tolist() == [[12, 13, 14, 15]]


@pytest.mark.parametrize("facts", [_SHAPE, Facts(version="0.5.23", experts=_SHAPE.experts), Facts(version="0.5.23")])
def test_an_engine_that_obeys_the_start_sent_the_rest(facts: Facts) -> None:
    """The same values by either way of knowing."""
    body = answer([8, 9], routed_experts=_b64(_TABLE[2:].tobytes()))
    got = _decode(body, asked=_from(2), facts=facts).routed_experts
    assert got is not None
    assert got.reshape(2, 4).tolist() == _TABLE[2:].reshape(2, 4).tolist()


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
    """16 values may be 4 rows of 4, or 2 rows of 8: no guess."""
    body = answer([8, 9], routed_experts=_b64(_TABLE.tobytes()))
    assert "routed_experts_shape" in _refusal(body, asked=_from(2))


@pytest.mark.parametrize("facts", [_SHAPE, Facts(version="0.5.23")])
def test_a_start_after_the_last_row_leaves_none(facts: Facts) -> None:
    """One new token and all of the prompt skipped."""
    got = _decode(answer([8], routed_experts=""), asked=_from(3), facts=facts).routed_experts
    assert got is not None
    assert got.shape[0] == 0


def test_a_start_of_none_is_no_start() -> None:
    """Null is the engine's default."""
    body = answer([8, 9], routed_experts=_b64(_TABLE.tobytes()))
    got = _decode(body, asked=_from(None), facts=_SHAPE).routed_experts
    assert got is not None
    assert got.shape == (4, 2, 2)


# --- everything else --------------------------------------------------------------------------------------------------


_odd: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        2**40,
        1.5,
        math.nan,
        math.inf,
        "",
        "x",
        "stop",
        [],
        [None],
        [[]],
        [1],
        [[1, 2]],
        {},
        {"type": 1},
    ]
)


@settings(max_examples=500)
@given(st.data())
def test_any_mutation_decodes_or_is_refused(data: st.DataObject) -> None:
    """Whatever stands in whatever place: a consistent segment or a ProtocolError, never another exception."""
    fields = {
        "return_logprob": True,
        "top_logprobs_num": 1,
        "return_routed_experts": True,
        "return_hidden_states": True,
    }
    asked = Prompt(input_ids=ids(1, 2, 3), fields=fields)
    body = answer(
        [8, 9],
        reason=data.draw(st.sampled_from(["stop", "length", "abort"])),
        routed_experts=_b64(_TABLE.tobytes()),
        output_top_logprobs=[[[-1, 8, None]], [[-1, 9, None]]],
        input_token_logprobs=[[None, 1, None]],
        hidden_states=[[[1.0]], [2.0]],
        weight_versions=_spans(("1", 0, 2)),
    )
    spots: list[tuple[Any, Any]] = [(body, key) for key in body] + [
        (body["meta_info"], key) for key in body["meta_info"]
    ]
    spots += [(body["output_ids"], 0), (body["meta_info"]["output_token_logprobs"], 1)]
    spots += [(body["meta_info"]["weight_versions"][0], "end"), (body["meta_info"]["output_top_logprobs"], 0)]
    for holder, key in data.draw(st.lists(st.sampled_from(spots), max_size=3)):
        holder[key] = data.draw(_odd)
    try:
        segment = _decode(body, asked=asked, facts=_SHAPE)
    except ProtocolError:
        return
    count = len(segment.output_ids)
    assert segment.logprobs is not None
    assert len(segment.logprobs) == count
    assert np.isfinite(segment.logprobs).all()
    assert sum(span.end - span.start for span in segment.weight_spans) == count
