"""The cap on the memory of the scores."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn.backends import reference_backend
from polyattn.backends.reference_backend import Reference
from polyattn.contract import AttentionRequest
from polyattn.errors import UnsupportedRequestError
from polyattn.semantics.reference import attention, dense, paged_attention, score_bytes, varlen_attention

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


TRAINED = [
    {"softcap": 2.0},
    {"softcap": 2.0, "causal": "bottom_right", "window": (20, -1), "sinks": torch.linspace(-1, 1, 4)},
    {"attn_mask": torch.randn(2, 4, 64, 96), "softcap": 1.0},
    {"attn_mask": torch.randn(1, 1, 64, 96) > 0, "alibi": torch.rand(4)},
]


def trained(options, **kw):
    q, k, v = (t.clone().requires_grad_() for t in tensors())
    options = {n: t.clone().requires_grad_() if is_float(t) else t for n, t in options.items()}
    leaves = [q, k, v, *(t for t in options.values() if is_float(t))]
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, lse = attention(q, k, v, return_lse=True, **options, **kw)
    return out, lse, leaves, sum(kept.values())


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize("options", TRAINED, ids=lambda o: "-".join(o))
def test_a_backward_keeps_no_scores_beyond_what_it_may(monkeypatch, options):
    """Training with a softcap kept all of them: 2.1 GB for 4,096 tokens of 8 heads."""
    monkeypatch.setattr(dense, "_BLOCK", score_bytes(2, 4, 10, 96))
    out, lse, leaves, all_of_them = trained(options)
    again, lse_again, leaves_again, few = trained(options, kept_bytes=1000, max_bytes=score_bytes(2, 4, 5, 96))
    assert all_of_them > few + 2 * 4 * 64 * 96 * 4
    assert few < 2 * sum(t.nbytes for t in (*leaves, *options.values()) if isinstance(t, torch.Tensor))
    torch.testing.assert_close((again, lse_again), (out, lse))
    want = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum() + lse_again.sum(), leaves_again), want)


def test_second_derivatives_and_versions_where_scores_are_computed_again(monkeypatch):
    monkeypatch.setattr(dense, "_BLOCK", score_bytes(2, 4, 10, 96))
    found = []
    for kept in (None, 0):
        out, _, leaves, _ = trained({"softcap": 2.0}, kept_bytes=kept)
        (first,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaves))
    torch.testing.assert_close(*found)
    mask = torch.randn(1, 1, 64, 96) > 0
    q, k, v = (t.clone().requires_grad_() for t in tensors())
    out = attention(q, k, v, attn_mask=mask, kept_bytes=0)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_dropout_drops_the_same_where_scores_are_computed_again(monkeypatch):
    monkeypatch.setattr(dense, "_BLOCK", score_bytes(2, 4, 10, 96))
    q, k, v = (t.clone().requires_grad_() for t in tensors())
    out = attention(q, k, v, dropout_p=0.5, kept_bytes=0)
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((dv * v).sum(), out.sum(), rtol=1e-4, atol=1e-3)


def test_packed_sequences_keep_no_scores_beyond_what_they_may_together():
    q, k, v = (t.flatten(0, 1).clone().requires_grad_() for t in tensors())
    lens = {"cu_seqlens_q": torch.tensor([0, 64, 128], dtype=torch.int32), "max_seqlen_q": 64}
    lens |= {"cu_seqlens_k": torch.tensor([0, 96, 192], dtype=torch.int32), "max_seqlen_k": 96}
    need = 2 * score_bytes(1, 4, 64, 96)
    sizes, found = [], []
    for kept in (need, need - 1):
        sizes.append(0)

        def keep(tensor):
            sizes[-1] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = varlen_attention(q, k, v, softcap=2.0, max_bytes=need, kept_bytes=kept, **lens)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        found.append(grads)
    torch.testing.assert_close(*found)
    assert sizes[0] > 2 * sizes[1]


def test_the_backend_keeps_a_quarter_of_a_gibibyte(monkeypatch):
    """And trains what is above its cap."""
    q, k, v = tensors()
    q.requires_grad_()
    call = Reference().bind(AttentionRequest(heads=4, kv_heads=2, softcap=2.0, grad=("query",))).forward
    want = torch.autograd.grad(call(q, k, v).sum(), q)
    calls = []
    real = dense._attend_again
    monkeypatch.setattr(dense, "_attend_again", lambda *a, **kw: calls.append(1) or real(*a, **kw))
    call(q, k, v)
    assert not calls
    monkeypatch.setattr(reference_backend, "_KEPT", 0)
    monkeypatch.setenv("POLYATTN_REFERENCE_MEMORY_GB", str(score_bytes(2, 4, 16, 96) / 2**30))
    call = Reference().bind(AttentionRequest(heads=4, kv_heads=2, softcap=2.0, grad=("query",))).forward
    torch.testing.assert_close(torch.autograd.grad(call(q, k, v).sum(), q), want)
    assert len(calls) == 4
