"""The core of a fleet's driver: a client's core whose requests are made by actors."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rolloutsync.core import Core
from rolloutsync.crew import Crew
from rolloutsync.errors import RolloutError, UnsupportedError
from rolloutsync.fleet import Fleet
from rolloutsync.gate import GateMode
from rolloutsync.health import Watcher
from rolloutsync.idle import Drainer, DrainReport
from rolloutsync.proof import IdleState
from rolloutsync.remote import Standing
from rolloutsync.slot import STALE, EngineState, EngineStatus
from rolloutsync.sweep import EngineDrain

if TYPE_CHECKING:
    from collections.abc import Callable

    import requests

    from rolloutsync.clock import Clock
    from rolloutsync.config import ClientConfig
    from rolloutsync.engine import Engine
    from rolloutsync.errors import Cut
    from rolloutsync.lane import Lane
    from rolloutsync.order import Order

    Recruit = Callable[[list[str]], list[Lane]]

_AFTER_CUT_S = 1.0


class CrewFleet(Fleet):
    """A fleet whose requests are made elsewhere: tells the crew what holds, and counts what the crew has in flight."""

    crew: Crew | None = None
    _number = 0
    _expected: str | None = None

    @property
    def expected_version(self) -> str | None:
        """As everywhere. Actors are told at once: an engine that goes on answers with these weights."""
        return self._expected

    @expected_version.setter
    def expected_version(self, version: str | None) -> None:
        self._expected = version
        self.publish()

    def standing(self) -> Standing:
        """What holds now."""
        with self._lock:
            self._number += 1
            slots = list(self._slots.values())
            stale = {s.engine.url: s.reason for s in slots if s.state is EngineState.QUARANTINED}
            return Standing(
                number=self._number,
                mode=self._gate.mode.value,
                closings=self.closings,
                cuts=self.cuts,
                expected=self.expected_version,
                versions={slot.engine.url: slot.engine.facts.weight_version for slot in slots},
                stale={url: reason for url, reason in stale.items() if reason.startswith(STALE)},
                paused=frozenset(slot.engine.url for slot in slots if slot.paused),
            )

    def publish(self, *, wait: bool = True) -> None:
        """Make what holds now hold at the actors."""
        if self.crew is not None:
            self.crew.stand(self.standing(), wait=wait)

    def renew(self) -> None:
        """The same, if there is anything new."""
        if self.crew is not None and not self.crew.knows(standing := self.standing()):
            self.crew.stand(standing, wait=True)

    def close_gate(self, token: object, mode: GateMode, *, cuts: bool = False) -> None:
        """As everywhere; blocks until no actor sends any more."""
        super().close_gate(token, mode, cuts=cuts)
        self.publish()

    def open_gate(self, *tokens: object) -> None:
        """As everywhere; blocks until the actors know, and which weights they may use."""
        super().open_gate(*tokens)
        self.publish()
        if self.crew is not None:
            self.crew.grow()

    def set_paused(self, url: str, paused: bool) -> None:
        """As everywhere: an actor must not take an engine for frozen that stands still because we want it to."""
        changed = self.is_paused(url) != paused
        super().set_paused(url, paused)
        if changed:
            self.publish(wait=False)

    def add(self, engine: Engine) -> bool:
        """As everywhere; an actor gets it."""
        if engine.front != engine.url:
            raise UnsupportedError("a RolloutFleet cannot drive disaggregated engines: use a RolloutClient")
        new = super().add(engine)
        if new and self.crew is not None:
            self.crew.join_engine(engine.url, urlsplit(engine.url).hostname or "")
        return new

    def remove(self, url: str, *, busy: bool = False) -> bool:
        """As everywhere; one that actors have requests at is a member until they have ended."""
        known = super().remove(url, busy=busy or (self.crew is not None and bool(self.crew.rids(url))))
        if self.crew is not None:
            self.crew.leave_engine(url)
        return known

    def _let_leave(self) -> None:
        """Forget engines that were removed and have nothing of ours any more."""
        with self._lock:
            leaving = [slot for slot in self._slots.values() if slot.state is EngineState.LEAVING]
        ended = [slot for slot in leaving if not self.rids(slot.engine.url)]  # outside of the lock: it asks the crew
        with self._lock:
            for slot in ended:
                if slot.state is EngineState.LEAVING:
                    self._slots.pop(slot.engine.url, None)

    def engines(self, *states: EngineState) -> list[Engine]:
        """As everywhere."""
        self._let_leave()
        return super().engines(*states)

    def statuses(self) -> list[EngineStatus]:
        """As everywhere; in flight is what actors have there."""
        self._let_leave()
        found = super().statuses()
        if self.crew is None:
            return found
        counts = self.crew.in_flight()
        return [replace(status, in_flight=counts[status.url]) for status in found]

    def rids(self, url: str) -> list[str]:
        """As everywhere; what an actor has just been given may be at any of its engines."""
        return super().rids(url) + (self.crew.rids(url) if self.crew is not None else [])

    def await_none(self, url: str, seconds: float, *, of: Callable[[Order], bool] | None = None) -> bool:
        """As everywhere."""
        if self.crew is None:
            return super().await_none(url, seconds, of=of)
        return self.crew.await_none(url, seconds, of or (lambda _: True))

    def cut(self, engine: Engine, why: Cut) -> None:
        """As everywhere; the sockets are the actors'."""
        super().cut(engine, why)
        if self.crew is not None:
            self.crew.cut(engine.url)


class CrewDrainer(Drainer):
    """Aborts our own requests where they are: at the actors."""

    def __init__(self, fleet: CrewFleet, crew: Crew, clock: Clock, name: str) -> None:
        super().__init__(fleet, clock, name, crew.drop)
        self._crew = crew

    def abort_own(self, timeout: float, of: Callable[[Order], bool]) -> DrainReport:
        """As everywhere."""
        begun = self._clock.monotonic()
        self._crew.abort(of, timeout)
        drains = [self._own_drain(engine.url, of) for engine in self._fleet.engines()]
        return DrainReport(tuple(drains), self._clock.monotonic() - begun, scope="own")

    def _own_drain(self, url: str, of: Callable[[Order], bool]) -> EngineDrain:
        self._crew.await_none(url, _AFTER_CUT_S, of)
        rids = tuple(self._crew.rids(url, of))
        detail = "no word from the actor that has them" if rids else ""
        return EngineDrain(url, IdleState.UNKNOWN if rids else IdleState.IDLE, rids=rids, detail=detail)


class CrewWatcher(Watcher):
    """Watches engines for a driver, who makes no samples there: actors prove an engine idle before they use it again.

    1. An engine may be used again. 2. An actor finds out, proves it idle and sends. 3. The driver finds out; a proof of
    its own would abort what the actor has there.
    """

    def _proves_idle(self, engine: Engine) -> bool:
        """Only what a lost actor has left there is told to end."""
        try:
            for _, rid, _ in self._fleet.orphans(engine.url):
                engine.abort(rid)
        except RolloutError:
            return False
        return True


class FleetCore(Core):
    """All running parts of one fleet's driver. Thread-safe.

    Args:
        urls: Of the engines at first.
        config: As of a client.
        session: Of the control calls.
        recruit: Makes lanes for the engines given, without waiting for the actors.
        shared: All actors use all engines.
        actor_wait_s: See ``Crew``.
    """

    workers: Crew  # type: ignore[assignment]  # all that is asked of it is there
    fleet: CrewFleet

    def __init__(
        self,
        urls: list[str],
        config: ClientConfig,
        session: requests.Session | None,
        *,
        recruit: Recruit,
        shared: bool,
        actor_wait_s: float,
    ) -> None:
        self._recruit = recruit
        self._shared = shared
        self._actor_wait_s = actor_wait_s
        self._hiring = threading.Lock()  # held while actors are asked for, which does not wait for them
        super().__init__(urls, config, session)
        self.watcher = CrewWatcher(self.fleet, self.clock, self.name, config.timeouts)

    def _make_fleet(self, kind: Callable[..., Any]) -> Any:  # noqa: ARG002 - ours takes the place of the usual one
        return super()._make_fleet(CrewFleet)

    def _make_workers(self) -> Any:
        return Crew(
            self.fleet,
            self.ledger,
            self.clock,
            policy=self._config.retry,
            engine_wait_s=self._config.timeouts.engine_wait_s,
            actor_wait_s=self._actor_wait_s,
            shared=self._shared,
            name=self.name,
        )

    def _make_drainer(self) -> Drainer:
        return CrewDrainer(self.fleet, self.workers, self.clock, self.name)

    def ready(self, limit_s: float | None = None) -> None:
        """As everywhere; the first time, actors are made too, which is not waited for."""
        super().ready(limit_s)
        with self._hiring:
            if self.fleet.crew is None:
                lanes = self._recruit([engine.url for engine in self.fleet.engines()])
                self.fleet.crew = self.workers
                self.workers.hire(lanes, self.fleet.standing())
                for engine in self.fleet.engines() if lanes else ():  # one may have come meanwhile
                    self.workers.join_engine(engine.url, urlsplit(engine.url).hostname or "")
        self.fleet.renew()

    def dump(self) -> Any:
        """As everywhere, and a line about each actor."""
        text = super().dump()
        return type(text)("\n".join([text, "actors:", *(f"  {line}" for line in self.workers.lanes)]))
