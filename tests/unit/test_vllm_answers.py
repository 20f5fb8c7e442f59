"""vLLM's answers: recorded ones, and those that cannot be right."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutsync.dialects.base import Facts
from rolloutsync.errors import ProtocolError
from rolloutsync.sample import Finish, Prompt, Status, WeightSpan, status_of

from .makers import ids
from .vllm_makers import ASKED, PROMPT, RID, asking, decode, entry, from_completions, from_tokens
from .vllm_recorded import all_recorded, decoded, prompt_of, recorded, rid_of

_GENERATES = {"/inference/v1/generate", "/v1/completions"}
_KEYS = (
    *("token_ids", "logprobs", "content", "finish_reason", "weight_versions", "token_id", "logprob", "version"),
    *("start", "end", "routed_experts"),
)
_SCALARS = st.none() | st.integers() | st.text(max_size=4) | st.floats()


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4)


# --- recorded ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", all_recorded())
def test_every_recorded_answer_decodes_or_is_refused(name: str) -> None:
    """Nothing that a real engine was seen to say raises anything but our own error."""
    exchange = recorded(name)
    if exchange.path not in _GENERATES or exchange.status != 200:
        return
    if len(exchange.answer["choices"]) != 1 or exchange.answer["choices"][0]["token_ids"] is None:
        with pytest.raises(ProtocolError):
            decoded(name, prompt=PROMPT)
        return
    if "logprobs" in exchange.request and "return_tokens_as_token_ids" not in exchange.request:
        with pytest.raises(ProtocolError, match="not named by its id"):
            decoded(name)
        return
    segment, choice = decoded(name), exchange.answer["choices"][0]
    assert segment.output_ids.tolist() == choice["token_ids"]
    assert segment.finish.type == choice["finish_reason"]
    assert segment.prompt_tokens == exchange.answer["usage"]["prompt_tokens"]
    assert (segment.logprobs is not None) == bool(prompt_of(exchange).fields)
    assert [span.end for span in segment.weight_spans][-1:] == [len(choice["token_ids"])][: len(segment.weight_spans)]


def test_tokens_in_and_out() -> None:
    """An ordinary answer of the token route."""
    segment, raw = decoded("generate_reqid"), recorded("generate_reqid").answer["choices"][0]
    assert segment.finish == Finish(type="length")
    assert segment.logprobs is not None
    assert segment.logprobs.dtype == np.float32
    assert np.allclose(segment.logprobs, [entry["logprob"] for entry in raw["logprobs"]["content"]])
    assert segment.weight_spans == (WeightSpan("default", 0, 8),)
    assert "weight_versions" in segment.meta_info


def test_a_stop_token_is_told() -> None:
    """As the engine words it."""
    assert decoded("generate_stop_ids").finish == Finish(type="stop", matched=324)


def test_an_aborted_request_keeps_its_tokens() -> None:
    """200, with what there is."""
    segment = decoded("gen_pause_abort")
    assert status_of(segment.finish) is Status.ABORTED
    assert len(segment.output_ids) == 115
    assert segment.logprobs is not None
    assert len(segment.logprobs) == 115


def test_an_aborted_request_that_never_ran_is_empty() -> None:
    """No tokens, no logprobs, no spans."""
    segment = decoded("gen_abort_all_4")
    assert segment.output_ids.tolist() == []
    assert segment.logprobs is not None
    assert segment.logprobs.tolist() == []
    assert segment.weight_spans == ()


def test_logprobs_of_the_prompt() -> None:
    """The first is NaN, the others are the prompt's own tokens'."""
    exchange = recorded("generate_prompt_logprobs")
    whole = decoded("generate_prompt_logprobs").prompt_logprobs
    assert whole is not None
    expected = [
        row[str(t)]["logprob"]
        for row, t in zip(exchange.answer["prompt_logprobs"], exchange.request["token_ids"], strict=True)
        if row
    ]
    assert np.isnan(whole[0])
    assert np.allclose(whole[1:], expected)
    later = Prompt(input_ids=ids(*exchange.request["token_ids"]), fields={**ASKED, "logprob_start_len": 4})
    cut = decoded("generate_prompt_logprobs", prompt=later).prompt_logprobs
    assert cut is not None
    assert np.allclose(cut, expected[3:])


def test_a_text_prompt_gets_its_token_ids() -> None:
    """A resume needs them."""
    exchange = recorded("compl_long_aborted_all_0")
    segment = decoded("compl_long_aborted_all_0", prompt=Prompt(text="hello"))
    assert segment.prompt_ids is not None
    assert segment.prompt_ids.tolist() == exchange.request["prompt"]
    assert segment.text == exchange.answer["choices"][0]["text"]
    assert segment.weight_spans == (WeightSpan(None, 0, len(segment.output_ids)),)


# --- whose answer it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        from_tokens([5], top={"request_id": "generate-tokens-" + "cd" * 16}),
        from_tokens([5], top={"request_id": RID}),
        from_tokens([5], top={"request_id": f"cmpl-{RID}"}),
        from_tokens([5], top={"request_id": f"generate-tokens-{RID}-0"}),
        from_tokens([5], top={"request_id": None}),
        from_tokens([5], top={"request_id": 7}),
        from_completions([5], top={"id": f"cmpl-{RID}-0"}),
        from_completions([5], top={"id": f"generate-tokens-{RID}"}),
        from_completions([5], top={"id": None}),
    ],
)
def test_another_requests_answer_is_refused(answer: Any) -> None:
    """Also one whose id has another form."""
    with pytest.raises(ProtocolError, match="another request's id"):
        decode(answer)


@pytest.mark.parametrize(
    ("version", "told", "fits"),
    [
        ("0.24.0", "0" * 32, True),
        ("0.16.0", f"generate-tokens-{'cd' * 16}", False),
        (None, "0" * 32, True),
        ("0.1.dev1+g123", "0" * 32, True),
        ("0.25.0", "0" * 32, False),
    ],
)
def test_old_engines_answer_with_an_id_of_their_own(version: str | None, told: str, fits: bool) -> None:
    """Up to 0.24 the token route makes one up; in the right form it must still be ours."""
    answer = from_tokens([5], top={"request_id": told})
    if fits:
        assert decode(answer, facts=Facts(version=version)).output_ids.tolist() == [5]
    else:
        with pytest.raises(ProtocolError, match="another request's id"):
            decode(answer, facts=Facts(version=version))


def test_an_answer_to_another_prompt_is_refused() -> None:
    """Where the engine tells the prompt's ids they are compared."""
    with pytest.raises(ProtocolError, match="another prompt"):
        decode(from_completions([5], prompt_token_ids=[1, 2, 4]))


# --- what cannot be right ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        "text",
        7,
        {},
        {"choices": None},
        {"choices": []},
        {"choices": [7]},
        {"choices": [{}, {}]},
        {"error": {"message": "no", "type": "x", "code": 400}},
        from_tokens([5], token_ids=None),
        from_tokens([5], token_ids="5"),
        from_tokens([5], token_ids=[5.0]),
        from_tokens([5], token_ids=[True]),
        from_tokens([5], token_ids=[2**31]),
        from_tokens([5], token_ids=[5, 6]),
        from_tokens([5], logprobs=None),
        from_tokens([5], logprobs=[]),
        from_tokens([5], logprobs={}),
        from_tokens([5], logprobs={"content": None}),
        from_tokens([5], logprobs={"content": [None]}),
        from_tokens([5], logprobs={"content": [entry(6)]}),
        from_tokens([5], logprobs={"content": [entry(5), entry(5)]}),
        from_tokens([5], logprobs={"content": [{"token_id": 5, "logprob": None}]}),
        from_tokens([5], logprobs={"content": [{"token_id": 5, "logprob": "-1"}]}),
        from_tokens([5], logprobs={"content": [{"token_id": 5, "logprob": float("nan")}]}),
        from_tokens([5], logprobs={"content": [{"token_id": 5, "logprob": 1e300}]}),
        from_tokens([5], logprobs={"content": [{"token_id": 5}]}),
        from_tokens([5], logprobs={"content": [{"token_id": 5, "logprob": -9999.0, "top_logprobs": []}]}),
        from_tokens([5], logprobs={"content": [{"token": "five", "logprob": -1.0}]}),
        from_tokens([5], logprobs={"content": [{"token": "token_id:x", "logprob": -1.0}]}),
        from_completions([5], logprobs={"tokens": ["token_id:5"], "token_logprobs": [None]}),
        from_completions([5], logprobs={"tokens": ["token_id:5"], "token_logprobs": []}),
        from_completions([5], logprobs={"tokens": ["five"], "token_logprobs": [-1.0]}),
        from_completions([5], logprobs={"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": [7]}),
        from_tokens([5], weight_versions=[{"version": "1", "start": 0, "end": 2}]),
        from_tokens([5], weight_versions=[{"version": "1", "start": 1, "end": 1}]),
        from_tokens([5], weight_versions=[{"version": "1"}]),
        from_tokens([5], weight_versions=[None]),
    ],
)
def test_what_cannot_be_right_is_refused(answer: Any) -> None:
    """A missing logprob is never 0.0, and nothing is padded."""
    with pytest.raises(ProtocolError):
        decode(answer)


@given(st.recursive(_SCALARS, _nested, max_leaves=12))
def test_no_answer_raises_anything_else(choice: Any) -> None:
    """Whatever stands in the choice."""
    wanting = asking(return_routed_experts=True, top_logprobs_num=2, logprob_start_len=0)
    answer = {"request_id": f"generate-tokens-{RID}", "choices": [choice]}
    try:
        segment = decode(answer, wanting)
    except ProtocolError:
        return
    assert segment.logprobs is not None
    assert len(segment.logprobs) == len(segment.output_ids)


def test_logprobs_that_nobody_asked_for_are_not_looked_at() -> None:
    """As with SGLang."""
    assert decode(from_tokens([5], logprobs={"content": [None]}), Prompt(input_ids=ids(1, 2, 3))).logprobs is None


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), max_size=6))
def test_spans_tile_the_output_or_are_refused(lengths: list[int]) -> None:
    """Whatever their lengths; empty ones are dropped."""
    edges = np.cumsum([0, *lengths]).tolist()
    spans = [{"version": str(n), "start": a, "end": b} for n, (a, b) in enumerate(itertools.pairwise(edges))]
    tokens = list(range(edges[-1]))
    got = decode(from_tokens(tokens, weight_versions=spans)).weight_spans
    assert sum(span.end - span.start for span in got) == len(tokens)
    assert all(span.end > span.start for span in got)
    if len(spans) > 1 and edges[-1]:
        with pytest.raises(ProtocolError, match="do not tile"):
            decode(from_tokens([*tokens, 5], weight_versions=spans))


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "finish", "status"),
    [
        ("stop", Finish("stop"), Status.COMPLETED),
        ("length", Finish("length"), Status.TRUNCATED),
        ("abort", Finish("abort"), Status.ABORTED),
        ("repetition", Finish("stop", message="repetition"), Status.COMPLETED),
        (None, Finish(""), Status.ABORTED),
        ("new", Finish("new"), Status.ABORTED),
    ],
)
def test_finish_reasons(reason: Any, finish: Finish, status: Status) -> None:
    """A repetition was asked for: it is not resumed."""
    got = decode(from_tokens([5], finish_reason=reason)).finish
    assert got == finish
    assert status_of(got) is status


def test_an_error_is_the_engines_own_abort() -> None:
    """Old versions answer 200 with it."""
    finish = decode(from_tokens([5], finish_reason="error")).finish
    assert (finish.type, finish.status_code) == ("abort", 500)


# --- likeliest tokens -------------------------------------------------------------------------------------------------


def test_the_likeliest_come_in_order_without_the_sampled_one_that_is_not() -> None:
    """The token route names the sampled token first."""
    top = [{"token_id": 5, "logprob": -3.0}, {"token_id": 8, "logprob": -0.1}, {"token_id": 9, "logprob": -1.0}]
    answer = from_tokens([5], logprobs={"content": [entry(5, -3.0, top_logprobs=top)]})
    got = decode(answer, asking(top_logprobs_num=2)).top_logprobs
    assert got is not None
    assert got.ids.tolist() == [[8, 9]]
    assert np.allclose(got.values, [[-0.1, -1.0]])


def test_the_likeliest_of_a_completion() -> None:
    """Its form is a mapping by name."""
    columns = {
        "tokens": ["token_id:5", "token_id:6"],
        "token_logprobs": [-3.0, -0.2],
        "top_logprobs": [{"token_id:5": -3.0, "token_id:8": -0.1}, {"token_id:6": -0.2}],
    }
    got = decode(from_completions([5, 6], logprobs=columns), asking(top_logprobs_num=1)).top_logprobs
    assert got is not None
    assert got.ids.tolist() == [[8], [6]]


@pytest.mark.parametrize(
    "tops",
    [
        [[{"token_id": 5, "logprob": -1.0}] * 2],
        [[{"token_id": 5, "logprob": -1.0}], []],
        [[{"token_id": 5, "logprob": "x"}, {"token_id": 6, "logprob": 1}]],
    ],
)
def test_likeliest_tokens_that_cannot_be_right(tops: list[Any]) -> None:
    """Two values under one id, rows of unequal length, no numbers."""
    content = [entry(5, top_logprobs=top) for top in tops]
    with pytest.raises(ProtocolError, match="top_logprobs"):
        decode(from_tokens([5] * len(tops), logprobs={"content": content}), asking(top_logprobs_num=2))


# --- logprobs of the prompt -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows", [None, [], [None, {}, {}], [None, {"2": {}}, {"3": {}}], [None, {"2": {"logprob": -1}}]]
)
def test_missing_logprobs_of_the_prompt(rows: Any) -> None:
    """An aborted answer may lack them all, a whole one nothing."""
    wanting = asking(logprob_start_len=0)
    with pytest.raises(ProtocolError, match="prompt_logprobs"):
        decode(from_tokens([5], top={"prompt_logprobs": rows}), wanting)
    if rows is None:
        assert (
            decode(from_tokens([], top={"prompt_logprobs": rows}, finish_reason="abort"), wanting).prompt_logprobs
            is None
        )


# --- counts -----------------------------------------------------------------------------------------------------------


def test_counts() -> None:
    """Cached tokens where the server tells them; without a usage the prompt's length is what was sent."""
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    segment = decode(from_tokens([5], top={"usage": usage}))
    assert (segment.prompt_tokens, segment.cached_tokens) == (3, 2)
    bare = decode(from_tokens([5], top={"usage": None}))
    assert (bare.prompt_tokens, bare.cached_tokens) == (3, None)


def test_a_count_that_disagrees_is_refused() -> None:
    """Only of a whole answer."""
    with pytest.raises(ProtocolError, match="completion_tokens is 2"):
        decode(from_tokens([5], top={"usage": {"completion_tokens": 2}}))


def test_the_recorded_ids_are_ours() -> None:
    """The header and the field do the same."""
    assert rid_of(recorded("completions_req_id_hdr").answer) == "my-req-1"
    assert rid_of(recorded("generate_reqid").answer) == recorded("generate_reqid").request["request_id"]
