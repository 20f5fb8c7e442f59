"""Links to actors that live in this process, and that a test can lose, kill, stall and hold back."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from rolloutsync import RolloutClient
from rolloutsync.core import Core
from rolloutsync.remote import Hello, LinkDead, LinkLost, Report, Standing, Task
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
