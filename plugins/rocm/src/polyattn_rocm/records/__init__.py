"""Limits of the ROCm libraries, by room: dense and packed batches, serving."""
