"""Engines and the processes that launched them: how ever those end, the engines end too."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import alive, await_true, begin

from .servers import Script

pytestmark = pytest.mark.slow

LAUNCH = """
import os, sys, threading
from rolloutsync.launch import launch_engine

folder = sys.argv[1]
env = {"PYTHONPATH": folder + "/modules", "SCRIPT_FOLDER": folder}
made = []
def launch():
    made.append(launch_engine("sglang", model="m", args=["--child", "--deaf"], env=env, log=folder + "/log"))
"""
MAIN = LAUNCH + "launch(); print(made[0].pid, flush=True); "
WAIT = "sys.stdin.readline()"


@pytest.fixture
def parents() -> Iterator[list[subprocess.Popen[str]]]:
    """Ended and reaped whatever happens."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def launched(parents: list[subprocess.Popen[str]], code: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A process that launched an engine, and the engine's process id."""
    process = begin(code, str(folder))
    parents.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return process, int(line)


def check_gone(script: Script, pid: int) -> None:
    """The engine is deaf to SIGTERM, and its child is an orphan in a session of its own."""
    child = int(script.told("child"))
    await_true(lambda: not alive(pid) and not alive(child), f"the end of {pid} and {child}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_parent_that_is_killed(number: int, script: Script, parents: list[subprocess.Popen[str]]) -> None:
    """Nothing of the parent's runs any more, and the engine is gone all the same."""
    process, pid = launched(parents, MAIN + WAIT, script.folder)
    assert alive(pid)
    process.send_signal(number)
    process.wait(20)
    check_gone(script, pid)


def test_a_parent_that_ends(script: Script, parents: list[subprocess.Popen[str]]) -> None:
    """Without ``stop``: the end of a script is enough."""
    process, pid = launched(parents, MAIN, script.folder)
    assert process.wait(20) == 0
    check_gone(script, pid)


def test_a_fork_does_not_keep_it_alive(script: Script, parents: list[subprocess.Popen[str]]) -> None:
    """A worker that the parent forked, and that outlives it, has all of its descriptors."""
    code = LAUNCH + "launch(); child = os.fork()\nif child: print(made[0].pid, child, flush=True)\nsys.stdin.readline()"
    process = begin(code, str(script.folder))
    parents.append(process)
    assert process.stdout is not None
    pid, fork = map(int, process.stdout.readline().split())
    process.kill()
    process.wait(20)
    check_gone(script, pid)
    assert alive(fork)
    os.kill(fork, signal.SIGKILL)


def test_threads_come_and_go_and_then_the_parent(script: Script, parents: list[subprocess.Popen[str]]) -> None:
    """The thread that launched it ends, the engine stays; then the process is killed, and it goes."""
    lines = "t = threading.Thread(target=launch); t.start(); t.join(); print(made[0].pid, flush=True)\n"
    code = LAUNCH + lines + WAIT + "; print(made[0].wait(1.2), flush=True); " + WAIT
    process, pid = launched(parents, code, script.folder)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert process.stdout.readline() == "None\n"
    assert alive(pid)
    process.kill()
    process.wait(20)
    check_gone(script, pid)
