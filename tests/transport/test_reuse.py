"""When a connection is used again, when it is retired, and that nobody's FIN stays unread."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable

import pytest
import urllib3

from rolloutsync.errors import Cut
from rolloutsync.transport import Lane
from tests.background import in_thread
from tests.kernel import client_states
from tests.steps import answer_packed
from tests.transport.kit import CLOCK, Caller
from tests.wire import (
    WireServer,
    answer,
    answer_chunked,
    answer_until_close,
    close,
    eventually,
    interim,
    read_bytes,
    read_request,
    send,
    serve,
    silence,
    tell,
    wait_for,
)

MakeCaller = Callable[..., Caller]


def test_a_connection_is_used_again(call_to: MakeCaller) -> None:
    """Three calls in a row use one socket."""
    story = [read_request, answer(b"1"), read_request, answer(b"2"), read_request, answer(b"3")]
    with WireServer(story) as server:
        caller = call_to(server.url)
        assert [caller.post() for _ in range(3)] == [b"1", b"2", b"3"]
        assert server.accepted == 1


@pytest.mark.parametrize(
    ("step", "body"),
    [
        (answer(b"x" * 300_000), b"x" * 300_000),
        (answer_chunked(b"one", b"two" * 50_000, b"three"), b"one" + b"two" * 50_000 + b"three"),
        (answer_packed(b"text" * 50_000), b"text" * 50_000),
        (answer(b""), b""),
    ],
    ids=["length", "chunked", "gzip", "empty"],
)
def test_every_kind_of_body_is_read_to_its_end(call_to: MakeCaller, step: Callable[..., None], body: bytes) -> None:
    """A body of any framing arrives whole and leaves the socket usable."""
    with WireServer([read_request, step, read_request, answer(b"next")]) as server:
        caller = call_to(server.url)
        assert caller.post() == body
        assert caller.post() == b"next"
        assert server.accepted == 1


def test_a_body_that_ends_with_the_connection_closes_the_socket(call_to: MakeCaller) -> None:
    """A close-delimited body arrives whole; its socket is gone from the client's side too."""
    with WireServer([read_request, answer_until_close(b"all of it"), close]) as server:
        caller = call_to(server.url)
        assert caller.post() == b"all of it"
        server.await_ended(1)
        eventually(lambda: client_states(server.port) == [], "no socket left")


def test_an_idle_socket_is_retired_before_the_server_does_it(call_to: MakeCaller) -> None:
    """Past idle_socket_s a socket is not used again, though it still works."""
    with WireServer([read_request, answer(b"a"), read_request, answer(b"b")]) as server:
        caller = call_to(server.url, idle_socket_s=0.1)
        caller.post()
        until = CLOCK.monotonic() + 0.15
        eventually(lambda: CLOCK.monotonic() > until, "past the idle limit")
        caller.post()
        assert server.accepted == 2


def test_idle_sockets_that_nobody_reuses_are_closed_on_a_timer(call_to: MakeCaller) -> None:
    """After the last call the sockets go away by themselves, without another call."""
    with WireServer([serve(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")]) as server:
        caller = call_to(server.url, idle_socket_s=0.2)
        caller.post()
        assert client_states(server.port) == ["ESTABLISHED"]
        eventually(lambda: client_states(server.port) == [], "the idle socket was reaped", 2.0)
        server.await_ended(1)


def test_a_fin_is_read_though_nobody_calls(call_to: MakeCaller) -> None:
    """A server that closes an idle socket does not leave it in CLOSE_WAIT here for longer than the idle limit."""
    go = threading.Event()
    with WireServer([read_request, answer(b"x"), wait_for(go), close]) as server:
        caller = call_to(server.url, idle_socket_s=0.5)
        caller.post()
        go.set()
        eventually(lambda: client_states(server.port) == ["CLOSE_WAIT"], "the FIN has come", 0.4)
        eventually(lambda: client_states(server.port) == [], "the FIN was read", 2.0)


def test_the_watching_thread_ends_with_the_last_socket(call_to: MakeCaller) -> None:
    """No thread of ours stays when there is nothing to watch, and it comes back when there is."""
    with WireServer([serve(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")]) as server:
        caller = call_to(server.url, idle_socket_s=0.1)
        for _ in range(2):
            caller.post()
            assert "rolloutsync-test-sockets" in _thread_names()
            eventually(lambda: "rolloutsync-test-sockets" not in _thread_names(), "the thread has ended", 3.0)


def _thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_lanes_have_sockets_of_their_own(call_to: MakeCaller) -> None:
    """A control call never uses a data socket, nor the other way round."""
    with WireServer([serve(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")]) as server:
        caller = call_to(server.url)
        for lane in (Lane.DATA, Lane.CONTROL, Lane.DATA, Lane.CONTROL):
            caller.post(lane=lane)
        assert [request.connection for request in server.requests] == [0, 1, 0, 1]


def test_a_control_call_does_not_wait_behind_generates(call_to: MakeCaller) -> None:
    """200 generates hang; the abort is answered within a second (B33)."""
    with WireServer([serve(_answer_aborts_alone), silence]) as server:
        caller = call_to(server.url)
        hanging = [in_thread(lambda: caller.fails(seconds=60.0)) for _ in range(200)]
        server.await_requests(200)
        began = CLOCK.monotonic()
        caller.post(path="/abort_request", lane=Lane.CONTROL, seconds=5.0)
        assert CLOCK.monotonic() - began < 1.0
        assert caller.transport.cut(lambda exchange: exchange.lane is Lane.DATA, Cut.ABORT) == 200
        assert {future.result(5.0).cut for future in hanging} == {Cut.ABORT}


def _answer_aborts_alone(request: object) -> bytes:
    path = getattr(request, "path", "")
    return b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" if path == "/abort_request" else b"HTTP/1.1 102 Wait\r\n\r\n"


def test_a_control_call_does_not_wait_behind_connects(call_to: MakeCaller) -> None:
    """80 generates wait in a full listen queue; a control call may still try to connect at once."""
    accepting = threading.Event()
    with WireServer([read_request, answer(b"ok"), close], backlog=0, accepting=accepting) as server:
        caller = call_to(server.url, connect_s=1.0)
        waiting = [in_thread(lambda: caller.post(seconds=30.0)) for _ in range(80)]
        eventually(lambda: client_states(server.port).count("SYN_SENT") >= 56, "connects hang in the queue")
        before = client_states(server.port).count("SYN_SENT")
        abort = in_thread(lambda: caller.post(path="/abort_request", lane=Lane.CONTROL, seconds=30.0))
        eventually(lambda: client_states(server.port).count("SYN_SENT") > before, "the control call connects", 1.0)
        caller.transport.cut(lambda _: True, Cut.CLOSE)
        accepting.set()
        eventually(lambda: all(future.done() for future in [*waiting, abort]), "all have ended", 20.0)


@pytest.mark.parametrize("lines", [["103 Early Hints"], ["102 Processing", "199 Odd", "100 Continue", "103 Early"]])
def test_interim_answers_are_skipped(call_to: MakeCaller, lines: list[str]) -> None:
    """Whatever comes from 100 to 199 before the answer, the answer is what counts, and the socket stays in step."""
    story = [read_request, *map(interim, lines), answer(b"final"), read_request, answer(b"second")]
    with WireServer(story) as server:
        caller = call_to(server.url)
        assert caller.full() == (200, b"final")
        assert caller.post() == b"second"
        assert server.accepted == 1


def test_a_late_interim_answer_does_not_shift_the_next_answer(call_to: MakeCaller) -> None:
    """A 1xx that comes after the answer makes the socket unfit: the next call gets its own answer."""
    ready = threading.Event()
    second = [read_request, answer(b"second")]
    with WireServer(
        [read_request, answer(b"first"), interim("103 Early Hints"), tell(ready), *second], second
    ) as server:
        caller = call_to(server.url)
        assert caller.post() == b"first"
        assert ready.wait(5.0)
        assert caller.post() == b"second"


def test_101_is_an_error_and_closes_the_socket(call_to: MakeCaller) -> None:
    """Nobody asked for another protocol: the socket that speaks it is not used again."""
    story = [read_request, send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"), silence]
    with WireServer(story, [read_request, answer(b"fresh")]) as server:
        caller = call_to(server.url)
        assert caller.full() == (101, b"")
        server.await_ended(1)
        assert caller.post() == b"fresh"


def test_the_private_name_that_skips_interim_answers_still_exists() -> None:
    """Pinned: http.client reads a status line in ``HTTPResponse._read_status``, which returns a triple.

    If this fails, interim answers are not skipped any more: change ``AnswerReader`` to the new name.
    """
    sent = _FakeSocket(b"HTTP/1.1 103 Early Hints\r\n")
    response = http.client.HTTPResponse(sent)  # type: ignore[arg-type]
    assert http.client.HTTPResponse._read_status(response)[:2] == ("HTTP/1.1", 103)  # type: ignore[attr-defined]
    assert "_read_status" in http.client.HTTPResponse.begin.__code__.co_names


def test_where_urllib3_connects() -> None:
    """Pinned: its connections get their socket from ``_new_conn``, which is where ours become known to a cut."""
    for kind in (urllib3.connection.HTTPConnection, urllib3.connection.HTTPSConnection):
        assert "_new_conn" in kind.connect.__code__.co_names


class _FakeSocket:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> object:
        import io

        return io.BytesIO(self._data)


def test_an_early_answer_is_used_and_its_socket_dropped(call_to: MakeCaller) -> None:
    """B28: a 413 that comes while we still send is the answer, and the socket is not used again."""
    words = b"payload reached size limit"
    story = [read_bytes(4096), answer(words, "413 Payload Too Large"), close]
    with WireServer(story, [read_request, answer(b"small")]) as server:
        caller = call_to(server.url)
        assert caller.full(b"x" * (9 << 20)) == (413, words)
        assert caller.post(b"x") == b"small"
        assert server.accepted == 2


def test_an_early_answer_that_keeps_the_socket_does_not_get_it_used_again(call_to: MakeCaller) -> None:
    """B28, keep-alive: the rest of our body lies unread in that socket, so the next call needs another."""
    story = [read_bytes(4096), answer(b"no", "400 Bad Request"), silence]
    with WireServer(story, [read_request, answer(b"fine")]) as server:
        caller = call_to(server.url)
        assert caller.full(b"x" * (9 << 20), seconds=5.0) == (400, b"no")
        assert caller.post(b"x", seconds=5.0) == b"fine"
        assert server.accepted == 2


def test_more_bytes_than_promised_are_not_the_next_answer(call_to: MakeCaller) -> None:
    """A body longer than its Content-Length never becomes the head of the next call's answer."""
    ready = threading.Event()
    second = [read_request, answer(b"next")]
    with WireServer([read_request, answer(b"four", length=2), tell(ready), *second], second) as server:
        caller = call_to(server.url)
        assert caller.post() == b"fo"
        assert ready.wait(5.0)
        assert caller.post() == b"next"
