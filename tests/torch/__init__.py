"""Tensors and tables, with torch and pyarrow; see conftest.py."""
