"""Engines as child processes: ``with launch_engine("sglang", model="...") as engine: RolloutClient(engine.url)``.

Between this process and the engine stands a small guard, ``launch_guard.py``, which ends whatever the engine started
and outlives neither. This and the transport are the only users of sockets: a readiness probe is a single GET that
nothing depends on but its status, and it must not need a client, whose pools and threads are for engines that serve.
"""

from __future__ import annotations

import http.client
import os
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolloutsync.clock import Clock, Deadline
from rolloutsync.errors import EngineLaunchError, ForkedError, clip
from rolloutsync.launch_plan import LaunchPlan, blanked
from rolloutsync.launch_process import AT_ONCE, POLITELY, GuardedProcess, told

_POLL_S = 0.1
_PROBE_S = 30.0  # SGLang's answer waits for a first token
_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 40
_TAIL_SHOWN = 6000  # bytes of it in an error
_COMMAND_SHOWN = 400


def launch_engine(
    kind: str,
    *,
    model: str | os.PathLike[str] | None = None,
    weight_version: str | int | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    python: str | os.PathLike[str] | None = None,
    ready_timeout: float = 600.0,
    grace: float = 15.0,
    log: str | os.PathLike[str] | None = None,
) -> LaunchedEngine:
    """Start an engine process and wait until it serves; use the result in a ``with`` block, or call its ``stop``.

    Blocks until the engine's ``/health`` answers 200: on SGLang that is after a first token, on vLLM when the API
    server is up, with the model loaded. The engine ends, with all the processes that it started, when the block is
    left or ``stop`` called, and when this process ends, however it does. It does not depend on the thread that
    started it. Where several engines start at once, call this from several threads. Needs Linux.

    Args:
        kind: ``"sglang"``, ``"vllm"`` or ``"sim"`` (the simulated engine).
        model: Path or name of the checkpoint; not needed by ``"sim"``.
        weight_version: The label under which the engine reports those weights. vLLM cannot be given one.
        port: To listen on; None takes a free one. It stays reserved while the engine restarts.
        host: Address to listen on. The simulated engine has ``127.0.0.1`` alone.
        args: Further arguments of the engine's own command line. Those of ``"sim"``: ``--dialect vllm``,
            ``--version 0.5.23``, and ``--config-json '{...}'`` with fields of ``SimConfig``.
        env: Environment variables, added to those of this process.
        python: The interpreter that has the engine installed; None is this one.
        ready_timeout: Seconds from the start until it must serve.
        grace: Seconds that ``stop`` gives the engine between SIGTERM and SIGKILL.
        log: File to which the engine's output is appended; None makes one in the folder for temporary files. It stays.

    Returns:
        The engine, which serves.

    Raises:
        ValueError: A parameter is out of range, or ``args`` has a flag that is set here, such as ``--port``.
        EngineLaunchError: The port is taken, or the engine ended or was not ready in time; nothing is left running.
        OSError: The log cannot be written.
    """
    plan = LaunchPlan(
        kind=kind,
        model=model,
        weight_version=weight_version,
        port=port,
        host=host,
        args=args,
        env=env,
        python=python,
        ready_timeout=ready_timeout,
        grace=grace,
    )
    engine = LaunchedEngine(plan, log)
    try:
        engine.start()
    except BaseException:
        engine.kill()
        raise
    return engine


class LaunchedEngine:
    """An engine process of this process; what ``launch_engine`` returns. A context manager. Thread-safe.

    In a fork of this process ``stop`` does nothing and ``restart`` raises.

    Args:
        plan: What to run.
        log: As for ``launch_engine``.
        clock: Tests pass their own.

    Raises:
        EngineLaunchError: The port is taken.
        OSError: The log cannot be written.
    """

    def __init__(self, plan: LaunchPlan, log: str | os.PathLike[str] | None = None, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._owner = os.getpid()
        self._plan = plan
        self._reserved = _reserve(plan)
        self.port = int(self._reserved.getsockname()[1])
        try:
            self._log = _log_file(plan.kind, self.port, log)
        except OSError:
            self._reserved.close()
            raise
        self._turn = threading.Lock()  # one start at a time. Held until the engine is ready.
        # _lock guards: _plan, _process, and that nothing starts once _stopped is set. Never held across a wait for
        # the engine.
        self._lock = threading.Lock()
        self._process: GuardedProcess | None = None
        self._stopped = threading.Event()

    # --- what it is ---

    @property
    def kind(self) -> str:
        """``"sglang"``, ``"vllm"`` or ``"sim"``."""
        return self._plan.kind

    @property
    def model(self) -> str | None:
        """The checkpoint that the process was started with."""
        model = self._plan.model
        return None if model is None else str(model)

    @property
    def weight_version(self) -> str | None:
        """The label of the weights that the process was started with."""
        version = self._plan.weight_version
        return None if version is None else str(version)

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash; the same after a restart."""
        return self._plan.url(self.port)

    @property
    def log(self) -> Path:
        """The file with all that the engine wrote."""
        return self._log

    @property
    def pid(self) -> int | None:
        """Id of the engine's main process, the last one if it has ended; None before the first start."""
        process = self._process
        return None if process is None else process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or negative signal number; None while it runs, and before the first start."""
        return self.poll()

    def poll(self) -> int | None:
        """The same as a call. Does not block."""
        process = self._process
        return None if process is None else process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Block until the engine and all that it started has ended, for ``timeout`` seconds at most; as ``poll``."""
        process = self._process
        return None if process is None else process.wait(timeout)

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of what this process of the engine wrote."""
        process = self._process
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0 if process is None else process.log_start, size - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:]) if lines > 0 else ""

    # --- its life ---

    def start(self) -> None:
        """Start it for the first time, and block until it serves; ``launch_engine`` has done that.

        Raises:
            EngineLaunchError: As ``launch_engine``.
        """
        self.restart()

    def restart(self, **changes: Any) -> None:
        """End the process if it runs, start another one on the same port, and block until that serves.

        Args:
            **changes: Parameters of ``launch_engine`` that are to be different from now on: ``model``, ``args``,
                ``weight_version``, ``env``, ``ready_timeout``, ``grace``, ``python``.

        Raises:
            ValueError: As ``launch_engine``; nothing has changed then.
            EngineLaunchError: As ``launch_engine``, or ``stop`` was called; no engine runs then.
            ForkedError: This is a fork of the process whose engine it is.
        """
        if os.getpid() != self._owner:
            raise ForkedError("the engine belongs to the parent of this process", engine=self.url)
        if fixed := changes.keys() & {"kind", "port", "host"}:
            raise ValueError(f"{min(fixed)} cannot change in a restart, got {changes[min(fixed)]!r}")
        plan = replace(self._plan, **changes)
        with self._turn:
            self._end(POLITELY)
            try:
                self._begin(plan)
                self._await_ready()
            except BaseException:
                self._end(AT_ONCE)
                raise

    def stop(self) -> None:
        """End the engine and all that it started; wakes a ``restart`` that waits. Idempotent; final.

        Blocks until all is gone: ``grace`` seconds and a few more where a process hangs.
        """
        self._stop(POLITELY)

    def kill(self) -> None:
        """As ``stop``, without the grace."""
        self._stop(AT_ONCE)

    def __enter__(self) -> LaunchedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<LaunchedEngine {self.kind} at {self.url}, pid {self.pid}, returncode {self.poll()}>"

    def _stop(self, how: int) -> None:
        if os.getpid() != self._owner:
            return
        self._stopped.set()
        self._end(how)
        self._reserved.close()

    def _begin(self, plan: LaunchPlan) -> None:
        with self._lock:
            if self._stopped.is_set():
                raise self.failure("was stopped")
            self._plan = plan
            command = plan.command(self.port)
            heading = f"rolloutsync starts: {' '.join(blanked(command))}"
            self._process = GuardedProcess(command, plan.environment(), self._log, plan.grace, heading)

    def _await_ready(self) -> None:
        deadline = Deadline.after(self._clock, self._plan.ready_timeout)
        answer = "nothing yet"
        while answer != "200":
            answer = self._probe(deadline.within(_PROBE_S))
            if self._stopped.is_set():
                raise self.failure("was stopped before it was ready")
            if self.poll() is not None:
                raise self.failure(f"{told(self.poll())} before it was ready")
            if answer != "200" and deadline.expired:
                raise self.failure(f"was not ready within {self._plan.ready_timeout:g} s; /health: {answer}")
            if answer != "200":
                self._clock.sleep(_POLL_S, self._stopped)
        if self._process is not None:
            self._process.note_shared_files()  # they exist now

    def _probe(self, seconds: float) -> str:
        """What ``/health`` says."""
        connection = http.client.HTTPConnection(*self._plan.address(self.port), timeout=max(0.1, seconds))
        try:
            connection.request("GET", "/health", headers={"Connection": "close"})
            return str(connection.getresponse().status)
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def _end(self, how: int) -> None:
        with self._lock:
            process = self._process
        if process is not None:
            process.end(how)

    def failure(self, what: str) -> EngineLaunchError:
        """An error about this engine, with its command and the end of its log."""
        command = blanked(self._plan.command(self.port))
        return EngineLaunchError(
            f"{self.kind} {what}; command: {clip(' '.join(command), _COMMAND_SHOWN)}",
            engine=self.url,
            log=str(self._log),
            tail=_end_of(self.log_tail(), _TAIL_SHOWN),
            command=command,
            returncode=self.poll(),
        )


def _end_of(text: str, limit: int) -> str:
    """The end of a text, in so many bytes of UTF-8."""
    return text.encode("utf-8", "replace")[-limit:].decode("utf-8", "ignore")


def _reserve(plan: LaunchPlan) -> socket.socket:
    """A socket that holds the port and does not listen: the engine may, beside it, and nothing else gets that port."""
    holder = None
    try:
        family, _, _, _, address = socket.getaddrinfo(plan.host, plan.port or 0, type=socket.SOCK_STREAM)[0]
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(address)
    except OSError as error:
        if holder is not None:
            holder.close()
        words = f"{plan.kind} cannot listen on port {plan.port} of {plan.host}: {error.strerror or error}"
        raise EngineLaunchError(words, engine=plan.url(plan.port or 0)) from error
    return holder


def _log_file(kind: str, port: int, log: str | os.PathLike[str] | None) -> Path:
    if log is None:
        handle, path = tempfile.mkstemp(prefix=f"rolloutsync-{kind}-{port}-", suffix=".log")
        os.close(handle)
        return Path(path)
    Path(log).open("ab").close()
    return Path(log)
