"""The way from a fleet's driver to its actors, over Ray."""

from __future__ import annotations

import os
import platform
import threading
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from rolloutsync.client import RolloutClient
from rolloutsync.ray_actor import RolloutWorker, in_group
from rolloutsync.remote import LinkDead, LinkLost
from rolloutsync.station import Station

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rolloutsync.config import ClientConfig
    from rolloutsync.core import Core
    from rolloutsync.remote import Hello, Report, Standing, Task

GROUPS = {"control": 8, "look": 4, "orders": 1, "reports": 2}
_MORE_S = 5.0  # for the way there and back
_LOOK_S = 1.0
_WORDS = 300
_ENGINE_WAIT_S = 5.0


class SharingClient(RolloutClient):
    """A client that leaves the engines' other users their share of the limits."""

    sharers = 1

    @property
    def core(self) -> Core:
        """The running parts."""
        return self._open()

    @property
    def urls(self) -> list[str]:
        """Of the members."""
        with self._lock:
            return list(self._urls)

    def _make_core(self) -> Core:
        core = super()._make_core()
        core.fleet.sharers = self.sharers
        return core


class Members(NamedTuple):
    """The engines that are one actor's own. A later one has a higher number."""

    number: int
    urls: tuple[str, ...]


class FleetWorker(RolloutWorker):
    """What an actor of a fleet is made of: a ``RolloutWorker`` with a station for its driver's tasks."""

    def __init__(self, urls: list[str], sharers: int, settings: dict[str, Any]) -> None:
        self.client = SharingClient(urls, **settings)
        self.client.sharers = sharers
        place = f"{platform.node()} (node {ray.get_runtime_context().get_node_id()[:8]}, pid {os.getpid()})"
        self._station = Station(self.client.core, place, alone=sharers == 1)
        self._lock = threading.Lock()  # guards: _members. Held while an engine is asked what it is.
        self._members = Members(-1, tuple(self.client.urls))

    @in_group("control")
    def hello(self, standing: Standing, incarnation: str | None, members: Members) -> Hello:
        """See ``Station.hello``. A restarted actor was made with the engines that were its own at first."""
        self._have(members)
        return self._station.hello(standing, incarnation)

    @in_group("orders")
    def take(self, tasks: list[Task], incarnation: str) -> None:
        """See ``Station.take``."""
        self._station.take(tasks, incarnation)

    @in_group("reports", num_returns="streaming")
    def reports(self, incarnation: str) -> Iterator[Report]:
        """See ``Station.reports``."""
        yield from self._station.reports(incarnation)

    @in_group("control")
    def stand(self, standing: Standing) -> None:
        """See ``Station.stand``."""
        self._station.stand(standing)

    @in_group("control")
    def abort_jobs(self, jobs: list[int], timeout: float) -> None:
        """See ``Station.abort``."""
        self._station.abort(jobs, timeout)

    @in_group("control")
    def cut(self, url: str) -> None:
        """See ``Station.cut``."""
        self._station.cut(url)

    @in_group("control")
    def have(self, members: Members) -> None:
        """Change which engines are this actor's own."""
        self._have(members)

    def _have(self, members: Members) -> None:
        with self._lock:
            if members.number <= self._members.number:
                return
            before, self._members = self._members.urls, members
            for url in members.urls:
                if url not in before:
                    self.client.add_engine(url)
            for url in before:
                if url not in members.urls:
                    self.client.remove_engine(url)

    @in_group("control")
    def shut(self, timeout: float) -> None:
        """End all samples; their reports can still be read."""
        self.client.close(timeout)
        self._station.close()


FleetActor = ray.remote(concurrency_groups=GROUPS, max_concurrency=8)(FleetWorker)


class RayLink:
    """A ``Link`` to an actor handle. Thread-safe.

    Args:
        name: For people.
        actor: The handle of a ``FleetActor``.
        wait_s: How long its start may take.
        urls: Of the engines that it was made with.
    """

    def __init__(self, name: str, actor: Any, wait_s: float, urls: Iterable[str]) -> None:
        self.name = name
        self.actor = actor
        self._wait_s = wait_s
        self._job = _job()
        self._lock = threading.Lock()  # guards: _members
        self._members = Members(0, tuple(urls))

    @property
    def _is_valid(self) -> bool:
        """Whether Ray is still what it was: after a shutdown it would start anew, unasked, with the next call."""
        return self._job == _job()

    def _check(self) -> None:
        if not self._is_valid:
            raise LinkDead("Ray was shut down in this process")

    def hello(self, standing: Standing, incarnation: str | None) -> Hello:
        """See ``Link``."""
        self._check()
        with self._lock:
            members = self._members
        found: Hello = _get(self.actor.hello.remote(standing, incarnation, members), self._wait_s)
        return found

    def take(self, tasks: list[Task], incarnation: str, failed: Callable[[Exception], None]) -> None:
        """See ``Link``."""

        def ended(future: Any) -> None:
            if (error := future.exception()) is not None:
                failed(_translated(error))

        self._check()
        self.actor.take.remote(tasks, incarnation).future().add_done_callback(ended)

    def reports(self, incarnation: str) -> Iterator[Report]:
        """See ``Link``."""
        self._check()
        refs = self.actor.reports.remote(incarnation)
        while True:
            try:
                while not ray.wait([refs], timeout=_LOOK_S)[0]:  # else the generator asks a Ray that was shut down
                    self._check()
                self._check()
                ref = next(refs)
            except StopIteration:
                return
            except ray.exceptions.RayError as error:
                raise _translated(error) from error
            yield _get(ref, None)
            del ref  # the samples keep what they need of it

    def stand(self, standing: Standing) -> Callable[[float], None]:
        """See ``Link``."""
        if not self._is_valid:
            return lambda _: self._check()
        ref = self.actor.stand.remote(standing)
        return lambda seconds: _get(ref, seconds)

    def abort(self, jobs: list[int], timeout: float) -> None:
        """See ``Link``."""
        self._check()
        _get(self.actor.abort_jobs.remote(jobs, timeout), timeout + _MORE_S)

    def cut(self, url: str) -> None:
        """See ``Link``."""
        if self._is_valid:
            self.actor.cut.remote(url)

    def members(self, add: Iterable[str] = (), remove: Iterable[str] = ()) -> None:
        """See ``Link``."""
        gone, more = set(remove), list(add)
        with self._lock:
            kept = [url for url in self._members.urls if url not in gone and url not in more]
            members = self._members = Members(self._members.number + 1, (*kept, *more))
        if self._is_valid:
            self.actor.have.remote(members)

    def kill(self, *, restart: bool) -> None:
        """See ``Link``."""
        if self._is_valid:
            ray.kill(self.actor, no_restart=not restart)

    def close(self, timeout: float) -> None:
        """See ``Link``."""
        self._check()
        _get(self.actor.shut.remote(timeout), timeout)


def settings_of(config: ClientConfig, session: Any) -> dict[str, Any]:
    """A client's arguments, from its settings.

    An actor has no terminal for bars, and waits for an engine only a little: another may have one.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    timeouts = replace(config.timeouts, engine_wait_s=min(_ENGINE_WAIT_S, config.timeouts.engine_wait_s))
    return {**values, "timeouts": timeouts, "session": session, "progress": False}


def _job() -> str | None:
    """Of this process, in a Ray that runs."""
    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else None


def _get(ref: Any, seconds: float | None) -> Any:
    try:
        return ray.get(ref, timeout=seconds)
    except ray.exceptions.RayError as error:
        raise _translated(error) from error


def _translated(error: Exception) -> Exception:
    """Ray's word for it in ours. What a call itself raised stays what it is."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, Exception) else error
    if isinstance(error, ray.exceptions.ActorDiedError):
        return LinkDead(_short(error))
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return LinkLost("no answer in time")
    return LinkLost(_short(error)) if isinstance(error, ray.exceptions.RayError) else error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_WORDS] or type(error).__name__
