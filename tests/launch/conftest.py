"""Launched engines: every test ends with nothing left of what it started, down to the guards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rolloutsync.launch import LaunchedEngine, launch_engine
from tests.processes import await_true

from .servers import Script

QUICK = ("--config-json", '{"health_poll_s": 0.01}')


@pytest.fixture
def script(tmp_path: Path) -> Script:
    folder = tmp_path / "script"
    folder.mkdir()
    return Script(folder)


@pytest.fixture
def start(script: Script, tmp_path: Path) -> Callable[..., LaunchedEngine]:
    """Launches the scripted server; the test ends it."""

    def started(*args: str, kind: str = "sglang", **options: Any) -> LaunchedEngine:
        env = {**script.env, **options.pop("env", {})}
        options.setdefault("log", tmp_path / "engine.log")
        return launch_engine(kind, **{"model": "some/model", "args": args, "env": env, **options})

    return started


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Each process here has the test's folder in its command line or its environment; none may outlive the test."""
    yield
    await_true(lambda: not carrying(str(tmp_path)), lambda: f"the end of {carrying(str(tmp_path))}")


def carrying(mark: str) -> dict[int, str]:
    """Processes with this text in their environment or command line, but for this one."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                text = words + (folder / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in text:
                found[int(folder.name)] = words.decode(errors="replace")[:200]
    return found
