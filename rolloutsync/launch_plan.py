"""What it takes to run one engine process: a frozen value, checked when it is made, that knows its command line."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rolloutsync.errors import shown

_ROOT = Path(__file__).resolve().parents[1]  # where a child finds the simulated engine
_LOOPBACK = "127.0.0.1"
_ANY = {"0.0.0.0": _LOOPBACK, "::": "::1"}  # noqa: S104 - where an engine on all addresses is reached
_SECRET = ("key", "token", "password")
_CONFIG = "--config-json"


@dataclass(frozen=True)
class _Kind:
    """How an engine is started.

    Attributes:
        module: Run with ``python -m``.
        model: Its flag for the checkpoint.
        version: Its flag for the label of the weights; empty: it has none.
        owned: Further flags that are not the user's to give, and the parameter that stands for each.
    """

    module: str
    model: str = ""
    version: str = ""
    owned: Mapping[str, str] = field(default_factory=dict)


_KINDS = {
    "sglang": _Kind("sglang.launch_server", "--model-path", "--weight-version", {"--model": "model"}),
    "vllm": _Kind("vllm.entrypoints.openai.api_server", "--model", "", {"--uds": "host"}),
    "sim": _Kind("rolloutsync.sim", owned={"--parent": "", "--watch-stdin": ""}),
}
_SIM_OWNED = {"port": "port", "model_path": "model", "weight_version": "weight_version"}


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What to run, and how long to wait for it; the fields are the parameters of ``launch_engine``.

    Raises ``ValueError`` naming field and value.
    """

    kind: str
    model: str | os.PathLike[str] | None = None
    weight_version: str | int | None = None
    port: int | None = None
    host: str = _LOOPBACK
    args: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    python: str | os.PathLike[str] | None = None
    ready_timeout: float = 600.0
    grace: float = 15.0

    def __post_init__(self) -> None:
        self._settle()
        self._require("kind", self.kind in _KINDS, "one of " + ", ".join(_KINDS))
        self._require("model", bool(self.model) or self.kind == "sim", f"given, since the engine is {self.kind}")
        self._require("port", self.port is None or (_is_int(self.port) and 1 <= self.port <= 65535), "1 to 65535")
        self._require("host", isinstance(self.host, str) and bool(self.host), "an address")
        self._require("host", self.kind != "sim" or self.host == _LOOPBACK, f"{_LOOPBACK}, all that a sim listens on")
        self._require("ready_timeout", _is_number(self.ready_timeout) and self.ready_timeout > 0, "seconds above 0")
        self._require("grace", _is_number(self.grace) and self.grace >= 0, "seconds, at least 0")
        self._require("python", shutil.which(self.interpreter) is not None, "a program that can be run")
        self._require("args", isinstance(self.args, tuple) and _all_strings(self.args), "a sequence of strings")
        env = self.env or {}
        self._require("env", _all_strings([*env, *env.values()]), "names and values that are strings")
        version = self.weight_version
        self._require("weight_version", version is None or self.kind != "vllm", "None: vLLM has no flag for it")
        self._require("weight_version", version is None or bool(version), "None or not empty")
        self._check_flags()
        if self.kind == "sim":
            self._sim_config()

    def _settle(self) -> None:
        """Give what may be written in several ways its one form."""
        for name in ("model", "python"):
            value = getattr(self, name)
            object.__setattr__(self, name, os.fspath(value) if isinstance(value, os.PathLike) else value)
        if self.weight_version is not None:
            object.__setattr__(self, "weight_version", str(self.weight_version))
        object.__setattr__(self, "env", dict(self.env or {}))
        if isinstance(self.args, Sequence) and not isinstance(self.args, str):
            object.__setattr__(self, "args", tuple(self.args))

    @property
    def interpreter(self) -> str:
        """The Python that has the engine."""
        return str(self.python or sys.executable)

    def url(self, port: int) -> str:
        """Where the engine is reached from this machine."""
        host = _ANY.get(self.host, self.host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def address(self, port: int) -> tuple[str, int]:
        """The same for a socket."""
        return _ANY.get(self.host, self.host), port

    def command(self, port: int) -> list[str]:
        """What to run."""
        base = [self.interpreter, "-m", _KINDS[self.kind].module]
        return base + (self._sim_words(port) if self.kind == "sim" else self._words(port))

    def environment(self) -> dict[str, str]:
        """What to run it in: this process's, and the user's over it."""
        merged = {**os.environ, "PYTHONUNBUFFERED": "1", **(self.env or {})}
        if self.kind == "sim":
            merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), merged.get("PYTHONPATH")]))
        return merged

    def _words(self, port: int) -> list[str]:
        kind = _KINDS[self.kind]
        version = [kind.version, str(self.weight_version)] if self.weight_version is not None else []
        return [kind.model, str(self.model), "--host", self.host, "--port", str(port), *version, *self.args]

    def _sim_words(self, port: int) -> list[str]:
        given, rest = self._sim_config()
        ours = {"port": port, "model_path": self.model, "weight_version": self.weight_version}
        config = {**given, **{name: value for name, value in ours.items() if value is not None}}
        return [_CONFIG, json.dumps(config), *rest]

    def _sim_config(self) -> tuple[dict[str, object], list[str]]:
        """The user's settings of a simulated engine, and the other arguments."""
        rest = list(self.args)
        if _CONFIG not in rest:
            return {}, rest
        at = rest.index(_CONFIG)
        text = "".join(rest[at + 1 : at + 2])
        try:
            given = json.loads(text)
        except json.JSONDecodeError:
            given = None
        self._require("args", isinstance(given, dict), f"such that a JSON object follows {_CONFIG}")
        for name in given.keys() & _SIM_OWNED:
            self._refuse(f"{_CONFIG} with {name!r}", _SIM_OWNED[name])
        return given, rest[:at] + rest[at + 2 :]

    def _check_flags(self) -> None:
        kind = _KINDS[self.kind]
        owned = {"--host": "host", "--port": "port", **kind.owned}
        owned |= {kind.model: "model", kind.version: "weight_version"}
        for word in self.args:
            flag = word.partition("=")[0].replace("_", "-")
            if flag.startswith("--") and flag in owned:
                self._refuse(repr(word), owned[flag])

    def _refuse(self, what: str, parameter: str) -> None:
        instead = f": use the parameter {parameter}" if parameter else ""
        raise ValueError(f"args must not contain {what}, which launch_engine sets itself{instead}")

    def _require(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise ValueError(f"{name} must be {wanted}, got {shown(getattr(self, name))}")


def blanked(command: Sequence[str]) -> tuple[str, ...]:
    """A command line that may be shown: what follows a flag for a key is left out."""
    words: list[str] = []
    for word in command:
        flag, equals, _ = word.partition("=")
        before = words[-1] if words else ""
        if equals and _is_secret(flag):
            words.append(f"{flag}=...")
        else:
            words.append("..." if _is_secret(before) and "=" not in before and not word.startswith("--") else word)
    return tuple(words)


def _is_secret(flag: str) -> bool:
    """Whether a flag's value is a key: ``--api-key`` is, ``--ssl-keyfile`` and ``--max-total-tokens`` are not."""
    return flag.startswith("--") and flag.replace("_", "-").rpartition("-")[2] in _SECRET


def _all_strings(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(float(value))  # type: ignore[arg-type]
