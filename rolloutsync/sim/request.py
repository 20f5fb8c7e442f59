"""One generation inside the simulated engine, from its arrival to its last token."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolloutsync.sim.stream import TokenStream

_SERIAL = itertools.count()


class Phase(enum.Enum):
    """Where a generation is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True)
class Refusal:
    """A generation that the scheduler answered with an error."""

    status: int
    message: str


ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
QUEUE_FULL = Refusal(503, "The request queue is full.")


@dataclass(eq=False)
class SimRequest:
    """The mutable state of one generation; only its scheduler changes it.

    Attributes:
        rid: As the client knows it.
        prompt: Token ids.
        stream: Its output tokens.
        on_done: Called once, when the last token is there or the generation was aborted.
        dp_rank: The rank that the client wants, or None.
        queued_at: When it came into the waiting queue, or came back there.
        entered_at: When its first prefill began.
        count: Tokens that count, as of `since`.
        due: When the next thing happens to it.
        cut_at: How many tokens an abort lets it have, once it was aborted.
        to_prefill: Tokens that are not computed yet, those in the running pass included.
        finish: The answer's `finish_reason`, or why there is none.
    """

    rid: str
    prompt: Sequence[int]
    stream: TokenStream
    on_done: Callable[[], None]
    dp_rank: int | None = None
    reuse_limit: int | None = None
    phase: Phase = Phase.WAITING
    rank: int = 0
    arrives: float = 0.0
    queued_at: float = 0.0
    entered_at: float = 0.0
    finished: float = 0.0
    count: int = 0
    since: float = 0.0
    due: float = 0.0
    target: int = 0
    cut_at: int | None = None
    aborted: bool = False
    to_prefill: int = 0
    in_pass: int = 0
    while_queued: bool = False
    retractions: int = 0
    cached_tokens: int = 0
    finish: dict[str, Any] | Refusal | None = None
    serial: int = field(default_factory=lambda: next(_SERIAL))

    def produced(self, now: float, step: float) -> int:
        """Returns how many tokens there are at `now`, at one token per `step` seconds."""
        if self.phase is not Phase.RUNNING:
            return self.count
        return max(self.count, min(self.target, self.count + int((now - self.since) / step + 1e-6)))

    def settle(self, now: float, step: float) -> None:
        """Books the tokens produced so far, so that step or target may change."""
        produced = self.produced(now, step)
        self.since += (produced - self.count) * step
        self.count = produced

    def begin_decoding(self, at: float) -> None:
        """Its prefill has ended, which brings one more token."""
        self.phase, self.since = Phase.RUNNING, at
        self.stream.grow(self.count + 1)
        self.count = min(self.count + 1, len(self.stream.tokens))

    def end_soon(self) -> None:
        """An abort has found it: it ends with its next token."""
        self.cut_at = min(self.count + 1, self.stream.limit)

    @property
    def size(self) -> int:
        """Tokens of prompt and counted output."""
        return len(self.prompt) + self.count
