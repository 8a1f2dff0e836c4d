"""polyattn on AMD GPUs: adapters over AITER, flash-attn and Wave, and their limits as data."""
