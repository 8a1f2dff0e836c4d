"""`block_sparse_attention`: dense attention under the mask that a map stands for; what is no map is a typed error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.semantics.block_maps import lists_of, visible_keys

B, S_Q, S_K, H, H_KV, D, D_V = 2, 70, 100, 4, 2, 16, 24
SHAPE = (16, 32)
BLOCKS = (-(-S_Q // 16), -(-S_K // 32))


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    shapes = ((B, S_Q, H, D), (B, S_K, H_KV, D), (B, S_K, H_KV, D_V))
    made = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return made[0], made[1], made[2]


def flags(batch: int = B, heads: int = H) -> Tensor:
    return torch.rand(batch, heads, *BLOCKS) < 0.5


def mask_of(block_map: Tensor) -> Tensor:
    wide = block_map.repeat_interleave(SHAPE[0], 2).repeat_interleave(SHAPE[1], 3)
    return wide[..., :S_Q, :S_K]


@pytest.mark.parametrize("batch, heads", [(B, H), (1, H), (B, 1), (1, 1)])
def test_it_is_dense_attention_under_the_mask(qkv, batch, heads):
    chosen = flags(batch, heads)
    chosen[0, 0, 1] = False  # rows without keys
    out, lse = polyattn.block_sparse_attention(*qkv, block_map=chosen, block_shape=SHAPE, return_lse=True)
    mask = mask_of(chosen).expand(B, H, -1, -1)
    right, right_lse = polyattn.attention(*qkv, attn_mask=mask, return_lse=True, backend="reference")
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)
    assert out[0, 16:32, 0].eq(0).all()
    assert lse[0, 16:32, 0].eq(-torch.inf).all()
    upstream, upstream_lse = torch.randn_like(out), torch.randn_like(lse)
    grads, rights = (
        torch.autograd.grad((o * upstream).sum() + (s.nan_to_num(neginf=0.0) * upstream_lse).sum(), qkv)
        for o, s in ((out, lse), (right, right_lse))
    )
    for found, wanted in zip(grads, rights, strict=True):
        torch.testing.assert_close(found, wanted)


def test_lists_are_the_map(qkv):
    chosen = flags()
    counts, indices = lists_of(chosen)
    assert (counts.dtype, indices.dtype) == (torch.int32, torch.int32)
    # What stands behind the end of a list is nobody's.
    junk = torch.where(torch.arange(BLOCKS[1]) < counts[..., None], indices, 2**31 - 1)
    out = polyattn.block_sparse_attention(*qkv, lists=(counts, junk), block_shape=SHAPE)
    torch.testing.assert_close(out, polyattn.block_sparse_attention(*qkv, block_map=chosen, block_shape=SHAPE))


def test_valid_sizes_hide_the_rest_of_a_block(qkv):
    chosen = flags()
    valid = torch.tensor([32, 5, 0, 4], dtype=torch.int32)
    seen = torch.arange(S_K) % 32 < valid.repeat_interleave(32)[:S_K]
    out = polyattn.block_sparse_attention(*qkv, block_map=chosen, block_shape=SHAPE, block_valid=valid)
    torch.testing.assert_close(out, polyattn.attention(*qkv, attn_mask=mask_of(chosen) & seen, backend="reference"))


def test_blocks_that_start_anywhere_hold_the_keys_they_say(qkv):
    starts = torch.tensor([[[40, 0, 70]]], dtype=torch.int32)
    valid = torch.tensor([[[30, 17, 1]]], dtype=torch.int32)
    lists = lists_of(torch.rand(B, H, BLOCKS[0], 3) < 0.6)
    given = {"lists": lists, "block_shape": SHAPE, "block_valid": valid, "block_starts": starts}
    seen = visible_keys(SHAPE, S_Q, S_K, *lists, block_valid=valid, block_starts=starts)
    assert not seen[..., 17:40].any()
    out = polyattn.block_sparse_attention(*qkv, **given)
    right = polyattn.attention(*qkv, attn_mask=seen, backend="reference")
    torch.testing.assert_close(out, right)
    upstream = torch.randn_like(out)
    for found, wanted in zip(*(torch.autograd.grad(o, qkv, upstream) for o in (out, right)), strict=True):
        torch.testing.assert_close(found, wanted)
    compiled = torch.compile(lambda *t: polyattn.block_sparse_attention(*t, **given), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*qkv), right)
    assert polyattn.explain(polyattn.block_sparse_attention, *qkv, **given).request.block_starts


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "compiled"])
def test_starts_need_lists_and_sizes(qkv, traced):
    starts = torch.zeros(1, 1, 1, dtype=torch.int32)

    def call(**given):
        return polyattn.block_sparse_attention(*qkv, block_shape=SHAPE, block_starts=starts, **given)

    run = torch.compile(call, backend="eager", fullgraph=True) if traced else call
    with pytest.raises(Exception, match="a map of flags cuts the keys into equal blocks"):
        run(block_map=flags())
    with pytest.raises(Exception, match="block_starts without block_valid"):
        run(lists=lists_of(torch.ones(1, 1, BLOCKS[0], 1, dtype=torch.bool)))


def test_heads_first_and_out(qkv):
    chosen, scale = flags(), 0.3
    right, right_lse = polyattn.block_sparse_attention(
        *qkv, block_map=chosen, block_shape=SHAPE, scale=scale, return_lse=True
    )
    turned = [tensor.detach().transpose(1, 2).contiguous() for tensor in qkv]
    room = torch.empty(B, H, S_Q, D_V, dtype=torch.float64)
    given = {"block_map": chosen, "block_shape": SHAPE, "scale": scale, "layout": "BHSD"}
    out, lse = polyattn.block_sparse_attention(*turned, **given, return_lse=True, out=room)
    assert out.data_ptr() == room.data_ptr()
    torch.testing.assert_close(room, right.detach().transpose(1, 2))
    torch.testing.assert_close(lse, right_lse.detach().transpose(1, 2))


def test_autocast_is_obeyed(qkv):
    single = [tensor.detach().float() for tensor in qkv]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = polyattn.block_sparse_attention(*single, block_map=flags(), block_shape=SHAPE)
    assert out.dtype == torch.bfloat16


def test_compiled_code_gives_the_same(qkv):
    chosen = flags()

    @torch.compile(backend="eager")
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = polyattn.block_sparse_attention(q * 2, k, v, block_map=chosen, block_shape=SHAPE)
        return out + 1

    q, k, v = qkv
    right = polyattn.block_sparse_attention(q * 2, k, v, block_map=chosen, block_shape=SHAPE) + 1
    torch.testing.assert_close(call(q, k, v), right)


def test_explain_says_that_the_map_is_written_out(qkv):
    given = {"block_map": flags(), "block_shape": SHAPE}
    said = polyattn.explain(polyattn.block_sparse_attention, *qkv, **given)
    assert said.lowerings == ("expand_block_map",)
    assert said.request.block_shape == SHAPE
    said = polyattn.explain(polyattn.block_sparse_attention, *qkv, **given, backend="reference")
    assert (said.backend, said.lowerings) == ("reference", ("expand_block_map",))


def test_a_backend_that_cannot_is_refused_by_name(qkv):
    with pytest.raises(UnsupportedRequestError, match="family='block_sparse'"):
        polyattn.block_sparse_attention(*qkv, block_map=flags(), block_shape=SHAPE, backend="torch_native")


def test_a_mask_that_no_kernel_is_for_is_refused(qkv, monkeypatch):
    monkeypatch.setattr("polyattn.lowering.lengths._LARGE", 10)
    with pytest.raises(UnsupportedRequestError, match="writing a block map out as a mask makes a tensor of"):
        polyattn.block_sparse_attention(*qkv, block_map=flags(), block_shape=SHAPE)


COUNTS, INDICES = lists_of(flags())


def test_numpys_numbers_and_flags_are_taken_as_pythons(qkv):
    chosen = flags()
    plain = polyattn.block_sparse_attention(*qkv, block_map=chosen, block_shape=SHAPE, scale=0.25, return_lse=True)
    shape, words = (np.int64(SHAPE[0]), np.uint8(SHAPE[1])), {"scale": np.float32(0.25), "return_lse": np.True_}
    given = {"block_map": chosen, "block_shape": shape, **words}
    for got, want in zip(polyattn.block_sparse_attention(*qkv, **given), plain, strict=True):
        assert torch.equal(got, want)
    found = polyattn.explain(polyattn.block_sparse_attention, *qkv, **given).request.block_shape
    assert found == SHAPE
    assert [type(tokens) for tokens in found] == [int, int]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_map": None}, r"neither of block_map and lists given: pass block_map, bool \[B\|1, H_q\|1, nQ, nK\]"),
        ({"lists": (COUNTS, INDICES)}, "both of block_map and lists given"),
        ({"block_map": flags().int()}, r"block_map is torch\.int32 on cpu; torch\.bool on cpu is needed"),
        ({"block_map": [True]}, "block_map is a list; a tensor of bool"),
        ({"block_map": flags()[:, :, 1:]}, r"block_map has the shape \(2, 4, 4, 4\); needed is .* 5 blocks of 16 quer"),
        ({"block_map": None, "lists": COUNTS}, r"lists is a Tensor; a pair \(counts, indices\) is needed"),
        (
            {"block_map": None, "lists": (COUNTS + 9, INDICES)},
            "block_counts holds .*; block_indices has room for",
        ),
        ({"block_map": None, "lists": (COUNTS.long(), INDICES)}, r"block_counts is torch\.int64 on cpu"),
        ({"block_shape": 16}, r"block_shape=16 must be two numbers of tokens, \(block_q, block_k\), each 1 or more"),
        ({"block_shape": (16, 0)}, r"block_shape=\(16, 0\) must be two numbers"),
        ({"block_shape": (True, 16)}, r"block_shape=\(True, 16\) must be two numbers"),
        ({"block_shape": (np.True_, 16)}, r"block_shape=\((np\.)?True_?, 16\) must be two numbers"),
        ({"block_shape": (16.0, 16)}, r"block_shape=\(16.0, 16\) must be two numbers"),
        ({"return_lse": "yes"}, "return_lse='yes' is a str; it must be True or False"),
        ({"block_valid": torch.tensor([1])}, r"block_valid is torch\.int64"),
        ({"layout": "BSDH"}, "layout='BSDH' must be one of BSHD, BHSD"),
        ({"scale": float("nan")}, "scale=nan must be a finite number"),
        ({"backend": 3}, "backend=3 is a int; give a name"),
    ],
)
def test_what_is_no_map_is_refused(qkv, change, message):
    given = {"block_map": flags(), "block_shape": SHAPE, **change}
    with pytest.raises(InvalidInputError, match=message):
        polyattn.block_sparse_attention(*qkv, **given)
