"""Tables: every field of every sample, through parquet and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from rolloutsync.errors import RolloutError
from rolloutsync.sample import Finish, Prompt, Sample, Status, Timing, TopLogprobs, WeightSpan, begin
from rolloutsync.tensors import to_table

from .makers import sample_of, samples

pytestmark = pytest.mark.torch

FULL = sample_of(
    3,
    2,
    prompt=Prompt(
        input_ids=np.array([1, 2, 3], np.int32),
        text="Once",
        sampling_params=MappingProxyType({"temperature": np.float32(0.5), "stop": ["a"], "logit_bias": {5: 1.0}}),
        image_data=["aGk="],
        fields={"return_logprob": True},
    ),
    finish=Finish(type="stop", matched=[1, 2], message="m", status_code=None),
    text="naïve 漢字 😀",
    weight_spans=(WeightSpan("1", 0, 1), WeightSpan(None, 1, 2)),
    prompt_logprobs=np.array([np.nan, -2, -3], np.float32),
    top_logprobs=TopLogprobs(np.array([[1, 2], [3, 4]], np.int32), np.array([[-1, -2], [-3, -np.inf]], np.float32)),
    hidden_states=np.arange(6, dtype=np.float32).reshape(2, 3),
    engine="http://h:1",
    attempts=2,
    cached_tokens=1,
    dp_rank=0,
    timing=Timing(0.5, 1.0, 2.0),
    meta_info={"e2e_latency": 1.5},
    metadata={"answer": 42, "ids": np.arange(6)[::2]},
    reward=np.float32(0.25),
)
FAILED = replace(begin(Prompt(text="x"), 1, 0), status=Status.FAILED, error=RolloutError("why"))


def test_every_field() -> None:
    """Plain ones as they are, nested ones as structs, what is the user's own as JSON."""
    row = to_table([FULL]).to_pylist()[0]
    for name in ("index", "member", "rid", "text", "engine", "attempts", "prompt_tokens", "cached_tokens", "dp_rank"):
        assert row[name] == getattr(FULL, name), name
    assert (row["status"], row["reward"], row["error"], row["prompt_text"]) == ("COMPLETED", 0.25, None, "Once")
    assert row["weight_spans"] == [span._asdict() for span in FULL.weight_spans]
    assert row["finish"] == {"type": "stop", "matched": "[1,2]", "message": "m", "status_code": None}
    assert row["timing"] == {"queued_s": 0.5, "engine_s": 1.0, "total_s": 2.0}
    assert json.loads(row["metadata"]) == {"answer": 42, "ids": [0, 2, 4]}
    assert json.loads(row["meta_info"]) == {"e2e_latency": 1.5}
    assert json.loads(row["sampling_params"]) == {"temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1.0}}
    assert (json.loads(row["image_data"]), json.loads(row["fields"])) == (["aGk="], {"return_logprob": True})


def array_of(table: pa.Table, name: str, number: int) -> Any:
    """As a reader of the table gets it: the values, in their shape if they have one."""
    value = table[name][number].values
    if value is None:
        return None
    shape = name.replace("_ids", "").replace("_values", "") + "_shape"
    return value.to_numpy().reshape(table[shape][number].as_py() if shape in table.column_names else -1)


ARRAYS: dict[str, Callable[[Sample], Any]] = {
    "prompt_ids": lambda sample: sample.prompt.input_ids,
    "output_ids": lambda sample: sample.output_ids,
    "logprobs": lambda sample: sample.logprobs,
    "prompt_logprobs": lambda sample: sample.prompt_logprobs,
    "routed_experts": lambda sample: sample.routed_experts,
    "hidden_states": lambda sample: sample.hidden_states,
    "top_logprobs_ids": lambda sample: sample.top_logprobs and sample.top_logprobs.ids,
    "top_logprobs_values": lambda sample: sample.top_logprobs and sample.top_logprobs.values,
}


def check_arrays(table: pa.Table, made: list[Sample]) -> None:
    """Values, dtypes and shapes."""
    for name, reach in ARRAYS.items():
        for number, sample in enumerate(made):
            there, wanted = array_of(table, name, number), reach(sample)
            assert (there is None) == (wanted is None), name
            if wanted is not None:
                assert there.dtype == wanted.dtype, name
                assert np.array_equal(there, wanted, equal_nan=wanted.dtype.kind == "f"), name


@given(made=samples())
def test_arrays(made: list[Sample]) -> None:
    """Some have them, some don't; some are empty, which is not the same."""
    check_arrays(to_table(made), made)


def test_arrays_through_parquet(tmp_path: Path) -> None:
    """The file says the same as the table, types too."""
    made = [FULL, FAILED, sample_of(2, 5, seed=4), FULL]
    table = to_table(made)
    pq.write_table(table, tmp_path / "step.parquet")
    back = pq.read_table(tmp_path / "step.parquet")
    assert back.schema.equals(table.schema)
    assert str(back.to_pylist()) == str(table.to_pylist())  # as words: a NaN equals nothing
    check_arrays(back, made)


def test_a_table_without_nan_equals_its_file(tmp_path: Path) -> None:
    table = to_table([sample_of(2, 5), FAILED, replace(FULL, prompt_logprobs=None)])
    pq.write_table(table, tmp_path / "step.parquet")
    assert pq.read_table(tmp_path / "step.parquet").equals(table)


def test_samples_that_have_little() -> None:
    """What is not there is null."""
    row = to_table([FAILED]).to_pylist()[0]
    assert (row["status"], row["error"], row["prompt_text"]) == ("FAILED", "why", "x")
    assert row["output_ids"] == []
    missing = ("prompt_ids", "logprobs", "routed_experts", "routed_experts_shape", "finish", "reward", "engine")
    assert [row[name] for name in missing] == [None] * len(missing)


def test_the_types_are_always_the_same() -> None:
    """Tables of several steps can be joined, empty ones too."""
    steps = [to_table([]), to_table([FAILED]), to_table([FULL])]
    assert steps[0].schema.equals(steps[1].schema)
    assert steps[1].schema.equals(steps[2].schema)
    assert pa.concat_tables(steps).num_rows == 2


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_experts_keep_their_dtype(dtype: type[Any]) -> None:
    made = sample_of(2, 3, routed_experts=np.full((4, 2, 3), 250, dtype))
    assert to_table([made, FAILED]).schema.field("routed_experts").type.value_type == pa.from_numpy_dtype(dtype)
    check_arrays(to_table([made]), [made])


def test_the_tokens_of_all_are_one_array() -> None:
    """A reader takes them without a copy."""
    column = to_table([sample_of(2, 3), sample_of(2, 1)])["output_ids"]
    assert column.num_chunks == 1
    assert len(column.chunk(0).values.to_numpy(zero_copy_only=True)) == 4


WRONG: dict[str, tuple[Any, str]] = {
    "no sample": (None, r"samples\[1\] must be a Sample, got None"),
    "metadata": (replace(FULL, metadata={"a": object()}), r"samples\[1\]\.metadata cannot be in a table: .*object"),
    "reward": (sample_of(reward="good"), r"samples\[1\]\.reward cannot be in a table"),
    "parameters": (
        replace(FULL, prompt=Prompt(sampling_params={"a": {1, 2}})),
        r"samples\[1\]\.prompt\.sampling_params cannot be in a table",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_in_a_table(name: str) -> None:
    """Sample and field are named."""
    wrong, words = WRONG[name]
    with pytest.raises(TypeError, match=words):
        to_table([FULL, wrong])
