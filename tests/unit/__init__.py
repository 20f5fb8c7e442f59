"""Tests of the pure and low-floor modules."""
