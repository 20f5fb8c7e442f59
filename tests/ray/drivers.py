"""Drivers in processes of their own: scripts that a user would start from a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import TracebackType

from tests.processes import await_true

ROOT = Path(__file__).resolve().parents[2]
MARK = "ROLLOUTSYNC_TEST_DRIVER"


class Driver:
    """A Python script in a session of its own; what it starts is found by a mark that it inherits.

    Args:
        code: The script.
        folder: For the script and what it writes.
        **environment: Variables to set; empty ones are removed.
    """

    def __init__(self, code: str, folder: Path, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        script = folder / "driver.py"
        script.write_text(code)
        self._output = folder / "output.txt"
        values = {**os.environ, MARK: self._mark, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(script)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in values.items() if value},
                start_new_session=True,
            )

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def interrupt(self) -> None:
        """Ctrl-C in a terminal: SIGINT to the whole foreground group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait(self, seconds: float = 30.0) -> int:
        """Blocks until the script has ended; its exit code."""
        return self._process.wait(seconds)

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def processes(self) -> list[int]:
        """Whatever still runs of what the script and its children started."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and self._marked(path)]

    def _marked(self, path: Path) -> bool:
        try:
            return f"{MARK}={self._mark}".encode() in (path / "environ").read_bytes()
        except OSError:  # it has ended meanwhile
            return False

    def await_no_process(self) -> None:
        await_true(lambda: not self.processes(), "the end of all processes of the driver")
