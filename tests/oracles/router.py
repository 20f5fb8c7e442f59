"""Real routers, each in a cached environment of its own: independent clients of the simulated engines."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from tests.real.kit import KitError, Report, run, tail
from tests.real.launch import free_ports

from .wheel import cached


@dataclass(frozen=True)
class Release:
    """One release of a router, from the package registry."""

    package: str
    version: str
    module: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


CURRENT = Release("sglang-router", "0.3.2", "sglang_router.launch_router")
OLDER = Release("sglang-router", "0.2.1", "sglang_router.launch_router")  # it still has /list_workers
NEWER = Release("smg", "1.13.0", "smg.launch_router")  # what the project became
RELEASES = (CURRENT, OLDER, NEWER)
LOOPBACK = "127.0.0.1"
READY_TIMEOUT_S = 60.0
GRACE_S = 5.0
LISTEN = "0A"
BOOTSTRAP_PORT = "8998"  # of a prefill engine, told on to the one that decodes; nothing listens there
# Each failure must show, and a restarted engine count again as soon as it is healthy.
QUICK = ("--health-check-interval-secs", "1", "--worker-startup-check-interval", "1")
FLAGS = ("--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker", *QUICK)


def ensure(report: Report, release: Release = CURRENT) -> Path:
    """Returns the interpreter of the router's environment, filling that first if it is not in the cache.

    Args:
        report: Called with one line before each step that takes long, and with the version that is found.
        release: Of which router.

    Raises:
        KitError: The package cannot be had; the message shows what pip said.
    """
    name = f"{release.package}-{release.version}-py{sys.version_info.major}.{sys.version_info.minor}"
    python = cached(name, lambda venv: _install(venv, report, release), report) / "bin" / "python"
    asked = f"import importlib.metadata as m; print(m.version({release.package!r}))"
    found = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    report(f"{release.package} {found.stdout.strip()}")
    return python


def _install(venv: Path, report: Report, release: Release) -> None:
    report(f"installing {release} (100 to 150 MB) into {venv}")
    log = venv.parent / "router.log"
    run([sys.executable, "-m", "venv", str(venv)], log)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run([*pip, "--only-binary", ":all:", f"{release.package}=={release.version}"], log)


class Router:
    """One router process on the loopback; a context manager that ends it by its own id.

    Args:
        python: The interpreter of its environment.
        workers: Base URLs of the engines; in a disaggregated fleet, of those that decode.
        prefill: Base URLs of the engines that prefill; any makes the fleet a disaggregated one.
        flags: Its policy, and how fast it notices things; `FLAGS` where nothing else matters.
        release: That `python` has.
        key: Sent with each question to it; the flags must say the same.
    """

    def __init__(
        self,
        python: Path,
        workers: Sequence[str],
        *,
        prefill: Sequence[str] = (),
        flags: Sequence[str] = FLAGS,
        release: Release = CURRENT,
        key: str | None = None,
    ) -> None:
        self._module = release.module
        self._python = python
        self._expected = {*workers, *prefill}
        self._fleet = _fleet(workers, prefill)
        self._flags = flags
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.headers["Connection"] = "close"
        if key is not None:
            self.session.headers["Authorization"] = f"Bearer {key}"
        self.url = ""

    def __enter__(self) -> Router:
        self._log = Path(tempfile.mkstemp(prefix="router-", suffix=".log")[1])
        port, metrics = free_ports(2)
        self.url, self.ports = f"http://{LOOPBACK}:{port}", {port, metrics}
        address = ["--host", LOOPBACK, "--port", str(port), "--prometheus-host", LOOPBACK]
        command = [str(self._python), "-m", self._module, *address, "--prometheus-port", str(metrics)]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *self._flags, *self._fleet],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            self._await_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while {url.partition("@")[0] for url in self.healthy()} != self._expected:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise KitError(f"the router did not get ready; the end of {self._log}:\n{tail(self._log)}")
            time.sleep(0.05)

    def _stop(self) -> None:
        self.session.close()
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.unlink()

    def healthy(self) -> set[str]:
        """The engines that it would send to now; none if it does not answer."""
        try:
            return {worker["url"] for worker in self.workers() if worker["is_healthy"]}
        except requests.RequestException:
            return set()

    def workers(self) -> list[dict[str, Any]]:
        """What it lists; with `--dp-aware` there is one entry for each rank, `url@rank`."""
        answer = self.session.get(f"{self.url}/workers", timeout=5)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["workers"]
        return found

    def add(self, url: str) -> str:
        """Asks it to take an engine in, which it does later, and returns the id that the engine has there."""
        answer = self.session.post(f"{self.url}/workers", json={"url": url}, timeout=5)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["worker_id"])

    def remove(self, worker_id: str) -> None:
        """Asks it to forget an engine."""
        answer = self.session.delete(f"{self.url}/workers/{worker_id}", timeout=5)
        assert answer.status_code == 202, answer.text

    def listening(self) -> set[tuple[str, int]]:
        """Address and port of every socket on which the process listens."""
        files = Path(f"/proc/{self._process.pid}/fd").iterdir()
        return _listeners({file.readlink().name for file in files if file.is_symlink()})


def _fleet(workers: Sequence[str], prefill: Sequence[str]) -> list[str]:
    if not prefill:
        return ["--worker-urls", *workers]
    first = [word for url in prefill for word in ("--prefill", url, BOOTSTRAP_PORT)]
    return ["--pd-disaggregation", *first, *(word for url in workers for word in ("--decode", url))]


def _listeners(sockets: set[str]) -> set[tuple[str, int]]:
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == LISTEN and f"socket:[{parts[9]}]" in sockets:
                address, _, port = parts[1].rpartition(":")
                found.add((_shown(address), int(port, 16)))
    return found


def _shown(address: str) -> str:
    """An address of the kernel's table, whose words are in the machine's byte order, as people write it."""
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    data = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return str(ipaddress.ip_address(data))
