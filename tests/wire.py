"""A scripted loopback server for wire faults: each connection plays a list of steps that reads like the story it tells.

    with WireServer([read_request, answer(b"one"), read_request, reset], [read_request, answer(b"two")]) as server:
        ...

The first connection plays the first script, and so on; the last script is for all that follow. A script that ends
closes its socket. Nothing here sleeps for luck: what takes time waits on an event or on the other side.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from tests.kernel import deafen

WAIT_S = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time


@dataclass(frozen=True)
class Request:
    """One request as it came in, and on which connection."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int


class Left(Exception):  # noqa: N818 - not an error: how a script ends early
    """The client has gone; the script ends here."""


@dataclass
class Peer:
    """One connection, in the hands of its script."""

    server: WireServer
    sock: socket.socket
    number: int
    received: bytes = b""
    taken: bytes = b""  # by the last step that took some
    requests: list[Request] = field(default_factory=list)

    def encrypted(self) -> socket.socket:
        """The socket, behind a TLS handshake where the server speaks TLS."""
        if self.server.tls is None:
            return self.sock
        plain = self.sock
        try:
            self.sock = self.server.tls.wrap_socket(plain, server_side=True)
        except ssl.SSLError:
            plain.close()
            raise
        self.server.exchange(plain, self.sock)
        return self.sock

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise Left from error

    def send_answer(self, body: bytes) -> None:
        self.send(head_of(body) + body)

    def more(self) -> bool:
        """Receives some bytes; False at the client's end."""
        try:
            data = self.sock.recv(1 << 16)
        except OSError as error:
            raise Left from error
        self.received += data
        return bool(data)

    def take(self, size: int) -> bytes:
        while len(self.received) < size:
            if not self.more():
                raise Left
        self.taken, self.received = self.received[:size], self.received[size:]
        return self.taken

    def take_head(self) -> bytes:
        while b"\r\n\r\n" not in self.received:
            if not self.more():
                raise Left
        return self.take(self.received.index(b"\r\n\r\n") + 4)


Step = Callable[[Peer], None]
Script = Sequence[Step]


class WireServer:
    """Listens on a loopback port of its own; a context manager.

    Args:
        scripts: One per connection; the last one repeats.
        backlog: Of the listen queue.
        accepting: Connections are accepted only while it is set.
        host: 127.0.0.1 or ::1.
        tls: Speak TLS.
    """

    def __init__(
        self,
        *scripts: Script,
        backlog: int = 512,
        accepting: threading.Event | None = None,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._scripts = scripts
        self._accepting = accepting or _set_event()
        self._host, self._backlog = host, backlog
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=self._family, backlog=backlog)
        self.port: int = self._listener.getsockname()[1]
        self.tls = tls
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
        self.changed = threading.Condition()  # its lock guards: requests, accepted, ended, _peers
        self.requests: list[Request] = []
        self.accepted = 0
        self.ended = 0
        self.closing = threading.Event()
        self._peers: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> WireServer:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def refuse(self) -> None:
        """From now on connections are refused; those that are open go on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def reopen(self) -> None:
        """Comes back on the same port."""
        self._listener = socket.create_server((self._host, self.port), family=self._family, backlog=self._backlog)
        self._start(self._accept)

    def die(self) -> None:
        """What happens to the sockets of a killed process: connections are reset, new ones refused."""
        self.refuse()
        for sock in self._open_peers():
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.shutdown(socket.SHUT_RD)  # wakes the script, which closes it

    def vanish(self) -> None:
        """What happens when a host loses its network: no packet is answered any more, open connections included."""
        for sock in (self._listener, *self._open_peers()):
            deafen(sock)

    def _open_peers(self) -> list[socket.socket]:
        with self.changed:
            return list(self._peers)

    def close(self) -> None:
        self.closing.set()
        self._accepting.set()
        self.refuse()
        with self.changed:
            self.changed.notify_all()
        for sock in self._open_peers():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)

    def await_requests(self, count: int, timeout: float = WAIT_S) -> None:
        """Blocks until that many requests have come in whole."""
        self._await(lambda: len(self.requests) >= count, f"{count} requests", timeout)

    def await_ended(self, count: int, timeout: float = WAIT_S) -> None:
        """Blocks until that many connections are closed on this side."""
        self._await(lambda: self.ended >= count, f"{count} closed connections", timeout)

    def _await(self, holds: Callable[[], bool], what: str, timeout: float) -> None:
        with self.changed:
            if not self.changed.wait_for(holds, timeout):
                raise AssertionError(f"no {what}: {len(self.requests)} requests, {self.accepted} accepted")

    def paths(self) -> list[str]:
        with self.changed:
            return [request.path for request in self.requests]

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="wire", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            self._accepting.wait()
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self.changed:
                number, self.accepted = self.accepted, self.accepted + 1
                self._peers.append(sock)
            self._start(_play(Peer(self, sock, number), self._scripts[min(number, len(self._scripts) - 1)]))

    def saw(self, request: Request) -> None:
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()

    def exchange(self, old: socket.socket, new: socket.socket) -> None:
        """A connection goes on as another socket object."""
        with self.changed:
            self._peers[self._peers.index(old)] = new

    def forget(self, sock: socket.socket) -> None:
        with self.changed:
            self._peers.remove(sock)
            self.ended += 1
            self.changed.notify_all()


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _play(peer: Peer, script: Script) -> Callable[[], None]:
    def run() -> None:
        with contextlib.suppress(Left, ssl.SSLError), peer.encrypted() as sock:
            peer.sock = sock
            for step in script:
                step(peer)
        peer.server.forget(peer.sock)

    return run


# --- steps ------------------------------------------------------------------------------------------------------------


def read_request(peer: Peer) -> None:
    """Reads a whole request; ends the script if the client leaves instead, or speaks HTTP/2."""
    head = peer.take_head().decode("latin-1").split("\r\n")
    if head[0].startswith("PRI "):
        raise Left
    method, path, _ = head[0].split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = peer.take(int(headers.get("content-length", "0")))
    request = Request(method, path, headers, body, peer.number)
    peer.requests.append(request)
    peer.server.saw(request)


def read_bytes(count: int) -> Step:
    """Reads only so many bytes of a request."""

    def step(peer: Peer) -> None:
        peer.take(count)

    return step


def head_of(body: bytes, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    """A header block; ``length`` lies about the body's."""
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {size}", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


def answer(body: bytes = b"{}", status: str = "200 OK", *headers: str, length: int | None = None) -> Step:
    """Answers, and keeps the connection."""
    return send(head_of(body, status, *headers, length=length) + body)


def send(data: bytes) -> Step:
    """Sends these bytes, whatever they are."""
    return lambda peer: peer.send(data)


def answer_chunked(*chunks: bytes, last: bool = True) -> Step:
    """Answers in chunks, with or without the one that ends the body."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    parts = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    return send(head + b"".join(parts) + (b"0\r\n\r\n" if last else b""))


def answer_until_close(body: bytes) -> Step:
    """Answers without a length: the end of the connection is the end of the body."""
    return send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)


def truncated(body: bytes, at: int) -> Step:
    """Promises the whole body and sends ``at`` bytes of it."""
    return send(head_of(body) + body[:at])


def interim(status: str) -> Step:
    """Sends an informational answer."""
    return send(f"HTTP/1.1 {status}\r\nLink: </style.css>\r\n\r\n".encode())


def drip(data: bytes, every_s: float) -> Step:
    """Sends one byte at a time, for as long as the client listens."""

    def step(peer: Peer) -> None:
        for at in range(len(data)):
            peer.send(data[at : at + 1])
            if peer.server.closing.wait(every_s):
                raise Left

    return step


def silence(peer: Peer) -> None:
    """Says nothing more until the client leaves."""
    while peer.more():
        pass
    raise Left


def reset(peer: Peer) -> None:
    """Resets the connection."""
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    raise Left


def close(peer: Peer) -> None:
    """Closes the connection in good order."""
    raise Left


def wait_for(event: threading.Event, timeout: float = WAIT_S) -> Step:
    """Waits until a test says so."""

    def step(peer: Peer) -> None:
        if not event.wait(timeout) or peer.server.closing.is_set():
            raise Left

    return step


def tell(event: threading.Event) -> Step:
    """Tells a test that the story has come this far."""
    return lambda peer: event.set()


def serve(handle: Callable[[Request], bytes]) -> Step:
    """Answers every request on this connection with the bytes that ``handle`` gives; none means: close."""

    def step(peer: Peer) -> None:
        while True:
            read_request(peer)
            reply = handle(peer.requests[-1])
            if not reply:
                raise Left
            peer.send(reply)

    return step


def play(choose: Callable[[Request], Script]) -> Step:
    """After every request on this connection plays the steps that ``choose`` gives for it."""

    def step(peer: Peer) -> None:
        while True:
            read_request(peer)
            for inner in choose(peer.requests[-1]):
                inner(peer)

    return step


def eventually(holds: Callable[[], bool], what: str, timeout: float = WAIT_S) -> None:
    """Polls an observable until it holds; fails at the deadline."""
    deadline = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not so within {timeout:g} s")
        time.sleep(0.01)
