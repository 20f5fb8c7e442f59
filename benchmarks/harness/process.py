"""Processes: fresh ones that are measured, and what the kernel says of one."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAST_CHARS = 4000


class BenchmarkError(RuntimeError):
    """A process of a benchmark failed; the message carries its last words."""


def raise_file_limit() -> None:
    """Allow as many open files as may be."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def cpu_s() -> float:
    """User and system seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory_bytes(key: str = "VmRSS") -> int:
    """Of this process: ``VmRSS`` now, ``VmHWM`` at most. (``ru_maxrss`` would count the parent before the exec.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


def forget_peak() -> None:
    """Let ``VmHWM`` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def environment() -> dict[str, str]:
    """Of a child that finds the benchmarks and the library."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def run_fresh(module: str, spec: str, *, timeout_s: float = 900.0) -> dict[str, Any]:
    """Run ``python -m module`` with ``spec`` as its standard input; the JSON that it prints last.

    Raises:
        BenchmarkError: It failed, or took too long.
    """
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(
            command, input=spec, text=True, capture_output=True, env=environment(), timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{module} took longer than {timeout_s:g} s: {spec}") from None
    if done.returncode:
        raise BenchmarkError(f"{module} ended with {done.returncode} ({spec}):\n{done.stderr[-LAST_CHARS:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
