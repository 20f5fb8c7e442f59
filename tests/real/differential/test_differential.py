"""Real SGLang and the simulated engine take the same sequences of calls and must say the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from rolloutsync.sim import SimFleet
from tests.real.launch import RealEngine

from .compare import KNOWN, Difference, differences, report, unanswered
from .runner import run
from .sequence import sequence, tour
from .steps import Step

SEEDS = int(os.environ.get("ROLLOUTSYNC_DIFFERENTIAL_SEEDS", "12"))
SIZE = 16


def compared(
    title: str, steps: Sequence[Step], urls: tuple[str, str], sides: tuple[str, str]
) -> tuple[list[Difference], str]:
    """Runs both sides side by side; returns the differences, and what is to be said about those that are not known."""
    with ThreadPoolExecutor(2) as pool:
        left, right = pool.map(lambda url: run(url, steps), urls)
    found = list(differences(steps, left, right))
    unknown = [each for each in found if each.known is None]
    said = report(title, sides, steps, unknown) if unknown else ""
    missing = unanswered(steps, left)
    return found, "\n".join([said, *(f"{sides[0]} never answered: {each}" for each in missing)]).strip()


def agree(title: str, steps: Sequence[Step], real: RealEngine, simulated: str) -> set[object]:
    """Checks that the simulation agrees with the real engine; returns the entries of the table that were met."""
    found, complaint = compared(title, steps, (real.url, simulated), ("real", "sim"))
    real.check_alive()
    assert not complaint, complaint
    return {each.known for each in found}


@pytest.mark.real
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_sequence_goes_alike(seed: int, real_llama: Sequence[RealEngine], twins: SimFleet) -> None:
    """Statuses, shapes, reasons, counts and determined orders are the same at every step."""
    lane = seed % len(real_llama)
    agree(f"sequence {seed}", sequence(seed, SIZE), real_llama[lane], twins.urls[lane])


@pytest.mark.real
def test_every_call_is_answered_alike_and_every_known_difference_still_occurs(
    real_llama: Sequence[RealEngine], twins: SimFleet
) -> None:
    """The tour meets every body and call, so an entry of the table that it does not need any more is out of date."""
    met = agree("the tour", tour(), real_llama[0], twins.urls[0])
    out_of_date = [entry for entry in KNOWN if entry not in met]
    assert not out_of_date, f"no difference any more, take it out of the table: {out_of_date}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, pytest.param(None, id="tour")])
def test_a_trace_is_the_same_twice(seed: int | None, twins: SimFleet) -> None:
    """What is left of an answer does not depend on time or chance: two simulated engines give the same trace."""
    steps = tour() if seed is None else sequence(seed, SIZE)
    found, complaint = compared(f"sequence {seed}", steps, (twins.urls[0], twins.urls[1]), ("one", "other"))
    assert not complaint, complaint
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_many_traces_are_the_same_twice(seed: int, twins: SimFleet) -> None:
    """The same for the sequences that real engines take."""
    _, complaint = compared(f"sequence {seed}", sequence(seed, SIZE), (twins.urls[0], twins.urls[1]), ("one", "other"))
    assert not complaint, complaint


def test_sequences_differ_by_seed_and_by_nothing_else() -> None:
    """A seed names one sequence, so a failure can be run again."""
    assert [str(step) for step in sequence(1, SIZE)] == [str(step) for step in sequence(1, SIZE)]
    assert [str(step) for step in sequence(1, SIZE)] != [str(step) for step in sequence(2, SIZE)]


def test_the_sequences_contain_what_they_are_for() -> None:
    """All three pauses, aborts of either kind, late requests, duplicates and races come up within the default seeds."""
    said = {step.what for seed in range(12) for step in sequence(seed, SIZE)}
    wanted = {"pause abort", "pause in_place", "pause retract", "abort all", "abort a running request"}
    wanted |= {"abort a waiting request", "abort what is parked", "a rid that is in use", "the shorter of two"}
    wanted |= {"make room", "abort both by the shorter", "a rid again that has ended"}
    assert wanted <= said, wanted - said
    assert any(what.endswith("sent during a pause") for what in said)


def test_a_difference_is_told_with_what_led_to_it() -> None:
    """The report names the step, the fact and both sides."""
    steps = sequence(1, SIZE)
    left = [{"call status": "200"} for _ in steps]
    right = [dict(facts) for facts in left]
    right[2] = {"call status": "400"}
    found = list(differences(steps, left, right))
    text = report("sequence 1", ("real", "sim"), steps, found)
    assert "step 2 differs" in text
    assert str(steps[2]) in text
    assert "real  200" in text
    assert "sim   400" in text
