"""A small FlashAttention-style kernel for the CPU as a backend of polyattn. `plugin` holds the records."""
