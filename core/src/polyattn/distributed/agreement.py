"""Ranks tell each other what a call of a layer is about, and who serves it, before any waits for another."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import Place, scalars
from ..dispatch.rank_agreement import ELSEWHERE
from ..errors import ConfigError, InvalidInputError, RankError, UnsupportedRequestError, did_you_mean
from ..selection.overrides import current_settings
from ..selection.select import Selection
from ..semantics import validation
from .blocks import TRANSFERS, connect, offer
from .plan import Plan
from .ranks import MeshRanks
from .rounds import tell

__all__ = ["Agreement", "Call", "Three", "compared", "is_of_heads", "word"]

_TEXT_AT = ("front", "back")
_PLANS_KEPT = 256
Three = tuple[Tensor, Tensor, Tensor]


class Call(NamedTuple):
    """The arguments of a layer.

    Attributes:
        own: (q, k, v) of this rank. grads: whether gradients will be asked for, said where autograd cannot know; None =
            as it records them.
    """

    own: Three
    text: Three | None = None
    text_at: str = "front"
    segments: Any = None
    place: Any = None
    lengths: Sequence[int] | None = None
    grads: bool | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that may want a gradient."""
        return (*self.own, *(self.text or ()))

    @property
    def trained(self) -> bool:
        """Whether a backward will follow."""
        if self.grads is not None:
            return self.grads
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


@contextlib.contextmanager
def compared() -> Iterator[None]:
    """Leave choices made here to `Agreement`, which compares them before a rank waits for another."""
    token = ELSEWHERE.set(True)
    try:
        yield
    finally:
        ELSEWHERE.reset(token)


class Agreement:
    """What the ranks of a layer agreed on.

    Args:
        order, balance: as `Plan.of`. transfers: of `TRANSFERS`. timeout: as `tell`. layer: its arguments, equal on all
            ranks.
        selections: who serves a call of a plan here.
    """

    def __init__(
        self,
        ranks: MeshRanks,
        order: str,
        timeout: float,
        layer: str,
        selections: Callable[[Plan, Call], list[Selection]],
        *,
        balance: bool,
        transfers: str = TRANSFERS[0],
    ) -> None:
        self._ranks, self._timeout, self._layer, self._selections = ranks, timeout, layer, selections
        self._order, self._balance, self._transfers = order, balance, transfers
        self._plans: dict[str, Plan] = {}

    def plan(self, call: Call) -> Plan:
        """The plan of a call that all ranks make.

        Raises:
            InvalidInputError: what does not fit, here or between ranks. ConfigError: ranks choose differently.
            RankError: another rank refused the call or did not come. UnsupportedRequestError: nobody serves it.
        """
        said: dict[str, Any] = {}
        wrong: Exception | None = None
        try:
            said = self._said(call)
        except Exception as error:  # noqa: BLE001 - the others are told of any, and it is raised here
            wrong, said = error, {"wrong": f"{type(error).__name__}: {error}"}
        declared = repr(sorted(said.items())) if said.get("lengths") else ""
        if declared in self._plans:
            return self._plans[declared]
        heard = self._told(said, wrong)
        _check_alike(self._ranks, heard)
        found = [int(one["tokens"]) for one in heard]
        name = repr((found, sorted((k, v) for k, v in said.items() if k not in ("tokens", "lengths"))))
        plan = self._plans.get(name)
        if plan is None:
            query, key, _ = call.own
            heads, order, ring = (query.shape[2], key.shape[2]), self._order, self._ranks.ring.size
            plan = Plan.of(found, ring, heads, query.shape[0], said["text"], order, balance=self._balance)
            self._compare(plan, call)
            for one in (self._ranks.ring, self._ranks.ulysses):
                one.meet(query.device)
        while len(self._plans) >= _PLANS_KEPT:
            self._plans.pop(next(iter(self._plans)))
        self._plans[name] = plan
        if declared:
            self._plans[declared] = plan
        return plan

    def _told(self, said: dict[str, Any], wrong: Exception | None) -> list[dict[str, Any]]:
        """What the ranks said, where none of them found anything wrong."""
        if wrong is not None:
            with contextlib.suppress(RankError):  # where lengths were declared, the others may not come
                tell(self._ranks, said, self._timeout)
            raise wrong
        heard = tell(self._ranks, said, self._timeout)
        for rank, one in zip(self._ranks.ranks, heard, strict=True):
            if "wrong" in one:
                raise RankError(f"rank {rank} refused a call that all ranks of its mesh make: {one['wrong']}")
        return heard

    def _said(self, call: Call) -> dict[str, Any]:
        """What the ranks must have in common, and how many tokens are here."""
        query, key, value = call.own
        text, segments, lengths = call.text, call.segments, call.lengths
        validation.check_dense(query, key, value, None, None, None, "BSHD")
        if query.shape[1] != key.shape[1]:
            raise InvalidInputError(
                f"query has {query.shape[1]} tokens and key {key.shape[1]}; layers over ranks are self-attention: a "
                "rank has queries, keys and values of the same tokens. Keys that all ranks have, as those of a text "
                "encoder, need no exchange: use LocalAttention"
            )
        if text is not None:
            _check_text(query, key, value, text)
            word("text_at", call.text_at, _TEXT_AT)
            if segments is not None:
                raise UnsupportedRequestError(
                    "segments are given with text, which is of no segment; put the text into the row, or leave one out"
                )
        if segments is not None:
            more = {"q_segments": segments, "k_segments": segments}
            validation.check_dense(query, key, value, None, None, None, "BSHD", **more)
        if call.place is not None and self._ranks.ring.size > 1:
            raise UnsupportedRequestError(
                "a place is given to a ring: a method looks at the whole sequence before it decides what each query "
                "sees, and no rank of a ring has all of it. Use UlyssesAttention, whose ranks have all tokens of their "
                "heads, or leave the place out for exact attention"
            )
        if call.place is not None:
            _check_place(call)
        if lengths is not None:
            if not isinstance(lengths, (tuple, list)):
                raise InvalidInputError(
                    f"lengths={scalars.shown(lengths)}; a list with S of each rank is needed, in the order of the mesh"
                )
            lengths = [scalars.length("lengths", one) for one in lengths]
            if len(lengths) != len(self._ranks.ranks) or lengths[self._ranks.index] != query.shape[1]:
                raise InvalidInputError(
                    f"lengths={lengths} for {len(self._ranks.ranks)} ranks, of which this is number "
                    f"{self._ranks.index} with {query.shape[1]} tokens: give S of each rank, in the order of the mesh"
                )
        recorded = [torch.is_grad_enabled() and bool(tensor.requires_grad) for tensor in call.tensors]
        return {
            "tokens": query.shape[1],
            "lengths": lengths,
            "batch": query.shape[0],
            "heads": [query.shape[2], key.shape[2], query.shape[3], value.shape[3]],
            "dtype": str(query.dtype),
            "device": query.device.type,
            "text": 0 if text is None else text[0].shape[1],
            "text_at": "" if text is None else call.text_at,
            "segments": segments is not None,
            "place": call.place is not None,
            "grads": recorded if call.grads is None else call.grads,
            "layer": self._layer,
        }

    def _compare(self, plan: Plan, call: Call) -> None:
        """Look at who will serve the calls on each rank, and how blocks get there, before the first of them."""
        wrong: Exception | None = None
        said: dict[str, Any]
        device = call.own[0].device
        try:
            said = {"chosen": [_choice(one) for one in self._selections(plan, call)]}
            if self._transfers != "send":
                said["memory"] = offer(self._ranks.ring, device)
        except Exception as error:  # noqa: BLE001 - as above
            wrong, said = error, {"wrong": f"{type(error).__name__}: {error}"}
        first: dict[str, tuple[int, str, str]] = {}
        heard = self._told(said, wrong)
        for rank, one in zip(self._ranks.ranks, heard, strict=True):
            for request, summary, fingerprint, who in one["chosen"]:
                other, expected, why = first.setdefault(request, (rank, fingerprint, who))
                if expected != fingerprint:
                    raise ConfigError(
                        f"rank {other} would serve {summary} by {why}, fingerprint {expected}, and rank {rank} by "
                        f"{who}, fingerprint {fingerprint}: ranks of one layer choose alike. Give them one tuning "
                        "store (POLYATTN_TUNING_STORE) or copies of one, set POLYATTN_TUNING=off on all, or name one "
                        "backend on all of them"
                    )
        if self._transfers != "send":
            offers = [one["memory"] for one in heard]
            why = connect(self._ranks, plan, call.own[1:], device, offers, self._timeout)
            if why and self._transfers == "copy":
                self._sends(why)

    def _sends(self, why: str) -> None:
        """Say that blocks are sent which were to be copied.

        Raises:
            UnsupportedRequestError: in strict mode, on all ranks.
        """
        text = f'transfers="copy" of {self._layer}: {why}'
        if current_settings().strict:
            raise UnsupportedRequestError(
                f'{text}. Strict mode takes no other way: say transfers="auto" or "send", or unset POLYATTN_STRICT'
            )
        warnings.warn(f"{text}; blocks are sent", RuntimeWarning, stacklevel=2)


def _choice(one: Selection) -> tuple[str, str, str, str]:
    request = hashlib.sha256(repr(one.request).encode()).hexdigest()
    return request, one.request.summary(), one.fingerprint(), f"{one.id} ({one.source}: {one.why})"


def word(name: str, given: Any, allowed: tuple[str, ...]) -> str:
    """One of some words.

    Raises:
        InvalidInputError: it is none of them.
    """
    if given not in allowed:
        raise InvalidInputError(
            f"{name}={scalars.shown(given)} is not one of {', '.join(allowed)}.{did_you_mean(str(given), allowed)}"
        )
    return str(given)


def is_of_heads(given: Any) -> bool:
    """Whether what a model learned for a method is [B, S|1, H, D], and not one number for all tokens and heads."""
    shape = tuple(getattr(given, "shape", ()))
    return len(shape) == 4 and shape[1:3] != (1, 1)


def _check_place(call: Call) -> None:
    if not isinstance(call.place, Place):
        raise InvalidInputError(f"place is a {type(call.place).__name__}; a polyattn.video.Place is needed")
    (batch, tokens, heads, _), text = call.own[0].shape, call.text is not None
    for name, given in call.place.tensors.items():
        if is_of_heads(given) and (given.shape[2] != heads or given.shape[1] not in ((1,) if text else (1, tokens))):
            raise InvalidInputError(
                f"place.tensors has {name!r} {list(given.shape)}; on ranks of a layer it is [B, S of this rank, H, D] "
                f"= [{batch}, {tokens}, {heads}, D], or has 1 for S, as beside text, or 1 for S and H"
            )


def _check_text(query: Tensor, key: Tensor, value: Tensor, text: Any) -> None:
    if not isinstance(text, (tuple, list)) or len(text) != 3 or not all(isinstance(one, Tensor) for one in text):
        raise InvalidInputError(f"text is {scalars.shown(text)}; (tq, tk, tv) is needed, each [B, T, H, D]")
    validation.check_dense(text[0], text[1], text[2], None, None, None, "BSHD")
    for name, one, own in zip(("tq", "tk", "tv"), text, (query, key, value), strict=True):
        same = (one.shape[0], *one.shape[2:]) == (own.shape[0], *own.shape[2:])
        if not same or one.dtype != own.dtype or one.device != own.device or one.shape[1] != text[0].shape[1]:
            raise InvalidInputError(
                f"text: {name} is {one.dtype} {list(one.shape)} on {one.device}; beside {own.dtype} {list(own.shape)} "
                f"on {own.device} it must be of the same, and [{own.shape[0]}, {text[0].shape[1]}, {own.shape[2]}, "
                f"{own.shape[3]}]"
            )


def _check_alike(ranks: MeshRanks, heard: list[dict[str, Any]]) -> None:
    first = heard[0]
    for rank, one in zip(ranks.ranks, heard, strict=True):
        for name, value in first.items():
            if name == "tokens":
                continue
            if name not in one or one[name] != value:
                raise InvalidInputError(
                    f"ranks of one layer disagree in {name}: rank {ranks.ranks[0]} has {value}, rank {rank} has "
                    f"{one.get(name)}. All ranks of a mesh make the same call; only their numbers of tokens may differ"
                )
