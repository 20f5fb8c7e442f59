"""Weights through a RolloutActor: the verbs that travel, and the error that names stale engines."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from rolloutsync import UpdateReport, UpdateState, WeightUpdateError
from rolloutsync.sim import Fault, SimFleet
from rolloutsync.sim.tokens import expected_tokens
from tests.client.kit import params

pytestmark = pytest.mark.ray


def test_an_update_through_the_actor(cluster: ModuleType, actor: Any, fleet: SimFleet) -> None:
    """The report travels; samples are of the new weights. A stale engine arrives as our error, with its report."""
    get = cluster.get
    report = get(actor.update_weights_from_disk.remote("new", "12", verify="checksum"))
    assert isinstance(report, UpdateReport)
    assert {engine.state for engine in report.engines} == {UpdateState.UPDATED}
    assert get(actor.weight_versions.remote()) == dict.fromkeys(fleet, "12")
    (sample,) = get(actor.generate.remote([[5, 6]], params(4)))
    assert sample.output_ids.tolist() == expected_tokens([5, 6], 4, version="12")
    refusal = {"success": False, "message": "no such checkpoint"}
    fleet.engines[0].add_fault(Fault(kind="status", status=400, path="/update_weights_from_disk", body=refusal))
    with pytest.raises(WeightUpdateError, match="no such checkpoint") as caught:
        get(actor.update_weights_from_disk.remote("newer", "13", "hold"))
    assert [engine.url for engine in caught.value.report.stale] == [fleet[0]]
