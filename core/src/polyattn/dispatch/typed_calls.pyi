"""The public calls as type checkers see them: what comes back depends on `return_lse`, and words are `Literal`s.

There is no module of this name when a program runs: `polyattn/__init__.py` takes its names from here while it is
checked, and from `dispatch.py`, `varlen.py` and `serving_calls.py` else, which say what each argument is.
"""

from collections.abc import Sequence
from typing import Generic, Literal, TypeAlias, TypedDict, TypeVar, overload

from torch import Tensor
from typing_extensions import Required, Unpack

from ..contract import KVPart, Place
from .call_key import Static

_Result = TypeVar("_Result", covariant=True)
_Both: TypeAlias = Tensor | tuple[Tensor, Tensor]
_Causal: TypeAlias = bool | Literal["top_left", "bottom_right"]
_Layout: TypeAlias = Literal["BSHD", "BHSD"]
_KVLayout: TypeAlias = Literal["NHD", "HND"]
_Segments: TypeAlias = Tensor | tuple[Tensor, Tensor]
_Role: TypeAlias = Literal["self", "cross"]

class _Options(TypedDict, total=False):
    causal: _Causal
    window: tuple[int, int]
    attn_mask: Tensor | None
    deterministic: bool
    batch_invariant: bool
    backend: str | None
    out: Tensor | None
    chunk: int

class _DenseOptions(_Options, total=False):
    scale: float | None
    softcap: float
    sinks: Tensor | None
    layout: _Layout
    dropout_p: float
    place: Place | None
    alibi: Tensor | None
    segments: _Segments | None

class _VarlenOptions(_Options, total=False):
    cu_seqlens_q: Required[Tensor]
    cu_seqlens_k: Required[Tensor]
    max_seqlen_q: Required[int]
    max_seqlen_k: Required[int]
    scale: float | None
    softcap: float
    sinks: Tensor | None
    dropout_p: float
    alibi: Tensor | None

class _Tables(_Options, total=False):
    page_table: Required[Tensor]
    seq_lens: Required[Tensor]
    cu_seqlens_q: Required[Tensor]
    max_seqlen_q: Required[int]
    max_seqlen_k: Required[int]
    kv_parts: Sequence[KVPart]
    tree: bool
    chunked_prefix: bool

class _PagedOptions(_Tables, total=False):
    key: Tensor | None
    value: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float | None
    softcap: float
    sinks: Tensor | None
    kv_layout: _KVLayout
    save_kv_cache: bool
    alibi: Tensor | None

class _LatentOptions(_Tables, total=False):
    v_head_dim: int
    token_indices: Tensor | None

class _BindOptions(TypedDict, total=False):
    causal: _Causal
    window: tuple[int, int]
    softcap: float
    scale: float | None
    layout: _Layout
    dropout_p: float
    deterministic: bool
    batch_invariant: bool
    role: _Role | None
    backend: str | None
    chunk: int

class BoundAttention(Generic[_Result]):
    """What `bind` returns: `attention` with everything bound but its tensors."""

    static: Static
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        place: Place | None = None,
        alibi: Tensor | None = None,
        segments: _Segments | None = None,
    ) -> _Result: ...

@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_DenseOptions]
) -> Tensor:
    """Softmax attention on dense tensors: [B, S, H, D], with `layout="BHSD"` [B, H, S, D] (docs/semantics.md)."""

@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[_DenseOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Unpack[_DenseOptions]
) -> _Both: ...
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_VarlenOptions]
) -> Tensor:
    """Softmax attention on sequences packed along one axis: [T, H, D] (docs/semantics.md)."""

@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[_VarlenOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Unpack[_VarlenOptions]
) -> _Both: ...
@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_PagedOptions],
) -> Tensor:
    """Attention of packed queries, [T_q, H_q, D], over a paged KV cache (docs/semantics.md, S9)."""

@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_PagedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *, return_lse: bool, **options: Unpack[_PagedOptions]
) -> _Both: ...
@overload
def mla_attention(
    query: Tensor,
    cache: Tensor,
    *,
    scale: float,
    return_lse: Literal[False] = False,
    **options: Unpack[_LatentOptions],
) -> Tensor:
    """Multi-head latent attention over a paged latent cache, absorbed form (docs/semantics.md, S2 and S9)."""

@overload
def mla_attention(
    query: Tensor, cache: Tensor, *, scale: float, return_lse: Literal[True], **options: Unpack[_LatentOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def mla_attention(
    query: Tensor, cache: Tensor, *, scale: float, return_lse: bool, **options: Unpack[_LatentOptions]
) -> _Both: ...
@overload
def bind(*, return_lse: Literal[False] = False, **options: Unpack[_BindOptions]) -> BoundAttention[Tensor]:
    """Bind the static arguments of `attention` once, for the hottest paths and for layers."""

@overload
def bind(*, return_lse: Literal[True], **options: Unpack[_BindOptions]) -> BoundAttention[tuple[Tensor, Tensor]]: ...
@overload
def bind(*, return_lse: bool, **options: Unpack[_BindOptions]) -> BoundAttention[_Both]: ...
