"""What is refused before anything starts, and the command lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolloutsync.launch import launch_engine
from rolloutsync.launch_plan import LaunchPlan, blanked


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("triton", {}, r"kind must be one of sglang, vllm, sim, got 'triton'"),
        ("sglang", {}, r"model must be given, since the engine is sglang, got None"),
        ("vllm", {"model": ""}, r"model must be given, since the engine is vllm, got ''"),
        ("sim", {"port": 0}, r"port must be 1 to 65535, got 0"),
        ("sim", {"port": 65536}, r"port must be 1 to 65535, got 65536"),
        ("sim", {"port": True}, r"port must be 1 to 65535, got True"),
        ("sim", {"host": "0.0.0.0"}, r"host must be 127.0.0.1, all that a sim listens on, got '0.0.0.0'"),
        ("sim", {"host": ""}, r"host must be an address, got ''"),
        ("sim", {"ready_timeout": float("inf")}, r"ready_timeout must be seconds above 0, got inf"),
        ("sim", {"grace": -1}, r"grace must be seconds, at least 0, got -1"),
        ("sim", {"python": "/no/python"}, r"python must be a program that can be run, got '/no/python'"),
        ("sim", {"args": "--dialect vllm"}, r"args must be a sequence of strings, got '--dialect vllm'"),
        ("sim", {"args": ["--version", 5]}, r"args must be a sequence of strings, got \('--version', 5\)"),
        ("sim", {"env": {"A": 1}}, r"env must be names and values that are strings, got {'A': 1}"),
        ("sim", {"weight_version": ""}, r"weight_version must be None or not empty, got ''"),
        (
            "vllm",
            {"model": "m", "weight_version": "3"},
            r"weight_version must be None: vLLM has no flag for it, got '3'",
        ),
        (
            "sglang",
            {"model": "m", "args": ["--port", "1"]},
            r"args must not contain '--port', which launch_engine sets itself: use the parameter port",
        ),
        (
            "vllm",
            {"model": "m", "args": ["--host=::"]},
            r"args must not contain '--host=::', .*: use the parameter host",
        ),
        ("sglang", {"model": "m", "args": ["--model_path", "x"]}, r"'--model_path', .*: use the parameter model"),
        ("sglang", {"model": "m", "args": ["--weight-version=1"]}, r": use the parameter weight_version"),
        ("vllm", {"model": "m", "args": ["--model", "x"]}, r": use the parameter model"),
        (
            "sim",
            {"args": ["--watch-stdin"]},
            r"args must not contain '--watch-stdin', which launch_engine sets itself$",
        ),
        ("sim", {"args": ["--config-json"]}, r"args must be such that a JSON object follows --config-json"),
        ("sim", {"args": ["--config-json", "[]"]}, r"args must be such that a JSON object follows --config-json"),
        ("sim", {"args": ["--config-json", '{"port": 1}']}, r"--config-json with 'port', .*: use the parameter port"),
    ],
)
def test_bad_input_is_named(kind: str, options: dict[str, Any], message: str) -> None:
    """Field and value, before a process or a file exists."""
    with pytest.raises(ValueError, match=message):
        launch_engine(kind, **options)


def test_what_is_the_users_own_is_let_through() -> None:
    """vLLM has no ``--model-path``, and a value may look like anything."""
    plan = LaunchPlan(kind="vllm", model=Path("m"), args=["--served-model-name", "port", "--weight-version", "7"])
    assert plan.command(9)[3:] == ["--model", "m", "--host", "127.0.0.1", "--port", "9", *plan.args]


def test_the_simulated_engines_settings_are_joined() -> None:
    """The user's fields and ours, in one object."""
    args = ["--version", "0.5.9", "--config-json", '{"tokens_per_second": 9.5}', "--dialect", "sglang"]
    plan = LaunchPlan(kind="sim", model="m", weight_version=3, args=args)
    flag, config, *rest = plan.command(8)[3:]
    assert flag == "--config-json"
    assert json.loads(config) == {"tokens_per_second": 9.5, "port": 8, "model_path": "m", "weight_version": "3"}
    assert rest == ["--version", "0.5.9", "--dialect", "sglang"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:5"),
        ("10.0.0.7", "http://10.0.0.7:5"),
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("::", "http://[::1]:5"),
        ("fd00::7", "http://[fd00::7]:5"),
    ],
)
def test_urls(host: str, url: str) -> None:
    """An engine on all addresses is reached on the loopback, and IPv6 is put in brackets."""
    assert LaunchPlan(kind="vllm", model="m", host=host).url(5) == url


def test_keys_are_blanked_out() -> None:
    """What follows a flag for a key, however it is written; nothing else."""
    words = [
        "--api-key",
        "s1",
        "--admin_api_key",
        "s2",
        "--hf-token=s3",
        "--ssl-keyfile",
        "path",
        "--key",
        "--other",
        "v",
    ]
    assert (
        " ".join(blanked(words))
        == "--api-key ... --admin_api_key ... --hf-token=... --ssl-keyfile path --key --other v"
    )
