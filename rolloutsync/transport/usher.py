"""The usher: one thread that watches the sockets of all requests in flight, where there are many.

Most of them are parked: no thread waits for their answers, and the usher's own takes them in as they come, the small
and usual ones whole. A request that is not gets a thread as soon as its answer comes; see ``rolloutsync.workers``.

Other requests have a thread that waits. When its ``recv`` returns it waits for the interpreter, and the interpreter
wakes each of those who wait every 5 ms to look whether it is their turn. When hundreds of answers come at once (an
abort, a short stall of this process), that alone takes all the time there is. A thread that waits for a lock sleeps,
so they wait for tickets, of which the usher grants a few at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rolloutsync.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

R = TypeVar("R")
log = logging.getLogger("rolloutsync.transport")
_AT_ONCE = 1  # threads that have a ticket
_TOGETHER = 32  # parked ones whose answers are taken in together; no more than half, lest engines and we work by turns
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


class Parked(Protocol):
    """A request that no thread waits for. Nothing here may block."""

    def look(self) -> bool:
        """Something has come: read it. False: it is parked again, for more."""

    def leave(self) -> Callable[[], None] | None:
        """Nothing is watched any more. What is to be done then, once all that has come with it has left too."""


def _let_go(some: Sequence[Parked]) -> None:
    """One step after the other for all of them: the processor is twice as fast at what it has just done."""
    _let_leave([one for one in some if _guarded(one.look, otherwise=True)])


def _let_leave(some: Sequence[Parked]) -> None:
    for then in [_guarded(one.leave) for one in some]:
        if then is not None:
            _guarded(then)


def _guarded(step: Callable[[], R], otherwise: R | None = None) -> R | None:
    """A thread's outermost frame: a bug of ours must not end the thread, nor keep the others from their steps."""
    try:
        return step()
    except Exception:
        with contextlib.suppress(Exception):  # a user's handler
            log.exception("an answer could not be taken in")
        return otherwise


class Usher:
    """Takes in what is parked, and grants tickets to threads whose answers have begun to come. Thread-safe.

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
        self._parked: dict[int, Parked] = {}  # by descriptor
        self._landing: list[Parked] = []  # of these, those for which something has come
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
        self._edges.discard(descriptor)  # without the lock: one atomic step, and nobody waits for this one yet
        if known and self._epoll is not None and not self._closed:
            return True
        with self._lock:
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

    def park(self, descriptor: int, parked: Parked) -> bool:
        """Have the usher's own thread call ``parked.look()`` when something has come on a watched socket.

        That must not block. Where the usher closes first, ``parked.leave()`` is called instead, by it or by ``close``.
        False: it is closed already.
        """
        with self._lock:
            if self._open_locked() is None or self._thread is None:
                return False
            if descriptor not in self._edges and descriptor not in self._ends:
                self._parked[descriptor] = parked
                return True
            self._edges.discard(descriptor)
            self._ends.discard(descriptor)
            self._landing.append(parked)
            if self._thread is not threading.current_thread():
                os.eventfd_write(self._bell, 1)
            return True

    def _open_locked(self) -> Any:
        """The epoll object, with a thread that watches it; None where there can be none."""
        if self._closed:
            return None
        if self._epoll is None:
            self._make_epoll()
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # no more threads: those who wait lose their patience
                self._thread = start_thread(self._name, self._run)
        return self._epoll

    def _make_epoll(self) -> None:
        self._epoll = select.epoll()
        try:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._bell, select.EPOLLIN)
        except OSError:
            self.abandon()
            raise

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
        try:
            while self._step(self._epoll, self._bell):
                pass
        except Exception:  # a thread's outermost frame: those who wait lose their patience, what is parked leaves
            with contextlib.suppress(Exception):
                log.exception("the sockets cannot be watched")
            with self._lock:
                self._thread = None
            self._let_all_leave()

    def _step(self, epoll: Any, bell: int) -> bool:
        """Take in what has come; False at the end."""
        edges = epoll.poll(0 if self._landing else _IDLE_EXIT_S)
        with self._lock:
            for descriptor, events in edges:
                if descriptor != bell:
                    self._edge_locked(descriptor, self._ends if events & _ENDED else self._edges)
                elif not self._closed:
                    os.eventfd_read(bell)
            landing, self._landing = self._landing, []
            together = max(1, min(_TOGETHER, (len(landing) + len(self._parked)) // 2))
            waits = edges or self._waiting or self._called or self._parked or landing
            if ends := self._closed or not waits:
                self._thread = None
        if ends:
            _let_leave(landing)
            return False
        for start in range(0, len(landing), together):
            _let_go(landing[start : start + together])
        return True

    def _let_all_leave(self) -> None:
        with self._lock:
            parked = [*self._parked.values(), *self._landing]
            self._parked.clear()
            self._landing.clear()
        _let_leave(parked)

    def _edge_locked(self, descriptor: int, kept: set[int]) -> None:
        ticket = self._waiting.pop(descriptor, None)
        if ticket is not None:
            self._call_locked(ticket)
            return
        parked = self._parked.pop(descriptor, None)
        if parked is not None:
            self._landing.append(parked)
        else:
            kept.add(descriptor)

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
        self._let_all_leave()
        if thread is not None and thread.is_alive():
            return [thread.name]
        self.abandon()
        return []

    def abandon(self) -> None:
        """Close its descriptors; also in a forked child, where its thread does not exist."""
        epoll, bell, self._epoll, self._bell = self._epoll, self._bell, None, -1
        if epoll is not None:
            epoll.close()
        if bell >= 0:
            os.close(bell)
