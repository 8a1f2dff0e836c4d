"""FlashAttention 2, 3 and 4. What they share is in `binding`, how each spells it in `fa2`, `fa3` and `fa4`."""
