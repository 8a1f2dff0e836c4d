"""This module makes an `AttentionRequest` of the flags of a question. It knows what is taken where a flag is not given,
and what fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..contract import FAMILIES, AttentionRequest
from ..errors import ConfigError
from ..registry.manager import get_manager
from .request_flags import given_fields, one_of

__all__ = ["ALIGNMENTS", "SCALES", "SERVING", "above_zero", "ask"]

SERVING = ("paged", "mla")
RELATIONS = {"prefill": "equal", "extend": "fewer", "decode": "one", "verify": "fewer"}
ALIGNMENTS = ("bottom_right", "top_left")
SCALES = ("", "tensor", "head", "token", "block128", "block16")
MLA_SCALE = 192**-0.5
"""The scale of the uncompressed heads of DeepSeek's models, 128 + 64 wide. Absorbed rows have no scale of their own
(S2)."""
PAGE_SIZE = 64
BLOCK_SHAPE = (64, 64)
ONE_KIND_OF_SCALES = {
    ("mla", "fp8_e4m3"): "block128",
    ("mla", "fp4_e2m1"): "block16",
    ("paged", "fp4_e2m1"): "block16",
}
"""Caches that are stored with one kind of scales only -> that kind, taken where --kv-scales is not given."""

VIDEO = {
    "sta": "sliding_tile_attn",
    "vsa": "video_sparse_attn",
    "vmoba": "vmoba_attn",
    "sla": "sla_attn",
    "sage_sla": "sage_sla_attn",
    "svg2": "sparse_video_gen_2_attn",
}
"""Short names of sparse video methods -> their backends."""

OF_FAMILIES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "KV cache": (SERVING, ("page_size", "kv_scales", "kv_layout", "kv_parts", "save_kv_cache", "chunked_prefix")),
    "block map": (("block_sparse",), ("block_map", "block_sizes", "block_starts", "block_shape")),
    "recurrent state": (
        ("linear",),
        ("state_dtype", "state_layout", "state_slots", "state_out", "raw_gates", "beta_range", "qk_norm"),
    ),
}
"""What only some families have -> those families, and the fields that are about it."""


def ask(flags: Mapping[str, Any], where: Mapping[str, Any] | None = None) -> AttentionRequest:
    """Make the request that a question describes.

    Args:
        flags: field -> what was typed, None = not given; and `mla` (short for family mla), `causal_alignment`, `role`
            and `grid`. causal and save_kv_cache are True, False or None. where: platform fields of the request
            (platform, arch, toolkit, features).

    Raises:
        ConfigError: a word that is not known (near match offered), or values that do not fit together.
    """
    given = given_fields({**flags, "causal": None})
    family = _family(given, mla=bool(flags.get("mla")))
    explicit = bool(flags.get("mla")) or "family" in given
    _check_family(given, family, "use" if explicit else "add")
    serving = family in SERVING
    phase = given.get("phase", "verify" if given.get("spec_topk") else "prefill")
    topk = given.get("spec_topk", 1 if phase == "verify" and serving else 0)
    tree = serving and phase == "verify" and topk > 1
    mask = given.get("mask", "none")
    head_dim, v_head_dim = _dims(given, family)
    heads, kv_heads = _heads(given, family)
    usual = {
        "layout": _layout(family),
        "kv_layout": "NHD" if family == "paged" else "",
        "page_size": PAGE_SIZE if serving else 0,
        "scale": MLA_SCALE if family == "mla" else None,
        "kv_scales": ONE_KIND_OF_SCALES.get((family, given.get("kv_dtype", "auto")), ""),
        **_usual_of_maps_and_states(given, family),
    }
    decided = {
        "family": family,
        # Phases are a word of serving; elsewhere they only say how many queries there are.
        "phase": "prefill" if family in ("dense", "varlen", "block_sparse") else phase,
        "s_relation": RELATIONS[phase],
        "spec_topk": topk,
        "tree": tree,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "causal": _causal(flags, default=serving),
        # A tree comes as a mask.
        "mask": "bool" if tree and mask == "none" else mask,
        "cross": given.get("cross", False) or _role(flags.get("role")) == "cross",
        "place": _placed(flags.get("grid"), family),
    }
    fields = {**usual, **given, **decided, **(where or {})}
    if family == "mla" and fields["kv_scales"] == "tensor":
        fields["kv_scales"] = ""  # of latent rows one scale is none that is stored, as `serve --kv-cache-scales` has it
    _check_gradients(flags.get("grad"), fields)
    return AttentionRequest(**fields)


def _role(word: str | None) -> str:
    return "" if word is None else str(one_of("--role", word, ("self", "cross")))


def _placed(text: str | None, family: str) -> bool:
    """Say whether the call has a place. Where exactly decides nothing of who serves it, and is checked all the same."""
    if text is None:
        return False
    if family != "dense":
        raise ConfigError(f"--grid is the place of a dense call, and this is {family}: leave one of them out")
    sizes = re.fullmatch(r"\s*(\d{1,18})\s*,\s*(\d{1,18})\s*,\s*(\d{1,18})\s*", text)
    if sizes is None or min(map(int, sizes.groups())) < 1:
        raise ConfigError(f"--grid {text!r} is not T,H,W: three numbers of tokens, 1 or more, such as 21,45,80")
    return True


def _family(given: Mapping[str, Any], *, mla: bool) -> str:
    family = given.get("family")
    if mla:
        if family not in (None, "mla"):
            raise ConfigError(f"--mla means --family mla, but --family {family} is given too: leave one out")
        return "mla"
    if family is not None:
        return str(family)
    return "paged" if {"page_size", "phase", "kv_dtype", "spec_topk"} & given.keys() else "dense"


def _check_family(given: Mapping[str, Any], family: str, how: str) -> None:
    """Check that no flag belongs to another family: that is a slip of the command line, not something for backends to
    refuse."""
    for what, (families, names) in OF_FAMILIES.items():
        typed = [_typed(name, given[name]) for name in names if name in given]
        if typed and family not in families:
            raise ConfigError(
                f"{', '.join(typed)}: family {family} has no {what} that this could be of: {how} --family "
                f"{' or '.join(families)}"
            )
    if given.get("block_starts") and not given.get("block_sizes"):
        raise ConfigError(
            "--block-starts says that packed blocks of keys lie anywhere: add --block-sizes, for blocks of any length"
        )
    if "layout" in given and family != "dense":
        raise ConfigError(f"--layout is for family dense; of {family} it is {_layout(family)}: leave it out")
    method = given.get("method")
    if (name := VIDEO.get(method or "")) is not None:
        raise ConfigError(
            f"--method {method} is a backend, which serves calls with a place: leave it out, and add "
            f"--attention-backend {name} --grid T,H,W"
        )
    homes = _homes(method) if method else []
    if homes and family not in homes:
        where, other = " or ".join(homes), "" if how == "add" else f", not of {family}"
        raise ConfigError(f"--method {method} is a method of {where}{other}: {how} --family {where}")


def _typed(name: str, value: Any) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def _homes(method: str) -> list[str]:
    """List the families that have a method, as the plugins that are here declare it; empty where no plugin knows it."""
    found = set()
    for info in get_manager().backends.values():
        for row in (row for provider in info.providers for row in provider.rows):
            said = {**row.when, **row.allows}
            # Only a row that lists methods is about them; one that takes any says nothing of where they belong.
            if method in getattr(said.get("method"), "values", ()):
                found |= {family for family in FAMILIES if "family" in said and not said["family"].reason(family)}
    return [family for family in FAMILIES if family in found]


def _usual_of_maps_and_states(given: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Give what calls of these families ask for where nothing is said: a map, or a state."""
    if family == "linear":
        return {"method": "gdn", "state_layout": "KV"}
    if family == "block_sparse":
        return {"block_map": True, "block_shape": BLOCK_SHAPE}
    return {}


def _dims(given: Mapping[str, Any], family: str) -> tuple[int, int]:
    """Give (D, D_v). Latent rows are 576 wide with 512 values (absorbed), or heads of 192 with 128 (uncompressed)."""
    head_dim = given.get("head_dim", 576 if family == "mla" else 128)
    usual = {576: 512, 192: 128}.get(head_dim, head_dim) if family == "mla" else head_dim
    return head_dim, given.get("v_head_dim", usual)


def _heads(given: Mapping[str, Any], family: str) -> tuple[int, int]:
    heads = given.get("heads", 128 if family == "mla" else 32)
    kv_heads = given.get("kv_heads", 1 if family == "mla" else heads)
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}: every key head serves as many")
    return heads, kv_heads


def _causal(flags: Mapping[str, Any], *, default: bool) -> str:
    causal = flags.get("causal")
    alignment = one_of("--causal-alignment", flags.get("causal_alignment") or "bottom_right", ALIGNMENTS)
    if causal is False and alignment != "bottom_right":
        raise ConfigError(f"--causal-alignment {alignment} and --no-causal exclude each other: leave one out")
    causal = causal if causal is not None else default or alignment != "bottom_right"
    return str(alignment) if causal else "none"


def _layout(family: str) -> str:
    """Give the layout of the calls of a family; dense calls may say another."""
    return "THD" if family in ("varlen", *SERVING) else "BHSD" if family == "block_sparse" else "BSHD"


def _check_gradients(typed: str | None, fields: Mapping[str, Any]) -> None:
    wanted = fields.get("grad", ())
    if "sinks" in wanted and not fields.get("sinks"):
        raise ConfigError(f"--grad {typed}: the call has no sinks; add --sinks, or leave them out")
    if "mask" in wanted and fields["mask"] != "additive":
        raise ConfigError(
            f"--grad {typed}: only a mask that is added has a gradient, and this is {fields['mask']}; add "
            f"--mask additive, or leave it out"
        )


def above_zero(flag: str, value: float) -> None:
    """Check that a number is above 0.

    Raises:
        ConfigError: it is none.
    """
    if not value > 0:
        raise ConfigError(f"{flag} {value:g}: give a number above 0")
