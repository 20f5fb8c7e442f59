"""Sessions: requests that bear the same ``session_id`` go to one engine."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from rolloutsync.order import Group

if TYPE_CHECKING:
    from rolloutsync.sample import Prompt

_REMEMBERED = 65536


class Sessions:
    """The groups of the sessions that were used last. Thread-safe.

    A session stays on the engine (and DP rank) of its first request while that is live, and waits there for room: its
    prefix is cached there. One that was not used for long is forgotten, and goes where it is quiet.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards: _groups
        self._groups: OrderedDict[str, Group] = OrderedDict()

    def group_of(self, prompt: Prompt) -> Group | None:
        """The group of a prompt's session; None for one without."""
        name = prompt.fields.get("session_id")
        if name is None:
            return None
        with self._lock:
            group = self._groups.setdefault(str(name), Group(1, sticky=True))
            self._groups.move_to_end(str(name))
            if len(self._groups) > _REMEMBERED:
                self._groups.popitem(last=False)
        return group
