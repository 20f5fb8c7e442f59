"""The actor, on a real local Ray; see conftest.py."""
