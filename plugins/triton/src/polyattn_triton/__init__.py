"""polyattn's own portable Triton kernels, for every device Triton compiles for and for CPUs under its interpreter."""
