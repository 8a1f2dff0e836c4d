"""The cap on the memory of the scores."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn.errors import UnsupportedRequestError
from polyattn.reference import attention, paged_attention, score_bytes, varlen_attention

OPTIONS = [
    {},
    {"causal": "bottom_right", "window": (20, -1), "chunk": 32},
    {"softcap": 2.0},
    {"attn_mask": torch.randn(1, 1, 64, 96)},
    {"attn_mask": torch.randn(2, 4, 64, 96) > 0, "softcap": 2.0},
    {"alibi": torch.rand(4), "causal": "bottom_right", "softcap": 2.0, "sinks": torch.zeros(4)},
    {"dropout_p": 0.5, "softcap": 2.0},
]


def tensors(B=2, S_q=64, S_k=96, H_q=4, H_kv=2, D=2):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(B, S, H, D, generator=gen) for S, H in ((S_q, H_q), (S_k, H_kv), (S_k, H_kv))]


class LiveScores(TorchDispatchMode):
    """Follows the tensors made under it that have a number per query, key and head; `peak` is in bytes."""

    def __init__(self, heads, S_k):
        super().__init__()
        self.heads, self.S_k, self.peak = heads, S_k, 0
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.dim() >= 3 and t.shape[-1] == self.S_k and t.is_floating_point():
                self.storages.setdefault(t.untyped_storage().data_ptr(), []).append(weakref.ref(t))
        live = 0
        for pointer, refs in list(self.storages.items()):
            alive = [r() for r in refs if r() is not None]
            if alive:
                live += alive[0].untyped_storage().nbytes()
            else:
                del self.storages[pointer]
        self.peak = max(self.peak, live)
        return out


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_score_bytes_bounds_what_is_alive(options):
    q, k, v = tensors()
    whole = score_bytes(2, 4, 64, 96)
    mask_bytes = options["attn_mask"].nbytes if "attn_mask" in options else 0
    with torch.no_grad(), LiveScores(4, 96) as uncapped:
        attention(q, k, v, **options)
    assert whole / 2 < uncapped.peak <= whole + mask_bytes
    with torch.no_grad(), LiveScores(4, 96) as capped:
        attention(q, k, v, max_bytes=whole // 5, **options)
    assert 0 < capped.peak <= whole // 5 + mask_bytes


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_blocks_of_rows_change_nothing(options, layout):
    q, k, v = tensors()
    if layout == "BHSD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    want = attention(q, k, v, layout=layout, return_lse=True, **options)
    for part in (64, 7, 3):
        got = attention(q, k, v, layout=layout, return_lse=True, max_bytes=score_bytes(2, 4, 64, 96) // part, **options)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            assert a.shape == b.shape


def test_gradients_above_the_cap_are_refused_with_numbers_and_the_next_step():
    q, k, v = (t.requires_grad_() for t in tensors())
    need = score_bytes(2, 4, 64, 96)
    attention(q, k, v, max_bytes=need).sum().backward()
    with pytest.raises(UnsupportedRequestError) as caught:
        attention(q, k, v, max_bytes=need - 1)
    text = str(caught.value)
    for part in (str(need), str(need - 1), "backward", "POLYATTN_REFERENCE_MEMORY_GB", "another backend"):
        assert part in text
    with torch.no_grad():
        attention(q, k, v, max_bytes=need - 1)


def test_a_single_row_above_the_cap_is_refused():
    with pytest.raises(UnsupportedRequestError, match=r"one query row at a time.*POLYATTN_REFERENCE_MEMORY_GB"):
        attention(*tensors(), max_bytes=score_bytes(2, 4, 1, 96) - 1)


def test_packed_gradients_count_every_sequence():
    q, k, v = (t[0].requires_grad_() for t in tensors(B=1, S_q=8, S_k=8))
    ends = torch.tensor([0, 4, 8], dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 4, "max_seqlen_k": 4}
    need = 2 * score_bytes(1, 4, 4, 4)
    varlen_attention(q, k, v, max_bytes=need, **lengths)
    with pytest.raises(UnsupportedRequestError, match=f"{need} bytes"):
        varlen_attention(q, k, v, max_bytes=need - 1, **lengths)
    caches = [t.detach().view(2, 4, 2, 2) for t in (k, v)]
    table, lens = torch.tensor([[0], [1]]), torch.tensor([4, 4])
    with pytest.raises(UnsupportedRequestError, match=f"{need} bytes"):
        paged_attention(q, *caches, page_table=table, seq_lens=lens, cu_seqlens_q=ends, max_bytes=need - 1)
