"""Requests beyond the sizes of conformance, with the real libraries on a GPU: where a grid ends, an offset of 32 bits,
a planner's list or a kernel's shared memory; and tensors that only TMA looks at twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError

from .devices import need

pytestmark = pytest.mark.filterwarnings("default")  # a vendor's own

GENERATIONS = ("fa2", "fa3", "fa4")
SAMPLES = 65_535 + 33


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]


def generation(name: str, request: pytest.FixtureRequest, *, trained: bool = False) -> None:
    """Skip where no provider of this generation is here that serves and, if asked for, trains: `fa` is one backend of
    three, and as in its conformance any one of them may be missing, which is said."""
    need("fa@cuda", request)
    small = [t.requires_grad_(trained) for t in tensors(*[(1, 16, 8, 64)] * 3)]
    polyattn.configure(strict=True)  # no documented fallback
    try:
        polyattn.attention(*small, backend=name)
    except (BackendUnavailableError, UnsupportedRequestError) as refused:
        pytest.skip(f"not run: {refused}")
    finally:
        polyattn.configure()


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", GENERATIONS)
def test_samples_beyond_a_grid(name: str, request: pytest.FixtureRequest) -> None:
    generation(name, request)
    q, k, v = tensors(*[(SAMPLES, 16, 8, 64)] * 3)
    found = polyattn.attention(q, k, v, backend=name)
    for part in (slice(0, 64), slice(65_500, None)):
        close(found[part], polyattn.attention(q[part], k[part], v[part], backend="torch_sdpa"))


@pytest.mark.parametrize("name", GENERATIONS)
def test_sequences_beyond_a_grid(name: str, request: pytest.FixtureRequest) -> None:
    generation(name, request)
    q, k, v = tensors(*[(4 * SAMPLES, 8, 64)] * 3)
    starts = torch.arange(0, 4 * SAMPLES + 1, 4, dtype=torch.int32, device="cuda")
    lens: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 4, "max_seqlen_k": 4}
    found = polyattn.varlen_attention(q, k, v, **lens, backend=name).unflatten(0, (SAMPLES, 4))
    q, k, v = (t.unflatten(0, (SAMPLES, 4)) for t in (q, k, v))
    for part in (slice(0, 64), slice(65_500, None)):
        close(found[part], polyattn.attention(q[part], k[part], v[part], backend="torch_sdpa"))


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("batch", [28_800, SAMPLES])
def test_gradients_of_many_samples(name: str, batch: int, request: pytest.FixtureRequest) -> None:
    """The sums of dQ have 128 rows for each sample: of 28,800 they are beyond an offset of 32 bits."""
    generation(name, request, trained=True)
    heads = 16 if batch == 28_800 else 4
    q, k, v = (t.requires_grad_() for t in tensors(*[(batch, 16, heads, 64)] * 3))
    polyattn.attention(q, k, v, backend=name).backward(q.detach())
    for part in (slice(0, 32), slice(16_380, 16_400), slice(batch - 32, None)):
        mine = [t[part].detach().requires_grad_() for t in (q, k, v)]
        polyattn.attention(*mine, backend="torch_sdpa").backward(q[part].detach())
        for whole, one in zip((q, k, v), mine, strict=True):
            close(whole.grad[part], one.grad)


@pytest.mark.parametrize("name", [*GENERATIONS, "flashinfer"])
@pytest.mark.parametrize(("shape", "axis"), [((1, 200, 8, 64), 0), ((2, 200, 1, 64), 2)])
def test_an_axis_of_one_with_an_odd_stride(
    name: str, shape: tuple[int, ...], axis: int, request: pytest.FixtureRequest
) -> None:
    if name in GENERATIONS:
        generation(name, request)
    else:
        need(f"{name}@cuda", request)
    regular = tensors(*[shape] * 3)
    odd = [t.as_strided(t.shape, [12_345 if a == axis else s for a, s in enumerate(t.stride())]) for t in regular]
    close(polyattn.attention(*odd, backend=name), polyattn.attention(*regular, backend="torch_sdpa"))


def latent(lengths: list[int], queries: list[int], heads: int) -> dict[str, Any]:
    """A latent call in pages of 64, whose sequences have some pages in common."""
    most = max(-(-length // 64) for length in lengths)
    cache, query = tensors((97 + most, 64, 576), (sum(queries), heads, 576))
    first = torch.arange(len(lengths)) % 97
    table = (first[:, None] + torch.arange(most)).int().cuda()
    return {
        "query": query,
        "cache": cache,
        "page_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        "cu_seqlens_q": torch.tensor([0, *queries], device="cuda").cumsum(0, dtype=torch.int32),
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(lengths),
        "scale": 192**-0.5,
    }


LATENT = {
    # Its schedule is in shared memory, an entry for each sequence.
    "sequences": ("flashmla", [100] * 12_000, [1] * 12_000, 16),
    # Shorter sequences are filled up to the longest one's queries.
    "a prompt beside decodes": ("flashmla", [3000] + [100] * 40, [3000] + [1] * 40, 64),
    # Its planner lists 16,384 tiles of 128 rows, and a row is one head of one query.
    "a prompt of many heads": ("flashinfer_mla", [16_500, 70], [16_500, 1], 128),
    "decodes of many heads": ("flashinfer_mla", [100] * 16_500, [1] * 16_500, 128),
}


@pytest.mark.parametrize(("name", "lengths", "queries", "heads"), LATENT.values(), ids=LATENT)
def test_latent_steps_beyond_a_call(
    name: str, lengths: list[int], queries: list[int], heads: int, request: pytest.FixtureRequest
) -> None:
    need(f"{name}@cuda", request)
    call = latent(lengths, queries, heads)
    found = polyattn.mla_attention(**call, backend=name)
    starts = call["cu_seqlens_q"].tolist()
    for n in (0, 1, len(lengths) - 1):
        # The last queries of a sequence see what they see beside the others.
        rows = slice(max(starts[n], starts[n + 1] - 40), starts[n + 1])
        count = rows.stop - rows.start
        one = {
            **call,
            "query": call["query"][rows],
            "page_table": call["page_table"][n : n + 1],
            "seq_lens": call["seq_lens"][n : n + 1],
            "cu_seqlens_q": torch.tensor([0, count], dtype=torch.int32, device="cuda"),
            "max_seqlen_q": count,
        }
        close(found[rows], polyattn.mla_attention(**one, backend="torch_native"))


def test_a_mask_of_many_pairs(request: pytest.FixtureRequest) -> None:
    """All pairs of a query and a key at once would take 16 GiB."""
    need("flashinfer@cuda", request)
    length, heads = 16_384, 2
    query, *caches = tensors((length, heads, 64), *[(length // 64, 64, heads, 64)] * 2)
    mask = torch.rand(1, 1, length, length, device="cuda") < 0.5
    given: dict[str, Any] = {
        "page_table": torch.arange(length // 64, dtype=torch.int32, device="cuda")[None],
        "seq_lens": torch.tensor([length], dtype=torch.int32, device="cuda"),
        "cu_seqlens_q": torch.tensor([0, length], dtype=torch.int32, device="cuda"),
        "max_seqlen_q": length,
        "max_seqlen_k": length,
    }
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = polyattn.paged_attention(query, *caches, **given, attn_mask=mask, causal=False, backend="flashinfer")
    assert torch.cuda.max_memory_allocated() - before < 2 << 30
    rows = slice(length - 64, length)
    last = {**given, "cu_seqlens_q": torch.tensor([0, 64], dtype=torch.int32, device="cuda"), "max_seqlen_q": 64}
    wanted = polyattn.paged_attention(
        query[rows], *caches, **last, attn_mask=mask[:, :, rows], causal=False, backend="torch_native"
    )
    close(found[rows], wanted)


def test_tiles_of_128_heads(request: pytest.FixtureRequest) -> None:
    """Its planner lists seven numbers for each head of each tile, up to 4,096 tiles of them."""
    need("flashinfer@cuda", request)
    lengths = [200] * 1_200
    q, k, v = tensors(*[(sum(lengths), 128, 64)] * 3)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    lens: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 200, "max_seqlen_k": 200}
    found = polyattn.varlen_attention(q, k, v, **lens, backend="flashinfer", causal=True).unflatten(0, (-1, 200))
    q, k, v = (t.unflatten(0, (-1, 200)) for t in (q, k, v))
    for part in (slice(0, 2), slice(1_198, None)):
        close(found[part], polyattn.attention(q[part], k[part], v[part], causal=True, backend="torch_sdpa"))
