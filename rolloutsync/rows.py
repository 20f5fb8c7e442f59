"""The rows of a batch, in numpy: what of each sample goes into it, how wide it gets, which samples cannot be in it."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rolloutsync.sample import Sample, Status, WeightSpan
from rolloutsync.transcript import TranscriptSegment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rolloutsync.sample import AnyArray, FloatArray, IntArray
    from rolloutsync.transcript import MaskArray


class Row(NamedTuple):
    """One sample. What concerns the output begins at the first token that the model made."""

    name: str
    prompt: IntArray
    output: IntArray
    mask: MaskArray | None  # None: the model made all of the output
    logprobs: FloatArray | None
    spans: tuple[WeightSpan, ...]
    experts: AnyArray | None
    first: int  # tokens before those that have experts
    expanded: bool  # the engine counted other tokens than there are ids (images), so its rows are not theirs

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.prompt) + len(self.output)


# --- reading ---


def read_rows(samples: Iterable[Sample | TranscriptSegment]) -> list[Row]:
    """Views of what the samples have; nothing is copied.

    Raises:
        ValueError: No samples, or one that cannot be in a batch.
        TypeError: Something else than samples.
    """
    if isinstance(samples, (Sample, TranscriptSegment)):
        raise TypeError(f"samples must be several, got one {type(samples).__name__}: wrap it in a list")
    rows = [_read(f"samples[{number}]", sample) for number, sample in enumerate(samples)]
    if not rows:
        raise ValueError("samples is empty: a batch needs at least one")
    return rows


def _read(name: str, sample: Any) -> Row:
    if not isinstance(sample, (Sample, TranscriptSegment)):
        raise TypeError(f"{name} must be a Sample or a segment of a transcript, got {sample!r:.200}")
    row = _of_sample(name, sample) if isinstance(sample, Sample) else _of_segment(name, sample)
    if row.logprobs is not None and row.logprobs.shape != row.output.shape:
        raise ValueError(f"{name} has logprobs of shape {row.logprobs.shape} for {len(row.output)} tokens")
    if any(not 0 <= start <= end <= len(row.output) for _, start, end in row.spans):
        raise ValueError(f"{name} has weight_spans beyond its {len(row.output)} tokens: {row.spans}")
    return row


def _of_sample(name: str, sample: Sample) -> Row:
    if sample.status is Status.FAILED:
        raise ValueError(f"{name} is FAILED, leave it out: {sample.error}")
    ids, told = sample.prompt.input_ids, sample.prompt_tokens
    if ids is None:
        advice = "call generate with return_prompt_token_ids=True, or with token ids as prompts"
        raise ValueError(f"{name}: its prompt is text, and its token ids are not known; {advice}")
    return Row(
        name=name,
        prompt=ids,
        output=sample.output_ids,
        mask=None,
        logprobs=sample.logprobs,
        spans=sample.weight_spans,
        experts=sample.routed_experts,
        first=int(sample.prompt.fields.get("routed_experts_start_len") or 0),
        expanded=told is not None and told != len(ids),
    )


def _of_segment(name: str, segment: TranscriptSegment) -> Row:
    ids, mask, logprobs = segment.input_ids, segment.loss_mask, segment.logprobs
    start = int(mask.argmax()) if mask.any() else len(ids)
    return Row(
        name=name,
        prompt=ids[:start],
        output=ids[start:],
        mask=mask[start:],
        logprobs=None if np.isnan(logprobs).any() else logprobs[start:],
        spans=tuple(WeightSpan(version, begin - start, end - start) for version, begin, end in segment.weight_spans),
        experts=None,
        first=0,
        expanded=False,
    )


# --- what they have in common ---


def logprobs_of(rows: Sequence[Row]) -> bool:
    """Whether they have logprobs.

    Raises:
        ValueError: Some have, and one with tokens of the model's has not.
    """
    return _all_have(rows, "logprobs", [row.logprobs for row in rows], "ask for them in every call, or in none")


def experts_of(rows: Sequence[Row], *, aligned: bool) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """The dtype that holds all experts, and the shape of one token's; None where there are none.

    Args:
        rows: Of one batch.
        aligned: Whether they must be those of the row's tokens.

    Raises:
        ValueError: Some have experts, and one with tokens of the model's has not; or they do not fit.
    """
    arrays = [row.experts for row in rows]
    if not _all_have(rows, "routed experts", arrays, "leave it out, or say routed_experts=None (in pack: False)"):
        return None
    found = [(row, array) for row, array in zip(rows, arrays, strict=True) if array is not None]
    (leader, model), shape = found[0], found[0][1].shape[1:]
    for row, array in found:
        if array.shape[1:] != shape:
            raise ValueError(f"{row.name} has experts of shape {array.shape}, {leader.name} of shape {model.shape}")
        if aligned and len(array):
            _check_aligned(row, len(array))
    return np.result_type(*(array.dtype for _, array in found)), shape


def _check_aligned(row: Row, count: int) -> None:
    if row.expanded or row.first + count > row.length:
        what = f"{count} rows of routed experts from token {row.first} on, which are not those of its {row.length} ids"
        raise ValueError(f"{row.name} has {what} (images expand): leave it out, or collate them as 'ragged'")


def _all_have(rows: Sequence[Row], what: str, values: Sequence[AnyArray | None], remedy: str) -> bool:
    if all(value is None for value in values):
        return False
    for row, value in zip(rows, values, strict=True):
        if value is None and len(row.output):
            raise ValueError(f"{row.name} has no {what}, others have: {remedy}")
    return True


def table_of(rows: Sequence[Row]) -> dict[str, int]:
    """Numbers of the weight versions, in the order in which they first occur."""
    versions = [version for row in rows for version, start, end in row.spans if version is not None and start < end]
    return {version: number for number, version in enumerate(dict.fromkeys(versions))}


# --- how wide they get ---


def widths_of(
    rows: Sequence[Row], side: str, pad_to: int | tuple[int, int] | None, multiple: int
) -> tuple[list[int], int, int]:
    """At which place each row begins, the column of the split (0 if there is none), and the width.

    Raises:
        ValueError: ``pad_to`` is not for this side, or less than a row needs.
        TypeError: It is not of ints.
    """
    read_integer("pad_to_multiple_of", multiple, least=1)
    if pad_to is not None and multiple != 1:
        raise ValueError(f"pad_to={pad_to} and pad_to_multiple_of={multiple} exclude each other")
    if side == "split":
        left = _width([(row.name, len(row.prompt)) for row in rows], "of its prompt", _part(pad_to, 0), multiple)
        right = _width([(row.name, len(row.output)) for row in rows], "of its output", _part(pad_to, 1), multiple)
        return [left - len(row.prompt) for row in rows], left, left + right
    width = _width([(row.name, row.length) for row in rows], "in all", _whole(pad_to), multiple)
    return [width - row.length if side == "left" else 0 for row in rows], 0, width


def _width(lengths: Sequence[tuple[str, int]], what: str, wanted: int | None, multiple: int) -> int:
    name, longest = max(lengths, key=lambda pair: pair[1])
    if wanted is None:
        return -(-longest // multiple) * multiple
    if longest > wanted:
        raise ValueError(f"{name} has {longest} tokens {what}, pad_to allows {wanted}; nothing is cut off")
    return wanted


def _part(pad_to: Any, place: int) -> int | None:
    if pad_to is None:
        return None
    if not isinstance(pad_to, (tuple, list)) or len(pad_to) != 2:
        raise ValueError(f"pad_to must be a pair with side='split', tokens of prompt and of output, got {pad_to!r}")
    return read_integer(f"pad_to[{place}]", pad_to[place], least=0)


def _whole(pad_to: Any) -> int | None:
    if isinstance(pad_to, (tuple, list)):
        raise ValueError(f"pad_to must be one number unless side='split', got {pad_to!r}")
    return None if pad_to is None else read_integer("pad_to", pad_to, least=0)


# --- arguments ---


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless the value is one of these."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def read_integer(name: str, value: Any, *, least: int | None = None) -> int:
    """The value as an int, also from numpy's.

    Raises:
        TypeError: It is none.
        ValueError: It is less than it may be.
    """
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number
