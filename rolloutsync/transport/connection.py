"""urllib3 connections that report to the exchange they serve, and know their idle age."""

from __future__ import annotations

import errno
import http.client
import ipaddress
import os
import resource
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from rolloutsync.threads import Outcome, start_thread
from rolloutsync.transport.exchange import CutError, Lane

if TYPE_CHECKING:
    import io

    from rolloutsync.transport.exchange import Exchange

LARGE_REQUEST_BYTES = 1 << 16  # a larger one is sent in pieces, in case that the answer comes early
_PIECE_BYTES = 1 << 14
_ESTABLISHED = 1  # of the kernel's TCP states
_SO_MEMINFO = 55  # Linux; the first of its numbers are the bytes that have come and were not read
_KEPT_FOR_CONTROL = 16  # descriptors
_current = threading.local()


def current_exchange() -> Exchange | None:
    """The exchange that this thread is making."""
    return getattr(_current, "exchange", None)


def set_current_exchange(exchange: Exchange | None) -> None:
    """Say which exchange this thread is making."""
    _current.exchange = exchange


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def _leave_some(sock: socket.socket, exchange: Exchange) -> None:
    """Generates leave the last descriptors to control calls: the kernel always gives the lowest that is free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if exchange.lane is Lane.DATA and soft > 4 * _KEPT_FOR_CONTROL and sock.fileno() >= soft - _KEPT_FOR_CONTROL:
        raise OSError(errno.EMFILE, f"Too many open files (RLIMIT_NOFILE is {soft})")


def _is_quiet(sock: socket.socket) -> bool:
    """Whether the kernel says that it is established and has nothing unread, which would be taken for our answer.

    False also where the kernel does not say. Costs a tenth of a poll, and does not let another thread run.
    """
    try:
        established = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
        return established and not any(sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4))
    except (AttributeError, OSError):
        return False


class _Lines:
    """Hands lines on from a file, and remembers the last."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.last = b""

    def readline(self, limit: int = -1) -> bytes:
        """The next line."""
        self.last = self.file.readline(limit)
        return self.last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class AnswerReader(http.client.HTTPResponse):
    """Skips interim answers (102 to 199; http.client skips only 100) and tells when the first byte has come.

    A header block that breaks off is an error; http.client takes the end of the connection for the end of the headers.
    """

    def begin(self) -> None:
        """Read the status line and the headers."""
        lines: Any = _Lines(self.fp)
        self.fp = lines  # for as long as the head is read
        try:
            super().begin()
        finally:
            if self.fp is not None:  # not closed meanwhile
                self.fp = lines.file
        if lines.last not in {b"\r\n", b"\n"}:
            raise http.client.IncompleteRead(lines.last)

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            version, status, reason = self._read_one_status()
            if not 102 <= status <= 199:
                return version, status, reason
            http.client.parse_headers(self.fp)

    def _read_one_status(self) -> tuple[str, int, str]:
        exchange = current_exchange()
        if exchange is not None and self.fp.peek(1):  # blocks for the first bytes and leaves them where they are
            exchange.answered = True
        line: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]  # private, pinned by a test
        return line


class Tracked(HTTPConnection):
    """What both connection classes share.

    The owner is the exchange that uses the connection. Two races it prevents:

    1. Thread A reads its body to the end and the pool takes the connection back. 2. Thread B gets it and claims it
    (``is_connected`` runs in B). 3. A settles: it finds B as owner and leaves everything alone.

    1. The reaper sees an idle connection. 2. Thread B claims it. 3. The reaper, which looks again under ``_guard``,
    finds an owner and does not close it; or it closed first, and B finds no socket and connects anew.
    """

    response_class = AnswerReader
    speaks_tls = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = threading.RLock()  # guards: _owner, _idle_since, _tainted, the socket's closing
        self._owner: Exchange | None = None
        self._idle_since = 0.0
        self._tainted = False
        self._pin: io.RawIOBase | None = None
        self.usher: Any = None  # that watches the present socket
        exchange = current_exchange()
        if exchange is not None:
            exchange.registry.add(self)

    def connect(self) -> None:
        """Connect within the engine's connect slots and register the socket."""
        exchange = current_exchange()
        if exchange is None:
            super().connect()
            return
        with self._guard:
            self._owner, self._tainted = exchange, False  # before there is a socket: the reaper keeps off
        try:
            with exchange.connect_slot():
                self.timeout = exchange.connect_timeout()  # anew: waiting for the slot took time
                super().connect()
        except BaseException as error:
            exchange.connect_error = error
            with self._guard:
                self._owner = None
            raise
        self._own(exchange)

    def _new_conn(self) -> socket.socket:
        """As urllib3's, but the look-up of a name has a limit, and a cut ends the connect."""
        exchange = current_exchange()
        if exchange is None:
            return super()._new_conn()
        try:
            addresses = self._look_up(exchange)
            return self._connect_to_any(exchange, addresses)
        except socket.gaierror as error:
            raise NameResolutionError(self.host, self, error) from error
        except CutError:
            raise
        except TimeoutError as error:
            raise ConnectTimeoutError(self, f"connecting to {self.host} timed out: {error}") from error
        except OSError as error:
            raise NewConnectionError(self, f"Failed to establish a new connection: {error}") from error

    def _look_up(self, exchange: Exchange) -> list[Any]:
        """The addresses of the host: of a name in a thread of its own, which is left behind where the look-up hangs."""
        outcome = Outcome(lambda: socket.getaddrinfo(self.host, self.port, 0, socket.SOCK_STREAM))
        if _is_address(self.host):
            outcome.run()
            return outcome.get()
        try:
            start_thread(f"{exchange.registry.name}-lookup", outcome.run)
        except RuntimeError:
            outcome.run()
        exchange.await_lookup(outcome.wait, self.host)
        return outcome.get()

    def _connect_to_any(self, exchange: Exchange, addresses: list[Any]) -> socket.socket:
        failure: OSError | None = None
        for family, kind, protocol, _, address in addresses:
            sock = socket.socket(family, kind, protocol)
            try:
                _leave_some(sock, exchange)
                for option in self.socket_options or ():
                    sock.setsockopt(*option)
                sock.settimeout(exchange.connect_timeout())
                exchange.connect(sock, address)
            except BaseException as error:
                sock.close()
                if isinstance(error, CutError) or not isinstance(error, OSError):
                    raise
                failure = error
            else:
                if self.speaks_tls:
                    exchange.shakes_hands(sock)
                return sock
        raise failure or OSError(f"the name {self.host!r} has no address")

    def _own(self, exchange: Exchange) -> None:
        with self._guard:
            self._pin = self.sock.makefile("rb", buffering=0)
            self.usher = None
        self.sock.settimeout(exchange.socket_timeout())
        exchange.took(self, reused=False)

    @property
    def is_connected(self) -> bool:
        """Whether the pool may reuse it: no past the idle limit. Saying yes claims it for the current exchange."""
        exchange = current_exchange()
        return super().is_connected if exchange is None else self.claim(exchange)

    def claim(self, exchange: Exchange) -> bool:
        """Take it for an exchange, unless it is not connected, or not to be used again."""
        with self._guard:
            busy = self._owner is not None  # an exchange that has read its answer but not settled yet
            idle = 0.0 if busy else exchange.clock.monotonic() - self._idle_since
            if self.sock is None or self._tainted or exchange.fresh or idle > exchange.idle_limit_s:
                return False
            if (busy or not _is_quiet(self.sock)) and not super().is_connected:
                return False
            self._owner = exchange
        exchange.took(self, reused=True)
        return True

    def request(self, *args: Any, **kwargs: Any) -> None:
        """Send a request and note when its last byte was handed to the kernel."""
        exchange = current_exchange()
        if exchange is None:
            super().request(*args, **kwargs)
            return
        if self.sock is not None:
            self.timeout = exchange.socket_timeout()  # not the connect timeout: a large body may take longer
        super().request(*args, **kwargs)
        if not exchange.early:
            exchange.sent_at = exchange.clock.monotonic()

    def send(self, data: Any) -> None:
        """Send bytes; a large body stops where the answer, or the end, comes before all of it is sent.

        Not so over TLS, where what can be read may be the protocol's own.
        """
        exchange = current_exchange()
        if exchange is None or self.speaks_tls or not isinstance(data, bytes) or len(data) <= LARGE_REQUEST_BYTES:
            super().send(data)
            return
        for start in range(0, len(data), _PIECE_BYTES):
            if self._answers_already(exchange.socket_timeout()):
                exchange.early = True
                return
            self.sock.sendall(data[start : start + _PIECE_BYTES])

    def _answers_already(self, timeout_s: float | None) -> bool:
        """Block until there is room to send or something to read; whether it is the latter."""
        poller = select.poll()
        poller.register(self.sock, select.POLLIN | select.POLLOUT)
        events = poller.poll(None if timeout_s is None else timeout_s * 1000.0)
        if not events:
            raise TimeoutError("the request could not be sent in time")
        return bool(events[0][1] & ~select.POLLOUT)

    def close(self) -> None:
        """Close the socket; its descriptor lives on until the exchange that uses it has ended."""
        with self._guard:
            pin, self._pin = self._pin, None
            if pin is not None and self._owner is not None:
                self._owner.keep(pin)
            elif pin is not None:
                pin.close()
            super().close()

    def settle(self, exchange: Exchange) -> None:
        """The exchange has ended: idle from now on, unless another has it already."""
        with self._guard:
            if self._owner is exchange:
                self._owner, self._idle_since = None, exchange.clock.monotonic()
                if self._tainted or exchange.sent_at is None:
                    self.close()

    def taint(self, exchange: Exchange) -> None:
        """Never reuse this socket; its stream of answers can no longer be trusted."""
        with self._guard:
            self._tainted = True
            if self._owner is exchange or self._owner is None:
                self.close()

    def reap(self, now: float, limit_s: float) -> bool:
        """Close the socket if it has been idle for longer than ``limit_s``; True if something is open afterwards."""
        if self._owner is not None and self.sock is not None:
            return True  # without the lock: nothing is done to one in use
        with self._guard:
            if self._owner is None and self.sock is not None and now - self._idle_since > limit_s:
                self.close()
            return self.sock is not None

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptor; no shutdown, which would end the parent's call.

        Detached first: files that threads of the parent had open on it would keep it open here for ever.
        """
        self._guard = threading.RLock()
        self._owner = None
        sock, self.sock = self.sock, None
        if sock is not None and (descriptor := sock.detach()) >= 0:
            os.close(descriptor)


class TrackedHTTPConnection(Tracked):
    """Plain HTTP."""


class TrackedHTTPSConnection(Tracked, HTTPSConnection):
    """HTTP over TLS."""

    speaks_tls = True
