"""FlashInfer behind the serving contract: a plan for each step, fixed buffers where steps are recorded, new rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn.errors import UnsupportedRequestError
from polyattn.semantics import reference
from polyattn.serving import DraftTree, ForwardBatch, ForwardMode, PageAllocator, RequestTable, StepBuffers
from polyattn.serving.attention.workspace import Limits, Workspaces
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn_cuda.flashinfer import latent, lengths, paged, workbench

from .emulators import flashinfer as wrappers
from .emulators import trtllm as emulator
from .sessions import InSession

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
PAGED = Emulated("flashinfer", "flashinfer-python", "cuda:sm90@12.8")
LATENT = Emulated("flashinfer_mla", "flashinfer-python", "cuda:sm90@12.8")
GENERATED = Emulated("trtllm_mha", "flashinfer-python", "cuda:sm100@13.0")
XQA = Emulated("trtllm_mha", "flashinfer-python", "cuda:sm90@12.8")
SIZE, PAGES, ROWS, MOST = 16, 64, 6, 256
CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.library().install(monkeypatch)


class Server:
    """Pages, a table and one session of a backend; steps as a serving context runs them."""

    def __init__(self, target: Emulated, *, recorded: bool = False, rows: int = ROWS, tokens: int = 96, **fields: Any):
        torch.manual_seed(3)
        fields = {"family": "paged", "heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": SIZE, **fields}
        self.request = target.request(layout="THD", **fields)
        r = self.request
        self.latent = r.family == "mla"
        self.table = RequestTable(rows, MOST, SIZE, [-1], [PageAllocator(PAGES)], CPU)
        columns = self.table.tables[0].shape[1]
        self.buffers = StepBuffers(rows, tokens, columns, device=CPU, static=recorded)
        limits = Limits(rows, tokens, MOST)
        slot = Workspaces(CPU).slot("steps", r, limits, columns, recorded=recorded)
        self.bound = target.bind(layout="THD", **fields)
        assert self.bound.session is not None
        self.session = self.bound.session(slot)
        dtype = getattr(torch, r.dtype)
        shapes = [(PAGES, SIZE, r.head_dim)] if self.latent else [(PAGES, SIZE, r.kv_heads, width) for width in r.dims]
        self.caches = [torch.randn(shape).to(dtype) for shape in shapes]

    def give(self, new: Mapping[int, int]) -> None:
        for row, count in new.items():
            self.table.extend(row, count)

    def step(
        self, mode: ForwardMode, new: Mapping[int, int], *, padding: int = 0, tree: DraftTree | None = None
    ) -> Any:
        """Plan and prepare a step with so many new tokens of each row."""
        self.give(new)
        lengths = [self.table.length(row) for row in new]
        batch = ForwardBatch(mode, list(new), lengths, list(new.values()), tree, padding=padding)
        (self.now,) = self.buffers.stage(batch, self.table)
        self.session.plan(self.now)
        self.buffers.prepare()
        self.session.prepare(self.now)
        return self.now

    def query(self) -> Tensor:
        r = self.request
        return torch.randn(self.now.tokens, r.heads, r.head_dim).to(getattr(torch, r.dtype))

    def layer(self, query: Tensor | None = None, **given: Any) -> Any:
        """What the session returns for a layer, after it was compared with the definition."""
        query, now, r = self.query() if query is None else query, self.now, self.request
        found = self.session.forward(query, *self.caches, **now.keywords, **given)
        keys = [self.caches[0].unsqueeze(2), self.caches[0].unsqueeze(2)[..., : r.dims[1]]]
        keys = keys if self.latent else self.caches
        wanted = reference.paged_attention(
            query.double(), *(t.double() for t in keys),
            page_table=now.page_table, seq_lens=now.seq_lens, cu_seqlens_q=now.cu_seqlens_q,
            causal="bottom_right", window=r.window, scale=r.scale, attn_mask=now.attn_mask, sinks=given.get("sinks"),
        )  # fmt: skip
        real = int(now.cu_seqlens_q[now.sequences - now.padding])
        out = found[0] if isinstance(found, tuple) else found
        torch.testing.assert_close(out[:real].double(), wanted[:real], rtol=2e-2, atol=2e-2)
        return found


STEPS = {
    "flashinfer": InSession("flashinfer", "flashinfer-python", "cuda:sm90@12.8"),
    "flashinfer_mla": InSession("flashinfer_mla", "flashinfer-python", "cuda:sm90@12.8"),
    "trtllm_mha": InSession("trtllm_mha", "flashinfer-python", "cuda:sm100@13.0"),
    "trtllm_mla": InSession("trtllm_mla", "flashinfer-python", "cuda:sm100@13.0"),
}
CASES = [(name, case) for name, target in STEPS.items() for case in target.cases(per_row=3, dtypes=("bfloat16",))]


@pytest.mark.slow(keep=27)
@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_the_kit_in_steps(name: str, case: Case, library: Library) -> None:
    STEPS[name].passes(case, library)


RECORDED = [(name, case) for name, target in STEPS.items() for case in target.recorded()]


@pytest.mark.parametrize(("name", "case"), RECORDED, ids=str)
def test_the_steps_that_the_kit_records(name: str, case: Case, library: Library) -> None:
    STEPS[name].passes(case, library)


EXTENDING = {"phase": "extend", "s_relation": "fewer", "causal": "bottom_right"}
DECODING = {"phase": "decode", "s_relation": "one"}
VERIFYING = {"phase": "verify", "s_relation": "fewer", "causal": "bottom_right"}
LATENTS = {"family": "mla", "heads": 16, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "scale": 192**-0.5}


def plans(library: Library) -> list[str]:
    return [call.name for call in library.calls if ".plan" in call.name or "_plan" in call.name]


@pytest.mark.parametrize("fields", [{}, {"window": (20, -1)}, {"sinks": True}, {"lse": True}], ids=str)
def test_layers_share_the_plan_of_a_step(library: Library, fields: dict[str, Any]) -> None:
    server = Server(PAGED, **EXTENDING, **fields)
    a, b = server.table.add(), server.table.add()
    given = {"sinks": torch.randn(8)} if fields.get("sinks") else {}
    server.step(EXTEND, {a: 40, b: 7})
    for _ in range(3):
        server.layer(**given)
    server.step(EXTEND, {b: 30, a: 1})
    server.layer(**given)
    assert len(plans(library)) == 2
    assert not [call for call in library.calls if call.positional], "everything is given by name"


def test_a_layer_whose_caches_are_of_unlike_strides_plans_for_itself(library: Library) -> None:
    """The plan of the step is for fa3, which cannot read them."""
    server = Server(PAGED, **EXTENDING)
    server.step(EXTEND, {server.table.add(): 40})
    server.layer()
    server.caches[1] = torch.randn(PAGES, SIZE, 2, 80).bfloat16()[..., :64]
    server.layer()
    server.caches[1] = server.caches[1].contiguous()
    server.layer()
    assert len(plans(library)) == 2


def test_kernels_of_two_widths_are_loaded_before_a_step_is_recorded(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer loads them when they are first called, which it refuses while a graph is recorded."""
    fields = {**VERIFYING, "head_dim": 192, "v_head_dim": 128, "graph_capture": "session"}
    server = Server(PAGED, recorded=True, rows=2, tokens=6, **fields)
    server.give(dict.fromkeys((server.table.add(), server.table.add()), 20))
    for _ in range(2):
        server.step(VERIFY, {0: 3, 1: 3})
        with monkeypatch.context() as capturing:
            capturing.setattr(wrappers.Planned, "capturing", True)
            server.layer()
    assert sum("prewarm" in call.name for call in library.calls) == 1


def test_decode_plans_from_the_host_and_reads_the_pages_of_the_step(library: Library) -> None:
    server = Server(PAGED, **DECODING)
    rows = [server.table.add() for _ in range(3)]
    server.give({row: 20 + 15 * n for n, row in enumerate(rows)})
    for _ in range(18):
        server.step(DECODE, dict.fromkeys(rows, 1))
        server.layer()
    assert {name.split(".")[0] for name in plans(library)} == {"BatchDecodeWithPagedKVCacheWrapper"}
    given = [call.given for call in library.calls if "_plan" in call.name]
    assert all(g["indptr"].device.type == "cpu" and g["q_data_type"] is torch.bfloat16 for g in given)
    made = [call.given for call in library.calls if call.name.endswith("__init__")]
    assert [g["use_tensor_cores"] for g in made] == [True]


def test_a_group_of_two_decodes_on_the_cuda_cores(library: Library) -> None:
    server = Server(PAGED, **DECODING, kv_heads=4)
    server.step(DECODE, {server.table.add(): 1})
    server.layer()
    assert [call.given["use_tensor_cores"] for call in library.calls if call.name.endswith("__init__")] == [False]


def test_a_recorded_step_reads_the_same_memory_at_every_replay(library: Library) -> None:
    server = Server(PAGED, recorded=True, rows=4, tokens=4, graph_capture="session", **DECODING)
    a, b = server.table.add(), server.table.add()
    server.give({a: 30, b: 4})
    server.step(DECODE, {a: 1, b: 1}, padding=2)
    server.layer()
    wrapper = server.session._wrapper
    fixed = {name: tensor.data_ptr() for name, tensor in server.session._fixed.items()}
    for new in ({a: 1, b: 1}, {b: 1}, {b: 1, a: 1}):
        server.step(DECODE, new, padding=4 - len(new))
        server.layer()
    assert server.session._wrapper is wrapper
    (made,) = [call.given for call in library.calls if call.name.endswith("__init__")]
    assert made["use_cuda_graph"] is True
    buffers = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    assert {made[name].data_ptr() for name in buffers} <= set(fixed.values())
    assert {name: tensor.data_ptr() for name, tensor in server.session._fixed.items()} == fixed
    first, *others = plans(library)
    assert first.endswith("._plan_impl")
    assert others == ["decode.fast_decode_plan"] * 3, "planned anew without a copy of the tables"


def test_an_older_library_plans_every_recorded_step_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    library = wrappers.library("0.6.18").install(monkeypatch)
    server = Server(PAGED, recorded=True, rows=1, tokens=1, graph_capture="session", **DECODING)
    row = server.table.add()
    for _ in range(2):
        server.step(DECODE, {row: 1})
        server.layer()
    assert [name.endswith("._plan_impl") for name in plans(library)] == [True, True]


TREES = ([[-1, 0, 0, 1], [-1, 0, 1, 2]], [[-1, 0, 0, 0], [-1, -1, 0, 2]])


@pytest.mark.parametrize("recorded", [False, True])
def test_trees_are_masks_of_the_plan(library: Library, recorded: bool) -> None:
    fields = {
        **VERIFYING,
        "mask": "bool",
        "tree": True,
        "spec_topk": 4,
        "graph_capture": "session" if recorded else False,
    }
    server = Server(PAGED, recorded=recorded, rows=3, tokens=12, **fields)
    a, b = server.table.add(), server.table.add()
    server.give({a: 37, b: 3})
    for parents in TREES:
        server.step(VERIFY, {a: 4, b: 4}, tree=DraftTree.from_parents(parents), padding=1 if recorded else 0)
        server.layer()
        server.layer()
    planned = [call.given for call in library.calls if call.name.endswith(".plan")]
    assert len(planned) == 2
    assert all(g["custom_mask"].sum() and not g["causal"] for g in planned)
    assert all(g.get("uniform_q_len") == (4 if recorded else None) for g in planned)


def test_a_chain_needs_no_mask(library: Library) -> None:
    server = Server(PAGED, **VERIFYING, spec_topk=1)
    a, b = server.table.add(), server.table.add()
    server.give({a: 37, b: 3})
    server.step(VERIFY, {a: 4, b: 4})
    server.layer()
    assert next(call.given for call in library.calls if call.name.endswith(".plan"))["custom_mask"] is None


@pytest.mark.parametrize("step", [EXTENDING, DECODING], ids=["extend", "decode"])
@pytest.mark.parametrize("recorded", [False, True])
def test_latent_steps(library: Library, step: dict[str, Any], recorded: bool) -> None:
    server = Server(
        LATENT,
        recorded=recorded,
        rows=2,
        tokens=12,
        **LATENTS,
        **step,
        lse=True,
        graph_capture="session" if recorded else False,
    )
    a, b = server.table.add(), server.table.add()
    server.give({a: 37, b: 3})
    mode, count = (DECODE, 1) if step is DECODING else (EXTEND, 6)
    for _ in range(3):
        server.step(mode, {a: count, b: count})
        server.layer()
        server.layer()
    assert len(plans(library)) == 3
    made = [call.given["use_cuda_graph"] for call in library.calls if "MLAPaged" in call.name and "init" in call.name]
    assert made == [recorded]


def test_a_step_of_one_token_is_copied_for_tma(library: Library) -> None:
    """The emulator reads garbage where a stride is no multiple of 16 bytes, that of an axis of one included."""
    server = Server(PAGED, **EXTENDING)
    server.step(EXTEND, {server.table.add(): 1})
    query = torch.randn(2, 8 * 64 + 4).bfloat16()[:, :-4].unflatten(1, (8, 64))[:1]
    assert query.is_contiguous()
    assert query.stride(0) % 8
    server.layer(query)
    assert next(c.given["backend"] for c in library.calls if c.name.endswith("__init__")) == "fa3"


def little_room(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """For the work items of an MLA plan, in the emulator too."""
    monkeypatch.setattr(latent, "_MOST_WORK", most)
    monkeypatch.setattr(wrappers, "WORKS", most)
    monkeypatch.setattr(wrappers, "PROCESSORS", 2)
    monkeypatch.setattr(latent, "processors", lambda device: 2)


@pytest.mark.parametrize("lse", [False, True])
def test_latent_steps_of_much_work_are_planned_in_pieces(
    library: Library, lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all layers, as others are."""
    little_room(monkeypatch, 8)
    server = Server(LATENT, **LATENTS, **EXTENDING, lse=lse)
    a, b, c = (server.table.add() for _ in range(3))
    server.give({a: 37, c: 20})
    for new in ({a: 40, b: 21, c: 30}, {a: 2, b: 1}, {c: 60, a: 7}):
        server.step(EXTEND, new)
        before = len(plans(library))
        found = [server.layer() for _ in range(2)]
        assert len(plans(library)) == before, "layers plan nothing"
        assert not lse or found[0][1].isfinite().all()
    assert len(plans(library)) > 5


def test_a_recorded_latent_step_of_too_much_work_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    little_room(monkeypatch, 2)

    def step(count: int) -> Server:
        server = Server(LATENT, recorded=True, rows=count, tokens=count, graph_capture="session", **LATENTS, **DECODING)
        server.step(DECODE, dict.fromkeys([server.table.add() for _ in range(count)], 1))
        return server

    step(2).layer()
    message = r"room for 2 work items .* of 3 tokens with 16 heads needs 3: record steps of fewer tokens"
    with pytest.raises(UnsupportedRequestError, match=message):
        step(3)


def test_a_recorded_wrapper_has_room_for_its_schedule_from_the_first(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator refuses another integer workspace once there is a plan, which a graph may read."""
    monkeypatch.setattr(wrappers, "INTEGERS", 1 << 10)
    monkeypatch.setattr(workbench, "_STAGED", 1 << 10)
    server = Server(PAGED, recorded=True, rows=6, tokens=24, graph_capture="session", **VERIFYING, spec_topk=1)
    rows = [server.table.add() for _ in range(6)]
    server.give(dict.fromkeys(rows, 5))
    for real in (2, 6, 4):
        server.step(VERIFY, dict.fromkeys(rows[:real], 4), padding=6 - real)
        server.layer()
    assert server.session._wrapper.integers > 1 << 10


def test_steps_that_the_kernels_cannot_count_are_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**VERIFYING, "mask": "bool", "tree": True, "spec_topk": 4}
    server = Server(PAGED, **fields)
    a, b = server.table.add(), server.table.add()
    server.give({a: 37, b: 3})
    with monkeypatch.context() as patch:
        patch.setattr(paged, "REACH", 4095)
        with pytest.raises(UnsupportedRequestError, match="has 8 tokens of 8 heads of 64: it takes at most 7 tokens"):
            server.step(VERIFY, {a: 4, b: 4}, tree=DraftTree.from_parents(TREES[0]))
    monkeypatch.setattr(lengths, "_PAIRS", 4 * (45 + 11))
    with pytest.raises(UnsupportedRequestError, match=r"this call have 224: it takes fewer than 224 at once"):
        server.step(VERIFY, {a: 4, b: 4}, tree=DraftTree.from_parents(TREES[0]))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("target", [PAGED, GENERATED, XQA], ids=["flashinfer", "trtllm-gen", "xqa"])
def test_new_rows_go_to_their_slots(library: Library, target: Emulated, layout: str, monkeypatch: Any) -> None:
    if target is XQA:
        emulator.library(arch=90).install(monkeypatch)
    server = Server(target, **DECODING, kv_layout=layout, save_kv_cache=True)
    rows = [server.table.add() for _ in range(3)]
    server.give({row: 15 + n for n, row in enumerate(rows)})
    server.step(DECODE, dict.fromkeys(rows, 1))
    query, new = server.query(), torch.randn(2, 3, 2, 64).bfloat16()
    slots = server.now.slots
    pairs = zip(server.caches, new, strict=True)
    wanted = [cache.flatten(0, 1).index_copy(0, slots, kept) for cache, kept in pairs]
    caches = [cache.transpose(1, 2).contiguous() if layout == "HND" else cache for cache in server.caches]
    found = server.session.forward(query, *caches, key=new[0], value=new[1], **server.now.keywords)
    caches = [cache.transpose(1, 2) if layout == "HND" else cache for cache in caches]
    for cache, rows_wanted in zip(caches, wanted, strict=True):
        torch.testing.assert_close(cache.flatten(0, 1), rows_wanted, rtol=0, atol=0)
    server.caches = [cache.contiguous() for cache in caches]
    torch.testing.assert_close(server.layer(query) if layout == "NHD" else found, found, rtol=0, atol=0)


def test_rows_that_are_not_kept_are_attended_from_copies(library: Library) -> None:
    server = Server(PAGED, **DECODING)
    row = server.table.add()
    server.give({row: 20})
    server.step(DECODE, {row: 1})
    before, new = [cache.clone() for cache in server.caches], torch.randn(2, 1, 2, 64).bfloat16()
    query = server.query()
    found = server.session.forward(query, *server.caches, key=new[0], value=new[1], **server.now.keywords)
    for cache, was in zip(server.caches, before, strict=True):
        torch.testing.assert_close(cache, was, rtol=0, atol=0)
    for cache, rows in zip(server.caches, new, strict=True):
        cache.flatten(0, 1)[server.now.slots] = rows
    torch.testing.assert_close(server.layer(query), found, rtol=0, atol=0)


def test_fp8_rows_and_their_scales(library: Library) -> None:
    fields = {**DECODING, "kv_dtype": "fp8_e4m3", "kv_scales": "tensor", "save_kv_cache": True}
    server = Server(PAGED, **fields)
    row = server.table.add()
    server.give({row: 20})
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}
    kept = [(cache / s).to(torch.float8_e4m3fn) for cache, s in zip(server.caches, scales.values(), strict=True)]
    server.step(DECODE, {row: 1})
    new, query = torch.randn(2, 1, 2, 64).bfloat16(), server.query()
    found = server.session.forward(query, *kept, key=new[0], value=new[1], **server.now.keywords, **scales)
    server.caches = [cache.float() * s for cache, s in zip(kept, scales.values(), strict=True)]
    slot = server.now.slots
    for cache, rows in zip(server.caches, new, strict=True):
        torch.testing.assert_close(cache.flatten(0, 1)[slot], rows.float(), rtol=0.07, atol=1e-2)
    call = library.calls[-1]
    assert (call.given["k_scale"], call.given["v_scale"]) == (0.5, 0.25)
    wanted = reference.paged_attention(
        query.double(), *(c.double() for c in server.caches), page_table=server.now.page_table,
        seq_lens=server.now.seq_lens, cu_seqlens_q=server.now.cu_seqlens_q,
    )  # fmt: skip
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)


def test_sessions_that_are_planned_at_once_do_not_share_memory(library: Library) -> None:
    """The emulator spoils a plan over whose workspace another was made."""
    servers = [Server(PAGED, **EXTENDING), Server(PAGED, **EXTENDING, window=(9, -1)), Server(PAGED, **EXTENDING)]
    for server in servers:
        server.step(EXTEND, {server.table.add(): 21})
    for server in servers:
        server.layer()
    memory = {call.given["float_workspace_buffer"].data_ptr() for call in library.calls if "__init__" in call.name}
    assert len(memory) == 3


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("target", [GENERATED, XQA], ids=["trtllm-gen", "xqa"])
def test_kernels_without_plans(target: Emulated, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = 100 if target is GENERATED else 90
    library = emulator.library(arch=arch).install(monkeypatch)
    server = Server(
        target,
        recorded=recorded,
        rows=3,
        tokens=6,
        **VERIFYING,
        spec_topk=1,
        graph_capture="session" if recorded else False,
    )
    a, b = server.table.add(), server.table.add()
    server.give({a: 30, b: 4})
    for _ in range(2):
        server.step(VERIFY, {a: 2, b: 2}, padding=1 if recorded else 0)
        server.layer()
    given = [call.given for call in library.calls]
    assert len({g["workspace_buffer"].data_ptr() for g in given}) == 1
    if target is GENERATED:
        assert all(not g["multi_ctas_kv_counter_buffer"].any() for g in given)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_decode_step_of_xqa_goes_straight_to_the_library(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but queries and caches is known since the step was prepared."""
    library = emulator.library(arch=90).install(monkeypatch)
    fields = {**DECODING, "graph_capture": "session" if recorded else False}
    server = Server(XQA, recorded=recorded, rows=3, tokens=3, **fields)
    a, b = server.table.add(), server.table.add()
    server.give({a: 30, b: 4})
    for _ in range(2):
        server.step(DECODE, {a: 1, b: 1}, padding=1 if recorded else 0)
        query = server.query()
        server.layer(query)
        wide = torch.cat([query, query], -1)
        found = server.layer(wide[..., : query.shape[-1]])
        assert library.calls[-1].given["query"].is_contiguous()
        assert torch.equal(server.layer(query), found)
    tables, seen, given = dict(server.now.keywords), list[str](), list[dict[str, Any]]()
    with monkeypatch.context() as patch:
        patch.setattr(server.session._call, "decode", lambda **keywords: given.append(keywords))
        sys.setprofile(lambda frame, event, argument: seen.append(frame.f_code.co_name) if event == "call" else None)
        try:
            server.session.forward(query, *server.caches, **tables)
        finally:
            sys.setprofile(None)
    assert seen == ["_reading", "_in_rows", "<lambda>"]
    assert given[0].keys() == library.calls[-1].given.keys() - {"out"}
    server.layer(query, sinks=torch.randn(server.request.heads))


def test_an_older_library_serves_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    library = wrappers.library("0.6.18.post1").install(monkeypatch)
    fields = {**VERIFYING, "mask": "bool", "tree": True, "spec_topk": 4, "graph_capture": "session"}
    server = Server(PAGED, recorded=True, rows=2, tokens=8, **fields)
    a, b = server.table.add(), server.table.add()
    server.give({a: 37, b: 3})
    server.step(VERIFY, {a: 4, b: 4}, tree=DraftTree.from_parents(TREES[0]))
    server.layer()
    assert "uniform_q_len" not in next(call.given for call in library.calls if call.name.endswith(".plan"))


class _Wrapper:
    """Stands for the library's call, of which nothing is counted."""

    def __init__(self, out: Tensor) -> None:
        self.out = out

    def run(self, **given: Any) -> Tensor:
        return self.out


class _Operations(TorchDispatchMode):
    """Counts torch's operations, and those of a library not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.off = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.off
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("target", "fields"), [(PAGED, {}), (LATENT, LATENTS)], ids=["paged", "mla"])
def test_what_a_planned_layer_adds_to_the_call_of_the_library(
    library: Library, target: Emulated, fields: dict[str, Any]
) -> None:
    """No operation of torch, and three functions: so a layer stays within a few microseconds of the library by hand."""
    server = Server(target, **DECODING, **fields)
    server.step(DECODE, {server.table.add(): 1})
    query, seen = server.query(), []
    out = server.session._wrapper = _Wrapper(torch.empty_like(query))
    tables = dict(server.now.keywords)
    sys.setprofile(lambda frame, event, argument: seen.append(frame.f_code.co_name) if event == "call" else None)
    try:
        found = server.session.forward(query, *server.caches, **tables)
    finally:
        sys.setprofile(None)
    assert found is out.out
    assert seen == ["forward", "run_step", "prepared", "run"]
    with _Operations() as operations:
        server.session.forward(query, *server.caches, **tables)
    assert not operations.count


@pytest.mark.parametrize(("target", "fields"), [(PAGED, {}), (LATENT, LATENTS)], ids=["paged", "mla"])
def test_what_a_plan_adds_to_that_of_the_library(
    library: Library, target: Emulated, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host tensors of the lengths, as the library reads them, and little more, in a step of any size."""
    counted: list[int] = []
    for rows, tokens in ((2, 2), (6, 6)):
        server = Server(target, **DECODING, **fields)
        numbers = [server.table.add() for _ in range(rows)]
        server.step(DECODE, dict.fromkeys(numbers, 1))
        server.give(dict.fromkeys(numbers, 1))
        lengths = [server.table.length(row) for row in numbers]
        (step,) = server.buffers.stage(ForwardBatch(DECODE, numbers, lengths, [1] * tokens), server.table)
        wrapper, operations = type(server.session._wrapper), _Operations()
        library_plan = wrapper.plan

        def plan(*args: Any, library_plan: Any = library_plan, operations: Any = operations, **given: Any) -> None:
            operations.off = True
            library_plan(*args, **given)
            operations.off = False

        with monkeypatch.context() as patched, operations:
            patched.setattr(wrapper, "plan", plan)
            server.session.plan(step)
        counted.append(operations.count)
    assert counted[0] == counted[1] <= 9
