"""Attention of an engine: who serves each phase, plans of a step, calls of the layers."""
