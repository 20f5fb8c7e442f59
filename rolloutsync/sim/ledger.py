"""What an engine remembers for tests: every generation that it started, every abort, every call."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rolloutsync.sim.request import Refusal, SimRequest

MAX_RECORDS = 200_000


@dataclass(eq=False)
class Record:
    """One generation: who, what and how far."""

    rid: str
    prompt_tokens: int
    prompt_hash: str
    request: SimRequest | None = None
    disconnected: bool = False
    _state: str = "parked"
    _tokens: int = 0

    def close(self) -> None:
        """Keeps what is to be told and lets go of the request; one that never came to be was refused."""
        if self.request is None:
            self._state = "refused"
            return
        self._state, self._tokens = self.state(), self.request.count
        self.request = None

    def state(self) -> str:
        """Returns parked, waiting, prefill, running, finished, aborted, disconnected or refused."""
        if self.request is None:
            return self._state
        finish = self.request.finish
        if finish is None:
            return self.request.phase.value
        if isinstance(finish, Refusal):
            return "refused"
        if finish["type"] == "abort":
            return "disconnected" if self.disconnected else "aborted"
        return "finished"

    def row(self, now: float, steps: list[float]) -> dict[str, Any]:
        """Returns it as JSON, as of `now`; `steps` are the ranks' seconds per token."""
        request = self.request
        produced = self._tokens if request is None else request.produced(now, steps[request.rank])
        return {
            "rid": self.rid,
            "prompt_tokens": self.prompt_tokens,
            "prompt_hash": self.prompt_hash,
            "state": self.state(),
            "tokens": produced,
        }


@dataclass
class Ledger:
    """Counters of one engine since its start or the last reset."""

    records: deque[Record] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))
    calls: Counter[str] = field(default_factory=Counter)
    aborts: int = 0
    aborts_all: int = 0
    aborts_ignored: int = 0
    abort_rids: list[str] = field(default_factory=list)
    busy_before: float = 0.0

    def saw_abort(self, rids: Iterable[str], *, everything: bool, ignored: bool) -> None:
        """Counts a call that aborts one, some or all."""
        self.aborts += 1
        self.aborts_all += everything
        self.aborts_ignored += ignored
        self.abort_rids += rids
