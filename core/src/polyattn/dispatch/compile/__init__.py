"""The calls under torch.compile and torch.export: custom ops, what tracing sees, and what a saved graph says."""
