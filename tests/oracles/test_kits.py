"""SGLang's own test kits, which it runs against every model that it supports, run against the simulated engine.

A kit is a module of unittest mixins that know a base URL and a process. Every test method of every mixin of these kits
is listed here: one that is new in another release fails the list. Some ask what only a trained model knows; they run as
well, and must come as far as that question and fail on nothing but the fact.
"""

from __future__ import annotations

import random
import unittest
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from rolloutsync.sim import SimConfig, SimEngine, SimFleet

from .wheel import PREFIX, Oracles

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Mixin:
    """One mixin of a kit.

    Attributes:
        engine: The one that it wants.
        settings: Its own class attributes.
        methods: Those that must pass.
        states: How the generations that they ask for must have ended, by the engine's ledger; kits are lenient there.
        facts: Those that end with a question to a trained model, and what they say when they miss the fact.
    """

    engine: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...]
    states: Mapping[str, int] | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


# The kits' default pauses suit a model on a GPU; an engine that has no model to load needs less of them.
KITS: dict[tuple[str, str], Mixin] = {
    ("abort_timeout_kit", "AbortAllMixin"): Mixin(engine="plain", methods=("test_abort_all",), states={"aborted": 32}),
    ("abort_timeout_kit", "WaitingTimeoutMixin"): Mixin(
        engine="impatient", methods=("test_waiting_timeout",), states={"finished": 1, "refused": 1}
    ),
    ("abort_timeout_kit", "RunningTimeoutTwoWaveMixin"): Mixin(
        engine="hasty",
        settings={"running_timeout_sleep": 0.5},
        methods=("test_running_timeout_no_crash",),
        states={"refused": 16},
    ),
    ("pause_generation_kit", "PauseResumeInPlaceMixin"): Mixin(
        engine="plain",
        settings={"pause_duration": 2.0},
        methods=("test_pause_resume_in_place",),
        states={"finished": 32},
    ),
    ("basic_api_contract_kit", "BasicAPIContractMixin"): Mixin(
        engine="plain",
        methods=(
            *("test_health", "test_health_generate", "test_get_server_info", "test_get_model_info"),
            *("test_openai_chat_completion", "test_openai_completion"),
        ),
    ),
    ("matched_stop_kit", "MatchedStopMixin"): Mixin(
        engine="chatty",
        settings={"model": "sim-model"},
        methods=("test_finish_stop_str", "test_finish_stop_regex_str", "test_finish_stop_eos", "test_finish_length"),
    ),
    ("basic_decode_correctness_kit", "BasicDecodeCorrectnessMixin"): Mixin(
        engine="plain",
        methods=(
            *("test_ascii_ratio", "test_no_repetition_blowup", "test_determinism_temp_zero", "test_max_token_one"),
        ),
        facts={
            "test_capital_france": "'paris' not found in ",
            "test_basic_math": "'391' not found in ",
            "test_color_completion": "'yellow' not found in ",
        },
    ),
    ("basic_scheduler_stress_kit", "BasicSchedulerStressMixin"): Mixin(
        engine="plain",
        methods=("test_long_prompt",),
        facts={
            "test_streaming_response": "'paris' not found in ",
            "test_concurrent_requests": "0 not greater than or equal to 7 : concurrent answers correct: 0/8;",
        },
    ),
}
# The stop kit asks for 1000 tokens and counts on a model that says a newline, an "or" and a full stop before its end. A
# simulated model says what its weights' name makes it say; these are the first of their numbers that are talkative so.
CHATTY: dict[str, Any] = {"vocab_size": 659, "mean_output_tokens": 400.0, "weight_version": "checkpoint-13"}
ENGINES = {
    "plain": SimConfig(context_length=131_072, prefill_tokens_per_second=200_000.0, health_poll_s=0.1),
    "impatient": SimConfig(max_running_requests=1, waiting_timeout_s=0.5),
    "hasty": SimConfig(running_timeout_s=1.0),
    "chatty": SimConfig(**CHATTY, tokens_per_second=5000.0),
}
RUNS = [(kit, mixin, method) for (kit, mixin), each in KITS.items() for method in each.methods]
FACTS = [(kit, mixin, method) for (kit, mixin), each in KITS.items() for method in each.facts]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, SimEngine]]:
    """One engine of each kind."""
    with SimFleet(configs=list(ENGINES.values())) as fleet:
        yield dict(zip(ENGINES, fleet.engines, strict=True))


@pytest.fixture
def before_the_guard(engines: dict[str, SimEngine], oracles: Oracles) -> None:
    """The shared engines and the files outlive a test."""


class Process:
    """What the kits take for the server's process: None as long as it lives."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def poll(self) -> int | None:
        """As `subprocess.Popen.poll`."""
        return None if self._engine.alive else 1


@pytest.mark.parametrize(("kit", "mixin", "method"), RUNS, ids=[".".join(run) for run in RUNS])
def test_kit(kit: str, mixin: str, method: str, oracles: Oracles, engines: dict[str, SimEngine]) -> None:
    """The kit's own method, whole and unchanged."""
    plan = KITS[kit, mixin]
    engine = engines[plan.engine]
    engine.reset()
    run(oracles.kit(kit), mixin, method, engine)
    assert engine.state()["requests"]
    assert plan.states is None or states(engine) == plan.states


@pytest.mark.parametrize(("kit", "mixin", "method"), FACTS, ids=[".".join(run) for run in FACTS])
def test_kit_up_to_the_fact(kit: str, mixin: str, method: str, oracles: Oracles, engines: dict[str, SimEngine]) -> None:
    """Everything that the method checks before the fact holds; the fact itself no simulation can know."""
    plan = KITS[kit, mixin]
    engine = engines[plan.engine]
    engine.reset()
    with pytest.raises(AssertionError) as missed:
        run(oracles.kit(kit), mixin, method, engine)
    assert str(missed.value).startswith(plan.facts[method])
    assert states(engine).keys() == {"finished"}


def test_the_radix_kit(oracles: Oracles, engines: dict[str, SimEngine]) -> None:
    """A function, no mixin: a tree of 400 prompts in one call, most of which begin with others."""
    engine = engines["plain"]
    engine.reset()
    random.seed(0)
    oracles.kit("radix_cache_server_kit").run_radix_attention_test(engine.url)
    ended = states(engine)
    assert ended.keys() == {"finished"}
    assert ended["finished"] > 400


def states(engine: SimEngine) -> Counter[str]:
    """How many generations came to which end since the last reset."""
    return Counter(row["state"] for row in engine.state()["generations"])


def run(kit: ModuleType, mixin: str, method: str, engine: SimEngine) -> None:
    """Runs one method; what it raises is not caught."""
    settings = KITS[kit.__name__.removeprefix(PREFIX), mixin].settings
    names = {"base_url": engine.url, "process": Process(engine), **settings}
    case = type(mixin, (getattr(kit, mixin), unittest.TestCase), names)
    case(method).debug()


def test_the_list_is_complete(oracles: Oracles) -> None:
    """Every method of every mixin of these kits is run."""
    for kit in {name for name, _ in KITS}:
        listed = {mixin: {*plan.methods, *plan.facts} for (name, mixin), plan in KITS.items() if name == kit}
        assert methods_of(oracles.kit(kit)) == listed


def methods_of(kit: ModuleType) -> dict[str, set[str]]:
    """The test methods of the mixins that a kit defines."""
    mixins = {name: value for name, value in vars(kit).items() if isinstance(value, type)}
    own = {name: value for name, value in mixins.items() if value.__module__ == kit.__name__}
    return {name: {method for method in vars(value) if method.startswith("test")} for name, value in own.items()}
