"""The simulated engines of the differential test, set up as the real one is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rolloutsync.sim import SimFleet
from tests.real.conftest import SIM_LLAMA

from .bodies import VOCABULARY

TOKENS_PER_SECOND = 400.0  # about what the real one does on a CPU


@pytest.fixture(scope="session")
def twins() -> Iterator[SimFleet]:
    """Two simulated engines with the real model's vocabulary."""
    with SimFleet(engines=2, **SIM_LLAMA, vocab_size=VOCABULARY, tokens_per_second=TOKENS_PER_SECOND) as fleet:
        yield fleet
