"""The same seeded sequences of calls against real SGLang and the simulated engine, and what differs between the two."""
