"""Links to actors that live in this process, and that a test can lose, kill, stall and hold back."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from rolloutsync import RolloutClient
from rolloutsync.core import Core
from rolloutsync.order import new_rid
from rolloutsync.remote import Hello, LinkDead, LinkLost, Placed, Report, Standing, Task
from rolloutsync.sample import Sample
from rolloutsync.station import Station

T = TypeVar("T")
PATIENCE_S = 10.0
Failed = Callable[[Exception], None]


def sent(value: T) -> T:
    """What arrives at the other end: nothing is shared between a driver and an actor."""
    arrived: T = pickle.loads(pickle.dumps(value))
    return arrived


class SharingClient(RolloutClient):
    """An actor's client: it takes its share of the engines' limits, and shows its parts."""

    sharers = 1

    @property
    def core(self) -> Core:
        return self._open()

    def _make_core(self) -> Core:
        core = super()._make_core()
        core.fleet.sharers = self.sharers
        return core


class Process:
    """What an actor's process holds."""

    def __init__(self, urls: str | Iterable[str], sharers: int, settings: dict[str, Any]) -> None:
        self.client = SharingClient(urls, **settings)
        self.client.sharers = sharers
        self.station = Station(self.client.core, "this process", alone=sharers == 1)

    def end(self) -> None:
        """As a signal that cannot be caught would: no abort is sent, engines see their sockets close."""
        core = self.client.core
        core.fleet.close()
        core.workers.close()
        core.transport.close(5.0)
        self.client.close(5.0)
        self.station.close()


class StationLink:
    """A link to a station in this process. Thread-safe.

    Args:
        name: Of the actor.
        urls: Its engines, as its constructor is told: a new process begins with them again.
        sharers: Actors that use them.
        settings: Of its client.
    """

    def __init__(self, name: str, urls: Iterable[str], *, sharers: int = 1, **settings: Any) -> None:
        self.name = name
        self.urls = list(urls)
        self.kills: list[bool] = []  # restart, of each
        self.hellos = 0
        self._sharers = sharers
        self._settings = settings
        # _changed's lock guards all that follows. Never held across a call of the station's.
        self._changed = threading.Condition()
        self._process: Process | None = None
        self._lost: type[LinkLost] | None = None
        self._breaks = 0  # so many connections have been lost so far
        self._held: dict[str, deque[Callable[[], None]]] = {}  # messages that are under way, by kind
        self._pumps: list[threading.Thread] = []
        self._start()

    # --- what a test does to it ---

    @property
    def station(self) -> Station:
        return self._alive().station

    @property
    def client(self) -> SharingClient:
        return self._alive().client

    def _alive(self) -> Process:
        process = self._process
        assert process is not None, f"{self.name} has no process"
        return process

    def _start(self) -> None:
        self._process = Process(self.urls, self._sharers, self._settings)

    def lose(self, error: type[LinkLost] = LinkLost) -> None:
        """The connection breaks; the process lives on."""
        with self._changed:
            self._lost = error
            self._breaks += 1
            self._changed.notify_all()

    def crash(self, error: type[LinkLost] = LinkLost) -> None:
        """The process ends at once, and the connection with it."""
        with self._changed:
            process, self._process = self._process, None
        self.lose(error)
        if process is not None:
            process.end()

    def revive(self) -> None:
        """It can be reached again: the same process, or a new one if that has ended."""
        if self._process is None:
            self._start()
        with self._changed:
            self._lost = None
            self._changed.notify_all()

    def hold(self, kind: str) -> None:
        """From now on messages of a kind ("take", "stand", "report") are under way until they are let go."""
        with self._changed:
            self._held.setdefault(kind, deque())

    def let_go(self, kind: str) -> None:
        """They arrive, in their order, and so does what is sent from now on."""
        with self._changed:
            waiting = self._held.pop(kind, deque())
            self._changed.notify_all()
        for arrive in waiting:
            arrive()

    def under_way(self, kind: str) -> int:
        with self._changed:
            return len(self._held.get(kind, ()))

    def forget(self, kind: str) -> None:
        """What is under way never arrives; messages of this kind are still held."""
        with self._changed:
            self._held[kind].clear()

    def end(self) -> None:
        """After the test."""
        self.crash(LinkDead)
        for pump in self._pumps:
            pump.join(PATIENCE_S)
            assert not pump.is_alive()

    # --- the link ---

    def _reached(self) -> Process:
        with self._changed:
            process = self._process
            if self._lost is not None or process is None:
                raise (self._lost or LinkLost)(f"{self.name} cannot be reached")
            return process

    def _send(self, kind: str, arrive: Callable[[], None]) -> None:
        with self._changed:
            if kind in self._held:
                self._held[kind].append(arrive)
                self._changed.notify_all()
                return
        arrive()

    def hello(self, standing: Standing, incarnation: str | None) -> Hello:
        self.hellos += 1
        return sent(self._reached().station.hello(sent(standing), incarnation))

    def take(self, tasks: list[Task], incarnation: str, failed: Failed) -> None:
        packed = pickle.dumps(tasks)

        def arrive() -> None:
            try:
                self._reached().station.take(pickle.loads(packed), incarnation)
            except Exception as error:  # noqa: BLE001 - the way back
                failed(error)

        self._send("take", arrive)

    def reports(self, incarnation: str) -> Iterator[Report]:
        station, begun = self._reached().station, self._breaks
        arrived: deque[Report | Exception | None] = deque()

        def pump() -> None:
            last: Exception | None = None
            try:
                for report in station.reports(incarnation):
                    self._send("report", lambda report=report: self._arrive(arrived, sent(report)))  # type: ignore[misc]
            except LinkLost as error:
                last = error
            self._send("report", lambda: self._arrive(arrived, last))

        thread = threading.Thread(target=pump, name=f"pump-{self.name}", daemon=True)
        self._pumps.append(thread)
        thread.start()
        while (report := self._next(arrived, begun)) is not None:
            yield report

    def _arrive(self, arrived: deque[Report | Exception | None], news: Report | Exception | None) -> None:
        with self._changed:
            arrived.append(news)
            self._changed.notify_all()

    def _next(self, arrived: deque[Report | Exception | None], begun: int) -> Report | None:
        with self._changed:
            while not arrived and self._breaks == begun:
                self._changed.wait()
            if self._breaks != begun:
                raise (self._lost or LinkLost)(f"the connection to {self.name} broke")
            news = arrived.popleft()
        if isinstance(news, Exception):
            raise news
        return news

    def stand(self, standing: Standing) -> Callable[[float], None]:
        done, errors, copy = threading.Event(), list[Exception](), sent(standing)

        def arrive() -> None:
            try:
                self._reached().station.stand(copy)
            except Exception as error:  # noqa: BLE001 - the way back
                errors.append(error)
            done.set()

        def holds(seconds: float) -> None:
            if not done.wait(seconds):
                raise LinkLost("no answer in time")
            for error in errors:
                raise error

        self._send("stand", arrive)
        return holds

    def abort(self, jobs: list[int], timeout: float) -> None:
        self._reached().station.abort(jobs, timeout)

    def cut(self, url: str) -> None:
        if self._lost is None and self._process is not None:
            self._process.station.cut(url)

    def members(self, add: Iterable[str] = (), remove: Iterable[str] = ()) -> None:
        process = self._process
        if self._lost is not None or process is None:
            return
        for url in add:
            process.client.add_engine(url)
        for url in remove:
            process.client.remove_engine(url)

    def kill(self, *, restart: bool) -> None:
        self.kills.append(restart)
        if self._lost is LinkDead:
            return
        self.crash(LinkLost if restart else LinkDead)
        if restart:
            self.revive()

    def close(self, timeout: float) -> None:
        process = self._reached()
        process.client.close(timeout)
        process.station.close()


class ScriptedLink:
    """A link whose actor is the test: it sees what comes and says what it likes. Thread-safe.

    Args:
        name: Of the actor.
        room: That its hello names.
        up: Whether hello is answered; else it blocks until ``rise``, a kill or a loss.
    """

    def __init__(self, name: str = "actor-0", *, room: int = 4, up: bool = True) -> None:
        self.name = name
        self.room = room
        self.incarnation = new_rid()
        self.tasks: list[Task] = []  # that have come, in their order
        self.standings: list[Standing] = []
        self.aborted: list[list[int]] = []
        self.cuts: list[str] = []
        self.kills: list[bool] = []
        self.changes: list[tuple[list[str], list[str]]] = []
        self.spoken_to: list[str | None] = []  # as each hello named it
        self.refusal: Exception | None = None  # raised by take
        self.failures: list[Failed] = []  # of each take
        self.parcels: list[int] = []  # sizes
        self._changed = threading.Condition()
        self._up = up
        self._acknowledges = True
        self._lost: type[LinkLost] | None = None
        self._breaks = 0
        self._reports: deque[Report | None] = deque()

    # --- what the test says ---

    def rise(self, incarnation: str | None = None) -> None:
        with self._changed:
            self._up, self._lost = True, None
            self.incarnation = incarnation or new_rid()
            self._changed.notify_all()

    def lose(self, error: type[LinkLost] = LinkLost) -> None:
        with self._changed:
            self._lost, self._up = error, False
            self._breaks += 1
            self._reports.clear()
            self._changed.notify_all()

    def stall(self) -> None:
        """No standing is acknowledged any more."""
        self._acknowledges = False

    def acknowledge(self) -> None:
        """All are, and those to come."""
        with self._changed:
            self._acknowledges = True
            self._changed.notify_all()

    def say(
        self, ended: Iterable[tuple[int, Sample]] = (), placed: Iterable[Placed] = (), room: int | None = None
    ) -> None:
        number = self.standings[-1].number
        with self._changed:
            report = Report(list(ended), list(placed), self.room if room is None else room, number)
            self._reports.append(report)
            self._changed.notify_all()

    def await_tasks(self, count: int) -> list[Task]:
        with self._changed:
            there = self._changed.wait_for(lambda: len(self.tasks) >= count, PATIENCE_S)
            assert there, f"{len(self.tasks)} of {count} tasks have come to {self.name}"
            return list(self.tasks)

    # --- the link ---

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost(f"{self.name} cannot be reached")

    def hello(self, standing: Standing, incarnation: str | None) -> Hello:
        with self._changed:
            self.spoken_to.append(incarnation)
            self._changed.notify_all()
            while not self._up and not self._lost:
                self._changed.wait()
            self._check()
            self.standings.append(standing)
            return Hello(self.incarnation, self.room, "a script")

    def take(self, tasks: list[Task], incarnation: str, failed: Failed) -> None:
        if self.refusal is not None:
            raise self.refusal
        pickle.dumps(tasks)
        with self._changed:
            self.failures.append(failed)
            self.parcels.append(len(tasks))
            self.tasks += tasks
            self._changed.notify_all()

    def reports(self, incarnation: str) -> Iterator[Report]:
        begun = self._breaks
        while True:
            with self._changed:
                while not self._reports and self._breaks == begun:
                    self._changed.wait()
                if self._breaks != begun:
                    self._check()
                    raise LinkLost("lost, and back again")
                report = self._reports.popleft()
            if report is None:
                return
            yield report

    def stand(self, standing: Standing) -> Callable[[float], None]:
        with self._changed:
            self.standings.append(standing)
            self._changed.notify_all()

        def holds(seconds: float) -> None:
            with self._changed:
                if not self._changed.wait_for(lambda: self._acknowledges or self._lost, seconds):
                    raise LinkLost("no answer in time")
                self._check()

        return holds

    def abort(self, jobs: list[int], timeout: float) -> None:
        self.aborted.append(jobs)

    def cut(self, url: str) -> None:
        self.cuts.append(url)

    def members(self, add: Iterable[str] = (), remove: Iterable[str] = ()) -> None:
        self.changes.append((list(add), list(remove)))

    def kill(self, *, restart: bool) -> None:
        self.kills.append(restart)
        self.lose(LinkLost if restart else LinkDead)

    def close(self, timeout: float) -> None:
        with self._changed:
            self._reports.append(None)
            self._changed.notify_all()
