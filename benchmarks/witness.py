"""The witness of a soak: looks every second at the engines' own books, and at this process's sockets and memory."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.findings import Findings
from rolloutsync.sim import SimEngine, SimFleet

LOOK_S = 1.0
CALL_S = 2.0
CLOSE_WAIT_S = 5.0  # an idle socket lives two seconds; the rest is for a machine that is busy
_RUNS = {"waiting", "prefill", "running"}
_CLOSE_WAIT = "08"
_PAGE = os.sysconf("SC_PAGE_SIZE")

Row = dict[str, Any]


class Witness:
    """A thread of its own. Thread-safe.

    Args:
        fleet: Its engines.
        findings: Told of what must not be.
        copies_s: For so long more copies of a prompt may run than were asked for: until an engine notices that one was
            aborted, or that nobody waits for it.
        most: Gives how many copies of a prompt may run at once: the size of its group.
    """

    def __init__(self, fleet: SimFleet, findings: Findings, copies_s: float, most: Callable[[int], int]) -> None:
        self._engines = fleet.engines
        self._findings = findings
        self._copies_s = copies_s
        self._most = most
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)
        self._copies_since: dict[int, float] = {}
        self._unread_since: dict[str, float] = {}
        # _lock guards: everything below
        self._lock = threading.Lock()
        self._generations: Counter[int] = Counter()  # by prompt
        self._memory: list[float] = []  # megabytes, look by look
        self._threads = 0
        self._copies: set[int] = set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        running: Counter[int] = Counter()
        for engine in self._engines:
            state = read(engine)
            if state is not None and not state["frozen"] and not state["paused"]:
                running.update(int(row["prompt_hash"], 16) for row in _known(state) if row["state"] in _RUNS)
        self._judge_copies(running, time.monotonic())
        self._look_at_sockets()
        with self._lock:
            self._memory.append(resident_mb())
            self._threads = max(self._threads, threading.active_count())

    def take_down(self, engine: SimEngine) -> Row | None:
        """Take an engine's own books down, before they are lost; None if it cannot be read now."""
        state = read(engine)
        if state is not None:
            with self._lock:
                self._generations.update(int(row["prompt_hash"], 16) for row in _known(state))
        return state

    def _judge_copies(self, running: Counter[int], now: float) -> None:
        """Who runs more often than asked for may do so for a moment only; each is told once."""
        many = {key for key, count in running.items() if count > self._most(key)}
        self._copies_since = {key: self._copies_since.get(key, now) for key in many}
        with self._lock:
            self._copies |= many
        for key, since in self._copies_since.items():
            if now - since > self._copies_s:
                words = f"prompt {key:016x}: {running[key]} copies for {now - since:.1f} s"
                self._findings.add("second copies running too long", words)
                self._copies_since[key] = float("inf")

    def _look_at_sockets(self) -> None:
        now = time.monotonic()
        self._unread_since = {inode: self._unread_since.get(inode, now) for inode in unread_sockets()}
        for inode, since in self._unread_since.items():
            if now - since > CLOSE_WAIT_S:
                self._findings.add("sockets in CLOSE_WAIT", f"socket {inode} for {now - since:.1f} s")
                self._unread_since[inode] = float("inf")

    def generations(self) -> dict[int, int]:
        """How many generations the engines began for each prompt, as far as they lived to tell."""
        with self._lock:
            return dict(self._generations)

    def facts(self) -> list[tuple[str, object]]:
        """What it saw, for the report."""
        with self._lock:
            generations = sum(self._generations.values())
            return [
                ("generations that engines began", generations),
                ("second copies, for a moment", len(self._copies)),
                ("threads at once", self._threads),
            ]

    def growth_mb(self) -> tuple[float, float, float]:
        """(least memory in the second quarter, in the last one, the difference), in megabytes.

        The least, since each of the threads that come and go takes some while it lives.
        """
        with self._lock:
            sizes = [*self._memory, resident_mb()]
        quarter = max(1, len(sizes) // 4)
        early, late = min(sizes[quarter : 2 * quarter] or sizes), min(sizes[-quarter:])
        return early, late, late - early


def read(engine: SimEngine) -> Row | None:
    """An engine's own books; None if it cannot be read now."""
    try:
        state: Row = engine.call("GET", "/sim/state", timeout=CALL_S)
    except (OSError, RuntimeError, ValueError):
        return None
    return state


def _known(state: Row) -> Iterator[Row]:
    """The generations that came to be; a request that was turned away is none."""
    return (row for row in state["generations"] if row["prompt_hash"] and row["state"] != "refused")


def resident_mb() -> float:
    """This process's memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE / 1e6


def our_sockets() -> dict[str, tuple[int, str]]:
    """This process's TCP sockets: (remote port, state) by inode."""
    ours = {_target(fd) for fd in Path("/proc/self/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return {row[9]: (int(row[2].rpartition(":")[2], 16), row[3]) for row in rows if f"socket:[{row[9]}]" in ours}


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""


def unread_sockets() -> set[str]:
    """Inodes of this process's sockets in CLOSE_WAIT."""
    return {inode for inode, (_, state) in our_sockets().items() if state == _CLOSE_WAIT}


def sockets_to(ports: set[int]) -> dict[str, tuple[int, str]]:
    """This process's sockets to some ports."""
    return {inode: found for inode, found in our_sockets().items() if found[0] in ports}
