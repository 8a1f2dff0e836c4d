"""What the backend `template` is and can do, as data.

This module is read on every machine, also to answer what would be chosen elsewhere. It imports neither torch nor a
vendor's library.
"""

from __future__ import annotations

from collections.abc import Iterable

from polyattn.contract import BackendInfo, Provider, Range, hookimpl, row

POLYATTN_API_VERSION = 2

PLATFORM = "cpu"

# A row lists every field of the request that the kernel honours, and its values. What it leaves out never reaches the
# kernel. Rows are alternatives: add one for each family, or for limits that hold together.
ROWS = (
    row(
        family="dense",
        dtype=("float32", "bfloat16", "float16"),
        head_dim=Range(8, 256, multiple_of=8),
        causal=("none", "bottom_right"),
        scale=True,
        lse=True,
        s_relation=("equal", "one", "fewer"),
    ),
)


@hookimpl
def polyattn_register_backends() -> Iterable[BackendInfo]:
    """The backend, its one provider and what that can serve."""
    # A vendor's library that must be installed goes into the provider's `requires`, with what to do when it is missing.
    provider = Provider(
        "template",
        ROWS,
        target="polyattn_template.kernel:Adapter",
    )
    yield BackendInfo(
        "template",
        PLATFORM,
        (provider,),
        summary="tiled attention with an online softmax, in plain PyTorch",
    )
