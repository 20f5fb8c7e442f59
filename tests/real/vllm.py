"""Real vLLM as a child process: the server of `launch`, started with vLLM's words."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .launch import Device, RealEngine, descendants

# What the tests count on. A prompt of 2000 tokens takes eight steps, which leaves time to look at it.
LIMITS = (
    *("--max-model-len", "2048", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"),
    *("--dtype", "bfloat16", "--enforce-eager", "--served-model-name", "tiny"),
)
CPU_ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}
CPU = Device(name="CPU", environment=CPU_ENGINE, ready_timeout_s=240.0)
SCALE_OUT = ("--enable-scale-out",)
LOAD_TRACKING = ("--enable-server-load-tracking",)
CACHED_TOKENS = ("--enable-prompt-tokens-details",)
WEIGHT_TRANSFER = ("--weight-transfer-config", '{"backend": "nccl"}')
_RUN_S, _STAND_S = 0.002, 0.1  # a few tokens each second
HEADER_IDS = ("--enable-request-id-headers",)
NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)
FULL = (*SCALE_OUT, *LOAD_TRACKING, *CACHED_TOKENS, *WEIGHT_TRANSFER)


def data_parallel(size: int) -> tuple[str, ...]:
    """The arguments of an engine with so many ranks, each a core of its own behind one API server."""
    return ("--data-parallel-size", str(size))


class VllmEngine(RealEngine):
    """One vLLM server: an API server, a core and a worker in one process group."""

    name = "vLLM"
    alive_path = "/health"
    shared_prefixes = ("psm_", "sem.mp-")
    dev_mode = True

    def _server(self, port: int, rendezvous: int) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        return ["-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), *address, *LIMITS]

    def _environment(self) -> dict[str, str]:
        compiled = self._kit.python.parents[1] / "compiled"  # by the first request: 15 s, once
        paths = {"VLLM_CACHE_ROOT": str(compiled), "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor")}
        return {**self.device.environment, **paths, "VLLM_SERVER_DEV_MODE": "1" if self.dev_mode else "0"}

    def _shortest(self) -> tuple[str, dict[str, object]]:
        return "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 1, "logprobs": 0}

    def wait_ready(self) -> None:
        """As any engine; then its core and workers run only where nobody else wants the CPU, as if on a GPU.

        A core spins with `sched_yield` for as long as its worker computes. Beside two that do so on two CPUs, a thread
        of ours or of the front end was seen to wait four seconds for its turn: a brake that does not brake, a look
        that comes when all is over.
        """
        super().wait_ready()
        for part in parts(self, "VLLM::EngineCore") + parts(self, "VLLM::Worker"):
            for thread in Path(f"/proc/{part}/task").iterdir():
                os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))

    def _tells_version(self) -> str:
        return str(self._session.get(f"{self.url}/version", timeout=30).json()["version"])


class PlainVllm(VllmEngine):
    """vLLM without its dev mode, hence without its control routes."""

    dev_mode = False


def parts(engine: RealEngine, title: str) -> list[int]:
    """The process ids of all parts of this kind; none that has just ended."""
    return [each for each in descendants(engine.pid) if _command(each).startswith(title.encode())]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def process(engine: RealEngine, title: str) -> int:
    """The process id of a part of the engine."""
    found = parts(engine, title)
    assert found, f"{engine.url} has no {title}"
    return found[0]


@contextmanager
def frozen(engine: RealEngine) -> Iterator[None]:
    """Its worker stands still, and with it the core."""
    worker = process(engine, "VLLM::Worker")
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


@contextmanager
def slowed(engine: RealEngine) -> Iterator[None]:
    """Its worker hardly runs. On a quick machine what runs ends between two looks; on a busy one looks take seconds."""
    worker, over = process(engine, "VLLM::Worker"), threading.Event()

    def brake() -> None:
        while not over.wait(_RUN_S):
            os.kill(worker, signal.SIGSTOP)
            over.wait(_STAND_S)
            os.kill(worker, signal.SIGCONT)

    thread = threading.Thread(target=brake, name="brake")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
