"""Who owns the running parts of a client: makes them on the first use, ends them, and survives pickle and fork."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

from rolloutsync.clock import Clock, Deadline
from rolloutsync.config import ClientConfig, check_number
from rolloutsync.threads import renew_after_fork

if TYPE_CHECKING:
    from collections.abc import Iterable

    import requests

    from rolloutsync.core import Core

_EXIT_S = 1.0
_LEAST_EXIT_S = 0.1


class CoreOwner:
    """Settings, and the core that is made from them when first used. Thread-safe.

    A pickle carries the settings; a forked child keeps them and makes a core of its own. While the owner lives, the end
    of the interpreter closes it.
    """

    def __init__(self, urls: list[str], config: ClientConfig, session: requests.Session | None, tokenizer: Any) -> None:
        self._urls = urls
        self._config = config
        self._session = session
        self._tokenizer = tokenizer
        self._begin(closed=False)

    def _begin(self, *, closed: bool) -> None:
        self._lock = threading.Lock()  # guards: _urls, _core, _closed. Held while parts are made, never across I/O.
        self._core: Core | None = None
        self._closed = closed
        _owners.add(self)

    def _make_core(self) -> Core:
        """The running parts without engines, made from the settings; no I/O, no thread."""
        raise NotImplementedError

    def _join(self, core: Core, urls: Iterable[str]) -> None:
        """Make engines members."""
        for url in urls:
            core.add(url)

    def _open(self) -> Core:
        """The core; of a closed owner, a closed one."""
        with self._lock:
            if self._core is None:
                self._core = self._make_core()
                self._join(self._core, self._urls)
                if self._closed:
                    self._core.close(0.0)
            return self._core

    def _ready(self) -> Core:
        """The core, once new engines have been asked what they are."""
        core = self._open()
        core.ready()
        return core

    def close(self, timeout: float = 5.0) -> list[str]:
        """End everything: samples in flight are aborted and delivered, threads joined, sockets closed. Idempotent.

        Args:
            timeout: Seconds.

        Returns:
            Names of threads that did not end in time; empty if all did.
        """
        check_number("timeout", timeout)
        with self._lock:
            self._closed, core = True, self._core
        return core.close(timeout) if core is not None else []

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            urls = list(self._urls)
        return {"urls": urls, "config": self._config, "session": self._session, "tokenizer": self._tokenizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._urls, self._config = state["urls"], state["config"]
        self._session, self._tokenizer = state["session"], state["tokenizer"]
        self._begin(closed=False)

    def renew_in_child(self) -> None:
        """No thread but this one exists here: locks may be held by nobody, sockets are the parent's."""
        core = self._core
        self._begin(closed=self._closed)
        if core is not None:
            core.abandon()


_owners: weakref.WeakSet[CoreOwner] = weakref.WeakSet()


def install_sigterm() -> None:
    """Make SIGTERM end this process as ``sys.exit(143)`` does: blocking calls unwind, our own requests are aborted.

    Nothing installs it unasked: by default SIGTERM kills the process, the kernel closes its sockets, and engines abort
    on that. Call it from the main thread; it takes the place of a handler that is there.

    Raises:
        ValueError: Not called from the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        name = threading.current_thread().name
        raise ValueError(f"install_sigterm must be called from the main thread, not from {name!r}")
    signal.signal(signal.SIGTERM, _exit_on_signal)


def _exit_on_signal(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _renew_in_child() -> None:
    renew_after_fork()
    for owner in list(_owners):
        owner.renew_in_child()


def _close_at_exit() -> None:
    """Shut sockets and join for a second, so that a main thread that ends is gone soon."""
    deadline = Deadline.after(Clock(), _EXIT_S)  # for all together
    for owner in list(_owners):
        owner.close(max(_LEAST_EXIT_S, deadline.within(_EXIT_S)))


atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)
