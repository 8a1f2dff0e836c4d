"""The dense and packed kernels: what the kit does not reach by a request, and that compilers of real devices take them.

What a request can ask for is the conformance kit's (`polyattn conform triton`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.contract import AttentionRequest
from polyattn.semantics import reference
from polyattn.testing.conforming import FULL
from polyattn.testing.tolerances import check as gate
from polyattn_triton import dense, runtime
from polyattn_triton.kernels import rules
from polyattn_triton.kernels.arguments import constants_of, sizes_of, units_of
from polyattn_triton.kernels.backward import Config as BackwardConfig
from polyattn_triton.kernels.backward import backward, narrow, shares
from polyattn_triton.kernels.forward import Config, forward
from polyattn_triton.kernels.gradient_sums import add_up, partial
from polyattn_triton.kernels.tiles import Spec, parts

import triton  # isort: skip
import triton.language as tl  # isort: skip

from .launched_offline import Problem, elsewhere

FLOAT = torch.float32

B, H_Q, H_KV, D = 2, 4, 2, 24


def _tensors(S_q: int, S_k: int, D_v: int = D, heads: int = H_Q, D: int = D) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(S_q * 1000 + S_k)
    shapes = ((B, S_q, heads, D), (B, S_k, H_KV, D), (B, S_k, H_KV, D_v))
    return tuple(torch.randn(shape, generator=make) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("S_q", "S_k", "spec", "asked"),
    [
        (37, 70, {"right": 0}, {"causal": "bottom_right"}),
        (70, 37, {"right": 0, "top_left": True}, {"causal": "top_left"}),
        (50, 50, {"left": 9, "right": 3}, {"window": (9, 3)}),
        (40, 61, {"right": 0, "chunk": 16}, {"chunk": 16}),
        (3, 70, {"right": 0, "softcap": 2.0}, {"causal": "bottom_right", "softcap": 2.0}),
    ],
)
def test_small_tiles_agree_with_the_reference(S_q: int, S_k: int, spec: dict[str, Any], asked: dict[str, Any]) -> None:
    """Tiles much smaller than the sequences, so that every kind of block is met."""
    q, k, v = _tensors(S_q, S_k, 40)
    out, lse = torch.full((B, S_q, H_Q, 40), torch.nan), torch.full((B, S_q, H_Q), torch.nan)
    said = Spec(scale=D**-0.5, **spec)
    forward(q, k, v, out, lse, spec=said, layout="BSHD", config=Config(16, 16, 4, 1))
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **asked)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_backward_of_small_tiles_is_the_same_twice_and_agrees() -> None:
    q, k, v = _tensors(37, 45)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    expected, lse = reference.attention(q, k, v, causal="bottom_right", return_lse=True)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    tensors = [t.detach() for t in (dout, q, k, v, expected, lse)]
    config = BackwardConfig(16, 16, 4, 1, 16, 16, 4, 1)
    spec = Spec(scale=D**-0.5, right=0)
    found = backward(*tensors, spec=spec, layout="BSHD", config=config)
    again = backward(*tensors, spec=spec, layout="BSHD", config=config)
    for gradient, repeated, right in zip(found, again, wanted, strict=True):
        assert torch.equal(gradient, repeated)
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("programs", "group", "steps", "found"),
    [
        (132, 12, 13, (12, 1)),  # as many as there are processors: no part is stored
        (75, 3, 49, (1, 1)),
        (16, 5, 15, (1, 1)),
        (50, 12, 40, (4, 1)),  # no fewer heads than fill the device
        (67, 1, 67, (1, 4)),
        (67, 1, 20, (1, 2)),
        (3, 1, 7, (1, 1)),  # short ones are not cut
    ],
)
def test_few_programs_share_their_query_heads_and_rows(
    programs: int, group: int, steps: int, found: tuple[int, int]
) -> None:
    assert shares(programs, group, steps, 132) == found


def test_few_tiles_of_queries_are_half_as_high() -> None:
    config = BackwardConfig(128, 64, 8, 3, 64, 64, 4, 2, tma=True)
    assert narrow(config, 132, 132) == config
    assert narrow(config, 131, 132) == config._replace(m=64, warps=4)
    small = config._replace(m=64, warps=4)
    assert narrow(small, 1, 132) == small, "`wgmma` has 64 rows"


@pytest.mark.parametrize("layout", ["BSHD", "BHSD", "THD"])
@pytest.mark.parametrize(("width", "v_width"), [(64, 64), (40, 24)])
def test_parts_are_added_up_in_place(layout: str, width: int, v_width: int) -> None:
    """Into gradients that lie as their inputs do: here beside each other in one tensor."""
    ways, (B, S, H) = 3, (1 if layout == "THD" else 2, 70, 2)
    shape = {"BSHD": (B, S, H), "BHSD": (B, H, S), "THD": (S, H)}[layout]
    axis = 1 if layout == "BHSD" else len(shape) - 1
    whole = torch.full((*shape, width + v_width), float("nan")).bfloat16()
    dkey, dvalue = whole[..., :width], whole[..., width:]
    parts = [partial(grad, axis, ways).normal_() for grad in (dkey, dvalue)]
    add_up(*parts, dkey, dvalue, layout=layout)
    for grad, found in zip((dkey, dvalue), parts, strict=True):
        wanted = found.unflatten(axis, (H, ways)).sum(axis + 1)
        torch.testing.assert_close(grad.float(), wanted, rtol=8e-3, atol=1e-6)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("layout", ["BSHD", "BHSD", "THD"])
@pytest.mark.parametrize(
    ("S_q", "S_k", "heads", "ways"),
    [(37, 45, (6, 1), (2, 1)), (300, 33, (1, 1), (1, 2)), (290, 20, (2, 1), (1, 2))],
)
def test_parts_of_the_gradients_of_keys_add_up(
    layout: str, S_q: int, S_k: int, heads: tuple[int, int], ways: tuple[int, int]
) -> None:
    """Of query heads that share keys, and of a head's rows: where a program for each tile of keys is too few."""
    (H, H_k), config = heads, BackwardConfig(16, 16, 4, 1, 16, 16, 4, 1)
    assert shares(-(-S_k // 16) * H_k, H // H_k, -(-S_q // 16), runtime.processors(torch.device("cpu"))) == ways
    make = torch.Generator().manual_seed(S_q)
    shapes = ((1, S_q, H, D), (1, S_k, H_k, D), (1, S_k, H_k, 40))
    q, k, v = (torch.randn(shape, generator=make).requires_grad_() for shape in shapes)
    out, lse = reference.attention(q, k, v, causal="bottom_right", return_lse=True)
    dout = torch.randn(out.shape, generator=make)
    wanted = torch.autograd.grad(out, (q, k, v), dout)
    tensors = [t.detach() for t in (dout, q, k, v, out, lse)]
    lengths: dict[str, Any] = {}
    if layout == "BHSD":
        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
    elif layout == "THD":
        tensors = [t[0] for t in tensors]
        cu_q, cu_k = (torch.tensor([0, length], dtype=torch.int32) for length in (S_q, S_k))
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": S_q, "max_seqlen_k": S_k}
    found, again = (
        backward(*tensors, spec=Spec(scale=D**-0.5, right=0), layout=layout, config=config, **lengths) for _ in range(2)
    )
    for gradient, repeated, right in zip(found, again, wanted, strict=True):
        assert torch.equal(gradient, repeated)
        if layout == "BHSD":
            gradient = gradient.transpose(1, 2)
        torch.testing.assert_close(gradient.reshape(right.shape), right, rtol=1e-4, atol=1e-5)


def test_what_lies_between_and_beyond_sequences_is_not_read() -> None:
    """Keys and values of the next sequence are NaN: a product of 0 with one of them would show."""
    q, k, v = (t[0] for t in _tensors(20, 20))
    k[9:], v[9:] = torch.nan, torch.nan
    cu = torch.tensor([0, 9, 20], dtype=torch.int32)
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 11, "max_seqlen_k": 11}
    out, lse = polyattn.varlen_attention(q, k, v, causal=True, return_lse=True, backend="triton", **given)
    expected = reference.attention(q[None, :9], k[None, :9], v[None, :9], causal="bottom_right")
    torch.testing.assert_close(out[:9], expected[0])
    assert lse[:9].isfinite().all()
    assert out[9:].isnan().all()


def test_no_keys_give_zeros_and_an_lse_of_minus_infinity() -> None:
    q, k, v = _tensors(5, 0)
    out, lse = polyattn.attention(q, k, v, return_lse=True, backend="triton")
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("call", ["dense", "varlen", "paged"])
def test_sinks_that_are_a_column(call: str) -> None:
    (q, k, v), sinks = (t[0] for t in _tensors(9, 9)), torch.randn(H_Q, 2)[:, 0]
    starts, lens = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    given: dict[str, object] = {"sinks": sinks, "max_seqlen_q": 9, "max_seqlen_k": 9, "cu_seqlens_q": starts}

    def served(backend: str) -> Tensor:
        if call == "dense":
            return polyattn.attention(q[None], k[None], v[None], sinks=sinks, backend=backend)
        if call == "varlen":
            return polyattn.varlen_attention(q, k, v, cu_seqlens_k=starts, backend=backend, **given)
        pages = torch.zeros(1, 1, dtype=torch.int32)
        more = {"page_table": pages, "seq_lens": lens}
        return polyattn.paged_attention(q, k[None], v[None], backend=backend, **more, **given)

    torch.testing.assert_close(served("triton"), served("reference"), rtol=1e-5, atol=1e-5)


def test_a_row_that_is_no_number_is_not_merged_as_one_without_keys() -> None:
    q, k, v = _tensors(5, 9)
    q[0, 3] = torch.nan
    out, lse = polyattn.attention(q, k, v, return_lse=True, backend="triton")
    assert lse.isnan().nonzero()[:, :2].unique(dim=0).tolist() == [[0, 3]]
    merged, _ = polyattn.merge([out, torch.zeros_like(out)], [lse, torch.zeros_like(lse)])
    assert merged[0, 3].isnan().all()


@pytest.mark.parametrize(
    ("width", "cut"), [(64, (64, 0)), (72, (64, 16)), (96, (64, 32)), (112, (128, 0)), (24, (32, 0)), (192, (128, 64))]
)
def test_head_dims_are_cut_into_powers_of_two(width: int, cut: tuple[int, int]) -> None:
    assert parts(width) == cut


LAUNCHES = {
    "cuda:90": [
        Problem("forward", (128, 24), queries=63, off=1),
        Problem("forward", (96, 96), queries=300),
        Problem("backward", (40, 16), queries=63, off=1),
        Problem("backward", (128, 128), queries=300),
    ],
    "cuda:80": [Problem("forward", (256, 256), queries=300, mask="bool", off=1), Problem("backward", (128, 128))],
    "hip:gfx942": [Problem("forward", (72, 72), queries=300), Problem("backward", (64, 64), queries=300)],
}
MORE = [
    *(Problem("forward", dims, queries=63, off=1) for dims in ((24, 16), (40, 16), (64, 16), (96, 96))),
    *(Problem("backward", dims, queries=63, off=1) for dims in ((64, 16), (128, 24), (96, 96))),
    Problem("forward", (64, 16), queries=5, mask="bool", off=1, softcap=30.0),
    Problem("forward", (128, 128), queries=3, mask="bool"),
    *(Problem("forward", (width, width), queries=300) for width in (40, 64, 128, 192, 256)),
    *(Problem("backward", (width, width), queries=300) for width in (64, 256)),
]
"""Compiling takes seconds each: these under --polyattn-full."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "launches" in metafunc.fixturenames:
        more = {"cuda:90": MORE} if metafunc.config.getoption(FULL, False) else {}
        found = [(target, some + more.get(target, [])) for target, some in LAUNCHES.items()]
        metafunc.parametrize(("target", "launches"), found, ids=list(LAUNCHES))


@pytest.mark.slow(keep=1)
def test_compilers_of_devices_take_the_kernels(target: str, launches: list[Problem]) -> None:
    """Offline, by Triton's own compiler: no device is needed. The compiler is judged too, see `launched_offline`."""
    for problem, launched in zip(launches, elsewhere(target, *launches), strict=True):
        for kernel in launched:
            assert not kernel.wrong, (str(problem), kernel)
            if target == "cuda:90" and problem.queries > 5 and kernel.name != "_add_up":  # which has no products
                assert kernel.wgmma, (str(problem), kernel)
                assert (kernel.copies == "tma") == (not problem.off), (str(problem), kernel)


@pytest.mark.parametrize("dims", [(24, 16), (40, 16), (64, 16), (128, 24), (96, 96), (192, 128), (256, 256)])
def test_loose_rows_are_laid_out_alike(dims: tuple[int, int]) -> None:
    """Whatever compiler there is here: 64 columns and more have one swizzle, so that ptxas 12.8 mistakes nothing."""
    query, value = (torch.empty(1 + 9 * width, dtype=torch.bfloat16)[1:].view(1, 9, 1, width) for width in dims)
    unit, loose, strides = units_of(query, query, value, layout="BSHD")
    assert (unit, loose, strides[4]) == (8, True, dims[0] // 8)
    sizes = sizes_of(query, query, value, "BSHD", None, 0, 0)
    found = constants_of(Spec(1.0), sizes, 0, unit, loose)
    assert not any(found[part] % 64 for part in ("D1", "D2", "E1", "E2"))
    assert found["D1"] + found["D2"] >= dims[0]
    assert found["E1"] + found["E2"] >= dims[1]


def test_which_rows_are_loose() -> None:
    room = torch.empty(4096, dtype=torch.bfloat16)
    rows = room[:1440].view(1, 36, 1, 40)
    assert units_of(rows, layout="BSHD") == (8, False, [180, 5, 5])
    assert units_of(room[1:1441].view(1, 36, 1, 40), layout="BSHD")[:2] == (8, True)
    assert units_of(rows[..., :36].contiguous(), layout="BSHD")[:2] == (1, True)
    assert units_of(rows.float()[..., :37], layout="BSHD")[:2] == (4, False)
    assert units_of(torch.empty(2, 3, 4, 37), layout="BHSD") == (1, False, [444, 37, 148])


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("cap", [30.0, 50.0])
@pytest.mark.parametrize("size", [1e-3, 0.3])
def test_softcap_keeps_the_digits_of_small_logits(cap: float, size: float) -> None:
    """In float32: 1 - 2 / (1 + exp(2x)) has an error of 2^-24, and a cap of 30 makes 2e-6 of that."""
    q, k, v = _tensors(13, 20)
    q = q * size
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    plain = [t.clone().requires_grad_() for t in (q, k, v)]
    given: dict[str, Any] = {"softcap": cap, "return_lse": True}
    right, right_lse = reference.attention(*wide, **given, compute_dtype=torch.float64)
    expected, expected_lse = reference.attention(*plain, **given)
    out, lse = torch.empty_like(q), torch.empty(B, 13, H_Q)
    spec = Spec(scale=D**-0.5, softcap=cap)
    forward(q, k, v, out, lse, spec=spec, layout="BSHD")
    assert gate(out, right.detach(), expected.detach(), FLOAT, softcap=True) is None
    assert gate(lse, right_lse.detach(), expected_lse.detach(), FLOAT, softcap=True, kind="lse") is None
    dout = torch.randn_like(out)
    found = backward(dout, q, k, v, out, lse, spec=spec, layout="BSHD")
    wanted = torch.autograd.grad(right, wide, dout.double())
    known = torch.autograd.grad(expected, plain, dout)
    for gradient, exact, beside in zip(found, wanted, known, strict=True):
        assert gate(gradient, exact, beside, FLOAT, softcap=True, kind="grad") is None


def test_tanh_is_right_to_its_last_digits() -> None:
    x = torch.logspace(-10, 1.5, 4096)
    found = torch.empty_like(x)
    _tanhs[(1,)](x, found, 4096)
    right = torch.tanh(x.double())
    assert float(((found - right).abs() / right).max()) < 2.5e-7


@triton.jit
def _tanhs(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, rules._tanh(tl.load(x + i), tl.float32))


def test_rows_of_one_head_come_in_vectors() -> None:
    """A stride of 40 is no multiple of 16, which is all that a compiler would know of a number by itself."""
    problems = [Problem("forward", (40, 40), heads=(1, 1), queries=300, off=off) for off in (0, 1)]
    (aligned,), (loose,) = elsewhere("cuda:80", *problems)
    assert (aligned.copies, loose.copies) == ("async", "")


@pytest.mark.parametrize(
    ("sizes", "changed", "served"),
    [
        ((8, 256, 8, 64), {}, (64, 128)),
        ((24, 300, 4, 64), {}, (64, 64)),
        ((24, 300, 4, 64), {"layout": "BHSD"}, (64, 64)),
        ((24, 300, 4, 64), {"causal": "bottom_right"}, (64, 64)),
        ((15, 331, 6, 64), {}, None),  # 540 tiles of 64 rows
        ((24, 300, 4, 80), {}, None),
        ((24, 300, 4, 64), {"batch_invariant": True}, None),
    ],
)
def test_few_tiles_of_narrow_heads_are_portable_on_a_hopper(
    sizes: tuple[int, ...], changed: dict[str, Any], served: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most four tiles of 64 rows for each of 132 processors."""
    batch, rows, heads, width = sizes
    used: list[Any] = []
    monkeypatch.setattr(dense.runtime, "processors", lambda device: 132)
    monkeypatch.setattr(dense.hopper, "fits", lambda *args, **given: True)
    monkeypatch.setattr(dense.hopper, "forward", lambda *args, **given: used.append(None))
    monkeypatch.setattr(dense, "forward", lambda *args, config=None, **given: used.append(config[:2]))
    request = AttentionRequest(
        platform="cuda", dtype="bfloat16", heads=heads, kv_heads=heads, head_dim=width, **changed
    ).normalised()  # fmt: skip
    axes = (rows, heads) if request.layout == "BSHD" else (heads, rows)
    query = torch.empty(batch, *axes, width, device="meta", dtype=torch.bfloat16)
    dense.Dense().bind(request).forward(query, query, query)
    assert used == [served]
