"""The calls. A call site (its static arguments) finds the bound kernel for its tensors with one lookup.

Eager: a site remembers its last signature in torch's own guard object, checked in one C++ call, and every signature
in a dict whose key holds all that decides (`DENSE_KEY`). Lengths are not in it: random lengths do not miss.
Compiled: see `polyattn.compiled`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import overrides, validate
from .autograd import differentiable
from .choose import Chosen, choose, device_facts, dtype_name, select_here
from .compiled import trace_dense, trace_varlen
from .epoch import EPOCH
from .errors import InvalidInputError
from .records import AttentionRequest
from .selection import Selection

__all__ = [
    "DENSE_KEY",
    "STATIC_KEY",
    "DenseSite",
    "VarlenSite",
    "attention",
    "bind",
    "dense_request",
    "runner",
    "varlen_attention",
    "varlen_request",
]

_is_tracing = torch.compiler.is_dynamo_compiling
_grad_on = torch.is_grad_enabled
_deterministic = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
_scope = overrides.SCOPE.get
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
overrides.tracing = _is_tracing

LARGE = 2**31
SITES_KEPT = 1024
SIGNATURES_KEPT = 4096

STATIC_KEY = (
    *("causal", "window", "softcap", "scale", "layout", "dropout_p", "return_lse", "deterministic", "backend"),
    "scope of overrides",
)
"""What a site is found by. The epoch (plugins, configuration, tuning store) empties every site."""

DENSE_KEY = (
    *("exact types", "query dtype", "key dtype", "value dtype", "query device", "key device", "value device"),
    *("H_q", "key H", "value H", "query D", "key D", "value D", "relation", "lengths agree", "zero size", "large"),
    *("dense axes", "aligned", "grads", "mask", "sinks", "out", "autocast", "capture", "transform", "deterministic"),
)
"""What a dense signature holds, in order."""


def _relation(s_q: int, s_k: int) -> str:
    return "equal" if s_q == s_k else "one" if s_q == 1 else "fewer" if s_q < s_k else "more"


def _autocast(kind: str) -> torch.dtype | None:
    # Meta tensors have no autocast state of their own.
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def _capturing(kind: str) -> bool:
    return kind == "cuda" and torch.cuda.is_current_stream_capturing()


def _transform(*tensors: Tensor) -> str:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "vmap"
    plain = (Tensor, torch.nn.Parameter)
    known = ("FakeTensor", "FunctionalTensor")
    return "" if all(type(t) in plain or type(t).__name__ in known for t in tensors) else "subclass"


def _aligned(*tensors: Tensor) -> bool:
    try:
        return not any(t.data_ptr() & 15 for t in tensors)
    except RuntimeError:  # no storage: a fake or transformed tensor
        return True


def _mask_key(mask: Tensor | None, batch: int, heads: int, s_q: int, s_k: int) -> Any:
    if mask is None:
        return None
    shape = tuple(mask.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == (s_q, s_k)
    return (fits, mask.dtype, mask.device, mask.requires_grad, type(mask))


def _sinks_key(sinks: Tensor | None) -> Any:
    return None if sinks is None else (sinks.shape, sinks.dtype, sinks.device, sinks.requires_grad, type(sinks))


def _out_key(out: Tensor | None, shape: tuple[int, ...], inputs: tuple[Tensor, ...]) -> Any:
    if out is None:
        return None
    shares = any(t.data_ptr() == out.data_ptr() for t in inputs)
    return (tuple(out.shape) == shape, out.dtype, out.device, out.stride()[-1:], out.requires_grad, shares, type(out))


def _dense_axis(tensor: Tensor) -> bool:
    return tensor.stride()[-1] == 1 or tensor.shape[-1] == 1


def _dense_key(q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, out: Any, bshd: bool) -> tuple[Any, ...]:
    """The complete signature of a dense call, in the order of `DENSE_KEY`."""
    b, s_q, h_q, d = q.shape
    bk, s_k, h_k, dk = k.shape
    bv, s_v, h_v, dv = v.shape
    if not bshd:
        s_q, h_q, s_k, h_k, s_v, h_v = h_q, s_q, h_k, s_k, h_v, s_v
    kind = q.device.type
    exact = type(q) is type(k) is type(v) is Tensor
    return (
        exact,
        *(q.dtype, k.dtype, v.dtype),
        *(q.device, k.device, v.device),
        *(h_q, h_k, h_v, d, dk, dv),
        _relation(s_q, s_k),
        b == bk == bv and s_k == s_v,
        not (q.numel() and k.numel() and v.numel()),
        max(q.numel(), k.numel(), v.numel()) >= LARGE,
        (_dense_axis(q), _dense_axis(k), _dense_axis(v)),
        _aligned(q, k, v),
        (q.requires_grad, k.requires_grad, v.requires_grad) if _grad_on() else None,
        _mask_key(mask, b, h_q, s_q, s_k),
        _sinks_key(sinks),
        _out_key(out, (*q.shape[:3], dv), (q, k, v)),
        _autocast(kind),
        _capturing(kind),
        _transform(q, k, v),
        _deterministic(),
    )


def _grads(named: dict[str, Tensor | None], return_lse: bool) -> tuple[str, ...]:
    if not _grad_on():
        return ()
    wanted = [name for name, tensor in named.items() if tensor is not None and tensor.requires_grad]
    if wanted and return_lse:
        wanted.append("lse")
    return tuple(wanted)


@dataclasses.dataclass(frozen=True)
class Static:
    """The arguments of a call that are no tensors, checked."""

    causal: Any = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    layout: str = "BSHD"
    dropout_p: float = 0.0
    return_lse: bool = False
    deterministic: bool = False

    def checked(self, layouts: tuple[str, ...] = validate.LAYOUTS) -> Static:
        window = validate.check_statics(
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            layout=self.layout,
            dropout_p=self.dropout_p,
            layouts=layouts,
        )
        return dataclasses.replace(self, window=window)

    def fields(self) -> dict[str, Any]:
        """As request fields."""
        causal = self.causal if isinstance(self.causal, str) else ("bottom_right" if self.causal else "none")
        return {
            "causal": causal,
            "window": self.window,
            "softcap": float(self.softcap),
            "scale": None if self.scale is None else float(self.scale),
            "layout": self.layout,
            "dropout": float(self.dropout_p),
            "lse": bool(self.return_lse),
            "deterministic": bool(self.deterministic) or _deterministic(),
        }


def _facts(
    static: Static, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, heads: int, kv: int
) -> dict[str, Any]:
    """Request fields shared by the dense and packed calls."""
    kind = q.device.type
    autocast = _autocast(kind)
    dtype = autocast if autocast is not None and q.dtype != torch.float64 else q.dtype
    named = {"query": q, "key": k, "value": v, "mask": mask, "sinks": sinks}
    return {
        **static.fields(),
        **device_facts(q.device),
        "dtype": dtype_name(dtype),
        "heads": heads,
        "kv_heads": kv,
        "head_dim": q.shape[-1],
        "v_head_dim": v.shape[-1],
        "mask": "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive",
        "sinks": sinks is not None,
        "grad": _grads(named, static.return_lse),
        "graph_capture": _capturing(kind),
        "zero_size": not (q.numel() and k.numel() and v.numel()),
        "large": max(q.numel(), k.numel(), v.numel()) >= LARGE,
        "misaligned": not _aligned(q, k, v),
        "transform": _transform(q, k, v),
    }


def dense_request(static: Static, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, out: Any) -> AttentionRequest:
    """Validate a dense call and say what it asks for.

    Raises:
        InvalidInputError: an argument no backend could serve.
    """
    if isinstance(q, Tensor) and _autocast(q.device.type) is not None:
        q, k, v = _cast(q, k, v)
    grad = bool(_grads({"q": q, "k": k, "v": v}, False)) if all(isinstance(t, Tensor) for t in (q, k, v)) else False
    validate.check_dense(q, k, v, mask, sinks, out, static.layout, grad)
    s, h = (1, 2) if static.layout == "BSHD" else (2, 1)
    facts = _facts(static, q, k, v, mask, sinks, q.shape[h], k.shape[h])
    return AttentionRequest(family="dense", s_relation=_relation(q.shape[s], k.shape[s]), **facts).normalised()  # type: ignore[arg-type]


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Autocast as torch's SDPA does it: floats but float64 go to the autocast dtype."""
    dtype = _autocast(tensors[0].device.type)
    skip = (torch.float64, dtype)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype not in skip else t for t in tensors)


def runner(chosen: Chosen, return_lse: bool, autocast: bool, head_axis: int) -> Callable[..., Any]:
    """What a signature calls: the bound forward, made differentiable and autocast where that is asked for."""
    bound = chosen.bound
    forward = bound.forward
    if bound.backward is not None and chosen.request.grad:
        forward = differentiable(bound, return_lse, head_axis)
    if not autocast:
        return forward

    def cast(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **kw: Any) -> Any:
        query, key, value = _cast(query, key, value)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(query.dtype)
        with torch.autocast(query.device.type, enabled=False):
            return forward(query, key, value, attn_mask=attn_mask, **kw)

    return cast


@dataclasses.dataclass(frozen=True)
class _Entry:
    """What a signature calls: with everything optional as keywords, and the short way where there is one."""

    run: Callable[..., Any]
    simple: Callable[..., Any] | None = None


class _Fast:
    """The last plain signature of a site as torch guards, and the function it calls.

    `same` holds for the very shapes seen last; `alike` leaves batch and lengths free, the rest of it is checked here.
    """

    __slots__ = (
        *("alike", "call", "cuda", "deterministic", "epoch", "grad", "lengths", "relation", "rooms", "same", "seen"),
    )

    def __init__(self, call: Any, lengths: int, key: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> None:
        heads = 3 - lengths
        sizes = [[t.shape[i] if i in (heads, 3) else None for i in range(4)] for t in (q, k, v)]
        strides = [[None, None, None, None if t.shape[3] == 1 else 1] for t in (q, k, v)]
        self.alike = _Guards(q, k, v, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        self.call, self.lengths, self.relation = call, lengths, key["relation"]
        self.epoch, self.deterministic, self.cuda = EPOCH.value, key["deterministic"], q.device.type == "cuda"
        # The guards hold requires_grad; grad mode matters only where some input requires it.
        self.grad = _grad_on() if q.requires_grad or k.requires_grad or v.requires_grad else None
        width = max(key["query D"], key["value D"])
        self.rooms = (LARGE // (key["H_q"] * width), LARGE // (key["key H"] * width))
        self.seen: Any = None
        self.keep(q, k, v)

    def keep(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        strides = [[None, None, None, None if t.shape[3] == 1 else 1] for t in (q, k, v)]
        self.same = _Guards(q, k, v, dynamic_dims_sizes=None, dynamic_dims_strides=strides).check

    def other_lengths(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the signature holds for other lengths; lengths that come twice are remembered for `same`."""
        if not self.alike(q, k, v):
            return False
        if self.lengths == 1:
            b, s_q, _, _ = q.shape
            bk, s_k, _, _ = k.shape
            bv, s_v, _, _ = v.shape
        else:
            b, _, s_q, _ = q.shape
            bk, _, s_k, _ = k.shape
            bv, _, s_v, _ = v.shape
        room_q, room_k = self.rooms
        if not (b == bk == bv and s_k == s_v and 0 < b * s_q < room_q and 0 < b * s_k < room_k):
            return False
        if self.relation != ("equal" if s_q == s_k else "one" if s_q == 1 else "fewer" if s_q < s_k else "more"):
            return False
        seen = (b, s_q, s_k)
        if self.seen == seen:
            self.keep(q, k, v)
        self.seen = seen
        return True


class DenseSite:
    """A dense call with its static arguments bound: what `bind` returns, what layers hold, what each call finds.

    Call it with (query, key, value, attn_mask=None, sinks=None, out=None); shapes as `polyattn.attention`.
    """

    __slots__ = ("_argument", "_bshd", "_entries", "_epoch", "_fast", "_last", "_scope", "static")

    def __init__(self, static: Static, backend: str | None = None, scope: overrides.Scope | None = None) -> None:
        self.static = static.checked()
        self._last: Any = None
        self._bshd = static.layout == "BSHD"
        self._argument = _name(backend)
        self._scope = _scope() if scope is None else scope
        overrides.reach(self._scope)
        self._epoch = -1
        self._entries: dict[Any, _Entry] = {}
        self._fast: _Fast | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        if _is_tracing():
            return trace_dense(
                query, key, value, attn_mask, sinks, out, _constants(self.static), self._argument, self._scope
            )
        return self.eager(query, key, value, attn_mask, sinks, out)

    def eager(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """The call when torch.compile is not tracing it."""
        fast = self._fast
        if (
            fast is not None
            and attn_mask is None
            and sinks is None
            and out is None
            and fast.epoch == EPOCH.value
            and (fast.same(query, key, value) or fast.other_lengths(query, key, value))
            and (fast.grad is None or fast.grad is _grad_on())
            and fast.deterministic is _deterministic()
            and not (fast.cuda and (_capturing("cuda") or not _aligned(query, key, value)))
        ):
            return fast.call(query, key, value)
        return self._find(query, key, value, attn_mask, sinks, out)

    def _find(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, out: Any) -> Any:
        if self._epoch != EPOCH.value:
            self._entries, self._fast, self._epoch = {}, None, EPOCH.value
        entries = self._entries
        try:
            signature = _dense_key(query, key, value, attn_mask, sinks, out, self._bshd)
        except (AttributeError, RuntimeError, TypeError, ValueError) as exc:
            validate.check_dense(query, key, value, attn_mask, sinks, out, self.static.layout, False)
            raise InvalidInputError(f"the arguments of attention cannot be read: {exc}; pass 4-D tensors") from exc
        entry = entries.get(signature)
        if entry is None:
            entry = self._resolve(query, key, value, attn_mask, sinks, out)
            if len(entries) >= SIGNATURES_KEPT:
                entries.clear()
            entries[signature] = entry
        elif signature == self._last and attn_mask is None and sinks is None and out is None:
            # Seen twice in a row: worth a guard. Alternating signatures stay with the dict.
            self._remember(dict(zip(DENSE_KEY, signature, strict=True)), entry, query, key, value)
        self._last = signature
        return entry.run(query, key, value, attn_mask=attn_mask, sinks=sinks, out=out)

    def _resolve(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Any, out: Any) -> _Entry:
        request = dense_request(self.static, query, key, value, mask, sinks, out)
        chosen = choose(request, self._argument, self._scope)
        run = runner(chosen, self.static.return_lse, not _no_autocast(query), 2 if self._bshd else 1)
        return _Entry(run, chosen.bound.simple if run is chosen.bound.forward else None)

    def _remember(self, key: dict[str, Any], entry: _Entry, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep a plain signature for the check in one call; what guards cannot see rules it out."""
        odd = key["zero size"] or key["large"] or key["capture"] or key["transform"] or not key["aligned"]
        # torch's guards never hold for one tensor passed twice.
        distinct = q is not k and k is not v and q is not v
        if _Guards is not None and distinct and key["autocast"] is None and not odd and key["exact types"]:
            self._fast = _Fast(entry.simple or entry.run, 1 if self._bshd else 2, key, q, k, v)

    def __polyattn_explain__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, sinks: Any = None, out: Any = None
    ) -> Selection:
        request = dense_request(self.static, query, key, value, attn_mask, sinks, out)
        return select_here(request, self._argument, self._scope, full=True)


def _constants(static: Static) -> tuple[Any, ...]:
    return (
        *(static.causal, static.window, static.softcap, static.scale, static.layout),
        *(static.dropout_p, static.return_lse, static.deterministic),
    )


def _name(backend: Any) -> str | None:
    if backend is not None and not isinstance(backend, str):
        raise InvalidInputError(f"backend={backend!r} is a {type(backend).__name__}; give a name as a string, or None")
    return backend


_sites: dict[Any, Callable[..., Any]] = {}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    layout: str = "BSHD",
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    out: Tensor | None = None,
) -> Any:
    """Softmax attention on dense tensors, by the best backend that can serve the call.

    Args:
        query: [B, S_q, H_q, D] (BSHD) or [B, H_q, S_q, D] (BHSD); float32, float16, bfloat16 or float64.
        key: [B, S_k, H_kv, D] or [B, H_kv, S_k, D]; H_q is a multiple of H_kv (GQA, no repeat needed).
        value: [B, S_k, H_kv, D_v] or [B, H_kv, S_k, D_v].
        causal: True = bottom-right aligned (row i sees keys j <= i + S_k - S_q), "top_left" the other (S3).
        window: (left, right) inclusive key counts around the row's position, -1 unlimited (S4).
        softcap: logits become softcap * tanh(logits / softcap) before the mask; 0 is off (S5).
        sinks: [H_q] logits that take part in the denominator only (S5).
        attn_mask: [B|1, H_q|1, S_q, S_k], bool (True = attend) or a float that is added (S8).
        scale: of the logits; None = D ** -0.5 (S2).
        layout: BSHD or BHSD, of the inputs and the output (S1).
        dropout_p: dropout on the attention weights, training only.
        return_lse: also return the LSE: fp32, natural log, without the sink, [B, S_q, H_q] or [B, H_q, S_q] (S6).
        deterministic: only a backend whose results are the same bits on every run.
        backend: name of a backend; None = `use_backend`, configuration, then automatic.
        out: where to write the output; not while gradients are wanted.

    Returns:
        out like query with D_v, or (out, lse). Rows that see no key are 0 with lse = -inf (S7).

    Raises:
        InvalidInputError: an argument no backend could serve. UnsupportedRequestError: none here can, or the named
            one cannot; the message has everyone's reasons. BackendUnavailableError: the named one is not here.
    """
    if _is_tracing():
        static = (causal, window, softcap, scale, layout, dropout_p, return_lse, deterministic)
        return trace_dense(query, key, value, attn_mask, sinks, out, static, backend, None)
    scope = _scope()
    name = (causal, window, softcap, scale, layout, dropout_p, return_lse, deterministic, backend, scope)
    try:
        site = _sites.get(name)
    except TypeError:  # an unhashable argument: a window as a list is fine, the rest is told
        if not isinstance(window, list):
            Static(causal, window, softcap, scale, layout, dropout_p, return_lse, deterministic).checked()
            _name(backend)
            raise
        return attention(
            query, key, value, causal=causal, window=tuple(window), softcap=softcap, sinks=sinks, attn_mask=attn_mask,
            scale=scale, layout=layout, dropout_p=dropout_p, return_lse=return_lse, deterministic=deterministic,
            backend=backend, out=out,
        )  # fmt: skip
    if site is None:
        site = DenseSite(Static(*name[:8]), backend, scope).eager
        if len(_sites) >= SITES_KEPT:
            _sites.clear()
        _sites[name] = site
    return site(query, key, value, attn_mask, sinks, out)


def bind(
    *,
    causal: bool | str = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
    layout: str = "BSHD",
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> DenseSite:
    """Bind the static arguments of `attention` once, for the hottest paths and for layers.

    The overrides in force now (`use_backend`, the component) are captured; process-wide changes still take effect.

    Returns:
        A callable (query, key, value, attn_mask=None, sinks=None, out=None), as `attention`.
    """
    static = Static(causal, window, softcap, scale, layout, dropout_p, return_lse, deterministic)
    return DenseSite(static, backend)


def _explain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sinks: Any = None,
    attn_mask: Any = None,
    backend: str | None = None,
    out: Any = None,
    **static: Any,
) -> Selection:
    return DenseSite(Static(**static), backend).__polyattn_explain__(query, key, value, attn_mask, sinks, out)


attention.__polyattn_explain__ = _explain_attention  # type: ignore[attr-defined]


class VarlenSite:
    """A packed call with its static arguments bound."""

    __slots__ = ("_argument", "_entries", "_epoch", "_scope", "static")

    def __init__(self, static: Static, backend: str | None = None, scope: overrides.Scope | None = None) -> None:
        self.static = static.checked(("THD",))
        self._argument = _name(backend)
        self._scope = _scope() if scope is None else scope
        overrides.reach(self._scope)
        self._epoch = -1
        self._entries: dict[Any, Callable[..., Any]] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, out: Any, **lens: Any
    ) -> Any:
        if self._epoch != EPOCH.value:
            self._entries, self._epoch = {}, EPOCH.value
        entries = self._entries
        # Contents may differ at every call, so they are checked at every call; the shapes with them.
        tensors = all(isinstance(t, Tensor) for t in (query, key, value))
        grads = bool(_grads({"q": query, "k": key, "v": value}, False)) if tensors else False
        q, k, v = _cast(query, key, value) if tensors and not _no_autocast(query) else (query, key, value)
        validate.check_varlen(q, k, v, attn_mask=attn_mask, sinks=sinks, out=out, grad=grads, **lens)
        if validate.contents_readable(lens["cu_seqlens_q"]):
            for side, tensor in (("q", q), ("k", k)):
                longest = lens[f"max_seqlen_{side}"]
                cu = lens[f"cu_seqlens_{side}"]
                validate.check_cu_seqlens(f"cu_seqlens_{side}", cu, tensor.shape[0], longest, f"max_seqlen_{side}")
        relation = _packed_relation(lens)
        signature = (
            *(type(query), type(key), type(value), query.dtype, key.dtype, value.dtype, query.device),
            *(query.shape[1], key.shape[1], query.shape[2], value.shape[2], relation),
            not (query.numel() and key.numel() and value.numel()),
            max(query.numel(), key.numel(), value.numel()) >= LARGE,
            _aligned(query, key, value),
            (query.requires_grad, key.requires_grad, value.requires_grad) if _grad_on() else None,
            None if attn_mask is None else (attn_mask.dtype, attn_mask.requires_grad),
            _sinks_key(sinks),
            out is None,
            *(_autocast(query.device.type), _capturing(query.device.type), _transform(query, key, value)),
            _deterministic(),
        )
        run = entries.get(signature)
        if run is None:
            chosen = choose(varlen_request(self.static, q, k, v, attn_mask, sinks, lens), self._argument, self._scope)
            run = runner(chosen, self.static.return_lse, not _no_autocast(query), 1)
            if len(entries) >= SIGNATURES_KEPT:
                entries.clear()
            entries[signature] = run
        return run(query, key, value, attn_mask=attn_mask, sinks=sinks, out=out, **lens)

    def __polyattn_explain__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, sinks: Any, **lens: Any
    ) -> Selection:
        request = varlen_request(self.static, query, key, value, attn_mask, sinks, lens)
        return select_here(request, self._argument, self._scope, full=True)


def _no_autocast(query: Any) -> bool:
    return not isinstance(query, Tensor) or _autocast(query.device.type) is None


def _packed_relation(lens: dict[str, Any]) -> str:
    """Of the sequences' lengths. `equal` needs proof (one tensor); `more` stands for any mixture."""
    if lens["cu_seqlens_q"] is lens["cu_seqlens_k"]:
        return "equal"
    return "one" if lens["max_seqlen_q"] == 1 else "more"


def varlen_request(
    static: Static, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, lens: dict[str, Any]
) -> AttentionRequest:
    """What a packed call asks for. Its tensors are checked already."""
    facts = _facts(static, q, k, v, mask, sinks, q.shape[1], k.shape[1])
    return AttentionRequest(family="varlen", s_relation=_packed_relation(lens), **facts).normalised()  # type: ignore[arg-type]


_varlen_sites: dict[Any, VarlenSite] = {}


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool | str = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    out: Tensor | None = None,
) -> Any:
    """Softmax attention on sequences packed along one axis.

    Args:
        query: [T_q, H_q, D]; key: [T_k, H_kv, D]; value: [T_k, H_kv, D_v].
        cu_seqlens_q, cu_seqlens_k: int32 [N+1], cumulative lengths from 0 to T; pass one tensor for self-attention.
            Contents are checked on the CPU, on a device only under POLYATTN_VALIDATE=1.
        max_seqlen_q, max_seqlen_k: host ints, at least the longest sequence.
        attn_mask: [N|1, H_q|1, max_seqlen_q, max_seqlen_k], read up to each sequence's lengths.
        sinks: [H_q]. out: [T_q, H_q, D_v]. The rest as `attention`.

    Returns:
        out [T_q, H_q, D_v], or (out, lse [T_q, H_q]).

    Raises:
        As `attention`.
    """
    static = (causal, window, softcap, scale, "THD", dropout_p, return_lse, deterministic)
    lens = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    if _is_tracing():
        return trace_varlen(query, key, value, attn_mask, sinks, out, lens, static, backend)
    name = (*static, backend, _scope())
    try:
        site = _varlen_sites.get(name)
    except TypeError:
        site = VarlenSite(Static(*static), backend)
    if site is None:
        site = VarlenSite(Static(*static), backend)
        if len(_varlen_sites) >= SITES_KEPT:
            _varlen_sites.clear()
        _varlen_sites[name] = site
    return site(query, key, value, attn_mask, sinks, out, **lens)


def _explain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sinks: Any = None,
    attn_mask: Any = None,
    backend: str | None = None,
    out: Any = None,
    **static: Any,
) -> Selection:
    site = VarlenSite(Static(layout="THD", **static), backend)
    lens = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    return site.__polyattn_explain__(query, key, value, attn_mask, sinks, **lens)


varlen_attention.__polyattn_explain__ = _explain_varlen  # type: ignore[attr-defined]
