"""A fleet's driver over links of a test's own, with all public verbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rolloutsync import RetryPolicy, RolloutClient, Timeouts
from rolloutsync.core import Core
from rolloutsync.crew import Crew
from rolloutsync.fleet_core import CrewFleet, FleetCore
from rolloutsync.lane import Lane
from rolloutsync.remote import Link
from tests.fleet.links import StationLink

RETRY = RetryPolicy(backoff_base_s=0.02, backoff_cap_s=0.1)
TIMES = Timeouts(connect_s=2.0, control_s=2.0, sample_s=30.0, engine_wait_s=2.0)

MakeLink = Callable[[int, list[str], int], Link]


class DrivenFleet(RolloutClient):
    """A ``RolloutFleet`` without Ray.

    Args:
        urls: Of the engines.
        make: Makes the link of an actor: its number, its engines, how many share them.
        actors: How many.
        shared: All of them use all engines.
        actor_wait_s: As for ``RolloutFleet``.
        options: As for ``RolloutClient``.
    """

    def __init__(
        self,
        urls: Any,
        make: MakeLink,
        *,
        actors: int = 2,
        shared: bool = False,
        actor_wait_s: float = 30.0,
        **options: Any,
    ) -> None:
        self.links: list[Any] = []
        self._make = make
        self._actors = actors
        self._shared = shared
        self._wait_s = actor_wait_s
        super().__init__(urls, **{"progress": False, "retry": RETRY, "timeouts": TIMES, **options})

    @property
    def core(self) -> FleetCore:
        core = self._open()
        assert isinstance(core, FleetCore)
        return core

    @property
    def crew(self) -> Crew:
        return self.core.workers

    @property
    def engine_fleet(self) -> CrewFleet:
        return self.core.fleet

    def _make_core(self) -> Core:
        return FleetCore(
            [], self._config, self._session, recruit=self._recruit, shared=self._shared, actor_wait_s=self._wait_s
        )

    def _recruit(self, urls: list[str]) -> list[Lane]:
        parts = [list(urls) if self._shared else urls[number :: self._actors] for number in range(self._actors)]
        sharers = self._actors if self._shared else 1
        self.links = [self._make(number, part, sharers) for number, part in enumerate(parts)]
        return [Lane(link, "", list(part)) for link, part in zip(self.links, parts, strict=True)]


def station_links(**settings: Any) -> MakeLink:
    """Links to actors in this process; an engine that is not there is waited for only a little, as with Ray."""
    timeouts = Timeouts(connect_s=2.0, control_s=2.0, sample_s=30.0, engine_wait_s=0.5)
    options = {"progress": False, "retry": RETRY, "timeouts": timeouts, **settings}
    return lambda number, urls, sharers: StationLink(f"actor-{number}", urls, sharers=sharers, **options)


def lane_states(fleet: DrivenFleet) -> Sequence[str]:
    with fleet.crew._lock:
        return [str(lane.state) for lane in fleet.crew._lanes]
