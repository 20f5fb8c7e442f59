"""The lean path: a request as one block of bytes, and a usual answer straight from the socket.

It takes requests' and http.client's per-call work out of the hot path and nothing else: connections, pools, TLS, the
registry, cuts and phases are those of the plain path. It is taken where requests would do nothing but what is done
here (see ``LeanPath.route``), and an answer that is not of the usual form is read by http.client and urllib3 as ever.
"""

from __future__ import annotations

import http.client
import io
import re
import socket
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from rolloutsync.transport.connection import LARGE_REQUEST_BYTES
from rolloutsync.transport.exchange import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rolloutsync.transport.exchange import Exchange
    from rolloutsync.transport.session import LaneAdapter

_MOST_ROUTES = 4096  # kept; control(path) makes one for each path
FIRST_READ = 1 << 16
_LARGEST = 1 << 28  # bytes; memory for a longer body is touched only as it comes
_MOST_FORMS = 1024
_STATUS = re.compile(rb"http/1\.1 ([2-5]\d\d)[ \r]")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*(?=\r\n)")
_UNUSUAL = (b"\r\n ", b"\r\n\t", b"transfer-encoding", b"content-encoding", b"\r\nconnection")
_KEEPS_ALIVE = b"\r\nconnection: keep-alive\r\n"
_NO_BODY = {204, 304}


class Route(NamedTuple):
    """Where a request goes, and its head without the Content-Length."""

    pool: Any
    head: bytes


class Answer(NamedTuple):
    """A whole answer: its header block as it came, or parsed already, and its body."""

    status: int
    head: bytes | Mapping[str, str]
    body: bytes | bytearray
    reserved: int


class LeanPath:
    """Decides who may take the lean path, and makes each request's head once. Thread-safe.

    Args:
        session: The session whose settings are to be obeyed.
        adapter: Ours.
        shared: The session has settings of the user's, who may change them at any time.
    """

    def __init__(self, session: requests.Session, adapter: LaneAdapter, *, shared: bool) -> None:
        self._session = session
        self._adapter = adapter
        self._shared = shared
        self._routes: dict[tuple[str, str, Lane], tuple[Any, Route]] = {}

    def route(self, method: str, url: str, headers: Mapping[str, str], lane: Lane) -> Route | None:
        """The route of a request; None where only requests itself can make it.

        ``responses`` and its like patch ``HTTPAdapter.send`` or mount adapters of their own, which shows here.
        """
        session = self._session
        if type(session) is not requests.Session or HTTPAdapter.send.__module__ != "requests.adapters":
            return None
        if session.get_adapter(url) is not self._adapter or (self._shared and not self._is_plain()):
            return None
        given = (headers, tuple(session.headers.items())) if self._shared else (headers,)
        known = self._routes.get((method, url, lane))
        if known is not None and known[0] == given:
            return known[1]
        return self._learn(method, url, headers, lane, given)

    def _is_plain(self) -> bool:
        """Whether the session does nothing to a request but to add headers."""
        session = self._session
        hooks = any(session.hooks.values())
        return session.verify is not False and not (session.auth or session.params or session.proxies or hooks)

    def _learn(self, method: str, url: str, headers: Mapping[str, str], lane: Lane, given: Any) -> Route | None:
        """Let requests prepare the request once, as it would each time, with its checks of URL and headers."""
        request = requests.Request(method, url, headers=dict(headers), data=b"")
        prepared = self._session.prepare_request(request)
        settings = self._session.merge_environment_settings(prepared.url, {}, True, None, None)
        if settings["proxies"]:
            return None
        pool = self._adapter.get_connection_with_tls_context(prepared, settings["verify"], cert=settings["cert"])
        lines = [f"{method} {prepared.path_url} HTTP/1.1", f"Host: {_host(prepared)}"]
        lines += [f"{name}: {_text(value)}" for name, value in prepared.headers.items() if name.lower() not in _OURS]
        head = "\r\n".join([*lines, ""]).encode("latin-1")
        if len(self._routes) >= _MOST_ROUTES:
            self._routes.clear()
        route = Route(pool, head)
        self._routes[method, url, lane] = given, route
        return route


_OURS = {"content-length", "host"}


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _host(prepared: requests.PreparedRequest) -> str:
    given = prepared.headers.get("Host")
    return _text(given) if given else urlsplit(str(prepared.url)).netloc.rpartition("@")[2]


def send(connection: Any, exchange: Exchange, route: Route, body: bytes | None) -> None:
    """Send the request on a connection that the exchange has claimed.

    A server that hangs up while it is sent may have answered all the same, so that is left for the reader to find.
    """
    if connection.sock is None:
        connection.connect()
    elif connection.sock.gettimeout() != (timeout := exchange.socket_timeout()):
        connection.sock.settimeout(timeout)
    if exchange.usher is not None:
        if not exchange.usher.watch(connection.sock, known=connection.usher is exchange.usher):
            exchange.usher = None
        connection.usher = exchange.usher
    try:
        if body is None:
            connection.sock.sendall(route.head + b"\r\n")
        elif len(body) <= LARGE_REQUEST_BYTES:
            connection.sock.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (route.head, len(body), body))
        else:
            connection.sock.sendall(b"%bContent-Length: %d\r\n\r\n" % (route.head, len(body)))
            connection.send(body)
    except (BrokenPipeError, ConnectionResetError):
        return
    if not exchange.early:
        exchange.sent_at = exchange.clock.monotonic()


def read(
    connection: Any,
    exchange: Exchange,
    reserve: Callable[[int], int],
    buffer: Callable[[int], bytearray],
    seen: bytes = b"",
) -> Answer:
    """Read one answer to its end.

    Args:
        connection: On which the request was sent.
        exchange: That it is for.
        reserve: Is told the length of the body, and says how much of it it counts.
        buffer: Gives a buffer of a length.
        seen: What has come of it already.
    """
    seen = seen or _read_first(connection.sock, exchange)
    end = _end_of_head(seen)
    usual = _usual_form(seen, end)
    if usual is None:
        return _read_unusual(connection, seen, reserve)
    status, length = usual
    reserved = reserve(length)
    if len(seen) > end + length:
        connection.taint(exchange)  # what follows is nobody's
    start = seen[end : end + length]
    if len(start) < length:
        wait_for_all = 0 if connection.speaks_tls else socket.MSG_WAITALL  # in one call, where the kernel can
        return Answer(status, seen[:end], _read_rest(connection.sock, start, buffer(length), wait_for_all), reserved)
    return Answer(status, seen[:end], start, reserved)


def whole_answer(seen: bytes) -> tuple[Answer | None, bool]:
    """The answer, if all of a usual one has come; else whether what is missing of it is short."""
    end = _end_of_head(seen)
    if end == 0:
        return None, len(seen) < FIRST_READ
    usual = _usual_form(seen, end)
    if usual is None or len(seen) > end + usual[1]:  # what follows is nobody's: read() says so
        return None, False
    status, length = usual
    if len(seen) < end + length:
        return None, end + length <= FIRST_READ
    return Answer(status, seen[:end], seen[end:], 0), False


def _read_first(sock: Any, exchange: Exchange) -> bytes:
    """What comes at first."""
    usher = exchange.usher
    seen: bytes = sock.recv(FIRST_READ) if usher is None else usher.receive(sock, FIRST_READ)
    exchange.answered = bool(seen)
    return seen


def _end_of_head(seen: bytes) -> int:
    """Where the head ends; 0 where it does not, which is for http.client to judge."""
    return seen.find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in seen else 0


def _usual_form(seen: bytes, end: int) -> tuple[int, int] | None:
    """(status, length of the body) of an answer whose head says no more than that; None for any other."""
    if end == 0:
        return None
    head = seen[: end - 2].lower()
    form = head.translate(None, b"0123456789")  # heads of one server are alike but for digits
    usual = _known_forms.get(form)
    if usual is None:
        usual = _learn_form(form)
    length = _LENGTH.search(head) if usual else None
    status = _STATUS.match(head)
    if length is None or status is None or (number := int(status[1])) in _NO_BODY:
        return None
    size = int(length[1])
    return (number, size) if size <= _LARGEST else None


_known_forms: dict[bytes, bool] = {}


def _learn_form(form: bytes) -> bool:
    """Whether a head, given without digits, says no more than how long the body is."""
    lines = form.replace(_KEEPS_ALIVE, b"\r\n", 1)
    once = lines.count(b"\r\ncontent-length:") == lines.count(b"content-length") == 1
    usual = once and lines.count(b"\n") == lines.count(b"\r\n") and not any(word in lines for word in _UNUSUAL)
    if len(_known_forms) >= _MOST_FORMS:
        _known_forms.clear()
    _known_forms[form] = usual
    return usual


def _read_rest(sock: Any, start: bytes, body: bytearray, flags: int) -> bytearray:
    """Fill ``body``, of which ``start`` has come."""
    length = len(body)
    body[: len(start)] = start
    with memoryview(body) as view:
        have = len(start)
        while have < length:
            got = sock.recv_into(view[have:], 0, flags)
            if not got:
                raise http.client.IncompleteRead(b"", length - have)
            have += got
    return body


# --- any other answer -------------------------------------------------------------------------------------------------


class _Replay(io.RawIOBase):
    """A socket's bytes, with those that were read already before them."""

    def __init__(self, seen: bytes, sock: socket.socket) -> None:
        self._seen = seen
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._seen:
            return self._sock.recv_into(buffer)
        part, self._seen = self._seen[: len(buffer)], self._seen[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


class _ReplaySocket:
    """As much of a socket as ``http.client.HTTPResponse`` wants."""

    def __init__(self, seen: bytes, sock: socket.socket) -> None:
        self._raw = _Replay(seen, sock)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._raw)


def _read_unusual(connection: Any, seen: bytes, reserve: Callable[[int], int]) -> Answer:
    """Interim answers, chunks, compression, ends by closing, broken heads: as http.client and urllib3 read them."""
    inner = connection.response_class(_ReplaySocket(seen, connection.sock), method="POST")
    try:
        inner.begin()
        headers = urllib3.HTTPHeaderDict(inner.msg.items())
        reserved = reserve(length_of(headers))
        response = urllib3.HTTPResponse(
            body=inner,
            headers=headers,
            status=inner.status,
            version=inner.version,
            preload_content=False,
            decode_content=True,
            original_response=inner,
            request_method="POST",
        )
        body = response.read(decode_content=True)
    except BaseException:
        inner.close()  # while its file is open: the collector may close that first
        raise
    if inner.will_close:
        connection.close()
    return Answer(inner.status, requests.structures.CaseInsensitiveDict(headers), body, reserved)


def length_of(headers: Mapping[str, str]) -> int:
    """The length of a body as its headers tell it; 0 where they do not."""
    told = headers.get("Content-Length", "")
    return int(told) if told.isascii() and told.isdigit() else 0


def headers_of(head: bytes | Mapping[str, str]) -> Mapping[str, str]:
    """The headers in a header block."""
    if not isinstance(head, bytes):
        return head
    lines = head.partition(b"\r\n")[2]
    return requests.structures.CaseInsensitiveDict(http.client.parse_headers(io.BytesIO(lines)).items())
