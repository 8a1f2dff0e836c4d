"""What the tests of lowerings share: kernels of both kinds, rows that force a rewrite, cases, and the properties.

A test draws a case (`cases`), says what its kernel takes (`takes`) and which rewrites must lead there, and asks for a
property: `exact`, in float64 the numbers are those of the reference, or `gates`, the gates of conformance hold.
Both run over kernels of both kinds: one that autograd goes through, and one with an explicit backward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from torch import Tensor

from polyattn.adapters.alignment import aligned
from polyattn.backends.reference_backend import Reference
from polyattn.contract import AttentionRequest, Bound, Row, relation, request_fields, row
from polyattn.lowering import Plan, Planner, bind, get_lowering
from polyattn.lowering.base import Rewrite
from polyattn.semantics import reference
from polyattn.semantics.autograd import differentiable
from polyattn.testing.calls import out_of
from polyattn.testing.cases import Case
from polyattn.testing.checks import run_case
from polyattn.testing.families import DTYPES, FAMILIES
from polyattn.testing.plain import cancelling, in_float64
from polyattn.testing.problems import build, off_boundary

CPU = torch.device("cpu")
EXACT = settings(max_examples=300, deadline=None, derandomize=True)
GATES = settings(max_examples=25, deadline=None, derandomize=True)

KINDS = ("autograd", "explicit")
"""Of kernels: one whose gradients flow through torch operations, and one with a backward of its own."""


# ---------------------------------------------------------------------------------------------------------- kernels


def kernel(kind: str) -> Callable[[AttentionRequest], Bound]:
    """What binds a kernel of a kind. It refuses tensors that its request did not announce."""

    def load(request: AttentionRequest) -> Bound:
        bound = Reference().bind(request) if kind == "autograd" else _explicit(request)
        return _strict(request, bound)

    return load


def kinds(request: AttentionRequest) -> tuple[str, ...]:
    """The kinds of kernels that can serve a request: a backward gives no gradient of a mask, and cannot drop again."""
    return KINDS[:1] if "mask" in request.grad or request.dropout else KINDS


def _explicit(request: AttentionRequest) -> Bound:
    """The reference with its history cut, and a backward written down from the formulas of `polyattn.contract`."""
    inner = Reference().bind(dataclasses.replace(request, lse=True))
    both = request.lse or bool(request.grad)

    def forward(*tensors: Tensor, **given: Any) -> Any:
        with torch.no_grad():
            out, lse = inner.forward(*tensors, **given)
        return (out, lse) if both else out

    if request.family not in ("dense", "varlen"):
        return Bound(forward)

    def backward(
        dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **given: Any
    ) -> tuple[Tensor, ...]:
        tensors = (dout, query, key, value, out, lse)
        with torch.no_grad():
            return (_dense_backward if request.family == "dense" else _packed_backward)(request, tensors, **given)

    return Bound(forward, backward)


def _dense_backward(
    request: AttentionRequest, tensors: Sequence[Tensor], attn_mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    bshd = request.layout == "BSHD"
    grads = _gradients(request, [t.transpose(1, 2) for t in tensors] if bshd else tensors, attn_mask)
    return tuple(g.transpose(1, 2) for g in grads) if bshd else grads


def _packed_backward(
    request: AttentionRequest,
    tensors: Sequence[Tensor],
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    dout, query, key, value, out, lse = tensors
    grads = [torch.zeros_like(t) for t in (query, key, value)]
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for n in range(len(starts_q) - 1):
        qs, ks = slice(starts_q[n], starts_q[n + 1]), slice(starts_k[n], starts_k[n + 1])
        mask = attn_mask if attn_mask is None or attn_mask.shape[0] == 1 else attn_mask[n : n + 1]
        if mask is not None:
            mask = mask[:, :, : qs.stop - qs.start, : ks.stop - ks.start]
        rows = [*(t[qs] for t in (dout, query)), *(t[ks] for t in (key, value)), *(t[qs] for t in (out, lse))]
        found = _gradients(request, [t.transpose(0, 1)[None] for t in rows], mask)
        for grad, part, span in zip(grads, found, (qs, ks, ks), strict=True):
            grad[span] = part[0].transpose(0, 1)
    return tuple(grads)


def _gradients(
    request: AttentionRequest, tensors: Sequence[Tensor], mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P * (dP - delta), P = exp(S - lse), delta = rowsum(dout * out), of heads-first tensors."""
    wide = torch.promote_types(tensors[1].dtype, torch.float32)
    dout, q, k, v, out, lse = (t.to(wide) for t in tensors)
    group = q.shape[1] // k.shape[1]
    scale = request.head_dim**-0.5 if request.scale is None else request.scale
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ keys.mT * scale
    slope: Tensor | float = 1.0
    if request.softcap:
        logits = request.softcap * torch.tanh(logits / request.softcap)
        slope = 1 - (logits / request.softcap) ** 2
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.to(wide)
    seen = reference.visible(
        q.shape[2], k.shape[2], causal=request.causal, window=request.window, chunk=request.chunk, device=q.device
    )
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    delta = (dout * out).sum(-1, keepdim=True)
    dlogits = weights * (dout @ values.mT - delta) * slope * scale
    dk, dv = (shared.unflatten(1, (k.shape[1], group)).sum(2) for shared in (dlogits.mT @ q, weights.mT @ dout))
    return tuple(g.to(t.dtype) for g, t in zip((dlogits @ keys, dk, dv), tensors[1:4], strict=True))  # type: ignore[return-value]


def _strict(request: AttentionRequest, bound: Bound) -> Bound:
    """`bound`, which may only be called as the request it was bound to says."""

    def forward(*tensors: Tensor, out: Tensor | None = None, **given: Any) -> Any:
        _check_call(request, tensors, given)
        assert ("sinks" in given and given["sinks"] is not None) == request.sinks, "sinks"
        result = bound.forward(*tensors, out=out, **given)
        assert out is None or (result[0] if isinstance(result, tuple) else result) is out
        return result

    if bound.backward is None:
        return Bound(forward, None, bound.traceable)
    kernel_backward = bound.backward

    def backward(
        dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **given: Any
    ) -> tuple[Tensor, ...]:
        assert request.grad, "a backward is wanted, and the request says none"
        assert "sinks" not in given
        _check_call(request, (query, key, value), given)
        shape = (*query.shape[:-1], request.dims[1])
        assert dout.shape == out.shape == (*lse.shape, shape[-1]) == shape, "dout, out, lse"
        assert dout.dtype == out.dtype == query.dtype, "dout, out"
        return kernel_backward(dout, query, key, value, out, lse, **given)

    return Bound(forward, backward, bound.traceable)


def _check_call(request: AttentionRequest, tensors: Sequence[Tensor], given: Mapping[str, Any]) -> None:
    """The tensors of a call against the request it was bound to."""
    query = tensors[0]
    heads = 1 if request.layout == "BHSD" and request.family == "dense" else -2
    assert (query.shape[heads], query.shape[-1]) == (request.heads, request.head_dim), "query"
    assert query.dtype == DTYPES[request.dtype], "dtype"
    mask = given.get("attn_mask")
    kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive"
    assert kind == request.mask, f"a mask of kind {kind}, {request.mask} was announced"
    if request.family in ("dense", "varlen"):
        _, key, value = tensors
        assert key.dtype == value.dtype == query.dtype, "dtypes"
        assert key.shape[heads] == value.shape[heads] == request.kv_heads, "kv_heads"
        assert (key.shape[-1], value.shape[-1]) == request.dims, "dims"
        assert request.misaligned or aligned(*tensors), "a tensor is misaligned, and was not announced"
        assert request.zero_size or all(t.numel() for t in tensors), "zero_size"
        assert all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors), "the last axis is not dense"
    if request.family == "dense":
        s = 2 if request.layout == "BHSD" else 1
        s_q, s_k = query.shape[s], tensors[1].shape[s]
        assert relation(s_q, s_k) == request.s_relation, f"S_q {s_q}, S_k {s_k}: {request.s_relation} was announced"
        rows, batch = (s_q, s_k), query.shape[0]
    else:
        lens = given if request.family == "varlen" else given["tables"]._asdict()
        rows, batch = (lens["max_seqlen_q"], lens["max_seqlen_k"]), lens["cu_seqlens_q"].shape[0] - 1
        assert lens["cu_seqlens_q"].dtype == torch.int32, "cu_seqlens_q"
        assert request.s_relation != "one" or rows[0] <= 1, "one query"
        longest = int(lens["cu_seqlens_q"].diff().max()) if batch else 0
        assert longest <= rows[0], "max_seqlen_q is too small"
    if request.family == "varlen":
        assert (request.s_relation == "equal") <= (given["cu_seqlens_q"] is given["cu_seqlens_k"]), "equal lengths"
    if mask is not None:
        fits = mask.shape[0] in (1, batch) and mask.shape[1] in (1, request.heads) and mask.shape[2:] == rows
        assert fits, f"the mask has shape {tuple(mask.shape)}"
    if request.family == "paged":
        _check_caches(request, tensors[1:], given)
    if request.family == "mla":
        assert tensors[1].shape[1] == request.page_size, "page_size"


def _check_caches(request: AttentionRequest, caches: Sequence[Tensor], given: Mapping[str, Any]) -> None:
    page = (request.page_size, request.kv_heads)
    dtype = {**DTYPES, "int8": torch.int8}.get(request.kv_storage, torch.uint8)
    for cache, width in zip(caches, request.dims, strict=True):
        stored = width // 2 if request.kv_storage == "fp4_e2m1" else width
        assert cache.shape[1:] == (*(page[::-1] if request.kv_layout == "HND" else page), stored), "shape of a cache"
        assert cache.dtype == dtype, "dtype of a cache"
    assert given.get("key") is not None or not request.save_kv_cache, "nothing to save"
    for name in ("k_scale", "v_scale"):
        assert (given.get(name) is not None) == (request.kv_scales != ""), name


# ------------------------------------------------------------------------------------------- rows, plans and targets


def takes(family: str | tuple[str, ...] = "dense", **limits: Any) -> tuple[Row, ...]:
    """The capability of a kernel that takes everything, but for these fields (values as `polyattn.records.row`)."""
    everything: dict[str, Any] = {f.name: True for f in request_fields() if f.kind != "context"}
    return (row(**{**everything, "group": True, "family": family, **limits}),)


def offers(name: str, request: AttentionRequest) -> list[Rewrite]:
    """What a lowering offers for a request."""
    return list(get_lowering(name).rewrites(request.normalised()))


class Lowered:
    """A kernel of some kind behind the rewrites that a planner finds, as a target of the conformance kit.

    Args:
        rows: what the kernel takes. kind: of the kernel. names: the rewrites that must be found, None = any.
        options: of `Planner`. Helpers are served by a kernel of the same kind.
    """

    name, device = "lowered", CPU

    def __init__(self, rows: Sequence[Row], kind: str, names: Sequence[str] | None = None, **options: Any) -> None:
        self.rows, self.names, self.load = rows, None if names is None else tuple(names), kernel(kind)
        self.options = {"helper": lambda request: request, **options}

    def plan(self, request: AttentionRequest) -> Plan:
        plan = Planner(self.rows, **self.options).plan(request)
        assert plan is not None, f"there is no plan for {request.summary()}"
        assert self.names is None or plan.names == self.names, f"planned {plan.names}, {self.names} expected"
        return plan

    def bound(self, request: AttentionRequest) -> Bound:
        return bind(self.plan(request), self.load, self.load)

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        request = case.request
        bound = self.bound(request)
        forward = bound.forward
        if bound.backward is not None and request.grad:
            forward = differentiable(bound, request.lse, 2 if request.layout == "BSHD" else 1)
        given = dict(tensors)
        caches = {"paged": ("query", "key_cache", "value_cache"), "mla": ("query", "cache")}
        positional = [given.pop(name) for name in caches.get(request.family, ("query", "key", "value"))]
        mask = given.pop("mask", None)
        result = forward(*positional, **FAMILIES[case.request.family].keywords(extra), **given, attn_mask=mask, out=out)
        assert isinstance(result, tuple) == (request.lse), "an LSE is returned if and only if it is asked for"
        return result


# ------------------------------------------------------------------------------------------------------- properties


def exact(case: Case, rows: Sequence[Row], names: Sequence[str] | None, **options: Any) -> None:
    """In float64: out, LSE and gradients of the reference, by kernels of both kinds. No input is written to.

    Errors are relative to the largest magnitude of a tensor, not of each element: outputs are averages of values of
    both signs. A gradient is a sum whose terms can cancel altogether (a query that sees one key), so a few roundings of
    its terms are forgiven too.
    """
    problem = build(case, CPU)
    right = in_float64(problem)
    terms = cancelling(problem) if right.grads else {}
    for kind in kinds(case.request):
        given = {name: (t.detach().clone(), t._version) for name, t in problem.tensors.items()}
        out = out_of(case, tuple(problem.dout.shape), problem.dtype, CPU)
        raw = Lowered(rows, kind, names, **options).call(case, problem.tensors, problem.extra, out)
        result, lse = raw if case.request.lse else (raw, None)
        assert out is None or result is out, f"{kind}: out= is not what is returned"
        assert result.dtype == problem.dtype
        assert result.stride(-1) == 1 or result.shape[-1] <= 1 or not result.numel(), "the last axis is not dense"
        _close(f"{kind} out", result, right.out)
        outputs, upstream = [result], [problem.dout]
        if lse is not None:
            assert lse.dtype == torch.float64
            _close(f"{kind} lse", lse, right.lse)
            if problem.through_lse:
                outputs.append(lse)
                upstream.append(problem.dlse.to(lse.dtype))
        wanted = list(right.grads)
        inputs = [problem.tensors[name] for name in wanted]
        grads = torch.autograd.grad(outputs, inputs, upstream, materialize_grads=True) if wanted else ()
        for name, grad in zip(wanted, grads, strict=True):
            _close(f"{kind} grad {name}", grad, right.grads[name], terms[name])
        for name, (before, version) in given.items():
            if case.request.save_kv_cache and name in ("key_cache", "value_cache"):
                continue
            after = problem.tensors[name]
            same = torch.equal(after.detach().double().nan_to_num(7e7), before.double().nan_to_num(7e7))
            assert (same, after._version) == (True, version), f"{kind}: {name} was written to"


def _close(name: str, got: Tensor, want: Tensor, terms: Tensor | None = None) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, {tuple(want.shape)} expected"
    got, want = got.detach(), want.detach()
    infinite = want.isinf()
    assert torch.equal(got[infinite].double(), want[infinite].double()), f"{name}: infinities"
    got, want = got[~infinite], want[~infinite]
    if not want.numel():
        return
    # Sinks may be float32 beside float64 queries: their gradient is no finer than they are.
    eps = torch.finfo(got.dtype).eps
    allowed = (1e-12 if got.dtype == torch.float64 else 1e-6) * float(want.abs().max())
    error = (got.double() - want.double()).abs()
    if terms is not None:
        error = error - 32 * eps * terms[~infinite]
    # Also false for NaN.
    assert bool((error <= allowed).all()), f"{name}: off by {float(error.max()):.3g}, {allowed:.3g} is allowed"


def gates(case: Case, rows: Sequence[Row], names: Sequence[str] | None, **options: Any) -> None:
    """In the case's dtype: every check of the conformance kit, by kernels of both kinds."""
    for kind in kinds(case.request):
        outcome = run_case(Lowered(rows, kind, names, **options), case)
        assert outcome.verdict == "passed", f"{kind}: {outcome}"


# ------------------------------------------------------------------------------------------------------------ cases

SHORT: dict[str, dict[str, tuple[Any, ...]]] = {
    "dense": {
        "equal": ((5, 5), (1, 1), (9, 9)),
        "one": ((1, 7), (1, 2)),
        "fewer": ((3, 8), (2, 13)),
        "more": ((7, 4), (5, 1)),
    },
    "varlen": {
        "equal": (((5, 5), (0, 0), (1, 1)), ((7, 7), (3, 3))),
        "one": (((1, 6), (1, 1), (1, 3)), ((1, 4), (0, 3), (1, 0))),
        "fewer": (((3, 8), (1, 2)), ((0, 3), (2, 5))),
        "more": (((6, 9), (0, 4), (5, 0), (7, 3)), ((4, 3), (2, 6))),
    },
    "paged": {
        "equal": (((5, 5), (1, 1)), ((7, 7),)),
        "one": (((1, 9), (1, 0), (1, 1)), ((1, 4), (1, 13))),
        "fewer": (((3, 8), (1, 5)), ((2, 11),)),
        "more": (((4, 9), (3, 3)), ((2, 2), (1, 7))),
    },
}
SHORT["mla"] = SHORT["paged"]
"""Lengths (S_q, S_k) by family and relation: odd, equal and unequal, one query, rows and sequences that are empty."""

LONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "dense": {"equal": ((63, 63),), "one": ((1, 100),), "fewer": ((37, 65),), "more": ((63, 37),)},
    "varlen": {
        "equal": (((33, 33), (0, 0), (17, 17)),),
        "one": (((1, 63), (1, 1), (1, 33), (1, 64), (1, 7)),),
        "fewer": (((17, 50), (1, 2), (33, 64)),),
        "more": (((33, 50), (0, 5), (5, 0), (40, 17)),),
    },
    "paged": {
        "equal": (((17, 17), (33, 33)),),
        "one": (((1, 63), (1, 0), (1, 1), (1, 100), (1, 40)),),
        "fewer": (((7, 64), (33, 50)),),
        "more": (((7, 64), (5, 5), (17, 17)),),
    },
}
LONG["mla"] = LONG["paged"]
"""The same for half precision: the largest of a handful of errors is a matter of luck, so there are more rows."""

_FREE: dict[str, tuple[Hashable, ...]] = {
    "s_relation": ("equal", "one", "fewer", "more"),
    "batch": (1, 2, 3),
    "head_dim": (8, 3, 16, 1),
    "v_head_dim": (0, 8, 5),
    "kv_heads": (1, 2),
    "group": (1, 2, 3),
    "layout": ("BSHD", "BHSD"),
    "causal": ("none", "bottom_right", "top_left"),
    "window": ((-1, -1), (2, -1), (-1, 1), (3, 2), (0, 0)),
    "chunk": (0, 0, 0, 4),
    "softcap": (0.0, 0.0, 2.0),
    "sinks": (False, True),
    "mask": ("none", "bool", "additive"),
    "scale": (None, 0.3),
    "lse": (False, True),
    "grad": (
        (),
        ("query", "key", "value"),
        ("query", "key", "value", "mask", "sinks"),
        ("query", "key", "value", "sinks"),
        ("value",),
        ("query",),
        ("sinks",),
    ),
    "storage": ("contiguous", "gapped", "transposed", "expanded"),
    "out": ("", "contiguous", "strided"),
    "sink": ("usual", "dominant", "off"),
    "mask_shape": ("full", "batch", "heads", "one", "expanded"),
    "mask_dtype": ("same", "float32"),
    "closed_rows": (False, True),
    "new_rows": (False,),
}
"""What each field of a request, and each of a case, is drawn from."""

_PACKED: dict[str, tuple[Hashable, ...]] = {"batch": (1,), "layout": ("THD",)}
_CACHED: dict[str, tuple[Hashable, ...]] = {
    **_PACKED,
    "grad": ((),),
    "causal": ("bottom_right", "none"),
    "page_size": (4, 1, 5),
}
_LATENT = {"head_dim": (16,), "v_head_dim": (8,), "kv_heads": (1,), "scale": (0.2,), "sinks": (False,)}
_OF_FAMILY = {"varlen": _PACKED, "paged": _CACHED, "mla": {**_CACHED, **_LATENT}}
"""What differs by family."""

_ONLY: dict[str, Callable[[dict[str, Any]], bool]] = {
    "out": lambda v: not v["grad"],
    "sink": lambda v: v["sinks"],
    "mask_shape": lambda v: v["mask"] != "none",
    "closed_rows": lambda v: v["mask"] != "none",
    "mask_dtype": lambda v: v["mask"] == "additive",
}
"""When a value means something."""

_OF_THE_CASE = ("storage", "out", "sink", "mask_shape", "mask_dtype", "closed_rows", "new_rows")


@functools.cache
def _one_of(values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def cases(
    draw: st.DrawFn,
    family: str = "dense",
    dtype: str = "float64",
    lengths: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    where: Callable[[AttentionRequest], bool] = lambda request: True,
    **choices: Iterable[Hashable],
) -> Case:
    """Cases of conformance with short sequences (`LONG` ones in half precision).

    Args:
        family, dtype: of the request. lengths: (S_q, S_k) by family and relation.
        where: what must hold for the request in normal form.
        choices: the values of fields of the request and of `Case`, instead of the usual ones.
    """
    free = {**_FREE, **_OF_FAMILY.get(family, {}), **{name: tuple(values) for name, values in choices.items()}}
    if family != "dense":
        free["storage"] = tuple(s for s in free["storage"] if s != "expanded") or ("contiguous",)
    v: dict[str, Any] = {}
    for name, values in free.items():
        idle = name in _ONLY and not _ONLY[name](v)
        v[name] = values[0] if len(values) == 1 else _FREE[name][0] if idle else draw(_one_of(values))
    v = _fitting(v, dtype)
    table = lengths or (SHORT if dtype == "float64" else LONG)
    chosen = draw(_one_of(table[family][v["s_relation"]]))
    spans = (chosen,) * (v["batch"] if chosen[0] > 2 else v["batch"] + 1) if family == "dense" else chosen
    names = {f.name for f in dataclasses.fields(AttentionRequest)}
    fields = {name: value for name, value in v.items() if name in names}
    fields["heads"] = v["kv_heads"] * v["group"]
    request = AttentionRequest(family=family, dtype=dtype, **fields)
    case = Case(request=request, lengths=spans, **{name: v[name] for name in _OF_THE_CASE})
    if off_boundary(case):
        case = dataclasses.replace(case, request=dataclasses.replace(request, misaligned=True))
    assume(where(case.request.normalised()))
    return case


def of_families(*families: str, **choices: Any) -> st.SearchStrategy[Case]:
    """`cases` of any of these families."""
    return st.one_of(*(cases(family, **choices) for family in families))


def _fitting(v: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Values drawn one by one, made into one request that a caller could make."""
    if v["mask"] == "none":
        v |= {"mask_shape": "full", "closed_rows": False}
    if v["mask"] != "additive" or dtype in ("float32", "float64"):
        v["mask_dtype"] = "same"
    if not v["sinks"]:
        v["sink"] = "usual"
    unused = {"mask": v["mask"] != "additive", "sinks": not v["sinks"], "lse": True}
    v["grad"] = tuple(name for name in v["grad"] if not unused.get(name, False))
    if v["grad"]:
        v["out"] = ""
        v["grad"] = (*v["grad"], "lse") if v["lse"] else v["grad"]
    if v.get("save_kv_cache"):
        v["new_rows"] = True
    return v


def dense(**fields: Any) -> AttentionRequest:
    """A plain dense request for tests of what is offered."""
    return AttentionRequest(**{"dtype": "float32", "head_dim": 64, "heads": 4, "kv_heads": 4, **fields})


def families_of(name: str, **fields: Any) -> set[str]:
    """The families for which a lowering offers something, for a request that is otherwise these fields."""
    return {family for family in FAMILIES if offers(name, dense(**{**fields, "family": family}))}


def tensors_of(
    request: AttentionRequest, S_q: int, S_k: int, device: str = "cpu"
) -> tuple[list[Tensor], dict[str, Any]]:
    """BSHD tensors of a request for two samples: (positional, by name)."""
    H_q, H_kv, (D, D_v) = request.heads, request.kv_heads, request.dims
    shapes = (2, S_q, H_q, D), (2, S_k, H_kv, D), (2, S_k, H_kv, D_v)
    given: dict[str, Any] = {}
    if request.mask == "bool":
        given["attn_mask"] = torch.ones(1, H_q, S_q, S_k, dtype=torch.bool, device=device)
    if request.sinks:
        given["sinks"] = torch.zeros(H_q, device=device)
    return [torch.zeros(shape, device=device) for shape in shapes], given
