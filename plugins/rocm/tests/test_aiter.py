"""AITER: the kit over an emulator of both versions, and what its entry points are really called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn.adapters import without_free_slots
from polyattn.errors import BackendUnavailableError
from polyattn.semantics.paged_kv import Tokens
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn.testing.families.cached import in_tables
from polyattn_rocm.aiter import latent as latents
from polyattn_rocm.aiter import mha, sage, unified
from polyattn_rocm.aiter.mha import _Kernels
from polyattn_rocm.aiter.tokens import SPARE, token_lists

from .emulators import aiter as emulator

# build: (version, chip, provider of `fa`, provider of `aiter`)
BUILDS: dict[str, tuple[str, str, str, str]] = {
    "0.1.20": ("0.1.20", "gfx942", "aiter", "amd-aiter"),
    "0.1.20-gfx950": ("0.1.20", "gfx950", "", "amd-aiter"),
    "0.1.20-fp8": ("0.1.20", "gfx950", "", "amd-aiter/triton"),
    "0.1.20-gfx1201": ("0.1.20", "gfx1201", "", "amd-aiter/triton"),
    "0.1.7": ("0.1.7", "gfx942", "aiter-0.1.7", "amd-aiter-0.1.7"),
}


def target(build: str, *, serving: bool = True) -> Emulated:
    _, chip, dense, cached = BUILDS[build]
    return Emulated("aiter", cached, f"rocm:{chip}") if serving else Emulated("fa", dense, f"rocm:{chip}")


SAGE = Emulated("aiter_sage", "amd-aiter", "rocm:gfx942")


def families(build: str) -> dict[str, Emulated]:
    """What is tried of a build, and by which backend."""
    paged = {"paged": target(build), "mla": target(build)}
    if BUILDS[build][3] == "amd-aiter/triton":
        return {"paged": target(build)}
    return paged if "-" in build else {**paged, "dense": target(build, serving=False), "varlen": target(build)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    full = metafunc.config.getoption("--polyattn-full")
    given: dict[str, Any] = {"per_row": 24} if full else {"per_row": 2, "dtypes": ("bfloat16",)}
    metafunc.parametrize(
        ("build", "tried", "case"),
        [
            pytest.param(build, tried, case, id=f"{build}-{case.id}")
            for build in BUILDS
            for family, tried in families(build).items()
            for case in tried.cases(**given, families=(family,))
        ]
        + [pytest.param("0.1.20", SAGE, case, id=f"sage-{case.id}") for case in SAGE.cases(**given)],
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Library]:
    return lambda build: emulator.library(*BUILDS[build][:2]).install(monkeypatch)


@pytest.mark.slow(keep=117)
def test_conformance(build: str, tried: Emulated, case: Case, install: Callable[[str], Library]) -> None:
    tried.passes(case, install(build))


# ------------------------------------------------------------------------------------------------ dense and packed

QKV = ((2, 200, 4, 128), (2, 200, 2, 128), (2, 200, 2, 128))


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def dense(build: str, **fields: Any) -> Any:
    usual = {"heads": 4, "kv_heads": 2, "head_dim": 128, "causal": "bottom_right"}
    return target(build, serving=False).bind(**{**usual, **fields})


@pytest.mark.parametrize("build", ["0.1.20", "0.1.7"])
def test_only_tensors_are_given_by_position(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    q, k, v = tensors(*QKV)
    out, lse = dense(build, grad=("query",)).forward(q, k, v)
    dense(build, grad=("query",)).backward(out, q, k, v, out, lse)
    paged(build)
    latent(build)
    assert [call.positional for call in library.calls] == [3, 0, 3, 0]


def test_sinks_are_fused_where_they_are_not_dropped(install: Callable[[str], Library]) -> None:
    library = install("0.1.20")
    q, k, v = tensors(*QKV)
    sinks = torch.tensor([0.5, 1.0, -2.0, 3.0])
    dense("0.1.20", sinks=True).forward(q, k, v, sinks=sinks.bfloat16())
    assert library.calls[-1].given.get("sink_ptr") is None
    assert library.calls[-1].given["return_lse"]
    dense("0.1.20", sinks=True, head_dim=64).forward(q[..., :64], k[..., :64], v[..., :64], sinks=sinks.bfloat16())
    assert library.calls[-1].given["sink_ptr"].dtype == torch.float32
    assert not library.calls[-1].given["return_lse"]


@pytest.mark.parametrize("build", ["0.1.20", "0.1.7"])
def test_a_window_of_no_keys_stays_off_assembly(build: str, install: Callable[[str], Library]) -> None:
    """Each query sees its own key alone: its value is the result."""
    library = install(build)
    q, k, v = tensors(*QKV)
    bound = dense(build, window=(0, -1))
    for call in (bound.forward, bound.simple):
        assert torch.equal(call(q, k, v), v.repeat_interleave(2, 2))
        assert not library.calls[-1].given["alibi_slopes"].any()
    bound = dense(build)
    assert torch.equal(bound.simple(q, k, v), bound.forward(q, k, v))
    assert "alibi_slopes" not in library.calls[-1].given


def test_dropout_leaves_the_gradient_to_the_library(install: Callable[[str], Library]) -> None:
    library = install("0.1.20")
    bound = dense("0.1.20", dropout=0.25, grad=("query", "key", "value"))
    assert bound.backward is None
    q, k, v = (t.requires_grad_() for t in tensors(*QKV))
    bound.forward(q, k, v).sum().backward()
    assert library.calls[-1].given["dropout_p"] == 0.25
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"family": "varlen", "layout": "THD", "softcap": 30.0}, "have no softcap"),
        ({"grad": ("query",)}, "have no gradients of its own"),
    ],
)
def test_a_build_without_composable_kernel_says_so(
    fields: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.library(ck=False).install(monkeypatch)
    dense("0.1.20")
    with pytest.raises(BackendUnavailableError, match=words):
        dense("0.1.20", **fields)


def test_an_older_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.library("0.1.7").install(monkeypatch)
    with pytest.raises(BackendUnavailableError, match=r"0\.1\.7.* takes no 'return_lse', which the LSE needs"):
        target("0.1.20").bind(**LATENT, lse=True)
    with pytest.raises(BackendUnavailableError, match=r"0\.1\.7.* has no usable aiter\.ops\.triton\.attention"):
        target("0.1.20-fp8").bind(**PAGED, kv_dtype="fp8_e4m3")


# ------------------------------------------------------------------------------------------------------ over a cache

PAGED: dict[str, Any] = {
    "family": "paged",
    "layout": "THD",
    "phase": "decode",
    "s_relation": "one",
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "page_size": 16,
}
LATENT: dict[str, Any] = {
    **PAGED,
    "family": "mla",
    "heads": 16,
    "kv_heads": 1,
    "head_dim": 576,
    "v_head_dim": 512,
    "scale": 192**-0.5,
}


def tables(queries: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """Sequences of 30 and 9 keys in pages of 16."""
    return {
        "page_table": torch.tensor([[2, 1], [0, 7]], dtype=torch.int32),
        "seq_lens": torch.tensor([30, 9], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32),
        "max_seqlen_q": max(queries),
        "max_seqlen_k": 30,
    }


def paged(build: str, free: float = 0.0, queries: tuple[int, int] = (1, 1), **fields: Any) -> Tensor:
    query, keys, values = tensors((sum(queries), 4, 64), (3, 16, 2, 64), (3, 16, 2, 64))
    for cache in (keys, values):
        cache[1, 14:], cache[0, 9:] = free, free
    bound = target(build).bind(**{**PAGED, **fields})
    result: Tensor = bound.forward(query, keys, values, **in_tables(**tables(queries)))
    return result


def latent(build: str, queries: tuple[int, int] = (1, 1), **fields: Any) -> Any:
    query, cache = tensors((sum(queries), 16, 576), (3, 16, 576))
    return target(build).bind(**{**LATENT, **fields}).forward(query, cache, **in_tables(**tables(queries)))


def test_pages_are_read_by_token_where_they_lie(install: Callable[[str], Library]) -> None:
    library = install("0.1.20")
    paged("0.1.20", free=torch.nan)
    given = library.calls[-1].given
    assert library.calls[-1].name == "mha_batch_prefill_func"
    assert given["kv_indptr"].tolist() == [0, 30, 39]
    owned = [*range(32, 48), *range(16, 30), *range(9)]
    assert given["kv_page_indices"][:39].tolist() == owned
    # What lies behind the end is read too.
    assert set(given["kv_page_indices"][39:].tolist()) == {32}
    assert given["kv_page_indices"].shape == (2 * 30 + SPARE,)


def test_lists_of_tokens_are_made_without_waiting_for_the_device() -> None:
    """Where tensors have no values, whatever reads one on the host raises."""
    with FakeTensorMode():
        where = in_tables(**tables())["tables"]
        cache = torch.empty(3, 16, 2, 64)
        (tokens,), lists = token_lists((cache,), where)
        drafts = Tokens.of(torch.empty(5, 16, 576), where)
        without_free_slots(target("0.1.20").request(**PAGED), (cache,), where)
    assert (tokens.shape, lists.indices.shape, drafts.real.shape) == ((48, 1, 2, 64), (60 + SPARE,), (5,))


FINITE = {"options": (("free_slots", "finite"),)}


@pytest.mark.parametrize("build", ["0.1.20", "0.1.7"])
def test_free_slots_reach_the_triton_kernel_only_by_promise(build: str, install: Callable[[str], Library]) -> None:
    library = install(build)
    any_slots = paged(build, free=torch.nan)
    assert library.calls[-1].name == "mha_batch_prefill_func"
    finite = paged(build, **FINITE)
    assert library.calls[-1].name == "unified_attention"
    assert torch.allclose(any_slots, finite, atol=0.02)
    assert bool(paged(build, free=torch.nan, **FINITE).isnan().any())
    for more in ({"lse": True}, {"window": (3, 3)}, {"batch_invariant": True}):
        target(build).bind(**{**PAGED, **FINITE, **more, "s_relation": "fewer"})
    paged(build, **FINITE, lse=False, causal="none", s_relation="fewer", queries=(2, 3))
    assert library.calls[-1].name == "mha_batch_prefill_func"


def test_fp8_pages_are_copied_unless_promised_or_large(install: Callable[[str], Library]) -> None:
    library = install("0.1.20-gfx950")
    for page, options, copied in ((16, {}, True), (16, FINITE, False), (128, {}, False)):
        bound = target("0.1.20-fp8").bind(**{**PAGED, **options, "page_size": page, "kv_dtype": "fp8_e4m3"})
        query, keys, values = tensors((2, 4, 64), (3, page, 2, 64), (3, page, 2, 64))
        caches = [t.to(torch.float8_e4m3fn) for t in (keys, values)]
        bound.forward(query, *caches, **in_tables(**tables(), k_scale=torch.tensor(2.0), v_scale=torch.tensor(0.5)))
        given = library.calls[-1].given
        assert (given["k"].data_ptr() != caches[0].data_ptr()) is copied
        assert (given["k_descale"].tolist(), given["v_descale"].tolist()) == ([2.0], [0.5])
        assert given["q"].dtype == torch.bfloat16


def test_a_row_of_padding_is_not_taken_for_one_query_each(install: Callable[[str], Library]) -> None:
    library = install("0.1.20-gfx1201")
    paged("0.1.20-gfx1201")
    assert library.calls[-1].given["max_seqlen_q"] == 1
    paged("0.1.20-gfx1201", queries=(1, 0))
    assert library.calls[-1].given["max_seqlen_q"] == 2


def test_latent_calls(install: Callable[[str], Library]) -> None:
    library = install("0.1.20")
    latent("0.1.20")
    given = library.calls[-1].given
    assert given["num_kv_splits"] >= 2
    assert given["kv_buffer"].shape == (48, 1, 1, 576)
    latent("0.1.20", queries=(3, 2), s_relation="fewer", causal="bottom_right")
    assert library.calls[-1].name == "mla_prefill_fwd"
    # With an LSE each query is a sequence of its own, as long as what it sees.
    latent("0.1.20", queries=(3, 2), s_relation="fewer", causal="bottom_right", lse=True)
    assert library.calls[-1].name == "mla_decode_fwd"
    assert library.calls[-1].given["kv_indptr"].diff().tolist() == [28, 29, 30, 8, 9]


# ------------------------------------------------------------------------------------------------------------ planted


def _shifted(right: Any) -> Any:
    def lists(*args: Any) -> Any:
        caches, found = right(*args)
        return caches, found._replace(indices=found.indices.roll(1))

    return lists


def _told(**wrong: Any) -> Any:
    return lambda right: lambda request: {**right(request), **wrong}


# id, family, words of the cases, module, name, what becomes of it
PLANTED: list[tuple[str, str, str, Any, str, Any]] = [
    ("causal dropped", "dense", "causal=", mha, "_options", _told(causal=False)),
    ("window dropped", "dense", "window=", mha, "_options", _told(window_size=(-1, -1))),
    ("scale dropped", "varlen", "scale=", mha, "_options", _told(softmax_scale=None)),
    ("sinks dropped by assembly", "varlen", "sinks", mha, "_ASSEMBLY", lambda right: ()),
    ("tokens off by one", "paged", "paged", mha, "token_lists", _shifted),
    ("latent tokens off by one", "mla", "mla", latents, "token_lists", _shifted),
]


@pytest.mark.parametrize(
    ("family", "words", "module", "name", "wrong"), [pytest.param(*p[1:], id=p[0]) for p in PLANTED]
)
def test_a_planted_error_is_found(
    family: str,
    words: str,
    module: Any,
    name: str,
    wrong: Any,
    install: Callable[[str], Library],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("0.1.20")
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    tried = families("0.1.20")[family]
    made = tried.cases(3, families=(family,), dtypes=("bfloat16",))
    assert tried.caught([case for case in made if words in case.id and ("sinks" not in words or "D192" in case.id)][:4])


def test_a_planted_lse_in_base_2_is_found(install: Callable[[str], Library], monkeypatch: pytest.MonkeyPatch) -> None:
    install("0.1.20")
    right = _Kernels._run

    def wrong(*args: Any) -> Any:
        out, lse = right(*args)
        return out, None if lse is None else lse * 1.4426950408889634

    monkeypatch.setattr(_Kernels, "_run", wrong)
    tried = families("0.1.20")["dense"]
    assert tried.caught([c for c in tried.cases(3, families=("dense",), dtypes=("bfloat16",)) if c.request.lse][:2])


# id, build, who is tried, family, words of the cases, what the library is told instead
TOLD: list[tuple[str, str, Emulated, str, str, dict[str, Any]]] = [
    ("latent scale dropped", "0.1.20", target("0.1.20"), "mla", "scale=", {"sm_scale": None}),
    ("one key less", "0.1.20-gfx1201", target("0.1.20-gfx1201"), "paged", "window=17", {"window_size": (16, 0)}),
    ("scale of the keys dropped", "0.1.20-fp8", target("0.1.20-fp8"), "paged", "=tensor", {"k_descale": None}),
    ("sage without its mask", "0.1.20", SAGE, "dense", "causal=", {"causal": False}),
    ("sage in the other layout", "0.1.20", SAGE, "dense", "BHSD", {"layout": "bshd"}),
]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("build", "tried", "family", "words", "wrong"), [pytest.param(*t[1:], id=t[0]) for t in TOLD])
def test_a_planted_argument_is_found(
    build: str,
    tried: Emulated,
    family: str,
    words: str,
    wrong: dict[str, Any],
    install: Callable[[str], Library],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(build)
    right = mha.load

    def load(*args: Any) -> Any:
        function = right(*args)
        return lambda *tensors, **given: function(*tensors, **{**given, **wrong})

    made = tried.cases(6, families=(family,), dtypes=("bfloat16",))
    cases = [case for case in made if words in case.id][:6]
    assert cases
    for module in (latents, mha, sage, unified):
        monkeypatch.setattr(module, "load", load)
    assert tried.caught(cases)
