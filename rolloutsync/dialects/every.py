"""Every dialect there is, by the name that users write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolloutsync.dialects.sglang import SGLangDialect
from rolloutsync.dialects.vllm import VLLMDialect

if TYPE_CHECKING:
    from rolloutsync.dialects.base import Dialect

SGLANG: Dialect = SGLangDialect()
VLLM: Dialect = VLLMDialect()
BY_NAME: dict[str, Dialect] = {"sglang": SGLANG, "vllm": VLLM}
AUTO = "auto"  # each engine is asked what it is
NAMES = (AUTO, *BY_NAME)
