"""This room describes one step of an engine: its batch, its request table, the tensors that kernels read."""
