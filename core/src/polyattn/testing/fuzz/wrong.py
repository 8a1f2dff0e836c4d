"""This module spoils calls that are fine. Every backend must refuse them with a typed error before it computes
anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["CONTENTS", "WRONGS", "spoil", "wrongs"]

Arguments = Mapping[str, Any]
Change = Callable[[Arguments], dict[str, Any]]
"""Arguments of a call by name -> those that change; none where these arguments cannot be spoilt in this way."""

NAN, INF = float("nan"), float("inf")


def _to(**values: Any) -> Change:
    return lambda given: dict(values)


def _any(name: str, *values: Any, **also: Any) -> dict[str, Change]:
    """Make one wrong call for each of these values of an argument, `also` changing with it."""
    return {f"{name} {value!r}": _to(**{name: value}, **also) for value in values}


def _of(name: str, change: Callable[[Tensor], Any]) -> Change:
    return lambda given: {name: change(given[name])}


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _off_the_last_axis(tensor: Tensor) -> Any:
    """The same shape with strides that leave gaps in the last axis."""
    return torch.stack([tensor.detach(), tensor.detach()], -1).flatten(-2)[..., ::2]


def _narrower(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.detach(), tensor.detach()], -1)[..., : tensor.shape[-1] + 1].contiguous()


def _strided(name: str) -> Change:
    def change(given: Arguments) -> dict[str, Any]:
        tensor = given[name]
        return {name: _off_the_last_axis(tensor)} if tensor.numel() and tensor.shape[-1] > 1 else {}

    return change


def _repeated(name: str, axis: int, times: int = 2) -> Change:
    """Make one axis longer than it may be; an axis of 0 would stay one."""

    def change(given: Arguments) -> dict[str, Any]:
        tensor = given[name].detach()
        return {name: torch.cat([tensor] * times, axis)} if tensor.shape[axis] else {}

    return change


def _odd_heads(given: Arguments) -> dict[str, Any]:
    """Add a query head, where that is no multiple of H_kv."""
    query, heads = given["query"].detach(), _heads_axis(given)
    key = given["key"]
    if key.shape[heads] < 2:
        return {}
    return {"query": torch.cat([query, query.narrow(heads, 0, 1)], heads)}


def _heads_axis(given: Arguments) -> int:
    return 1 if given["query"].dim() == 3 or given.get("layout") == "BHSD" else 2


def _no_heads(given: Arguments) -> dict[str, Any]:
    return {"query": given["query"].detach().narrow(_heads_axis(given), 0, 0)}


def _result(given: Arguments, **options: Any) -> Tensor:
    """A tensor that would do as `out=`."""
    query, value = given["query"], given.get("value_cache", given.get("value"))
    width = given["v_head_dim"] if value is None else value.shape[-1]
    return torch.empty(*query.shape[:-1], width, **{"dtype": query.dtype, "device": query.device, **options})


def _out(change: Callable[[Tensor], Any]) -> Change:
    return lambda given: {"out": change(_result(given))}


def _expanded_out(given: Arguments) -> dict[str, Any]:
    """A result whose rows are all in one place, where there are several."""
    out = _result(given)
    if out.shape[0] < 2 or not out.numel():
        return {}
    return {"out": out[:1].expand(out.shape)}


def _out_wanting_gradients(given: Arguments) -> dict[str, Any]:
    return {"query": given["query"].detach().clone().requires_grad_(), "out": _result(given)}


def _mask(change: Callable[[tuple[int, ...], Tensor], Any]) -> Change:
    """An attn_mask made from its right shape and the query."""

    def of(given: Arguments) -> dict[str, Any]:
        query = given["query"]
        if "max_seqlen_q" in given:
            rows, columns = given["max_seqlen_q"], given["max_seqlen_k"]
        else:
            axis = 2 if given["layout"] == "BHSD" else 1
            rows, columns = query.shape[axis], given["key"].shape[axis]
        return {"attn_mask": change((1, 1, rows, columns), query)}

    return of


def _sinks(change: Callable[[int], Any]) -> Change:
    return lambda given: {"sinks": change(given["query"].shape[_heads_axis(given)])}


def _entry(name: str, place: int, value: Callable[[int], int]) -> Change:
    """Replace one entry of a table of lengths."""

    def change(given: Arguments) -> dict[str, Any]:
        table = given[name].clone()
        table[place] = value(int(table[place]))
        return {name: table}

    return change


def _falling(name: str) -> Change:
    def change(given: Arguments) -> dict[str, Any]:
        table = given[name].clone()
        if table.numel() < 3:
            return {}
        table[1] = table[-1] + 1
        return {name: table}

    return change


def _page(value: Callable[[int], int]) -> Change:
    """The first page that is read: a number outside of the cache."""

    def change(given: Arguments) -> dict[str, Any]:
        table, cache = given["page_table"].clone(), given.get("key_cache", given.get("cache"))
        used = [n for n, length in enumerate(given["seq_lens"].tolist()) if length]
        if not used or cache is None:
            return {}
        table[used[0], 0] = value(cache.shape[0])
        return {"page_table": table}

    return change


def _fewer_keys_than_queries(given: Arguments) -> dict[str, Any]:
    starts, lengths = given["cu_seqlens_q"].tolist(), given["seq_lens"].clone()
    for n, length in enumerate(lengths.tolist()):
        if length and starts[n + 1] - starts[n] > 1:
            lengths[n] = 1
            return {"seq_lens": lengths}
    return {}


def _too_long(given: Arguments) -> dict[str, Any]:
    lengths = given["seq_lens"].clone()
    lengths[0] = 10_000
    return {"seq_lens": lengths, "max_seqlen_k": 10_000, "attn_mask": None}


def _short(side: str) -> Change:
    """max_seqlen less than the longest sequence."""

    def change(given: Arguments) -> dict[str, Any]:
        longest = given[f"max_seqlen_{side}"]
        return {f"max_seqlen_{side}": longest - 1, "attn_mask": None} if longest else {}

    return change


def _trained(given: Arguments) -> dict[str, Any]:
    return {"query": given["query"].detach().clone().requires_grad_()}


# Values that are equal to right ones and of another type are among the wrong: calls are found by their arguments, and
# True finds what 1.0 has left there unless the types are looked at too.
_STATIC: dict[str, Change] = {
    **_any("causal", "left", "bottom-right", 2, 1.0, 0.0, 1.5, None, []),
    "causal tensor": _to(causal=torch.ones(2)),
    "causal tensor of one": _to(causal=torch.tensor(True)),
    **_any("return_lse", "no", 1.0, 2, None, []),
    **_any("deterministic", "no", 0.0, None),
    **_any("batch_invariant", "no", 0.0, None),
    "return_lse tensor": _to(return_lse=torch.tensor(True)),
    "deterministic tensor": _to(deterministic=torch.zeros(2)),
    **_any("window", (True, False), (0, True), (-1, False)),
    **_any("scale", True, False, 1e39),
    "scale of 401 digits": _to(scale=10**400),
    "mask sparse": _mask(lambda shape, q: torch.ones(shape, device=q.device).to_sparse()),
    "query sparse": _of("query", lambda t: t.detach().to_sparse()),
    "out expanded": _expanded_out,
    **_any("window", 5, (1,), (1, 2, 3), (-2, 0), (0, -3), (1.5, 0), (NAN, 0), (INF, 0), ("a", 0), None),
    "window of lists": _to(window=[[1], 0]),
    **_any("scale", NAN, INF, "8"),
    "scale tensor": _to(scale=torch.ones(())),
    **_any("backend", 3, "fa_of_tomorrow", ["reference"], b"fa"),
    "backend of no platform": _to(backend="reference@nowhere"),
    "query None": _to(query=None),
    "query list": _to(query=[1.0]),
    "query of lower rank": _of("query", lambda t: t[0] if t.shape[0] else None),
    "query of higher rank": _of("query", lambda t: t[None]),
    "query int": _of("query", lambda t: t.detach().int()),
    "query complex": _of("query", lambda t: t.detach().to(torch.complex64)),
    "query on meta": _of("query", lambda t: t.detach().to("meta")),
    "query not dense": _strided("query"),
    "query wider": _of("query", _narrower),
    "query without width": _of("query", lambda t: t[..., :0]),
    "out of another shape": _out(lambda t: torch.cat([t, t], -1)),
    "out of another dtype": _out(lambda t: t.to(torch.float32 if t.dtype == torch.float64 else torch.float64)),
    "out on meta": _out(lambda t: t.to("meta")),
    "out list": _to(out=[]),
    "out number": _to(out=1.0),
    "mask of lower rank": _mask(lambda shape, q: torch.ones(shape[2:], device=q.device)),
    "mask of another shape": _mask(lambda shape, q: torch.ones(1, 1, shape[2] + 1, shape[3], device=q.device)),
    "mask with too many heads": _mask(lambda shape, q: torch.ones(1, 97, *shape[2:], device=q.device)),
    "mask int": _mask(lambda shape, q: torch.ones(shape, device=q.device).long()),
    "mask on meta": _mask(lambda shape, q: torch.ones(shape, device="meta")),
    "mask True": _to(attn_mask=True),
}

_UNLATENT: dict[str, Change] = {
    **_any("softcap", -1.0, NAN, INF, None, "2", True, False, 1e39, 1e-46),
    "softcap of 401 digits": _to(softcap=10**400),
    "sinks sparse": _sinks(lambda heads: torch.ones(heads).to_sparse()),
    "sinks too many": _sinks(lambda heads: torch.ones(heads + 1)),
    "sinks 2-D": _sinks(lambda heads: torch.ones(1, heads)),
    "sinks int": _sinks(lambda heads: torch.ones(heads).int()),
    "sinks on meta": _sinks(lambda heads: torch.ones(heads, device="meta")),
    "sinks number": _to(sinks=0.5),
}

_TRAINABLE: dict[str, Change] = {
    **_any("dropout_p", 1.0, -0.1, NAN, None, True, False),
    "key None": _to(key=None),
    "value text": _to(value="v"),
    "key of lower rank": _of("key", lambda t: t[0] if t.shape[0] else None),
    "value of another dtype": _of(
        "value", lambda t: t.detach().to(torch.float32 if t.dtype == torch.float64 else torch.float64)
    ),
    "all int": lambda given: {name: given[name].detach().int() for name in ("query", "key", "value")},
    "key on meta": _of("key", lambda t: t.detach().to("meta")),
    "key not dense": _strided("key"),
    "key wider": _of("key", _narrower),
    "value without width": _of("value", lambda t: t[..., :0]),
    "value with a longer first axis": _repeated("value", 0),
    "heads no multiple": _odd_heads,
    "no heads": _no_heads,
    "out with gradients": _out_wanting_gradients,
}

_DENSE: dict[str, Change] = {
    **_any("layout", "SBHD", "bshd", "THD", None, 3),
    "key with a longer second axis": _repeated("key", 1),
    "value with a longer third axis": _repeated("value", 2),
    "query with more samples": _repeated("query", 0, 3),
}

_LENGTHS: dict[str, Change] = {
    "cu_seqlens_q list": _of("cu_seqlens_q", Tensor.tolist),
    "cu_seqlens_q int64": _of("cu_seqlens_q", Tensor.long),
    "cu_seqlens_q float": _of("cu_seqlens_q", Tensor.float),
    "cu_seqlens_q empty": _to(cu_seqlens_q=_int32()),
    "cu_seqlens_q 2-D": _of("cu_seqlens_q", lambda t: t[None]),
    "cu_seqlens_q on meta": _of("cu_seqlens_q", lambda t: t.to("meta")),
    "cu_seqlens_q starts with 1": _entry("cu_seqlens_q", 0, lambda n: 1),
    "cu_seqlens_q starts below 0": _entry("cu_seqlens_q", 0, lambda n: -1),
    "cu_seqlens_q ends past T": _entry("cu_seqlens_q", -1, lambda n: n + 1),
    "cu_seqlens_q falls": _falling("cu_seqlens_q"),
    "cu_seqlens_q of more sequences": _of("cu_seqlens_q", lambda t: torch.cat([t, t[-1:]])),
    "max_seqlen_q short": _short("q"),
    "max_seqlen_k short": _short("k"),
    **_any("max_seqlen_q", -1, 3.0, True, None, "3", attn_mask=None),
    "max_seqlen_k tensor": _to(max_seqlen_k=torch.tensor(200), attn_mask=None),
}

_VARLEN: dict[str, Change] = {
    "cu_seqlens_k None": _to(cu_seqlens_k=None),
    "cu_seqlens_k int64": _of("cu_seqlens_k", Tensor.long),
    "cu_seqlens_k ends past T": _entry("cu_seqlens_k", -1, lambda n: n + 1),
    "cu_seqlens_k ends short": _entry("cu_seqlens_k", -1, lambda n: n - 1),
    "cu_seqlens_k falls": _falling("cu_seqlens_k"),
}

_TABLES: dict[str, Change] = {
    **_any("tree", "no", 0.0, None),
    **_any("chunked_prefix", "no", 1.0, None),
    "tree tensor": _to(tree=torch.zeros(2)),
    "page_table float": _of("page_table", Tensor.float),
    "page_table int64": _of("page_table", Tensor.long),
    "page_table 1-D": _of("page_table", Tensor.flatten),
    "page_table None": _to(page_table=None),
    "page_table on meta": _of("page_table", lambda t: t.to("meta")),
    "page past the cache": _page(lambda pages: pages),
    "page below 0": _page(lambda pages: -1),
    "page_table of more sequences": _of("page_table", lambda t: torch.cat([t, t[-1:]])),
    "seq_lens 2-D": _of("seq_lens", lambda t: t[None]),
    "seq_lens int64": _of("seq_lens", Tensor.long),
    "seq_lens list": _of("seq_lens", Tensor.tolist),
    "seq_lens negative": _entry("seq_lens", 0, lambda n: -1),
    "seq_lens past the table": _too_long,
    "seq_lens below the queries": _fewer_keys_than_queries,
    "query wants gradients": _trained,
}

_PAGED: dict[str, Change] = {
    **_any("kv_layout", "NZ", "nhd", None, 3),
    "key_cache 3-D": _of("key_cache", lambda t: t[0]),
    "key_cache None": _to(key_cache=None),
    "value_cache with fewer pages": _of("value_cache", lambda t: t[1:]),
    "caches int": lambda given: {name: given[name].to(torch.int32) for name in ("key_cache", "value_cache")},
    "key_cache wider": _of("key_cache", lambda t: _narrower(t.float())),
    "caches on meta": lambda given: {name: given[name].to("meta") for name in ("key_cache", "value_cache")},
    "k_scale alone": _to(k_scale=torch.ones(()), v_scale=None),
    "scales of another shape": _to(k_scale=torch.ones(97), v_scale=torch.ones(97)),
    "scales numbers": _to(k_scale=2.0, v_scale=2.0),
    "scales int": _to(k_scale=_int32(1), v_scale=_int32(1)),
    "key alone": lambda given: {"key": _new_rows(given, 0), "value": None, "save_kv_cache": False},
    **_any("save_kv_cache", "no", 1.0, None, key=None, value=None),
    "nothing to save": _to(key=None, value=None, save_kv_cache=True),
    "new keys too many": lambda given: {"key": _new_rows(given, 1), "value": _new_rows(given, 1)},
}

_LATENT: dict[str, Change] = {
    "scale None": _to(scale=None),
    "cache None": _to(cache=None),
    "cache 4-D": _of("cache", lambda t: t[None]),
    "cache of another dtype": _of("cache", lambda t: t.to(torch.uint8)),
    "cache wider": _of("cache", _narrower),
    "cache on meta": _of("cache", lambda t: t.to("meta")),
    **_any("v_head_dim", 0, -1, 1000, 2.5, None, "8"),
}


def _new_rows(given: Arguments, more: int) -> Tensor:
    query, cache = given["query"], given["key_cache"]
    heads = cache.shape[2 if given["kv_layout"] == "NHD" else 1]
    return torch.ones(query.shape[0] + more, heads, cache.shape[-1], dtype=query.dtype, device=query.device)


WRONGS: Mapping[str, Mapping[str, Change]] = {
    "dense": _STATIC | _UNLATENT | _TRAINABLE | _DENSE,
    "varlen": _STATIC | _UNLATENT | _TRAINABLE | _LENGTHS | _VARLEN,
    "paged": _STATIC | _UNLATENT | _LENGTHS | _TABLES | _PAGED,
    "mla": _STATIC | _LENGTHS | _TABLES | _LATENT,
}
"""By family: name -> what it changes."""


CONTENTS = frozenset(
    (
        *(f"cu_seqlens_q {what}" for what in ("starts with 1", "starts below 0", "ends past T", "falls")),
        *(f"cu_seqlens_k {what}" for what in ("ends past T", "ends short", "falls")),
        *("max_seqlen_q short", "max_seqlen_k short", "page past the cache", "page below 0"),
        *("seq_lens negative", "seq_lens past the table", "seq_lens below the queries"),
    )
)
"""What only the contents of a table show: nobody has to notice it on a device (`polyattn.semantics.validation`)."""


def wrongs(family: str) -> tuple[str, ...]:
    """The names of the ways to spoil a call of a family."""
    return tuple(WRONGS[family])


def spoil(family: str, wrong: str, given: Arguments) -> dict[str, Any] | None:
    """Arguments that are wrong in one way, or None where these cannot be."""
    changes = WRONGS[family][wrong](given)
    return {**given, **changes} if changes else None
