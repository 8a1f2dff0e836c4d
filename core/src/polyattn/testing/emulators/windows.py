"""Windows that are not S4's."""

from __future__ import annotations

__all__ = ["fa2_window"]


def fa2_window(left: int, right: int, keys: int) -> tuple[int, int]:
    """Return what FlashAttention 2 makes of a window where a sequence has so many keys at most
    (csrc/flash_attn/flash_api.cpp, `mha_fwd` and `set_params_fprop`; PyTorch's copy has the same lines): a bound of
    `keys` or more is none, and none beside a bound is `keys`. For queries before the first key that is another
    window."""
    left, right = (-1 if bound >= keys else bound for bound in (left, right))
    if left < 0 <= right:
        left = keys
    elif right < 0 <= left:
        right = keys
    return left, right
