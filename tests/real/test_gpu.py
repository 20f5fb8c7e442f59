"""What the marker `gpu` says where it cannot run: never a silent pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .gpu import ARGS, MODEL, PYTHON, gpu_device, gpu_kit
from .kit import KitError


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment that names an interpreter and a model, both as good as they look; the model's folder."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv(PYTHON, sys.executable)
    monkeypatch.setenv(MODEL, str(tmp_path))
    monkeypatch.delenv(ARGS, raising=False)
    return tmp_path


@pytest.mark.parametrize("variable", [PYTHON, MODEL])
def test_a_variable_that_is_not_set(variable: str, named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable)
    with pytest.raises(KitError, match=f"{variable} is not set"):
        gpu_kit()


@pytest.mark.parametrize("variable", [PYTHON, MODEL])
def test_a_path_that_is_not_there(variable: str, named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "/no/such/path")
    with pytest.raises(KitError, match=f"{variable}=/no/such/path is not"):
        gpu_kit()


def script(folder: Path, text: str) -> Path:
    """An interpreter that does only this."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("echo", "finds no GPU"),
        ("echo No module named sglang >&2; exit 1", "cannot import sglang and torch: No module named sglang"),
    ],
)
def test_an_interpreter_without_sglang_or_gpu(
    text: str, means: str, named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON, str(script(named, text)))
    with pytest.raises(KitError, match=means):
        gpu_device(gpu_kit())


def test_the_device_is_called_by_its_name(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a CPU through these variables is not reported as one on a GPU."""
    monkeypatch.setenv(PYTHON, str(script(named, "echo A100")))
    assert gpu_device(gpu_kit()).name == "GPU A100"
    monkeypatch.setenv(ARGS, "--tp 2 --device cpu")
    device = gpu_device(gpu_kit())
    assert device.name.startswith("cpu (named by ROLLOUTSYNC_GPU_ARGS")
    assert device.flags[-4:] == ("--tp", "2", "--device", "cpu")
