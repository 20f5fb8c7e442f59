"""Python code in processes of its own, with this checkout's modules."""

from __future__ import annotations

import os
import subprocess
import sys
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
