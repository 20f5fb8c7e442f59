"""The scheduler on a clock that only the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutsync.sim import SimConfig
from rolloutsync.sim.request import ABORTED, ABORTED_IN_QUEUE, Phase, Refusal, SimRequest
from rolloutsync.sim.sampling import parse
from rolloutsync.sim.scheduler import Scheduler
from rolloutsync.sim.stream import TokenStream, model_of
from rolloutsync.sim.tokens import expected_tokens

VOCAB = 512
PROMPT = [5, 6, 7, 8]


class Bench:
    """A scheduler, its clock, and requests to put in: 100 tokens/s, 1000 prompt tokens/s, no dispatch delay."""

    def __init__(self, **fields: Any) -> None:
        defaults = {"tokens_per_second": 100.0, "prefill_tokens_per_second": 1000.0, "dispatch_s": 0.0}
        self.config = SimConfig(**{"vocab_size": VOCAB, **defaults, **fields})
        self.time = 50.0
        self.scheduler = Scheduler(self.config, lambda: self.time)
        self.ended: list[str] = []
        self._model = model_of(VOCAB, self.config.mean_output_tokens)

    def submit(self, rid: str, tokens: int = 50, prompt: list[int] = PROMPT, **fields: Any) -> SimRequest:
        """Puts a request in."""
        sampling = parse({"max_new_tokens": tokens, "ignore_eos": True, **fields.pop("sampling", {})})
        stream = TokenStream(self._model, prompt, sampling, tokens, self.scheduler.weight_version)
        request = SimRequest(rid, prompt, stream, lambda: self.ended.append(rid), **fields)
        self.scheduler.submit(request)
        return request

    def run(self, seconds: float) -> None:
        """Moves the clock from event to event."""
        end = self.time + seconds
        while (at := self.scheduler.next_event()) is not None and at <= end:
            self.time = max(self.time, at)
            self.scheduler.advance()
        self.time = end
        self.scheduler.advance()

    def jump(self, seconds: float) -> None:
        """Moves the clock at once, as a loaded machine would."""
        self.time += seconds
        self.scheduler.advance()

    def abort(self, *rids: str) -> None:
        """Aborts by exact id, or all."""
        self.scheduler.abort(lambda request: not rids or request.rid in rids)


def test_a_request_takes_its_prefill_and_one_step_per_token() -> None:
    """Four prompt tokens at 1000/s, the first token with them, 49 more at 100/s."""
    bench = Bench()
    request = bench.submit("a")
    bench.run(0.003)
    assert request.phase is Phase.PREFILL
    bench.run(0.001)
    assert (request.phase, request.count) == (Phase.RUNNING, 1)
    bench.run(0.489)
    assert bench.ended == []
    bench.run(0.002)
    assert bench.ended == ["a"]
    assert request.finish == {"type": "length", "length": 50}
    assert request.finished == pytest.approx(50.0 + 0.004 + 0.49)
    assert request.stream.tokens == expected_tokens(PROMPT, 50, vocab_size=VOCAB)


def test_one_jump_gives_the_same_as_many_steps() -> None:
    """Events are worked off at their own times, however late the scheduler is woken."""
    stepped, jumped = Bench(max_running_requests=2), Bench(max_running_requests=2)
    for bench in (stepped, jumped):
        for number in range(6):
            bench.submit(f"r{number}", tokens=10 + 7 * number, prompt=[5, 6, number + 3])
    stepped.run(3.0)
    jumped.jump(3.0)
    assert stepped.ended == jumped.ended
    assert len(stepped.ended) == 6
    assert stepped.scheduler.ranks[0].busy_s == pytest.approx(jumped.scheduler.ranks[0].busy_s)


def test_only_so_many_run_and_the_rest_waits_in_order() -> None:
    """A place is filled as soon as it is free."""
    bench = Bench(max_running_requests=2)
    requests = [bench.submit(f"r{number}", prompt=[5, number + 3]) for number in range(4)]
    bench.run(0.1)
    assert [request.phase for request in requests] == [Phase.RUNNING] * 2 + [Phase.WAITING] * 2
    bench.run(0.5)
    assert [request.phase for request in requests] == [Phase.DONE] * 2 + [Phase.RUNNING] * 2
    bench.run(0.5)
    assert bench.ended == ["r0", "r1", "r2", "r3"]
    assert bench.scheduler.ranks[0].peak_running == 2
    assert bench.scheduler.idle


def test_a_full_queue_refuses() -> None:
    """More waiting than allowed is a 503, at once."""
    bench = Bench(max_running_requests=1, max_queued_requests=1)
    bench.submit("runs")
    bench.run(0.05)
    bench.submit("waits")
    refused = bench.submit("too many")
    assert refused.finish == Refusal(503, "The request queue is full.")
    assert bench.ended == ["too many"]


def test_a_running_request_ends_one_step_after_its_abort() -> None:
    """The token that was being computed still comes."""
    bench = Bench()
    request = bench.submit("a")
    bench.run(0.1)
    produced = request.produced(bench.scheduler.now, 0.01)
    bench.abort("a")
    assert bench.ended == []
    bench.run(0.01)
    assert bench.ended == ["a"]
    assert request.count == produced + 1
    assert request.finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def test_a_waiting_request_ends_with_its_abort() -> None:
    """It never ran, so it has nothing."""
    bench = Bench(max_running_requests=1)
    bench.submit("runs")
    request = bench.submit("waits")
    bench.run(0.1)
    bench.abort("waits")
    assert bench.ended == ["waits"]
    assert (request.finish, request.count) == ({"type": "abort", "message": "Abort in waiting queue"}, 0)


def test_an_abort_ends_a_prefill_behind_its_pass() -> None:
    """With its first token where that was the last pass; with nothing where another one would have come."""
    bench = Bench(chunked_prefill_size=100)
    short = bench.submit("short", tokens=5)
    bench.run(0.002)
    bench.abort()
    assert bench.ended == []
    bench.run(0.002)
    assert (short.finish, short.count) == (ABORTED, 1)
    retracted = bench.submit("retracted", prompt=list(range(400, 405)))
    bench.run(0.002)
    bench.abort()
    bench.scheduler.pause(retract=True)
    assert (retracted.finish, retracted.count) == (ABORTED, 1)
    bench.scheduler.resume()
    long = bench.submit("long", prompt=list(range(3, 353)))
    bench.run(0.15)
    bench.abort()
    bench.run(0.06)
    assert long.finish == {"type": "abort", "message": "Abort in waiting queue"}
    assert bench.scheduler.idle


def test_an_abort_is_kept_over_a_retract() -> None:
    """A prefill that it would have ended behind its pass, and that a pause gave up, ends when the engine goes on."""
    bench = Bench(chunked_prefill_size=100, max_running_requests=1)
    same = list(range(3, 153))
    first, second = bench.submit("first", tokens=5, prompt=same), bench.submit("second", tokens=5, prompt=same)
    bench.run(0.01)
    bench.abort("first")
    bench.scheduler.pause(retract=True)
    assert bench.ended == []
    bench.scheduler.resume()
    assert first.finish == ABORTED_IN_QUEUE
    bench.run(5.0)
    assert second.finish == {"type": "length", "length": 5}


def test_a_prefill_shows_in_the_token_counts_alone() -> None:
    """Nothing runs, nothing waits, but tokens are in use."""
    bench = Bench(chunked_prefill_size=100)
    bench.submit("long", prompt=list(range(3, 353)))
    bench.run(0.05)
    (load,) = bench.scheduler.loads()
    assert (load.running, load.waiting) == (0, 0)
    assert (load.used_tokens, load.total_tokens) == (100, 100)
    bench.run(0.1)
    assert bench.scheduler.loads()[0].used_tokens == 200


def test_a_snapshot_is_stale_until_the_next_one() -> None:
    """Between two publications nothing changes, then everything does."""
    bench = Bench(load_publish_interval=10)
    bench.submit("a", tokens=100)
    bench.run(0.05)
    first = bench.scheduler.loads()[0]
    assert (first.running, first.used_tokens) == (0, 4)
    bench.run(0.04)
    assert bench.scheduler.loads()[0] == first
    bench.run(0.02)
    second = bench.scheduler.loads()[0]
    assert second.at == pytest.approx(50.1)
    assert (second.running, second.used_tokens) == (1, 4 + 10)
    bench.run(2.0)
    assert bench.scheduler.loads()[0].total_tokens == 0


def test_a_lag_makes_a_snapshot_readable_later() -> None:
    """What was published just now cannot be seen yet."""
    bench = Bench(load_lag_s=0.5)
    bench.submit("a", tokens=200)
    bench.run(0.4)
    assert bench.scheduler.loads()[0].used_tokens == 0
    bench.run(0.2)
    assert bench.scheduler.loads()[0].used_tokens > 0


def test_idle_ranks_keep_publishing_and_paused_ones_do_not() -> None:
    """The timestamp moves while idle, and stands still under a pause."""
    bench = Bench(load_idle_interval_s=0.1)
    seen = set()
    for _ in range(5):
        bench.run(0.1)
        seen.add(bench.scheduler.loads()[0].at)
    assert len(seen) == 5
    bench.scheduler.pause(retract=False)
    frozen = bench.scheduler.loads()[0].at
    bench.run(3.0)
    assert bench.scheduler.loads()[0].at == frozen
    bench.scheduler.resume()
    bench.run(0.2)
    assert bench.scheduler.loads()[0].at > frozen


def test_older_versions_tell_the_live_numbers() -> None:
    """Before 0.5.13 a load is a round trip to the scheduler."""
    bench = Bench(version="0.5.9", load_publish_interval=1000)
    bench.submit("a")
    bench.run(0.1)
    assert bench.scheduler.loads()[0].running == 1


def test_an_in_place_pause_keeps_everything_where_it_is() -> None:
    """Not one token comes during the pause, and none is lost."""
    bench = Bench()
    request = bench.submit("a")
    bench.run(0.2)
    bench.scheduler.pause(retract=False)
    produced = request.produced(bench.time, 0.01)
    bench.run(10.0)
    assert not bench.scheduler.flush()
    assert bench.ended == []
    bench.scheduler.resume()
    bench.run(0.294)
    assert bench.ended == ["a"]
    assert (request.count, request.retractions) == (50, 0)
    assert produced < 50


def test_an_abort_under_an_in_place_pause_takes_effect_after_it() -> None:
    """Waiting requests end at once; running ones need the step that does not come."""
    bench = Bench(max_running_requests=1)
    running, waiting = bench.submit("runs"), bench.submit("waits")
    bench.run(0.2)
    bench.scheduler.pause(retract=False)
    bench.run(1.0)
    bench.abort()
    bench.run(1.0)
    assert bench.ended == ["waits"]
    bench.scheduler.resume()
    bench.run(0.02)
    assert bench.ended == ["waits", "runs"]
    assert running.finish is not None
    assert waiting.count == 0
    assert 0 < running.count < 50


def test_a_retract_pause_puts_running_requests_back_into_the_queue() -> None:
    """They keep their tokens, pay a second prefill, and end as if nothing had been."""
    bench = Bench()
    requests = [bench.submit(f"r{number}", prompt=[5, number + 3]) for number in range(3)]
    bench.run(0.2)
    bench.scheduler.pause(retract=True)
    assert [request.phase for request in requests] == [Phase.WAITING] * 3
    assert bench.scheduler.flush()
    bench.run(5.0)
    bench.scheduler.resume()
    bench.run(2.0)
    assert sorted(bench.ended) == ["r0", "r1", "r2"]
    for number, request in enumerate(requests):
        assert request.stream.tokens == expected_tokens([5, number + 3], 50, vocab_size=VOCAB)
        assert request.retractions == 1


def test_an_aborted_retracted_request_keeps_only_what_was_reported() -> None:
    """The front door knows whole fifties; the rest is lost."""
    bench = Bench()
    request = bench.submit("a", tokens=500)
    bench.run(1.2)
    bench.scheduler.pause(retract=True)
    assert request.count > 100
    bench.abort()
    assert bench.ended == ["a"]
    assert request.count == len(request.stream.tokens) == 100


def test_a_full_cache_retracts_the_youngest() -> None:
    """Two requests outgrow the cache; one goes on, the other waits and starts again with its tokens."""
    bench = Bench(max_total_tokens=400, context_length=2000)
    old, young = bench.submit("old", tokens=300), bench.submit("young", tokens=300, prompt=[9, 9, 9, 9])
    bench.run(1.9)
    assert (old.phase, young.phase) == (Phase.RUNNING, Phase.RUNNING)
    bench.run(0.2)
    assert (old.phase, young.phase) == (Phase.RUNNING, Phase.WAITING)
    assert bench.scheduler.ranks[0].used_tokens(bench.time) <= 400
    bench.run(10.0)
    assert bench.ended == ["old", "young"]
    assert young.retractions == 1
    assert young.stream.tokens == expected_tokens([9, 9, 9, 9], 300, vocab_size=VOCAB)


def test_a_known_prefix_is_cached_and_a_flush_forgets_it() -> None:
    """The second time, all but the last token are there."""
    bench = Bench()
    first = bench.submit("a", tokens=2)
    bench.run(1.0)
    second = bench.submit("b", tokens=2)
    longer = bench.submit("c", tokens=2, prompt=[*PROMPT, *first.stream.tokens, 99])
    limited = bench.submit("d", tokens=2, reuse_limit=0)
    bench.run(1.0)
    assert [request.cached_tokens for request in (first, second, longer, limited)] == [0, 3, 6, 0]
    assert bench.scheduler.flush()
    third = bench.submit("e", tokens=2)
    bench.run(1.0)
    assert third.cached_tokens == 0


def test_new_weights_show_from_the_next_token_on() -> None:
    """What was there stays, spans say where the change came."""
    bench = Bench()
    request = bench.submit("a")
    bench.run(0.2)
    bench.scheduler.pause(retract=False)
    bench.scheduler.change_weights("2")
    bench.scheduler.resume()
    bench.run(1.0)
    (old, _, count), (new, start, end) = request.stream.versions(50)
    assert (old, new, start, end) == ("default", "2", count, 50)
    head = expected_tokens(PROMPT, count, vocab_size=VOCAB)
    tail = expected_tokens(PROMPT + head, 50 - count, version="2", vocab_size=VOCAB)
    assert request.stream.tokens == head + tail


def test_slower_steps_take_effect_at_once() -> None:
    """Tokens that were there stay, the others come at the new pace."""
    bench = Bench()
    request = bench.submit("a", tokens=30)
    bench.run(0.104)
    assert request.produced(bench.time, 0.01) == 11
    bench.scheduler.slow_down(0.09)
    bench.run(1.0)
    assert request.produced(bench.time, 0.1) == 21
    bench.scheduler.slow_down(0.0)
    bench.run(0.1)
    assert bench.ended == ["a"]


def test_a_frozen_scheduler_loses_no_message_and_no_token() -> None:
    """Submits and aborts wait in its mailbox; its time stands still."""
    bench = Bench(dispatch_s=0.001)
    request = bench.submit("a")
    bench.run(0.201)
    bench.scheduler.freeze()
    before = bench.scheduler.loads()[0]
    late = bench.submit("late")
    bench.abort("late")
    bench.run(60.0)
    assert bench.scheduler.next_event() is None
    assert bench.scheduler.loads()[0] == before
    bench.scheduler.thaw()
    assert bench.ended == ["late"]
    assert late.finish == {"type": "abort", "message": "Abort in waiting queue"}
    bench.run(0.294)
    assert bench.ended == ["late", "a"]
    assert request.count == 50


def test_ranks_take_turns_unless_one_is_wanted() -> None:
    """Each rank has its own limits and its own load."""
    bench = Bench(dp_size=2, max_running_requests=1)
    requests = [bench.submit(f"r{number}") for number in range(4)]
    wanted = bench.submit("wanted", dp_rank=1)
    bench.run(0.2)
    assert [request.rank for request in (*requests, wanted)] == [0, 1, 0, 1, 1]
    assert [(load.running, load.waiting) for load in bench.scheduler.loads()] == [(1, 1), (1, 2)]


def test_an_end_token_ends_a_request_when_it_comes() -> None:
    """Nobody looks at each token, yet the end is at its time."""
    bench = Bench(mean_output_tokens=40.0)
    prompts = [[5, 6, number] for number in range(3, 20)]
    requests = [bench.submit(f"r{prompt[2]}", 2000, prompt, sampling={"ignore_eos": False}) for prompt in prompts]
    bench.run(30.0)
    for prompt, request in zip(prompts, requests, strict=True):
        expected = expected_tokens(prompt, 2000, vocab_size=VOCAB, ignore_eos=False, mean_output_tokens=40.0)
        assert request.stream.tokens == expected
        assert request.finish == {"type": "stop", "matched": 2}
        assert request.finished - request.since == pytest.approx(0.0)
    assert len({request.finished for request in requests}) > 5
