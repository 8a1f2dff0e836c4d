"""Limits of the CUDA libraries, by room: serving (paged, MLA), diffusion (dense, varlen, sparse video), linear."""
