"""Options as frozen dataclasses, and the command line that has the same names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


class Form(str, Enum):
    """How much is measured: all of it; enough for a glance (minutes); only whether everything works (seconds)."""

    FULL = "full"
    QUICK = "quick"
    SMOKE = "smoke"


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every benchmark.

    Attributes:
        form: See ``Form``.
        repeat: Measured runs of each; 0 for what the form says (5, 3, 1).
        compare: Whether the other clients run too; None for what the benchmark says.
        peers: These clients alone.
        json: File for everything that was measured.
        plot: File for a picture of it, .svg or .png.
    """

    form: Form = Form.FULL
    repeat: int = 0
    compare: bool | None = None
    peers: tuple[str, ...] = ()
    json: str = ""
    plot: str = ""

    @property
    def repeats(self) -> int:
        """Measured runs of each client in each case."""
        return self.repeat or {Form.FULL: 5, Form.QUICK: 3, Form.SMOKE: 1}[self.form]


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of ``Common``."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="a glance, in under five minutes")
    form.add_argument("--smoke", action="store_true", help="only whether everything works, in seconds")
    parser.add_argument("--repeat", type=_positive, default=0, metavar="N", help="runs of each (5; quick 3; smoke 1)")
    parser.add_argument("--compare", choices=("yes", "no"), help="whether the other clients run too")
    parser.add_argument("--peers", nargs="+", default=(), metavar="PEER", help="only these clients")
    parser.add_argument("--json", default="", metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", default="", metavar="FILE", help="draw it, .svg or .png")


def read_common(parsed: argparse.Namespace) -> Common:
    """What ``add_common`` has read."""
    form = Form.QUICK if parsed.quick else Form.SMOKE if parsed.smoke else Form.FULL
    return Common(
        form=form,
        repeat=parsed.repeat,
        compare=None if parsed.compare is None else parsed.compare == "yes",
        peers=tuple(parsed.peers),
        json=parsed.json,
        plot=parsed.plot,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def add_fields(parser: argparse.ArgumentParser, options: Any) -> None:
    """An argument for each field of a dataclass value; a field that is not given stays as it is."""
    group = parser.add_argument_group("options of this benchmark")
    for field in fields(options):
        value = getattr(options, field.name)
        flags = [f"--{field.name.replace('_', '-')}"]
        extra = field.metadata.get("flags", ())
        kind, several = _kind(field.metadata, value)
        group.add_argument(
            *flags,
            *extra,
            type=kind,
            nargs="+" if several else None,
            action="extend" if several else "store",
            dest=field.name,
            default=None,
            help=f"{field.metadata.get('help', '')} ({_shown(value)})".strip(),
        )


def _kind(metadata: Any, value: Any) -> tuple[Any, bool]:
    if isinstance(value, tuple):
        return metadata.get("type") or type(value[0]), True
    return type(value), False


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read_fields(parsed: argparse.Namespace, options: T) -> T:
    """``options`` with what ``add_fields`` has read."""
    names = [field.name for field in fields(options)]  # type: ignore[arg-type]  # any dataclass value
    given = {name: getattr(parsed, name, None) for name in names}
    chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return replace(options, **{name: value for name, value in chosen.items() if value is not None})  # type: ignore[type-var]


def chosen_peers(common: Common, default: Sequence[str], alone: str, *, compare: bool = True) -> tuple[str, ...]:
    """Which clients run: those that are named, else all, or ours alone."""
    if common.peers:
        return common.peers
    return tuple(default) if (compare if common.compare is None else common.compare) else (alone,)
