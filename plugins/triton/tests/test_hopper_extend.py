"""Paged extend on Hopper: what it takes, where its tiles and pages are, its kernel emulated, and compiled for sm_90."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import tuning
from polyattn.contract import AttentionRequest, KVPart
from polyattn.semantics.reference import attention
from polyattn.testing.conforming import FULL
from polyattn.testing.families.cached import in_tables
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn_triton import paged, runtime
from polyattn_triton.hopper import extend as hopper
from polyattn_triton.kernels import splits
from polyattn_triton.kernels.merge import merge
from polyattn_triton.kernels.pools import pools_of
from polyattn_triton.records.tuned import HOPPER_EXTEND

from .hopper_offline import elsewhere, overlaps


class Problem:
    """Sequences of (queries, keys) over pages in any order; rows of the pools that are nobody's are NaN."""

    def __init__(
        self, lens: list[tuple[int, int]], *, page_size: int, heads: tuple[int, int], width: int,
        hnd: bool = False, dtype: torch.dtype = torch.bfloat16, left: int = -1,
    ) -> None:  # fmt: skip
        torch.manual_seed(len(lens) + page_size)
        self.lens, self.page_size, self.hnd, self.left = lens, page_size, hnd, left
        heads_q, heads_k = heads
        columns = max(1, *(-(-k // page_size) for _, k in lens))
        pages = len(lens) * columns + 1
        table = torch.randperm(pages)[: len(lens) * columns].view(len(lens), columns)
        rows = torch.randn(2, pages, page_size, heads_k, width).to(dtype)
        self.keys: list[tuple[Tensor, Tensor]] = []
        owned = torch.zeros(pages, page_size, dtype=torch.bool)
        for n, (q, k) in enumerate(lens):
            i = torch.arange(k)
            at = (table[n, i // page_size], i % page_size)
            self.keys.append((rows[0][at], rows[1][at]))
            first = max(0, k - q - left) if left >= 0 else 0
            owned[at[0][first:], at[1][first:]] = True
            # Pages that lie wholly before the window are gone, and so are those after the end.
            table[n, : first // page_size] = 2**31 - 1
            table[n, -(-k // page_size) :] = 2**31 - 1
        rows[:, ~owned] = float("nan")
        if hnd:
            rows = rows.transpose(2, 3).contiguous()
        self.key_cache, self.value_cache = rows
        tokens = sum(q for q, _ in lens)
        self.query = torch.randn(tokens, heads_q, width).to(dtype)
        self.out = torch.full_like(self.query, float("nan"))
        self.lse = torch.full((tokens, heads_q), float("nan"))
        self.tables: dict[str, Any] = {
            "page_table": table.int(),
            "seq_lens": torch.tensor([k for _, k in lens], dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, *[q for q, _ in lens]]).cumsum(0).int(),
            "max_seqlen_q": max(q for q, _ in lens),
        }

    def on(self, device: str) -> Problem:
        for name in ("query", "key_cache", "value_cache", "out", "lse"):
            setattr(self, name, getattr(self, name).to(device))
        self.tables = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in self.tables.items()}
        return self

    def run(self, **options: Any) -> None:
        hopper.extend(
            self.query, self.key_cache, self.value_cache, **in_tables(**self.tables), page_size=self.page_size,
            hnd=self.hnd, scale=self.query.shape[2] ** -0.5, left=self.left, out=self.out, lse=self.lse, **options,
        )  # fmt: skip

    def check(self, *, causal: bool, attn_mask: Tensor | None = None, sinks: Tensor | None = None) -> None:
        starts = self.tables["cu_seqlens_q"].tolist()
        wanted, wanted_lse = torch.zeros_like(self.out.cpu()).double(), torch.zeros_like(self.lse.cpu()).double()
        for n, (q, k) in enumerate(self.lens):
            mask = None if attn_mask is None else attn_mask[n if len(attn_mask) > 1 else 0, :, :q, :k]
            if q:
                wanted[starts[n] : starts[n + 1]], wanted_lse[starts[n] : starts[n + 1]] = one(
                    self.query[starts[n] : starts[n + 1]].cpu(), *self.keys[n], causal, self.left, mask, sinks
                )
        found = self.out.cpu().double()
        assert float((found - wanted).norm()) <= RELATIVE_L2[self.out.dtype] * float(wanted.norm())
        torch.testing.assert_close(self.lse.cpu().double(), wanted_lse, rtol=0, atol=1e-3)


def one(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, left: int, mask: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A sequence by core's definition."""
    out, lse = attention(
        *(x.double()[None] for x in (query, key, value)),
        causal="bottom_right" if causal else "none",
        window=(left, -1),
        attn_mask=None if mask is None else mask[None],
        sinks=sinks,
        return_lse=True,
    )
    return out[0], lse[0]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher launches the emulated kernel."""
    if sys.modules.get("triton.experimental.gluon.language.nvidia.hopper") is None:
        pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="not run: the Hopper kernels")
    from polyattn_triton.hopper import extend_kernel

    from .gluon_emulator import Machine

    monkeypatch.setattr(extend_kernel, "attend", Machine(extend_kernel.attend))


CASES = {
    # (queries, keys) of sequences, and what differs from causal bf16 with 8 heads over 2, D 64, pages of 16 tokens
    "odd lengths": ([(70, 300), (3, 9), (0, 40), (1, 1)], {}),
    "one length": ([(40, 150), (40, 41), (40, 40)], {"heads": (4, 4)}),
    "more queries than keys": ([(50, 20), (33, 0), (7, 130)], {}),
    "pages of 48, HND, full": ([(90, 333), (2, 50)], {"page_size": 48, "hnd": True, "causal": False, "heads": (2, 2)}),
    "pages of 256": ([(40, 600)], {"page_size": 256}),
    "one key head": ([(30, 290), (5, 17)], {"heads": (16, 1), "page_size": 32}),
    "D 128": ([(40, 270), (3, 130)], {"width": 128, "page_size": 64, "dtype": torch.float16}),
    "D 256": ([(40, 170)], {"width": 256, "page_size": 32, "heads": (2, 1)}),
    "window": ([(70, 600), (70, 90), (5, 333)], {"left": 100, "page_size": 32}),
    "window, full": ([(70, 400), (30, 20)], {"left": 37, "causal": False}),
    "window, HND": ([(40, 333), (3, 50)], {"left": 50, "hnd": True, "heads": (4, 1)}),
    "a window of one": ([(50, 300)], {"left": 0}),
    "7 heads": ([(70, 300), (3, 9), (0, 40), (1, 1)], {"heads": (14, 2)}),
    "12 heads, D 128": ([(9, 290), (5, 17)], {"heads": (12, 1), "page_size": 32, "width": 128}),
    "5 heads, full": ([(40, 150), (40, 41), (40, 40)], {"heads": (5, 1), "causal": False, "hnd": True}),
    "3 heads, window": ([(70, 600), (5, 333)], {"left": 100, "page_size": 32, "heads": (6, 2)}),
}


def problem_of(name: str, with_sinks: bool) -> tuple[Problem, dict[str, Any]]:
    lens, given = CASES[name]
    given = {"heads": (8, 2), "width": 64, "page_size": 16, **given}
    options = {"causal": given.pop("causal", True), "sinks": torch.randn(given["heads"][0]) if with_sinks else None}
    return Problem(lens, **given), options


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_emulated(emulated: None, name: str, with_sinks: bool) -> None:
    problem, options = problem_of(name, with_sinks)
    problem.run(**options)
    problem.check(**options)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("config", [hopper.Config(128, 3), hopper.Config(64, 3, registers=160, warpgroups=3)], ids=str)
def test_emulated_with_other_consumers(emulated: None, config: hopper.Config) -> None:
    problem, options = problem_of("window", True)
    problem.run(**options, config=config)
    problem.check(**options)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["", "one mask"])
def test_emulated_tree(emulated: None, causal: bool, shared: bool) -> None:
    """A query sees the keys before the last ones, and of these its ancestors."""
    lens = [(40, 200), (40, 40), (40, 141)]
    problem = Problem(lens, heads=(8, 2), width=64, page_size=32)
    ancestors = torch.eye(40, dtype=torch.bool)
    for i in range(1, 40):
        ancestors[i] |= ancestors[(i - 1) // 2]
    mask = torch.ones(1 if shared else 3, 1 if shared else 8, 40, 200, dtype=torch.bool)
    if shared:
        problem = Problem([(40, 200)] * 3, heads=(8, 2), width=64, page_size=32)
        mask[..., 160:] = ancestors
    else:
        for n, (q, k) in enumerate(lens):
            mask[n, ..., k - q : k] = ancestors
            mask[n, 1::2, 5, k - q] = False
    # Only the own columns are read.
    read = mask.clone()
    for n, (q, k) in enumerate(lens if not shared else []):
        read[n, ..., : k - q] = False
    problem.run(causal=causal, attn_mask=read)
    problem.check(causal=causal, attn_mask=mask)


def test_a_query_that_tma_cannot_read_is_copied(emulated: None) -> None:
    problem = Problem([(40, 90)], heads=(4, 2), width=64, page_size=16)
    rows = torch.zeros(40, 4, 65, dtype=torch.bfloat16)[..., 1:]
    problem.query = rows.copy_(problem.query)
    assert problem.query.data_ptr() % 16
    problem.run(causal=True)
    problem.check(causal=True)


def test_outputs_of_any_steps(emulated: None) -> None:
    problem = Problem([(40, 90)], heads=(4, 2), width=64, page_size=16)
    problem.out = torch.full((40, 5, 65), float("nan"), dtype=torch.bfloat16)[:, :4, 1:]
    problem.lse = torch.full((4, 40), float("nan")).T
    problem.run(causal=True)
    problem.check(causal=True)


def test_keys_in_ranges(emulated: None) -> None:
    """Each range is a part of its own; some have no keys."""
    problem = Problem([(20, 800), (3, 9), (4, 0)], heads=(4, 2), width=64, page_size=48)
    outs = torch.full((3, *problem.out.shape), float("nan"))
    lses = torch.full((3, *problem.lse.shape), float("nan"))
    problem.out, problem.lse, whole = outs, lses, (problem.out, problem.lse)
    problem.run(causal=False, cuts=3)
    assert bool((lses[1] == float("-inf"))[20:].all()), "a range has whole blocks and pages"
    assert bool((lses > float("-inf"))[:, :20].all())
    problem.out, problem.lse = whole
    merge(outs, lses, out=problem.out, lse=problem.lse)
    problem.check(causal=False)


RANGED = {
    # (queries, keys) of sequences, and what differs from causal bf16 with 6 heads over 2, D 64, pages of 16 tokens
    "few tokens": ([(20, 700)], {}),
    "odd lengths": ([(41, 300), (3, 9), (0, 40), (1, 1), (7, 0), (2, 129)], {}),
    "more queries than keys": ([(50, 20), (33, 0), (7, 130)], {"heads": (4, 4)}),
    "prefill": ([(300, 300), (130, 131)], {"heads": (3, 1)}),
    "12 heads, D 128": ([(9, 520), (5, 17)], {"heads": (12, 1), "width": 128, "page_size": 64}),
    "pages of 48, HND, full": ([(33, 900), (2, 50)], {"page_size": 48, "hnd": True, "causal": False}),
    "D 256": ([(30, 300)], {"width": 256, "heads": (5, 1), "page_size": 128}),
}


def in_ranges(problem: Problem, cuts: int, *, causal: bool, sinks: Tensor | None = None) -> None:
    whole = problem.out, problem.lse
    problem.out = torch.full((cuts, *whole[0].shape), float("nan"), device=whole[0].device)
    problem.lse = torch.full((cuts, *whole[1].shape), float("nan"), device=whole[0].device)
    problem.run(causal=causal, cuts=cuts)
    merge(problem.out, problem.lse, sinks=sinks, out=whole[0], lse=whole[1])
    problem.out, problem.lse = whole


def ranged(name: str) -> tuple[Problem, bool]:
    lens, given = RANGED[name]
    given = {"heads": (6, 2), "width": 64, "page_size": 16, **given}
    causal = given.pop("causal", True)
    return Problem(lens, **given), causal


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", RANGED)
@pytest.mark.parametrize("cuts", [2, 3, 7])
def test_ranges_of_a_call_of_its_own(emulated: None, name: str, cuts: int) -> None:
    """A range's keys are masked from where they stand in the sequence."""
    problem, causal = ranged(name)
    sinks = torch.randn(problem.query.shape[1]) if cuts == 3 else None
    in_ranges(problem, cuts, causal=causal, sinks=sinks)
    problem.check(causal=causal, sinks=sinks)


def drawn(seed: int) -> tuple[Problem, dict[str, Any], int]:
    """A batch that nobody chose, and ranges of its keys or 0."""
    chance = random.Random(seed)
    lens = [
        (chance.choice([0, 1, chance.randint(2, 40), chance.randint(40, 90)]), chance.choice([0, 1, 90, 300]))
        for _ in range(chance.randint(0, 8))
    ]
    lens = [(q, q * chance.randint(0, 1) + k) for q, k in [*lens, (chance.randint(1, 70), chance.randint(1, 400))]]
    group, heads = chance.choice([1, 3, 5, 6, 7, 8, 12]), chance.choice([1, 2])
    cuts = chance.choice([0, 0, 2, 5])
    problem = Problem(
        lens, page_size=chance.choice([16, 48, 64, 128]), heads=(group * heads, heads), hnd=chance.random() < 0.3,
        width=chance.choice([64, 64, 128]), left=-1 if cuts else chance.choice([-1, 0, 30, 150]),
        dtype=chance.choice([torch.bfloat16, torch.float16]),
    )  # fmt: skip
    sinks = torch.randn(group * heads) if chance.random() < 0.4 else None
    return problem, {"causal": chance.random() < 0.7, "sinks": sinks}, cuts


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(20))
def test_emulated_as_drawn(emulated: None, seed: int) -> None:
    problem, options, cuts = drawn(seed)
    if cuts:
        in_ranges(problem, cuts, **options)
    else:
        problem.run(**options)
    problem.check(**options)


def test_a_key_that_is_missing_is_told(emulated: None) -> None:
    problem, causal = ranged("few tokens")
    problem.tables["seq_lens"] -= 1
    in_ranges(problem, 3, causal=causal)
    with pytest.raises(AssertionError):
        problem.check(causal=causal)


@pytest.mark.parametrize(
    ("tiles", "blocks", "unit", "ranges"),
    [
        (16, 52, 1, 8),  # one round of an H100's 132, and of 52 blocks no range has more than 7
        (78, 40, 1, 5),  # three rounds of 8 blocks are less than one of 40
        (2, 11, 1, 11),
        (12, 97, 1, 11),
        (132, 40, 1, 1),
        (4, 2, 1, 1),  # merging takes longer
        (1, 9, 3, 3),
        (0, 0, 1, 1),
    ],
)
def test_ranges_end_soonest(tiles: int, blocks: int, unit: int, ranges: int) -> None:
    assert splits.ranges(132, tiles, blocks, unit) == ranges


def test_same_bits_whatever_else_is_in_the_batch(emulated: None) -> None:
    together = Problem([(70, 300), (3, 9), (90, 90)], heads=(8, 2), width=64, page_size=16)
    together.run(causal=True)
    for n, (first, last) in enumerate(((0, 70), (70, 73), (73, 163))):
        alone = Problem([together.lens[n]], heads=(8, 2), width=64, page_size=16)
        alone.key_cache, alone.value_cache = together.key_cache, together.value_cache
        alone.query = together.query[first:last]
        alone.tables["page_table"] = together.tables["page_table"][n : n + 1]
        alone.run(causal=True)
        assert torch.equal(alone.out, together.out[first:last])
        assert torch.equal(alone.lse, together.lse[first:last])


# What is taken -------------------------------------------------------------------------------------------------------

REQUEST = AttentionRequest(
    family="paged", platform="cuda", dtype="bfloat16", head_dim=128, heads=32, kv_heads=8, causal="bottom_right",
    phase="extend", s_relation="fewer", page_size=64, kv_layout="NHD", save_kv_cache=False, lse=True,
).normalised()  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"dtype": "float16", "head_dim": 64, "v_head_dim": 64}, True),
        ({"head_dim": 256, "v_head_dim": 256, "page_size": 16}, True),
        ({"page_size": 1}, False),
        ({"page_size": 24}, False),
        ({"page_size": 48}, True),
        ({"dtype": "float32"}, False),
        ({"head_dim": 96, "v_head_dim": 96}, False),
        ({"head_dim": 192, "v_head_dim": 128}, False),
        ({"v_head_dim": 64}, False),
        ({"kv_dtype": "fp8_e4m3", "kv_scales": "tensor"}, False),
        ({"kv_dtype": "float16"}, False),
        ({"heads": 24}, True),
        ({"kv_heads": 32}, True),
        ({"heads": 128, "kv_heads": 1}, False),
        ({"scale": -1.0}, False),
        ({"scale": 2.0}, True),
        ({"softcap": 30.0}, False),
        ({"chunk": 128}, False),
        ({"window": (351, -1)}, False),
        ({"window": (352, -1)}, True),
        ({"window": (320, -1), "kv_heads": 16}, True),
        ({"window": (184, -1), "head_dim": 256, "v_head_dim": 256, "kv_heads": 2}, True),
        ({"causal": "none", "window": (0, -1)}, True),
        ({"causal": "none", "window": (128, 5)}, False),
        ({"causal": "none"}, True),
        ({"sinks": True}, True),
        ({"mask": "bool"}, False),
        ({"mask": "additive"}, False),
        ({"mask": "additive", "tree": True}, False),
        ({"mask": "bool", "tree": True}, True),
        ({"kv_parts": 1}, False),
        ({"batch_invariant": True}, True),
    ],
    ids=lambda x: ",".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_takes(changed: dict[str, Any], taken: bool) -> None:
    request = dataclasses.replace(REQUEST, **changed).normalised()
    assert hopper.takes(request) is taken


def caches() -> Iterator[Any]:
    def made(*sizes: int) -> Tensor:
        return torch.randn(sizes).bfloat16()

    both = made(5, 2, 16, 4, 64)
    yield pytest.param(made(5, 16, 4, 64), made(5, 16, 4, 64), False, True, id="NHD")
    yield pytest.param(made(5, 4, 16, 64), made(5, 4, 16, 64), True, True, id="HND")
    yield pytest.param(both[:, 0], both[:, 1], False, True, id="keys and values page by page")
    yield pytest.param(made(2, 5, 16, 4, 64)[1], made(5, 16, 4, 64), False, True, id="a part of a tensor")
    yield pytest.param(
        made(5, 4, 16, 64).transpose(1, 2), made(5, 4, 16, 64).transpose(1, 2), False, False, id="turned"
    )
    yield pytest.param(made(5, 16, 4, 64), made(5, 16, 4, 72)[..., :64], False, False, id="rows apart")
    yield pytest.param(made(5, 16, 4, 64), both[:, 1], False, False, id="unlike pages")
    off = torch.zeros(5 * 16 * 4 * 64 + 1, dtype=torch.bfloat16)[1:].view(5, 16, 4, 64)
    yield pytest.param(off, off, False, False, id="misaligned")
    yield pytest.param(made(0, 16, 4, 64), made(0, 16, 4, 64), False, False, id="no pages")


@pytest.mark.parametrize(("key", "value", "hnd", "reached"), list(caches()))
def test_pools_as_matrices(
    key: Tensor, value: Tensor, hnd: bool, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hopper.fits(key, value, key, hnd=hnd), "this is no Hopper"
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    assert hopper.fits(key, value, key, hnd=hnd) is reached
    assert not hopper.fits(key, value, key.float(), hnd=hnd)
    pools = pools_of(key, value, hnd)
    assert (pools is not None) is reached
    if pools is None:
        return
    for cache, matrix in ((key, pools.key), (value, pools.value)):
        rows = cache.as_strided(matrix.shape, matrix.strides)
        for page in range(5):
            for head in range(4):
                expected = cache[page, head] if hnd else cache[page, :, head]
                first, column = page * pools.page_rows + head * pools.row, head * pools.column
                assert torch.equal(rows[first : first + 16, column : column + 64], expected)


@pytest.mark.parametrize(("page_size", "keys", "piece"), [(16, 128, 16), (48, 128, 16), (256, 128, 128), (64, 64, 64)])
def test_boxes_lie_in_one_page_and_one_block(page_size: int, keys: int, piece: int) -> None:
    assert hopper.piece_of(page_size, keys) == piece


def test_there_is_a_number_for_every_tile() -> None:
    """Sequence n has those from floor(start * group / rows) + n on; no two have one in common."""
    for group, rows in itertools.product((1, 4, 64), (128, 192)):
        for queries in ([1, 1, 1], [0, 129, 3, 0, 64], [500], [32] * 7, [1, 300, 2, 2, 2, 127]):
            longest, count, uniform = hopper.tiles_of(sum(queries), len(queries), max(queries), group, rows)
            assert uniform == (len(set(queries)) == 1)
            starts = torch.tensor([0, *queries]).cumsum(0).tolist()
            numbers = []
            for n, q in enumerate(queries):
                first = n * longest if uniform else starts[n] * group // rows + n
                numbers += [first + i for i in range(-(-q * group // rows))]
            assert len(set(numbers)) == len(numbers)
            assert all(number < count for number in numbers)


def test_what_was_measured_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = (torch.device("cpu"), torch.bfloat16, 128, 64, 4)
    shipped = hopper.config_for(*key)
    assert shipped == hopper.Config(128, 2)
    try:
        with monkeypatch.context() as patched:
            patched.setenv("POLYATTN_TUNING_STORE", str(tmp_path / "tuning.sqlite3"))
            patched.delenv("POLYATTN_TUNING", raising=False)
            tuning.reload()
            candidates = [c._asdict() for c in (shipped, shipped._replace(turns=False))]
            tuning.tune(
                HOPPER_EXTEND, ("bfloat16", *key[2:]), candidates, lambda c: 1.0 + c["turns"], where=key[0],
                seconds=30, rounds=1, while_serving=True,
            )  # fmt: skip
            assert hopper.config_for(*key) == shipped._replace(turns=False)
    finally:
        tuning.reload()
    assert hopper.config_for(*key) == shipped


# In the adapter ------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(emulated: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a call of the adapter as if on a Hopper, and tells which kernels were called."""
    used: list[str] = []

    def noted(place: Any, name: str, label: str) -> None:
        kernel = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args, **kwargs: (used.append(label), kernel(*args, **kwargs))[1])

    noted(hopper, "extend", "hopper")
    noted(paged, "extend", "portable")
    noted(paged, "decode", "decode")
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)

    def call(problem: Problem, request: AttentionRequest, **given: Any) -> list[str]:
        used.clear()
        bound = paged.Paged().bind(request)
        tables = {**problem.tables, "max_seqlen_k": max(k for _, k in problem.lens)}
        problem.out, problem.lse = bound.forward(
            problem.query, problem.key_cache, problem.value_cache, **in_tables(**tables, **given)
        )
        return list(used)

    return call


SMALL = dataclasses.replace(REQUEST, head_dim=64, v_head_dim=64, heads=4, kv_heads=2, page_size=16)


def test_the_adapter_extends_on_a_hopper(adapter: Callable[..., list[str]]) -> None:
    problem = Problem([(70, 200), (3, 9)], heads=(4, 2), width=64, page_size=16)
    assert adapter(problem, SMALL) == ["hopper"]
    problem.check(causal=True)


def test_the_adapter_passes_every_option_on(adapter: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem([(70, 200), (70, 90)], heads=(4, 2), width=64, page_size=16, left=33)
    sinks, scale = torch.randn(4), 0.25
    mask = torch.ones(2, 1, 70, 200, dtype=torch.bool)
    mask[:, :, 40:, 132] = False
    request = dataclasses.replace(SMALL, window=(33, -1), sinks=True, mask="bool", tree=True, scale=scale)
    assert hopper.short(request)
    monkeypatch.setattr(hopper, "_STEPS", 0)
    assert adapter(problem, request, sinks=sinks, attn_mask=mask) == ["hopper"]
    problem.query *= scale * 8  # an exact power of two, which `check` leaves out
    problem.check(causal=True, sinks=sinks, attn_mask=mask)


def test_the_adapter_keeps_to_the_request_for_batch_invariance(adapter: Callable[..., list[str]]) -> None:
    """One sequence or many, long or short: one kernel."""
    invariant = dataclasses.replace(SMALL, batch_invariant=True)
    for lens in ([(70, 200), (3, 9)], [(3, 9)], [(1, 2000)], [(0, 0), (1, 0)]):
        problem = Problem(lens, heads=(4, 2), width=64, page_size=16)
        assert adapter(problem, invariant) == ["hopper"]
        problem.check(causal=True)


def test_the_adapter_cuts_a_shared_prefix(adapter: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_RANGE", 64)
    own = Problem([(1, 20)] * 5, heads=(16, 1), width=64, page_size=16)
    prefix = Problem([(5, 300)], heads=(16, 1), width=64, page_size=16)
    part = KVPart(**prefix.tables, max_seqlen_k=300, key_cache=prefix.key_cache, value_cache=prefix.value_cache)
    request = dataclasses.replace(SMALL, heads=16, kv_heads=1, kv_parts=1, phase="decode")
    assert hopper.cuts_for(own.query.device, 1, 5, 300, 1, 16, 64) == 4
    assert adapter(own, request, kv_parts=(part,)) == ["decode", "hopper"]
    keys = [[torch.cat(pair) for pair in zip(prefix.keys[0], mine, strict=True)] for mine in own.keys]
    own.keys, own.lens = [(k, v) for k, v in keys], [(1, 320)] * 5
    own.check(causal=True)
    invariant = dataclasses.replace(request, batch_invariant=True)
    assert paged._Call(invariant)._cuts(own.query, part.tables, own.key_cache, own.value_cache) == 0


def test_the_adapter_cuts_few_tokens(adapter: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tiles over many keys, but neither a small tile of `decode`, nor a mask, nor where batches must not matter."""
    monkeypatch.setattr(runtime, "processors", lambda device: 132)
    request = dataclasses.replace(SMALL, heads=12, kv_heads=1, sinks=True)

    def served(request: AttentionRequest, queries: int, **given: Any) -> list[str]:
        problem = Problem([(queries, 1400)], heads=(12, 1), width=request.head_dim, page_size=16)
        sinks = torch.randn(12)
        found = adapter(problem, request, sinks=sinks, **given)
        problem.check(causal=True, sinks=sinks)
        return found

    assert served(request, 6) == ["hopper"]
    assert served(request, 5) == ["decode"]
    wide = dataclasses.replace(request, head_dim=128, v_head_dim=128)
    assert served(wide, 5) == ["hopper"]
    assert served(wide, 2) == ["decode"]
    invariant = dataclasses.replace(request, batch_invariant=True)
    assert served(invariant, 5) == ["hopper"], "whole"
    tree = dataclasses.replace(request, mask="bool", tree=True)
    assert served(tree, 5, attn_mask=torch.ones(1, 1, 5, 1400, dtype=torch.bool)) == ["decode"]


def test_a_session_plans_nothing_for_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    monkeypatch.setattr(runtime, "processors", lambda device: 132)
    planned: list[Any] = []
    monkeypatch.setattr(paged, "items_for", lambda *args, **given: planned.append(given) or (None, None))
    slot = types.SimpleNamespace(device=torch.device("cpu"), workspace=None)
    session = paged.Paged().bind(dataclasses.replace(SMALL, heads=16, kv_heads=1)).session(slot)
    session.plan(types.SimpleNamespace(sequences=1, max_seqlen_q=5, max_seqlen_k=4000))
    assert not planned
    session.plan(types.SimpleNamespace(sequences=1, max_seqlen_q=1, max_seqlen_k=4000))
    assert planned


@pytest.mark.parametrize(("queries", "keys", "cut"), [(64, 2048, True), (600, 2048, False), (4, 100, False)])
def test_ranges_are_of_few_new_tokens(monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, cut: bool) -> None:
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    monkeypatch.setattr(runtime, "processors", lambda device: 132)
    call = paged._Call(SMALL)
    assert (call.ranges(torch.device("cpu"), 1, 2, 2, (queries, keys)) > 1) is cut


def test_the_adapter_does_not_extend_where_it_would_mean_something_else(adapter: Callable[..., list[str]]) -> None:
    new = torch.randn(40, 2, 64).bfloat16()
    problem = Problem([(40, 60)], heads=(4, 2), width=64, page_size=16)
    problem.key_cache.nan_to_num_()
    problem.value_cache.nan_to_num_()
    assert adapter(problem, SMALL, key=new, value=new) == ["portable"]
    empty = Problem([(40, 0)], heads=(4, 2), width=64, page_size=16)
    empty.tables["page_table"] = empty.tables["page_table"][:, :0]
    assert adapter(empty, SMALL) == ["portable"]
    assert not empty.out.any()


# For sm_90, and on one -----------------------------------------------------------------------------------------------

VARIANTS = {
    # D, page size, group, causal, left window, tree, sinks, all sequences of one length, parts
    "causal": (128, 64, 4, True, False, False, False, True),
    "D 64": (64, 16, 8, True, True, False, True, False),
    "all options": (64, 16, 8, True, True, True, True, False),
    "tree": (128, 64, 4, False, False, True, False, True),
    "full": (256, 32, 1, False, False, False, False, False),
    "window": (256, 128, 1, True, True, False, True, False),
    "7 heads": (128, 64, 7, True, False, False, False, False),
    "12 heads, ranges": (128, 16, 12, True, False, False, False, True, True),
    "6 heads, ranges": (64, 128, 6, True, False, False, False, False, True),
    "5 heads, all options": (64, 16, 5, True, True, True, True, False),
}
SHORT = ("causal", "D 64", "12 heads, ranges")
"""Compiling takes seconds each: the others under --polyattn-full."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS if metafunc.config.getoption(FULL, False) else SHORT)


SPILLED = {2: 176, 3: 288}
"""Bytes of a thread's stack by consumers. Of two they are no loss: what the inner loop does not touch, such as the
number of the next tile of packed prompts. Three have fewer registers, and the masks of trees take them."""


@pytest.mark.slow(keep=1)
def test_compiles_for_hopper(variant: str) -> None:
    found = elsewhere("extend", *VARIANTS[variant])
    config = hopper.config_for(torch.device("cpu"), torch.bfloat16, *VARIANTS[variant][:3])
    # Consumers, and a producer in the place of one more.
    assert found["warps"] == 4 * config.warpgroups + 4
    assert found["stack"] is None or found["stack"] <= SPILLED[config.warpgroups]
    assert found["registers"] is None or found["registers"] * found["warps"] * 32 <= 65536
    assert f"setmaxnreg.inc.sync.aligned.u32 \t{config.registers}" in found["ptx"]
    assert "cp.async.bulk.tensor.2d" in found["ptx"]
    # Whole rows of outputs, and what a thread has side by side of parts.
    assert ("st.global.v2.b32" if VARIANTS[variant][8:] else "st.global.v4.b32") in found["ptx"]
    assert overlaps(found["ptx"]) == config.overlap


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_on_hopper(name: str, with_sinks: bool, on_hopper: None) -> None:
    problem, options = problem_of(name, with_sinks)
    problem.on("cuda")
    assert hopper.fits(problem.key_cache, problem.value_cache, problem.out, hnd=problem.hnd)
    here = {**options, "sinks": options["sinks"].cuda() if with_sinks else None}
    problem.run(**here)
    problem.check(**options)
    first = problem.out.clone()
    problem.run(**here)
    assert torch.equal(first, problem.out)
