"""Weight updates: the transaction, stale engines, what happens when something breaks in the middle."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolloutsync import (
    EngineState,
    EngineUnavailableError,
    RolloutClient,
    Status,
    Timeouts,
    UpdateState,
    WeightUpdate,
    WeightUpdateError,
    weight_update,
)
from rolloutsync.clock import Clock
from rolloutsync.sim import Fault, SimFleet
from rolloutsync.sim.tokens import expected_tokens
from tests.background import in_thread
from tests.client.kit import ENDLESS, calls, check_sample, error_answer, params, prompts
from tests.client.weightkit import (
    BUCKET,
    DISK,
    SENT,
    TENSOR,
    WeightEngine,
    nothing_is_held,
    refuse,
    slowly,
    states,
    tensors_for,
    weight_engines,
)
from tests.wire import WAIT_S, answer, close, eventually, silence, tell, wait_for

MakeClient = Callable[..., RolloutClient]
LABEL = "update_weight_version"
CLOCK = Clock()


# --- when all is well ---


def test_an_update_from_disk(fleet: SimFleet, make_client: MakeClient) -> None:
    """Every engine has the weights, says so, and makes other tokens; what was running came back as a partial."""
    client = make_client(fleet)
    job = client.start(prompts(4), ENDLESS)
    eventually(lambda: sum(load.running for load in client.loads().values()) == 4, "they run")
    report = client.update_weights_from_disk(Path("step/12"), 12, verify="checksum", load_format="auto")
    assert {sample.status for sample in job.result()} == {Status.ABORTED}
    assert [engine.state for engine in report.updated] == [UpdateState.UPDATED] * 4
    assert len({engine.checksum for engine in report.engines}) == 1
    assert "4 of 4 engines have weights '12'" in str(report)
    assert pickle.loads(pickle.dumps(report)) == report
    assert client.weight_versions() == dict.fromkeys(fleet, "12")
    (sample,) = client.generate([[5, 6]], params(4))
    assert sample.output_ids.tolist() == expected_tokens([5, 6], 4, version="12")
    assert [span.version for span in sample.weight_spans] == ["12"]
    nothing_is_held(fleet, client)


def test_the_order_of_the_calls(make_client: MakeClient) -> None:
    """One session around all buckets, none around disk; one flush; the label last; nothing is flushed or aborted."""
    with WeightEngine(tp_size=2) as engine:
        client = make_client(engine.url)
        with client.weight_update("7") as update:
            update.from_disk("/ckpt")
            update.from_tensor({engine.url + "/": ["QQ==", b"B"]}, load_format="flattened_bucket")
            future = update.from_distributed(*BUCKET, group_name="g")
            assert future.result(WAIT_S) is None
        assert engine.steps() == [
            "pause_generation",
            LABEL,
            "update_weights_from_disk",
            "begin_weight_update",
            "update_weights_from_tensor",
            "update_weights_from_distributed",
            "end_weight_update",
            "flush_cache",
            LABEL,
            "continue_generation",
        ]
        assert engine.bodies("/pause_generation") == [{"mode": "retract"}]
        quiet = {"flush_cache": False, "abort_all_requests": False}
        assert engine.bodies(DISK) == [{"model_path": "/ckpt", **quiet}]
        tensors = {"serialized_named_tensors": ["QQ==", "Qg=="], "load_format": "flattened_bucket"}
        assert engine.bodies(TENSOR) == [{**tensors, **quiet}]
        told = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "group_name": "g"}
        assert engine.bodies(SENT) == [{**told, **quiet}]
        labels = ("7 (partial)", "7")  # so that nobody takes one that got stuck, or was restarted, for updated
        assert engine.bodies(f"/{LABEL}") == [{"new_version": name, "abort_all_requests": False} for name in labels]
        with pytest.raises(WeightUpdateError, match="has ended"):
            update.from_disk("/more")


def test_an_engine_without_sessions(make_client: MakeClient) -> None:
    """Up to 0.5.20: it is asked once."""
    with WeightEngine({"/begin_weight_update": error_answer("404 Not Found")}) as engine:
        client = make_client(engine.url)
        for _ in range(2):
            with client.weight_update(mode="hold") as update:
                update.from_tensor({engine.url: ["QQ=="]})
        assert engine.counts()["/begin_weight_update"] == 1
        assert engine.counts()["/end_weight_update"] == 0


def test_a_session_that_a_crash_left_open(make_client: MakeClient) -> None:
    """Is taken over, and ended."""
    left = error_answer("400 Bad", b'{"success": false, "message": "a weight-update session is already open; call"}')
    with WeightEngine({"/begin_weight_update": left}) as engine:
        client = make_client(engine.url)
        with client.weight_update(mode="hold") as update:
            update.from_tensor({engine.url: ["QQ=="]})
        assert update.report is not None
        assert len(update.report.updated) == 1
        assert engine.counts()["/end_weight_update"] == 1


def test_a_400_that_says_that_the_weights_are_there(make_client: MakeClient) -> None:
    """0.5.22 says so of a flush that it was not asked for; the flush is ours."""
    words = b'{"success": false, "message": "Weights were updated, but the cache was not flushed because"}'
    with WeightEngine({DISK: error_answer("400 Bad", words)}) as engine:
        report = make_client(engine.url).update_weights_from_disk("/ckpt", "2", "retract")
        assert report.engines[0].flushed
        assert engine.counts()["/flush_cache"] == 1


def test_versions_count_on(fleet: SimFleet, make_client: MakeClient) -> None:
    """From the highest number that is known; the new client of a restarted trainer too."""
    client = make_client(fleet[:2])
    versions = [client.update_weights_from_disk("a", given, "hold").version for given in (None, "41", None, "x", None)]
    assert versions == ["1", "41", "42", "x", "43"]
    other = make_client(fleet[:2])
    assert other.update_weights_from_disk("a", None, "hold").version == "44"


def test_a_sample_that_an_update_overlaps(fleet: SimFleet, make_client: MakeClient) -> None:
    """Mode "hold": it goes on with the new weights, and says which token came from which. Its time stands still."""
    client = make_client(fleet[0])
    with slowly(fleet.engines[:1]):
        job = client.start([[5, 6]], params(300), timeout=10.0)
        eventually(lambda: client.loads()[fleet[0]].tokens > 10, "it runs")
        report = client.update_weights_from_disk("new", "w2", "hold")
    assert not report.engines[0].flushed
    (sample,) = job.result()
    old, new = sample.weight_spans
    assert [(old.version, old.start), (new.version, new.end)] == [("default", 0), ("w2", 300)]
    first = expected_tokens([5, 6], old.end)
    rest = expected_tokens([5, 6, *first], 300 - old.end, version="w2")
    assert sample.output_ids.tolist() == first + rest


# --- engines that do not get the weights ---


def test_a_stale_engine_gets_no_traffic_until_it_has_the_weights(fleet: SimFleet, make_client: MakeClient) -> None:
    """The others go on; the error names it, and why; the next update brings it back."""
    client = make_client(fleet)
    refuse(fleet.engines[1], DISK)
    with pytest.raises(WeightUpdateError, match=f"1 of 4 engines do not have weights '2': {fleet[1]}") as caught:
        client.update_weights_from_disk("new", "2", verify="checksum")
    assert "no such" in caught.value.message
    assert [engine.url for engine in caught.value.report.stale] == [fleet[1]]
    assert str(pickle.loads(pickle.dumps(caught.value)).report) == str(caught.value.report)
    status = client.engines()[1]
    assert status.state is EngineState.QUARANTINED
    assert "stale" in status.reason or "the fleet '2'" in status.reason
    assert {sample.engine for sample in client.generate(prompts(12), params(2))} == set(fleet) - {fleet[1]}
    nothing_is_held(fleet, client)
    assert len(client.update_weights_from_disk("new", "3").updated) == 4
    eventually(lambda: states(client) == ["live"] * 4, "the watcher brings it back")


def test_raise_on_stale(fleet: SimFleet, make_client: MakeClient) -> None:
    """False returns the report."""
    client = make_client(fleet[:2])
    refuse(fleet.engines[0], DISK)
    report = client.update_weights_from_disk("new", mode="hold", raise_on_stale=False)
    assert [engine.state for engine in report.engines] == [UpdateState.STALE, UpdateState.UPDATED]
    assert states(client) == ["quarantined", "live"]


def test_an_engine_that_keeps_its_label(make_client: MakeClient) -> None:
    """What it says of itself counts."""
    with weight_engines(WeightEngine(), WeightEngine(deaf=True)) as (good, deaf):
        client = make_client([good.url, deaf.url])
        with pytest.raises(WeightUpdateError, match=r"it says 'default', not '5 \(partial\)'"):
            client.update_weights_from_disk("new", "5", "hold")
        assert states(client) == ["live", "quarantined"]


def test_a_stuck_engine_does_not_bear_the_new_label(make_client: MakeClient) -> None:
    """Also where it had it before: the watcher would take it for updated."""
    with weight_engines(WeightEngine(), WeightEngine()) as (good, bad):
        client = make_client([good.url, bad.url])
        client.update_weights_from_disk("new", "5", "hold")
        bad._others = {DISK: error_answer("400 Bad", b'{"success": false, "message": "half of it"}')}
        report = client.update_weights_from_disk("new", "5", "hold", raise_on_stale=False)
        assert [engine.url for engine in report.stale] == [bad.url]
        assert (good.label, bad.label) == ("5", "5 (partial)")


def test_checksums_outvote_an_engine(fleet: SimFleet, make_client: MakeClient) -> None:
    """It bears no new label, but has kept its weights: the other three agree."""
    client = make_client(fleet)
    fleet.engines[2].add_fault(Fault(kind="stale_weights"))
    with pytest.raises(WeightUpdateError, match="engines that should be alike disagree") as caught:
        client.update_weights_from_disk("new", "2", "hold", verify="checksum")
    assert [engine.url for engine in caught.value.report.stale] == [fleet[2]]


def test_checksums_without_a_majority(fleet: SimFleet, make_client: MakeClient) -> None:
    """Nobody knows who is right: both are stale."""
    client = make_client(fleet[:2])
    fleet.engines[0].add_fault(Fault(kind="stale_weights"))
    report = client.update_weights_from_disk("new", "2", "hold", verify="checksum", raise_on_stale=False)
    assert len(report.stale) == 2
    assert states(client) == ["quarantined"] * 2


def test_an_engine_without_checksums(make_client: MakeClient) -> None:
    """Cannot be verified, which is not the same as being right."""
    with WeightEngine({"/weights_checker": error_answer("404 Not Found")}) as engine:
        client = make_client(engine.url)
        with pytest.raises(WeightUpdateError, match="checksum: POST /weights_checker answered 404"):
            client.update_weights_from_disk("new", "2", "hold", verify="checksum")


def test_an_engine_that_is_gone(fleet: SimFleet, make_client: MakeClient) -> None:
    """Is no error: it is told apart, and would have to come back with these weights."""
    client = make_client([fleet[0], "http://127.0.0.1:1"])
    report = client.update_weights_from_disk("new", "2")
    assert [engine.state for engine in report.engines] == [UpdateState.UPDATED, UpdateState.ABSENT]
    with pytest.raises(EngineUnavailableError, match="no live engine"), make_client("http://127.0.0.1:1") as alone:
        alone.update_weights_from_disk("new")


def test_an_engine_that_dies_of_it(make_client: MakeClient) -> None:
    """The call is not sent again; the others go on."""
    with weight_engines(WeightEngine(), WeightEngine({DISK: [close]})) as (good, bad):
        client = make_client([good.url, bad.url])
        report = client.update_weights_from_disk("new", "2", "hold", raise_on_stale=False)
        assert [engine.url for engine in report.stale] == [bad.url]
        assert bad.counts()[DISK] == 1


def test_an_engine_that_joins_in_the_middle(fleet: SimFleet, make_client: MakeClient) -> None:
    """It was not updated, so it gets no traffic."""
    client = make_client(fleet[0])
    with client.weight_update("2", "hold") as update:
        client.add_engine(fleet[1])
        update.from_disk("new")
    assert states(client) == ["live", "quarantined"]
    assert update.report is not None
    assert [engine.state for engine in update.report.engines] == [UpdateState.UPDATED, UpdateState.ABSENT]


def test_an_engine_that_joins_after_an_update(fleet: SimFleet, make_client: MakeClient) -> None:
    """It serves other weights, so it gets no traffic, until an update that it gets."""
    client = make_client(fleet[0])
    client.update_weights_from_disk("new", "2", "hold")
    client.add_engine(fleet[1])
    status = client.engines()[1]
    assert (str(status.state), status.weight_version) == ("quarantined", "default")
    assert status.reason == "stale: it serves weights 'default', the fleet '2'"
    assert len(client.update_weights_from_disk("new", "3", "hold").updated) == 2
    assert [engine.weight_version for engine in client.engines()] == ["3", "3"]
    eventually(lambda: states(client) == ["live"] * 2, "the watcher brings it in")


# --- when something breaks in the middle ---


def test_an_exception_before_anything_was_sent(fleet: SimFleet, make_client: MakeClient) -> None:
    """The engines go on as they were."""
    client = make_client(fleet[:2])
    with pytest.raises(KeyError, match="mine"), client.weight_update("2"):
        raise KeyError("mine")
    nothing_is_held(fleet, client)
    assert client.weight_versions() == dict.fromkeys(fleet[:2], "default")
    check_sample(client.generate([[5]], params(4))[0], [5], 4)


def test_an_exception_after_something_was_sent(fleet: SimFleet, make_client: MakeClient) -> None:
    """The engines go on, but nobody knows what they have: they get no traffic until the next update."""
    client = make_client(fleet[:2])

    def block(update: WeightUpdate) -> None:
        update.from_tensor(tensors_for(fleet[:2]))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), client.weight_update("2") as update:
        block(update)
    nothing_is_held(fleet, client)
    assert states(client) == ["quarantined"] * 2
    assert update.failed == dict.fromkeys(fleet[:2], "the update was broken off by KeyError")
    with client.weight_update("2", "hold") as update:
        update.from_tensor(tensors_for(fleet[:2]))
    assert update.report is not None
    assert len(update.report.updated) == 2


def test_ctrl_c_while_a_bucket_is_on_its_way(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is not waited for much longer; the engines go on, stale."""
    monkeypatch.setattr(weight_update, "_INTERRUPTED_S", 0.1)
    sent = threading.Event()

    def block(update: WeightUpdate) -> None:
        update.from_distributed(*BUCKET)
        assert sent.wait(WAIT_S)
        raise KeyboardInterrupt

    with weight_engines(WeightEngine({SENT: [tell(sent), silence]})) as (engine,):
        client = make_client(engine.url)
        with pytest.raises(KeyboardInterrupt), client.weight_update("2", "hold") as update:
            block(update)
        ended = ["end_weight_update", "destroy_weights_update_group", "continue_generation"]
        assert engine.steps()[-3:] == ended
        assert "aborted by us" in update.failed[engine.url]
        assert states(client) == ["quarantined"]


def test_a_second_update_is_refused(fleet: SimFleet, make_client: MakeClient) -> None:
    """While one runs, from whatever thread; the first is not disturbed."""
    client = make_client(fleet[0])
    with client.weight_update("2", "hold") as update:
        with pytest.raises(WeightUpdateError, match="weights '2' are being updated: one update at a time"):
            in_thread(lambda: client.update_weights_from_disk("other", "3")).result(WAIT_S)
        update.from_disk("new")
    assert client.weight_versions() == {fleet[0]: "2"}


def test_closing_in_the_middle(make_client: MakeClient) -> None:
    """Everybody who waits comes back, and the engine is not left paused."""
    sent = threading.Event()
    with WeightEngine({DISK: [tell(sent), silence]}) as engine:
        client = make_client(engine.url, timeouts=Timeouts())
        update = in_thread(lambda: client.update_weights_from_disk("new", "2", "hold"))
        assert sent.wait(WAIT_S)
        assert client.close() == []
        with pytest.raises(WeightUpdateError, match="client closed"):
            update.result(WAIT_S)
        assert engine.counts()["/continue_generation"] == 1


@pytest.mark.slow
def test_an_update_that_takes_longer_than_a_control_call(make_client: MakeClient) -> None:
    """It has the long timeout, and comes to an end by it."""
    go = threading.Event()
    limits = Timeouts(control_s=0.2, long_control_s=0.6)
    with weight_engines(WeightEngine({DISK: [wait_for(go), answer()]}), WeightEngine({DISK: [silence]})) as both:
        client = make_client([engine.url for engine in both], timeouts=limits)
        update = in_thread(lambda: client.update_weights_from_disk("new", "2", "hold", raise_on_stale=False))
        until = CLOCK.monotonic() + 0.3
        eventually(lambda: CLOCK.monotonic() > until, "more than a control call may take")
        go.set()
        report = update.result(WAIT_S)
        assert [engine.url for engine in report.stale] == [both[1].url]
        assert "deadline" in report.stale[0].detail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "softly"}, r"mode must be one of \('abort', 'hold', 'retract'\), got 'softly'"),
        ({"verify": "md5"}, r"verify must be one of \(None, 'checksum'\), got 'md5'"),
        ({"version": ""}, "version must be a non-empty string, an integer or None, got ''"),
        ({"version": True}, "version must be a non-empty string, an integer or None, got True"),
        ({"timeout": -1}, "timeout must be a finite number"),
    ],
)
def test_bad_arguments(fleet: SimFleet, make_client: MakeClient, options: dict[str, Any], message: str) -> None:
    """Refused before anything happens."""
    client = make_client(fleet[0])
    with pytest.raises((ValueError, TypeError), match=message), client.weight_update(**options):
        raise AssertionError("entered")
    assert calls(fleet, "/pause_generation") == 0


def test_bad_buckets(fleet: SimFleet, make_client: MakeClient) -> None:
    """Refused before anything is sent; what was right stays so."""
    client = make_client(fleet[:2])
    with client.weight_update(mode="hold") as update:
        with pytest.raises(ValueError, match="path must be a non-empty string or path, got ''"):
            update.from_disk("")
        with pytest.raises(ValueError, match=f"tensors has nothing for {fleet[1]}"):
            update.from_tensor({fleet[0]: ["QQ=="]})
        with pytest.raises(ValueError, match=f"tensors has 2 ranks for {fleet[0]}, whose tp_size is 1"):
            update.from_tensor(tensors_for(fleet[:2], 2))
        with pytest.raises(ValueError, match="got 1 names, 0 dtypes and 1 shapes"):
            update.from_distributed(["w"], [], [[2]])
    assert calls(fleet, TENSOR) + calls(fleet, SENT) == 0
    assert states(client) == ["live"] * 2
