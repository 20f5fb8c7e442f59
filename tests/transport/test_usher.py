"""The usher: every thread gets its answer, whatever edges come and go, and nobody depends on it for ever."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from rolloutsync.errors import Cut, Phase
from rolloutsync.transport import usher as module
from rolloutsync.transport.usher import Usher
from tests.background import in_thread
from tests.transport.kit import Caller, all_at_once
from tests.wire import WireServer, answer, eventually, read_request, serve, silence, wait_for

_epoll = select.epoll
MakeCaller = Callable[..., Caller]
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def usher() -> Iterator[Usher]:
    made = Usher("rolloutsync-test-usher")
    yield made
    assert made.close(5.0) == []


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _waits(usher: Usher, count: int = 1) -> None:
    eventually(lambda: len(usher._waiting) == count, "the thread waits")


def test_an_answer_that_is_there_already(usher: Usher, pair: Pair) -> None:
    """It came between the request and the wait."""
    ours, theirs = pair
    usher.watch(ours, known=False)
    theirs.sendall(b"early")
    eventually(lambda: ours.fileno() in usher._edges, "the edge has been seen")
    assert usher.receive(ours, 100) == b"early"


def test_an_answer_that_comes_later(usher: Usher, pair: Pair) -> None:
    """The thread sleeps until then; several requests on one socket need one registration."""
    ours, theirs = pair
    for number in range(3):
        usher.watch(ours, known=number > 0)
        waiting = in_thread(lambda: usher.receive(ours, 100))
        _waits(usher)
        theirs.sendall(b"%d" % number)
        assert waiting.result(5.0) == b"%d" % number


def test_an_old_edge_is_no_answer(usher: Usher, pair: Pair) -> None:
    """An edge without bytes behind it sends the thread back to wait, without the ticket."""
    ours, theirs = pair
    usher.watch(ours, known=False)
    usher._edges.add(ours.fileno())
    waiting = in_thread(lambda: usher.receive(ours, 100))
    _waits(usher)
    assert usher._granted == 0
    theirs.sendall(b"new")
    assert waiting.result(5.0) == b"new"


def test_hundreds_at_once(usher: Usher) -> None:
    """Each thread gets its own answer, and all tickets come back."""
    pairs = [socket.socketpair() for _ in range(200)]
    for ours, _ in pairs:
        usher.watch(ours, known=False)
    waiting = [in_thread(partial(usher.receive, ours, 100)) for ours, _ in pairs]
    _waits(usher, len(pairs))
    for number, (_, theirs) in enumerate(pairs):
        theirs.sendall(b"%d" % number)
    assert [one.result(10.0) for one in waiting] == [b"%d" % number for number in range(len(pairs))]
    assert (usher._granted, usher._waiting, list(usher._called)) == (0, {}, [])
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_a_socket_that_is_shut_wakes_its_thread(usher: Usher, pair: Pair) -> None:
    """By a cut of ours as well as by the peer."""
    ours, _ = pair
    usher.watch(ours, known=False)
    waiting = in_thread(lambda: usher.receive(ours, 100))
    _waits(usher)
    socket.socket.shutdown(ours, socket.SHUT_RDWR)
    assert waiting.result(5.0) == b""


def test_patience_ends(usher: Usher, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has become of the usher, a thread asks its socket itself after a while."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(usher, "_run", lambda: None)  # a thread that ends at once and leaves no word
    ours, theirs = pair
    usher.watch(ours, known=False)
    waiting = in_thread(lambda: usher.receive(ours, 100))
    theirs.sendall(b"seen")
    assert waiting.result(5.0) == b"seen"


def test_no_thread_to_be_had(usher: Usher, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then every thread asks its socket itself."""

    def refuse(*_: object) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "start_thread", refuse)
    ours, theirs = pair
    usher.watch(ours, known=False)
    theirs.sendall(b"seen")
    assert usher.receive(ours, 100) == b"seen"


def test_its_thread_ends_when_nobody_waits(usher: Usher, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another begins with the next request."""
    monkeypatch.setattr(module, "_IDLE_EXIT_S", 0.02)
    ours, theirs = pair
    for number in range(2):
        usher.watch(ours, known=number > 0)
        waiting = in_thread(lambda: usher.receive(ours, 100))
        _waits(usher)
        theirs.sendall(b"x")
        assert waiting.result(5.0) == b"x"
        eventually(lambda: usher._thread is None, "the thread has ended")


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_alone(usher: Usher, pair: Pair) -> None:
    """It closes its own copies of the descriptors; the parent's threads are woken as before."""
    ours, theirs = pair
    usher.watch(ours, known=False)
    waiting = in_thread(lambda: usher.receive(ours, 100))
    _waits(usher)
    child = os.fork()
    if child == 0:
        usher.abandon()
        os._exit(0)
    os.waitpid(child, 0)
    theirs.sendall(b"still here")
    assert waiting.result(5.0) == b"still here"


def test_an_end_that_came_before_the_request_is_not_forgotten(usher: Usher, pair: Pair) -> None:
    """The peer has closed its half between the pool's look at the socket and the watch."""
    ours, theirs = pair
    usher.watch(ours, known=False)
    theirs.shutdown(socket.SHUT_WR)
    eventually(lambda: ours.fileno() in usher._ends, "the end has been seen")
    usher.watch(ours, known=True)
    assert usher.receive(ours, 100) == b""


def test_an_end_of_another_socket_with_the_same_descriptor_is_forgotten(usher: Usher, pair: Pair) -> None:
    """Which had its number before."""
    ours, theirs = pair
    usher._ends.add(ours.fileno())
    usher.watch(ours, known=False)
    assert usher._ends == set()
    theirs.sendall(b"x")
    assert usher.receive(ours, 100) == b"x"


# --- in a transport ---------------------------------------------------------------------------------------------------


def test_slow_answers_hold_nobody_up(call_to: MakeCaller, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stops in the middle of its head, one in its body: the ticket is for the first read alone."""
    monkeypatch.setattr("rolloutsync.transport.registry._CROWD", -1)
    stuck = threading.Event()
    head = [read_request, lambda peer: peer.send(b"HTTP/1.1 200 OK\r\nContent"), wait_for(stuck)]
    body = [read_request, lambda peer: peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"), wait_for(stuck)]
    with WireServer(head, body, [serve(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")]) as server:
        caller = call_to(server.url)
        slow = [in_thread(lambda: caller.fails(seconds=30.0, rid="slow")) for _ in range(2)]
        eventually(lambda: server.accepted == 2, "both are there")
        assert [caller.post(seconds=5.0) for _ in range(3)] == [b"ok"] * 3
        assert caller.transport.cut(lambda exchange: exchange.rid == "slow", Cut.ABORT) == 2
        assert [one.result(5.0).cut for one in slow] == [Cut.ABORT] * 2
        stuck.set()


def test_a_crowd_is_let_in(call_to: MakeCaller, transport_path: str) -> None:
    """With more in flight than the limit the usher is there, and a cut ends what waits for it."""
    with WireServer(*([[read_request, silence]] * 140), [read_request, answer(b"ok")]) as server:
        caller = call_to(server.url)
        waiting = all_at_once([lambda: caller.fails(seconds=60.0)] * 140)
        eventually(lambda: len(server.requests) == 140, "all are there")
        made = caller.transport._usher
        assert made is not None
        if transport_path != "plain":
            eventually(lambda: len(made._waiting) > 0, "some of them wait for the usher")
        caller.transport.cut(lambda _: True, Cut.ABORT)
        assert {(one.result(10.0).cut, one.result().phase) for one in waiting} == {(Cut.ABORT, Phase.SENT)}


@pytest.mark.parametrize("what", ["epoll", "register"])
def test_no_descriptor_for_the_usher(call_to: MakeCaller, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """B34: then threads ask their sockets themselves: nothing breaks, nobody is blamed, nobody waits for patience."""
    monkeypatch.setattr("rolloutsync.transport.registry._CROWD", -1)

    class Full:
        def __init__(self) -> None:
            if what == "epoll":
                raise OSError(errno.EMFILE, "Too many open files")
            self.inner = _epoll()

        def register(self, descriptor: int, events: int) -> None:
            if events == module._READY:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.inner.register(descriptor, events)

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

    monkeypatch.setattr(select, "epoll", Full)
    with WireServer([serve(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")]) as server:
        caller = call_to(server.url)
        assert [caller.post(seconds=5.0) for _ in range(3)] == [b"ok"] * 3
        assert server.accepted == 1
