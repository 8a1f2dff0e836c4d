"""polyattn on Moore Threads GPUs: what MATE, the MUSA attention library, can do, as data."""
