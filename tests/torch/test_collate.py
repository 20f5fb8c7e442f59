"""Padded batches, against one that is written token by token."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutsync.sample import Prompt, Sample, WeightSpan
from rolloutsync.tensors import PaddedBatch, Ragged, collate
from rolloutsync.transcript import Transcript

from .makers import LAYERS, NEVER_SENT, TOPK, sample_of, samples, tokens_of

pytestmark = pytest.mark.torch
PAD = 1023
SIDES = st.sampled_from(["right", "left", "split"])
Side = Literal["right", "left", "split"]


def places(batch: list[Sample], side: str, more: int = 0) -> tuple[list[list[int | None]], int, int]:
    """For each row, which token stands in each column; the column of the split, and the width."""
    lengths = [len(sample.tokens) for sample in batch]
    prompts = [
        len(tokens) - len(sample.output_ids) for tokens, sample in zip(map(tokens_of, batch), batch, strict=True)
    ]
    left, width = max(prompts), max(lengths) + more
    if side == "split":
        left += more
        width = left + more + max(len(sample.output_ids) for sample in batch)
    found = []
    for length, prompt in zip(lengths, prompts, strict=True):
        first = {"right": 0, "left": width - length, "split": left - prompt}[side]
        found.append([column - first if first <= column < first + length else None for column in range(width)])
    return found, left, width


def expected(batch: list[Sample], side: str, more: int = 0) -> dict[str, Any]:
    """All fields as lists, one token after the other; versions in words, experts with their layers."""
    rows: dict[str, list[list[Any]]] = {name: [] for name in ("ids", "mask", "loss", "logprobs", "versions", "experts")}
    for sample, columns in zip(batch, places(batch, side, more)[0], strict=True):
        tokens = tokens_of(sample)
        here = [None if column is None else tokens[column] for column in columns]
        rows["ids"].append([PAD if token is None else token.id for token in here])
        rows["mask"].append([int(token is not None) for token in here])
        rows["loss"].append([token is not None and token.made for token in here])
        rows["logprobs"].append([0.0 if token is None else token.logprob for token in here])
        rows["versions"].append([None if token is None else token.version for token in here])
        nothing = np.zeros((LAYERS, TOPK), np.uint8)
        rows["experts"].append([(nothing if token is None else token.experts).tolist() for token in here])
    return rows


def words(batch: PaddedBatch) -> list[list[str | None]]:
    """Versions by name."""
    return [[None if number < 0 else batch.version_table[number] for number in row] for row in batch.versions.tolist()]


def check(batch: PaddedBatch, made: list[Sample], side: str, more: int = 0) -> None:
    """Every field of every place."""
    wanted = expected(made, side, more)
    assert batch.input_ids.tolist() == wanted["ids"]
    assert batch.attention_mask.tolist() == wanted["mask"]
    assert torch.equal(batch.position_ids, (batch.attention_mask.cumsum(1) - 1).clamp(min=0))
    assert batch.loss_mask.tolist() == wanted["loss"]
    assert words(batch) == wanted["versions"]
    assert batch.lengths.tolist() == [len(sample.tokens) for sample in made]
    assert batch.prompt_lengths.tolist() == [len(s.tokens) - len(s.output_ids) for s in made]
    assert (batch.logprobs is None) == all(sample.logprobs is None for sample in made)
    assert batch.logprobs is None or batch.logprobs.tolist() == wanted["logprobs"]
    assert (batch.routed_experts is None) == all(sample.routed_experts is None for sample in made)
    if batch.routed_experts is not None:
        assert isinstance(batch.routed_experts, torch.Tensor)
        assert batch.routed_experts.tolist() == wanted["experts"]


@given(made=samples(), side=SIDES)
def test_every_field_of_every_place(made: list[Sample], side: Side) -> None:
    """Any mix of lengths, none among them, of versions, of samples that were never sent."""
    batch = collate(made, pad_token_id=PAD, side=side)
    check(batch, made, side)
    assert batch.split == (places(made, side)[1] if side == "split" else None)


@given(made=samples(), side=SIDES, more=st.integers(0, 5))
def test_a_width_that_is_given(made: list[Sample], side: Side, more: int) -> None:
    """One number, or with a split one for each part."""
    _, left, width = places(made, side, more)
    batch = collate(made, pad_token_id=PAD, side=side, pad_to=(left, width - left) if side == "split" else width)
    check(batch, made, side, more)


@given(made=samples(), side=SIDES, multiple=st.integers(1, 8))
def test_a_width_that_is_a_multiple(made: list[Sample], side: Side, multiple: int) -> None:
    """The least one that is wide enough."""
    batch = collate(made, pad_token_id=PAD, side=side, pad_to_multiple_of=multiple)
    _, left, width = places(made, side)
    narrow = left, width - left
    wide = [-(-part // multiple) * multiple for part in (narrow if side == "split" else (width,))]
    assert batch.input_ids.shape == (len(made), sum(wide))
    assert batch.split == (wide[0] if side == "split" else None)
    for row, columns in zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), strict=True):
        assert [number for number, there in zip(row, columns, strict=True) if there] in [
            s.tokens.tolist() for s in made
        ]


@given(made=samples())
def test_ragged_experts_are_what_the_samples_have(made: list[Sample]) -> None:
    """Neither padded nor moved."""
    batch = collate(made, pad_token_id=PAD, routed_experts="ragged")
    if all(sample.routed_experts is None for sample in made):
        assert batch.routed_experts is None
        return
    ragged = batch.routed_experts
    assert isinstance(ragged, Ragged)
    assert len(ragged) == len(made)
    for number, sample in enumerate(made):
        rows = np.empty((0, LAYERS, TOPK), np.uint8) if sample.routed_experts is None else sample.routed_experts
        assert np.array_equal(ragged[number].numpy(), rows)
        assert batch.routed_rows[number] == len(rows)
    with pytest.raises(IndexError, match=f"{len(made)} of {len(made)} samples"):
        ragged[len(made)]


def test_dtypes() -> None:
    """As the docstring promises."""
    batch = collate([sample_of(2, 3), sample_of(4, 0)], pad_token_id=0)
    for name in ("input_ids", "attention_mask", "position_ids", "lengths", "prompt_lengths"):
        assert getattr(batch, name).dtype == torch.int64, name
    assert batch.loss_mask.dtype == torch.bool
    assert batch.logprobs is not None
    assert batch.logprobs.dtype == torch.float32
    assert batch.versions.dtype == torch.int32
    assert len(batch) == 2


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_experts_keep_their_dtype(dtype: type[Any]) -> None:
    """Whatever the library chose for the model."""
    experts = np.full((4, LAYERS, TOPK), 250, dtype)
    batch = collate([sample_of(3, 2, routed_experts=experts)], pad_token_id=0)
    assert isinstance(batch.routed_experts, torch.Tensor)
    assert batch.routed_experts.numpy().dtype == dtype
    assert batch.routed_experts.long().sum() == 250 * experts.size


def test_experts_of_several_dtypes_and_without_a_shape() -> None:
    """The widest holds all; layers and topk may be one axis."""
    flat = [np.full((4, 6), 5, np.uint8), np.full((4, 6), 70000, np.int32)]
    batch = collate([sample_of(3, 2, routed_experts=experts) for experts in flat], pad_token_id=0)
    assert isinstance(batch.routed_experts, torch.Tensor)
    assert batch.routed_experts.shape == (2, 5, 6)
    assert batch.routed_experts[:, :4].unique().tolist() == [5, 70000]


def test_where_experts_are_real() -> None:
    """The last token has none; the first ones may have been left out."""
    begun = replace(
        sample_of(3, 2), prompt=Prompt(np.array([1, 2, 3], np.int32), fields={"routed_experts_start_len": 1})
    )
    assert begun.routed_experts is not None
    batch = collate([sample_of(2, 1), replace(begun, routed_experts=begun.routed_experts[1:])], pad_token_id=0)
    assert batch.routed_first.tolist() == [0, 1]
    assert batch.routed_rows.tolist() == [2, 3]
    assert isinstance(batch.routed_experts, torch.Tensor)
    assert batch.routed_experts.bool().any((2, 3)).tolist() == [
        [True, True, False, False, False],
        [False, *[True] * 3, False],
    ]


def test_experts_may_be_left_out() -> None:
    batch = collate([sample_of()], pad_token_id=0, routed_experts=None)
    assert batch.routed_experts is None
    assert batch.routed_rows.tolist() == [0]


def test_a_logprob_stands_where_its_token_is() -> None:
    """Ratio of a trainer: logits at t are for t + 1."""
    sample = sample_of(2, 2, logprobs=np.array([-1, -2], np.float32))
    batch = collate([sample], pad_token_id=0)
    assert batch.logprobs is not None
    assert batch.logprobs.tolist() == [[0.0, 0.0, -1.0, -2.0]]
    assert batch.input_ids[batch.loss_mask].tolist() == sample.output_ids.tolist()


def test_versions_that_the_engine_did_not_say() -> None:
    spans = (WeightSpan("b", 0, 1), WeightSpan(None, 1, 2), WeightSpan("a", 2, 3))
    batch = collate([sample_of(1, 3, weight_spans=spans), sample_of(1, 3)], pad_token_id=0)
    assert batch.version_table == ("b", "a", "7")
    assert batch.versions.tolist() == [[-1, 0, -1, 1], [-1, 2, 2, 2]]


def test_arrays_of_any_layout() -> None:
    """Slices with a stride, reversed ones, Fortran's order, read-only ones as Ray has them, big-endian ones."""
    ids = np.arange(1, 21, dtype=np.int32)
    odd, back = ids[::2], ids[::-1][:6]
    logprobs = np.linspace(-2, -1, 12, dtype=np.float32)[::2]
    experts = np.asfortranarray(np.arange(15 * 6, dtype=np.uint8).reshape(15, 2, 3))
    for array in (odd, back, logprobs, experts):
        array.setflags(write=False)
    plain = sample_of(10, 6, prompt=Prompt(odd), output_ids=back, logprobs=logprobs, routed_experts=experts)
    foreign = replace(plain, output_ids=back.astype(">i4"), logprobs=logprobs.astype(">f4"))
    check(collate([plain, foreign], pad_token_id=PAD), [plain, foreign], "right")


def test_a_batch_shares_no_memory_with_its_samples() -> None:
    sample = sample_of(2, 3)
    batch = collate([sample], pad_token_id=0)
    batch.input_ids.zero_()
    assert batch.logprobs is not None
    batch.logprobs.zero_()
    assert sample.output_ids.all()
    assert sample.logprobs is not None
    assert sample.logprobs.all()


def test_a_batch_moves_with_all_its_tensors() -> None:
    """The meta device stands for any other; nothing else of the batch changes."""
    made = [sample_of(2, 3), sample_of(4, 5)]
    there = collate(made, pad_token_id=0, side="split", device="meta")
    for field in fields(there):
        value = getattr(there, field.name)
        assert not isinstance(value, torch.Tensor) or value.device.type == "meta", field.name
    assert (there.split, there.version_table, len(there)) == (4, ("7",), 2)
    ragged = collate(made, pad_token_id=0, routed_experts="ragged", device="meta").routed_experts
    assert isinstance(ragged, Ragged)
    assert (ragged.values.device.type, ragged.offsets.device.type) == ("meta", "meta")


def test_moving_to_where_it_is_copies_nothing() -> None:
    batch = collate([sample_of()], pad_token_id=0)
    assert batch.to("cpu").input_ids.data_ptr() == batch.input_ids.data_ptr()


@pytest.mark.parametrize(
    ("device", "freely"), [("cuda:1", True), (0, True), ("cpu", False), (torch.device("cpu"), False)]
)
def test_a_copy_to_the_cpu_is_waited_for(monkeypatch: pytest.MonkeyPatch, device: Any, freely: bool) -> None:
    """torch would hand out memory that is still being written."""
    batch = collate([sample_of()], pad_token_id=0, routed_experts="ragged")
    asked: list[tuple[Any, bool]] = []

    def note(self: torch.Tensor, to: Any, *, non_blocking: bool) -> torch.Tensor:
        asked.append((to, non_blocking))
        return self

    monkeypatch.setattr(torch.Tensor, "to", note)
    batch.to(device)
    assert len(asked) == 12
    assert set(asked) == {(device, freely)}


def test_a_default_device_is_not_where_batches_are_written() -> None:
    """Trainers set one; numpy can write to the CPU only."""
    with torch.device("meta"):
        batch = collate([sample_of(3, 2)], pad_token_id=0)
    assert batch.input_ids.device.type == "cpu"
    check(batch, [sample_of(3, 2)], "right")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_pinned_memory_needs_a_gpu() -> None:
    """In torch's own words, which differ from version to version."""
    with pytest.raises(RuntimeError, match="pin_memory"):
        collate([sample_of()], pad_token_id=0, pin_memory=True)


def test_long_samples_and_short_ones() -> None:
    """Of 131072 tokens, beside one of two."""
    long, short = sample_of(1000, 130072, seed=1), sample_of(1, 1, seed=2)
    batch = collate([long, short], pad_token_id=PAD, side="left")
    assert batch.input_ids.shape == (2, 131072)
    assert np.array_equal(batch.input_ids[0].numpy(), long.tokens)
    assert isinstance(batch.routed_experts, torch.Tensor)
    assert long.routed_experts is not None
    assert np.array_equal(batch.routed_experts[0, :-1].numpy(), long.routed_experts)
    assert batch.attention_mask.sum(1).tolist() == [131072, 2]
    assert batch.position_ids[:, -1].tolist() == [131071, 1]


def test_samples_without_a_single_token() -> None:
    """A width of nothing is a batch too."""
    nothing = sample_of(0, 0, **NEVER_SENT)
    assert collate([nothing, nothing], pad_token_id=0).input_ids.shape == (2, 0)
    assert collate([nothing], pad_token_id=5, pad_to=2).input_ids.tolist() == [[5, 5]]


def test_segments_of_an_episode() -> None:
    """What a tool said in between is context, and in no loss."""
    first = sample_of(3, 2, seed=1, routed_experts=None)
    told = np.concatenate([first.tokens, np.array([900, 901], np.int32)])
    second = sample_of(7, 3, seed=2, prompt=Prompt(told), routed_experts=None, weight_spans=(WeightSpan("8", 0, 3),))
    (segment,) = Transcript((first, second)).segments
    batch = collate([segment, sample_of(1, 1, routed_experts=None)], pad_token_id=PAD, side="split")
    assert batch.split == 3
    assert batch.input_ids[0].tolist() == [*told.tolist(), *second.output_ids.tolist()]
    assert batch.loss_mask[0].tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3
    assert batch.logprobs is not None
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert batch.logprobs[0].tolist() == [0, 0, 0, *first.logprobs.tolist(), 0, 0, *second.logprobs.tolist()]
    assert words(batch)[0] == [None] * 3 + ["7"] * 2 + [None] * 2 + ["8"] * 3
    assert batch.prompt_lengths.tolist() == [3, 1]


def test_an_iterator_will_do() -> None:
    assert len(collate(iter([sample_of(), sample_of()]), pad_token_id=np.int64(0))) == 2
