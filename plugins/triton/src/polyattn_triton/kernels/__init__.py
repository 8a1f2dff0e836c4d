"""The kernels: one file for each kind, `rules.py` for what they share. Nothing here reads a request."""
