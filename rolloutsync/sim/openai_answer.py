"""OpenAI answers made of `/generate` answers: whole ones, and the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rolloutsync.sim.openai_request import OpenAIRequest

Json = dict[str, Any]
Whole = Callable[[OpenAIRequest, list[Json]], Json]


def whole_completion(request: OpenAIRequest, answers: list[Json]) -> Json:
    """The answer of `/v1/completions`."""
    return _whole(request, answers, "text_completion", [_completion(request, *each) for each in enumerate(answers)])


def whole_chat(request: OpenAIRequest, answers: list[Json]) -> Json:
    """The answer of `/v1/chat/completions`."""
    return _whole(request, answers, "chat.completion", [_chat(request, *each) for each in enumerate(answers)])


def _whole(request: OpenAIRequest, answers: list[Json], kind: str, choices: list[Json]) -> Json:
    metas = [answer["meta_info"] for answer in answers]
    names = ("weight_version", "weight_versions")
    whole = _head(request, metas[0]["id"], kind, int(time.time())) | {
        "choices": choices,
        "usage": usage(request, metas),
    }
    whole["metadata"] = {name: metas[0][name] for name in names if name in metas[0]}
    experts = metas[0].get("routed_experts")
    return whole | ({"sglext": {"routed_experts": experts}} if experts else {})


def _completion(request: OpenAIRequest, index: int, answer: Json) -> Json:
    echo = request.echoes[index // request.n] if request.echoes else ""
    logprobs = _completion_logprobs(answer["meta_info"], 0, inputs=bool(echo)) if request.logprobs else None
    choice = {"index": index, "text": echo + answer["text"], "logprobs": logprobs} | _ending(answer["meta_info"])
    return choice | _extras(request, answer, "token_ids")


def _chat(request: OpenAIRequest, index: int, answer: Json) -> Json:
    message = {"role": "assistant", "content": answer["text"], "reasoning_content": None}
    logprobs = _chat_logprobs(answer["meta_info"], 0) if request.logprobs else None
    choice = {"index": index, "message": message, "logprobs": logprobs} | _ending(answer["meta_info"])
    return choice | _extras(request, answer, "response_token_ids")


def _head(request: OpenAIRequest, rid: str, kind: str, created: int) -> Json:
    return {"id": rid, "object": kind, "created": created, "model": request.model}


def _ending(meta: Json) -> Json:
    reason = meta["finish_reason"] or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def _extras(request: OpenAIRequest, answer: Json, ids_name: str) -> Json:
    extras = {}
    if request.token_ids:
        extras[ids_name] = answer["output_ids"]
    if request.prompt_token_ids and "prompt_token_ids" in answer:
        extras["prompt_token_ids"] = answer["prompt_token_ids"]
    if (hidden := answer["meta_info"].get("hidden_states")) is not None:
        extras["hidden_states"] = _shown(hidden, request.generate.get("return_hidden_states"))
    return extras


def _shown(hidden: list[Any], mode: Any) -> list[Any]:
    """Only the last token's hidden state is shown, and of a prefill alone none."""
    if mode == "last":
        return hidden
    last: list[Any] = hidden[-1] if len(hidden) > 1 else []
    return last


def usage(request: OpenAIRequest, metas: Iterable[Json]) -> Json:
    """Token counts of a whole call; the copies of a prompt count it once."""
    given = list(metas)
    prompt = sum(meta.get("prompt_tokens", 0) for meta in given[:: request.n])
    completion = sum(meta.get("completion_tokens", 0) for meta in given)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def _completion_logprobs(meta: Json, start: int, *, inputs: bool) -> Json:
    triples = [*(meta.get("input_token_logprobs") or []) * inputs, *(meta.get("output_token_logprobs") or [])[start:]]
    rows = [*(meta.get("input_top_logprobs") or []) * inputs, *(meta.get("output_top_logprobs") or [])[start:]]
    return {
        "text_offset": [-1] * len(triples),
        "token_logprobs": [value for value, _, _ in triples],
        "tokens": [text or "" for _, _, text in triples],
        "top_logprobs": [None if row is None else {text or "": value for value, _, text in row} for row in rows],
    }


def _chat_logprobs(meta: Json, start: int) -> Json:
    triples = (meta.get("output_token_logprobs") or [])[start:]
    rows = (meta.get("output_top_logprobs") or [])[start:] or [None] * len(triples)
    content = [
        _token(*triple) | {"top_logprobs": [_token(*top) for top in row or []]}
        for triple, row in zip(triples, rows, strict=True)
    ]
    return {"content": content}


def _token(value: float, _: int, text: str | None) -> Json:
    return {"token": text or "", "bytes": list((text or "").encode()), "logprob": value}


class Chunks:
    """The chunks of one stream, made of the events of `/generate`, which hold everything so far."""

    def __init__(self, request: OpenAIRequest, *, chat: bool) -> None:
        self._request = request
        self._chat = chat
        self._kind = "chat.completion.chunk" if chat else "text_completion"
        self._created = int(time.time())
        self._texts: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._metas: dict[int, Json] = {}

    def of(self, event: Json) -> Iterator[Json]:
        """Returns the chunks for what an event adds."""
        index, meta = event.get("index", 0), event["meta_info"]
        first, sent = index not in self._texts, self._texts.get(index, 0)
        delta, self._texts[index] = event["text"][sent:], len(event["text"])
        known, self._tokens[index] = self._tokens.get(index, 0), len(event.get("output_ids", ()))
        self._metas[index] = meta
        if self._chat:
            yield from self._chat_chunks(index, meta, delta, known, first=first)
        else:
            yield self._completion_chunk(index, event, delta, known, first=first)

    def end(self) -> Iterator[Json]:
        """Returns the chunks behind the last event."""
        for index, meta in self._metas.items() if self._chat else ():
            yield self._chunk(meta, [self._chat_choice(index, {"reasoning_content": None}, **_ending(meta))])
        if self._request.usage_at_end and self._metas:
            last = next(reversed(self._metas.values()))
            yield self._chunk(last, []) | {"usage": self._whole_usage()}

    def _whole_usage(self) -> Json:
        """The usage of all; that of completions leaves out what is null."""
        whole = usage(self._request, [self._metas[index] for index in sorted(self._metas)])
        return whole if self._chat else {name: value for name, value in whole.items() if value is not None}

    def _chat_chunks(self, index: int, meta: Json, delta: str, known: int, *, first: bool) -> Iterator[Json]:
        if first:
            role = {"reasoning_content": None, "role": "assistant", "content": ""}
            yield self._chunk(meta, [self._chat_choice(index, role)])
        if delta:
            logprobs = _chat_logprobs(meta, known) if self._request.logprobs else None
            choice = self._chat_choice(index, {"reasoning_content": None, "content": delta}, logprobs=logprobs)
            yield self._chunk(meta, [choice]) | self._usage_so_far(meta)

    def _completion_chunk(self, index: int, event: Json, delta: str, known: int, *, first: bool) -> Json:
        request, meta = self._request, event["meta_info"]
        echo = request.echoes[index // request.n] if first and request.echoes else ""
        logprobs = _completion_logprobs(meta, known, inputs=bool(echo)) if request.logprobs else None
        choice = {"index": index, "text": echo + delta, "logprobs": logprobs} | _ending(meta)
        if request.token_ids:
            choice["token_ids"] = event["output_ids"][known:]
        return self._chunk(meta, [choice]) | {"usage": None} | self._usage_so_far(meta)

    def _usage_so_far(self, meta: Json) -> Json:
        return {"usage": usage(self._request, [meta])} if self._request.usage_in_chunks else {}

    def _chunk(self, meta: Json, choices: list[Json]) -> Json:
        return _head(self._request, meta["id"], self._kind, self._created) | {"choices": choices}

    @staticmethod
    def _chat_choice(index: int, delta: Json, **more: Any) -> Json:
        rest = {"logprobs": None, "finish_reason": None, "matched_stop": None}
        return {"index": index, "delta": delta} | rest | more
