"""Python code in processes of its own, with this checkout's modules."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(code: str, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    quiet = {"PYTHONWARNINGS": "ignore::DeprecationWarning"}  # of fork beside threads, from 3.12 on
    process = begin(code, *arguments, **quiet)
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def begin(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts it; it may wait for a line from ``stdin``."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_true(what: Callable[[], bool], means: str | Callable[[], str], seconds: float = 20.0) -> None:
    """Poll an observable until it shows what the test needs."""
    deadline = time.monotonic() + seconds
    while not what():
        in_time = time.monotonic() < deadline
        assert in_time, f"waited {seconds:.0f} s for {means if isinstance(means, str) else means()}"
        time.sleep(0.02)
