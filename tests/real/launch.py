"""Real engines as child processes: started together, watched until ready, ended whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import requests

from .kit import OFFLINE, RECIPE, SHIMS, Kit, tail

GUARD = RECIPE / "guard.py"
READY_TIMEOUT_S = 150.0
GRACE_S = 15.0
LIMITS = (  # what the tests count on, whatever the engine runs on
    *("--skip-server-warmup", "--sleep-on-idle"),
    *("--max-total-tokens", "8192", "--context-length", "2048"),
    *("--max-running-requests", "4", "--chunked-prefill-size", "256"),
)
CPU_ENGINE = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(SHIMS),
}
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--mem-fraction-static", "0.1"),
)


class EngineFailed(Exception):  # noqa: N818  (an event, told with the end of the engine's log)
    """A real engine did not come up, or did not stay up."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What an engine runs on, and what SGLang has to be told for that."""

    name: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = READY_TIMEOUT_S


CPU = Device(name="CPU", flags=CPU_FLAGS, environment=CPU_ENGINE)


class RealEngine:
    """One server with a tiny model, in a process group of its own: SGLang's here, other engines in subclasses.

    Start it from the main thread: it is killed when the thread that started it ends. Not safe for use from several
    threads, but `url` may be read anywhere once it is ready.

    Args:
        kit: The cached environment.
        model: The checkpoint to serve.
        log: Where the server's output goes.
        flags: Further arguments of the server's command line.
        device: What it runs on.
    """

    name = "SGLang"
    alive_path = "/model_info"  # answers once the server does
    shared_prefixes: tuple[str, ...] = ("sglang_loads_",)  # of its files in /dev/shm, which a killed one leaves there

    def __init__(self, kit: Kit, model: Path, log: Path, flags: Sequence[str] = (), *, device: Device = CPU) -> None:
        self.model = model
        self.device = device
        self.log = log
        self.url = ""
        self.version = ""
        self.ready_after_s = 0.0
        self._shared: set[Path] = set()
        self._scratch: str | None = None
        self._kit = kit
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Connection"] = "close"  # no socket stays behind between two calls

    @property
    def pid(self) -> int:
        """The server's process id, which is its group's too."""
        return self._running().pid

    def start(self) -> None:
        """Starts the process and returns at once; after `kill`, on the port that it had."""
        port, rendezvous = free_ports(2)
        port = int(self.url.rpartition(":")[2]) if self.url else port
        self.url = f"http://127.0.0.1:{port}"
        self._started = time.monotonic()
        self._scratch = tempfile.mkdtemp(prefix="rs-")  # short: SGLang's sockets go there, and their paths are limited
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command(port, rendezvous),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **OFFLINE, **self._environment(), "TMPDIR": self._scratch},
                start_new_session=True,
            )

    def _command(self, port: int, rendezvous: int) -> list[str]:
        guard = [sys.executable, str(GUARD), str(os.getpid()), str(self._kit.python)]
        return [*guard, *self._server(port, rendezvous), *self.device.flags, *self._flags]

    def _server(self, port: int, rendezvous: int) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(rendezvous)]
        return ["-m", "sglang.launch_server", "--model-path", str(self.model), *address, *LIMITS]

    def _environment(self) -> dict[str, str]:
        return dict(self.device.environment)

    def wait_ready(self) -> None:
        """Blocks until the engine has generated its first token.

        Raises:
            EngineFailed: It ended, or was not ready in time; the message shows the end of its log.
        """
        timeout_s = self.device.ready_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            self.check_alive()
            if time.monotonic() > deadline:
                raise EngineFailed(self._story(f"not ready within {timeout_s:.0f} s"))
            time.sleep(0.2)
        self._first_token()
        self.version = self._tells_version()
        self.ready_after_s = time.monotonic() - self._started
        self._shared = _shared_files(self.pid, self.shared_prefixes)

    def _answers(self) -> bool:
        try:
            return self._session.get(self.url + self.alive_path, timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def _first_token(self) -> None:
        path, body = self._shortest()
        answer = self._session.post(self.url + path, json=body, timeout=60)
        if answer.status_code != 200:
            raise EngineFailed(self._story(f"first generate answered {answer.status_code}: {answer.text}"))

    def _shortest(self) -> tuple[str, dict[str, object]]:
        return "/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}

    def _tells_version(self) -> str:
        return str(self._session.get(f"{self.url}/server_info", timeout=30).json()["version"])

    def check_alive(self) -> None:
        """Raises `EngineFailed`, with the end of the log, if the process has ended."""
        code = self._running().poll()
        if code is not None:
            raise EngineFailed(self._story(f"ended with {code}"))

    def ask_to_stop(self) -> None:
        """Sends SIGTERM and returns at once; the engines take seconds to follow."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the server and its children at once, as a crash would."""
        process, self._process = self._running(), None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._sweep()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Ends the server and its children: asks, waits up to `grace_s`, then kills the group. Idempotent."""
        process, self._process = self._process, None
        self._session.close()
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _kill_group_after(process, grace_s)
        self._sweep()

    def _sweep(self) -> None:
        for file in self._shared:
            file.unlink(missing_ok=True)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EngineFailed(f"engine with model {self.model} has not been started")
        return self._process

    def _story(self, what: str) -> str:
        return f"{self.name} at {self.url} ({self.model.name}): {what}; the end of {self.log}:\n{tail(self.log)}"


def start_all(engines: Sequence[RealEngine]) -> None:
    """Starts engines side by side and blocks until all are ready; on any failure none is left running."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
    except BaseException:
        stop_all(engines, grace_s=0.0)
        raise


def stop_all(engines: Sequence[RealEngine], grace_s: float = GRACE_S) -> None:
    """Ends engines side by side."""
    for engine in engines:
        engine.ask_to_stop()
    for engine in engines:
        engine.stop(grace_s)


def free_ports(count: int) -> list[int]:
    """Returns distinct loopback ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _kill_group_after(process: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _kill_group(process.pid)
    process.wait()


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # the server took its children along


def descendants(pid: int) -> list[int]:
    """A process and what it started, and what those started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [pid, *(each for child in children for each in descendants(child))]


def _shared_files(pid: int, prefixes: tuple[str, ...]) -> set[Path]:
    """Engines have files in /dev/shm and, when killed, leave them there, so somebody has to know them."""
    maps = "".join(Path(f"/proc/{each}/maps").read_text() for each in descendants(pid))
    files = {Path(line.split()[-1]) for line in maps.splitlines() if "/dev/shm/" in line}
    return {file for file in files if file.name.startswith(prefixes)}
