"""From the words of a command line to an `AttentionRequest`: defaults per family, and what a word may be."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..contract import FAMILIES, PHASES, AttentionRequest
from ..contract.vocabulary import DTYPE_WORDS, WORDS
from ..errors import ConfigError, did_you_mean
from ..registry.manager import get_manager
from ..selection.config import KV_CACHE_DTYPES

__all__ = ["QUERY_DTYPES", "SCALES", "Question", "above_zero", "ask", "one_of"]

QUERY_DTYPES = DTYPE_WORDS
SERVING = ("paged", "mla")
RELATIONS = {"prefill": "equal", "extend": "fewer", "decode": "one", "verify": "fewer"}
ALIGNMENTS = ("bottom_right", "top_left")
SCALES = ("", "tensor", "head", "token", "block128", "block16")
RECORDINGS: Mapping[str, Any] = {"none": False, "call": True, "session": "session"}
MLA_SCALE = 192**-0.5
"""Of the uncompressed heads of DeepSeek's models, 128 + 64 wide: absorbed rows have no scale of their own (S2)."""
PAGE_SIZE = 64
VIDEO = {
    "sta": "sliding_tile_attn",
    "vsa": "video_sparse_attn",
    "vmoba": "vmoba_attn",
    "sla": "sla_attn",
    "sage_sla": "sage_sla_attn",
    "svg2": "sparse_video_gen_2_attn",
}
"""Short names of sparse video methods -> their backends."""
ONE_KIND_OF_SCALES = {("mla", "fp8_e4m3"): "block128", ("paged", "fp4_e2m1"): "block16"}
"""Of caches that are stored with no other: what is meant where --kv-scales is not given."""


@dataclasses.dataclass(frozen=True)
class Question:
    """The flags of `explain` as typed; None = not given."""

    family: str | None = None
    phase: str | None = None
    dtype: str = "bf16"
    kv_dtype: str | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    page_size: int | None = None
    causal: bool | None = None
    causal_alignment: str = "bottom_right"
    layout: str | None = None
    window: str | None = None
    softcap: float = 0.0
    sinks: bool = False
    spec_topk: int | None = None
    mla: bool = False
    scale: float | None = None
    mask: str = "none"
    lse: bool = False
    grad: str | None = None
    cross: bool = False
    role: str | None = None
    grid: str | None = None
    dropout: float = 0.0
    deterministic: bool = False
    graph_capture: str = "none"
    multimodal: bool = False
    chunked_prefix: bool = False
    save_kv_cache: bool | None = None
    kv_scales: str | None = None
    method: str | None = None


def ask(question: Question, where: Mapping[str, Any] | None = None) -> AttentionRequest:
    """The request a question describes.

    Args:
        question: the flags. where: platform fields of the request (platform, arch, toolkit, features).

    Raises:
        ConfigError: a word that is not known (near match offered), or numbers that do not fit together.
    """
    family = _family(question)
    _check_family(question, family)
    phase = one_of("--phase", question.phase or ("verify" if question.spec_topk else "prefill"), PHASES)
    serving = family in SERVING
    head_dim, v_head_dim = _dims(question, family)
    heads, kv_heads = _heads(question, family)
    kv_dtype = one_of("--kv-dtype", question.kv_dtype or "auto", KV_CACHE_DTYPES)
    topk = question.spec_topk if question.spec_topk is not None else (1 if phase == "verify" and serving else 0)
    tree = serving and phase == "verify" and topk > 1
    fields: dict[str, Any] = {
        "family": family,
        # Phases are a word of serving; elsewhere they only say how many queries there are.
        "phase": "prefill" if family in ("dense", "varlen", "block_sparse") else phase,
        "s_relation": RELATIONS[phase],
        "dtype": one_of("--dtype", question.dtype, QUERY_DTYPES),
        "kv_dtype": kv_dtype,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "layout": _layout(question.layout, family),
        "kv_layout": "NHD" if family == "paged" else "",
        "page_size": _at_least("--page-size", question.page_size, 1) or (PAGE_SIZE if serving else 0),
        "causal": _causal(question, default=serving),
        "window": _window(question.window),
        "softcap": _not_negative("--softcap", question.softcap),
        "sinks": question.sinks,
        "spec_topk": _at_least("--spec-topk", topk, 0),
        "tree": tree,
        "scale": MLA_SCALE if question.scale is None and family == "mla" else _finite("--scale", question.scale),
        # A tree comes as a mask.
        "mask": one_of("--mask", "bool" if tree and question.mask == "none" else question.mask, WORDS["mask"]),
        "lse": question.lse,
        "grad": _gradients(question),
        "cross": question.cross or _role(question.role) == "cross",
        "place": _placed(question.grid, family),
        "dropout": _probability("--dropout", question.dropout),
        "deterministic": question.deterministic,
        "graph_capture": RECORDINGS[one_of("--graph-capture", question.graph_capture, tuple(RECORDINGS))],
        "multimodal": question.multimodal,
        "chunked_prefix": question.chunked_prefix,
        "save_kv_cache": question.save_kv_cache,
        "kv_scales": one_of("--kv-scales", question.kv_scales, SCALES[1:])
        if question.kv_scales
        else ONE_KIND_OF_SCALES.get((family, kv_dtype), ""),
        "method": question.method or ("gdn" if family == "linear" else ""),
        **(where or {}),
    }
    return AttentionRequest(**fields)


def _family(question: Question) -> str:
    if question.mla:
        if question.family not in (None, "mla"):
            raise ConfigError(f"--mla means --family mla, but --family {question.family} is given too: leave one out")
        return "mla"
    if question.family is not None:
        return one_of("--family", question.family, FAMILIES)
    given = (question.page_size, question.phase, question.kv_dtype, question.spec_topk)
    return "paged" if any(value is not None for value in given) else "dense"


def _check_family(question: Question, family: str) -> None:
    """What belongs to other families is a slip of the command line, not something that backends refuse."""
    how = "use" if question.mla or question.family is not None else "add"
    of_caches = {
        "--page-size": question.page_size is not None,
        "--kv-scales": question.kv_scales is not None,
        "--save-kv-cache": question.save_kv_cache is True,
        "--no-save-kv-cache": question.save_kv_cache is False,
        "--chunked-prefix": question.chunked_prefix,
    }
    if family not in SERVING and (given := [flag for flag, there in of_caches.items() if there]):
        raise ConfigError(
            f"{', '.join(given)}: family {family} has no KV cache that this could be of: {how} --family "
            f"{' or '.join(SERVING)}"
        )
    if (name := VIDEO.get(question.method or "")) is not None:
        raise ConfigError(
            f"--method {question.method} is a backend, which serves calls with a place: leave it out, and add "
            f"--attention-backend {name} --grid T,H,W"
        )
    homes = _homes(question.method) if question.method else []
    if homes and family not in homes:
        where, other = " or ".join(homes), "" if how == "add" else f", not of {family}"
        raise ConfigError(f"--method {question.method} is a method of {where}{other}: {how} --family {where}")


def _homes(method: str) -> list[str]:
    """The families that have a method, as the plugins that are here declare it; empty where none knows it."""
    found = set()
    for info in get_manager().backends.values():
        for row in (row for provider in info.providers for row in provider.rows):
            said = {**row.when, **row.allows}
            # Only a row that lists methods is about them; one that takes any says nothing of where they belong.
            if method in getattr(said.get("method"), "values", ()):
                found |= {family for family in FAMILIES if "family" in said and not said["family"].reason(family)}
    return [family for family in FAMILIES if family in found]


def _dims(question: Question, family: str) -> tuple[int, int]:
    """(D, D_v). MLA: absorbed rows of 576 with 512 values, or the uncompressed heads of 192 with 128."""
    head_dim = _at_least("--head-dim", question.head_dim, 1) or (576 if family == "mla" else 128)
    usual = {576: 512, 192: 128}.get(head_dim, head_dim) if family == "mla" else head_dim
    return head_dim, _at_least("--v-head-dim", question.v_head_dim, 1) or usual


def _heads(question: Question, family: str) -> tuple[int, int]:
    heads = _at_least("--heads", question.heads, 1) or (128 if family == "mla" else 32)
    kv_heads = _at_least("--kv-heads", question.kv_heads, 1) or (1 if family == "mla" else heads)
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}: every key head serves as many")
    return heads, kv_heads


def _causal(question: Question, *, default: bool) -> str:
    alignment = one_of("--causal-alignment", question.causal_alignment, ALIGNMENTS)
    if question.causal is False and alignment != "bottom_right":
        raise ConfigError(f"--causal-alignment {alignment} and --no-causal exclude each other: leave one out")
    causal = question.causal if question.causal is not None else default or alignment != "bottom_right"
    return alignment if causal else "none"


def _layout(word: str | None, family: str) -> str:
    """That of the calls of a family; those of dense attention may say it."""
    usual = "THD" if family in ("varlen", *SERVING) else "BHSD" if family == "block_sparse" else "BSHD"
    if word is None:
        return usual
    if family != "dense":
        raise ConfigError(f"--layout is for family dense; of {family} it is {usual}: leave it out")
    return one_of("--layout", word, ("BSHD", "BHSD"))


def _window(text: str | None) -> tuple[int, int]:
    if text is None:
        return (-1, -1)
    match = re.fullmatch(r"\s*(-?\d+)\s*,\s*(-?\d+)\s*", text)
    if match is None or min(int(match[1]), int(match[2])) < -1:
        raise ConfigError(
            f"--window {text!r} is not left,right: two whole numbers of keys besides the row's own, -1 = no bound. A "
            f"model's sliding window of 128 tokens is --window 127,0"
        )
    return (int(match[1]), int(match[2]))


def _role(word: str | None) -> str:
    return "" if word is None else one_of("--role", word, ("self", "cross"))


def _placed(text: str | None, family: str) -> bool:
    """Whether the call has a place. Where exactly decides nothing of who serves it, and is checked all the same."""
    if text is None:
        return False
    if family != "dense":
        raise ConfigError(f"--grid is the place of a dense call, and this is {family}: leave one of them out")
    sizes = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*", text)
    if sizes is None or min(map(int, sizes.groups())) < 1:
        raise ConfigError(f"--grid {text!r} is not T,H,W: three numbers of tokens, 1 or more, such as 21,45,80")
    return True


def _gradients(question: Question) -> tuple[str, ...]:
    names = [part.strip() for part in (question.grad or "").split(",") if part.strip()]
    wanted = tuple(one_of("--grad", name, WORDS["grad"]) for name in names)
    if "sinks" in wanted and not question.sinks:
        raise ConfigError(f"--grad {question.grad}: the call has no sinks; add --sinks, or leave them out")
    if "mask" in wanted and question.mask != "additive":
        raise ConfigError(
            f"--grad {question.grad}: only a mask that is added has a gradient, and this is {question.mask}; add "
            f"--mask additive, or leave it out"
        )
    return wanted


def one_of(flag: str, word: str, known: Iterable[str]) -> str:
    """`word`, or what it stands for where `known` is a mapping."""
    words = list(known)
    if word not in words:
        raise ConfigError(f"{flag} {word!r} is not known.{did_you_mean(word, words)} Allowed: {', '.join(words)}")
    return known[word] if isinstance(known, Mapping) else word


def above_zero(flag: str, value: float) -> None:
    """
    Raises:
        ConfigError: it is none.
    """
    if not value > 0:
        raise ConfigError(f"{flag} {value:g}: give a number above 0")


def _at_least(flag: str, value: int | None, low: int) -> int:
    if value is not None and value < low:
        raise ConfigError(f"{flag} {value} is too small: give a whole number, {low} or more")
    return value or 0


def _finite(flag: str, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{flag} {value:g} is no finite number")
    return value


def _not_negative(flag: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{flag} {value:g} is not a number of 0 (off) or more")
    return value


def _probability(flag: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ConfigError(f"{flag} {value:g} is no probability below 1: give 0 (off) to 0.999")
    return value
