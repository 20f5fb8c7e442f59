"""SGLang's own files, from its released wheel: fetched on first use, kept in the cache, never part of this repository.

Single files are loaded by their path: SGLang itself is neither installed nor imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.real.kit import KitError, Report, cache_root, once, only_one, run

VERSION = "0.5.23"
WHEEL_FOR = ("--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux_2_34_x86_64")
KITS = "sglang/test/kits"
CODEC = "sglang/api/v1/api_types.py"
PROTOCOL = "sglang/srt/entrypoints/openai/protocol.py"
CHUNKS = "sglang/srt/entrypoints/openai/sse_utils.py"
METRICS = "sglang/srt/observability/metrics_collector.py"
FILES = (CODEC, PROTOCOL, CHUNKS, METRICS)
PREFIX = "oracle_"  # of the names of loaded modules


@dataclass(frozen=True)
class Oracles:
    """The files of one release."""

    folder: Path

    def kit(self, name: str) -> ModuleType:
        """One of SGLang's own test kits."""
        return _load(self.folder / KITS / f"{name}.py")

    def codec(self) -> ModuleType:
        """The engine's JSON contract: `GenerateRequest`, `GenerateResponse`, `AbortRequest` and others."""
        return _load(self.folder / CODEC)

    def source(self, name: str) -> str:
        """The text of one of `FILES`, to be read and not run: it would import the whole engine."""
        return (self.folder / name).read_text()


def oracle_root() -> Path:
    """Where everything of this folder is cached."""
    return cache_root().parent / "oracles"


def ensure(report: Report) -> Oracles:
    """Returns the files, fetching the wheel (39 MB) first if they are not in the cache.

    Args:
        report: Called with one line before each step that takes long.

    Raises:
        KitError: The wheel cannot be had; the message shows what pip said.
    """
    name = f"sglang-{VERSION}-{hashlib.sha256(' '.join((KITS, *FILES)).encode()).hexdigest()[:10]}"
    return Oracles(cached(name, lambda folder: _fetch(folder, report), report))


def cached(name: str, build: Callable[[Path], None], report: Report) -> Path:
    """Returns a folder of the cache, built first if it is not there; one run at a time."""
    root = oracle_root()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / name
    with only_one(root / "lock", report):
        once(folder, lambda: build(folder))
    return folder


def _fetch(folder: Path, report: Report) -> None:
    report(f"fetching the wheel of SGLang {VERSION} (39 MB)")
    store, log = folder / "wheel", folder.parent / "sglang.log"
    store.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "-d", str(store)]
    run([*pip, "--only-binary", ":all:", *WHEEL_FOR, f"sglang=={VERSION}"], log)
    (wheel,) = store.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name in FILES or name.startswith(f"{KITS}/")]
        archive.extractall(folder, wanted)
    wheel.unlink()
    if missing := set(FILES) - set(wanted):
        raise KitError(f"{wheel.name} holds no {', '.join(sorted(missing))}")


def _load(path: Path) -> ModuleType:
    name = PREFIX + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
