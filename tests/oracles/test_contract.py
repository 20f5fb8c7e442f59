"""The simulated engine refuses at its door what SGLang's own codec refuses, in the same words, and nothing else."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolloutsync.sim import contract

from .wheel import Oracles

pytestmark = pytest.mark.slow
# Structures that the simulation does not look into: pictures, sounds, caches elsewhere, watermarks.
UNREAD = {"image_data", "video_data", "audio_data", "mm_hashes", "images_config", "kv_hints"}
UNREAD_PARAMS = {"watermark"}
VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 1.5, "x", "", [], {}, 2**63, -(2**70)),
    *([1], [-1], [1.5], ["a"], [True], [None], [{}], [[]], [2**63]),
    *([[1]], [["a"]], [[None]], [1, "a"], ["a", 1], [[1], 2], [1, [2]], [True, 1], [1, True], [1.5, 1]),
    *({"a": 1}, {"a": "b"}, {"a": None}, {"a": [1]}, {"5": 1.5, "6": "x"}),
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def verdicts(codec: ModuleType, body: dict[str, Any]) -> tuple[str | None, str | None]:
    """What the codec says of a body, and what we say; None is nothing against it."""
    theirs = ours = None
    try:
        codec.GenerateRequest.from_json_value(body)
    except codec.JsonContractError as error:
        theirs = str(error)
    try:
        contract.check(body)
    except contract.ContractError as error:
        ours = str(error)
    return theirs, ours


def test_every_field_with_every_kind_of_value(oracles: Oracles) -> None:
    """The top level, where unknown names are let through."""
    codec, refused = oracles.codec(), 0
    for name in [*codec.GenerateRequest.__struct_fields__, "unknown"]:
        for value in VALUES if name not in UNREAD else ():
            theirs, ours = verdicts(codec, {name: value})
            assert ours == theirs, {name: value}
            refused += theirs is not None
    assert refused > 400


def test_every_sampling_parameter_with_every_kind_of_value(oracles: Oracles) -> None:
    """Alone and in a list, where unknown names are refused."""
    codec, refused = oracles.codec(), 0
    for name in [*codec.SamplingParams.__struct_fields__, "max_tokens"]:
        for value in VALUES if name not in UNREAD_PARAMS else ():
            for params in ({name: value}, [{}, {name: value}], [{name: value}, 1]):
                theirs, ours = verdicts(codec, {"sampling_params": params})
                assert ours == theirs, params
                refused += theirs is not None
    assert refused > 1000


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_at_all(data: st.DataObject, oracles: Oracles) -> None:
    """Several fields at once: the first that is wrong is the one that is told."""
    codec = oracles.codec()
    names = sorted({*codec.GenerateRequest.__struct_fields__} - UNREAD)
    params = sorted({*codec.SamplingParams.__struct_fields__} - UNREAD_PARAMS)
    body = data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=4))
    if data.draw(st.booleans()):
        body["sampling_params"] = data.draw(st.dictionaries(st.sampled_from(params), JSON, max_size=4))
    theirs, ours = verdicts(codec, body)
    assert ours == theirs
