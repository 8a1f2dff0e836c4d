"""`decode` under the interpreter against core's definition, and how it shares a batch out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.semantics.kv_quant import fp4_scales, real, stored
from polyattn.semantics.reference import paged_attention, verify_mask
from polyattn.testing.families.cached import in_tables
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn_triton.kernels.decode import Config, bounds, config_for, decode, items_for, parts_for
from polyattn_triton.kernels.splits import FIELDS, Items, Shape

Lengths = Sequence[tuple[int, int]]
RAGGED: Lengths = ((1, 33), (1, 0), (1, 90))
"""(queries, keys): padding among them, and one that is worth splitting."""
DRAFTS: Lengths = ((5, 64), (3, 9), (1, 0), (4, 4))
NO_PAGE = 2**30
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8, "fp4_e2m1": torch.uint8}

MANY = Config(16, 16, 4, 1, 2, 1)
"""More parts than the interpreter's own configuration makes."""


class Problem:
    """Rows of some sequences in pages in random order: everything that is not theirs is NaN, or no page."""

    def __init__(
        self, lens: Lengths, *, heads: tuple[int, int] = (4, 2), widths: tuple[int, int] = (16, 16), page: int = 16,
        dtype: torch.dtype = torch.float32, kv: tuple[str, str] = ("auto", ""), new: bool = False, hnd: bool = False,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(page)
        self.lens, self.page, self.kv, self.hnd, self.dtype = lens, page, kv, hnd, dtype
        needed = [-(-keys // page) for _, keys in lens]
        pages, order = sum(needed) + 1, iter(torch.randperm(sum(needed) + 1, generator=g).tolist())
        self.table = torch.full((len(lens), max(needed) + 1), NO_PAGE, dtype=torch.int32)
        mine = torch.zeros(pages, page, dtype=torch.bool)
        fresh = torch.zeros_like(mine)
        for n, (queries, keys) in enumerate(lens):
            for t in range(keys):
                if t % page == 0:
                    self.table[n, t // page] = next(order)
                mine[self.table[n, t // page], t % page] = True
                fresh[self.table[n, t // page], t % page] = t >= keys - queries
        self.query = torch.randn(sum(q for q, _ in lens), heads[0], widths[0], generator=g).to(dtype)
        self.width = widths[1]
        self.caches, self.scales, self.numbers, self.new = [], [], [], []
        for width in widths:
            values = torch.randn(pages, page, heads[1], width, generator=g).to(dtype).float()
            scale = self._scale(values, g)
            codes = stored(values, _broadcast(scale), DTYPES.get(kv[0], dtype))
            self.numbers.append(real(codes, _broadcast(scale), torch.float32).masked_fill(~mine[..., None, None], 0.0))
            hidden = ~(mine & ~fresh if new else mine)[..., None, None]
            # float8 has no masked_fill.
            blank = torch.nan if codes.is_floating_point() else 127
            kept = codes.float().masked_fill(hidden, blank).to(codes.dtype)
            self.caches.append(kept.transpose(1, 2).contiguous() if hnd else kept)
            per_token = scale is not None and scale.ndim > 2
            self.scales.append(scale.transpose(1, 2).contiguous() if hnd and per_token and scale is not None else scale)
            rows = [self._row(values, n, t) for n, (q, k) in enumerate(lens) for t in range(k - q, k)]
            self.new.append(torch.stack(rows).to(dtype) if new else None)

    def _row(self, values: Tensor, n: int, t: int) -> Tensor:
        if t < 0:
            return torch.full_like(values[0, 0], torch.nan)
        return values[self.table[n, t // self.page], t % self.page]

    def _scale(self, values: Tensor, g: torch.Generator) -> Tensor | None:
        pages, page, heads, _ = values.shape
        made = {
            "": lambda: None,
            "tensor": lambda: torch.tensor([0.37]),
            "head": lambda: torch.rand(heads, generator=g) + 0.1,
            "token": lambda: (torch.rand(pages, page, heads, generator=g) + 0.1) * 1e-3,
            "block16": lambda: fp4_scales(values),
        }
        return made[self.kv[1]]()

    @property
    def tables(self) -> dict[str, Any]:
        starts = [0, *itertools.accumulate(q for q, _ in self.lens)]
        return {
            "page_table": self.table,
            "seq_lens": torch.tensor([k for _, k in self.lens], dtype=torch.int32),
            "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32),
        }

    @property
    def longest(self) -> dict[str, int]:
        return {"max_seqlen_q": max(q for q, _ in self.lens), "max_seqlen_k": max(k for _, k in self.lens)}

    def items(
        self, config: Config | None = None, *, causal: bool = True, window: tuple[int, int] = (-1, -1), chunk: int = 0,
        invariant: bool = False, **_: Any,
    ) -> tuple[Items, Config]:  # fmt: skip
        shape = self.query.shape
        return items_for(
            (shape[2], self.width), self.dtype, self.query.device, heads=(shape[1], self.numbers[0].shape[2]),
            sequences=len(self.lens), **self.longest, window=bounds(causal, window, chunk), chunk=chunk,
            kv_dtype=self.kv[0], invariant=invariant, config=config,
        )  # fmt: skip

    def run(self, plan: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
        out = torch.full((*self.query.shape[:2], self.width), torch.nan, dtype=self.dtype)
        lse = torch.full(self.query.shape[:2], torch.nan)
        options = {"causal": True, "scale": 0.3, **options}
        decode(
            self.query, *self.caches, **in_tables(**self.tables, **self.longest, page_size=self.page, hnd=self.hnd,
            key=self.new[0], value=self.new[1], kv_dtype=self.kv[0], kv_scales=self.kv[1], k_scale=self.scales[0],
            v_scale=self.scales[1], out=out, lse=lse, plan=plan, **options),
        )  # fmt: skip
        return out, lse

    def check(self, config: Config | None = None, **options: Any) -> None:
        plan = None
        if config is not None:
            plan = self.items(config, **options)
            for workspace in (plan[0].outs, plan[0].lses):
                workspace.fill_(torch.nan)
            plan[0].share_out(self.tables["seq_lens"], self.tables["cu_seqlens_q"])
        out, lse = self.run(plan, **options)
        options.pop("tree", None)
        causal = options.pop("causal", True)
        expected, expected_lse = paged_attention(
            self.query.float(), *self.numbers, **self.tables, scale=0.3, causal="bottom_right" if causal else "none",
            return_lse=True, **options,
        )  # fmt: skip
        error = (out.float() - expected).norm() / expected.norm()
        # What is quantised is multiplied in float16 where the query is of 16 bits.
        assert float(error) < RELATIVE_L2[self.dtype]
        torch.testing.assert_close(lse, expected_lse, atol=2e-3 if self.dtype != torch.float32 else 1e-5, rtol=1e-5)
        if plan is not None:
            assert not plan[0].counters.any()


def _broadcast(scale: Tensor | None) -> Tensor | None:
    if scale is None or scale.ndim == 4:
        return scale
    return scale.unsqueeze(-1) if scale.ndim == 3 else scale.reshape(-1, 1)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("page", "hnd"), [(1, False), (5, True), (16, False), (64, True)])
def test_s9_pages_of_any_size_in_both_layouts(page: int, hnd: bool) -> None:
    Problem(RAGGED, page=page, hnd=hnd).check(MANY)


def test_the_configuration_of_the_table() -> None:
    Problem(RAGGED, page=64).check()


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (40, 2)])
def test_groups_of_any_size(heads: tuple[int, int]) -> None:
    """20 heads of a group are two tiles of 16 rows."""
    Problem(((1, 40), (1, 9)), heads=heads).check(MANY)


@pytest.mark.parametrize("widths", [(24, 40), (72, 16)])
def test_head_dims_that_are_no_power_of_two(widths: tuple[int, int]) -> None:
    Problem(RAGGED, widths=widths, dtype=torch.bfloat16).check(MANY)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window": (9, -1)},
        {"window": (3, 2), "causal": False},
        {"chunk": 11},
        {"softcap": 1.5, "sinks": torch.tensor([0.0, -torch.inf, 30.0, -5.0])},
    ],
    ids=lambda o: "-".join(o),
)
def test_rules_and_logits(options: dict[str, Any]) -> None:
    Problem(DRAFTS).check(MANY, **options)


def test_queries_of_an_encoder_that_is_shorter() -> None:
    Problem(((9, 3), (2, 40), (4, 4), (1, 0))).check(MANY, causal=False, window=(3, -1))


def test_keys_before_a_window_are_not_read() -> None:
    """Their pages may be another request's by now."""
    problem = Problem(((1, 170),), page=5)
    problem.table[:, :30] = NO_PAGE
    expected = Problem(((1, 170),), page=5)
    options: dict[str, Any] = {"window": (9, -1)}
    assert torch.equal(problem.run(**options)[0], expected.run(**options)[0])


@pytest.mark.parametrize("tree", [False, True])
def test_s8_masks_and_trees(tree: bool) -> None:
    problem = Problem(DRAFTS, page=5)
    mask = torch.zeros(4, 1, 5, 64, dtype=torch.bool)
    for n, (queries, keys) in enumerate(DRAFTS):
        if keys:
            mask[n, 0, :queries, :keys] = verify_mask(
                keys - queries, [(i - 1) // 2 if i else -1 for i in range(queries)]
            )
    problem.check(MANY, attn_mask=mask, tree=tree, causal=False)
    if not tree:
        bias = torch.randn(1, 4, 5, 64, generator=torch.Generator().manual_seed(1)).masked_fill(~mask[:1], -torch.inf)
        problem.check(MANY, attn_mask=bias, causal=True)


KINDS = [
    ("fp8_e4m3", "tensor"), ("fp8_e4m3", "token"), ("fp8_e5m2", "head"), ("int8", "token"), ("fp8_e5m2", ""),
    ("fp4_e2m1", "block16"),
]  # fmt: skip


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("kv", KINDS, ids="-".join)
def test_quantised_caches(kv: tuple[str, str], new: bool) -> None:
    Problem(((3, 41), (1, 0), (2, 7)), kv=kv, new=new, widths=(32, 48), hnd=new).check(MANY)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kv", [("fp8_e4m3", "token"), ("int8", "tensor"), ("fp4_e2m1", "block16")], ids="-".join)
def test_quantised_caches_under_half_precision(kv: tuple[str, str]) -> None:
    Problem(RAGGED, kv=kv, widths=(64, 32), dtype=torch.bfloat16).check(MANY)


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_queries_that_float16_does_not_hold(size: float) -> None:
    """An 8-bit cache is multiplied in float16, bfloat16 queries or not."""
    problem = Problem(((1, 40),), kv=("fp8_e4m3", "tensor"), dtype=torch.bfloat16)
    expected, _ = problem.run()
    problem.query *= size
    out, _ = problem.run(scale=0.3 / size)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def test_new_rows_are_read_where_they_are() -> None:
    Problem(DRAFTS, new=True, page=5).check(MANY, window=(7, -1))


@pytest.mark.parametrize("lens", [DRAFTS, ((1, 40), (1, 3))])
@pytest.mark.parametrize("seen", [{"window": (0, -1)}, {"window": (0, 0)}, {"chunk": 1}])
def test_of_new_rows_alone_no_page_is_read(lens: Lengths, seen: dict[str, Any]) -> None:
    """What lies in a cache where a new row will be may be anything, and 0 times NaN is no number."""
    Problem(lens, new=True, page=5).check(MANY, **seen)


def test_a_plan_serves_many_calls() -> None:
    problem = Problem(RAGGED)
    plan = problem.items(MANY)
    plan[0].share_out(problem.tables["seq_lens"], problem.tables["cu_seqlens_q"])
    first, second = problem.run(plan), problem.run(plan)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


# How a batch is shared out ------------------------------------------------------------------------------------------


def shared_out(lens: Lengths, config: Config, **options: Any) -> list[list[int]]:
    """The items that have something to do."""
    items, _ = Problem(lens).items(config, **options)
    seq_lens = torch.tensor([k for _, k in lens], dtype=torch.int32)
    starts = torch.tensor([0, *itertools.accumulate(q for q, _ in lens)], dtype=torch.int32)
    items.table.fill_(-77)
    items.share_out(seq_lens, starts)
    rows = items.table.view(-1, FIELDS.value).tolist()
    assert all(row[0] >= -1 for row in rows), "every item is written"
    return [row for row in rows if row[0] >= 0]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": (20, -1)}, {"chunk": 50}], ids=str)
def test_items_cover_what_is_seen_once(options: dict[str, Any], invariant: bool) -> None:
    lens = ((1, 170), (1, 0), (4, 90), (1, 16), (2, 33))
    rows = shared_out(lens, MANY, invariant=invariant, **options)
    for n, (queries, keys) in enumerate(lens):
        mine = [row for row in rows if row[0] == n]
        assert [row[1:4] for row in mine] == [[keys, sum(q for q, _ in lens[:n]), queries]] * len(mine)
        assert [row[6:] for row in mine] == [[rows.index(mine[0]), len(mine)]] * len(mine)
        ranges = [tuple(row[4:6]) for row in mine]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        p = keys - queries
        first = max(p - options.get("window", (p, 0))[0], p // options.get("chunk", 1000) * options.get("chunk", 0), 0)
        assert ranges[0][0] == first // 16 * 16 if keys else ranges == [(0, 0)]
        assert ranges[-1][1] == -(-keys // 16) * 16


def test_one_long_sequence_among_short_ones_fills_the_device() -> None:
    """8 processors, 2 programs on each, 2 heads: 8 items are to be long."""
    rows = shared_out([(1, 4096), *[(1, 16)] * 7], MANY)
    assert sum(row[0] == 0 for row in rows) >= 7
    assert len(rows) <= 8 + 8


def test_even_batches_are_not_split_without_need() -> None:
    assert len(shared_out([(1, 256)] * 16, MANY)) == 16


@pytest.mark.parametrize(
    ("sequences", "keys", "parts"),
    [(1, 2048, 16), (1, 32768, 32), (8, 2048, 4), (8, 32768, 4), (64, 8192, 1), (256, 8192, 1), (1, 1, 1)],
)
def test_parts_of_uniform_batches_on_a_large_device(sequences: int, keys: int, parts: int) -> None:
    """132 processors with two programs each, 8 heads: what was fastest when all were tried."""
    assert parts_for(8 * sequences, -(-keys // 64), 132, 2) == parts


@pytest.mark.parametrize(
    ("programs", "blocks", "cells", "parts"),
    [(12, 13, 16 * 128, 7), (8, 14, 64 * 64, 7), (20, 2, 8 * 128, 1), (9, 115, 16 * 64, 13), (4, 125, 8 * 256, 32)],
)
def test_parts_of_wide_groups(programs: int, blocks: int, cells: int, parts: int) -> None:
    """On an H200: what was within 6% of the fastest when 1 to 40 were tried."""
    assert parts_for(programs, blocks, 132, 2, cells=cells) == parts


def test_no_part_is_empty() -> None:
    for programs, blocks in itertools.product((1, 7, 140, 300, 5000), (1, 2, 13, 100)):
        parts = parts_for(programs, blocks, 132, 3)
        assert 1 <= parts <= blocks
        longest = -(-blocks // parts)
        assert longest * (parts - 1) < blocks


# Batch invariance ---------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("lens", [((1, 100), (1, 3), (1, 200)), ((3, 100), (9, 70))])
def test_a_sequence_alone_has_the_bits_it_has_in_a_batch(lens: Lengths) -> None:
    batch = Problem(lens)
    out, lse = batch.run(invariant=True)
    start = 0
    for n, (queries, _) in enumerate(lens):
        alone = Problem(lens)
        span = slice(start, start + queries)
        alone.query, alone.table, alone.lens = batch.query[span], batch.table[n : n + 1], lens[n : n + 1]
        own, own_lse = alone.run(invariant=True)
        assert torch.equal(own, out[span])
        assert torch.equal(own_lse, lse[span])
        start += queries


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("window", [(-1, 0), (700, 0)], ids=str)
def test_batch_invariant_parts_follow_from_their_sequence_alone(window: tuple[int, int]) -> None:
    """With 64 keys a block, as on a large device. A short sequence is cut as fine as it pays, a long one in 16."""
    lengths = (1, 129, 2048, 2049, 40000)

    def cuts(lens: tuple[int, ...], most: int) -> list[list[tuple[int, int]]]:
        shape = Shape(len(lens), 2, 16, 64, most, 64, target=0, least=0, fixed=(2, 32), window=window, chunk=0)
        items = Items(shape, lambda _, size: torch.empty(size, dtype=torch.uint8))
        items.share_out(torch.tensor(lens, dtype=torch.int32), torch.arange(len(lens) + 1, dtype=torch.int32))
        rows = [row for row in items.table.view(-1, FIELDS.value).tolist() if row[0] >= 0]
        found = [[tuple(row[4:6]) for row in rows if row[0] == n] for n in range(len(lens))]
        assert all(
            len(own) == row[7] for own, row in zip(found, (r for r in rows if r[6] == rows.index(r)), strict=True)
        )
        return found

    together = cuts(lengths, 40000)
    for length, own in zip(lengths, together, strict=True):
        assert own == cuts((length,), length)[0]
        first = max(length - 1 - window[0], 0) // 64 * 64 if window[0] >= 0 else 0
        assert (own[0][0], own[-1][1]) == (first, -(-length // 64) * 64)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(own))
    if window[0] < 0:
        assert [len(own) for own in together] == [1, 2, 16, 11, 20]


def test_configurations_fit_any_head_dim() -> None:
    device = torch.device("cpu")
    assert config_for(device, torch.bfloat16, 16, (128, 128), 4).M == 16
    assert config_for(device, torch.float32, 32, (256, 64), 1000).M == 64
    assert config_for(device, torch.bfloat16, 8, (128, 128), 1000).M == 32
