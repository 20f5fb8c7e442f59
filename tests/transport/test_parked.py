"""Requests that no thread waits for: the usher's thread reads their answers, and nothing holds it up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any, cast

import pytest

from rolloutsync.clock import Deadline
from rolloutsync.errors import Cut, Phase, TransportError
from rolloutsync.transport import Pending, Transport, lean
from rolloutsync.transport import usher as module
from rolloutsync.transport.usher import Usher
from tests.transport.kit import CLOCK, Caller
from tests.wire import (
    Script,
    WireServer,
    answer,
    close,
    drip,
    eventually,
    head_of,
    read_request,
    reset,
    send,
    serve,
    silence,
    wait_for,
)

MakeCaller = Callable[..., Caller]
OK = head_of(b"ok") + b"ok"


@pytest.fixture(autouse=True)
def each_is_parked(monkeypatch: pytest.MonkeyPatch, transport_path: str) -> None:
    """Also a single one. The plain path has nothing to do with all this."""
    if transport_path == "plain":
        pytest.skip("there the session makes each request")
    monkeypatch.setattr("rolloutsync.transport.registry._FEW", 0)


class Left:
    """A request that was sent and left to the usher."""

    def __init__(self, transport: Transport, pending: Pending) -> None:
        self._transport = transport
        self._pending = pending
        self.told: Queue[bool] = Queue()
        self.threads: list[str] = []
        self.parked = transport.park(pending, self._landed)

    def _landed(self, whole: bool) -> Callable[[], None]:
        self.threads.append(threading.current_thread().name)
        return lambda: self.told.put(whole)

    @property
    def whole(self) -> bool:
        """What the usher says of it, once it has read what it can. Before that nobody may finish it."""
        assert self.parked
        return self.told.get(timeout=10.0)

    def finish(self) -> tuple[int, bytes]:
        with self._transport.finish(self._pending) as reply:
            return reply.status, bytes(reply.body)

    def fails(self) -> TransportError:
        with pytest.raises(TransportError) as caught:
            self._transport.finish(self._pending)
        assert self.told.empty()
        return caught.value


def sent(caller: Caller, body: bytes = b"{}", *, block: bool = True, seconds: float = 10.0) -> Pending | None:
    return caller.transport.send_off(
        url=caller.url + "/generate",
        headers={},
        body=body,
        engine=caller.url,
        deadline=Deadline.after(CLOCK, seconds),
        rid="rid",
        relieve=(lambda: None) if block else None,
    )


def left(caller: Caller, *, seconds: float = 10.0) -> Left:
    return Left(caller.transport, cast("Pending", sent(caller, seconds=seconds)))


# --- what comes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        [answer(b"ok")],
        [send(OK[:9]), send(OK[9:-1]), send(OK[-1:])],
        [drip(OK, 0.001)],
    ],
    ids=["at once", "in pieces", "byte by byte"],
)
def test_a_whole_answer(call_to: MakeCaller, script: Script) -> None:
    """It can be finished without blocking, and its connection serves the next one."""
    with WireServer([read_request, *script, read_request, *script]) as server:
        caller = call_to(server.url)
        for _ in range(2):
            one = left(caller)
            assert one.whole
            assert one.finish() == (200, b"ok")
            assert one.threads == [threading.current_thread().name.replace("MainThread", "rolloutsync-test-usher")]
        assert server.accepted == 1


def test_an_answer_that_is_there_already(call_to: MakeCaller) -> None:
    """It came before anybody was told to look for it."""
    with WireServer([read_request, answer(b"ok")]) as server:
        caller = call_to(server.url)
        pending = cast("Pending", sent(caller))
        made = cast("Usher", caller.transport._usher)
        eventually(lambda: bool(made._edges | made._ends), "its edge was seen")
        one = Left(caller.transport, pending)
        assert one.whole
        assert one.finish() == (200, b"ok")


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ([answer(b"no", "503 Service Unavailable")], (503, b"no")),
        ([answer(b"x" * 100_000)], (200, b"x" * 100_000)),
        ([answer(b"ok", "200 OK", "Connection: close"), close], (200, b"ok")),
        ([send(b"HTTP/1.1 100 Continue\r\n\r\n"), answer(b"ok")], (200, b"ok")),
        ([send(OK + b"more")], (200, b"ok")),
    ],
    ids=["an error", "a large one", "the last", "an interim one", "too much"],
)
def test_an_answer_that_a_thread_must_read(call_to: MakeCaller, script: Script, what: tuple[int, bytes]) -> None:
    """Or judge: whatever is not whole, usual, short and a success."""
    with WireServer([read_request, *script], [read_request, *script]) as server:
        caller = call_to(server.url)
        one = left(caller)
        assert not one.whole
        assert one.finish() == what


@pytest.mark.parametrize(
    ("script", "phase"),
    [
        ([close], Phase.SENT),
        ([reset], Phase.SENT),
        ([send(OK[:9]), close], Phase.BODY),
        ([send(OK[:-1]), reset], Phase.BODY),
        ([send(head_of(b"x" * 100_000) + b"x"), close], Phase.BODY),
    ],
    ids=["nothing", "reset", "part of a head", "part of a body", "part of a large body"],
)
@pytest.mark.parametrize("before", [False, True], ids=["while parked", "before it was"])
def test_an_answer_that_breaks_off(call_to: MakeCaller, script: Script, phase: Phase, before: bool) -> None:
    """Whoever finishes it is told how far it had come, also where one look has to see all of it."""
    go = threading.Event()
    with WireServer([read_request, wait_for(go), *script]) as server:
        caller = call_to(server.url)
        pending = cast("Pending", sent(caller))
        made = cast("Usher", caller.transport._usher)
        if before:
            go.set()
            eventually(lambda: bool(made._ends), "its end was seen")
        one = Left(caller.transport, pending)
        go.set()
        assert not one.whole
        error = one.fails()
        assert (error.phase, error.cut) == (phase, None)


def test_the_keep_alive_race(call_to: MakeCaller) -> None:
    """The connection was closed just as the second request was sent on it."""
    with WireServer([read_request, answer(b"ok"), read_request, close]) as server:
        caller = call_to(server.url)
        first = left(caller)
        assert first.whole
        assert first.finish() == (200, b"ok")
        one = left(caller)
        assert not one.whole
        assert one.fails().phase is Phase.RACE


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_a_cut_while_nobody_waits(call_to: MakeCaller) -> None:
    """As if a thread had."""
    with WireServer([read_request, silence]) as server:
        caller = call_to(server.url)
        one = left(caller)
        eventually(lambda: len(server.requests) == 1, "it is there")
        assert caller.transport.cut(lambda exchange: exchange.rid == "rid", Cut.DEAD) == 1
        assert not one.whole
        assert one.fails().cut is Cut.DEAD


def test_its_deadline(call_to: MakeCaller) -> None:
    """A silence and a drip end in time."""
    with WireServer([read_request, silence], [read_request, drip(OK[:-1] + b" " * 99, 0.05)]) as server:
        caller = call_to(server.url)
        for one in [left(caller, seconds=0.5), left(caller, seconds=0.5)]:
            assert not one.whole
            assert one.fails().cut is Cut.DEADLINE


def test_the_end_of_the_transport(call_to: MakeCaller) -> None:
    """Everybody is told, in the usher's thread or in the closing one; nothing can be left any more."""
    with WireServer(*([[read_request, silence]] * 5)) as server:
        caller = call_to(server.url)
        many = [left(caller) for _ in range(4)]
        late = cast("Pending", sent(caller))
        assert caller.transport.close(5.0) == []
        assert [one.whole for one in many] == [False] * 4
        assert {one.fails().cut for one in many} == {Cut.CLOSE}
        last = Left(caller.transport, late)
        assert not last.parked
        assert last.fails().cut is Cut.CLOSE


def test_an_error_of_our_own_while_sending(call_to: MakeCaller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request may be out, so it is not made again: the error is what came of it, and its socket is closed."""

    def sends_and_fails(*args: Any) -> None:
        lean.send(*args)
        raise MemoryError("no memory to note that it was sent")

    with WireServer([read_request, silence]) as server:
        caller = call_to(server.url)
        monkeypatch.setattr("rolloutsync.transport.transport.send", sends_and_fails)
        one = Left(caller.transport, cast("Pending", sent(caller)))
        assert not one.parked
        with pytest.raises(MemoryError):
            one.finish()
        server.await_ended(1)
        assert server.paths() == ["/generate"]
        assert not caller.transport._registry._exchanges


# --- what is not sent off ---------------------------------------------------------------------------------------------


def test_nothing_is_sent_where_that_might_block(call_to: MakeCaller) -> None:
    """Not without a connection, not if it is large; and what was not sent leaves no trace."""
    with WireServer([serve(lambda _: OK)]) as server:
        caller = call_to(server.url)
        assert sent(caller, block=False) is None
        assert server.accepted == 0
        assert caller.post() == b"ok"
        assert sent(caller, b"x" * 20_000, block=False) is None
        one = Left(caller.transport, cast("Pending", sent(caller, block=False)))
        assert one.whole
        assert one.finish() == (200, b"ok")
        assert server.accepted == 1
        assert not caller.transport._registry._exchanges


def test_few_are_quickest_in_threads(call_to: MakeCaller, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is sent with a time that is over."""
    with WireServer([serve(lambda _: OK)]) as server:
        caller = call_to(server.url)
        assert sent(caller, seconds=0.0) is None
        assert caller.transport.parks(caller.url)
        assert not caller.transport.parks(caller.url.replace("http:", "https:"))
        monkeypatch.setattr("rolloutsync.transport.registry._FEW", 2)
        assert not caller.transport.parks(caller.url)


def test_a_deadline_that_nobody_watches(call_to: MakeCaller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives no thread for that: whoever sends it waits itself, with a limit on its socket."""
    monkeypatch.setattr("rolloutsync.transport.registry._CROWD", -1)
    with WireServer([read_request, silence]) as server:
        caller = call_to(server.url)
        monkeypatch.setattr(caller.transport._registry, "_try_start", lambda: None)
        assert sent(caller) is None
        assert caller.fails(seconds=0.3).cut is Cut.DEADLINE
        assert len(server.requests) == 1


def test_a_connection_that_cannot_be_made(call_to: MakeCaller) -> None:
    """That is an error like any other: it is there to be finished, and cannot be left."""
    with WireServer([]) as server:
        url = server.url
    one = left(call_to(url))
    assert not one.parked
    assert one.fails().phase is Phase.REFUSED


# --- the usher's thread -----------------------------------------------------------------------------------------------


class Watched:
    """Something parked, that reads a byte at each look."""

    def __init__(self, usher: Usher, sock: socket.socket, fault: Exception | None = None) -> None:
        self._usher = usher
        self._sock = sock
        self._fault = fault
        self.looks: Queue[bytes] = Queue()
        self.left = threading.Event()

    def look(self) -> bool:
        if self._fault is not None:
            raise self._fault
        self.looks.put(self._sock.recv(1))
        return not self._usher.park(self._sock.fileno(), self)

    def leave(self) -> None:
        self.left.set()


@pytest.fixture
def usher() -> Iterator[Usher]:
    made = Usher("rolloutsync-test-usher")
    yield made
    assert made.close(5.0) == []


def test_a_look_that_fails(usher: Usher, caplog: pytest.LogCaptureFixture) -> None:
    """It is a bug of ours: the thread lives on for the others, and whoever is concerned is told."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        bad, good = Watched(usher, ours, ZeroDivisionError()), Watched(usher, theirs)
        for sock, one in ((ours, bad), (theirs, good)):
            usher.watch(sock, known=False)
            assert usher.park(sock.fileno(), one)
        theirs.sendall(b"x")
        assert bad.left.wait(10.0)
        ours.sendall(b"y")
        assert good.looks.get(timeout=10.0) == b"y"
    assert [record.message for record in caplog.records] == ["an answer could not be taken in"]
    caplog.clear()


def test_it_stays_while_something_is_parked(usher: Usher, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long nothing comes; then it goes, and is there again for the next one."""
    monkeypatch.setattr(module, "_IDLE_EXIT_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        usher.watch(ours, known=False)
        first = usher._thread
        one = Watched(usher, ours)
        assert usher.park(ours.fileno(), one)
        for sign in (b"a", b"b"):
            assert not one.left.wait(0.2)
            theirs.sendall(sign)
            assert one.looks.get(timeout=10.0) == sign
        assert usher._thread is first
