"""The pure functions that say what a simulated engine answers."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutsync.sim import tokens
from rolloutsync.sim.sampling import Sampling
from rolloutsync.sim.stream import TokenStream, model_of
from rolloutsync.sim.tokenizer import Tokenizer
from rolloutsync.sim.tokens import expected_logprobs, expected_routed_experts, expected_tokens

VOCAB = 512
MODEL = model_of(VOCAB, 40.0)
contexts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
versions = st.text(max_size=5)


@given(prompt=contexts, seed=st.integers(-(2**63), 2**63 - 1), version=versions, cut=st.integers(0, 60))
def test_a_resumed_sample_goes_on_as_the_whole_one(prompt: list[int], seed: int, version: str, cut: int) -> None:
    """Prompt plus the first outputs gives the remaining outputs, log-probabilities and expert rows."""
    whole = expected_tokens(prompt, 60, seed=seed, version=version, vocab_size=VOCAB)
    head = whole[:cut]
    tail = expected_tokens(prompt + head, 60 - cut, seed=seed, version=version, vocab_size=VOCAB)
    assert head + tail == whole
    scores = expected_logprobs(prompt, whole, version=version)
    assert scores[cut:] == expected_logprobs(prompt + head, tail, version=version)
    shape = {"layers": 2, "topk": 3, "num_experts": 5}
    rows = expected_routed_experts(prompt, whole, **shape)
    again = expected_routed_experts(prompt + head, tail, **shape, start_len=len(prompt) + cut - 1)
    assert np.array_equal(rows[len(prompt) + cut - 1 :], again)


@given(prompt=contexts, first=st.integers(0, 30), second=st.integers(0, 30))
def test_eos_and_its_minimum_survive_a_resume(prompt: list[int], first: int, second: int) -> None:
    """An end token comes at the same place, whether or not the sample was cut before it."""
    arguments = {"vocab_size": VOCAB, "ignore_eos": False, "mean_output_tokens": 10.0}
    whole = expected_tokens(prompt, 60, min_new_tokens=second, **arguments)  # type: ignore[arg-type]
    head = whole[: min(first, len(whole) - 1)]
    left = max(0, second - len(head))
    assert head + expected_tokens(prompt + head, 60 - len(head), min_new_tokens=left, **arguments) == whole  # type: ignore[arg-type]
    assert tokens.EOS_TOKEN_ID not in whole[:second]


@given(prompt=contexts, version=versions)
def test_logprobs_are_exact_in_float32_and_below_zero(prompt: list[int], version: str) -> None:
    """What travels as JSON is what a trainer's float32 holds."""
    scores = expected_logprobs(prompt, expected_tokens(prompt, 20, version=version), version=version)
    assert all(float(np.float32(score)) == score and -8.0 <= score < 0.0 for score in scores)


def test_seed_version_and_context_all_matter() -> None:
    """Changing any of them changes the tokens."""
    base = expected_tokens([5, 6, 7], 8)
    others = [
        expected_tokens([5, 6, 7], 8, seed=1),
        expected_tokens([5, 6, 7], 8, version="2"),
        expected_tokens([5, 7, 6], 8),
    ]
    assert base not in others
    assert expected_tokens([5, 6, 7], 8, seed=0, version="default") == base


def test_prefix_hashes_equal_the_step_by_step_hash() -> None:
    """The vectorised hash and the one in the token loop are the same function."""
    ids, state = tokens.draw(tokens.context_hash([9, 8]), 77, 3000, VOCAB)
    assert tokens.context_hash([9, 8, *ids]) == state
    assert tokens.prefix_hashes([9, 8, *ids])[2] == tokens.context_hash([9, 8])


def test_lengths_have_the_mean_that_was_asked_for() -> None:
    """Samples end by themselves, at a realistic variety of lengths."""
    lengths = [
        len(expected_tokens([first, 5], 10_000, ignore_eos=False, mean_output_tokens=50.0)) for first in range(1000)
    ]
    assert 44 < statistics.mean(lengths) < 56
    assert 40 < statistics.stdev(lengths) < 60


def test_experts_of_a_row_are_distinct_and_in_range() -> None:
    """A router chooses k different experts."""
    rows = expected_routed_experts([5, 6, 7], [8, 9], layers=3, topk=4, num_experts=6)
    assert rows.shape == (4, 3, 4)
    assert rows.dtype == np.int32
    assert rows.min() >= 0
    assert rows.max() < 6
    assert all(len(set(row)) == 4 for row in rows.reshape(-1, 4).tolist())


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60), number=st.integers(0, 5000))
def test_the_tokenizer_gives_a_text_back(text: str, number: int) -> None:
    """Whatever `encode` makes of a text, `decode` turns back."""
    tokenizer = Tokenizer(2000)
    mixed = f"{text}{tokenizer.decode([259 + number % 1700])}{text}"
    ids = tokenizer.encode(mixed)
    assert tokenizer.decode(ids) == mixed
    assert all(0 <= token < 2000 for token in ids)


def stream(prompt: list[int], limit: int, **sampling: object) -> TokenStream:
    """A stream under version "1"."""
    return TokenStream(MODEL, prompt, Sampling(**sampling), limit, "1")  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(prompt=contexts, steps=st.lists(st.integers(1, 30), max_size=8), change=st.integers(0, 50))
def test_a_stream_is_lazy_but_says_the_same(prompt: list[int], steps: list[int], change: int) -> None:
    """In how many pieces it was computed does not matter, nor what was computed ahead of a change of weights."""
    lazy = stream(prompt, 100, ignore_eos=True)
    for step in steps:
        lazy.grow(len(lazy.tokens) + step)
    lazy.change_weights("2", change)
    lazy.grow(100)
    before = expected_tokens(prompt, change, version="1", vocab_size=VOCAB)
    assert lazy.tokens == before + expected_tokens(prompt + before, 100 - change, version="2", vocab_size=VOCAB)
    spans = [("1", 0, change), ("2", change, 100)]
    assert lazy.versions(100) == [span for span in spans if span[1] < span[2]]
    assert lazy.logprobs(100) == [
        *expected_logprobs(prompt, before, version="1"),
        *expected_logprobs(prompt + before, lazy.tokens[change:], version="2"),
    ]


def test_a_stop_string_ends_with_the_token_that_completes_it() -> None:
    """The text is cut before the stop, the ids keep it; `no_stop_trim` keeps the text."""
    plain = stream([5, 6], 20, ignore_eos=True)
    plain.grow(20)
    wanted = plain.text(6)[-3:]
    stopped = stream([5, 6], 20, ignore_eos=True, stop=(wanted,))
    stopped.grow(20)
    count = len(stopped.tokens)
    assert stopped.stop is not None
    assert stopped.stop.matched == wanted
    assert count <= 6
    assert plain.text(count).startswith(stopped.text(count))
    assert wanted not in stopped.text(count)
    kept = stream([5, 6], 20, ignore_eos=True, stop=(wanted,), no_stop_trim=True)
    kept.grow(20)
    assert wanted in kept.text(count)


@pytest.mark.parametrize("minimum", [0, 4])
def test_a_stop_token_counts_from_the_minimum_on(minimum: int) -> None:
    """`min_new_tokens` lets an earlier stop token pass."""
    plain = expected_tokens([5, 6], 20, version="1", vocab_size=VOCAB)
    stopped = stream([5, 6], 20, stop_token_ids=frozenset({plain[1], plain[8]}), min_new_tokens=minimum)
    stopped.grow(20)
    assert stopped.tokens == plain[: 9 if minimum else 2]
