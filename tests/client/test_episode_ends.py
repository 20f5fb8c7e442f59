"""How episodes end: interrupts, errors, and what their threads leave behind."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rolloutsync import (
    EngineHTTPError,
    EpisodeError,
    EpisodeInterrupt,
    RolloutClient,
    Status,
    Turn,
    episodes,
)
from rolloutsync.sim import Fault, SimFleet
from rolloutsync.threads import start_thread
from tests.background import in_thread
from tests.client.episode_kit import DONE, FAILED, INTERRUPTED, WAIT_S, chat, check_books, statuses
from tests.client.kit import ENDLESS, calls, generations, params, prompts
from tests.wire import eventually

MakeClient = Callable[..., RolloutClient]


# --- interrupts -------------------------------------------------------------------------------------------------------


def test_a_drain_interrupts_turns(fleet: SimFleet, make_client: MakeClient) -> None:
    """At once, with the tokens so far; ``finally`` runs, ``except Exception`` does not see it; the rest won't begin."""
    client, left, swallowed = make_client(fleet), [], []

    def play(turn: Turn, item: int) -> str:
        try:
            first = turn.generate([3 + item], params(2))
            turn.generate([3 + item, *first.output_ids.tolist(), 9], ENDLESS)
        except Exception:  # noqa: BLE001 - what users write
            swallowed.append(item)
        finally:
            left.append(item)
        return "never"

    running = in_thread(lambda: client.map(play, range(10), concurrency=6))
    eventually(lambda: sum(row["state"] == "running" and row["tokens"] > 0 for row in generations(fleet)) == 6, "run")
    assert client.abort_until_idle(WAIT_S).idle
    results = running.result(WAIT_S)
    assert statuses(results) == [INTERRUPTED] * 10
    assert (sorted(left), swallowed) == (list(range(6)), [])
    for episode in results[:6]:
        cut = episode.transcript.samples[-1]
        assert (cut.status, episode.value) == (Status.ABORTED, None)
        assert len(cut.output_ids) > 0
        (segment,) = episode.transcript.segments
        assert segment.input_ids.tolist() == cut.tokens.tolist()
        assert int(segment.loss_mask.sum()) == 2 + len(cut.output_ids)
        assert isinstance(episode.error, EpisodeInterrupt)
        assert "the engines were drained" in str(episode.error)
    assert [episode.transcript.samples for episode in results[6:]] == [()] * 4
    check_books(client, 12)


@pytest.mark.parametrize("verb", ["abort_until_idle", "pause"])
def test_a_drain_interrupts_tools_at_their_next_turn(fleet: SimFleet, make_client: MakeClient, verb: str) -> None:
    """Also if the drain is long over; who looks sees it before. What has no further turn is complete."""
    client, met = make_client(fleet), threading.Barrier(4)

    def play(turn: Turn, item: int) -> bool:
        chat(turn, item, 1)
        met.wait(WAIT_S)
        met.wait(WAIT_S)
        seen = turn.interrupted
        if item:
            turn.generate([5])
        return seen

    running = in_thread(lambda: client.map(play, range(3), sampling_params=params(2)))
    met.wait(WAIT_S)
    getattr(client, verb)()
    client.resume()
    met.wait(WAIT_S)
    results = running.result(WAIT_S)
    assert statuses(results) == [INTERRUPTED] * 3
    assert results[0].value is True
    assert [len(episode.transcript.samples) for episode in results] == [1, 1, 1]
    check_books(client, 3)


def test_a_pause_in_place_holds_turns(fleet: SimFleet, make_client: MakeClient) -> None:
    """Nobody is interrupted; the next turn waits for the resume."""
    client, met = make_client(fleet), threading.Barrier(2)

    def play(turn: Turn, item: int) -> list[str | None]:
        chat(turn, item, 1)
        met.wait(WAIT_S)
        return chat(turn, item, 2)

    running = in_thread(lambda: client.map(play, [1], sampling_params=params(2)))
    eventually(lambda: client.stats().truncated == 1, "it is at its tool")
    client.pause("in_place")
    met.wait(WAIT_S)
    eventually(lambda: client.stats().open == 1, "it waits")
    assert not running.done()
    client.resume()
    assert statuses(running.result(WAIT_S)) == [DONE]


def test_a_swallowed_interrupt_comes_again(fleet: SimFleet, make_client: MakeClient) -> None:
    """At every turn; an episode that returns all the same is INTERRUPTED, with what it returned or raised."""
    client = make_client(fleet)

    def stubborn(turn: Turn, item: int) -> int:
        caught = 0
        while caught < 3:
            try:
                turn.generate([3 + item], ENDLESS)
            except BaseException:  # noqa: BLE001 - what users write
                caught += 1
        if item:
            raise ZeroDivisionError
        return caught

    running = in_thread(lambda: client.map(stubborn, range(2)))
    eventually(lambda: sum(row["state"] == "running" for row in generations(fleet)) == 2, "both run")
    client.abort_until_idle(WAIT_S)
    one, two = running.result(WAIT_S)
    assert (one.status, one.value, type(one.error)) == (INTERRUPTED, 3, EpisodeInterrupt)
    assert (two.status, two.value, type(two.error)) == (INTERRUPTED, None, ZeroDivisionError)
    assert [len(episode.transcript.samples) for episode in (one, two)] == [1, 1]


def test_a_foreign_abort_interrupts_one(fleet: SimFleet, make_client: MakeClient) -> None:
    """Somebody else aborts the requests at one engine: the episodes at the others go on."""
    client = make_client([fleet[0], fleet[1]])
    running = in_thread(
        lambda: client.map(lambda turn, item: chat(turn, item, 1), range(2), sampling_params=params(400))
    )
    eventually(lambda: sum(row["state"] == "running" for row in generations(fleet)) == 2, "both run")
    fleet.engines[0].call("POST", "/abort_request", {"abort_all": True})
    results = running.result(WAIT_S)
    assert sorted(statuses(results)) == sorted([DONE, INTERRUPTED])
    assert any("turn 0 was cut short by an abort" in str(episode.error) for episode in results)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_exception_fails_its_item_alone(
    fleet: SimFleet, make_client: MakeClient, warnings: Callable[[], list[str]]
) -> None:
    """Even SystemExit; the transcript stays, one WARNING counts them."""

    def play(turn: Turn, item: int) -> int:
        chat(turn, item, 1)
        if item < 2:
            raise [ValueError("no good"), SystemExit(3)][item]
        return item

    results = make_client(fleet).map(play, range(6), sampling_params=params(2))
    assert statuses(results) == [FAILED] * 2 + [DONE] * 4
    assert [type(episode.error) for episode in results[:2]] == [ValueError, SystemExit]
    assert all(len(episode.transcript.segments) == 1 for episode in results)
    assert warnings() == ["2 of 6 episodes failed; the first: ValueError: no good"]


def test_on_error(fleet: SimFleet, make_client: MakeClient) -> None:
    """ "raise" on any, "auto" if all failed, "return" never; the error has the complete list."""
    client = make_client(fleet)
    some: Callable[[Turn, int], float] = lambda _, item: 1 / item  # noqa: E731
    with pytest.raises(EpisodeError, match="1 of 2 episodes failed; the first: ZeroDivisionError") as caught:
        client.map(some, range(2), on_error="raise")
    assert statuses(caught.value.episodes) == [FAILED, DONE]
    assert caught.value.counts == {"FAILED": 1, "COMPLETED": 1}
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(pickle.loads(pickle.dumps(caught.value)).episodes) == 1
    with pytest.raises(EpisodeError):
        client.map(some, [0, 0])
    assert statuses(client.map(some, [0, 0], on_error="return")) == [FAILED] * 2


def test_a_failed_turn(fleet: SimFleet, make_client: MakeClient) -> None:
    """Raises in the episode, or is returned if that is asked for; it is part of the transcript."""
    fleet.engines[0].add_fault(Fault(kind="status", status=400, times=2))
    client = make_client(fleet[0])

    def play(turn: Turn, item: int) -> Status:
        assert turn.generate([5], on_error="return").status is Status.FAILED
        with pytest.raises(EngineHTTPError, match="400"):
            turn.generate([5])
        return turn.generate([5]).status

    (episode,) = client.map(play, [0], sampling_params=params(2), on_error="raise")
    assert episode.value is Status.TRUNCATED
    assert [sample.status.value for sample in episode.transcript.samples] == ["FAILED", "FAILED", "TRUNCATED"]
    assert episode.transcript.segments[0].turns == (2,)


def test_bad_turns_and_bad_maps(fleet: SimFleet, make_client: MakeClient) -> None:
    """Named before anything is sent; a turn's sampling parameters and fields are checked as a call's are."""
    client = make_client(fleet)

    wrong: list[tuple[list[int], dict[str, Any]]] = [
        ([], {}),
        ([5], {"sampling_params": {"temprature": 1}}),
        ([5], {"temperature": 1.0}),
        ([5], {"timeout": 0}),
        ([5], {"on_error": "auto"}),
    ]

    def play(turn: Turn, _: int) -> None:
        for ids, options in wrong:
            with pytest.raises(ValueError, match=r"empty|temprature|temperature|timeout|on_error"):
                turn.generate(ids, **options)

    client.map(play, [0], on_error="raise")
    with pytest.raises(TypeError, match="episode must be a function"):
        client.map("chat", [0])  # type: ignore[arg-type]
    bads: list[dict[str, Any]] = [{"concurrency": 0}, {"timeout": -1}, {"on_error": "no"}, {"rid": "x"}]
    for bad in bads:
        with pytest.raises(ValueError, match=next(iter(bad))):
            client.map(chat, [0], **bad)
    assert calls(fleet, "/generate") == 0


def test_a_turn_is_over_with_its_episode(fleet: SimFleet, make_client: MakeClient) -> None:
    """A handle that was kept makes no more samples."""
    client = make_client(fleet)
    kept: list[Turn] = []
    client.map(lambda turn, _: kept.append(turn), [0])
    with pytest.raises(RuntimeError, match="item 0 has ended"):
        kept[0].generate([5])
    assert calls(fleet, "/generate") == 0


def test_results_pickle(fleet: SimFleet, make_client: MakeClient) -> None:
    """As a Ray actor sends them; an error that cannot travel goes as its words."""

    def play(turn: Turn, item: int) -> int:
        chat(turn, item, 2)
        if item:
            raise ValueError(threading.Lock())
        return 7

    one, two = pickle.loads(pickle.dumps(make_client(fleet).map(play, range(2), sampling_params=params(2))))
    assert (one.value, one.status, two.status) == (7, DONE, FAILED)
    assert "ValueError: <unlocked" in str(two.error)
    assert one.transcript.segments[0].turns == (0, 1)


def test_too_few_threads(
    fleet: SimFleet,
    make_client: MakeClient,
    warnings: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that there are play all episodes; without any, the call fails and nothing is left."""
    client, left = make_client(fleet), [3]

    def scarce(name: str, target: Callable[[], None], **options: Any) -> threading.Thread:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        return start_thread(name, target, **options)

    monkeypatch.setattr(episodes, "start_thread", scarce)
    assert statuses(client.map(chat, range(6), sampling_params=params(1))) == [DONE] * 6
    assert warnings()[0].startswith("only 3 of 6 episodes at once (can't start new thread)")
    with pytest.raises(RuntimeError, match="can't start"):
        client.map(chat, range(6))
    check_books(client, 18)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_close_answers_every_item(
    fleet: SimFleet, make_client: MakeClient, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns are cut; an episode that does not come back from its tool is answered for, and its thread named."""
    monkeypatch.setattr(episodes, "_GRACE_S", 0.2)
    client, stuck = make_client(fleet), threading.Event()

    def play(turn: Turn, item: int) -> None:
        if item == 0:
            stuck.wait(WAIT_S)
        turn.generate([3 + item], ENDLESS)

    running = in_thread(lambda: client.map(play, range(5), concurrency=4))
    eventually(lambda: sum(row["state"] == "running" and row["tokens"] > 0 for row in generations(fleet)) == 3, "run")
    assert client.close() == []
    results = running.result(3.0)
    assert statuses(results) == [INTERRUPTED] * 5
    assert [len(episode.transcript.samples) for episode in results] == [0, 1, 1, 1, 0]
    (warning,) = warnings()
    assert "1 episodes did not return within 0.2 s; their threads are left behind: rolloutsync-" in warning
    stuck.set()
    check_books(client, 3)


def test_a_maps_timeout(fleet: SimFleet, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns fail, what has not begun does not, tools are not waited for."""
    monkeypatch.setattr(episodes, "_GRACE_S", 0.2)
    client, stuck = make_client(fleet), threading.Event()

    def play(turn: Turn, item: int) -> None:
        if item == 0:
            stuck.wait(WAIT_S)
        turn.generate([3 + item], ENDLESS)

    results = client.map(play, range(4), concurrency=2, timeout=0.3, on_error="return")
    assert statuses(results) == [FAILED] * 4
    words = [
        "has not come back",
        "the sample's deadline came",
        "was up before its episode",
        "was up before its episode",
    ]
    assert all(word in str(episode.error) for word, episode in zip(words, results, strict=True))
    assert all(isinstance(episode.error, TimeoutError) for episode in results)
    stuck.set()


def test_ctrl_c(fleet: SimFleet, make_client: MakeClient, warnings: Callable[[], list[str]]) -> None:
    """Its own requests are aborted, an evaluation beside it is not; tools are not waited for."""
    client, stuck, seen = make_client(fleet), threading.Event(), []
    other = client.start(prompts(2), params(2500))  # longer than it takes until all run

    def play(turn: Turn, item: int) -> None:
        try:
            if item == 0:
                stuck.wait(WAIT_S)
            turn.generate([3 + item], ENDLESS)
        finally:
            seen.append(item)

    def interrupt() -> None:
        eventually(lambda: sum(engine.in_flight for engine in client.engines()) == 5, "all run")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sender = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.map(play, range(4))
    sender.result(1.0)
    assert sorted(seen) == [1, 2, 3]
    assert "1 episodes did not return" in warnings()[0]
    stuck.set()
    eventually(lambda: len(seen) == 4, "its next turn was interrupted")
    assert {sample.status for sample in other.result()} == {Status.TRUNCATED}
