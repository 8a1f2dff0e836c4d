"""Multi-head latent attention, absorbed and not, and the rows of its FP8 cache (S9)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ...contract import Causal
from ..kv_quant import mla_unpack
from .dense import attention
from .paged import paged_attention


def mla_attention(
    query: Tensor,
    cache: Tensor,
    *,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    v_head_dim: int = 512,
    causal: Causal = "bottom_right",
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    token_indices: Tensor | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    One latent row per token is the key of every head, and its first D_c = `v_head_dim` numbers are the value.

    Args:
        query: [T_q, H_q, D_c + D_r], see `mla_absorb`.
        cache: [pages, page_size, D_c + D_r], or rows in one of `kv_quant.LATENT_FORMATS`.
        page_table, seq_lens, cu_seqlens_q, attn_mask: as `paged_attention`.
        scale: that of the uncompressed heads, (D_nope + D_r) ** -0.5 times the model's own factor; there is no
            default, because the one derived from the query's width would be wrong (S2).
        token_indices: int32 [T_q, topk], positions of the tokens that each query sees, -1 = none (DeepSeek-V3.2-Exp,
            arXiv 2512.02556, section 2.1).
        The rest: as `paged_attention`.

    Returns:
        out [T_q, H_q, D_c], or (out, lse [T_q, H_q]).

    Raises:
        UnsupportedRequestError: `max_bytes` cannot be kept.
    """
    rows = mla_unpack(cache)
    rows = rows.unsqueeze(2)
    if token_indices is not None:
        attn_mask = _with_lists(attn_mask, token_indices, cu_seqlens_q, page_table.shape[1] * cache.shape[1])
    return paged_attention(
        query,
        rows,
        rows[..., :v_head_dim],
        page_table=page_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks,
        attn_mask=attn_mask,
        scale=scale,
        return_lse=return_lse,
        compute_dtype=compute_dtype,
        max_bytes=max_bytes,
    )


def _with_lists(mask: Tensor | None, token_indices: Tensor, cu_seqlens_q: Tensor, keys: int) -> Tensor:
    """The mask [N, 1|H_q, max_q, keys] of lists, and what was hidden before."""
    starts = cu_seqlens_q.tolist()
    sizes = [stop - start for start, stop in itertools.pairwise(starts)]
    # A place behind the keys takes what is listed as none.
    flags = token_indices.new_zeros(len(token_indices), keys + 1, dtype=torch.bool)
    flags.scatter_(1, token_indices.long().masked_fill(token_indices < 0, keys), True)
    seen = torch.nn.utils.rnn.pad_sequence(list(torch.split(flags[:, :keys], sizes)), batch_first=True)[:, None]
    if mask is None:
        return seen
    mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[3]))
    return seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def mla_unpack_fp8(cache: Tensor) -> Tensor:
    """Real values of an FP8 latent cache (S9).

    Args:
        cache: uint8 [pages, page_size, 656]; a row is 512 float8_e4m3fn latents, the 4 float32 scales of their
            groups of 128, and 64 bfloat16 rope numbers.

    Returns:
        float32 [pages, page_size, 576].
    """
    return mla_unpack(cache)


def mla_absorb(q_nope: Tensor, q_rope: Tensor, w_uk: Tensor) -> Tensor:
    """The query of `mla_attention`: K's up-projection moved to the query's side.

    Args:
        q_nope: [..., H_q, D_nope]; q_rope: [..., H_q, D_r], after RoPE.
        w_uk: [H_q, D_nope, D_c], latent to key.

    Returns:
        [..., H_q, D_c + D_r].
    """
    return torch.cat([torch.einsum("...hd,hdc->...hc", q_nope, w_uk), q_rope], dim=-1)


def mla_unabsorbed_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same attention as ordinary multi-head attention, which is what a model trains with.

    Args:
        q_nope: [B, S_q, H_q, D_nope]; q_rope: [B, S_q, H_q, D_r], after RoPE.
        latent: [B, S_k, D_c]; k_rope: [B, S_k, D_r], after RoPE, one for all heads.
        w_uk: [H_q, D_nope, D_c]; w_uv: [H_q, D_v, D_c].
        scale: as `mla_attention`.
        options: keywords of `attention`.

    Returns:
        out [B, S_q, H_q, D_v] (in absorbed form: `mla_attention`'s out times w_uv), or (out, lse [B, S_q, H_q]).
    """
    k_nope = torch.einsum("bsc,hdc->bshd", latent, w_uk)
    k = torch.cat([k_nope, k_rope.unsqueeze(2).expand(-1, -1, w_uk.shape[0], -1)], dim=-1)
    v = torch.einsum("bsc,hdc->bshd", latent, w_uv)
    return attention(torch.cat([q_nope, q_rope], dim=-1), k, v, scale=scale, **options)
