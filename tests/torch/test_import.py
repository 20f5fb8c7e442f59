"""Who needs what: samples need neither library, tensors need torch, tables need pyarrow alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.torch


def outcome(code: str, *missing: str) -> str:
    """What a fresh interpreter prints in which some libraries cannot be imported."""
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in missing)
    command = [sys.executable, "-W", "error", "-c", f"import sys; {hide}{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


CAUGHT = "\ntry: {}\nexcept ImportError as error: print(error)"


def test_the_package_imports_neither() -> None:
    assert "[]" in outcome("import rolloutsync; print([n for n in ('torch', 'pyarrow') if n in sys.modules])")


def test_tensors_without_torch() -> None:
    """The message says what to install."""
    words = outcome(CAUGHT.format("import rolloutsync.tensors"), "torch")
    assert "rolloutsync.tensors needs torch" in words
    assert "pip install 'rolloutsync[torch]'" in words


def test_tables_without_pyarrow() -> None:
    """Said when a table is made: tensors do without."""
    words = outcome("from rolloutsync.tensors import to_table" + CAUGHT.format("to_table([])"), "pyarrow")
    assert "to_table needs pyarrow" in words
    assert "pip install 'rolloutsync[torch]'" in words


def test_tables_without_torch() -> None:
    assert "0\n" in outcome("from rolloutsync.tables import to_table; print(to_table([]).num_rows)", "torch")


def test_one_function_by_both_names() -> None:
    assert "True" in outcome("from rolloutsync import tables, tensors; print(tables.to_table is tensors.to_table)")
