"""Samples: how they grow, and the way to a file and back."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutsync.errors import EngineHTTPError, RolloutError
from rolloutsync.growth import extend, make
from rolloutsync.sample import (
    Finish,
    Prompt,
    Sample,
    Segment,
    Status,
    Timing,
    TopLogprobs,
    WeightSpan,
    begin,
    status_of,
)

from .makers import floats, ids, prompt

_STOP = Finish(type="stop", matched=2)


def _full(**given: Any) -> Sample:
    values: dict[str, Any] = {
        "prompt": Prompt(
            input_ids=ids(1, 2, 3),
            sampling_params={"temperature": 0.5, "stop": ["a"], "logit_bias": {5: np.float32(0.5)}},
            image_data=["aGk="],
            metadata={"answer": "42"},
            fields={"return_logprob": True, "input_embeds": np.ones((2, 2), np.float32)},
        ),
        "index": 3,
        "member": 1,
        "rid": "ab" * 16,
        "status": Status.COMPLETED,
        "finish": _STOP,
        "text": "naïve 漢字 😀 \x00 \ufffd",
        "output_ids": ids(7, 8),
        "logprobs": floats(-0.5, -1.25),
        "weight_spans": (WeightSpan("1", 0, 1), WeightSpan(None, 1, 2)),
        "routed_experts": np.arange(16, dtype=np.uint8).reshape(4, 2, 2),
        "prompt_logprobs": floats(float("nan"), -2.0, -3.0),
        "top_logprobs": TopLogprobs(
            np.array([[1, 2], [3, 4]], np.int32), np.array([[-1, -np.inf], [-1, -2]], np.float32)
        ),
        "hidden_states": np.array([[0.5, 1.5]], np.float32),
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "dp_rank": 0,
        "engine": "http://h:1",
        "attempts": 2,
        "timing": Timing(0.5, 1.0, 2.0),
        "meta_info": {"id": "ab" * 16, "e2e_latency": 1.5, "cached_tokens_details": None},
        "metadata": {"answer": "42"},
        "reward": 1.0,
    }
    return Sample(**{**values, **given})


def _bare(status: Status, error: RolloutError | None = None) -> Sample:
    return replace(begin(Prompt(text="héllo"), 0, 0), status=status, error=error)


_REFUSED = EngineHTTPError("no", engine="http://h:1", rid="r", attempts=1, status=400)
_OPTIONAL = ["logprobs", "routed_experts", "prompt_logprobs", "top_logprobs", "hidden_states", "finish", "reward"]
_SAMPLES = {
    "full": _full(),
    "truncated": _full(status=Status.TRUNCATED, finish=Finish(type="length")),
    "partial": _full(status=Status.ABORTED, finish=Finish(type="abort", message="Aborted", status_code=None)),
    "failed": _full(status=Status.FAILED, error=_REFUSED),
    "never sent": _bare(Status.ABORTED),
    "bare failure": _bare(Status.FAILED, RolloutError("why")),
    "wordless failure": _bare(Status.FAILED, RolloutError("")),
    "no rows": _full(routed_experts=np.empty((0, 2, 2), np.uint8), output_ids=ids(), logprobs=floats()),
    "flat experts": _full(routed_experts=np.arange(16, dtype=np.int32).reshape(4, 4)),
    "lost probability": _full(prompt_logprobs=floats(float("nan"), -np.inf, 0.0)),
    "text and ids": _full(prompt=Prompt(input_ids=ids(1), text="a")),
    "matched ids": _full(finish=Finish(type="stop", matched=[1, 2])),
    **{f"without {name}": _full(**{name: None}) for name in _OPTIONAL},
}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
            and other.flags.writeable
        )
    if isinstance(one, TopLogprobs):
        return isinstance(other, TopLogprobs) and all(_same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, RolloutError):
        return isinstance(other, RolloutError) and str(other) == str(one)
    return type(one) is type(other) and bool(one == other)


def _plainly(value: Any) -> Any:
    """What a mapping of the user's looks like after a trip through JSON."""
    return json.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))


def _check(before: Sample, after: Sample) -> None:
    for field in fields(Sample):
        if field.name != "prompt":
            assert _same(getattr(before, field.name), getattr(after, field.name)), field.name
    assert _same(before.prompt.input_ids, after.prompt.input_ids)
    for name in ("text", "sampling_params", "image_data", "metadata", "fields"):
        assert getattr(after.prompt, name) == _plainly(getattr(before.prompt, name)), name


@pytest.mark.parametrize("name", _SAMPLES)
def test_round_trip_through_json(name: str) -> None:
    """Through the text of a file, with the strict writer as well as with the lenient one."""
    sample = _SAMPLES[name]
    _check(sample, Sample.from_dict(json.loads(json.dumps(sample.to_dict(), allow_nan=False))))
    _check(sample, Sample.from_dict(orjson.loads(orjson.dumps(sample.to_dict()))))


@pytest.mark.parametrize("name", _SAMPLES)
def test_round_trip_through_npz(name: str) -> None:
    """Arrays go as arrays, and nothing is pickled."""
    file = io.BytesIO()
    np.savez_compressed(file, **_SAMPLES[name].to_dict(arrays=True))
    file.seek(0)
    with np.load(file, allow_pickle=False) as loaded:
        _check(_SAMPLES[name], Sample.from_dict(loaded))


@pytest.mark.parametrize("name", _SAMPLES)
def test_round_trip_through_pickle(name: str) -> None:
    """Ray ships samples."""
    back = pickle.loads(pickle.dumps(_SAMPLES[name]))
    for field in fields(Sample):
        if field.name != "prompt":
            assert _same(getattr(_SAMPLES[name], field.name), getattr(back, field.name)), field.name


def test_data_of_another_version_is_refused() -> None:
    """What is unknown or missing is named, never guessed."""
    data = _full().to_dict()
    with pytest.raises(ValueError, match="colour"):
        Sample.from_dict({**data, "colour": 1})
    for name in data:
        with pytest.raises(ValueError, match=name):
            Sample.from_dict({key: value for key, value in data.items() if key != name})
    arrays = _full().to_dict(arrays=True)
    del arrays["routed_experts"]
    with pytest.raises(ValueError, match="routed_experts"):
        Sample.from_dict(arrays)
    with pytest.raises(ValueError, match="prompt"):
        Sample.from_dict({})


def test_to_dict_leaves_the_sample_alone() -> None:
    """Changing what it returned changes nothing in the sample."""
    sample = _full()
    data = sample.to_dict()
    data["metadata"]["answer"] = "0"
    data["prompt"]["metadata"]["answer"] = "0"
    data["output_ids"].append(1)
    assert sample.metadata == sample.prompt.metadata == {"answer": "42"}
    assert sample.output_ids.tolist() == [7, 8]


# --- growing ----------------------------------------------------------------------------------------------------------


def _segment(*tokens: int, version: str | None = "1", reason: str = "abort", **given: Any) -> Segment:
    values: dict[str, Any] = {
        "finish": Finish(type=reason),
        "text": "x" * len(tokens),
        "output_ids": ids(*tokens),
        "logprobs": floats(*[-float(token) for token in tokens]),
        "weight_spans": (WeightSpan(version, 0, len(tokens)),) if tokens else (),
    }
    return Segment(**{**values, **given})


def test_tokens_logprobs_text_and_spans_grow_together() -> None:
    """Three rounds of many, none and one new token, under three weight versions."""
    sample = begin(prompt(), 0, 0)
    for segment in (_segment(4, 5), _segment(version="2"), _segment(6, version="3", reason="stop")):
        sample = extend(sample, segment)
        assert sample.logprobs is not None
        assert len(sample.output_ids) == len(sample.logprobs) == len(sample.text)
        assert sum(end - start for _, start, end in sample.weight_spans) == len(sample.output_ids)
    assert sample.output_ids.tolist() == [4, 5, 6]
    assert sample.output_ids.dtype == np.int32
    assert sample.logprobs is not None
    assert sample.logprobs.tolist() == [-4.0, -5.0, -6.0]
    assert sample.logprobs.dtype == np.float32
    assert sample.weight_spans == (WeightSpan("1", 0, 2), WeightSpan("3", 2, 3))
    assert sample.status is Status.COMPLETED
    assert sample.text == "xxx"
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6]


def test_an_unknown_version_stays_unknown() -> None:
    """It is not copied from the segment before."""
    sample = extend(extend(begin(prompt(), 0, 0), _segment(4)), _segment(5, version=None))
    assert sample.weight_spans == (WeightSpan("1", 0, 1), WeightSpan(None, 1, 2))


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=5))
def test_whatever_the_segments_nothing_is_lost(parts: list[list[int]]) -> None:
    """The output is the parts in order, and the spans tile it."""
    sample = begin(prompt(), 0, 0)
    for number, tokens in enumerate(parts):
        sample = extend(sample, _segment(*tokens, version=str(number)))
    assert sample.output_ids.tolist() == [token for tokens in parts for token in tokens]
    ends = [0, *(span.end for span in sample.weight_spans)]
    assert [span.start for span in sample.weight_spans] == ends[:-1]
    assert ends[-1] == len(sample.output_ids)


def test_logprobs_are_never_half_there() -> None:
    """If a part has none the whole has none: a gap would shift the rest."""
    sample = extend(extend(begin(prompt(), 0, 0), _segment(4)), _segment(5, logprobs=None))
    assert sample.logprobs is None
    assert sample.output_ids.tolist() == [4, 5]


def test_ids_of_a_text_prompt_are_taken_over_once() -> None:
    """The engine's word for what a text is; ids that were given stay."""
    text = extend(begin(Prompt(text="a"), 0, 0), _segment(4, prompt_ids=ids(9)))
    assert text.tokens.tolist() == [9, 4]
    assert text.prompt.text == "a"
    given_ids = extend(begin(prompt(), 0, 0), _segment(4, prompt_ids=ids(9)))
    assert given_ids.tokens.tolist() == [1, 2, 3, 4]


def test_tokens_of_a_text_prompt_are_refused_until_known() -> None:
    """The message says how to ask for them."""
    with pytest.raises(ValueError, match="return_prompt_token_ids"):
        _ = begin(Prompt(text="a"), 0, 0).tokens


def test_samples_are_frozen_and_slotted_values_without_equality() -> None:
    """Comparing arrays by accident would be an error of its own; samples compare by identity and hash."""
    for value in (_full(), _full().prompt):
        assert not hasattr(value, "__dict__")
        with pytest.raises(FrozenInstanceError):
            value.metadata = {}  # type: ignore[misc]
        assert value != replace(value)
        assert len({value, value}) == 1


def test_each_member_has_metadata_of_its_own() -> None:
    """A shallow copy: what one member writes into its own, the others do not see."""
    shared = prompt(metadata={"answer": "42", "list": []})
    one, two = begin(shared, 0, 0), begin(shared, 0, 1)
    one.metadata["answer"] = "0"
    assert two.metadata["answer"] == shared.metadata["answer"] == "42"
    assert one.metadata["list"] is two.metadata["list"]


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("stop", Status.COMPLETED),
        ("length", Status.TRUNCATED),
        ("abort", Status.ABORTED),
        ("", Status.ABORTED),
        ("something new", Status.ABORTED),
    ],
)
def test_what_a_finish_reason_stands_for(reason: str, status: Status) -> None:
    """What we do not know is never taken for complete."""
    assert status_of(Finish(type=reason)) is status
    assert str(status) == status.value


@pytest.mark.parametrize("spans", [(), (WeightSpan("1", 0, 4),), (WeightSpan("1", 0, 2), WeightSpan("1", 2, 4))])
def test_a_first_segment_makes_what_it_extends(spans: tuple[WeightSpan, ...]) -> None:
    """The short way of a fresh sample brings each field that the long way brings."""
    segment = replace(_segment(4, prompt_ids=ids(9)), weight_spans=spans, cached_tokens=1, meta_info={"a": 1})
    short = make(Prompt(text="a", metadata={"b": 2}), 1, 2, segment, rid="r", attempts=1)
    long = extend(begin(Prompt(text="a", metadata={"b": 2}), 1, 2), segment, rid="r", attempts=1)
    assert short.to_dict() == long.to_dict()
