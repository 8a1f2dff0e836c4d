"""Sparse attention for video models: the methods, once for all vendors. Kernels for them live in plugins."""
