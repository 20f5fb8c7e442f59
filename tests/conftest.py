"""Guards on every test: no thread, socket or connection of ours outlives it, and nothing leaves the loopback."""

from __future__ import annotations

import gc
import ipaddress
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from rolloutsync.transport import registry
from rolloutsync.transport.lean import LeanPath

settings.register_profile("repeatable", deadline=None, derandomize=True)  # a busy machine proves nothing wrong
settings.load_profile("repeatable")

SETTLE_S = 5.0  # a thread or socket that is on its way out may take this long


FAST = "not real and not slow and not ray and not gpu and not torch"  # as in pyproject.toml


def pytest_configure() -> None:
    """Ctrl-C is tried also where a shell has started the tests in the background, for which it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The wire faults must be survived on every path that a request can take.

    ``--path=plain``: none takes the lean path. ``--path=crowd``: each waits for the usher, as in a crowd of hundreds of
    threads. ``--path=parked``: the answers of all that a batch sends are read by the usher's thread.
    """
    parser.addoption("--path", choices=("lean", "plain", "crowd", "parked"), default="lean")


@pytest.fixture(autouse=True)
def transport_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path that requests take in this run."""
    path = str(request.config.getoption("--path"))
    if path == "plain":
        monkeypatch.setattr(LeanPath, "route", lambda *_: None)
    if path == "crowd":
        monkeypatch.setattr(registry, "_CROWD", -1)
        monkeypatch.setattr(registry, "_FEW", 1 << 30)
    if path == "parked":
        monkeypatch.setattr(registry, "_FEW", 0)
    return path


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The fast suite has two cores; what a marker asks for runs alone: it measures time, or starts large engines."""
    return 2 if config.option.markexpr == FAST else 0


def our_threads() -> set[str]:
    """Names of live threads that rolloutsync started."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("rolloutsync-")}


def open_sockets() -> set[str]:
    """Inodes of this process's sockets."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


@pytest.fixture
def before_the_guard() -> None:
    """Override it in a folder's conftest to start what outlives a test there before the guard takes its count."""


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest, before_the_guard: None) -> Iterator[None]:
    """Fails a test that leaves a thread or a socket behind."""
    threads, sockets = our_threads(), open_sockets()
    yield
    deadline = time.monotonic() + SETTLE_S
    while (left := _left(threads, sockets)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    if left:
        pytest.fail(f"{request.node.nodeid} left behind: {', '.join(sorted(left))}")


def _left(threads: set[str], sockets: set[str]) -> set[str]:
    return (our_threads() - threads) | (open_sockets() - sockets)


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that connects to another machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in {socket.AF_INET, socket.AF_INET6} and not _is_loopback(str(address[0])):
            raise AssertionError(f"a test tried to connect to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
