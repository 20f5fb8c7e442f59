"""The OpenAI routes and `/metrics`: the same generations in other words."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rolloutsync.sim import Fault, SimEngine, SimFleet
from rolloutsync.sim.openai_request import render
from rolloutsync.sim.tokenizer import Tokenizer
from rolloutsync.sim.tokens import expected_logprobs, expected_tokens

from .kit import WAIT_S, Caller, events, rows

VOCAB = 512
WORDS = Tokenizer(VOCAB)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi."}]}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def engine() -> Iterator[SimEngine]:
    """One engine with metrics that runs one request at a time and lets none wait for long."""
    fields: dict[str, Any] = {"max_running_requests": 1, "waiting_timeout_s": 0.1, "enable_metrics": True}
    with SimFleet(engines=1, vocab_size=VOCAB, tokens_per_second=1000.0, hidden_size=2, **fields) as fleet:
        yield fleet.engines[0]


@pytest.fixture
def before_the_guard(engine: SimEngine) -> None:
    """The shared engine outlives a test."""


@pytest.fixture
def api(engine: SimEngine) -> Iterator[Caller]:
    """Calls the engine, which is idle before and after."""
    engine.reset()
    with ThreadPoolExecutor(max_workers=4) as pool:
        yield Caller(engine, pool)
        engine.clear_faults()
        engine.call("POST", "/abort_request", {"abort_all": True})


def expected(ids: list[int], count: int) -> list[int]:
    """What the engine says."""
    return expected_tokens(ids, count, vocab_size=VOCAB)


def test_a_completion_is_the_generation_of_its_prompt(api: Caller) -> None:
    """Text, ids of both sides, counts, and 16 tokens where nothing else is wanted."""
    ids = WORDS.encode("once upon a time")
    body = {"model": "m", "prompt": "once upon a time", "ignore_eos": True, "return_token_ids": True}
    answer = api.post(COMPLETIONS, body).json
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected(ids, 16)
    assert choice["prompt_token_ids"] == ids
    assert choice["text"] == WORDS.decode(choice["token_ids"])
    assert (choice["finish_reason"], choice["matched_stop"], choice["logprobs"]) == ("length", None, None)
    assert (answer["object"], answer["model"]) == ("text_completion", "m")
    counts = answer["usage"]
    assert [counts["prompt_tokens"], counts["completion_tokens"]] == [len(ids), 16]
    assert counts["total_tokens"] == len(ids) + 16
    assert answer["metadata"]["weight_version"] == "default"


def test_a_chat_is_the_generation_of_its_template(api: Caller) -> None:
    """The template is public, so a test can say what comes."""
    ids = WORDS.encode(render(CHAT, CHATS))
    answer = api.post(CHATS, {"messages": CHAT, "max_tokens": 9, "ignore_eos": True}).json
    (choice,) = answer["choices"]
    text = WORDS.decode(expected(ids, 9))
    assert choice["message"] == {"role": "assistant", "content": text, "reasoning_content": None}
    assert (answer["object"], answer["model"]) == ("chat.completion", "default")
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_several_prompts_and_copies(api: Caller) -> None:
    """Prompt-major, each prompt counted once."""
    body = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    answer = api.post(COMPLETIONS, body).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    wanted = [expected([5, 6], 3)] * 2 + [expected([7], 3)] * 2
    assert [choice["token_ids"] for choice in answer["choices"]] == wanted
    assert [answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")] == [3, 12]


def test_logprobs_of_both_kinds(api: Caller) -> None:
    """Lists of a completion, entries of a chat; with `echo`, the prompt's as well."""
    body = {"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True, "logprobs": 2}
    told = api.post(COMPLETIONS, body).json["choices"][0]["logprobs"]
    ids = expected([5, 6], 4)
    assert told["token_logprobs"] == expected_logprobs([5, 6], ids)
    assert [told["tokens"], told["text_offset"]] == [[WORDS.decode([each]) for each in ids], [-1] * 4]
    assert all(len(row) == 2 for row in told["top_logprobs"])
    echoed = api.post(COMPLETIONS, body | {"echo": True}).json["choices"][0]
    assert echoed["text"].startswith(WORDS.decode([5, 6]))
    assert echoed["logprobs"]["token_logprobs"][2:] == told["token_logprobs"]
    chat = {"messages": CHAT, "max_tokens": 4, "ignore_eos": True, "logprobs": True, "top_logprobs": 1}
    entries = api.post(CHATS, chat).json["choices"][0]["logprobs"]["content"]
    prompt = WORDS.encode(render(CHAT, CHATS))
    assert [entry["logprob"] for entry in entries] == expected_logprobs(prompt, expected(prompt, 4))
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)
    assert {len(entry["top_logprobs"]) for entry in entries} == {1}


@pytest.mark.parametrize("stop", [{"stop": ["ka", "be"]}, {"stop_token_ids": list(range(300, 500))}])
def test_a_stop_is_told(api: Caller, stop: dict[str, Any]) -> None:
    """As `/generate` tells it, which does the work."""
    prompt = {"prompt": [5, 6], "max_tokens": 300, **stop}
    (choice,) = api.post(COMPLETIONS, prompt).json["choices"]
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 300, **stop}}
    reason = api.post("/generate", body).finish
    assert [choice["finish_reason"], choice["matched_stop"]] == ["stop", reason["matched"]]


def test_a_regex_stops_and_is_not_trimmed(api: Caller) -> None:
    """It is told as it was given, and the text ends with what it found."""
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "stop_regex": ["b[ae]$", "never"]}
    answer = api.post("/generate", {"input_ids": [5, 6], "sampling_params": sampling}).json
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b[ae]$"}
    assert answer["text"].endswith(("ba", "be"))
    assert answer["output_ids"] == expected([5, 6], len(answer["output_ids"]))
    broken = api.post("/generate", {"input_ids": [5], "sampling_params": {"stop_regex": "("}})
    assert broken.status == 500


def test_a_completion_can_be_streamed(api: Caller) -> None:
    """Deltas that add up to the whole, then the usage."""
    body = {"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    whole = api.post(COMPLETIONS, body).json
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last, done = events(api.post(COMPLETIONS, body | options))
    assert done == "[DONE]"
    assert len(chunks) > 1
    choices = [chunk["choices"][0] for chunk in chunks]
    (choice,) = whole["choices"]
    assert "".join(each["text"] for each in choices) == choice["text"]
    assert [token for each in choices for token in each["token_ids"]] == choice["token_ids"]
    logprobs = [value for each in choices for value in each["logprobs"]["token_logprobs"]]
    assert logprobs == choice["logprobs"]["token_logprobs"]
    assert [each["finish_reason"] for each in choices] == [None] * (len(choices) - 1) + ["length"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert last["usage"] == {name: value for name, value in whole["usage"].items() if value is not None}
    assert last["choices"] == []


def test_a_chat_can_be_streamed(api: Caller) -> None:
    """The role first, then deltas, then the reason, of each copy."""
    body = {"messages": CHAT, "max_tokens": 30, "ignore_eos": True, "n": 2}
    whole = api.post(CHATS, body).json
    *chunks, done = events(api.post(CHATS, body | {"stream": True}))
    assert done == "[DONE]"
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert mine[0]["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in mine)
        assert text == whole["choices"][index]["message"]["content"]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (COMPLETIONS, [], "Input should be a valid dictionary"),
        (COMPLETIONS, {}, "Field required"),
        (COMPLETIONS, {"prompt": 7}, "Input should be a valid string"),
        (COMPLETIONS, {"prompt": ""}, "Prompt cannot be empty"),
        (COMPLETIONS, {"prompt": [[], []]}, "Prompt cannot be empty"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens must be positive"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**6}, "maximum context length"),
        (COMPLETIONS, {"prompt": "a", "top_p": 3}, "top_p must be in"),
        (COMPLETIONS, {"prompt": "a", "top_p": 3, "stream": True}, "top_p must be in"),
        (CHATS, {"messages": []}, "Messages cannot be empty."),
        (CHATS, {"messages": "hi"}, "Input should be a valid list"),
        (CHATS, {"messages": [{"content": "hi"}]}, "Field required"),
        (CHATS, {"messages": CHAT, "max_tokens": 10**6}, "maximum context length"),
    ],
)
def test_what_cannot_be_right_is_an_error_object(api: Caller, path: str, body: Any, words: str) -> None:
    """Before any stream begins."""
    reply = api.post(path, body)
    assert reply.status == 400
    assert words in reply.json["message"]
    assert [reply.json[name] for name in ("object", "param", "code")] == ["error", None, 400]


def test_a_scheduler_refuses_in_the_same_words(api: Caller) -> None:
    """503 where there is no stream; in a stream an error is an event."""
    body = {"prompt": [5], "max_tokens": 4}
    running = api.begin(COMPLETIONS, body | {"max_tokens": 20_000, "ignore_eos": True, "rid": "long"})
    api.await_row("long", "running")
    words = "Request waiting timeout reached."
    error = {"object": "error", "message": words, "type": "503", "param": None, "code": 503}
    for path, fields in ((COMPLETIONS, body), ("/generate", {"input_ids": [5]})):
        reply = api.post(path, fields)
        assert [reply.status, reply.json] == [503, error]
    told = events(api.post(COMPLETIONS, body | {"stream": True}))
    assert told == [{"error": error | {"type": "SERVICE_UNAVAILABLE"}}, "[DONE]"]
    api.post("/abort_request", {"rid": "long"})
    assert running.result(WAIT_S).json["choices"][0]["finish_reason"] == "abort"


def test_the_ledger_and_the_faults_know_these_calls(api: Caller) -> None:
    """They are generations like any other."""
    api.engine.add_fault(Fault(kind="status", path=CHATS, status=418, times=1))
    assert api.post(CHATS, {"messages": CHAT}).status == 418
    assert api.post(COMPLETIONS, {"prompt": [5], "max_tokens": 2, "rid": "mine"}).status == 200
    state = api.engine.state()
    assert [row["state"] for row in rows(state, "mine")] == ["finished"]
    assert state["requests"] == {CHATS: 1, COMPLETIONS: 1}


def test_hidden_states_are_those_of_the_last_token(api: Caller) -> None:
    """And `/generate` gives them in full, for newer engines have no other value there."""
    body = {"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True}
    states = api.generate([5, 6], 4, return_hidden_states=True).json["meta_info"]["hidden_states"]
    for wanted, told in ((True, states[-1]), ("last", [states[-1]])):
        (choice,) = api.post(COMPLETIONS, body | {"return_hidden_states": wanted}).json["choices"]
        assert choice["hidden_states"] == told
    assert api.post("/generate", {"input_ids": [5], "return_hidden_states": "last"}).status == 400


def test_one_model_is_there(api: Caller) -> None:
    """And no other."""
    (card,) = api.get("/v1/models").json["data"]
    assert api.get("/v1/models/sim-model").json["id"] == card["id"] == "sim-model"
    missing = api.get("/v1/models/other/one")
    assert missing.status == 404
    assert missing.json["error"]["code"] == "model_not_found"


def sums(api: Caller) -> dict[tuple[str, str], float]:
    """Every sample of `/metrics` by name and whether it is of streams."""
    families = text_string_to_metric_families(api.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, sample.labels.get("is_streaming", "")): sample.value for sample in samples}


def test_metrics_count_what_was_done(api: Caller) -> None:
    """Under the real engine's names, streams apart from the rest."""
    before = sums(api)
    api.generate([5, 6, 7], 10)
    api.post(COMPLETIONS, {"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True, "stream": True})
    api.post("/abort_request", {"abort_all": True})
    api.post("/abort_request", {"rid": "nobody"})
    after = sums(api)
    changes = {key: value - before.get(key, 0.0) for key, value in after.items()}
    assert changes["sglang:num_requests_total", "false"] == changes["sglang:num_requests_total", "true"] == 1
    assert changes["sglang:prompt_tokens_total", "false"] == 3
    assert changes["sglang:generation_tokens_total", "true"] == 4
    assert changes["sglang:num_aborted_requests_total", ""] == 1
    assert changes["sglang:e2e_request_latency_seconds_count", "false"] == 1
    assert after["sglang:num_running_reqs", ""] == after["sglang:num_queue_reqs", ""] == 0
    assert after["sglang:max_total_num_tokens", ""] == 1_048_576


def test_metrics_leave_out_what_ends_in_the_queue(api: Caller) -> None:
    """As the real engine's do: an abort counts where it hits what runs."""
    before = sums(api)
    running = api.begin_generate([5], 20_000, rid="long")
    api.await_row("long", "running")
    assert api.post(COMPLETIONS, {"prompt": [5]}).status == 503
    (event, _) = events(api.post("/generate", {"input_ids": [5], "stream": True}))
    words = "Request waiting timeout reached."
    assert event["meta_info"]["finish_reason"] == {"type": "abort", "status_code": 503, "message": words}
    counted = {key: value for key, value in sums(api).items() if key[0].endswith("_total")}
    assert counted.items() <= before.items()
    api.post("/abort_request", {"rid": "long"})
    assert running.result(WAIT_S).finish["type"] == "abort"
    done = "sglang:num_requests_total", "false"
    assert sums(api)[done] == before.get(done, 0) + 1


def test_metrics_show_what_runs(api: Caller) -> None:
    """From the load snapshots, which come late."""
    call = api.begin_generate([5], 20_000, rid="long")
    api.await_row("long", "running")
    api.await_state(lambda _: sums(api)["sglang:num_running_reqs", ""] == 1, "a running request in the metrics")
    assert sums(api)["sglang:num_used_tokens", ""] > 0
    api.post("/abort_request", {"rid": "long"})
    assert call.result(WAIT_S).finish["type"] == "abort"


def test_metrics_are_off_unless_wanted(main: Caller) -> None:
    """As on the real engine."""
    assert main.get("/metrics").status == 404
