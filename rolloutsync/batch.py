"""What users pass as a batch → prompts. Everything that can be wrong with it is found here, before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rolloutsync.errors import shown
from rolloutsync.payload import int32_array, to_json
from rolloutsync.resume import Resumed, resume
from rolloutsync.sample import Prompt, Sample, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rolloutsync.dialects.base import Vocabulary
    from rolloutsync.sample import IntArray

_IDS_KEYS = ("input_ids", "prompt_token_ids")
_TEXT_KEYS = ("text", "prompt")
_OWN_KEYS = {*_IDS_KEYS, *_TEXT_KEYS, "messages", "sampling_params", "image_data", "metadata"}
_REFUSED_FIELDS = {
    "rid": "request ids are rolloutsync's own: they must be unique and of one length",
    "stream": "answers are read whole",
    "n": "one submit makes one sample, and items share the n= of generate or start",
    "on_error": "it belongs to generate and start",
    "progress": "it belongs to generate and start",
    "keep_partials": "it belongs to generate and start",
    "metadata": "it goes into the items of the batch, and is never sent",
    "sampling_params": "it goes into the call or the item as such",
    **dict.fromkeys((*_IDS_KEYS, *_TEXT_KEYS, "messages"), "prompts go into the batch"),
}
_SAMPLING_WORDS = {
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_new_tokens", "min_new_tokens", "stop"),
    *("stop_token_ids", "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "sampling_seed"),
}  # an engine ignores them without a word where they do not belong
_ID_LIMIT = 2**31
_FLAGS = {"return_logprob", "return_routed_experts", "return_hidden_states", "return_prompt_token_ids"}
_COUNTS = {"priority": -(2**63), "logprob_start_len": -1, "top_logprobs_num": 0, "routed_experts_start_len": 0}


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What holds for every item of one call.

    Attributes:
        vocabulary: Checks sampling parameters.
        sampling: The call's own parameters, checked.
        fields: The call's request fields.
        n: Samples of each prompt.
        tokenizer: For items with ``messages``; None if the client has none.
        keep_partials: Partials go on where they were cut; otherwise they start over.
    """

    vocabulary: Vocabulary
    sampling: Mapping[str, Any]
    fields: Mapping[str, Any]
    n: int = 1
    tokenizer: Any = None
    keep_partials: bool = True


Item = Prompt | Resumed | Sample


def overridden(rules: BatchRules, sampling_params: Any, fields: Mapping[str, Any]) -> BatchRules:
    """The rules with other sampling parameters and request fields, key by key; errors as for those of a call."""
    check_fields(fields)
    sampling = {**rules.sampling, **rules.vocabulary.check_sampling(sampling_params)}
    return replace(rules, sampling=sampling, fields={**rules.fields, **fields})


def check_fields(fields: Mapping[str, Any], where: str = "") -> None:
    """Refuse request fields that are ours to set or belong elsewhere, and values that are not JSON."""
    for name, value in fields.items():
        if name in _REFUSED_FIELDS:
            raise ValueError(f"{where}request field {name}={shown(value)} is not accepted: {_REFUSED_FIELDS[name]}")
        if name in _SAMPLING_WORDS:
            raise ValueError(f"{where}{name}={shown(value)} is a sampling parameter: put it into sampling_params")
        _check_known_field(name, value, where)
        try:
            to_json(value)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{where}request field {shown(name)} cannot be sent as JSON: {error}") from None


def _check_known_field(name: str, value: Any, where: str) -> None:
    """Types of the fields that we read ourselves, or that engines answer with an internal error."""
    if name in _FLAGS and not (isinstance(value, bool) or (value == "last" and name == "return_hidden_states")):
        raise TypeError(f"{where}{name} must be True or False, got {shown(value)}")
    least = _COUNTS.get(name)
    if least is None or (value is None and name != "priority"):
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{where}{name} must be an integer, got {shown(value)}")
    if value < least:
        raise ValueError(f"{where}{name} must be at least {least}, got {shown(value)}")


def read_batch(batch: Any, rules: BatchRules) -> list[Item]:
    """A prompt for each item, how it goes on where it is a partial, or the item itself where it is a finished sample.

    Raises:
        TypeError: Not a batch, or an item of no known kind.
        ValueError: An item with a wrong value; names the item and the field.
    """
    return [_read_item(item, rules, f"batch[{index}]: ") for index, item in enumerate(_items(batch))]


def _items(batch: Any) -> Iterable[Any]:
    if isinstance(batch, (str, bytes, dict, Prompt, Sample)):
        raise TypeError(f"batch is a single {type(batch).__name__}, not a list of prompts: wrap it in a list")
    if getattr(batch, "ndim", 2) == 1:
        raise TypeError("batch is a single sequence of token ids, not a list of prompts: wrap it in a list")
    try:
        items = list(batch)
    except TypeError:
        raise TypeError(f"batch must be a list of prompts, got a {type(batch).__name__}") from None
    if items and isinstance(items[0], (int, np.integer)):
        raise TypeError("batch is a single sequence of token ids, not a list of prompts: wrap it in a list")
    return items


def _read_item(item: Any, rules: BatchRules, where: str) -> Item:
    if isinstance(item, Sample):
        return _read_sample(item, rules, where)
    if isinstance(item, Prompt):
        return _read_prompt(item, rules, where)
    if isinstance(item, dict):
        return _from_dict(item, rules, where)
    if isinstance(item, str):
        return Prompt(text=_read_text(item, where), sampling_params=rules.sampling, fields=rules.fields)
    return Prompt(input_ids=_read_ids(item, where), sampling_params=rules.sampling, fields=rules.fields)


def _read_prompt(prompt: Prompt, rules: BatchRules, where: str) -> Prompt:
    """A text whose ids an engine has told is sent as text again: the very request that was sent before."""
    ids = prompt.input_ids if prompt.text is None else None
    given = {"input_ids": ids, "text": prompt.text, "sampling_params": prompt.sampling_params}
    more = {"image_data": prompt.image_data, "metadata": prompt.metadata}
    return _from_dict({**given, **more, **prompt.fields}, rules, where)


def _read_sample(sample: Sample, rules: BatchRules, where: str) -> Item:
    """Finished: as it is. A partial goes on. Failed, or cut short before its first token: its prompt again."""
    finished = sample.status in {Status.COMPLETED, Status.TRUNCATED}
    partial = sample.status is Status.ABORTED and len(sample.output_ids) > 0 and rules.keep_partials
    if not finished and not partial:
        return _read_item(sample.prompt, rules, where)
    if rules.n > 1:
        kind = "finished sample" if finished else "partial"
        raise ValueError(f"{where}a {kind} cannot have n={rules.n} members: pass those that have begun with n=1")
    return sample if finished else resume(sample, rules.vocabulary, where)


def _from_dict(item: Mapping[str, Any], rules: BatchRules, where: str) -> Prompt:
    ids, text = _one_of(item, _IDS_KEYS, where), _one_of(item, _TEXT_KEYS, where)
    if item.get("messages") is not None:
        if ids is not None or text is not None:
            raise ValueError(f"{where}give one of messages, input_ids and text")
        ids = _apply_template(item["messages"], rules.tokenizer, where)
    if (ids is None) == (text is None):
        raise ValueError(f"{where}give exactly one of input_ids and text (keys: {shown(sorted(map(str, item)))})")
    own = {key: value for key, value in item.items() if key not in _OWN_KEYS}
    check_fields({**own, "image_data": item.get("image_data")}, where)
    return Prompt(
        input_ids=None if ids is None else _read_ids(ids, where),
        text=None if text is None else _read_text(text, where),
        sampling_params=_merged(item.get("sampling_params"), rules, where),
        image_data=item.get("image_data"),
        metadata=_read_metadata(item.get("metadata"), where),
        fields={**rules.fields, **own},
    )


def _one_of(item: Mapping[str, Any], keys: tuple[str, str], where: str) -> Any:
    given = [key for key in keys if item.get(key) is not None]
    if len(given) > 1:
        raise ValueError(f"{where}{given[0]} and {given[1]} are the same thing: give one")
    return item[given[0]] if given else None


def _merged(own: Any, rules: BatchRules, where: str) -> Mapping[str, Any]:
    if own is None or own == {}:
        return rules.sampling
    try:
        return {**rules.sampling, **rules.vocabulary.check_sampling(own)}
    except (ValueError, TypeError) as error:
        raise type(error)(f"{where}{error}") from None


def _apply_template(messages: Any, tokenizer: Any, where: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"{where}messages need RolloutClient(tokenizer=...), an object with apply_chat_template")
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    return ids["input_ids"] if hasattr(ids, "keys") else ids


def _read_text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{where}text must be a string, got {shown(text)}")
    if not text:
        raise ValueError(f"{where}text is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}text holds a lone surrogate at {error.start}, which cannot be sent") from None
    return text


def _read_ids(raw: Any, where: str) -> IntArray:
    if type(raw) is list:
        try:
            if type(sum(raw)) is int:  # not of what merely stands for a number, as a tensor of one does
                return int32_array(raw, least=0)
        except (OverflowError, TypeError, ValueError):
            pass  # which one it is, is found below
    ids = _to_array(raw, where)
    if ids.ndim != 1:
        raise ValueError(f"{where}input_ids must be one-dimensional, got shape {ids.shape}")
    if not len(ids):
        raise ValueError(f"{where}input_ids is empty")
    if ids.min() < 0 or ids.max() >= _ID_LIMIT:
        at = int(((ids < 0) | (ids >= _ID_LIMIT)).argmax())
        raise ValueError(f"{where}input_ids[{at}] is {int(ids[at])}, not a token id")
    return ids.astype(np.int32, copy=True)


def check_vocabulary(items: list[Item], vocab_size: int | None) -> None:
    """Refuse token ids beyond the vocabulary, where its size is known: one of them can kill an engine."""
    if vocab_size is None:
        return
    for index, item in enumerate(items):
        ids = item.input_ids if isinstance(item, Prompt) else None
        if ids is not None and int(ids.max()) >= vocab_size:
            at = int(ids.argmax())
            raise ValueError(f"batch[{index}]: input_ids[{at}] is {int(ids[at])}, the vocabulary size is {vocab_size}")


def _to_array(raw: Any, where: str) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(raw, (list, tuple)):
        _check_elements(raw, where)
        try:
            return np.array(raw, np.int64) if raw else np.empty(0, np.int64)
        except (OverflowError, ValueError, TypeError) as error:
            raise ValueError(f"{where}input_ids: {error}") from None
    if hasattr(raw, "detach"):
        raw = raw.detach().cpu().numpy()  # a torch tensor, wherever it lives
    if not isinstance(raw, np.ndarray):
        raise TypeError(f"{where}a prompt must be text, token ids, a dict, Prompt or Sample; got {raw!r:.200}")
    if raw.dtype.kind not in "iu":
        raise TypeError(f"{where}input_ids must be integers, got dtype {raw.dtype}")
    return raw


def _check_elements(raw: list[Any] | tuple[Any, ...], where: str) -> None:
    kinds = set(map(type, raw))
    if kinds <= {int}:
        return
    for at, item in enumerate(raw):
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise TypeError(f"{where}input_ids[{at}] is {shown(item)}, not an integer")


def _read_metadata(metadata: Any, where: str) -> dict[str, Any]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise TypeError(f"{where}metadata must be a dict, got {metadata!r:.200}")
    return dict(metadata)
