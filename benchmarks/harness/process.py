"""Processes: fresh ones that are measured, and what the kernel says of one."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
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


def memory_bytes(key: str = "VmRSS", pid: int | str = "self") -> int:
    """Of this process or another: ``VmRSS`` now, ``VmHWM`` at most. (``ru_maxrss`` counts the parent too.)"""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``, in which only two of the names matter."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "free", "fast", "maps", "hblkhd", "_", "fast_bytes", "uordblks", "fordblks", "keepcost")
    )


def live_bytes() -> int:
    """Allocated and not freed, by the C library's own books over all its arenas.

    Complete only in a process whose Python allocates all through it: ``PYTHONMALLOC=malloc``.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def trimmed_bytes() -> int:
    """Resident, after everything that is free was given back as far as the C library does."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory_bytes()


def forget_peak() -> None:
    """Let ``VmHWM`` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def environment() -> dict[str, str]:
    """Of a child that finds the benchmarks and the library."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def answer_spec(measure: Callable[[Any], Mapping[str, Any]]) -> None:
    """The main program of a fresh process: JSON in, what was measured out."""
    raise_file_limit()
    print(json.dumps(measure(json.load(sys.stdin))))


def run_fresh(module: str, spec: str, *, timeout_s: float = 900.0, **variables: str) -> dict[str, Any]:
    """Run ``python -m module`` with ``spec`` as its standard input; the JSON that it prints last.

    ``variables`` are added to its environment.

    Raises:
        BenchmarkError: It failed, or took too long.
    """
    command, env = [sys.executable, "-m", module], environment() | variables
    try:
        done = subprocess.run(
            command, input=spec, text=True, capture_output=True, env=env, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{module} took longer than {timeout_s:g} s: {spec}") from None
    if done.returncode:
        raise BenchmarkError(f"{module} ended with {done.returncode} ({spec}):\n{done.stderr[-LAST_CHARS:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
