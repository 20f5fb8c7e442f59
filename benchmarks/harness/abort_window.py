"""The measured process of ``abort``: fill the engines, then bring them to idle."""

from __future__ import annotations

import threading
import time
from typing import Any

from benchmarks.harness.plain import abort_all, await_running
from benchmarks.harness.process import answer_spec, cpu_s, memory_bytes
from benchmarks.harness.work import Shape, Work
from benchmarks.peers import OURS, RAW
from benchmarks.peers.raw_peer import RawPeer
from rolloutsync import RolloutClient, Sample, Status

_FOREVER = 20_000  # tokens
_PROMPT = 16


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """By ``RolloutClient``, or by a plain script."""
    work = Work(
        peer=spec["who"],
        urls=spec["urls"],
        threads=spec["threads"],
        requests=spec["threads"],
        shape=Shape(prompt_tokens=_PROMPT, tokens=_FOREVER),
    )
    return (ours if work.peer == OURS else plain)(work, spec["hold_s"])


def ours(work: Work, hold_s: float) -> dict[str, float]:
    """``abort_until_idle``, then all partials."""
    in_flight = -(-work.threads // len(work.urls))
    with RolloutClient(work.urls, engine_concurrency=in_flight, progress=False) as client:
        job = client.start(work.prompts(work.threads), work.shape.sampling, on_error="raise")
        await_running(work.urls, work.threads)
        time.sleep(hold_s)
        cpu, began = cpu_s(), time.perf_counter()
        report = client.abort_until_idle()
        idle = time.perf_counter() - began
        samples = job.result()
        delivered, cpu = time.perf_counter() - began, cpu_s() - cpu
        check_partials(samples, work.threads)
        assert report.idle
    tokens = sum(len(sample.output_ids) for sample in samples)
    return {
        "idle_s": idle,
        "delivered_s": delivered,
        "cpu_ms": 1e3 * cpu / work.threads,
        "tokens": tokens / work.threads,
        "peak_mb": memory_bytes("VmHWM") / 1e6,
    }


def check_partials(samples: list[Sample], wanted: int) -> None:
    """Every one is there, cut short, with its tokens."""
    whole = [sample for sample in samples if sample.status is Status.ABORTED and len(sample.output_ids)]
    if len(samples) != wanted or len(whole) != wanted:
        raise ValueError(f"{len(whole)} partials with tokens among {len(samples)} samples, wanted {wanted}")


def plain(work: Work, hold_s: float) -> dict[str, float]:
    """One bare abort_all for each engine, then its load until that says zero."""
    peer = RawPeer(Work(**{**vars(work), "peer": RAW}))
    wave = threading.Thread(target=peer.run, args=(work.prompts(work.threads),))
    wave.start()
    await_running(work.urls, work.threads)
    time.sleep(hold_s)
    began = time.perf_counter()
    took = abort_all(work.urls)
    wave.join()
    delivered = time.perf_counter() - began
    peer.close()
    return {"slowest_s": max(took), "idle_s": max(took), "delivered_s": delivered}


if __name__ == "__main__":
    answer_spec(measure)
