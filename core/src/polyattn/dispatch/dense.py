"""The calls. A call site (its static arguments) finds the bound kernel for its tensors with one lookup.

Eager: a site remembers its last signature in torch's own guard object, checked in one C++ call, and every signature
in a dict whose key holds all that decides (`CallKey`). Lengths are not in it: random lengths do not miss.
Compiled: see `polyattn.dispatch.compile.trace`.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler

from ..adapters.alignment import aligned
from ..adapters.device import capturing, recording
from ..contract import AttentionRequest, Place, relation
from ..epoch import EPOCH
from ..errors import InvalidInputError
from ..selection import overrides
from ..selection.select import Selection
from ..semantics import validation
from .binding import choose, explained_by
from .bound_table import SIGNATURES_KEPT, Recent
from .call_key import (
    LARGE,
    NO_CHUNK,
    NOTHING,
    SITES_KEPT,
    Added,
    CallKey,
    Found,
    Six,
    Static,
    added_fields,
    added_key,
    added_tensors,
    autocast_dtype,
    autocasted,
    backend_name,
    grad_on,
    mask_key,
    out_key,
    raw_stream,
    request_of,
    runner,
    sinks_key,
    torch_deterministic,
)
from .compile.facts import counted
from .compile.symbolic import recorded_call
from .compile.trace import trace_dense
from .device_facts import transform

__all__ = ["DenseSite", "attention", "bind", "dense_request", "dense_signature"]

_is_tracing = torch.compiler.is_dynamo_compiling
_scope = overrides.SCOPE.get
_Guards = validation.TensorGuards

# A site is found by its static arguments, the backend named and the scope of overrides; the epoch (plugins,
# configuration, tuning store) empties every site.


def _dense_key(q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, out: Any, bshd: bool) -> tuple[Any, ...]:
    """The complete signature of a dense call: a `CallKey`, as a bare tuple."""
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
        relation(s_q, s_k),
        b == bk == bv and s_k == s_v,
        not (q.numel() and k.numel() and v.numel()),
        max(q.numel(), k.numel(), v.numel()) >= LARGE,
        (q.stride(-1) == 1 or d == 1, k.stride(-1) == 1 or dk == 1, v.stride(-1) == 1 or dv == 1),
        (not exact and validation.has_shapes_only(q)) or aligned(q, k, v),  # those are at no address
        (q.requires_grad, k.requires_grad, v.requires_grad) if grad_on() else None,
        None if mask is None else mask_key(mask, b, h_q, s_q, s_k),
        None if sinks is None else sinks_key(sinks),
        None if out is None else out_key(out, (*q.shape[:3], dv), (q, k, v)),
        autocast_dtype(kind),
        capturing(kind),
        transform(q, k, v, mask, sinks),
        torch_deterministic(),
    )


def dense_signature(layout: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, out: Any) -> tuple[Any, ...]:
    """The signature of a dense call.

    Raises:
        InvalidInputError: arguments that have none.
    """
    try:
        return _dense_key(q, k, v, mask, sinks, out, layout == "BSHD")
    except (AttributeError, RuntimeError, TypeError, ValueError) as exc:
        validation.check_dense(q, k, v, mask, sinks, out, layout)
        raise InvalidInputError(f"the arguments of attention cannot be read: {exc}; pass 4-D tensors") from exc


def dense_request(
    static: Static,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    sinks: Any,
    out: Any,
    key: CallKey | None = None,
    added: Added = NOTHING,
) -> AttentionRequest:
    """Validate a dense call and say what it asks for. key: its signature, where the caller has taken it.

    Raises:
        InvalidInputError: an argument no backend could serve.
    """
    if key is None or key.autocast is not None:
        q, k, v = autocasted(q, k, v)
        key = None
    validation.check_dense(q, k, v, mask, sinks, out, static.layout, **added)
    key = key or CallKey._make(dense_signature(static.layout, q, k, v, mask, sinks, out))
    if not added:
        return request_of(key, static)
    key = key._replace(transform=transform(q, k, v, mask, sinks, *added.values()))
    return request_of(key, static, **added_fields(added))


_OFTEN = 32
"""Calls of the same lengths before they get a guard of their own."""


class _Fast:
    """The last signature of a site, with or without a mask, as torch guards, and the function it calls.

    `same` holds for the very shapes seen often (without a mask, and strides); `alike` leaves batch and lengths free,
    and all axes of a mask; the rest of it is checked here.
    """

    __slots__ = (
        *("alike", "call", "cuda", "deterministic", "epoch", "grad", "heads", "index"),
        *("lengths", "relation", "rooms", "same", "seen", "times", "watch"),
    )

    def __init__(
        self, call: Any, lengths: int, key: CallKey, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> None:
        heads = 3 - lengths
        sizes = [[t.shape[i] if i in (heads, 3) else None for i in range(4)] for t in (q, k, v)]
        strides = [[None, None, None, None if t.shape[3] == 1 else 1] for t in (q, k, v)]
        tensors, free = ((q, k, v), []) if mask is None else ((q, k, v, mask), [[None] * 4])
        self.alike = _Guards(*tensors, dynamic_dims_sizes=sizes + free, dynamic_dims_strides=strides + free).check
        self.call, self.lengths, self.relation, self.heads = call, lengths, key.relation, key.query_heads
        self.epoch, self.deterministic, self.cuda = EPOCH.value, key.deterministic, q.device.type == "cuda"
        self.index = q.device.index
        # The guards hold requires_grad; grad mode matters only where some input requires it.
        self.grad = grad_on() if any(t is not None and t.requires_grad for t in (q, k, v, mask)) else None
        width = max(key.query_dim, key.value_dim)
        self.rooms = (LARGE // (key.query_heads * width), LARGE // (key.key_heads * width))
        self.watch = self.cuda or self.grad is not None
        self.seen: Any = None
        self.times = 0
        self.keep(*tensors)

    def keep(self, *tensors: Tensor) -> None:
        free = [[None, None, None, None if t.shape[3] == 1 else 1] for t in tensors[:3]] + [[None] * 4]
        strides = None if len(tensors) == 3 else free
        self.same = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=strides).check

    def unmoved(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """`still`, where `same` holds for the strides too, and the caller has looked at the rest."""
        if self.cuda and (
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or (raw_stream(self.index) and recording())
        ):
            return False
        return self.grad is None or self.grad is grad_on()

    def still(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """What the guards do not see: grad mode, torch's deterministic switch, capture and alignment on a GPU.
        Without gradients on a CPU (`watch` off) two comparisons say it all, which callers make."""
        fresh = self.epoch == EPOCH.value and self.deterministic is torch_deterministic()
        return fresh and self.unmoved(q, k, v) and (not self.cuda or aligned(q, k, v))

    def other_lengths(self, *tensors: Tensor) -> bool:
        """Whether the signature holds for other lengths; lengths that come often are remembered for `same`: a guard
        costs as much as many of these checks, and lengths that grow come once for each layer."""
        q, k, v = tensors[:3]
        if not self.alike(*tensors) or (self.watch and not self.still(q, k, v)):
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
        if self.relation != relation(s_q, s_k):
            return False
        if len(tensors) == 4:
            batch, heads, rows, columns = tensors[3].shape
            if not (rows == s_q and columns == s_k and batch in (1, b) and heads in (1, self.heads)):
                return False
        seen = (b, s_q, s_k)
        if self.seen != seen:
            self.seen, self.times = seen, 0
        self.times += 1
        if self.times == _OFTEN:
            self.keep(*tensors)
        return True


class DenseSite:
    """A dense call with its static arguments bound: what `bind` returns, what layers hold, what each call finds.

    Call it with (query, key, value, attn_mask=None, sinks=None, out=None, place=None, alibi=None, segments=None), as
    `polyattn.attention`.
    """

    __slots__ = ("_argument", "_bshd", "_entries", "_epoch", "_fast", "_last", "_masked", "_scope", "static")

    def __init__(self, static: Static, backend: str | None = None, scope: overrides.Scope | None = None) -> None:
        self.static = static.checked()
        self._last: Any = None
        self._bshd = static.layout == "BSHD"
        self._argument = backend_name(backend)
        self._scope = _scope() if scope is None else scope
        overrides.reach(self._scope)
        self._epoch = -1
        self._entries: Recent[Any, Found] = Recent(SIGNATURES_KEPT)
        self._fast: _Fast | None = None
        self._masked: _Fast | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Kernels that were found and the guards before them are a process's own; what they were found by is not.
        return type(self), (self.static, self._argument, self._scope)

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
        segments: Any = None,
    ) -> Any:
        if place is not None or alibi is not None or segments is not None:
            from .placed import at

            tensors = (query, key, value, attn_mask, sinks, out)
            added = added_tensors(alibi, segments)
            return at(tensors, self.static, self._argument, self._scope, place, added)
        if _is_tracing():
            return trace_dense((query, key, value, attn_mask, sinks, out), self.static, self._argument, self._scope)
        fast = self._fast
        if sinks is None and out is None:
            if attn_mask is None:
                if (
                    fast is not None
                    and (
                        (fast.same(query, key, value) and (not fast.watch or fast.unmoved(query, key, value)))
                        or fast.other_lengths(query, key, value)
                    )
                    and fast.epoch == EPOCH.value
                    and fast.deterministic is torch_deterministic()
                    and forward_ad._current_level < 0
                    and not _profiler._is_profiler_enabled
                ):
                    return fast.call(query, key, value)
            elif (
                (fast := self._masked) is not None
                and (fast.same(query, key, value, attn_mask) or fast.other_lengths(query, key, value, attn_mask))
                and fast.still(query, key, value)
                and forward_ad._current_level < 0
                and not _profiler._is_profiler_enabled
            ):
                return fast.call(query, key, value, attn_mask=attn_mask)
        return self._find(query, key, value, attn_mask, sinks, out)

    def _find(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any,
        sinks: Any,
        out: Any,
        place: Any = None,
        added: Added = NOTHING,
    ) -> Any:
        if not isinstance(query, Tensor):
            node = recorded_call(attention, self, query, key, value, attn_mask=attn_mask, sinks=sinks, out=out)
            if node is not None:
                return node
        # An export without dynamo, whose tensors no guard holds for; or fake tensors, which are at no address.
        if place is None and (
            torch.compiler.is_compiling()
            or counted()
            or (type(query) is not Tensor and validation.has_shapes_only(query))
        ):
            six = (query, key, value, attn_mask, sinks, out)
            return trace_dense(six, self.static, self._argument, self._scope, added)
        if self._epoch != EPOCH.value:
            self._entries, self._epoch = Recent(SIGNATURES_KEPT), EPOCH.value
            self._fast = self._masked = None
        entries = self._entries
        signature: Any = dense_signature(self.static.layout, query, key, value, attn_mask, sinks, out)
        said = signature
        if place is not None or added:  # a place itself decides nothing
            signature = (*signature, place is not None, added_key(added, query, key, self.static.layout))
        entry = entries.get(signature) or entries.recall(signature)
        if entry is None:
            tensors = (query, key, value, attn_mask, sinks, out)
            entry = entries.keep(signature, self._resolve(CallKey._make(said), tensors, place is not None, added))
        elif said == self._last and said is signature and sinks is out is None and not _profiler._is_profiler_enabled:
            # Seen twice in a row: worth a guard. Alternating signatures stay with the dict, and so do profiled calls.
            self._remember(CallKey._make(said), entry, query, key, value, attn_mask)
        self._last = signature
        run = entry.chosen.ranged("attention", entry.run)
        given = {**added, "place": place} if entry.chosen.request.place else added
        if place is not None and place.run is not None:  # it is told of what a method leaves to others
            place.run.left(place, entry.chosen.selection)
        return run(query, key, value, attn_mask=attn_mask, sinks=sinks, out=out, **given)

    def _resolve(self, said: CallKey, tensors: Six, placed: bool, added: Added) -> Found:
        request = dense_request(self.static, *tensors, said, added)
        request = dataclasses.replace(request, place=True) if placed else request
        chosen = choose(request, self._argument, self._scope)
        run = runner(chosen, self.static.return_lse, said.autocast is not None, 2 if self._bshd else 1)
        return Found(chosen, run, chosen.bound.simple if run is chosen.bound.forward else None)

    def _remember(self, key: CallKey, entry: Found, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        """Keep a signature for the check in one call; what guards cannot see rules it out."""
        odd = key.zero_size or key.large or key.capture or key.transform or not key.aligned
        # torch's guards never hold for one tensor passed twice.
        distinct = q is not k and k is not v and q is not v
        if _Guards is not None and distinct and key.autocast is None and not odd and key.exact_types:
            call = entry.run if mask is not None else entry.simple or entry.run
            fast = _Fast(call, 1 if self._bshd else 2, key, q, k, v, mask)
            if mask is None:
                self._fast = fast
            else:
                self._masked = fast

    def __polyattn_explain__(self, *args: Any, **kwargs: Any) -> Selection:
        from .placed import explain

        given = inspect.signature(self.__call__).bind(*args, **kwargs)
        given.apply_defaults()
        *tensors, place, alibi, segments = given.args
        added = added_tensors(alibi, segments)
        return explain((*tensors,), self.static, self._argument, self._scope, place, added)


_sites: Recent[Any, Any] = Recent(SITES_KEPT)


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
    place: Place | None = None,
    chunk: int = NO_CHUNK,
    alibi: Tensor | None = None,
    segments: Tensor | tuple[Tensor, Tensor] | None = None,
    batch_invariant: bool = False,
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
        place: where in a model the call is (`polyattn.video.Place`). Methods such as sparse video attention need
            it (docs/methods.md); to all others it only says whether this is cross-attention.
        chunk: chunked-local attention in blocks of so many positions, which is causal; 0 = off (S4).
        alibi: [H_q] slopes of a float dtype; adds -slope * distance to the logits (S8). It has no gradient.
        segments: int32 [B, S], or a pair ([B, S_q], [B, S_k]): a query sees the keys of its own number alone, as of
            packed documents (S8). Other rules hold beside it, with positions along the whole row.
        batch_invariant: only a backend that gives a sequence the same bits whatever else is in its batch.

    Returns:
        out like query with D_v, or (out, lse). Rows that see no key are 0 with lse = -inf (S7).

    Raises:
        InvalidInputError: an argument no backend could serve. UnsupportedRequestError: none here can, or the named
            one cannot; the message has everyone's reasons. BackendUnavailableError: the named one is not here.
    """
    if not (chunk is NO_CHUNK and place is None and alibi is None and segments is None and batch_invariant is False):
        from .placed import at

        own = (
            causal, window, softcap, scale, layout, dropout_p, return_lse, deterministic, chunk, None, batch_invariant,
        )  # fmt: skip
        tensors = (query, key, value, attn_mask, sinks, out)
        return at(tensors, own, backend, None, place, added_tensors(alibi, segments))
    if _is_tracing():
        static = Static(causal, window, softcap, scale, layout, dropout_p, return_lse, deterministic)
        return trace_dense((query, key, value, attn_mask, sinks, out), static, backend, None)
    try:
        left, right = window
        # The types, since 1, 1.0 and True are one key of a dict: who takes 1.0 need not take True.
        name = (
            causal, window, softcap, scale, layout, dropout_p, return_lse, deterministic, backend, _scope(),
            type(causal), type(left), type(right), type(softcap), type(scale), type(dropout_p), type(return_lse),
            type(deterministic),
        )  # fmt: skip
        site = _sites.get(name) or _sites.recall(name)
    except (TypeError, ValueError):  # an unhashable argument: a window as a list is fine, the rest is told
        name = site = None  # type: ignore[assignment]
    if site is None:
        static = Static(causal, window, softcap, scale, layout, dropout_p, return_lse, deterministic)
        site = DenseSite(static, backend).__call__
        if name is not None:
            _sites.keep(name, site)
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
    role: str | None = None,
    backend: str | None = None,
    chunk: int = 0,
    batch_invariant: bool = False,
) -> DenseSite:
    """Bind the static arguments of `attention` once, for the hottest paths and for layers.

    The overrides in force now (`use_backend`, the component) are captured; process-wide changes still take effect.

    Args:
        role: "self" or "cross", whose keys these are; None = not said. The others are as `attention`.

    Returns:
        A callable (query, key, value, attn_mask=None, sinks=None, out=None, place=None, alibi=None, segments=None), as
        `attention`.
    """
    static = Static(
        causal, window, softcap, scale, layout, dropout_p, return_lse, deterministic, chunk, role, batch_invariant
    )
    return DenseSite(static, backend)


def _asked(backend: Any, **given: Any) -> Selection:
    static = {name: given.pop(name) for name in Static._fields if name in given}
    return DenseSite(Static(**static), backend).__polyattn_explain__(**given)


explained_by(attention, _asked)
