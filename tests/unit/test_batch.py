"""What users pass as a batch: every form that is accepted, and every mistake found before anything is sent."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutsync.batch import BatchRules, check_fields, check_vocabulary, read_batch
from rolloutsync.dialects.sglang import SGLangDialect
from rolloutsync.errors import RolloutError
from rolloutsync.growth import extend
from rolloutsync.sample import Finish, Prompt, Sample, Segment, Status, begin

from .makers import ids


class FakeTensor:
    """What a torch tensor looks like to us: not an array, until it is detached and brought to the CPU."""

    def __init__(self, values: Any, dtype: Any = np.int64) -> None:
        self._values = np.array(values, dtype)
        self.ndim = self._values.ndim
        self._steps: list[str] = []

    def __iter__(self) -> Any:
        return (FakeTensor(row) for row in self._values)

    def detach(self) -> FakeTensor:
        """Off the graph."""
        self._steps.append("detach")
        return self

    def cpu(self) -> FakeTensor:
        """Off the GPU."""
        self._steps.append("cpu")
        return self

    def numpy(self) -> Any:
        """Only then."""
        assert self._steps == ["detach", "cpu"]
        return self._values


class FakeScalar:
    """One element of a torch tensor: it stands for a number, and makes another tensor of whatever it is added to."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return int(self._value)

    def __radd__(self, other: int) -> FakeScalar:
        return FakeScalar(other + self._value)

    __add__ = __radd__


class Tokenizer:
    """Turns messages into as many tokens as they have characters."""

    def __init__(self, wrap: Any = lambda tokens: tokens) -> None:
        self.calls: list[dict[str, Any]] = []
        self._wrap = wrap

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """The real one's signature."""
        self.calls.append(options)
        return self._wrap([len(message["content"]) for message in messages])


_MESSAGES = [{"role": "user", "content": "hello"}, {"role": "user", "content": "you"}]


def _rules(sampling: Any = None, *, n: int = 1, tokenizer: Any = None, **fields: Any) -> BatchRules:
    dialect = SGLangDialect()
    return BatchRules(dialect, dialect.check_sampling(sampling), {"return_logprob": True, **fields}, n, tokenizer)


def _read(batch: Any, rules: BatchRules | None = None) -> list[Prompt]:
    prompts = read_batch(batch, rules or _rules())
    assert all(isinstance(prompt, Prompt) for prompt in prompts)
    return [prompt for prompt in prompts if isinstance(prompt, Prompt)]


def _one(item: Any, rules: BatchRules | None = None) -> Prompt:
    (prompt,) = _read([item], rules)
    return prompt


def _refusal(kind: type[Exception], item: Any, rules: BatchRules | None = None) -> str:
    """The words of the error that the second item of a batch gives; they name it."""
    with pytest.raises(kind) as caught:
        read_batch(["fine", item], rules or _rules())
    assert type(caught.value) is kind
    assert str(caught.value).startswith("batch[1]: ")
    return str(caught.value)


# --- the batch itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [[], (), np.empty((0, 4), np.int32), iter([])])
def test_an_empty_batch_is_a_batch(batch: Any) -> None:
    """Nothing to do is no error."""
    assert read_batch(batch, _rules()) == []


@pytest.mark.parametrize(
    "batch",
    [
        "a text",
        b"bytes",
        "",
        [1, 2, 3],
        (1, 2, 3),
        [np.int64(1), np.int64(2)],
        np.array([1, 2, 3]),
        np.array([], np.int64),
        FakeTensor([1, 2, 3]),
        {"text": "a"},
        Prompt(text="a"),
        begin(Prompt(text="a"), 0, 0),
    ],
)
def test_a_single_prompt_is_not_a_batch(batch: Any) -> None:
    """The message says what to do about it."""
    with pytest.raises(TypeError, match="wrap it in a list"):
        read_batch(batch, _rules())


@pytest.mark.parametrize("batch", [None, 5, 1.5, object(), True])
def test_what_is_no_batch_at_all(batch: Any) -> None:
    """It names the type."""
    with pytest.raises(TypeError, match=f"batch must be a list of prompts, got a {type(batch).__name__}"):
        read_batch(batch, _rules())


@pytest.mark.parametrize(
    "batch",
    [
        [[1, 2], [3]],
        ((1, 2), (3,)),
        iter([[1, 2], (3,)]),
        [np.array([1, 2]), np.array([3], np.uint16)],
        [FakeTensor([1, 2]), FakeTensor([3], np.int32)],
        [[np.int64(1), 2], (np.int32(3),)],
        [{"input_ids": [1, 2]}, {"prompt_token_ids": (3,)}],
        [Prompt(input_ids=ids(1, 2)), [3]],
    ],
)
def test_token_ids_in_every_form(batch: Any) -> None:
    """List, tuple, numpy, torch, dict, Prompt, in any mix."""
    one, two = _read(batch)
    for prompt, tokens in ((one, [1, 2]), (two, [3])):
        assert prompt.input_ids is not None
        assert prompt.input_ids.tolist() == tokens
        assert prompt.input_ids.dtype == np.int32
        assert prompt.input_ids.flags.owndata
        assert prompt.input_ids.flags.c_contiguous
        assert prompt.text is None


@pytest.mark.parametrize("batch", [np.array([[1, 2], [3, 4]]), FakeTensor([[1, 2], [3, 4]])])
def test_rows_of_a_table_are_prompts(batch: Any) -> None:
    """A two-dimensional array is a batch."""
    assert [prompt.input_ids.tolist() for prompt in _read(batch) if prompt.input_ids is not None] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("array", [np.arange(10, dtype=np.int32)[::2], np.arange(10)[::-1], np.arange(10, dtype=">i4")])
def test_views_are_copied(array: Any) -> None:
    """The caller may change or free what they gave; what we keep can be sent as it is."""
    prompt = _one(array)
    before = array.tolist()
    array[:] = 0
    assert prompt.input_ids is not None
    assert prompt.input_ids.tolist() == before
    call = SGLangDialect().encode_generate(prompt, "r", facts=SGLangDialect().read_facts({}), dp_rank=None)
    assert str(before).replace(" ", "").encode() in (call.body or b"")


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
def test_any_ids_survive(tokens: list[int]) -> None:
    """Exactly."""
    prompt = _one(tokens)
    assert prompt.input_ids is not None
    assert prompt.input_ids.tolist() == tokens


# --- items that are wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ([], "input_ids is empty"),
        ((), "input_ids is empty"),
        (np.array([], np.int64), "input_ids is empty"),
        ("", "text is empty"),
        ({"text": ""}, "text is empty"),
        ({"input_ids": []}, "input_ids is empty"),
        ([1, -1], "input_ids[1] is -1"),
        ([1, 2**31], "input_ids[1] is 2147483648"),
        ([1, 2**80], "input_ids"),
        (np.array([-1]), "input_ids[0] is -1"),
        (np.array([2**63], np.uint64), "input_ids[0] is 9223372036854775808"),
        (np.array([[1]]), "one-dimensional"),
        (np.array(1), "one-dimensional"),
        (FakeTensor([[1, 2]]), "one-dimensional"),
        ("a\ud83d", "lone surrogate at 1"),
        ({}, "exactly one of input_ids and text"),
        ({"metadata": {}, 5: 1}, "exactly one of input_ids and text (keys: ['5', 'metadata'])"),
        ({"input_ids": None, "text": None}, "exactly one of input_ids and text"),
        ({"input_ids": [1], "text": "a"}, "exactly one of input_ids and text"),
        ({"input_ids": [1], "prompt_token_ids": [1]}, "input_ids and prompt_token_ids are the same thing"),
        ({"text": "a", "prompt": "a"}, "text and prompt are the same thing"),
        ({"messages": _MESSAGES}, "tokenizer="),
        (Prompt(), "exactly one of input_ids and text"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "'temprature'"),
        ({"text": "a", "sampling_params": {"n": 2}}, "pass n= to the call"),
        ({"text": "a", "sampling_params": {"temperature": float("nan")}}, "sampling_params['temperature']"),
        ({"text": "a", "sampling_params": {"max_tokens": 1, "max_new_tokens": 1}}, "max_tokens (1)"),
        ({"text": "a", "n": 2}, "n=2"),
        ({"text": "a", "rid": "x"}, "rid='x'"),
        ({"text": "a", "stream": True}, "stream=True"),
        ({"text": "a", "max_new_tokens": 5}, "max_new_tokens=5 is a sampling parameter: put it into sampling_params"),
        ({"text": "a", "bias": float("nan")}, "'bias'"),
        ({"text": "a", "image_data": [float("inf")]}, "'image_data'"),
    ],
)
def test_wrong_values(item: Any, words: str) -> None:
    """A ValueError that names the item, the field and the value."""
    assert words in _refusal(ValueError, item)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (None, "None"),
        (5, "5"),
        (1.5, "1.5"),
        (b"abc", "b'abc'"),
        (object(), "object"),
        ([1, 2.0], "input_ids[1] is 2.0"),
        ([1, True], "input_ids[1] is True"),
        ([np.bool_(True)], "input_ids[0] is"),
        ([1, "2"], "input_ids[1] is '2'"),
        ([1, None], "input_ids[1] is None"),
        ([[1, 2]], "input_ids[0] is [1, 2]"),
        ([5, FakeScalar(True)], "input_ids[1] is"),
        ([FakeScalar(7)], "input_ids[0] is"),
        ([np.array(5)], "input_ids[0] is"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array(["1"]), "<U1"),
        (FakeTensor([1.0], np.float32), "float32"),
        ({"input_ids": "abc"}, "abc"),
        ({"text": 5}, "text must be a string, got 5"),
        ({"text": ["a"]}, "text must be a string"),
        ({"prompt": [1, 2]}, "text must be a string"),
        ({"text": "a", "metadata": [1]}, "metadata must be a dict"),
        ({"text": "a", "sampling_params": 5}, "sampling_params must be a dict"),
        ({"text": "a", "priority": "high"}, "priority must be an integer, got 'high'"),
        ({"text": "a", "priority": True}, "priority must be an integer, got True"),
        ({"text": "a", "image_data": object()}, "'image_data'"),
        ({"text": "a", "lora_path": {1, 2}}, "'lora_path'"),
        (Prompt(text="a", fields={"x": b"y"}), "'x'"),
    ],
)
def test_wrong_types(item: Any, words: str) -> None:
    """A TypeError that names the item, the field and the value."""
    assert words in _refusal(TypeError, item)


def test_a_huge_wrong_item_is_not_shown_whole() -> None:
    """A message is for reading."""
    assert len(_refusal(TypeError, b"x" * 1_000_000)) < 500


# --- dicts, prompts, messages -----------------------------------------------------------------------------------------


def test_dicts_in_the_engines_own_words() -> None:
    """Sampling overrides the call's by key; what we do not know is sent through; metadata stays here."""
    shared = {"answer": "42"}
    item = {
        "prompt": "a",
        "sampling_params": {"temperature": 0.0, "max_tokens": 5},
        "image_data": ["aGk="],
        "metadata": shared,
        "lora_path": "l",
        "return_logprob": False,
        "priority": 3,
    }
    before = copy.deepcopy(item)
    prompt = _one(item, _rules({"temperature": 1.0, "max_new_tokens": 9, "top_p": 0.5}, top_logprobs_num=2))
    assert (prompt.text, prompt.input_ids) == ("a", None)
    assert prompt.sampling_params == {"temperature": 0.0, "max_new_tokens": 5, "top_p": 0.5}
    assert prompt.image_data == ["aGk="]
    assert prompt.fields == {"return_logprob": False, "top_logprobs_num": 2, "lora_path": "l", "priority": 3}
    assert prompt.metadata == shared
    assert prompt.metadata is not shared
    assert item == before


def test_none_in_a_dict_is_absent() -> None:
    """As in data sets that have all columns for all rows."""
    item = {
        "text": "a",
        "input_ids": None,
        "messages": None,
        "sampling_params": None,
        "metadata": None,
        "image_data": None,
    }
    prompt = _one(item)
    assert (prompt.text, prompt.sampling_params, prompt.metadata, prompt.image_data) == ("a", {}, {}, None)


def test_sampling_of_an_item_may_be_an_object() -> None:
    """The same as for the call."""
    item = {"text": "a", "sampling_params": SimpleNamespace(temperature=0.5, top_p=None)}
    assert _one(item, _rules({"top_p": 0.1})).sampling_params == {"temperature": 0.5, "top_p": 0.1}


def test_prompts_pass_through() -> None:
    """Their fields and sampling count as an item's own."""
    given_prompt = Prompt(
        text="a",
        sampling_params={"temperature": 0.0},
        image_data="x",
        metadata={"k": 1},
        fields={"session_id": "s", "return_logprob": False},
    )
    prompt = _one(given_prompt, _rules({"temperature": 1.0, "top_p": 0.5}))
    assert prompt.sampling_params == {"temperature": 0.0, "top_p": 0.5}
    assert prompt.fields == {"session_id": "s", "return_logprob": False}
    assert (prompt.text, prompt.image_data, prompt.metadata) == ("a", "x", {"k": 1})
    assert prompt.metadata is not given_prompt.metadata


def test_a_text_whose_ids_the_engine_told_is_still_a_text() -> None:
    """The prompt of an answered sample can be asked again, as it was asked before."""
    told = Segment(Finish(type="stop"), output_ids=ids(9), prompt_ids=ids(4, 5))
    answered = extend(begin(Prompt(text="a"), 0, 0), told).prompt
    assert answered.input_ids is not None
    again = _one(answered)
    assert (again.text, again.input_ids) == ("a", None)


@pytest.mark.parametrize("wrap", [lambda t: t, np.array, FakeTensor, lambda t: {"input_ids": t, "attention_mask": t}])
def test_messages_go_through_the_tokenizer(wrap: Any) -> None:
    """Whatever it returns ids in; with the generation prompt, as for a chat."""
    tokenizer = Tokenizer(wrap)
    prompt = _one({"messages": _MESSAGES, "metadata": {"k": 1}}, _rules(tokenizer=tokenizer))
    assert prompt.input_ids is not None
    assert prompt.input_ids.tolist() == [5, 3]
    assert tokenizer.calls == [{"tokenize": True, "add_generation_prompt": True}]
    assert "messages" not in prompt.fields


@pytest.mark.parametrize("other", [{"text": "a"}, {"input_ids": [1]}, {"prompt": "a"}])
def test_messages_exclude_other_prompts(other: dict[str, Any]) -> None:
    """One prompt for each item."""
    words = _refusal(ValueError, {"messages": _MESSAGES, **other}, _rules(tokenizer=Tokenizer()))
    assert "one of messages, input_ids and text" in words


# --- samples ----------------------------------------------------------------------------------------------------------


def _sample(status: Status, tokens: tuple[int, ...] = (), **given: Any) -> Sample:
    prompt = Prompt(input_ids=ids(1, 2), sampling_params={"temperature": 0.0}, metadata={"k": 1})
    return replace(begin(prompt, 7, 3), status=status, output_ids=ids(*tokens), **given)


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.TRUNCATED])
def test_finished_samples_are_returned_untouched(status: Status) -> None:
    """The very object; more members of it make no sense."""
    sample = _sample(status, (5,))
    assert read_batch([sample], _rules())[0] is sample
    assert "n=2" in _refusal(ValueError, sample, _rules(n=2))


@pytest.mark.parametrize(
    "sample", [_sample(Status.FAILED, error=RolloutError("x")), _sample(Status.ABORTED)], ids=["failed", "unstarted"]
)
def test_samples_without_tokens_start_anew(sample: Sample) -> None:
    """Failed ones can be passed back (B14): the prompt that they had, as a new one."""
    prompt = _one(sample, _rules({"temperature": 1.0, "top_p": 0.5}))
    assert prompt.input_ids is not None
    assert prompt.input_ids.tolist() == [1, 2]
    assert prompt.sampling_params == {"temperature": 0.0, "top_p": 0.5}
    assert prompt.metadata == {"k": 1}


# --- fields of the call, vocabulary -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rid", "stream", "n", "input_ids", "text", "messages", "prompt", "prompt_token_ids"])
def test_fields_that_are_ours_are_refused(name: str) -> None:
    """With the reason."""
    with pytest.raises(ValueError, match=f"request field {name}=1 is not accepted: "):
        check_fields({name: 1})


@pytest.mark.parametrize(
    ("value", "kind"),
    [(object(), TypeError), ({1}, TypeError), (b"x", TypeError), ("\ud83d", TypeError), (float("nan"), ValueError)],
)
def test_fields_must_be_json(value: Any, kind: type[Exception]) -> None:
    """Named before anything is sent, also deep inside."""
    for wrapped in (value, [value], {"a": [value]}):
        with pytest.raises(kind, match=r"request field 'lora_path' cannot be sent as JSON"):
            check_fields({"lora_path": wrapped})


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "max_new_tokens", "stop", "top_k", "sampling_seed"])
def test_sampling_parameters_in_the_wrong_place_are_refused(name: str) -> None:
    """An engine would ignore them there, and sample by its defaults."""
    with pytest.raises(ValueError, match=f"{name}=1 is a sampling parameter: put it into sampling_params"):
        check_fields({name: 1})


def test_fields_that_are_json_pass() -> None:
    """Numpy included; a priority is an integer of either sign."""
    check_fields(
        {
            "a": None,
            "b": [1, {"c": np.array([1.5])}],
            "priority": -3,
            "logprob_start_len": None,
            "token_ids_logprob": np.arange(3),
        }
    )
    for bad in (1.5, "1", True, None):
        with pytest.raises(TypeError, match="priority must be an integer"):
            check_fields({"priority": bad})


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    """One of them can kill an engine; only token ids of prompts are looked at."""
    items = read_batch([[1, 511], "text", _sample(Status.COMPLETED, (900,))], _rules())
    check_vocabulary(items, None)
    check_vocabulary(items, 512)
    with pytest.raises(ValueError, match=r"batch\[0\]: input_ids\[1\] is 511, the vocabulary size is 511"):
        check_vocabulary(items, 511)
    check_vocabulary([], 1)
