"""Kernels of their own for NVIDIA Hopper (compute capability 9.0), in Gluon, Triton's lower layer."""
