"""B32, B34 and the end of processes: signals, exits, forks, and limits on what a process may have."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rolloutsync import RolloutClient, install_sigterm
from tests.background import in_thread
from tests.client.kit import ScriptedEngine, body_of, error_answer, prompts, quiet
from tests.faults.engine import LiveEngine
from tests.faults.kit import IMPATIENT, MakeClient, echo
from tests.faults.sinner import Sinner
from tests.processes import begin, run
from tests.wire import Request, Script, eventually, reset, silence

START = """
import signal, sys
from rolloutsync import RolloutClient
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
batch = [[3 + number, 9] for number in range(100)]
client = RolloutClient(sys.argv[1], progress=False)
"""
GENERATES = "client.generate(batch)"
BLOCKED = {
    "generate": GENERATES,
    "result": "client.start(batch).result()",
    "iteration": "list(client.start(batch))",
    "submit": "[future.result() for future in [client.submit(prompt) for prompt in batch]]",
}
SLOWLY = pytest.mark.slow  # one of each kind is enough for the fast suite
LEAVES = "job = client.start(batch)\nwhile client.stats().waiting:\n    pass\nsys.stdin.readline()\n"


class Child:
    """A process with 100 calls in flight. What a busy machine took to begin it, it may take longer to end it."""

    def __init__(self, code: str, url: str, await_calls: Callable[[], None]) -> None:
        began = time.monotonic()
        self.process = begin(START + code, url)
        await_calls()
        self.grace_s = time.monotonic() - began

    def ends(self, seconds: float, signal_number: int | None = None) -> tuple[int, str]:
        """Return code and standard error; in time after the signal, or after the line that it waits for."""
        began = time.monotonic()
        if signal_number is not None:
            self.process.send_signal(signal_number)
        _, errors = self.process.communicate("leave\n", timeout=30.0)
        took = time.monotonic() - began
        assert took < seconds + self.grace_s, f"gone after {took:.1f} s: {errors}"
        return self.process.returncode, errors


def running(engine: LiveEngine) -> Callable[[], None]:
    return lambda: engine.journal.await_running(100, 30.0)


def sent(engine: ScriptedEngine) -> Callable[[], None]:
    return lambda: engine.server.await_requests(102, 30.0)


@pytest.mark.parametrize(
    "verb", ["generate", *(pytest.param(verb, marks=SLOWLY) for verb in BLOCKED if verb != "generate")]
)
def test_ctrl_c(verb: str) -> None:
    """B32: one traceback, gone within two seconds, our ids aborted as far as that goes, every socket closed."""
    with LiveEngine() as engine:
        child = Child(BLOCKED[verb], engine.url, running(engine))
        code, errors = child.ends(2.0, signal.SIGINT)
        assert (code, errors.count("Traceback")) == (-signal.SIGINT, 1)
        assert errors.strip().endswith("KeyboardInterrupt")
        eventually(lambda: engine.running() == 0, "the engine is free")
        assert set(engine.aborted_rids()) <= set(engine.rids())
        assert engine.aborts or child.grace_s > 3.0  # one second of aborts may be nothing on a very busy machine
        assert engine.sweeps() == []


@SLOWLY
def test_ctrl_c_at_a_silent_engine() -> None:
    """B32: nothing is answered, not even aborts: gone as soon."""
    with ScriptedEngine(quiet, others={"/abort_request": [silence]}) as engine:
        code, errors = Child(GENERATES, engine.url, sent(engine)).ends(2.0, signal.SIGINT)
        assert (code, errors.count("Traceback")) == (-signal.SIGINT, 1)


def test_sigterm_is_the_systems(client_to: MakeClient) -> None:
    """B32: no handler of ours: the process is gone at once; the kernel closes its sockets, on which engines abort."""
    with LiveEngine() as engine:
        before = signal.getsignal(signal.SIGTERM)
        client_to(engine.url).engines()
        assert signal.getsignal(signal.SIGTERM) is before
        assert Child(GENERATES, engine.url, running(engine)).ends(0.5, signal.SIGTERM) == (-signal.SIGTERM, "")
        eventually(lambda: engine.journal.ends() == ["lost"] * 100, "the engine is free")


ASKED_FOR = "from rolloutsync import install_sigterm\ninstall_sigterm()\n"


@SLOWLY
def test_sigterm_that_was_asked_for() -> None:
    """B32: with ``install_sigterm()`` it ends like ``sys.exit(143)``: our ids are aborted first, nothing is printed."""
    with LiveEngine() as engine:
        child = Child(ASKED_FOR + GENERATES, engine.url, running(engine))
        assert child.ends(2.0, signal.SIGTERM) == (128 + signal.SIGTERM, "")
        eventually(lambda: engine.running() == 0, "the engine is free")
        assert engine.aborts or child.grace_s > 3.0
        assert engine.sweeps() == []


def test_sigterm_is_for_the_main_thread() -> None:
    with pytest.raises(ValueError, match="must be called from the main thread, not from 'caller'"):
        in_thread(install_sigterm).result(5.0)


EXIT, RAISE = "sys.exit(3)", "raise ValueError('ours')"


@pytest.mark.parametrize("how", ["", pytest.param(EXIT, marks=SLOWLY), pytest.param(RAISE, marks=SLOWLY)])
def test_a_main_thread_that_leaves_while_all_is_silent(how: str) -> None:
    """B32: without close(), and the engine answers not even aborts: gone within three seconds, nothing more printed."""
    with ScriptedEngine(quiet, others={"/abort_request": [silence]}) as engine:
        code, errors = Child(LEAVES + how, engine.url, sent(engine)).ends(3.0)
        assert code == {"": 0, EXIT: 3, RAISE: 1}[how]
        assert errors.count("Traceback") == (how == RAISE)
        assert "Exception ignored" not in errors


FEW_DESCRIPTORS = """
import resource, sys
from rolloutsync import RolloutClient
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with RolloutClient(sys.argv[1], progress=False) as client:
    batch = [[3 + number, 9] for number in range(256)]
    samples = client.generate(batch)
    right = [sample.output_ids.tolist()[:1] == [1003 + number] for number, sample in enumerate(samples)]
    print(sum(right), {sample.attempts for sample in samples}, [engine.state.value for engine in client.engines()])
"""


def test_sixty_four_descriptors() -> None:
    """B34: 256 samples with RLIMIT_NOFILE=64: all are made, nobody is blamed, nothing counts as an attempt."""
    with LiveEngine(takes_s=0.05) as engine:
        done = run(FEW_DESCRIPTORS, engine.url)
        assert done.stdout.strip() == "256 {1} ['live']", done.stdout + done.stderr


FEW_THREADS = """
import sys, threading
from rolloutsync import RolloutClient
client = RolloutClient(sys.argv[1], progress=False)
client.engines()
start, left = threading.Thread.start, [20]
def limited(thread):
    if left[0] == 0:
        raise RuntimeError("can't start new thread")
    left[0] -= 1
    start(thread)
threading.Thread.start = limited
batch = [[3 + number, 9] for number in range(256)]
samples = client.generate(batch)
print(sum(sample.output_ids.tolist()[:1] == [1003 + number] for number, sample in enumerate(samples)))
threading.Thread.start = start
print(client.close())
"""


@SLOWLY
def test_twenty_threads() -> None:
    """B34: "can't start new thread" after 20: all 256 samples are made by those."""
    with LiveEngine(takes_s=0.0) as engine:
        done = run(FEW_THREADS, engine.url)
        assert done.stdout.split("\n")[:2] == ["256", "[]"], done.stdout + done.stderr
        assert done.stderr.count("worker threads") <= 1


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def faulty(request: Request, number: int) -> Script | None:
    """One prompt runs until it is aborted, one is refused, the rest is answered; now and then a reset."""
    first = body_of(request)["input_ids"][0]
    if first == 3:
        return None
    return error_answer("400 Bad Request") if first == 4 else [reset] if number % 7 == 6 else echo(request)


def test_twenty_batches_of_faults_leave_nothing() -> None:
    """B34: resets, refusals and an abort in each of 20 batches; then as many descriptors and threads as before."""
    with LiveEngine(faulty) as engine:
        before = descriptors(), threads()
        with RolloutClient(engine.url, progress=False, retry=IMPATIENT) as client:
            for _ in range(20):
                with client.start(prompts(10), on_error="return") as job:
                    for sample in itertools.islice(job, 9):
                        assert (sample.error is None) == (sample.index != 1)
                assert [sample.index for sample in job.partials] == [0]
        stats = client.stats()
        assert (stats.admitted, stats.truncated, stats.failed, stats.aborted, stats.open) == (200, 160, 20, 20, 0)
        eventually(lambda: (descriptors(), threads()) <= before, "nothing is left")


MANY_EXPERTS = """
import re, sys
from rolloutsync import RolloutClient
def memory(name):
    return int(re.search(name + r":\\s+([0-9]+) kB", open("/proc/self/status").read())[1]) >> 10
client = RolloutClient(sys.argv[1], progress=False, body_budget_bytes=96 << 20, routed_experts_shape=(48, 8),
                       routed_experts_dtype="uint8")
batch = [[3 + number, *range(8188)] for number in range(64)]
client.generate(batch[:1], return_routed_experts=True)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = memory("VmRSS")
samples = client.generate(batch, return_routed_experts=True)
kept = sum(sample.routed_experts.nbytes for sample in samples) >> 20
client.close()
print({sample.routed_experts.shape for sample in samples}, kept, memory("VmHWM") - before)
"""


@pytest.mark.slow
def test_many_large_experts_at_once() -> None:
    """B26: 64 answers of 16 MiB (12 MiB of raw int32) at once: beside the arrays that are kept, memory grows by a few
    times the budget of 96 MiB (a body, its base64 and its bytes), not by a gigabyte.
    """
    rows = 8191
    with ScriptedEngine(Sinner(rows, width=48 * 8)) as engine:
        done = run(MANY_EXPERTS, engine.url)
        shape, kept, grown = done.stdout.rsplit(" ", 2)
        assert (shape, int(kept)) == (f"{{({rows}, 48, 8)}}", 64 * rows * 48 * 8 >> 20), done.stdout + done.stderr
        assert int(grown) < int(kept) + 4 * 96
