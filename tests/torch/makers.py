"""Samples of any shape, and a batch of them written token by token, as slow as it is plain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rolloutsync.sample import NO_TOKENS, Prompt, Sample, Status, WeightSpan

LAYERS, TOPK = 2, 3


def sample_of(prompt: int = 3, output: int = 2, /, *, seed: int = 0, **given: Any) -> Sample:
    """A whole sample with so many tokens; ``given`` overrides its fields."""
    random = np.random.default_rng(seed)
    rows = max(prompt + output - 1, 0)
    values: dict[str, Any] = {
        "prompt": Prompt(input_ids=random.integers(1, 1000, prompt, np.int32)),
        "index": seed,
        "member": 0,
        "rid": f"{seed:032x}",
        "status": Status.COMPLETED,
        "output_ids": random.integers(1, 1000, output, np.int32),
        "logprobs": -random.random(output, np.float32) - np.float32(0.01),
        "weight_spans": (WeightSpan("7", 0, output),) if output else (),
        "routed_experts": random.integers(1, 200, (rows, LAYERS, TOPK), np.uint8),
        "prompt_tokens": prompt,
    }
    return Sample(**{**values, **given})


NEVER_SENT: dict[str, Any] = {
    "status": Status.ABORTED,
    "output_ids": NO_TOKENS,
    "logprobs": None,
    "routed_experts": None,
}


@st.composite
def _spans(draw: st.DrawFn, output: int) -> tuple[WeightSpan, ...]:
    """Versions that tile the output, some of them unknown."""
    cuts = sorted(draw(st.sets(st.integers(1, output - 1), max_size=3))) if output > 1 else []
    ends = [*cuts, output] if output else []
    versions = st.none() | st.sampled_from(["1", "2", "step-3", ""])
    return tuple(WeightSpan(draw(versions), start, end) for start, end in zip([0, *cuts], ends, strict=False))


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    """One to six of them, with logprobs and experts or without; whatever was never sent has neither."""
    has_logprobs, has_experts, begins = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 2))
    found = []
    for seed in range(draw(st.integers(1, 6))):
        prompt, output = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        made = sample_of(prompt, output, seed=draw(st.integers(0, 99)) + seed)
        first = min(begins, prompt)
        fields = {"routed_experts_start_len": first} if first else {}
        assert made.routed_experts is not None
        made = replace(
            made,
            prompt=Prompt(input_ids=made.prompt.input_ids, fields=fields),
            weight_spans=draw(_spans(output)),
            status=draw(st.sampled_from([Status.COMPLETED, Status.TRUNCATED, Status.ABORTED])),
            logprobs=made.logprobs if has_logprobs else None,
            routed_experts=made.routed_experts[first:] if has_experts else None,
        )
        found.append(replace(made, **NEVER_SENT) if not output and draw(st.booleans()) else made)
    return found


@dataclass
class Token:
    """All that is known of one token."""

    id: int
    position: int
    made: bool
    logprob: float
    version: str | None
    experts: Any


def tokens_of(sample: Sample) -> list[Token]:
    """One at a time."""
    prompt, output = _ids(sample), sample.output_ids.tolist()
    found = []
    for place, number in enumerate(prompt + output):
        at = place - len(prompt)
        row = place - int(sample.prompt.fields.get("routed_experts_start_len") or 0)
        rows = [] if sample.routed_experts is None else list(sample.routed_experts)
        found.append(
            Token(
                id=number,
                position=place,
                made=at >= 0,
                logprob=0.0 if at < 0 or sample.logprobs is None else float(sample.logprobs[at]),
                version=next((v for v, start, end in sample.weight_spans if start <= at < end), None),
                experts=rows[row] if 0 <= row < len(rows) else np.zeros((LAYERS, TOPK), np.uint8),
            )
        )
    return found


def _ids(sample: Sample) -> list[int]:
    assert sample.prompt.input_ids is not None
    return [int(number) for number in sample.prompt.input_ids]
