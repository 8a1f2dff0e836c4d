"""What people write, right and wrong, for type checkers: nobody runs it. Wrong lines carry the code of mypy's error,
and `warn_unused_ignores` makes one that passes an error itself (`nox -s typing`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import polyattn
from polyattn.serving import AttentionBackend, AttentionLayer, ForwardBatch, PageAllocator, vision_attention
from polyattn.testing import run

Both = tuple[Tensor, Tensor]


def dense(q: Tensor) -> Tensor:
    return polyattn.attention(q, q, q)


def dense_with_options(q: Tensor, flag: bool) -> Tensor:
    out = polyattn.attention(q, q, q, causal="top_left", window=(63, 0), softcap=30.0, layout="BHSD", out=q)
    same: Tensor = polyattn.attention(q, q, q, causal=flag, attn_mask=q, sinks=q, scale=None, return_lse=False)
    return out + same


def dense_with_lse(q: Tensor) -> Both:
    out, lse = polyattn.attention(q, q, q, return_lse=True)
    return polyattn.merge([out, out], [lse, lse])


def dense_with_lse_or_not(q: Tensor, flag: bool) -> Tensor:
    found = polyattn.attention(q, q, q, return_lse=flag)
    return found[0] if isinstance(found, tuple) else found


def packed(q: Tensor, cu: Tensor) -> Tensor:
    out, lse = polyattn.varlen_attention(
        q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3, max_seqlen_k=3, return_lse=True
    )
    return out * lse[..., None] + polyattn.varlen_attention(
        q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3, max_seqlen_k=3, causal=True, dropout_p=0.1
    )


def paged(q: Tensor, pages: Tensor, table: Tensor) -> Tensor:
    return polyattn.paged_attention(
        q, pages, pages, page_table=table, seq_lens=table, cu_seqlens_q=table, max_seqlen_q=1, max_seqlen_k=9,
        kv_layout="HND", save_kv_cache=True, key=q, value=q, kv_parts=[], tree=False,
    )  # fmt: skip


def paged_with_lse(q: Tensor, pages: Tensor, table: Tensor) -> Both:
    return polyattn.paged_attention(
        q, pages, pages, page_table=table, seq_lens=table, cu_seqlens_q=table, max_seqlen_q=1, max_seqlen_k=9,
        return_lse=True,
    )  # fmt: skip


def latent(q: Tensor, rows: Tensor, table: Tensor) -> Tensor:
    return polyattn.mla_attention(
        q, rows, page_table=table, seq_lens=table, cu_seqlens_q=table, max_seqlen_q=1, max_seqlen_k=9, scale=0.1
    )


def latent_with_lse(q: Tensor, rows: Tensor, table: Tensor) -> Both:
    return polyattn.mla_attention(
        q, rows, page_table=table, seq_lens=table, cu_seqlens_q=table, max_seqlen_q=1, max_seqlen_k=9, scale=0.1,
        v_head_dim=64, return_lse=True,
    )  # fmt: skip


def drop_in(q: Tensor) -> Tensor:
    return polyattn.scaled_dot_product_attention(q, q, q, is_causal=True)


def bound(q: Tensor) -> Tensor:
    site = polyattn.bind(causal=True, layout="BHSD")
    call: Callable[[Tensor, Tensor, Tensor], Tensor] = site
    return call(q, q, q) + site(q, q, q, sinks=q)


def bound_with_lse(q: Tensor) -> Both:
    return polyattn.bind(return_lse=True)(q, q, q)


def of_an_engine(backend: AttentionBackend, layer: AttentionLayer, batch: ForwardBatch, q: Tensor) -> Tensor:
    backend.plan(batch)
    backend.prepare()
    pages: list[int] = PageAllocator(pages=4).allocate(2)
    return backend.forward(q, q, q, layer) + vision_attention(q, q, q, q, 3) + len(pages)


def by_their_modules() -> object:
    return (polyattn.serving.AttentionLayer, polyattn.nn.LocalAttention, run, polyattn.tuning.tune)


def wrong(q: Tensor, cu: Tensor, backend: AttentionBackend, layer: AttentionLayer) -> None:
    number: int = polyattn.attention(q, q, q)  # type: ignore[assignment]
    lse: Tensor = polyattn.attention(q, q, q, return_lse=True)  # type: ignore[assignment]
    both: Both = polyattn.attention(q, q, q)  # type: ignore[assignment]
    polyattn.attention(q, q, q, layout="BSDH")  # type: ignore[call-overload]
    polyattn.attention(q, q, q, causal="botom_right")  # type: ignore[call-overload]
    polyattn.attention(q, q, q, window=3)  # type: ignore[call-overload]
    polyattn.attention(q, q, q, window=(1, 2, 3))  # type: ignore[arg-type]
    polyattn.attention(q, q, q, softcap="30")  # type: ignore[call-overload]
    polyattn.attention(q, q, q, return_lse="no")  # type: ignore[call-overload]
    polyattn.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    polyattn.attention(q, q, q, attn_mask=True)  # type: ignore[call-overload]
    polyattn.attention(q, q)  # type: ignore[call-overload]
    polyattn.attention([1.0], q, q)  # type: ignore[call-overload]
    polyattn.atention(q, q, q)  # type: ignore[attr-defined]
    polyattn.varlen_attention(q, q, q, cu_seqlens_q=cu)  # type: ignore[call-overload]
    polyattn.paged_attention(q, q, q, kv_layout="NZ")  # type: ignore[call-overload]
    polyattn.mla_attention(q, q, page_table=cu)  # type: ignore[call-overload]
    polyattn.scaled_dot_product_attention(q, q, q, is_causal="no")  # type: ignore[arg-type]
    polyattn.bind(layout="BSDH")  # type: ignore[call-overload]
    polyattn.bind(sinks=q)  # type: ignore[call-overload]
    polyattn.bind()(q, q)  # type: ignore[call-arg]
    polyattn.serving.AtentionLayer  # type: ignore[attr-defined] # noqa: B018
    polyattn.testing.conform  # type: ignore[attr-defined] # noqa: B018
    backend.forward(q, q, q, 3)  # type: ignore[arg-type]
    backend.forwards(q, q, q, layer)  # type: ignore[attr-defined]
    polyattn.merge([q], [q], layout="BSDH")  # type: ignore[arg-type]
    from polyattn.serving import AtentionBackend  # type: ignore[attr-defined] # noqa: F401

    del number, lse, both


def of_torch() -> Tensor:
    return dense(torch.ones(1, 2, 3, 4))
