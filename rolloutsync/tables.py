"""Samples as a pyarrow table, for parquet and Hugging Face datasets. Needs pyarrow (the extra ``torch``), not torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from rolloutsync.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pyarrow

    from rolloutsync.sample import AnyArray

_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_FINISH = ("type", "matched", "message", "status_code")
_PLAIN: dict[str, Callable[[Any], Any]] = {  # kind of a column, and what makes a value of a sample's
    "int": int,
    "float": float,
    "text": str,
    "json": lambda value: orjson.dumps(value, default=_plainer, option=_JSON).decode(),
    "spans": lambda spans: [span._asdict() for span in spans],
    "finish": lambda finish: {name: _finish_part(name, getattr(finish, name)) for name in _FINISH},
    "timing": lambda timing: timing._asdict(),
    "shape": lambda array: list(array.shape),
}
_COLUMNS = (  # name, what of a sample, kind: of _PLAIN, or the dtype of an array
    ("index", "index", "int"),
    ("member", "member", "int"),
    ("rid", "rid", "text"),
    ("status", "status", "text"),
    ("text", "text", "text"),
    ("reward", "reward", "float"),
    ("prompt_text", "prompt.text", "text"),
    ("prompt_ids", "prompt.input_ids", "int32"),
    ("output_ids", "output_ids", "int32"),
    ("logprobs", "logprobs", "float32"),
    ("weight_spans", "weight_spans", "spans"),
    ("routed_experts", "routed_experts", "widest"),
    ("routed_experts_shape", "routed_experts", "shape"),
    ("prompt_logprobs", "prompt_logprobs", "float32"),
    ("top_logprobs_ids", "top_logprobs.ids", "int32"),
    ("top_logprobs_values", "top_logprobs.values", "float32"),
    ("top_logprobs_shape", "top_logprobs.ids", "shape"),
    ("hidden_states", "hidden_states", "float32"),
    ("hidden_states_shape", "hidden_states", "shape"),
    ("finish", "finish", "finish"),
    ("error", "error", "text"),
    ("engine", "engine", "text"),
    ("attempts", "attempts", "int"),
    ("prompt_tokens", "prompt_tokens", "int"),
    ("cached_tokens", "cached_tokens", "int"),
    ("dp_rank", "dp_rank", "int"),
    ("timing", "timing", "timing"),
    ("metadata", "metadata", "json"),
    ("meta_info", "meta_info", "json"),
    ("sampling_params", "prompt.sampling_params", "json"),
    ("fields", "prompt.fields", "json"),
    ("image_data", "prompt.image_data", "json"),
)


def to_table(samples: Iterable[Sample]) -> pyarrow.Table:
    """One row for each sample, failed ones and partials too. Blocks for the copying; thread-safe.

    ================================================= ================================================================
    columns                                           type
    ================================================= ================================================================
    index, member, attempts, prompt_tokens,           int64
    cached_tokens, dp_rank
    reward                                            double
    rid, status, text, prompt_text, engine, error     large_string; ``error`` is the text of a failed sample's
    prompt_ids, output_ids                            large_list<int32>
    logprobs, prompt_logprobs                         large_list<float>, natural logarithms
    top_logprobs_ids, top_logprobs_values,            large_list<int32>, <float>, <float>, flattened in C order
    hidden_states
    routed_experts                                    large_list of the samples' own dtype, the widest if there are
                                                      several (uint8 if there is none); flattened in C order
    top_logprobs_shape, hidden_states_shape,          list<int64>, for ``numpy.reshape``
    routed_experts_shape
    weight_spans                                      list<struct<version: large_string, start: int64, end: int64>>
    finish                                            struct<type, matched (JSON), message: large_string,
                                                      status_code: int64>
    timing                                            struct<queued_s, engine_s, total_s: double>, seconds
    metadata, meta_info, sampling_params, fields,     large_string: JSON, where NaN is null; ``metadata`` is the
    image_data                                        sample's, the last three are the prompt's
    ================================================= ================================================================

    What a sample does not have is null. The types are always these, so tables of several steps can be joined (of
    routed experts if their dtype is the same). Arrays are joined once, and pyarrow takes numpy's memory as it is.

    Raises:
        ImportError: There is no pyarrow.
        TypeError: Something else than a sample, a reward that is no number, or metadata and the like that JSON cannot
            say; names the sample and the field.
    """
    arrow, rows = _arrow(), list(samples)
    for number, sample in enumerate(rows):
        if not isinstance(sample, Sample):
            raise TypeError(f"samples[{number}] must be a Sample, got {sample!r:.200}")
    return arrow.table({name: _column(arrow, rows, path, kind) for name, path, kind in _COLUMNS})


def _arrow() -> Any:
    try:
        import pyarrow  # noqa: PLC0415 - rolloutsync.tensors brings this module along, and needs no pyarrow
    except ImportError as missing:
        raise ImportError(f"to_table needs pyarrow ({missing}): pip install 'rolloutsync[torch]'") from missing
    return pyarrow


def _column(arrow: Any, samples: Sequence[Sample], path: str, kind: str) -> Any:
    values = [_reach(sample, path) for sample in samples]
    if kind not in _PLAIN:
        return _lists(arrow, values, kind)
    made = [_made(f"samples[{number}].{path}", value, _PLAIN[kind]) for number, value in enumerate(values)]
    return arrow.array(made, _type(arrow, kind))


def _reach(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _made(name: str, value: Any, make: Callable[[Any], Any]) -> Any:
    try:
        return None if value is None else make(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} cannot be in a table: {error}") from None


def _lists(arrow: Any, arrays: Sequence[AnyArray | None], kind: str) -> Any:
    """A list of each array, flattened; pyarrow keeps the one numpy array in which they are joined."""
    given = [array for array in arrays if array is not None]
    dtype = np.dtype(kind) if kind != "widest" else np.result_type(*(array.dtype for array in given or [np.uint8()]))
    joined = np.concatenate([np.empty(0, dtype), *(array.ravel() for array in given)], dtype=dtype)
    offsets = np.cumsum([0, *(0 if array is None else array.size for array in arrays)])
    missing = np.array([array is None for array in arrays], np.bool_)
    return arrow.LargeListArray.from_arrays(arrow.array(offsets), arrow.array(joined), mask=arrow.array(missing))


def _type(arrow: Any, kind: str) -> Any:
    text, whole, real = arrow.large_string(), arrow.int64(), arrow.float64()
    finish = zip(_FINISH, (text, text, text, whole), strict=True)
    return {
        "int": whole,
        "float": real,
        "text": text,
        "json": text,
        "spans": arrow.list_(arrow.struct([("version", text), ("start", whole), ("end", whole)])),
        "finish": arrow.struct(list(finish)),
        "timing": arrow.struct([("queued_s", real), ("engine_s", real), ("total_s", real)]),
        "shape": arrow.list_(whole),
    }[kind]


def _finish_part(name: str, value: Any) -> Any:
    return value if name != "matched" or value is None else _PLAIN["json"](value)


def _plainer(value: Any) -> Any:
    """What orjson does not know: any mapping, and arrays that do not lie in one piece."""
    if hasattr(value, "keys"):
        return {key: value[key] for key in value.keys()}  # noqa: SIM118 - any mapping
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
