"""POLYATTN_VALIDATE=1 looks at what a backend returns and at what it does to its inputs, and names whose it is."""

from __future__ import annotations

import pytest
import torch

import polyattn
from polyattn.contract import AttentionRequest, Bound, PagedTables
from polyattn.errors import PluginError
from polyattn.registry import result_check
from polyattn.registry.manager import get_manager

KERNEL = """
import torch
from polyattn.contract import Bound

@hookimpl
def polyattn_register_backends():
    rows = tuple(row(family=f, dtype=("float32", "bfloat16"), head_dim=Range(1), lse=True, causal=True, grad=GRADS)
                 for f in ("dense", "varlen"))
    return [info("acme", providers=(Provider("own", rows, "m:C"),))]

def right(query, key, value, **more):
    return torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)

def lse_of(query):
    return torch.zeros(query.shape[:-1])

def answer(query, key, value, *, out=None, **more):
    {body}

@hookimpl
def polyattn_load_forward(backend, provider, request):
    def forward(query, key, value, *, attn_mask=None, sinks=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None,
                max_seqlen_q=0, max_seqlen_k=0):
        return answer(query, key, value, out=out, mask=attn_mask)
    def backward(dout, query, key, value, out, lse, *, attn_mask=None, cu_seqlens_q=None, cu_seqlens_k=None,
                 max_seqlen_q=0, max_seqlen_k=0):
        {back}
    return Bound(forward, backward=backward if GRADS else None)
"""


def use(site, body, back="", grads="()"):
    source = KERNEL.replace("{body}", body).replace("{back}", back or "raise AssertionError").replace("GRADS", grads)
    site.add("acme", source)
    site.use()


def call(dtype=torch.float32, **more):
    q = torch.randn(2, 3, 4, 8, dtype=dtype)
    return polyattn.attention(q, q.clone(), q.clone(), backend="acme", **more)


WRONG = {
    "return right(query, key, value)[:, :2]": r"returned as out \[2, 2, 4, 8\] float32 on cpu; \[2, 3, 4, 8\] float32",
    "return right(query, key, value).double()": r"out \[2, 3, 4, 8\] float64 on cpu; \[2, 3, 4, 8\] float32 on cpu",
    "return right(query, key, value).to('meta')": r"returned as out \[2, 3, 4, 8\] float32 on meta; .* on cpu is",
    "return right(query, key, value).transpose(-1, -2).contiguous().transpose(-1, -2)": "strides .*; a dense last axis",
    "return query": "returned its input query, or memory of it; the output is a tensor of its own",
    "return query[:]": "returned its input query, or memory of it",
    "return value": "returned its input value, or memory of it",
    "query.mul_(2); return right(query, key, value)": r"wrote to its input query, \[2, 3, 4, 8\] float32 on cpu; .*cop",
    "value[0, 0, 0, 0] = float('nan'); return right(query, key, value)": "wrote to its input value",
    "key.numpy()[0] = 1; return right(query, key, value)": "wrote to its input key",
    "return right(query, key, value), lse_of(query)": "returned as out a tuple of 2; ",
    "return None": "returned as out a NoneType; ",
}


@pytest.mark.parametrize("body", WRONG)
def test_a_wrong_answer_is_an_error_that_names_the_backend(site, monkeypatch, body):
    monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    use(site, body)
    with pytest.raises(
        PluginError, match=rf"^plugin acme \(fake-acme 1.0\): acme@cpu: its dense forward .*{WRONG[body]}"
    ):
        call()


def test_a_packed_answer(site, monkeypatch):
    monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    use(site, "return right(query, key, value)[1:]")
    q, lens = torch.randn(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(
        PluginError, match=r"its varlen forward returned as out \[4, 4, 8\] .*; \[5, 4, 8\] float32 on cpu"
    ):
        polyattn.varlen_attention(
            q,
            q.clone(),
            q.clone(),
            cu_seqlens_q=lens,
            cu_seqlens_k=lens,
            max_seqlen_q=3,
            max_seqlen_k=3,
            backend="acme",
        )


@pytest.mark.parametrize(
    "body, wrong",
    [
        (
            "return right(query, key, value)",
            r"returned \[2, 3, 4, 8\] bfloat16 on cpu; a pair, \(out, lse\), is needed",
        ),
        (
            "return right(query, key, value), lse_of(query)[..., None]",
            r"returned as lse \[2, 3, 4, 1\] float32 on cpu; ",
        ),
        (
            "return right(query, key, value), lse_of(query).bfloat16()",
            r"returned as lse \[2, 3, 4\] bfloat16 on cpu; .* float32 on c",
        ),
    ],
)
def test_a_wrong_lse(site, monkeypatch, body, wrong):
    monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    use(site, body)
    with pytest.raises(PluginError, match=rf"its dense forward {wrong}"):
        call(dtype=torch.bfloat16, return_lse=True)


def test_an_out_that_is_not_returned(site, monkeypatch):
    monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    use(site, "return right(query, key, value)")
    with pytest.raises(PluginError, match=r"was given out= and returned another tensor, .*; out itself is needed"):
        call(out=torch.empty(2, 3, 4, 8))


@pytest.mark.parametrize(
    "back, wrong",
    [
        ("return query, key", r"returned a tuple of 2; \(dquery, dkey, dvalue\) is needed"),
        (
            "return query + 1, key[:1] + 1, value + 1",
            r"returned as dkey \[1, 3, 4, 8\] float32 on cpu; \[2, 3, 4, 8\] flo",
        ),
        ("out.zero_().add_(1); return query + 1, key + 1, value + 1", "wrote to its input out"),
    ],
)
def test_a_wrong_gradient(site, monkeypatch, back, wrong):
    monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    use(site, "return right(query, key, value), lse_of(query)", back, "('query', 'key', 'value')")
    q, k, v = (torch.randn(2, 3, 4, 8, requires_grad=True) for _ in range(3))
    with pytest.raises(PluginError, match=rf"acme@cpu: its dense backward {wrong}"):
        polyattn.attention(q, k, v, backend="acme").sum().backward()


@pytest.mark.parametrize("value", ["0", None])
def test_nothing_is_in_the_way_without_the_variable(site, monkeypatch, value):
    """The very functions of the plugin are called."""
    monkeypatch.delenv("POLYATTN_VALIDATE", raising=False)
    if value is not None:
        monkeypatch.setenv("POLYATTN_VALIDATE", value)
    use(site, "return query")
    manager = get_manager()
    info = manager.backends["acme", "cpu"]
    bound = manager.load_forward(info, info.providers[0], AttentionRequest(dtype="float32"))
    assert bound.forward.__module__ == "fake_acme"
    assert call().shape == (2, 3, 4, 8)


def test_inputs_that_are_too_large_for_a_copy_are_not_compared(site, monkeypatch):
    monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    monkeypatch.setattr(result_check, "MOST_BYTES", 3 * 4 * 2 * 3 * 4 * 8)
    use(site, "query.mul_(2); return right(query, key, value)")
    with pytest.raises(PluginError, match="wrote to its input query"):
        call()
    monkeypatch.setattr(result_check, "MOST_BYTES", 3 * 4 * 2 * 3 * 4 * 8 - 1)
    assert not call().any()


def test_the_serving_side_of_a_kernel_that_plans_is_looked_at_too():
    class Side:
        kept = "x"

        def forward(self, query, key_cache, value_cache, **tables):
            return query

    request = AttentionRequest(family="paged", dtype="float32", head_dim=8)
    bound = Bound(Side().forward, session=lambda slot: Side())
    side = result_check.checking(bound, request, "plugin p: b@cpu").session(None)
    q, cache = torch.randn(2, 4, 8), torch.randn(3, 16, 4, 8)
    with pytest.raises(PluginError, match="b@cpu: its paged forward returned its input query"):
        side.forward(q, cache, cache.clone())
    assert side.kept == "x"


def test_a_cache_may_be_written_where_the_call_asks_for_it():
    def forward(query, key_cache, value_cache, **tables):
        key_cache.add_(1)
        return torch.zeros_like(query)

    q, cache = torch.randn(2, 4, 8), torch.randn(3, 16, 4, 8)
    for save, fine in ((True, True), (False, False), (None, False)):
        request = AttentionRequest(family="paged", dtype="float32", head_dim=8, save_kv_cache=save)
        looked_at = result_check.checking(Bound(forward), request, "plugin p: b@cpu").forward
        if fine:
            looked_at(q, cache, cache.clone())
        else:
            with pytest.raises(PluginError, match="wrote to its input key_cache"):
                looked_at(q, cache, cache.clone())


@pytest.mark.parametrize("name", ["page_table", "seq_lens", "cu_seqlens_q"])
def test_tables_that_are_written_to_are_named(name):
    def forward(query, key_cache, value_cache, *, tables):
        getattr(tables, name).add_(1)
        return torch.zeros_like(query)

    request = AttentionRequest(family="paged", dtype="float32", head_dim=8)
    looked_at = result_check.checking(Bound(forward), request, "plugin p: b@cpu").forward
    q, cache = torch.randn(2, 4, 8), torch.randn(3, 16, 4, 8)
    tables = PagedTables(torch.zeros(2, 1).int(), torch.ones(2).int(), torch.arange(3).int(), 1, 1)
    with pytest.raises(PluginError, match=f"wrote to its input {name}"):
        looked_at(q, cache, cache.clone(), tables=tables)


@pytest.mark.parametrize("backend", ["torch_sdpa", "flex_attention", "torch_native", "reference"])
@pytest.mark.parametrize("causal, lse", [(False, False), (True, True)])
def test_cores_backends_pass(monkeypatch, backend, causal, lse):
    monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    polyattn.registry.manager.reset_manager()
    q = torch.randn(1, 3, 2, 16, requires_grad=True)
    with torch.no_grad():
        polyattn.attention(q, q, q, causal=causal, return_lse=lse, backend=backend)
    if backend != "flex_attention":
        found = polyattn.attention(q, q, q, causal=causal, backend=backend)
        found.sum().backward()
    polyattn.registry.manager.reset_manager()
