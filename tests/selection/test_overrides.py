"""Who asked for what: the chain of precedence, the scopes of the `with` forms, and overrides that reached nothing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import polyattn
from polyattn.contract import AttentionRequest, BackendInfo, Bound, Fallback, Provider, Range, hookimpl, row
from polyattn.errors import BackendUnavailableError, ConfigError, InvalidInputError, UnsupportedRequestError
from polyattn.registry.manager import PluginManager, reset_manager
from polyattn.selection.overrides import SCOPE, current_settings
from polyattn.semantics.reference import attention as reference

NAMES = ("alpha", "beta", "gamma", "delta")
VARIABLES = (
    "POLYATTN_ATTENTION_BACKEND",
    "POLYATTN_COMPONENT_ATTENTION_BACKENDS",
    "POLYATTN_CONFIG",
    "POLYATTN_STRICT",
)
REQUEST = AttentionRequest(dtype="float32", head_dim=8)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Backends alpha, beta, gamma and delta, never automatic; yields the names of those that were run, in order."""
    ran: list[str] = []

    def adapter(name: str) -> type:
        class Adapter:
            def bind(self, request: AttentionRequest) -> Bound:
                def forward(
                    query: Any, key: Any, value: Any, *, attn_mask: Any = None, sinks: Any = None, out: Any = None
                ):
                    ran.append(name)
                    return reference(query, key, value, layout=request.layout)

                return Bound(forward)

        return Adapter

    module = types.ModuleType("polyattn_named")
    rows = (row(family="dense", dtype="float32", head_dim=Range(1), grad=("query", "key", "value")),)
    infos = []
    for name in NAMES:
        setattr(module, name, adapter(name))
        provider = Provider("own", rows, f"polyattn_named:{name}")
        infos.append(BackendInfo(name, "cpu", (provider,), summary="made for a test", priority=None))
    half = Provider("own", (row(family="dense", dtype="bfloat16", head_dim=Range(1)),), "polyattn_named:alpha")
    step = (Fallback("alpha", "half takes bfloat16 only"),)
    infos.append(BackendInfo("half", "cpu", (half,), summary="made for a test", priority=None, fallbacks=step))
    module.polyattn_register_backends = hookimpl(lambda: infos, specname="polyattn_register_backends")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for variable in VARIABLES:
        monkeypatch.delenv(f"POLYATTN_{variable}", raising=False)
    reset_manager(PluginManager({"POLYATTN_PLUGINS": ""}))
    polyattn.register_plugin(module, "named")
    polyattn.configure()
    yield ran
    polyattn.force_backend(None)
    monkeypatch.undo()
    polyattn.configure()
    reset_manager()


def who() -> tuple[str, str]:
    """Backend and source of a plain call made here and now."""
    selection = polyattn.explain(REQUEST)
    return selection.backend, selection.source


def call(**named: Any) -> None:
    q = torch.ones(1, 2, 1, 8)
    polyattn.attention(q, q, q, **named)


def test_the_chain_from_the_top_down(monkeypatch, tmp_path):
    """Every place names a backend; each is taken away in turn, and the next one decides."""
    file = tmp_path / "polyattn.json"
    file.write_text(json.dumps({"attention_backend": "beta"}))
    monkeypatch.setenv("POLYATTN_CONFIG", str(file))
    monkeypatch.setenv("POLYATTN_ATTENTION_BACKEND", "gamma")
    polyattn.configure(attention_backend="delta", component_attention_backends="vae=gamma,vae.cross=delta")
    polyattn.force_backend("beta")

    def selected(**named: str) -> tuple[str, str]:
        selection = polyattn.explain(REQUEST, **named)
        return selection.backend, selection.source

    with polyattn.component("vae", "cross"):
        with polyattn.use_backend("alpha"):
            assert selected(backend="delta") == ("delta", "argument")
            assert selected() == ("alpha", "use_backend")
        assert selected() == ("beta", "force_backend")
        polyattn.force_backend(None)
        assert selected() == ("delta", "component vae.cross")
        with polyattn.component("vae"):
            assert selected() == ("gamma", "component vae")
        with polyattn.component("vae", "self"):
            assert selected() == ("gamma", "component vae")
    assert selected() == ("delta", "configure()")
    polyattn.configure()
    assert selected() == ("gamma", "environment POLYATTN_ATTENTION_BACKEND")
    monkeypatch.delenv("POLYATTN_ATTENTION_BACKEND")
    polyattn.configure()
    assert selected() == ("beta", f"config file {file}")
    monkeypatch.delenv("POLYATTN_CONFIG")
    polyattn.configure()
    assert selected() == ("torch_sdpa", "platform rule")


def test_calls_obey_what_explain_says(calls):
    polyattn.force_backend("beta")
    with polyattn.use_backend("alpha"):
        call()
        call(backend="gamma")
    call()
    polyattn.configure(attention_backend="delta")
    polyattn.force_backend(None)
    call()
    assert calls == ["alpha", "gamma", "beta", "delta"]


def test_components_are_merged_name_by_name(monkeypatch):
    monkeypatch.setenv("POLYATTN_COMPONENT_ATTENTION_BACKENDS", "vae=alpha,text_encoder=beta")
    polyattn.configure(component_attention_backends="vae=gamma")
    with polyattn.component("vae"):
        assert who() == ("gamma", "component vae")
    with polyattn.component("text_encoder"):
        assert who() == ("beta", "component text_encoder")


def test_scopes_nest_and_end():
    with polyattn.use_backend("alpha"):
        with polyattn.use_backend("beta"):
            assert who()[0] == "beta"
            with polyattn.use_backend(None):
                assert who()[0] == "torch_sdpa"
            assert who()[0] == "beta"
        assert who()[0] == "alpha"
    assert who()[0] == "torch_sdpa"


def test_a_scope_ends_when_its_block_fails():
    with contextlib.suppress(ZeroDivisionError), polyattn.component("vae"), polyattn.use_backend("alpha"):
        raise ZeroDivisionError
    assert SCOPE.get() == ("", "", "")


def test_one_object_may_be_entered_again_inside_itself():
    scope = polyattn.use_backend("alpha")
    with scope, polyattn.use_backend("beta"), scope:
        assert who()[0] == "alpha"
    assert who()[0] == "torch_sdpa"


def test_as_a_decorator():
    @polyattn.use_backend("alpha")
    def decorated(depth: int) -> list[str]:
        return [who()[0], *(decorated(depth - 1) if depth else [])]

    with polyattn.use_backend("beta"):
        assert decorated(2) == ["alpha"] * 3
        assert who()[0] == "beta"
    assert decorated.__name__ == "decorated"


def test_decorating_what_runs_later_is_refused():
    """The scope would be over before the first line of it runs."""

    async def coroutine() -> None: ...

    def generator() -> Iterator[None]:
        yield

    async def both() -> Any:
        yield

    for function in (coroutine, generator, both):
        with pytest.raises(InvalidInputError, match=f"cannot decorate {function.__name__}, .*Put `with use_backend"):
            polyattn.use_backend("alpha")(function)


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_scope_belongs_to_its_thread():
    with polyattn.use_backend("alpha"):
        assert in_thread(who)[0] == "torch_sdpa"
        carried = contextvars.copy_context()
        assert in_thread(lambda: carried.run(who))[0] == "alpha"


def test_threads_at_once_keep_their_own(calls):
    """Both are inside their scopes at the same time, and leave in the order they came."""
    barrier = threading.Barrier(2, timeout=1800)
    found: dict[str, list[str]] = {}

    def work(name: str) -> None:
        with polyattn.use_backend(name):
            barrier.wait()
            found[name] = [who()[0] for _ in range(20)]
            call()
            barrier.wait()
        found[name].append(who()[0])

    threads = [threading.Thread(target=work, args=(name,)) for name in ("alpha", "beta")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert found == {name: [name] * 20 + ["torch_sdpa"] for name in ("alpha", "beta")}
    assert sorted(calls) == ["alpha", "beta"]


def test_tasks_at_once_keep_their_own(calls):
    async def work(name: str) -> list[str]:
        found = []
        with polyattn.use_backend(name):
            for _ in range(5):
                await asyncio.sleep(0)
                found.append(who()[0])
                call()
        found.append(who()[0])
        return found

    async def main() -> list[list[str]]:
        with polyattn.use_backend("gamma"):
            inherited = asyncio.create_task(asyncio.to_thread(who))
            return [*await asyncio.gather(work("alpha"), work("beta")), [(await inherited)[0]]]

    assert asyncio.run(main()) == [["alpha"] * 5 + ["gamma"], ["beta"] * 5 + ["gamma"], ["gamma"]]
    assert sorted(calls) == ["alpha"] * 5 + ["beta"] * 5


def test_tasks_may_enter_one_object():
    """The first to come is the first to go."""
    shared = polyattn.use_backend("alpha")

    async def work(outer: str, came: asyncio.Event, wait: asyncio.Event, gone: asyncio.Event) -> list[str]:
        with polyattn.use_backend(outer):
            with shared:
                came.set()
                await wait.wait()
                found = [who()[0]]
            gone.set()
            return [*found, who()[0]]

    async def main() -> list[list[str]]:
        first, second, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        return await asyncio.gather(work("beta", first, second, gone), work("gamma", second, gone, asyncio.Event()))

    assert asyncio.run(main()) == [["alpha", "beta"], ["alpha", "gamma"]]


def test_a_block_may_end_in_another_context_than_it_began_in():
    scope = polyattn.use_backend("alpha")
    contextvars.copy_context().run(scope.__enter__)
    with polyattn.use_backend("beta"):
        assert contextvars.Context().run(lambda: (scope.__exit__(None, None, None), who()[0]))[1] == "torch_sdpa"
        assert who()[0] == "beta"


def test_force_is_for_the_whole_process_and_its_block_ends():
    polyattn.force_backend("alpha")
    assert who() == in_thread(who) == ("alpha", "force_backend")
    with polyattn.global_force_attn_backend_context_manager("beta"):
        assert who() == in_thread(who) == ("beta", "force_backend")
        with polyattn.global_force_attn_backend_context_manager(None):
            assert who()[0] == "torch_sdpa"
        assert who()[0] == "beta"
    assert who()[0] == "alpha"
    with contextlib.suppress(KeyError), polyattn.global_force_attn_backend_context_manager("beta"):
        raise KeyError
    assert who()[0] == "alpha"
    polyattn.global_force_attn_backend("gamma")
    assert who()[0] == "gamma"
    polyattn.global_force_attn_backend(None)
    assert who()[0] == "torch_sdpa"


def test_an_explicit_choice_that_cannot_serve_names_who_asked():
    for override, source in (
        (polyattn.use_backend("alpha"), "use_backend"),
        (polyattn.global_force_attn_backend_context_manager("alpha"), "force_backend"),
    ):
        with override, pytest.raises(UnsupportedRequestError, match=f"alpha, asked for by {source}, cannot serve"):
            call(softcap=3.0)
    polyattn.configure(attention_backend="alhpa")
    named = r"no backend is named 'alhpa', asked for by configure\(\)\. Did you mean 'alpha'"
    with pytest.raises(BackendUnavailableError, match=named):
        call()


def test_no_setting_chooses_who_computes_linear_attention(monkeypatch):
    """A hybrid model has both kinds, and few backends do."""
    rows = torch.zeros(1, 3, 2, 16)
    given = {"gate": rows[..., 0], "beta": rows[..., 0]}
    unset = polyattn.explain(polyattn.linear_attention, rows, rows, rows, **given)
    monkeypatch.setenv("POLYATTN_ATTENTION_BACKEND", "flex_attention")
    polyattn.configure()
    assert polyattn.explain(polyattn.attention, rows, rows, rows).backend == "flex_attention"
    found = polyattn.explain(polyattn.linear_attention, rows, rows, rows, **given)
    assert (found.backend, found.source) == (unset.backend, unset.source)
    with polyattn.use_backend("flex_attention"), pytest.raises(UnsupportedRequestError, match="asked for by use_back"):
        polyattn.linear_attention(rows, rows, rows, **given)


def test_a_fallback_is_said_once_and_an_error_in_strict_mode(calls):
    with pytest.warns(RuntimeWarning, match="half was asked for by argument and replaced by alpha"):
        call(backend="half")
    call(backend="half")
    polyattn.configure(strict=True)
    with pytest.raises(UnsupportedRequestError, match="alpha is not taken in strict mode"):
        call(backend="half")
    assert calls == ["alpha", "alpha"]


def test_bind_captures_the_scope_and_obeys_the_process(calls):
    q = torch.ones(1, 2, 1, 8)
    with polyattn.use_backend("alpha"):
        inside = polyattn.bind()
    outside = polyattn.bind()
    with polyattn.use_backend("beta"):
        inside(q, q, q)
        outside(q, q, q)
        polyattn.bind(backend="gamma")(q, q, q)
    polyattn.force_backend("delta")
    inside(q, q, q)
    outside(q, q, q)
    assert calls == ["alpha", "gamma", "alpha", "delta"]


COMPONENTS = "text_encoder=alpha,transformer.cross=beta"


def build(name: str, role: str = "") -> Any:
    with polyattn.component(name, role):
        return polyattn.bind()


def test_layers_obey_the_component_they_were_built_in(calls):
    polyattn.configure(component_attention_backends=COMPONENTS)
    layers = [build("text_encoder"), build("text_encoder", "self"), build("transformer", "cross"), build("transformer")]
    q = torch.ones(1, 2, 1, 8)
    for layer in layers:
        layer(q, q, q)
    assert calls == ["alpha", "alpha", "beta"]


def test_overrides_that_reached_their_layers_are_fine_once_the_model_is_built():
    polyattn.configure(component_attention_backends=COMPONENTS)
    build("text_encoder")
    build("transformer", "cross")
    polyattn.check_components()


def test_an_override_that_reached_no_layer_is_an_error_with_the_near_match():
    polyattn.configure(component_attention_backends="text_encodr=alpha")
    build("text_encoder")
    with pytest.raises(
        ConfigError,
        match=r"text_encodr reached no layer\. Did you mean 'text_encoder'\? Reached: text_encoder\.",
    ):
        polyattn.check_components()


def test_several_are_named_together():
    polyattn.configure(component_attention_backends=COMPONENTS)
    build("transformer")
    with pytest.raises(
        ConfigError,
        match=r"overrides text_encoder, transformer\.cross reached no layer\..*Check the component",
    ):
        polyattn.check_components()
    polyattn.configure(component_attention_backends="vae=alpha")
    nothing = (
        r"component override vae reached no layer\. No layer was built or called inside `with polyattn\.component\("
    )
    with pytest.raises(ConfigError, match=rf"{nothing}.*Put the part's code into that, or remove them"):
        polyattn.check_components()


def test_a_call_in_the_component_reaches_it_too_even_when_something_stronger_decides(calls):
    polyattn.configure(component_attention_backends="vae=alpha")
    with polyattn.component("vae"):
        call(backend="beta")
    polyattn.check_components()
    assert calls == ["beta"]
    polyattn.configure(component_attention_backends="vae=alpha")
    with pytest.raises(ConfigError, match="reached no layer"):
        polyattn.check_components()


def test_no_override_is_nothing_to_miss():
    polyattn.check_components()


def test_configure_starts_over_and_a_mistake_changes_nothing():
    settings = polyattn.configure(attention_backend="alpha")
    assert current_settings() is settings
    with pytest.raises(ConfigError):
        polyattn.configure(attention_backend="not a name!")
    with pytest.raises(ConfigError):
        polyattn.configure(component_attention_backends="vae")
    assert who()[0] == "alpha"
    polyattn.configure(strict=False)
    assert who()[0] == "torch_sdpa"


@pytest.mark.parametrize("context_fn, recomputed_by", [(True, "alpha"), (False, "torch_sdpa")], ids=["kept", "lost"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["this thread", "another thread"])
def test_recomputation_outside_the_block(calls, context_fn, recomputed_by, elsewhere):
    """Activation checkpointing runs the forward a second time in the backward, which is outside the block here."""
    sources: list[str] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        sources.append(who()[0])
        return polyattn.attention(x, x, x)

    x = torch.randn(1, 3, 1, 8, requires_grad=True)
    more = {"context_fn": polyattn.checkpoint_context_fn} if context_fn else {}
    # Without the scope the other backend saves other tensors, which checkpoint would notice first.
    with polyattn.use_backend("alpha"):
        out = checkpoint(block, x, use_reentrant=False, determinism_check="none", **more)
    with contextlib.suppress(torch.utils.checkpoint.CheckpointError):
        (in_thread if elsewhere else lambda f: f())(lambda: out.sum().backward())
    assert sources == ["alpha", recomputed_by]
    assert calls == ["alpha"] * (2 if context_fn else 1)
    if context_fn:
        expected = torch.autograd.grad(reference(x, x, x).sum(), x)[0]
        torch.testing.assert_close(x.grad, expected)
    assert SCOPE.get() == ("", "", "")
