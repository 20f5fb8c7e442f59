"""Settings and faults are checked when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutsync.sim import Fault, SimConfig, SimFleet


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"vocab_size": 10}, "vocab_size must be in .*, got 10"),
        ({"port": 70000}, "port must be at most 65535, got 70000"),
        ({"tokens_per_second": 0}, "tokens_per_second must be above 0, got 0"),
        ({"dp_size": 0}, "dp_size must be at least 1, got 0"),
        ({"death_delay_s": -1}, "death_delay_s must be at least 0, got -1"),
        ({"max_queued_requests": -1}, "max_queued_requests must be None or at least 0, got -1"),
        ({"mean_output_tokens": 0.5}, "mean_output_tokens must be at least 1, got 0.5"),
        ({"dialect": "vllm", "max_queued_requests": 1}, "max_queued_requests must be left out .*, got 1"),
        ({"dialect": "vllm", "admin_api_key": "k"}, "admin_api_key must be left out .*, got 'k'"),
        ({"dialect": "tgi"}, "dialect must be one of sglang, vllm, got 'tgi'"),
        ({"version": "new"}, "version must be a version .*, got 'new'"),
        ({"routed_experts": (2, 9, 8)}, "routed_experts must be .*, got \\(2, 9, 8\\)"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(fields: dict[str, Any], named: str) -> None:
    """The message says which field and what was given."""
    with pytest.raises(ValueError, match=named):
        SimConfig(**fields)


def test_a_setting_of_the_wrong_type_is_a_type_error() -> None:
    """A string is no number."""
    with pytest.raises(TypeError, match="dp_size must be a number, got '2'"):
        SimConfig(dp_size="2")  # type: ignore[arg-type]


def test_settings_travel_as_json() -> None:
    """Nothing is lost on the way to the child process."""
    config = SimConfig(routed_experts=(2, 2, 8), version="0.5.9", api_key="k", max_queued_requests=3)
    assert SimConfig.from_json(config.to_json()) == config
    assert config.release == (0, 5, 9)
    with pytest.raises(ValueError, match="unknown settings: speed"):
        SimConfig.from_json('{"speed": 1}')


def test_what_is_not_given_is_the_real_engines_own() -> None:
    """Each dialect has other defaults; a version may leave its last number out."""
    sglang, vllm = SimConfig(), SimConfig(dialect="vllm")
    assert (sglang.version, sglang.report_interval, sglang.load_publish_interval) == ("0.5.23", 50, 15)
    assert (vllm.version, vllm.report_interval, vllm.load_publish_interval) == ("0.33.0", 1, 1)
    assert SimConfig(dialect="vllm", version="0.16").version == "0.16.0"
    assert SimConfig.from_json(vllm.to_json()) == vllm
    assert SimConfig.from_json("{}", dialect="vllm") == vllm


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "explode"}, "kind must be one of .*, got 'explode'"),
        ({"kind": "hang", "times": 0}, "times must be None or at least 1, got 0"),
        ({"kind": "status"}, "status must be given for kind 'status', got None"),
        ({"kind": "status", "status": 99}, "status must be in .*, got 99"),
        ({"kind": "delay", "seconds": -1.0}, "seconds must be at least 0, got -1.0"),
    ],
)
def test_a_bad_fault_is_named_with_its_value(fields: dict[str, Any], named: str) -> None:
    """The message says which field and what was given."""
    with pytest.raises(ValueError, match=named):
        Fault(**fields)


def test_a_fleet_wants_engines() -> None:
    """None is a mistake, and so are two descriptions at once."""
    with pytest.raises(ValueError, match="engines must be at least 1, got 0"):
        SimFleet(0)
    with pytest.raises(ValueError, match="not both: vocab_size"):
        SimFleet(configs=[SimConfig()], vocab_size=600)
