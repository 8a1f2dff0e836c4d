"""Records of the backends that torch itself brings, on every platform. No torch import here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..contract import (
    AutoRule,
    BackendInfo,
    ConfigField,
    OneOf,
    PlatformInfo,
    Provider,
    Range,
    Requirement,
    Row,
    Window,
    conditions,
    row,
)
from ..contract.hookspecs import hookimpl
from ..contract.platforms import CORE_PLATFORMS
from ..methods.video.options import WINDOW, dense_by_rule
from ..methods.video.records import EMULATED, PORTABLE, portable
from . import defects

POLYATTN_API_VERSION = 2

HALF = ("float16", "bfloat16")
FLOAT = ("float32", *HALF)
PLATFORMS = ("cpu", "cuda", "rocm", "xpu", "musa", "npu", "mps")
EVERY_LENGTH = ("equal", "one", "fewer", "more")
QKV = ("query", "key", "value")
TRANSFORMS = ("", "subclass", "functionalize", "vmap", "grad", "gradgrad", "jvp")
READING = tuple(name for name in TRANSFORMS if name != "functionalize")
"""Those around which lengths on an accelerator can be read: a functional tensor has no storage there."""
DROPOUT = Range(0.0, 0.999)
SHAPES: dict[str, Any] = {
    "head_dim": Range(1),
    "v_head_dim": Range(1),
    "group": True,
    "scale": True,
    "s_relation": EVERY_LENGTH,
    "cross": True,
    "misaligned": True,
}
"""Every width, length, number of heads and scale."""
WINDOWS: dict[str, Any] = {"causal": ("none", "bottom_right", "top_left"), "window": Window()}
"""Every rule by position but chunks."""
MASKS: dict[str, Any] = {"chunk": Range(0), "mask": ("none", "bool", "additive")}
TORCH = (Requirement("torch", ">=2.11", hint="install torch 2.11 or newer for this device"),)


def _sdpa_rows(platform: str) -> tuple[Row, ...]:
    """Limits of torch's SDPA as our adapter calls it: masks explicit where torch's own alignment would differ."""
    dtypes = {"cpu": ("float64", *FLOAT), "cuda": ("float64", *FLOAT), "mps": FLOAT}.get(platform, FLOAT)
    common: dict[str, Any] = {
        "family": "dense",
        "dtype": dtypes,
        **SHAPES,
        **WINDOWS,
        **MASKS,
        "multimodal": True,
        "zero_size": True,
    }
    train = (*QKV, "mask")
    plain = row(
        **common,
        grad=train if platform != "mps" else QKV,
        dropout=False if platform == "mps" else DROPOUT,
        transform=TRANSFORMS,
        graph_capture=platform in ("cuda", "rocm"),
        note="torch.nn.functional.scaled_dot_product_attention",
    )
    if platform == "cpu":
        with_lse = {k: v for k, v in common.items() if k != "zero_size"}
        return (
            plain,
            row(
                **with_lse,
                lse=True,
                sinks=True,
                deterministic=True,
                grad=(*QKV, "sinks", "lse"),
                note="torch's CPU flash op, which returns the LSE; sinks are applied from it",
            ),
        )
    if platform == "cuda":
        flash: dict[str, Any] = {
            "family": "dense",
            "dtype": HALF,
            "head_dim": Range(1, 256),
            "v_head_dim": Range(1, 256),
            "group": True,
            "scale": True,
            "cross": True,
            "lse": True,
            "sinks": True,
            "grad": (*QKV, "sinks", "lse"),
            "deterministic": True,
            "misaligned": True,
        }
        return (
            plain,
            row(**common, deterministic=True, note="the same, inference: its forward kernels use no atomics"),
            row(
                **flash,
                causal=("none", "bottom_right"),
                s_relation="equal",
                multimodal=True,
                note="torch's CUDA flash op, which returns the LSE; sinks are applied from it",
            ),
            row(**flash, s_relation=EVERY_LENGTH, note="the same op without a causal mask, any lengths"),
        )
    return (plain,)


def _flex_rows(platform: str) -> tuple[Row, ...]:
    """FlexAttention: every position rule, softcap, masks and the LSE; on the CPU forward only (torch's limit)."""
    cpu = platform == "cpu"
    widths = dict.fromkeys(("head_dim", "v_head_dim"), Range(1 if cpu else 16))
    common: dict[str, Any] = {
        **SHAPES,
        **widths,
        **WINDOWS,
        **MASKS,
        "softcap": Range(0.0),
        "sinks": True,
        "tree": True,
        "lse": True,
    }
    # The LSE of FlexAttention is differentiable; a gradient for an additive mask would be one atomic add per score.
    grad: tuple[str, ...] = () if cpu else (*QKV, "sinks", "lse")
    dtypes = ("float64", *FLOAT) if cpu else FLOAT
    return (
        row(family="dense", dtype=dtypes, grad=grad, **common, note="torch.nn.attention.flex_attention"),
        row(
            family="varlen",
            dtype=dtypes,
            grad=grad,
            **{k: v for k, v in common.items() if k not in ("mask", "tree", "chunk")},
            note="sequences kept apart by a document mask",
        ),
    )


def _native_rows(platform: str) -> tuple[Row, ...]:
    cpu = platform == "cpu"
    common: dict[str, Any] = {
        "family": "varlen",
        "dtype": ("float64", *FLOAT) if platform in ("cpu", "cuda") else FLOAT,
        **SHAPES,
        **WINDOWS,
        "note": "one SDPA call per sequence; lengths are read on the host",
    }
    plain = row(**common, grad=QKV, transform=TRANSFORMS if cpu else READING)
    with_lse = row(**common, lse=True, sinks=True, deterministic=True, grad=(*QKV, "sinks", "lse"))
    return (plain, with_lse) if cpu else (plain,)


# Over a cache that holds the query's dtype.
SERVING: dict[str, Any] = {
    **SHAPES,
    **MASKS,
    "phase": ("prefill", "extend", "decode", "verify"),
    "causal": ("none", "bottom_right"),
    "window": Window(),
    "tree": True,
    "spec_topk": Range(0),
    "kv_dtype": "auto",
    "page_size": Range(1),
    "zero_size": True,
}
# Fields of `paged` alone: a latent row has one head, and its call brings no new rows.
HEADS: dict[str, Any] = {"family": "paged", "kv_layout": ("", "NHD", "HND"), "save_kv_cache": True}
INDEXED = ("cpu", "cuda", "rocm")
"""Where torch finds rows of a pool of any size."""
BY_NUMBERS = ("", "tensor", "head", "token")
STORED: dict[str, tuple[dict[str, Any], ...]] = {
    "paged": (
        {"kv_dtype": ("fp8_e4m3", "fp8_e5m2", "int8"), "kv_scales": BY_NUMBERS},
        {"kv_dtype": "fp4_e2m1", "kv_scales": "block16"},
    ),
    "mla": (
        {"kv_dtype": "fp8_e4m3", "kv_scales": "block128", "dims": ((576, 512),)},
        {"kv_dtype": ("fp8_e4m3", "fp8_e5m2"), "kv_scales": ""},
        {"kv_dtype": "fp4_e2m1", "kv_scales": "block16"},
    ),
}
"""Quantised caches that `dequantise_kv` turns into one of the query's dtype."""


def _over_a_cache(**kernel: Any) -> tuple[Row, ...]:
    """The row of a kernel, and of what exact rewrites add to it."""
    dequantise = {"kv_dtype": "dequantise_kv", "kv_scales": "dequantise_kv"}
    rows = [row(**kernel), *(row(when=when, lowered=dequantise, **kernel) for when in STORED[kernel["family"]])]
    if kernel["lse"]:
        whole = {"phase": ("prefill", "extend"), "window": ((-1, -1),), "chunk": 0, "mask": "none"}
        chunked = {**kernel, "chunked_prefix": OneOf((False,))}
        lowered = {"chunked_prefix": "chunked_prefix_by_lse"}
        rows.append(row(when={**whole, "chunked_prefix": True}, lowered=lowered, **chunked))
    return tuple(rows)


def _gathered_rows(platform: str, **more: Any) -> tuple[Row, ...]:
    """SDPA on gathered keys and values: every page size. The LSE where torch's op for masks gives it."""
    cpu = platform == "cpu"
    common: dict[str, Any] = {
        **SERVING,
        "dtype": ("float64", *FLOAT) if platform in ("cpu", "cuda") else FLOAT,
        "lse": cpu,
        "deterministic": platform in ("cpu", "cuda"),
        "multimodal": True,
        "large": platform in INDEXED,
        **more,
    }
    return (
        *_over_a_cache(**common, **HEADS, sinks=cpu),
        *_over_a_cache(**common, family="mla", note="V is the first D_v of a latent row"),
    )


def _listed_rows(platform: str) -> tuple[Row, ...]:
    """Latent attention to listed tokens, whose rows are gathered: nothing is read on the host."""
    kernel: dict[str, Any] = dict(
        family="mla",
        token_topk=Range(1),
        dtype=("float64", *FLOAT) if platform in ("cpu", "cuda") else FLOAT,
        **{name: SHAPES[name] for name in ("head_dim", "v_head_dim", "group", "scale", "s_relation", "misaligned")},
        phase=("prefill", "extend", "decode", "verify"),
        causal=("none", "bottom_right"),
        page_size=Range(1),
        spec_topk=Range(0, 1),
        lse=True,
        graph_capture=platform in ("cuda", "rocm"),
        zero_size=True,
        large=platform in INDEXED,
    )
    plain = row(kv_dtype="auto", **kernel)
    packed, numbers, fp4 = STORED["mla"]
    one_width = {**kernel, "head_dim": 576, "v_head_dim": 512}
    in_blocks = {**kernel, "head_dim": Range(16, multiple_of=16)}
    return (plain, row(**one_width, **packed), row(**kernel, **numbers), row(**in_blocks, **fp4))


def _flex_serving_rows(platform: str) -> tuple[Row, ...]:
    """FlexAttention on gathered keys, with the window, softcap, sinks and LSE it honours elsewhere too."""
    cpu = platform == "cpu"
    widths = dict.fromkeys(("head_dim", "v_head_dim"), Range(1 if cpu else 16))
    return _over_a_cache(
        **{**SERVING, **widths},
        **HEADS,
        dtype=("float64", *FLOAT) if cpu else FLOAT,
        softcap=Range(0.0),
        sinks=True,
        lse=True,
        large=platform in INDEXED,
    )


def _linear_row(platform: str) -> Row:
    """The gated delta rules in chunks, by products of matrices: every length and width."""
    return row(
        family="linear",
        method=("gdn", "kda"),
        dtype=("float64", *FLOAT) if platform in ("cpu", "cuda") else FLOAT,
        **{name: SHAPES[name] for name in ("head_dim", "v_head_dim", "group", "scale", "misaligned")},
        phase=("prefill", "decode"),
        s_relation=("equal", "one"),
        state_layout=("", "KV"),
        grad=QKV,
        deterministic=platform == "cpu",
        zero_size=True,
        note="chunks of 64 tokens, or 16 with a decay for each channel",
    )


VARLEN_ATTN = (
    Requirement("torch", ">=2.12", hint="install torch 2.12 or newer: its varlen_attn is the first with a page table"),
)


def _varlen_attn_rows() -> tuple[Row, ...]:
    """Return what the checks of torch's FlashAttention-2 for pages let through. It takes a bound of S_k keys or more
    for none, and a missing right bound beside a left one for S_k: neither is what it says for queries before the first
    key, of which it can take no block (see the adapter)."""
    windows: tuple[dict[str, Any], ...] = (
        {"s_relation": ("equal", "one", "fewer"), "causal": ("none", "bottom_right"), "window": Window()},
        {"s_relation": "more"},
    )
    return tuple(
        row(
            when={"arch": ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")},
            **HEADS,
            phase=("prefill", "extend", "decode", "verify"),
            dtype=HALF,
            head_dim=Range(8, 256, multiple_of=8),
            page_size=Range(256, multiple_of=256),
            group=True,
            scale=True,
            sinks=True,
            lse=True,
            deterministic=True,
            batch_invariant=True,
            graph_capture=True,
            spec_topk=(0, 1),
            cross=True,
            multimodal=True,
            zero_size=True,
            misaligned=True,
            note="torch.nn.attention.varlen.varlen_attn with a block table; sinks are applied from its LSE",
            **limits,
        )
        for limits in windows
    )


def _reference_rows(platform: str) -> tuple[Row, ...]:
    common: dict[str, Any] = {
        "dtype": ("float64", *FLOAT),
        **SHAPES,
        **WINDOWS,
        **MASKS,
        "softcap": Range(0.0),
        "sinks": True,
        "tree": True,
        "lse": True,
        "alibi": True,
        # Not batch_invariant: BLAS takes other kernels for other batch sizes, which shows in float64.
        "deterministic": True,
        "multimodal": True,
        "zero_size": True,
        "large": True,
    }
    paged: dict[str, Any] = {
        **common,
        "phase": ("prefill", "extend", "decode", "verify"),
        "page_size": Range(1),
        "spec_topk": Range(0),
        "save_kv_cache": True,
    }
    every_grad = (*QKV, "mask", "sinks", "lse")
    reading = TRANSFORMS if platform == "cpu" else READING
    return (
        row(
            family="dense",
            grad=every_grad,
            transform=TRANSFORMS,
            dropout=DROPOUT,
            segments=("", "shared", "pair"),
            **common,
        ),
        row(family="varlen", grad=every_grad, transform=reading, dropout=DROPOUT, **common),
        row(
            family="paged",
            kv_layout=("", "NHD", "HND"),
            kv_dtype=("auto", "float64", *FLOAT, "fp8_e4m3", "fp8_e5m2"),
            kv_scales=("", "tensor", "head", "token"),
            **paged,
        ),
        row(
            family="mla",
            token_topk=Range(0),
            kv_dtype=("auto", "fp8_e4m3", "fp8_e5m2"),
            **{k: v for k, v in paged.items() if k not in ("sinks", "alibi", "save_kv_cache")},
        ),
        row(
            family="linear",
            method=("gdn", "kda"),
            dtype=("float64", *FLOAT),
            **{name: SHAPES[name] for name in ("head_dim", "v_head_dim", "group", "scale", "misaligned")},
            phase=("prefill", "decode", "verify"),
            s_relation=("equal", "one"),
            state_layout=("KV", "VK"),
            state_out=("", "every"),
            tree=True,
            grad=QKV,
            deterministic=True,
            batch_invariant=True,
            zero_size=True,
            large=True,
            note="token by token, for what no kernel takes and for checking",
        ),
    )


def _window_rows(platform: str) -> tuple[Row, ...]:
    """Self-attention over one grid. What the calls that it makes need is judged when they are made."""
    return (
        row(
            when={"place": True},
            family="dense",
            dtype=("float64", *FLOAT) if platform in ("cpu", "cuda") else FLOAT,
            head_dim=Range(1),
            v_head_dim=Range(1),
            group=True,
            s_relation="equal",
            scale=True,
            grad=QKV,
            misaligned=True,
            graph_capture=platform in ("cuda", "rocm"),
            note="an order of tokens and a block map, for whoever serves block_sparse calls here",
        ),
    )


def _sdpa_rule(platform: str) -> tuple[AutoRule, ...]:
    whole = conditions(family="dense")
    return {
        "cpu": (AutoRule(390, "CPU: PyTorch SDPA", whole),),
        "cuda": (AutoRule(390, "CUDA: PyTorch SDPA where no FlashAttention is installed or fits", whole),),
        "rocm": (AutoRule(390, "ROCm: PyTorch SDPA where no FlashAttention is installed or fits", whole),),
        "xpu": (AutoRule(390, "XPU: PyTorch SDPA outside the limits of its FlashAttention", whole),),
        "musa": (AutoRule(390, "MUSA: PyTorch SDPA where no FlashAttention is installed or fits", whole),),
        "mps": (AutoRule(300, "MPS: always PyTorch SDPA", whole),),
        "npu": (AutoRule(390, "NPU: PyTorch SDPA, FlashAttention only where a ring needs the LSE", whole),),
    }[platform]


def _native_rule(platform: str) -> tuple[AutoRule, ...]:
    return {
        "cpu": (
            AutoRule(190, "CPU without AMX kernels: torch_native, the faster of PyTorch's", conditions(family="paged")),
            AutoRule(290, "MLA on a CPU without AMX kernels: torch_native", conditions(family="mla")),
        ),
        "mps": (AutoRule(110, "MPS serving: torch_native", conditions(family=("paged", "mla"))),),
    }.get(platform, ())


FLEX_OPTIONS = (
    ConfigField(
        "compile",
        "str",
        "auto",
        "fuse with torch.compile: auto = on accelerators; always = on the CPU too, where a first call takes about half "
        "a minute and calls with LSE or sinks stay unfused (torch cannot fuse them there)",
        choices=("auto", "always", "never"),
    ),
)


def _varlen_attn(platform: str) -> tuple[Provider, ...]:
    if platform != "cuda":
        return ()
    target = "polyattn.backends.paged_varlen_attn:PagedVarlenAttn"
    return (Provider("varlen-attn", _varlen_attn_rows(), target, VARLEN_ATTN, defects=(defects.VARLEN,)),)


def _backends(platform: str) -> Iterable[BackendInfo]:
    yield BackendInfo(
        "torch_sdpa",
        platform,
        (
            Provider(
                "torch",
                (*_sdpa_rows(platform), *_gathered_rows(platform, graph_capture=platform in ("cuda", "rocm"))),
                "polyattn.backends.torch_sdpa:TorchSDPA",
                TORCH,
                defects={"cuda": defects.CUDA, "mps": defects.MPS}.get(platform, ()),
            ),
        ),
        summary="PyTorch scaled_dot_product_attention, the universal backend",
        priority=50,
        auto=_sdpa_rule(platform),
        # PyTorch's own code run off-chip: the adapters are checked against its CPU composite for every platform here.
        # Evidence files raise this where the device itself was used.
        evidence="vendor code",
        upstream="torch",
    )
    yield BackendInfo(
        "torch_native",
        platform,
        (
            Provider(
                "torch",
                _native_rows(platform),
                "polyattn.backends.torch_native:TorchNative",
                TORCH,
                # It calls `torch_sdpa` for each sequence.
                defects=defects.CUDA if platform == "cuda" else (),
            ),
            *_varlen_attn(platform),
            Provider("torch-linear", (_linear_row(platform),), "polyattn.backends.torch_linear:TorchLinear", TORCH),
            Provider(
                "torch-serving",
                _gathered_rows(platform, batch_invariant=platform == "cpu"),
                "polyattn.backends.paged_torch_native:PagedTorchNative",
                TORCH,
            ),
            Provider("torch-listed", _listed_rows(platform), "polyattn.backends.listed_latent:ListedLatent", TORCH),
        ),
        summary="SDPA sequence by sequence; serving on gathered KV; linear attention in chunks",
        priority=30,
        auto=_native_rule(platform),
        evidence="vendor code",
        upstream="torch",
    )
    if platform != "mps":
        yield BackendInfo(
            "flex_attention",
            platform,
            (
                Provider("torch", _flex_rows(platform), "polyattn.backends.flex_attention:FlexAttention", TORCH),
                Provider(
                    "torch-serving",
                    _flex_serving_rows(platform),
                    "polyattn.backends.paged_flex_attention:PagedFlexAttention",
                    TORCH,
                ),
            ),
            summary="PyTorch FlexAttention: window, softcap, sinks, tree and document masks",
            # On the CPU it is either compiled for half a minute or slower than the reference: by name only.
            priority=None if platform == "cpu" else 20,
            config=FLEX_OPTIONS,
            evidence="vendor code",
            upstream="torch",
            compiles=True,
        )
    yield BackendInfo(
        "reference",
        platform,
        (Provider("polyattn", _reference_rows(platform), "polyattn.backends.reference_backend:Reference", TORCH),),
        summary="the fp32/fp64 definition in plain PyTorch: everything, slowly",
        priority=-100 if platform == "cpu" else None,
        evidence="vendor code",
        upstream="polyattn",
    )
    if platform != "mps":
        yield BackendInfo(
            "window_video_attn",
            platform,
            (Provider("polyattn", _window_rows(platform), "polyattn.methods.video.window:WindowVideo", TORCH),),
            summary="Window of tiles over a video grid: the example of a method",
            priority=None,
            fallbacks=dense_by_rule(),
            config=WINDOW,
            lossy="sparse: exact over the keys it keeps, dense only with a reach as long as the grid",
            upstream="polyattn",
        )
    if platform not in ("cuda", "mps"):  # polyattn-cuda lists them beside the vendors' kernels
        here = [name for name in PORTABLE if platform == "cpu" or name not in EMULATED]
        yield from (portable(name, platform) for name in here)


@hookimpl
def polyattn_register_platforms() -> Iterable[PlatformInfo]:
    return CORE_PLATFORMS


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    return [info for platform in PLATFORMS for info in _backends(platform)]
