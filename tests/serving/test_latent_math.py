"""Latent attention as functions on tensors: both forms, chunked prefixes, the scale, the policy."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import InvalidInputError
from polyattn.semantics import reference
from polyattn.serving.mla import (
    Decision,
    LatentPolicy,
    UpProjection,
    absorb,
    attend,
    decide,
    expand,
    plan_pieces,
    softmax_scale,
    split_kv_b,
    value_up,
    yarn_mscale,
)

H, NOPE, ROPE, LATENT, VALUE, PAGE = 3, 8, 4, 16, 6, 4
PREFIX, NEW = [5, 0, 17, 9], [3, 4, 1, 6]
EXACT = {torch.float64: 1e-13, torch.float32: 2e-6}
DTYPES = pytest.mark.parametrize("dtype", list(EXACT), ids=["fp64", "fp32"])


def far(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@dataclasses.dataclass
class Case:
    """A step over a pool of rows whose pages are in any order."""

    q_nope: Tensor
    q_pe: Tensor
    pool: Tensor
    table: Tensor
    up: UpProjection
    scale: float

    @property
    def query(self) -> Tensor:
        return torch.cat([self.q_nope, self.q_pe], -1)

    def slots(self, first: list[int], last: list[int]) -> Tensor:
        found = []
        for n, (start, stop) in enumerate(zip(first, last, strict=True)):
            token = torch.arange(start, stop)
            found.append(self.table[n, token // PAGE].long() * PAGE + token % PAGE)
        return torch.cat(found)

    @property
    def new_rows(self) -> Tensor:
        return self.pool[self.slots(PREFIX, lengths())]

    def unabsorbed(self, form: str, chunk: int = 100) -> Tensor:
        pieces = plan_pieces(Decision(form, ""), PREFIX, NEW, self.table, PAGE, chunk)
        return attend(pieces, self.query, self.new_rows, lambda slots: self.pool[slots], self.up, scale=self.scale)

    def absorbed(self) -> Tensor:
        out = polyattn.mla_attention(
            absorb(self.q_nope, self.q_pe, self.up),
            self.pool.unflatten(0, (-1, PAGE)),
            page_table=self.table,
            seq_lens=torch.tensor(lengths(), dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *itertools.accumulate(NEW)], dtype=torch.int32),
            max_seqlen_q=max(NEW),
            max_seqlen_k=max(lengths()),
            scale=self.scale,
            v_head_dim=LATENT,
        )
        return value_up(out, self.up)

    def wanted(self) -> Tensor:
        """Sequence by sequence, from the definition."""
        found = []
        stops = [0, *itertools.accumulate(NEW)]
        for n, length in enumerate(lengths()):
            token = torch.arange(length)
            rows = self.pool[self.table[n, token // PAGE].long() * PAGE + token % PAGE][None]
            own = slice(stops[n], stops[n + 1])
            found.append(
                reference.mla_unabsorbed_attention(
                    self.q_nope[own][None], self.q_pe[own][None], rows[..., :LATENT], rows[..., LATENT:],
                    *self.up, scale=self.scale, causal="bottom_right",
                )[0]
            )  # fmt: skip
        return torch.cat(found)


def lengths() -> list[int]:
    return [p + q for p, q in zip(PREFIX, NEW, strict=True)]


def make(dtype: torch.dtype, order: int = 0) -> Case:
    """The same tokens whatever the `order` of their pages."""
    counts = [-(-n // PAGE) for n in lengths()]
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    rows = randn(sum(counts), PAGE, LATENT + ROPE)
    pages = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(order))
    pool = torch.full((sum(counts) + 1, PAGE, LATENT + ROPE), float("nan"), dtype=dtype)
    pool[pages] = rows
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for n, own in enumerate(pages.int().split(counts)):
        table[n, : len(own)] = own
    up = split_kv_b(randn(H * (NOPE + VALUE), LATENT), NOPE, VALUE)
    return Case(randn(sum(NEW), H, NOPE), randn(sum(NEW), H, ROPE), pool.flatten(0, 1), table, up, 0.3)


# Up-projection --------------------------------------------------------------------------------------------------------


def test_both_halves_are_views_and_make_what_the_linear_layer_makes():
    linear = torch.nn.Linear(LATENT, H * (NOPE + VALUE), bias=False).requires_grad_(False)
    up = split_kv_b(linear.weight, NOPE, VALUE)
    assert all(half.untyped_storage().data_ptr() == linear.weight.untyped_storage().data_ptr() for half in up)
    rows = torch.randn(5, LATENT + ROPE)
    key, value = expand(rows, up)
    k_nope, wanted = linear(rows[:, :LATENT]).view(5, H, NOPE + VALUE).split([NOPE, VALUE], -1)
    torch.testing.assert_close(key[..., :NOPE], k_nope)
    torch.testing.assert_close(value, wanted)
    assert torch.equal(key[..., NOPE:], rows[:, None, LATENT:].expand(5, H, ROPE))


@pytest.mark.parametrize("shape", [(H * (NOPE + VALUE) + 1, LATENT), (0, LATENT), (LATENT,)])
def test_a_weight_of_another_shape_is_refused(shape):
    with pytest.raises(InvalidInputError, match=r"weight of kv_b_proj is \[.*whole heads of D_nope \+ D_v rows"):
        split_kv_b(torch.zeros(shape), NOPE, VALUE)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantised_weight_is_refused(dtype):
    with pytest.raises(InvalidInputError, match=r"is torch\.\w+; absorbing it needs real numbers: dequantise"):
        split_kv_b(torch.zeros(H * (NOPE + VALUE), LATENT, dtype=dtype), NOPE, VALUE)


# The two forms --------------------------------------------------------------------------------------------------------


@DTYPES
def test_absorbed_equals_unabsorbed_and_the_definition(dtype):
    case = make(dtype)
    assert far(case.absorbed(), case.wanted()) < EXACT[dtype]
    assert far(case.unabsorbed("one_shot"), case.wanted()) < EXACT[dtype]


@DTYPES
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 13, 16, 30, 31, 32, 1000])
def test_chunks_of_any_size_equal_one_piece(dtype, chunk):
    case = make(dtype)
    assert far(case.unabsorbed("chunked", chunk), case.unabsorbed("one_shot")) < EXACT[dtype]


def test_the_comparison_sees_a_chunk_that_is_missing():
    case = make(torch.float64)
    pieces = plan_pieces(Decision("chunked", ""), PREFIX, NEW, case.table, PAGE, 10)
    assert len(pieces) == 5
    for gone in range(1, len(pieces)):
        some = pieces[:gone] + pieces[gone + 1 :]
        got = attend(some, case.query, case.new_rows, lambda slots: case.pool[slots], case.up, scale=case.scale)
        assert far(got, case.wanted()) > 1e-3


@DTYPES
def test_where_the_pages_are_does_not_matter(dtype):
    one, other = make(dtype), make(dtype, order=1)
    assert not torch.equal(one.table, other.table)
    for form in ("one_shot", "chunked"):
        assert torch.equal(one.unabsorbed(form, 7), other.unabsorbed(form, 7))
    assert far(one.absorbed(), other.absorbed()) < EXACT[dtype]


@DTYPES
def test_a_prompt_without_a_prefix_reads_no_cache(dtype):
    case = make(dtype)
    none = [0] * len(NEW)
    pieces = plan_pieces(Decision("unabsorbed", ""), none, NEW, case.table, PAGE, 8)
    assert [piece.slots for piece in pieces] == [None]

    def unread(slots: Tensor) -> Tensor:
        raise AssertionError("the rows are given")

    got = attend(pieces, case.query, case.new_rows, unread, case.up, scale=case.scale)
    key, value = expand(case.new_rows, case.up)
    cu = torch.tensor([0, *itertools.accumulate(NEW)], dtype=torch.int32)
    wanted = reference.varlen_attention(
        case.query, key, value, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=max(NEW), max_seqlen_k=max(NEW),
        causal="bottom_right", scale=case.scale,
    )  # fmt: skip
    assert far(got, wanted) < EXACT[dtype]


@pytest.mark.parametrize("form", ["one_shot", "chunked"])
def test_sixteen_bits_are_summed_in_thirty_two(form):
    """Many small chunks lose no more than one rounding of the result."""
    exact, case = make(torch.float64), make(torch.bfloat16)
    exact = dataclasses.replace(
        exact, q_nope=case.q_nope.double(), q_pe=case.q_pe.double(), pool=case.pool.double(),
        up=UpProjection(*(half.double() for half in case.up)),
    )  # fmt: skip
    got = case.unabsorbed(form, 1)
    assert got.dtype == torch.bfloat16
    assert far(got, exact.wanted()) < 8e-3


# Pieces ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4, 10, 31, 100])
def test_chunks_are_full_and_cover_every_prefix_token_once(chunk):
    case = make(torch.float32)
    _, *chunks = plan_pieces(Decision("chunked", ""), PREFIX, NEW, case.table, PAGE, chunk)
    sizes = [len(piece.slots) for piece in chunks]
    assert sizes[:-1] == [chunk] * (len(sizes) - 1)
    covered = torch.cat([piece.slots for piece in chunks])
    assert torch.equal(covered, case.slots([0] * len(PREFIX), PREFIX))
    for piece in chunks:
        assert not piece.causal
        assert piece.cu_seqlens_q[-1] == piece.queries.stop - piece.queries.start
        assert piece.cu_seqlens_k[-1] == len(piece.slots)
        assert piece.max_seqlen_q == piece.cu_seqlens_q.diff().max()
        assert piece.max_seqlen_k == piece.cu_seqlens_k.diff().max()


def test_only_the_queries_of_sequences_in_a_chunk_take_part():
    case = make(torch.float32)
    _, *chunks = plan_pieces(Decision("chunked", ""), PREFIX, NEW, case.table, PAGE, 5)
    assert [(piece.queries.start, piece.queries.stop) for piece in chunks] == [
        (0, 3), (7, 8), (7, 8), (7, 8), (7, 14), (8, 14), (8, 14),
    ]  # fmt: skip


def test_an_absorbed_step_has_no_pieces():
    assert plan_pieces(Decision("absorbed", ""), PREFIX, NEW, make(torch.float32).table, PAGE, 5) == []


# Scale ----------------------------------------------------------------------------------------------------------------


def test_the_scale_is_that_of_the_uncompressed_heads():
    assert softmax_scale(128, 64) == 192**-0.5
    assert softmax_scale(128, 64, {"rope_type": "default", "mscale_all_dim": 1.0, "factor": 40}) == 192**-0.5
    assert softmax_scale(128, 64, {"rope_type": "yarn", "factor": 40}) == 192**-0.5
    # DeepSeek-V3: factor 40, mscale_all_dim 1: 0.1 ln 40 + 1 = 1.36888...
    wanted = pytest.approx(192**-0.5 * 1.3688879454113937**2, rel=1e-12)
    assert softmax_scale(128, 64, {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}) == wanted
    assert softmax_scale(128, 64, {"type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}) == wanted
    assert yarn_mscale(1.0) == yarn_mscale(0.5) == 1.0


def test_a_temperature_without_a_factor_is_refused():
    with pytest.raises(InvalidInputError, match=r"mscale_all_dim=0\.707 and factor=None; .* needs the factor"):
        softmax_scale(8, 4, {"rope_type": "yarn", "mscale_all_dim": 0.707})


# Policy ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, prefix, new, form, said",
    [
        ("decode", [90000], [1], "absorbed", "mode decode"),
        ("target_verify", [90000], [4], "absorbed", "mode target_verify"),
        ("draft_extend", [90000], [4], "absorbed", "mode draft_extend"),
        ("mixed", [90000, 0], [1, 500], "absorbed", "mode mixed: rows that decode"),
        ("idle", [], [], "absorbed", "no tokens"),
        ("extend", [0, 0], [500, 3], "unabsorbed", "no sequence has a prefix"),
        ("extend", [8191, 0], [9, 9], "absorbed", "8191 tokens in all are below the threshold, 8192"),
        ("extend", [8190, 2], [9, 9], "one_shot", "8210 keys in all, 8192 of them prefix: at most 131072"),
        ("extend", [131000], [72], "one_shot", "131072 keys in all"),
        ("extend", [131000], [73], "chunked", "131073 keys in all are above 131072: prefixes in chunks of 131072"),
    ],
)
def test_the_rule(mode, prefix, new, form, said):
    decision = decide(mode, prefix, new)
    assert decision.form == form
    assert said in str(decision)


def test_a_policy_may_ask_for_enough_queries():
    policy = LatentPolicy(threshold=100, queries=128)
    assert decide("extend", [1000, 1000], [200, 60], policy).form == "one_shot"
    few = decide("extend", [1000, 1000], [200, 50], policy)
    assert (few.form, few.reason) == ("absorbed", "125.0 new tokens read a prefix token, 128 are needed")


def test_an_unknown_mode_is_refused():
    with pytest.raises(InvalidInputError, match=r"mode='extent' is not one of .* Did you mean 'extend'"):
        decide("extent", [], [])


@pytest.mark.parametrize(
    "limit", [{"threshold": -1}, {"chunk": 0}, {"one_shot_tokens": 1.5}, {"queries": 0}, {"threshold": True}]
)
def test_limits_are_numbers_of_tokens(limit):
    with pytest.raises(InvalidInputError, match=r"LatentPolicy \w+=.*; a whole number of tokens, at least \d,"):
        LatentPolicy(**limit)
