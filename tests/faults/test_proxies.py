"""Where all this began: an async proxy that dies of ``ReadError``, because the engine closes a socket as it is reused.

Both engines close a kept-alive connection that was idle for five seconds; httpx keeps it for five seconds, too. So
sooner or later the engine's timer fires while a request is on its way on that very connection: it is never answered,
and the proxy has no way to know whether it ran. The engine here decides when that is: whatever is connected when it
gets tired is closed as the next request comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import requests

from rolloutsync import Status, Timeouts
from tests.client.kit import ScriptedEngine, body_of, prompts
from tests.faults.kit import IMPATIENT, MakeClient, check, check_all, echo
from tests.faults.proxy import STYLES, Proxy
from tests.kernel import client_states
from tests.wire import Request, Script, eventually, reset, wait_for

MANY = 8


class TiredEngine(ScriptedEngine):
    """Answers its first requests when all of them are there, so that each has a connection of its own."""

    def __init__(self, together: int = MANY) -> None:
        super().__init__(self._story)
        self._together = together
        self._all_there = threading.Event()
        self._tired_of: set[int] = set()  # connections
        self.broken: list[str] = []  # ids of the requests that were read and not answered

    def tire(self) -> None:
        """The timer of every connection that is open fires, as the next request on it comes."""
        with self.server.changed:
            self._tired_of = {request.connection for request in self.server.requests if request.path == "/generate"}

    def _story(self, request: Request, number: int) -> Script:
        if request.connection in self._tired_of:
            self._tired_of.remove(request.connection)
            self.broken.append(body_of(request)["rid"])
            return [reset]
        if number + 1 >= self._together:
            self._all_there.set()
        return [wait_for(self._all_there), *echo(request)]


@pytest.mark.parametrize("style", STYLES)
def test_a_proxy_that_dies_of_read_errors_loses_no_sample(client_to: MakeClient, style: str) -> None:
    """The proxy fails as often as the engine closes; with us in front of it each sample is there, once."""
    batch = prompts(MANY)
    with TiredEngine() as engine, Proxy(engine.url, style) as proxy:
        client = client_to(proxy.url, retry=IMPATIENT)
        check_all(client.generate(batch), batch)
        assert proxy.errors == []
        engine.tire()
        samples = client.generate(batch)
        check_all(samples, batch, attempts=None)
        assert proxy.errors == ["ReadError"] * len(engine.broken)
        # The proxy's server closes our sockets, too, after an error of its own: an attempt may get no further.
        assert 0 < len(engine.broken) <= sum(sample.attempts - 1 for sample in samples)
        delivered = {sample.rid for sample in samples}
        assert len(delivered) == MANY
        assert delivered.isdisjoint(engine.broken)
        assert len(set(engine.rids())) == len(engine.rids()) == 2 * MANY + len(engine.broken)
        stats = client.stats()
        assert (stats.admitted, stats.truncated, stats.open) == (2 * MANY, 2 * MANY, 0)


def test_a_plain_caller_of_that_proxy_loses_its_sample() -> None:
    """The same story without us: an error of the proxy's own takes the place of the answer."""
    body = {"input_ids": [3, 4], "sampling_params": {}}
    with TiredEngine(1) as engine, Proxy(engine.url, "bare") as proxy, requests.Session() as session:
        session.trust_env = False

        def post(rid: str) -> requests.Response:
            return session.post(f"{proxy.url}/generate", json={**body, "rid": rid}, timeout=10)

        assert post("a").status_code == 200
        engine.tire()
        lost = post("b")
        assert (lost.status_code, lost.text) == (500, "Internal Server Error")
        assert (proxy.errors, engine.broken) == (["ReadError"], ["b"])


def test_the_same_engine_without_the_proxy(client_to: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """Our sockets are closed before the engine tires of them, so nothing fails. (0.3 s for two, of its five.)"""
    batch = prompts(MANY)
    with TiredEngine() as engine:
        client = client_to(engine.url, timeouts=Timeouts(idle_socket_s=0.3))
        check_all(client.generate(batch), batch)
        eventually(lambda: "ESTABLISHED" not in client_states(engine.server.port), "our idle sockets are closed")
        engine.tire()
        check_all(client.generate(batch), batch)  # at the first attempt
        assert engine.broken == engine.aborted() == warnings() == []
        assert len(engine.rids()) == 2 * MANY


def test_even_where_the_engine_is_quicker(client_to: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """It tires of sockets that were idle for a moment only: once more at once, and nobody is told of it."""
    batch = prompts(MANY)
    with TiredEngine() as engine:
        client = client_to(engine.url)
        check_all(client.generate(batch), batch)
        engine.tire()
        for sample, prompt in zip(client.generate(batch), batch, strict=True):
            check(sample, prompt, attempts=sample.attempts)
            assert sample.attempts <= 2
            assert sample.status is Status.TRUNCATED
        assert 0 < len(engine.broken) == len(engine.aborted())
        assert sorted(engine.aborted()) == sorted(engine.broken)
        assert warnings() == []
