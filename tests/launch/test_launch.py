"""``launch_engine``: it serves when the call returns, says why when it does not, and goes without a trace."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rolloutsync import EngineLaunchError, RolloutClient, Status
from rolloutsync.errors import ForkedError
from rolloutsync.launch import LaunchedEngine, launch_engine
from rolloutsync.launch_plan import LaunchPlan
from tests.background import in_thread
from tests.fakes import FakeClock
from tests.processes import alive, await_true

from .conftest import QUICK, carrying
from .servers import Script

pytestmark = pytest.mark.slow

Start = Callable[..., LaunchedEngine]


def status(engine: LaunchedEngine) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


# --- it serves ---


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_a_simulated_engine_serves(dialect: str, tmp_path: Path) -> None:
    """The README's lines: launch, generate, and it is gone."""
    log = tmp_path / "sim.log"
    with launch_engine("sim", args=["--dialect", dialect, *QUICK], log=log) as engine, RolloutClient(engine.url) as c:
        samples = c.generate([[1, 2, 3]], {"max_new_tokens": 4, "ignore_eos": True}, n=2)
        assert [sample.status for sample in samples] == [Status.TRUNCATED] * 2
        assert engine.poll() is None
        pid = engine.pid
        assert pid is not None
        assert alive(pid)
    assert not alive(pid)
    assert engine.returncode == 0
    assert json.loads(log.read_text().splitlines()[1]) == {"port": engine.port, "pid": pid}


def test_model_and_version_reach_the_simulated_engine(tmp_path: Path) -> None:
    """What it was told to serve is what it says that it serves."""
    with (
        launch_engine("sim", model="a/b", weight_version=7, args=QUICK, log=tmp_path / "log") as engine,
        RolloutClient(engine.url) as client,
    ):
        assert client.weight_versions() == {engine.url: "7"}
        assert client.control("/model_info", method="GET")[engine.url]["model_path"] == "a/b"
        assert (engine.model, engine.weight_version, engine.kind) == ("a/b", "7", "sim")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sglang", ["--model-path", "some/model", "--host", "127.0.0.1", "--port", "P", "--tp-size", "2"]),
        ("vllm", ["--model", "some/model", "--host", "127.0.0.1", "--port", "P", "--tp-size", "2"]),
    ],
)
def test_arguments_and_environment(kind: str, expected: list[str], start: Start) -> None:
    """The engine's own words, ours first; variables are added to those that are there."""
    with start("--tp-size", "2", kind=kind, env={"GREETING": "hello"}) as engine:
        told = json.loads(engine.log_tail(1))
    assert told["argv"] == [str(engine.port) if word == "P" else word for word in expected]
    assert told["env"] == "hello"
    assert told["pid"] == engine.pid


def test_it_is_ready_when_the_engine_says_so(script: Script, start: Start) -> None:
    """A port that answers is not enough: 503 means that a model is being loaded."""
    script.answers(503)
    launched = in_thread(start)
    await_true(lambda: script.has_told("up"), "the server")
    assert not launched.done()
    script.answers(200)
    with launched.result(20) as engine:
        assert status(engine) == 200


def test_another_python(script: Script, start: Start, tmp_path: Path) -> None:
    """The engine is run by the interpreter that has it, the guard by ours."""
    other = tmp_path / "other-python"
    other.write_text(f'#!/bin/sh\nexport GREETING=other\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    with start(python=other) as engine:
        assert json.loads(engine.log_tail(1))["env"] == "other"


def test_the_given_port_is_taken_and_kept(start: Start) -> None:
    """Nobody else gets it, while the engine is there and while it is not."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(EngineLaunchError, match=rf"^sglang cannot listen on port {port} of 127.0.0.1: Address"):
            start(port=port)
    with start(port=port) as engine:
        assert engine.url == f"http://127.0.0.1:{port}"
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        assert engine.wait(20) == -signal.SIGKILL
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        engine.restart()
        assert status(engine) == 200


def test_threads_launch_side_by_side(script: Script, start: Start, tmp_path: Path) -> None:
    """Each with a port and a log of its own."""
    launched = [in_thread(lambda n=n: start(log=tmp_path / f"{n}.log")) for n in range(4)]  # type: ignore[misc]
    engines = [each.result(30) for each in launched]
    try:
        assert len({engine.port for engine in engines}) == 4
        assert [status(engine) for engine in engines] == [200] * 4
    finally:
        for ended in [in_thread(engine.stop) for engine in engines]:
            ended.result(30)


def test_the_thread_that_started_it_may_end(start: Start) -> None:
    """The kernel's parent-death signal is about threads; the engine is not."""
    made: list[LaunchedEngine] = []
    thread = threading.Thread(target=lambda: made.append(start()))
    thread.start()
    thread.join()
    with made[0] as engine:
        assert engine.wait(1.2) is None  # the guard looks at its parent twice in that time
        assert status(engine) == 200


def test_a_log_of_its_own(start: Start) -> None:
    """Without a path it is a file among the temporary ones, and stays."""
    with start(log=None) as engine:
        assert engine.log.name.startswith(f"rolloutsync-sglang-{engine.port}-")
    assert f'"pid": {engine.pid}' in engine.log.read_text()
    engine.log.unlink()


def test_the_log_tail_is_of_this_run(start: Start) -> None:
    """The file keeps every run; the tail shows the last one's words."""
    with start() as engine:
        first = engine.pid
        engine.restart(args=("--tp-size", "4"))
        assert f'"pid": {first}' not in engine.log_tail()
        assert '"--tp-size", "4"' in engine.log_tail()
        assert engine.log_tail(0) == ""
    assert f'"pid": {first}' in engine.log.read_text()


# --- it does not ---


def test_one_that_ends_at_once(start: Start) -> None:
    """The error has the exit code, the command without its keys, and the end of the log."""
    with pytest.raises(EngineLaunchError) as caught:
        start("--fail", "--api-key", "very-secret", "--admin-api-key=secret-too")
    error = caught.value
    assert error.returncode == 1
    assert error.message.startswith("sglang ended with exit code 1 before it was ready; command: ")
    assert "--fail --api-key ... --admin-api-key=..." in error.message
    assert str(error).endswith("line 198\nline 199\nno such model, with many words about why")
    assert f"the end of {error.log}:" in str(error)
    assert error.engine is not None
    assert error.engine.startswith("http://127.0.0.1:")
    assert len(error.tail.splitlines()) == 40
    heading = Path(error.log).read_text().partition("\n")[0]
    assert "secret" not in f"{error.command} {error.message} {heading}"


def test_one_that_is_killed(script: Script, start: Start) -> None:
    """The error names the signal."""
    launched = in_thread(lambda: start("--mute"))
    await_true(lambda: script.has_told("up"), "the process")
    os.kill(int(script.told("up")), signal.SIGKILL)
    with pytest.raises(EngineLaunchError, match=r"^sglang was ended by SIGKILL before") as caught:
        launched.result(20)
    assert caught.value.returncode == -signal.SIGKILL


def test_one_that_cannot_be_run(tmp_path: Path) -> None:
    """What the system says about the interpreter is in the log's tail."""
    broken = tmp_path / "python"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with pytest.raises(EngineLaunchError, match="exit code 127") as caught:
        launch_engine("vllm", model="m", python=broken, log=tmp_path / "log")
    assert caught.value.tail == f"launch_guard: cannot run {broken}: [Errno 2] No such file or directory"


class _TickWhenUp(FakeClock):
    """A clock whose time passes, with every sleep, once the server is up."""

    def __init__(self, script: Script) -> None:
        super().__init__(auto=True)
        self._script = script

    def sleep(self, seconds: float, wake: threading.Event) -> bool:
        if self._script.has_told("up"):
            return super().sleep(seconds, wake)
        return wake.wait(seconds / 10)


@pytest.mark.parametrize(("args", "answer"), [((), "503"), (("--mute",), "ConnectionRefusedError: ")])
def test_one_that_never_is_ready(args: tuple[str, ...], answer: str, script: Script, tmp_path: Path) -> None:
    """After ``ready_timeout`` by our clock it is ended, and the error says what ``/health`` said last."""
    script.answers(503)
    clock = _TickWhenUp(script)
    plan = LaunchPlan(kind="sglang", model="m", args=args, env=script.env, ready_timeout=30.0)
    engine = LaunchedEngine(plan, tmp_path / "log", clock)
    with pytest.raises(EngineLaunchError, match=r"was not ready within 30 s; /health: " + answer) as caught:
        engine.start()
    assert caught.value.returncode is None
    assert engine.wait(0) == -signal.SIGKILL
    engine.stop()


def test_ctrl_c_while_it_starts(script: Script, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception goes on as it is, and nothing is left of the engine."""
    script.answers(503)

    def interrupted(self: object, seconds: float, wake: object) -> bool:
        if script.has_told("up"):
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr("rolloutsync.clock.Clock.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start("--deaf", "--child")
    assert not alive(int(script.told("up")))
    assert not alive(int(script.told("child")))


def test_stop_while_it_starts(script: Script, tmp_path: Path) -> None:
    """The thread that waits gets an error at once."""
    script.answers(503)
    plan = LaunchPlan(kind="sglang", model="m", env=script.env)
    engine = LaunchedEngine(plan, tmp_path / "log")
    started = in_thread(engine.start)
    await_true(lambda: script.has_told("up"), "the server")
    engine.stop()
    with pytest.raises(EngineLaunchError, match="was stopped before it was ready"):
        started.result(20)
    with pytest.raises(EngineLaunchError, match="sglang was stopped"):
        engine.restart()


# --- it goes ---


def test_all_that_it_started_goes_with_it(script: Script, start: Start) -> None:
    """A grandchild with a session of its own, orphaned and deaf to SIGTERM, is found and killed."""
    with start("--child", grace=5.0) as engine:
        child = int(script.told("child"))
        assert alive(child)
        assert os.getsid(child) == child
    assert not alive(child)
    assert engine.returncode == -signal.SIGTERM


def test_one_that_is_deaf(script: Script, start: Start) -> None:
    """SIGTERM does not end it; after the grace SIGKILL does."""
    with start("--deaf", grace=0.2) as engine:
        pass
    assert engine.returncode == -signal.SIGKILL


def test_a_crash_takes_the_rest_along(script: Script, start: Start) -> None:
    """Once ``wait`` returns, what the engine left behind is gone: memory of a GPU is free again."""
    with start("--child") as engine:
        child = int(script.told("child"))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSEGV)
        assert engine.wait(20) == -signal.SIGSEGV
        assert not alive(child)


def test_shared_memory_of_a_killed_one_is_removed(script: Script, start: Start) -> None:
    """It would stay until the machine restarts; what is somebody else's stays."""
    theirs = Path("/dev/shm") / f"rolloutsync-test-{os.getpid()}"
    theirs.touch()
    try:
        with start("--shared") as engine:
            shared = [Path("/dev/shm") / name for name in script.told("shared").split()]
            assert [path.exists() for path in shared] == [True, True]
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            engine.wait(20)
            assert [path.exists() for path in shared] == [False, False]
        assert theirs.exists()
    finally:
        theirs.unlink()


@pytest.mark.parametrize("which", [0, 1])
def test_either_guard_is_enough(which: int, script: Script, start: Start, tmp_path: Path) -> None:
    """Ray kills the children of its workers, and what kills for want of memory takes what it finds."""
    with start("--child", "--deaf") as engine:
        child, pid = int(script.told("child")), engine.pid
        assert pid is not None
        guards = sorted(each for each, words in carrying(str(tmp_path)).items() if "launch_guard.py" in words)
        assert len(guards) == 2
        os.kill(guards[which], signal.SIGKILL)
        assert engine.wait(20) == -signal.SIGKILL
        assert not alive(pid)
        assert not alive(child)


def test_stop_is_idempotent_and_safe(start: Start) -> None:
    """From several threads, and again."""
    engine = start()
    for ended in [in_thread(engine.stop) for _ in range(4)]:
        ended.result(20)
    engine.stop()
    engine.kill()
    assert engine.returncode == -signal.SIGTERM


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_fork_does_not_end_it(start: Start) -> None:
    """The engine is its parent's."""
    with start() as engine:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                engine.stop()
                engine.restart()
            except ForkedError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert engine.poll() is None
        assert status(engine) == 200


# --- restart ---


def test_restart_changes_what_it_serves(start: Start) -> None:
    """On the same port, another process with another command line; bad changes change nothing."""
    with start(weight_version="1") as engine:
        before = (engine.pid, engine.url)
        with pytest.raises(ValueError, match="ready_timeout must be seconds above 0, got 0"):
            engine.restart(ready_timeout=0)
        with pytest.raises(ValueError, match="port cannot change in a restart, got 1"):
            engine.restart(port=1)
        assert engine.poll() is None
        engine.restart(model=Path("other/model"), weight_version=2)
        assert (engine.model, engine.weight_version) == ("other/model", "2")
        assert engine.url == before[1]
        assert engine.pid != before[0]
        argv = json.loads(engine.log_tail(1))["argv"]
        assert argv[:2] == ["--model-path", "other/model"]
        assert argv[-2:] == ["--weight-version", "2"]


def test_a_restart_that_fails_may_be_tried_again(start: Start) -> None:
    """No engine runs after it, and the port is still kept."""
    with start() as engine:
        with pytest.raises(EngineLaunchError, match="exit code 1"):
            engine.restart(args=("--fail",))
        assert engine.returncode == 1
        engine.restart(args=())
        assert status(engine) == 200
