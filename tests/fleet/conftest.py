"""Fixtures of the fleet tests: engines for all, drivers that are closed, a crew of scripted actors on a fake clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rolloutsync.clock import Clock, Deadline
from rolloutsync.sim import SimFleet
from tests.fleet.driver import DrivenFleet, station_links
from tests.fleet.links import StationLink
from tests.fleet.scripted import ScriptedCrew

MakeFleet = Callable[..., DrivenFleet]


@pytest.fixture(scope="session")
def shared_engines() -> Iterator[SimFleet]:
    """Three engines for all tests."""
    with SimFleet(engines=3, tokens_per_second=1000.0, disconnect_poll_s=0.1, max_running_requests=16) as fleet:
        yield fleet


@pytest.fixture
def before_the_guard(request: pytest.FixtureRequest) -> None:
    """The engines outlive the test."""
    if "engines" in request.fixturenames:
        request.getfixturevalue("shared_engines")


@pytest.fixture
def engines(shared_engines: SimFleet) -> Iterator[SimFleet]:
    """The shared engines with empty ledgers and without faults."""
    for engine in shared_engines.engines:
        engine.call("POST", "/update_weight_version", {"new_version": "default"})
        engine.reset()
    yield shared_engines
    for engine in shared_engines.engines:
        engine.clear_faults()
        engine.slow_down(None)
        engine.call("POST", "/abort_request", {"abort_all": True})
        engine.call("POST", "/continue_generation", {})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that was lost is greeted again soon."""
    monkeypatch.setattr("rolloutsync.actors._REST_S", 0.02)


@pytest.fixture
def make_fleet(quick: None) -> Iterator[MakeFleet]:
    """Makes drivers of actors in this process, which are closed after the test."""
    made: list[DrivenFleet] = []

    def make(urls: Any, **options: Any) -> DrivenFleet:
        make_link = options.pop("make", None) or station_links(**options.pop("settings", {}))
        made.append(DrivenFleet(urls, make_link, **options))
        return made[-1]

    yield make
    for fleet in made:
        left = fleet.close()
        for link in fleet.links:
            if isinstance(link, StationLink):
                link.end()
        assert left == []


@pytest.fixture
def make_crew(quick: None) -> Iterator[Callable[..., ScriptedCrew]]:
    """Makes crews whose actors are the test, which are closed after it."""
    made: list[ScriptedCrew] = []

    def make(**options: Any) -> ScriptedCrew:
        made.append(ScriptedCrew(**options))
        return made[-1]

    yield make
    for kit in made:
        kit.fleet.close()
        kit.crew.close()
        for link in kit.links:
            with contextlib.suppress(AttributeError):
                link.acknowledge()
        assert kit.crew.join(Deadline.after(Clock(), 10.0)) == []
        assert not kit.open()
