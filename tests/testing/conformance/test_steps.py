"""Calls of the kit as steps of an engine: what a graph records of a backend that plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.contract import SESSION, AttentionRequest, PagedTables, Range, row
from polyattn.serving import DraftTree, ForwardBatch, ForwardMode, PageAllocator, RequestTable, Step, StepBuffers
from polyattn.testing import Case, generate
from polyattn.testing.beyond import refusals
from polyattn.testing.steps import CallStep, planned

SIZE, ROWS = 4, 5
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "decode": ("DECODE", {"rows": {0: 9, 1: 1, 2: 4}, "new": 1}),
    "verify": ("TARGET_VERIFY", {"rows": {0: 12, 1: 3}, "new": 3, "tree": True}),
    "extend": ("EXTEND", {"rows": {0: 7, 1: 5, 2: 13}, "new": 5}),
}


def both(phase: str) -> tuple[Step, CallStep]:
    """A step as the engine's buffers make it, and the same as a call of its tables."""
    mode, given = STEPS[phase]
    table = RequestTable(ROWS, 64, SIZE, [-1], [PageAllocator(40)], "cpu")
    rows = {table.add(): length for length in given["rows"].values()}
    for row_, length in reversed(rows.items()):
        table.extend(row_, length)
    parents = torch.tensor([[-1, 0, 0]] * len(rows), dtype=torch.int32)
    tree = DraftTree(parents) if given.get("tree") else None
    new = [given["new"] if length >= given["new"] else length for length in rows.values()]
    batch = ForwardBatch(ForwardMode[mode], list(rows), list(rows.values()), new, tree)
    (step,) = StepBuffers(ROWS, 64, 16).build(batch, table)
    request = AttentionRequest(family="paged", phase=phase, page_size=SIZE, tree=tree is not None)  # type: ignore[arg-type]
    case = Case(request=request, lengths=tuple(zip(new, rows.values(), strict=True)))
    tensors = {} if step.attn_mask is None else {"mask": step.attn_mask.clone()}
    tables = PagedTables(*(t.clone() if isinstance(t, Tensor) else t for t in step.tables[:5]))
    # Tensors that do not say where they are go elsewhere: so all of the step must be where its tables are.
    with torch.device("meta"):
        made = CallStep(case, tensors, tables)
        assert made.at(2).kv_indices.device.type == "cpu"
        assert made.windowed(3).page_table.device.type == "cpu"
    return step, made


@pytest.mark.parametrize("phase", STEPS)
def test_a_call_is_the_step_that_an_engine_would_make(phase: str) -> None:
    step, made = both(phase)
    tensors = (
        "page_table",
        "seq_lens",
        "cu_seqlens_q",
        "slots",
        "positions",
        "cu_seqlens_k",
        "kv_indptr",
        "kv_indices",
    )
    for name in (*tensors, "last_page_len", "tree_mask", "attn_mask"):
        ours, theirs = getattr(made, name), getattr(step, name)
        if theirs is not None:
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours, theirs), name
    for name in ("phase", "mode", "sequences", "tokens", "padding", "page_size", "max_seqlen_q", "max_seqlen_k"):
        assert getattr(made, name) == getattr(step, name), name
    for name in ("seq_lens", "cu_seqlens_q", "kv_indptr", "kv_indices", "last_page_len", "page_table"):
        assert torch.equal(made.host(name), step.host(name)), name


def test_a_call_is_planned_and_prepared_before_it_is_recorded() -> None:
    """And the session is given what the family's forward is given."""
    told: list[Any] = []

    class Session:
        def plan(self, step: Any) -> None:
            told.append(("plan", step.host("seq_lens").tolist()))

        def prepare(self, step: Any) -> None:
            told.append(("prepare", step.slots.tolist()))

        def forward(self, *tensors: Any, **tables: Any) -> Any:
            told.append((len(tensors), sorted(tables)))
            return tensors[0]

    def make(slot: Any) -> Any:
        assert (slot.recorded, slot.max_sequences, slot.max_tokens, slot.max_pages) == (True, 1, 1, 2)
        return Session()

    request = AttentionRequest(family="paged", phase="decode", page_size=SIZE)
    tables = {
        "page_table": torch.tensor([[3, 1]], dtype=torch.int32), "seq_lens": torch.tensor([6], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32), "max_seqlen_q": 1, "max_seqlen_k": 6,
    }  # fmt: skip
    tensors = {name: torch.zeros(1) for name in ("query", "key_cache", "value_cache", "mask")}
    call = planned(make, Case(request=request, lengths=((1, 6),)), tensors, tables, recorded=True)
    assert told == [("plan", [6]), ("prepare", [SIZE + 1])]
    assert call() is tensors["query"]
    assert told[-1] == (3, ["attn_mask", "tables"])


SERVED: dict[str, Any] = {
    "family": "paged", "dtype": "bfloat16", "head_dim": 64, "phase": ("decode", "verify"), "spec_topk": Range(0),
    "s_relation": ("one", "fewer"), "page_size": Range(1), "save_kv_cache": True, "lse": True, "group": True,
    "mask": ("none", "bool"), "tree": True, "causal": ("none", "bottom_right"),
}  # fmt: skip


def test_what_is_recorded_in_steps_only_is_drawn_in_steps_and_refused_as_a_call() -> None:
    facts, which = {"platform": "cuda"}, {"families": ("paged",), "dtypes": ("bfloat16",)}
    rows = {name: (row(**SERVED, graph_capture=word),) for name, word in (("steps", SESSION), ("any", True))}
    drawn = {name: generate(given, facts, **which, per_row=1) for name, given in rows.items()}
    captures = {name: [c for c in cases if c.check == "capture"] for name, cases in drawn.items()}
    assert {c.request.graph_capture for c in captures["steps"]} == {"session"}
    assert {c.request.graph_capture for c in captures["any"]} == {True, "session"}
    steps = [(c.request.phase, c.request.tree, c.request.lse) for c in captures["steps"]]
    assert steps == [
        ("decode", False, False), ("verify", True, False), ("verify", False, False), ("decode", False, True),
    ]  # fmt: skip
    assert all(c.new_rows and c.request.save_kv_cache and all(k for _, k in c.lengths) for c in captures["steps"])
    beyond = {name: refusals(given, facts, **which, pairs=0) for name, given in rows.items()}
    refused = {
        name: [c.request.graph_capture for c in cases if c.fields == ("graph_capture",)]
        for name, cases in beyond.items()
    }
    assert refused == {"steps": [True], "any": []}
