"""Counts, as users see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts of one engine.

    Attributes:
        requests: Requests sent there.
        retries: Failures there after which the sample was tried again.
        tokens: Output tokens received from there.
    """

    requests: int
    retries: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts since the client was made. The sample counts are of one moment: admitted = open + all that ended.

    Attributes:
        admitted: Samples taken on.
        open: Samples not ended yet.
        waiting: Of these, samples that no thread has taken yet.
        completed: Samples that ended COMPLETED; likewise ``truncated``, ``aborted``, ``failed``.
        tokens: Output tokens delivered.
        retries: Attempts beyond the first, of samples that have ended.
        gate: "open", "hold" or "abort".
        engines: By URL.
    """

    admitted: int
    open: int
    waiting: int
    completed: int
    truncated: int
    aborted: int
    failed: int
    tokens: int
    retries: int
    gate: str
    engines: dict[str, EngineStats]
