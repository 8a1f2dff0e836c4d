"""vLLM's own registry, selector and attention layer over polyattn, on a CPU. `nox -s engines` installs vLLM."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import polyattn
from polyattn.integrations import vllm as host

pytest.importorskip("vllm", reason="nox -s engines installs vLLM without what needs a GPU")
vp = pytest.importorskip("vllm.platforms", reason="nox -s engines installs vLLM without what needs a GPU")

PAGE, PAGES, HEADS, KV_HEADS, DIM = 16, 8, 4, 2, 32
LENGTHS, QUERIES = (7, 20), (3, 1)
TABLE = torch.tensor([[1, 0], [3, 5]], dtype=torch.int32)


@pytest.fixture(scope="module", autouse=True)
def platform() -> Iterator[None]:
    """A platform of torch's CPU kernels that chooses as vLLM's CUDA platform does where a backend is named."""
    from vllm.platforms.interface import Platform, PlatformEnum

    class Cpu(Platform):  # type: ignore[misc]
        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"
        dispatch_key = "CPU"

        @classmethod
        def get_attn_backend_cls(cls, selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
            backend = selected.get_class()
            if reasons := backend.validate_configuration(device_capability=None, **attn_selector_config._asdict()):
                raise ValueError(f"{selected} is not valid for this configuration. Reason: {reasons}")
            return str(selected.get_path())

        @classmethod
        def opaque_attention_op(cls) -> bool:
            return True

        @classmethod
        def check_and_update_config(cls, config: Any) -> None: ...

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> None: ...

    before = vp._current_platform
    vp._current_platform = Cpu()
    host.register()
    yield
    vp._current_platform = before


@pytest.fixture
def config() -> Any:
    from vllm.config import AttentionConfig, DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig(device="cpu"), attention_config=AttentionConfig(backend=host.NAME))


def layer_of(config: Any, **options: Any) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    torch.set_default_dtype(torch.float32)
    with set_current_vllm_config(config):
        return Attention(HEADS, DIM, DIM**-0.5, KV_HEADS, prefix="layer", **options)


class Step:
    """Two sequences whose last tokens are new, in vLLM's own metadata."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.k = [torch.randn(n, KV_HEADS, DIM) for n in LENGTHS]
        self.v = [torch.randn(n, KV_HEADS, DIM) for n in LENGTHS]
        self.q = torch.randn(sum(QUERIES), HEADS, DIM)
        self.slots = torch.tensor(
            [
                int(TABLE[i, t // PAGE]) * PAGE + t % PAGE
                for i, (n, q) in enumerate(zip(LENGTHS, QUERIES, strict=True))
                for t in range(n - q, n)
            ]
        )

    def new(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([one[-q:] for one, q in zip(rows, QUERIES, strict=True)])

    def fill(self, layer: Any, cache: torch.Tensor) -> None:
        """Write the earlier tokens, as vLLM does at their steps."""
        for i, (n, q) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
            slots = torch.tensor([int(TABLE[i, t // PAGE]) * PAGE + t % PAGE for t in range(n - q)])
            layer.impl.do_kv_cache_update(layer, self.k[i][: n - q], self.v[i][: n - q], cache, slots)

    def common(self, **changes: Any) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, 3, 4], dtype=torch.int32)
        fields: dict[str, Any] = {
            "query_start_loc": starts, "query_start_loc_cpu": starts, "num_reqs": 2, "num_actual_tokens": 4,
            "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32), "max_query_len": 3, "max_seq_len": 20,
            "block_table_tensor": TABLE, "slot_mapping": self.slots,
        }  # fmt: skip
        return CommonAttentionMetadata(**{**fields, **changes})

    def wanted(self, **options: Any) -> torch.Tensor:
        lens = {
            "cu_seqlens_q": torch.tensor([0, 3, 4], dtype=torch.int32),
            "cu_seqlens_k": torch.tensor([0, 7, 27], dtype=torch.int32),
            "max_seqlen_q": 3,
            "max_seqlen_k": 20,
        }
        with polyattn.use_backend("reference"):
            found: torch.Tensor = polyattn.varlen_attention(
                self.q, torch.cat(self.k), torch.cat(self.v), causal=True, **lens, **options
            )
        return found


def run(layer: Any, config: Any, step: Step, cache: torch.Tensor) -> torch.Tensor:
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    layer.kv_cache = cache
    with set_current_vllm_config(config):
        spec = layer.get_kv_cache_spec(config)
        builder = layer.attn_backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    metadata = builder.build(0, step.common())
    step.fill(layer, cache)
    given = [rows.flatten(1) for rows in (step.q, step.new(step.k), step.new(step.v))]
    with set_forward_context({"layer": metadata}, config, slot_mapping={"layer": step.slots}):
        out: torch.Tensor = layer(*given)
    return out.view(-1, HEADS, DIM)


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"per_layer_sliding_window": 5}, {"window": (4, -1)}),
    "softcap": ({"logits_soft_cap": 3.0}, {"softcap": 3.0}),
    "sinks": ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    "alibi": ({"alibi_slopes": [0.5, 0.25, 0.125, 0.1]}, {"alibi": torch.tensor([0.5, 0.25, 0.125, 0.1])}),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_vllms_layer_gives_what_the_reference_gives(config: Any, kind: str) -> None:
    given, wanted = LAYERS[kind]
    layer, step = layer_of(config, **given), Step()
    out = run(layer, config, step, torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM))
    torch.testing.assert_close(out, step.wanted(**wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_caches_of_any_layout_are_read_as_they_lie(config: Any, order: tuple[int, ...]) -> None:
    sizes = (PAGES, KV_HEADS, PAGE, 2 * DIM)
    stored = torch.zeros([sizes[axis] for axis in order])
    cache = stored.permute([order.index(axis) for axis in range(4)])
    step = Step()
    out = run(layer_of(config), config, step, cache)
    torch.testing.assert_close(out, step.wanted(), rtol=1e-4, atol=1e-5)


def test_a_narrow_cache_is_written_and_read_by_its_scales(config: Any) -> None:
    config.cache_config.cache_dtype = "fp8_e4m3"
    layer, step = layer_of(config, cache_config=config.cache_config), Step()
    layer._k_scale, layer._v_scale = torch.tensor(0.5), torch.tensor(2.0)
    out = run(layer, config, step, torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM, dtype=torch.uint8))
    error = (out - step.wanted()).abs().max()
    assert 1e-4 < error < 0.15, "rounded to fp8, and no more"


def test_padding_writes_nowhere_that_is_read(config: Any) -> None:
    layer, cache = layer_of(config), torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM)
    rows = torch.ones(2, KV_HEADS, DIM)
    layer.impl.do_kv_cache_update(layer, rows, rows, cache, torch.tensor([17, -1]))
    assert cache[1, :, 1].eq(1).all()
    assert cache[1:].sum() == KV_HEADS * 2 * DIM, "page 0 is nobody's"


def test_a_step_that_only_measures_gives_zeros(config: Any) -> None:
    layer, out = layer_of(config), torch.full((3, HEADS, DIM), 7.0)
    rows = torch.ones(3, HEADS, DIM)
    layer.impl.forward(layer, rows, rows, rows, torch.empty(0), None, out)
    assert out.eq(0).all()


def test_the_name_survives_processes_that_have_not_registered_it() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    host.register()  # once more
    member = AttentionBackendEnum[host.NAME]
    assert pickle.loads(pickle.dumps(member)) is member
    program = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).get_path())"
    done = subprocess.run([sys.executable, "-c", program, pickle.dumps(member).hex()], capture_output=True, text=True)
    assert done.stdout.strip().endswith("polyattn.integrations.vllm.backend.PolyattnBackend"), done.stderr


def test_reasons_come_from_the_rows_that_judge_calls(config: Any) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()
    backend = AttentionBackendEnum[host.NAME].get_class()
    asked = {
        "head_size": DIM, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": None, "attn_type": "decoder",
    }  # fmt: skip
    assert backend.validate_configuration(**asked) == []
    assert backend.validate_configuration(**{**asked, "use_mla": True})
    with polyattn.use_backend("fa3"):
        (reason, *_) = backend.validate_configuration(**asked)
        assert "fa3" in reason
        with pytest.raises(ValueError, match="is not valid for this configuration"):
            layer_of(config, sinks=torch.zeros(HEADS))


@pytest.mark.parametrize(
    "given, name",
    [({"attn_type": "encoder_only"}, "attn_type"), ({"chunk_lookback": 3}, "chunk_lookback"), ({"x": "y"}, "x")],
)
def test_what_a_layer_asks_beyond_the_questions_is_refused_when_it_is_built(given: dict[str, Any], name: str) -> None:
    from polyattn.integrations.vllm.backend import PolyattnImpl

    with pytest.raises(polyattn.UnsupportedRequestError, match=f"{name}=.* of a layer of vLLM is not served"):
        PolyattnImpl(HEADS, DIM, 1.0, KV_HEADS, **given)


def test_steps_that_are_not_causal_and_quantised_outputs_are_refused(config: Any) -> None:
    layer, step = layer_of(config), Step()
    builder = layer.attn_backend.get_builder_cls()(
        layer.get_kv_cache_spec(config), ["layer"], config, torch.device("cpu")
    )
    with pytest.raises(polyattn.UnsupportedRequestError, match="causal=False"):
        builder.build(0, step.common(causal=False))
    with pytest.raises(polyattn.UnsupportedRequestError, match="output_scale"):
        layer.impl.forward(layer, step.q, None, None, torch.empty(0), None, step.q, output_scale=torch.ones(1))


def test_an_older_vllm_is_warned_of_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "outdated", lambda name: "vllm 0.20 is installed, 0.33 or newer is needed")
    with pytest.warns(RuntimeWarning, match=r"not among vLLM's attention backends: vllm 0\.20"):
        host.register()


def test_latent_decode_gives_what_the_reference_gives_and_its_lse(config: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum[host.MLA].get_class()
    rank, rope, heads, new = 32, 64, 4, 2
    latent = {
        "q_lora_rank": None, "kv_lora_rank": rank, "qk_nope_head_dim": 16, "qk_rope_head_dim": rope,
        "qk_head_dim": 16 + rope, "v_head_dim": 16, "kv_b_proj": None,
    }  # fmt: skip
    with set_current_vllm_config(config):
        impl = backend.get_impl_cls()(heads, rank + rope, 0.2, 1, None, None, "auto", None, "decoder", None, **latent)
    torch.manual_seed(0)
    rows = [torch.randn(n, rank + rope) for n in LENGTHS]
    cache = torch.zeros(PAGES, PAGE, rank + rope)
    for i, own in enumerate(rows):
        slots = torch.tensor([int(TABLE[i, t // PAGE]) * PAGE + t % PAGE for t in range(len(own))])
        impl.do_kv_cache_update(own[:, :rank], own[:, None, rank:], cache, slots, "auto", torch.ones(1))
    q = torch.randn(2 * new, heads, rank + rope)
    lens = torch.tensor(LENGTHS, dtype=torch.int32)
    metadata = SimpleNamespace(decode=SimpleNamespace(block_table=TABLE, seq_lens=lens), max_seq_len=20, causal=True)
    out, lse = impl.forward_mqa((q[..., :rank], q[..., rank:]), cache, metadata, None)
    for i, own in enumerate(rows):
        mine = q[i * new : (i + 1) * new]
        logits = torch.einsum("qhd,kd->hqk", mine, own) * 0.2
        seen = torch.arange(len(own))[None] <= torch.arange(len(own) - new, len(own))[:, None]
        logits = logits.masked_fill(~seen, float("-inf"))
        want = torch.einsum("hqk,kd->qhd", logits.softmax(-1), own[:, :rank])
        torch.testing.assert_close(out[i * new : (i + 1) * new], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[i * new : (i + 1) * new], logits.logsumexp(-1).t(), rtol=1e-4, atol=1e-5)
    metadata.causal = False
    with pytest.raises(polyattn.UnsupportedRequestError, match="in causal steps"):
        impl.forward_mqa(q, cache, metadata, None)


def test_latent_layers_are_asked_about_as_what_they_are(config: Any) -> None:
    from polyattn.integrations.vllm.mla import PolyattnMLABackend, PolyattnMLAImpl

    asked = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": None, "attn_type": "decoder",
    }  # fmt: skip
    assert PolyattnMLABackend.validate_configuration(**asked) == []
    assert PolyattnMLABackend.validate_configuration(**{**asked, "use_mla": False})
    with polyattn.use_backend("flashmla"):
        assert any("flashmla" in reason for reason in PolyattnMLABackend.validate_configuration(**asked))
    with pytest.raises(polyattn.UnsupportedRequestError, match="logits_soft_cap=3"):
        PolyattnMLAImpl(4, 576, 0.2, 1, None, None, "auto", 3.0, "decoder", None)


def test_the_command_line_chooses_names_that_vllms_configuration_knows() -> None:
    from vllm.config import AttentionConfig

    from polyattn.cli.engines import _KINDS

    kinds = AttentionConfig(backend_per_kind=dict(_KINDS)).backend_per_kind
    assert {kind: member.name for kind, member in kinds.items()} == _KINDS


def test_its_command_has_every_flag_that_polyattn_serve_translates() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from polyattn.cli.engines import _INSTALLED, command_of

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    known = {flag for action in parser._actions for flag in action.option_strings} | {"--host", "--port"}
    asked = {flag.replace("--no-", "--") for flag in _INSTALLED["vllm"].flags.values() if flag}
    assert asked <= known, asked - known
    own = {"page_size": 64, "disable_radix_cache": True}
    words, _ = command_of("vllm", "m", own, {"kv_cache_dtype": "bf16"}, [])
    told = parser.parse_args(words[words.index("serve") + 2 :])
    assert (told.block_size, told.kv_cache_dtype, told.enable_prefix_caching) == (64, "bfloat16", False)
    assert "POLYATTN_MLA" in str(told.attention_config)
