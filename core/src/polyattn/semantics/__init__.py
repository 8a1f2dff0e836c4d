"""This room defines what a call means (docs/semantics.md, S1 to S12): references, masks, LSE merge, gradients, stored
numbers, checks.

This room knows no backend and no plugin."""
