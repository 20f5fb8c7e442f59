"""Fixtures of the transport tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transport.kit import Caller, make_transport


@pytest.fixture
def call_to() -> Iterator[Callable[..., Caller]]:
    """Makes a caller with a transport of its own, which is closed after the test."""
    made: list[Caller] = []

    def make(url: str, **options: Any) -> Caller:
        made.append(Caller(make_transport(**options), url))
        return made[-1]

    yield make
    for caller in made:
        assert caller.transport.close(5.0) == []
