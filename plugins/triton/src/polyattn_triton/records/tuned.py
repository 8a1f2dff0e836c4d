"""Kernels whose choices can be measured (docs/tuning.md), and what the choices may be. Without a measurement the tables
beside the kernels serve.

Keys hold nothing of the batch: a choice must not make a sequence's results depend on what else is computed with it.
"""

from __future__ import annotations

from polyattn.contract import Kernel

__all__ = [
    "BACKWARD",
    "BLOCK_SPARSE",
    "DECODE",
    "EXTEND",
    "FORWARD",
    "HOPPER_EXTEND",
    "KERNELS",
    "LATENT",
]

_VERSIONS = ("polyattn-triton", "triton")
_CACHE = ("dtype", "kv_bits", "head_dim", "v_dim")
"""Of a paged cache: the query's dtype, bits of a stored number, D and D_v."""

DECODE = Kernel(
    "triton.decode",
    key=(*_CACHE, "rows"),
    choices={
        "N": (16, 32, 64, 128),
        "warps": (2, 4, 8),
        "stages": (1, 2, 3, 4),
        "resident": (1, 2, 3, 4),
        "least": (1, 2, 4, 8),
    },
    versions=_VERSIONS,
)
"""`rows`: of a tile, queries times heads of a group. Choices: of `kernels.decode.Config`."""

EXTEND = Kernel(
    "triton.extend",
    key=(*_CACHE, "page_size", "boxes", "mask", "few"),
    choices={
        "M": (16, 32, 64, 128),
        "N": (32, 64, 128),
        "warps": (4, 8),
        "stages": (1, 2, 3, 4),
        "split": (False, True),
        "box": (False, True),
    },
    versions=_VERSIONS,
)
"""`boxes`: whether rows are such that tensor descriptors can read them. `mask`: "" | "tree" | "bool" | "additive".
`few`: mostly empty tiles. Choices: of `kernels.extend.Config`."""

LATENT = Kernel(
    "triton.latent",
    key=("dtype", "latent_dim", "rope_dim", "rows", "additive"),
    choices={
        "keys": (16, 32, 64, 128),
        "warps": (4, 8),
        "stages": (1, 2, 3),
        "least": (1, 2, 4),
    },
    versions=_VERSIONS,
)
"""`rows`: of a tile, (token, head) pairs. `additive`: there is a mask that is added. Choices: of
`kernels.latent.Config`."""

HOPPER_EXTEND = Kernel(
    "triton.hopper_extend",
    key=("dtype", "head_dim", "page_size", "group"),
    choices={
        "keys": (64, 128),
        "stages": (2, 3),
        "turns": (False, True),
        "registers": (152, 160, 216, 224, 232, 240),
        "warpgroups": (2, 3),
        "overlap": (False, True),
    },
    versions=_VERSIONS,
)
"""`page_size`: 0 of packed keys. Choices: of `hopper.extend.Config`."""

FORWARD = Kernel(
    "triton.forward",
    key=("dtype", "head_dim", "v_dim", "few", "loose"),
    choices={
        "m": (16, 32, 64, 128),
        "n": (32, 64, 128),
        "warps": (4, 8),
        "stages": (1, 2, 3, 4),
        "tma": (False, True),
    },
    versions=_VERSIONS,
)
"""`few`: rows of a tile where queries are few, else 0. `loose`: rows that do not start at 16 bytes. Choices: of
`kernels.forward.Config`."""

BACKWARD = Kernel(
    "triton.backward",
    key=("dtype", "head_dim", "v_dim"),
    choices={
        "m": (32, 64, 128),
        "n": (32, 64, 128),
        "warps": (4, 8),
        "stages": (1, 2, 3, 4),
        "keys_m": (32, 64, 128),
        "keys_n": (32, 64, 128),
        "keys_warps": (4, 8),
        "keys_stages": (1, 2, 3, 4),
        "tma": (False, True),
    },
    versions=_VERSIONS,
)
"""Choices: of `kernels.backward.Config`."""

BLOCK_SPARSE = Kernel(
    "triton.block_sparse",
    key=("kernel", "dtype", "head_dim", "block_q", "block_k"),
    choices={"m": (16, 32, 64, 128), "n": (16, 32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3, 4)},
    versions=_VERSIONS,
)
"""`kernel`: forward, query or key. Choices: of `kernels.block_sparse.Tiles`; no tile is larger than a block."""

KERNELS = (DECODE, EXTEND, LATENT, HOPPER_EXTEND, FORWARD, BACKWARD, BLOCK_SPARSE)
