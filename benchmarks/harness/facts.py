"""On what machine, with which versions, something was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.harness.process import ROOT

_LIBRARIES = (
    *("rolloutsync", "requests", "urllib3", "orjson", "pybase64", "numpy"),
    *("httpx", "aiohttp", "uvloop", "matplotlib"),
)


def machine_facts() -> dict[str, Any]:
    """For the JSON file and below the plot."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load": os.getloadavg()[0],
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "commit": _commit(),
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """With a "+" where the tree was changed since."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
