"""Layers of attention whose tokens lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..contract import Place, scalars
from ..dispatch.call_key import Static, autocasted
from ..dispatch.dense import DenseSite, bind
from ..dispatch.part import Part, bind_part
from ..errors import ConfigError, InvalidInputError, PolyattnError, RankError, UnsupportedRequestError, did_you_mean
from ..selection.select import Selection
from ..semantics import validation
from .exchange import all_segments, join_heads, reordered, text_heads, to_heads, to_tokens
from .plan import ORDERS, Plan
from .ranks import MeshRanks, ranks_of
from .ring import Ring, ring_attention
from .rounds import tell

__all__ = ["RingAttention", "USPAttention", "UlyssesAttention"]

_TEXT_AT = ("front", "back")
_TEXT_GRADS = ("whole", "share")
_PLANS_KEPT = 256
_Text = tuple[Tensor, Tensor, Tensor]


class USPAttention(nn.Module):
    """Attention of tokens that lie on the ranks of a mesh: Ulysses along one dimension, a ring along the other.

    Each rank calls it with its own tokens and gets their results; lengths may differ, and a rank may have none. The
    ranks of a Ulysses group exchange heads for tokens, those of a ring pass keys and values round (docs/parallel.md).
    All ranks of the mesh make the same calls in the same order, backward passes included.

    Args:
        mesh: `torch.distributed.DeviceMesh` [ring, ulysses] with dimensions of these names, or a slice of one. Rank
            (r, u) holds slice r * U + u of the sequence.
        causal, window, softcap, scale, return_lse, deterministic, role, backend, chunk: as `polyattn.attention`. A ring
            takes neither window nor chunk; causal is True or False, and counts the text as it lies.
        order: how tokens lie on the ring: "consecutive", which a causal ring turns into zigzag by itself, or "zigzag":
            of 2 R pieces in order, ring rank r holds number r and then number 2 R - 1 - r.
        text_grad: "whole": each rank gets the whole gradient of the text, and gives that of its results, which are the
            same on all ranks. "share": each gets and gives a share, whose sum over the ranks is the whole, as layers
            need whose gradients are summed over the ranks.
        timeout: seconds that a rank waits for the others to come to a call.

    Raises:
        InvalidInputError: no process group, a mesh of other dimensions, or an argument that is none.
        UnsupportedRequestError: what a ring cannot compute, with the reason.
    """

    _kind = "usp"

    def __init__(
        self,
        mesh: Any,
        *,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        scale: float | None = None,
        return_lse: bool = False,
        deterministic: bool = False,
        role: str | None = None,
        backend: str | None = None,
        chunk: int = 0,
        order: str = "consecutive",
        text_grad: str = "whole",
        timeout: float = 300.0,
    ) -> None:
        super().__init__()
        self._ranks = ranks_of(mesh, self._kind)
        self._order = _word("order", order, ORDERS)
        self._whole = _word("text_grad", text_grad, _TEXT_GRADS) == "whole"
        if not scalars.number(timeout) or timeout <= 0:
            raise InvalidInputError(f"timeout={scalars.shown(timeout)} must be a number of seconds above 0")
        self._timeout = float(timeout)
        ring = self._ranks.ring.size > 1
        if ring:
            _check_ring(causal, window, chunk)
        self._lse = scalars.flag("return_lse", return_lse)
        fixed: dict[str, Any] = {
            "causal": causal,
            "window": window,
            "softcap": softcap,
            "scale": scale,
            "deterministic": deterministic,
            "backend": backend,
            "chunk": chunk,
        }
        self._site: DenseSite = bind(**fixed, return_lse=return_lse, role=role)
        self._causal = bool(causal)
        self._parts: dict[tuple[bool, bool], Part] = {}
        if ring:
            for masked in (False, True):
                for trained in (False, True):
                    self._parts[masked, trained] = bind_part(**{**fixed, "causal": masked}, backward=trained)
        self._agreed: dict[str, Plan] = {}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        text: _Text | None = None,
        text_at: str = "front",
        segments: Tensor | None = None,
        place: Place | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Any:
        """Attention of this rank's tokens to those of all ranks.

        Args:
            query, key, value: [B, S of this rank, H, D], [B, S of this rank, H_kv, D | D_v]; heads as on one device.
            text: (tq, tk, tv) [B, T, H, D], the same on all ranks: tokens that take part once, before all others or
                after them. text_at: "front" or "back".
            segments: int32 [B, S of this rank], as `polyattn.attention`, for documents packed into one row.
            place: as `polyattn.attention`, of the whole sequence. Methods need all tokens: not on a ring.
            lengths: S of each rank, in the order of the mesh. Given, ranks do not tell each other their lengths by the
                host at each call, but only at the first one of its kind: all ranks give them then, or none.

        Returns:
            out like query with D_v; (out, lse [B, S, H]) with return_lse. With text (out, text_out), or (out, lse,
            text_out, text_lse); results of the text are the same on all ranks.

        Raises:
            InvalidInputError: what does not fit, here or between ranks. ConfigError: ranks choose different backends.
            RankError: another rank refused the call, or did not come to it. All of them on every rank.
        """
        query, key, value = autocasted(query, key, value)
        plan = self._agree(query, key, value, text, text_at, segments, place, lengths)
        ranks, causal_ring = self._ranks, self._ranks.ring.size > 1
        if text is not None:
            text = text_heads(plan, ranks, self._whole, *autocasted(*text))
        seg = None if segments is None else all_segments(plan, ranks, segments)
        query, key, value = to_heads(plan, ranks, query, key, value)
        if causal_ring:
            found = self._around(plan, (query, key, value), text, text_at, seg)
        else:
            found = self._alone((query, key, value), text, text_at, seg, place)
        own = to_tokens(plan, ranks, *(found["own"] if self._lse else found["own"][:1]))
        if text is None:
            return own if self._lse else own[0]
        results = found["text"] if self._lse else found["text"][:1]
        words = tuple(join_heads(plan, ranks, self._whole, one) for one in results)
        return (*own, *words)

    def _alone(
        self, own: _Text, text: _Text | None, text_at: str, segments: list[Tensor] | None, place: Place | None
    ) -> dict[str, tuple[Tensor, ...]]:
        """All tokens are here: one call."""
        names = ("own",) if text is None else ("text", "own") if text_at == "front" else ("own", "text")
        tensors = {"own": own} if text is None else {"own": own, "text": text}
        query, key, value = (_cat([tensors[name][i] for name in names]) for i in range(3))
        sizes = [tensors[name][0].shape[1] for name in names]
        if not query.numel():
            results = _Nothing.apply(query, key, value)  # type: ignore[no-untyped-call]
        else:
            given = {} if segments is None else {"segments": segments[0]}
            results = self._site(query, key, value, place=place, **given)
        results = results if isinstance(results, tuple) else (results,)
        cut = [one.split(sizes, 1) for one in results]
        return {name: tuple(one[i] for one in cut) for i, name in enumerate(names)}

    def _around(
        self, plan: Plan, own: _Text, text: _Text | None, text_at: str, segments: list[Tensor] | None
    ) -> dict[str, tuple[Tensor, ...]]:
        """Keys and values go round."""
        ring = self._ring(plan, text_at, trained=torch.is_grad_enabled() and any(t.requires_grad for t in own))
        own = reordered(ring.ranks, plan.held, plan.computed, *own)  # type: ignore[assignment]
        tensors = {"own": own} if text is None else {"own": own, "text": text}
        found: dict[str, tuple[Tensor, ...]] = dict(ring_attention(ring, tensors, segments))
        found["own"] = reordered(ring.ranks, plan.computed, plan.held, *found["own"])
        return found

    def _ring(self, plan: Plan, text_at: str, *, trained: bool) -> Ring:
        full, causal = self._parts[False, trained], self._parts[True, trained]
        return Ring(plan, self._ranks.ring, full, causal, self._causal, text_at == "front")

    # What ranks say to each other before they wait for each other.

    def _agree(
        self, query: Any, key: Any, value: Any, text: Any, text_at: Any, segments: Any, place: Any, lengths: Any
    ) -> Plan:
        said: dict[str, Any] = {}
        wrong: PolyattnError | None = None
        try:
            said = self._said(query, key, value, text, text_at, segments, place, lengths)
        except PolyattnError as error:
            wrong, said = error, {"wrong": f"{type(error).__name__}: {error}"}
        known = said.get("lengths") and self._agreed.get(repr(sorted(said.items())))
        if known:
            return known
        heard = tell(self._ranks, said, self._timeout)
        if wrong is not None:
            raise wrong
        _check_alike(self._ranks, heard)
        found = [int(one["tokens"]) for one in heard]
        name = repr((found, sorted((k, v) for k, v in heard[0].items() if k not in ("tokens", "lengths"))))
        plan = self._agreed.get(name)
        if plan is None:
            plan = Plan.of(
                found,
                self._ranks.ring.size,
                (said["heads"][0], said["heads"][1]),
                said["batch"],
                said["text"],
                self._order,
                balance=self._causal,
            )
            self._compare(plan, query, key, value, text_at, segments, place)
            while len(self._agreed) >= _PLANS_KEPT:
                self._agreed.pop(next(iter(self._agreed)))
            self._agreed[name] = plan
        if lengths is not None:
            self._agreed[repr(sorted(said.items()))] = plan
        return plan

    def _said(
        self, query: Any, key: Any, value: Any, text: Any, text_at: Any, segments: Any, place: Any, lengths: Any
    ) -> dict[str, Any]:
        """What the ranks must have in common, and how many tokens are here."""
        validation.check_dense(query, key, value, None, None, None, "BSHD")
        if query.shape[1] != key.shape[1]:
            raise InvalidInputError(
                f"query has {query.shape[1]} tokens and key {key.shape[1]}; layers over ranks are self-attention: a "
                "rank has queries, keys and values of the same tokens. Keys that all ranks have, as those of a text "
                "encoder, need no exchange: use LocalAttention"
            )
        tensors = [query, key, value]
        if text is not None:
            _check_text(query, key, value, text)
            _word("text_at", text_at, _TEXT_AT)
            if segments is not None:
                raise UnsupportedRequestError(
                    "segments are given with text, which is of no segment; put the text into the row, or leave one out"
                )
            tensors += list(text)
        if segments is not None:
            validation.check_dense(
                query, key, value, None, None, None, "BSHD", q_segments=segments, k_segments=segments
            )
        if place is not None and self._ranks.ring.size > 1:
            raise UnsupportedRequestError(
                "a place is given to a ring: a method looks at the whole sequence before it decides what each query "
                "sees, and no rank of a ring has all of it. Use UlyssesAttention, whose ranks have all tokens of their "
                "heads, or leave the place out for exact attention"
            )
        if lengths is not None:
            lengths = [scalars.length("lengths", one) for one in lengths]
            if len(lengths) != len(self._ranks.ranks) or lengths[self._ranks.index] != query.shape[1]:
                raise InvalidInputError(
                    f"lengths={lengths} for {len(self._ranks.ranks)} ranks, of which this is number "
                    f"{self._ranks.index} with {query.shape[1]} tokens: give S of each rank, in the order of the mesh"
                )
        grad = torch.is_grad_enabled()
        return {
            "tokens": query.shape[1],
            "lengths": lengths,
            "batch": query.shape[0],
            "heads": [query.shape[2], key.shape[2], query.shape[3], value.shape[3]],
            "dtype": str(query.dtype),
            "device": query.device.type,
            "text": 0 if text is None else text[0].shape[1],
            "text_at": "" if text is None else text_at,
            "segments": segments is not None,
            "place": place is not None,
            "grads": [grad and bool(tensor.requires_grad) for tensor in tensors],
            "layer": f"{type(self).__name__}({self.extra_repr()})",
        }

    def _compare(
        self, plan: Plan, query: Tensor, key: Tensor, value: Tensor, text_at: str, segments: Any, place: Any
    ) -> None:
        """Look at who will serve the calls on each rank, before the first of them."""
        wrong: PolyattnError | None = None
        chosen: list[list[str]] = []
        try:
            chosen = [
                [one.request.summary(), one.fingerprint(), f"{one.id} ({one.source}: {one.why})"]
                for one in self._selections(plan, query, key, value, text_at, segments, place)
            ]
        except PolyattnError as error:
            wrong = error
        heard = tell(
            self._ranks, {"chosen": chosen, "wrong": wrong and f"{type(wrong).__name__}: {wrong}"}, self._timeout
        )
        if wrong is not None:
            raise wrong
        _check_none_wrong(self._ranks, heard)
        first: dict[str, tuple[int, str, str]] = {}
        for rank, one in zip(self._ranks.ranks, heard, strict=True):
            for request, fingerprint, who in one["chosen"]:
                other, print_, why = first.setdefault(request, (rank, fingerprint, who))
                if print_ != fingerprint:
                    raise ConfigError(
                        f"rank {other} would serve {request} by {why}, fingerprint {print_}, and rank {rank} by {who}, "
                        f"fingerprint {fingerprint}: ranks of one layer choose alike. Give them one tuning store "
                        "(POLYATTN_TUNING_STORE) or copies of one, set POLYATTN_TUNING=off on all, or name one backend "
                        "on all of them"
                    )

    def _selections(
        self, plan: Plan, query: Tensor, key: Tensor, value: Tensor, text_at: str, segments: Any, place: Any
    ) -> list[Selection]:
        mine, me = plan.heads[self._ranks.ulysses.index], self._ranks.ring.index
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))

        def like(tensor: Tensor, tokens: int, heads: int) -> Tensor:
            made = torch.empty(
                tensor.shape[0], tokens, heads, tensor.shape[3], dtype=tensor.dtype, device=tensor.device
            )
            return made.requires_grad_(trained)

        def explained(call: Any, rows: int, keys: int, **given: Any) -> list[Selection]:
            heads, shared = mine.stop - mine.start, len(mine.keys)
            if not (rows and keys and heads):
                return []
            if segments is not None:
                made = [segments.new_zeros(segments.shape[0], n) for n in (rows, keys)]
                given["segments"] = (made[0], made[1]) if call is not self._site else made[0]
            tensors = like(query, rows, heads), like(key, keys, shared), like(value, keys, shared)
            return [call.__polyattn_explain__(*tensors, **given)]

        if self._ranks.ring.size == 1:
            tokens = sum(plan.lengths) + plan.text
            return explained(self._site, tokens, tokens, place=place)
        ring = self._ring(plan, text_at, trained=trained)
        tokens = plan.tokens(plan.computed[me])
        found = explained(ring.part(causal=self._causal), tokens, tokens)
        for block in range(ring.ranks.size):
            for (start, stop), keys, causal in ring.visible(me, block) if block != me else ():
                found += explained(ring.part(causal=causal), stop - start, keys)
        return found

    def extra_repr(self) -> str:
        """The mesh, and the bound arguments that are not the default."""
        default = Static()._asdict()
        changed = {k: v for k, v in self._site.static._asdict().items() if v != default[k]}
        sizes = f"ring={self._ranks.ring.size}, ulysses={self._ranks.ulysses.size}, order={self._order!r}"
        return ", ".join([sizes, *(f"{k}={v!r}" for k, v in changed.items())])


class UlyssesAttention(USPAttention):
    """Attention of tokens that lie on the ranks of a mesh, which exchange heads for tokens: each computes some heads.

    Any backend serves it, methods with a place too, and all that `polyattn.attention` can bind. Arguments, calls and
    errors are those of `USPAttention`, with a mesh of one dimension; heads that do not divide are spread unevenly.
    """

    _kind = "ulysses"


class RingAttention(USPAttention):
    """Attention of tokens that lie on the ranks of a mesh, which pass keys and values round and keep their queries.

    A backend with an LSE serves it. Arguments, calls and errors are those of `USPAttention`, with a mesh of one
    dimension; there may be fewer heads than ranks.
    """

    _kind = "ring"


class _Nothing(torch.autograd.Function):
    """Attention without a query, which takes part in what ranks exchange for gradients all the same."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value)
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        return out, out.new_full(query.shape[:-1], float("-inf"), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _word(name: str, given: Any, allowed: tuple[str, ...]) -> str:
    if given not in allowed:
        raise InvalidInputError(
            f"{name}={scalars.shown(given)} is not one of {', '.join(allowed)}.{did_you_mean(str(given), allowed)}"
        )
    return str(given)


def _check_ring(causal: Any, window: Any, chunk: Any) -> None:
    """
    Raises:
        UnsupportedRequestError: what the parts of a ring cannot compute.
    """
    if isinstance(causal, str):
        raise UnsupportedRequestError(
            f"causal={causal!r} on a ring: all keys have a query of their own there, so there is one alignment; pass "
            "causal=True"
        )
    if tuple(window) != (-1, -1) or chunk:
        name = f"chunk={chunk}" if chunk else f"window={tuple(window)}"
        raise UnsupportedRequestError(
            f"{name} on a ring: a rank sees the blocks of others without their positions, so their windows cannot be "
            "cut. Use UlyssesAttention, whose ranks have all tokens of their heads"
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


def _check_none_wrong(ranks: MeshRanks, heard: list[dict[str, Any]]) -> None:
    for rank, one in zip(ranks.ranks, heard, strict=True):
        if one.get("wrong"):
            raise RankError(f"rank {rank} refused a call that all ranks of its mesh make: {one['wrong']}")


def _check_alike(ranks: MeshRanks, heard: list[dict[str, Any]]) -> None:
    _check_none_wrong(ranks, heard)
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
