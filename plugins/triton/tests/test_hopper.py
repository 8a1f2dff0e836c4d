"""The dense and the block-sparse Hopper kernels: emulated they are core's definition, and on a Hopper; they compile for
sm_90 on any machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.semantics.block_maps import visible_keys
from polyattn.semantics.reference import attention
from polyattn.testing.conforming import FULL
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn_triton.hopper import block_sparse
from polyattn_triton.hopper import forward as hopper_forward
from polyattn_triton.hopper.forward import Config, config_for, forward, supports, takes
from polyattn_triton.kernels.block_sparse import Lists
from polyattn_triton.kernels.tiles import Spec

from .hopper_offline import elsewhere, overlaps

TOGETHER = Config(warpgroups=1, block_n=128, stages=2, turns=False)
PLAIN = Config(warpgroups=2, block_n=128, stages=2, overlap=False, turns=False)
THREE = Config(3, 64, 2, registers=160)
INTO_Q = Config(2, 128, 2, apart=False)
CONFIGS = {"table": None, "no producer": TOGETHER, "no overlap": PLAIN, "three warpgroups": THREE, "into Q": INTO_Q}
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (72, 72), (96, 96)]
VARIANTS = {
    # dims, configuration, causal, windowed with sinks
    **{f"{d}-{d_v}": ((d, d_v), config_for(d, d_v), True, False) for d, d_v in DIMS},
    "window and sinks": ((128, 128), config_for(128, 128), False, True),
    "no producer": ((128, 128), TOGETHER, True, False),
    "no overlap": ((128, 128), PLAIN, False, False),
    "three warpgroups": ((128, 128), THREE, True, False),
    "output through the query's buffers": ((128, 128), INTO_Q, True, False),
    "short": ((64, 64), config_for(64, 64, True), True, False),
}
LISTED = [
    # D, block_q, block_k, valid sizes
    (64, 64, 64, True),
    (64, 128, 64, False),
    (128, 64, 64, False),
    (128, 64, 128, True),
    (128, 128, 128, False),
    (128, 128, 64, True),
    (256, 128, 128, False),
    (128, 64, 64, False, True),
    (64, 128, 64, False, True),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compiling takes seconds each: all variants under --polyattn-full only."""
    full = metafunc.config.getoption(FULL, False)
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS if full else ["96-96", "window and sinks", "no producer"])
    if "listed" in metafunc.fixturenames:
        some = LISTED if full else LISTED[2:3] + LISTED[-2:-1]
        metafunc.parametrize("listed", some, ids=["-".join(map(str, task)) for task in some])


@pytest.mark.slow(keep=1)
def test_compiles_for_hopper(variant: str) -> None:
    dims, config, causal, windowed = VARIANTS[variant]
    found = elsewhere("dense", *dims, dataclasses.asdict(config), causal, windowed)
    assert "cp.async.bulk.tensor.4d" in found["ptx"]
    if config.warpgroups > 1:
        # A producer beside the consumers takes a warpgroup's place, and gives them its registers.
        assert found["warps"] == 4 * (config.warpgroups + 1)
        assert f"setmaxnreg.inc.sync.aligned.u32 \t{config.registers}" in found["ptx"]
    assert overlaps(found["ptx"]) or not config.overlap


@pytest.mark.slow(keep=1)
def test_lists_compile_for_hopper(listed: tuple[Any, ...]) -> None:
    found = elsewhere("listed", *listed)
    assert "cp.async.bulk.tensor.4d" in found["ptx"]
    # With query blocks of 64 there are two producers; both are in the place of one warpgroup.
    assert found["warps"] == 12
    assert overlaps(found["ptx"])


def test_supports_only_hopper() -> None:
    x = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    assert takes(x.dtype, 64, 64, spec=Spec(1.0), layout="BSHD")
    assert not supports(x, x, x, x, spec=Spec(1.0), layout="BSHD")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers launch emulated kernels."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="not run: this Triton has no Gluon")
    from polyattn_triton.hopper import kernel, listed

    from .gluon_emulator import Machine

    monkeypatch.setattr(kernel, "attend", Machine(kernel.attend))
    monkeypatch.setattr(listed, "attend_listed", Machine(listed.attend_listed))


@dataclasses.dataclass(frozen=True)
class Case:
    """A dense call."""

    S_q: int
    S_k: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    causal: str = "none"
    window: tuple[int, int] = (-1, -1)
    sinks: bool = False
    layout: str = "BSHD"
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1

    def __str__(self) -> str:
        words = (f"{self.S_q}x{self.S_k}", *self.heads, *self.dims, self.causal, *self.window, self.layout)
        return "-".join(map(str, words))

    def check(self, device: str, config: Config | None) -> None:
        torch.manual_seed(3)

        def made(tokens: int, heads: int, width: int) -> Tensor:
            axes = (tokens, heads) if self.layout == "BSHD" else (heads, tokens)
            return torch.randn(self.batch, *axes, width).to(device, self.dtype)

        query, key = made(self.S_q, self.heads[0], self.dims[0]), made(self.S_k, self.heads[1], self.dims[0])
        value, out = made(self.S_k, self.heads[1], self.dims[1]), made(self.S_q, self.heads[0], self.dims[1])
        sinks = torch.randn(self.heads[0]).to(device) if self.sinks else None
        right = 0 if self.causal != "none" else self.window[1]
        top_left = self.causal == "top_left"
        spec = Spec(self.dims[0] ** -0.5, left=self.window[0], right=right, top_left=top_left)
        assert takes(self.dtype, *self.dims, spec=spec, layout=self.layout)

        def call() -> tuple[Tensor, Tensor]:
            lse = torch.full(out.shape[:-1], float("nan"), device=device)
            into = torch.full_like(out, float("nan"))
            forward(query, key, value, into, lse, spec=spec, layout=self.layout, sinks=sinks, config=config)
            return into, lse

        found, lse = call()
        wanted, wanted_lse = attention(
            *(x.double() for x in (query, key, value)), causal=self.causal, window=self.window, sinks=sinks,
            layout=self.layout, return_lse=True,
        )  # fmt: skip
        assert float((found - wanted).norm() / wanted.norm()) < RELATIVE_L2[self.dtype]
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)
        assert torch.equal(found, call()[0])


HALF = torch.float16
SMALL = [
    Case(70, 200, (2, 1), (64, 64)),
    Case(133, 270, (4, 2), (128, 128), "bottom_right", sinks=True, layout="BHSD"),
    Case(200, 133, (2, 2), (64, 64), "bottom_right", dtype=HALF),
    Case(90, 150, (2, 1), (256, 256), "top_left"),
    Case(150, 290, (3, 3), (128, 128), window=(130, 5)),
    Case(300, 300, (2, 1), (72, 72), "bottom_right", (100, 0), sinks=True, layout="BHSD", batch=2),
    Case(130, 130, (2, 2), (192, 128), "bottom_right"),
]
LARGE = [
    Case(333, 451, (6, 2), (128, 128), batch=2),
    Case(333, 451, (6, 2), (128, 128), "bottom_right", sinks=True, layout="BHSD", batch=2),
    Case(451, 333, (4, 4), (64, 64), "bottom_right", dtype=HALF),
    Case(333, 451, (4, 1), (256, 256), "top_left"),
    Case(700, 700, (6, 3), (96, 96), "bottom_right", (100, 0), sinks=True, layout="BHSD", dtype=HALF, batch=2),
    Case(700, 900, (2, 1), (80, 80), window=(257, -1)),
    Case(300, 300, (2, 1), (72, 72), window=(50, 70)),
    Case(500, 500, (4, 4), (192, 128), "bottom_right"),
    Case(2048, 2048, (16, 4), (128, 128), "bottom_right", batch=2),
]


def configured(cases: list[Case]) -> list[Any]:
    """Cases with the configurations there are for their head dims: wider ones need more shared memory than there is."""
    return [
        pytest.param(case, name, id=f"{case}-{name}")
        for case in cases
        for name, config in CONFIGS.items()
        if config is None or sum(case.dims) <= 256
    ]


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(("case", "config"), configured(SMALL[:1]) + [(case, "table") for case in SMALL[1:]], ids=str)
def test_emulated(case: Case, config: str, emulated: None) -> None:
    case.check("cpu", CONFIGS[config])


@pytest.mark.parametrize(
    "case",
    [
        # Some consumers see fewer blocks than their tile does, at either end, or none at all.
        Case(200, 133, (1, 1), (64, 64), "bottom_right"),
        Case(400, 400, (1, 1), (64, 64), "bottom_right", (150, 0)),
        Case(500, 200, (1, 1), (64, 64), "top_left", (60, 0)),
    ],
    ids=str,
)
def test_three_consumers_emulated(case: Case, emulated: None) -> None:
    case.check("cpu", config_for(*case.dims))


def test_consumers_pass_blocks_that_they_do_not_see(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from . import gluon_emulator

    made: list[None] = []

    class Counted(gluon_emulator.Product):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(None)

    monkeypatch.setattr(gluon_emulator, "Product", Counted)
    query, key, value, out = torch.randn(4, 1, 256, 1, 64).bfloat16()
    forward(query, key, value, out, spec=Spec(0.125, right=0), layout="BSHD", config=config_for(64, 64))
    # Two products a block of 128 keys. Rows in 64s see 1, 1, 2 and 2 of them; two consumers of the second tile have no
    # rows, and begin with a block all the same.
    assert len(made) == 2 * (1 + 1 + 2 + 2 + 1 + 1)


@pytest.mark.parametrize(
    ("queries", "causal", "consumers"),
    [
        (100, False, 2),
        (192, False, 3),
        (217, False, 2),  # two tiles of 128 or two of 192
        (256, False, 2),
        (310, False, 3),  # three tiles of 128 take longer than two of 192
        (640, False, 3),  # five of 128, four of 192
        (640, True, 2),
        (8192, True, 3),
    ],
)
def test_rows_that_three_consumers_would_not_have_go_to_two(queries: int, causal: bool, consumers: int) -> None:
    sizes = [(4, queries, 8, 64)] * 4
    axes = [(size, (queries * 512, 512, 64, 1)) for size in sizes]
    spec = Spec(1.0, right=0) if causal else Spec(1.0)
    plan = hopper_forward._Plan("BSHD", spec, None, torch.device("cpu"), axes)
    assert plan.options["WARPGROUPS"] == consumers


@pytest.mark.parametrize(("tokens", "batch", "heads_k"), [(1024, 16, 32), (4096, 4, 8), (4096, 4, 32), (16384, 1, 32)])
def test_causal_tiles_are_shared_out_evenly(
    tokens: int, batch: int, heads_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_forward.runtime, "processors", lambda device: 132)
    sizes = [(batch, tokens, heads, 128) for heads in (32, heads_k, heads_k, 32)]
    axes = [(size, (tokens * size[2] * 128, size[2] * 128, 128, 1)) for size in sizes]
    with torch.device("meta"):  # a program's default device, which a plan asks nothing of
        plan = hopper_forward._Plan("BSHD", Spec(1.0, right=0), None, torch.device("cpu"), axes)
    blocks, _, _, heads, together, *_ = plan.numbers
    work = [0] * 132
    for tile in range(blocks * heads):
        # As `kernel._decode` and `common.tile_of` have it.
        first = tile // (together * blocks) * together
        block = blocks - 1 - (tile - first * blocks) // min(together, heads - first)
        turn, place = divmod(tile, 132)
        work[place if turn % 2 == 0 else 131 - place] += block + 2
    assert max(work) < 1.02 * sum(work) / 132


@pytest.mark.parametrize(("case", "config"), configured(LARGE))
def test_on_hopper(case: Case, config: str, on_hopper: None) -> None:
    case.check("cuda", CONFIGS[config])


@dataclasses.dataclass(frozen=True)
class Sparse:
    """A block-sparse call."""

    heads: tuple[int, int]
    S_q: int
    S_k: int
    width: int
    blocks: tuple[int, int]
    sizes: bool = False
    one_map: bool = False
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    packed: bool = False

    def __str__(self) -> str:
        kinds = (self.sizes, self.one_map, self.packed)
        words = (*self.heads, f"{self.S_q}x{self.S_k}", self.width, *self.blocks, *kinds)
        return "-".join(map(str, words))

    def check(self, device: str) -> None:
        torch.manual_seed(5)
        shapes = ((self.heads[0], self.S_q), (self.heads[1], self.S_k), (self.heads[1], self.S_k))
        query, key, value = (torch.randn(self.batch, *s, self.width).to(device, self.dtype) for s in shapes)
        rows, columns = (-(-length // block) for length, block in zip((self.S_q, self.S_k), self.blocks, strict=True))
        shape = (1, 1, rows) if self.one_map else (self.batch, self.heads[0], rows)
        counts = (torch.rand(shape) * (columns + 1)).int()
        counts.view(-1)[-1], counts.view(-1)[0] = 0, columns
        indices = torch.rand(*shape, columns).argsort(-1).int()
        indices[torch.arange(columns) >= counts[..., None]] = 2**31 - 1
        valid = (torch.rand(columns) * (self.blocks[1] + 1)).int() if self.sizes else None
        starts = None
        if self.packed:
            # Blocks of all sizes with gaps between them, in an order of each head.
            sizes = (torch.rand(self.batch, self.heads[1], columns) * 1.3 * (self.blocks[1] + 1)).int()
            sizes = sizes.clamp(max=self.blocks[1])
            starts = (sizes + 3).cumsum(-1).int() - sizes
            order = torch.rand(starts.shape).argsort(-1)
            valid = torch.minimum(sizes, (self.S_k - starts).clamp(min=0)).gather(-1, order)
            starts = starts.clamp(max=self.S_k).gather(-1, order)
        maps = [None if x is None else x.to(device) for x in (counts, indices, valid, starts)]
        scale = self.width**-0.5
        assert block_sparse.takes(self.dtype, self.width, self.blocks, scale)

        def call() -> tuple[Tensor, Tensor]:
            out = torch.full_like(query, float("nan"))
            lse = torch.full(query.shape[:3], float("nan"), device=device)
            block_sparse.forward(
                query, key, value, Lists(*maps[:3], *self.blocks, maps[3]), scale=scale, out=out, lse=lse
            )
            return out, lse

        out, lse = call()
        group = self.heads[0] // self.heads[1]
        mask = visible_keys(self.blocks, self.S_q, self.S_k, *maps, group=group).expand(
            *query.shape[:2], self.S_q, self.S_k
        )
        tensors = (x.double() for x in (query, key, value))
        wanted, wanted_lse = attention(*tensors, attn_mask=mask, layout="BHSD", return_lse=True)
        assert float((out - wanted).norm() / wanted.norm().clamp(min=1e-9)) < RELATIVE_L2[self.dtype]
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)
        assert torch.equal(out, call()[0])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "case",
    [
        Sparse((2, 1), 100, 300, 64, (64, 64), sizes=True, batch=2),
        Sparse((2, 2), 200, 192, 64, (64, 128), one_map=True, dtype=HALF),
        Sparse((2, 1), 192, 200, 128, (128, 64), sizes=True),
        Sparse((2, 1), 130, 192, 128, (128, 128)),
        Sparse((1, 1), 1, 130, 256, (128, 128)),
        Sparse((4, 2), 100, 400, 64, (64, 64), packed=True, batch=2),
        Sparse((2, 2), 70, 500, 128, (128, 128), packed=True),
        Sparse((2, 2), 70, 300, 256, (128, 64), packed=True, one_map=True),
    ],
    ids=str,
)
def test_lists_emulated(case: Sparse, emulated: None) -> None:
    case.check("cpu")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    "case",
    [
        Sparse((4, 2), 100, 400, 64, (64, 64), packed=True, batch=2),
        Sparse((6, 6), 70, 300, 64, (128, 64), packed=True, one_map=True),
    ],
    ids=str,
)
def test_keys_that_no_cache_holds_emulated(
    case: Sparse, parts: int, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of the keys one after the other, some heads at a time."""
    monkeypatch.setattr(block_sparse, "_cached", lambda device: -(-4 * case.S_k * case.width // parts))
    calls: list[Any] = []
    launched = block_sparse._launched

    def counted(*some: Any, **given: Any) -> None:
        calls.append(given)
        launched(*some, **given)

    monkeypatch.setattr(block_sparse, "_launched", counted)
    case.check("cpu")
    heads = case.heads[1]
    assert len(calls) == 2 * case.batch * len(range(0, heads, -(-heads // 12))) * parts


@pytest.mark.parametrize(
    "case",
    [
        Sparse((4, 2), 700, 1100, 128, (64, 64), batch=2),
        Sparse((4, 2), 700, 1100, 128, (64, 64), sizes=True, dtype=HALF, batch=2),
        Sparse((2, 1), 1, 130, 64, (64, 64), sizes=True, one_map=True),
        Sparse((4, 4), 1100, 700, 64, (128, 64), one_map=True),
        Sparse((4, 1), 1100, 700, 128, (64, 128), sizes=True),
        Sparse((16, 8), 2048, 2048, 128, (128, 128)),
        Sparse((4, 4), 1100, 700, 128, (128, 64), sizes=True),
        Sparse((4, 4), 1100, 700, 256, (128, 128), sizes=True),
        Sparse((4, 2), 1100, 1700, 128, (64, 64), packed=True, batch=2),
        Sparse((4, 4), 700, 1100, 128, (128, 64), packed=True, dtype=HALF),
        Sparse((4, 4), 700, 1100, 64, (64, 128), packed=True, one_map=True),
        Sparse((4, 1), 700, 1100, 64, (128, 128), packed=True),
        Sparse((4, 2), 700, 1100, 256, (128, 64), packed=True),
    ],
    ids=str,
)
def test_lists_on_hopper(case: Sparse, on_hopper: None) -> None:
    case.check("cuda")


@pytest.mark.parametrize(
    ("release", "serves"), [("3.5.1", False), ("3.6.0", True), ("3.10.0+git1234", True), ("4.0.0", True)]
)
def test_kernels_are_for_a_triton_that_starts_warps_so(
    release: str, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="not run: this Triton has no Gluon")
    monkeypatch.setattr(hopper_forward.triton, "__version__", release)
    monkeypatch.setattr(hopper_forward.runtime, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    asked = hopper_forward.on_hopper.__wrapped__
    assert asked(torch.device("cuda", 0)) is serves
