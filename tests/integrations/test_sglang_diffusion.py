"""SGLang's image and video models on polyattn: over stand-ins with its signatures."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import polyattn
from polyattn.integrations import sglang as host
from polyattn.video import Place, Run

from . import sglang_diffusion as theirs
from .sglang_source import fields, parameters, real

HEADS, DIM, GRID, STEPS = 2, 32, (2, 4, 6), 4
TOKENS = 48
OURS = "polyattn.integrations.sglang.diffusion"
ASKED: tuple[Any, Any] = vars(theirs.CpuPlatform)["get_attn_backend_cls_str"].__func__, theirs.CpuPlatform
"""A platform's own answer, and the platform."""


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What SGLang knows: its arguments, the pass that runs, the component that is built."""
    model = SimpleNamespace(patch_size=(1, 2, 2), num_layers=3)
    state = SimpleNamespace(
        args=SimpleNamespace(attention_backend_config=None, pipeline_config=SimpleNamespace(dit_config=model)),
        context=None, component="transformer", skip=None, dtype=torch.float32, model=model,
    )  # fmt: skip
    for name, module in theirs.stand_ins(state).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    monkeypatch.setattr(host, "outdated", lambda name: "")
    yield state
    sys.modules.pop(OURS, None)
    polyattn.configure()


def layer(word: str | None, *, prefix: str = "blocks.1.attn1.impl", scale: float = DIM**-0.5, **more: Any) -> Any:
    """The calls of a layer of the backend that SGLang finds by a name."""
    ours: Any = sys.modules.get(OURS) or __import__(OURS, fromlist=["choose"])
    name = None if word is None else theirs.Names[word.upper()]
    path = ours.choose(
        theirs.CpuPlatform.get_attn_backend_cls_str.__func__, theirs.CpuPlatform, name, DIM, torch.float32
    )
    backend = resolve_name(path)
    assert backend.get_enum() is (name or theirs.Names.TORCH_SDPA)
    return backend.get_impl_cls()(HEADS, DIM, scale, num_kv_heads=HEADS, prefix=prefix, **more)


@contextlib.contextmanager
def denoising(state: SimpleNamespace, step: int, *, negative: bool = False, extra: Any = None) -> Iterator[Any]:
    batch = SimpleNamespace(
        raw_latent_shape=(1, 16, 2, 8, 12), timesteps=torch.arange(STEPS), extra={} if extra is None else extra,
        is_cfg_negative=negative,
    )  # fmt: skip
    state.context = SimpleNamespace(current_timestep=step, attn_metadata=None, forward_batch=batch)
    yield batch
    state.context = None


def tensors(tokens: int = TOKENS, heads: int = HEADS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, tokens, heads, DIM) for _ in range(3)]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float = DIM**-0.5) -> torch.Tensor:
    q, k, v = (one.double().transpose(1, 2) for one in (q, k, v))
    return ((q @ k.transpose(-1, -2) * scale).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("word", [None, "torch_sdpa"])
@pytest.mark.parametrize("scale", [DIM**-0.5, 0.3])
def test_dense_layers_are_what_the_formula_gives(state: Any, word: str | None, scale: float) -> None:
    q, k, v = tensors()
    out = layer(word, scale=scale).forward(q, k, v, None)
    torch.testing.assert_close(out.double(), dense(q, k, v, scale), rtol=1e-4, atol=1e-5)


def test_packed_sequences_are_attended_apart(state: Any) -> None:
    q, k, v = (one[0] for one in tensors())
    lens = torch.tensor([0, 10, TOKENS], dtype=torch.int32)
    out = layer(None).forward_varlen(q, k, v, cu_seqlens=lens, max_seqlen=TOKENS - 10)
    for some in (slice(0, 10), slice(10, TOKENS)):
        want = dense(*(one[None, some] for one in (q, k, v)))[0]
        torch.testing.assert_close(out[some].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", [0, 5])
def test_a_method_is_told_grid_step_layer_text_and_branch(
    state: Any, monkeypatch: pytest.MonkeyPatch, text: int
) -> None:
    state.args.attention_backend_config = {"sparsity": 0.5}
    own, told = layer("video_sparse_attn"), []
    ours: Any = sys.modules[OURS]
    call = ours.at
    monkeypatch.setattr(ours, "at", lambda *given: (told.append(given[4]), call(*given))[1])
    q, k, v = tensors(TOKENS + text)
    gate = torch.randn_like(q)
    extra: dict[str, Any] = {}
    for negative in (False, True):
        with denoising(state, 2, negative=negative, extra=extra):
            qkv = torch.cat([q, k, v, gate])
            assert own.preprocess_qkv(qkv[:, :TOKENS], None).shape[1] == TOKENS
            out = own.forward(q, k, v, attn_metadata=None, gate_compress=gate)
        (place,) = told[negative:]
        assert (place.grid, place.text, place.step, place.steps) == (GRID, (0, text), 2, STEPS)
        assert (place.layer, place.layers, place.role) == (1, 3, "self")
        assert place.branch == ("uncond" if negative else "cond")
    polyattn.configure(attention_backend_config={"video_sparse_attn": {"sparsity": 0.5}})
    place = Place(grid=GRID, text=(0, text), layer=1, layers=3, step=2, steps=STEPS, tensors={"gate_compress": gate})
    want = polyattn.attention(q, k, v, backend="video_sparse_attn", place=place)
    torch.testing.assert_close(out, want)
    (run,) = extra.values()
    assert isinstance(run, Run)
    assert "video_sparse_attn" in str(run.explain())


def test_a_method_that_drops_nothing_is_dense_attention(state: Any) -> None:
    state.args.attention_backend_config = {"coarse": "off", "sparsity": 0.0}
    q, k, v = tensors()
    with denoising(state, 0):
        out = layer("video_sparse_attn").forward(q, k, v)
    torch.testing.assert_close(out.double(), dense(q, k, v), rtol=1e-4, atol=1e-5)


def test_cross_attention_and_encoders_stay_dense_under_a_method(state: Any) -> None:
    polyattn.configure(attention_backend="sliding_tile_attn")
    q, k, v = tensors()
    cross = layer(None, is_cross_attention=True)
    with denoising(state, 0):
        out = cross.forward(q, k[:, :7], v[:, :7], None)
    torch.testing.assert_close(out.double(), dense(q, k[:, :7], v[:, :7]), rtol=1e-4, atol=1e-5)
    out = layer(None).forward(q, k, v, None)  # no request is there: a text encoder
    torch.testing.assert_close(out.double(), dense(q, k, v), rtol=1e-4, atol=1e-5)


def test_overrides_of_a_component_and_its_role_are_heard(state: Any) -> None:
    polyattn.configure(component_attention_backends="transformer.cross=fa3", strict=True)
    q, k, v = tensors()
    with pytest.raises(polyattn.BackendUnavailableError, match=r"fa3, asked for by component transformer\.cross"):
        layer(None, is_cross_attention=True).forward(q, k, v, None)
    layer(None).forward(q, k, v, None)


def test_names_that_polyattn_does_not_have_stay_sglangs(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    ours: Any = __import__(OURS, fromlist=["choose"])
    path = ours.choose(lambda *given: f"theirs.{given[1]}", "platform", theirs.Names.LASER_ATTN, DIM, torch.float16)
    assert path == "theirs.laser_attn"
    assert "laser_attn: polyattn has no backend of this name" in caplog.text


@pytest.mark.parametrize(
    "what, call",
    [
        ("dropout_p=0.1", lambda state: layer(None, dropout_p=0.1)),
        ("sage_attn of SGLang is polyattn's here, and it does not serve this layer", lambda state: layer("sage_attn")),
        ("skip_softmax_params", lambda state: setattr(state, "skip", 1) or layer(None).forward(*tensors(), None)),
        ("a sparse method on 1 of 2 heads", lambda state: sparse(state, tensors(heads=1))),
        ("a sparse method over 3 tokens beside the grid", lambda state: sparse(state, tensors(TOKENS + 3))),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(state: Any, what: str, call: Any) -> None:
    with pytest.raises(polyattn.UnsupportedRequestError, match=what):
        call(state)


def sparse(state: Any, given: list[torch.Tensor]) -> Any:
    with denoising(state, 0):
        return layer("video_sparse_attn").forward(*given)


def test_options_of_sglangs_command_that_a_method_does_not_have_are_refused(state: Any) -> None:
    state.args.attention_backend_config = {"sparsiti": 0.5}
    with pytest.raises(polyattn.ConfigError, match=r"--attention-backend-config.*sparsiti.*sparsity"):
        sparse(state, tensors())


@pytest.mark.parametrize("switch", ["", "1"])
def test_the_hook_is_registered_where_it_is_asked_for(state: Any, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv("POLYATTN_SGLANG_DIFFUSION", switch)
    host.register_diffusion()
    found = sys.modules[f"{theirs.ROOM}.platforms.plugins"].HookRegistry.registered
    assert [target for target, _, _ in found] == [f"{theirs.__name__}.CpuPlatform.get_attn_backend_cls_str"] * len(
        switch
    )
    for _, hook, kind in found:
        assert kind == "around"
        assert hook(
            theirs.CpuPlatform.get_attn_backend_cls_str.__func__, theirs.CpuPlatform, None, DIM, torch.half
        ) == (f"{OURS}.auto_TORCH_SDPA")


def test_methods_have_the_parameters_of_sglangs_own(state: Any) -> None:
    ours: Any = __import__(OURS, fromlist=["choose"])
    known = theirs.SIGNATURES["layers/attention/backends/attention_backend.py"]
    for name, words in known.items():
        kind, _, method = name.partition(".")
        mine = {"AttentionImpl": ours.PolyattnDiffusionImpl, "AttentionBackend": ours._Backend}.get(kind, ours._Builder)
        found = [
            p.name for p in inspect.signature(getattr(mine, method)).parameters.values() if p.kind != p.VAR_KEYWORD
        ]
        assert [word for word in found if word not in ("self", "gate_compress")] == [w for w in words if w != "self"]


@pytest.mark.parametrize("file", theirs.SIGNATURES)
def test_the_signatures_are_those_of_sglangs_source(file: str) -> None:
    tree = real(f"sglang/multimodal_gen/runtime/{file}")
    for name, words in theirs.SIGNATURES[file].items():
        assert parameters(tree, name) == words, name


@pytest.mark.parametrize("file", theirs.FIELDS)
def test_what_is_read_of_sglangs_objects_is_there(file: str) -> None:
    tree = real(f"sglang/multimodal_gen/runtime/{file}")
    for name, wanted in theirs.FIELDS[file].items():
        assert wanted <= fields(tree, name)
