"""The families over a cache: what the kit makes of a case against mathematics written down query by query."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.contract import AttentionRequest, Range, row
from polyattn.semantics.kv_quant import real, stored
from polyattn.semantics.reference import mla_unpack_fp8
from polyattn.testing import Case, generate, run_case

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "group": True,
    "causal": ("none", "bottom_right"),
    "mask": ("none", "bool", "additive"),
    "scale": True,
    "lse": True,
    "phase": ("prefill", "extend", "decode", "verify"),
    "s_relation": ("equal", "one", "fewer", "more"),
    "page_size": Range(1),
    "kv_parts": Range(0),
    "misaligned": True,
}
PAGED = row(
    family="paged",
    head_dim=Range(1),
    v_head_dim=Range(1),
    sinks=True,
    kv_dtype=("auto", "fp8_e4m3", "int8", "fp4_e2m1"),
    kv_scales=("", "tensor", "head", "token", "block16"),
    kv_layout=("", "NHD", "HND"),
    save_kv_cache=True,
    **COMMON,
)
LATENT = row(
    family="mla",
    head_dim=(64, 576),
    v_head_dim=(24, 512),
    kv_dtype=("auto", "fp8_e4m3"),
    kv_scales=("", "block128"),
    **COMMON,
)


Rows = tuple[Tensor, Tensor]


@functools.cache
def cases(family: str) -> list[Case]:
    one = PAGED if family == "paged" else LATENT
    return generate(
        [one], {"platform": "cpu"}, families=[family], dtypes=["float32"], per_row=60 if family == "paged" else 40
    )


class Slow:
    """Every query by itself: gather the keys and values it sees, then softmax in float64."""

    name, device = "slow", torch.device("cpu")

    def call(self, case: Case, tensors: Any, extra: Any, out: Tensor | None) -> Any:
        if case.request.save_kv_cache:
            self.store(case, tensors, extra)
        starts, rows = extra["cu_seqlens_q"].tolist(), []
        for n, length in enumerate(extra["seq_lens"].tolist()):
            own = self.own(case, tensors, extra, n, length)
            rows += [self.query(case, tensors, extra, n, i, length, own) for i in range(starts[n + 1] - starts[n])]
        made = torch.stack([o for o, _ in rows]).to(tensors["query"].dtype)
        lse = torch.stack([x for _, x in rows]).float()
        made = made if out is None else out.copy_(made)
        return (made, lse) if case.request.lse else made

    def query(self, case: Case, t: Any, extra: Any, n: int, i: int, length: int, own: Rows) -> tuple[Tensor, Tensor]:
        r, start = case.request, int(extra["cu_seqlens_q"][n])
        s_q = int(extra["cu_seqlens_q"][n + 1]) - start
        last = length if r.causal == "none" else max(i + length - s_q + 1, 0)
        keys, values = [own[0][:last]], [own[1][:last]]
        bias = torch.zeros(last, r.heads, dtype=torch.float64)
        if "mask" in t:
            mask = t["mask"].expand(len(case.lengths), r.heads, -1, -1)[n, :, i, :last].T
            bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
        for part in extra.get("kv_parts", ()):
            pool = {**t, **{k: v for k in ("key_cache", "value_cache", "cache") if (v := getattr(part, k)) is not None}}
            group = int(torch.searchsorted(part.cu_seqlens_q[1:], torch.tensor(start + i), right=True))
            more = self.stored(case, pool, part.page_table[group], int(part.seq_lens[group]))
            keys.append(more[0])
            values.append(more[1])
            bias = torch.cat([bias, bias.new_zeros(len(more[0]), r.heads)])
        scale = r.head_dim**-0.5 if r.scale is None else r.scale
        scores = torch.einsum("hd,khd->kh", t["query"][start + i].double(), torch.cat(keys)) * scale + bias
        lse = torch.logsumexp(scores, 0) if len(scores) else torch.full((r.heads,), -torch.inf).double()
        total = torch.logaddexp(lse, t["sinks"].double()) if "sinks" in t else lse
        out = torch.einsum("kh,khd->hd", torch.exp(scores - total), torch.cat(values))
        return torch.where((lse == -torch.inf)[:, None], 0.0, out), lse

    def own(self, case: Case, t: Any, extra: Any, n: int, length: int) -> Rows:
        start, end = extra["cu_seqlens_q"][n : n + 2].tolist()
        keys, values = self.stored(case, t, extra["page_table"][n], length)
        if case.new_rows and length:
            keys[length - end + start :] = self.heads(case, t["key"][start:end].double())
            values[length - end + start :] = self.heads(case, t["value"][start:end].double())
        return keys, values

    def stored(self, case: Case, t: Any, table: Tensor, length: int) -> Rows:
        """Keys and values [S, H_q, D] of the first `length` tokens on some pages."""
        r, token = case.request, torch.arange(length)
        where = (table[token // r.page_size].long(), token % r.page_size)
        if r.family == "mla":
            rows = mla_unpack_fp8(t["cache"][where]) if r.kv_scales else t["cache"][where]
            rows = rows.double().unsqueeze(1).expand(-1, r.heads, -1)
            return rows, rows[..., : r.dims[1]]
        found = []
        for name in ("key", "value"):
            cache, scale = nhd(r, t[f"{name}_cache"]), of(r, t.get(f"{name[0]}_scale"), where)
            found.append(self.heads(case, real(cache[where], scale, torch.float64)))
        return found[0], found[1]

    def heads(self, case: Case, rows: Tensor) -> Tensor:
        return rows.repeat_interleave(case.request.group, 1)

    def store(self, case: Case, t: Any, extra: Any) -> None:
        r, starts = case.request, extra["cu_seqlens_q"].tolist()
        for n, length in enumerate(extra["seq_lens"].tolist()):
            token = torch.arange(max(length - starts[n + 1] + starts[n], 0), length)
            where = (extra["page_table"][n, token // r.page_size].long(), token % r.page_size)
            for name in ("key", "value") if length else ():
                cache = t[f"{name}_cache"]
                rows = t[name][starts[n] : starts[n + 1]]
                nhd(r, cache)[where] = stored(rows, of(r, t.get(f"{name[0]}_scale"), where), cache.dtype)


def nhd(request: AttentionRequest, pages: Tensor) -> Tensor:
    return pages.transpose(1, 2) if request.kv_layout == "HND" else pages


def of(request: AttentionRequest, scale: Tensor | None, where: Any) -> Tensor | None:
    """Scales of these rows, broadcastable to [S, H_kv, D]."""
    if scale is None or scale.dim() < 2:
        return scale if scale is None else scale.reshape(-1, 1)
    rows = nhd(request, scale)[where]
    return rows if scale.dim() == 4 else rows.unsqueeze(-1)


@pytest.mark.parametrize("family", ["paged", "mla"])
def test_the_definition_query_by_query_agrees(family: str) -> None:
    for case in cases(family):
        assert run_case(Slow(), case).verdict == "passed", str(run_case(Slow(), case))


def test_every_kind_of_storage_is_among_them() -> None:
    paged, latent = cases("paged"), cases("mla")
    assert {c.request.kv_dtype for c in paged} == {"auto", "fp8_e4m3", "int8", "fp4_e2m1"}
    assert {c.request.kv_scales for c in paged} == {"", "tensor", "head", "token", "block16"}
    assert {c.request.kv_dtype for c in latent} == {"auto", "fp8_e4m3"}
    for some in (paged, latent):
        assert {c.request.kv_parts for c in some} == {0, 1, 3}
        assert {"decode", "split", "pages"} <= {c.check for c in some}


def test_bits_that_depend_on_the_page_are_found() -> None:
    class Paging(Slow):
        def call(self, case: Case, tensors: Any, extra: Any, out: Tensor | None) -> Any:
            raw = super().call(case, tensors, extra, out)
            if case.check == "pages":
                result = raw[0] if case.request.lse else raw
                result += 1e-8 * float(extra["page_table"][0, 0])
            return raw

    paged = [c for c in cases("paged") if c.check == "pages" and c.request.page_size == 16]
    messages = {str(f) for c in paged for f in run_case(Paging(), c).findings}
    assert "pages: out: the same content on other pages gave other bits" in messages


def test_a_kernel_without_fixed_bits_is_held_to_the_gates_on_other_pages() -> None:
    class Restless(Slow):
        calls = 0

        def call(self, case: Case, tensors: Any, extra: Any, out: Tensor | None) -> Any:
            raw = super().call(case, tensors, extra, out)
            Restless.calls += 1
            result = raw[0] if case.request.lse else raw
            result *= 1 + 1.2e-7 * Restless.calls
            return raw

    case = next(c for c in cases("paged") if c.check == "pages")
    assert run_case(Restless(), case).verdict == "passed"


def test_pages_read_in_their_own_order_are_found() -> None:
    class InOrder(Slow):
        def call(self, case: Case, tensors: Any, extra: Any, out: Tensor | None) -> Any:
            table = extra["page_table"].sort(-1).values
            return super().call(case, tensors, {**extra, "page_table": table}, out)

    seen = (finding.check for case in cases("paged") for finding in run_case(InOrder(), case).findings)
    assert next(seen) == "out"


def test_parts_that_are_not_read_are_found() -> None:
    class Deaf(Slow):
        def call(self, case: Case, tensors: Any, extra: Any, out: Tensor | None) -> Any:
            return super().call(case, tensors, {**extra, "kv_parts": ()}, out)

    parted = [c for c in cases("paged") if c.request.kv_parts][:5]
    assert all(run_case(Deaf(), c).findings for c in parted)


def test_a_decode_that_differs_from_prefill_is_found() -> None:
    class Shifted(Slow):
        def call(self, case: Case, tensors: Any, extra: Any, out: Tensor | None) -> Any:
            if case.check == "decode":
                extra = {**extra, "seq_lens": (extra["seq_lens"] - 1).clamp(min=1)}
            return super().call(case, tensors, extra, out)

    assert "decode" in {f.check for c in cases("paged") if c.check == "decode" for f in run_case(Shifted(), c).findings}


@pytest.mark.parametrize("family", ["paged", "mla"])
def test_an_empty_part_that_is_no_identity_is_found(family: str) -> None:
    class Zero(Slow):
        def call(self, case: Case, tensors: Any, extra: Any, out: Tensor | None) -> Any:
            raw = super().call(case, tensors, extra, out)
            if case.request.lse:
                return raw[0], raw[1].nan_to_num(neginf=0.0)
            return raw

    splits = [c for c in cases(family) if c.check == "split"]
    assert any(run_case(Zero(), c).findings for c in splits)
