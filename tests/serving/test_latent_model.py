"""DeepSeek-shaped models of transformers on a pool of latent rows: hidden states as the model's own eager attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.integrations.transformers.latent import replaced
from polyattn.serving import PageAllocator, RequestTable
from polyattn.serving.attention.backend import AttentionBackend
from polyattn.serving.attention.workspace import Limits
from polyattn.serving.kv_cache.pool import KVCacheConfig, KVPool
from polyattn.serving.mla import LatentAttention, LatentPolicy
from polyattn.serving.step.batch import ForwardBatch, ForwardMode

transformers = pytest.importorskip("transformers")

from transformers.modeling_utils import AttentionInterface  # noqa: E402

SERVED = "latent_pool"
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
# Norms, softmax and rotations are in float32 in the models' own code, whatever their dtype.
EXACT = {torch.float64: 1e-6, torch.float32: 2e-5}
FORMS = {
    "absorbed": LatentPolicy(),
    "one_shot": LatentPolicy(threshold=1),
    "chunked": LatentPolicy(threshold=1, one_shot_tokens=0, chunk=7),
}


@pytest.fixture
def served() -> Iterator[str]:
    """The name of an attention implementation without masks, whose function nobody may reach."""

    def unreached(*_: Any, **__: Any) -> Any:
        raise AssertionError("the forward of every attention module is replaced")

    AttentionInterface.register(SERVED, unreached)
    yield SERVED
    del AttentionInterface._global_mapping[SERVED]


class Server:
    """Steps of a model over a pool of its latent rows."""

    def __init__(self, model: Any, policy: LatentPolicy) -> None:
        self.model, dtype = model, model.dtype
        # The pool knows the layers before anything is replaced: its forward is given afterwards.
        self.replacement = replaced(model, lambda *given: self.attention.forward(*given))
        layers = self.replacement.layers
        pool = KVPool(layers, KVCacheConfig(page_size=4), 30, dtype=dtype)
        self.table = RequestTable(4, 64, 4, [-1], [PageAllocator(30)])
        self.backend = AttentionBackend(layers, pool, self.table, limits=Limits(4, 64, 64))
        self.attention = LatentAttention(self.backend, pool, policy)

    @torch.no_grad()
    def step(self, mode: ForwardMode, new: dict[int, Tensor]) -> tuple[Tensor, ...]:
        for row, tokens in new.items():
            self.table.extend(row, len(tokens))
        counts = [len(tokens) for tokens in new.values()]
        batch = ForwardBatch(mode, list(new), [self.table.length(row) for row in new], counts)
        steps = self.backend.plan(batch)
        self.backend.prepare()
        self.attention.plan(batch, steps)
        tokens, places = torch.cat(list(new.values()))[None], torch.tensor(batch.positions())[None]
        return self.model(tokens, position_ids=places, use_cache=False)[0][0].split(counts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "kind, changes",
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"rope_parameters": YARN, "q_lora_rank": None, "rope_interleave": False}),
        ("deepseek_v2", {"rope_parameters": YARN}),
    ],
    ids=["v3", "v3-yarn-halves-no-q-lora", "v2-yarn"],
)
@pytest.mark.parametrize("dtype", list(EXACT), ids=["fp64", "fp32"])
def test_hidden_states_over_a_pool_are_the_models_own(dtype, kind, changes, form, served):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 97, (length,), generator=generator) for length in (15, 22)]
    with torch.no_grad():
        wanted = [model(text[None], use_cache=False)[0][0] for text in texts]
    model.set_attn_implementation(served)
    server = Server(model, FORMS[form])
    rows = [server.table.add() for _ in texts]
    done = [0, 0]

    def run(mode: ForwardMode, *counts: int) -> str:
        parts = {row: text[start : start + n] for row, text, start, n in zip(rows, texts, done, counts, strict=True)}
        for i, (got, n) in enumerate(zip(server.step(mode, parts), counts, strict=True)):
            own = wanted[i][done[i] : done[i] + n]
            assert got.shape == own.shape
            assert float((got.double() - own.double()).norm() / own.double().norm()) < EXACT[dtype]
            done[i] += n
        return server.attention.decision.form

    with server.replacement:
        assert run(ForwardMode.EXTEND, 9, 5) == "unabsorbed"
        assert run(ForwardMode.EXTEND, 3, 14) == form
        assert [run(ForwardMode.DECODE, 1, 1) for _ in range(3)] == ["absorbed"] * 3
    assert done == [15, 22]
