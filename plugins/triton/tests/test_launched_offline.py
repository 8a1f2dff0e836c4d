"""What calls over caches launch, compiled for devices that are not here: it fits, and compilers did not spoil it.

Results are not computed: the two faults that are looked for here gave wrong ones on an H200 under Triton 3.6, and are
seen in what was compiled. A Triton whose ptxas is 12.9 or later does not make the second of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyattn.contract.platforms import CORE_PLATFORMS
from polyattn_triton.kernels import backward, extend, forward, latent
from polyattn_triton.kernels.arguments import known_aligned
from polyattn_triton.kernels.cached import least
from polyattn_triton.kernels.decode import _LEAST, _fixed, config_for
from polyattn_triton.kernels.extend import _widths
from polyattn_triton.kernels.room import Room

from . import compiled_evidence
from .launched_offline import Problem, elsewhere, mistaken_products, wrong_descriptors

EVERYWHERE = (
    Problem("extend", (64, 24), queries=64, kv_dtype="fp8_e4m3"),
    Problem("decode", (16, 64), kv_dtype="fp4_e2m1", kv_scales="block16", fresh=True),
    Problem("ranges", (64, 64), queries=99, page_size=1),
    Problem("latent", (512, 64), heads=(16, 1)),
    Problem("latent", (512, 64), heads=(128, 1), kv_dtype="fp8_e4m3", page_size=64),
    Problem("latent", (24, 16), heads=(16, 1), queries=3, kv_dtype="fp8_e5m2"),
    Problem("dsa", (512, 64), heads=(128, 1), page_size=64),
    Problem("dsa", (512, 64), heads=(16, 1), queries=3, kv_dtype="fp8_e4m3", page_size=64),
    Problem("dequantise", (128, 128), heads=(32, 8), page_size=64),
    Problem("dequantise", (48, 48), dtype="float32"),
    Problem("chosen", (128, 128)),
    Problem("gdn", (128, 128), heads=(4, 2), queries=300),
    Problem("kda", (128, 128), heads=(4, 2), queries=300),
)
"""The first: FP8 without scales, where columns are masked."""
HOPPER = (
    Problem("extend", (128, 16), queries=64, kv_dtype="fp8_e5m2", kv_scales="token", mask="additive"),
    Problem("decode", (24, 16), heads=(2, 2), queries=33, mask="bool", off=1, page_size=1),
    Problem("latent", (512, 64), heads=(128, 1), page_size=64, mask="additive"),
    *(Problem(rule, (128, 128), heads=(16, 8), queries=300) for rule in ("gdn", "kda")),
    # Without `delta_chunks.narrowed`: outputs that are wrong, and gradients, the last ones of rows that are aligned.
    Problem("gdn", (64, 64), dtype="float16", queries=77, off=1),
    Problem("gdn", (16, 64), dtype="float16", queries=77, off=1),
    Problem("kda", (1, 24), heads=(2, 2), dtype="float16", queries=77, off=1),
    Problem("kda", (128, 64), heads=(8, 1), queries=77),
)
_QUANTISED = (("auto", ""), ("fp8_e4m3", "token"), ("int8", "head"), ("fp4_e2m1", "block16"))
_LATENT = (("fp8_e4m3", "block128"), ("fp8_e4m3", ""), ("fp8_e5m2", ""))
_RULES = itertools.product(("gdn", "kda"), (1, 40, 64, 128, 255), (24, 64, 256, 511), (0, 1))
_ODD = ((24, 24), (40, 16), (72, 72), (96, 96), (192, 128), (80, 64))
FULL = (
    *(
        Problem("extend", (width, width), queries=64, kv_dtype=kind, kv_scales=scales, mask=mask, page_size=page)
        for width in (64, 128, 256)
        for kind, scales in _QUANTISED
        for mask in ("", "tree", "bool", "additive")
        for page in (16, 64)
    ),
    *(
        Problem("extend", dims, queries=64, off=off, fresh=fresh)
        for dims in _ODD
        for off in (0, 1)
        for fresh in (False, True)
    ),
    *(Problem("extend", dims, queries=5, kv_dtype="int8", kv_scales="tensor") for dims in _ODD),
    *(Problem(rule, (D, D_v), queries=77, dtype="float16", off=off) for rule, D, D_v, off in _RULES),
    *(
        Problem("decode", (width, width), queries=queries, kv_dtype=kind, kv_scales=scales, mask=mask)
        for width in (16, 64, 128, 256)
        for kind, scales in _QUANTISED
        for queries in (1, 8, 16)
        for mask in ("", "bool")
    ),
    *(
        Problem(call, (256, 256), queries=queries, dtype="float32", mask="additive", page_size=64)
        for call, queries in (("decode", 16), ("extend", 64))
    ),
    *(
        Problem("latent", dims, heads=(heads, 1), queries=4, mask=mask, kv_dtype=kind, kv_scales=scales, dtype=dtype)
        for mask in ("", "bool", "additive")
        for dims, heads, kind, scales, dtype in (
            ((512, 64), 1, "auto", "", "bfloat16"),
            ((512, 64), 8, *_LATENT[0], "bfloat16"),
            ((512, 64), 128, *_LATENT[0], "bfloat16"),
            ((512, 64), 128, *_LATENT[1], "bfloat16"),
            ((128, 32), 16, *_LATENT[2], "float32"),
            ((512, 128), 16, "auto", "", "float16"),
            ((128, 32), 16, "auto", "", "bfloat16"),
            ((512, 64), 16, "auto", "", "float32"),
        )
    ),
)


def _check(target: str, *problems: Problem, room_only: bool = False) -> None:
    for problem, launched in zip(problems, elsewhere(target, *problems, room_only=room_only), strict=True):
        wrong = [f"{kernel.name}: {what}" for kernel in launched for what in kernel.wrong]
        assert not wrong, f"{problem} on {target}: {'; '.join(wrong)}"
        if target == "cuda:90" and problem.call == "extend" and problem.queries == 64 and problem.dtype != "float32":
            assert any(kernel.wgmma for kernel in launched), f"{problem}: no wgmma"


LAUNCHED = [
    (target, every[n : n + 3])
    for target, every in (("cuda:90", EVERYWHERE + HOPPER), ("cuda:80", EVERYWHERE), ("hip:gfx942", EVERYWHERE))
    for n in range(0, len(every), 3)
]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("target", "some"), LAUNCHED, ids=lambda one: one if isinstance(one, str) else str(one[0]))
def test_compilers_take_what_is_launched(target: str, some: tuple[Problem, ...]) -> None:
    _check(target, *some)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("dims", [(72, 72), (40, 40), (128, 128)])
def test_decoded_rows_come_sixteen_bytes_at_a_time(dims: tuple[int, int]) -> None:
    """Whatever a compiler can know of the stride of a head: 72 and 40 are no multiples of 16."""
    (launched,) = elsewhere("cuda:90", Problem("decode", dims, heads=(12, 3)))
    (decode,) = (kernel for kernel in launched if kernel.name == "_decode")
    assert not decode.wrong
    assert decode.copies == "async"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("queries", [1, 3])
def test_index_keys_of_132_bytes_are_loaded_four_bytes_at_a_time(queries: int) -> None:
    """Their rows begin at no multiple of more, and at none at all as far as a compiler knows that is not told."""
    problem = Problem("dsa", (512, 64), heads=(16, 1), queries=queries, kv_dtype="fp8_e4m3", page_size=64)
    (launched,) = elsewhere("cuda:90", problem)
    (scores,) = (kernel for kernel in launched if kernel.name == "_score")
    assert not scores.wrong
    assert scores.wgmma
    assert scores.single_bytes == 0


def test_latent_rows_of_8_bits_are_cut_into_blocks_that_tensor_cores_multiply() -> None:
    """Where shared memory is small, blocks are cut too: to no fewer keys than `least` says."""
    asked: dict[str, Any] = {"heads": (128, 1), "queries": 4, "page_size": 64, "mask": "additive"}
    _check("cuda:86", *(Problem("latent", (512, 64), kv_dtype=dtype, kv_scales=by, **asked) for dtype, by in _LATENT))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("chip", compiled_evidence.CHIPS)
def test_what_is_evidence_for_chips_of_amd_is_compiled(chip: str, pytestconfig: pytest.Config) -> None:
    every = tuple(compiled_evidence.problems())
    full = pytestconfig.getoption("--polyattn-full")
    some = every if full else [one for one in every if one.call == "write" or (one.call == "decode" and one.kv_scales)]
    _check(f"hip:{chip}", *some)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "many" in metafunc.fixturenames and metafunc.config.getoption("--polyattn-full"):
        metafunc.parametrize("many", [FULL[n : n + 8] for n in range(0, len(FULL), 8)])
    elif "many" in metafunc.fixturenames:
        metafunc.parametrize("many", [FULL[-5:-4]])
    if "declared" in metafunc.fixturenames:
        full = metafunc.config.getoption("--polyattn-full")
        parts = [(target, DECLARED[n : n + 40]) for target in FULLY for n in range(0, len(DECLARED), 40)]
        some = parts if full else [("cuda:90", DECLARED[:1])]
        metafunc.parametrize("declared", some, ids=[f"{target}-{n}" for n, (target, _) in enumerate(some)])


def test_every_entry_of_the_tables_fits_hopper(many: tuple[Problem, ...]) -> None:
    _check("cuda:90", *many)


# ------------------------------------------------------------------------------------------------------ shared memory

ARCHITECTURES = tuple(
    f"{kind}:{arch.removeprefix('sm')}"
    for platform, kind in (("cuda", "cuda"), ("rocm", "hip"))
    for arch in next(known.archs for known in CORE_PLATFORMS if known.name == platform)
)
_WIDE = Problem("forward", (192, 192), queries=256)
_FLOAT = Problem("forward", (256, 256), queries=256, dtype="float32")
_ROWS = {"queries": 16, "mask": "additive"}
_656 = {"kv_dtype": "fp8_e4m3", "kv_scales": "block128"}
NEAREST: dict[str, tuple[Problem, ...]] = {
    # By what they need, nearest to 227 KiB, where an H100 has its own tables.
    "cuda:90": (
        Problem("forward", (192, 192), queries=256, packed=True),
        *(Problem("forward", dims, queries=256, mask="additive") for dims in ((128, 128), (136, 136), (192, 128))),
        Problem("forward", (160, 160), queries=256, mask="bool"),
        Problem("backward", (128, 128), queries=256, mask="additive"),
        Problem("sparse", (256, 256), queries=128),
        Problem("decode", (256, 256), **_ROWS),
        Problem("extend", (256, 256), queries=64, mask="additive", page_size=64),
        Problem("latent", (512, 64), heads=(128, 1), queries=4, mask="bool"),
        Problem("latent", (512, 64), heads=(128, 1), queries=4, **_656, page_size=64),
        Problem("latent", (512, 64), heads=(128, 1), queries=4, kv_dtype="fp8_e4m3", page_size=64),
        Problem("latent", (448, 128), heads=(128, 1), queries=4, page_size=64),
        Problem("kda", (128, 128), heads=(4, 2), queries=300),
    ),
    # And to 99 KiB, where the tables are those of an A100.
    "cuda:86": (
        *(Problem("forward", (128, 128), queries=256, mask=mask) for mask in ("bool", "additive")),
        Problem("backward", (128, 128), queries=256, mask="additive"),
        Problem("backward", (256, 256), queries=256, dtype="float32"),
        Problem("sparse", (256, 256), queries=128),
        Problem("decode", (256, 256), **_ROWS),
        Problem("decode", (256, 256), **_ROWS, dtype="float32"),
        Problem("decode", (256, 256), **_ROWS, kv_dtype="fp8_e4m3", kv_scales="token"),
        Problem("decode", (128, 128), **_ROWS, kv_dtype="fp4_e2m1", kv_scales="block16"),
        Problem("extend", (256, 256), queries=64, dtype="float32", mask="additive"),
        Problem("extend", (128, 128), queries=64, mask="additive", kv_dtype="fp4_e2m1", kv_scales="block16"),
        Problem("latent", (512, 64), heads=(128, 1), queries=4, mask="additive", **_656, page_size=64),
        Problem("latent", (512, 64), heads=(128, 1), queries=4, mask="additive", kv_dtype="fp8_e5m2", page_size=64),
        Problem("latent", (448, 128), heads=(16, 1), queries=4),
        *(Problem(rule, (256, 256), heads=(4, 2), queries=300, dtype="float32") for rule in ("gdn", "kda")),
    ),
    "cuda:75": tuple(
        Problem("kda", (256, 256), heads=(4, 2), queries=300, dtype=dtype) for dtype in ("bfloat16", "float32")
    ),
    "cuda:89": (Problem("decode", (256, 256), **_ROWS),),
    "cuda:120": (Problem("decode", (256, 256), **_ROWS),),
    "cuda:100": (
        Problem("forward", (128, 128), queries=256, mask="additive"),
        Problem("latent", (448, 128), heads=(128, 1), queries=4, page_size=64),
        Problem("latent", (448, 128), heads=(128, 1), queries=4, kv_dtype="fp8_e4m3", page_size=64),
    ),
    "hip:gfx942": (
        Problem("forward", (128, 128), queries=256, mask="additive"),
        Problem("backward", (256, 256), queries=256, dtype="float32"),
        Problem("decode", (256, 256), **_ROWS, dtype="float32"),
        Problem("extend", (256, 256), queries=64, dtype="float32", mask="additive"),
        Problem("latent", (448, 128), heads=(16, 1), queries=4),
        Problem("latent", (448, 128), heads=(16, 1), queries=4, kv_dtype="fp8_e4m3"),
    ),
}
"""What is compiled for an architecture, besides `_WIDE` and `_FLOAT`. Chips that are not named have as much as one that
is, and the same tables."""
_CUT = (16, 64, 96, 128, 136, 160, 192, 256)
"""A head dim for each way in which it is cut into tiles."""
DECLARED = (
    *(
        Problem(call, dims, queries=256, mask=mask, dtype=dtype, packed=packed)
        for call in ("forward", "backward")
        for dims in (*((d, d) for d in _CUT), (192, 128), (128, 192), (16, 256), (256, 16), (64, 256))
        for dtype in ("bfloat16", "float32")
        for mask, packed in (("", False), ("", True), ("bool", False), ("additive", False))
    ),
    *(Problem("forward", (d, d), queries=n, mask="additive") for d in _CUT for n in (1, 16)),
    *(Problem("sparse", (d, d), queries=256, dtype=dtype) for d in (64, 128, 256) for dtype in ("bfloat16", "float32")),
    *(
        Problem(call, (d, d), queries=queries, mask=mask, dtype=dtype, kv_dtype=kind, kv_scales=scales)
        for call, queries in (("decode", 1), ("decode", 16), ("extend", 5), ("extend", 64))
        for d in (16, 64, 128, 192, 256)
        for mask in ("", "bool", "additive")
        for dtype in ("bfloat16", "float32")
        for kind, scales in _QUANTISED
    ),
    *(
        Problem("latent", dims, heads=(heads, 1), queries=4, mask=mask, dtype=dtype, kv_dtype=kind, kv_scales=scales)
        for dims in ((512, 64), (448, 128), (256, 64), (128, 32), (16, 16))
        for heads in (1, 16, 128)
        for mask in ("", "bool", "additive")
        for dtype in ("bfloat16", "float32")
        for kind, scales in (("auto", ""), *_LATENT[dims != (512, 64) :])
    ),
)


FULLY = ("cuda:86", "cuda:90", "cuda:100", "hip:gfx942")
"""Where all of it is compiled, in an hour: each table, on the chip of those it is for that has least."""


def _fits(target: str, *problems: Problem) -> None:
    for problem, launched in zip(problems, elsewhere(target, *problems, room_only=True), strict=True):
        wrong = [f"{kernel.name} of {kernel.cut}: {what}" for kernel in launched for what in kernel.wrong]
        assert not wrong, f"{problem} on {target}: {'; '.join(wrong)}"


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("target", ARCHITECTURES)
def test_what_is_declared_fits_the_shared_memory_of_each_architecture(target: str) -> None:
    _fits(target, _WIDE, _FLOAT, *NEAREST.get(target, ()))


def test_all_that_is_declared_fits(declared: tuple[str, tuple[Problem, ...]]) -> None:
    _fits(declared[0], *declared[1])


def test_what_is_needed_is_what_is_computed() -> None:
    """`room.Loop`, for what fills a Hopper: the compiler adds no more than barriers and sums."""
    bf16 = torch.bfloat16
    asked: tuple[tuple[Problem, str, Room, Callable[..., Any]], ...] = (
        (
            Problem("forward", (192, 128), queries=256),
            "_forward",
            forward._room(2, (192, 128), False, 0),
            forward.Config,
        ),
        (
            Problem("backward", (128, 128), queries=256, mask="additive"),
            "_queries",
            backward._rooms(2, (128, 128), False, 4)[0],
            lambda *cut: backward.Config(*cut, *cut),
        ),
        (
            Problem("extend", (256, 256), queries=64, kv_dtype="int8", kv_scales="tensor"),
            "_extend",
            extend._room(bf16, 8, (256, 256), False, 0, 32),
            extend.Config,
        ),
        (
            Problem("latent", (448, 128), heads=(128, 1), queries=4, page_size=64),
            "_attend",
            latent._room(bf16, (448, 128), 0, ""),
            latent.Config,
        ),
    )
    compiled = elsewhere("cuda:90", *(problem for problem, *_ in asked), room_only=True)
    for (problem, name, room, config), launched in zip(asked, compiled, strict=True):
        kernel = next(kernel for kernel in launched if kernel.name == name)
        cut = (kernel.cut[word] for word in ("M", "N", "num_warps", "STAGES"))
        assert 0 <= kernel.shared - room.loop(config(*cut)).needs("hopper") <= 1024, problem


# ------------------------------------------------------------------------------------------------- what they look for

RIGHT = """
    /*01*/  UMOV UR6, URZ ;
    /*02*/  UIADD3 UR10, UP1, UR48, 0x2, URZ ;
    /*03*/  UIADD3.X UR6, UR6, 0x40000040, URZ, UP1, !UPT ;
    /*04*/  UIADD3.X UR9, URZ, -0x3ffffff0, URZ, UP0, !UPT ;
    /*05*/  UIADD3.X UR17, UR17, -0x1, URZ, UP0, !UPT ;
"""
WRONG = """
    /*01*/  ULEA UR4, UR6, UR4, 0x18 ;
    /*02*/  UIADD3 UR13, UP0, UR4, 0x20, URZ ;
    /*03*/  UIADD3.X UR17, UR4, -0x3ffffff0, URZ, UP0, !UPT ;
"""


def test_a_descriptor_with_something_in_its_upper_word_is_seen() -> None:
    assert list(wrong_descriptors(RIGHT)) == []
    assert list(wrong_descriptors(WRONG)) == ["UIADD3.X UR17, UR4, -0x3ffffff0, URZ, UP0, !UPT ;"]


@pytest.mark.parametrize(("keys", "side", "seen"), [(16, 2, 0), (16, 4, 1), (32, 4, 0), (32, 8, 1), (64, 8, 0)])
def test_a_product_of_too_few_numbers_is_seen(keys: int, side: int, seen: int) -> None:
    left = f"tensor<16x{keys}xbf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {side}}}>>"
    right = f"tensor<{keys}x64xbf16, #ttg.dot_op<{{opIdx = 1, parent = #mma, kWidth = {side}}}>>"
    assert len(list(mistaken_products(f"%d = tt.dot %a, %b, %c : {left} * {right} -> tensor<16x64xf32, #mma>"))) == seen


def test_tiles_have_room_for_what_a_thread_holds() -> None:
    assert [least(bits) for bits in (4, 8, 16, 32)] == [64, 32, 16, 16]
    device = torch.device("cpu")
    for bits in (4, 8, 16):
        for width in (16, 40, 256):
            config = config_for(device, torch.bfloat16, bits, (width, width), 1)
            assert least(min(bits, 8)) <= config.N
    assert least(4) <= _LEAST


@pytest.mark.parametrize("dims", [(128, 16), (96, 24), (40, 256), (72, 80), (64, 64)])
def test_rows_by_way_of_registers_have_one_swizzle(dims: tuple[int, int]) -> None:
    """Of 128 bytes: 64 numbers. What goes straight to shared memory is cut as closely as it can be."""
    for width in dims:
        cut = _widths(width, straight=False)
        assert sum(cut) >= width
        assert not any(part % 64 for part in cut)
        assert sum(_widths(width, straight=True)) <= sum(cut)
    config = config_for(torch.device("cpu"), torch.bfloat16, 16, dims, 64)
    fixed = (
        torch.device("cpu"),
        torch.bfloat16,
        dims,
        (8, 2),
        8,
        16,
        "auto",
        "",
        True,
        (-1, -1),
        0,
        0.1,
        0.0,
        0,
        0,
        False,
        2,
        False,
        config,
    )
    _, constants = _fixed(*fixed)
    assert not any(constants[side] % 64 for side in ("BLOCK_D", "BLOCK_E"))


def test_rows_are_straight_where_the_compiler_knows_that_they_begin_at_16_bytes() -> None:
    rows = torch.zeros(4, 16, 2, 48, dtype=torch.bfloat16)
    assert known_aligned(rows[..., :32])
    assert not known_aligned(rows[:, :, :1, :24].reshape(4, 16, 1, 24)), "24 is no multiple of 16"
    assert not known_aligned(rows[..., 1:33])
    assert not known_aligned(torch.zeros(4, 16, 2, 43, dtype=torch.bfloat16)[..., :32])
