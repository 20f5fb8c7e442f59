"""The recipes in README.md, run as they stand, against what verl and TRL make of the same samples.

What those two do is written down here anew, sample by sample: pad each one, then stack. Neither is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from rolloutsync.sample import Prompt, Sample
from rolloutsync.transcript import Transcript
from tests.processes import ROOT

from .makers import LAYERS, TOPK, sample_of, samples

pytestmark = pytest.mark.torch
PAD = 1023


def recipe(name: str) -> Callable[..., dict[str, torch.Tensor]]:
    """The function in the Python block behind a marker of the README."""
    block = re.search(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, f"README.md has no block after <!-- recipe: {name} -->"
    names: dict[str, Any] = {}
    exec(block[1], names)
    found: Callable[..., dict[str, torch.Tensor]] = names[f"to_{name}"]
    return found


def padded(values: Any, length: int, *, left: bool = False, value: float = 0) -> torch.Tensor:
    """One sample's values as a row."""
    filled = [value] * (length - len(values))
    return torch.tensor([*filled, *values] if left else [*values, *filled])


def lengths_of(made: list[Sample]) -> tuple[int, int]:
    """Of the longest prompt and the longest output."""
    return max(len(s.tokens) - len(s.output_ids) for s in made), max(len(s.output_ids) for s in made)


def parts(sample: Sample) -> tuple[list[int], list[int]]:
    """Ids of the prompt and of the output."""
    output = sample.output_ids.tolist()
    return sample.tokens.tolist()[: len(sample.tokens) - len(output)], output


def verl_row(sample: Sample, prompt_length: int, response_length: int) -> dict[str, torch.Tensor]:
    """As its agent loop pads one sample."""
    prompt, response = parts(sample)
    row = {
        "prompts": padded(prompt, prompt_length, left=True, value=PAD).long(),
        "responses": padded(response, response_length, value=PAD).long(),
        "response_mask": padded([1] * len(response), response_length).long(),
    }
    row["input_ids"] = torch.cat([row["prompts"], row["responses"]])
    row["attention_mask"] = torch.cat(
        [padded([1] * len(prompt), prompt_length, left=True), row["response_mask"]]
    ).long()
    row["position_ids"] = torch.clip(torch.cumsum(row["attention_mask"], dim=-1) - 1, min=0, max=None)
    logprobs = [] if sample.logprobs is None else sample.logprobs.tolist()
    row["rollout_log_probs"] = padded(logprobs, response_length, value=0.0).float()
    experts = torch.zeros(prompt_length + response_length, LAYERS, TOPK, dtype=torch.uint8)
    if sample.routed_experts is not None:
        first = prompt_length - len(prompt) + int(sample.prompt.fields.get("routed_experts_start_len") or 0)
        experts[first : first + len(sample.routed_experts)] = torch.from_numpy(sample.routed_experts)
    return row | {"routed_experts": experts}


@given(made=samples())
def test_into_verls_batch(made: list[Sample]) -> None:
    """Every tensor is what verl's own padding gives, bit by bit."""
    prompt_length, response_length = (length + 2 for length in lengths_of(made))
    found = recipe("verl")(made, PAD, prompt_length, response_length)
    rows = [verl_row(sample, prompt_length, response_length) for sample in made]
    wanted = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    optional = {"rollout_log_probs": "logprobs", "routed_experts": "routed_experts"}
    absent = {name for name, field in optional.items() if all(getattr(sample, field) is None for sample in made)}
    assert found.keys() == wanted.keys() - absent
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name


@given(made=samples())
def test_into_trls_batch(made: list[Sample]) -> None:
    """Every tensor is what TRL's own padding gives, bit by bit."""
    found = recipe("trl")(made, PAD)
    prompt_length, length = lengths_of(made)
    pairs = [parts(sample) for sample in made]
    wanted = {
        "prompt_ids": [padded(prompt, prompt_length, left=True, value=PAD).long() for prompt, _ in pairs],
        "prompt_mask": [padded([1] * len(prompt), prompt_length, left=True).long() for prompt, _ in pairs],
        "completion_ids": [padded(output, length, value=PAD).long() for _, output in pairs],
        "completion_mask": [padded([1] * len(output), length).long() for _, output in pairs],
        "tool_mask": [torch.ones(length).long() for _ in pairs],
    }
    if any(sample.logprobs is not None for sample in made):
        logprobs = [[] if sample.logprobs is None else sample.logprobs.tolist() for sample in made]
        wanted["sampling_per_token_logps"] = [padded(each, length, value=0.0).float() for each in logprobs]
        wanted["old_per_token_logps"] = wanted["sampling_per_token_logps"]
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, torch.stack(wanted[name])), name
        assert tensor.dtype == wanted[name][0].dtype, name


def episode() -> Any:
    """A prompt of 3, an answer of 2, a tool's word of 2, an answer of 3."""
    first = sample_of(3, 2, seed=1, routed_experts=None)
    told = np.concatenate([first.tokens, np.array([900, 901], np.int32)])
    second = replace(sample_of(7, 3, seed=2, routed_experts=None), prompt=Prompt(told))
    (segment,) = Transcript((first, second)).segments
    return segment


@pytest.mark.parametrize(("name", "more", "mask"), [("verl", (4, 8), "response_mask"), ("trl", (), "tool_mask")])
def test_what_tools_said_is_in_no_loss(name: str, more: tuple[int, ...], mask: str) -> None:
    """It is attended to."""
    found = recipe(name)([episode()], PAD, *more)
    assert found[mask][0, :7].tolist() == [1, 1, 0, 0, 1, 1, 1]
    attended = found["attention_mask"][:, 4:] if name == "verl" else found["completion_mask"]
    assert attended[0, :7].tolist() == [1] * 7


@pytest.mark.parametrize("name", ["verl", "trl"])
def test_a_recipe_is_short(name: str) -> None:
    """Ten lines, as promised."""
    assert recipe(name).__code__.co_firstlineno == 4
    lines = {line for _, _, line in recipe(name).__code__.co_lines() if line is not None}
    assert max(lines) - min(lines) <= 10
