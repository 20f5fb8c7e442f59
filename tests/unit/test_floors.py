"""The house: who may import whom, who may import what, and how large a module may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rolloutsync

_ROOT = Path(rolloutsync.__file__).parent
_PACKAGES = ("client", "dialects", "transport")  # each counts as one module
_FLOORS = {
    "errors": 0,
    "routers": 2,
    "discovery": 5,
    "routed": 7,
    "clock": 1,
    "config": 1,
    "sample": 1,
    "payload": 1,
    "threads": 1,
    "dialects": 2,
    "transport": 2,
    "retry": 2,
    "growth": 2,
    "order": 2,
    "progress": 2,
    "transcript": 2,
    "recognition": 3,
    "endpoint": 4,
    "engine": 5,
    "batch": 6,
    "resume": 5,
    "storage": 2,
    "proof": 5,
    "gate": 5,
    "weight_report": 5,
    "sessions": 5,
    "slot": 5,
    "placement": 5,
    "ledger": 5,
    "admission": 5,
    "roster": 6,
    "fleet": 7,
    "assurance": 6,
    "sweep": 7,
    "vigil": 6,
    "weight_member": 6,
    "idle": 8,
    "health": 8,
    "journey": 6,
    "rollout": 7,
    "controls": 7,
    "quiet": 8,
    "weight_groups": 7,
    "weight_update": 7,
    "workers": 8,
    "weights": 8,
    "jobs": 8,
    "collect": 8,
    "collected": 2,
    "launch_guard": 0,
    "launch_plan": 2,
    "launch_process": 2,
    "launch": 3,
    "keeper": 4,
    "tables": 2,
    "rows": 3,
    "tensors": 4,
    "stats": 8,
    "audit": 8,
    "dump": 8,
    "turn": 8,
    "episodes": 9,
    "core": 9,
    "remote": 4,
    "lane": 5,
    "actors": 8,
    "crew": 9,
    "station": 10,
    "fleet_core": 10,
    "ray_link": 12,
    "ray_fleet": 13,
    "owner": 9,
    "client": 10,
    "__init__": 11,
    "cli": 11,
    "ray_actor": 11,
    "ray_engine": 12,
}
_HEAVY = {"torch", "pyarrow", "ray", "sglang", "vllm", "uvicorn", "starlette", "matplotlib", "typer", "rich", "asyncio"}
_OF_RAY = {"ray_actor", "ray_engine", "ray_link", "ray_fleet"}
_LINES = 400


def _sources() -> dict[str, list[Path]]:
    """Module, or package that counts as one, and its files; without the simulated engine."""
    found: dict[str, list[Path]] = {}
    for path in sorted(_ROOT.rglob("*.py")):
        top = path.relative_to(_ROOT).parts[0].removesuffix(".py")
        if top != "sim":
            found.setdefault(top, []).append(path)
    return found


def _imports(path: Path) -> list[tuple[str, bool, bool]]:
    """(imported module, for annotations alone, inside a function) for each import in a file."""
    found: list[tuple[str, bool, bool]] = []

    def visit(node: ast.AST, typing_only: bool, nested: bool) -> None:
        for child in ast.iter_child_nodes(node):
            names = [alias.name for alias in child.names] if isinstance(child, ast.Import) else []
            if isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                base = str(child.module)
                names = [f"{base}.{alias.name}" for alias in child.names] if base == "rolloutsync" else [base]
            found.extend((name, typing_only, nested) for name in names)
            guard = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            visit(child, typing_only or guard, nested or inside)

    visit(ast.parse(path.read_text()), False, False)
    return found


def _every_import() -> list[tuple[str, str, bool, bool]]:
    return [
        (module, name, typing_only, nested)
        for module, paths in _sources().items()
        for path in paths
        for name, typing_only, nested in _imports(path)
    ]


def test_every_module_has_a_floor() -> None:
    """A new module must say where it lives."""
    assert set(_sources()) == set(_FLOORS)


def test_modules_import_only_from_floors_below() -> None:
    """At run time strictly from below; names for annotations may also come from the same floor, never from above."""
    wrong = []
    for module, name, typing_only, _ in _every_import():
        parts = name.split(".")
        target = parts[1] if parts[0] == "rolloutsync" and len(parts) > 1 else None
        if target in {None, "sim"} or target == module:
            continue
        allowed = _FLOORS[module] - (0 if typing_only else 1)
        if _FLOORS[str(target)] > allowed:
            wrong.append(f"{module} ({_FLOORS[module]}) imports {target} ({_FLOORS[str(target)]})")
    assert not wrong


def test_only_the_clock_knows_the_time() -> None:
    """Everything else is handed a clock. The guard of engine processes is a program of its own, with its own time."""
    users = {module for module, name, _, _ in _every_import() if name.split(".")[0] in {"time", "datetime", "sched"}}
    assert users == {"clock", "launch_guard"}
    ours = [(module, name) for module, name, _, _ in _every_import() if name.startswith("rolloutsync")]
    assert not [each for each in ours if "launch_guard" in {each[0], each[1].split(".")[-1]}]


def test_only_the_transport_knows_the_http_library() -> None:
    """Others may name its types in annotations.

    What starts an engine asks it for one status over and over, before it serves and without a client, and holds its
    port: for that it has the standard library, and no HTTP library of the transport's.
    """
    names = {"requests", "urllib3", "http", "socket", "httpx", "aiohttp"}
    used = {
        (module, name.split(".")[0])
        for module, name, typing_only, _ in _every_import()
        if name.split(".")[0] in names and not typing_only
    }
    assert {module for module, _ in used} == {"transport", "launch"}
    assert {name for module, name in used if module == "launch"} == {"http", "socket"}


def test_what_starts_engines_knows_no_client() -> None:
    """It knows errors, the clock and how a thread is started, and works where nothing else of ours is in use."""
    ours = {"launch", "launch_plan", "launch_process", "keeper"}
    known = {name for module, name, _, _ in _every_import() if module in ours and name.startswith("rolloutsync.")}
    assert {name.split(".")[1] for name in known} - ours == {"errors", "clock", "threads"}


def test_the_core_imports_nothing_heavy() -> None:
    """The command line, the actor and the tensors alone may: these are what they are for."""
    wrong = [
        (module, name)
        for module, name, typing_only, nested in _every_import()
        if name.split(".")[0] in _HEAVY and not typing_only and module != "cli" and not nested
        if (module, name) != ("tensors", "torch") and (module not in _OF_RAY or name != "ray")
    ]
    assert not wrong


def test_tensors_know_samples_alone() -> None:
    """What becomes of samples is no business of the client's: nobody imports it, and it knows no engine."""
    ours = {"tables", "rows", "tensors"}
    known = {name for module, name, _, _ in _every_import() if module in ours and name.startswith("rolloutsync.")}
    assert {name.split(".")[1] for name in known} == {"sample", "transcript", "tables", "rows"}
    users = {module for module, name, _, _ in _every_import() if name.removeprefix("rolloutsync.") in ours}
    assert users <= ours


def test_client_and_simulated_engine_know_nothing_of_each_other() -> None:
    """The simulated engine is an oracle: code shared with the client would hide the client's errors."""
    into = [(module, nested) for module, name, _, nested in _every_import() if name.startswith("rolloutsync.sim")]
    assert all(module == "cli" and nested for module, nested in into)
    outward = {
        name
        for path in (_ROOT / "sim").rglob("*.py")
        for name, _, _ in _imports(path)
        if name.startswith("rolloutsync") and not name.startswith("rolloutsync.sim")
    }
    assert not outward


def test_no_module_is_long() -> None:
    """One module, one noun."""
    lengths = {str(path.relative_to(_ROOT)): len(path.read_text().splitlines()) for path in _ROOT.rglob("*.py")}
    assert {name: count for name, count in lengths.items() if count >= _LINES} == {}


def test_what_is_exported_is_what_is_public() -> None:
    """``__all__`` is sorted, complete, and everything in it exists."""
    tree = ast.parse((_ROOT / "__init__.py").read_text())
    imported = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert rolloutsync.__all__ == sorted(rolloutsync.__all__)
    assert set(rolloutsync.__all__) == imported
    assert all(hasattr(rolloutsync, name) for name in rolloutsync.__all__)


def test_the_package_is_typed() -> None:
    """Without the marker type checkers would ignore our hints."""
    assert (_ROOT / "py.typed").is_file()


def test_importing_is_quick_and_light() -> None:
    """Our own share, in CPU seconds, the best of three: others may be in the way, and numpy's is not ours."""
    assert min(_import_seconds() for _ in range(3)) < _QUICK_S


def _import_seconds() -> float:
    code = (
        "import sys, time, numpy, requests, orjson, pybase64, tqdm; "
        "begun = time.process_time(); import rolloutsync; print(time.process_time() - begun); "
        f"assert not {_HEAVY!r} & set(sys.modules), set(sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_ROOT.parent, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


_QUICK_S = 0.4  # on a slow and busy machine; half of that on others


@pytest.mark.parametrize("package", _PACKAGES)
def test_packages_hide_their_parts(package: str) -> None:
    """What others import from the transport is what it exports; a dialect's modules are its own business."""
    public = ("base", "common", "every", "family", "sampling", "sglang")  # what all speak of, and who there is
    exported = {f"rolloutsync.{package}", *(f"rolloutsync.dialects.{name}" for name in public)}
    reached = {
        name
        for module, name, _, _ in _every_import()
        if name.startswith(f"rolloutsync.{package}") and module not in {package, "cli"}
    }
    assert reached <= exported
