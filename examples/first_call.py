"""One call, why that backend, a split of the keys merged exactly, and a layer. Runs on a laptop in seconds."""

from __future__ import annotations

import torch

import polyattn
from polyattn.nn import LocalAttention

torch.manual_seed(0)
query = torch.randn(2, 128, 8, 64, requires_grad=True)  # [B, S_q, H_q, D]
key, value = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)  # [B, S_k, H_kv, D]: grouped heads as they are

# Causal attention over the last 64 keys; the backend is chosen for this machine.
out = polyattn.attention(query, key, value, causal=True, window=(63, 0))
print(polyattn.explain(polyattn.attention, query, key, value, causal=True, window=(63, 0)))

# What a backend does not declare is refused with a reason, never dropped.
try:
    polyattn.attention(query, key, value, softcap=30.0, backend="torch_sdpa")
except polyattn.UnsupportedRequestError as refusal:
    print(f"\nrefused: {refusal}")

# Attention over a split of the keys, merged by the LSE, is attention over all of them; gradients too.
halves = [polyattn.attention(query, key[:, s], value[:, s], return_lse=True) for s in (slice(0, 50), slice(50, 128))]
merged, _ = polyattn.merge(*zip(*halves, strict=True))
whole = polyattn.attention(query, key, value)
(by_parts,) = torch.autograd.grad(merged.square().sum(), query)
(at_once,) = torch.autograd.grad(whole.square().sum(), query)
off, gradient_off = (merged - whole).abs().max(), (by_parts - at_once).abs().max()
print(f"\nsplit and merged: output off by {off:.1e}, gradient by {gradient_off:.1e}")

# A layer keeps the choice that was in force when it was built.
with polyattn.use_backend("flex_attention"):
    layer = LocalAttention(causal=True, window=(63, 0))
with torch.no_grad():
    print(f"as a layer, by flex_attention: off by {(layer(query, key, value) - out).abs().max():.1e}")
