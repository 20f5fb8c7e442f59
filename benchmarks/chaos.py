"""What happens to the engines of a soak: a schedule made from a seed, and the threads that carry it out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from rolloutsync.sim import Fault, SimEngine, SimFleet

CALM_S = (1.0, 4.0)  # between two blows to the same engine
_PATHS = (None, None, None, None, "/abort_request", "/v1/loads")
_WEIGHTS = {
    "kill": 3,
    "stop": 2,
    "freeze": 2,
    "reset": 2,
    "truncate": 2,
    "drop": 2,
    "drip": 2,
    "delay": 2,
    "wrong_id": 1,
    "error_200": 1,
    "status": 2,
    "interim": 2,
    "stuck_load": 1,
    "ignore_abort": 1,
}
_LONGEST_S = {"kill": 4.0, "stop": 8.0, "freeze": 8.0}


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One thing that is done to one engine.

    Attributes:
        calm_s: Seconds of peace before.
        kind: "kill" (SIGKILL, and a new process on the same port), "stop" (SIGSTOP and SIGCONT) or a kind of fault.
        seconds: How long it lasts.
        fault: For the other kinds.
    """

    calm_s: float
    kind: str
    seconds: float
    fault: Fault | None = None


def plan(seed: int, engine: int, seconds: float) -> list[Blow]:
    """The blows to one engine: a pure function of the seed."""
    chance = Random(f"chaos/{seed}/{engine}")
    blows: list[Blow] = []
    while seconds > 0:
        blows.append(_blow(chance))
        seconds -= blows[-1].calm_s + blows[-1].seconds
    return blows


def _blow(chance: Random) -> Blow:
    kind = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    seconds = chance.uniform(0.3, _LONGEST_S.get(kind, 3.0))
    fault = None if kind in {"kill", "stop"} else _fault(chance, kind)
    return Blow(calm_s=chance.uniform(*CALM_S), kind=kind, seconds=seconds, fault=fault)


def _fault(chance: Random, kind: str) -> Fault:
    """A few calls are hit; what they lack at its kind is chosen here."""
    fault = Fault(kind=kind, times=chance.randint(1, 12), status=_status(chance, kind))
    path, after, seconds = chance.choice(_PATHS), chance.random() < 0.5, chance.uniform(0.0, 0.5)
    if kind in {"reset", "delay"}:
        return replace(fault, path=path, after=after, seconds=seconds)
    if kind == "drop":
        return replace(fault, seconds=seconds)
    if kind == "truncate":
        return replace(fault, path=path, bytes=chance.randint(0, 200))
    if kind == "drip":
        return replace(fault, bytes=chance.randint(100, 400), seconds=seconds / 10, headers_too=after)
    if kind == "status":
        return replace(fault, path=path, after=after)
    return fault


def _status(chance: Random, kind: str) -> int | None:
    choices = {"status": (429, 500, 502, 503), "interim": (102, 103)}
    return chance.choice(choices[kind]) if kind in choices else None


class Chaos:
    """Carries the plans out, one thread for each engine.

    Args:
        fleet: Its engines.
        seed: Of the plans.
        seconds: Their length.
        before_kill: Called with an engine that is about to die: what it remembers dies with it.
    """

    def __init__(self, fleet: SimFleet, seed: int, seconds: float, before_kill: Callable[[SimEngine], object]) -> None:
        self._before_kill = before_kill
        self._over = threading.Event()
        self._lock = threading.Lock()  # guards: _done
        self._done: Counter[str] = Counter()
        self._engines = fleet.engines
        self._threads = [
            threading.Thread(target=self._run, args=(engine, plan(seed, number, seconds)), daemon=True)
            for number, engine in enumerate(fleet.engines)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End it and heal all engines. Blocks until they serve."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        for engine in self._engines:
            _heal(engine)

    def done(self) -> dict[str, int]:
        """How often each kind of blow fell."""
        with self._lock:
            return dict(sorted(self._done.items()))

    def _run(self, engine: SimEngine, blows: list[Blow]) -> None:
        for blow in blows:
            if self._over.wait(blow.calm_s):
                return
            try:
                self._strike(engine, blow)
            except OSError:  # too busy to be told in time
                self._count("not delivered")
            else:
                self._count(blow.kind)

    def _strike(self, engine: SimEngine, blow: Blow) -> None:
        if blow.kind == "kill":
            self._before_kill(engine)
            engine.kill()
            self._over.wait(blow.seconds)
            engine.restart()
        elif blow.kind == "stop":
            engine.freeze()
            self._over.wait(blow.seconds)
            engine.thaw()
        elif blow.fault is not None:
            number = engine.add_fault(blow.fault)
            self._over.wait(blow.seconds)
            engine.clear_faults(number)

    def _count(self, kind: str) -> None:
        with self._lock:
            self._done[kind] += 1


def _heal(engine: SimEngine, patience_s: float = 30.0) -> None:
    if not engine.alive:
        engine.restart()
    engine.thaw()
    until = time.monotonic() + patience_s
    while True:
        try:
            engine.clear_faults()
        except OSError:
            if time.monotonic() > until:
                raise
        else:
            return
