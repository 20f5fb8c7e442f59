"""The usher: where many threads wait for answers, it lets them in a few at a time.

A thread whose ``recv`` returns waits for the interpreter, and the interpreter wakes each of those who wait every 5 ms
to look whether it is their turn. When hundreds of answers come at once (an abort, a short stall of this process), that
alone takes all the time there is. A thread that waits for a lock sleeps, so with many requests in flight threads wait
for a ticket, one thread watches all sockets, and it grants a few tickets at a time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from typing import Any

from rolloutsync.threads import start_thread

_AT_ONCE = 1  # threads that have a ticket
_PATIENCE_S = 30.0  # then a thread asks its socket itself, whatever has become of the usher
_IDLE_EXIT_S = 10.0
_ENDED = sum(getattr(select, name, 0) for name in ("EPOLLRDHUP", "EPOLLHUP", "EPOLLERR"))
_READY = getattr(select, "EPOLLIN", 0) | getattr(select, "EPOLLRDHUP", 0) | getattr(select, "EPOLLET", 0)


class _Ticket:
    """One thread's wait for its answer. Guarded by the usher's lock, but for the wait itself."""

    __slots__ = ("call", "granted")

    def __init__(self) -> None:
        self.granted = False
        self.call = threading.Lock()
        self.call.acquire()


class Usher:
    """Grants tickets to threads whose answers have begun to come. Thread-safe.

    Sockets are watched for their whole life, edge-triggered, so that a request costs no system call more. An edge may
    be an old one; who has a ticket therefore reads without blocking, and comes back if nothing is there. The ticket is
    for that first read alone, so that nobody's slow answer holds the others up.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards all that follows; never held across a wait
        self._waiting: dict[int, _Ticket] = {}  # by descriptor
        self._edges: set[int] = set()  # of descriptors for which nobody waited
        self._ends: set[int] = set()  # the same, where the connection has ended: kept until it is read
        self._called: deque[_Ticket] = deque()  # whose answers have come, but who have to wait for others
        self._granted = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._epoll: Any = None
        self._bell = -1

    def watch(self, sock: socket.socket, *, known: bool) -> bool:
        """A request is about to be sent on ``sock``. ``known``: it has been watched since it was connected.

        False: it cannot be watched (no more descriptors), so its thread has to ask it.
        """
        descriptor = sock.fileno()
        with self._lock:
            self._edges.discard(descriptor)
            try:
                epoll = self._open_locked()
                if not known and epoll is not None:
                    self._ends.discard(descriptor)
                    epoll.register(descriptor, _READY)
            except OSError:
                return False
            return epoll is not None

    def receive(self, sock: socket.socket, size: int) -> bytes:
        """As ``sock.recv(size)`` of a watched socket: blocks until the answer has begun to come, and for one's turn."""
        while self._wait(sock.fileno()):
            try:
                return sock.recv(size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue  # an old edge
            finally:
                self._done()
        return sock.recv(size)

    def _open_locked(self) -> Any:
        """The epoll object, with a thread that watches it; None where there can be none."""
        if self._closed:
            return None
        if self._epoll is None:
            self._epoll, self._bell = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._bell, select.EPOLLIN)
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # no more threads: those who wait lose their patience
                self._thread = start_thread(self._name, self._run)
        return self._epoll

    def _wait(self, descriptor: int) -> bool:
        """Block until there is a ticket, to be given back with ``_done``; False: ask the socket itself."""
        ticket = _Ticket()
        with self._lock:
            if self._open_locked() is None or self._thread is None:  # opens nothing: watch() did
                return False
            if descriptor in self._edges or descriptor in self._ends:
                self._edges.discard(descriptor)
                self._ends.discard(descriptor)
                self._call_locked(ticket)
            else:
                self._waiting[descriptor] = ticket
        if ticket.call.acquire(timeout=_PATIENCE_S):
            return ticket.granted
        with self._lock:
            self._waiting.pop(descriptor, None)
            if ticket in self._called:
                self._called.remove(ticket)
            return ticket.granted

    def _done(self) -> None:
        with self._lock:
            if self._called:
                self._grant_locked(self._called.popleft())
            else:
                self._granted -= 1

    def _call_locked(self, ticket: _Ticket) -> None:
        if self._granted < _AT_ONCE:
            self._granted += 1
            self._grant_locked(ticket)
        else:
            self._called.append(ticket)

    def _grant_locked(self, ticket: _Ticket) -> None:
        ticket.granted = True
        ticket.call.release()

    # --- its thread ---

    def _run(self) -> None:
        epoll, bell = self._epoll, self._bell
        while True:
            edges = epoll.poll(_IDLE_EXIT_S)
            with self._lock:
                for descriptor, events in edges:
                    if descriptor != bell:
                        self._edge_locked(descriptor, self._ends if events & _ENDED else self._edges)
                if self._closed or not (edges or self._waiting or self._called):
                    self._thread = None
                    return

    def _edge_locked(self, descriptor: int, kept: set[int]) -> None:
        ticket = self._waiting.pop(descriptor, None)
        if ticket is None:
            kept.add(descriptor)
        else:
            self._call_locked(ticket)

    # --- the end ---

    def close(self, timeout: float) -> list[str]:
        """Send everybody away and end the thread; its name if it did not end in time."""
        with self._lock:
            self._closed = True
            tickets = [*self._waiting.values(), *self._called]
            self._waiting.clear()
            self._called.clear()
            thread = self._thread
        for ticket in tickets:
            ticket.call.release()
        if thread is not None:
            os.eventfd_write(self._bell, 1)
            thread.join(timeout)
            if thread.is_alive():
                return [thread.name]
        self.abandon()
        return []

    def abandon(self) -> None:
        """Close its descriptors; also in a forked child, where its thread does not exist."""
        epoll, bell, self._epoll, self._bell = self._epoll, self._bell, None, -1
        if epoll is not None:
            epoll.close()
            os.close(bell)
