"""What goes in and what comes out: prompts, samples, and the pure functions that extend a sample by a segment."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pybase64

from rolloutsync.errors import RolloutError

if TYPE_CHECKING:
    from collections.abc import Mapping

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
AnyArray = npt.NDArray[Any]

NO_TOKENS: IntArray = np.empty(0, np.int32)
NO_LOGPROBS: FloatArray = np.empty(0, np.float32)


class Status(str, Enum):
    """How a sample ended. Each sample ends exactly once."""

    COMPLETED = "COMPLETED"  # the model stopped
    TRUNCATED = "TRUNCATED"  # max_new_tokens reached
    ABORTED = "ABORTED"  # cut short by an abort: a partial
    FAILED = "FAILED"  # sample.error says why

    __hash__ = str.__hash__  # the enum's own takes a microsecond, and each sample is counted by it

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Finish:
    """The engine's own words for why it stopped.

    Attributes:
        type: "stop", "length" or "abort"; "" where the engine did not say.
        matched: Token id, string or ids that stopped it.
        message: For an abort.
        status_code: For an abort that is an error of the engine.
    """

    type: str = ""
    matched: Any = None
    message: str | None = None
    status_code: int | None = None


class WeightSpan(NamedTuple):
    """Output tokens ``start`` to ``end`` (exclusive) and the weights that made them (None: the engine did not say)."""

    version: str | None
    start: int
    end: int


# Answers are much alike, and what is alike is one object: each is one more that the garbage collector has to visit.
_shared = lru_cache(maxsize=1024, typed=True)


@_shared
def whole_span(version: str | None, tokens: int) -> tuple[WeightSpan, ...]:
    """The spans of an output that one version has made; none where it is empty."""
    return (WeightSpan(version, 0, tokens),) if tokens else ()


_usual_finish = _shared(Finish)


def finish_of(kind: str, matched: Any, message: Any = None, status_code: int | None = None) -> Finish:
    """``Finish`` with these fields."""
    if kind in _STATUS_OF and message is status_code is None and (matched is None or type(matched) is int):
        return _usual_finish(kind, matched)
    return Finish(kind, matched, message, status_code)


class TopLogprobs(NamedTuple):
    """The k likeliest tokens at each output position: ids int32[T, k] and values float32[T, k]."""

    ids: IntArray
    values: FloatArray


class Timing(NamedTuple):
    """Seconds: waiting for an engine the first time, inside engine calls, and from admission to the end."""

    queued_s: float = 0.0
    engine_s: float = 0.0
    total_s: float = 0.0


NO_TIME = Timing()


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What to continue. Exactly one of ``input_ids`` and ``text`` is given, or both where the engine told the ids.

    Attributes:
        input_ids: int32[P], or None.
        text: or None.
        sampling_params: In the engine's words.
        image_data: Sent through.
        metadata: Yours; never sent; shallow-copied for each sample.
        fields: Further top-level request fields, sent through.
    """

    input_ids: IntArray | None = None
    text: str | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    image_data: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)  # not frozen: one is made for each answer, and a frozen one takes three times as long
class Segment:
    """One engine answer, decoded: what it adds to a sample. Never changed."""

    finish: Finish
    text: str = ""
    output_ids: IntArray = field(default_factory=lambda: NO_TOKENS)
    logprobs: FloatArray | None = None
    weight_spans: tuple[WeightSpan, ...] = ()
    routed_experts: AnyArray | None = None
    prompt_logprobs: FloatArray | None = None
    top_logprobs: TopLogprobs | None = None
    hidden_states: AnyArray | None = None
    prompt_ids: IntArray | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    dp_rank: int | None = None
    meta_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion of one prompt. Frozen; arrays are numpy and own their memory.

    Attributes:
        prompt: What was continued.
        index: Position of the prompt in the batch.
        member: Position in its group, 0 to n-1.
        rid: Request id of the last attempt.
        status: See ``Status``.
        finish: The engine's reason; None where no engine answered.
        text: For display; ``output_ids`` are the truth.
        output_ids: int32[T].
        logprobs: float32[T], or None if not asked for.
        weight_spans: Tile the output: which weight version made which tokens.
        routed_experts: [prompt_tokens + T - 1, layers, topk] (or [.., layers*topk] where the shape is unknown).
        prompt_logprobs: float32 from ``logprob_start_len`` on; the first of the prompt is NaN.
        top_logprobs: (ids, values) of the k likeliest, or None.
        hidden_states: float32 [rows, hidden], or None; of a resumed sample, what its last answer brought.
        prompt_tokens: As the engine counts them (images expand); None if it did not say.
        cached_tokens: Of the prompt, found in the engine's prefix cache.
        dp_rank: That ran it, or None.
        engine: URL of the engine that answered last, or None if it was never sent.
        attempts: Requests sent for it, those before a resume included.
        timing: Seconds, see ``Timing``.
        error: Why it FAILED, else None.
        meta_info: The engine's other meta_info fields, as sent.
        metadata: A shallow copy of the prompt's.
        reward: None; ``dataclasses.replace`` it.
    """

    prompt: Prompt
    index: int
    member: int
    rid: str = ""
    status: Status = Status.ABORTED
    finish: Finish | None = None
    text: str = ""
    output_ids: IntArray = field(default_factory=lambda: NO_TOKENS)
    logprobs: FloatArray | None = None
    weight_spans: tuple[WeightSpan, ...] = ()
    routed_experts: AnyArray | None = None
    prompt_logprobs: FloatArray | None = None
    top_logprobs: TopLogprobs | None = None
    hidden_states: AnyArray | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    dp_rank: int | None = None
    engine: str | None = None
    attempts: int = 0
    timing: Timing = NO_TIME
    error: RolloutError | None = None
    meta_info: Mapping[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    reward: float | None = None

    @property
    def tokens(self) -> IntArray:
        """Prompt ids followed by output ids, int32[P + T].

        Raises:
            ValueError: The prompt was text and its ids are not known (ask with ``return_prompt_token_ids=True``).
        """
        if self.prompt.input_ids is None:
            raise ValueError(f"sample {self.index}: the prompt is text; its ids are unknown (return_prompt_token_ids)")
        return np.concatenate([self.prompt.input_ids, self.output_ids])

    def to_dict(self, *, arrays: bool = False) -> dict[str, Any]:
        """All fields as plain values for ``json.dumps`` or, with ``arrays=True``, as arrays for ``numpy.savez``.

        ``Sample.from_dict`` takes either form back, also after the round trip through the file. The error of a
        failed sample travels as its text. ``metadata`` must be JSON itself.
        """
        packed: dict[str, np.ndarray[Any, Any]] = {}
        plain = {f.name: _pack(f.name, getattr(self, f.name), packed if arrays else None) for f in fields(self)}
        if not arrays:
            return plain
        return {**packed, "sample": np.array(json.dumps(plain))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The sample that ``to_dict`` wrote, from its dict or from a loaded npz file.

        Raises:
            ValueError: A field that this version does not know, or one that is missing.
        """
        plain = json.loads(str(data["sample"])) if "sample" in data else dict(data)
        wrong = plain.keys() ^ {f.name for f in fields(cls)}
        if wrong:
            raise ValueError(f"unknown or missing sample fields {sorted(wrong)}: written by another version?")
        try:
            return cls(**{name: _UNPACK.get(name, _array)(value, data) for name, value in plain.items()})
        except KeyError as error:
            raise ValueError(f"sample data lacks the array {error}") from None


def begin(prompt: Prompt, index: int, member: int) -> Sample:
    """A sample with nothing generated yet."""
    return Sample(prompt, index, member, metadata=dict(prompt.metadata))


def status_of(finish: Finish) -> Status:
    """The status that a finish reason stands for; an unknown or missing reason counts as cut short."""
    return _STATUS_OF.get(finish.type, Status.ABORTED)


_STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}


# --- to and from plain values -----------------------------------------------------------------------------------------


def _pack(name: str, value: Any, arrays: dict[str, np.ndarray[Any, Any]] | None) -> Any:
    if isinstance(value, np.ndarray):
        return _pack_array(name, value, arrays)
    if isinstance(value, Status):
        return value.value
    if isinstance(value, Prompt):
        rest = {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name != "input_ids"}
        return {"input_ids": _pack(f"{name}.input_ids", value.input_ids, arrays), **rest}
    if isinstance(value, Finish):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_pack(f"{name}.{number}", item, arrays) for number, item in enumerate(value)]
    if isinstance(value, BaseException):
        return str(value)
    return _plain(value)


def _plain(value: Any) -> Any:
    """Mappings, lists and numpy values in what the user passed, as JSON has them."""
    if hasattr(value, "keys"):
        return {str(key): _plain(value[key]) for key in value.keys()}  # noqa: SIM118 - any mapping
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _pack_array(name: str, value: AnyArray, arrays: dict[str, np.ndarray[Any, Any]] | None) -> Any:
    if arrays is not None:
        arrays[name] = value
        return {"array": name}
    if value.ndim == 1 and np.isfinite(value).all():
        return {"dtype": value.dtype.str, "values": value.tolist()} if value.dtype != np.int32 else value.tolist()
    data = pybase64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "base64": data}


def _array(value: Any, source: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return np.array(source[value["array"]])
    if "base64" in value:
        return np.frombuffer(pybase64.b64decode(value["base64"]), value["dtype"]).reshape(value["shape"]).copy()
    return np.array(value["values"], value["dtype"])


def _ids(value: Any, source: Mapping[str, Any]) -> Any:
    return np.array(value, np.int32) if isinstance(value, list) else _array(value, source)


def _prompt(value: Any, source: Mapping[str, Any]) -> Prompt:
    return Prompt(**{**value, "input_ids": _ids(value["input_ids"], source)})


def _top(value: Any, source: Mapping[str, Any]) -> Any:
    return value and TopLogprobs(*(_array(item, source) for item in value))


_ARRAYS = {"array", "base64", "values"}
_UNPACK: dict[str, Any] = {
    "prompt": _prompt,
    "status": lambda value, _: Status(value),
    "finish": lambda value, _: value and Finish(**value),
    "output_ids": _ids,
    "weight_spans": lambda value, _: tuple(WeightSpan(*span) for span in value),
    "top_logprobs": _top,
    "timing": lambda value, _: Timing(*value),
    "error": lambda value, _: None if value is None else RolloutError(value),
    "meta_info": lambda value, _: value,
    "metadata": lambda value, _: value,
    "reward": lambda value, source: (
        _array(value, source) if isinstance(value, dict) and _ARRAYS & value.keys() else value
    ),
}
