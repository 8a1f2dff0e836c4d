"""The Hopper backward: emulated it is the gradient of core's definition, and on a Hopper; it compiles for sm_90 on any
machine."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.contract import AttentionRequest
from polyattn.semantics.reference import attention
from polyattn.testing.tolerances import RELATIVE_L2
from polyattn_triton import dense
from polyattn_triton.hopper import backward as hopper
from polyattn_triton.hopper.backward import backward, takes
from polyattn_triton.kernels.tiles import Spec

from .hopper_offline import elsewhere, overlaps

HALF = torch.float16


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """The launcher launches an emulated kernel."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="not run: this Triton has no Gluon")
    from polyattn_triton.hopper import backward_kernel

    from .gluon_emulator import Machine

    monkeypatch.setattr(backward_kernel, "differentiate", Machine(backward_kernel.differentiate))


@dataclasses.dataclass(frozen=True)
class Case:
    """A dense call with gradients."""

    S_q: int
    S_k: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    causal: str = "none"
    window: tuple[int, int] = (-1, -1)
    layout: str = "BSHD"
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    factor: float = 1.0

    def __str__(self) -> str:
        words = (f"{self.S_q}x{self.S_k}", *self.heads, *self.dims, self.causal, *self.window, self.layout, self.batch)
        return "-".join(map(str, words))

    def check(self, device: str) -> None:
        torch.manual_seed(3)

        def made(tokens: int, heads: int, width: int) -> Tensor:
            axes = (tokens, heads) if self.layout == "BSHD" else (heads, tokens)
            return torch.randn(self.batch, *axes, width).to(device, self.dtype)

        query, key = made(self.S_q, self.heads[0], self.dims[0]), made(self.S_k, self.heads[1], self.dims[0])
        value, dout = made(self.S_k, self.heads[1], self.dims[1]), made(self.S_q, self.heads[0], self.dims[1])
        scale = self.factor * self.dims[0] ** -0.5
        right = 0 if self.causal != "none" else self.window[1]
        spec = Spec(scale, left=self.window[0], right=right, top_left=self.causal == "top_left")
        assert takes(self.dtype, *self.dims, spec=spec, layout=self.layout)
        given = [x.double().requires_grad_() for x in (query, key, value)]
        options = {"causal": self.causal, "window": self.window, "layout": self.layout, "scale": scale}
        exact, lse = attention(*given, **options, return_lse=True)
        wanted = torch.autograd.grad(exact, given, dout.double())
        out, lse = exact.detach().to(self.dtype), lse.detach().float()
        found = backward(dout, query, key, value, out, lse, spec=spec, layout=self.layout)
        for name, gradient, right_one, like in zip("qkv", found, wanted, (query, key, value), strict=True):
            assert (gradient.shape, gradient.dtype) == (like.shape, like.dtype)
            error = float((gradient - right_one).norm() / right_one.norm().clamp(min=1e-9))
            assert error < 2 * RELATIVE_L2[self.dtype], f"d{name} is off by {error:.4f}"


SMALL = [
    Case(70, 200, (2, 1), (128, 128)),
    Case(200, 133, (2, 2), (64, 64), "bottom_right", dtype=HALF),
    Case(133, 270, (4, 2), (128, 128), "bottom_right", layout="BHSD", batch=2),
    Case(300, 150, (2, 1), (128, 128), "bottom_right"),  # the first rows see no key
    Case(150, 300, (1, 1), (96, 96), "top_left"),  # the last keys are seen by no row
    Case(150, 290, (3, 3), (80, 72), window=(60, 5)),
    Case(300, 300, (2, 1), (64, 40), "bottom_right", (100, 0), layout="BHSD", batch=2),
    Case(260, 260, (1, 1), (128, 128), factor=4.0),
]
LARGE = [
    Case(333, 451, (6, 2), (128, 128), batch=2),
    Case(333, 451, (6, 2), (128, 128), "bottom_right", layout="BHSD", batch=2),
    Case(451, 333, (4, 4), (64, 64), "bottom_right", dtype=HALF),
    Case(1333, 1451, (4, 1), (128, 128), "top_left"),
    Case(700, 700, (6, 3), (96, 96), "bottom_right", (100, 0), layout="BHSD", dtype=HALF, batch=2),
    Case(700, 900, (2, 1), (80, 80), window=(257, -1)),
    Case(300, 300, (2, 1), (72, 72), window=(50, 70)),
    Case(1000, 1000, (4, 4), (64, 48)),
    Case(2048, 2048, (16, 4), (128, 128), "bottom_right", batch=2),
    Case(4096, 4096, (8, 8), (128, 128)),
    Case(4096, 4096, (8, 2), (64, 64), "bottom_right"),
]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_emulated(case: Case, emulated: None) -> None:
    case.check("cpu")


@pytest.mark.parametrize("case", [Case(200, 300, (6, 2), (64, 64), "bottom_right")], ids=str)
def test_sums_over_some_of_the_heads_emulated(case: Case, emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for each query head, whose dK and dV are added up afterwards."""
    asked: list[int] = []

    def heads_of(steps: list[int], sequences: int, group: int, processors: int, part: float) -> int:
        asked.append(group)
        return 1

    monkeypatch.setattr(hopper, "heads_of", heads_of)
    hopper._plan.cache_clear()
    case.check("cpu")
    hopper._plan.cache_clear()
    assert asked == [3]


@pytest.mark.parametrize(
    ("heads", "batch", "S", "width", "causal", "each"),
    [
        ((96, 8), 1, 2292, 96, False, 2),  # 144 programs of all heads were two rounds of 132 processors
        ((12, 1), 5, 2702, 64, False, 2),
        ((12, 4), 3, 750, 64, True, 1),  # few programs
        ((28, 4), 1, 2048, 128, True, 1),  # the first key tiles, which all rows see, are not waited for
        ((24, 2), 4, 1000, 128, False, 6),  # one round
        ((7, 1), 30, 500, 64, True, 7),  # parts would cost more than they save
        ((32, 8), 1, 4096, 128, True, 2),
        ((32, 8), 2, 8192, 128, True, 4),
        ((8, 1), 64, 8192, 128, False, 8),  # a last round of thirty is little
        ((64, 8), 1, 32_768, 128, True, 8),  # a gigabyte of parts would save a hundredth
        ((32, 8), 4, 256, 128, True, 4),
    ],
)
def test_heads_of_a_program(
    heads: tuple[int, int], batch: int, S: int, width: int, causal: bool, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the last three were measured on an H200: each is the fastest of all divisors, or within 2% of it."""
    monkeypatch.setattr(hopper.runtime, "processors", lambda device: 132)
    hopper._plan.cache_clear()
    axes = [
        ((batch, S, n, width), (S * n * width, n * width, width, 1)) for n in (heads[0], heads[1], heads[1], heads[0])
    ]
    plan = hopper._plan("BSHD", Spec(1.0, right=0 if causal else -1), torch.device("cpu"), *axes)
    hopper._plan.cache_clear()
    assert plan is not None
    assert plan.each == each


def test_whole_groups_on_few_processors_are_taken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one head would be enough, whatever the programs have."""
    monkeypatch.setattr(hopper.runtime, "processors", lambda device: 132)
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    hopper._plan.cache_clear()
    query, key = torch.zeros(4, 256, 32, 128).bfloat16(), torch.zeros(4, 256, 8, 128).bfloat16()
    given: dict[str, Any] = {"spec": Spec(1.0, right=0), "layout": "BSHD"}
    assert hopper.fits(query, key, key, query, **given)
    assert not hopper.fits(query[:1, :, :8], key[:1, :, :2], key[:1, :, :2], query[:1, :, :8], **given)
    hopper._plan.cache_clear()


def test_blocks_of_rows_that_see_a_tile_of_keys() -> None:
    """As the kernel has them, by counting."""
    for s_q, s_k, offset, causal, left in (
        (300, 300, 0, False, -1), (300, 300, 0, True, -1), (200, 700, 500, True, -1), (700, 200, -500, True, -1),
        (400, 400, 0, True, 100), (400, 500, 100, False, 70), (64, 900, 836, True, 130),
    ):  # fmt: skip
        blocks, tiles = -(-s_q // hopper.ROWS), -(-s_k // hopper.KEYS)
        row, key = torch.arange(s_q)[:, None], torch.arange(s_k)[None, :]
        seen = torch.ones(s_q, s_k, dtype=torch.bool)
        if causal:
            seen &= key <= row + offset
        if left >= 0:
            seen &= key >= row + offset - left
        found = hopper.steps_of(tiles, blocks, s_q, s_k, offset, causal=causal, left=left)
        for tile, steps in enumerate(found):
            rows = seen[:, tile * hopper.KEYS : (tile + 1) * hopper.KEYS].any(1).nonzero().flatten()
            wanted = int(rows[-1]) // hopper.ROWS - int(rows[0]) // hopper.ROWS + 1 if len(rows) else 0
            assert steps == wanted, (s_q, s_k, offset, causal, left, tile)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_on_hopper(case: Case, on_hopper: None) -> None:
    case.check("cuda")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("width", "causal", "windowed"), [(64, False, True), (128, True, False)])
def test_compiles_for_hopper(width: int, causal: bool, windowed: bool) -> None:
    found = elsewhere("gradients", width, width, causal, windowed)
    assert "cp.async.bulk.tensor.4d" in found["ptx"]
    assert found["warps"] == 12
    assert "setmaxnreg.inc.sync.aligned.u32 \t240" in found["ptx"]
    assert overlaps(found["ptx"])
    assert "cp.async.bulk.wait_group.read" in found["ptx"]  # not until all of it is added up
    # dQ leaves through TMA: a copy a step, in each of the loops over masked and whole blocks, and one at the end.
    assert not re.search(r"(?:atom|red)\.global", found["ptx"])
    assert len(re.findall(r"cp\.reduce\.async\.bulk\.tensor\.2d\S*\.add", found["ptx"])) == 2 + windowed + 1


def test_what_it_takes() -> None:
    plain: dict[str, Any] = {"spec": Spec(1.0), "layout": "BSHD"}
    assert takes(HALF, 64, 48, **plain)
    assert takes(HALF, 72, 128, **plain)
    for width, v_width in ((32, 32), (64, 72), (192, 128), (100, 100), (256, 256)):
        assert not takes(HALF, width, v_width, **plain)
    assert not takes(torch.float32, 64, 64, **plain)
    assert not takes(HALF, 64, 64, **plain, masked=True)
    assert not takes(HALF, 64, 64, spec=Spec(-1.0), layout="BSHD")
    assert not takes(HALF, 64, 64, spec=Spec(1.0, softcap=3.0), layout="BSHD")
    assert not takes(HALF, 64, 64, spec=Spec(1.0, chunk=64), layout="BSHD")
    assert not takes(HALF, 64, 64, spec=Spec(1.0), layout="THD")


@pytest.mark.parametrize(
    ("asked", "keys", "served"),
    [
        ({}, 300, "one launch"),
        ({}, 60, "two launches"),  # processors have no tile
        ({"deterministic": True}, 300, "two launches"),
        ({"batch_invariant": True}, 300, "two launches"),
    ],
)
def test_what_serves(asked: dict[str, Any], keys: int, served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(hopper, "on_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "backward", lambda *tensors, **_: given.append("one launch") or tensors[1:4])
    monkeypatch.setattr(dense, "backward", lambda *tensors, **_: given.append("two launches") or tensors[1:4])
    request = AttentionRequest(
        platform="cuda",
        dtype="bfloat16",
        heads=2,
        kv_heads=1,
        head_dim=128,
        layout="BSHD",
        grad=("q", "k", "v"),
        **asked,
    )
    differentiate = dense.Dense().bind(request).backward
    assert differentiate is not None
    query, out, dout = torch.randn(3, 1, 300, 2, 128).bfloat16()
    key, value = torch.randn(2, 1, keys, 1, 128).bfloat16()
    differentiate(dout, query, key, value, out, torch.zeros(1, 300, 2))
    assert given == [served]
