"""Methods turn one attention call into calls of families, once for all vendors. Their kernels live in plugins."""
