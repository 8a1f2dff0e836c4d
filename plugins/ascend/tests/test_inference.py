"""`ascend`: the kit over an emulator of npu_fused_infer_attention_score_v2, and what it is really given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.contract import AttentionRequest, Slot
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn.testing.families.cached import in_tables
from polyattn_ascend import inference, planning
from polyattn_ascend.planning import Lengths

from .emulators import torch_npu

TARGET = Emulated("ascend", "torch-npu", "npu:ascend910b@8.5")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return torch_npu.library().install(monkeypatch)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("--polyattn-full")
        given: dict[str, Any] = {"per_row": 24} if full else {"per_row": 1, "dtypes": ("bfloat16",)}
        metafunc.parametrize("case", TARGET.cases(**given), ids=str)


def test_conformance(case: Case, library: Library) -> None:
    TARGET.passes(case, library)


# ------------------------------------------------------------------------------------------------ what it is given

PAGED: dict[str, Any] = {
    "family": "paged",
    "layout": "THD",
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 128,
    "page_size": 128,
    "phase": "extend",
    "s_relation": "fewer",
    "causal": "bottom_right",
}
MLA: dict[str, Any] = {**PAGED, "family": "mla", "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scale": 192**-0.5}
# (queries, keys) of three sequences; those of a padding row have no keys.
MIXED = ((1, 300), (5, 40), (1, 9))
DECODE = ((1, 300), (1, 40), (1, 9))
WITH_PADDING = ((1, 0), (5, 40), (2, 9))


class Call:
    """A request and a cache to run it over, every sequence in three pages of its own."""

    def __init__(self, lengths: tuple[tuple[int, int], ...] = MIXED, **fields: Any) -> None:
        r = self.fields = {**PAGED, **fields}
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        queries, keys = zip(*lengths, strict=True)
        width = r.get("v_head_dim") or r["head_dim"]
        pages = 3 * len(lengths)
        self.query = drawn(sum(queries), r["heads"], r["head_dim"])
        if r["family"] == "mla":
            self.caches: tuple[Tensor, ...] = (drawn(pages, 128, r["head_dim"]),)
        else:
            shapes = [(pages, 128, r["kv_heads"], d) for d in (r["head_dim"], width)]
            if r.get("kv_layout") == "HND":
                shapes = [(a, c, b, d) for a, b, c, d in shapes]
            self.caches = tuple(drawn(*shape) for shape in shapes)
        order = torch.randperm(pages, generator=generator, dtype=torch.int32)
        self.tables: dict[str, Any] = {
            "page_table": order.view(len(lengths), 3),
            "seq_lens": torch.tensor(keys, dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, *queries]).cumsum(0).int(),
            "max_seqlen_q": max(queries),
            "max_seqlen_k": max(keys),
        }

    def run(self, **more: Any) -> Any:
        return TARGET.bind(**self.fields).forward(self.query, *self.caches, **in_tables(**self.tables, **more))


def test_packed_queries_have_running_sums_and_keys_of_each_sequence(library: Library) -> None:
    Call().run()
    (call,) = library.calls
    assert call.positional == 3
    given = call.given
    assert (given["input_layout"], given["actual_seq_qlen"], given["actual_seq_kvlen"]) == (
        "TND",
        [1, 6, 7],
        [300, 40, 9],
    )
    assert (given["sparse_mode"], given["atten_mask"].shape) == (3, (2048, 2048))
    assert (given["num_query_heads"], given["num_key_value_heads"], given["block_size"]) == (4, 2, 128)
    assert given["softmax_scale"] == 128**-0.5


def test_single_queries_are_padded_rows_by_a_view(library: Library) -> None:
    run = Call(DECODE, phase="decode", s_relation="one", causal="none")
    run.run()
    given = library.calls[-1].given
    assert (given["input_layout"], given["query"].shape) == ("BSND", (3, 1, 4, 128))
    assert given["query"].data_ptr() == run.query.data_ptr()
    assert "atten_mask" not in given


@pytest.mark.parametrize(("kv_layout", "shape"), [("NHD", (9, 128, 256)), ("HND", (9, 2, 128, 128))])
def test_the_cache_is_read_where_it_lies(kv_layout: str, shape: tuple[int, ...], library: Library) -> None:
    run = Call(kv_layout=kv_layout)
    run.run()
    given = library.calls[-1].given
    assert given["key"].shape == given["value"].shape == shape
    assert [given[n].data_ptr() for n in ("key", "value")] == [cache.data_ptr() for cache in run.caches]
    assert torch.equal(given["block_table"], run.tables["page_table"])


LAYOUTS = [
    ({}, ["TND"]),
    ({"kv_layout": "HND"}, ["TND"]),
    ({"head_dim": 64}, ["BSND", "BSND"]),
    ({"head_dim": 96, "kv_layout": "HND"}, ["BNSD", "BNSD"]),
    ({"head_dim": 64, "kv_heads": 4}, ["TND"]),
    ({"kv_heads": 4, "kv_layout": "HND"}, ["BNSD", "BNSD"]),
    ({"head_dim": 192, "v_head_dim": 128}, ["TND"]),
    ({"window": (20, -1)}, ["BSND", "TND"]),
]


@pytest.mark.parametrize(("fields", "layouts"), LAYOUTS)
def test_layouts_that_widths_and_pages_go_with(fields: dict[str, Any], layouts: list[str], library: Library) -> None:
    Call(**fields).run()
    assert [call.given["input_layout"] for call in library.calls] == layouts


def test_rows_are_padded_to_twice_as_many_at_most(library: Library) -> None:
    lengths = ((1, 300), (40, 200), (33, 90), (3, 20), (1, 7))
    Call(lengths, head_dim=64).run()
    assert [tuple(call.given["query"].shape[:2]) for call in library.calls] == [(2, 1), (1, 3), (2, 40)]
    assert library.calls[-1].given["actual_seq_qlen"] == [40, 33]


@pytest.mark.parametrize("left", [0, 5, 200, 400])
def test_a_window_at_decode_is_a_mask_of_its_own(left: int, library: Library) -> None:
    """Bands mean nothing to a single query: left + 1 keys are seen, the query's own among them."""
    Call(DECODE, phase="decode", s_relation="one", causal="none", window=(left, -1)).run()
    given = library.calls[-1].given
    assert given["atten_mask"].shape == (3, 1, 1, 384)
    assert given.get("sparse_mode", 0) == 0
    seen = (~given["atten_mask"]).sum(-1).flatten().tolist()
    assert seen == [min(left + 1, keys) for _, keys in DECODE]


def test_padding_rows_are_not_computed(library: Library) -> None:
    out, lse = Call(WITH_PADDING, lse=True).run()
    (call,) = library.calls
    assert call.given["actual_seq_kvlen"] == [40, 9]
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == -torch.inf).all())
    assert bool(out.isfinite().all())
    assert bool(lse[1:].isfinite().all())


def test_latent_rows_go_in_two_parts(library: Library) -> None:
    run = Call(**MLA)
    run.run()
    given = library.calls[-1].given
    assert given["key"] is given["value"]
    names = ("query", "query_rope", "key", "key_rope")
    shapes = [(7, 4, 512), (7, 4, 64), (9, 128, 512), (9, 128, 64)]
    assert [tuple(given[name].shape) for name in names] == shapes
    assert all(given[name].is_contiguous() for name in names)
    assert given["softmax_scale"] == 192**-0.5


def test_sinks_are_applied_from_the_lse(library: Library) -> None:
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    out = Call(sinks=True).run(sinks=sinks)
    given = library.calls[-1].given
    assert given["return_softmax_lse"]
    assert "learnable_sink" not in given
    plain, lse = Call(lse=True).run()
    kept = torch.sigmoid(lse - sinks)[..., None]
    assert torch.allclose(out.float(), plain.float() * kept, atol=2e-2)


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_a_scale_that_is_not_positive_goes_into_the_queries(scale: float, library: Library) -> None:
    out = Call(scale=scale).run()
    assert library.calls[-1].given["softmax_scale"] > 0
    if not scale:
        run = Call(((1, 50),), scale=0.0)
        values = run.caches[1][run.tables["page_table"][0, 0].long()][:50].float().mean(0)
        assert torch.allclose(run.run()[0].float(), values.repeat_interleave(2, 0), atol=2e-2)
    assert bool(out.isfinite().all())


# ------------------------------------------------------------------------------------------------ sessions


class Step:
    """What a session reads of a step: host copies, so that nothing waits for the device."""

    def __init__(self, tables: dict[str, Any]) -> None:
        self._tables, self.asked = tables, list[str]()
        self.seq_lens = tables["seq_lens"]

    def host(self, name: str) -> Tensor:
        self.asked.append(name)
        found: Tensor = self._tables[name]
        return found


@pytest.mark.parametrize("fields", [PAGED, {**PAGED, "head_dim": 64, "window": (20, -1)}, MLA])
def test_a_step_is_planned_once_for_all_layers(
    fields: dict[str, Any], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = TARGET.bind(**fields)
    slot = Slot(torch.device("cpu"), 3, 8, 3, lambda name, size: torch.empty(size, dtype=torch.uint8))
    session = bound.session(slot)
    for lengths in (MIXED, DECODE, WITH_PADDING):
        run = Call(lengths, **fields)
        step = Step(run.tables)
        session.plan(step)
        session.prepare(step)
        assert sorted(set(step.asked)) == ["cu_seqlens_q", "seq_lens"]
        alone = run.run()
        with monkeypatch.context() as patch:
            patch.setattr(Lengths, "read", lambda *_: pytest.fail("a planned step read lengths from the device"))
            for _ in range(2):
                assert torch.equal(session.forward(run.query, *run.caches, **in_tables(**run.tables)), alone)


# ------------------------------------------------------------------------------------------------ planted errors


def _unscaled(self: Any, request: Any, init: Any = inference._Inference.__init__) -> None:
    init(self, request)
    self.scale = 1.0


def _packs_all(request: Any) -> bool:
    return True


def _cumulative(self: Any, lens: Any, device: Any, plan: Any = inference._Inference.plan) -> Any:
    found = plan(self, lens, device)
    for group in found:
        keys = group.lens["actual_seq_kvlen"]
        group.lens["actual_seq_kvlen"] = [sum(keys[: n + 1]) for n in range(len(keys))]
    return found


def _a_page_off(self: Any, page_table: Tensor, table: Any = planning.Group.table) -> Tensor:
    found: Tensor = table(self, page_table)
    return found.roll(1, 0)


def _seen(*args: Any, last_keys: Any = planning._last_keys) -> Any:
    found = last_keys(*args)
    return found._replace(mask=~found.mask)


def _a_key_less(band: Any, *rest: Any, last_keys: Any = planning._last_keys) -> Any:
    return last_keys(band._replace(before=band.before - 1), *rest)


def _band(rule: Any, *rest: Any) -> Any:
    return rule


def _base_two(self: Any, *args: Any, attend: Any = inference._Inference._attend) -> Any:
    result, lse = attend(self, *args)
    return result, None if lse is None else lse / 0.6931471805599453


def _other_pages(*args: Any, owned: Any = inference.owned) -> Tensor:
    found: Tensor = owned(*args)
    return found.roll(1, 0)


def _misnamed(self: Any, request: Any, init: Any = inference._Inference.__init__) -> None:
    """The layout of padded queries is called by the other's name."""
    init(self, request)
    operator, other = self.operator, {"BSND": "BNSD", "BNSD": "BSND", "TND": "TND"}
    self.operator = lambda *tensors, input_layout, **given: operator(
        *tensors, input_layout=other[input_layout], **given
    )


def latent(r: AttentionRequest) -> bool:
    return r.family == "mla" and not r.zero_size


def extends(r: AttentionRequest) -> bool:
    return r.s_relation == "fewer" and not r.zero_size


def decodes(r: AttentionRequest) -> bool:
    return r.s_relation == "one" and r.window[0] >= 0


PLANTED: dict[str, tuple[Any, str, Any, Callable[[AttentionRequest], bool]]] = {
    "the scale is dropped": (inference._Inference, "__init__", _unscaled, extends),
    "keys are running sums": (inference._Inference, "plan", _cumulative, extends),
    "tables of other sequences": (planning.Group, "table", _a_page_off, extends),
    "widths that packed queries do not have": (
        inference,
        "_packs",
        _packs_all,
        lambda r: extends(r) and r.head_dim not in (64, 128, 192),
    ),
    "a mask is not inverted": (planning, "_last_keys", _seen, decodes),
    "a window at decode is one key too narrow": (planning, "_last_keys", _a_key_less, decodes),
    "a window at decode is left to the mode": (planning, "_last_keys", _band, decodes),
    "latent pages of other sequences": (inference, "owned", _other_pages, latent),
    "the scale of a latent is dropped": (inference._Inference, "__init__", _unscaled, latent),
    "padded queries by the wrong layout string": (
        inference._Inference,
        "__init__",
        _misnamed,
        lambda r: extends(r) and r.head_dim not in (64, 128, 192),
    ),
    "pages of another size": (inference, "PAGE", 64, extends),
    "the LSE is of base 2": (inference._Inference, "_attend", _base_two, lambda r: r.lse and not r.zero_size),
}


@functools.cache
def drawn() -> list[Case]:
    return TARGET.cases(per_row=8, families=("paged", "mla"), dtypes=("bfloat16",))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found(error: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, telling = PLANTED[error]
    told = [c for c in TARGET.cases(per_row=24, families=("paged", "mla"), dtypes=("bfloat16",)) if telling(c.request)]
    assert told
    monkeypatch.setattr(where, name, wrong)
    assert TARGET.caught(told[:8])


# ------------------------------------------------------------------------------------------------ refusals

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**PAGED, "page_size": 64}, "page_size=64 is not 128"),
    ({**PAGED, "dtype": "float32"}, "dtype='float32' is not"),
    ({**PAGED, "head_dim": 100}, "head_dim=100 is not 16 to 240, a multiple of 16"),
    ({**PAGED, "head_dim": 128, "v_head_dim": 64}, "dims=(128, 64) is not (192, 128)"),
    ({**PAGED, "head_dim": 528}, "head_dim=528 is not 256 to 512"),
    ({**PAGED, "heads": 260, "kv_heads": 130}, "heads=260 is not 1 to 256"),
    ({**PAGED, "heads": 130, "kv_heads": 1}, "group=130 is not 1 to 64"),
    ({**PAGED, "softcap": 30.0}, "softcap=30.0 is not declared"),
    ({**PAGED, "mask": "bool"}, "mask='bool' is not declared"),
    ({**PAGED, "kv_layout": "NZ"}, "kv_layout='NZ' is not"),
    ({**PAGED, "graph_capture": True}, "graph_capture=True is not declared"),
    ({**PAGED, "phase": "verify", "spec_topk": 4}, "spec_topk=4 is not 0 to 1"),
    ({**PAGED, "phase": "verify", "spec_topk": 4, "tree": True}, "ascend cannot verify: every phase of a server asks"),
    ({**PAGED, "head_dim": 192, "v_head_dim": 128, "window": (9, -1)}, "window=(9, -1) is not declared"),
    ({**PAGED, "head_dim": 192, "v_head_dim": 128, "kv_layout": "HND", "kv_heads": 4}, "group=1 is not 2 to 64"),
    ({**MLA, "heads": 24}, "heads=24 is not one of"),
    ({**MLA, "lse": True}, "lse=True is not declared"),
    ({**MLA, "window": (9, -1)}, "window=(9, -1) is not declared"),
    ({**MLA, "head_dim": 192, "v_head_dim": 128}, "dims=(192, 128) is not (576, 512)"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedRequestError) as refused:
        what_if(AttentionRequest(**changes), platform="npu", installed=("torch-npu",), backend="ascend", strict=True)
    assert words in str(refused.value)


INSIDE: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({**PAGED, "head_dim": 16}, ()),
    ({**PAGED, "head_dim": 512, "kv_layout": "HND", "heads": 256, "kv_heads": 256}, ()),
    ({**PAGED, "head_dim": 512, "heads": 127, "kv_heads": 127}, ()),
    ({**PAGED, "heads": 64, "kv_heads": 1, "window": (9, -1), "sinks": True}, ()),
    ({**PAGED, "phase": "verify", "spec_topk": 1}, ()),
    ({**PAGED, "kv_dtype": "fp8_e4m3", "kv_scales": "head"}, ("dequantise_kv",)),
    ({**PAGED, "page_size": 256}, ("finer_pages",)),
    ({**MLA, "heads": 128, "phase": "verify", "spec_topk": 1}, ()),
    ({**MLA, "heads": 16, "kv_dtype": "fp8_e4m3", "kv_scales": "block128"}, ("dequantise_kv",)),
]


@pytest.mark.parametrize(("changes", "lowerings"), INSIDE)
def test_limits_are_taken(changes: dict[str, Any], lowerings: tuple[str, ...]) -> None:
    request = AttentionRequest(**changes)
    selection = what_if(request, platform="npu", installed=("torch-npu",), backend="ascend", strict=True)
    assert (selection.backend, selection.lowerings) == ("ascend", lowerings)


def test_rows_of_more_numbers_are_refused() -> None:
    """256 heads of 256 are rows of 65,536 where tokens come first."""
    request = AttentionRequest(**{**PAGED, "heads": 256, "kv_heads": 256, "head_dim": 256})
    with pytest.raises(UnsupportedRequestError, match="kv_heads=256 is not 1 to 127"):
        what_if(request, platform="npu", installed=("torch-npu",), backend="ascend", strict=True)


def test_an_older_torch_npu_is_named(library: Library) -> None:
    def older(query: Tensor, key: Tensor, value: Tensor, *, block_table: Tensor, num_heads: int) -> None: ...

    library.add("torch_npu", npu_fused_infer_attention_score_v2=older)
    with pytest.raises(BackendUnavailableError, match=r"torch-npu 2\.13\.0 takes no 'actual_seq_qlen', which a cache"):
        TARGET.bind(**PAGED)
    del library.modules["torch_npu"].npu_fused_infer_attention_score_v2
    with pytest.raises(BackendUnavailableError, match=r"has no usable torch_npu:npu_fused_infer_attention_score_v2"):
        TARGET.bind(**PAGED)
