"""The soak's own books: what was asked for, and whether what came is exactly that."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.findings import Findings
from rolloutsync import (
    EngineAbortError,
    EngineHTTPError,
    PoisonPromptError,
    ProtocolError,
    Sample,
    Status,
    TransportError,
)
from rolloutsync.sim.tokens import FIRST_TOKEN_ID, context_hash, expected_logprobs, expected_tokens

_DIGITS = 20_000
_LONG = 0.08  # share of samples that run for seconds


@dataclass(frozen=True)
class Ask:
    """A prompt that no other caller has, and how many tokens are wanted."""

    ids: tuple[int, ...]
    tokens: int

    @property
    def item(self) -> dict[str, object]:
        """As an item of a batch."""
        sampling = {"max_new_tokens": self.tokens, "ignore_eos": True}
        return {"input_ids": list(self.ids), "sampling_params": sampling, "metadata": {"ids": self.ids}}

    @property
    def key(self) -> int:
        """What engines call the prompt."""
        return context_hash(self.ids)


class Books:
    """Thread-safe.

    Args:
        findings: Told of whatever is wrong.
        max_attempts: Of the client's retry policy.
    """

    def __init__(self, findings: Findings, max_attempts: int) -> None:
        self._findings = findings
        self._max_attempts = max_attempts
        self._numbers = itertools.count()
        # _lock guards: everything below
        self._lock = threading.Lock()
        self._statuses: Counter[str] = Counter()
        self._failures: list[str] = []
        self._unsent = 0
        self._rids: set[int] = set()
        self._attempts: dict[int, int] = {}  # by prompt, over the members of its group
        self._sizes: dict[int, int] = {}  # of groups of more than one, by prompt
        self._wanted = 0
        self._tokens = 0

    def ask(self, chance: Random) -> Ask:
        """A new prompt."""
        number = next(self._numbers)
        head = (FIRST_TOKEN_ID + number % _DIGITS, FIRST_TOKEN_ID + number // _DIGITS)
        tokens = chance.randint(250, 500) if chance.random() < _LONG else chance.randint(4, 60)
        return Ask((*head, *range(10, 10 + chance.randint(1, 20))), tokens)

    def wants(self, asks: Sequence[Ask], n: int = 1) -> None:
        """These samples are asked for now."""
        with self._lock:
            self._wanted += len(asks) * n
            if n > 1:
                self._sizes.update((ask.key, n) for ask in asks)

    def size(self, key: int) -> int:
        """How many samples of a prompt are wanted."""
        with self._lock:
            return self._sizes.get(key, 1)

    def receive(self, asks: Sequence[Ask], samples: Sequence[Sample], n: int = 1) -> None:
        """What came for ``asks``: each sample once, in its place, and nothing in it that was not said."""
        if len(samples) != len(asks) * n:
            words = f"{len(samples)} samples came for {len(asks)} prompts with n={n}"
            self._findings.add("lost samples", words, abs(len(asks) * n - len(samples)))
        for place, sample in enumerate(samples):
            index, member = divmod(place, n)
            if (sample.index, sample.member, sample.metadata) != (index, member, {"ids": asks[index].ids}):
                words = f"at {index}/{member} is {sample.index}/{sample.member}, {sample.metadata}, rid {sample.rid}"
                self._findings.add("samples out of place", words)
            self._check(asks[index], sample)

    def _check(self, ask: Ask, sample: Sample) -> None:
        self._enter(ask, sample)
        count = len(sample.output_ids)
        whole = sample.status is Status.TRUNCATED
        if sample.status is Status.COMPLETED or (whole and count != ask.tokens) or not _is_said(ask, sample):
            words = f"rid {sample.rid} of {sample.engine}: {sample.status}, {count} of {ask.tokens} tokens"
            self._findings.add("wrong tokens or logprobs", f"{words}, prompt {ask.ids}")
        if sample.status is Status.FAILED and not self._is_explained(sample):
            self._findings.add("failures without a good reason", f"{sample.attempts} attempts: {sample.error!r}")

    def _enter(self, ask: Ask, sample: Sample) -> None:
        with self._lock:
            known = bool(sample.rid) and int(sample.rid, 16) in self._rids
            if sample.rid:  # "": it was called off before it was sent anywhere
                self._rids.add(int(sample.rid, 16))
            self._statuses[sample.status.value] += 1
            self._attempts[ask.key] = self._attempts.get(ask.key, 0) + sample.attempts
            self._tokens += len(sample.output_ids)
            self._unsent += sample.engine is None
            if sample.error is not None:
                self._failures.append(f"{type(sample.error).__name__}: {sample.error}")
        if known:
            self._findings.add("duplicate request ids", f"{sample.rid!r}, {sample.status}, engine {sample.engine}")

    def _is_explained(self, sample: Sample) -> bool:
        """Whether the client had to give up: attempts used up, two broken answers, or two engines dead of it."""
        error = sample.error
        if isinstance(error, PoisonPromptError):
            return len(error.engines) >= 2
        if isinstance(error, ProtocolError):
            return sample.attempts >= 2
        used_up = sample.attempts >= self._max_attempts
        return used_up and isinstance(error, TransportError | EngineHTTPError | EngineAbortError)

    # --- at the end ---

    def settle(self, generations: dict[int, int]) -> None:
        """Compare with how many generations the engines began for each prompt."""
        with self._lock:
            lost, attempts = self._wanted - sum(self._statuses.values()), dict(self._attempts)
        if lost:
            self._findings.add("lost samples", f"{lost} of {self._wanted} samples did not come", abs(lost))
        for key, count in generations.items():
            if count > attempts.get(key, 0):
                words = f"prompt {key:016x}: {count} generations in {attempts.get(key, 0)} attempts"
                self._findings.add("samples with too many generations", words)

    def statuses(self) -> dict[str, int]:
        with self._lock:
            return {status.value: self._statuses[status.value] for status in Status}

    def failures(self) -> list[str]:
        """Why samples failed: kinds and words of their errors."""
        with self._lock:
            return list(self._failures)

    def totals(self) -> tuple[int, int, int]:
        """(samples asked for, of these never sent since a drain came first, tokens delivered)."""
        with self._lock:
            return self._wanted, self._unsent, self._tokens


def _is_said(ask: Ask, sample: Sample) -> bool:
    """Whether these are the first tokens, and the logprobs, that any engine says after this prompt."""
    ids = sample.output_ids.tolist()
    if sample.logprobs is None or ids != expected_tokens(ask.ids, ask.tokens)[: len(ids)]:
        return not ids and sample.logprobs is None
    wanted = np.array(expected_logprobs(ask.ids, ids), np.float32)
    return np.array_equal(sample.logprobs, wanted)
