"""Multi-turn rollouts: what is recorded, where turns go, and that none is in another's way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rolloutsync import (
    RolloutClient,
    Sample,
    Status,
    Turn,
    WeightSpan,
)
from rolloutsync.sim import SimFleet
from rolloutsync.sim.tokens import expected_logprobs, expected_tokens
from tests.background import in_thread
from tests.client.episode_kit import DONE, WAIT_S, chat, check_books, statuses
from tests.client.kit import generations, params, prompts
from tests.wire import eventually

MakeClient = Callable[..., RolloutClient]


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


def test_an_interrupted_episode_goes_on(fleet: SimFleet, make_client: MakeClient) -> None:
    """Played again from its transcript: whole turns are not sent, the partial goes on, as if nothing had happened."""
    client = make_client(fleet)

    def play(turn: Turn, before: Sequence[Sample]) -> None:
        context: Any = {"input_ids": [5, 6], "sampling_params": params(4)}
        for number, tokens in enumerate((4, 500, 4)):
            answer = turn.generate(before[number] if number < len(before) else context, params(tokens))
            context = [*answer.tokens.tolist(), 7]

    running = in_thread(lambda: client.map(play, [()]))
    eventually(
        lambda: any(row["prompt_tokens"] == 7 and row["tokens"] > 9 for row in generations(fleet)), "turn 1 runs"
    )
    client.abort_until_idle(WAIT_S)
    (cut,) = running.result(WAIT_S)
    assert [str(sample.status) for sample in cut.transcript.samples] == ["TRUNCATED", "ABORTED"]
    (whole,) = client.map(play, [cut.transcript.samples])
    (segment,) = whole.transcript.segments
    ids = [5, 6]
    for tokens in (4, 500, 4):
        ids += [*expected_tokens(ids, tokens), 7]
    assert segment.input_ids.tolist() == ids[:-1]
    assert int(segment.loss_mask.sum()) == 508
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


@pytest.mark.slow
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
