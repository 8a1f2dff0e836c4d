"""`bind_part`: a call over some of the keys, whose results are merged with those of others.

Ring attention, cascades and split K/V compute each part by itself, merge the parts by their LSE (`polyattn.merge`), and
give every part's backward the merged (out, lse). Autograd has no place in that, so parts have none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import AttentionRequest, UnsupportedRequestError, scalars
from ..contract.families import FAMILY_SPECS
from ..contract.lengths import extent_of
from ..errors import InvalidInputError
from ..selection import overrides
from ..selection.select import Selection
from ..semantics import validation
from ..semantics.autograd import recomputed_backward
from .binding import Chosen, choose, select_here
from .bound_table import BoundTable
from .call_key import Static, added_key, added_tensors, autocasted, backend_name, without_autocast
from .dense import dense_request, dense_signature
from .varlen import packed_key, varlen_request

__all__ = ["Part", "bind_part"]

_TRAINED = ("query", "key", "value", "lse")


class _Entry(NamedTuple):
    chosen: Chosen
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None


class Part:
    """Attention over some of the keys, bound by `bind_part`: `forward` and `backward` without autograd."""

    __slots__ = ("_argument", "_check", "_scope", "_table", "_trained", "static")

    def __init__(
        self, static: Static, backward: bool = True, backend: str | None = None, scope: overrides.Scope | None = None
    ) -> None:
        self.static = static.checked((*validation.LAYOUTS, "THD"))
        self._trained = scalars.flag("backward", backward)
        self._argument = backend_name(backend)
        self._scope = overrides.SCOPE.get() if scope is None else scope
        overrides.reach(self._scope)
        self._table: BoundTable[_Entry] = BoundTable()
        self._check = validation.PackedCheck()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.static, self._trained, self._argument, self._scope)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        alibi: Tensor | None = None,
        segments: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """The result of these keys alone; no gradient is recorded.

        Args:
            query, key, value, attn_mask: as `polyattn.attention`, or as `polyattn.varlen_attention` for layout THD.
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: for layout THD only, as `varlen_attention`.
            alibi, segments: as `polyattn.attention`, of these keys; segments not for layout THD.

        Returns:
            (out, lse): what `attention(..., return_lse=True)` returns. Give several to `polyattn.merge`.

        Raises:
            InvalidInputError, UnsupportedRequestError, BackendUnavailableError: as `polyattn.attention`.
        """
        lens = self._lens(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, alibi=alibi, segments=segments)
        run = _as_compiled(self._forward)
        result: tuple[Tensor, Tensor] = run(query, key, value, attn_mask, lens)
        return result

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        attn_mask: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        alibi: Tensor | None = None,
        segments: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This part's share of the gradients, given the merged result.

        Args:
            dout: gradient of the merged output, like `out`.
            query, key, value and the keywords: those of `forward`.
            out, lse: of the whole: the merge of this part and all others. Where sinks were merged in, `out` with them
                and `logaddexp(lse, sinks)` in the place of `lse`.

        Returns:
            (dquery, dkey, dvalue), each in the dtype of its input. dquery is to be summed over the parts.

        Raises:
            InvalidInputError: tensors that do not fit, or a part that was bound with backward=False.
            UnsupportedRequestError, BackendUnavailableError: as `forward`.
        """
        if not self._trained:
            raise InvalidInputError(
                "the backward of a part that was bound with backward=False is called; bind it with backward=True, "
                "which chooses among the backends that have one"
            )
        lens = self._lens(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, alibi=alibi, segments=segments)
        run = _as_compiled(self._backward)
        dquery, dkey, dvalue = run(dout, query, key, value, out, lse, attn_mask, lens)
        return dquery, dkey, dvalue

    @property
    def _packed(self) -> bool:
        return self.static.layout == "THD"

    @property
    def _spec(self) -> Any:
        return FAMILY_SPECS["varlen" if self._packed else "dense"]

    def _lens(self, *given: Any, alibi: Any, segments: Any) -> dict[str, Any]:
        """What a kernel is given beside the tensors and the mask, in the words of its family."""
        lens = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), given, strict=True))
        packed = self._packed
        wrong = [name for name, value in lens.items() if (value is None) is packed]
        if wrong:
            says = "are missing" if packed else "are given"
            raise InvalidInputError(
                f"{', '.join(wrong)} {says} to a part with layout={self.static.layout!r}; layout='THD' takes all four, "
                "the others none"
            )
        if packed and segments is not None:
            raise InvalidInputError("segments are given to a part with layout='THD', whose cu_seqlens say the same")
        added = dict(added_tensors(alibi, segments))
        if not packed:
            return added
        lens = {name: scalars.length(name, n) if name.startswith("max") else n for name, n in lens.items()}
        return lens | added

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, lens: dict[str, Any]) -> Any:
        with torch.no_grad():
            query, key, value, entry = self._entry(query, key, value, attn_mask, lens)
            run = entry.chosen.ranged(f"{self._spec.call} part", entry.forward)
            return without_autocast(run, query, key, value, attn_mask=attn_mask, **lens)

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attn_mask: Any, lens: Any
    ) -> tuple[Tensor, ...]:
        with torch.no_grad():
            query, key, value, entry = self._entry(q, k, v, attn_mask, lens)
            _check_whole(dout, out, lse, query, value)
            dout, out = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (dout, out))
            given = (dout, query, key, value, out, lse)
            grads = without_autocast(entry.backward, *given, attn_mask=attn_mask, **lens)
        return tuple(grad.to(one.dtype) for grad, one in zip(grads, (q, k, v), strict=True))

    def _entry(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, lens: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, _Entry]:
        """The tensors as a kernel takes them, and what serves them."""
        query, key, value = autocasted(query, key, value)
        if self._packed:
            self._check(query, key, value, attn_mask=attn_mask, sinks=None, out=None, **lens)
            validation.check_lengths(query, key, **lens)
            signature = packed_key(query, key, value, attn_mask, None, None, lens)
        else:
            signature = dense_signature(self.static.layout, query, key, value, attn_mask, None, None)
            if lens:
                signature = (*signature, added_key(lens, query, key, self.static.layout))
        entry = self._table.get(signature)
        if entry is None:
            entry = self._table.put(signature, self._resolve(self._request(query, key, value, attn_mask, lens)))
        return query, key, value, entry

    def _request(self, query: Any, key: Any, value: Any, attn_mask: Any, lens: dict[str, Any]) -> AttentionRequest:
        if self._packed:
            request = varlen_request(self.static, query, key, value, attn_mask, None, lens)
        else:
            request = dense_request(self.static, query, key, value, attn_mask, None, None, added=lens)
        return dataclasses.replace(request, grad=_TRAINED) if self._trained else request

    def _resolve(self, request: AttentionRequest) -> _Entry:
        # One backend for all lengths: a part of another length is met by a backward that takes the same LSE.
        try:
            chosen = choose(request, self._argument, self._scope, planned=True)
        except UnsupportedRequestError as error:
            # A gradient through the LSE is more than a kernel with a backward of its own needs.
            less = self._trained and self._chosen(dataclasses.replace(request, grad=_TRAINED[:3]))
            if not less or less.bound.backward is None:
                raise error
            chosen = less
        if not self._trained:
            return _Entry(chosen, chosen.bound.forward, None)
        backward = chosen.bound.backward or recomputed_backward(chosen.bound.forward)
        return _Entry(chosen, chosen.bound.forward, backward)

    def _chosen(self, request: AttentionRequest) -> Chosen | None:
        try:
            return choose(request, self._argument, self._scope, planned=True)
        except UnsupportedRequestError:
            return None

    def __polyattn_explain__(
        self, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **given: Any
    ) -> Selection:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        beside = {name: given.get(name) for name in ("alibi", "segments")}
        lens = self._lens(*(given.get(name) for name in names), **beside)
        with torch.no_grad():
            if self._packed:
                self._check(query, key, value, attn_mask=attn_mask, sinks=None, out=None, **lens)
            request = self._request(query, key, value, attn_mask, lens)
        extent = extent_of(request)(query, key, **lens)
        return select_here(request, self._argument, self._scope, extent, full=True)


def _check_whole(dout: Any, out: Any, lse: Any, query: Tensor, value: Tensor) -> None:
    """Check the merged result and its gradient against the part's queries and values."""
    shape = (*query.shape[:-1], value.shape[-1])
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    for name, tensor, sizes, dtype in (
        ("dout", dout, shape, query.dtype),
        ("out", out, shape, query.dtype),
        ("lse", lse, shape[:-1], wide),
    ):
        validation.check_tensor(name, tensor, len(sizes), "that of the merged result")
        if tuple(tensor.shape) != sizes or tensor.dtype != dtype or tensor.device != query.device:
            raise InvalidInputError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; the merged result of this part's "
                f"queries has {dtype} {list(sizes)} on {query.device}: cast it, or pass the merge of this part"
            )


def _as_compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`; in code that is compiled, between two graphs."""
    if not torch.compiler.is_compiling():
        return run
    from .compile.between_graphs import between_graphs

    return functools.partial(between_graphs, run)


def bind_part(
    *,
    causal: bool | str = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
    layout: str = "BSHD",
    deterministic: bool = False,
    backward: bool = True,
    backend: str | None = None,
    chunk: int = 0,
) -> Part:
    """Bind attention over some of the keys, for results that are merged with those of the others.

    It is chosen as a call with return_lse=True whose query, key and value want gradients. Sinks belong to the whole:
    give them to the last `polyattn.merge`. The overrides in force now are captured, as by `polyattn.bind`.

    Args:
        causal, window, softcap, scale, deterministic, backend, chunk: as `polyattn.attention`.
        layout: BSHD or BHSD for dense tensors, THD for packed ones.
        backward: whether `Part.backward` will be called. False: any backend with an LSE may be chosen.

    Returns:
        A `Part` with `forward(query, key, value, ...) -> (out, lse)` and `backward(dout, query, key, value, out, lse,
        ...) -> (dquery, dkey, dvalue)`, of which the second takes the merged (out, lse).

    Raises:
        InvalidInputError: an argument no backend could serve.

    Example:
        >>> import polyattn
        >>> q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        >>> part, halves = bind_part(), [(k[:, :8], v[:, :8]), (k[:, 8:], v[:, 8:])]
        >>> out, lse = polyattn.merge(*zip(*(part.forward(q, *half) for half in halves)))
        >>> grads = [part.backward(torch.ones_like(out), q, *half, out, lse) for half in halves]
        >>> dquery = grads[0][0] + grads[1][0]
        >>> torch.allclose(out, polyattn.attention(q, k, v), atol=1e-5)
        True
    """
    static = Static(causal, window, softcap, scale, layout, 0.0, True, deterministic, chunk)
    return Part(static, backward, backend)
