"""polyattn on AMD GPUs: what each ROCm attention library can do, as data."""
