"""The parts of benchmarks/video_sparse.py: what is measured, whether it is right, and how long it takes."""
