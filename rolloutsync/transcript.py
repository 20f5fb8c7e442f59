"""The transcript of an episode: its turns, and what of them a trainer trains on. Pure functions of the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rolloutsync.sample import NO_TOKENS, WeightSpan

if TYPE_CHECKING:
    from rolloutsync.sample import FloatArray, IntArray, Sample

MaskArray = npt.NDArray[np.bool_]
_Part = tuple[int, "IntArray", "Sample"]  # number of the turn, ids that were new in its prompt, what the model said


@dataclass(frozen=True, slots=True, eq=False)
class TranscriptSegment:
    """One training sample: token ids of which some are the model's. All arrays have one length, T.

    Attributes:
        input_ids: int32[T]: the first prompt, the model's words, what the tool said, the model's words, ...
        loss_mask: bool[T]: True where this segment's model made the token, and so is to be trained on it.
        logprobs: float32[T]: 0.0 where the mask is False; NaN where it is True and logprobs were not asked for.
        weight_spans: (version, start, end) in positions of ``input_ids``; they tile exactly what the mask shows.
        turns: Numbers of the turns that are in it, from 0.
    """

    input_ids: IntArray
    loss_mask: MaskArray
    logprobs: FloatArray
    weight_spans: tuple[WeightSpan, ...]
    turns: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """The turns of one episode.

    Attributes:
        samples: One for each turn, in the order in which they ended; ``index`` is the item's, ``member`` the number of
            the turn. The last one of an interrupted episode may be a partial (ABORTED).
    """

    samples: tuple[Sample, ...] = ()

    @property
    def segments(self) -> tuple[TranscriptSegment, ...]:
        """What to train on: each token that the model made is in the mask of exactly one segment.

        A turn whose prompt begins with everything said so far (prompt and answer of the turn before) extends the
        segment; any other one (a chat template stripped the reasoning, a second try from the same prompt) begins a new
        segment, in whose mask earlier answers are False. Turns without a token of the model's add nothing.

        Raises:
            ValueError: A turn's prompt is text, and the engine did not tell its token ids.
        """
        parts: list[list[_Part]] = []
        said = NO_TOKENS
        for number, sample in enumerate(self.samples):
            if not len(sample.output_ids):
                continue
            prompt = _prompt_ids(number, sample)
            if not parts or not _extends(prompt, said):
                parts.append([])
                said = NO_TOKENS
            parts[-1].append((number, prompt[len(said) :], sample))
            said = np.concatenate([prompt, sample.output_ids])
        return tuple(_segment(each) for each in parts)


def _prompt_ids(number: int, sample: Sample) -> IntArray:
    ids = sample.prompt.input_ids
    if ids is None:
        advice = "SGLang tells them from 0.5.13 on, unless return_prompt_token_ids=False; else pass ids or messages"
        raise ValueError(f"turn {number}: the prompt is text, and {sample.engine} did not tell its token ids: {advice}")
    return ids


def _extends(prompt: IntArray, said: IntArray) -> bool:
    return len(prompt) >= len(said) and bool((prompt[: len(said)] == said).all())


def _segment(parts: list[_Part]) -> TranscriptSegment:
    ids: list[IntArray] = []
    masks: list[MaskArray] = []
    logprobs: list[FloatArray] = []
    spans: list[WeightSpan] = []
    length = 0
    for _, told, sample in parts:
        length += len(told)
        spans += [WeightSpan(version, start + length, end + length) for version, start, end in sample.weight_spans]
        length += len(sample.output_ids)
        ids += [told, sample.output_ids]
        masks += [np.zeros(len(told), np.bool_), np.ones(len(sample.output_ids), np.bool_)]
        logprobs += [np.zeros(len(told), np.float32), _logprobs(sample)]
    joined = (np.concatenate(ids), np.concatenate(masks), np.concatenate(logprobs))
    return TranscriptSegment(*joined, tuple(spans), tuple(number for number, _, _ in parts))


def _logprobs(sample: Sample) -> FloatArray:
    unknown = np.full(len(sample.output_ids), np.nan, np.float32)
    return unknown if sample.logprobs is None else sample.logprobs
