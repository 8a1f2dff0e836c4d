"""What `benchmarks/parallel.py` is made of."""
