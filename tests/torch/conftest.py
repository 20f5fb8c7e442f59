"""What needs torch (the extra ``torch``): ``pytest -m torch``. Without torch these fail, they are not skipped.

The modules import it at the top, so they are not even collected where the marker was not asked for: the fast suite runs
without torch, and does not wait for its import where it is installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Only for an expression that asks for the marker, or for everything."""
    asked = str(config.option.markexpr)
    return None if not asked or "torch" in asked.replace("not torch", "") else True
