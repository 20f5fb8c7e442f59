"""Packed batches, against samples that are laid behind each other token by token."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given

from rolloutsync import tensors
from rolloutsync.rows import Row
from rolloutsync.sample import NO_TOKENS, Sample
from rolloutsync.tensors import collate, pack

from .makers import LAYERS, TOPK, sample_of, samples, tokens_of

pytestmark = pytest.mark.torch


@given(made=samples())
def test_every_field_of_every_token(made: list[Sample]) -> None:
    """No padding: the tokens of all, in order."""
    batch = pack(made)
    tokens = list(chain.from_iterable(map(tokens_of, made)))
    table = [*batch.version_table, None]
    assert batch.input_ids.tolist() == [token.id for token in tokens]
    assert batch.position_ids.tolist() == [token.position for token in tokens]
    assert batch.loss_mask.tolist() == [token.made for token in tokens]
    assert [table[number] for number in batch.versions.tolist()] == [token.version for token in tokens]
    assert batch.logprobs is None or batch.logprobs.tolist() == [token.logprob for token in tokens]
    assert (batch.logprobs is None) == all(sample.logprobs is None for sample in made)
    if any(sample.routed_experts is not None for sample in made):
        assert batch.routed_experts is not None
        assert batch.routed_experts.shape == (len(tokens), LAYERS, TOPK)
        assert batch.routed_experts.tolist() == [token.experts.tolist() for token in tokens]


@given(made=samples())
def test_where_each_sample_lies(made: list[Sample]) -> None:
    """As flash attention wants it."""
    batch = pack(made)
    assert len(batch) == len(made)
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == np.cumsum([0, *(len(sample.tokens) for sample in made)]).tolist()
    assert batch.max_seqlen == max(len(sample.tokens) for sample in made)
    assert batch.prompt_lengths.tolist() == [len(s.tokens) - len(s.output_ids) for s in made]


@given(made=samples())
def test_both_forms_say_the_same(made: list[Sample]) -> None:
    """A padded batch without its padding is the packed one."""
    packed, padded = pack(made), collate(made, pad_token_id=0, side="left")
    there = padded.attention_mask.bool()
    for name in ("input_ids", "position_ids", "loss_mask", "versions", "logprobs", "routed_experts"):
        one, other = getattr(packed, name), getattr(padded, name)
        assert (one is None and other is None) or torch.equal(one, other[there]), name
        assert one is None or one.dtype == other.dtype, name
    assert packed.version_table == padded.version_table
    assert torch.equal(packed.routed_first, padded.routed_first)
    assert torch.equal(packed.routed_rows, padded.routed_rows)


def test_experts_may_be_left_out() -> None:
    assert pack([sample_of()], routed_experts=False).routed_experts is None


def test_a_packed_batch_moves_with_all_its_tensors() -> None:
    there = pack([sample_of(2, 3), sample_of(4, 5)], device="meta")
    assert there.input_ids.device.type == there.cu_seqlens.device.type == there.routed_rows.device.type == "meta"
    assert (there.max_seqlen, len(there)) == (9, 2)


def test_more_tokens_than_offsets_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """cu_seqlens is int32; nothing is allocated before that is known."""
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2**30,), (0,), writeable=False)
    row = Row("samples[0]", huge, NO_TOKENS, None, None, (), None, 0, False)
    monkeypatch.setattr(tensors, "read_rows", lambda samples: samples)
    with pytest.raises(ValueError, match=f"{2**31} tokens, a packed batch holds {2**31 - 1}"):
        pack([row, row])  # type: ignore[list-item]  # stands for samples that no test can hold
