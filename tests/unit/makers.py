"""Small builders."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from rolloutsync.clock import Deadline
from rolloutsync.order import Group, Order
from rolloutsync.sample import FloatArray, IntArray, Prompt
from tests.fakes import FakeClock

_numbers = itertools.count()


def ids(*tokens: int) -> IntArray:
    """Token ids."""
    return np.array(tokens, np.int32)


def floats(*values: float) -> FloatArray:
    """Logprobs."""
    return np.array(values, np.float32)


def prompt(**given: Any) -> Prompt:
    """A prompt of three tokens, unless told otherwise."""
    return Prompt(**{"input_ids": ids(1, 2, 3), "fields": {"return_logprob": True}, **given})


def order(**given: Any) -> Order:
    """An order without a deadline."""
    basics = {"prompt": prompt(), "index": next(_numbers), "member": 0, "group": Group(1), "job": 0}
    return Order(**{**basics, "deadline": Deadline(FakeClock(), None), "admitted_at": 0.0, **given})


def answer(tokens: list[int], rid: str = "r", *, reason: Any = "stop", **meta: Any) -> dict[str, Any]:
    """A completion as SGLang words it; ``meta`` overrides meta_info by key, and None removes a key."""
    info: dict[str, Any] = {
        "id": rid,
        "finish_reason": {"type": reason} if isinstance(reason, str) else reason,
        "prompt_tokens": 3,
        "completion_tokens": len(tokens),
        "weight_version": "7",
        "output_token_logprobs": [[-0.5 - number, token, None] for number, token in enumerate(tokens)],
        **meta,
    }
    return {"text": "x" * len(tokens), "output_ids": tokens, "meta_info": info}
