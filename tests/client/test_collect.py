"""collect: the target met, nothing lost, nothing left at the engines, and nobody else disturbed."""

from __future__ import annotations

import itertools
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from rolloutsync import BatchError, Collected, CollectError, RolloutClient, Sample, Status
from rolloutsync.collect import Plan
from rolloutsync.sim import Fault, SimFleet
from rolloutsync.sim.tokens import expected_tokens
from tests.background import in_thread
from tests.client.kit import ENDLESS, calls, check_sample, generations, params, prompts
from tests.processes import begin
from tests.wire import eventually

MakeClient = Callable[..., RolloutClient]
Warnings = Callable[[], list[str]]


class Source:
    """An endless iterator of prompts that counts how far it was read."""

    def __init__(self, tokens: int | None = None) -> None:
        self.read = 0
        self._tokens = tokens

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        self.read += 1
        own = {} if self._tokens is None else {"sampling_params": params(self._tokens)}
        return {"input_ids": [3 + self.read], "metadata": {"number": self.read - 1}, **own}


def ids(number: int) -> list[int]:
    """What the source gives as its item of that number."""
    return [4 + number]


def number_of(group: list[Sample]) -> int:
    number: int = group[0].metadata["number"]
    return number


def odd(group: list[Sample]) -> bool:
    return number_of(group) % 2 == 1


def running(fleet: SimFleet) -> int:
    return sum(engine.state()["running"] + engine.state()["waiting"] for engine in fleet.engines)


def check_books(client: RolloutClient, fleet: SimFleet, got: Collected, n: int) -> None:
    """Each item that was read is in one list, as a group of n; the ledger is closed; the engines are empty."""
    everything = [*got.groups, *got.surplus, *got.rejected, *got.partials]
    assert sorted(group[0].index for group in everything) == list(range(got.read))
    for group in everything:
        assert [(sample.index, sample.member) for sample in group] == [(group[0].index, m) for m in range(n)]
    assert client.audit().balanced
    assert client.stats().open == 0
    eventually(lambda: running(fleet) == 0, "nothing runs")


# --- the target is met ------------------------------------------------------------------------------------------------


def test_half_rejected_beside_an_evaluation(fleet: SimFleet, make_client: MakeClient) -> None:
    """The target is met, its rest is gone, and a generate beside it is exactly what it would have been."""
    client, source = make_client(fleet), Source()
    evaluation = client.start(prompts(8), ENDLESS)
    eventually(lambda: sum(row["tokens"] > 0 for row in generations(fleet)) == 8, "the evaluation runs")
    got = client.collect(source, params(40), n=3, target=6, accept=odd)
    assert client.stats().open == 8
    assert (len(got.groups), got.complete, got.ended) == (6, True, "target")
    assert all(odd(group) for group in got.groups)
    assert not any(odd(group) for group in got.rejected)
    for sample in [*got.samples, *(sample for group in [*got.rejected, *got.surplus] for sample in group)]:
        check_sample(sample, ids(sample.metadata["number"]), 40)
    for sample, prompt in zip(evaluation.abort(), prompts(8), strict=True):
        assert sample.output_ids.tolist() == expected_tokens(prompt, len(sample.output_ids))
    assert sum(engine.state()["aborts"]["abort_all"] for engine in fleet.engines) == 0
    check_books(client, fleet, got, 3)


def test_the_rest_is_cut_short(fleet: SimFleet, make_client: MakeClient) -> None:
    """Long groups in flight at the end are partials with tokens; each request was sent once."""
    client = make_client(fleet)
    lengths = itertools.chain([30_000, 20, 30_000, 20], itertools.repeat(30_000))
    source = ({"input_ids": [5], "sampling_params": params(tokens)} for tokens in lengths)

    def accept(_: object) -> bool:
        eventually(lambda: sum(row["tokens"] > 0 for row in generations(fleet)) == 8, "all have begun")
        return True

    got = client.collect(source, n=2, target=2, oversample=2.0, accept=accept)
    assert [group[0].index for group in got.groups] == [1, 3]
    assert [group[0].index for group in got.partials] == [0, 2]
    assert {sample.status for group in got.partials for sample in group} == {Status.ABORTED}
    assert sum(row["state"] == "aborted" for row in generations(fleet)) == 4
    assert calls(fleet, "/generate") == 8
    check_books(client, fleet, got, 2)


def test_finished_groups_that_are_not_needed_are_surplus(fleet: SimFleet, make_client: MakeClient) -> None:
    """What finishes while accept is at work is kept, unjudged; given to the next call it costs no request."""
    client, judged = make_client(fleet), []

    def accept(group: list[Sample]) -> bool:
        judged.append(group[0].index)
        eventually(lambda: client.stats().open == 0, "all have finished")
        return True

    got = client.collect(prompts(9), params(10), n=2, target=1, in_flight=3, accept=accept)
    assert (len(judged), len(got.groups), len(got.surplus), got.read) == (1, 1, 2, 3)
    check_books(client, fleet, got, 2)
    sent = calls(fleet, "/generate")
    again = client.collect(got.surplus, n=2, target=2)
    assert again.complete
    assert calls(fleet, "/generate") == sent
    assert [sample.output_ids.tolist() for sample in again.samples] == [
        sample.output_ids.tolist() for group in got.surplus for sample in group
    ]


def test_accept_may_replace_samples(fleet: SimFleet, make_client: MakeClient) -> None:
    """Rewards that accept works out reach the result."""

    def accept(group: list[Sample]) -> int:
        group[:] = [replace(sample, reward=float(sample.member)) for sample in group]
        return 7

    got = make_client(fleet).collect(prompts(2), params(2), n=2, target=2, accept=accept)
    assert [sample.reward for sample in got.samples] == [0.0, 1.0, 0.0, 1.0]


def test_seeds_are_those_of_generate(fleet: SimFleet, make_client: MakeClient) -> None:
    """Each member has its own, also a member that had not begun when its group was cut short."""
    client = make_client(fleet)
    wanted = [sample.output_ids.tolist() for sample in client.generate([[9]], params(5, sampling_seed=7), n=3)]
    got = client.collect([[9]], params(5, sampling_seed=7), n=3, target=1)
    assert [sample.output_ids.tolist() for sample in got.samples] == wanted
    blank = [replace(sample, status=Status.ABORTED, output_ids=sample.output_ids[:0]) for sample in got.samples]
    again = client.collect([blank], n=3, target=1)
    assert [sample.output_ids.tolist() for sample in again.samples] == wanted


# --- how much is submitted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "accepted", "window"),
    [
        ({}, 0, 12),
        ({}, 7, 2),
        ({}, 6, 3),
        ({"oversample": 1.0}, 3, 5),
        ({"oversample": 1}, 0, 8),
        ({"oversample": 1.1}, 0, 9),
        ({"oversample": 1.25}, 0, 10),
        ({"oversample": 1.0000000000001}, 0, 8),
        ({"in_flight": 3}, 0, 3),
        ({"in_flight": 30, "oversample": 2.0}, 7, 30),
    ],
)
def test_oversample_arithmetic(options: dict[str, Any], accepted: int, window: int) -> None:
    """Rounded up, never fewer than are missing; an explicit number does not depend on what is missing."""
    assert Plan(prompts=[], n=4, target=8, **options).window(accepted) == window


def test_an_iterator_is_read_no_further_than_needed(fleet: SimFleet, make_client: MakeClient) -> None:
    """Six for four at 1.5; the next item is still the iterator's."""
    client, source = make_client(fleet), Source()
    got = client.collect(source, params(5), n=2, target=4)
    assert (source.read, got.read) == (6, 6)
    assert calls(fleet, "/generate") <= 12
    assert next(source)["metadata"]["number"] == 6
    check_books(client, fleet, got, 2)


def test_rejected_groups_are_replaced_one_by_one(fleet: SimFleet, make_client: MakeClient) -> None:
    """Never more undecided at once than allowed, and never fewer while more are needed."""
    judged, undecided = [0], []

    class Watched(Source):
        def __next__(self) -> dict[str, Any]:
            undecided.append(self.read - judged[0])
            return super().__next__()

    def accept(group: list[Sample]) -> bool:
        judged[0] += 1
        return odd(group)

    got = make_client(fleet).collect(Watched(), params(5), n=1, target=8, in_flight=3, accept=accept)
    assert got.complete
    assert undecided == [0, 1, 2] + [2] * (got.read - 3)


def test_round_robin_beside_other_jobs(fleet: SimFleet, make_client: MakeClient) -> None:
    """A whole collect is one job: a generate that comes later does not wait behind all of its samples."""
    client = make_client(fleet[0], engine_concurrency=1)
    collecting = in_thread(lambda: client.collect(Source(), params(40), n=10, target=4))
    eventually(lambda: client.stats().open >= 60, "all wait")
    client.generate(prompts(3), params(2))
    assert len(generations(fleet)) <= 10
    client.abort_until_idle()
    assert collecting.result(10.0).ended == "aborted"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"target": 0}, "target must be at least 1, got 0"),
        ({"target": 2.0}, "target must be an integer, got 2.0"),
        ({"oversample": 0.9}, "oversample must be a finite number of at least 1"),
        ({"oversample": float("inf")}, "oversample must be a finite number"),
        ({"in_flight": 0}, "in_flight must be at least 1, got 0"),
        ({"timeout": 0}, "timeout must be a finite number above 0"),
        ({"accept": 3}, "accept must be an object with a method __call__"),
        ({"executor": 3, "accept": odd}, "executor must be an object with a method submit"),
        ({"executor": ThreadPoolExecutor(1)}, "is for accept, which is None"),
        ({"keep_partials": None}, "keep_partials must be True or False, got None"),
        ({"progress": 1}, "progress must be True, False or None, got 1"),
        ({"prompts": "text"}, "prompts is a single str"),
        ({"prompts": 5}, "prompts must be a list or an iterator of prompts, got 5"),
        ({"prompts": [1, 2]}, "prompts is a single sequence of token ids"),
        ({"prompts": [[5], [-1]]}, "prompts[1]: input_ids[0] is -1"),
        ({"prompts": [[99_999]]}, "prompts[0]: input_ids[0] is 99999, the vocabulary size is 32000"),
        ({"on_error": "raise"}, "on_error='raise' is not accepted"),
    ],
)
def test_bad_arguments(fleet: SimFleet, make_client: MakeClient, arguments: dict[str, Any], words: str) -> None:
    """Named, with the value, and nothing was sent."""
    given = {"prompts": prompts(2), "n": 2, "target": 2, **arguments}
    with pytest.raises((ValueError, TypeError)) as caught:
        make_client(fleet).collect(given.pop("prompts"), params(2), **given)
    assert words in str(caught.value)
    assert calls(fleet, "/generate") == 0


def test_groups_of_the_wrong_size(fleet: SimFleet, make_client: MakeClient) -> None:
    """A list of samples is a group of n, and a sample that has begun is no prompt of n others."""
    client = make_client(fleet)
    pair = client.generate([[5]], params(2), n=2)
    with pytest.raises(ValueError, match=r"prompts\[1\] has 2 samples, not n=3"):
        client.collect([[7], pair], n=3, target=2)
    with pytest.raises(ValueError, match=r"prompts\[0\]: a finished sample cannot have n=3 members"):
        client.collect([pair[0]], n=3, target=1)


def test_a_bad_item_later(fleet: SimFleet, make_client: MakeClient) -> None:
    """What was made before it comes with the error; the rest of the job is aborted."""
    client = make_client(fleet)
    items: list[Any] = [*prompts(3), [-1]]
    with pytest.raises(CollectError, match=r"prompts\[3\]: input_ids\[0\] is -1") as caught:
        client.collect(iter(items), params(5), n=2, target=4, in_flight=2)
    got = caught.value.collected
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(got.groups) >= 1
    assert got.ended == "error"
    check_books(client, fleet, got, 2)


def test_an_iterator_that_raises(fleet: SimFleet, make_client: MakeClient) -> None:
    """Before anything was sent it is the user's own error; later one that has everything."""
    client = make_client(fleet)
    with pytest.raises(ZeroDivisionError):
        client.collect((1 // 0 for _ in range(1)), params(2), n=1, target=1)
    with pytest.raises(CollectError, match="ZeroDivisionError") as caught:
        client.collect(([5, 1 // (2 - at)] for at in range(3)), ENDLESS, n=1, target=3)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert [len(group) for group in caught.value.collected.partials] == [1, 1]
    check_books(client, fleet, caught.value.collected, 1)


# --- accept raises, samples fail --------------------------------------------------------------------------------------


def test_an_exception_in_accept(fleet: SimFleet, make_client: MakeClient) -> None:
    """It reaches the caller with everything so far, once the rest is aborted; it pickles with counts."""
    client, seen = make_client(fleet), []

    def accept(group: list[Sample]) -> bool:
        seen.append(group)
        return 1 // (3 - len(seen)) >= 0

    lengths = itertools.chain([10, 10, 10], itertools.repeat(30_000))
    source = ({"input_ids": [5], "sampling_params": params(tokens)} for tokens in lengths)
    with pytest.raises(CollectError, match=r"broke off with 2 of 4 groups: ZeroDivisionError") as caught:
        client.collect(source, n=2, target=4, accept=accept)
    got = caught.value.collected
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (len(got.groups), len(got.surplus), len(got.partials)) == (2, 1, got.read - 3)
    check_books(client, fleet, got, 2)
    back = pickle.loads(pickle.dumps(caught.value))
    assert back.counts == got.counts == {"groups": 2, "surplus": 1, "rejected": 0, "partials": got.read - 3}
    assert (back.collected, type(back.__cause__)) == (None, ZeroDivisionError)


def test_accept_without_a_return(fleet: SimFleet, make_client: MakeClient) -> None:
    """Rejecting everything for ever would be worse."""
    with pytest.raises(CollectError, match="TypeError: accept returned None"):
        make_client(fleet).collect(Source(), params(2), n=1, target=2, accept=lambda group: None)


def test_groups_with_failed_members_are_rejected_unasked(
    fleet: SimFleet, make_client: MakeClient, warnings: Warnings
) -> None:
    """One error costs its group alone; a warning counts it; given again, only what failed is made again."""
    fleet.engines[0].add_fault(Fault(kind="status", status=400, times=1))
    client, judged = make_client(fleet[0]), []

    def accept(group: list[Sample]) -> bool:
        judged.append(group[0].index)
        return True

    got = client.collect(Source(), params(3), n=2, target=3, in_flight=1, accept=accept)
    assert got.complete
    assert [sample.status for sample in got.rejected[0]].count(Status.FAILED) == 1
    assert got.rejected[0][0].index not in judged
    assert len(warnings()) == 1
    assert "1 samples failed, and their groups were rejected" in warnings()[0]
    check_books(client, fleet, got, 2)
    sent = calls(fleet, "/generate")
    assert client.collect(got.rejected, params(3), n=2, target=1).complete
    assert calls(fleet, "/generate") == sent + 1


def test_when_everything_fails(fleet: SimFleet, make_client: MakeClient) -> None:
    """An endless source is not read to no end; nor does a short one end as if nothing had happened."""
    fleet.engines[0].add_fault(Fault(kind="status", status=400, times=None))
    client, source = make_client(fleet[0]), Source()
    with pytest.raises(CollectError, match="every sample of the last 8 groups failed") as caught:
        client.collect(source, params(2), n=2, target=2)
    assert isinstance(caught.value.__cause__, BatchError)
    assert source.read <= 8 + 3
    check_books(client, fleet, caught.value.collected, 2)
    with pytest.raises(CollectError, match="every sample of the last 2 groups failed"):
        client.collect(prompts(2), params(2), n=2, target=2)


# --- an executor ------------------------------------------------------------------------------------------------------


def test_accept_in_an_executor(fleet: SimFleet, make_client: MakeClient) -> None:
    """Several at once, in other threads."""
    both, names = threading.Barrier(2, timeout=10.0), set()

    def accept(group: list[Sample]) -> bool:
        names.add(threading.current_thread().name)
        both.wait()
        return True

    client = make_client(fleet)
    with ThreadPoolExecutor(2, "judge") as pool:
        got = client.collect(prompts(2), params(3), n=2, target=2, accept=accept, executor=pool)
    assert got.complete
    assert len(names) == 2
    assert all(name.startswith("judge") for name in names)
    check_books(client, fleet, got, 2)


def test_late_verdicts_are_not_waited_for(fleet: SimFleet, make_client: MakeClient) -> None:
    """The group of a judge that hangs is surplus, and what that judge does later changes nothing."""
    client, begun, go, ended = make_client(fleet), threading.Event(), threading.Event(), threading.Event()

    def accept(group: list[Sample]) -> bool:
        if number_of(group) != 0:
            return begun.wait(20.0)
        begun.set()
        go.wait(20.0)
        group.clear()
        ended.set()
        return True

    with ThreadPoolExecutor(8) as pool:
        got = client.collect(Source(), params(5), n=2, target=3, in_flight=4, accept=accept, executor=pool)
        go.set()
        assert ended.wait(10.0)
    assert len(got.groups) == 3
    assert 0 not in map(number_of, got.groups)
    assert {number_of(group): len(group) for group in got.surplus}[0] == 2
    check_books(client, fleet, got, 2)


def test_an_exception_in_the_executor(fleet: SimFleet, make_client: MakeClient) -> None:
    """As in the caller's thread; so is an executor that takes nothing more."""
    client = make_client(fleet)
    with ThreadPoolExecutor(1) as pool, pytest.raises(CollectError, match="KeyError") as caught:
        client.collect(Source(), params(3), n=1, target=2, accept=lambda _: {"a": 1}["b"], executor=pool)
    check_books(client, fleet, caught.value.collected, 1)
    with pytest.raises(CollectError, match="RuntimeError: cannot schedule new futures") as caught:
        client.collect(Source(), params(3), n=1, target=2, accept=odd, executor=pool)
    check_books(client, fleet, caught.value.collected, 1)


# --- ends before the target -------------------------------------------------------------------------------------------


def test_a_source_that_runs_dry(fleet: SimFleet, make_client: MakeClient, warnings: Warnings) -> None:
    """What there is comes back, flagged, with one warning."""
    client = make_client(fleet)
    items = [next(source) for source in [Source()] for _ in range(6)]
    got = client.collect(items, params(3), n=2, target=4, accept=odd)
    assert (len(got.groups), len(got.rejected), got.complete, got.ended, got.read) == (3, 3, False, "source", 6)
    assert warnings() == ["collect has 3 of 4 groups: the prompts ran out (6 items read)"]
    assert repr(got) == "<Collected: 3 of 4 groups, 0 surplus, 3 rejected, 0 partials; ended by source>"
    check_books(client, fleet, got, 2)
    assert client.collect([], params(3), n=2, target=4).read == 0


def test_a_timeout(fleet: SimFleet, make_client: MakeClient, warnings: Warnings) -> None:
    """What there is comes back, flagged; nothing is FAILED for it."""
    client = make_client(fleet)
    done = client.generate([[5]], params(2), n=2)
    got = client.collect([done, *prompts(3)], ENDLESS, n=2, target=4, timeout=0.3)
    assert (len(got.groups), len(got.partials), got.ended) == (1, 3, "timeout")
    assert {sample.status for group in got.partials for sample in group} == {Status.ABORTED}
    assert warnings() == ["collect has 1 of 4 groups: its time was up (4 items read)"]
    check_books(client, fleet, got, 2)


def test_a_drain_ends_it(fleet: SimFleet, make_client: MakeClient, warnings: Warnings) -> None:
    """Partials come back, and the source is not read on against the drain; that is no reason to warn."""
    client, source = make_client(fleet), Source()
    collecting = in_thread(lambda: client.collect(source, ENDLESS, n=2, target=4))
    eventually(lambda: sum(row["tokens"] > 0 for row in generations(fleet)) == 12, "all run")
    client.abort_until_idle()
    got = collecting.result(10.0)
    assert (got.ended, len(got.partials), source.read, warnings()) == ("aborted", 6, 6, [])
    check_books(client, fleet, got, 2)


def test_close_while_collecting(fleet: SimFleet, client_to: MakeClient) -> None:
    """It returns what there is; in accept, and while it waits for engines."""
    client, source = client_to(fleet), Source()
    collecting = in_thread(lambda: client.collect(source, ENDLESS, n=2, target=4))
    eventually(lambda: sum(row["tokens"] > 0 for row in generations(fleet)) == 12, "all run")
    assert client.close() == []
    got = collecting.result(10.0)
    assert (got.ended, len(got.partials), source.read) == ("aborted", 6, 6)
    check_books(client, fleet, got, 2)
    second = client_to(fleet)
    items = [[5], *({"input_ids": [6], "sampling_params": ENDLESS} for _ in range(3))]
    got = second.collect(items, params(3), n=2, target=4, accept=lambda _: second.close() == [])
    assert got.ended == "aborted"
    assert len(got.groups) == 1
    check_books(second, fleet, got, 2)


# --- partials go on ---------------------------------------------------------------------------------------------------


def test_a_half_finished_group_goes_on(fleet: SimFleet, make_client: MakeClient) -> None:
    """A finished member stays, a partial is continued token by token, one that had not begun begins."""
    client = make_client(fleet)
    with client.start([[5, 6]], ENDLESS) as job:
        eventually(lambda: [row["tokens"] > 0 for row in generations(fleet)] == [True], "it runs")
    tokens = len(job.partials[0].output_ids) + 50
    cut = replace(job.partials[0], prompt=replace(job.partials[0].prompt, sampling_params=params(tokens)))
    done = client.generate([[5, 6]], params(tokens))[0]
    blank = replace(cut, output_ids=cut.output_ids[:0], logprobs=None, weight_spans=())
    sent, before = calls(fleet, "/generate"), client.stats().tokens
    got = client.collect([[done, cut, blank], [7]], params(tokens), n=3, target=2)
    assert calls(fleet, "/generate") == sent + 5
    for sample in got.groups[0]:
        check_sample(sample, [5, 6], tokens)
    assert client.stats().tokens == before + 4 * tokens + 50
    check_books(client, fleet, got, 3)


def test_partials_feed_the_next_call(fleet: SimFleet, make_client: MakeClient) -> None:
    """Over rounds of oversampling every prompt comes through whole, the long ones too."""
    client = make_client(fleet)
    lengths = [300, 20, 250, 20, 280, 20, 20, 20]
    items = [{"input_ids": [5 + at], "sampling_params": params(count)} for at, count in enumerate(lengths)]
    stream = iter(items)
    carried: list[list[Sample]] = []
    whole: dict[int, list[Sample]] = {}
    while len(whole) < len(items):
        target = min(2, len(items) - len(whole))
        got = client.collect(itertools.chain(carried, stream), n=2, target=target, oversample=3.0)
        check_books(client, fleet, got, 2)
        whole |= {int(group[0].tokens[0]): group for group in [*got.groups, *got.surplus]}
        carried = got.partials
    for at, count in enumerate(lengths):
        for sample in whole[5 + at]:
            check_sample(sample, [5 + at], count)


def test_keep_partials_false_starts_over(fleet: SimFleet, make_client: MakeClient) -> None:
    """No token of old weights is left; finished members are kept all the same."""
    client = make_client(fleet)
    got = client.collect([{"input_ids": [5], "sampling_params": params(300)}], n=2, target=1, timeout=0.1)
    assert len(got.partials) == 1
    before = client.stats().tokens
    again = client.collect(got.partials, n=2, target=1, keep_partials=False)
    for sample in again.groups[0]:
        check_sample(sample, [5], 300)
    assert client.stats().tokens == before + 600


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import sys, itertools
from rolloutsync import RolloutClient
client = RolloutClient(sys.argv[1], progress=False)
items = ([5, number % 9] for number in itertools.count())
print("begun", flush=True)
try:
    client.collect(items, {"max_new_tokens": 30000, "ignore_eos": True}, n=2, target=8)
except KeyboardInterrupt:
    print(client.stats().open, client.stats().aborted, flush=True)
"""


@pytest.mark.slow
def test_ctrl_c(fleet: SimFleet) -> None:
    """Its own requests are aborted, and the process can go on at once."""
    process = begin(INTERRUPTED, fleet[0])
    try:
        eventually(lambda: fleet.engines[0].state()["running"] == 24, "all run", 30.0)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=10.0)
    finally:
        process.kill()
        process.communicate()
    assert output.splitlines() == ["begun", "0 24"], errors
    assert {row["state"] for row in generations(fleet)} <= {"aborted", "disconnected"}


# --- progress ---------------------------------------------------------------------------------------------------------


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1].rpartition("\r")[2]


def test_the_bar_ends_at_the_target(
    fleet: SimFleet, make_client: MakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts groups that were accepted, and tells what else there is, also after retries."""
    fleet.engines[0].add_fault(Fault(kind="status", status=503, times=3))
    make_client(fleet).collect(Source(), params(20), n=2, target=6, accept=odd, progress=True)
    last = last_line(capsys.readouterr().err)
    assert "| 6/6 [" in last
    assert "group/s" in last
    assert all(word in last for word in ("tok/s=", "in_flight=0", "rejected="))


def test_the_bar_stands_where_it_ended(
    fleet: SimFleet, make_client: MakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target that was not met is not shown as met."""
    make_client(fleet).collect(prompts(3), params(5), n=2, target=4, progress=True)
    assert "| 3/4 [" in last_line(capsys.readouterr().err)
