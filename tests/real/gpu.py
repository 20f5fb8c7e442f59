"""The engine of somebody who has a GPU: which Python, which model and which flags, from the environment.

Nothing is installed and nothing is guessed. What is missing is an error, so a run without a GPU cannot pass for one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from .kit import Kit, KitError
from .launch import Device

PYTHON = "ROLLOUTSYNC_GPU_PYTHON"
MODEL = "ROLLOUTSYNC_GPU_MODEL"
ARGS = "ROLLOUTSYNC_GPU_ARGS"
ASK = "import sglang, torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
ASK_TIMEOUT_S = 120.0
TWO_ON_ONE = ("--mem-fraction-static", "0.3")  # both engines see the same GPU unless the arguments say otherwise


def gpu_kit() -> Kit:
    """The Python and the model that the environment names.

    Raises:
        KitError: One is not named or cannot be used.
    """
    python, model = (Path(_named(name)).expanduser() for name in (PYTHON, MODEL))
    if not os.access(python, os.X_OK) or not python.is_file():
        raise KitError(f"{PYTHON}={python} is not an interpreter that can be run")
    if not (model / "config.json").is_file():
        raise KitError(f"{MODEL}={model} is not a model's folder: it has no config.json")
    return Kit(python=python, llama=model, llama_other=model, moe=model)


def gpu_device(kit: Kit) -> Device:
    """What the engines run on: the GPU that PyTorch finds, or the device that the arguments name instead.

    Raises:
        KitError: There is none.
    """
    args = tuple(shlex.split(os.environ.get(ARGS, "")))
    if "--device" in args[:-1]:
        name = f"{args[args.index('--device') + 1]} (named by {ARGS}, no GPU was looked for)"
    else:
        name = f"GPU {_gpu_of(kit.python)}"
    return Device(name=name, flags=(*TWO_ON_ONE, *args), ready_timeout_s=900.0)


def _named(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise KitError(f"{variable} is not set: tests with the marker `gpu` need it, see tests/real/README.md")
    return value


def _gpu_of(python: Path) -> str:
    command = [str(python), "-c", ASK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise KitError(f"{PYTHON}={python} did not import sglang within {ASK_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise KitError(f"{PYTHON}={python} cannot import sglang and torch: {done.stderr.strip()[-500:]}")
    name = done.stdout.strip().rpartition("\n")[2]
    if not name:
        raise KitError(f"{PYTHON}={python}: its PyTorch finds no GPU; tests with the marker `gpu` need one")
    return name
