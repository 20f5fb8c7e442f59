"""Routed experts in vLLM's answers."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from rolloutsync.dialects.base import Experts, Facts
from rolloutsync.errors import ProtocolError

from .vllm_makers import PROMPT, asking, decode, from_tokens
from .vllm_recorded import DIALECT


def _npy(table: Any) -> str:
    raw = io.BytesIO()
    np.save(raw, table)
    return base64.b64encode(raw.getvalue()).decode()


@pytest.mark.parametrize("made", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize(
    ("count", "dtype", "got"), [(8, "auto", "uint8"), (None, "auto", "int32"), (None, "uint16", "uint16")]
)
def test_experts_come_in_a_dtype_of_their_own(made: Any, count: int | None, dtype: str, got: str) -> None:
    """And leave in the one that all samples have."""
    table = np.arange(4 * 2 * 2).reshape(4, 2, 2).astype(made)
    answer = from_tokens([5, 6], routed_experts=_npy(table))
    facts = Facts(version="0.32.0", experts=Experts(count=count))
    rows = decode(answer, asking(return_routed_experts=True), facts, dtype).routed_experts
    assert rows is not None
    assert rows.dtype == got
    assert rows.flags.owndata
    assert np.array_equal(rows, table)


@pytest.mark.parametrize("sent", [3, 4])
def test_a_resumed_sample_gets_the_rows_that_are_missing(sent: int) -> None:
    """Also from an engine that sends all of them again."""
    table = np.arange(4).reshape(4, 1, 1).astype(np.uint8)
    answer = from_tokens([5, 6], routed_experts=_npy(table[4 - sent :]))
    rows = decode(answer, asking(return_routed_experts=True, routed_experts_start_len=1)).routed_experts
    assert rows is not None
    assert rows[:, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("rows", [0, 3, 5])
def test_a_wrong_number_of_rows_is_refused(rows: int) -> None:
    """Four are right: the last token was never run."""
    answer = from_tokens([5, 6], routed_experts=_npy(np.zeros((rows, 2, 2), np.uint8)))
    with pytest.raises(ProtocolError, match=f"{rows} rows, not 4"):
        decode(answer, asking(return_routed_experts=True))


@pytest.mark.parametrize(
    "value",
    [
        _npy(np.zeros((4, 4), np.uint8)),
        _npy(np.zeros((4, 2, 2), np.float32)),
        "AAAA",
        "?",
        7,
        _npy(np.zeros((4, 2, 2))),
    ],
)
def test_experts_that_cannot_be_right(value: Any) -> None:
    """Of another shape, no integers, or no file."""
    with pytest.raises(ProtocolError, match="routed_experts"):
        decode(from_tokens([5, 6], routed_experts=value), asking(return_routed_experts=True))


def test_experts_that_were_decoded_with_the_body() -> None:
    """They come as bytes where they are large."""
    table = np.arange(16).reshape(4, 2, 2).astype(np.uint8)
    answer = from_tokens([5, 6], routed_experts=base64.b64decode(_npy(table)))
    rows = decode(answer, asking(return_routed_experts=True)).routed_experts
    assert rows is not None
    assert np.array_equal(rows, table)
    (field,) = DIALECT.large_fields(PROMPT, Facts(), "auto")
    value: Any = answer
    for key in field.path:
        value = value[key]
    assert isinstance(value, bytes)


def test_an_engine_without_experts_says_how_to_start_it() -> None:
    """An aborted answer may have none."""
    with pytest.raises(ProtocolError, match="--enable-return-routed-experts"):
        decode(from_tokens([5]), asking(return_routed_experts=True))
    assert decode(from_tokens([], finish_reason="abort"), asking(return_routed_experts=True)).routed_experts is None


def test_an_aborted_answer_may_have_its_first_rows_alone() -> None:
    """A resume asks for those behind them."""
    answer = from_tokens([5, 6], finish_reason="abort", routed_experts=_npy(np.ones((2, 2, 2), np.uint8)))
    rows = decode(answer, asking(return_routed_experts=True)).routed_experts
    assert rows is not None
    assert len(rows) == 2
