"""Samples on disk: one file for a list, so that a step that was cut short goes on in another process."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rolloutsync.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_FORMAT = "rolloutsync samples"
SCHEMA = 1


def save_samples(path: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Write samples, partials among them, to one file (a numpy ``.npz``). Atomic: it is there whole or not at all.

    Blocks until the bytes are on disk. The error of a failed sample travels as its text.

    Args:
        path: Of the file; an old one is replaced.
        samples: In the order in which ``load_samples`` gives them back.

    Raises:
        TypeError: Something else than a sample, or metadata that JSON cannot say; names the sample.
        OSError: The file cannot be written.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    count = 0
    for number, sample in enumerate(samples):
        arrays |= {f"{number}/{name}": array for name, array in _packed(sample, number).items()}
        count += 1
    head = {"format": _FORMAT, "schema": SCHEMA, "count": count}
    _write(Path(path), {"head": np.array(json.dumps(head)), **arrays})


def _packed(sample: Any, number: int) -> dict[str, Any]:
    if not isinstance(sample, Sample):
        raise TypeError(f"samples[{number}] must be a Sample, got {sample!r:.200}")
    try:
        return sample.to_dict(arrays=True)
    except (TypeError, ValueError) as error:
        raise TypeError(f"samples[{number}]: its metadata or meta_info is not JSON: {error}") from None


def _write(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes names for its options
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_samples(path: str | os.PathLike[str]) -> list[Sample]:
    """The samples in a file that ``save_samples`` wrote, in order.

    Raises:
        ValueError: Not such a file, a damaged one, or one of another schema version.
        OSError: The file cannot be read.
    """
    try:
        with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            count = _check_head(file, path)
            return [Sample.from_dict(_Part(file, f"{number}/")) for number in range(count)]
    except (
        zipfile.BadZipFile,
        KeyError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        AttributeError,
    ) as error:
        raise ValueError(f"{path} is not a whole file of samples: {error}") from None


def _check_head(file: Any, path: Any) -> int:
    head = json.loads(str(file["head"])) if hasattr(file, "files") and "head" in file.files else {}
    if head.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a file of samples")
    if head.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {head.get('schema')!r}, this version of rolloutsync reads {SCHEMA}")
    return int(head["count"])


class _Part(dict[str, Any]):
    """One sample's arrays, read when they are asked for."""

    def __init__(self, file: Any, prefix: str) -> None:
        super().__init__()
        self._file = file
        self._prefix = prefix

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._file.files

    def __missing__(self, name: str) -> Any:
        return self._file[f"{self._prefix}{name}"]
