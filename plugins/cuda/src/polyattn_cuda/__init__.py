"""polyattn on NVIDIA GPUs: what each CUDA attention library can do, as data."""
