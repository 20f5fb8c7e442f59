"""Engines as processes: they start together, and none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rolloutsync.sim import SimConfig, SimEngine, SimFleet, SimStartError, run_engines

from .kit import WAIT_S, generation, until

ROOT = Path(__file__).resolve().parents[2]


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_fleet_is_the_sequence_of_its_urls() -> None:
    """Index, length, iteration, slices; every engine has a port of its own."""
    with SimFleet(engines=2, tokens_per_second=1000.0) as fleet:
        assert isinstance(fleet, Sequence)
        assert list(fleet) == fleet.urls == [engine.url for engine in fleet.engines]
        assert fleet[0] == fleet.urls[0] != fleet[-1]
        assert fleet[:1] == [fleet[0]]
        assert len(fleet) == 2
        assert fleet[1] in fleet
        assert all(engine.call("GET", "/model_info")["model_path"] == "sim-model" for engine in fleet.engines)


def test_a_fleet_stops_at_once_with_requests_in_flight() -> None:
    """Whatever the engines are doing, also when one is stopped by a signal."""
    with SimFleet(engines=2) as fleet:
        pids = [engine.pid for engine in fleet.engines]
        wires = [socket.create_connection(("127.0.0.1", engine.port)) for engine in fleet.engines]
        for wire in wires:
            wire.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        fleet.engines[0].freeze()
        started = time.monotonic()
    assert time.monotonic() - started < 1.0
    assert all(gone(pid) for pid in pids)
    for wire in wires:
        wire.close()


def test_an_exception_ends_the_engines() -> None:
    """The block's error passes through, the processes do not outlive it."""
    fleet = SimFleet(engines=1)
    with pytest.raises(RuntimeError, match="404"), fleet:
        fleet.engines[0].call("GET", f"/{fleet.engines[0].pid}")
    assert not fleet.engines[0].alive


def test_a_failed_start_tells_why_and_leaves_nothing() -> None:
    """The message has what the child wrote to its standard error."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fleet = SimFleet(configs=[SimConfig(), SimConfig(port=port)])
        with pytest.raises(SimStartError, match="ddress already in use"):
            fleet.start()
    assert not any(engine.alive for engine in fleet.engines)


def test_a_killed_engine_refuses_until_it_is_restarted_on_its_port() -> None:
    """With an empty memory."""
    with SimFleet(engines=1) as fleet:
        engine = fleet.engines[0]
        url, pid = engine.url, engine.pid
        engine.call("POST", "/generate", generation([5, 6], 2))
        engine.kill()
        assert not engine.alive
        with pytest.raises(ConnectionRefusedError):
            engine.state()
        engine.restart()
        assert (engine.url, engine.state()["started"]) == (url, 0)
        assert engine.pid != pid


def test_a_frozen_engine_accepts_and_does_not_answer() -> None:
    """SIGSTOP and SIGCONT."""
    with SimFleet(engines=1) as fleet:
        engine = fleet.engines[0]
        engine.freeze()
        with pytest.raises(TimeoutError):
            engine.call("GET", "/model_info", timeout=0.2)
        engine.thaw()
        assert engine.call("GET", "/model_info")["is_generation"] is True


def test_sigterm_lets_running_requests_finish() -> None:
    """/health says 503 meanwhile, then the process ends by itself."""
    with SimFleet(engines=1, tokens_per_second=100.0, health_poll_s=0.01) as fleet:
        engine = fleet.engines[0]
        answers: list[int] = []
        caller = threading.Thread(
            target=lambda: answers.append(len(engine.call("POST", "/generate", generation([5], 50))["output_ids"]))
        )
        caller.start()
        until(engine.state, lambda state: bool(state["running"]), "a running request")
        engine.terminate()

        def unhealthy() -> bool:
            try:
                engine.call("GET", "/health")
            except RuntimeError:
                return True
            return False

        until(unhealthy, bool, "a 503 from /health")
        caller.join(WAIT_S)
        assert answers == [50]
        assert engine.wait(WAIT_S) == 0


def test_sigterm_can_end_at_once() -> None:
    """Where the settings say so."""
    with SimFleet(engines=1, drain_on_sigterm=False) as fleet:
        fleet.engines[0].terminate()
        assert fleet.engines[0].wait(WAIT_S) == 0


@pytest.mark.parametrize("thread", ["main", "other"])
def test_engines_die_with_a_parent_that_is_killed(thread: str) -> None:
    """Even by SIGKILL, which no handler sees, and even if the fleet was started by another thread."""
    code = (
        "import sys, threading, time\n"
        "from rolloutsync.sim import SimFleet\n"
        "fleet = SimFleet(engines=1)\n"
        "if sys.argv[1] == 'main':\n"
        "    fleet.start()\n"
        "else:\n"
        "    starter = threading.Thread(target=fleet.start)\n"
        "    starter.start()\n"
        "    starter.join()\n"
        "print(fleet.engines[0].pid, fleet.engines[0].call('GET', '/model_info')['is_generation'], flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code, thread], stdout=subprocess.PIPE, text=True, env=environment)
    with parent:
        assert parent.stdout is not None
        pid, alive = parent.stdout.readline().split()
        assert alive == "True"
        assert not gone(int(pid))
        parent.kill()
    until(lambda: gone(int(pid)), bool, "the end of the engine")


def test_a_fork_of_the_starter_leaves_the_engines_alone() -> None:
    """It may leave the block, or exit, without ending what is not its own."""
    code = (
        "import os, sys\n"
        "from rolloutsync.sim import SimFleet\n"
        "with SimFleet(engines=1) as fleet:\n"
        "    if os.fork() == 0:\n"
        "        sys.exit(0)\n"
        "    os.wait()\n"
        "    print(fleet.engines[0].call('GET', '/model_info')['is_generation'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_foreground_runner_ends_on_sigterm() -> None:
    """Consecutive ports, one callback, nothing printed."""
    code = (
        "from rolloutsync.sim import run_engines\n"
        "run_engines(2, 0, on_ready=lambda urls: print(*urls, flush=True), tokens_per_second=500.0)\n"
        "print('ended')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    with runner:
        assert runner.stdout is not None
        urls = runner.stdout.readline().split()
        assert len(set(urls)) == 2
        runner.send_signal(signal.SIGTERM)
        assert runner.stdout.read() == "ended\n"
        assert runner.wait(WAIT_S) == 0
    for url in urls:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))


def test_the_foreground_runner_reports_a_taken_port() -> None:
    """As an error, with no engine left and the signal handlers as they were."""
    before = signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SimStartError):
        run_engines(1, taken.getsockname()[1])
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_engine_that_was_not_started_says_so() -> None:
    """Instead of a strange error."""
    with pytest.raises(RuntimeError, match="was not started"):
        SimEngine(SimConfig()).kill()
