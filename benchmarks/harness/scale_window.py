"""The measured process of ``scale``: a fleet's driver, with a Ray of its own for its actors."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})

import ray

from benchmarks.harness.process import answer_spec, cpu_s, environment, memory_bytes
from benchmarks.harness.work import Work
from rolloutsync.ray_fleet import RolloutFleet

MB = 1e6
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """One warm-up with every place taken, then the batch that counts."""
    work = Work.from_dict(spec["work"])
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        ray.init(
            num_cpus=spec["actors"],
            include_dashboard=False,
            object_store_memory=spec["store_bytes"],
            logging_level="ERROR",
            log_to_driver=False,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": {"PYTHONPATH": environment()["PYTHONPATH"]}},
        )
        try:
            return _measure(work, spec)
        finally:
            ray.shutdown()


def _measure(work: Work, spec: dict[str, Any]) -> dict[str, float]:
    per_engine = work.threads // len(work.urls)
    with RolloutFleet(
        work.urls, actors=spec["actors"], engine_concurrency=per_engine, actor_wait_s=120.0, progress=False
    ) as fleet:
        _make(fleet, work, work.threads)
        pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in fleet.actors])
        actors, driver, began = sum(map(_cpu_s, pids)), cpu_s(), time.perf_counter()
        for _ in range(spec["batches"]):
            _make(fleet, work, work.requests // spec["batches"])
        wall, driver, actors = time.perf_counter() - began, cpu_s() - driver, sum(map(_cpu_s, pids)) - actors
        assert fleet.audit().balanced
        peaks = [memory_bytes("VmHWM", pid) for pid in pids]
    return {
        "wall_s": wall,
        "per_s": work.requests / wall,
        "actor_ms": 1e3 * actors / work.requests,
        "driver_ms": 1e3 * driver / work.requests,
        "actor_cores": actors / wall / spec["actors"],
        "actor_mb": max(peaks) / MB,
        "driver_mb": memory_bytes("VmHWM") / MB,
    }


def _make(fleet: RolloutFleet, work: Work, count: int) -> None:
    for sample in fleet.start(work.prompts(count), work.shape.sampling, on_error="raise", **work.shape.fields):
        if sample.error is not None or len(sample.output_ids) != work.shape.tokens:
            raise ValueError(f"a wrong sample: {sample!r:.300}")


def _cpu_s(pid: int) -> float:
    """User and system seconds of another process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


if __name__ == "__main__":
    answer_spec(measure)
