"""A simulated SGLang or vLLM engine: a real HTTP server in its own process, for demos, tests and users without a GPU.

```python
from rolloutsync.sim import Fault, SimFleet

with SimFleet(engines=4, tokens_per_second=500.0) as fleet:
    fleet.engines[0].add_fault(Fault(kind="drop", seconds=0.2))
    print(list(fleet), fleet.engines[0].state()["peak_running"])
```

`SimFleet(dialect="vllm")` speaks vLLM, and a fleet of `configs` can have both: one scheduler with two faces.

It continues every context by a pure function of it (`rolloutsync.sim.tokens`), so that a test can say what is right.
"""

from rolloutsync.sim.config import SimConfig
from rolloutsync.sim.faults import Fault
from rolloutsync.sim.fleet import SimEngine, SimFleet, SimStartError, run_engines

__all__ = ["Fault", "SimConfig", "SimEngine", "SimFleet", "SimStartError", "run_engines"]
