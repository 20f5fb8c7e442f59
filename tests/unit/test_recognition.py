"""Telling servers apart: a few probes, in order, until it is clear."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutsync.dialects.base import Call
from rolloutsync.dialects.family import PROBES, Family
from rolloutsync.errors import Cut, EngineHTTPError, Phase, TransportError
from rolloutsync.recognition import recognise

MISSING = EngineHTTPError("404", status=404)


class Server:
    """Answers probes by path; everything else with ``otherwise``."""

    def __init__(self, answers: dict[str, Any], otherwise: Any = MISSING) -> None:
        self._answers = answers
        self._otherwise = otherwise
        self.asked: list[str] = []

    def __call__(self, call: Call) -> Any:
        self.asked.append(call.path)
        said = self._answers.get(call.path, self._otherwise)
        if isinstance(said, Exception):
            raise said
        return said


@pytest.mark.parametrize(
    ("answers", "found", "probes"),
    [
        ({"/version": {"version": "0.33.0"}}, Family.VLLM, 1),
        ({"/workers": {"workers": []}}, Family.ROUTER, 2),
        ({"/model_info": {"model_path": "m"}}, Family.SGLANG, 3),
        ({"/list_workers": {"urls": ["http://h:1"]}, "/get_model_info": {"model_path": "m"}}, Family.ROUTER, 4),
        ({"/get_model_info": {"model_path": "m"}}, Family.SGLANG, 5),
        ({}, None, 5),
    ],
)
def test_families(answers: dict[str, Any], found: Family | None, probes: int) -> None:
    """No more is asked than is needed."""
    server = Server(answers)
    assert recognise(server) is found
    assert len(server.asked) == probes


@pytest.mark.parametrize("phase", [Phase.RACE, Phase.SENT, Phase.BODY])
def test_probes_that_break(phase: Phase) -> None:
    """As all do that a mock does not know; the next one may tell."""
    broken = TransportError("broken", phase=phase)
    assert recognise(Server({}, broken)) is None
    assert recognise(Server({"/model_info": {"model_path": "m"}}, broken)) is Family.SGLANG


@pytest.mark.parametrize(
    "error",
    [
        TransportError("refused", phase=Phase.REFUSED),
        TransportError("no name", phase=Phase.CONNECT),
        TransportError("silent", phase=Phase.SENT, cut=Cut.DEADLINE),
        TransportError("closed", phase=Phase.SENT, cut=Cut.CLOSE),
    ],
)
def test_servers_that_are_not_there(error: TransportError) -> None:
    """Nothing is known of them, and they are not asked again and again."""
    server = Server({}, error)
    with pytest.raises(TransportError):
        recognise(server)
    assert server.asked == [PROBES[0].path]
