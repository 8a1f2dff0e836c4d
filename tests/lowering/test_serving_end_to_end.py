"""Through the public calls: a backend that takes one kind of pages and nothing else serves what engines ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import polyattn
from polyattn.backends.reference_backend import Reference
from polyattn.contract import AttentionRequest, BackendInfo, Bound, Provider, Range, hookimpl, row
from polyattn.registry.manager import PluginManager, get_manager, reset_manager
from polyattn.testing.plain import reference_attention

from .serving import Step, cached, close, int32, make, same

NARROW: dict[str, Any] = {
    "dtype": "float64",
    "head_dim": Range(1),
    "v_head_dim": Range(1),
    "group": True,
    "page_size": 4,
    "scale": True,
    "phase": ("extend", "decode"),
    "s_relation": ("one", "fewer", "more"),
    "causal": ("none", "bottom_right"),
}
ROWS = (row(family="paged", **NARROW, lse=True, softcap=Range(0.0)), row(family="mla", **NARROW, lse=True))
"""What a simple kernel takes: NHD pages of 4 in the query's dtype, no masks, no sinks, and it writes nothing."""


@pytest.fixture(autouse=True, scope="module")
def _narrow() -> Iterator[None]:
    """A plugin with the backend `narrow`, by name only, and one that is automatic, `narrow_auto`."""
    plain = BackendInfo("narrow", "cpu", (Provider("torch", ROWS, "nowhere:Nothing"),), summary="pages of 4")
    auto = dataclasses.replace(plain, name="narrow_auto", priority=60, evidence="vendor code")

    def polyattn_register_backends() -> list[BackendInfo]:
        return [plain, auto]

    def polyattn_load_forward(backend: BackendInfo, provider: str, request: AttentionRequest) -> Bound:
        bound = Reference().bind(request)

        def forward(*tensors: Any, **given: Any) -> Any:
            assert given.get("key") is given.get("value") is None, "no row says that it takes new rows"
            return bound.forward(*tensors, **given)

        return dataclasses.replace(bound, forward=forward)

    module: Any = ModuleType("narrow")
    module.POLYATTN_API_VERSION = 2
    for hook in (polyattn_register_backends, polyattn_load_forward):
        setattr(module, hook.__name__, hookimpl(hook))
    before = get_manager()
    reset_manager(PluginManager(before.environ, before.host_version))
    get_manager().register(module, "narrow")
    yield
    reset_manager(before)


def called(step: Step, backend: str | None, explain: bool = False) -> Any:
    """The public call of a step."""
    r, call = step.request, polyattn.paged_attention if step.request.family == "paged" else polyattn.mla_attention
    given = {name: value for name, value in step.given.items() if name not in ("page", "place")}
    given |= {"causal": r.causal if r.causal != "none" else False, "scale": r.scale, "return_lse": r.lse}
    given |= {"tree": r.tree, "chunked_prefix": r.chunked_prefix, "backend": backend}
    if r.family == "mla":
        given["v_head_dim"] = r.dims[1]
    else:
        given |= {"kv_layout": r.kv_layout or "NHD", "save_kv_cache": bool(r.save_kv_cache), "softcap": r.softcap}
    return polyattn.explain(call, *step.tensors, **given) if explain else call(*step.tensors, **given)


LENGTHS = ((3, 8), (1, 5), (2, 0), (4, 16))
DECODE = ((1, 8), (1, 5), (1, 0), (1, 16))
GROUPS = [([4, 6], [5, 9]), ([10], [3])]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "pages of 8": ({"page_size": 8}, {}, ("finer_pages",)),
    "a quantised cache in large pages": (
        {"page_size": 16, "kv_dtype": "fp8_e4m3", "kv_scales": "head"},
        {},
        ("dequantise_kv", "finer_pages"),
    ),
    "new rows into an fp4 cache": (
        {"page_size": 4, "kv_dtype": "fp4_e2m1", "kv_scales": "block16", "save_kv_cache": True},
        {"new": True},
        ("dequantise_kv",),
    ),
    "new rows": ({"page_size": 4, "save_kv_cache": True}, {"new": True}, ("write_new_rows",)),
    "new rows that are not kept, in fp8": (
        {"page_size": 4, "kv_dtype": "fp8_e4m3", "kv_scales": "token", "save_kv_cache": False},
        {"new": True},
        ("dequantise_kv",),
    ),
    "new rows that are not kept": ({"page_size": 4, "save_kv_cache": False}, {"new": True}, ("write_new_rows",)),
    "latent rows in fp8": (
        {"family": "mla", "page_size": 4, "kv_dtype": "fp8_e4m3", "kv_scales": "block128"},
        {},
        ("dequantise_kv",),
    ),
    "a tree over an fp4 cache with sinks": (
        {
            "page_size": 8,
            "kv_dtype": "fp4_e2m1",
            "kv_scales": "block16",
            "sinks": True,
            "lse": True,
            "phase": "verify",
            "tree": True,
            "mask": "bool",
        },
        {"mask": "tree"},
        ("dequantise_kv", "finer_pages", "tree_by_lse"),
    ),
    "a tree over latent rows": (
        {"family": "mla", "page_size": 8, "phase": "verify", "tree": True, "mask": "bool", "lse": True},
        {"mask": "tree"},
        ("finer_pages", "tree_by_lse"),
    ),
    "a long prefix": ({"page_size": 4, "chunked_prefix": True, "lse": True}, {}, ("chunked_prefix_by_lse",)),
    "a shared prefix in fp8 with sinks": (
        {"page_size": 8, "kv_dtype": "fp8_e5m2", "kv_scales": "tensor", "sinks": True, "softcap": 5.0},
        {"parts": GROUPS},
        ("dequantise_kv", "finer_pages", "kv_parts_by_lse"),
    ),
    "split latent rows": (
        {"family": "mla", "page_size": 4, "phase": "decode", "s_relation": "one", "lse": True},
        {"parts": [([1] * 4, [3, 0, 7, 1])], "own_pools": True},
        ("kv_parts_by_lse",),
    ),
}


def step_of(fields: dict[str, Any], options: dict[str, Any]) -> Step:
    fields = dict(fields)
    family = fields.pop("family", "paged")
    if family == "mla" and "kv_dtype" in fields:
        fields |= {"head_dim": 576, "v_head_dim": 512}
    lengths = DECODE if fields.get("phase") == "decode" else LENGTHS
    parts = options.get("parts", ())
    request = cached(family, dtype="float64", kv_parts=len(parts), **fields)
    return make(request, lengths, 5, **options)


@pytest.mark.parametrize("backend", ["narrow", "narrow_auto", None])
@pytest.mark.parametrize("fields, options, names", CASES.values(), ids=CASES)
def test_a_simple_kernel_serves_it(fields, options, names, backend):
    step = step_of(fields, options)
    right, lse = step.answer(reference_attention, torch.float64)
    caches = step.written()
    found = called(step, backend, explain=True)
    if backend is not None:
        assert found.backend == backend
        assert set(found.lowerings) == set(names)
    assert all(any(line.startswith(f"{name}: ") for line in found.steps()) for name in found.lowerings)
    got = called(step, backend)
    out = got[0] if step.request.lse else got
    close("out", out, right)
    if step.request.lse:
        close("lse", got[1], lse)
    assert all(same(a, b) for a, b in zip(step.tensors[1:], caches, strict=True))


def test_what_is_automatic_is_rewritten_too():
    """Nothing takes further keys as they are; a long prefix is rewritten for the backend that a rule names."""
    step = step_of(*CASES["split latent rows"][:2])
    found = called(step, None, explain=True)
    assert found.source == "lowering"
    assert "kv_parts_by_lse" in found.lowerings
    step = step_of(*CASES["a long prefix"][:2])
    found = called(step, None, explain=True)
    assert (found.backend, found.source) == ("torch_native", "platform rule")
    assert found.lowerings == ("chunked_prefix_by_lse",)


def test_a_bool_that_is_not_exact_is_refused_with_reasons():
    """A window over a tree: no rewrite, and the backend by name says so."""
    step = step_of(*CASES["a tree over latent rows"][:2])
    with pytest.raises(polyattn.UnsupportedRequestError, match=r"tree=True is not declared"):
        polyattn.mla_attention(
            *step.tensors, **step.given, scale=0.3, v_head_dim=16, tree=True, window=(4, 0), backend="narrow"
        )


def test_the_part_of_a_call_is_a_named_tuple():
    part = polyattn.KVPart(int32([0]), int32(4), int32(0, 1), 1, 4)
    assert part.key_cache is part.value_cache is part.cache is None
    assert part._replace(max_seqlen_k=5).max_seqlen_k == 5
