"""Samples as torch tensors: padded, ``collate``, or packed, ``pack``. Needs torch (the extra ``torch``).

Each field is one tensor that is written once, straight from the numpy arrays of the samples: no tensor of each sample,
no lists, nothing joined in between. Samples share no memory with a batch.

Where things stand, in both forms:

* What is known of a token stands at that token's own place: its id, whether the model made it, the logprob with which
  it was drawn, the weights that made it. A model's logits at place t are for the token at t + 1, so a trainer compares
  ``logits[:, :-1]`` with ``logprobs[:, 1:]``.
* Row t of routed experts is where token t went when the engine read it. The last token of a sample was never read, so
  it has none; there, and wherever else rows are missing, stand zeros. ``routed_first`` and ``routed_rows`` say which
  are real.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from rolloutsync.rows import check_choice, experts_of, logprobs_of, read_integer, read_rows, table_of, widths_of
from rolloutsync.tables import to_table

try:
    import torch
except ImportError as missing:
    raise ImportError(f"rolloutsync.tensors needs torch ({missing}): pip install 'rolloutsync[torch]'") from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rolloutsync.rows import Row
    from rolloutsync.sample import AnyArray, Sample
    from rolloutsync.transcript import TranscriptSegment

    _Put = Callable[[AnyArray, Row], None]
    _Shape = tuple[int, ...]

__all__ = ["PackedBatch", "PaddedBatch", "Ragged", "collate", "pack", "to_table"]

Side = Literal["right", "left", "split"]
M = TypeVar("M", bound="_Movable")


@dataclass(frozen=True, slots=True, eq=False)
class _Movable:
    """Tensors that go together."""

    def to(self: M, device: torch.device | str | int, *, non_blocking: bool = True) -> M:  # noqa: PYI019 - as PYI034
        """The same with its tensors on ``device``; those that are there already are not copied.

        Does not wait for copies from pinned memory to a GPU (work on the GPU's current stream comes after them), unless
        ``non_blocking`` is False. A copy to the CPU is always waited for: it would be read too early.
        """
        freely = non_blocking and not str(device).startswith("cpu")
        moved = {
            field.name: value.to(device, non_blocking=freely)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), (torch.Tensor, _Movable))
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged(_Movable):
    """Rows of all samples behind each other; ``ragged[i]`` is a view of those of sample i.

    Attributes:
        values: [R, layers, topk], of all samples.
        offsets: int64[B + 1]: sample i has the rows from ``offsets[i]`` to ``offsets[i + 1]``.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> torch.Tensor:
        if not 0 <= number < len(self):
            raise IndexError(f"{number} of {len(self)} samples")
        return self.values[self.offsets[number] : self.offsets[number + 1]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaddedBatch(_Movable):
    """B samples, each a row of L places.

    Attributes:
        input_ids: int64[B, L]: prompt and output; ``pad_token_id`` elsewhere.
        attention_mask: int64[B, L]: 1 at tokens, 0 at padding.
        position_ids: int64[B, L]: 0, 1, ... from a row's first token; 0 before it, and after its last token that
            one's position, so that it is ``(attention_mask.cumsum(1) - 1).clamp(min=0)``.
        loss_mask: bool[B, L]: True at tokens that the model made.
        logprobs: float32[B, L], natural logarithm: of each token that the model made, at that token's own place; 0.0
            elsewhere. None if no sample has any.
        versions: int32[B, L]: place in ``version_table`` of the weights that made the token; -1 where the model made
            none, or the engine did not say.
        version_table: Weight versions, in the order in which they first occur.
        lengths: int64[B]: tokens of each row.
        prompt_lengths: int64[B]: of them, those before the model's first.
        split: The column at which everybody's output begins; None unless ``side="split"``.
        routed_experts: [B, L, layers, topk] or ``Ragged``, in the samples' own dtype ([.., layers*topk] where the
            shape is not known); None if no sample has any, or they were not wanted.
        routed_first: int64[B]: tokens before the first of a row that has experts (``routed_experts_start_len``).
        routed_rows: int64[B]: how many from there on have.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor | None
    versions: torch.Tensor
    version_table: tuple[str, ...]
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    split: int | None
    routed_experts: torch.Tensor | Ragged | None
    routed_first: torch.Tensor
    routed_rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedBatch(_Movable):
    """B samples of T tokens in all behind each other, without padding: what variable-length attention takes.

    Attributes:
        input_ids: int64[T].
        cu_seqlens: int32[B + 1]: sample i has the tokens from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``.
        max_seqlen: Tokens of the longest sample.
        position_ids: int64[T]: 0, 1, ... anew in each sample.
        loss_mask: bool[T]: True at tokens that the model made.
        logprobs: float32[T]: as in ``PaddedBatch``; None if no sample has any.
        versions: int32[T]: as in ``PaddedBatch``.
        version_table: Weight versions, in the order in which they first occur.
        prompt_lengths: int64[B]: tokens of each sample before the model's first.
        routed_experts: [T, layers, topk], in the samples' own dtype ([T, layers*topk] where the shape is not known);
            None if no sample has any, or they were not wanted.
        routed_first: int64[B]: tokens before the first of a sample that has experts (``routed_experts_start_len``).
        routed_rows: int64[B]: how many from there on have.
    """

    input_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor | None
    versions: torch.Tensor
    version_table: tuple[str, ...]
    prompt_lengths: torch.Tensor
    routed_experts: torch.Tensor | None
    routed_first: torch.Tensor
    routed_rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1


def collate(
    samples: Iterable[Sample | TranscriptSegment],
    *,
    pad_token_id: int,
    side: Side = "right",
    pad_to: int | tuple[int, int] | None = None,
    pad_to_multiple_of: int = 1,
    routed_experts: Literal["padded", "ragged"] | None = "padded",
    pin_memory: bool = False,
    device: torch.device | str | int | None = None,
) -> PaddedBatch:
    """Samples as one padded batch. Partials (ABORTED) are taken as they are: with what tokens they have.

    Args:
        samples: Samples, segments of episodes' transcripts, or both, in the order of the rows.
        pad_token_id: What ``input_ids`` has where no token is.
        side: Where the padding is: "right", "left", or "split": prompts are padded on the left, outputs on the right,
            so that all outputs begin in the same column (as verl and TRL want it).
        pad_to: Tokens in a row, L; None for the longest sample. With "split" a pair, of the prompt and of the output.
            Nothing is ever cut off.
        pad_to_multiple_of: Instead: L (with "split", both parts of it) is made a multiple of this.
        routed_experts: "padded" to the tokens; "ragged", just the rows that there are; None to leave them out.
        pin_memory: Writes to page-locked memory, from which a GPU reads without waiting. torch raises RuntimeError
            where there is no GPU.
        device: Where to move the batch when it is written, see ``PaddedBatch.to``; None leaves it on the CPU.

    Blocks for the copying. Thread-safe.

    Raises:
        ValueError: No samples, a FAILED one, one whose prompt ids are unknown, one longer than ``pad_to``, one that
            lacks logprobs or experts that others have, or one whose arrays do not fit each other; names the sample.
        TypeError: Something else than a sample; names it too.
    """
    check_choice("side", side, ("right", "left", "split"))
    check_choice("routed_experts", routed_experts, ("padded", "ragged", None))
    pad = read_integer("pad_token_id", pad_token_id)
    rows = read_rows(samples)
    starts, split, width = widths_of(rows, side, pad_to, pad_to_multiple_of)
    writer = _Writer(rows, [number * width + start for number, start in enumerate(starts)], pin_memory)
    shape = (len(rows), width)
    mask = writer.write(torch.int64, shape, _put_ones)
    batch = PaddedBatch(
        input_ids=writer.write(torch.int64, shape, _put_ids, pad),
        attention_mask=mask,
        position_ids=writer.positions(mask),
        **_made(writer, shape),
        lengths=writer.column([row.length for row in rows]),
        split=split if side == "split" else None,
        **_experts(writer, shape, routed_experts),
    )
    return batch if device is None else batch.to(device)


def pack(
    samples: Iterable[Sample | TranscriptSegment],
    *,
    routed_experts: bool = True,
    pin_memory: bool = False,
    device: torch.device | str | int | None = None,
) -> PackedBatch:
    """Samples as one packed batch. Partials (ABORTED) are taken as they are: with what tokens they have.

    Args:
        samples: As for ``collate``.
        routed_experts: Whether the batch has them.
        pin_memory: As for ``collate``.
        device: As for ``collate``.

    Blocks for the copying. Thread-safe.

    Raises:
        ValueError: As ``collate``; or 2**31 tokens and more.
        TypeError: Something else than a sample; names it.
    """
    rows = read_rows(samples)
    ends = np.cumsum([row.length for row in rows])
    if ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"samples have {ends[-1]} tokens, a packed batch holds {np.iinfo(np.int32).max}")
    writer = _Writer(rows, [0, *ends[:-1].tolist()], pin_memory)
    shape = (int(ends[-1]),)
    batch = PackedBatch(
        input_ids=writer.write(torch.int64, shape, _put_ids),
        cu_seqlens=writer.column([0, *ends.tolist()], torch.int32),
        max_seqlen=max(row.length for row in rows),
        position_ids=writer.write(torch.int64, shape, _put_positions),
        **_made(writer, shape),
        **_experts(writer, shape, "padded" if routed_experts else None),
    )
    return batch if device is None else batch.to(device)


# --- writing ----------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes one tensor for all rows.

    Args:
        rows: Of the batch.
        starts: Where the first token of each is, counted over all places of the batch.
        pin: Whether to write to page-locked memory.
    """

    def __init__(self, rows: Sequence[Row], starts: Sequence[int], pin: bool) -> None:
        self.rows = rows
        self._starts = starts
        self._pin = pin

    def write(self, dtype: torch.dtype, shape: _Shape, put: _Put, pad: int = 0, each: Any = ()) -> torch.Tensor:
        """Each row's tokens by ``put``, ``pad`` between them; ``each``: the shape of what one token has."""
        tensor = torch.empty((*shape, *each), dtype=dtype, device="cpu", pin_memory=self._pin)
        flat = tensor.numpy().reshape(math.prod(shape), *each)
        done = 0
        for row, start in zip(self.rows, self._starts, strict=True):
            flat[done:start] = pad
            done = start + row.length
            put(flat[start:done], row)
        flat[done:] = pad
        return tensor

    def column(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A number of each row."""
        tensor = torch.empty(len(values), dtype=dtype, device="cpu", pin_memory=self._pin)
        tensor.numpy()[:] = values
        return tensor

    def positions(self, mask: torch.Tensor) -> torch.Tensor:
        """Of the tokens in padded rows."""
        tensor = torch.empty(mask.shape, dtype=torch.int64, device="cpu", pin_memory=self._pin)
        torch.cumsum(mask, 1, out=tensor)
        return tensor.sub_(1).clamp_(min=0)

    def ragged(self, dtype: torch.dtype, each: _Shape) -> Ragged:
        """The rows of experts that there are."""
        arrays = [row.experts for row in self.rows if row.experts is not None]
        values = torch.empty((sum(map(len, arrays)), *each), dtype=dtype, device="cpu", pin_memory=self._pin)
        np.concatenate(arrays, out=values.numpy())
        return Ragged(values, self.column(np.cumsum([0, *map(_count, self.rows)]).tolist()))


def _made(writer: _Writer, shape: _Shape) -> dict[str, Any]:
    """What is known of the tokens that the model made."""
    table = table_of(writer.rows)
    return {
        "loss_mask": writer.write(torch.bool, shape, _put_mask),
        "logprobs": writer.write(torch.float32, shape, _put_logprobs) if logprobs_of(writer.rows) else None,
        "versions": writer.write(torch.int32, shape, partial(_put_versions, table), -1),
        "version_table": tuple(table),
        "prompt_lengths": writer.column([len(row.prompt) for row in writer.rows]),
    }


def _experts(writer: _Writer, shape: _Shape, form: str | None) -> dict[str, Any]:
    found = None if form is None else experts_of(writer.rows, aligned=form == "padded")
    experts: Any = None
    if found is not None:
        dtype, each = torch.from_numpy(np.empty(0, found[0])).dtype, found[1]
        ragged = form == "ragged"
        experts = writer.ragged(dtype, each) if ragged else writer.write(dtype, shape, _put_experts, each=each)
    return {
        "routed_experts": experts,
        "routed_first": writer.column([row.first if found else 0 for row in writer.rows]),
        "routed_rows": writer.column([_count(row) if found else 0 for row in writer.rows]),
    }


def _count(row: Row) -> int:
    return 0 if row.experts is None else len(row.experts)


def _put_ids(place: AnyArray, row: Row) -> None:
    place[: len(row.prompt)] = row.prompt
    place[len(row.prompt) :] = row.output


def _put_ones(place: AnyArray, row: Row) -> None:  # noqa: ARG001 - one signature for all
    place[:] = 1


def _put_positions(place: AnyArray, row: Row) -> None:
    place[:] = np.arange(row.length)


def _put_mask(place: AnyArray, row: Row) -> None:
    place[: len(row.prompt)] = False
    place[len(row.prompt) :] = True if row.mask is None else row.mask


def _put_logprobs(place: AnyArray, row: Row) -> None:
    place[: len(row.prompt)] = 0.0
    place[len(row.prompt) :] = 0.0 if row.logprobs is None else row.logprobs


def _put_versions(table: dict[str, int], place: AnyArray, row: Row) -> None:
    place[:] = -1
    output = place[len(row.prompt) :]
    for version, start, end in row.spans:
        output[start:end] = -1 if version is None else table[version]


def _put_experts(place: AnyArray, row: Row) -> None:
    count = _count(row)
    place[: row.first] = 0
    place[row.first + count :] = 0
    if row.experts is not None:
        place[row.first : row.first + count] = row.experts
