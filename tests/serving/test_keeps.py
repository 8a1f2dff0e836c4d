"""What layers keep: several formats in one pool, rows beside keys and values, and states that live as rows do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.contract import Keep
from polyattn.errors import ConfigError, InternalError, InvalidInputError
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.workspace import Limits
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams, Speculative
from polyattn.serving.kv_cache.pages import PageAllocator
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool, groups_of, pages_for
from polyattn.serving.kv_cache.prefix_cache import PrefixCache
from polyattn.serving.layer import AttentionLayer, StateLayer, keeps_of
from polyattn.serving.step.batch import ForwardBatch, ForwardMode
from polyattn.serving.step.requests import RequestTable
from polyattn.serving.step.step import StepBuffers

from .rig import Rig
from .toy_model import DIM, HEADS, ToyRunner

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
KEY = Keep("key", "token", (2, 16))
INDEX = Keep("index", "token", (132,), "uint8")
STATE = Keep("state", "request", (4, 4), "float32")


def layer(layer_id: int = 0, *keeps: Keep, **more: Any) -> AttentionLayer:
    return AttentionLayer(layer_id, **{"heads": 4, "kv_heads": 2, "head_dim": 16, "keeps": keeps, **more})


def pool_of(*layers: Any, pages: int = 6, **config: Any) -> KVPool:
    return KVPool(layers, KVCacheConfig(page_size=4, **config), pages, dtype=torch.float32, requests=3, drafts=2)


# What a layer declares ------------------------------------------------------------------------------------------------


def test_keys_and_values_are_kept_without_being_named() -> None:
    assert layer(v_head_dim=8).kept == (KEY, Keep("value", "token", (2, 8)))
    assert layer(0, STATE, INDEX).kept == (KEY, Keep("value", "token", (2, 16)), STATE, INDEX)
    fp8 = Keep("key", "token", (2, 16), "fp8_e4m3", "head", "HND")
    assert layer(0, INDEX, fp8).kept == (fp8, Keep("value", "token", (2, 16), "fp8_e4m3", "head", "HND"), INDEX)
    latent = AttentionLayer(0, 4, 1, 20, v_head_dim=16, scale=0.25, latent=True)
    assert latent.kept == (Keep("latent", "token", (20,)),)


@pytest.mark.parametrize(
    ("keeps", "more", "words"),
    [
        ([Keep("latent", "token", (16,))], {}, "keeps='?\"?latent.* a layer with latent=False keeps key and value"),
        ([KEY], {"latent": True, "kv_heads": 1, "v_head_dim": 8, "scale": 1.0}, "latent=True keeps latent"),
        ([Keep("key", "token", (4, 16))], {}, r"key with per='token', shape=\(4, 16\).* shape=\(2, 16\) and a dtype"),
        ([Keep("value", "request", (2, 16))], {}, "per='request'.*per='token'"),
        ([Keep("key", "token", (2, 16), "uint8")], {}, "dtype='uint8'.* a dtype of attention"),
        ([KEY, Keep("value", "token", (2, 16), "int8")], {}, "a layer has both in one dtype, with one kind of scales"),
        ([INDEX, INDEX], {}, "AttentionLayer 0: keeps has 'index' twice"),
        (["index"], {}, "AttentionLayer 0: keeps has 'index', a str; it is a list of Keep"),
        (INDEX, {}, None),
    ],
)
def test_keeps_that_a_layer_does_not_have(keeps: Any, more: dict[str, Any], words: str | None) -> None:
    if words is None:  # one is as good as a list of it
        assert AttentionLayer(0, 4, 2, 16, keeps=keeps).kept[2] == keeps
        return
    with pytest.raises(InvalidInputError, match=words):
        AttentionLayer(0, **{"heads": 4, "kv_heads": 2, "head_dim": 16, "keeps": keeps, **more})


@pytest.mark.parametrize(
    ("layer_id", "keeps", "words"),
    [
        (-1, [STATE], "StateLayer: layer_id=-1; a whole number of at least 0"),
        (0, [], "StateLayer 0: keeps is empty; declare what the layer keeps"),
        (0, [INDEX], "StateLayer 0: index is kept by token, which takes pages: declare it in the AttentionLayer"),
        (0, [STATE, STATE], "StateLayer 0: keeps has 'state' twice"),
        (0, 7, "StateLayer 0: keeps has 7, a int"),
    ],
)
def test_what_is_no_layer_without_pages(layer_id: Any, keeps: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        StateLayer(layer_id, keeps)


def test_a_layer_is_known_by_what_it_keeps() -> None:
    pool = pool_of(layer(0, INDEX))
    pool.check_layer(layer(0, INDEX))
    with pytest.raises(
        InvalidInputError, match=r"layer 0 has keeps=\[\], and the pool was .* keeps=\[Keep\(name=.index"
    ):
        pool.check_layer(layer(0))
    assert layer(0, INDEX).differs(layer(0)) == "keeps"


# Several formats ------------------------------------------------------------------------------------------------------

FORMATS = [
    layer(0),
    layer(1, Keep("key", "token", (2, 16), layout="HND")),
    layer(2, Keep("key", "token", (2, 16), "float16")),
    layer(3, Keep("key", "token", (2, 16), "fp8_e4m3", "head"), window=5),
    layer(4, Keep("key", "token", (2, 16), "int8", "token", "HND")),
    layer(5, Keep("value", "token", (2, 16), "fp8_e5m2"), window=5),
]


def test_each_layer_has_the_format_it_says() -> None:
    pool = pool_of(*FORMATS)
    said = [(c.kv_dtype, c.kv_scales, c.kv_layout) for c in (pool.cache(i) for i in range(6))]
    assert said == [
        ("auto", "", "NHD"),
        ("auto", "", "HND"),
        ("float16", "", "NHD"),
        ("fp8_e4m3", "head", "NHD"),
        ("int8", "token", "HND"),
        ("fp8_e5m2", "tensor", "NHD"),
    ]
    assert pool.cache(4).tensors[0].shape == (6, 2, 4, 16)
    assert pool.cache(2).tensors[0].dtype == torch.float16


def test_what_a_layer_does_not_say_is_the_pools() -> None:
    pool = pool_of(layer(0), layer(1, Keep("key", "token", (2, 16), "float32")), dtype="int8", scales="head")
    assert [pool.cache(i).kv_scales for i in (0, 1)] == ["head", ""]
    assert [pool.cache(i).kv_dtype for i in (0, 1)] == ["int8", "auto"]
    with pytest.raises(
        ConfigError, match="layer 0: a cache in int8 has no scales by block16; allowed: token, tensor, head"
    ):
        pool_of(layer(0, Keep("key", "token", (2, 16), "int8", "block16")))


@pytest.mark.parametrize("backend", ["reference", "torch_native", "torch_sdpa"])
def test_steps_over_several_formats(backend: str) -> None:
    """Each layer's results are those of dense attention over what its own cache holds (`Rig.step`)."""
    rig = Rig(FORMATS, backend=backend)
    for i in (3,):
        rig.pool.set_scales(i, torch.tensor([0.02, 0.05]), torch.tensor([0.03, 0.02]))
    a, b = rig.add(2)
    rig.step(EXTEND, {a: 9, b: 3})
    rig.step(DECODE, {a: 1, b: 1})
    c = rig.table.fork(a)
    for key in list(rig.kept):
        if key[1] == a:
            rig.kept[key[0], c] = rig.kept[key]
    rig.step(EXTEND, {c: 2, b: 4})
    rig.step(DECODE, {a: 1, c: 1, b: 1})


@pytest.mark.parametrize(("dtype", "close"), [("float32", 0.0), ("fp8_e4m3", 0.1)])
def test_paged_calls_read_each_layer_in_its_format(dtype: str, close: float) -> None:
    torch.manual_seed(0)
    layers = [layer(0), layer(1, Keep("key", "token", (2, 16), dtype, layout="HND"))]
    pool, slots = pool_of(*layers), torch.arange(4, 11)
    key, value, query = torch.randn(7, 2, 16), torch.randn(7, 2, 16), torch.randn(1, 4, 16)
    outs = []
    for i in (0, 1):
        pool.write(i, slots, key, value)
        cache = pool.cache(i)
        outs.append(
            polyattn.paged_attention(
                query,
                *cache.tensors,
                page_table=torch.tensor([[1, 2]], dtype=torch.int32),
                seq_lens=torch.tensor([7], dtype=torch.int32),
                cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
                max_seqlen_q=1,
                max_seqlen_k=7,
                causal=True,
                kv_layout=cache.kv_layout,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                backend="reference",
            )
        )
    assert torch.allclose(*outs, atol=close, rtol=close)
    assert torch.equal(*outs) is (close == 0)


# Rows beside keys and values ------------------------------------------------------------------------------------------


def indexed() -> KVPool:
    return pool_of(layer(0, INDEX, Keep("score", "token", (2, 4), "int8", "token", "HND")), layer(1))


def test_rows_beside_keys_are_written_and_read_by_slot() -> None:
    pool, slots = indexed(), torch.tensor([5, 18, 7])
    rows, score = torch.randint(0, 255, (3, 132), dtype=torch.uint8), torch.randn(3, 2, 4)
    pool.write_kept(0, "index", slots, rows)
    pool.write_kept(0, "score", slots, score)
    assert pool.kept(0, "index").shape == (6, 4, 132)
    assert pool.kept(0, "score").shape == (6, 2, 4, 4)
    assert torch.equal(pool.kept(0, "index")[4, 2], rows[1])
    assert torch.equal(pool.read_kept(0, "index", slots, torch.float32), rows)
    assert torch.allclose(pool.read_kept(0, "score", slots, torch.float32), score, atol=0.02)


def test_pages_and_tokens_take_all_their_rows_along() -> None:
    pool, slots = indexed(), torch.tensor([5, 18])
    rows, score = torch.randint(0, 255, (2, 132), dtype=torch.uint8), torch.randn(2, 2, 4)
    pool.write_kept(0, "index", slots, rows)
    pool.write_kept(0, "score", slots, score)
    pool.copy(0, [1], [3])
    pool.move(0, [18], [9])
    moved = torch.tensor([13, 9])
    assert torch.equal(pool.read_kept(0, "index", moved, torch.float32), rows)
    assert torch.allclose(pool.read_kept(0, "score", moved, torch.float32), score, atol=0.02)
    assert pool.bytes_per_token(0) == pool_of(layer(0), layer(1)).bytes_per_token(0) + 132 + 2 * (4 + 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda p, s: p.kept(0, "indx"),
            "layer 0 keeps no 'indx' by token .* Did you mean 'index'.* else it keeps: ind",
        ),
        (lambda p, s: p.kept(1, "index"), "layer 1 keeps no 'index' by token .* What else it keeps: nothing"),
        (lambda p, s: p.kept(0, "key"), "write, read and cache are for keys, values and latent rows"),
        (lambda p, s: p.kept(9, "index"), "the pool has no layer 9"),
        (
            lambda p, s: p.write_kept(0, "index", s, torch.zeros(2, 132)),
            "index is .2, 132. torch.float32 on cpu; a torch",
        ),
        (
            lambda p, s: p.write_kept(0, "index", s, torch.zeros(2, 131).byte()),
            r"a torch.uint8 tensor \[T, D\] = .2, 132",
        ),
        (lambda p, s: p.write_kept(0, "score", s, torch.zeros(2, 2, 4).int()), "a float tensor"),
        (lambda p, s: p.write_kept(0, "index", s.int(), torch.zeros(2, 132).byte()), "slots is .2. torch.int32 on cpu"),
    ],
)
def test_rows_that_are_refused(call: Callable[[KVPool, Tensor], Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        call(indexed(), torch.tensor([5, 6]))


@pytest.mark.parametrize("more", [{"dtype": "fp8_e4m3"}, {"scales": "tensor", "dtype": "int8"}])
def test_rows_for_all_heads_have_no_scales_of_the_pools(more: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"layer 0: index \[128\] in .* has scales by tensor, .* keep bytes .uint8."):
        pool_of(layer(0, Keep("index", "token", (128,), **more)))


# States ---------------------------------------------------------------------------------------------------------------


def hybrid(requests: int = 3, **more: Any) -> tuple[KVPool, RequestTable, PageAllocator]:
    pool = pool_of(layer(0), StateLayer(1, [STATE]))
    allocator = PageAllocator(6)
    return pool, RequestTable(requests, 16, 4, [-1], [allocator], states=pool.states, **more), allocator


def test_states_live_as_rows_do() -> None:
    pool, table, _ = hybrid()
    assert pool.states is not None
    state = pool.states.tensor(1, "state")
    row = table.add()
    state[row] = 5
    other = table.fork(row)
    assert state[other].eq(5).all()
    state[other] = 6
    assert pool.states.live == sorted([row, other])
    table.check()
    table.remove(row)
    assert pool.states.live == [other]
    again = table.add()
    assert again == row
    assert not state[again].any()
    assert state[other].eq(6).all()
    pool.states.drop(again)
    with pytest.raises(InternalError, match=r"rows .* are in use, and the states of rows"):
        table.check()


def test_a_row_that_was_removed_is_not_forked() -> None:
    _, table, _ = hybrid()
    row = table.add()
    table.remove(row)
    with pytest.raises(InvalidInputError, match=f"row {row} is no request"):
        table.fork(row)
    rows = [table.add() for _ in range(3)]
    with pytest.raises(InvalidInputError, match="all 3 rows are in use"):
        table.fork(rows[0])
    table.check()


def test_states_and_table_are_of_one_size() -> None:
    with pytest.raises(InvalidInputError, match="the table has rows for 4 requests, and states for 3: build both"):
        hybrid(4)


def test_a_cached_prefix_has_no_states() -> None:
    _, table, allocator = hybrid()
    cache = PrefixCache(4, [-1], [allocator])
    row = table.add()
    table.extend(row, 8)
    cache.insert(list(range(8)), [table.pages(row, 0)])
    match = cache.match([*range(8), 9])
    new = table.add()
    with pytest.raises(
        InvalidInputError, match="cannot begin with 8 cached tokens: some layers keep a state by request"
    ):
        table.adopt(new, match)


def test_what_a_pool_with_states_needs() -> None:
    layers = [layer(0), StateLayer(1, [STATE])]
    assert [group.layer_ids for group in groups_of(layers)] == [(0,)]
    with pytest.raises(InvalidInputError, match="some layers keep a state by request, and requests=0"):
        KVPool(layers, KVCacheConfig(), 2, dtype=torch.float32)
    with pytest.raises(
        InvalidInputError, match=r"no layer has pages: .* RequestStates\(keeps_of\(layers\), requests\)"
    ):
        groups_of(layers[1:])
    with pytest.raises(InvalidInputError, match="the pool has no layer 1"):
        pool_of(*layers).cache(1)
    assert pool_of(layer(0)).states is None
    assert keeps_of(layers)[1] == (STATE,)


def test_a_backend_is_made_with_the_table_that_knows_the_states() -> None:
    layers = [layer(0), StateLayer(1, [STATE])]
    pool, table, _ = hybrid()
    limits = Limits(3, 8, 16)
    assert list(AttentionBackend(layers, pool, table, limits=limits).layers) == [0]
    without = RequestTable(3, 16, 4, [-1], [PageAllocator(6)])
    with pytest.raises(InvalidInputError, match=r"other states by request.* build .* states=pool.states"):
        AttentionBackend(layers, pool, without, limits=limits)
    with pytest.raises(InvalidInputError, match="layers has 3, which is no AttentionLayer"):
        AttentionBackend([layers[0], 3], pool, table, limits=limits)  # type: ignore[list-item]


def test_memory_of_states_is_not_memory_of_pages() -> None:
    layers, config = [layer(0), StateLayer(1, [STATE])], KVCacheConfig(page_size=4)
    without = pages_for(1 << 16, layers, config, torch.float32)
    assert without == pages_for(1 << 16, layers[:1], config, torch.float32)
    less = pages_for(1 << 16, layers, config, torch.float32, requests=7, drafts=3)
    page = 4 * 2 * 2 * 16 * 4
    assert less == ((1 << 16) - 8 * 4 * 64) // page < without
    pool = KVPool(layers, config, less, dtype=torch.float32, requests=7, drafts=3)
    assert pool.nbytes <= 1 << 16


@pytest.mark.parametrize("static", [False, True])
def test_a_step_says_where_the_states_of_its_rows_are(static: bool) -> None:
    _, table, _ = hybrid()
    rows = [table.add() for _ in range(3)]
    for row in rows:
        table.extend(row, 2)
    buffers = StepBuffers(4, 8, 4, 1, static=static)
    batch = ForwardBatch(DECODE, rows[:2], [2, 2], [1, 1], padding=2)
    (step,) = buffers.build(batch, table)
    slots = step.state_slots
    assert slots.dtype == torch.int64
    assert slots.tolist() == [*rows[:2], -1, -1]
    assert step.at(2).state_slots is slots
    (step,) = buffers.build(ForwardBatch(DECODE, rows[1:], [2, 2], [1, 1], padding=2), table)
    assert step.state_slots.tolist() == [*rows[1:], -1, -1]
    if static:
        assert step.state_slots.data_ptr() == slots.data_ptr(), "a graph reads it where it was"


def test_an_attention_layer_may_keep_a_state_too() -> None:
    pool = pool_of(layer(0, STATE, INDEX))
    assert pool.states is not None
    assert pool.states.tensor(0, "state").shape == (4, 4, 4)
    with pytest.raises(InvalidInputError, match=r"layer 0 keeps no 'state' by token .* else it keeps: state, index"):
        pool.kept(0, "state")


def test_an_engine_leaves_layers_the_layout_they_say() -> None:
    """The layout that phases share is found for the others."""
    runner = ToyRunner()
    said = Keep("key", "token", (2, DIM), layout="HND")
    runner.layers = [dataclasses.replace(runner.layers[0], keeps=[said]), runner.layers[1]]
    engine = Engine(runner, EngineConfig(cache=KVCacheConfig(page_size=4), max_requests=2, max_tokens=32))
    assert [engine.memory.pool.cache(i).kv_layout for i in (0, 1)] == ["HND", "NHD"]
    (output,) = engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6))
    assert list(output.token_ids) == greedy(runner, PROMPTS[0], 6)
    runner.layers = [dataclasses.replace(layer, keeps=[said]) for layer in runner.layers]
    pool = Engine(runner, EngineConfig(max_requests=2, max_tokens=32)).memory.pool
    assert [pool.cache(i).kv_layout for i in (0, 1)] == ["HND", "HND"]


# A model --------------------------------------------------------------------------------------------------------------


class HybridRunner(ToyRunner):
    """The toy with a recurrent layer between its two: a decayed sum over the tokens before, and the last token kept as
    the tail of a convolution."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        width = HEADS * DIM
        self.recurrent = StateLayer(
            7, [Keep("state", "request", (width,), "float32"), Keep("conv", "request", (1, width))]
        )
        self.attending = self.layers
        self.layers: list[Any] = [self.attending[0], self.recurrent, self.attending[1]]

    @staticmethod
    def recur(state: Tensor, tail: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return 0.8 * state + torch.tanh(x + 0.5 * tail[0]), x[None]

    def serve(self, backend: Any) -> Any:
        states = backend.pool.states
        state, conv = (states.tensor(7, name) for name in ("state", "conv"))

        def mix(x: Tensor, batch: Any, steps: Any) -> Tensor:
            out = torch.empty_like(x)
            for n, slot in enumerate(steps[0].state_slots.tolist()):
                start, stop = batch.cu_seqlens_q[n : n + 2]
                left: dict[int, tuple[Tensor, Tensor]] = {-1: (state[slot].clone(), conv[slot].clone())}
                verify = batch.mode is VERIFY
                for i, token in enumerate(range(start, stop)):
                    parent = int(batch.tree.parents[n, i]) if verify else i - 1
                    left[i] = self.recur(*left[parent], x[token])
                    out[token] = left[i][0]
                    if verify:
                        kept = (states.drafted(7, name) for name in ("state", "conv"))
                        for drafted, value in zip(kept, left[i], strict=True):
                            drafted[slot, i] = value
                if not verify:
                    state[slot], conv[slot] = left[stop - start - 1]
            return out

        def forward(ids: Tensor, positions: Tensor, keep: Tensor | None, batch: Any, steps: Any) -> Tensor:
            logits = self._logits(
                ids, positions, lambda layer, q, k, v: backend.forward(q, k, v, layer), lambda x: mix(x, batch, steps)
            )
            return logits if keep is None else logits[keep]

        return forward

    def dense(self, tokens: Sequence[int]) -> Tensor:
        found: list[Tensor] = []

        def mix(x: Tensor) -> Tensor:
            state, tail = torch.zeros(HEADS * DIM), torch.zeros(1, HEADS * DIM)
            outs = []
            for token in x:
                state, tail = self.recur(state, tail, token)
                outs.append(state)
            return torch.stack(outs)

        def run(ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
            found.append(self._logits(ids, positions, attend, mix))
            return found[-1]

        plain, self._run = self._run, run  # type: ignore[method-assign]
        try:
            return super().dense(tokens)
        finally:
            self._run = plain  # type: ignore[method-assign]

    def _logits(self, ids: Tensor, positions: Tensor, attend: Any, mix: Callable[[Tensor], Tensor]) -> Tensor:
        x = self.embedding[ids] + self.places[positions]
        for n, (layer, weight) in enumerate(zip(self.attending, self.inputs, strict=True)):
            qkv = (x @ weight).unflatten(-1, (-1, DIM))
            out = attend(layer, *qkv.split([HEADS, 2, 2], 1)).flatten(1)
            x = torch.nn.functional.normalize(x + out, dim=-1) * (HEADS * DIM) ** 0.5
            if not n:
                x = torch.nn.functional.normalize(x + mix(x), dim=-1) * (HEADS * DIM) ** 0.5
        return x @ self.head


def greedy(runner: ToyRunner, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(runner.dense(text)[-1].argmax()))
    return text[len(prompt) :]


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [1, 6, 1, 8, 0, 3, 3]]


@pytest.mark.slow(keep=5)
@pytest.mark.filterwarnings("ignore:polyattn. prompts that begin alike:RuntimeWarning")
@pytest.mark.parametrize(("drafts", "seed"), [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_hybrid_model_is_served_token_for_token(drafts: int, seed: int, page_size: int) -> None:
    """Chunked prefill, mixed batches, preemption and drafts, most of which are accepted (by the model itself) or few:
    every way gives what the model alone gives."""
    runner = HybridRunner()
    spec = Speculative(HybridRunner(seed), steps=2, topk=drafts) if drafts else None
    config = EngineConfig(
        cache=KVCacheConfig(page_size=page_size), max_requests=3, max_tokens=32, max_batch_tokens=6,
        pages=1 + 40 // page_size, speculative=spec,
    )  # fmt: skip
    engine = Engine(runner, config)
    outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=9))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.token_ids) == greedy(runner, prompt, 9)
    engine.check()


@pytest.mark.filterwarnings("ignore:polyattn. prompts that begin alike:RuntimeWarning")
def test_samples_of_one_prompt_are_forks_of_its_states() -> None:
    runner = HybridRunner()
    engine = Engine(runner, EngineConfig(cache=KVCacheConfig(page_size=4), max_requests=4, max_tokens=32))
    first, _ = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=6), n=2)
    while len(engine.tokens_of(first)) < 2:
        engine.step()
    engine.fork(first)
    texts = []
    while engine.unfinished:
        texts += [list(output.token_ids) for output in engine.step()]
    assert texts == [greedy(runner, PROMPTS[0], 6)] * 3


def test_prefix_reuse_is_off_for_hybrid_models_and_said() -> None:
    with pytest.warns(RuntimeWarning, match="prompts that begin alike are run anew .* keep a state by request"):
        engine = Engine(HybridRunner(), EngineConfig(max_requests=2, max_tokens=32))
    assert engine.memory.prefixes is None
