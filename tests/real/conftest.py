"""Fixtures of the real suite.

A test that takes `llama_urls` or `moe_urls` runs twice: against the simulated engine, in the slow suite, and against
real SGLang, under the marker `real`. What does not depend on the model runs a third time under the marker `gpu`,
against the engine that the environment names (`gpu.py`). Real engines start when the first test wants them, serve the
whole session and are put back to idle after each test. If any real test was selected, the kit is installed before the
first test, outside of every test's time limit, and the session moves to a private loopback. A test that takes
`vllm`, `plain_vllm` or `mixed_urls` has real vLLM, and vLLM is installed only for such a test.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests

from rolloutsync.sim import SimFleet
from tests.oracles import router

from .gpu import gpu_device, gpu_kit
from .kit import Kit, KitError, ensure, ensure_vllm
from .launch import CPU, Device, RealEngine, start_all, stop_all
from .network import Namespace
from .raw_vllm import settle_vllm
from .vllm import CPU as VLLM_CPU
from .vllm import FULL, HEADER_IDS, PlainVllm, VllmEngine, slowed

LLAMA_ENGINES = 2
MOE_FLAGS = ("--enable-return-routed-experts",)
TEST_TIMEOUT_S = 300
GPU_TEST_TIMEOUT_S = 1200  # the first one waits until the user's model is loaded
ANY_MODEL = ("test_main_job.py", "test_engine_contract.py")  # what a GPU is tried with, but for the tests with experts
IDLE_TIMEOUT_S = 30.0
TOKEN_COUNTS = ("num_waiting_uncached_tokens", "num_used_tokens", "num_total_tokens")
COUNTS = ("num_running_reqs", "num_waiting_reqs", *TOKEN_COUNTS)
# The simulated engines are given what the real ones are started with.
SIM_LLAMA: dict[str, Any] = {"context_length": 2048, "max_running_requests": 4, "max_total_tokens": 8192}
SIM_MOE: dict[str, Any] = {**SIM_LLAMA, "routed_experts": (2, 2, 8)}


@dataclass
class Bench:
    """What the session has set up: the kits or why there are none, the network, and the engines that were started."""

    kits: dict[str, tuple[Kit, Device]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    namespace: Namespace = field(default_factory=Namespace)
    network: str = ""
    started: list[RealEngine] = field(default_factory=list)  # those that serve the whole session
    modules: list[RealEngine] = field(default_factory=list)  # those that served one module
    routers: dict[str, Path] = field(default_factory=dict)  # interpreters


BENCH = pytest.StashKey[Bench]()
ROUTER = "router"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what says nothing on a GPU; gives tests the time that a slow machine takes to start engines."""
    unfit = {item for item in items if item.get_closest_marker("gpu") and not _fits_any_model(item)}
    config.hook.pytest_deselected(items=list(unfit))
    items[:] = [item for item in items if item not in unfit]
    for item in items:
        kind = _kind(item)
        if kind is not None and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S if kind == "real" else GPU_TEST_TIMEOUT_S))


def _fits_any_model(item: pytest.Item) -> bool:
    return item.path.name in ANY_MODEL and "moe_urls" not in getattr(item, "fixturenames", ())


def _kind(item: pytest.Item) -> str | None:
    return next((kind for kind in ("real", "gpu") if item.get_closest_marker(kind)), None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepares the kits and the network if a selected test needs a real engine."""
    kinds = {kind for item in session.items for kind in _needs(item)}
    if session.config.option.collectonly or not kinds:
        return
    bench = session.config.stash.setdefault(BENCH, Bench())
    report = _reporter(session.config)
    for kind in kinds - {ROUTER}:
        try:
            bench.kits[kind] = _obtained(kind, report)
        except KitError as error:
            bench.problems[kind] = str(error)
    for release in router.RELEASES if ROUTER in kinds else ():
        with contextlib.suppress(KitError):  # the tests that want it say so
            bench.routers[str(release)] = router.ensure(report, release)
    if bench.kits or bench.routers:
        bench.network = _enter(bench.namespace)
        report(bench.network)


def _needs(item: pytest.Item) -> set[str]:
    """The kits that a test wants: its marker's, and vLLM's if it takes an engine of that; the oracles want routers."""
    kind = _kind(item)
    if kind == "real" and item.path.parent.name == "oracles":
        return {ROUTER}
    vllm = kind == "real" and "vllm_kit" in getattr(item, "fixturenames", ())
    return {each for each in (kind, "vllm" if vllm else None) if each is not None}


def _obtained(kind: str, report: Callable[[str], None]) -> tuple[Kit, Device]:
    if kind == "vllm":
        return ensure_vllm(report), VLLM_CPU
    return (ensure(report), CPU) if kind == "real" else _of_the_environment()


def _of_the_environment() -> tuple[Kit, Device]:
    kit = gpu_kit()
    return kit, gpu_device(kit)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Returns from the private loopback."""
    session.config.stash.get(BENCH, Bench()).namespace.leave()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says which engines and routers the tests ran against."""
    bench = config.stash.get(BENCH, Bench())
    started = [*bench.started, *bench.modules]
    if started or bench.routers:
        terminalreporter.section("real engines")
    for name in bench.routers:
        terminalreporter.write_line(f"{name} before simulated engines")
    for engine in started:
        what = f"{engine.name} {engine.version} on {engine.device.name}, model {engine.model.name}"
        terminalreporter.write_line(f"{what}, {engine.url}, ready after {engine.ready_after_s:.1f} s")


def _enter(namespace: Namespace) -> str:
    try:
        namespace.enter()
    except OSError as error:
        return f"network: no namespace of our own ({error}); SGLang's extra listener is open to other machines"
    return "network: a private loopback in a namespace of this session"


def _reporter(config: pytest.Config) -> Callable[[str], None]:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    return lambda message: None if terminal is None else terminal.write_line(f"real: {message}")


# The engines.


@pytest.fixture(
    params=[
        pytest.param("sim", marks=pytest.mark.slow),
        pytest.param("real", marks=pytest.mark.real),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)
def engine_kind(request: pytest.FixtureRequest) -> str:
    """`sim`, `real` or `gpu`: every test below runs against the first two, and those for any model against all."""
    return str(request.param)


@pytest.fixture
def llama_urls(engine_kind: str, request: pytest.FixtureRequest) -> Iterator[Sequence[str]]:
    """Two dense engines: 4 running requests each, 2048 tokens of context, prefill in chunks of 256."""
    yield from _lend(request, f"{engine_kind}_llama")


@pytest.fixture
def moe_urls(engine_kind: str, request: pytest.FixtureRequest) -> Iterator[Sequence[str]]:
    """One engine with 2 layers of 8 experts, 2 per token, that returns routed experts on request."""
    yield from _lend(request, f"{engine_kind}_moe")


@pytest.fixture
def checkpoints(engine_kind: str, request: pytest.FixtureRequest) -> tuple[str, str]:
    """Paths of the checkpoint that the dense engines serve at first, and of one with other weights."""
    if engine_kind == "sim":
        return ("sim/llama", "sim/llama-other")
    kit, _ = _kit(request.config, engine_kind)
    return (str(kit.llama), str(kit.llama_other))


@pytest.fixture(scope="session")
def real_llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    """Two real engines with the dense model, started side by side, shared by the session."""
    yield from _serve_llama(request.config, "real", tmp_path_factory.mktemp("real-llama"))


@pytest.fixture(scope="session")
def gpu_llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    """Two engines with the model and on the GPU that the environment names, shared by the session."""
    yield from _serve_llama(request.config, "gpu", tmp_path_factory.mktemp("gpu-llama"))


@pytest.fixture(scope="session")
def real_moe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    """One real engine with the mixture of experts, shared by the session."""
    log: Path = tmp_path_factory.mktemp("real-moe") / "0.log"
    kit, _ = _kit(request.config, "real")
    yield from _serve(request.config, [RealEngine(kit, kit.moe, log, MOE_FLAGS)])


@pytest.fixture(scope="session")
def sim_llama() -> Iterator[Sequence[str]]:
    """Two simulated dense engines, shared by the session."""
    with SimFleet(engines=LLAMA_ENGINES, **SIM_LLAMA) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def sim_moe() -> Iterator[Sequence[str]]:
    """One simulated engine with routed experts, shared by the session."""
    with SimFleet(engines=1, **SIM_MOE) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def vllm_kit(request: pytest.FixtureRequest) -> Kit:
    """What it takes to start real vLLM engines of a test's own."""
    return _kit(request.config, "vllm")[0]


@pytest.fixture(scope="session")
def real_vllm(
    vllm_kit: Kit, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RealEngine]]:
    """One real vLLM engine with all that a client can use, shared by the session."""
    log: Path = tmp_path_factory.mktemp("real-vllm") / "0.log"
    yield from _serve(request.config, [VllmEngine(vllm_kit, vllm_kit.llama, log, FULL, device=VLLM_CPU)])


@pytest.fixture(scope="module")
def plain_vllm(
    vllm_kit: Kit, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealEngine]:
    """A module's own vLLM engine without dev mode, scale-out and load tracking; it may be killed."""
    log: Path = tmp_path_factory.mktemp("plain-vllm") / "0.log"
    engine = PlainVllm(vllm_kit, vllm_kit.llama, log, HEADER_IDS, device=VLLM_CPU)
    start_all([engine])
    request.config.stash[BENCH].modules.append(engine)
    yield engine
    stop_all([engine])  # it alone: the session goes on with the others


@pytest.fixture
def vllm(real_vllm: list[RealEngine]) -> Iterator[RealEngine]:
    """The vLLM engine: 4 running requests, 2048 tokens of context, 256 tokens a step. Left resumed and idle."""
    (engine,) = real_vllm
    yield engine
    engine.check_alive()
    settle_vllm(engine.url)


@pytest.fixture
def slow_vllm(vllm: RealEngine) -> Iterator[None]:
    """The vLLM engine makes a few tokens each second in this test."""
    with slowed(vllm):
        yield


@pytest.fixture
def mixed_urls(real_llama: list[RealEngine], vllm: RealEngine) -> Iterator[list[str]]:
    """A real SGLang engine and a real vLLM engine, in this order, that serve the same checkpoint."""
    sglang = real_llama[0]
    yield [sglang.url, vllm.url]
    sglang.check_alive()
    settle([sglang.url])


@pytest.fixture
def own_kit(request: pytest.FixtureRequest) -> Kit:
    """What it takes to start real engines of a test's own."""
    return _kit(request.config, "real")[0]


def _kit(config: pytest.Config, kind: str) -> tuple[Kit, Device]:
    bench = config.stash.get(BENCH, Bench())
    if kind not in bench.kits:
        problem = bench.problems.get(kind, f"no test with the marker `{kind}` was selected")
        pytest.fail(f"no real engine: {problem}", pytrace=False)
    return bench.kits[kind]


def _serve_llama(config: pytest.Config, kind: str, logs: Path) -> Iterator[list[RealEngine]]:
    kit, device = _kit(config, kind)
    engines = [RealEngine(kit, kit.llama, logs / f"{n}.log", device=device) for n in range(LLAMA_ENGINES)]
    yield from _serve(config, engines)


def _serve(config: pytest.Config, engines: list[RealEngine]) -> Iterator[list[RealEngine]]:
    started = config.stash[BENCH].started
    start_all(engines)
    started.extend(engines)
    try:
        yield engines
    finally:
        for engine in started:  # the session ends: all of them are about to be stopped, so let them go together
            engine.ask_to_stop()
        stop_all(engines)


def _lend(request: pytest.FixtureRequest, owner: str) -> Iterator[Sequence[str]]:
    engines = request.getfixturevalue(owner)
    urls = [each.url if isinstance(each, RealEngine) else str(each) for each in engines]
    yield urls
    for each in engines:
        if isinstance(each, RealEngine):
            each.check_alive()
    settle(urls)


def settle(urls: Sequence[str]) -> None:
    """Leaves engines as a test should find them: not paused, not slowed down, proven idle.

    Raises:
        AssertionError: One was not idle within 30 s; the message shows its load.
    """
    with requests.Session() as session:
        session.trust_env = False
        for url in urls:
            _post(session, f"{url}/continue_generation", {})
            _post(session, f"{url}/slow_down", {"forward_sleep_time": None})
        for url in urls:
            _abort_until_idle(session, url)


def _post(session: requests.Session, url: str, body: object) -> None:
    answer = session.post(url, json=body, timeout=10)
    assert answer.status_code == 200, f"{url} answered {answer.status_code}: {answer.text}"


def _abort_until_idle(session: requests.Session, url: str) -> None:
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while _busy(load := _rank(session, url)):
        assert time.monotonic() < deadline, f"{url} is not idle: {json.dumps(load)}"
        _post(session, f"{url}/abort_request", {"rid": "", "abort_all": True})
        _await_later_snapshot(session, url, load, deadline)


def _busy(load: dict[str, float]) -> bool:
    return any(load[name] for name in COUNTS)


def _rank(session: requests.Session, url: str) -> dict[str, float]:
    loads = session.get(f"{url}/v1/loads", timeout=10).json()["loads"]
    assert len(loads) == 1, f"{url} should have one rank: {loads}"
    rank: dict[str, float] = loads[0]
    return rank


def _await_later_snapshot(session: requests.Session, url: str, load: dict[str, float], deadline: float) -> None:
    while _rank(session, url)["timestamp"] == load["timestamp"]:
        assert time.monotonic() < deadline, f"{url} publishes no load: {json.dumps(load)}"
        time.sleep(0.1)
