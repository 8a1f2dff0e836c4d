"""Sparse attention for video models: the methods, once for all vendors."""
