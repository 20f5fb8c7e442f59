"""Bodies for `/generate`: good ones of every shape, and bad ones that no engine dies of.

Not among them is what real SGLang dies of: an id outside the vocabulary, an empty prompt within a batch or of no text,
a `logprob_start_len` below -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCABULARY = 512
CONTEXT = 2048
KEPT_ID = 7
ALL_BUT_ONE = [token for token in range(VOCABULARY) if token != KEPT_ID]
STOPPED: dict[str, Any] = {
    "stop_token_ids": ALL_BUT_ONE,
    "logit_bias": {str(KEPT_ID): -100.0},
    "ignore_eos": False,
}
FIXED: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True}

Body = dict[str, Any]


def prompt(length: int, first: int = 5) -> list[int]:
    """Token ids; prompts with different first ids share no cache."""
    return [3 + (first + place) % 500 for place in range(length)]


def generation(tokens: int, ids: list[Any], sampling: Mapping[str, Any] = {}, **fields: Any) -> Body:
    """A body that asks for exactly so many tokens."""
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, **sampling},
        **fields,
    }


def _good() -> dict[str, Body]:
    ids = prompt(5)
    return {
        "plain": generation(3, ids),
        "one token": generation(1, ids),
        "no token": generation(0, ids),
        "one id": generation(2, [9]),
        "two chunks of prefill": generation(2, prompt(300, 40)),
        "logprobs": generation(4, ids, return_logprob=True),
        "logprobs of the prompt": generation(2, ids, return_logprob=True, logprob_start_len=0),
        "logprobs from the middle": generation(2, ids, return_logprob=True, logprob_start_len=3),
        "logprobs with text": generation(2, ids, return_logprob=True, return_text_in_logprobs=True),
        "top logprobs": generation(2, ids, return_logprob=True, top_logprobs_num=2),
        "top logprobs of the prompt": generation(2, ids, return_logprob=True, top_logprobs_num=2, logprob_start_len=0),
        "logprobs of given ids": generation(2, ids, return_logprob=True, token_ids_logprob=[5, 6]),
        "logprobs of no token": generation(0, ids, return_logprob=True),
        "top logprobs without logprobs": generation(2, ids, top_logprobs_num=2),
        "a stop id": generation(9, ids, STOPPED),
        "a stop id after a minimum": generation(9, ids, {**STOPPED, "min_new_tokens": 4}),
        "a stop id with logprobs": generation(9, ids, {**STOPPED, "no_stop_trim": True}, return_logprob=True),
        "a stop id that is ignored": generation(4, ids, {"stop_token_ids": ALL_BUT_ONE}),
        "a stop string that never comes": generation(4, ids, {"stop": ["\u4e2d\u6587 never"]}),
        "stop strings that never come": generation(4, ids, {"stop": "\u4e2d\u6587 never", "min_new_tokens": 2}),
        "as many as at least": {"input_ids": ids, "sampling_params": {"max_new_tokens": 5, "min_new_tokens": 5}},
        "greedy": generation(3, ids, {"temperature": 0.0}),
        "all the knobs": generation(
            3,
            ids,
            {
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 20,
                "min_p": 0.01,
                "frequency_penalty": 0.1,
                "presence_penalty": 0.1,
                "sampling_seed": 3,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            },
        ),
        "null knobs": generation(3, ids, {"stop": None, "stop_token_ids": None, "temperature": None}),
        "a knob of another number type": generation(3, ids, {"temperature": 1}),
        "n of zero": generation(2, ids, {"n": 0}),
        "text": {"text": "the rest", "sampling_params": FIXED},
        "text with ids": {"text": "the rest", "sampling_params": FIXED, "return_prompt_token_ids": True},
        "ids back": generation(2, ids, return_prompt_token_ids=True),
        "ids and text": generation(2, ids, text="the rest"),
        "the default length, cut by the context": {
            "input_ids": prompt(CONTEXT - 30, 200),  # begins with nothing that may have been sampled after another
            "sampling_params": {"ignore_eos": True},
        },
        "no limit but the context": {
            "input_ids": prompt(CONTEXT - 20, 300),
            "sampling_params": {"max_new_tokens": None, "ignore_eos": True},
        },
        "null fields": generation(2, ids, rid=None, text=None, return_logprob=None),
        "logprobs from the end": generation(2, ids, return_logprob=True, logprob_start_len=5),
        "an unknown field": generation(2, ids, no_such_field=1),
        "a priority": generation(2, ids, priority=3),
        "rank 0": generation(2, ids, routed_dp_rank=0),
        "experts of a dense model": generation(2, ids, return_routed_experts=True),
        "two of one prompt": generation(3, ids, {"n": 2}),
        "two of one prompt with logprobs": generation(3, ids, {"n": 2}, return_logprob=True),
        "two of two prompts": generation(2, [prompt(4), prompt(6, 90)], {"n": 2}),
        "two of one prompt with a rid": generation(2, ids, {"n": 2}, rid="differential-n"),
        "a batch": generation(3, [prompt(4), prompt(6, 90)]),
        "a batch of one": generation(3, [prompt(4)]),
        "a batch with one rid": generation(2, [prompt(4), prompt(6, 90)], rid="differential-stem"),
        "a batch with rids": generation(2, [prompt(4), prompt(6, 90)], rid=["differential-x", "differential-y"]),
        "a batch with parameters each": {
            "input_ids": [prompt(4), prompt(6, 90)],
            "sampling_params": [FIXED, {"max_new_tokens": 6, "ignore_eos": True}],
        },
        "a batch with logprobs": generation(2, [prompt(4), prompt(6, 90)], return_logprob=True),
        "a batch with logprobs each": generation(2, [prompt(4), prompt(6, 90)], return_logprob=[True, False]),
        "a batch with too many parameters": {
            "input_ids": [prompt(4), prompt(6, 90)],
            "sampling_params": [FIXED, FIXED, FIXED],
        },
        "a stream": generation(3, ids, stream=True),
        "a stream with logprobs": generation(3, ids, stream=True, return_logprob=True),
        "a stream of a batch": generation(3, [prompt(4), prompt(6, 90)], stream=True),
    }


def _refused_at_once() -> dict[str, Any]:
    """Refused while the body is read, paused or not."""
    ids = prompt(5)
    return {
        "malformed JSON": b'{"input_ids": [5, 6',
        "no JSON": b"hello",
        "an empty body": b"",
        "a JSON list": [1, 2],
        "a JSON string": '"x"',
        "an unknown sampling key": generation(2, ids, {"no_such_parameter": 1}),
        "max_tokens": generation(2, ids, {"max_tokens": 2}),
        "an unknown sampling key in a batch": {"input_ids": [ids, ids], "sampling_params": [FIXED, {"nope": 1}]},
        "no prompt": {"sampling_params": FIXED},
        "no ids": generation(2, []),
        "n of null": generation(2, ids, {"n": None}),
        "n that is a string": generation(2, ids, {"n": "2"}),
        "a length that is a fraction": generation(2, ids, {"max_new_tokens": 2.5}),
        "a length that is a string": generation(2, ids, {"max_new_tokens": "2"}),
        "a temperature that is a string": generation(2, ids, {"temperature": "hot"}),
        "a switch that is a number": generation(2, ids, {"ignore_eos": 1}),
        "stop ids that are fractions": generation(2, ids, {"stop_token_ids": [1.5]}),
        "a stop that is a number": generation(2, ids, {"stop": 5}),
        "a bias that is a list": generation(2, ids, {"logit_bias": [1]}),
        "a seed that is a string": generation(2, ids, {"sampling_seed": "x"}),
        "NaN": b'{"input_ids": [5], "sampling_params": {"temperature": NaN}}',
        "no UTF-8": b'{"text": "\xff", "sampling_params": {}}',
        "a stream of null": generation(2, ids, stream=None),
        "a stream that is a string": generation(2, ids, stream="x"),
        "logprobs that are a string": generation(2, ids, return_logprob="x"),
        "logprobs that are a number": generation(2, ids, return_logprob=1),
        "a rid that is a number": generation(2, ids, rid=5),
        "a rid in a list": generation(2, ids, rid=["differential-x"]),
        "a text that is a number": {"text": 5, "sampling_params": FIXED},
        "a priority that is a string": generation(2, ids, priority="x"),
        "listed logprobs for two of one prompt": generation(2, ids, {"n": 2}, return_logprob=[True, True]),
        "ids and lists of ids": generation(2, [[5], 6]),
        "sampling parameters in a list": {"input_ids": ids, "sampling_params": [FIXED]},
        "an empty list of sampling parameters": {"input_ids": [ids, ids], "sampling_params": []},
        "ids that are a string": {"input_ids": "5 6 7", "sampling_params": FIXED},
        "ids that are strings": {"input_ids": ["5", "6"], "sampling_params": FIXED},
        "ids that are a number": {"input_ids": 5, "sampling_params": FIXED},
        "sampling parameters that are a string": {"input_ids": ids, "sampling_params": "hot"},
        "too few sampling parameters": {"input_ids": [ids, ids], "sampling_params": [FIXED]},
        "a list of rids that is too short": generation(2, [ids, ids], rid=["differential-x"]),
        "one rid twice in a batch": generation(2, [ids, ids], rid=["differential-x", "differential-x"]),
        "a rank that is not there": generation(2, ids, routed_dp_rank=3),
        "a rank below zero": generation(2, ids, routed_dp_rank=-1),
    }


def _refused_later() -> dict[str, Body]:
    """Refused when it is the request's turn, which in a pause is behind it."""
    ids = prompt(5)
    return {
        "a prompt as long as the context": generation(1, prompt(CONTEXT)),
        "a prompt longer than the context": generation(1, prompt(CONTEXT + 100)),
        "more tokens than the context": generation(CONTEXT, ids),
        "tokens below zero": generation(-1, ids),
        "a minimum below zero": generation(2, ids, {"min_new_tokens": -1}),
        "a minimum above the maximum": generation(2, ids, {"min_new_tokens": 3}),
        "a temperature below zero": generation(2, ids, {"temperature": -1.0}),
        "top_p above one": generation(2, ids, {"top_p": 1.5}),
        "top_p zero": generation(2, ids, {"top_p": 0.0}),
        "top_k zero": generation(2, ids, {"top_k": 0}),
        "min_p above one": generation(2, ids, {"min_p": 2.0}),
        "a frequency penalty of three": generation(2, ids, {"frequency_penalty": 3.0}),
        "a presence penalty of three": generation(2, ids, {"presence_penalty": 3.0}),
        "a repetition penalty of three": generation(2, ids, {"repetition_penalty": 3.0}),
        "too many stop strings": generation(2, ids, {"stop": [str(number) for number in range(33)]}),
        "logprobs from behind the end": generation(2, ids, return_logprob=True, logprob_start_len=6),
        "experts from behind the end": generation(2, ids, return_routed_experts=True, routed_experts_start_len=6),
        "experts from before the start": generation(2, ids, return_routed_experts=True, routed_experts_start_len=-1),
        "hidden states": generation(2, ids, return_hidden_states=True),
        "logprobs of an id that is not there": generation(2, ids, return_logprob=True, token_ids_logprob=[VOCABULARY]),
        "too long in a batch": generation(1, [ids, prompt(CONTEXT + 1)]),
        "a bad stream": generation(2, ids, {"temperature": -1.0}, stream=True),
    }


GOOD = _good()
REFUSED_AT_ONCE = _refused_at_once()
REFUSED_LATER = _refused_later()
ALL = (GOOD, REFUSED_AT_ONCE, REFUSED_LATER)
