"""Batches whose requests no thread waits for: few threads, and the same promises."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from rolloutsync import RolloutClient, Sample, Status
from rolloutsync import workers as module
from rolloutsync.clock import Deadline
from rolloutsync.order import Order
from rolloutsync.rollout import Rollout
from rolloutsync.threads import start_thread
from rolloutsync.transport import Pending
from rolloutsync.workers import Workers
from tests.client.kit import ScriptedEngine, body_of, error_answer, prompts
from tests.conftest import our_threads
from tests.faults.kit import IMPATIENT, MakeClient, check, check_all, echo, echo_body, within
from tests.transport.kit import CLOCK
from tests.unit.makers import order
from tests.wire import Request, Script, answer, close, eventually, silence, wait_for

PARAMS = {"max_new_tokens": 3}


@pytest.fixture(autouse=True)
def all_are_parked(monkeypatch: pytest.MonkeyPatch, transport_path: str) -> None:
    """Also the first ones."""
    if transport_path != "lean":
        pytest.skip("these tests choose the path themselves")
    monkeypatch.setattr("rolloutsync.transport.registry._FEW", 0)


@pytest.fixture
def gone_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that have nothing to do end at once."""
    monkeypatch.setattr(module, "_IDLE_EXIT_S", 0.01)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Answers wait for it."""
    go = threading.Event()
    yield go
    go.set()


def pool_of(client: RolloutClient) -> Workers:
    core = client._core
    assert core is not None
    return core.workers


def workers() -> list[str]:
    return [name for name in our_threads() if "-worker-" in name]


def with_room(held: threading.Event, *before: Script) -> ScriptedEngine:
    """An engine that plays these stories for the first requests, and holds all others."""

    def story(request: Request, number: int) -> Script:
        return [wait_for(held), *(before[number] if number < len(before) else echo(request))]

    return ScriptedEngine(story)


def all_there(engine: ScriptedEngine, count: int) -> None:
    eventually(lambda: len(engine.rids()) == count, "all requests are at the engine")
    eventually(lambda: len(workers()) <= 1, "no worker waits for them but the last, which stays")


# --- what it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gone_soon")
def test_no_thread_waits(client_to: MakeClient, held: threading.Event) -> None:
    """The usher's thread takes all answers in, sends what waited for room meanwhile, and no worker comes back."""
    batch = prompts(100)
    with with_room(held) as engine:
        client = client_to(engine.url, engine_concurrency=64)
        job = client.start(batch, PARAMS)
        all_there(engine, 64)
        held.set()
        check_all(job.result(), batch)
        assert len(workers()) <= 1
        assert client.stats().retries == 0
        assert client.audit().balanced


@pytest.mark.usefixtures("gone_soon")
@pytest.mark.parametrize(
    "story",
    [[*error_answer("503 Service Unavailable")], [close], [answer(b"{}")], [answer(b"x" * 70_000)]],
    ids=["an error", "nothing", "no completion", "large nonsense"],
)
def test_what_goes_wrong_gets_a_thread(client_to: MakeClient, held: threading.Event, story: Script) -> None:
    """All of the first wave at once; each sample is made again, by a thread that may block."""
    batch = prompts(40)
    with with_room(held, *([story] * 40)) as engine:
        job = client_to(engine.url, retry=IMPATIENT).start(batch, PARAMS)
        all_there(engine, 40)
        held.set()
        check_all(job.result(), batch, attempts=2)


@pytest.mark.usefixtures("gone_soon")
def test_large_answers_are_read_by_threads(client_to: MakeClient, held: threading.Event) -> None:
    """And the others meanwhile by the usher's."""
    batch = prompts(40)

    def story(request: Request, number: int) -> Script:
        body = echo_body(request)
        return [wait_for(held), answer(body + b" " * 100_000 if number % 2 else body)]

    with ScriptedEngine(story) as engine:
        job = client_to(engine.url).start(batch, PARAMS)
        all_there(engine, 40)
        held.set()
        check_all(job.result(), batch)


# --- who may be run in the usher's thread -----------------------------------------------------------------------------


def test_a_callback_may_generate(client_to: MakeClient) -> None:
    """It blocks until the engine has answered another request, which the usher's thread has to take in."""
    batch = prompts(20)
    with ScriptedEngine(echo) as engine:
        client = client_to(engine.url)
        told: list[Future[Sample]] = [Future() for _ in batch]

        def and_again(done: Future[Sample], place: int) -> None:
            again = client.generate([[*body(done), 7]] * 3, PARAMS)
            told[place].set_result(again[2])

        def body(done: Future[Sample]) -> list[int]:
            ids = done.result().prompt.input_ids
            assert ids is not None
            return list(map(int, ids))

        for place, ids in enumerate(batch):
            client.submit(ids, PARAMS).add_done_callback(lambda done, place=place: and_again(done, place))  # type: ignore[misc]
        for future, ids in zip(told, batch, strict=True):
            check(future.result(20.0), [*ids, 7])


# --- no more threads, and bugs of our own -----------------------------------------------------------------------------


@pytest.mark.usefixtures("gone_soon")
def test_a_system_without_threads(
    client_to: MakeClient, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one has stayed, and does what all would have done; places are used as before, and threads come back."""
    batch = prompts(40)
    with with_room(held, *([error_answer("503 Service Unavailable")] * 8)) as engine:
        client = client_to(engine.url, retry=IMPATIENT, engine_concurrency=8)
        job = client.start(batch, PARAMS)
        all_there(engine, 8)

        def none_left(*_: object, **__: object) -> threading.Thread:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(module, "start_thread", none_left)
        held.set()
        check_all(job.result(), batch, attempts=None)
        assert len(workers()) == 1
        pool = pool_of(client)
        assert (pool._scarce, pool._room) == (True, 8)
        monkeypatch.setattr(module, "start_thread", start_thread)
        check_all(client.generate(batch, PARAMS), batch)
        assert not pool._scarce


@pytest.mark.parametrize("where", ["set_out", "park", "_delivered"])
def test_a_bug_of_ours(client_to: MakeClient, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It costs no sample, or the sample says so; no place at an engine is kept, and the next batch is served."""
    batch = prompts(12)
    inner = getattr(Rollout, where)
    calls = iter(range(1 << 30))

    def broken(self: Rollout, *args: object, **options: object) -> object:
        if next(calls) < 4:
            raise ZeroDivisionError
        return inner(self, *args, **options)

    monkeypatch.setattr(Rollout, where, broken)
    with ScriptedEngine(echo) as engine:
        client = client_to(engine.url, engine_concurrency=4)
        samples = client.generate(batch, PARAMS, on_error="return")
        failed = [sample for sample in samples if sample.status is Status.FAILED]
        assert len(failed) == (4 if where == "_delivered" else 0)
        assert all("internal error: ZeroDivisionError" in str(sample.error) for sample in failed)
        check_all(client.generate(batch, PARAMS), batch)
        assert client.audit().balanced
        assert [status.in_flight for status in client.engines()] == [0]


class Full(logging.Handler):
    """A user's, that fails."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(f"disk full: {record.getMessage()}")


def test_a_bug_that_cannot_even_be_told(client_to: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples say it, and nobody waits for ever."""

    def broken(*_: object) -> Sample:
        raise ZeroDivisionError

    logger, full = logging.getLogger("rolloutsync"), Full()
    logger.addHandler(full)
    try:
        with ScriptedEngine(echo) as engine:
            client = client_to(engine.url)
            with monkeypatch.context() as patch:
                patch.setattr(Rollout, "_delivered", broken)
                samples = client.generate(prompts(12), PARAMS, on_error="return")
            assert {sample.status for sample in samples} == {Status.FAILED}
            check_all(client.generate(prompts(12), PARAMS), prompts(12))
    finally:
        logger.removeHandler(full)


def test_what_is_not_sent_keeps_no_place(client_to: MakeClient) -> None:
    """There is no connection yet, so sending would block: a thread will look for a place when it comes to it."""
    with ScriptedEngine(echo) as engine:
        client = client_to(engine.url)
        client.engines()
        core = client._core
        assert core is not None
        eventually(lambda: core.fleet.capacity() > 0, "the engine is known")
        rollout = core.workers._rollout
        journey = rollout.journey(order())
        assert not rollout.set_out(journey, None)
        assert (journey.lease, journey.flight) == (None, None)
        assert core.fleet.leases() == []
        assert client.stats().engines[engine.url].requests == 0
        assert rollout.travel(journey) is not None


# --- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gone_soon")
def test_a_client_that_is_closed(client_to: MakeClient, held: threading.Event) -> None:
    """Every sample ends, also those that the usher had and those that had not begun."""
    with with_room(held) as engine:
        client = client_to(engine.url, engine_concurrency=64)
        job = client.start(prompts(100), PARAMS)
        all_there(engine, 64)
        with within(5.0):
            assert client.close() == []
            assert {sample.status for sample in job.result()} == {Status.ABORTED}
        held.set()


def test_a_client_that_is_closed_while_the_usher_is_held_up(
    client_to: MakeClient, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread does not end in time; what is parked ends all the same."""
    go, look = threading.Event(), Pending.look
    monkeypatch.setattr(Pending, "look", lambda self: go.wait(10.0) and look(self))
    with with_room(held) as engine:
        client = client_to(engine.url)
        job = client.start(prompts(20), PARAMS)
        eventually(lambda: len(engine.rids()) == 20, "all requests are at the engine")
        assert any("usher" in name for name in client.close(0.2))
        go.set()
        assert {sample.status for sample in job.result()} == {Status.ABORTED}
        eventually(lambda: not our_threads(), "all threads have ended")
        held.set()


@pytest.mark.usefixtures("gone_soon")
def test_a_job_that_is_aborted(client_to: MakeClient) -> None:
    """Its requests are at an engine that answers no abort: their sockets are shut, and another job is not touched."""

    def story(request: Request, _: int) -> Script:
        return [silence] if body_of(request)["input_ids"][0] >= 10 else echo(request)

    batch = prompts(20)
    with ScriptedEngine(story) as engine:
        client = client_to(engine.url)
        job = client.start(batch, PARAMS)
        eventually(lambda: len(engine.rids()) == 20, "all requests are at the engine")
        assert {len(sample.output_ids) for sample in job.abort(0.3)} == {0}
        check_all(client.generate(batch[:5], PARAMS), batch[:5])


# --- the pool by itself -----------------------------------------------------------------------------------------------


def test_places_that_are_gone_do_not_hold_back_what_is_under_way(client_to: MakeClient, held: threading.Event) -> None:
    """An engine with half of the places is removed; its requests come back broken, and each gets a thread."""
    batch = prompts(60)
    with with_room(held) as stays, with_room(held, *([[close]] * 60)) as leaves:
        client = client_to([stays.url, leaves.url], retry=IMPATIENT, engine_concurrency=30)
        job = client.start(batch, PARAMS)
        eventually(lambda: len(stays.rids()) + len(leaves.rids()) == 60, "all requests are at the engines")
        client.remove_engine(leaves.url)
        held.set()
        check_all(job.result(), batch, attempts=None)
        pool = pool_of(client)
        eventually(lambda: pool._under_way == 0, "nothing is counted as under way")


def test_nothing_is_taken_after_the_end(client_to: MakeClient) -> None:
    """An answer that comes while the pool closes is delivered, and no other request is sent for it."""
    with ScriptedEngine(echo) as engine:
        client = client_to(engine.url, engine_concurrency=2)
        check_all(client.generate(prompts(6), PARAMS), prompts(6))
        pool = pool_of(client)
        pool.close()
        assert pool.join(Deadline.after(CLOCK, 10.0)) == []
        delivered: list[Order] = []
        with pytest.raises(Exception, match="closed"):
            pool.admit([], lambda order, _: delivered.append(order))
        assert not delivered
