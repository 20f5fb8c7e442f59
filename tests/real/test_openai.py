"""The OpenAI routes, once against the simulated engine and once against real SGLang."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import requests

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = [5, 6, 7, 8]
CHAT = [{"role": "user", "content": "hi"}]
COMPLETION: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
TALK: dict[str, Any] = {"messages": CHAT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
WHOLE = ["id", "object", "created", "model", "choices", "usage", "metadata"]
CHUNK = ["id", "object", "created", "model", "choices"]
USAGE = [
    *("prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"),
    *("reasoning_tokens", "completion_tokens_details"),
]


def post(url: str, path: str, body: Any) -> requests.Response:
    """One call on a connection of its own."""
    return requests.post(url + path, json=body, timeout=30, headers={"Connection": "close"})


def whole(url: str, path: str, body: Any) -> dict[str, Any]:
    """The answer to what must be answered."""
    answer = post(url, path, body)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def streamed(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, whose end mark is checked."""
    answer = post(url, path, body | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    *events, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_completion(llama_urls: Sequence[str]) -> None:
    """Names, their order, and counts."""
    answer = whole(llama_urls[0], COMPLETIONS, COMPLETION | {"return_token_ids": True})
    (choice,) = answer["choices"]
    assert [list(answer), list(answer["usage"])] == [WHOLE, USAGE]
    assert list(choice) == [
        *("index", "text", "logprobs", "finish_reason", "matched_stop"),
        *("token_ids", "prompt_token_ids"),
    ]
    assert [choice["prompt_token_ids"], len(choice["token_ids"])] == [PROMPT, 6]
    assert [choice["finish_reason"], choice["matched_stop"]] == ["length", None]
    assert [answer["usage"][name] for name in USAGE] == [4, 10, 6, None, 0, None]
    assert [answer["object"], answer["model"]] == ["text_completion", "default"]
    assert list(answer["metadata"]) == ["weight_version", "weight_versions"]


def test_a_chat(llama_urls: Sequence[str]) -> None:
    """The same; the prompt is what the template makes of it."""
    answer = whole(llama_urls[0], CHATS, TALK)
    (choice,) = answer["choices"]
    assert [list(answer), list(answer["usage"])] == [WHOLE, USAGE]
    assert list(choice) == ["index", "message", "logprobs", "finish_reason", "matched_stop"]
    assert list(choice["message"]) == ["role", "content", "reasoning_content"]
    assert answer["usage"]["completion_tokens"] == 6
    assert [answer["object"], choice["message"]["role"]] == ["chat.completion", "assistant"]


def test_copies(llama_urls: Sequence[str]) -> None:
    """Prompt-major; a prompt counts once."""
    body = COMPLETION | {"prompt": [PROMPT, [9, 10]], "n": 2}
    answer = whole(llama_urls[0], COMPLETIONS, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]] == [6, 24]


def test_logprobs(llama_urls: Sequence[str]) -> None:
    """Lists in a completion, entries in a chat."""
    told = whole(llama_urls[0], COMPLETIONS, COMPLETION | {"logprobs": 2})["choices"][0]["logprobs"]
    assert list(told) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert told["text_offset"] == [-1] * 6
    assert [len(told[name]) for name in ("token_logprobs", "tokens", "top_logprobs")] == [6, 6, 6]
    body = TALK | {"logprobs": True, "top_logprobs": 2}
    entries = whole(llama_urls[0], CHATS, body)["choices"][0]["logprobs"]["content"]
    assert [list(entry) for entry in entries] == [["token", "bytes", "logprob", "top_logprobs"]] * 6
    assert [list(top) for top in entries[0]["top_logprobs"]] == [["token", "bytes", "logprob"]] * 2


def test_a_streamed_completion(llama_urls: Sequence[str]) -> None:
    """Deltas that add up; the usage behind them leaves out what is null."""
    body = COMPLETION | {"stream_options": {"include_usage": True}, "max_tokens": 40}
    *chunks, usage = streamed(llama_urls[0], COMPLETIONS, body)
    assert {tuple(chunk) for chunk in chunks} == {(*CHUNK, "usage")}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {tuple(choice) for choice in choices} == {("index", "text", "logprobs", "finish_reason", "matched_stop")}
    assert (
        "".join(choice["text"] for choice in choices) == whole(llama_urls[0], COMPLETIONS, body)["choices"][0]["text"]
    )
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert usage["choices"] == []
    counts = {"prompt_tokens": 4, "total_tokens": 44, "completion_tokens": 40, "reasoning_tokens": 0}
    assert usage["usage"] == counts


def test_a_streamed_chat(llama_urls: Sequence[str]) -> None:
    """The role, the deltas, the reason, the usage."""
    body = TALK | {"stream_options": {"include_usage": True}, "max_tokens": 40}
    first, *chunks, last, usage = streamed(llama_urls[0], CHATS, body)
    assert [list(first), list(usage)] == [CHUNK, [*CHUNK, "usage"]]
    (choice,) = first["choices"]
    assert list(choice) == ["index", "delta", "logprobs", "finish_reason", "matched_stop"]
    assert choice["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == whole(llama_urls[0], CHATS, body)["choices"][0]["message"]["content"]
    assert last["choices"][0]["delta"] == {"reasoning_content": None}
    assert last["choices"][0]["finish_reason"] == "length"
    assert [list(usage["usage"]), usage["usage"]["completion_tokens"]] == [USAGE, 40]


def test_a_regex_stops(llama_urls: Sequence[str]) -> None:
    """It is told as it was given."""
    body = COMPLETION | {"max_tokens": 1500, "temperature": 1, "stop_regex": "[a-z]"}
    (choice,) = whole(llama_urls[0], COMPLETIONS, body)["choices"]
    assert [choice["finish_reason"], choice["matched_stop"]] == ["stop", "[a-z]"]
    broken = {"input_ids": PROMPT, "sampling_params": {"stop_regex": "(", "max_new_tokens": 4}}
    assert post(llama_urls[0], "/generate", broken).status_code == 500


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (COMPLETIONS, {}, "Bad Request"),
        (COMPLETIONS, [], "Bad Request"),
        (COMPLETIONS, {"prompt": ""}, "BadRequestError"),
        (COMPLETIONS, {"prompt": [[], []]}, "BadRequestError"),
        (COMPLETIONS, COMPLETION | {"max_tokens": 0}, "Bad Request"),
        (COMPLETIONS, COMPLETION | {"max_tokens": 10**6}, "BadRequestError"),
        (COMPLETIONS, COMPLETION | {"top_p": 3}, "BadRequestError"),
        (COMPLETIONS, COMPLETION | {"top_p": 3, "stream": True}, "BadRequestError"),
        (CHATS, {}, "Bad Request"),
        (CHATS, {"messages": "hi"}, "Bad Request"),
        (CHATS, {"messages": []}, "BadRequestError"),
        (CHATS, TALK | {"max_tokens": 10**6}, "BadRequestError"),
    ],
)
def test_refusals(llama_urls: Sequence[str], path: str, body: Any, kind: str) -> None:
    """One form for all of them."""
    answer = post(llama_urls[0], path, body)
    assert answer.status_code == 400, answer.text
    value = answer.json()
    assert list(value) == ["object", "message", "type", "param", "code"]
    assert [value[name] for name in ("object", "type", "param", "code")] == ["error", kind, None, 400]


def test_an_aborted_completion(llama_urls: Sequence[str]) -> None:
    """A result with a reason of its own."""
    body = COMPLETION | {"max_tokens": 2000, "rid": "openai-abort", "stream": True}
    with requests.post(llama_urls[0] + COMPLETIONS, json=body, timeout=30, stream=True) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith(b"data: {"))
        next(lines)
        post(llama_urls[0], "/abort_request", {"rid": "openai-abort"})
        *_, last = lines
    assert json.loads(last.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "abort"


def test_models(llama_urls: Sequence[str]) -> None:
    """One, by name; another is not found."""
    with requests.Session() as session:
        listed = session.get(f"{llama_urls[0]}/v1/models", timeout=10).json()
        missing = session.get(f"{llama_urls[0]}/v1/models/other", timeout=10)
    (card,) = listed["data"]
    assert list(card) == ["id", "object", "created", "owned_by", "root", "parent", "max_model_len"]
    assert card["max_model_len"] == 2048
    assert [missing.status_code, missing.json()["error"]["code"]] == [404, "model_not_found"]
