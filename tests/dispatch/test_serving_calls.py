"""`paged_attention` and `mla_attention`: who is asked for by phase, and that they say what the definition says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import polyattn

# The reference serves these families until they have kernels, and says so.


@pytest.fixture(autouse=True)
def plain_settings():
    yield
    polyattn.configure()


def paged(max_seqlen_q):
    torch.manual_seed(0)
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    starts = torch.tensor([0, max_seqlen_q, 2 * max_seqlen_q], dtype=torch.int32)
    return {
        "query": torch.randn(2 * max_seqlen_q, 4, 16),
        "key_cache": torch.randn(4, 4, 2, 16),
        "value_cache": torch.randn(4, 4, 2, 16),
        "page_table": torch.tensor([[2, 0], [1, 3]], dtype=torch.int32),
        "seq_lens": lengths,
        "cu_seqlens_q": starts,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": 5,
    }


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("options", [{}, {"window": (1, 0)}, {"softcap": 3.0}, {"return_lse": True}], ids=str)
def test_paged_equals_dense_on_gathered_keys(queries, options):
    call = paged(queries)
    got = polyattn.paged_attention(**call, **options)
    for n, (length, pages) in enumerate(zip([5, 3], [[2, 0], [1, 3]], strict=True)):
        k, v = (torch.cat([call[c][p] for p in pages])[None, :length] for c in ("key_cache", "value_cache"))
        q = call["query"][None, n * queries : (n + 1) * queries]
        want = polyattn.attention(q, k, v, causal=True, backend="reference", **options)
        rows = slice(n * queries, (n + 1) * queries)
        for a, b in zip(
            got if options.get("return_lse") else [got], want if "return_lse" in options else [want], strict=True
        ):
            torch.testing.assert_close(a[rows], b[0])


def test_latent_scale_is_asked_for_and_out_is_returned():
    call = paged(1)
    cache = torch.randn(4, 4, 24)
    rows = {k: v for k, v in call.items() if k not in ("key_cache", "value_cache", "query")}
    query, out = torch.randn(2, 4, 24), torch.full((2, 4, 16), float("nan"))
    got = polyattn.mla_attention(query, cache, scale=0.2, v_head_dim=16, out=out, **rows)
    assert got is out
    paged_form = polyattn.paged_attention(
        query, cache[:, :, None], cache[:, :, None, :16].contiguous(), scale=0.2, **rows
    )
    torch.testing.assert_close(got, paged_form)


@pytest.mark.parametrize(
    ("queries", "settings", "source"),
    [
        (1, {"decode_attention_backend": "reference", "prefill_attention_backend": "triton"}, "configure()"),
        (2, {"prefill_attention_backend": "reference", "decode_attention_backend": "triton"}, "configure()"),
        (1, {"attention_backend": "reference", "prefill_attention_backend": "triton"}, "configure()"),
    ],
    ids=["decode", "extend", "one phase inherits"],
)
def test_each_phase_has_its_own_setting(queries, settings, source):
    polyattn.configure(**settings)
    found = polyattn.explain(polyattn.paged_attention, **paged(queries))
    assert (found.backend, found.source) == ("reference", source)
    torch.testing.assert_close(polyattn.paged_attention(**paged(queries)).isfinite().all(), torch.tensor(True))


def test_phase_settings_leave_dense_calls_alone():
    polyattn.configure(decode_attention_backend="reference", prefill_attention_backend="reference")
    q = torch.randn(1, 1, 4, 16)
    assert polyattn.explain(polyattn.attention, q, q, q).backend == "torch_sdpa"


def test_drafts_are_verified_by_the_mode():
    from polyattn.selection.overrides import current_choice

    request = polyattn.AttentionRequest(family="paged", phase="verify", page_size=16)
    for mode, name in (("prefill", "fa3"), ("decode", "triton")):
        polyattn.configure(
            prefill_attention_backend="fa3", decode_attention_backend="triton", speculative_attention_mode=mode
        )
        assert current_choice(None, ("", "", ""), request).name == name


def test_training_over_a_cache_is_refused():
    call = paged(1)
    call["query"].requires_grad_()
    with pytest.raises(polyattn.InvalidInputError, match="inference only"):
        polyattn.paged_attention(**call)
    for name, shape in (("sinks", (4,)), ("attn_mask", (1, 1, call["max_seqlen_q"], call["max_seqlen_k"]))):
        call = {**paged(1), name: torch.zeros(shape, requires_grad=True)}
        with pytest.raises(polyattn.InvalidInputError, match="inference only"):
            polyattn.paged_attention(**call)
        with torch.no_grad():
            polyattn.paged_attention(**call)


def test_a_recorded_call_needs_a_kernel_that_can_be(monkeypatch):
    """torch_native reads lengths on the host, which no capture survives."""
    assert polyattn.explain(polyattn.paged_attention, **paged(1), backend="torch_native").backend == "torch_native"
    monkeypatch.setattr("polyattn.dispatch.paged.capturing", lambda kind: True)
    with pytest.raises(polyattn.UnsupportedRequestError, match="graph_capture"):
        polyattn.explain(polyattn.paged_attention, **paged(1), backend="torch_native")


@pytest.mark.parametrize("shared", [False, True])
def test_tables_of_one_column_and_one_row_come_with_a_last_stride_of_one(shared, monkeypatch):
    """Libraries ask for it, or for a contiguous tensor, where no stride matters."""
    given = {}

    def forward(*tensors, **words):
        given.update(words)

    chosen = SimpleNamespace(bound=SimpleNamespace(forward=forward), ranged=lambda call, run: run)
    monkeypatch.setattr("polyattn.dispatch.paged.remembered", lambda *asked: chosen)
    call = paged(1)
    table = torch.tensor([[2, 1]], dtype=torch.int32).t()
    lengths = torch.tensor([[4, 9, 9]], dtype=torch.int32)[:, :1].expand(1, 1).t()[0]
    lengths = lengths.as_strided((1,), (5,))
    one = {"page_table": table[:1], "seq_lens": lengths, "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32)}
    assert table.stride(-1) != 1
    assert lengths.stride(-1) != 1
    if shared:
        part = polyattn.KVPart(one["page_table"], lengths, torch.tensor([0, 2], dtype=torch.int32), 2, 4)
        polyattn.paged_attention(**call, kv_parts=[part])
        tables = given["kv_parts"][0].page_table, given["kv_parts"][0].seq_lens
    else:
        polyattn.paged_attention(**{**call, **one, "query": call["query"][:1]})
        tables = given["tables"].page_table, given["tables"].seq_lens
        latent = {name: tensor for name, tensor in call.items() if name not in ("key_cache", "value_cache")}
        cache, query = torch.randn(4, 4, 24), torch.randn(1, 4, 24)
        polyattn.mla_attention(**{**latent, **one, "query": query}, cache=cache, scale=0.2, v_head_dim=16)
        assert [table.stride(-1) for table in given["tables"][:2]] == [1, 1]
    assert [t.stride(-1) for t in tables] == [1, 1]
    assert [t.tolist() for t in tables] == [[[2]], [4]]
