"""SGLang's ``/generate`` answer → a segment. Strict about what must agree, tolerant of what may be absent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rolloutsync.dialects.base import error_words
from rolloutsync.dialects.ids import token_ids
from rolloutsync.errors import ProtocolError, clip
from rolloutsync.payload import FEW, Rows, decode_experts, narrow, narrowest
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
    from rolloutsync.dialects.base import Experts
    from rolloutsync.sample import AnyArray, FloatArray, IntArray, Prompt

_DECODED = frozenset(
    (
        *("finish_reason", "routed_experts", "hidden_states", "input_token_logprobs", "output_token_logprobs"),
        *("input_top_logprobs", "output_top_logprobs"),
    )
)


_LEAST = -1e38  # well within float32


class _Answer:
    """One answer object with typed access to its parts."""

    __slots__ = ("finish", "meta", "prompt", "top")

    def __init__(self, answer: Any, prompt: Prompt, rid: str) -> None:
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]  # a proxy's one-element batch
        if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
            raise ProtocolError(f"the answer is not a completion: {_shown(answer)}")
        self.top: dict[str, Any] = answer
        self.meta: dict[str, Any] = answer["meta_info"]
        self.prompt = prompt
        self.finish = _finish(self.meta.get("finish_reason"))
        told = self.meta.get("id")
        if told is not None and told != rid:
            raise ProtocolError(f"the answer bears another request's id {told!r}, ours is {rid!r}")

    @property
    def whole(self) -> bool:
        """Whether it ran to its own end; an aborted one may lack anything."""
        return self.finish.type in {"stop", "length"}

    def number(self, key: str) -> int | None:
        value = self.meta.get(key)
        return value if type(value) is int else None  # true and false are of another type


def _shown(answer: Any) -> str:
    if isinstance(answer, dict) and (answer.get("error") or answer.get("object") == "error"):
        return error_words(answer)
    return clip(repr(answer), 200)


def decode(
    answer: Any, prompt: Prompt, rid: str, experts: Experts, dtype: str, *, cuts_rows: bool | None = None
) -> Segment:
    """The segment in one non-streamed ``/generate`` answer.

    Args:
        answer: The parsed body.
        prompt: What was sent.
        rid: The id that was sent.
        experts: The shape of the model's routing, as far as it is known.
        dtype: Of expert ids; "auto" for the narrowest.
        cuts_rows: Whether this engine obeys ``routed_experts_start_len``; None where that is not known.

    Raises:
        ProtocolError: It cannot be the answer to this request, or its parts disagree.
    """
    whole = _Answer(answer, prompt, rid)
    ids = _output_ids(whole)
    text = whole.top.get("text")
    wants = prompt.fields.get
    return Segment(
        finish=whole.finish,
        text=text if isinstance(text, str) else "",
        output_ids=ids,
        logprobs=_logprobs(whole, ids),
        weight_spans=_spans(whole, len(ids)),
        routed_experts=_experts(whole, len(ids), experts, dtype, cuts_rows) if wants("return_routed_experts") else None,
        prompt_logprobs=_prompt_logprobs(whole) if wants("return_logprob") else None,
        top_logprobs=_top_logprobs(whole, len(ids)) if wants("top_logprobs_num") else None,
        hidden_states=_hidden_states(whole) if wants("return_hidden_states") else None,
        prompt_ids=_prompt_ids(whole),
        prompt_tokens=whole.number("prompt_tokens"),
        cached_tokens=whole.number("cached_tokens"),
        dp_rank=whole.number("dp_rank"),
        meta_info=_rest(whole.meta),
    )


def _rest(meta: dict[str, Any]) -> dict[str, Any]:
    """What nobody has decoded, as sent; but ``indexer_topk`` as flat int32, where it is base64 of that."""
    rest = meta.copy()
    for key in _DECODED:
        rest.pop(key, None)
    if "indexer_topk" in rest and isinstance(topk := rest["indexer_topk"], (str, bytes)):
        try:
            rest["indexer_topk"] = decode_experts(topk)
        except ValueError as error:
            raise ProtocolError(f"indexer_topk: {error}") from None
    return rest


def _finish(reason: Any) -> Finish:
    if isinstance(reason, str):
        return Finish(type=reason)
    if not isinstance(reason, dict):
        return Finish()
    status = reason.get("status_code")
    number = int(status) if isinstance(status, int) else None
    return finish_of(str(reason.get("type") or ""), reason.get("matched"), reason.get("message"), number)


def _output_ids(answer: _Answer) -> IntArray:
    raw = answer.top.get("output_ids")
    if raw is None:
        rows = answer.meta.get("output_token_logprobs")
        if rows is None and answer.whole:
            raise ProtocolError("the answer has no output_ids")
        return _columns(rows or [], "output_token_logprobs")[1]
    ids = token_ids(raw, "output_ids")
    told = answer.number("completion_tokens")
    if answer.whole and told is not None and told != len(ids):
        raise ProtocolError(f"completion_tokens is {told}, but there are {len(ids)} output_ids")
    return ids


def _logprobs(answer: _Answer, ids: IntArray) -> FloatArray | None:
    rows = answer.meta.get("output_token_logprobs")
    if not answer.prompt.fields.get("return_logprob"):
        return None
    if rows is None and len(ids) == 0:
        return NO_LOGPROBS
    if isinstance(rows, Rows):
        first, named = rows
        return _checked(first, named, answer, ids)
    if not isinstance(rows, list) or len(rows) != len(ids):
        raise ProtocolError(f"{len(ids)} output_ids but {_length(rows)} output_token_logprobs")
    try:
        return _checked([row[0] for row in rows], [row[1] for row in rows], answer, ids)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ProtocolError(f"output_token_logprobs is not a list of [logprob, id, text]: {error}") from None


def _checked(numbers: list[Any], named: list[Any], answer: _Answer, ids: IntArray) -> FloatArray:
    """The logprobs of the tokens that are named beside them, which must be those of the answer."""
    if len(named) != len(ids):
        raise ProtocolError(f"{len(ids)} output_ids but {len(named)} output_token_logprobs")
    told = answer.top.get("output_ids")
    if told is not None and named != told:  # else the ids were read from these rows
        raise ProtocolError("output_token_logprobs are of other tokens than output_ids")
    values, finite = _floats(numbers)
    if not finite and not np.isfinite(values).all():
        raise ProtocolError(f"the logprob of output token {int(np.isfinite(values).argmin())} is NaN, null or infinite")
    return values


def _floats(numbers: list[Any]) -> tuple[FloatArray, bool]:
    """As float32, None as NaN and what is beyond as infinite; and whether all are surely finite (cheap, not exact)."""
    if len(numbers) <= FEW and _all_usual(numbers):
        return np.array(numbers, np.float32), True
    with np.errstate(over="ignore"):
        values = np.fromiter(numbers, np.float32, len(numbers))
        return values, math.isfinite(np.add.reduce(values))


def _all_usual(numbers: list[Any]) -> bool:
    """Whether they are numbers from ``_LEAST`` to 0: then their sum is no less, and no NaN."""
    try:
        return bool(numbers) and sum(numbers) > _LEAST and max(numbers) <= 0.0
    except TypeError:
        return False


def _length(rows: Any) -> str:
    return str(len(rows)) if isinstance(rows, list) else "no"


def _columns(rows: Any, name: str) -> tuple[FloatArray, IntArray]:
    """[[logprob, id, text], ...] as (float32 with NaN for null, int32)."""
    if isinstance(rows, Rows):
        return _floats(rows.first)[0], token_ids(rows.second, name)
    if not isinstance(rows, list):
        raise ProtocolError(f"{name} is a {type(rows).__name__}, not a list")
    if not rows:
        return NO_LOGPROBS, NO_TOKENS
    try:
        with np.errstate(over="ignore"):  # beyond float32 is infinite
            values = np.array([row[0] for row in rows], np.float32)  # None becomes NaN
        return values, token_ids([row[1] for row in rows], name)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ProtocolError(f"{name} is not a list of [logprob, id, text]: {error}") from None


def _spans(answer: _Answer, tokens: int) -> tuple[WeightSpan, ...]:
    """The engine's spans where they tile the output, else one span of the single version it names."""
    raw = answer.meta.get("weight_versions")
    if raw and isinstance(raw, list):
        spans = tuple(_span(item) for item in raw)
        ends = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != ends[:-1] or ends[-1] != tokens or sorted(ends) != ends:
            raise ProtocolError(f"weight_versions {raw!r} do not tile {tokens} output tokens")
        return tuple(span for span in spans if span.end > span.start)
    version = answer.meta.get("weight_version")
    return whole_span(None if version is None else str(version), tokens)


def _span(item: Any) -> WeightSpan:
    try:
        version = item["version"]
        return WeightSpan(None if version is None else str(version), int(item["start"]), int(item["end"]))
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ProtocolError(f"weight_versions holds {item!r}") from None


def _experts(answer: _Answer, tokens: int, experts: Experts, dtype: str, cuts_rows: bool | None) -> AnyArray | None:
    raw = answer.meta.get("routed_experts")
    if raw is None:
        if answer.whole:
            flag = "--enable-return-routed-experts"
            raise ProtocolError(f"no routed_experts in the answer: the engine must be started with {flag}")
        return None
    try:
        flat = decode_experts(raw)
        rows = _expert_rows(answer, tokens)
        start = int(answer.prompt.fields.get("routed_experts_start_len") or 0)
        shaped = _shape_experts(flat, rows, start, experts, cuts_rows)
        return narrow(shaped, narrowest(experts.count) if dtype == "auto" else dtype)
    except ValueError as error:
        raise ProtocolError(f"routed_experts: {error}") from None


def _expert_rows(answer: _Answer, tokens: int) -> int:
    """Rows of the whole sequence: one for each token but the last. The engine's own prompt count: images expand."""
    prompt_tokens = answer.number("prompt_tokens")
    if prompt_tokens is None and answer.prompt.input_ids is not None:
        prompt_tokens = len(answer.prompt.input_ids)
    if prompt_tokens is None:
        raise ValueError("the answer does not say how many prompt tokens there were")
    return prompt_tokens + tokens - 1


def _shape_experts(flat: AnyArray, rows: int, start: int, experts: Experts, cuts_rows: bool | None) -> AnyArray:
    """[rows - start, layers, topk]; an engine that ignored ``start`` sent all rows, and the first ones are cut."""
    wanted = max(0, rows - start)
    width = experts.layers * experts.topk if experts.layers and experts.topk else None
    fits = [sent for sent in _rows_sent(wanted, rows, cuts_rows, width) if _fits(flat.size, sent, width)]
    if not fits:
        raise ValueError(f"{flat.size} values are not {wanted} rows of {width or 'some'} values")
    if len(fits) > 1 and width is None:
        raise ValueError(f"{flat.size} values may be {fits[0]} or {fits[1]} rows: pass routed_experts_shape=")
    table = flat.reshape(fits[0], width or (flat.size // fits[0] if fits[0] else 0))[fits[0] - wanted :]
    return table.reshape(wanted, experts.layers or 0, experts.topk or 0) if width else table


def _rows_sent(wanted: int, rows: int, cuts_rows: bool | None, width: int | None) -> list[int]:
    """How many rows there may be. The version decides where the size alone cannot, for want of a known width."""
    if cuts_rows is None or width is not None:
        return list(dict.fromkeys((wanted, rows)))
    return [wanted if cuts_rows else rows]


def _fits(size: int, rows: int, width: int | None) -> bool:
    if rows <= 0 or size == 0:
        return rows == size == 0
    return size == rows * width if width else size % rows == 0


def _prompt_logprobs(answer: _Answer) -> FloatArray | None:
    rows = answer.meta.get("input_token_logprobs")
    if not isinstance(rows, list) or not rows:
        return None
    return _columns(rows, "input_token_logprobs")[0]


def _top_logprobs(answer: _Answer, tokens: int) -> TopLogprobs | None:
    rows = answer.meta.get("output_top_logprobs")
    if not isinstance(rows, list):
        return None
    lines = [row or [] for row in rows]
    if not all(isinstance(line, list) for line in lines):
        raise ProtocolError("output_top_logprobs holds something that is not a list")
    if len(lines) != tokens or len(set(map(len, lines))) > 1:
        raise ProtocolError(f"output_top_logprobs has {len(rows)} rows for {tokens} tokens, or rows of unequal length")
    flat = [entry for line in lines for entry in line]
    values, ids = _columns(flat, "output_top_logprobs")
    return TopLogprobs(ids.reshape(tokens, -1), values.reshape(tokens, -1)) if flat else None


def _hidden_states(answer: _Answer) -> AnyArray | None:
    """Prefill chunks of rows, then one row for each decoded token, as one float32 [rows, hidden]."""
    parts = answer.meta.get("hidden_states")
    if not isinstance(parts, list) or not parts:
        return None
    try:
        with np.errstate(over="ignore"):
            return np.concatenate([np.atleast_2d(np.array(part, np.float32)) for part in parts])
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"hidden_states are not rows of numbers: {error}") from None


def _prompt_ids(answer: _Answer) -> IntArray | None:
    raw = answer.top.get("prompt_token_ids")
    return token_ids(raw, "prompt_token_ids") if isinstance(raw, list) else None
