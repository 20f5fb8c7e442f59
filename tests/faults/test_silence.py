"""B02, B03 and every other wait: silence, drips, half-open peers, slow uploads, look-ups. Each ends in time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rolloutsync import (
    ControlError,
    DeadlineExceededError,
    IdleState,
    NotIdleError,
    RetryPolicy,
    Status,
    Timeouts,
)
from tests.background import in_thread
from tests.client.kit import ScriptedEngine, prompts
from tests.faults.engine import LiveEngine
from tests.faults.kit import MakeClient, await_parting, check, check_all, check_failed, echo, of_prompt, within
from tests.kernel import client_states
from tests.steps import NEVER_ENDING, half_open, read_slowly
from tests.wire import WireServer, answer, close, eventually, play, read_bytes, silence, wait_for

DEADLINE_S = 0.4
WIDE = [np.arange(1_300_000, dtype=np.int32)]  # a request of about 9 MB


def test_one_silent_request_of_eight(client_to: MakeClient) -> None:
    """B02: never answered and never closed; the other 7 are delivered, this one fails in time and is aborted.

    The deadline of a sample is an hour by default: overridden.
    """
    batch = [[first, 9] for first in range(1, 9)]
    with ScriptedEngine(of_prompt(7, lambda *_: [silence])) as engine, within(DEADLINE_S + 1):
        samples = client_to(engine.url, timeouts=Timeouts(sample_s=DEADLINE_S)).generate(batch)
        check_all(samples[:6] + samples[7:], batch[:6] + batch[7:])
        check_failed(samples[6], DeadlineExceededError, "/generate", attempts=1)
        assert engine.aborted() == [samples[6].rid]


def test_every_answer_that_never_ends(client_to: MakeClient) -> None:
    """B03: drips of heads, bodies, chunks and interim answers, lengths that lie: a deadline on the wall, for all."""
    with ScriptedEngine(lambda request, number: list(NEVER_ENDING.values())[number]) as engine:
        client = client_to(engine.url)
        with within(DEADLINE_S + 1):
            samples = client.generate(prompts(len(NEVER_ENDING)), timeout=DEADLINE_S, on_error="return")
        for sample in samples:
            check_failed(sample, DeadlineExceededError, "deadline", attempts=1)
        assert sorted(engine.aborted()) == sorted(sample.rid for sample in samples)
        assert client.close() == []
        eventually(lambda: client_states(engine.server.port) == [], "no socket of theirs is kept")


def test_a_drain_of_a_silent_engine(client_to: MakeClient) -> None:
    """B02: /v1/loads and /abort_request never answer; the error comes in time, names the URL, and the calls are cut."""
    mute = {"/v1/loads": [silence], "/abort_request": [silence]}
    with LiveEngine(others=mute) as engine:
        client = client_to(engine.url)
        job = client.start(prompts(3))
        engine.journal.await_running(3)
        with within(DEADLINE_S + 1), pytest.raises(NotIdleError, match=engine.url) as caught:
            client.abort_until_idle(DEADLINE_S)
        assert [drain.state for drain in caught.value.report.engines] == [IdleState.UNKNOWN]
        with within(1.0):
            assert {sample.status for sample in job.result()} == {Status.ABORTED}


def test_an_orphans_abort_that_is_never_answered(client_to: MakeClient) -> None:
    """B02: it gets 5 s by default (here: none of them wasted), then the sample moves on to another engine."""
    with (
        ScriptedEngine(lambda *_: [close], others={"/abort_request": [silence]}) as engine,
        ScriptedEngine(echo) as other,
        within(2.0),
    ):
        client = client_to([engine.url, other.url], retry=RetryPolicy(orphan_abort_timeout_s=0.3))
        samples = client.generate([[5, 6], [7, 8]])
        assert sorted(sample.attempts for sample in samples) == [1, 2]
        assert {sample.engine for sample in samples} == {other.url}


# --- half-open --------------------------------------------------------------------------------------------------------


def test_a_half_open_engine_is_found_out(client_to: MakeClient) -> None:
    """The host vanishes while it generates: its peer is declared dead after half_open_s (30 s by default: overridden).

    The orphan's abort cannot be delivered either (5 s by default: overridden), and the sample runs elsewhere.
    """
    with LiveEngine() as engine, ScriptedEngine(echo) as other, within(6.0):
        limits = {"timeouts": Timeouts(half_open_s=1.0), "retry": RetryPolicy(orphan_abort_timeout_s=0.3)}
        client = client_to(engine.url, **limits)
        job = client.start([[5, 6], [7, 8]])
        engine.journal.await_running(2)
        client.add_engine(other.url)
        engine.server.vanish()
        check_all(job.result(), [[5, 6], [7, 8]], attempts=2)
        assert {sample.engine for sample in job.result()} == {other.url}


@pytest.mark.slow
def test_a_half_open_engine_among_two(client_to: MakeClient) -> None:
    """Default settings: one of two hosts vanishes; the batch completes on the other in 36 s (30 for the dead peer, 5
    for the abort that cannot be delivered).
    """
    batch = prompts(16)
    with LiveEngine() as engine, LiveEngine(takes_s=0.2, journal=engine.journal) as other, within(40.0):
        client = client_to([engine.url, other.url])
        job = client.start(batch)
        engine.journal.await_running(9)
        engine.server.vanish()
        samples = job.result()
        check_all(samples, batch, attempts=None)
        assert {sample.engine for sample in samples} == {other.url}
        assert max(sample.attempts for sample in samples) == 2


@pytest.mark.slow
def test_twenty_seconds_of_healthy_silence(client_to: MakeClient) -> None:
    """Default settings: a generation that merely takes long is one attempt, and nobody is told to stop it."""
    with LiveEngine(takes_s=20.0) as engine:
        check_all(client_to(engine.url).generate(prompts(4)), prompts(4))
        assert (engine.aborts, engine.journal.ends()) == ([], ["finished"] * 4)


def test_a_connection_that_is_half_open_before_the_request(client_to: MakeClient) -> None:
    """Our request goes out and is never acknowledged: the deadline ends it like any silence."""
    scripts = [[play(lambda _: [answer()])], [read_bytes(1), half_open]]
    with WireServer(*scripts) as server:
        client = client_to(server.url, timeouts=Timeouts(control_s=0.5))
        client.engines()
        with within(DEADLINE_S + 1.5):  # the abort of what may be running there takes its time too
            sample = client.generate([[5]], timeout=DEADLINE_S, on_error="return")[0]
        check_failed(sample, DeadlineExceededError, attempts=1)


# --- uploads and look-ups ---------------------------------------------------------------------------------------------


def test_an_upload_that_nobody_takes(client_to: MakeClient) -> None:
    """The engine reads 4 kB of a 9 MB request and no more: sending ends at the deadline too."""
    stop = threading.Event()
    with WireServer([play(lambda _: [answer()])], [read_bytes(4096), wait_for(stop)]) as server:
        client = client_to(server.url, timeouts=Timeouts(control_s=0.5))
        client.engines()
        with within(DEADLINE_S + 1.5):  # the abort of what may be running there takes its time too
            sample = client.generate(WIDE, timeout=DEADLINE_S, on_error="return")[0]
        check_failed(sample, DeadlineExceededError, attempts=1)
        stop.set()


def test_a_slow_but_healthy_upload(client_to: MakeClient) -> None:
    """9 MB that take five times the connect timeout (10 s by default: overridden) are not cut by it."""
    infos, slowly = [play(lambda _: [answer()])], [read_slowly(8 << 20, 8, 0.06), read_rest]
    with WireServer(infos, [*slowly, answer(b"[]", "400 Bad Request")]) as server:
        client = client_to(server.url, timeouts=Timeouts(connect_s=0.1))
        client.engines()
        sample = client.generate(WIDE, on_error="return")[0]
        assert sample.attempts == 1
        assert "answered 400" in str(sample.error)


def read_rest(peer: Any) -> None:
    """Whatever the client still sends, until it waits."""
    peer.sock.settimeout(0.1)
    try:
        while peer.sock.recv(1 << 20):
            pass
    except TimeoutError:
        peer.sock.settimeout(None)


@pytest.fixture
def hanging_resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No name is looked up while the event is set; an address is its own name."""
    resolve, hangs, free = socket.getaddrinfo, threading.Event(), threading.Event()

    def look_up(host: str, *args: Any, **options: Any) -> Any:
        if hangs.is_set() and host == "localhost":
            free.wait(10.0)
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield hangs
    free.set()


def test_a_name_that_cannot_be_looked_up(client_to: MakeClient, hanging_resolver: threading.Event) -> None:
    """The resolver hangs: a sample ends at its deadline, a control call at its own (10 s by default: overridden)."""
    with ScriptedEngine(echo, closing=True) as engine:
        client = client_to(f"http://localhost:{engine.server.port}", timeouts=Timeouts(control_s=DEADLINE_S))
        check(client.generate([[5, 6]])[0], [5, 6])
        await_parting(engine.server.port)
        hanging_resolver.set()
        verb = in_thread(client.flush_cache)
        call = in_thread(lambda: client.generate([[7, 8]], timeout=DEADLINE_S, on_error="return"))
        sample = call.result(DEADLINE_S + 1)[0]
        assert isinstance(sample.error, DeadlineExceededError)
        assert isinstance(verb.exception(0.5), ControlError)


def test_a_busy_engine_is_not_a_silent_one(client_to: MakeClient) -> None:
    """Control calls to an engine whose generates hang are answered at once, whatever their number."""
    with LiveEngine() as engine:
        client = client_to(engine.url, engine_concurrency=4)
        job = client.start(prompts(8))
        engine.journal.await_running(4)
        with within(1.0):
            assert client.loads()[engine.url].running == 4
        job.abort()


@pytest.mark.parametrize("how", ["close", "abort", "drain"])
def test_a_connect_that_hangs_is_called_off(client_to: MakeClient, how: str) -> None:
    """The host vanishes, so new connects hang; close(), an abort and a drain each wake those who wait for them."""
    with ScriptedEngine(echo) as engine:
        client = client_to(engine.url)
        check(client.generate([[5, 6]])[0], [5, 6])
        engine.server.vanish()
        job = client.start(prompts(8), on_error="return")
        eventually(lambda: client_states(engine.server.port).count("SYN_SENT") >= 7, "connects hang")
        ways: dict[str, Callable[[], object]] = {
            "close": client.close,
            "abort": lambda: job.abort(0.2),
            "drain": lambda: client.abort_until_idle(0.2, raise_on_timeout=False),
        }
        calling_off = in_thread(ways[how])
        assert job.wait(1.5)
        calling_off.result(2.0)
        assert {sample.status for sample in job.result()} == {Status.ABORTED}


def test_a_look_up_that_hangs_is_no_reason_to_wait(client_to: MakeClient, hanging_resolver: threading.Event) -> None:
    """Nor is it the sample's end: after the connect timeout (10 s by default: overridden) it goes to another engine."""
    with ScriptedEngine(echo, closing=True) as engine, ScriptedEngine(echo) as other:
        timeouts = Timeouts(connect_s=0.3, control_s=0.5)
        client = client_to(f"http://localhost:{engine.server.port}", timeouts=timeouts)
        check(client.generate([[5, 6]])[0], [5, 6])
        await_parting(engine.server.port)
        hanging_resolver.set()
        job = client.start([[7, 8]])
        client.add_engine(other.url)
        with within(5.0):  # the resolver hangs for ten
            check(job.result()[0], [7, 8])
        assert job.result()[0].engine == other.url
