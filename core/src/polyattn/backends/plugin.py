"""Records of the backends that torch itself brings, on every platform. No torch import here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..hookspecs import hookimpl
from ..platforms import CORE_PLATFORMS
from ..records import (
    AutoRule,
    BackendInfo,
    ConfigField,
    PlatformInfo,
    Provider,
    Range,
    Requirement,
    Row,
    Window,
    conditions,
    row,
)

HALF = ("float16", "bfloat16")
FLOAT = ("float32", *HALF)
PLATFORMS = ("cpu", "cuda", "rocm", "xpu", "musa", "npu", "mps")
EVERY_LENGTH = ("equal", "one", "fewer", "more")
QKV = ("query", "key", "value")
TRANSFORMS = ("", "vmap", "subclass")
DROPOUT = Range(0.0, 0.999)
TORCH = (Requirement("torch", ">=2.11", hint="install torch 2.11 or newer for this device"),)


def _sdpa_rows(platform: str) -> tuple[Row, ...]:
    """Limits of torch's SDPA as our adapter calls it: masks explicit where torch's own alignment would differ."""
    dtypes = {"cpu": ("float64", *FLOAT), "cuda": ("float64", *FLOAT), "mps": FLOAT}.get(platform, FLOAT)
    common: dict[str, Any] = {
        "family": "dense",
        "dtype": dtypes,
        "head_dim": Range(1),
        "v_head_dim": Range(1),
        "group": True,
        "causal": ("none", "bottom_right", "top_left"),
        "window": Window(),
        "chunk": Range(0),
        "mask": ("none", "bool", "additive"),
        "scale": True,
        "s_relation": EVERY_LENGTH,
        "cross": True,
        "multimodal": True,
        "zero_size": True,
        "misaligned": True,
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
        return (
            plain,
            row(**common, deterministic=True, note="the same, inference: its forward kernels use no atomics"),
            row(
                family="dense",
                dtype=HALF,
                head_dim=Range(1, 256),
                v_head_dim=Range(1, 256),
                group=True,
                causal=("none", "bottom_right"),
                scale=True,
                s_relation="equal",
                cross=True,
                multimodal=True,
                lse=True,
                sinks=True,
                grad=(*QKV, "sinks", "lse"),
                deterministic=True,
                misaligned=True,
                note="torch's CUDA flash op, which returns the LSE; sinks are applied from it",
            ),
            row(
                family="dense",
                dtype=HALF,
                head_dim=Range(1, 256),
                v_head_dim=Range(1, 256),
                group=True,
                scale=True,
                s_relation=EVERY_LENGTH,
                cross=True,
                lse=True,
                sinks=True,
                grad=(*QKV, "sinks", "lse"),
                deterministic=True,
                misaligned=True,
                note="the same op without a causal mask, any lengths",
            ),
        )
    return (plain,)


def _flex_rows(platform: str) -> tuple[Row, ...]:
    """FlexAttention: every position rule, softcap, masks and the LSE; on the CPU forward only (torch's limit)."""
    cpu = platform == "cpu"
    common: dict[str, Any] = {
        "head_dim": Range(1 if cpu else 16),
        "v_head_dim": Range(1 if cpu else 16),
        "group": True,
        "causal": ("none", "bottom_right", "top_left"),
        "window": Window(),
        "chunk": Range(0),
        "softcap": Range(0.0),
        "sinks": True,
        "mask": ("none", "bool", "additive"),
        "tree": True,
        "scale": True,
        "lse": True,
        "s_relation": EVERY_LENGTH,
        "cross": True,
        "misaligned": True,
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
    return (
        row(
            family="varlen",
            dtype=("float64", *FLOAT) if platform in ("cpu", "cuda") else FLOAT,
            head_dim=Range(1),
            v_head_dim=Range(1),
            group=True,
            causal=("none", "bottom_right", "top_left"),
            window=Window(),
            scale=True,
            lse=cpu,
            sinks=cpu,
            deterministic=cpu,
            grad=(*QKV, "sinks", "lse") if cpu else QKV,
            s_relation=EVERY_LENGTH,
            cross=True,
            misaligned=True,
            note="one SDPA call per sequence; lengths are read on the host",
        ),
    )


# Serving without speculation; a quantised cache is dequantised by pages.
SERVING: dict[str, Any] = {
    "when": {"kv_dtype": ("auto", *FLOAT, "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8")},
    "phase": ("prefill", "extend", "decode"),
    "dtype": FLOAT,
    "head_dim": Range(1),
    "v_head_dim": Range(1),
    "group": True,
    "causal": ("none", "bottom_right"),
    "scale": True,
    "s_relation": EVERY_LENGTH,
    "kv_dtype": ("auto", *FLOAT),
    "save_kv_cache": True,
}
DEQUANTISE = {"kv_dtype": "dequantise_kv", "kv_scales": "dequantise_kv"}


def _native_serving_rows() -> tuple[Row, ...]:
    """SDPA on gathered keys and values: every page size, windows, no speculation."""
    return (
        row(
            **SERVING,
            family="paged",
            page_size=Range(1),
            window=Window(),
            multimodal=True,
            cross=True,
            lowered=DEQUANTISE,
        ),
        row(**SERVING, family="mla", page_size=Range(1), lowered=DEQUANTISE, note="V is the first D_v of a latent row"),
    )


def _flex_serving_rows() -> tuple[Row, ...]:
    """FlexAttention on a cache read token by token, with the window, softcap and sinks it honours elsewhere too."""
    return (
        row(
            **{**SERVING, "head_dim": Range(16), "v_head_dim": Range(16)},
            family="paged",
            page_size=1,
            window=Window(),
            softcap=Range(0.0),
            sinks=True,
            lse=True,
            lowered={**DEQUANTISE, "page_size": "page_table_to_tokens"},
        ),
    )


def _reference_rows() -> tuple[Row, ...]:
    common: dict[str, Any] = {
        "dtype": ("float64", *FLOAT),
        "head_dim": Range(1),
        "v_head_dim": Range(1),
        "group": True,
        "causal": ("none", "bottom_right", "top_left"),
        "window": Window(),
        "chunk": Range(0),
        "softcap": Range(0.0),
        "sinks": True,
        "mask": ("none", "bool", "additive"),
        "tree": True,
        "scale": True,
        "lse": True,
        # Not batch_invariant: BLAS takes other kernels for other batch sizes, which shows in float64.
        "deterministic": True,
        "s_relation": EVERY_LENGTH,
        "cross": True,
        "multimodal": True,
        "zero_size": True,
        "misaligned": True,
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
    return (
        row(family="dense", grad=every_grad, transform=TRANSFORMS, dropout=DROPOUT, **common),
        row(family="varlen", grad=every_grad, dropout=DROPOUT, **common),
        row(
            family="paged",
            kv_layout=("", "NHD", "HND"),
            kv_dtype=("auto", "float64", *FLOAT, "fp8_e4m3", "fp8_e5m2"),
            kv_scales=("", "tensor", "head", "token"),
            **paged,
        ),
        row(family="mla", **{k: v for k, v in paged.items() if k not in ("sinks", "save_kv_cache")}),
    )


def _sdpa_rule(platform: str) -> tuple[AutoRule, ...]:
    whole = conditions(family="dense")
    return {
        "cpu": (AutoRule(390, "CPU: PyTorch SDPA", whole),),
        "cuda": (AutoRule(390, "CUDA: PyTorch SDPA where no FlashAttention is installed or fits", whole),),
        "rocm": (AutoRule(390, "ROCm: PyTorch SDPA where no FlashAttention is installed or fits", whole),),
        "xpu": (AutoRule(390, "XPU: PyTorch SDPA outside the limits of Intel's FlashAttention", whole),),
        "musa": (AutoRule(390, "MUSA: PyTorch SDPA where no FlashAttention is installed or fits", whole),),
        "mps": (AutoRule(300, "MPS: always PyTorch SDPA", whole),),
        "npu": (AutoRule(390, "NPU: PyTorch SDPA, FlashAttention only where a ring needs the LSE", whole),),
    }[platform]


def _native_rule(platform: str) -> tuple[AutoRule, ...]:
    return {
        "cpu": (
            AutoRule(190, "CPU without AMX kernels: torch_native", conditions(family="paged")),
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


def _backends(platform: str) -> Iterable[BackendInfo]:
    yield BackendInfo(
        "torch_sdpa",
        platform,
        (Provider("torch", _sdpa_rows(platform), "polyattn.backends.torch_sdpa:TorchSDPA", TORCH),),
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
            Provider("torch", _native_rows(platform), "polyattn.backends.torch_native:TorchNative", TORCH),
            Provider("torch-serving", _native_serving_rows(), "", TORCH),
        ),
        summary="SDPA sequence by sequence; serving on gathered KV",
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
                Provider("torch-serving", _flex_serving_rows(), "", TORCH),
            ),
            summary="PyTorch FlexAttention: window, softcap, sinks, tree and document masks",
            # On the CPU it is either compiled for half a minute or slower than the reference: by name only.
            priority=None if platform == "cpu" else 20,
            config=FLEX_OPTIONS,
            evidence="vendor code",
            upstream="torch",
        )
    yield BackendInfo(
        "reference",
        platform,
        (Provider("polyattn", _reference_rows(), "polyattn.backends.reference_backend:Reference", TORCH),),
        summary="the fp32/fp64 definition in plain PyTorch: everything, slowly",
        priority=-100 if platform == "cpu" else None,
        evidence="vendor code",
        upstream="polyattn",
    )


@hookimpl
def polyattn_register_platforms() -> Iterable[PlatformInfo]:
    return CORE_PLATFORMS


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    return [info for platform in PLATFORMS for info in _backends(platform)]
