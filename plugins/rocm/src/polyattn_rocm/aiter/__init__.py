"""AITER, AMD's kernels: one file for each of its entry points that polyattn calls."""
