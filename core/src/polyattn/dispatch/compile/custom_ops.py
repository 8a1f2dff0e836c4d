"""The custom ops: one opaque op per family, with a fake and autograd, for what torch.compile cannot trace.

Their `plan` argument is JSON and holds everything needed to bind the same kernel again (`op_plans.py`), so that a saved
graph can be run by another process. They are registered as soon as both polyattn and torch are imported
(`registration.py`), from the schemas alone; what runs them is imported when one runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

__all__ = ["SCHEMAS"]

_MASKED = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
SCHEMAS = {
    "dense": _MASKED,
    "varlen": f"{_MASKED}, {_LENGTHS}",
    "block_sparse": (
        "Tensor query, Tensor key, Tensor value, Tensor block_counts, Tensor block_indices, Tensor? block_valid"
    ),
    "linear": ("Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor? state, Tensor? cu_seqlens"),
}
"""Of each family the arguments before `plan`, as saved graphs have them. They are those of
`polyattn.contract.families`, which a test compares: importing that here would cost every program that imports torch."""
ADDED = {
    "dense": ", Tensor? alibi=None, Tensor? q_segments=None, Tensor? k_segments=None",
    "varlen": ", Tensor? alibi=None",
    "block_sparse": ", Tensor? block_starts=None",
}
"""Arguments behind `plan`, which graphs saved before them do not have."""

_TABLES = "Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt max_seqlen_q, SymInt max_seqlen_k"
_GIVEN = "Tensor? key, Tensor? value, Tensor? attn_mask, Tensor? sinks, Tensor? k_scale, Tensor? v_scale"
_PARTS = "Tensor?[] kv_parts, SymInt[] part_lengths, str plan"
CACHED = {
    "paged": f"Tensor query, Tensor key_cache, Tensor value_cache, {_TABLES}, {_GIVEN}, {_PARTS}, Tensor? alibi=None",
    "mla": f"Tensor query, Tensor cache, {_TABLES}, Tensor? attn_mask, {_PARTS}, Tensor? token_indices=None",
}
"""Of the families that read a cache all arguments. `paged_saving` is `paged` that writes new keys to its caches."""


@functools.cache
def op_plans() -> Any:
    """Imported when an op runs first: it takes longer than all of this."""
    return import_module(".op_plans", __package__)


class _Op:
    """The op of a family, and the op of its gradient."""

    def __init__(self, family: str, arguments: str) -> None:
        added = ADDED.get(family, "")
        self._family, self._count, self._added = family, arguments.count(",") + 1, added.count(",")
        second, last = ("dstate", "final_state") if family == "linear" else ("dlse", "lse")
        schema, grads = f"({arguments}, str plan{added}) -> (Tensor, Tensor)", f"Tensor? dout, Tensor? {second}"
        forward = torch.library.custom_op(f"polyattn::{family}", self._run, mutates_args=(), schema=schema)
        forward.register_fake(self._fake)
        forward.register_autograd(self._differentiate, setup_context=self._keep)
        backward = torch.library.custom_op(
            f"polyattn::{family}_backward",
            self._gradients,
            mutates_args=(),
            schema=f"({grads}, {arguments}, Tensor out, Tensor {last}, str plan{added}) -> Tensor[]",
        )
        backward.register_fake(self._fake_gradients)
        backward.register_autograd(_second)
        self._backward = backward

    def _split(self, given: Sequence[Any], count: int) -> tuple[list[Any], str]:
        """(all arguments but the plan, the plan), of which `count` stand before it. torch leaves defaults out."""
        added = given[count + 1 :]
        return [*given[:count], *added, *[None] * (self._added - len(added))], given[count]

    def _run(self, *given: Any) -> tuple[Tensor, Tensor]:
        arguments, plan = self._split(given, self._count)
        found: tuple[Tensor, Tensor] = op_plans().forward(plan, self._family, arguments)
        return found

    def _fake(self, *given: Any) -> tuple[Tensor, Tensor]:
        arguments, plan = self._split(given, self._count)
        found: tuple[Tensor, Tensor] = op_plans().outputs(plan, self._family, arguments)
        return found

    def _gradients(self, dout: Tensor | None, dsecond: Tensor | None, *given: Any) -> list[Tensor]:
        arguments, plan = self._split(given, self._count + 2)
        out, second = arguments[self._count : self._count + 2]
        del arguments[self._count : self._count + 2]
        found: list[Tensor] = op_plans().backward(plan, self._family, arguments, dout, dsecond, out, second)
        return found

    def _fake_gradients(self, dout: Any, dsecond: Any, *given: Any) -> list[Tensor]:
        return [t.new_empty(t.shape) for t in self._trained(given[: self._count])]

    def _trained(self, arguments: Any) -> list[Tensor]:
        """The arguments that the gradient's op gives gradients of."""
        places = op_plans().differentiable(self._family)
        return [arguments[place] for place in places if arguments[place] is not None]

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        arguments, ctx.plan = self._split(inputs, self._count)
        ctx.set_materialize_grads(False)
        ctx.host = {place: one for place, one in enumerate(arguments) if isinstance(one, (int, torch.SymInt))}
        ctx.save_for_backward(*(None if place in ctx.host else one for place, one in enumerate(arguments)), *output)

    def _differentiate(self, ctx: Any, dout: Tensor | None, dsecond: Tensor | None) -> tuple[Any, ...]:
        *saved, out, second = ctx.saved_tensors
        arguments = [ctx.host.get(place, one) for place, one in enumerate(saved)]
        dsecond = dsecond if second.numel() else None
        before, added = arguments[: self._count], arguments[self._count :]
        grads = iter(self._backward(dout, dsecond, *before, out, second, ctx.plan, *added))
        trained = [p for p in op_plans().differentiable(self._family) if arguments[p] is not None]
        by_place = {place: next(grads) for place in trained}
        return (*(by_place.get(place) for place in range(self._count)), None, *[None] * self._added)


def _second(ctx: Any, *grads: Any) -> Any:
    op_plans().refuse_second()


@functools.cache
def _cached() -> Any:
    return import_module(".trace_cached", __package__)


def _register(name: str, family: str, *written: str) -> None:
    """An op of a family that reads a cache. It makes the eager call, and has no gradient."""
    arguments = CACHED[family]
    for letter, one in zip("ab", written, strict=False):
        arguments = arguments.replace(f"Tensor {one},", f"Tensor({letter}!) {one},")
    schema = f"({arguments}) -> (Tensor, Tensor)"

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _cached().forward(family, *given)
        return found

    op = torch.library.custom_op(f"polyattn::{name}", run, mutates_args=written, schema=schema)
    op.register_fake(lambda *given: _cached().outputs(family, *given))


_OPS = [_Op(family, arguments) for family, arguments in SCHEMAS.items()]
_register("mla", "mla")
_register("paged", "paged")
_register("paged_saving", "paged", "key_cache", "value_cache")
