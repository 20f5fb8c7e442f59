"""A tqdm bar, moved by the thread that waits for the job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tqdm import tqdm

    from rolloutsync.clock import Clock

SHOW_AFTER_S = 2.0


class Progress:
    """Shows how far a job is. Used by one thread.

    Args:
        total: Samples.
        wanted: True: at once; None: after two seconds, and only on a terminal; False: never.
        clock: Time.
    """

    def __init__(self, total: int, wanted: bool | None, clock: Clock) -> None:
        self._total = total
        self._clock = clock
        self._begun = clock.monotonic()
        self._wanted = wanted if wanted is not None else sys.stderr.isatty()
        self._show_at = self._begun + (0.0 if wanted else SHOW_AFTER_S)
        self._bar: tqdm[None] | None = None

    @property
    def wanted(self) -> bool:
        """Whether a bar may be shown at all."""
        return self._wanted

    def show(self, counts: Mapping[str, int]) -> None:
        """Move the bar to ``counts``: done, tokens, aborted, failed."""
        now = self._clock.monotonic()
        if not self._wanted or now < self._show_at:
            return
        if self._bar is None:
            from tqdm import tqdm  # noqa: PLC0415 - most calls show no bar

            self._bar = tqdm(total=self._total, unit="sample", dynamic_ncols=True)
        rate = counts["tokens"] / max(1e-9, now - self._begun)
        rest = {"in_flight": self._total - counts["done"], "aborted": counts["aborted"], "failed": counts["failed"]}
        self._bar.set_postfix({"tok/s": f"{rate:.0f}", **rest}, refresh=False)
        self._bar.update(counts["done"] - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
