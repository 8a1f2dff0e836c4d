"""SGLang's own classes with polyattn behind them, on a CPU: its registry, pools, batches and layers, and the selector
and layers of its image and video models. One rank; no model is loaded."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import polyattn
from polyattn.integrations import sglang as host
from polyattn.video import Place

MODULES = ("sglang.srt.layers.attention.attention_registry", "sglang.multimodal_gen.runtime.layers.attention.layer")
DIFFUSION = "sglang.multimodal_gen.runtime"
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
BEFORE, AFTER = (4, 5), (6, 9)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    for module in MODULES:
        try:
            importlib.import_module(module)
        except Exception as exc:  # noqa: BLE001 - of any package that SGLang imports
            pytest.skip(f"SGLang cannot be imported here ({type(exc).__name__}: {exc}); nox -s engines installs it")


def by_hand(q: Any, k: Any, v: Any, scale: float, *, causal: bool) -> torch.Tensor:
    """One sequence in fp64: q [S, H, D], k and v [L, H_kv, *]."""
    q, k, v = (one.double() for one in (q, k, v))
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    logits = torch.einsum("ihd,jhd->hij", q, k) * scale
    if causal:
        logits = logits.masked_fill(~torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)), -torch.inf)
    return torch.einsum("hij,jhd->ihd", logits.softmax(-1), v)


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


# Language models ----------------------------------------------------------------------------------------------------


def test_its_plugin_function_registers_a_choice_and_a_backend() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    host.register()
    host.register()
    assert choices.ATTENTION_BACKEND_CHOICES.count("polyattn") == 1
    runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=None, page_size=1)
    found = attention_registry.ATTENTION_BACKENDS["polyattn"](runner)
    assert type(found).__name__ == "PolyattnAttnBackend"
    assert isinstance(found, importlib.import_module("sglang.srt.layers.attention.base_attn_backend").AttentionBackend)


class Rig:
    """Two requests in pools of SGLang, whose pages are scattered."""

    def __init__(self, *, latent: bool = False, page: int = PAGE) -> None:
        from sglang.srt.layers.attention import attention_registry
        from sglang.srt.mem_cache import memory_pool as pools

        torch.manual_seed(0)
        requests = pools.ReqToTokenPool(4, 32, "cpu", False)
        places = torch.randperm(15)[:8] + 1
        for row in range(2):
            slots = (places[row * 4 : row * 4 + 4, None] * PAGE + torch.arange(PAGE)).flatten()
            requests.write((row + 1, slice(0, 16)), slots.int())
        size = (16 * PAGE, page, torch.float32)
        pool = (
            pools.MLATokenToKVPool(*size, DIM, 8, 1, "cpu", False)
            if latent
            else pools.MHATokenToKVPool(*size, KV_HEADS, DIM, 1, "cpu", False)
        )
        self.table = requests.req_to_token
        host.register()
        self.backend = attention_registry.ATTENTION_BACKENDS["polyattn"](
            SimpleNamespace(
                req_to_token_pool=requests, token_to_kv_pool=pool, page_size=page, dtype=torch.float32,
                use_mla_backend=latent,
            )
        )  # fmt: skip

    def batch(self, mode: str, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        where = torch.cat([self.table[row + 1, a:b] for row, (a, b) in enumerate(zip(before, after, strict=True))])
        new = torch.tensor(after) - torch.tensor(before)
        return ForwardBatch(
            forward_mode=ForwardMode[mode], batch_size=2, input_ids=torch.zeros(len(where), dtype=torch.long),
            req_pool_indices=torch.tensor([1, 2]), seq_lens=torch.tensor(after), out_cache_loc=where.long(),
            seq_lens_sum=sum(after), seq_lens_cpu=torch.tensor(after), extend_seq_lens=new,
            extend_seq_lens_cpu=new.tolist(), extend_prefix_lens=torch.tensor(before),
            extend_prefix_lens_cpu=list(before),
        )  # fmt: skip

    def run(self, layer: Any, q: Any, k: Any, v: Any, batch: Any) -> torch.Tensor:
        """A step of one layer, as a model calls it."""
        from sglang.srt.model_executor import forward_context as context
        from sglang.srt.runtime_context import get_parallel

        self.backend.init_forward_metadata(batch)
        with get_parallel().override(dcp_enabled=False), context.forward_context(context.ForwardContext(self.backend)):
            assert context.get_token_to_kv_pool() is self.backend.token_to_kv_pool
            assert context.get_req_to_token_pool().req_to_token is self.table
            out: torch.Tensor = layer(q, k, v, batch)
        return out


STEPS = [
    ("EXTEND", (0, 0), BEFORE),
    ("EXTEND", BEFORE, AFTER),
    ("DECODE", AFTER, (7, 10)),
    ("DECODE", (7, 10), (8, 11)),
]


@pytest.mark.parametrize("page", [1, PAGE])
def test_its_batches_pools_and_layers_give_what_the_formula_gives(page: int) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    rig, layer = Rig(page=page), RadixAttention(HEADS, DIM, 0.3, KV_HEADS, layer_id=0)
    keys, values = ([torch.randn(16, KV_HEADS, DIM) for _ in range(2)] for _ in range(2))
    for mode, before, after in STEPS:
        batch = rig.batch(mode, before, after)
        k, v = (torch.cat([one[a:b] for one, a, b in zip(rows, before, after, strict=True)]) for rows in (keys, values))
        q = torch.randn(len(k), HEADS * DIM)
        out, at = rig.run(layer, q, k.flatten(1), v.flatten(1), batch), 0
        for row, (a, b) in enumerate(zip(before, after, strict=True)):
            some = slice(at, at := at + b - a)
            want = by_hand(q[some].view(-1, HEADS, DIM), keys[row][:b], values[row][:b], 0.3, causal=True)
            close(out[some], want.flatten(1))


def test_its_latent_pool_is_read_absorbed() -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    rig, layer = Rig(latent=True), RadixAttention(HEADS, DIM + 8, 0.3, 1, layer_id=0, v_head_dim=DIM)
    rows = [torch.randn(16, 1, DIM + 8) for _ in range(2)]
    for mode, before, after in STEPS:
        batch, k = (
            rig.batch(mode, before, after),
            torch.cat([r[a:b] for r, a, b in zip(rows, before, after, strict=True)]),
        )
        q = torch.randn(len(k), HEADS, DIM + 8)
        out, at = rig.run(layer, q, k, k[..., :DIM], batch), 0
        for row, (a, b) in enumerate(zip(before, after, strict=True)):
            some = slice(at, at := at + b - a)
            close(out[some], by_hand(q[some], rows[row][:b], rows[row][:b, :, :DIM], 0.3, causal=True).flatten(1))


# Images and videos --------------------------------------------------------------------------------------------------


@pytest.fixture
def diffusion(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """SGLang's layers on one rank with the hook in place; gives what its command was told."""
    monkeypatch.setenv("POLYATTN_SGLANG_DIFFUSION", "1")
    monkeypatch.setenv("SGLANG_DIFFUSION_PLATFORM_OVERRIDE", "cpu")
    plugins = importlib.import_module(f"{DIFFUSION}.platforms.plugins")
    layers = importlib.import_module(f"{DIFFUSION}.layers.attention.layer")
    selector = importlib.import_module(f"{DIFFUSION}.layers.attention.selector")
    args = SimpleNamespace(
        attention_backend=None, attention_backend_config=None, kv_gather_degree=1, is_arg_explicitly_set=bool,
        enable_attention_backend_autotune=False,
        pipeline_config=SimpleNamespace(dit_config=SimpleNamespace(patch_size=(1, 2, 2), num_layers=3)),
    )  # fmt: skip
    platform = importlib.import_module(f"{DIFFUSION}.platforms.cpu").CpuPlatform
    before = vars(platform)["get_attn_backend_cls_str"]
    sys.modules.pop("polyattn.integrations.sglang.diffusion", None)
    host.register_diffusion()
    plugins.HookRegistry.apply_hooks()
    ours = importlib.import_module("polyattn.integrations.sglang.diffusion")
    for module in (selector, ours, importlib.import_module(f"{DIFFUSION}.server_args")):
        monkeypatch.setattr(module, "get_global_server_args", lambda: args)
    for name, value in {
        "get_ring_parallel_world_size": 1, "get_sp_world_size": 1, "get_sp_parallel_rank": 0,
        "get_sequence_parallel_world_size": 1, "get_compute_dtype": torch.float32,
    }.items():  # fmt: skip
        monkeypatch.setattr(layers, name, lambda value=value: value)
    monkeypatch.setattr(ours, "get_compute_dtype", lambda: torch.float32)
    for name in ("sequence_model_parallel_all_to_all_4D", "sequence_model_parallel_all_gather"):
        monkeypatch.setattr(layers, name, lambda x, **_: x)
    selector._cached_get_attn_backend.cache_clear()
    args.layers, args.selector = layers, selector
    yield args
    type.__setattr__(platform, "get_attn_backend_cls_str", before)
    plugins.HookRegistry.reset()
    selector._cached_get_attn_backend.cache_clear()
    polyattn.configure()


@contextlib.contextmanager
def denoising(step: int) -> Iterator[None]:
    """A pass of a model, told as SGLang tells it."""
    context = importlib.import_module(f"{DIFFUSION}.managers.forward_context")
    batch = SimpleNamespace(
        raw_latent_shape=(1, 16, 2, 8, 12), timesteps=torch.arange(4), extra={}, is_cfg_negative=False
    )
    with context.set_forward_context(step, None, batch):
        yield


def names(args: Any) -> Any:
    return importlib.import_module(f"{DIFFUSION}.platforms").AttentionBackendEnum


@pytest.mark.parametrize("kind", ["LocalAttention", "USPAttention", "UlyssesAttention"])
@pytest.mark.parametrize("word", [None, "torch_sdpa"])
def test_its_layers_are_served_by_polyattn(diffusion: Any, kind: str, word: str | None) -> None:
    diffusion.attention_backend = word
    layer = getattr(diffusion.layers, kind)(HEADS, DIM, softmax_scale=0.3)
    assert type(layer.attn_impl).__mro__[1].__name__ == "PolyattnDiffusionImpl"
    assert layer.backend is names(diffusion).TORCH_SDPA
    q, k, v = (torch.randn(2, 24, HEADS, DIM) for _ in range(3))
    with denoising(0):
        out = layer(q, k, v)
    out = out[0] if isinstance(out, tuple) else out
    for n in range(2):
        close(out[n], by_hand(q[n], k[n], v[n], 0.3, causal=False))


def test_its_layer_with_a_gate_is_our_method_at_its_place(diffusion: Any) -> None:
    diffusion.attention_backend, diffusion.attention_backend_config = "video_sparse_attn", {"sparsity": 0.5}
    layer = diffusion.layers.UlyssesAttention_VSA(HEADS, DIM, prefix="blocks.2.attn1")
    q, k, v, gate = (torch.randn(1, 48, HEADS, DIM) for _ in range(4))
    with denoising(1):
        out = layer(q, k, v, gate_compress=gate)
    place = Place(grid=(2, 4, 6), layer=2, layers=3, step=1, steps=4, tensors={"gate_compress": gate})
    polyattn.configure(attention_backend_config={"video_sparse_attn": {"sparsity": 0.5}})
    torch.testing.assert_close(out, polyattn.attention(q, k, v, backend="video_sparse_attn", place=place))


def test_its_text_behind_the_grid_is_text_of_the_place(diffusion: Any) -> None:
    diffusion.attention_backend = "video_sparse_attn"
    diffusion.attention_backend_config = {"sparsity": 0.5, "coarse": "off"}
    layer = diffusion.layers.UlyssesAttention(HEADS, DIM, prefix="double_blocks.0.attn")
    given = [torch.randn(1, 48, HEADS, DIM) for _ in range(3)]
    text = [torch.randn(1, 5, HEADS, DIM) for _ in range(3)]
    with denoising(1):
        out, behind = layer(*given, *text)
    q, k, v = (torch.cat(both, 1) for both in zip(given, text, strict=True))
    polyattn.configure(attention_backend_config={"video_sparse_attn": {"sparsity": 0.5, "coarse": "off"}})
    place = Place(grid=(2, 4, 6), text=(0, 5), layer=0, layers=3, step=1, steps=4)
    want = polyattn.attention(q, k, v, backend="video_sparse_attn", place=place)
    torch.testing.assert_close(torch.cat([out, behind], 1), want)


def test_its_selector_keeps_cross_attention_dense(diffusion: Any) -> None:
    diffusion.attention_backend = "sliding_tile_attn"
    layer = diffusion.layers.USPAttention(HEADS, DIM, is_cross_attention=True, skip_sequence_parallel=True)
    assert layer.backend is names(diffusion).TORCH_SDPA
    q, k = torch.randn(1, 48, HEADS, DIM), torch.randn(1, 7, HEADS, DIM)
    with denoising(0):
        out = layer(q, k, k)
    close(out[0], by_hand(q[0], k[0], k[0], DIM**-0.5, causal=False))


def test_a_name_that_cannot_serve_a_layer_is_refused_when_it_is_built(diffusion: Any) -> None:
    diffusion.attention_backend = "sage_attn"
    with pytest.raises(polyattn.UnsupportedRequestError, match=r"sage_attn of SGLang is polyattn's here"):
        diffusion.layers.USPAttention(HEADS, DIM)


# Starting it ----------------------------------------------------------------------------------------------------------


def test_its_command_has_every_flag_that_polyattn_serve_translates() -> None:
    from sglang.srt.server_args import ServerArgs

    from polyattn.cli.engines import _INSTALLED, command_of

    host.register()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    asked = {flag for flag in _INSTALLED["sglang"].flags.values() if flag}
    assert asked <= known, asked - known
    words, _ = command_of("sglang", "m", {"port": 1, "page_size": 64}, {"kv_cache_dtype": "bf16"}, ["--tp", "2"])
    told = parser.parse_args(words[words.index("--model-path") :])
    assert (told.attention_backend, told.disable_cuda_graph) == ("polyattn", True)
    assert (told.model_path, told.port, told.page_size, told.tp_size) == ("m", 1, 64, 2)
