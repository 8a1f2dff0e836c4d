"""Limits of the libraries for Intel hardware: one file for its GPUs by what they serve, one for its CPUs."""
