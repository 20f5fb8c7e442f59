"""All ranks of one engine on one clock, with what stops and starts them together."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.loads import Load
from rolloutsync.sim.rank import Match, Rank
from rolloutsync.sim.request import SimRequest

SNAPSHOTS_SINCE = (0, 5, 13)


class Scheduler:
    """Spreads requests over the ranks and drives them. Not thread-safe; nothing here waits.

    The clock is injected. While the scheduler is frozen its time stands still: messages are kept and done on `thaw`.
    """

    def __init__(self, config: SimConfig, clock: Callable[[], float]) -> None:
        self.weight_version = config.weight_version
        self.ranks = [Rank(config, index, clock()) for index in range(config.dp_size)]
        self.frozen = False
        self._config = config
        self._clock = clock
        self._frozen_at = 0.0
        self._lost_s = 0.0
        self._mail: list[Callable[[], None]] = []
        self._turn = itertools.cycle(self.ranks)

    @property
    def now(self) -> float:
        """Scheduler time: the clock's, less what was lost in freezes."""
        return (self._frozen_at if self.frozen else self._clock()) - self._lost_s

    @property
    def lost_s(self) -> float:
        """How far scheduler time is behind the clock, for whoever turns one into the other."""
        return self._lost_s

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or computed on any rank."""
        return all(rank.idle for rank in self.ranks)

    def next_event(self) -> float | None:
        """Returns the clock time of the next event, or None."""
        if self.frozen:
            return None
        times = [at for rank in self.ranks if (at := rank.next_event()) is not None]
        return min(times) + self._lost_s if times else None

    def advance(self) -> None:
        """Does everything that is due by now."""
        if not self.frozen:
            for rank in self.ranks:
                rank.advance(self.now)

    def submit(self, request: SimRequest) -> None:
        """Hands a request to the rank that it wants, or to the next in turn."""
        rank = next(self._turn) if request.dp_rank is None else self.ranks[request.dp_rank]
        self._tell(lambda: None if request.finish else rank.submit(request, self.now))

    def abort(self, match: Match) -> None:
        """Aborts what matches on every rank."""
        self._tell_all(lambda rank: rank.abort(match, self.now))

    def cut(self, match: Match) -> None:
        """Ends what matches on every rank at once, with all that it has."""
        self._tell_all(lambda rank: rank.cut(match, self.now))

    def hold(self, *, on: bool) -> None:
        """Keeps what is queued on all ranks in its queues, or lets it out again."""
        self._tell_all(lambda rank: rank.hold(on, self.now))

    def pause(self, *, retract: bool) -> None:
        """Stops all ranks."""
        self._tell_all(lambda rank: rank.pause(retract=retract, now=self.now))

    def resume(self) -> None:
        """Starts all ranks again."""
        self._tell_all(lambda rank: rank.resume(self.now))

    def slow_down(self, extra_s: float) -> None:
        """Makes every step of every rank this much longer."""
        self._tell_all(lambda rank: rank.slow_down(extra_s, self.now))

    def change_weights(self, version: str) -> None:
        """Lets all later tokens come from other weights; the same version changes nothing."""
        if version != self.weight_version:
            self.weight_version = version
            self._tell_all(lambda rank: rank.change_weights(version, self.now))

    def flush(self) -> bool:
        """Empties all prefix caches; False if any rank refused. Not while frozen."""
        flushed = [rank.flush(self.now) for rank in self.ranks]
        return all(flushed)

    def freeze(self) -> None:
        """Stops scheduler time, as a hung process would."""
        if not self.frozen:
            self.advance()
            self.frozen, self._frozen_at = True, self._clock()

    def thaw(self) -> None:
        """Lets scheduler time go on from where it stopped."""
        if not self.frozen:
            return
        self.frozen = False
        self._lost_s += self._clock() - self._frozen_at
        mail, self._mail = self._mail, []
        for message in mail:
            message()

    def produced(self, request: SimRequest) -> int:
        """Returns how many tokens a request has now."""
        rank = self.ranks[request.rank]
        return request.count if rank.paused else request.produced(self.now, rank.step_s)

    def loads(self) -> list[Load]:
        """Returns every rank's load: the last snapshot, or the live numbers where the version knows no snapshots."""
        self.advance()
        if self._config.release < SNAPSHOTS_SINCE:
            return [rank.measure(self.now) for rank in self.ranks]
        return [rank.snapshots.read(self.now) for rank in self.ranks]

    def live_loads(self) -> list[Load]:
        """Returns every rank's load at this moment."""
        self.advance()
        return [rank.measure(self.now) for rank in self.ranks]

    def _tell(self, message: Callable[[], None]) -> None:
        if self.frozen:
            self._mail.append(message)
        else:
            message()

    def _tell_all(self, message: Callable[[Rank], None]) -> None:
        def deliver() -> None:
            for rank in self.ranks:
                message(rank)

        self._tell(deliver)
