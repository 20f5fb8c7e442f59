"""The measured process: warm up, measure one window, check every answer.

Reads ``Work`` as JSON from standard input and prints what it measured.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

from benchmarks.harness.process import cpu_s, forget_peak, memory_bytes, raise_file_limit
from benchmarks.harness.work import Work
from benchmarks.peers import make_peer
from benchmarks.peers.base import Peer, check


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One window.

    Attributes:
        requests: Answered in it.
        wall_s: Its length.
        cpu_s: User and system seconds of the client process in it.
        idle_bytes: Resident before the first request.
        peak_bytes: Resident at most, in the window.
        retries: Requests that had to be sent again.
    """

    requests: int
    wall_s: float
    cpu_s: float
    idle_bytes: int
    peak_bytes: int
    retries: int


def measure(work: Work, peer: Peer) -> Measurement:
    """Warm up, then measure."""
    idle = memory_bytes()
    rate = warm_up(work, peer)
    if work.seconds:
        rate = warm_up(work, peer)  # the first was slowed by its connects
    count = max(work.threads, round(rate * work.seconds)) if work.seconds else work.requests
    prompts = work.prompts(count)
    forget_peak()
    cpu, began = cpu_s(), time.perf_counter()
    answers = peer.run(prompts)
    wall, cpu = time.perf_counter() - began, cpu_s() - cpu
    peak = memory_bytes("VmHWM")
    check(answers, work, count)
    retries = getattr(peer, "retries", 0)
    return Measurement(requests=count, wall_s=wall, cpu_s=cpu, idle_bytes=idle, peak_bytes=peak, retries=retries)


def warm_up(work: Work, peer: Peer) -> float:
    """Open connections, start threads; answers per second."""
    count = work.threads if work.warmup is None else work.warmup
    prompts = work.prompts(count)
    began = time.perf_counter()
    check(peer.run(prompts), work, count)
    return count / (time.perf_counter() - began)


def main() -> None:
    raise_file_limit()
    work = Work.from_json(sys.stdin.read())
    peer = make_peer(work)
    try:
        measured = measure(work, peer)
    finally:
        peer.close()
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
