"""Layers of attention whose tokens lie on several ranks."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..contract import Place, scalars
from ..dispatch.call_key import Static, autocasted
from ..dispatch.dense import DenseSite, bind
from ..dispatch.part import Part, bind_part
from ..errors import InvalidInputError, UnsupportedRequestError
from ..selection.select import Selection
from ..semantics.autograd import recording
from .agreement import Agreement, Call, Three, compared, is_of_heads, word
from .blocks import OTHERS, TRANSFERS, link_of
from .exchange import (
    all_segments,
    heads_of_tokens,
    join_heads,
    picked_heads,
    reordered,
    scattered,
    split_heads,
    text_heads,
    to_heads,
    to_tokens,
)
from .op import LAYERS, attend
from .plan import ORDERS, Plan
from .ranks import ranks_of
from .ring import Ring, gradients, ring_attention

__all__ = ["RingAttention", "USPAttention", "UlyssesAttention"]

_KV = ("ring", "gather")
_TEXT_GRADS = ("whole", "share")
_Pair = tuple[Tensor, Tensor | None]
_Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


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
        kv: how keys and values get to the ranks of a ring: "ring", a block after the other, each while the one before
            is computed; or "gather", all at once, for one call over them, which short blocks and few key heads like. It
            takes memory for all of them.
        text_grad: "whole": each rank gets the whole gradient of the text, and gives that of its results, which are the
            same on all ranks. "share": each gets and gives a share, whose sum over the ranks is the whole, as layers
            need whose gradients are summed over the ranks.
        transfers: how keys and values get to the ranks of a ring: "copy", by copy engines out of each other's memory,
            which takes no multiprocessors from attention; "send", by `torch.distributed`; or "auto", copied where the
            devices can, and else sent. Where a ring cannot do what "copy" asks for, a warning says why, and it sends
            (an error in strict mode). The layer's `transfers` says what happened.
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
        kv: str = "ring",
        text_grad: str = "whole",
        transfers: str = TRANSFERS[0],
        timeout: float = 300.0,
    ) -> None:
        super().__init__()
        self._ranks = ranks_of(mesh, self._kind)
        self._order = word("order", order, ORDERS)
        self._gathered = word("kv", kv, _KV) == "gather"
        self._whole = word("text_grad", text_grad, _TEXT_GRADS) == "whole"
        self._transfers = word("transfers", transfers, TRANSFERS)
        self._copied: str | None = None
        if not scalars.number(timeout) or timeout <= 0:
            raise InvalidInputError(f"timeout={scalars.shown(timeout)} must be a number of seconds above 0")
        if self._ranks.ring.size > 1:
            _check_ring(causal, window, chunk)
        self._lse = scalars.flag("return_lse", return_lse)
        fixed: dict[str, Any] = {
            "window": window,
            "softcap": softcap,
            "scale": scale,
            "deterministic": deterministic,
            "backend": backend,
            "chunk": chunk,
        }
        self._site: DenseSite = bind(**fixed, causal=causal, return_lse=return_lse, role=role)
        self._causal = bool(causal)
        self._parts: dict[tuple[bool, bool], Part] = {
            (masked, trained): bind_part(**fixed, causal=(causal or True) if masked else False, backward=trained)
            for masked in (False, True)
            for trained in (False, True)
        }
        self._agreement = Agreement(
            *(self._ranks, order, float(timeout), f"{type(self).__name__}({self.extra_repr()})", self._selections),
            balance=self._causal,
            transfers=self._transfers,
        )
        groups = [one.group.group_name for one in (self._ranks.ring, self._ranks.ulysses) if one.group is not None]
        self._key = repr(
            (type(self).__name__, self.extra_repr(), text_grad, timeout, backend, self._site._scope, groups)
        )
        LAYERS[self._key] = self

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        text: Three | None = None,
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
        if isinstance(text, (tuple, list)) and len(text) == 3:
            text = autocasted(*text)
        call = Call((query, key, value), text, text_at, segments, place, lengths)
        if not torch.compiler.is_compiling():
            found = self._run(call)
        elif place is not None:  # what a method does depends on the place
            from ..dispatch.compile.between_graphs import between_graphs

            found = between_graphs(self._run, call)
        else:
            given = list(text or ()), segments, text_at, None if lengths is None else list(lengths)
            found = attend(self._key, query, key, value, *given, call.trained, call.trained or self._lse)
        out, lse, words, word_lse = found
        if text is None:
            return (out, lse) if self._lse else out
        return (out, lse, words, word_lse) if self._lse else (out, words)

    @compared()
    def _run(self, call: Call) -> _Results:
        """(out, lse, text_out, text_lse), the last two None without text."""
        plan, ranks = self._agreement.plan(call), self._ranks
        text = None if call.text is None else text_heads(plan, ranks, self._whole, *call.text)
        numbers = None if call.segments is None else all_segments(plan, ranks, call.segments)
        place = (
            None
            if call.place is None
            else self._placed(plan, call.place, functools.partial(heads_of_tokens, plan, ranks))
        )
        inside = call._replace(own=to_heads(plan, ranks, *call.own), text=text, place=place)
        found = self._alone(inside, numbers) if self._is_alone(call) else self._around(plan, inside, numbers)
        out, lse = found["own"]
        if lse is None or not (self._lse or call.grads):
            (out,), lse = to_tokens(plan, ranks, out), None
        else:
            out, lse = to_tokens(plan, ranks, out, lse)
        if text is None:
            return out, lse, None, None
        words, word_lse = (None if one is None else join_heads(plan, ranks, self._whole, one) for one in found["text"])
        return out, lse, words, word_lse

    def _placed(self, plan: Plan, place: Place, exchange: Callable[[Tensor], Tensor]) -> Place:
        """A place as a method on the heads of this rank sees it. What the model learned for each token and head is
        exchanged as queries are."""
        mine = plan.heads[self._ranks.ulysses.index]

        def here(given: Any) -> Any:
            if not is_of_heads(given):
                return given
            return given[:, :, mine.start : mine.stop] if given.shape[1] == 1 else exchange(given)

        tensors = {name: here(given) for name, given in place.tensors.items()}
        return dataclasses.replace(place, heads=(mine.start, plan.query_heads), tensors=tensors)

    def _is_alone(self, call: Call) -> bool:
        """Whether one call has all tokens, and autograd goes through it. Else parts compute it."""
        return self._ranks.ring.size == 1 and call.grads is None

    def _alone(self, call: Call, segments: list[Tensor] | None) -> dict[str, _Pair]:
        tensors = _by_name(call)
        names = ("own",) if call.text is None else ("text", "own") if call.text_at == "front" else ("own", "text")
        query, key, value = (_cat([tensors[name][i] for name in names]) for i in range(3))
        sizes = [tensors[name][0].shape[1] for name in names]
        if not query.numel():
            results = _Nothing.apply(query, key, value)  # type: ignore[no-untyped-call]
        else:
            given = {} if segments is None else {"segments": segments[0]}
            results = self._site(query, key, value, place=call.place, **given)
        out, lse = results if isinstance(results, tuple) else (results, None)
        outs = torch.split(out, sizes, 1)
        lses = [None] * len(sizes) if lse is None else torch.split(lse, sizes, 1)
        return {name: (one, weight) for name, one, weight in zip(names, outs, lses, strict=True)}

    def _around(self, plan: Plan, call: Call, segments: list[Tensor] | None) -> dict[str, _Pair]:
        """Keys and values go round."""
        ring = self._linked(plan, call)
        q, k, v = reordered(ring.ranks, plan.held, plan.computed, *call.own)
        found: dict[str, _Pair] = dict(ring_attention(ring, _by_name(call._replace(own=(q, k, v))), segments))
        out, lse = reordered(ring.ranks, plan.computed, plan.held, *found["own"])  # type: ignore[arg-type]
        found["own"] = out, lse
        return found

    def _ring(self, plan: Plan, text_at: str, *, trained: bool) -> Ring:
        full, causal = self._parts[False, trained], self._parts[True, trained]
        return Ring(plan, self._ranks.ring, full, causal, self._causal, text_at == "front", self._gathered)

    def _linked(self, plan: Plan, call: Call) -> Ring:
        """The ring of a call, and how blocks get to its ranks."""
        ring, (query, key, value) = self._ring(plan, call.text_at, trained=call.trained), call.own
        if ring.ranks.size == 1:
            return ring
        if self._transfers == "send":
            self._copied = 'sent: transfers="send"'
            return ring
        link = link_of(ring.ranks, query.device)
        memory = link.serves(plan, key, value)
        self._copied = "copied" if memory else f"sent: {link.why}"
        return dataclasses.replace(ring, memory=memory)

    @property
    def transfers(self) -> str:
        """How the last call got keys and values to the ranks of a ring: "copied", or "sent: " with the reason."""
        if self._ranks.ring.size == 1:
            return "none: there is no ring"
        return self._copied or "none: no call yet"

    # What the custom op of compiled code calls, without autograd.

    def in_op(self, call: Call, *, trained: bool) -> _Results:
        """A call as `_run` has it, with an LSE where gradients will be asked for."""
        return self._run(call._replace(grads=trained if trained or self._ranks.ring.size > 1 else None))

    def op_gradients(self, call: Call, results: Any, words: Any, grads: Any, word_grads: Any) -> tuple[Tensor, ...]:
        """(dq, dk, dv) of the tokens of this rank, then of the text, given (out, lse) of both and their gradients."""
        plan = self._agreement.plan(call._replace(grads=True))
        ranks, ring = self._ranks, self._linked(plan, call._replace(grads=True))
        leaves = [tensor.detach().requires_grad_() for tensor in call.tensors]

        def turned(*tensors: Tensor) -> tuple[Tensor, ...]:
            return reordered(ring.ranks, plan.held, plan.computed, *tensors)

        with recording():
            moved = turned(*to_heads(plan, ranks, leaves[0], leaves[1], leaves[2]))
            shared = () if call.text is None else text_heads(plan, ranks, self._whole, leaves[3], leaves[4], leaves[5])

        def inside(pair: Any) -> tuple[Any, ...]:
            found = iter(turned(*scattered(plan, ranks, *(one for one in pair if one is not None))))
            return tuple(None if one is None else next(found) for one in pair)

        tensors = {"own": tuple(one.detach() for one in moved)}
        done, given = {"own": inside(results)}, {"own": inside(grads)}
        if call.text is not None:
            tensors["text"] = tuple(one.detach() for one in shared)
            done["text"] = tuple(picked_heads(plan, ranks, one) for one in words)
            given["text"] = tuple(
                None if one is None else split_heads(plan, ranks, self._whole, one) for one in word_grads
            )
        numbers = None if call.segments is None else all_segments(plan, ranks, call.segments)
        found = gradients(ring, tensors, done, given, numbers)
        return torch.autograd.grad([*moved, *shared], leaves, [one for name in tensors for one in found[name]])

    def _selections(self, plan: Plan, call: Call) -> list[Selection]:
        """Who serves the calls of this rank. Nothing is run."""
        mine, me, trained = plan.heads[self._ranks.ulysses.index], self._ranks.ring.index, call.trained
        counts = mine.stop - mine.start, len(mine.keys), len(mine.keys)

        def explained(site: Any, rows: int, keys: int, **given: Any) -> list[Selection]:
            if not (rows and keys and counts[0]):
                return []
            if call.segments is not None:
                made = [call.segments.new_zeros(plan.batch, n) for n in (rows, keys)]
                given["segments"] = made[0] if site is self._site else (made[0], made[1])
            tensors = [
                one.new_empty(plan.batch, tokens, heads, one.shape[3]).requires_grad_(trained)
                for one, tokens, heads in zip(call.own, (rows, keys, keys), counts, strict=True)
            ]
            return [site.__polyattn_explain__(*tensors, **given)]

        if self._is_alone(call):
            tokens = sum(plan.lengths) + plan.text

            def like(given: Tensor) -> Tensor:
                return given.new_empty(given.shape[0], tokens, counts[0], given.shape[3])

            place = None if call.place is None else self._placed(plan, call.place, like)
            return explained(self._site, tokens, tokens, place=place)
        ring = self._ring(plan, call.text_at, trained=trained)
        tokens = plan.tokens(plan.computed[me])
        found = explained(ring.part(causal=self._causal), tokens, tokens)
        blocks = (OTHERS,) if self._gathered else range(ring.ranks.size)
        for block in blocks if ring.ranks.size > 1 else ():
            for (start, stop), keys, causal in ring.visible(me, block) if block != me else ():
                found += explained(ring.part(causal=causal), stop - start, keys)
        return found

    def __deepcopy__(self, memo: Any) -> USPAttention:
        # A copy of a model is on the same ranks, whose process groups cannot be copied. What torch keeps of any module,
        # such as hooks and parameters that a subclass has, is the copy's own.
        other = copy.copy(self)
        vars(other).update((name, copy.deepcopy(vars(self)[name], memo)) for name in vars(nn.Module()))
        return other

    def extra_repr(self) -> str:
        """The mesh, and the bound arguments that are not the default."""
        default = Static()._asdict()
        changed = {k: v for k, v in self._site.static._asdict().items() if v != default[k]}
        sizes = f"ring={self._ranks.ring.size}, ulysses={self._ranks.ulysses.size}, order={self._order!r}"
        sizes += ", kv='gather'" if self._gathered else ""
        sizes += f", transfers={self._transfers!r}" if self._transfers != TRANSFERS[0] else ""
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


def _by_name(call: Call) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    return {"own": call.own} if call.text is None else {"own": call.own, "text": call.text}


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
