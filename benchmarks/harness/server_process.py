"""The load server as a child process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from benchmarks.harness.answers import model_config
from benchmarks.harness.load_server import HOST
from benchmarks.harness.process import BenchmarkError, environment
from benchmarks.harness.work import Shape


class LoadServer:
    """Engines in a process of their own, for the length of a ``with`` block, which yields their URLs.

    Args:
        engines: How many, each with a port.
        engine_s: Seconds from a request to its answer.
        shape: Of the answers.
    """

    def __init__(self, engines: int, engine_s: float, shape: Shape) -> None:
        self._options = {"engines": engines, "engine_s": engine_s, "shape": asdict(shape)}
        self._shape = shape

    def __enter__(self) -> list[str]:
        self._model = tempfile.TemporaryDirectory(prefix="rolloutsync-bench-")
        (Path(self._model.name) / "config.json").write_text(json.dumps(model_config(self._shape)))
        options = json.dumps(self._options | {"model_path": self._model.name})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.load_server", options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__(None, None, None)
            raise BenchmarkError(f"the load server did not start: {options}")
        return [f"http://{HOST}:{port}" for port in json.loads(line)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._process:
            self._process.kill()
        self._model.cleanup()
