"""Weights that a trainer broadcasts: groups, ranks that are lost, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolloutsync import (
    ProtocolError,
    RolloutClient,
    WeightUpdate,
    WeightUpdateError,
    weight_member,
)
from rolloutsync.sim import SimFleet
from tests.client.kit import calls, error_answer
from tests.client.weightkit import (
    BUCKET,
    SENT,
    TENSOR,
    WeightEngine,
    refuse,
    states,
    tensors_for,
    weight_engines,
)
from tests.wire import WAIT_S, silence

MakeClient = Callable[..., RolloutClient]


def test_a_broadcast(fleet: SimFleet, make_client: MakeClient) -> None:
    """The group has a rank for each tensor-parallel rank, after the trainer's; buckets do not block."""
    client = make_client(fleet)
    group = client.init_group("127.0.0.1", 29500, backend="gloo")
    group.wait(WAIT_S)
    assert group.world_size == 5
    assert dict(group.rank_offsets) == {url: 1 + index for index, url in enumerate(fleet)}
    with pytest.raises(WeightUpdateError, match="the weight group 'weight_update_group' exists"):
        client.init_group("127.0.0.1", 29500)
    with client.weight_update("2", "hold", verify="checksum") as update:
        futures = [update.from_distributed([f"w{number}"], ["bfloat16"], [[2]]) for number in range(3)]
    assert [future.result(0.0) for future in futures] == [None] * 3
    assert update.report is not None
    assert len(update.report.updated) == 4
    client.destroy_group()
    client.destroy_group()


def test_ranks_follow_the_sizes_of_the_engines(make_client: MakeClient) -> None:
    """Each engine begins where the one before it ended."""
    with weight_engines(WeightEngine(tp_size=4), WeightEngine(tp_size=2)) as (four, two):
        group = make_client([four.url, two.url]).init_group("10.0.0.1", 1234, group_name="g")
        group.wait(WAIT_S)
        assert group.world_size == 7
        where = {"master_address": "10.0.0.1", "master_port": 1234, "world_size": 7, "group_name": "g"}
        sent = [engine.bodies("/init_weights_update_group") for engine in (four, two)]
        assert sent == [[{**where, "backend": "nccl", "rank_offset": offset}] for offset in (1, 5)]


def test_a_group_that_is_not_made(fleet: SimFleet, make_client: MakeClient) -> None:
    """The error names the engine; those that had joined leave, so that it can be made anew."""
    client = make_client(fleet[:2])
    refuse(fleet.engines[1], "/init_weights_update_group")
    with pytest.raises(WeightUpdateError, match=f"was not made: {fleet[1]}: init_group: .*no such"):
        client.init_group("127.0.0.1", 1).wait(WAIT_S)
    client.init_group("127.0.0.1", 1).wait(WAIT_S)
    with WeightEngine(tp_size=None) as silent, pytest.raises(ProtocolError, match="does not say its tp_size"):
        make_client(silent.url).init_group("127.0.0.1", 1)


def test_a_lost_rank_fails_the_broadcast_for_all(fleet: SimFleet, make_client: MakeClient) -> None:
    """All are stale, the group is destroyed, and nothing more is broadcast; the next update has them all."""
    client = make_client(fleet[:3])
    client.init_group("127.0.0.1", 1).wait(WAIT_S)
    refuse(fleet.engines[1], SENT, skip=1)

    def block(update: WeightUpdate) -> None:
        update.from_distributed(*BUCKET).result(WAIT_S)
        with pytest.raises(WeightUpdateError, match=f"did not reach all engines: {fleet[1]}.*no such"):
            update.from_distributed(*BUCKET).result(WAIT_S)
        assert list(update.failed) == [fleet[1]]
        with pytest.raises(WeightUpdateError, match="no broadcast can reach all engines any more"):
            update.from_distributed(*BUCKET)

    all_stale = pytest.raises(WeightUpdateError, match="3 of 3 engines do not have weights '2'")
    with all_stale, client.weight_update("2", "hold") as update:
        block(update)
    assert states(client) == ["quarantined"] * 3
    assert [engine.state()["requests"]["/destroy_weights_update_group"] for engine in fleet.engines[:3]] == [1] * 3
    client.init_group("127.0.0.1", 1).wait(WAIT_S)
    with client.weight_update("3", "hold") as update:
        update.from_distributed(*BUCKET)
    assert update.report is not None
    assert len(update.report.updated) == 3


def test_those_that_wait_for_a_lost_rank_are_cut(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would sit in the broadcast for ever."""
    monkeypatch.setattr(weight_member, "_GRACE_S", 0.1)
    lost, stuck = WeightEngine({SENT: error_answer("500 Oops")}), WeightEngine({SENT: [silence]})
    with weight_engines(lost, stuck):
        client = make_client([lost.url, stuck.url])
        with client.weight_update("2", "hold", raise_on_stale=False) as update:
            future = update.from_distributed(*BUCKET)
            with pytest.raises(WeightUpdateError, match="did not reach all"):
                future.result(WAIT_S)
        assert update.report is not None
        assert len(update.report.stale) == 2
        assert "aborted by us" in update.failed[stuck.url]


def test_a_broadcast_after_a_failure(fleet: SimFleet, make_client: MakeClient) -> None:
    """The engine that failed would be missing in it, so nothing is sent to anyone."""
    client = make_client(fleet[:2])
    client.init_group("127.0.0.1", 1).wait(WAIT_S)
    refuse(fleet.engines[1], TENSOR)
    lost = pytest.raises(WeightUpdateError, match=f"no broadcast can reach all engines any more; {fleet[1]}: .*no such")
    with client.weight_update("2", "hold", raise_on_stale=False) as update:
        update.from_tensor(tensors_for(fleet[:2]))
        with lost:
            update.from_distributed(*BUCKET)
    assert calls(fleet, SENT) == 0
    assert update.report is not None
    assert len(update.report.stale) == 2


def test_a_rank_that_is_not_there(fleet: SimFleet, make_client: MakeClient) -> None:
    """A member of the group has left since: nothing is sent, and the engines are as they were."""
    client = make_client(fleet[:2])
    client.init_group("127.0.0.1", 1).wait(WAIT_S)
    client.remove_engine(fleet[1])
    missing = pytest.raises(WeightUpdateError, match=f"{fleet[1]}, a member of the weight group .*, is not there")
    with missing, client.weight_update("2", "hold") as update:
        update.from_distributed(*BUCKET)
    assert states(client) == ["live"]
    assert client.weight_versions() == {fleet[0]: "default"}


def test_an_engine_outside_of_the_group(fleet: SimFleet, make_client: MakeClient) -> None:
    """It came later: a broadcast cannot reach it, so nothing is sent to anyone."""
    client = make_client(fleet[0])
    client.init_group("127.0.0.1", 1).wait(WAIT_S)
    client.add_engine(fleet[1])
    outside = pytest.raises(WeightUpdateError, match="it is not in the weight group")
    with client.weight_update("2", "hold", raise_on_stale=False) as update, outside:
        update.from_distributed(*BUCKET)
    assert calls(fleet, SENT) == 0
    assert states(client) == ["quarantined"] * 2
