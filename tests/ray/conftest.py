"""Fixtures of the Ray tests, which run under the marker `ray`: Ray itself, simulated engines, actors that are ended.

Nothing here imports Ray before a test needs it, so the fast suite does without. A Ray test without Ray fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from rolloutsync import RetryPolicy, Timeouts
from rolloutsync.sim import SimFleet
from tests.processes import alive, await_true
from tests.ray.cluster import local_ray
from tests.ray.guard import watch_threads
from tests.real.network import Namespace

ROUTED = (16, 8, 64)  # layers, topk, experts: answers that are too large for Ray to send beside its messages
OPTIONS: dict[str, Any] = {
    "retry": RetryPolicy(backoff_base_s=0.02, backoff_cap_s=0.1),
    "timeouts": Timeouts(connect_s=2.0, control_s=5.0, sample_s=60.0, engine_wait_s=2.0),
    "routed_experts_shape": ROUTED[:2],
}
NAMESPACE = pytest.StashKey[Namespace]()

MakeActor = Callable[..., Any]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Moves to a private loopback if a Ray test was selected. (If a real engine is needed, the real suite does.)"""
    marks = {mark.name for item in session.items for mark in item.iter_markers()}
    if session.config.option.collectonly or "ray" not in marks or marks & {"real", "gpu"}:
        return
    namespace = session.config.stash[NAMESPACE] = Namespace()
    try:
        namespace.enter()
    except OSError as error:
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(f"ray: no network namespace of our own ({error}); Ray listens on all interfaces")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Returns from the private loopback."""
    namespace = session.config.stash.get(NAMESPACE, None)
    if namespace is not None:
        namespace.leave()


@pytest.fixture(scope="session")
def cluster() -> Iterator[ModuleType]:
    """Ray, running, for the whole session."""
    with local_ray() as ray:
        yield ray


@pytest.fixture(scope="session")
def shared_fleet() -> Iterator[SimFleet]:
    options: dict[str, Any] = {"tokens_per_second": 500.0, "max_running_requests": 16, "disconnect_poll_s": 0.2}
    with SimFleet(engines=2, routed_experts=ROUTED, **options) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared_fleet: SimFleet) -> Iterator[SimFleet]:
    """Two engines, which must be idle by themselves soon after the test."""
    for engine in shared_fleet.engines:
        engine.reset()
    yield shared_fleet
    for engine in shared_fleet.engines:
        engine.clear_faults()
    await_idle(shared_fleet)


@pytest.fixture(scope="session")
def deaf_engines() -> Iterator[SimFleet]:
    options: dict[str, Any] = {"tokens_per_second": 500.0, "max_running_requests": 64}
    deaf: dict[str, Any] = {"disconnect_poll_s": 3600.0, "report_interval": 1_000_000}
    with SimFleet(engines=4, routed_experts=ROUTED, **options, **deaf) as engines:
        yield engines


@pytest.fixture
def engines(deaf_engines: SimFleet) -> Iterator[SimFleet]:
    """Four engines that never notice that a client has gone, and must be idle at the end all the same."""
    for engine in deaf_engines.engines:
        engine.reset()
    yield deaf_engines
    left = running(deaf_engines)
    for engine in deaf_engines.engines:
        engine.restart() if left else engine.clear_faults()
    assert left == 0


@pytest.fixture
def make_actor(cluster: ModuleType, fleet: SimFleet) -> Iterator[MakeActor]:
    """Starts actors on the fleet; after the test they are killed and their processes awaited."""
    from rolloutsync.ray_actor import RolloutActor

    made: list[tuple[Any, int]] = []

    def make(kind: Any = RolloutActor, urls: Any = None, **options: Any) -> Any:
        actor = kind.options(num_cpus=0, **options).remote(fleet.urls if urls is None else urls, **OPTIONS)
        made.append((actor, pid_of(cluster, actor)))
        return actor

    yield make
    for actor, _ in made:
        cluster.kill(actor)
    for _, pid in made:
        await_true(lambda pid=pid: not alive(pid), f"the end of the actor's process {pid}")  # type: ignore[misc]


@pytest.fixture
def actor(make_actor: MakeActor) -> Any:
    return make_actor()


@pytest.fixture
def before_the_guard(request: pytest.FixtureRequest) -> None:
    """Ray and the engines outlive the test."""
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("cluster")
        request.getfixturevalue("shared_fleet")


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest, before_the_guard: None) -> Iterator[None]:
    """As everywhere, but for sockets: Ray opens and keeps channels to its processes as it pleases."""
    yield from watch_threads(request.node.nodeid)


# --- what the engines and the processes themselves say ---


def running(fleet: SimFleet) -> int:
    """Requests that the engines themselves say they have."""
    return sum(counts(fleet))


def counts(fleet: SimFleet) -> list[int]:
    """The same for each engine."""
    loads = [engine.call("GET", "/v1/loads")["loads"] for engine in fleet.engines]
    return [sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in ranks) for ranks in loads]


def await_running(fleet: SimFleet, count: int) -> None:
    """Poll until the engines have exactly so many requests."""
    seen: list[int] = []

    def reached() -> bool:
        seen[:] = counts(fleet)
        return sum(seen) == count

    await_true(reached, lambda: f"{count} requests on the engines, which say {seen}")


def await_idle(fleet: SimFleet) -> None:
    """Nobody aborts here: the engines see that nobody waits any more."""
    await_running(fleet, 0)


def pid_of(ray: ModuleType, actor: Any) -> int:
    """The process of an actor."""
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))
