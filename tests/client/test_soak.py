"""The soak of benchmarks/ for a few seconds; and what it would tell if something were wrong."""

from __future__ import annotations

import importlib
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from rolloutsync import DeadlineExceededError, Prompt, Sample, Status, TransportError
from rolloutsync.errors import Phase
from rolloutsync.sim import SimFleet
from rolloutsync.sim.tokens import expected_logprobs, expected_tokens
from tests.processes import ROOT, run

SOAK = "import sys; from benchmarks.soak import main; sys.exit(main(sys.argv[1:]))"
SMALL = ("--engines", "3", "--callers", "60", "--grace-s", "60")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of benchmarks/, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
def test_a_soak_of_some_seconds_finds_nothing() -> None:
    ended = run(SOAK, "--minutes", "0.1", "--seed", "7", *SMALL, timeout=100.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    zeros = ended.stdout.partition("must be zero")[2]
    assert {count for _, count in re.findall(r"^(\S.*?)  +(\d+)$", zeros, re.MULTILINE)} == {"0"}
    assert ended.stdout.endswith("passed\n")


@pytest.mark.slow
def test_a_finding_is_named_and_fails_the_run() -> None:
    ended = run(SOAK, "--minutes", "0.03", "--memory-mb", "-1000", *SMALL, timeout=100.0)
    assert ended.returncode == 1
    assert "megabytes grown beyond the limit: " in ended.stdout
    assert ended.stdout.endswith("FAILED\n")


def test_the_seed_alone_decides_what_is_done_to_the_engines(part: Callable[[str], Any]) -> None:
    plan = part("chaos").plan
    assert plan(1, 0, 600.0) == plan(1, 0, 600.0)
    assert plan(1, 0, 600.0) != plan(2, 0, 600.0)
    kinds = {blow.kind for seed in range(5) for blow in plan(seed, 0, 600.0)}
    assert {"kill", "stop", "freeze", "reset", "truncate", "drip", "drop", "wrong_id", "interim"} <= kinds


def sample_of(ask: Any, **changes: Any) -> Sample:
    """What must come for it."""
    ids = expected_tokens(ask.ids, ask.tokens)
    prompt = Prompt(input_ids=np.array(ask.ids, np.int32))
    whole = Sample(
        prompt=prompt,
        index=0,
        member=0,
        rid="ab" * 16,
        status=Status.TRUNCATED,
        output_ids=np.array(ids, np.int32),
        logprobs=np.array(expected_logprobs(ask.ids, ids), np.float32),
        attempts=1,
        metadata={"ids": ask.ids},
    )
    return replace(whole, **changes)


class Case:
    """Books that expect one sample."""

    def __init__(self, part: Callable[[str], Any]) -> None:
        self.findings = part("findings").Findings()
        self.books = part("books").Books(self.findings, 5)
        self.ask = self.books.ask(Random(1))
        self.books.wants([self.ask])

    def told(self) -> list[str]:
        return [kind for kind, count in self.findings.counts().items() if count]


@pytest.fixture
def case(part: Callable[[str], Any]) -> Case:
    return Case(part)


def test_what_must_come_is_no_finding(case: Case) -> None:
    sample = sample_of(case.ask)
    case.books.receive([case.ask], [sample])
    case.books.settle({case.ask.key: 1})
    assert case.told() == []


def test_a_sample_that_does_not_come_is_lost(case: Case) -> None:
    case.books.settle({})
    assert case.told() == ["lost samples"]


def test_two_samples_with_one_request_id_are_noticed(case: Case) -> None:
    case.books.wants([case.ask])
    for _ in range(2):
        case.books.receive([case.ask], [sample_of(case.ask)])
    assert case.told() == ["duplicate request ids"]


def test_more_generations_than_attempts_are_noticed(case: Case) -> None:
    case.books.receive([case.ask], [sample_of(case.ask)])
    case.books.settle({case.ask.key: 2})
    assert case.told() == ["samples with too many generations"]


LATE = TransportError("broke", phase=Phase.SENT)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"index": 1}, "samples out of place"),
        ({"metadata": {}}, "samples out of place"),
        ({"status": Status.COMPLETED}, "wrong tokens or logprobs"),
        ({"output_ids": np.array([3], np.int32), "logprobs": np.array([-1.0], np.float32)}, "wrong tokens or logprobs"),
        ({"status": Status.FAILED, "error": LATE, "attempts": 4}, "failures without a good reason"),
        ({"status": Status.FAILED, "error": DeadlineExceededError("late")}, "failures without a good reason"),
    ],
)
def test_what_is_not_as_it_must_be_is_named(case: Case, changes: dict[str, Any], kind: str) -> None:
    case.books.receive([case.ask], [sample_of(case.ask, **changes)])
    assert case.told() == [kind]


def test_a_second_copy_is_told_once_when_it_runs_too_long(part: Callable[[str], Any]) -> None:
    findings = part("findings").Findings()
    witness = part("witness").Witness(SimFleet(1), findings, 8.0, lambda _: 1)
    now = time.monotonic()
    for later in (0.0, 7.0, 9.0, 20.0):
        witness._judge_copies(Counter({1: 2, 2: 1}), now + later)
    assert findings.counts()["second copies running too long"] == 1


def test_a_second_copy_that_ends_in_time_is_none(part: Callable[[str], Any]) -> None:
    findings = part("findings").Findings()
    witness = part("witness").Witness(SimFleet(1), findings, 8.0, lambda _: 1)
    now = time.monotonic()
    for later, copies in ((0.0, 2), (7.0, 1), (9.0, 2), (16.0, 2)):
        witness._judge_copies(Counter({1: copies}), now + later)
    assert not findings
