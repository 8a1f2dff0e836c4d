"""AttentionRequest: everything that decides whether a backend can serve a call and how fast. No tensors.

Numbers S1..S12 refer to docs/semantics.md. Every field carries how it is judged:

- `required`: a capability row must constrain it, whatever its value;
- `option`: a row must constrain it as soon as it leaves its *off* value (S12: a backend that does not
  declare an option cannot be given it, so an option added later is refused by every older backend);
- `context`: judged only by rows, rules and `when` clauses that mention it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Literal, get_args

__all__ = [
    "DTYPES",
    "FAMILIES",
    "PHASES",
    "AttentionRequest",
    "Causal",
    "Family",
    "Field",
    "MaskKind",
    "Phase",
    "SRelation",
    "Segments",
    "option",
    "relation",
    "request_fields",
]

Family = Literal["dense", "varlen", "paged", "mla", "block_sparse", "linear"]
Phase = Literal["prefill", "extend", "decode", "verify"]
Causal = Literal["none", "bottom_right", "top_left"]
MaskKind = Literal["none", "bool", "additive"]
SRelation = Literal["equal", "one", "fewer", "more"]
Segments = Literal["", "shared", "pair"]

FAMILIES: tuple[str, ...] = get_args(Family)
PHASES: tuple[str, ...] = get_args(Phase)
DTYPES: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8")

_NO_OFF = object()
_NORMAL = "_normal"
"""An attribute of requests that are in normal form."""


def relation(S_q: int, S_k: int) -> SRelation:
    """`AttentionRequest.s_relation` of two lengths."""
    return "equal" if S_q == S_k else "one" if S_q == 1 else "fewer" if S_q < S_k else "more"


def required(*, doc: str, **kw: Any) -> Any:
    return dataclasses.field(metadata={"kind": "required", "doc": doc}, **kw)


def option(default: Any, *, doc: str, off: Any = _NO_OFF) -> Any:
    """A request field that a backend must declare before it may be given a value other than `off`.

    `off` is a value, or a predicate of the request (default: equal to `default`).
    """
    return dataclasses.field(
        default=default, metadata={"kind": "option", "off": default if off is _NO_OFF else off, "doc": doc}
    )


def context(default: Any, *, doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"kind": "context", "doc": doc})


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """What one call asks for, without its tensors. Frozen and hashable; build it in normal form (`normalised`).

    Example:
        >>> AttentionRequest(dtype="bfloat16", head_dim=128, heads=32, kv_heads=8, causal="bottom_right").group
        4
    """

    family: Family = required(default="dense", doc="dense, varlen, paged, mla, block_sparse or linear")
    dtype: str = required(default="bfloat16", doc="dtype of q, and of k and v unless kv_dtype says otherwise")
    head_dim: int = required(default=128, doc="D_qk; 576 for absorbed MLA")
    phase: Phase = option("prefill", doc="prefill, extend, decode or verify (serving)")

    platform: str = context("cpu", doc="cuda, rocm, xpu, musa, npu, mps, cpu or a plugin's own")
    arch: str = context("", doc="sm90, gfx942, ...; empty when unknown")
    toolkit: tuple[int, ...] = context((), doc="version of the device's toolkit (CUDA, ROCm, ...); () when unknown")
    features: tuple[str, ...] = context((), doc="machine features such as amx, xmx")
    heads: int = context(1, doc="H_q")
    kv_heads: int = context(1, doc="H_kv, a divisor of H_q")
    layout: str = context("BSHD", doc="S1: BSHD or BHSD (views of each other), THD for packed families")

    kv_dtype: str = option("auto", off=lambda r: r.kv_dtype in ("auto", r.dtype), doc="S9: dtype of the KV cache")
    v_head_dim: int = option(0, off=lambda r: r.v_head_dim in (0, r.head_dim), doc="D_v; 0 = D_qk")
    causal: Causal = option("none", doc="S3: alignment of the causal mask")
    window: tuple[int, int] = option((-1, -1), doc="S4: (left, right) inclusive, -1 unlimited")
    chunk: int = option(0, doc="S4: chunked-local attention, block length; 0 = off")
    softcap: float = option(0.0, doc="S5: logit cap; 0 = off")
    sinks: bool = option(False, doc="S5: per-head sink logits in the denominator")
    mask: MaskKind = option("none", doc="S8: bool (True = attend) or additive")
    alibi: bool = option(False, doc="S8: per-head ALiBi slopes")
    segments: Segments = option("", doc="S8: documents of tokens: shared by queries and keys, or a pair")
    tree: bool = option(False, doc="S8: tree mask of speculative verification")
    scale: float | None = option(None, doc="S2: None = D_qk ** -0.5, applied to fp32 logits")
    dropout: float = option(0.0, doc="S11: probability of dropping an attention weight")
    lse: bool = option(False, doc="S6: natural-log fp32 LSE wanted beside the output")
    grad: tuple[str, ...] = option((), doc="gradients wanted: query, key, value, mask, sinks, lse (through the LSE)")
    deterministic: bool = option(False, doc="same bits on every run")
    batch_invariant: bool = option(False, doc="same bits whatever else is in the batch")
    graph_capture: bool | Literal["session"] = option(
        False, doc="recorded into a device graph: True = the call by itself, session = as a layer of a planned step"
    )
    s_relation: SRelation = option("equal", doc="S_q against S_k: equal, one (one query), fewer, more")
    cross: bool = option(False, doc="cross-attention: keys are another sequence's")
    multimodal: bool = option(False, doc="the model has multimodal towers served by this family")

    page_size: int = option(0, doc="S9: tokens per KV page; 0 = not paged")
    kv_layout: str = option("", off=lambda r: r.kv_layout in ("", "NHD"), doc="S9: NHD, HND, vectorised, NZ")
    kv_scales: str = option("", doc="S9: granularity of the KV scales: tensor, head, token, block16, block128")
    save_kv_cache: bool | None = option(None, doc="S9: new K/V are given, and written if True; None: none are given")
    kv_parts: int = option(0, doc="S9: groups of further keys (shared prefixes, split KV); the call's own not counted")
    spec_topk: int = option(0, doc="speculation: 0 none, 1 chain, more = tree")
    chunked_prefix: bool = option(False, doc="prefix attended in chunks and merged")
    token_topk: int = option(0, doc="S9: tokens listed for each query, which sees no others; 0 = no lists")

    method: str = option("", doc="linear: the rule (gdn, kda); paged: dual_chunk")
    block_map: bool = option(False, doc="S8: block map given as a typed input")
    block_sizes: bool = option(False, doc="S8: per-block valid sizes given")
    block_starts: bool = option(False, doc="S8: key blocks say at which key they start, for each head")
    block_shape: tuple[int, int] = option((0, 0), doc="S8: tokens of a block, (block_q, block_k); (0, 0): no map")
    state_dtype: str = option("", off=lambda r: r.state_dtype in ("", "float32"), doc="S10: linear state dtype")
    state_layout: str = option("", doc="S10: KV or VK")
    state_slots: bool = option(False, doc="S10: states are in slots of a pool, which the call updates in place")
    state_out: str = option("", doc="S10: which states come back: every = after each draft token; empty = the last")
    raw_gates: str = option("", doc="S10: gates are computed in the call: softplus or bounded; empty = they are given")
    beta_range: int = option(1, doc="S10: betas computed from raw gates are from 0 to this, 1 or 2")
    qk_norm: bool = option(False, doc="S10: rows of queries and keys are divided by their lengths first")

    zero_size: bool = option(False, doc="a tensor has no elements")
    large: bool = option(False, doc="a tensor has 2**31 elements or more")
    misaligned: bool = option(False, doc="a tensor, or a row of a strided one, is off a 16-byte boundary")
    transform: str = option(
        "", doc="around the call: the last of functionalize, vmap, grad, gradgrad, jvp; or subclass"
    )

    place: bool = context(False, doc="a place is given: where in a model the call is, which methods need")

    options: tuple[tuple[str, Hashable], ...] = context((), doc="validated options of the chosen backend")

    q_bucket: int = context(0, doc="tuning only: S_q rounded up, to one of four steps between powers of two")
    k_bucket: int = context(0, doc="tuning only: S_k rounded up, to one of four steps between powers of two")
    batch_bucket: int = context(0, doc="tuning only: B, N or T_q / max S_q, rounded up as S_q is")

    # Derived values, usable in capability rows, rules and `when` clauses like fields.

    @property
    def group(self) -> int:
        """GQA group: H_q / H_kv."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def dims(self) -> tuple[int, int]:
        """(D_qk, D_v)."""
        return (self.head_dim, self.v_head_dim or self.head_dim)

    @property
    def same_dims(self) -> bool:
        """Whether K and V rows have one width."""
        return self.v_head_dim in (0, self.head_dim)

    @property
    def kv_storage(self) -> str:
        """dtype the KV cache is stored in."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def softmax_scale(self) -> float:
        """The factor on the logits (S2), for adapters: `scale`, or its default. Rows and rules speak of `scale`."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def normalised(self) -> AttentionRequest:
        """The same meaning with one spelling, so that equal requests share a choice and rows stay short.

        With S_q = S_k both alignments are the same; one query at the end sees every key, so causal says nothing;
        a right bound of 0 is causal; under causal a right bound says nothing; the default scale is None.
        """
        if _NORMAL in vars(self):
            return self
        causal, (left, right) = self.causal, self.window
        if causal == "top_left" and self.s_relation == "equal":
            causal = "bottom_right"
        if right == 0 and causal == "none":
            causal, right = "bottom_right", -1
        if causal != "none" and right >= 0:
            right = -1
        if self.s_relation == "one" and causal == "bottom_right":
            causal = "none"
        scale = None if self.scale == self.head_dim**-0.5 else self.scale
        v_head_dim = self.v_head_dim or self.head_dim
        kv_dtype = "auto" if self.kv_dtype == self.dtype else self.kv_dtype
        spelled = (causal, (left, right), scale, v_head_dim, kv_dtype)
        found = self
        if spelled != (self.causal, self.window, self.scale, self.v_head_dim, self.kv_dtype):
            names = ("causal", "window", "scale", "v_head_dim", "kv_dtype")
            found = changed(self, **dict(zip(names, spelled, strict=True)))
        vars(found)[_NORMAL] = True  # what is made of it anew, by `dataclasses.replace`, is looked at again
        return found

    def active(self) -> tuple[tuple[str, Any], ...]:
        """The options that are not off: what a backend must have declared to be given this request."""
        values = vars(self)
        found = [
            (name, value)
            for name, off in _options(type(self))
            if (value := values[name]) != off and not (callable(off) and off(self))
        ]
        if self.group != 1:
            found.append(("group", self.group))
        return tuple(found)

    def summary(self) -> str:
        """One line for people: the family and whatever is not off."""
        parts = [f"{self.family} {self.phase}", f"{self.platform}{':' + self.arch if self.arch else ''}", self.dtype]
        parts.append(f"H={self.heads}/{self.kv_heads} D={'/'.join(map(str, dict.fromkeys(self.dims)))}")
        skip = {"phase", "v_head_dim", "group"}
        parts += [k if v is True else f"{k}={v}" for k, v in self.active() if k not in skip]
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Field:
    """How one request field is judged. `off` tells whether a request leaves it unused."""

    name: str
    kind: Literal["required", "option", "context"]
    doc: str
    off: Any = None

    def is_off(self, request: AttentionRequest) -> bool:
        if callable(self.off):
            predicate: Callable[[AttentionRequest], bool] = self.off
            return predicate(request)
        return bool(getattr(request, self.name) == self.off)


def request_fields(kind: type[AttentionRequest] = AttentionRequest) -> tuple[Field, ...]:
    """Every field of a request type in order (a subclass may add fields: S12)."""
    return tuple(
        Field(f.name, f.metadata["kind"], f.metadata["doc"], f.metadata.get("off"))
        for f in dataclasses.fields(kind)
        if "kind" in f.metadata
    )


@functools.cache
def _defaults() -> dict[str, Any]:
    return {one.name: one.default for one in dataclasses.fields(AttentionRequest)}


def made(**fields: Any) -> AttentionRequest:
    """The same as `AttentionRequest(**fields)`, for the calls: a frozen class sets its fields one by one, which is a
    tenth of what the first call of a kind costs.

    Raises:
        TypeError: a name that is no field.
    """
    request = object.__new__(AttentionRequest)
    values = vars(request)
    values.update(_defaults())
    values.update(fields)
    # With a name too many, the class itself says what is wrong.
    return request if len(values) == len(_defaults()) else AttentionRequest(**fields)


def changed(request: AttentionRequest, **fields: Any) -> AttentionRequest:
    """The same as `dataclasses.replace(request, **fields)`, at a twentieth of its cost.

    Raises:
        TypeError: a name that is no field.
    """
    other = object.__new__(type(request))
    values = vars(other)
    values.update(vars(request))
    values.pop(_NORMAL, None)  # what is changed is looked at again
    known = len(values)
    values.update(fields)
    return other if len(values) == known else dataclasses.replace(request, **fields)


_option_fields: dict[type, tuple[tuple[str, Any], ...]] = {}


def _options(kind: type[AttentionRequest]) -> tuple[tuple[str, Any], ...]:
    """(name, `Field.off`) of the options."""
    if kind not in _option_fields:
        _option_fields[kind] = tuple((f.name, f.off) for f in request_fields(kind) if f.kind == "option")
    return _option_fields[kind]
