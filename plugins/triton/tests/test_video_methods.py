"""Video methods of core by the kernels of this package, beside the masks that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.contract import Like
from polyattn.methods import bound
from polyattn.methods.video import rows as tokens_in_blocks
from polyattn.methods.video.sla import SLA, sla_reference, top_blocks
from polyattn.methods.video.svg2 import clustered_attention
from polyattn.methods.video.vmoba import VMoBA, chunk_scores, chunks_of, select_chunks, vmoba_mask
from polyattn.testing import Installed
from polyattn.testing.checks import run_case
from polyattn.testing.families import METHODS
from polyattn.testing.placed_cases import placed_cases
from polyattn.video import Place
from polyattn_triton.device_ops import BlockOps

from .test_metadata import DEVICE


class Named:
    """The calls of a method, by this package. On a CPU nobody chooses it without a name."""

    def block_sparse(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return polyattn.block_sparse_attention(query, key, value, layout="BHSD", backend="triton", **given)

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return polyattn.varlen_attention(query, key, value, backend="triton", **given)


INNER: Any = Named()


def tensors(tokens: int, **kind: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, tokens, 64, device=DEVICE, **kind) for _ in range(3)]


def like(tensor: Tensor) -> Like:
    return Like(1, 2, 2, tensor.shape[2], 64, tensor.dtype, tensor.device)


def under_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    out: Tensor = polyattn.attention(q, k, v, attn_mask=mask, layout="BHSD", backend="reference")
    return out


def test_sparse_linear_attention_and_its_gradients() -> None:
    q, k, v = tensors(200, requires_grad=True)
    how = {"feature_map": "softmax", "linear_scope": "complement"}
    learned = {"proj_l.weight": torch.randn(64, 64, device=DEVICE) / 8}
    method = SLA(topk_ratio=0.5, BLKQ=128, BLKK=64, **how)
    place = Place(grid=(2, 10, 10), tensors=learned)
    out = method.attend(method.plan(place, like(q)), q, k, v, place=place, kept={}, inner=INNER)
    right = sla_reference(q, k, v, top_blocks(q, k, (128, 64), 2), (128, 64), learned, **how).float()
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
    dout = torch.randn_like(out)
    grads = [torch.autograd.grad(one, (q, k, v), dout) for one in (out, right)]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_chunks_of_queries_by_packed_kernels() -> None:
    q, k, v = tensors(96)
    method = VMoBA(
        temporal_chunk_size=1,
        temporal_topk=2,
        spatial_chunk_size=(4, 4),
        spatial_topk=2,
        st_chunk_size=(2, 4, 4),
        st_topk=2,
        moba_select_mode="topk",
        moba_threshold=0.25,
        moba_threshold_type="head_global",
        first_full_step=0,
        first_full_layer=0,
        temporal_layer=1,
        spatial_layer=1,
        st_layer=1,
    )
    place = Place(grid=(3, 4, 8), layer=0)
    chunks = chunks_of((3, 4, 8), (1,), q.device)
    plan = {"temporal_chunk_size": chunks}
    out = method.attend(plan, q, k, v, place=place, kept={}, inner=INNER)
    seen = select_chunks(chunk_scores(q, k, chunks), chunks.own, 2, None, "head_global")
    torch.testing.assert_close(out, under_mask(q, k, v, vmoba_mask(seen, chunks.own)), rtol=1e-4, atol=1e-4)


def test_clusters_of_unequal_sizes() -> None:
    q, k, v = tensors(150)
    rows, keys = (torch.multinomial(torch.arange(4.0), 300, True).view(1, 2, 150).to(DEVICE) for _ in range(2))
    seen = torch.rand(1, 2, 4, 4, device=DEVICE) < 0.6
    out = clustered_attention(q, k, v, rows, keys, seen, INNER)
    mask = seen.gather(2, rows[..., None].expand(-1, -1, -1, 4)).gather(3, keys[:, :, None].expand(-1, -1, 150, -1))
    torch.testing.assert_close(out, under_mask(q, k, v, mask), rtol=1e-4, atol=1e-4)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "sage_sla_attn"])  # it has a kernel of its own
def test_the_kit_finds_nothing_in_methods_by_these_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU other kernels serve the calls of methods, and nobody moves tokens in blocks: here these do."""
    served = []

    def ours(device: str) -> BlockOps:
        served.append(device)
        return BlockOps()

    monkeypatch.setattr(bound, "_AUTOMATIC", ("triton", "", ""))
    monkeypatch.setattr(tokens_in_blocks, "block_ops", ours)
    target = Installed(name, DEVICE)
    strided, trained = placed_cases(name, target.rows, target.facts, ["float32"])[3:5]
    for case in (strided, trained) if name in ("video_sparse_attn", "sla_attn") else (strided,):
        outcome = run_case(target, case)
        assert not outcome.findings, str(outcome)
    assert served or name == "window_video_attn"
