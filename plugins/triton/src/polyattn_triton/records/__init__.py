"""Limits of the portable kernels, by room: softmax attention, linear attention, methods. The same on every platform
but for what `common.py` says."""
