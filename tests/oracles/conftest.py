"""Fixtures of the oracles: their files, and simulated engines for them to judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rolloutsync import RolloutClient
from tests.client.kit import QUICK, SHORT
from tests.real.kit import KitError

from . import wheel


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Writes a line to the terminal."""
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    return lambda message: None if terminal is None else terminal.write_line(f"oracles: {message}")


@pytest.fixture(scope="session")
def oracles(report: Callable[[str], None]) -> wheel.Oracles:
    """The files of SGLang's wheel."""
    try:
        return wheel.ensure(report)
    except KitError as error:
        pytest.fail(
            f"no oracle: a package index is needed on first use ({wheel.oracle_root()}): {error}", pytrace=False
        )


@pytest.fixture
def make_client() -> Iterator[Callable[..., RolloutClient]]:
    """Makes clients with short limits, which are closed after the test."""
    made: list[RolloutClient] = []

    def make(urls: Any, **options: Any) -> RolloutClient:
        made.append(RolloutClient(urls, **{"retry": QUICK, "timeouts": SHORT, "progress": False, **options}))
        return made[-1]

    yield make
    for client in made:
        assert client.close() == []


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's kits use bare `requests`, which must not go through anybody's proxy to a loopback address."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
