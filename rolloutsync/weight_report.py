"""What a weight update came to, engine by engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_COLUMNS = ("engine", "state", "version", "checksum", "detail")


class UpdateState(str, Enum):
    """Whether an engine has the weights."""

    UPDATED = "updated"
    STALE = "stale"  # quarantined until an update that it gets
    ABSENT = "absent"  # was not there to be updated; joins when it has the weights

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """How the update of one engine went.

    Attributes:
        url: Of the engine.
        state: See ``UpdateState``.
        version: What it called its weights when asked at the end; None where it was not asked or did not say.
        checksum: Its own sum over its weights, with ``verify="checksum"``.
        flushed: Its prefix cache was emptied. One that holds requests (mode "hold") cannot.
        detail: What was wrong, in words; empty if nothing was.
    """

    url: str
    state: UpdateState
    version: str | None = None
    checksum: str | None = None
    flushed: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What a weight update came to. ``print`` shows it as a table.

    Attributes:
        version: The label that the weights were given.
        mode: How the engines were made quiet.
        engines: One ``EngineUpdate`` for each engine, in the fleet's order.
        seconds: From the closing of the gate to the last answer about the weights.
    """

    version: str
    mode: str
    engines: tuple[EngineUpdate, ...]
    seconds: float

    @property
    def stale(self) -> tuple[EngineUpdate, ...]:
        """The engines that took part and do not have the weights."""
        return tuple(engine for engine in self.engines if engine.state is UpdateState.STALE)

    @property
    def updated(self) -> tuple[EngineUpdate, ...]:
        """The engines that have the weights."""
        return tuple(engine for engine in self.engines if engine.state is UpdateState.UPDATED)

    def __str__(self) -> str:
        rows = [_COLUMNS, *(_row(engine) for engine in self.engines)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        told = f"{len(self.updated)} of {len(self.engines)} engines have weights {self.version!r}"
        return "\n".join([*lines, f"{told} after {self.seconds:.2f} s (mode {self.mode})"])


def _row(engine: EngineUpdate) -> tuple[str, ...]:
    return engine.url, engine.state.value, engine.version or "-", (engine.checksum or "-")[:12], engine.detail[:120]
