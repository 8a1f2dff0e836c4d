"""polyattn on Intel GPUs, and on Intel CPUs with AMX: what the attention libraries can do, as data."""
