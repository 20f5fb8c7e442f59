"""The real suite: the same tests against real SGLang on CPU and against the simulated engine."""
