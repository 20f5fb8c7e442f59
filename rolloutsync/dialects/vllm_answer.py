"""vLLM's answers → a segment: of the token route and of completions. Strict about what must agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rolloutsync.dialects.base import error_words
from rolloutsync.dialects.ids import token_ids
from rolloutsync.dialects.vllm_request import SAYS_ID_SINCE, known_version
from rolloutsync.errors import ProtocolError, clip, shown
from rolloutsync.payload import decode_experts, narrow, narrowest
from rolloutsync.sample import (
    NO_LOGPROBS,
    NO_TOKENS,
    Finish,
    Segment,
    TopLogprobs,
    WeightSpan,
    finish_of,
    whole_span,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutsync.dialects.base import Facts
    from rolloutsync.sample import AnyArray, FloatArray, IntArray, Prompt

Entry = tuple[int, Any]  # a token id and its logprob
_TOKENS_ID, _COMPLETIONS_ID = "generate-tokens-", "cmpl-"
_WHOLE = {"stop", "length"}
_REPETITION = "repetition"  # of a pattern that the request wanted to be ended by
_FAILED = "error"
_NO_LOGPROB = -9999.0  # what the engine says where it has none
_TOKEN_ID = "token_id:"  # noqa: S105 - the prefix of a token's name
_DECODED = ("choices", "prompt_logprobs", "prompt_token_ids", "prompt_token_id_logprobs")


class _Answer:
    """One answer with typed access to its parts, whichever route it came by."""

    def __init__(self, answer: Any, prompt: Prompt, rid: str, facts: Facts) -> None:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise ProtocolError(f"the answer is not a completion: {_shown(answer)}")
        self.top: dict[str, Any] = answer
        self.choice: dict[str, Any] = choices[0]
        self.prompt = prompt
        self.from_completions = answer.get("object") == "text_completion"
        self._check_id(rid, facts)
        self.finish = _finish(self.choice)
        self.prompt_ids = self._prompt_ids()

    def _check_id(self, rid: str, facts: Facts) -> None:
        """The answer must bear our id, in the form of its route; the token route does not say it up to 0.24."""
        form = _COMPLETIONS_ID if self.from_completions else _TOKENS_ID
        told = self.top.get("id" if self.from_completions else "request_id")
        if told == form + rid:
            return
        version = known_version(facts)
        says = self.from_completions or version >= SAYS_ID_SINCE or str(told).startswith(form)
        if says or not isinstance(told, str):
            raise ProtocolError(f"the answer bears another request's id {shown(told)}, ours is {form + rid!r}")

    def _prompt_ids(self) -> IntArray | None:
        """The prompt's token ids as the engine tells them; those that we sent must come back."""
        raw = (self.choice if self.from_completions else self.top).get("prompt_token_ids")
        sent = self.prompt.input_ids
        if not isinstance(raw, list):
            return None
        ids = token_ids(raw, "prompt_token_ids")
        if sent is not None and not np.array_equal(ids, sent):
            raise ProtocolError(f"the answer is to another prompt of {len(ids)} tokens, ours has {len(sent)}")
        return ids

    def wants(self, field: str) -> bool:
        return bool(self.prompt.fields.get(field))

    @property
    def whole(self) -> bool:
        """Whether it ran to its own end; an aborted one may lack anything."""
        return self.finish.type in _WHOLE

    def used(self, *path: str) -> int | None:
        """A number in the usage."""
        value: Any = self.top.get("usage")
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def prompt_tokens(self) -> int | None:
        """Of the prompt, as the engine counts them."""
        ids = self.prompt_ids if self.prompt_ids is not None else self.prompt.input_ids
        told = self.used("prompt_tokens")
        return told if told is not None or ids is None else len(ids)


def _shown(answer: Any) -> str:
    if isinstance(answer, dict) and answer.get("error"):
        return error_words(answer)
    return clip(repr(answer), 200)


def decode(answer: Any, prompt: Prompt, rid: str, facts: Facts, dtype: str) -> Segment:
    """The segment in one answer that was read whole.

    Args:
        answer: The parsed body.
        prompt: What was sent.
        rid: The id that was sent.
        facts: Of the engine.
        dtype: Of expert ids; "auto" for the narrowest.

    Raises:
        ProtocolError: It cannot be the answer to this request, or its parts disagree.
    """
    whole = _Answer(answer, prompt, rid, facts)
    ids, text = _output_ids(whole), whole.choice.get("text")
    rows = _logprob_rows(whole, len(ids))
    return Segment(
        finish=whole.finish,
        text=text if isinstance(text, str) else "",
        output_ids=ids,
        logprobs=_logprobs(rows, ids),
        weight_spans=_spans(whole, len(ids)),
        routed_experts=_experts(whole, len(ids), facts, dtype),
        prompt_logprobs=_prompt_logprobs(whole),
        top_logprobs=_top_logprobs(whole, rows),
        prompt_ids=whole.prompt_ids if prompt.input_ids is None else None,
        prompt_tokens=whole.prompt_tokens,
        cached_tokens=whole.used("prompt_tokens_details", "cached_tokens"),
        meta_info=_meta_info(whole),
    )


def _meta_info(answer: _Answer) -> dict[str, Any]:
    rest = {key: value for key, value in answer.top.items() if key not in _DECODED and value is not None}
    own = ("finish_reason", "stop_reason", "weight_versions", "sampling_mask")
    return rest | {key: answer.choice[key] for key in own if answer.choice.get(key) is not None}


def _finish(choice: dict[str, Any]) -> Finish:
    """The end in our words: a repetition is one that the request asked for, an error an abort by the engine."""
    reason, matched = choice.get("finish_reason"), choice.get("stop_reason")
    if reason == _REPETITION:
        return Finish(type="stop", matched=matched, message=_REPETITION)
    if reason == _FAILED:
        return Finish(type="abort", message="the engine says finish_reason 'error'", status_code=500)
    return finish_of(reason if isinstance(reason, str) else "", matched)


def _output_ids(answer: _Answer) -> IntArray:
    raw = answer.choice.get("token_ids")
    if raw is None and not answer.whole:
        return NO_TOKENS
    ids, told = token_ids(raw, "token_ids"), answer.used("completion_tokens")
    if answer.whole and told is not None and told != len(ids):
        raise ProtocolError(f"completion_tokens is {told}, but there are {len(ids)} token_ids")
    return ids


# --- logprobs ---------------------------------------------------------------------------------------------------------


def _logprob_rows(answer: _Answer, tokens: int) -> list[tuple[Entry, list[Entry]]] | None:
    """(the token's own entry, the likeliest entries) at each position; None if logprobs were not asked for."""
    if not answer.wants("return_logprob"):
        return None
    raw = answer.choice.get("logprobs")
    if raw is None and not tokens:
        return []
    if not isinstance(raw, dict):
        raise ProtocolError(f"{tokens} token_ids but no logprobs")
    try:
        rows = _columns_to_rows(raw) if answer.from_completions else [_row(item) for item in raw.get("content") or ()]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ProtocolError(f"the logprobs are not what was asked for: {clip(repr(error), 200)}") from None
    if len(rows) != tokens:
        raise ProtocolError(f"{tokens} token_ids but {len(rows)} logprobs")
    return rows


def _row(item: dict[str, Any]) -> tuple[Entry, list[Entry]]:
    """An entry of the token route; up to 0.31 it names tokens ``token_id:5``."""
    return (_id_of(item), item["logprob"]), [(_id_of(top), top["logprob"]) for top in item.get("top_logprobs") or ()]


def _id_of(item: dict[str, Any]) -> int:
    told = item.get("token_id")
    return told if isinstance(told, int) else _named_id(item["token"])


def _named_id(name: str) -> int:
    if not name.startswith(_TOKEN_ID):
        raise ValueError(f"token {name!r} is not named by its id")
    return int(name.removeprefix(_TOKEN_ID))


def _columns_to_rows(raw: dict[str, Any]) -> list[tuple[Entry, list[Entry]]]:
    """The columns of a completion, whose likeliest tokens are a mapping."""
    names, values = raw["tokens"], raw["token_logprobs"]
    tops = raw.get("top_logprobs") or [None] * len(names)
    if not len(names) == len(values) == len(tops):
        raise ValueError(f"columns of {len(names)}, {len(values)} and {len(tops)}")
    return [
        ((_named_id(name), value), [(_named_id(other), held) for other, held in (top or {}).items()])
        for name, value, top in zip(names, values, tops, strict=True)
    ]


def _logprobs(rows: list[tuple[Entry, list[Entry]]] | None, ids: IntArray) -> FloatArray | None:
    if rows is None:
        return None
    if not rows:
        return NO_LOGPROBS
    values = _floats([value for (_, value), _ in rows], "logprobs")
    if [token for (token, _), _ in rows] != ids.tolist():
        raise ProtocolError("the logprobs are of other tokens than token_ids")
    real = np.isfinite(values) & (values > _NO_LOGPROB)
    if not real.all():
        raise ProtocolError(f"the logprob of output token {int(real.argmin())} is missing")
    return values


def _floats(values: list[Any], name: str) -> FloatArray:
    """float32, NaN for null."""
    if any(isinstance(value, (bool, str)) for value in values):
        raise ProtocolError(f"{name} hold something that is not a number")
    try:
        with np.errstate(over="ignore"):
            return np.array(values, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{name} hold something that is not a number: {error}") from None


def _top_logprobs(answer: _Answer, rows: list[tuple[Entry, list[Entry]]] | None) -> TopLogprobs | None:
    """The k likeliest. The engine puts the sampled token first, whether it is one of them or not."""
    wanted = int(answer.prompt.fields.get("top_logprobs_num") or 0)
    if not wanted or not rows:
        return None
    lines = [_likeliest(top, wanted) for _, top in rows]
    if len(set(map(len, lines))) > 1:
        raise ProtocolError("top_logprobs are of unequal number")
    ids = [token for line in lines for token, _ in line]
    values = _floats([value for line in lines for _, value in line], "top_logprobs")
    return TopLogprobs(token_ids(ids, "top_logprobs").reshape(len(rows), -1), values.reshape(len(rows), -1))


def _likeliest(top: list[Entry], wanted: int) -> list[Entry]:
    """The first of them by value; one token named twice would be two tokens' values under one id."""
    if len({token for token, _ in top}) != len(top):
        raise ProtocolError("top_logprobs name a token twice")
    try:
        return sorted(top, key=_value, reverse=True)[:wanted]
    except TypeError:
        raise ProtocolError("top_logprobs hold something that is not a number") from None


_value: Callable[[Entry], Any] = lambda entry: entry[1]  # noqa: E731


def _prompt_logprobs(answer: _Answer) -> FloatArray | None:
    """From ``logprob_start_len`` on; the first token of a prompt has none."""
    start = answer.prompt.fields.get("logprob_start_len")
    if not answer.wants("return_logprob") or start is None or int(start) < 0:
        return None
    raw = (answer.choice if answer.from_completions else answer.top).get("prompt_logprobs")
    ids = answer.prompt.input_ids if answer.prompt.input_ids is not None else answer.prompt_ids
    if not isinstance(raw, list) or ids is None or len(raw) != len(ids):
        if answer.whole:
            raise ProtocolError(f"prompt_logprobs are {_count(raw)} for {_count(ids)} prompt tokens")
        return None
    pairs = list(zip(raw, ids.tolist(), strict=True))[int(start) :]
    return _floats([None if row is None else _own(row, token) for row, token in pairs], "prompt_logprobs")


def _own(row: Any, token: int) -> Any:
    try:
        return row[str(token)]["logprob"]
    except (TypeError, KeyError):
        raise ProtocolError(f"prompt_logprobs have nothing for token {token}") from None


def _count(items: Any) -> str:
    return str(len(items)) if isinstance(items, (list, np.ndarray)) else "none"


# --- weights and experts ----------------------------------------------------------------------------------------------


def _spans(answer: _Answer, tokens: int) -> tuple[WeightSpan, ...]:
    """The engine's spans, which must tile the output; one without a version where it does not say (up to 0.31)."""
    raw = answer.choice.get("weight_versions")
    if not isinstance(raw, list) or (not raw and tokens):
        return whole_span(None, tokens)
    spans = tuple(_span(item) for item in raw)
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != tokens or sorted(ends) != ends:
        raise ProtocolError(f"weight_versions {shown(raw)} do not tile {tokens} output tokens")
    return tuple(span for span in spans if span.end > span.start)


def _span(item: Any) -> WeightSpan:
    try:
        version = item["version"]
        return WeightSpan(None if version is None else str(version), int(item["start"]), int(item["end"]))
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ProtocolError(f"weight_versions holds {shown(item)}") from None


def _experts(answer: _Answer, tokens: int, facts: Facts, dtype: str) -> AnyArray | None:
    """[rows, layers, topk]: one row for each token but the last, from ``routed_experts_start_len`` on."""
    if not answer.wants("return_routed_experts"):
        return None
    raw = answer.choice.get("routed_experts")
    if raw is None:
        if answer.whole:
            flag = "--enable-return-routed-experts"
            raise ProtocolError(f"no routed_experts in the answer: vLLM must be started with {flag}")
        return None
    try:
        rows = _rows_of(decode_experts(raw), answer, tokens)
        return narrow(rows, narrowest(facts.experts.count) if dtype == "auto" else dtype)
    except ValueError as error:
        raise ProtocolError(f"routed_experts: {error}") from None


def _rows_of(table: AnyArray, answer: _Answer, tokens: int) -> AnyArray:
    """The rows that were asked for; an engine that does not know the field sent all, and the first ones are cut.

    An aborted request may have fewer: its first ones, and a resume asks for those behind them.
    """
    if table.ndim != 3:
        raise ValueError(f"the shape is {table.shape}, not [rows, layers, topk]")
    if answer.prompt_tokens is None:
        raise ValueError("the answer does not say how many prompt tokens there were")
    every = answer.prompt_tokens + tokens - 1
    start = int(answer.prompt.fields.get("routed_experts_start_len") or 0)
    wanted = max(0, every - start)
    if not answer.whole and not start and len(table) < wanted:
        return table
    if len(table) not in {wanted, every}:
        raise ValueError(f"there are {len(table)} rows, not {wanted}")
    return table[len(table) - wanted :]
