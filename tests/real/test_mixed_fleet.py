"""Real SGLang and real vLLM side by side: the same checkpoint, spoken to in each one's words."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from .raw import RawEngine
from .raw_vllm import RawVllm

pytestmark = pytest.mark.real

PROMPT = [5, 6, 7]
TOKENS = 3
AGREE = 0.02  # bfloat16, and kernels of their own


def test_two_engines_say_the_same_of_the_same_weights(mixed_urls: list[str]) -> None:
    """Without chance: the same tokens, and nearly the same log-probabilities."""
    sglang_url, vllm_url = mixed_urls
    with ThreadPoolExecutor(2) as pool:
        sglang, vllm = RawEngine(sglang_url, pool), RawVllm(vllm_url, pool)
        first = sglang.generate(
            ids=PROMPT, sampling_params={"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        )
        (second,) = vllm.generate(ids=PROMPT, tokens=TOKENS, temperature=0)["choices"]
    assert first["output_ids"] == second["token_ids"]
    ours = [entry[0] for entry in first["meta_info"]["output_token_logprobs"]]
    assert ours == pytest.approx([entry["logprob"] for entry in second["logprobs"]["content"]], abs=AGREE)
