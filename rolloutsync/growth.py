"""How samples grow: what one engine answer, a segment, makes of a sample. Pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rolloutsync.sample import NO_TIME, Sample, TopLogprobs, WeightSpan, status_of

if TYPE_CHECKING:
    from rolloutsync.sample import Prompt, Segment, Timing


def make(
    prompt: Prompt,
    index: int,
    member: int,
    segment: Segment,
    *,
    rid: str = "",
    engine: str | None = None,
    attempts: int = 0,
    timing: Timing = NO_TIME,
) -> Sample:
    """What ``extend`` makes of a sample with nothing generated yet."""
    ids = segment.prompt_ids
    return Sample(
        prompt=replace(prompt, input_ids=ids) if prompt.input_ids is None and ids is not None else prompt,
        index=index,
        member=member,
        status=status_of(segment.finish),
        finish=segment.finish,
        text=segment.text,
        output_ids=segment.output_ids,
        logprobs=segment.logprobs,
        weight_spans=_shift((), segment.weight_spans, 0),
        routed_experts=segment.routed_experts,
        prompt_logprobs=segment.prompt_logprobs,
        top_logprobs=segment.top_logprobs,
        hidden_states=segment.hidden_states,
        prompt_tokens=segment.prompt_tokens,
        cached_tokens=segment.cached_tokens,
        dp_rank=segment.dp_rank,
        meta_info=segment.meta_info,
        metadata=dict(prompt.metadata),
        rid=rid,
        engine=engine,
        attempts=attempts,
        timing=timing,
    )


def extend(sample: Sample, segment: Segment, **stamp: Any) -> Sample:
    """The sample with ``segment`` appended: tokens, logprobs and spans grow together. ``stamp``: further fields."""
    start = len(sample.output_ids)
    ids = segment.prompt_ids
    prompt = (
        replace(sample.prompt, input_ids=ids) if sample.prompt.input_ids is None and ids is not None else sample.prompt
    )
    return replace(
        sample,
        prompt=prompt,
        status=status_of(segment.finish),
        finish=segment.finish,
        text=sample.text + segment.text,
        output_ids=_join(sample.output_ids, segment.output_ids) if start else segment.output_ids,
        logprobs=_join(sample.logprobs, segment.logprobs) if start else segment.logprobs,
        weight_spans=_shift(sample.weight_spans, segment.weight_spans, start),
        routed_experts=_more_rows(sample.routed_experts, segment.routed_experts),
        prompt_logprobs=_of_prompt(sample.prompt_logprobs, segment.prompt_logprobs, start),
        top_logprobs=_join_top(sample, segment) if start else segment.top_logprobs,
        hidden_states=_latest(segment.hidden_states, sample.hidden_states),
        prompt_tokens=sample.prompt_tokens if segment.prompt_tokens is None else segment.prompt_tokens - start,
        cached_tokens=_latest(segment.cached_tokens, sample.cached_tokens),
        dp_rank=_latest(segment.dp_rank, sample.dp_rank),
        meta_info=segment.meta_info,
        **stamp,
    )


def _latest(now: Any, before: Any) -> Any:
    return before if now is None else now


def _join(first: Any, second: Any) -> Any:
    return None if first is None or second is None else np.concatenate([first, second])


def _more_rows(first: Any, second: Any) -> Any:
    """The rows that were missing, behind those that are there; an aborted answer may bring none."""
    if first is None or second is None:
        return _latest(second, first)
    return np.concatenate([first, second.reshape(len(second), *first.shape[1:])])


def _of_prompt(before: Any, now: Any, resumed: int) -> Any:
    """Logprobs of the prompt alone: to the engine, the tokens that a resumed request brings along are prompt too."""
    if before is not None or now is None or not resumed:
        return _latest(before, now)
    return now[: len(now) - resumed]


def _join_top(sample: Sample, segment: Segment) -> TopLogprobs | None:
    if sample.top_logprobs is None or not len(segment.output_ids):
        return sample.top_logprobs
    if segment.top_logprobs is None:
        return None
    pairs = zip(sample.top_logprobs, segment.top_logprobs, strict=True)
    return TopLogprobs(*(np.concatenate(pair) for pair in pairs))


def _shift(before: tuple[WeightSpan, ...], after: tuple[WeightSpan, ...], by: int) -> tuple[WeightSpan, ...]:
    """All spans; two that meet and have the same version are one."""
    if not before and len(after) <= 1:
        return after
    spans = list(before)
    for version, start, end in after:
        if spans and spans[-1].version == version:
            spans[-1] = spans[-1]._replace(end=end + by)
        else:
            spans.append(WeightSpan(version, start + by, end + by))
    return tuple(spans)
