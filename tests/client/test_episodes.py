"""Multi-turn rollouts: what is recorded, where turns go, how episodes end, and that none is in another's way."""

from __future__ import annotations

import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rolloutsync import (
    EngineHTTPError,
    Episode,
    EpisodeError,
    EpisodeInterrupt,
    EpisodeStatus,
    RolloutClient,
    Status,
    Turn,
    WeightSpan,
    episodes,
)
from rolloutsync.clock import Clock
from rolloutsync.sim import Fault, SimFleet
from rolloutsync.sim.tokens import expected_logprobs, expected_tokens
from tests.background import in_thread
from tests.client.kit import ENDLESS, calls, generations, params, prompts
from tests.wire import eventually

MakeClient = Callable[..., RolloutClient]
CLOCK = Clock()
WAIT_S = 20.0
DONE, INTERRUPTED, FAILED = EpisodeStatus.COMPLETED, EpisodeStatus.INTERRUPTED, EpisodeStatus.FAILED


def chat(turn: Turn, item: int, turns: int = 3) -> list[str | None]:
    """Some turns, each on top of all before, with two ids of a tool between; the engines that answered."""
    ids, engines = [3 + item, 10], []
    for number in range(turns):
        answer = turn.generate(ids)
        ids += [*answer.output_ids.tolist(), 20 + number, 30 + number]
        engines.append(answer.engine)
    return engines


def check_books(client: RolloutClient, samples: int) -> None:
    """Every sample of every turn is accounted for, once."""
    audit = client.audit()
    assert audit.balanced
    assert (audit.admitted, audit.delivered) == (samples, samples)


def statuses(results: Sequence[Episode]) -> list[EpisodeStatus]:
    return [episode.status for episode in results]


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_a_transcript_is_a_training_sample(fleet: SimFleet, make_client: MakeClient) -> None:
    """Ids, mask, logprobs and versions are exactly what was said, and by whom, in input order."""
    client = make_client(fleet)
    results = client.map(chat, range(6), sampling_params=params(8))
    assert [(episode.index, episode.item, episode.status) for episode in results] == [(n, n, DONE) for n in range(6)]
    for item, episode in enumerate(results):
        (segment,) = episode.transcript.segments
        ids, mask, logprobs = [3 + item, 10], [False] * 2, [0.0] * 2
        for number in range(3):
            said = expected_tokens(ids, 8)
            logprobs += [*expected_logprobs(ids, said), *([0.0, 0.0] if number < 2 else [])]
            ids += [*said, *([20 + number, 30 + number] if number < 2 else [])]
            mask += [*[True] * 8, *([False] * 2 if number < 2 else [])]
        assert (segment.input_ids.tolist(), segment.loss_mask.tolist()) == (ids, mask)
        assert segment.logprobs.tolist() == np.array(logprobs, np.float32).tolist()
        assert segment.weight_spans == tuple(WeightSpan("default", at, at + 8) for at in (2, 12, 22))
        assert (segment.turns, len(segment)) == ((0, 1, 2), 30)
        assert (str(segment.input_ids.dtype), str(segment.loss_mask.dtype)) == ("int32", "bool")
        assert [(s.index, s.member) for s in episode.transcript.samples] == [(item, 0), (item, 1), (item, 2)]
    check_books(client, 18)
    assert client.stats().truncated == 18


def test_a_turn_that_does_not_extend_begins_a_segment(fleet: SimFleet, make_client: MakeClient) -> None:
    """A stripped answer, a second try: each token of the model's is trained on once."""

    def strips(turn: Turn, _: int) -> None:
        first = turn.generate([5, 6])
        turn.generate([5, 6, *first.output_ids[4:].tolist(), 7], {"max_new_tokens": 3})
        turn.generate([5, 6, *first.output_ids[4:].tolist(), 7], {"max_new_tokens": 3, "sampling_seed": 9})

    (episode,) = make_client(fleet).map(strips, [0], sampling_params=params(8))
    segments = episode.transcript.segments
    assert [segment.turns for segment in segments] == [(0,), (1,), (2,)]
    assert [int(segment.loss_mask.sum()) for segment in segments] == [8, 3, 3]
    assert [segment.loss_mask.tolist().index(True) for segment in segments] == [2, 7, 7]


class Template:
    """Renders messages as ids, and forgets what the model thought."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        return [token for message in messages for token in (9, *message["content"])]


def test_messages(fleet: SimFleet, make_client: MakeClient) -> None:
    """Rendered by the client's tokenizer; what the template drops is not trained on again."""

    def talk(turn: Turn, item: int) -> None:
        messages = [{"content": [item]}]
        answer = turn.generate({"messages": messages})
        turn.generate({"messages": [*messages, {"content": answer.output_ids[-2:].tolist()}]})

    (episode,) = make_client(fleet, tokenizer=Template()).map(talk, [5], sampling_params=params(4))
    one, two = episode.transcript.segments
    assert one.input_ids.tolist() == [9, 5, *expected_tokens([9, 5], 4)]
    assert two.input_ids[:5].tolist() == [9, 5, 9, *one.input_ids[-2:].tolist()]
    assert two.loss_mask.tolist() == [False] * 5 + [True] * 4


def test_text(fleet: SimFleet, make_client: MakeClient) -> None:
    """The engine is asked for the ids of a text; where it does not tell them, only the segments are missing."""
    client = make_client(fleet)
    (episode,) = client.map(lambda turn, text: turn.generate(text).text, ["Hello"], sampling_params=params(4))
    (segment,) = episode.transcript.segments
    assert segment.loss_mask.tolist() == [False] * (len(segment) - 4) + [True] * 4
    assert segment.input_ids[-4:].tolist() == expected_tokens(segment.input_ids[:-4].tolist(), 4)
    (silent,) = client.map(lambda turn, text: turn.generate(text, return_prompt_token_ids=False), ["Hello"])
    assert silent.status is DONE
    with pytest.raises(ValueError, match=r"turn 0: the prompt is text, and http.* did not tell its token ids"):
        _ = silent.transcript.segments


def test_without_logprobs(fleet: SimFleet, make_client: MakeClient) -> None:
    """NaN where the model's are unknown, so that nobody trains on a guess."""
    results = make_client(fleet).map(chat, [1], sampling_params=params(2), return_logprob=False)
    (segment,) = results[0].transcript.segments
    assert (np.isnan(segment.logprobs) == segment.loss_mask).all()


def test_finished_samples_are_turns_too(fleet: SimFleet, make_client: MakeClient) -> None:
    """An episode that is played again from an earlier transcript sends only what is new."""
    client = make_client(fleet)
    (before,) = client.map(chat, [4], sampling_params=params(4))

    def again(turn: Turn, item: int) -> list[int]:
        answers = [turn.generate(sample) for sample in before.transcript.samples]
        turn.generate([*answers[-1].tokens.tolist(), 50])
        return [answer.member for answer in answers]

    (after,) = client.map(again, [4], sampling_params=params(4))
    assert after.value == [0, 1, 2]
    assert after.transcript.segments[0].turns == (0, 1, 2, 3)
    check_books(client, 4)


# --- where turns go ---------------------------------------------------------------------------------------------------


def test_an_episode_stays_on_its_engine(fleet: SimFleet, make_client: MakeClient) -> None:
    """Over four engines with too little room: all turns of one on one engine, every engine has its share."""
    client, met = make_client(fleet, engine_concurrency=2), threading.Barrier(24)

    def play(turn: Turn, item: int) -> list[str | None]:
        chat(turn, item)
        met.wait(WAIT_S)
        chat(turn, item)
        return [sample.engine for sample in turn.transcript.samples]

    results = client.map(play, range(24), sampling_params=params(2))
    assert all(len(set(episode.value)) == 1 for episode in results)
    assert Counter(episode.value[0] for episode in results) == dict.fromkeys(fleet.urls, 6)
    check_books(client, 24 * 6)


def test_slow_episodes_are_spread_too(fleet: SimFleet, make_client: MakeClient) -> None:
    """Homes are counted, not requests: episodes whose turns are short and tools are slow do not pile up on one."""
    client, first = make_client(fleet), threading.Barrier(8)
    results = client.map(
        lambda turn, item: (chat(turn, item, 1), first.wait(WAIT_S)), range(8), sampling_params=params(1)
    )
    assert Counter(episode.value[0][0] for episode in results) == dict.fromkeys(fleet.urls, 2)


def test_the_death_of_the_home(make_client: MakeClient) -> None:
    """Episodes of a dead engine go on elsewhere, with their transcript; the others stay where they are, and on their
    rank; engines and ranks have equal shares.
    """
    with SimFleet(engines=3, dp_size=2, tokens_per_second=5000.0) as fleet:
        client, met = make_client(fleet), threading.Barrier(13)

        def play(turn: Turn, item: int) -> list[tuple[str | None, int | None]]:
            ids = [3 + item]
            ids += turn.generate(ids).output_ids.tolist()
            met.wait(WAIT_S)
            met.wait(WAIT_S)
            for _ in range(2):
                ids += [7, *turn.generate([*ids, 7]).output_ids.tolist()]
            return [(sample.engine, sample.dp_rank) for sample in turn.transcript.samples]

        running = in_thread(lambda: client.map(play, range(12), sampling_params=params(4)))
        met.wait(WAIT_S)
        fleet.engines[1].kill()
        met.wait(WAIT_S)
        results = running.result(WAIT_S)
        assert set(statuses(results)) == {DONE}
        for episode in results:
            before, *after = episode.value
            assert len(set(after)) == 1
            assert (after[0] == before) == (before[0] != fleet[1])
            assert len(episode.transcript.segments) == 1
        homes = Counter(episode.value[0] for episode in results)
        assert homes == {(url, rank): 2 for url in fleet.urls for rank in (0, 1)}


def test_an_engine_that_leaves(fleet: SimFleet, make_client: MakeClient) -> None:
    """The next turn goes elsewhere, and the one after that too."""
    client = make_client([fleet[0], fleet[1]])

    def play(turn: Turn, item: int) -> list[str | None]:
        chat(turn, item, 1)
        client.remove_engine(str(turn.transcript.samples[0].engine))
        return chat(turn, item, 2)

    (episode,) = client.map(play, [0], sampling_params=params(2))
    home = episode.transcript.samples[0].engine
    assert {home, *episode.value} == {fleet[0], fleet[1]}
    assert len(set(episode.value)) == 1


def test_episodes_and_a_batch_share_an_engine(fleet: SimFleet, make_client: MakeClient) -> None:
    """Places are taken by turns: a large batch does not keep episodes out, nor do many episodes a small batch."""
    client, enough = make_client(fleet[0], engine_concurrency=1), threading.Event()
    batch = client.start(prompts(300), params(1))
    results = client.map(chat, range(3), sampling_params=params(1))
    assert set(statuses(results)) == {DONE}
    assert not batch.done
    batch.abort()

    def busy(turn: Turn, item: int) -> None:
        while not enough.is_set():
            turn.generate([3 + item])

    running = in_thread(lambda: client.map(busy, range(8), sampling_params=params(1)))
    eventually(lambda: client.stats().open >= 7, "they are busy")
    assert {sample.status for sample in client.generate(prompts(4), params(1))} == {Status.TRUNCATED}
    enough.set()
    assert set(statuses(running.result(WAIT_S))) == {DONE}


def test_a_slow_tool_blocks_only_its_own(fleet: SimFleet, make_client: MakeClient) -> None:
    """Seven of eight end while one is at its tool."""
    client, slow, ended = make_client(fleet), threading.Event(), []

    def play(turn: Turn, item: int) -> None:
        chat(turn, item, 1)
        if item == 0:
            slow.wait(WAIT_S)
        chat(turn, item, 2)
        ended.append(item)

    running = in_thread(lambda: client.map(play, range(8), sampling_params=params(2)))
    eventually(lambda: len(ended) == 7, "the others ended")
    assert 0 not in ended
    slow.set()
    assert set(statuses(running.result(WAIT_S))) == {DONE}


def test_sixty_four_episodes(fleet: SimFleet, make_client: MakeClient) -> None:
    """All at once, or four at a time; never more threads than that."""
    client, met = make_client(fleet), threading.Barrier(64)
    threads: set[str] = set()

    def play(turn: Turn, item: int) -> int:
        threads.add(threading.current_thread().name)
        return len(chat(turn, item))

    def meet(turn: Turn, item: int) -> int:
        met.wait(WAIT_S)
        return play(turn, item)

    assert [episode.value for episode in client.map(meet, range(64), sampling_params=params(2))] == [3] * 64
    threads.clear()
    client.map(play, range(16), sampling_params=params(1), concurrency=4)
    assert 1 <= len(threads) <= 4
    check_books(client, 80 * 3)


def test_nothing_to_do(fleet: SimFleet, make_client: MakeClient) -> None:
    """No items, no episodes."""
    assert make_client(fleet).map(chat, []) == []


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
    other = client.start(prompts(2), params(900))

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
