"""`AttentionBackend`: every mode, layer kind and cache equals dense attention on gathered tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyattn.errors import InvalidInputError
from polyattn.serving.attention import backend
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.tree import DraftTree

from . import rig as rig_module
from .rig import Rig, decoder

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
VERIFY, DRAFT_EXTEND, IDLE = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.IDLE

SINKS = torch.tensor([0.5, 3.0, -1.0, 0.0])
LAYERS: dict[str, Any] = {
    "gqa": decoder(),
    "mqa, wide values": decoder(heads=4, kv_heads=1, v_head_dim=24),
    "one head each": decoder(kv_heads=4, v_head_dim=8),
    "window": decoder(window=5),
    "two windows and full": [AttentionLayer(i, 4, 2, 16, window=window) for i, window in enumerate((-1, 3, -1, 6, 3))],
    "softcap": decoder(softcap=2.0),
    "sinks": decoder(sinks=SINKS),
    "sinks and window": decoder(sinks=SINKS, window=4),
    "scale": decoder(scale=0.3),
    "latent": decoder(kv_heads=1, head_dim=24, v_head_dim=16, scale=0.2, latent=True),
    "latent beside plain": [
        *decoder(1),
        AttentionLayer(1, 4, 1, 24, v_head_dim=16, scale=0.2, latent=True),
    ],
}
BACKENDS = [(None, 4, 0), (None, 1, 2), ("toy", 1, 2), ("toy_saves", 16, 2), ("reference", 4, 2)]
"""With page size and topk; None is automatic."""


@pytest.mark.parametrize("name, page_size, topk", BACKENDS)
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_every_mode_equals_dense_attention(
    layers: list[AttentionLayer], name: str | None, page_size: int, topk: int, toys: Any
) -> None:
    rig = Rig(layers, page_size=page_size, backend=name, topk=topk)
    a, b, c = rig.add(3)
    rig.step(EXTEND, {a: 7, b: 3})
    rig.step(DECODE, {b: 1, a: 1})
    rig.step(EXTEND, {c: 11, a: 5})
    rig.step(MIXED, {a: 1, c: 4, b: 1})
    rig.step(DRAFT_EXTEND, {a: 2, b: 3})
    rig.step(DECODE, {a: 1, b: 1, c: 1})
    rig.step(DECODE, {a: 1, b: 1, c: 1})
    if topk:
        rig.step(VERIFY, {a: 4, c: 4}, tree=DraftTree.from_parents([[-1, 0, 0, 1], [-1, 0, 1, 1]]))


@pytest.mark.parametrize("config", [{}, {"dtype": "fp8_e4m3", "scales": "token"}], ids=["plain", "fp8"])
def test_the_default_device_of_a_program_moves_nothing(
    config: dict[str, str], toys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs make their models under `torch.device(...)`; what went to "meta" would have no numbers."""

    def here(call: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        with torch.device("cpu"):
            return call(*args)

    for name in ("dense", "tree_mask"):
        monkeypatch.setattr(rig_module, name, functools.partial(here, getattr(rig_module, name)))
    tree = DraftTree.from_parents([[-1, 0, 0, 1], [-1, 0, 1, 1]])
    with torch.device("meta"):
        rig = Rig(decoder(), config=config, topk=2)
        a, b = rig.add(2)
        rig.step(EXTEND, {a: 7, b: 3})
        rig.step(DECODE, {b: 1, a: 1})
        rig.step(MIXED, {a: 1, b: 4})
        rig.step(VERIFY, {a: 4, b: 4}, tree=tree)


@pytest.mark.parametrize(
    "layers", [decoder(), decoder(window=4), decoder(sinks=SINKS)], ids=["full", "window", "sinks"]
)
def test_a_chain_is_verified_as_an_extend(layers: list[AttentionLayer], toys: Any) -> None:
    rig = Rig(layers, backend="toy_chain", topk=1)
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 6, b: 2})
    rig.step(VERIFY, {a: 3, b: 3})
    rig.step(VERIFY, {b: 3, a: 3}, tree=DraftTree.chain(2, 3))
    tables = rig.backend._any[0].step.keywords
    assert "attn_mask" not in tables, "a kernel that knows chains only is given no mask"


@pytest.mark.parametrize("name", [None, "toy", "toy_saves"])
@pytest.mark.parametrize("layers", [decoder(), decoder(window=4)], ids=["full", "window"])
def test_keys_that_are_not_saved_are_attended_and_not_written(
    layers: list[AttentionLayer], name: str | None, toys: Any
) -> None:
    rig = Rig(layers, backend=name)
    (row,) = rig.add()
    rig.step(EXTEND, {row: 6})
    layer = layers[1]
    rig.give({row: 2})
    rig.table.truncate(row, 6)
    before = [tensor.clone() for tensor in rig.pool.cache(1).tensors]
    rig.step(EXTEND, {row: 2}, save=False)
    assert all(torch.equal(a, b) for a, b in zip(before, rig.pool.cache(1).tensors, strict=True))
    rig.table.truncate(row, 6)
    rig.step(EXTEND, {row: 2})
    written = rig.pool.read(1, rig.slots(layer, row, 8), torch.float32)
    for kept, stored in zip(rig.kept[1, row], written, strict=True):
        assert torch.equal(kept, stored)


@pytest.mark.parametrize("scales", ["tensor", "head"])
@pytest.mark.parametrize("name", [None, "toy", "toy_saves"])
def test_fp8_caches_with_static_scales(name: str | None, scales: str, toys: Any) -> None:
    rig = Rig(decoder(), backend=name, config={"dtype": "fp8_e4m3", "scales": scales})
    for layer in rig.layers:
        given = 0.05 if scales == "tensor" else torch.tensor([0.05, 0.02])
        rig.pool.set_scales(layer.layer_id, given, given)
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 7, b: 3})
    rig.step(DECODE, {a: 1, b: 1})
    by = rig.backend.explain()["decode"].notes[-1]
    assert by == f"new keys and values are written by {WRITERS[name]}"


WRITERS = {
    None: "the kernel",
    "toy": "the pool, before the kernel runs",
    "toy_saves": "the kernel",
}


@pytest.mark.parametrize("config", [{"dtype": "fp8_e4m3", "scales": "token"}, {"dtype": "fp4_e2m1"}], ids=str)
@pytest.mark.parametrize("name", [None, "toy"])
def test_scales_of_tokens_are_made_by_the_pool(name: str | None, config: dict[str, str], toys: Any) -> None:
    """Kernels that do not know them are reached by an exact rewrite, whose tables no session has planned."""
    rig = Rig(decoder(), backend=name, config=config)
    (row,) = rig.add()
    rig.step(EXTEND, {row: 7})
    rig.step(DECODE, {row: 1})
    assert {s.notes[-1].split(" by ")[1] for s in rig.backend.explain().values()} == {WRITERS["toy"]}
    if name == "toy":
        assert {s.lowerings for s in rig.backend.explain().values()} == {("dequantise_kv",)}
    assert not toys


def test_keys_that_are_not_saved_have_scales_of_their_own_too(toys: Any) -> None:
    rig = Rig(decoder(1), config={"dtype": "fp8_e4m3", "scales": "token"})
    (row,) = rig.add()
    rig.step(EXTEND, {row: 7})
    layer = rig.layers[0]
    q, k, v = rig.random(2, 4, 16), rig.random(2, 2, 16), rig.random(2, 2, 16)
    rig.give({row: 2})
    rig.backend.init_forward_metadata(rig.batch_of(EXTEND, {row: 2}))
    attended = rig.backend.forward(q, k, v, layer, save_kv_cache=False)
    torch.testing.assert_close(attended, rig.backend.forward(q, k, v, layer))


@pytest.mark.parametrize("name", ["toy", "toy_saves"])
def test_keys_that_are_not_saved_go_to_kernels_that_take_them_alone(toys: Any, name: str) -> None:
    """`toy` reads its cache and no more: it finds the rows in a copy, and the pool stays as it is."""
    rig = Rig(decoder(1), backend=name)
    (row,) = rig.add()
    rig.step(EXTEND, {row: 7})
    layer = rig.layers[0]
    q, k, v = rig.random(2, 4, 16), rig.random(2, 2, 16), rig.random(2, 2, 16)
    rig.give({row: 2})
    rig.backend.init_forward_metadata(rig.batch_of(EXTEND, {row: 2}))
    before = [cache.clone() for cache in rig.pool.cache(0).tensors]
    attended = rig.backend.forward(q, k, v, layer, save_kv_cache=False)
    assert all(torch.equal(a, b) for a, b in zip(rig.pool.cache(0).tensors, before, strict=True))
    torch.testing.assert_close(attended, rig.backend.forward(q, k, v, layer))


def test_the_pool_and_the_kernel_write_the_same(toys: Any) -> None:
    def caches(name: str) -> tuple[torch.Tensor, ...]:
        rig = Rig(decoder(), backend=name, config={"layout": "HND"})
        a, b = rig.add(2)
        rig.step(EXTEND, {a: 7, b: 3})
        rig.step(DECODE, {a: 1, b: 1})
        return rig.pool.cache(1).tensors

    assert all(torch.equal(x[1:], y[1:]) for x, y in zip(caches("toy"), caches("toy_saves"), strict=True))


@pytest.mark.parametrize("name", [None, "toy", "reference"])
def test_pages_behind_a_window_may_be_anybodys(name: str | None, toys: Any) -> None:
    """Two kinds of layers in one step; what a sliding group gave back holds NaN."""
    rig = Rig([AttentionLayer(i, 4, 2, 16, window=window) for i, window in enumerate((-1, 5))], backend=name)
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 13, b: 6})
    for _ in range(4):
        for row in (a, b):
            rig.table.slide(row)
        owned = {page for row in (a, b) for page in rig.table.pages(row, 1)} - {0}
        for cache in rig.pool.cache(1).tensors:
            cache[[page for page in range(len(cache)) if page not in owned]] = float("nan")
        rig.step(MIXED, {a: 1, b: 3})
    assert 0 in rig.table.pages(a, 1), "nothing was given back, so this says nothing"


def test_an_idle_step_runs_nothing(toys: Any) -> None:
    rig = Rig(decoder(v_head_dim=8), backend="toy")
    batch = rig.batch_of(IDLE, {})
    rig.backend.init_forward_metadata(batch)
    q, k, v = rig.random(0, 4, 16), rig.random(0, 2, 16), rig.random(0, 2, 8)
    for forward in (rig.backend.forward_decode, rig.backend.forward_extend):
        assert forward(q, k, v, rig.layers[0], batch).shape == (0, 4, 8)
    assert not toys


@pytest.mark.parametrize("new", [{0: 3, 1: 2, 2: 1, 3: 1}, {2: 1, 0: 3, 3: 1, 1: 2}], ids=["in blocks", "interleaved"])
@pytest.mark.parametrize("layers", [LAYERS["gqa"], LAYERS["latent beside plain"]], ids=["plain", "latent"])
def test_a_mixed_step_is_split_where_backends_differ(
    new: dict[int, int], layers: list[AttentionLayer], toys: Any
) -> None:
    rig = Rig(layers, prefill_backend="toy", decode_backend="toy_plain")
    rows = rig.add(4)
    rig.step(EXTEND, dict.fromkeys(rows, 5))
    rig.step(DECODE, dict.fromkeys(rows, 1))
    before = {s: s.forwards for s in toys}
    rig.step(MIXED, {rows[i]: count for i, count in new.items()})
    phases = {s.request.phase for s in toys if s.forwards > before.get(s, 0)}
    assert phases == {"extend", "decode"}
    rig.step(MIXED, dict.fromkeys(rows, 1))
    rig.step(MIXED, dict.fromkeys(rows, 2))


def test_a_profile_names_who_serves_each_layer(toys: Any) -> None:
    rig = Rig(decoder(), prefill_backend="toy", decode_backend="toy_plain")
    a, b = rig.add(2)
    steps = ((EXTEND, {a: 5, b: 5}), (DECODE, {a: 1, b: 1}), (MIXED, {a: 1, b: 3}))
    names = []
    for mode, new in steps:
        with torch.profiler.profile() as found:
            rig.step(mode, new)
        names.append([e.name for e in found.events() if e.name.startswith("polyattn.serving")])
    asked = [("extend", "toy@cpu"), ("decode", "toy_plain@cpu"), ("mixed", "toy@cpu and toy_plain@cpu")]
    assert names == [[f"polyattn.serving {phase} layer {n} {by}" for n in range(2)] for phase, by in asked]
    with torch.profiler.profile() as found:
        rig.backend.forward(rig.random(4, 4, 16), None, None, rig.layers[0])
    assert "polyattn.serving mixed layer 0 toy@cpu and toy_plain@cpu" in {e.name for e in found.events()}


def test_a_mixed_step_is_one_extend_where_one_backend_serves_both(toys: Any) -> None:
    rig = Rig(decoder(), backend="toy")
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 5})
    rig.step(MIXED, {a: 1, b: 4})
    assert [s.request.phase for s in toys] == ["extend"]


def test_a_mixed_step_asks_no_layer_again_who_serves_it(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(decoder(), prefill_backend="toy", decode_backend="toy_plain")
    a, b = rig.add(2)
    rig.step(MIXED, {a: 1, b: 4})
    asked: list[object] = []
    monkeypatch.setattr(backend, "served_by", asked.append)
    rig.step(MIXED, {a: 1, b: 4})
    assert not asked
    assert {s.request.phase for s in toys} == {"extend", "decode"}


def test_a_padded_mixed_step_is_one_extend(toys: Any) -> None:
    rig = Rig(decoder(), prefill_backend="toy", decode_backend="toy_plain")
    a, b = rig.add(2)
    rig.step(MIXED, {a: 1, b: 4}, padding=2, padding_query_len=1)
    assert [s.request.phase for s in toys] == ["extend"]


@pytest.mark.parametrize("name", [None, "toy"])
def test_advance_is_a_plan_of_the_next_decode_step(name: str | None, toys: Any) -> None:
    rig = Rig([AttentionLayer(i, 4, 2, 16, window=window) for i, window in enumerate((-1, 5))], backend=name)
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 7, b: 3})
    rig.step(DECODE, {a: 1, b: 1})
    for _ in range(5):
        rig.give({a: 1, b: 1})
        rig.backend.advance()
        rig.backend.prepare()
        batch = rig.backend.batch
        assert batch is not None
        for layer in rig.layers:
            rig.check_layer(layer, batch, None, True)


def test_encoder_only_layers_see_their_whole_sequence(toys: Any) -> None:
    rig = Rig(
        [AttentionLayer(0, 4, 2, 16, kind="encoder_only"), AttentionLayer(1, 4, 2, 16, kind="encoder_only", window=2)]
    )
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 9, b: 3})


@pytest.mark.parametrize("mode, part", [(EXTEND, 4), (DECODE, 1)], ids=["chunk", "decode"])
def test_encoder_only_layers_are_given_whole_sequences(mode: ForwardMode, part: int, toys: Any) -> None:
    rig = Rig([*decoder(1), AttentionLayer(1, 4, 2, 16, kind="encoder_only")])
    a, b = rig.add(2)
    rig.give({a: 8})
    rig.give({a: part, b: part})
    batch = rig.batch_of(mode, {b: part, a: part})
    said = rf"row {a} has {part} new tokens of {8 + part}, and layer 1 is encoder-only: .*whole sequence in one step"
    with pytest.raises(InvalidInputError, match=said):
        rig.backend.plan(batch)


def test_a_recorded_decode_does_not_slip_a_part_of_a_sequence_in(toys: Any) -> None:
    rig = Rig([AttentionLayer(0, 4, 2, 16, kind="encoder_only")], backend="toy_saves")
    rig.backend.init_cuda_graph_state(1, 1)
    (row,) = rig.add()
    rig.step(DECODE, {row: 1}, recorded="replay")
    rig.give({row: 1})
    with pytest.raises(InvalidInputError, match=r"1 new tokens of 2, and layer 0 is encoder-only"):
        rig.backend.init_forward_metadata_replay_cuda_graph(rig.batch_of(DECODE, {row: 1}))


def new_of(rig: Rig, tokens: int) -> tuple[Any, Any, Any]:
    layer = rig.layers[0]
    return rig.random(tokens, layer.heads, layer.head_dim), *rig.new_keys(layer, tokens)


@pytest.mark.parametrize("backend", ["toy", "toy_saves", None])
def test_a_planned_step_is_written_once(backend: str | None, toys: Any) -> None:
    rig = Rig(decoder(1), backend=backend)
    (row,) = rig.add()
    rig.step(EXTEND, {row: 5})
    rig.give({row: 1})
    rig.backend.init_forward_metadata(rig.batch_of(DECODE, {row: 1}))
    first = new_of(rig, 1)
    out = rig.backend.forward(*first, rig.layers[0])
    kept = [cache.clone() for cache in rig.pool.cache(0).tensors]
    again = new_of(rig, 1)
    for forward in (rig.backend.forward, rig.backend.forward_decode):
        with pytest.raises(InvalidInputError, match=r"layer 0 is given keys and values a second time in one planned"):
            forward(*again, rig.layers[0])
    assert all(map(torch.equal, kept, rig.pool.cache(0).tensors))
    # What writes nothing may be asked again, and so may a step that is prepared again.
    torch.testing.assert_close(rig.backend.forward(first[0], None, None, rig.layers[0]), out)
    rig.backend.forward(*again, rig.layers[0], save_kv_cache=False)
    rig.backend.prepare()
    torch.testing.assert_close(rig.backend.forward(*first, rig.layers[0]), out)


def test_each_part_of_a_split_step_is_written_once(toys: Any) -> None:
    rig = Rig(decoder(1), prefill_backend="toy", decode_backend="toy_plain")
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 5})
    rig.step(MIXED, {a: 1, b: 3})
    with pytest.raises(InvalidInputError, match="a second time in one planned step"):
        rig.backend.forward(*new_of(rig, 4), rig.layers[0])


def test_a_layer_of_the_same_number_is_the_same_layer(toys: Any) -> None:
    sinks = torch.zeros(4)
    rig = Rig(decoder(1, window=5, sinks=sinks))
    (row,) = rig.add()
    alike = dataclasses.replace(rig.layers[0], sinks=sinks.view(4))
    others = {
        "window": -1,
        "softcap": 5.0,
        "scale": 1.0,
        "sinks": torch.ones(4),
        "kind": "encoder_only",
    }
    for mode in (EXTEND, DECODE):
        rig.give({row: 1})
        rig.backend.init_forward_metadata(rig.batch_of(mode, {row: 1}))
        names = ("forward", "forward_decode" if mode is DECODE else "forward_extend")
        for name in names:
            for field, value in others.items():
                other = dataclasses.replace(rig.layers[0], **{field: value})
                with pytest.raises(InvalidInputError, match=rf"layer 0 is given with {field}=.*and the one of that"):
                    getattr(rig.backend, name)(*new_of(rig, 1), other)
        getattr(rig.backend, names[1])(*new_of(rig, 1), alike)
    rig.backend.plan(ForwardBatch(ForwardMode.IDLE, [], [], []))
    with pytest.raises(InvalidInputError, match="layer 0 is given with window=-1"):
        rig.backend.forward(*new_of(rig, 0), dataclasses.replace(alike, window=-1))


CUDA = {
    "two windows and full": LAYERS["two windows and full"],
    "latent": LAYERS["latent"],
    "sinks and window": decoder(sinks=SINKS, window=4),
}


@pytest.mark.parametrize("layers", CUDA.values(), ids=CUDA)
def test_every_mode_on_a_gpu(layers: list[AttentionLayer], device: Callable[..., Any]) -> None:
    """Eager and planned for recording, by whoever is chosen there."""
    device("cuda", "rocm", what="serving steps on a GPU")
    there = [dataclasses.replace(layer, sinks=None if layer.sinks is None else layer.sinks.cuda()) for layer in layers]
    rig = Rig(there, device="cuda", topk=2)
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 7, b: 3})
    rig.step(DECODE, {b: 1, a: 1})
    rig.step(MIXED, {b: 1, a: 4})
    rig.step(VERIFY, {a: 4, b: 4}, tree=DraftTree.from_parents([[-1, 0, 0, 1], [-1, 0, 1, 1]], device="cuda"))
    rig.backend.init_cuda_graph_state(4, 16)
    for how in ("capture", "replay"):
        rig.step(DECODE, {b: 1, a: 1}, recorded=how, padding=2)
