"""The measured process of ``memory``: what samples keep, and what threads in flight take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.plain import Control, await_running
from benchmarks.harness.process import answer_spec, forget_peak, live_bytes, memory_bytes, trimmed_bytes
from benchmarks.harness.work import Work
from benchmarks.peers import make_peer
from benchmarks.peers.base import Answer, Peer
from benchmarks.peers.ours_peer import Ours
from rolloutsync import Sample

MB = 1e6


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """``kind`` is "keep", "step" or "threads"."""
    work = Work.from_dict(spec["work"])
    peer = make_peer(work)
    try:
        return {"keep": keep, "step": step, "threads": threads}[spec["kind"]](work, peer)
    finally:
        peer.close()


def samples_of(peer: Peer) -> Callable[[Sequence[list[int]]], Sequence[Any]]:
    """What a user of this client would keep."""
    return peer.samples if isinstance(peer, Ours) else peer.run


def keep(work: Work, peer: Peer) -> dict[str, float]:
    """Allocated for samples that are kept, and still there when they are dropped; needs ``PYTHONMALLOC=malloc``."""
    make, idle = samples_of(peer), live_bytes()
    make(work.prompts(work.threads))  # what one call leaves behind, the next one must not
    samples = make(work.prompts(work.requests))
    arrays, live = sum(map(array_bytes, samples)), live_bytes() - idle
    count = len(samples)
    del samples
    return {
        "arrays_mb": arrays / MB,
        "live_mb": live / MB,
        "live_percent": 100.0 * (live / arrays - 1.0),
        "each_bytes": (live - arrays) / count,
        "left_mb": (live_bytes() - idle) / MB,
    }


def step(work: Work, peer: Peer) -> dict[str, float]:
    """Resident in the end, and at most, beyond the idle process."""
    prompts = work.prompts(work.requests)
    idle = trimmed_bytes()
    forget_peak()
    samples = samples_of(peer)(prompts)
    peak = memory_bytes("VmHWM") - idle
    resident, arrays = trimmed_bytes() - idle, sum(map(array_bytes, samples))
    return {
        "arrays_mb": arrays / MB,
        "resident_mb": resident / MB,
        "resident_percent": 100.0 * (resident / arrays - 1.0),
        "peak_mb": peak / MB,
        "over_mb": (peak - resident) / MB,
    }


def array_bytes(sample: Sample | Answer) -> int:
    """Of all arrays that a sample was asked for."""
    if isinstance(sample, Answer):
        arrays: tuple[Any, ...] = (sample.ids, sample.logprobs, sample.experts)
    else:
        arrays = (sample.output_ids, sample.logprobs, sample.routed_experts, sample.prompt.input_ids)
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def threads(work: Work, peer: Peer) -> dict[str, float]:
    """Megabytes above the idle process while all requests are in flight, and at most until all are answered."""
    prompts = work.prompts(work.threads)
    before = trimmed_bytes()
    forget_peak()
    wave = threading.Thread(target=peer.run, args=(prompts,))
    wave.start()
    await_running(work.urls, work.threads)
    flying = memory_bytes() - before
    for url in work.urls:
        Control(url).call("POST", "/bench/release")
    wave.join()
    return {"flying_mb": flying / MB, "peak_mb": (memory_bytes("VmHWM") - before) / MB}


if __name__ == "__main__":
    answer_spec(measure)
