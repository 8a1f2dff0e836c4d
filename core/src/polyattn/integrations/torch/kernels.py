"""This module serves torch's operators of flash attention with polyattn's calls.

They are the operators below autograd: a forward that gives the LSE, and a backward that takes it, which is what
`polyattn.bind_part` has. What an operator asks for beyond that is refused by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.part import Part, bind_part
from ...errors import UnsupportedRequestError
from ...selection.overrides import SCOPE, Scope

__all__ = ["DEVICES", "kernels"]

DEVICES = ("CPU", "CUDA")
"""torch's dispatch keys that have the operators."""


class _Operator(NamedTuple):
    name: str
    run: Callable[..., Any]


def kernels(device: str, backend: str | None) -> list[_Operator]:
    """Return the operators of a dispatch key, each with what serves it.

    Args:
        device: of `DEVICES`. backend: by name, None = whoever is chosen.
    """
    serve = _Serve(backend)
    packed = [
        _Operator("_flash_attention_forward", serve.flash),
        _Operator("_flash_attention_backward", serve.flash_backward),
    ]
    if device == "CPU":
        return [
            _Operator("_scaled_dot_product_flash_attention_for_cpu", serve.cpu),
            _Operator("_scaled_dot_product_flash_attention_for_cpu_backward", serve.cpu_backward),
            *packed,
        ]
    return [
        _Operator("_scaled_dot_product_flash_attention", serve.dense),
        _Operator("_scaled_dot_product_flash_attention_backward", serve.dense_backward),
        *packed,
    ]


class _Serve:
    """Serves operators by one backend, or whoever is chosen for each call."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend
        self._parts = functools.lru_cache(maxsize=256)(self._bound)

    def _bound(
        self, scope: Scope, causal: bool | str, scale: float | None, window: tuple[int, int], layout: str, trained: bool
    ) -> Part:
        return bind_part(
            causal=causal, scale=scale, window=window, layout=layout, backward=trained, backend=self._backend
        )

    def _part(
        self,
        causal: bool | str,
        scale: float | None,
        layout: str = "BHSD",
        window: tuple[int, int] = (-1, -1),
        *,
        trained: bool,
    ) -> Part:
        # A part has the overrides that were in force when it was bound.
        return self._parts(SCOPE.get(), causal, scale, window, layout, trained)

    # torch's operators on a CPU ---------------------------------------------------------------------------------------

    def cpu(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        _refuse(dropout_p=dropout_p)
        part = self._part("top_left" if is_causal else False, scale, trained=_trained(query, key, value))
        out, lse = part.forward(query, key, value, attn_mask=_mask(attn_mask))
        # Compiled code relies on the strides that torch's own kernel gives.
        batch, heads, length = lse.shape
        told = lse.new_empty(batch, length, heads).transpose(1, 2)
        return torch.empty_like(query).copy_(out), told.copy_(lse)

    def cpu_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        _refuse(dropout_p=dropout_p)
        part = self._part("top_left" if is_causal else False, scale, trained=True)
        return _backward(part, grad_out, query, key, value, out, logsumexp, by_rows=True, attn_mask=_mask(attn_mask))

    # torch's operators on a GPU ---------------------------------------------------------------------------------------

    def dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
        part = self._part("top_left" if is_causal else False, scale, trained=_trained(query, key, value))
        out, lse = part.forward(query, key, value)
        told = torch.empty_like(query).copy_(out)
        return told, lse.contiguous(), None, None, query.shape[2], key.shape[2], *_nothing(query)

    def dense_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        _refuse(dropout_p=dropout_p)
        part = self._part("top_left" if is_causal else False, scale, trained=True)
        return _backward(part, grad_out, query, key, value, out, logsumexp)

    # What `torch.nn.attention.varlen` calls ---------------------------------------------------------------------------

    def flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> tuple[Tensor, ...]:
        _refuse(
            dropout_p=dropout_p, return_debug_mask=return_debug_mask, seqused_k=seqused_k, alibi_slopes=alibi_slopes,
            block_table=block_table, num_splits=num_splits,
        )  # fmt: skip
        part, packed = self._packed(
            is_causal, scale, window_size_left, window_size_right, cum_seq_q, cum_seq_k, max_q, max_k,
            trained=_trained(query, key, value),
        )  # fmt: skip
        out, lse = part.forward(query, key, value, **packed)
        # torch has heads before the length.
        return out, lse.transpose(-1, -2).contiguous(), *_nothing(query)

    def flash_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:
        _refuse(dropout_p=dropout_p)
        part, packed = self._packed(
            is_causal, scale, window_size_left, window_size_right, cum_seq_q, cum_seq_k, max_q, max_k, trained=True
        )
        lse = logsumexp.transpose(-1, -2).contiguous()
        return _backward(part, grad_out, query, key, value, out, lse, **packed)

    def _packed(
        self,
        is_causal: bool,
        scale: float | None,
        left: int | None,
        right: int | None,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        trained: bool,
    ) -> tuple[Part, dict[str, Any]]:
        window = (-1 if left is None else left, -1 if right is None else right)
        if cum_seq_q is None or cum_seq_k is None:
            return self._part(is_causal, scale, "BSHD", window, trained=trained), {}
        lens = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
        return self._part(is_causal, scale, "THD", window, trained=trained), lens


def _trained(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _mask(mask: Tensor | None) -> Tensor | None:
    """The mask with all four axes."""
    if mask is None:
        return None
    while mask.dim() < 4:
        mask = mask[None]
    return mask


def _backward(
    part: Part, grad_out: Tensor, *tensors: Tensor, by_rows: bool = False, **given: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, the first three of `tensors`.

    Args:
        by_rows: they lie as [B, S, H, D] in memory, as those of torch's CPU kernel do; else as what they belong to.
            Compiled code relies on it.
    """
    # Below autograd nothing is recorded, but a backend without a backward of its own records its forward anew.
    keys = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "ADInplaceOrView"):
        keys = keys - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys):
        grads = part.backward(grad_out, *(tensor.detach() for tensor in tensors), **given)
    made = [
        torch.empty_permuted(one.shape, (0, 2, 1, 3), dtype=one.dtype, device=one.device)
        if by_rows
        else torch.empty_like(one)
        for one in tensors[:3]
    ]
    return tuple(one.copy_(grad) for one, grad in zip(made, grads, strict=True))


def _nothing(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What flash attention says of dropout, without dropout: the state of the generator, nothing, and no mask."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, state.new_zeros(()), query.new_empty(0)


def _refuse(**asked: Any) -> None:
    """Refuse what an operator can ask for and polyattn does not serve through it."""
    for name, value in asked.items():
        if value is None or value is False or (name == "dropout_p" and value == 0):
            continue
        shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise UnsupportedRequestError(
            f"{name}={shown} reached polyattn through torch's slot of flash attention, which serves no {name} there; "
            f"leave it out, or call polyattn.integrations.torch.uninstall() before",
            {name: ["not served through torch's slot"]},
        )
