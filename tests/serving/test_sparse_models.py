"""Models of DeepSeek sparse attention, DeepSeek-V3.2 and GLM, against transformers' own passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from polyattn.contract import Keep
from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.integrations.transformers.serving import CausalLMRunner
from polyattn.semantics.token_index import index_scores, top_tokens, unpack_index
from polyattn.serving import (
    AttentionBackend,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    KVCacheConfig,
    KVPool,
    Limits,
    PageAllocator,
    RequestTable,
)
from polyattn.serving.engine import Engine, EngineConfig, SamplingParams, Speculative
from polyattn.serving.mla import Index, LatentAttention, lists

from .models import _COMMON, llama, prompt

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "initializer_range": 0.4,
}


def sparse(name: str, **own: Any) -> Any:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"not run: transformers {transformers.__version__} has no {name}")
    if name == "GlmMoeDsa":
        own = {"indexer_types": ["full", "full", "shared"], **own}
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **SIZES, **own})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_experts_implementation("eager")  # its kernels take no float64
    model = model.to(torch.float64)
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    return model


def alone(model: Any, tokens: list[int], count: int) -> list[int]:
    ids = torch.tensor([tokens])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
def test_generate(name: str, graphs: bool) -> None:
    model = sparse(name)
    engine = Engine(CausalLMRunner(model), EngineConfig(KVCacheConfig(page_size=4), max_batch_tokens=16, graphs=graphs))
    prompts = [prompt(n, n) for n in (3, 9, 21, 40)]
    for tokens, output in zip(prompts, engine.generate(prompts, SamplingParams(max_new_tokens=8)), strict=True):
        assert output.token_ids == alone(model, tokens, 8)
    again = engine.generate(prompts[-1:], SamplingParams(max_new_tokens=8))[0]
    assert again.cached_tokens
    assert again.token_ids == alone(model, prompts[-1], 8)


def test_drafts_in_a_chain() -> None:
    model = sparse("DeepseekV32")
    spec = Speculative(CausalLMRunner(llama().to(torch.float64)), 3, 1, 0)
    engine = Engine(CausalLMRunner(model), EngineConfig(KVCacheConfig(page_size=4), speculative=spec))
    assert engine.generate([prompt(21, 21)], SamplingParams(max_new_tokens=8))[0].token_ids == alone(
        model, prompt(21, 21), 8
    )


def test_lists_longer_than_any_text_are_dense_attention() -> None:
    """The indexer decides nothing then; with fewer it does."""
    outputs = {}
    for topk in (6, 64, 100):
        engine = Engine(
            CausalLMRunner(sparse("DeepseekV32", index_topk=topk)), EngineConfig(KVCacheConfig(page_size=4))
        )
        outputs[topk] = engine.generate([prompt(40, 40)], SamplingParams(max_new_tokens=8))[0].token_ids
    assert outputs[64] == outputs[100] != outputs[6]


def test_whole_keys_are_refused() -> None:
    with pytest.raises(
        UnsupportedRequestError, match=r"latent=False for DeepseekV32ForCausalLM, .* leave latent at None"
    ):
        CausalLMRunner(sparse("DeepseekV32"), latent=False)


def test_an_indexer_that_scores_otherwise_is_refused() -> None:
    model = sparse("DeepseekV32")
    indexer = model.model.layers[1].self_attn.indexer
    own = indexer.forward
    indexer.forward = lambda hidden, *rest, **more: own(-hidden, *rest, **more)
    with pytest.raises(UnsupportedRequestError, match=r"DeepseekV32Indexer lists other tokens than its parts"):
        CausalLMRunner(model)


def world(keep: Keep, topk: int = 4, backend: str | None = None) -> tuple[Any, LatentAttention, AttentionLayer, Any]:
    layer = AttentionLayer(0, 2, 1, 20, 16, scale=0.3, latent=True, token_topk=topk, keeps=[keep])
    pool = KVPool([layer], KVCacheConfig(page_size=4), 16, dtype=torch.float32)
    table = RequestTable(2, 40, 4, [-1], [PageAllocator(16)])
    attention = AttentionBackend([layer], pool, table, limits=Limits(2, 40, 40), backend=backend)
    return table, LatentAttention(attention, pool), layer, torch.nn.Linear(16, 2 * 20, bias=False).requires_grad_(False)


def test_index_keys_of_eight_bits() -> None:
    torch.manual_seed(0)
    found = []
    index = Index(torch.randn(30, 8, 16), torch.randn(30, 16), torch.rand(30, 8))
    q_nope, q_pe, rows = torch.randn(30, 2, 10), torch.randn(30, 2, 4), torch.randn(30, 20)
    weight = torch.randn(40, 16)
    for keep in (Keep("index", "token", (16,), "float32"), Keep("index", "token", (20,), "uint8")):
        table, attention, layer, up = world(keep)
        module = torch.nn.Module()
        module.kv_b_proj, up.weight.data = up, weight
        table.extend(row := table.add(), 30)
        batch = ForwardBatch(ForwardMode.EXTEND, [row], [30], [30])
        steps = attention.backend.plan(batch)
        attention.backend.prepare()
        attention.plan(batch, steps)
        attention.forward(module, q_nope, q_pe, rows, layer, index)
        found.append(attention._lists.of(layer, index))
    same = [len({*a} & {*b}) for a, b in zip(found[0].tolist(), found[1].tolist(), strict=True)]
    assert sum(same) > 0.85 * 4 * 30  # neighbours at the edge change places
    assert found[0][:3].tolist() == found[1][:3].tolist() or same[:3] == [2, 3, 4]


class Scorer:
    """The kernels of a package, by the definition: pages in order, tokens that are not seen are NaN."""

    def __init__(self) -> None:
        self.calls = 0

    def index_scores(
        self, query: Any, weights: Any, cache: Any, table: Any, lens: Any, starts: Any, longest: int
    ) -> Any:
        self.calls += 1
        scores = torch.full((len(query), table.shape[1] * cache.shape[1]), float("nan"))
        for n, keys in enumerate(lens.tolist()):
            some = slice(int(starts[n]), int(starts[n + 1]))
            rows = cache[table[n].long()].flatten(0, 1)[:keys]
            rows = unpack_index(rows) if rows.dtype == torch.uint8 else rows
            scores[some, :keys] = index_scores(query[some], rows, weights[some])
        return scores


class Lister(Scorer):
    """One that lists the tokens too."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = 0

    def top_tokens(self, scores: Any, seen: Any, topk: int) -> Any:
        assert (scores.ndim, scores.dtype, seen.shape) == (2, torch.float32, scores.shape[:1])
        self.listed += len(scores)
        return top_tokens(scores, seen, topk)


@pytest.mark.parametrize("room", [2**26, 100])
@pytest.mark.parametrize("keep", [Keep("index", "token", (16,), "float32"), Keep("index", "token", (20,), "uint8")])
def test_scores_by_the_kernels_of_a_package(keep: Keep, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, lister = [], Lister()
    for scorer in (None, Scorer(), lister):
        monkeypatch.setattr(lists, "device_ops", lambda _, scorer=scorer: scorer)
        monkeypatch.setattr(lists, "_ROOM", room)
        torch.manual_seed(0)
        table, attention, layer, _ = world(keep)
        one, two = table.add(), table.add()
        for mode, new in ((ForwardMode.EXTEND, {one: 21, two: 3}), (ForwardMode.DECODE, {one: 1, two: 1})):
            for row, count in new.items():
                table.extend(row, count)
            counts = list(new.values())
            batch = ForwardBatch(mode, list(new), [table.length(row) for row in new], counts)
            attention.plan(batch, attention.backend.plan(batch))
            attention.backend.prepare()
            total = sum(counts)
            index = Index(torch.randn(total, 8, 16), torch.randn(total, 16), torch.rand(total, 8))
            attention._lists.write(layer, index)
            found.append(attention._lists.of(layer, index).sort(1).values)
        assert scorer is None or scorer.calls >= 2
    for own, other in zip(2 * found[:2], found[2:], strict=True):
        assert torch.equal(own, other)
    assert lister.listed == 21 + 3 + 2


def test_a_layer_without_lists_before_it() -> None:
    table, attention, layer, up = world(Keep("index", "token", (16,), "float32"))
    module = torch.nn.Module()
    module.kv_b_proj = up
    table.extend(row := table.add(), 8)
    batch = ForwardBatch(ForwardMode.EXTEND, [row], [8], [8])
    attention.plan(batch, attention.backend.plan(batch))
    attention.backend.prepare()
    with pytest.raises(InvalidInputError, match="layer 0 has no indexer and takes the lists of the layer before it"):
        attention.forward(module, torch.zeros(8, 2, 10), torch.zeros(8, 2, 4), torch.zeros(8, 20), layer)
    with pytest.raises(InvalidInputError, match=r"None as value; a layer with token_topk takes its lists there"):
        attention.backend.forward(torch.zeros(8, 2, 20), torch.zeros(8, 20), None, layer)


def test_backends_that_read_no_lists_are_refused() -> None:
    with pytest.raises(UnsupportedRequestError, match=r"torch_sdpa.*token_topk=4 is not declared"):
        world(Keep("index", "token", (16,), "float32"), backend="torch_sdpa")


@pytest.mark.parametrize("fields", [{"latent": False, "scale": None}, {"window": 3}])
def test_layers_that_list_nothing(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="token_topk=4; only a latent layer without a window lists tokens"):
        AttentionLayer(**{"layer_id": 0, "heads": 2, "kv_heads": 1, "head_dim": 20, "v_head_dim": 16, "scale": 0.3,
                          "latent": True, "token_topk": 4, **fields})  # fmt: skip
