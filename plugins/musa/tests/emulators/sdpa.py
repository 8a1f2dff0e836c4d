"""torch's scaled_dot_product_attention on a MUSA device, from torch_musa 2.7 (github.com/MooreThreads/torch_musa):
torch_musa/csrc/aten/ops/attention/mudnn/{SDP.cpp,SDPUtils.h}.

Half precision to 128 wide, 160 or 192 with 128 is muDNN's flash kernel, from MP 2.2 on; the rest its other one, on
contiguous copies. A mask is not made additive before them, and has one of the shapes below, each of which means
something of its own. MUSA before 4.2 has no scale but the default one. What they make of tensors without elements is
not written there, nor of rows that see nothing: those are NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["scaled_dot_product_attention"]

WIDTHS = ((160, 160), (192, 128))


def _check(held: bool, message: str) -> None:
    """TORCH_CHECK."""
    if not held:
        raise RuntimeError(message)


def _mask(mask: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """`ParseMaskType`: [N, H_q, L, S] or what broadcasts to it."""
    N, _, L, S = sizes
    if mask.dim() == 2:
        if mask.shape == (L, S):
            return mask
        _check(mask.shape == (N, S), "MUSA SPDA: shape of 2D attn_mask should be [L, S] or [N, S].")
        return mask[:, None, None]
    _check(mask.dim() in (3, 4), "MUSA SPDA: attn_mask should be 2/3/4D Tensor.")
    wanted = sizes[-mask.dim() :]
    fits = all(have in (1, want) for have, want in zip(mask.shape, wanted, strict=True))
    _check(fits, f"MUSA SPDA: shape of {mask.dim()}D attn_mask should be expandable to {wanted}.")
    return mask


def scaled_dot_product_attention(calls: list[str], toolkit: tuple[int, int] = (4, 3)) -> Callable[..., Tensor]:
    """What takes torch's place; which of the two kernels served a call is kept in `calls`."""

    def sdpa(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        default = query.shape[-1] ** -0.5
        _check(query.dim() == key.dim() == value.dim() == 4, "SDPA on MUSA requires 3 or 4 dimensional tensors")
        _check(query.dtype == key.dtype == value.dtype, "Expected query, key, and value to have the same dtype")
        _check(query.numel() * key.numel() > 0, "muDNN: tensors without elements")
        _check(enable_gqa or query.shape[1] == key.shape[1], "heads of query and key")
        _check(not (is_causal and attn_mask is not None), "Explicit attn_mask should not be set when is_causal=True")
        if toolkit < (4, 2) and scale is not None:
            _check(abs(scale - default) < 1e-12, "Not support explicit `scale` parameter which is not equal to default")
        widths = query.shape[-1], value.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16)
        calls.append("flash" if half and (max(widths) <= 128 or widths in WIDTHS) else "math")
        sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        group = query.shape[1] // key.shape[1]
        k, v = (t.float().repeat_interleave(group, 1) for t in (key, value))
        logits = query.float() @ k.mT * (default if scale is None else scale)
        if is_causal:
            logits = logits.masked_fill(torch.ones(sizes[2:], dtype=torch.bool).triu(1), -torch.inf)
        elif attn_mask is not None:
            mask = _mask(attn_mask, sizes)
            _check(mask.dtype in (torch.bool, query.dtype), "attn_mask is bool or of the dtype of query")
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.float()
        weights = torch.dropout(logits.softmax(-1), dropout_p, dropout_p > 0)
        return (weights @ v).to(query.dtype)

    return sdpa
