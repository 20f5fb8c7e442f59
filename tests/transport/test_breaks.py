"""Every way in which an exchange breaks: how far it had come, that its socket is gone, and that it ends in time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import pytest

from rolloutsync.errors import Cut, Phase, TransportError
from rolloutsync.transport import Lane
from tests.background import in_thread
from tests.kernel import client_states
from tests.steps import NEVER_ENDING, read_slowly
from tests.transport.kit import CLOCK, Caller
from tests.wire import (
    Peer,
    Script,
    WireServer,
    answer,
    answer_chunked,
    close,
    eventually,
    head_of,
    read_request,
    reset,
    send,
    silence,
    tell,
    truncated,
    wait_for,
)

MakeCaller = Callable[..., Caller]
MIB = 1 << 20
BODY = b"x" * 177
AGAIN: Script = [read_request, answer(b"again")]


def assert_socket_gone(server: WireServer, caller: Caller) -> None:
    """The socket that broke is closed on this side, and the next call has another."""
    eventually(lambda: client_states(server.port) == [], "the broken socket is closed", 2.0)
    assert caller.post() == b"again"


@pytest.mark.parametrize(
    ("script", "phase"),
    [
        ([read_request, close], Phase.SENT),
        ([read_request, reset], Phase.SENT),
        ([read_request, send(b"HTTP/1."), close], Phase.BODY),
        ([read_request, send(b"HTTP/1.1 200 OK\r\nContent-Le"), close], Phase.BODY),
        ([read_request, send(b"SSH-2.0-OpenSSH_9.6\r\n"), close], Phase.BODY),
        ([read_request, truncated(BODY, 60), close], Phase.BODY),
        ([read_request, truncated(BODY, 0), close], Phase.BODY),
        ([read_request, truncated(BODY, 60), reset], Phase.BODY),
        ([read_request, answer_chunked(BODY, last=False), close], Phase.BODY),
        ([read_request, send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), close], Phase.BODY),
        (
            [read_request, send(head_of(b"0123456789", "200 OK", "Content-Encoding: gzip") + b"0123456789"), silence],
            Phase.BODY,
        ),
    ],
    ids=[
        *("fin", "reset", "half a status line", "half a header", "another protocol", "short body", "no body"),
        *("reset in body", "no last chunk", "bad chunk", "bad gzip"),
    ],
)
def test_a_break_has_the_right_phase_and_closes_the_socket(
    call_to: MakeCaller, script: Sequence[Callable[[Peer], None]], phase: Phase
) -> None:
    """B06: all of these are transport errors, none is a result."""
    with WireServer(script, AGAIN) as server:
        caller = call_to(server.url)
        error = caller.fails(rid="ours")
        assert (error.phase, error.cut, error.rid, error.engine) == (phase, None, "ours", server.url)
        assert_socket_gone(server, caller)


def test_half_a_status_line_before_a_reset_counts_as_bytes_back(call_to: MakeCaller) -> None:
    """On a reused socket: the engine had begun to answer, so this is no keep-alive race."""
    sent = threading.Event()
    reading = threading.Event()
    script = [read_request, answer(b"1"), read_request, send(b"HTTP/1."), tell(sent), wait_for(reading), reset]
    with WireServer(script, AGAIN) as server:
        caller = call_to(server.url)
        caller.post()
        call = in_thread(caller.fails)
        assert sent.wait(5.0)
        eventually(lambda: _unread(server.port) == 0, "the client has taken the half line")
        reading.set()
        assert call.result(5.0).phase is Phase.BODY


def _unread(port: int) -> int:
    """Bytes in the receive queues of the client ends."""
    with open("/proc/net/tcp", encoding="ascii") as table:  # noqa: PTH123
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if int(row[2].rpartition(":")[2], 16) == port)


@pytest.mark.parametrize("end", [close, reset])
def test_a_reused_socket_that_breaks_without_a_byte_is_a_race(call_to: MakeCaller, end: Callable[[Peer], None]) -> None:
    """B01: the server may have closed it just before our request."""
    with WireServer([read_request, answer(b"1"), read_request, end], AGAIN) as server:
        caller = call_to(server.url)
        caller.post()
        error = caller.fails()
        assert (error.phase, error.cut) == (Phase.RACE, None)
        assert_socket_gone(server, caller)


def test_a_reused_socket_that_breaks_late_is_no_race(call_to: MakeCaller) -> None:
    """After more than a second without a byte the engine has our request: it may be running."""
    late = threading.Event()
    with WireServer([read_request, answer(b"1"), read_request, wait_for(late), reset], AGAIN) as server:
        caller = call_to(server.url)
        caller.post()
        call = in_thread(caller.fails)
        server.await_requests(2)
        until = CLOCK.monotonic() + 1.05
        eventually(lambda: CLOCK.monotonic() > until, "more than a second")
        late.set()
        assert call.result(5.0).phase is Phase.SENT


def test_a_fresh_call_never_reuses(call_to: MakeCaller) -> None:
    """``fresh`` takes a new socket though an idle one is there."""
    with WireServer([read_request, answer(b"1"), silence], AGAIN) as server:
        caller = call_to(server.url)
        caller.post()
        assert caller.post(fresh=True) == b"again"
        assert server.accepted == 2


def test_a_socket_that_the_server_closed_while_idle_is_replaced_silently(call_to: MakeCaller) -> None:
    """B01, variant a: a FIN that came before our request is seen, and nobody notices."""
    with WireServer([read_request, answer(b"1"), close], AGAIN) as server:
        caller = call_to(server.url)
        caller.post()
        eventually(lambda: client_states(server.port) == ["CLOSE_WAIT"], "the FIN has come")
        assert caller.post() == b"again"


def test_a_refused_connect(call_to: MakeCaller) -> None:
    """Nobody listens: nothing was sent."""
    with WireServer(AGAIN) as server:
        caller = call_to(server.url)
    error = caller.fails()
    assert (error.phase, error.cut) == (Phase.REFUSED, None)
    assert "refused" in str(error)


def test_a_refused_reconnect_is_refused(call_to: MakeCaller) -> None:
    """The same after earlier calls: what counts is this call."""
    with WireServer([read_request, answer(b"1"), close]) as server:
        caller = call_to(server.url)
        caller.post()
        eventually(lambda: client_states(server.port) == ["CLOSE_WAIT"], "the FIN has come")
    assert caller.fails().phase is Phase.REFUSED


def test_the_phase_is_this_calls_own(call_to: MakeCaller) -> None:
    """A call made while another's error is being handled is not taken for that one."""
    with WireServer([read_request, reset], AGAIN) as server:
        caller = call_to(server.url)
        first = caller.fails()
    try:
        raise first
    except TransportError:
        assert caller.fails().phase is Phase.REFUSED


def test_a_connect_that_nobody_answers_times_out(call_to: MakeCaller) -> None:
    """A full listen queue: the connect ends after connect_s, not at the deadline."""
    with _FullQueue() as url:
        caller = call_to(url, connect_s=0.4)
        began = CLOCK.monotonic()
        error = caller.fails(seconds=20.0)
        assert (error.phase, error.cut) == (Phase.CONNECT, None)
        assert CLOCK.monotonic() - began < 2.0


def test_a_deadline_during_the_connect(call_to: MakeCaller) -> None:
    """The deadline ends a connect too, and is told as one."""
    with _FullQueue() as url:
        caller = call_to(url, connect_s=20.0)
        began = CLOCK.monotonic()
        error = caller.fails(seconds=0.4)
        assert (error.phase, error.cut) == (Phase.CONNECT, Cut.DEADLINE)
        assert CLOCK.monotonic() - began < 1.4


def test_a_host_name_that_does_not_exist(call_to: MakeCaller) -> None:
    """Nothing was sent."""
    assert call_to("http://host.invalid:1").fails().phase is Phase.CONNECT


class _FullQueue:
    """A listening socket whose queue is full, so that further connects hang."""

    def __enter__(self) -> str:
        self._sockets = [socket.create_server(("127.0.0.1", 0), backlog=0)]
        address = self._sockets[0].getsockname()
        for _ in range(2):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(address)
            self._sockets.append(sock)
        return f"http://127.0.0.1:{address[1]}"

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            sock.close()


ENDLESS = b"x" * 1000


def test_a_deadline_ends_every_kind_of_waiting(call_to: MakeCaller) -> None:
    """B02, B03: within a second after the deadline, as a deadline, and the socket is not used again."""
    cases = [(name, lane) for name in NEVER_ENDING for lane in Lane]
    calls = [in_thread(lambda case=case: _ends_in_time(call_to, *case)) for case in cases]  # type: ignore[misc]
    assert [call.result(10.0) for call in calls] == cases


def _ends_in_time(call_to: MakeCaller, name: str, lane: Lane) -> tuple[str, Lane]:
    with WireServer([read_request, *NEVER_ENDING[name]], AGAIN) as server:
        caller = call_to(server.url)
        began = CLOCK.monotonic()
        error = caller.fails(lane=lane, seconds=0.5)
        assert 0.4 < CLOCK.monotonic() - began < 1.5, name
        assert error.cut is Cut.DEADLINE, name
        assert error.phase in {Phase.SENT, Phase.BODY}, name
        assert_socket_gone(server, caller)
    return name, lane


def test_a_request_that_nobody_takes_ends_at_the_deadline(call_to: MakeCaller) -> None:
    """The server reads nothing of a large request: sending ends in time too."""
    stop = threading.Event()
    with WireServer([wait_for(stop)]) as server:
        caller = call_to(server.url)
        for lane in Lane:
            began = CLOCK.monotonic()
            error = caller.fails(body=b"x" * (32 << 20), lane=lane, seconds=0.5)
            assert (error.cut, CLOCK.monotonic() - began < 1.5) == (Cut.DEADLINE, True)
        stop.set()


def test_a_slow_upload_outlives_the_connect_timeout(call_to: MakeCaller) -> None:
    """A healthy server that takes five times connect_s for a large control request is not cut."""
    total = 8 * MIB
    with WireServer([read_slowly(total, 8, 0.06), silence]) as server:
        error = call_to(server.url, connect_s=0.1).fails(body=b"x" * total, lane=Lane.CONTROL, seconds=0.9)
        assert (error.phase, error.cut) == (Phase.SENT, Cut.DEADLINE)


def test_an_expired_deadline_sends_nothing(call_to: MakeCaller) -> None:
    """No time left is an error of the ordinary kind, and no request."""
    with WireServer(AGAIN) as server:
        error = call_to(server.url).fails(seconds=0.0)
        assert (error.phase, error.cut) == (Phase.CONNECT, Cut.DEADLINE)
        assert server.accepted == 0


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "story",
    [[silence], [send(head_of(ENDLESS) + b"x" * 60), silence], [send(b"HTTP/1.1 200 OK\r\n\r\npart"), silence]],
    ids=["head", "body", "close-delimited body"],
)
def test_a_cut_wakes_a_blocked_reader_at_once(call_to: MakeCaller, story: Script) -> None:
    """The reader raises with the cut's reason; it never takes what it has so far for the answer."""
    waiting = threading.Event()
    with WireServer([read_request, *story[:-1], tell(waiting), story[-1]], AGAIN) as server:
        caller = call_to(server.url)
        call = in_thread(lambda: caller.fails(rid="a", seconds=60.0))
        assert waiting.wait(5.0)
        began = CLOCK.monotonic()
        assert caller.transport.cut(lambda exchange: exchange.rid == "a", Cut.DRAIN) == 1
        assert call.result(5.0).cut is Cut.DRAIN
        assert CLOCK.monotonic() - began < 0.5
        assert_socket_gone(server, caller)


def test_a_cut_on_a_reused_socket_is_not_taken_for_a_race(call_to: MakeCaller) -> None:
    """A cut within a second after sending looks like the keep-alive race on the stack; it is told apart."""
    with WireServer([read_request, answer(b"1"), read_request, silence], AGAIN) as server:
        caller = call_to(server.url)
        caller.post()
        call = in_thread(caller.fails)
        server.await_requests(2)
        caller.transport.cut(lambda _: True, Cut.DEAD)
        error = call.result(5.0)
        assert (error.phase, error.cut) == (Phase.SENT, Cut.DEAD)


def test_a_cut_while_waiting_for_a_connect_slot(call_to: MakeCaller) -> None:
    """All connect slots hang; those who wait for one end at the cut, having sent nothing."""
    with _FullQueue() as url:
        caller = call_to(url, connect_s=1.0)
        calls = [in_thread(lambda: caller.fails(seconds=30.0)) for _ in range(80)]
        port = int(url.rpartition(":")[2])
        eventually(lambda: client_states(port).count("SYN_SENT") >= 56, "all slots are taken")
        eventually(lambda: len(_exchanges(caller)) == 80, "all calls have begun")
        began = CLOCK.monotonic()
        assert caller.transport.cut(lambda _: True, Cut.CLOSE) == 80
        errors = [call.result(10.0) for call in calls]
        assert {error.cut for error in errors} == {Cut.CLOSE}
        assert sum(error.phase is Phase.CONNECT for error in errors) >= 76  # the kernel may have let a few through
        assert CLOCK.monotonic() - began < 2.5


def _exchanges(caller: Caller) -> list[object]:
    return list(caller.transport._registry._exchanges.values())


def test_a_cut_never_hits_the_next_user_of_a_socket(call_to: MakeCaller) -> None:
    """Cuts for finished calls, aimed by rid while their sockets serve other calls, do no harm."""
    with WireServer([read_request, answer(b"ok")] * 400) as server:  # never closes: only our own cuts end a socket
        caller = call_to(server.url)
        caller.post()
        stop = threading.Event()

        def cutter() -> int:
            count = 0
            while not stop.wait(0.0005):
                count += caller.transport.cut(lambda exchange: exchange.rid == "old", Cut.ABORT)
            return count

        cutting = in_thread(cutter)
        results = {"old": 0, "new": 0}
        for _ in range(100):
            try:
                caller.post(rid="old")
                results["old"] += 1
            except TransportError as error:
                assert error.cut is Cut.ABORT  # noqa: PT017 - which of the two may happen is the point
            assert caller.post(rid="new") == b"ok"
            results["new"] += 1
        stop.set()
        cutting.result(5.0)
        assert results["new"] == 100


def test_after_close_every_call_is_cut(call_to: MakeCaller) -> None:
    """A closed transport sends nothing more."""
    with WireServer(AGAIN) as server:
        caller = call_to(server.url)
        assert caller.transport.close(1.0) == []
        assert caller.fails().cut is Cut.CLOSE
        assert server.requests == []
