"""A tqdm bar, moved by the thread that waits."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tqdm import tqdm

    from rolloutsync.clock import Clock

SHOW_AFTER_S = 2.0
LOOK_S = 0.5


class Progress:
    """Shows how far a call is. Thread-safe. Bars of calls that run at the same time are below each other.

    Args:
        total: What it ends at.
        wanted: True: at once; None: after two seconds, and only on a terminal; False: never.
        clock: Time.
        unit: What is counted.
    """

    def __init__(self, total: int, wanted: bool | None, clock: Clock, unit: str = "sample") -> None:
        self._total = total
        self._clock = clock
        self._unit = unit
        self._begun = clock.monotonic()
        self._wanted = wanted if wanted is not None else sys.stderr.isatty()
        self._asked = bool(wanted)
        self._show_at = self._begun + (0.0 if wanted else SHOW_AFTER_S)
        self._lock = threading.Lock()  # guards: _bar, _closed. Held while the bar is drawn.
        self._bar: tqdm[None] | None = None
        self._closed = False

    @property
    def wanted(self) -> bool:
        """Whether a bar may be shown at all."""
        return self._wanted

    def begin(self) -> None:
        """A blocking call begins: a bar that is not asked for waits two seconds from now."""
        self._show_at = self._clock.monotonic() + (0.0 if self._asked else SHOW_AFTER_S)

    def show(self, done: int, tokens: int, rest: Mapping[str, object]) -> None:
        """Move the bar to ``done``; ``tokens`` were made since it began, and ``rest`` is shown beside it."""
        now = self._clock.monotonic()
        if not self._wanted:
            return
        with self._lock:
            if self._closed or (self._bar is None and now < self._show_at):
                return
            bar = self._bar = self._bar or self._open()
            rate = tokens / max(1e-9, now - self._begun)
            bar.set_postfix({"tok/s": f"{rate:.0f}", **rest}, refresh=False)
            bar.update(done - bar.n)

    def _open(self) -> tqdm[None]:
        from tqdm import tqdm  # noqa: PLC0415 - most calls show no bar

        return tqdm(total=self._total, unit=self._unit, dynamic_ncols=True)

    def close(self) -> None:
        """Leave the bar as it stands; it is not shown again. Idempotent."""
        with self._lock:
            bar, self._bar, self._closed = self._bar, None, True
            if bar is not None:
                bar.refresh()
                bar.close()
