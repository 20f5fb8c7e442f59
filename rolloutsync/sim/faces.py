"""Which engine a config describes: one scheduler, two front doors."""

from __future__ import annotations

from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.engine import Engine
from rolloutsync.sim.vllm_engine import VllmEngine


def engine_of(config: SimConfig) -> Engine:
    """Makes the engine of the config's dialect."""
    return VllmEngine(config) if config.dialect == "vllm" else Engine(config)
