"""``launch_engine`` and ``EngineActor`` with real engines: they serve, come back with the right weights, and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rolloutsync import EngineLaunchError, EngineState, RolloutClient, Status
from rolloutsync.launch import LaunchedEngine, launch_engine
from rolloutsync.launch_guard import _parents, mapped_inodes
from tests.ray.cluster import local_ray
from tests.ray.guard import watch_threads

from . import launch, vllm
from .kit import OFFLINE, Kit
from .launch import descendants
from .test_main_job import await_true

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

READY_S = 240.0
PREFIXES = ("sglang", "psm_", "sem.")
SGLANG: dict[str, Any] = {"args": [*launch.CPU_FLAGS, *launch.LIMITS], "env": {**OFFLINE, **launch.CPU_ENGINE}}
VLLM_ENV = {**OFFLINE, **vllm.CPU_ENGINE, "VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A short folder for the engines' own files: paths of sockets are limited."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process and no shared memory that was not there before."""
    children, shared = set(descendants(os.getpid())), set(Path("/dev/shm").iterdir())
    yield
    await_true(lambda: (set(descendants(os.getpid())) <= children or _ray_runs()) and not _left_shared(shared))


def _left_shared(before: set[Path]) -> set[Path]:
    """What engines left in /dev/shm; other suites on this machine may be using theirs."""
    used = mapped_inodes(_parents())
    left = {path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith(PREFIXES)}
    return {path for path in left if path.lstat().st_ino not in used}


def _ray_runs() -> bool:
    import sys

    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def sglang(kit: Kit, scratch: Path, **options: Any) -> dict[str, Any]:
    """What it takes to launch SGLang here."""
    common = {"python": str(kit.python), "model": str(kit.llama), "ready_timeout": READY_S}
    return {**common, "args": SGLANG["args"], "env": _at(SGLANG["env"], scratch), **options}


def _at(env: Mapping[str, str], scratch: Path) -> dict[str, str]:
    return {**env, "TMPDIR": str(scratch)}


def check_serves(engine: LaunchedEngine) -> None:
    """It generates, through a client that knows nothing of it but its URL."""
    with RolloutClient(engine.url) as client:
        samples = client.generate([[5, 6, 7]], {"max_new_tokens": 8, "ignore_eos": True}, n=2, timeout=120.0)
        assert [sample.status for sample in samples] == [Status.TRUNCATED] * 2, samples
        assert [len(sample.output_ids) for sample in samples] == [8, 8]


def check_goes(engine: LaunchedEngine) -> None:
    """All of its processes, the guards too."""
    assert engine.pid is not None
    family = descendants(engine.pid)
    assert len(family) > 1
    engine.stop()
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
    assert engine.poll() is not None


def test_sglang(own_kit: Kit, scratch: Path, tmp_path: Path) -> None:
    """From a launch to nothing left, and once killed in between."""
    with launch_engine("sglang", log=tmp_path / "log", **sglang(own_kit, scratch, weight_version="1")) as engine:
        check_serves(engine)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        assert engine.wait(30) == -signal.SIGKILL
        engine.restart(model=own_kit.llama_other, weight_version="2")
        check_serves(engine)
        with RolloutClient(engine.url) as client:
            assert client.weight_versions() == {engine.url: "2"}
        check_goes(engine)


def test_sglang_that_cannot_start(own_kit: Kit, scratch: Path, tmp_path: Path) -> None:
    """Its own words say why."""
    options = sglang(own_kit, scratch)
    with pytest.raises(EngineLaunchError, match="unrecognized arguments: --no-such-flag") as caught:
        launch_engine("sglang", log=tmp_path / "log", **{**options, "args": [*options["args"], "--no-such-flag"]})
    assert caught.value.returncode == 2


def test_vllm(vllm_kit: Kit, scratch: Path, tmp_path: Path) -> None:
    """The same; its core and worker are processes of their own."""
    compiled = vllm_kit.python.parents[1] / "compiled"
    paths = {"VLLM_CACHE_ROOT": str(compiled), "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor")}
    with launch_engine(
        "vllm",
        model=vllm_kit.llama,
        python=vllm_kit.python,
        args=[*vllm.LIMITS, *vllm.FULL],
        env=_at({**VLLM_ENV, **paths}, scratch),
        ready_timeout=READY_S,
        log=tmp_path / "log",
    ) as engine:
        check_serves(engine)
        check_goes(engine)


# --- in a Ray actor ---


@pytest.fixture(scope="module")
def cluster() -> Iterator[ModuleType]:
    with local_ray() as ray:
        yield ray


@pytest.fixture
def before_the_guard(request: pytest.FixtureRequest) -> None:
    """Ray outlives the test."""
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("cluster")


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest, before_the_guard: None) -> Iterator[None]:
    """Threads alone: Ray's channels are its own business."""
    yield from watch_threads(request.node.nodeid)


@pytest.fixture
def actor(cluster: ModuleType, own_kit: Kit, scratch: Path, tmp_path: Path) -> Iterator[Any]:
    """An actor whose engine is killed with it."""
    from rolloutsync.ray_engine import EngineActor

    options = sglang(own_kit, scratch, log=str(tmp_path / "log"), weight_version="0")
    made = EngineActor.options(num_cpus=0).remote("sglang", **options)
    yield made
    pid = cluster.get(made.pid.remote())
    family = descendants(pid)
    cluster.kill(made)
    await_true(lambda: not [each for each in family if Path(f"/proc/{each}").exists()])


@pytest.mark.ray
def test_a_killed_engine_comes_back_with_the_right_version(cluster: ModuleType, actor: Any, own_kit: Kit) -> None:
    """Generate, update the weights, kill -9 the engine, and watch it return: the issue's own words."""
    from rolloutsync.ray_engine import RayEngines

    get: Callable[..., Any] = cluster.get
    engines = RayEngines([actor])
    (url,) = engines.urls(READY_S)
    with RolloutClient(url) as client, engines.watch(client, interval_s=0.5):
        check_versions(client, {"0"})
        client.update_weights_from_disk(str(own_kit.llama_other), version="1")
        engines.serve(str(own_kit.llama_other), "1")
        check_versions(client, {"1"})
        killed = get(actor.pid.remote())
        os.kill(killed, signal.SIGKILL)
        await_true(lambda: _is_back(get(actor.state.remote()), killed), READY_S)
        await_true(lambda: {each.url: each.state for each in client.engines()} == {url: EngineState.LIVE}, 60.0)
        assert client.weight_versions() == {url: "1"}
        check_versions(client, {"1"})


def _is_back(look: Any, killed: int) -> bool:
    return bool(look.state == "serving" and look.pid != killed)


def check_versions(client: RolloutClient, expected: set[str]) -> None:
    """Which weights produced what it generates now."""
    samples = client.generate([[5, 6, 7]], {"max_new_tokens": 8, "ignore_eos": True}, n=2, timeout=120.0)
    assert {str(span.version) for sample in samples for span in sample.weight_spans} == expected, samples
