"""Where an exchange failed → what may be done. The only retry layer: urllib3's and requests' own are off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from rolloutsync.errors import EngineHTTPError, Phase, ProtocolError, RolloutError, TransportError

if TYPE_CHECKING:
    import random

    from rolloutsync.clock import Clock
    from rolloutsync.config import RetryPolicy

_WORTH_RETRYING = {408, 425, 429}
_MAYBE_RUNNING = {502, 504}  # a proxy gave up waiting; the engine may not have
_PAUSE_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do after a failure.

    Attributes:
        again: Try again; otherwise the sample is FAILED.
        definite: The engine has refused this very request: true whatever else is going on.
        counts: It was one of ``max_attempts``.
        new_rid: The next request must bear another id.
        abort_old: The old id may be running: abort it where it went, before the sample runs elsewhere.
        fresh: At once, on a new socket of the same engine.
        elsewhere: Prefer another engine.
        unreachable: Nobody listens there: take the engine out of the fleet until a probe succeeds.
        delay_s: Wait before.
    """

    again: bool
    definite: bool = False
    counts: bool = True
    new_rid: bool = True
    abort_old: bool = False
    fresh: bool = False
    elsewhere: bool = False
    unreachable: bool = False
    delay_s: float = 0.0


class Judge:
    """Applies a ``RetryPolicy``. Stateless but for its source of jitter; thread-safe."""

    def __init__(self, policy: RetryPolicy, clock: Clock, chance: random.Random) -> None:
        self._policy = policy
        self._clock = clock
        self._chance = chance

    def judge(self, error: RolloutError, *, attempts: int, broken_answers: int) -> Verdict:
        """The verdict on ``error``.

        Args:
            error: What the engine call raised.
            attempts: Counted attempts before this one.
            broken_answers: Answers to this sample that could not be right, before this one.
        """
        verdict = self._by_kind(error, attempts, broken_answers)
        if verdict.again and verdict.counts and attempts + 1 >= self._policy.max_attempts:
            return Verdict(again=False, abort_old=verdict.abort_old)
        return verdict

    def _by_kind(self, error: RolloutError, attempts: int, broken_answers: int) -> Verdict:
        if isinstance(error, TransportError):
            return self._by_phase(error.phase, attempts)
        if isinstance(error, EngineHTTPError):
            return self._by_status(error, attempts)
        if isinstance(error, ProtocolError) and broken_answers == 0:
            return Verdict(again=True, abort_old=True, elsewhere=True)
        return Verdict(again=False)

    def _by_phase(self, phase: Phase, attempts: int) -> Verdict:
        wait = self.backoff(attempts)
        if phase in {Phase.REFUSED, Phase.CONNECT}:
            return Verdict(again=True, counts=False, new_rid=False, elsewhere=True, unreachable=True)
        if phase is Phase.LOCAL:
            return Verdict(again=True, counts=False, new_rid=False, delay_s=wait)
        if phase is Phase.RACE:
            return Verdict(again=True, abort_old=True, fresh=True)
        return Verdict(again=True, abort_old=True, elsewhere=True, delay_s=0.0 if attempts == 0 else wait)

    def _by_status(self, error: EngineHTTPError, attempts: int) -> Verdict:
        if error.paused:
            return Verdict(again=True, counts=False, delay_s=self._jitter(_PAUSE_POLL_S))
        if error.status in _WORTH_RETRYING or error.status >= 500:
            wait = max(self.backoff(attempts), self._asked_for(error.retry_after))
            running = error.status in _MAYBE_RUNNING
            return Verdict(again=True, abort_old=running, elsewhere=True, delay_s=wait)
        return Verdict(again=False, definite=True)

    def backoff(self, attempts: int) -> float:
        """Seconds to wait after ``attempts`` earlier attempts, with jitter."""
        longest = min(self._policy.backoff_cap_s, self._policy.backoff_base_s * 2.0 ** min(attempts, 30))
        return self._jitter(longest)

    def _jitter(self, seconds: float) -> float:
        return seconds * self._chance.uniform(0.25, 1.0)

    def _asked_for(self, header: str | None) -> float:
        """Seconds in a ``Retry-After`` header, up to the cap and spread a little; 0 for a missing or odd one."""
        seconds, cap = parse_retry_after(header, self._clock), self._policy.retry_after_cap_s
        spread = self._jitter(min(1.0, seconds, cap))
        return cap - spread if seconds >= cap else min(cap, seconds + spread)


def parse_retry_after(header: str | None, clock: Clock) -> float:
    """Seconds from a ``Retry-After`` header (RFC 9110, 10.2.3): a number or an HTTP date; 0.0 for anything else."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        seconds = _until(header, clock)
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _until(date: str, clock: Clock) -> float:
    try:
        return parsedate_to_datetime(date).timestamp() - clock.wall()
    except (ValueError, TypeError, OverflowError):
        return 0.0
