"""A sheet of random shapes, drawn from seeds: what no kernel and no rule can have been fitted to.

    python benchmarks/random_sheet.py 2026 --out random-2026.yaml      # 6 rows of each family, of each seed
    polyattn bench random-2026.yaml --peers benchmarks/peers --tune

Sheets of models are samples, and users are not. Here are groups of 3, 5, 6, 7 and 12 query heads for a key head,
ragged packed prompts, short full attention as encoders have it, windows at decode, head dims of 72, 80 and 96, and new
tokens, batches and lengths that are no power of two. The same seed gives the same sheet; of another one no shape is
known before it is drawn, so that a claim about shapes is tried on a new seed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

__all__ = ["FAMILIES", "drawn"]

GROUPS = (3, 5, 6, 7, 12)
ODD_DIMS = (72, 80, 96)
_TOKENS = 1 << 18
"""Keys of all sequences together, at most: with 8 key heads of 128 they are 1 GiB in 16 bits."""

Draw = Callable[[random.Random], dict[str, Any]]


def _length(chance: random.Random, low: int, high: int) -> int:
    """A whole number, as likely between 100 and 200 as between 1,000 and 2,000."""
    return min(max(round(low * (high / low) ** chance.random()), low), high)


def _heads(
    chance: random.Random, dims: tuple[int, ...] = (64, 128), groups: tuple[int, ...] = GROUPS
) -> dict[str, int]:
    group, kv_heads = chance.choice(groups), chance.choice((1, 2, 4, 8))
    return {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": chance.choice(dims)}


def _sized(chance: random.Random, most: int, low: int, high: int) -> dict[str, int]:
    """A length, and a batch of it that fits."""
    length = _length(chance, low, high)
    return {"batch": _length(chance, 1, max(min(most // length, 256), 1)), "q_len": length}


def _cached(chance: random.Random, low: int = 64) -> dict[str, int]:
    made = _sized(chance, _TOKENS, low, 40_000)
    return {"batch": made["batch"], "kv_len": made["q_len"], "page_size": chance.choice((1, 16, 64, 128))}


def _extend(chance: random.Random) -> dict[str, Any]:
    new = _length(chance, 3, 600)
    return {**_heads(chance, groups=(1, 4, *GROUPS)), **_cached(chance, 1024), "q_len": new}


def _ragged(chance: random.Random) -> dict[str, Any]:
    """One long sequence, and many short ones, some of one token."""
    short = [chance.choice((1, _length(chance, 2, 300))) for _ in range(chance.randrange(8, 100))]
    long = _length(chance, 2_000, 20_000)
    return {**_heads(chance), "lengths": chance.sample([*short, long], len(short) + 1), "causal": chance.random() < 0.7}


def _latent(chance: random.Random) -> dict[str, Any]:
    batch = _length(chance, 1, 64)
    length = _length(chance, 100, min(_TOKENS // batch, 20_000))
    heads = chance.choice((16, 24, 40, 64, 96, 128))
    return {
        "heads": heads, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "batch": batch, "q_len": 1, "kv_len": length,
        "page_size": 64, "kv_dtype": chance.choice(("auto", "auto", "fp8_e4m3")),
    }  # fmt: skip


FAMILIES: dict[str, tuple[str, Draw]] = {
    "random_prefill": (
        "dense", lambda chance: {**_heads(chance), **_sized(chance, 32_768, 500, 16_384), "causal": True}
    ),
    "random_short": (
        "dense",
        lambda chance: {
            **_heads(chance, groups=(1, *GROUPS)), "q_len": _length(chance, 128, 1024),
            "batch": _length(chance, 8, 64), "causal": False,
        },
    ),
    "random_head_dims": (
        "dense",
        lambda chance: {
            **_heads(chance, ODD_DIMS, (1, 4, *GROUPS)), **_sized(chance, 16_384, 300, 8_192),
            "causal": chance.random() < 0.5,
        },
    ),
    "random_packed": ("packed", _ragged),
    "random_extend": ("paged", _extend),
    "random_decode": ("paged", lambda chance: {**_heads(chance), **_cached(chance), "q_len": 1}),
    "random_decode_fp8": (
        "paged", lambda chance: {**_heads(chance), **_cached(chance), "q_len": 1, "kv_dtype": "fp8_e4m3"}
    ),
    "random_decode_windows": (
        "paged",
        lambda chance: {
            **_heads(chance, (64, 128, *ODD_DIMS)), **_cached(chance, 1024), "q_len": 1,
            "window": [_length(chance, 100, 4_096), 0],
        },
    ),
    "random_latent": ("latent", _latent),
    "random_training": (
        "training",
        lambda chance: {
            **_heads(chance, (64, 96, 128), (1, *GROUPS)), **_sized(chance, 16_384, 500, 8_192),
            "causal": chance.random() < 0.7,
        },
    ),
}  # fmt: skip
"""Family -> kind of its rows, and what draws one."""
_BARS: dict[str, dict[str, Any]] = {
    "choice of sizes unseen": {"of": ["*"], "who": "unseen", "than": "best_candidate", "geomean": 0.97},
    "tuned choice": {"of": ["*"], "who": "tuned", "than": "best_candidate", "geomean": 0.99},
    "our kernels over the fastest library": {
        "of": [name for name in FAMILIES if name != "random_training"], "who": "polyattn/triton", "than": "best_peer",
        "geomean": 1.0,
    },
    "our training over the fastest library": {
        "of": ["random_training"], "who": "polyattn/triton", "than": "best_peer", "geomean": 0.8, "stretch": 0.9,
    },
}  # fmt: skip


def drawn(seeds: Sequence[int], rows: int, names: Collection[str] = FAMILIES.keys()) -> dict[str, Any]:
    """The sheet of seeds, with so many rows of each named family and seed; more rows are the same and further ones."""
    families: dict[str, Any] = {}
    for name in names:
        kind, draw = FAMILIES[name]
        found: list[dict[str, Any]] = []
        for seed in seeds:
            chance, most = random.Random(f"{seed} {name}"), len(found) + rows
            of = {"model": f"seed {seed}", "source": f"drawn from seed {seed}"}
            while len(found) < most:
                row = draw(chance)
                if not any(row.items() <= other.items() for other in found):
                    found.append({**row, **of})
        families[name] = {"kind": kind, "rows": found}
    named = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    whole = {name: [one for one in bar["of"] if one in ("*", *names)] for name, bar in _BARS.items()}
    bars = [{"name": name, **bar, "of": whole[name]} for name, bar in _BARS.items() if whole[name]]
    return {"title": f"Random shapes, {named}", "families": families, "bars": bars}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+", metavar="SEED")
    parser.add_argument("--rows", type=int, default=6, metavar="N", help="rows of each family and seed (default: 6)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the sheet, a .yaml file")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, metavar="NAME", help=f"of {', '.join(FAMILIES)}")
    args = parser.parse_args()
    if args.rows < 1:
        parser.error(f"--rows {args.rows}: give 1 or more")
    sheet = drawn(args.seeds, args.rows, args.families or FAMILIES)
    text = yaml.safe_dump(sheet, sort_keys=False, default_flow_style=None, width=120)
    args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
