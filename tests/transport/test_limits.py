"""Many at once: connects, large bodies, threads, processes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rolloutsync.errors import Cut, Phase, TransportError
from tests.background import in_thread
from tests.processes import run
from tests.transport.kit import Caller, all_at_once, reservations
from tests.wire import (
    Request,
    WireServer,
    answer,
    close,
    eventually,
    head_of,
    read_request,
    send,
    serve,
    silence,
    wait_for,
)

MakeCaller = Callable[..., Caller]
MIB = 1 << 20


@pytest.mark.slow
def test_connects_are_capped_for_each_engine(call_to: MakeCaller) -> None:
    """B04: 256 threads start together at a server with a short queue and a slow accept; at most 64 connect at once."""
    peak = _Peak()
    accepting = threading.Event()
    with WireServer([read_request, answer(b"ok"), close], backlog=8, accepting=accepting) as server:
        caller = call_to(server.url, connect_s=20.0)
        peak.watch(caller)
        calls = all_at_once([lambda: _stubborn(caller)] * 256)
        eventually(lambda: peak.now >= 50, "connects wait in the queue")
        accepting.set()
        assert [call.result(60.0) for call in calls] == [b"ok"] * 256
    assert peak.most <= 64


def _stubborn(caller: Caller) -> bytes:
    """A queue that overflows may reset a connection that it had accepted: called again, as a client would."""
    while True:
        try:
            return caller.post(seconds=60.0)
        except TransportError as error:
            if error.cut is not None:
                raise


class _Peak:
    """How many connects run at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = 0

    def watch(self, caller: Caller) -> None:
        """Counts inside socket.connect, by way of the loopback guard of all tests."""
        import socket

        connect = socket.socket.connect

        def counted(sock: socket.socket, address: tuple[str, int]) -> None:
            with self._lock:
                self.now += 1
                self.most = max(self.most, self.now)
            try:
                connect(sock, address)
            finally:
                with self._lock:
                    self.now -= 1

        socket.socket.connect = counted  # type: ignore[method-assign, assignment]  # undone by the autouse guard


def test_large_bodies_stay_within_the_budget(call_to: MakeCaller) -> None:
    """Twelve answers of 2 MiB with a budget of 5 MiB: never more than two are read at once, all arrive."""
    body = bytes(2 * MIB)
    with WireServer([serve(lambda _: head_of(body) + body)]) as server:
        caller = call_to(server.url, budget_bytes=5 * MIB)
        budget = caller.transport._budget
        seen = reservations(budget)
        calls = all_at_once([lambda: len(caller.post(seconds=30.0))] * 12)
        assert {call.result(30.0) for call in calls} == {2 * MIB}
        assert len(seen) == 12
        assert max(seen) <= 5 * MIB
        assert budget._reserved == 0


def test_a_body_above_the_whole_budget_passes_alone(call_to: MakeCaller) -> None:
    """Three bodies of 4 MiB with a budget of 1 MiB."""
    body = bytes(4 * MIB)
    with WireServer([serve(lambda _: head_of(body) + body)]) as server:
        caller = call_to(server.url, budget_bytes=MIB)
        calls = all_at_once([lambda: len(caller.post(seconds=30.0))] * 3)
        assert [call.result(30.0) for call in calls] == [4 * MIB] * 3


def test_waiting_for_the_budget_ends_at_a_cut_and_at_the_deadline(call_to: MakeCaller) -> None:
    """A body that finds no room does not hang; what it had not reserved it does not give back."""
    body = bytes(2 * MIB)
    free = threading.Event()
    slow = [read_request, send(head_of(body)), wait_for(free), send(body), silence]
    with WireServer(slow, [serve(lambda _: head_of(body) + body)]) as server:
        caller = call_to(server.url, budget_bytes=3 * MIB)
        budget = caller.transport._budget
        first = in_thread(lambda: len(caller.post(seconds=30.0)))
        eventually(lambda: budget._reserved == 2 * MIB, "the first body is reserved")
        assert caller.fails(seconds=0.4).cut is Cut.DEADLINE
        second = in_thread(lambda: caller.fails(seconds=30.0, rid="second"))
        server.await_requests(3)
        caller.transport.cut(lambda exchange: exchange.rid == "second", Cut.DRAIN)
        assert second.result(2.0).cut is Cut.DRAIN
        assert budget._reserved == 2 * MIB
        free.set()
        assert first.result(5.0) == 2 * MIB
        assert budget._reserved == 0


def test_a_broken_large_body_gives_its_budget_back(call_to: MakeCaller) -> None:
    """Whatever ends a large body frees its share."""
    body = bytes(2 * MIB)
    with WireServer([read_request, send(head_of(body) + body[:MIB]), close]) as server:
        caller = call_to(server.url, budget_bytes=3 * MIB)
        assert caller.fails().phase is Phase.BODY
        assert caller.transport._budget._reserved == 0


def test_hammer(call_to: MakeCaller) -> None:
    """64 threads, 2000 requests, a server that sometimes closes instead of answering: no answer is another's."""
    chance = random.Random(20260729)
    lock = threading.Lock()

    def echo(request: Request) -> bytes:
        with lock:
            drop = chance.random() < 0.03
        body = request.headers["x-id"].encode()
        return b"" if drop else head_of(body) + body

    with WireServer([serve(echo)]) as server:
        caller = call_to(server.url)

        def one(number: int) -> bool:
            name = f"id-{number}"
            while True:
                try:
                    return caller.post(headers={"X-Id": name}) == name.encode()
                except TransportError as error:
                    assert error.phase in {Phase.RACE, Phase.SENT}  # noqa: PT017 - nothing else may happen here
                    assert error.cut is None  # noqa: PT017

        with ThreadPoolExecutor(64) as pool:
            assert all(pool.map(one, range(2000)))


FORK = """
import os, threading
from tests.background import in_thread
from tests.transport.kit import Caller, make_transport
from tests.wire import WireServer, head_of, play, read_request, send, tell, wait_for

slow_came, go = threading.Event(), threading.Event()

def steps(request):
    body = request.headers["x-id"].encode()
    if request.path == "/slow":
        return [tell(slow_came), wait_for(go, 20.0), send(head_of(body) + body)]
    return [send(head_of(body) + body)]

def sockets():
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {os.readlink(path) for path in paths if os.path.exists(path)}

with WireServer([play(steps)]) as server:
    caller = Caller(make_transport(), server.url)
    caller.post(headers={"X-Id": "warm"})
    slow = in_thread(lambda: caller.post(path="/slow", headers={"X-Id": "slow"}, seconds=20.0))
    assert slow_came.wait(5.0)
    inodes = [os.fstat(c.sock.fileno()).st_ino for c in caller.transport._registry._connections if c.sock]
    clients = {f"socket:[{inode}]" for inode in inodes}
    assert clients and clients <= sockets()
    child = os.fork()
    if child == 0:
        caller.transport.abandon()
        left = clients & sockets()
        own = Caller(make_transport(), server.url)
        good = all(own.post(headers={"X-Id": f"c{n}"}) == b"c%d" % n for n in range(50))
        os._exit(0 if good and not left else 1)
    good = all(caller.post(headers={"X-Id": f"p{n}"}) == b"p%d" % n for n in range(50))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go.set()
    assert slow.result(10.0) == b"slow"
    caller.transport.close(2.0)
    print("parent", good, "child", code)
"""


def test_a_forked_child_has_sockets_of_its_own() -> None:
    """B31: both processes get their own answers, the parent's call in flight survives, the child keeps no socket."""
    done = run(FORK)
    assert done.stdout.strip() == "parent True child 0", done.stderr
