"""Dialects: the pure translation between our values and one engine's JSON. No I/O, no state."""
