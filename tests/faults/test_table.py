"""The table in ``tests/README.md``: every kind of fault has a row, and every test that it names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
REPORTED = [1, 2, 3, 4, 6, 8, 9, 10, 11, 13, 14, 17, 18, 19, 20, 21, 22, 24, 26, 28, 29, 31, 32, 33, 34, 36, 37, 38]
_ROW = re.compile(r"^\| ([BP]\d\d) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def rows() -> dict[str, list[str]]:
    """The tests that each row names."""
    found = _ROW.findall((TESTS / "README.md").read_text())
    return {number: re.findall(r"`([^`]+::[^`]+)`", tests) for number, _, tests in found}


@functools.lru_cache
def defined(path: Path) -> set[str]:
    """Names of the functions that a file defines."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_kind_has_a_row() -> None:
    """Each reported one, in order, and each with a test."""
    table = rows()
    assert [number for number in table if number.startswith("B")] == [f"B{number:02}" for number in REPORTED]
    assert all(table.values())


def test_every_named_test_exists() -> None:
    """Nothing in the table is a promise alone."""
    named = {name for tests in rows().values() for name in tests}
    assert [
        name for name in sorted(named) if name.partition("::")[2] not in defined(TESTS / name.partition("::")[0])
    ] == []


def test_every_fault_test_is_in_the_table() -> None:
    """Nor is a test of this folder without a kind."""
    named = {name for tests in rows().values() for name in tests}
    files = [path for path in sorted(Path(__file__).parent.glob("test_*.py")) if path.name != Path(__file__).name]
    tests = {f"faults/{path.name}::{name}" for path in files for name in defined(path) if name.startswith("test_")}
    assert tests <= named
