"""What cannot be in a batch is refused by name, in both forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rolloutsync.errors import RolloutError
from rolloutsync.sample import Prompt, Sample, Status, WeightSpan
from rolloutsync.tensors import Ragged, collate, pack
from rolloutsync.transcript import Transcript

from .makers import NEVER_SENT, sample_of

pytestmark = pytest.mark.torch
FORMS: list[Callable[[Any], Any]] = [lambda samples: collate(samples, pad_token_id=0), pack]
GOOD = sample_of(3, 2)
both = pytest.mark.parametrize("form", FORMS, ids=["collate", "pack"])

WRONG: dict[str, tuple[Sample, str]] = {
    "failed": (
        replace(GOOD, status=Status.FAILED, error=RolloutError("engine said no")),
        r"samples\[1\] is FAILED, leave it out: engine said no",
    ),
    "text": (
        replace(GOOD, prompt=Prompt(text="Once")),
        r"samples\[1\]: its prompt is text, .*return_prompt_token_ids=True",
    ),
    "no logprobs": (replace(GOOD, logprobs=None), r"samples\[1\] has no logprobs, others have"),
    "no experts": (replace(GOOD, routed_experts=None), r"samples\[1\] has no routed experts, .*routed_experts=None"),
    "one logprob": (
        replace(GOOD, logprobs=np.array([-1], np.float32)),
        r"samples\[1\] has logprobs of shape \(1,\) for 2 tokens",
    ),
    "other experts": (
        replace(GOOD, routed_experts=np.zeros((4, 2, 8), np.uint8)),
        r"samples\[1\] has experts of shape \(4, 2, 8\), samples\[0\] of shape \(4, 2, 3\)",
    ),
    "too many rows": (
        replace(GOOD, routed_experts=np.zeros((6, 2, 3), np.uint8)),
        r"samples\[1\] has 6 rows of routed experts from token 0 on, .* its 5 ids .*'ragged'",
    ),
    "an expanded image": (
        replace(GOOD, prompt_tokens=4, routed_experts=np.zeros((5, 2, 3), np.uint8)),
        r"samples\[1\] has 5 rows .*images expand",
    ),
    "a span beyond": (
        replace(GOOD, weight_spans=(WeightSpan("1", 0, 3),)),
        r"samples\[1\] has weight_spans beyond its 2 tokens",
    ),
}


@both
@pytest.mark.parametrize("name", WRONG)
def test_a_sample_that_cannot_be_in_a_batch(form: Callable[[Any], Any], name: str) -> None:
    """The message says which one it is and why."""
    wrong, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        form([GOOD, wrong])


@both
def test_no_samples(form: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="samples is empty"):
        form([])


@both
@pytest.mark.parametrize("given", [GOOD, [GOOD, {"output_ids": [1]}], [GOOD, None]])
def test_other_things_than_samples(form: Callable[[Any], Any], given: Any) -> None:
    with pytest.raises(TypeError, match=r"wrap it in a list|samples\[1\] must be a Sample or a segment"):
        form(given)


@both
@pytest.mark.parametrize("status", [Status.ABORTED, Status.TRUNCATED])
def test_partials_are_taken(form: Callable[[Any], Any], status: Status) -> None:
    """An abort is a result; one that was never sent has a prompt, and lacks what no token of its could have."""
    batch = form([replace(GOOD, status=status), sample_of(4, 0, **NEVER_SENT)])
    assert len(batch) == 2
    assert int(batch.loss_mask.sum()) == 2


def test_ragged_experts_need_not_be_those_of_the_ids() -> None:
    """An image that expands has more rows than ids."""
    wrong = WRONG["an expanded image"][0]
    ragged = collate([GOOD, wrong], pad_token_id=0, routed_experts="ragged").routed_experts
    assert isinstance(ragged, Ragged)
    assert [len(ragged[0]), len(ragged[1])] == [4, 5]


@both
def test_a_segment_whose_logprobs_were_not_asked_for(form: Callable[[Any], Any]) -> None:
    """Its NaN are no logprobs: alone it has none, and beside others it is refused."""
    plain = replace(GOOD, routed_experts=None)
    (segment,) = Transcript((replace(plain, logprobs=None),)).segments
    assert form([segment]).logprobs is None
    with pytest.raises(ValueError, match=r"samples\[1\] has no logprobs"):
        form([plain, segment])


ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"side": "middle"}, ValueError, "side must be one of 'right', 'left', 'split', got 'middle'"),
    ({"routed_experts": "packed"}, ValueError, "routed_experts must be one of 'padded', 'ragged', None, got 'packed'"),
    ({"pad_token_id": None}, TypeError, "pad_token_id must be an int, got None"),
    ({"pad_to": 4}, ValueError, r"samples\[0\] has 5 tokens in all, pad_to allows 4; nothing is cut off"),
    ({"pad_to": -1}, ValueError, "pad_to must be at least 0, got -1"),
    ({"pad_to": 5.0}, TypeError, "pad_to must be an int, got 5.0"),
    ({"pad_to": (3, 2)}, ValueError, r"pad_to must be one number unless side='split', got \(3, 2\)"),
    ({"side": "split", "pad_to": 5}, ValueError, "pad_to must be a pair with side='split'.* got 5"),
    ({"side": "split", "pad_to": (2, 9)}, ValueError, r"samples\[0\] has 3 tokens of its prompt, pad_to allows 2"),
    ({"side": "split", "pad_to": (9, 1)}, ValueError, r"samples\[0\] has 2 tokens of its output, pad_to allows 1"),
    ({"pad_to_multiple_of": 0}, ValueError, "pad_to_multiple_of must be at least 1, got 0"),
    ({"pad_to": 8, "pad_to_multiple_of": 4}, ValueError, "exclude each other"),
]


@pytest.mark.parametrize(("given", "error", "words"), ARGUMENTS)
def test_arguments(given: dict[str, Any], error: type[Exception], words: str) -> None:
    """Field and value are named."""
    with pytest.raises(error, match=words):
        collate([GOOD], **{"pad_token_id": 0, **given})
