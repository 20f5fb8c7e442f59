"""Answers as vLLM words them, by hand."""

from __future__ import annotations

from typing import Any

from rolloutsync.dialects.base import Facts
from rolloutsync.sample import Prompt, Segment

from .makers import ids
from .vllm_recorded import DIALECT, FACTS

RID = "ab" * 16
ASKED = {"return_logprob": True}
PROMPT = Prompt(input_ids=ids(1, 2, 3), fields=ASKED)


def entry(token: int, logprob: float = -0.5, **more: Any) -> dict[str, Any]:
    """A token's logprob, as the token route words it."""
    top = {"token_id": token, "logprob": logprob, "rank": 1}
    return {**top, "top_logprobs": [top], **more}


def from_tokens(tokens: list[int], *, top: dict[str, Any] | None = None, **choice: Any) -> dict[str, Any]:
    """An answer of the token route; ``choice`` overrides its only choice by key."""
    own = {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": {"content": [entry(token) for token in tokens]},
        "weight_versions": [{"version": "7", "start": 0, "end": len(tokens)}],
        **choice,
    }
    usage = {"prompt_tokens": 3, "completion_tokens": len(tokens)}
    return {"request_id": f"generate-tokens-{RID}", "model": "m", "usage": usage, "choices": [own], **(top or {})}


def from_completions(tokens: list[int], *, top: dict[str, Any] | None = None, **choice: Any) -> dict[str, Any]:
    """The same of completions."""
    names = [f"token_id:{token}" for token in tokens]
    likeliest = [{name: -0.5} for name in names]
    columns = {"tokens": names, "token_logprobs": [-0.5] * len(tokens), "top_logprobs": likeliest}
    own = {
        "index": 0,
        "text": "x" * len(tokens),
        "token_ids": tokens,
        "finish_reason": "stop",
        "logprobs": columns,
        "prompt_token_ids": [1, 2, 3],
        **choice,
    }
    told = {"id": f"cmpl-{RID}", "object": "text_completion", "usage": {"prompt_tokens": 3}}
    return {**told, "choices": [own], **(top or {})}


def decode(answer: Any, prompt: Prompt = PROMPT, facts: Facts = FACTS, dtype: str = "auto") -> Segment:
    """As the answer to the request with that id."""
    return DIALECT.decode_generate(answer, prompt, RID, facts, dtype)


def asking(**fields: Any) -> Prompt:
    """A prompt that asks for more than logprobs."""
    return Prompt(input_ids=ids(1, 2, 3), fields={**ASKED, **fields})
