"""This module describes what the kit must know of a family to try it: its shapes, its tensors, its call, and what is
right."""

from __future__ import annotations

import abc
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ...contract import AttentionRequest
from ...contract.families import FAMILY_SPECS
from ..cases import Case
from ..plain import Method, plain_attention, reference_attention, softmax_terms

if TYPE_CHECKING:
    from ..problems import Maker

__all__ = ["DTYPES", "Call", "Family", "Lengths", "Part", "Shapes", "Variants", "along", "drawn_parts", "spans"]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The request's words for the dtypes that the kit makes tensors of."""

Lengths = tuple[tuple[int, int], ...]
"""(S_q, S_k) of each sequence of a batch."""

Shapes = Mapping[str, Sequence[Lengths]]
"""For each s_relation, the batches to try."""

Part = tuple[Any, ...]
"""What `Family.exact` and `Family.plain` compute at once: query, key, value and whatever else. For softmax families
[B, H_q, S_q, D] of sequences of equal lengths, and attn_mask (or None)."""


class Call(NamedTuple):
    """Holds one call: its case, its tensors by argument name (`mask` stands for attn_mask) and its other arguments."""

    case: Case
    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Any]


class Variants(Protocol):
    """The case of some field values, as a list of one; an empty list where the capability row does not take it."""

    def __call__(
        self, asked: Mapping[str, Any], extra: Mapping[str, Any], /, wish: Mapping[str, Any] = ..., **changes: Any
    ) -> list[Case]:
        """`asked`: values of fields that are combined; `extra`: of fields that are tried alone; `wish`: values that
        make a better case and are left out where the row does not take them; `changes`: of the case itself. Fields
        that the family has no use for are left out."""
        ...


class Family(abc.ABC):
    """Describes one family of `polyattn.contract.FAMILIES`. An instance in `polyattn.testing.families.FAMILIES` is all
    it takes to have a family generated, computed and checked.

    Attributes:
        lengths: for each s_relation, the batches to try. Odd, at and around a tile of 64, and the smallest.
        long: the same over several tiles of a kernel, whose widths are 64 to 256. Without any, nothing that
            `polyattn.testing.long_cases` makes is tried.
        empty: the same for requests with a tensor of no elements.
        batched: a batch has one length: `lengths` are repeated for it.
        drafts: a tree of draft tokens is an argument of its own, and no mask.
        family: its name in `polyattn.contract.families.FAMILY_SPECS`, which gives the next three.
        layouts: of the request. positional: names of the bound function's positional arguments.
        second: what comes back beside the output: an `lse` when it is asked for, or a `state` always.
        optional: names of the tensors that the public call hands to it whether they are there or None.
        says: fields that the public call can ask for; a case with another one is called as bound. Empty: no such call.
        unmade: field values that `make` has no tensors for; a report lists those that a row takes as not run.
        exact, plain: the mathematics of one part, (*part, sinks, request) -> (out, second): the definition in float64,
            and plain torch in the tensors' own dtype, what anybody would write first.
        terms: a function whose gradients are the sums of absolute terms of each gradient, see
            `polyattn.testing.plain.cancelling`; None where gradients do not cancel.
    """

    family: ClassVar[str] = ""
    lengths: ClassVar[Shapes]
    long: ClassVar[Shapes] = {}
    empty: ClassVar[Mapping[str, Lengths]] = {}
    batched: ClassVar[bool] = False
    drafts: ClassVar[bool] = False
    layouts: ClassVar[tuple[str, ...]] = ("THD",)
    positional: ClassVar[tuple[str, ...]] = ("query", "key", "value")
    optional: ClassVar[tuple[str, ...]] = ()
    says: ClassVar[frozenset[str]] = frozenset()
    unmade: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "alibi": (True,),
        "segments": ("shared", "pair"),
        "kv_dtype": ("int8", "fp4_e2m1"),
        "kv_layout": ("vectorised", "NZ"),
        "kv_scales": ("block16", "block128"),
        "kv_parts": (1, 3),
        "block_map": (True,),
        "block_sizes": (True,),
        "block_starts": (True,),
    }
    second: ClassVar[str] = "lse"
    exact: ClassVar[Method] = staticmethod(reference_attention)
    plain: ClassVar[Method] = staticmethod(plain_attention)
    terms: ClassVar[Method | None] = staticmethod(softmax_terms)

    def __init_subclass__(cls) -> None:
        if spec := FAMILY_SPECS.get(cls.__dict__.get("family", "")):
            cls.positional = tuple(one.name for one in spec.positional)
            cls.layouts, cls.second = spec.layouts, spec.second

    # --- what is generated

    def axes(self, axes: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        """The values to combine, from those that a row takes: only what the family can be asked."""
        # Only a cache has rows that are not in it yet.
        return {**axes, "new_rows": (False,)}

    def repaired(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values that were chosen one by one, made consistent."""
        return dict(values)

    def keywords(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """`Call.extra`, which has the words of the public call, as keywords of the bound function."""
        return dict(extra)

    def kv_heads(self, group: int) -> int:
        """H_kv at a GQA group."""
        # One key head at the largest group: that is multi-query attention.
        return 1 if group == 8 else 2

    def relations(self, variants: Variants, rng: random.Random) -> Iterator[Case]:
        """Cases of two ways to the same numbers, the most telling first."""
        return iter(())

    def recorded(self, variants: Variants) -> Iterator[Case]:
        """Cases of steps that an engine records into a device graph, the most telling first."""
        return iter(())

    # --- tensors

    def shaped(self, case: Case, name: str, values: Tensor) -> Tensor:
        """Normal values of the query, key or value, made what the case needs."""
        return values

    def differentiated(self, case: Case) -> list[str]:
        """Names of the tensors whose gradients are compared."""
        return [name for name in case.request.grad if name != "lse"]

    def settled(self, case: Case, backend: str) -> contextlib.AbstractContextManager[Any]:
        """Within, the process is configured as a case of this backend needs it."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def make(self, case: Case, maker: Maker) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        """(inputs by argument name, `mask` standing for attn_mask; other arguments)."""

    @abc.abstractmethod
    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs that `Case.storage` is about."""

    @abc.abstractmethod
    def out_shape(self, case: Case) -> tuple[int, ...]:
        """Shape of the output."""

    def second_form(self, case: Case) -> tuple[tuple[int, ...], tuple[torch.dtype, ...]]:
        """Shape of what comes back beside the output, and the dtypes it may have."""
        # S6: float32, and in float64 the reference's own precision is welcome.
        wide = case.request.dtype == "float64"
        return self.out_shape(case)[:-1], (torch.float32, torch.float64) if wide else (torch.float32,)

    def spelt_out(
        self, request: AttentionRequest, tensors: Mapping[str, Tensor], mask: Tensor | None, s_q: int, s_k: int
    ) -> Tensor | None:
        """A mask [1|B, 1|H_q, S_q, S_k] together with what slopes and segments say of sequences of one length (S8)."""
        if (slopes := tensors.get("alibi")) is not None:
            first = 0 if request.causal == "top_left" else s_k - s_q
            keys = torch.arange(s_k, device=slopes.device)
            distance = (torch.arange(s_q, device=slopes.device)[:, None] + first - keys).abs()
            bias = (-slopes[:, None, None] * distance)[None]
            no_mask = mask is None or mask.dtype == torch.bool
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf")) if no_mask else bias + mask
        if (queries := tensors.get("q_segments")) is not None:
            seen = (queries[:, :, None] == tensors["k_segments"][:, None, :])[:, None]
            if mask is None or mask.dtype == torch.bool:
                return seen if mask is None else seen & mask
            mask = mask.masked_fill(~seen, float("-inf"))
        return mask

    def places(self, case: Case) -> Tensor:
        """Return where each key lies in its sequence, from 0 to 1, to be multiplied with the key tensor. Of families
        whose `make` draws keys with `Maker.input`."""
        raise NotImplementedError(f"{type(self).__name__} has no `places`, which logits={case.logits!r} need")

    # --- the call

    def sayable(self, case: Case) -> bool:
        """Return whether the public call can ask for this case."""
        active = case.request.normalised().active()
        return bool(self.says) and all(name in self.says for name, _ in active if name != "group")

    def public(self, call: Call) -> tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]:
        """(the public call, its positional and its keyword arguments) of a case that is `sayable`."""
        raise NotImplementedError(f"{type(self).__name__} has no public call: override `says` and `public` together")

    def returned(self, request: AttentionRequest, raw: Any) -> tuple[Tensor, Tensor | None]:
        """(output, what comes beside it or None) from what a call returned."""
        return raw if request.lse or self.second != "lse" else (raw, None)

    def written(self, call: Call) -> Mapping[str, Tensor]:
        """The inputs that the call is asked to write to, by name, as they must be afterwards."""
        return {}

    def lent(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """`Call.extra` for one call, with copies of what it may write to."""
        return extra

    def misused(self, case: Case, extra: Mapping[str, Any], lent: Mapping[str, Any], second: Tensor | None) -> str:
        """What is wrong with what a call did to its `lent` arguments, beside the numbers of `second`; "" = nothing."""
        return ""

    # --- what is right

    @abc.abstractmethod
    def parts(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Iterator[Part]:
        """The call as problems for `exact` and `plain`, differentiable with respect to `tensors`."""

    @abc.abstractmethod
    def join(self, case: Case, outs: Sequence[Tensor], seconds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Their results as the call returns them."""

    # --- other calls that must give the same numbers; for the checks that `relations` asks for

    def first(self, call: Call) -> tuple[Call, int]:
        """(its first sequence alone, how many rows of the output along the first axis that is): `batch_invariant`."""
        raise self._missing("first", "batch_invariant")

    def last(self, call: Call) -> tuple[Call, Tensor, int]:
        """(decode of the last query of each sequence, where these rows are in the output, along which axis)."""
        raise self._missing("last", "decode")

    def pieces(self, call: Call) -> list[Call]:
        """The same queries over each of `call.case.parts`."""
        raise self._missing("pieces", "split")

    def repaged(self, call: Call, generator: torch.Generator) -> Call:
        """The same content on other pages."""
        raise self._missing("repaged", "pages")

    def _missing(self, method: str, check: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no `{method}`, which the check {check!r} needs")


def along(length: int) -> Tensor:
    """Places of the keys of one sequence, from 0 to 1: [S_k]."""
    return torch.linspace(0, 1, length) if length > 1 else torch.ones(length)


def drawn_parts(rng: random.Random, total: int, step: int = 1, empty: bool = False) -> tuple[int, ...]:
    """Two to four widths that add up to `total`, cut at any multiples of `step`; with `empty`, one of them is 0."""
    places = range(step, total, step)
    cuts = sorted(rng.sample(places, min(rng.randint(1, 2 if empty else 3), len(places))))
    widths = [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
    if empty:
        widths.insert(rng.randint(0, len(widths)), 0)
    return tuple(widths)


def spans(parts: Sequence[int]) -> list[slice]:
    """Return where the parts of a split lie on the keys' axis."""
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return [slice(start, start + width) for start, width in zip(starts, parts, strict=True)]
