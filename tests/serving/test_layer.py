"""`AttentionLayer`, and what a serving context says to arguments that fit neither the layer nor the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn.adapters.alignment import align16
from polyattn.errors import InvalidInputError
from polyattn.serving.attention import layer_calls as calls
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.layer_calls import LayerCall
from polyattn.serving.attention.workspace import Limits
from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool
from polyattn.serving.layer import AttentionLayer
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable
from polyattn.serving.step.tree import DraftTree
from polyattn.testing.problems import stored

from .rig import LIMITS, Rig, decoder

EXTEND, DECODE, IDLE = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.IDLE

GOOD: dict[str, Any] = {"layer_id": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
LATENT: dict[str, Any] = {**GOOD, "kv_heads": 1, "v_head_dim": 12, "scale": 0.2, "latent": True}
WRONG = [
    ({**GOOD, "layer_id": -1}, "AttentionLayer -1: layer_id=-1; a whole number of at least 0"),
    ({**GOOD, "heads": 4.0}, "heads=4.0; a whole number of at least 1"),
    ({**GOOD, "kv_heads": 0}, "kv_heads=0"),
    ({**GOOD, "head_dim": True}, "head_dim=True"),
    ({**GOOD, "kv_heads": 3}, "heads=4; a multiple of kv_heads=3"),
    ({**GOOD, "v_head_dim": -8}, "v_head_dim=-8"),
    ({**GOOD, "window": -2}, "window=-2; a whole number of at least -1"),
    ({**GOOD, "softcap": -1.0}, "softcap=-1.0; a number above 0 is needed, or 0"),
    ({**GOOD, "kind": "encoder"}, "kind='encoder'; it is one of decoder, encoder_only, cross. Did you mean"),
    ({**GOOD, "kind": "cross", "window": 3}, "window=3; keys of another sequence have no distance"),
    ({**GOOD, "sinks": torch.zeros(2)}, r"sinks=\(2,\); one logit per head is needed, \[4\]"),
    ({**GOOD, "sinks": [0.0] * 4}, r"sinks='list'; one logit per head is needed, \[4\]"),
    ({**GOOD, "softcap": float("nan")}, "softcap=nan; a number above 0 is needed, or 0"),
    ({**GOOD, "softcap": "3"}, "softcap='3'; a number above 0 is needed, or 0"),
    ({**GOOD, "scale": float("inf")}, "scale=inf; a finite number is needed, or None"),
    ({**GOOD, "scale": "x"}, "scale='x'; a finite number is needed, or None"),
    ({**LATENT, "kind": "encoder_only"}, "kind='encoder_only'; a latent layer is a decoder's"),
    ({**LATENT, "kv_heads": 2}, "kv_heads=2; a latent layer has one row for all heads"),
    ({**LATENT, "scale": None}, "scale=None; a latent layer needs that of the uncompressed heads"),
    ({**LATENT, "v_head_dim": 0}, "v_head_dim=0; the value is the first part of a row: 1 to 16"),
    ({**LATENT, "v_head_dim": 17}, "v_head_dim=17"),
    ({**LATENT, "softcap": 1.0}, "softcap='set'; latent attention"),
    ({**LATENT, "sinks": torch.zeros(4)}, "sinks='set'; latent attention"),
]


@pytest.mark.parametrize("fields, words", WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_layer_that_is_none(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        AttentionLayer(**fields)


def test_a_layer() -> None:
    assert AttentionLayer(**GOOD).dims == (16, 16)
    assert AttentionLayer(**LATENT).dims == (16, 12)


# A step's misuse ------------------------------------------------------------------------------------------------------


@pytest.fixture
def rig() -> Rig:
    """With a planned extend step of 3 tokens."""
    made = Rig(decoder(v_head_dim=8))
    made.step(EXTEND, {made.add()[0]: 3})
    return made


def refused(words: str) -> Any:
    return pytest.raises(InvalidInputError, match=words)


def qkv(tokens: int = 3, **more: Any) -> tuple[torch.Tensor, ...]:
    return torch.randn(tokens, 4, 16, **more), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 8)


def test_tensors_off_a_16_byte_boundary_are_moved_for_kernels_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's kernel is bound before there are any, for tensors that are on one."""
    made, moved = LayerCall.__init__, []

    def on_a_device(self: LayerCall, *given: Any) -> None:
        made(self, *given)
        self._loads = True

    def moving(tensor: torch.Tensor) -> torch.Tensor:
        found = align16(tensor)
        moved.append(found is not tensor)
        return found

    monkeypatch.setattr(LayerCall, "__init__", on_a_device)
    monkeypatch.setattr(calls, "align16", moving)
    rig = Rig(decoder(v_head_dim=8))
    rig.step(EXTEND, {rig.add()[0]: 3})
    rig.backend.prepare()
    moved.clear()
    given = qkv()
    off = [stored(tensor, "misaligned", torch.device("cpu")) for tensor in given]
    first = rig.backend.forward(*off, rig.layers[0])
    assert moved == [True, True, True]
    rig.backend.prepare()
    assert torch.equal(first, rig.backend.forward(*given, rig.layers[0]))
    assert moved[3:] == [False, False], "a query that is on one is not asked to be moved"


def test_before_any_step() -> None:
    rig = Rig(decoder())
    for forward in (rig.backend.forward, rig.backend.forward_decode, rig.backend.forward_extend):
        with refused(f"{forward.__name__}: no step is planned and prepared; call init_forward_metadata"):
            forward(*qkv(), rig.layers[0])
    with refused("no step is planned: plan.batch. first"):
        rig.backend.prepare()
    with refused("goes on from a planned decode step, and none is planned"):
        rig.backend.advance()


def test_a_step_that_is_planned_and_not_prepared(rig: Rig) -> None:
    assert rig.batch is not None
    rig.backend.plan(rig.batch)
    with refused("no step is planned and prepared"):
        rig.backend.forward(*qkv(), rig.layers[0])


def test_the_name_goes_with_the_mode(rig: Rig) -> None:
    with refused("forward_decode: the planned batch is of mode EXTEND; call forward_extend or forward"):
        rig.backend.forward_decode(*qkv(), rig.layers[0], rig.batch)
    rig.step(DECODE, {0: 1})
    with refused("forward_extend: the planned batch is of mode DECODE; call forward_decode"):
        rig.backend.forward_extend(*qkv(1), rig.layers[0], rig.batch)


def test_another_batch_than_the_planned_one(rig: Rig) -> None:
    other = ForwardBatch(EXTEND, [0], [3], [3])
    with refused("forward_extend: the batch given is not the one planned"):
        rig.backend.forward_extend(*qkv(), rig.layers[0], other)


@pytest.mark.parametrize("name", ["forward", "forward_extend", "forward_decode"])
def test_the_number_of_a_layer_is_no_layer(rig: Rig, name: str) -> None:
    with refused(r"layer=0 is no AttentionLayer: the layer itself is needed, one of this backend's `layers`, \[0, 1\]"):
        getattr(rig.backend, name)(*qkv(), 0)


def test_a_layer_of_another_model(rig: Rig) -> None:
    with refused(r"no attention layer 9 here.* Known: \[0, 1\]"):
        rig.backend.forward(*qkv(), AttentionLayer(9, 4, 2, 16))


@pytest.mark.parametrize(
    "given, words",
    [
        (qkv(4), r"layer 0 is given query \[4, 4, 16\] where the planned step and the layer say .* = \[3, 4, 16\]"),
        ((qkv()[0][:, :2], *qkv()[1:]), r"query \[3, 2, 16\]"),
        (
            (qkv(dtype=torch.float64)[0], *qkv()[1:]),
            "a query of torch.float64; its kernel was chosen for torch.float32",
        ),
        ((qkv(requires_grad=True)[0], *qkv()[1:]), "a query that requires gradients; serving is inference only"),
        ((qkv()[0], *qkv(2)[1:]), r"key \[2, 2, 16\], value \[2, 2, 8\] where .* say \[3, 2, 16\] and \[3, 2, 8\]"),
        ((*qkv()[:2], None), r"key \[3, 2, 16\], value None where"),
        ((qkv()[0], None, qkv()[2]), "a value without its key; give both, or None for both"),
        (
            (qkv()[0], qkv()[1].double(), qkv()[2]),
            "a key or value of torch.float64; the pool's model is in torch.float32",
        ),
        ((*qkv()[:2], qkv()[2].half()), "a key or value of torch.float16; .* convert what is new to it"),
        ((qkv()[0], qkv()[1].requires_grad_(), qkv()[2]), "a key or value that requires gradients; serving is infer"),
    ],
)
def test_tensors_that_do_not_fit(given: Any, words: str, rig: Rig) -> None:
    with refused(words):
        rig.backend.forward(*given, rig.layers[0])


def test_a_latent_layer_takes_rows() -> None:
    rig = Rig([AttentionLayer(**LATENT)])
    rig.step(EXTEND, {rig.add()[0]: 3})
    q, rows = rig.random(3, 4, 16), rig.random(3, 16)
    with refused(r"a latent layer takes rows \[3, 16\] as key, and value None"):
        rig.backend.forward(q, rows, rows, rig.layers[0])
    rig.backend.prepare()
    out = rig.backend.forward(q, rows, None, rig.layers[0])
    assert torch.equal(rig.backend.forward(q, rows, None, rig.layers[0], save_kv_cache=False), out)
    assert torch.equal(rig.backend.forward(q, None, None, rig.layers[0]), out), "the cache has them"


def test_tokens_in_an_idle_step(rig: Rig) -> None:
    rig.backend.init_forward_metadata(ForwardBatch(IDLE, [], [], []))
    with refused("layer 0 is given 3 tokens in an idle step"):
        rig.backend.forward(*qkv(), rig.layers[0])


def test_a_row_that_is_longer_than_the_limits() -> None:
    rig = Rig(decoder(), limits=Limits(max_sequences=2, max_tokens=16, max_seqlen=8))
    row = rig.add()[0]
    rig.step(EXTEND, {row: 8})
    with refused("a row of 9 keys, and limits.max_seqlen=8 is the most that backends plan for: refuse the request"):
        rig.step(DECODE, {row: 1})


@pytest.mark.parametrize("name", ["torch_native", "toy_saves", "toy"])
def test_scales_stay_once_rows_are_stored_by_whoever_it_was(name: str, toys: Any) -> None:
    rig = Rig(decoder(1), config={"dtype": "fp8_e4m3"}, backend=name)
    rig.step(EXTEND, {rig.add()[0]: 3})
    with refused("layer 0 has rows that were stored with the scales it has"):
        rig.pool.set_scales(0, 2.0, 2.0)


def test_a_tree_is_a_tree_and_a_chain_a_chain(toys: Any) -> None:
    chain = Rig(decoder(), backend="toy_chain", topk=1)
    with refused("topk=1 verifies chains, and the batch has a tree that is none"):
        chain.step(ForwardMode.TARGET_VERIFY, {chain.add()[0]: 3}, tree=DraftTree.from_parents([[-1, 0, 0]]))
    tree = Rig(decoder(), backend="toy", topk=2)
    with refused("topk > 1 verifies trees: give the batch its tree"):
        tree.step(ForwardMode.TARGET_VERIFY, {tree.add()[0]: 3})


# A context's parts ----------------------------------------------------------------------------------------------------


def test_parts_that_do_not_belong_together() -> None:
    rig = Rig([AttentionLayer(i, 4, 2, 16, window=window) for i, window in enumerate((-1, 5))])
    other = Rig(decoder())
    with refused(r"the request table has groups with windows \[-1\], the pool \[-1, 5\]"):
        AttentionBackend(rig.layers, rig.pool, other.table, limits=LIMITS)
    wide = Rig(decoder(), page_size=8)
    with refused("table has pages of 8 tokens, the pool of 4"):
        AttentionBackend(other.layers, other.pool, wide.table, limits=LIMITS)
    with refused("limits.max_seqlen=65 is more than the request table holds of one request, 64"):
        AttentionBackend(other.layers, other.pool, other.table, limits=Limits(8, 8, 65))
    with refused("encoder_table is for models with cross layers"):
        AttentionBackend(other.layers, other.pool, other.table, limits=LIMITS, encoder_table=other.table)
    elsewhere = AttentionLayer(0, 4, 2, 16, sinks=torch.zeros(4, device="meta"))
    with refused("the sinks of layer 0 are on meta, the pool on cpu"):
        AttentionBackend([elsewhere], other.pool, other.table, limits=LIMITS)
    with refused("the pool has no layer 5"):
        AttentionBackend([AttentionLayer(5, 4, 2, 16)], other.pool, other.table, limits=LIMITS)


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"window": 3}, "layer 0 has window=3, and the pool was made for one of window=-1: give both the same layers"),
    ({"kv_heads": 4}, "kv_heads=4, and the pool was made for one of kv_heads=2"),
    ({"head_dim": 32}, r"widths=\[32, 32\], and the pool was made for one of widths=\[16, 16\]"),
    ({"v_head_dim": 8}, r"widths=\[16, 8\], and the pool"),
    ({"kind": "cross"}, "cross=True, and the pool"),
    ({"kv_heads": 1, "latent": True, "v_head_dim": 8, "scale": 0.2}, "latent=True, and the pool"),
]


@pytest.mark.parametrize("fields, words", OTHERS)
def test_a_layer_that_the_pool_was_not_made_for(fields: dict[str, Any], words: str) -> None:
    rig = Rig(decoder())
    layer = AttentionLayer(**{"layer_id": 0, "heads": 4, "kv_heads": 2, "head_dim": 16, **fields})
    with refused(words):
        AttentionBackend([layer, rig.layers[1]], rig.pool, rig.table, limits=LIMITS)


def test_layers_are_there_once() -> None:
    rig = Rig(decoder())
    with refused("at least one layer; got none"):
        AttentionBackend([], rig.pool, rig.table, limits=LIMITS)
    with refused("layers has 1, which is no AttentionLayer: "):
        AttentionBackend([rig.layers[0], 1], rig.pool, rig.table, limits=LIMITS)  # type: ignore[list-item]
    with refused("two layers have layer_id 1"):
        AttentionBackend([*rig.layers, AttentionLayer(1, 4, 2, 16, scale=0.5)], rig.pool, rig.table, limits=LIMITS)
    assert AttentionBackend(rig.layers[1:], rig.pool, rig.table, limits=LIMITS).explain(), "some of the pool's will do"


def test_pages_that_the_pool_does_not_have() -> None:
    rig = Rig(decoder(), pages=20)
    table = RequestTable(8, 64, 4, [-1], [PageAllocator(21)])
    with refused(r"gives out pages up to 20, and the pool has 20 of that group: build it with PageAllocator\(20\)"):
        AttentionBackend(rig.layers, rig.pool, table, limits=LIMITS)
    fewer = RequestTable(8, 64, 4, [-1], [PageAllocator(7)])
    AttentionBackend(rig.layers, rig.pool, fewer, limits=LIMITS)
    layers = [*decoder(1), AttentionLayer(1, 4, 2, 16, kind="cross")]
    pool = KVPool(layers, KVCacheConfig(page_size=4), [21, 20], dtype=torch.float32)
    with refused("the allocator of group 1 gives out pages up to 20, and the pool has 20"):
        AttentionBackend(layers, pool, table, limits=LIMITS, encoder_table=table)


def test_keys_of_padding_under_the_name_of_engines() -> None:
    rig = Rig(decoder(), limits=Limits(4, 16, 32, padding_seq_len=2))
    assert rig.backend.get_cuda_graph_seq_len_fill_value() == 2
