"""Simulated engines as child processes: started together, found by a handle, never left behind."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, overload

from rolloutsync.sim.config import HOST, SimConfig
from rolloutsync.sim.faults import Fault

START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 10.0
REBIND_TIMEOUT_S = 3.0
STDERR_CHARS = 4000
SOURCE_ROOT = Path(__file__).resolve().parents[2]


class SimStartError(RuntimeError):
    """A simulated engine did not start; the message carries what it wrote to its standard error."""


class SimEngine:
    """The handle of one engine process. Safe to use from several threads, except for start, stop and restart."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.port = config.port
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._owner = 0

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id; raises `RuntimeError` before the start."""
        return self._running().pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.poll() is None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"the simulated engine on port {self.port} was not started")
        return self._process

    # Life

    def launch(self) -> None:
        """Starts the process without waiting until it serves; see `await_ready`."""
        command = [sys.executable, "-m", "rolloutsync.sim", "--watch-stdin"]
        command += ["--config-json", replace(self.config, port=self.port).to_json()]
        if threading.current_thread() is threading.main_thread():
            command += ["--parent", str(os.getpid())]
        path = os.pathsep.join(filter(None, [str(SOURCE_ROOT), os.environ.get("PYTHONPATH")]))
        self._owner = os.getpid()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )

    def await_ready(self, deadline: float) -> None:
        """Waits until the engine serves, and learns its port.

        Args:
            deadline: In `time.monotonic()` seconds.

        Raises:
            SimStartError: It ended, or does not serve in time.
        """
        output = self._running().stdout
        assert output is not None
        readable, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
        line = output.readline() if readable else b""
        if not line:
            reason = "ended" if readable else "did not serve in time"
            self.stop()
            raise SimStartError(f"the simulated engine {reason}: {self._last_words}")
        self.port = int(json.loads(line)["port"])

    def start(self) -> None:
        """Starts the process and blocks until it serves (about half a second).

        Raises:
            SimStartError: It ended, or does not serve within 30 s.
        """
        self.launch()
        self.await_ready(time.monotonic() + START_TIMEOUT_S)

    def stop(self) -> None:
        """Kills the process and reaps it, whatever it is doing. Idempotent, quick; nothing in a fork of the starter."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._owner:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._last_words = self._read_errors()

    def _read_errors(self) -> str:
        errors, self._errors = self._errors, None
        if errors is None:
            return ""
        with errors:
            errors.seek(0)
            return errors.read().decode(errors="replace")[-STDERR_CHARS:].strip() or "(it wrote nothing)"

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone. Its port refuses connections then."""
        process = self._running()
        process.kill()
        process.wait()

    def terminate(self) -> None:
        """SIGTERM; does not wait. The engine answers what is running first, unless configured otherwise."""
        self._running().terminate()

    def wait(self, timeout: float) -> int:
        """Waits for the end of the process and returns its exit code; raises `subprocess.TimeoutExpired`."""
        return self._running().wait(timeout)

    def freeze(self) -> None:
        """SIGSTOP: connections are still accepted by the kernel, nothing is answered."""
        self._running().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: ends a freeze."""
        self._running().send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kills the process and starts a new one, with nothing in memory, on the same port.

        Raises:
            SimStartError: The new one did not start.
        """
        self.stop()
        deadline = time.monotonic() + REBIND_TIMEOUT_S
        while True:
            try:
                self.start()
            except SimStartError as error:
                if "in use" not in str(error) or time.monotonic() > deadline:
                    raise
            else:
                return

    # Calls

    def call(self, method: str, path: str, body: Any = None, timeout: float = CALL_TIMEOUT_S) -> Any:
        """Makes one call of its own connection and returns the decoded JSON answer, None where there is none.

        Raises:
            RuntimeError: The answer is no 2xx.
            OSError: The engine cannot be reached, or is silent for `timeout` seconds.
        """
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, self._headers())
            with connection.getresponse() as response:
                answer = response.read()
        finally:
            connection.close()
        if response.status >= 300:
            raise RuntimeError(f"{method} {self.url}{path} answered {response.status}: {answer[:STDERR_CHARS]!r}")
        return json.loads(answer) if answer else None

    def _headers(self) -> dict[str, str]:
        key = self.config.admin_api_key or self.config.api_key
        headers = {"Content-Type": "application/json", "Connection": "close"}
        return headers | ({"Authorization": f"Bearer {key}"} if key else {})

    def state(self) -> dict[str, Any]:
        """Returns what `/sim/state` tells: every generation, aborts, calls by path, peak_running, busy_seconds."""
        answer: dict[str, Any] = self.call("GET", "/sim/state")
        return answer

    def reset(self) -> None:
        """Forgets what has ended and clears the faults; an idle engine is as new."""
        self.call("POST", "/sim/reset")

    def add_fault(self, fault: Fault) -> int:
        """Switches a fault on and returns its number."""
        return int(self.call("POST", "/sim/faults", fault.to_dict())["id"])

    def faults(self) -> list[dict[str, Any]]:
        """Returns the faults that are on, with how often each has hit."""
        answer: list[dict[str, Any]] = self.call("GET", "/sim/faults")
        return answer

    def clear_faults(self, number: int | None = None) -> None:
        """Switches one fault off, or all."""
        self.call("DELETE", "/sim/faults" if number is None else f"/sim/faults?id={number}")

    def slow_down(self, seconds: float | None) -> None:
        """Makes every decode step this much longer; None ends it."""
        self.call("POST", "/sim/slow_down", {"forward_sleep_time": seconds})

    _last_words = ""


class SimFleet(Sequence[str]):
    """Simulated engines on this machine, as the sequence of their base URLs; a context manager that yields itself.

    The processes are started by `with` (or `start`), all at once, and ended whatever happens: at the end of the block,
    on an exception, at interpreter exit, and when this process is killed.

    Args:
        engines: How many; ignored if `configs` is given.
        configs: One per engine.
        config_fields: Fields of `SimConfig` for all engines.

    Raises:
        ValueError: A field or the number of engines is out of range.
        SimStartError: From `with`: an engine did not start; none is left.
    """

    def __init__(self, engines: int = 4, *, configs: Sequence[SimConfig] | None = None, **config_fields: Any) -> None:
        if configs is not None and config_fields:
            raise ValueError(f"give configs or fields, not both: {', '.join(sorted(config_fields))}")
        if configs is None and engines < 1:
            raise ValueError(f"engines must be at least 1, got {engines}")
        made = [SimConfig(**config_fields)] * engines if configs is None else list(configs)
        self.engines = [SimEngine(config) for config in made]

    def start(self) -> None:
        """Starts all engines and blocks until they serve.

        Raises:
            SimStartError: One did not; none is left.
        """
        atexit.register(self.stop)
        try:
            for engine in self.engines:
                engine.launch()
            deadline = time.monotonic() + START_TIMEOUT_S
            for engine in self.engines:
                engine.await_ready(deadline)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kills and reaps all engines. Idempotent; takes milliseconds, whatever they are doing."""
        for engine in self.engines:
            engine.stop()
        atexit.unregister(self.stop)

    def __enter__(self) -> SimFleet:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def urls(self) -> list[str]:
        """The base URLs."""
        return [engine.url for engine in self.engines]

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.urls[index]

    def __len__(self) -> int:
        return len(self.engines)


def run_engines(
    engines: int, port: int, *, on_ready: Callable[[list[str]], None] | None = None, **config_fields: Any
) -> None:
    """Runs engines in the foreground until Ctrl-C or SIGTERM; prints nothing. For the main thread.

    Args:
        engines: How many.
        port: Of the first; the others follow it. 0 lets the system choose all.
        on_ready: Called once with the base URLs when all serve.
        config_fields: Fields of `SimConfig` for all engines.

    Raises:
        SimStartError: One did not start, for example because its port is taken.
    """
    ports = [port + index if port else 0 for index in range(engines)]
    configs = [SimConfig(**{**config_fields, "port": number}) for number in ports]
    stop = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with SimFleet(configs=configs) as fleet:
            if on_ready is not None and not stop.is_set():
                on_ready(fleet.urls)
            stop.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
