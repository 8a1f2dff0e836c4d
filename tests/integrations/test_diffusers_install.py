"""polyattn as a backend of diffusers: the names, what a call may say, and models that no name of diffusers reaches."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import polyattn
from polyattn.errors import BackendUnavailableError, ConfigError, InvalidInputError, UnsupportedRequestError
from polyattn.integrations import transformers as text_host

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")
from diffusers.models import attention_dispatch

from polyattn.integrations import diffusers as host
from polyattn.integrations.diffusers import names

from .tiny_pipelines import frames, tiny

REGISTRY = attention_dispatch._AttentionBackendRegistry
NAMES = attention_dispatch.AttentionBackendName


@pytest.fixture(autouse=True)
def installed() -> Iterator[tuple[str, ...]]:
    yield host.install()
    host.uninstall()
    polyattn.configure()


def qkv(heads: int = 4, kv_heads: int = 4, s_k: int = 7) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, s, h, 16) for s, h in ((5, heads), (s_k, kv_heads), (s_k, kv_heads)))


def attend(*tensors: torch.Tensor, backend: str = "polyattn", **options: Any) -> Any:
    return attention_dispatch.dispatch_attention_fn(*tensors, backend=NAMES(backend), **options)


def tables() -> tuple[Any, ...]:
    kept = [REGISTRY._backends, REGISTRY._constraints, REGISTRY._supported_arg_names]
    return ({*NAMES}, {*NAMES._value2member_map_}, {*NAMES.__members__}, *map(set, kept), REGISTRY._active_backend)


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_naming_the_integration_imports_no_diffusers():
    code = "import sys, polyattn; polyattn.integrations.diffusers.install; sys.exit('diffusers' in sys.modules)"
    assert run_python(code).returncode == 0


def test_names_are_members_and_backends(installed):
    assert {"polyattn", "polyattn|torch_sdpa", "polyattn|fa3", "polyattn|reference"} <= set(installed)
    assert host.installed()["polyattn"] is None
    assert host.installed()["polyattn|torch_sdpa"] == "torch_sdpa"
    for name in installed:
        assert NAMES(name) in list(NAMES)
        assert NAMES(name).value == name
        assert name in REGISTRY._backends


def test_installing_twice_changes_nothing_and_uninstall_leaves_diffusers_as_it_was():
    host.uninstall()
    before = tables()
    assert "polyattn" not in text_host.installed()
    host.install()
    once = tables()
    host.install()
    assert tables() == once != before
    assert "polyattn" in text_host.installed()
    host.uninstall()
    host.uninstall()
    assert tables() == before
    assert "polyattn" not in text_host.installed()


def test_uninstall_leaves_what_somebody_else_put_into_transformers():
    host.uninstall()
    text_host.install()
    host.install()
    host.uninstall()
    assert "polyattn" in text_host.installed()
    text_host.uninstall()


def test_the_context_manager_and_the_active_backend():
    query, key, value = qkv()
    native = attention_dispatch.dispatch_attention_fn(query, key, value)
    with attention_dispatch.attention_backend("polyattn|reference"):
        assert REGISTRY._active_backend is NAMES("polyattn|reference")
        inside = attention_dispatch.dispatch_attention_fn(query, key, value)
        host.uninstall()  # the backend that is active goes with it
        assert REGISTRY._active_backend is NAMES.NATIVE
    torch.testing.assert_close(inside, native)
    assert not torch.equal(inside, native)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["polyattn", "polyattn|reference"])
def test_the_variable_of_diffusers(name):
    code = (
        "from polyattn.integrations import diffusers as host; host.install()\n"
        "from diffusers.models.attention_dispatch import _AttentionBackendRegistry as r; print(r._active_backend.value)"
    )
    done = run_python(code, DIFFUSERS_ATTN_BACKEND=name)
    assert done.stdout.strip() == name, done.stderr


def test_the_variable_pins_a_backend_that_nobody_knows():
    code = "from polyattn.integrations import diffusers as host; host.install()"
    done = run_python(code, DIFFUSERS_ATTN_BACKEND="polyattn|fa33")
    assert "DIFFUSERS_ATTN_BACKEND='polyattn|fa33' is not installed" in done.stderr
    assert "Did you mean 'fa3'" in done.stderr


def test_an_old_diffusers_is_refused(monkeypatch):
    import diffusers

    host.uninstall()
    monkeypatch.setattr(diffusers, "__version__", "0.41.0")
    with pytest.raises(BackendUnavailableError, match=r"diffusers 0\.41\.0 is installed, 0\.42 or newer is needed"):
        host.install()


def test_an_enum_that_takes_no_members_is_refused():
    class Closed(str, enum.Enum):
        ONE = "one"

        @classmethod
        def _missing_(cls, value: object) -> Closed:
            return cls.ONE

    Closed._value2member_map_ = dict(Closed._value2member_map_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(Closed), "__iter__", lambda cls: iter(()), raising=False)
        with pytest.raises(BackendUnavailableError, match="Closed of the installed diffusers takes no new member"):
            names.add_members(Closed, ["two"])
    assert "two" not in Closed.__members__


@pytest.mark.parametrize(
    ("options", "kv_heads"),
    [
        ({}, 4),
        ({"is_causal": True}, 4),
        ({"scale": 0.3}, 4),
        ({"enable_gqa": True}, 2),
        ({"attn_mask": torch.arange(7)[None].expand(2, -1) < torch.tensor([[3], [7]])}, 4),
        ({"attn_mask": torch.randn(2, 7)}, 4),
        ({"attn_mask": (torch.arange(7) < 4)[None, None, None].expand(2, -1, -1, -1)}, 4),
        ({"attn_mask": torch.randn(2, 4, 5, 7)}, 4),
        ({"attn_mask": torch.randn(5, 7)}, 4),
    ],
)
def test_each_argument_means_what_it_means_natively(options, kv_heads):
    tensors = qkv(kv_heads=kv_heads)
    wanted = attend(*tensors, backend="native", **options)
    torch.testing.assert_close(attend(*tensors, **options), wanted)
    torch.testing.assert_close(attend(*tensors, backend="polyattn|reference", **options), wanted)
    assert (
        options == {}
        or not torch.allclose(wanted, attend(*qkv(kv_heads=kv_heads), enable_gqa=True), atol=1e-3)
        or ("enable_gqa" in options)
    )


def test_dropout_reaches_the_weights():
    torch.manual_seed(0)
    tensors = qkv()
    dropped = attend(*tensors, dropout_p=0.5)
    assert not torch.allclose(dropped, attend(*tensors), atol=1e-2)


def test_lse_is_natural_and_by_token():
    query, key, value = qkv()
    out, lse = attend(query, key, value, attention_kwargs={"return_lse": True})
    scores = torch.einsum("bqhd,bkhd->bqhk", query, key) / 4
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, attend(query, key, value))


def test_gradients_are_those_of_native_attention():
    found = []
    for backend in ("native", "polyattn"):
        tensors = [t.requires_grad_() for t in qkv()]
        attend(*tensors, backend=backend).square().sum().backward()
        found.append([t.grad for t in tensors])
    torch.testing.assert_close(found[1], found[0])


def test_what_cannot_be_honoured_is_refused_by_its_name():
    tensors = qkv()
    with pytest.raises(UnsupportedRequestError, match=r"unknown keyword window \(3\) reached attention of diffusers"):
        attend(*tensors, attention_kwargs={"window": 3})
    with pytest.raises(InvalidInputError, match=r"4 query heads and 2 key heads .* enable_gqa=False"):
        attend(*qkv(kv_heads=2))
    with pytest.raises(InvalidInputError, match="attn_mask"):
        attend(*tensors, attn_mask=torch.zeros(3, 3, dtype=torch.bool))


@pytest.mark.parametrize("name", ["wan", "sd3", "pixart"])
def test_a_model_is_given_the_name_and_gives_it_back(name):
    pipe = tiny(name)
    native = frames(pipe, name)
    pipe.transformer.set_attention_backend("polyattn|reference")
    pipe.transformer.set_attention_backend("polyattn|reference")  # layers that are reached already stay so
    REGISTRY.set_active_backend(NAMES.NATIVE)
    found = frames(pipe, name)
    torch.testing.assert_close(found, native, atol=1e-3, rtol=1e-3)
    assert not torch.equal(found, native)
    pipe.transformer.set_attention_backend("native")
    assert torch.equal(frames(pipe, name), native)
    pipe.transformer.set_attention_backend("polyattn|reference")
    pipe.transformer.reset_attention_backend()
    REGISTRY.set_active_backend(NAMES.NATIVE)
    assert torch.equal(frames(pipe, name), native)


def test_names_that_nobody_knows_and_models_that_cannot_be_reached():
    pipe = tiny("wan")
    with pytest.raises(ConfigError, match=r"'polyattn\|fa33' is not installed.*Did you mean 'fa3'"):
        pipe.transformer.set_attention_backend("polyattn|fa33")
    with pytest.raises(ConfigError, match="'polyattn' cannot reach AutoencoderKLWan: it has no attention layer"):
        pipe.vae.set_attention_backend("polyattn")
