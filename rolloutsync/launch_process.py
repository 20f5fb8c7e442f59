"""One run of a command under ``launch_guard.py``: it ends with all that it started, and does not outlive us."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_GUARD = Path(__file__).with_name("launch_guard.py")
_START_S = 30.0  # until the guard says that it started the command: milliseconds, where the machine is not stuck
_KILL_S = 70.0  # each of the two guards waits at most 30 s for what was killed
POLITELY = signal.SIGTERM  # SIGTERM to the command, ``grace``, then SIGKILL to whatever is left
AT_ONCE = signal.SIGINT


class GuardedProcess:
    """A command that runs from now on. Thread-safe.

    Args:
        command: What to run.
        env: Its whole environment.
        log: File to which its output is appended, by itself.
        grace: Seconds between SIGTERM and SIGKILL.
        heading: A line that is written to the log first.

    Raises:
        OSError: The log cannot be written, or the system gives no more processes.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, grace: float, heading: str) -> None:
        self._grace = grace
        # _lock guards: _status, a pipe that ends with the guards. Held while they are awaited.
        self._lock = threading.Lock()
        self.log_start = 0  # offset of its first byte
        read, write = os.pipe()
        self._status = os.fdopen(read, "rb", buffering=0)
        try:
            self._guard = self._start([str(write), str(grace), *command], write, env, log, heading)
        except BaseException:
            self._status.close()
            raise
        finally:
            os.close(write)
        self.pid = self._told()

    def _start(
        self, words: list[str], write: int, env: Mapping[str, str], log: Path, heading: str
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            output.write(f"{heading}\n".encode(errors="replace"))
            output.flush()
            self.log_start = output.tell()
            return subprocess.Popen(  # noqa: S603 - to run what the user asks for is what this is for
                [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                pass_fds=[write],
            )

    def _told(self) -> int | None:
        """The command's process id, which the guard tells; None if it ended without."""
        try:
            told = self._status.read(32) if self._readable(_START_S) else b""
        except BaseException:
            self._guard.send_signal(AT_ONCE)
            raise
        return int(told) if told else None

    def poll(self) -> int | None:
        """Exit code, or negative signal number; None while it runs."""
        return self._guard.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Block until it and all that it started has ended, for ``timeout`` seconds at most; as ``poll``."""
        try:
            code = self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        with self._lock:  # where somebody killed the outer guard, the inner one is still at it
            while not self._status.closed:
                if not self._readable(_KILL_S / 2) or not self._status.read(32):
                    self._status.close()
        return code

    def note_shared_files(self) -> None:
        """Have the guard look which files in /dev/shm it uses, so that they are removed however it ends.

        Blocks until the guard has looked: milliseconds.
        """
        with self._lock:
            if not self._status.closed:
                self._guard.send_signal(signal.SIGUSR2)
                if self._readable(_START_S):
                    self._status.read(32)

    def end(self, how: int = POLITELY) -> None:
        """End it and all that it started: ``POLITELY`` or ``AT_ONCE``. Blocks until all is gone."""
        self._guard.send_signal(how)
        if self.wait(self._grace + _KILL_S) is None:
            self._guard.kill()
            self.wait()

    def _readable(self, seconds: float) -> bool:
        """Wait until the pipe has something, or its end."""
        poll = select.poll()  # not select.select: a trainer may have thousands of descriptors
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


def told(code: int | None) -> str:
    """A return code in words."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
