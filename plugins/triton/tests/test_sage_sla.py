"""SageSLA with products of 8-bit integers, beside core's emulation of their rounding and beside exact attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn import what_if
from polyattn.contract import AttentionRequest, Like
from polyattn.methods.video.sla import SLA, eight_bits, top_blocks
from polyattn.methods.video.sla import SageSLA as Emulated
from polyattn.video import Place, Run, place
from polyattn_triton.kernels import eight_bits as kernels
from polyattn_triton.kernels.block_sparse import Lists, Tiles
from polyattn_triton.sage_sla import SageSLA

from .launched_offline import Problem, elsewhere
from .test_metadata import DEVICE

BLOCKS = ((64, 64), (128, 64), (64, 128), (128, 128))
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
OPTIONS = {"topk_ratio": 0.5, "feature_map": "softmax", "linear_scope": "all"}


def tensors(
    tokens: int = 200, dtype: torch.dtype = torch.float32, *, group: int = 2, D: int = 64, mean: float = 2.0
) -> list[Tensor]:
    """Keys have a mean, as those of models do; the heads lie as layers hand them over, tokens first."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = [(2, tokens, 2 * n, D) for n in (group, 1, 1)]
    query, key, value = (torch.randn(shape, generator=draw).transpose(1, 2) for shape in shapes)
    return [t.to(DEVICE, dtype) for t in (query, key + mean, value)]


class Inner:
    def block_sparse(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return polyattn.block_sparse_attention(query, key, value, layout="BHSD", backend="reference", **given)


def by(method: type, blocks: tuple[int, int], *qkv: Tensor) -> Tensor:
    query, key, value = qkv
    D = value.shape[-1]
    weight = torch.randn(D, D, generator=torch.Generator().manual_seed(1)).to(DEVICE) / 8
    at, made = Place(tensors={"proj_l.weight": weight}), method(**OPTIONS, BLKQ=blocks[0], BLKK=blocks[1])
    like = Like(query.shape[0], query.shape[1], key.shape[1], query.shape[2], D, query.dtype, query.device)
    inner: Any = Inner()
    out: Tensor = made.attend(made.plan(at, like), query, key, value, place=at, kept={}, inner=inner)
    return out


def listed(query: Tensor, key: Tensor, blocks: tuple[int, int], kept: int) -> Lists:
    chosen = top_blocks(query, key, blocks, kept)
    return Lists(torch.full(chosen.shape[:3], kept, dtype=torch.int32, device=DEVICE), chosen, None, *blocks)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("tokens", "block"), [(200, 64), (200, 128), (128, 64), (3, 64)])
def test_integers_are_those_of_the_definition(tokens: int, block: int) -> None:
    key = tensors(tokens)[1]
    for mean in (None, key.mean(2)):
        codes, scales = kernels.quantised(key, block, mean)
        wide = key if mean is None else key - mean[:, :, None]
        found = codes.float() * scales.repeat_interleave(block, 2)[:, :, :tokens, None]
        torch.testing.assert_close(found, eight_bits(wide, block), rtol=0, atol=1e-6)
    zeros, least = kernels.quantised(torch.zeros_like(key), block)
    assert not zeros.any()
    assert (least > 0).all()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_the_method_is_the_one_that_core_emulates(blocks: tuple[int, int], dtype: torch.dtype) -> None:
    qkv = tensors(dtype=dtype)
    found, right = (by(method, blocks, *qkv) for method in (SageSLA, Emulated))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), right.float(), rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("width", [64, 128])
def test_the_accuracy_it_is_declared_with(width: int) -> None:
    """Against SLA itself; without the mean taken away it is lost, which the class would tell."""
    qkv = tensors(256, torch.bfloat16, D=width, mean=30.0)
    query, key, value = qkv
    found, right = (by(method, (128, 64), *qkv).double().flatten() for method in (SageSLA, SLA))
    assert torch.nn.functional.cosine_similarity(found, right, 0) > 0.998
    assert (found - right).abs().sum() / right.abs().sum() < 0.06
    whole = eight_bits(key.float(), 64)
    scores = (query.float() @ whole.repeat_interleave(2, 1).mT / width**0.5).softmax(-1)
    exact = (query.float() @ key.float().repeat_interleave(2, 1).mT / width**0.5).softmax(-1)
    values = value.float().repeat_interleave(2, 1)
    assert ((scores - exact) @ values).abs().sum() / (exact @ values).abs().sum() > 0.06


def test_tiles_smaller_than_blocks_and_no_grouping() -> None:
    query, key, value = tensors(200, group=1)
    lists = listed(query, key, (128, 64), 2)
    right = kernels.attend(query, key, value, lists, scale=0.2)
    for m, n in itertools.product((16, 64), (32, 64)):
        found = kernels.attend(query, key, value, lists, scale=0.2, tiles=Tiles(m, n, 4, 1))
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_only_what_is_listed_is_seen() -> None:
    """Keys of blocks that nobody lists may hold anything; a list without entries gives zeros."""
    query, key, value = tensors(192, group=1)
    lists = Lists(torch.tensor([[[1, 0, 2]]]).int(), torch.tensor([[[[1, 0], [0, 0], [0, 1]]]]).int(), None, 64, 64)
    lists = lists._replace(counts=lists.counts.to(DEVICE), indices=lists.indices.to(DEVICE))
    mean = key.mean(2, keepdim=True)
    found = kernels.attend(query, key - mean, value, lists, scale=0.125)
    assert not found[:, :, 64:128].any()
    wide = eight_bits(query, 64) @ eight_bits(key - mean, 64).mT * 0.125
    for rows, keys in ((slice(0, 64), slice(64, 128)), (slice(128, 192), slice(0, 128))):
        right = wide[:, :, rows, keys].softmax(-1) @ value[:, :, keys]
        torch.testing.assert_close(found[:, :, rows], right, rtol=1e-4, atol=1e-4)
    spoilt = value.clone()
    spoilt[:, :, 128:] = float("nan")
    assert torch.equal(kernels.attend(query, key - mean, spoilt, lists, scale=0.125), found)


def test_more_samples_than_a_grid_has_are_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.cat([t * (1 + n / 8) for n in range(3)]) for t in tensors(70))
    lists = listed(query, key, (64, 64), 1)
    found = []
    for most in (2, 65_535):
        monkeypatch.setattr("polyattn.adapters.samples.MOST", most)
        found.append(kernels.attend(query, key, value, lists, scale=0.125))
    assert torch.equal(*found)


@pytest.mark.parametrize("machine", ["cuda:sm80", "cuda:sm90", "rocm:gfx942", "xpu"])
def test_it_is_chosen_where_it_is_declared(machine: str) -> None:
    asked = {"place": True, "head_dim": 128, "heads": 12, "kv_heads": 12}
    installed = {"triton", "polyattn-triton"}
    chosen = what_if(AttentionRequest(**asked), platform=machine, installed=installed, backend="sage_sla_attn")
    assert (chosen.backend, chosen.provider, chosen.planned) == ("sage_sla_attn", "polyattn-triton", False)
    for changes, said in (({"head_dim": 96}, "head_dim"), ({"grad": ("query",)}, "grad"), ({"scale": 0.5}, "scale")):
        with pytest.raises(polyattn.UnsupportedRequestError, match=said):
            what_if(AttentionRequest(**asked | changes), platform=machine, installed=installed, backend="sage_sla_attn")


def test_a_run_is_told_of_a_kernel_that_the_method_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: its record is none of CPUs, where core's emulation is faster than an interpreter."""
    monkeypatch.setattr("polyattn.methods.video.sla.SageSLA", SageSLA)
    polyattn.configure()  # nothing that was bound before is used
    qkv = [t.transpose(1, 2) for t in tensors(128)]
    learned = {"proj_l.weight": torch.zeros(64, 64, device=DEVICE)}
    with Run() as run, run.at(grid=(4, 4, 8)):
        at = place(layer=0, tensors=learned)
        assert polyattn.attention(*qkv, backend="sage_sla_attn", place=at).shape == qkv[0].shape
        assert not polyattn.explain(polyattn.attention, *qkv, backend="sage_sla_attn", place=at).inner
    (row,) = run.explain().rows
    assert row.kernels == ("8-bit scores: polyattn-triton",)
    monkeypatch.undo()
    polyattn.configure()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compiling takes seconds each: most under --polyattn-full."""
    if "target" in metafunc.fixturenames:
        full = metafunc.config.getoption("--polyattn-full", False)
        metafunc.parametrize("target", ["cuda:90", "cuda:80", "hip:gfx942"] if full else ["cuda:90"])


def test_compilers_of_devices_take_the_kernels(target: str) -> None:
    """Offline, by Triton's own compiler; see `launched_offline`."""
    (launched,) = elsewhere(target, Problem("sage", (128, 128), queries=300))
    assert {kernel.name for kernel in launched} == {"_quantise", "_attend"}
    assert not [kernel for kernel in launched if kernel.wrong]
