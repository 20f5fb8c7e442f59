"""Transcripts: what a trainer is given of the turns of an episode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutsync.sample import Prompt, Sample, Status, WeightSpan
from rolloutsync.transcript import Transcript

from .makers import floats, ids

_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)  # few different ones: prefixes often match


def _turn(prompt: list[int], said: list[int], *spans: tuple[str, int, int]) -> Sample:
    logprobs = floats(*(-1.0 - token for token in said))
    made = tuple(WeightSpan(*span) for span in spans) or (WeightSpan("1", 0, len(said)),)
    return Sample(
        Prompt(input_ids=ids(*prompt)),
        0,
        0,
        status=Status.COMPLETED,
        output_ids=ids(*said),
        logprobs=logprobs,
        weight_spans=made,
    )


def test_turns_that_extend_are_one_segment() -> None:
    """Prompt, answer, tool, answer: versions and logprobs stand where the model's tokens do."""
    first = _turn([1, 2], [3, 4], ("a", 0, 1), ("b", 1, 2))
    (segment,) = Transcript((first, _turn([1, 2, 3, 4, 9], [5], ("b", 0, 1)))).segments
    assert segment.input_ids.tolist() == [1, 2, 3, 4, 9, 5]
    assert segment.loss_mask.tolist() == [False, False, True, True, False, True]
    assert segment.logprobs.tolist() == [0.0, 0.0, -4.0, -5.0, 0.0, -6.0]
    assert segment.weight_spans == (WeightSpan("a", 2, 3), WeightSpan("b", 3, 4), WeightSpan("b", 5, 6))
    assert segment.turns == (0, 1)


@pytest.mark.parametrize("prompt", [[1, 2], [1, 2, 3], [1, 2, 3, 5], [1, 2, 4, 9], [7]])
def test_any_other_turn_begins_a_segment(prompt: list[int]) -> None:
    """The same prompt, a part of what was said, something else."""
    one, two = Transcript((_turn([1, 2], [3, 4]), _turn(prompt, [6]))).segments
    assert (one.turns, two.turns) == ((0,), (1,))
    assert two.input_ids.tolist() == [*prompt, 6]
    assert two.loss_mask.tolist() == [*[False] * len(prompt), True]


def test_a_tool_that_says_nothing() -> None:
    """The model goes on where it stopped: nothing lies between its two answers."""
    (segment,) = Transcript((_turn([1], [2]), _turn([1, 2], [3]))).segments
    assert segment.loss_mask.tolist() == [False, True, True]


def test_turns_without_tokens_add_nothing() -> None:
    """Failed ones, those that were cut before the first token, and text that nobody knows the ids of."""
    nothing = Sample(Prompt(text="x"), 0, 1)
    (segment,) = Transcript((nothing, _turn([1], [2]), nothing, _turn([1, 2, 5], [3]))).segments
    assert segment.turns == (1, 3)
    assert Transcript((nothing,)).segments == ()
    assert Transcript().segments == ()


def test_unknown_ids_are_an_error_by_name() -> None:
    """They cannot be guessed."""
    said = Sample(Prompt(text="x"), 0, 1, engine="http://h:1", output_ids=ids(3), logprobs=floats(-1.0))
    with pytest.raises(ValueError, match=r"turn 1: .* http://h:1 did not tell its token ids"):
        _ = Transcript((_turn([1], [2]), said)).segments


@given(st.lists(st.tuples(_TOKENS, _TOKENS), max_size=5))
def test_every_token_of_the_models_is_in_one_mask(turns: list[tuple[list[int], list[int]]]) -> None:
    """Whatever the prompts are; spans tile the mask, logprobs are 0.0 outside it."""
    segments = Transcript(tuple(_turn(*turn) for turn in turns)).segments
    said = [token for segment in segments for token in segment.input_ids[segment.loss_mask].tolist()]
    assert said == [token for _, answer in turns for token in answer]
    assert [number for segment in segments for number in segment.turns] == list(range(len(turns)))
    for segment in segments:
        covered = np.zeros(len(segment), np.bool_)
        for _, start, end in segment.weight_spans:
            assert not covered[start:end].any()
            covered[start:end] = True
        assert (covered == segment.loss_mask).all()
        assert ((segment.logprobs != 0.0) == segment.loss_mask).all()
