"""Recorded answers of a real vLLM 0.32, and what the simulated one says to the same calls."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rolloutsync.sim import Fault

from .kit import WAIT_S, Reply, events
from .recorded import check, compare, load, replay
from .vllm_kit import GENERATE, VllmCaller, asked, choice, ids

REAL = load("vllm-0.32.0")
REPLAY, OTHER = REAL["replay"], REAL["other"]
ENDING = ("finish_reason", "stop_reason")
PROMPT = [5, 30, 70, 100, 12, 44]


@pytest.mark.parametrize("name", [name for name in REPLAY if name != "metrics_idle"])
def test_it_answers_as_recorded(recorded: VllmCaller, name: str) -> None:
    """Status, content type, keys, types and the protocol's own words."""
    check(REPLAY[name], replay(recorded, REPLAY[name]), name)


def test_every_metric_is_one_of_the_real_ones(recorded: VllmCaller) -> None:
    """The simulation has a few of them, under their names."""
    reply, real = recorded.get("/metrics"), REPLAY["metrics_idle"]
    names = {line.split()[2] for line in reply.text.splitlines() if line.startswith("# TYPE")}
    assert names <= set(real["names"])
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= names
    assert reply.headers["content-type"] == real["content_type"]


def test_log_probabilities_by_id_have_the_recorded_form(recorded: VllmCaller) -> None:
    """The token, and the likeliest ones, as many as were asked for and the token itself first among them."""
    real = REPLAY["generate"]["json"]["choices"][0]["logprobs"]["content"][0]
    got = choice(recorded.tokens(PROMPT, 8, sampling={"logprobs": 1}))["logprobs"]["content"]
    assert len(got) == 8
    assert (list(got[0]), list(got[0]["top_logprobs"][0])) == (list(real), list(real["top_logprobs"][0]))
    assert [len(each["top_logprobs"]) for each in got] == [len(real["top_logprobs"])] * 8


def test_prompt_log_probabilities_have_the_recorded_form(recorded: VllmCaller) -> None:
    """None for the first token; for the others themselves and the likeliest, by id."""
    real = REPLAY["generate_prompt_logprobs"]["json"]["prompt_logprobs"]
    got = recorded.tokens(PROMPT, 1, sampling={"prompt_logprobs": 1}).json["prompt_logprobs"]
    assert (got[0], len(got)) == (real[0], len(PROMPT))
    assert [next(iter(each)) for each in got[1:]] == [str(token) for token in PROMPT[1:]]
    assert set(next(iter(got[1].values()))) == set(next(iter(real[1].values())))


def test_aborted_answers_have_the_recorded_form(recorded: VllmCaller) -> None:
    """Running requests come back with what they have, waiting ones with nothing; both say "abort"."""
    calls = [recorded.begin_tokens(PROMPT, 1800, request_id=f"q{n}", sampling={"logprobs": 1}) for n in range(6)]
    recorded.await_state(lambda state: (state["running"], state["waiting"]) == (4, 2), "four running, two waiting")
    assert recorded.counts() == (4, 2)
    check(OTHER["gen_abort_all_call"], recorded.post("/abort_requests", {}), "abort")
    replies = check_aborted(calls, ["gen_abort_all_4"] * 2 + ["gen_abort_all_0"] * 4)
    assert ids(replies[0]) == choice(replies[0])["weight_versions"] == []
    assert choice(replies[0])["logprobs"] == {"content": []}


def check_aborted(calls: list[Future[Reply]], names: list[str]) -> list[Reply]:
    """Compares answers with recorded ones, those with the fewest tokens first, and returns them so."""
    replies = sorted((call.result(WAIT_S) for call in calls), key=lambda reply: len(ids(reply)))
    for reply, name in zip(replies, names, strict=True):
        check(OTHER[name], reply, name)
        wanted = OTHER[name]["json"]["choices"][0]
        assert {key: choice(reply)[key] for key in ENDING} == {key: wanted[key] for key in ENDING}
    return replies


def test_aborted_completions_have_the_recorded_form(recorded: VllmCaller) -> None:
    """Twelve of them: four with tokens, eight without; /load counts all, the metrics four and eight."""
    body = OTHER["compl_long_aborted_all_0"]["request"]["body"]
    calls = [recorded.begin("/v1/completions", body) for _ in range(12)]
    recorded.await_state(lambda state: (state["running"], state["waiting"]) == (4, 8), "four running, eight waiting")
    assert recorded.get("/load").json == OTHER["load_12_inflight"]["json"]
    check(OTHER["abort_requests_all_emptyobj"], recorded.post("/abort_requests", {}), "abort")
    replies = check_aborted(calls, ["compl_long_aborted_all_10"] * 8 + ["compl_long_aborted_all_0"] * 4)
    assert [bool(ids(reply)) for reply in replies] == [False] * 8 + [True] * 4


@pytest.mark.parametrize("name", ["generate_stream", "completions_stream"])
def test_streams_have_the_recorded_form(recorded: VllmCaller, name: str) -> None:
    """Every event holds what is new; the last one is no JSON."""
    reply = replay(recorded, OTHER[name])
    got, real = events(reply), OTHER[name]["events"]
    assert reply.headers["content-type"] == OTHER[name]["content_type"]
    assert got[-1] == real[-1] == "[DONE]"
    for place in (0, 1, -2):
        compare(real[place], got[place])


def test_an_aborted_stream_ends_as_recorded(recorded: VllmCaller) -> None:
    """With an event that has no tokens, and says how they all came to be."""
    call = recorded.begin_running(PROMPT, "kill-me", stream=True)
    recorded.abort("generate-tokens-kill-me")
    got, real = events(call.result(WAIT_S)), OTHER["gen_stream_abort"]["events"]
    compare(real[-2], got[-2])
    last, count = got[-2]["choices"][0], sum(len(event["choices"][0]["token_ids"]) for event in got[:-1])
    assert last["finish_reason"] == "abort"
    assert last["weight_versions"] == [{"version": "default", "start": 0, "end": count}]


def test_requests_of_a_pause_answer_as_recorded(recorded: VllmCaller) -> None:
    """Up to 0.32 they are queued in every mode: they run after it, or are aborted in it and have nothing."""
    running = recorded.begin_running(PROMPT, "kill-me")
    check(REPLAY["pause_default"], recorded.post("/pause?mode=abort"), "pause")
    check(OTHER["gen_pause_abort"], running.result(WAIT_S), "abort")
    queued = recorded.begin_tokens(PROMPT, 4, request_id="pp")
    completion = recorded.begin("/v1/completions", OTHER["request_while_paused"]["request"]["body"] | {"model": None})
    recorded.await_state(lambda state: state["waiting"] == 2, "two that wait")
    assert recorded.abort("generate-tokens-pp") == 1
    check(OTHER["gen_while_paused_aborted"], queued.result(WAIT_S), "abort")
    recorded.post("/resume")
    check(OTHER["request_while_paused"], completion.result(WAIT_S), "completion")


def test_the_other_abort_says_nothing(recorded: VllmCaller) -> None:
    """An empty 200, and the request ends all the same."""
    call = recorded.begin_running(PROMPT, "kill-me", sampling={"logprobs": 1})
    body = OTHER["inference_v1_abort_requests_generate-tokens-kill-me"]
    check(body, replay(recorded, body), "abort")
    name = "gen_aborted_inference_v1_abort_requests_generate-tokens-kill-me"
    check(OTHER[name], call.result(WAIT_S), name)


def test_a_core_that_hangs_answers_aborts_as_recorded(recorded: VllmCaller) -> None:
    """At once: the API server does it itself."""
    number = recorded.engine.add_fault(Fault(kind="freeze"))
    call = recorded.begin(GENERATE, asked([5, 6, 7], 4))
    recorded.await_state(lambda state: state["in_flight"] == 1, "a call in flight")
    check(OTHER["frozen_abort"], recorded.post("/abort_requests", {}), "abort")
    check(OTHER["frozen_generate"], call.result(WAIT_S), "abort")
    recorded.engine.clear_faults(number)
