"""Engines that were restarted, removed, or left without memory around a weight update."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from rolloutsync import CollectError, EngineState, PoisonPromptError, RolloutClient, RolloutError, Status
from rolloutsync.sim import SimFleet
from rolloutsync.slot import Lease
from tests.client.conftest import MakeClient
from tests.client.kit import ScriptedEngine, body_of, error_answer, good, params, prompts, quiet
from tests.wire import Request, Script, eventually, silence


@pytest.fixture
def pair() -> Iterator[SimFleet]:
    """Two engines of our own, to be restarted."""
    with SimFleet(engines=2, tokens_per_second=2000.0) as fleet:
        yield fleet


def states(client: RolloutClient) -> list[EngineState]:
    return [engine.state for engine in client.engines()]


def test_an_engine_restarted_between_two_batches_is_noticed(pair: SimFleet, make_client: MakeClient) -> None:
    """Nothing of ours was on it; its own answers say that it has other weights: no more traffic until it has ours."""
    client = make_client(pair)
    client.update_weights_from_disk("new", version="7")
    pair.engines[0].restart()
    first = client.generate(prompts(8), params(4))
    assert {span.version for sample in first for span in sample.weight_spans} == {"default", "7"}  # and they say so
    eventually(lambda: states(client) == [EngineState.QUARANTINED, EngineState.LIVE], "it is stale")
    second = client.generate(prompts(8), params(4))
    assert {span.version for sample in second for span in sample.weight_spans} == {"7"}
    client.update_weights_from_disk("newer", version="8")
    eventually(lambda: states(client) == [EngineState.LIVE] * 2, "the next update brings it back", 20.0)


@pytest.mark.slow
def test_an_engine_that_died_takes_part_in_the_next_update(pair: SimFleet, make_client: MakeClient) -> None:
    client = make_client(pair)
    client.update_weights_from_disk("new", version="1")
    pair.engines[1].kill()
    client.generate(prompts(4), params(4))
    assert states(client) == [EngineState.LIVE, EngineState.DOWN]
    pair.engines[1].restart()
    eventually(lambda: states(client)[1] is EngineState.QUARANTINED, "it is back, and stale", 20.0)
    client.update_weights_from_disk("newer", version="2")
    eventually(lambda: states(client) == [EngineState.LIVE] * 2, "it is current", 20.0)


def test_no_request_leaves_while_memory_is_released(pair: SimFleet, make_client: MakeClient) -> None:
    """Also after an exception in the block: an engine without its weights would die of it."""
    client = make_client(pair)

    def train() -> None:
        with client.quiesced():
            client.release_memory(["weights", "kv_cache"])
            raise ValueError("training failed")

    with pytest.raises(ValueError, match="training failed"):
        train()
    assert client.stats().gate == "hold"
    future = client.submit([1, 2], params(2))
    client.resume_memory(["weights"])
    assert not future.done()
    client.resume_memory()
    assert future.result(10.0).status is Status.TRUNCATED
    assert client.stats().gate == "open"


def test_an_engine_removed_within_a_block_goes_on(pair: SimFleet, make_client: MakeClient) -> None:
    """Somebody else may use it."""
    client, url = make_client(pair), pair.urls[1]
    with client.quiesced():
        client.remove_engine(url)
    body = {"input_ids": [1, 2], "sampling_params": params(2)}
    answer = requests.post(f"{url}/generate", json=body, timeout=5, headers={"Connection": "close"})
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "length"


def test_an_engine_removed_under_our_pause_goes_on(pair: SimFleet, make_client: MakeClient) -> None:
    client, url = make_client(pair), pair.urls[1]
    client.pause("in_place")
    client.remove_engine(url)
    assert pair.engines[1].state()["paused"] is False
    client.resume()


def test_a_generate_within_its_own_block_is_refused(pair: SimFleet, make_client: MakeClient) -> None:
    """It would wait for the block's end, which waits for it."""
    client = make_client(pair)
    with client.quiesced():
        for call in (lambda: client.generate([[1]], params(2)), lambda: client.collect([[1]], n=1, target=1)):
            with pytest.raises(RolloutError, match="would wait for ever for the end of the block"):
                call()
        job = client.start([[1]], params(2))
    assert job.result()[0].status is Status.TRUNCATED


def test_a_collect_in_which_one_member_always_fails_ends(make_client: MakeClient) -> None:
    """An endless source is not read to no end; the second member's seed is odd."""

    def refuses_odd_seeds(request: Request, number: int) -> Script:
        odd = body_of(request)["sampling_params"]["sampling_seed"] % 2
        return error_answer("400 Bad Request") if odd else good(request)

    with ScriptedEngine(refuses_odd_seeds) as engine:
        client = make_client(engine.url)
        with pytest.raises(CollectError, match="some sample of the last") as raised:
            client.collect(([number] for number in itertools.count(1)), params(2, sampling_seed=4), n=2, target=4)
        assert raised.value.collected.groups == []


def test_a_returned_engine_is_what_it_was(make_client: MakeClient) -> None:
    """Removed with a request on it and added again: a quarantine is not forgotten."""
    with ScriptedEngine(quiet) as engine:
        client = make_client(engine.url)
        job = client.start([[1, 2]], params(2))
        eventually(lambda: engine.rids() != [], "it is there")
        client._open().fleet.set_state(engine.url, EngineState.QUARANTINED, "for a test")
        client.remove_engine(engine.url)
        client.add_engine(engine.url)
        (status,) = client.engines()
        assert (status.state, status.reason) == (EngineState.QUARANTINED, "for a test")
        job.abort(0.1)


def test_a_sample_out_of_time_waits_for_no_abort(make_client: MakeClient) -> None:
    """Neither the request nor its abort is answered: the deadline holds, and the request is a possible orphan."""
    with ScriptedEngine(quiet, others={"/abort_request": [silence]}) as engine:
        client = make_client(engine.url)
        began = time.monotonic()
        sample = client.generate([[1, 2]], params(2), timeout=0.5, on_error="return")[0]
        assert time.monotonic() - began < 1.5 + 1.0
        assert sample.status is Status.FAILED
        assert [orphan.rid for orphan in client.audit().orphans] == engine.rids()


def test_only_a_suspect_that_was_alone_is_convicted(make_client: MakeClient) -> None:
    """Two suspects on one engine that dies: neither is to blame for sure."""
    with ScriptedEngine(quiet) as engine:
        client = make_client(engine.url)
        job = client.start(prompts(2), params(2))
        eventually(lambda: len(engine.rids()) == 2, "both are there")
        fleet = client._open().fleet
        one, other = fleet.leases()
        for lease in (one, other):
            lease.order.life.died_on = ("http://first",)
            as_suspect(lease, [one, other])
        at = client._open().clock.monotonic()
        assert [fleet.convicts(lease, at) for lease in (one, other)] == [False, False]
        assert one.order.life.died_on == ("http://first", engine.url)
        job.abort(0.1)
    assert PoisonPromptError("x").engines == ()


def as_suspect(lease: Lease, there: list[Lease]) -> None:
    """What ``Slot.take`` notes."""
    lease.slot.suspect, lease.suspect, lease.alone = lease, True, len(there) == 1


def test_a_silent_tls_handshake_is_cut(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody speaks TLS there: close() answers each call at once."""
    from rolloutsync.health import Watcher

    monkeypatch.setattr(Watcher, "_probe", lambda *_: (EngineState.LIVE, ""))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = make_client(f"https://127.0.0.1:{listener.getsockname()[1]}")
        job: Any = client.start([[1, 2]], params(2))
        eventually(lambda: bool(client._open().fleet.leases()), "it connects")
        began = time.monotonic()
        assert client.close() == []
        assert time.monotonic() - began < 3.0
        assert job.result()[0].status is Status.ABORTED
