"""Fixtures of the client tests: one simulated fleet for all, clients that are closed, warnings that are counted."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rolloutsync import RolloutClient
from rolloutsync.sim import SimConfig, SimFleet
from rolloutsync.sim.fleet import SimEngine
from tests.client.kit import QUICK, SHORT
from tests.client.vllmkit import MORE_VERSIONS, SETTLES_S, VERSIONS, tidy

MakeClient = Callable[..., RolloutClient]


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimFleet]:
    """Four engines for all tests, whose model tells its vocabulary."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text('{"vocab_size": 32000}')
    with SimFleet(engines=4, tokens_per_second=1000.0, model_path=str(model), disconnect_poll_s=0.2) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared_fleet: SimFleet) -> Iterator[SimFleet]:
    """The shared engines with empty ledgers and without faults."""
    for engine in shared_fleet.engines:
        engine.reset()
    yield shared_fleet
    for engine in shared_fleet.engines:
        engine.clear_faults()
        engine.call("POST", "/abort_request", {"abort_all": True})
        engine.call("POST", "/continue_generation", {})


@pytest.fixture
def client_to() -> Iterator[MakeClient]:
    """Makes clients with their default settings, which are closed after the test."""
    made: list[RolloutClient] = []

    def make(urls: Any, **options: Any) -> RolloutClient:
        made.append(RolloutClient(urls, **{"progress": False, **options}))
        return made[-1]

    yield make
    for client in made:
        assert client.close() == []


@pytest.fixture
def make_client(client_to: MakeClient) -> MakeClient:
    """Makes clients with short limits, which are closed after the test."""
    return lambda urls, **options: client_to(urls, **{"retry": QUICK, "timeouts": SHORT, **options})


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The messages that rolloutsync has logged at WARNING or above."""
    caplog.set_level(logging.WARNING, logger="rolloutsync")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.startswith("rolloutsync")]

    return told


@pytest.fixture(scope="session")
def vllm_of() -> Iterator[Callable[[str], SimEngine]]:
    """The vLLM engine of a version, started when it is first wanted."""
    with ExitStack() as stack:

        @functools.cache
        def engine(version: str) -> SimEngine:
            config = SimConfig(dialect="vllm", version=version, tokens_per_second=1000.0)
            return stack.enter_context(SimFleet(configs=[config])).engines[0]

        yield engine


@pytest.fixture(params=[*VERSIONS, *(pytest.param(version, marks=pytest.mark.slow) for version in MORE_VERSIONS)])
def vllm(request: pytest.FixtureRequest, vllm_of: Callable[[str], SimEngine]) -> Iterator[SimEngine]:
    """Each of them in turn, as new."""
    yield from _as_new(vllm_of(request.param))


@pytest.fixture
def soon_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros that must last do so for less."""
    monkeypatch.setattr("rolloutsync.assurance.SETTLES_S", SETTLES_S)


@pytest.fixture(scope="session")
def bare() -> Iterator[SimEngine]:
    """A new vLLM engine that was started without anything: no development mode, no scale-out."""
    with SimFleet(engines=1, dialect="vllm", tokens_per_second=1000.0, dev_mode=False, enable_scale_out=False) as fleet:
        yield fleet.engines[0]


@pytest.fixture
def newest(vllm_of: Callable[[str], SimEngine]) -> Iterator[SimEngine]:
    """The newest of them, as new."""
    yield from _as_new(vllm_of(VERSIONS[-1]))


def _as_new(engine: SimEngine) -> Iterator[SimEngine]:
    tidy(engine)
    engine.reset()
    yield engine
