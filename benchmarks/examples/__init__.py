"""Examples that run: CI runs them against simulated engines and against real ones."""
