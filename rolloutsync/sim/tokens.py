"""What the simulated model says: pure functions of the context, the seed and the weight version.

The whole context is folded into 64 bits, `h' = h * A + token + 1 (mod 2**64)`, so that one more token costs one step
and a whole prompt costs one vectorised pass. A token depends on that hash, the seed and the weight version; a
log-probability on the hash, the token and the version; the routed experts of a position on the hash alone. Hence a
request that resumes with prompt + outputs and the same seed continues exactly as the uninterrupted one would have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

DEFAULT_VOCAB_SIZE = 32000
DEFAULT_MEAN_OUTPUT_TOKENS = 256.0
EOS_TOKEN_ID = 2
FIRST_TOKEN_ID = 3
EMPTY_CONTEXT = 0x243F6A8885A308D3

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_A = 0x9E3779B97F4A7C15
_A_INVERSE = pow(_A, -1, 2**64)
_B = 0xBF58476D1CE4E5B9
_C = 0x94D049BB133111EB
_EOS_BITS = 0xFF_FFFF
_LOGPROB_STEPS = 131072.0  # 2**17: with 20 random bits a log-probability is exact in float32 and lies in [-8, 0)


class _Powers:
    """Powers of the multiplier and of its inverse, as far as the longest context needed them."""

    def __init__(self) -> None:
        self._up: Hashes = np.ones(1, np.uint64)
        self._down: Hashes = np.ones(1, np.uint64)

    def upto(self, exponent: int) -> tuple[Hashes, Hashes]:
        if exponent >= len(self._up):
            size = max(1024, 2 * exponent) + 1
            self._up, self._down = _powers(_A, size), _powers(_A_INVERSE, size)
        return self._up[: exponent + 1], self._down[: exponent + 1]


def _powers(base: int, size: int) -> Hashes:
    factors = np.full(size, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


_POWERS = _Powers()


def prefix_hashes(ids: Sequence[int], start: int = EMPTY_CONTEXT) -> Hashes:
    """Returns the hash of every prefix of `ids`, from none of them to all of them (`len(ids) + 1` values).

    Args:
        ids: Token ids that follow the context whose hash is `start`.
        start: The hash of what came before.
    """
    up, down = _POWERS.upto(len(ids))
    terms = (np.asarray(ids, np.int64).astype(np.uint64) + np.uint64(1)) * down[1:]
    sums = np.empty(len(ids) + 1, np.uint64)
    sums[0] = start
    np.cumsum(terms, out=sums[1:])
    sums[1:] += np.uint64(start)
    return sums * up


def context_hash(ids: Sequence[int], start: int = EMPTY_CONTEXT) -> int:
    """Returns the hash of a whole context."""
    return int(prefix_hashes(ids, start)[-1])


def text_key(text: str) -> int:
    """Returns 64 bits that stand for a string, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def stream_key(seed: int, version: str) -> int:
    """Returns the 64 bits that seed and weight version contribute to every token."""
    mixed = ((seed & _MASK) * _B + _A) & _MASK
    mixed ^= mixed >> 30
    return (mixed * _C & _MASK) ^ text_key(version)


def eos_threshold(mean_output_tokens: float) -> int:
    """Returns the share of draws, out of 2**24, that end a sample so that its mean length is the given one."""
    return max(1, min(_EOS_BITS, round((_EOS_BITS + 1) / mean_output_tokens)))


def draw(state: int, key: int, count: int, vocab_size: int) -> tuple[list[int], int]:
    """Returns the next `count` tokens, none of them the end token, after a context's hash, and the hash after them."""
    tokens: list[int] = []
    append = tokens.append
    span = vocab_size - FIRST_TOKEN_ID
    for _ in range(count):
        x = (state ^ key) * _B & _MASK
        token = FIRST_TOKEN_ID + ((x >> 40) * span >> 24)
        append(token)
        state = (state * _A + token + 1) & _MASK
    return tokens, state


def draw_until_eos(state: int, key: int, count: int, vocab_size: int, threshold: int) -> tuple[list[int], int, bool]:
    """Like `draw`, but stops behind the end-of-sequence token; the flag says whether it came."""
    tokens: list[int] = []
    append = tokens.append
    span = vocab_size - FIRST_TOKEN_ID
    for _ in range(count):
        x = (state ^ key) * _B & _MASK
        if x >> 16 & _EOS_BITS < threshold:
            append(EOS_TOKEN_ID)
            return tokens, (state * _A + EOS_TOKEN_ID + 1) & _MASK, True
        token = FIRST_TOKEN_ID + ((x >> 40) * span >> 24)
        append(token)
        state = (state * _A + token + 1) & _MASK
    return tokens, state, False


def logprobs(before: Hashes, ids: Sequence[int], version_key: int) -> list[float]:
    """Returns the log-probability of each token after the context hashed at the same place of `before`."""
    tokens = np.asarray(ids, np.int64).astype(np.uint64) + np.uint64(1)
    mixed = ((before ^ np.uint64(version_key)) + tokens * np.uint64(_C)) * np.uint64(_B)
    mixed ^= mixed >> np.uint64(31)
    steps = (mixed * np.uint64(_C)) >> np.uint64(44)
    values: list[float] = ((steps.astype(np.float64) + 1.0) / -_LOGPROB_STEPS).tolist()
    return values


def top_logprobs(
    before: Hashes, count: int, version_key: int, vocab_size: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Returns, for each context, the `count` likeliest tokens' log-probabilities (falling) and ids."""
    mixed = (before ^ np.uint64(version_key)) * np.uint64(_C)
    mixed ^= mixed >> np.uint64(32)
    ranks = np.arange(count, dtype=np.uint64)
    ids = (mixed[:, None] % np.uint64(vocab_size) + ranks * np.uint64(7919)) % np.uint64(vocab_size)
    steps = (mixed >> np.uint64(50)).astype(np.float64)[:, None] + ranks.astype(np.float64) * 16384.0
    return ((steps + 1.0) / -_LOGPROB_STEPS).tolist(), ids.tolist()


def routed_experts(after: Hashes, layers: int, topk: int, num_experts: int) -> npt.NDArray[np.int32]:
    """Returns int32 `[len(after), layers, topk]`: distinct expert ids per position and layer.

    Args:
        after: The hash of the context up to and including each position's own token.
        layers: Number of layers.
        topk: Experts per token and layer, at most `num_experts`.
        num_experts: How many experts a layer has.
    """
    salts = np.arange(1, layers + 1, dtype=np.uint64) * np.uint64(_B)
    mixed = (after[:, None] ^ salts) * np.uint64(_C)
    first = ((mixed >> np.uint64(33)) % np.uint64(num_experts)).astype(np.int32)
    steps = np.arange(topk, dtype=np.int32)
    chosen: npt.NDArray[np.int32] = (first[:, :, None] + steps) % np.int32(num_experts)
    return chosen


def hidden_states(after: Hashes, width: int) -> list[list[float]]:
    """Returns one vector of `width` floats in [-0.5, 0.5) per context."""
    salts = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(_A)
    mixed = (after[:, None] ^ salts) * np.uint64(_C)
    rows: list[list[float]] = ((mixed >> np.uint64(40)).astype(np.float64) / 2.0**24 - 0.5).tolist()
    return rows


def expected_tokens(
    prompt_ids: Sequence[int],
    count: int,
    *,
    seed: int = 0,
    version: str = "default",
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    ignore_eos: bool = True,
    mean_output_tokens: float = DEFAULT_MEAN_OUTPUT_TOKENS,
    min_new_tokens: int = 0,
) -> list[int]:
    """Returns what an engine generates after `prompt_ids`: at most `count` tokens, the end token included.

    Pure; safe in any thread. The defaults are those of `SimConfig`.

    Args:
        prompt_ids: The whole context, earlier outputs included.
        count: `max_new_tokens`.
        seed: `sampling_seed` of the request, 0 where it has none.
        version: The weight version that the engine reports.
        vocab_size: `SimConfig.vocab_size`.
        ignore_eos: As in the request; True never ends early.
        mean_output_tokens: `SimConfig.mean_output_tokens`.
        min_new_tokens: As in the request; the end token cannot come before.
    """
    state, key = context_hash(prompt_ids), stream_key(seed, version)
    if ignore_eos:
        return draw(state, key, count, vocab_size)[0]
    head, state = draw(state, key, min(count, min_new_tokens), vocab_size)
    tail, _, _ = draw_until_eos(state, key, count - len(head), vocab_size, eos_threshold(mean_output_tokens))
    return head + tail


def expected_logprobs(prompt_ids: Sequence[int], output_ids: Sequence[int], *, version: str = "default") -> list[float]:
    """Returns the log-probability of each output token, each exact in float32 and below zero. Pure.

    Args:
        prompt_ids: The context before the first output token.
        output_ids: The tokens to score; all under the same weights.
        version: The weight version that the engine reports.
    """
    before = prefix_hashes(output_ids, context_hash(prompt_ids))[:-1]
    return logprobs(before, output_ids, text_key(version))


def expected_routed_experts(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    layers: int,
    topk: int,
    num_experts: int,
    start_len: int = 0,
) -> npt.NDArray[np.int32]:
    """Returns int32 `[len(prompt_ids) + len(output_ids) - 1 - start_len, layers, topk]`. Pure.

    Args:
        prompt_ids: The prompt.
        output_ids: All output tokens, the last of which was never an input and has no row.
        layers: First entry of `SimConfig.routed_experts`.
        topk: Second entry.
        num_experts: Third entry.
        start_len: `routed_experts_start_len` of the request.
    """
    after = prefix_hashes([*prompt_ids, *output_ids])[1 + start_len : -1]
    return routed_experts(after, layers, topk, num_experts)
