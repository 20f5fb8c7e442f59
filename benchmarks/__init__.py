"""Long runs and measurements, not part of the package."""
