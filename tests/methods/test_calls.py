"""Calls with a place: who serves them, what is left to others and how that is told, and methods of strangers."""

from __future__ import annotations

import dataclasses
import gc
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.contract import (
    BackendInfo,
    Bound,
    ConfigField,
    Fallback,
    Inner,
    Like,
    Method,
    Provider,
    conditions,
    hookimpl,
    row,
)
from polyattn.dispatch.dense import DenseSite
from polyattn.errors import ConfigError, InvalidInputError, PluginError, UnsupportedRequestError
from polyattn.nn import LocalAttention
from polyattn.registry.manager import reset_manager
from polyattn.video import Place

NAME = "window_video_attn"
PLACE = Place(grid=(4, 4, 8))


def tensors(tokens: int = 128, keys: int = 128, **kind: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 4, 16, generator=generator).to(**kind) for n in (tokens, keys, keys)]


@pytest.fixture(autouse=True)
def small() -> None:
    polyattn.configure(attention_backend_config={NAME: {"window_tile": [2, 2, 2]}})


def configure(**settings: Any) -> None:
    polyattn.configure(attention_backend_config={NAME: {"window_tile": [2, 2, 2]}}, **settings)


def by_name(place: Place | None = PLACE) -> Tensor:
    out: Tensor = polyattn.attention(*tensors(), backend=NAME, place=place)
    return out


# Who serves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["use_backend", "force_backend", "configure", "component", "layer", "bound"])
def test_every_way_to_name_it(how: str) -> None:
    """The name does not reach the calls that the method makes: they would come back to it."""
    right, qkv = by_name(), tensors()
    if how == "use_backend":
        with polyattn.use_backend(NAME):
            out = polyattn.attention(*qkv, place=PLACE)
    elif how == "force_backend":
        polyattn.force_backend(NAME)
        try:
            out = polyattn.attention(*qkv, place=PLACE)
        finally:
            polyattn.force_backend(None)
    elif how == "configure":
        configure(attention_backend=NAME)
        out = polyattn.attention(*qkv, place=PLACE)
    elif how == "component":
        configure(component_attention_backends={"transformer": NAME})
        with polyattn.component("transformer"):
            out = polyattn.attention(*qkv, place=PLACE)
            layer = LocalAttention()
        assert torch.equal(layer(*qkv, place=PLACE), right)
    elif how == "layer":
        out = LocalAttention(backend=NAME, role="self")(*qkv, place=PLACE)
    else:
        out = polyattn.bind(backend=NAME)(*qkv, place=PLACE)
    assert torch.equal(out, right)


def test_a_place_says_nothing_to_exact_attention() -> None:
    qkv = tensors()
    for backend in (None, "torch_sdpa", "reference"):
        right = polyattn.attention(*qkv, backend=backend)
        assert torch.equal(polyattn.attention(*qkv, backend=backend, place=PLACE), right)
        assert torch.equal(polyattn.attention(*qkv, backend=backend, place=Place(grid=(1, 2, 3))), right)
    said = polyattn.explain(polyattn.attention, *qkv, place=PLACE)
    assert (said.backend, said.inner, said.request.place) == ("torch_sdpa", (), False)


def test_out_and_scale() -> None:
    out = torch.empty(2, 128, 4, 16)
    assert polyattn.attention(*tensors(), backend=NAME, place=PLACE, out=out) is out
    torch.testing.assert_close(out, by_name())
    q, k, v = tensors()
    torch.testing.assert_close(polyattn.attention(q * 2, k, v, scale=0.125, backend=NAME, place=PLACE), out)


def test_under_autocast() -> None:
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out = polyattn.attention(q, k, v, backend=NAME, place=PLACE)
    assert out.dtype == torch.bfloat16
    half = polyattn.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), backend=NAME, place=PLACE)
    assert torch.equal(out, half)


def test_plans_made_in_inference_mode_serve_training() -> None:
    with torch.inference_mode():
        right = by_name()
    q, k, v = (t.requires_grad_() for t in tensors())
    out = polyattn.attention(q, k, v, backend=NAME, place=PLACE)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), right)


@pytest.mark.parametrize("given", [{"attn_mask": torch.ones(1, 1, 128, 128, dtype=torch.bool)}, {"causal": True}])
def test_what_a_method_does_not_take_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedRequestError, match=f"{NAME}, asked for by argument, cannot serve"):
        polyattn.attention(*tensors(), backend=NAME, place=PLACE, **given)


def test_no_exact_rewrite_leads_to_a_method(plugin: Any) -> None:
    """A rewrite is exact for exact attention; of what it makes, a method would choose other keys."""
    plugin(Doubled, head_dim=(64,))
    with pytest.raises(UnsupportedRequestError, match="head_dim=16 is not 64"):
        polyattn.attention(*tensors(), backend="strange", place=PLACE)


def test_what_is_no_place() -> None:
    for call in (polyattn.attention, LocalAttention(backend=NAME)):
        with pytest.raises(InvalidInputError, match=r"place is a tuple; a polyattn\.video\.Place is needed"):
            call(*tensors(), place=(4, 4, 8))


def test_bad_tensors_are_told_as_without_a_place() -> None:
    q, k, v = tensors()
    for wrong in ((q[0], k, v), (q, k, v[:, :5]), (q, k, "v")):
        with pytest.raises(InvalidInputError) as plain:
            polyattn.attention(*wrong)
        with pytest.raises(InvalidInputError) as placed:
            polyattn.attention(*wrong, backend=NAME, place=PLACE)
        assert str(placed.value) == str(plain.value)


# Rules ---------------------------------------------------------------------------------------------------------------

LEFT: dict[str, tuple[Place | None, str]] = {
    "no place": (None, "this one has none"),
    "cross": (Place(role="cross"), "never serve cross-attention"),
    "a step": (Place(grid=(4, 4, 8), step=0), "the first 2 steps run dense"),
}


@pytest.mark.parametrize("strict", [False, True], ids=["usual", "strict"])
@pytest.mark.parametrize("case", LEFT)
def test_what_a_rule_leaves_is_dense_and_silent(case: str, strict: bool) -> None:
    place, why = LEFT[case]
    options = {NAME: {"window_tile": [2, 2, 2], "first_full_step": 2}}
    polyattn.configure(strict=strict, attention_backend_config=options)
    keys = 40 if case == "cross" else 128
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qkv = tensors(keys=keys)
        out = polyattn.attention(*qkv, backend=NAME, place=place)
        said = polyattn.explain(polyattn.attention, *qkv, backend=NAME, place=place)
    torch.testing.assert_close(out, polyattn.attention(*qkv))
    (last,) = said.inner or (said,)
    assert (last.backend, last.rule, last.fallback) == ("torch_sdpa", NAME, False)
    assert why in last.why
    assert why in str(said)


def test_other_calls_under_its_name() -> None:
    """A name that is set for a whole pipeline reaches text encoders too: packed calls, and the drop-in for torch's."""
    q, k, v = tensors()
    lengths = {"cu_seqlens_q": torch.tensor([0, 100, 256], dtype=torch.int32), "max_seqlen_q": 156}
    packed = {**lengths, "cu_seqlens_k": lengths["cu_seqlens_q"], "max_seqlen_k": 156}
    flat, turned = [t.flatten(0, 1) for t in (q, k, v)], [t.transpose(1, 2) for t in (q, k, v)]
    right = polyattn.varlen_attention(*flat, **packed), polyattn.scaled_dot_product_attention(*turned)
    configure(strict=True)
    with polyattn.use_backend(NAME), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = polyattn.varlen_attention(*flat, **packed), polyattn.scaled_dot_product_attention(*turned)
    torch.testing.assert_close(found, right)
    with polyattn.use_backend(NAME), pytest.raises(UnsupportedRequestError, match="family='block_sparse' is not dense"):
        polyattn.block_sparse_attention(
            q, k, v, block_map=torch.ones(1, 1, 2, 2, dtype=torch.bool), block_shape=(64, 64)
        )


def test_a_layer_says_its_role_without_a_place() -> None:
    layer, qkv = LocalAttention(role="cross", backend=NAME), tensors(keys=40)
    assert torch.equal(layer(*qkv), polyattn.attention(*qkv))
    said = polyattn.explain(layer, *qkv)
    assert (said.rule, said.request.cross) == (NAME, True)
    assert "never serve cross-attention" in said.why
    assert polyattn.explain(LocalAttention(role="cross"), *qkv).request.cross
    assert not polyattn.explain(LocalAttention(role="self"), *tensors()).request.cross
    assert "role='cross'" in repr(layer)


def test_roles_that_contradict_each_other() -> None:
    with pytest.raises(InvalidInputError, match="layer has role='self' and the place role='cross'; leave one"):
        LocalAttention(role="self")(*tensors(), place=Place(role="cross"))
    with pytest.raises(InvalidInputError, match="role='both' must be 'self', 'cross' or None"):
        LocalAttention(role="both")


def test_a_method_that_served_no_call_is_an_error() -> None:
    by_name(None)
    polyattn.attention(*tensors(keys=40), backend=NAME, place=Place(role="cross"))
    with pytest.raises(ConfigError, match=f"{NAME} was asked for and served no call") as caught:
        polyattn.check_components()
    assert "this one has none" in str(caught.value)
    assert "never serve cross-attention" in str(caught.value)
    by_name()
    polyattn.check_components()


def test_a_method_whose_steps_all_ran_dense_served_no_call() -> None:
    polyattn.configure(attention_backend_config={NAME: {"window_tile": [2, 2, 2], "first_full_step": 2}})
    by_name(Place(grid=(4, 4, 8), step=1))
    with pytest.raises(ConfigError, match=r"served no call: .* the first 2 steps run dense \(first_full_step\)"):
        polyattn.check_components()
    polyattn.configure()
    polyattn.check_components()


def test_explaining_is_not_serving() -> None:
    by_name(None)
    polyattn.explain(polyattn.attention, *tensors(), backend=NAME, place=PLACE)
    with pytest.raises(ConfigError, match="served no call"):
        polyattn.check_components()


# What is said --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["call", "layer", "bound"])
def test_explain_shows_the_method_and_its_kernels(kind: str) -> None:
    call: Any = {
        "call": polyattn.attention,
        "layer": LocalAttention(backend=NAME),
        "bound": polyattn.bind(backend=NAME),
    }[kind]
    given = {"backend": NAME} if kind == "call" else {}
    said = polyattn.explain(call, *tensors(), place=PLACE, **given)
    assert (said.backend, said.request.place, said.source) == (NAME, True, "argument")
    (inner,) = said.inner
    assert (inner.request.family, inner.backend, inner.lowerings) == (
        "block_sparse",
        "torch_sdpa",
        ("expand_block_map",),
    )
    assert (inner.request.block_shape, inner.request.block_sizes) == ((8, 8), True)
    assert "calls block_sparse: torch_sdpa@cpu" in str(said)
    assert [one["backend"] for one in said.to_dict()["inner"]] == ["torch_sdpa"]


def test_explain_runs_nothing_and_says_what_gradients_need() -> None:
    q, k, v = (t.requires_grad_() for t in tensors())
    (inner,) = polyattn.explain(polyattn.attention, q, k, v, backend=NAME, place=PLACE).inner
    assert set(inner.request.grad) == {"query", "key", "value"}
    meta = [t.to("meta") for t in tensors()]
    (inner,) = polyattn.explain(polyattn.attention, *meta, backend=NAME, place=PLACE).inner
    assert inner.backend == "torch_sdpa"


# Strangers' methods --------------------------------------------------------------------------------------------------


class Doubled:
    """Dense attention, twice: how often it plans and what it keeps can be seen."""

    plans: ClassVar[list[tuple[Place, Like]]] = []

    def __init__(self, *, factor: float) -> None:
        self.factor = factor

    def leaves_dense(self, place: Place) -> str:
        return ""

    def plan(self, place: Place, like: Like) -> Any:
        self.plans.append((place, like))
        return len(self.plans)

    def attend(
        self, plan: Any, query: Tensor, key: Tensor, value: Tensor, *, place: Place, kept: dict[str, Any], inner: Inner
    ) -> Tensor:
        kept["calls"] = kept.get("calls", 0) + 1
        out: Tensor = inner.dense(query, key, value)
        return out * self.factor * place.tensors.get("gate", 1)


class Broken(Doubled):
    def attend(self, *given: Any, **more: Any) -> Tensor:
        raise RuntimeError("no such map")


class Silent(Doubled):
    """It forgets to return what it computed, or returns another shape."""

    def attend(self, plan: Any, query: Tensor, *given: Any, **more: Any) -> Any:
        return None if self.factor == 2 else query[..., :3]


class Reader(Doubled):
    reads = ("gate", "proj.bias")


class Linear(Doubled):
    """Another family: the calls of a method need not be of softmax."""

    def attend(
        self, plan: Any, query: Tensor, key: Tensor, value: Tensor, *, place: Place, kept: dict[str, Any], inner: Inner
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        gate = torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
        out, _ = inner.linear(q, k, v, gate=gate, beta=torch.ones_like(gate), qk_norm=True)
        return self.factor * out.transpose(1, 2)


@pytest.fixture
def plugin() -> Iterator[Any]:
    """Register a plugin with one method, `strange`."""
    Doubled.plans = []

    def register(target: type, **limits: Any) -> None:
        allowed = {"dtype": ("float32", "float64"), "head_dim": (16,), "s_relation": "equal", "scale": True}
        placed = row(when={"place": True}, family="dense", grad=("query", "key", "value"), **{**allowed, **limits})
        info = BackendInfo(
            "strange",
            "cpu",
            (Provider("own", (placed,), f"{__name__}:{target.__name__}"),),
            summary="made for a test",
            priority=None,
            fallbacks=(Fallback("", "it needs a place", when=conditions(place=False), rule=True),),
            config=(ConfigField("factor", "float", 2.0, "times"),),
            lossy="twice too much",
        )
        module = types.ModuleType("strange_plugin")
        module.polyattn_register_backends = hookimpl(lambda: [info])  # type: ignore[attr-defined]
        module.polyattn_register_backends.__name__ = "polyattn_register_backends"  # type: ignore[attr-defined]
        polyattn.register_plugin(module)

    yield register
    reset_manager()


def test_a_method_of_a_plugin(plugin: Any) -> None:
    plugin(Doubled)
    method: Method = Doubled(factor=1.0)  # as a type checker sees it
    assert method.leaves_dense(PLACE) == ""
    q, k, v = (t.requires_grad_() for t in tensors())
    dense = polyattn.attention(q, k, v)
    out = polyattn.attention(q, k, v, backend="strange", place=PLACE)
    torch.testing.assert_close(out, 2 * dense)
    torch.testing.assert_close(*(torch.autograd.grad(one.sum(), v)[0] for one in (out, 2 * dense)))
    polyattn.configure(attention_backend_config={"strange": {"factor": 3.0}})
    torch.testing.assert_close(polyattn.attention(q, k, v, backend="strange", place=PLACE), 3 * dense)
    assert polyattn.explain(polyattn.attention, q, k, v, backend="strange").rule == "strange"


def test_plans_are_shared_by_layers_and_not_by_steps(plugin: Any) -> None:
    plugin(Doubled)
    qkv = tensors()

    def call(**at: Any) -> int:
        polyattn.attention(*qkv, backend="strange", place=Place(grid=(4, 4, 8), **at))
        return len(Doubled.plans)

    made = [call(layer=layer, step=0, tensors={"gate": layer}) for layer in range(3)]
    made += [call(layer=torch.tensor(1), step=0), call(step=1), call(step=1, branch="uncond"), call(step=0)]
    assert made == [1, 1, 1, 1, 2, 3, 3]
    assert Doubled.plans[0][1] == Like(2, 4, 4, 128, 16, torch.float32, torch.device("cpu"))
    polyattn.attention(*tensors(dtype=torch.float64), backend="strange", place=Place(grid=(4, 4, 8), step=0))
    assert len(Doubled.plans) == 4


def test_a_plan_serves_all_steps_where_the_method_says_so(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doubled, "plans_by_step", False, raising=False)
    plugin(Doubled)
    qkv = tensors()
    for grid in ((4, 4, 8), (8, 4, 4)):
        for at in ({}, {"step": 0}, {"step": 1, "steps": 3}, {"step": 1, "branch": "uncond"}):
            polyattn.attention(*qkv, backend="strange", place=Place(grid=grid, **at))
    assert [place.grid for place, _ in Doubled.plans] == [(4, 4, 8), (8, 4, 4)]


def test_a_plan_keeps_no_tensors_of_the_call_that_it_was_made_for() -> None:
    """A gate is as large as the queries; plans outlive calls, and runs."""
    gate, kept = torch.ones(3), {"large": torch.ones(3)}
    held = [weakref.ref(gate), weakref.ref(kept["large"])]
    polyattn.attention(*tensors(), backend=NAME, place=Place(grid=(4, 4, 8), tensors={"gate": gate}, kept=kept))
    del gate, kept
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_what_a_method_keeps_belongs_to_the_run(plugin: Any) -> None:
    plugin(Doubled)
    kept: dict[str, Any] = {}
    for _ in range(3):
        polyattn.attention(*tensors(), backend="strange", place=Place(grid=(4, 4, 8), kept=kept))
    assert kept == {"calls": 3}
    polyattn.attention(*tensors(), backend="strange", place=PLACE)
    assert kept == {"calls": 3}


def test_tensors_of_a_place_are_trained(plugin: Any) -> None:
    plugin(Doubled)
    gate = torch.ones((), requires_grad=True)
    out = polyattn.attention(*tensors(), backend="strange", place=Place(tensors={"gate": gate}))
    (found,) = torch.autograd.grad(out.sum(), gate)
    torch.testing.assert_close(found, out.sum().detach())


def test_a_method_over_linear_attention(plugin: Any) -> None:
    plugin(Linear)
    qkv = tensors()
    said = polyattn.explain(polyattn.attention, *qkv, backend="strange", place=PLACE)
    assert [(one.request.family, one.backend) for one in said.inner] == [("linear", "torch_native")]
    gate = torch.zeros(2, 128, 4)
    right, _ = polyattn.linear_attention(*qkv, gate=gate, beta=torch.ones_like(gate), qk_norm=True)
    torch.testing.assert_close(polyattn.attention(*qkv, backend="strange", place=PLACE), 2 * right)


def test_an_error_inside_a_method_is_its_own(plugin: Any) -> None:
    plugin(Broken)
    with pytest.raises(RuntimeError, match="no such map"):
        polyattn.attention(*tensors(), backend="strange", place=PLACE)
    polyattn.configure(attention_backend_config={"strange": {"fact": 1.0}})
    with pytest.raises(ConfigError, match=r"strange@cpu has no option 'fact'\. Did you mean 'factor'"):
        polyattn.attention(*tensors(), backend="strange", place=PLACE)


def test_what_a_method_returns_is_checked(plugin: Any) -> None:
    plugin(Silent)
    with pytest.raises(PluginError, match=r"strange: attend of Silent returned NoneType; a tensor \[2, 4, 128, 16\]"):
        polyattn.attention(*tensors(), backend="strange", place=PLACE)
    with pytest.raises(PluginError, match="returned NoneType"):
        polyattn.explain(polyattn.attention, *tensors(), backend="strange", place=PLACE)
    polyattn.configure(attention_backend_config={"strange": {"factor": 1.0}})
    with pytest.raises(PluginError, match=r"returned \[2, 4, 128, 3\]; a tensor \[2, 4, 128, 16\]"):
        polyattn.attention(*tensors(), backend="strange", place=PLACE)


def test_a_slip_in_the_name_of_a_tensor(plugin: Any) -> None:
    """One place serves all methods, so names that this one does not know are taken, unless they are nearly its own."""
    plugin(Reader)
    one = torch.ones(())

    def call(*names: str) -> Any:
        at = dataclasses.replace(PLACE, tensors=dict.fromkeys(names, one))
        return polyattn.attention(*tensors(), backend="strange", place=at)

    torch.testing.assert_close(call("gate", "proj.bias", "centroids"), call())
    with pytest.raises(InvalidInputError, match=r"the place has a tensor 'proj.bais'.* Did you mean 'proj.bias'"):
        call("gate", "proj.bais")
    call("proj.bais", "proj.bias")  # both are there: nothing is missed


def test_slips_of_the_published_methods() -> None:
    for name, wrong, right in (
        ("video_sparse_attn", "gate_compres", "gate_compress"),
        ("sla_attn", "proj_l.bais", "proj_l.bias"),
        ("sage_sla_attn", "proj_l.Weight", "proj_l.weight"),
    ):
        at = dataclasses.replace(PLACE, tensors={wrong: torch.ones(16)})
        with pytest.raises(
            InvalidInputError, match=f"{name}: the place has a tensor {wrong!r}.*Did you mean {right!r}"
        ):
            polyattn.attention(*tensors(), backend=name, place=at)


def test_a_hook_may_bind_a_method_by_itself() -> None:
    """`polyattn_load_forward` returns a Bound whose forward takes the place; one that does not is refused."""

    def register(forward: Any) -> None:
        placed = row(when={"place": True}, family="dense", dtype="float32", head_dim=16, s_relation="equal")
        info = BackendInfo("hooked", "cpu", (Provider("own", (placed,), "none:none"),), summary="made for a test")
        info = dataclasses.replace(info, priority=None)
        module = types.ModuleType("hooked_plugin")

        def polyattn_register_backends() -> list[BackendInfo]:
            return [info]

        def polyattn_load_forward(backend: Any, provider: str, request: Any) -> Bound:
            return Bound(forward)

        for hook in (polyattn_register_backends, polyattn_load_forward):
            setattr(module, hook.__name__, hookimpl(hook))
        polyattn.register_plugin(module)

    def takes(query: Tensor, key: Tensor, value: Tensor, *, attn_mask=None, sinks=None, out=None, place=None) -> Tensor:  # type: ignore[no-untyped-def]
        return value * place.grid[2]

    def lacks(query: Tensor, key: Tensor, value: Tensor, *, attn_mask=None, sinks=None, out=None) -> Tensor:  # type: ignore[no-untyped-def]
        return value

    try:
        register(takes)
        qkv = tensors()
        assert torch.equal(polyattn.attention(*qkv, backend="hooked", place=PLACE), qkv[2] * 8)
        reset_manager()
        register(lacks)
        with pytest.raises(PluginError, match="cannot be given place"):
            polyattn.attention(*qkv, backend="hooked", place=PLACE)
    finally:
        reset_manager()


# Around a call -------------------------------------------------------------------------------------------------------


def test_results_are_checked_under_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_VALIDATE", "1")
    reset_manager()
    try:
        right = by_name()
        said = polyattn.explain(polyattn.attention, *tensors(), backend=NAME, place=PLACE)
        assert (said.inner, said.notes[-1]) == ((), "which calls it makes is not known before it runs")
        monkeypatch.delenv("POLYATTN_VALIDATE")
        reset_manager()
        assert torch.equal(by_name(), right)
    finally:
        reset_manager()


def test_the_profiler_names_the_method_and_the_kernel() -> None:
    qkv = tensors()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        polyattn.attention(*qkv, backend=NAME, place=PLACE)
    names = {event.key for event in profile.key_averages()}
    assert {f"polyattn.attention {NAME}@cpu", "polyattn.block_sparse_attention torch_sdpa@cpu"} <= names


def test_a_site_without_a_place_is_the_one_it_was() -> None:
    """No call more on the way of an ordinary call: a place is looked for once, where it would be an argument."""
    site, (q, k, v) = polyattn.bind(), tensors()
    for _ in range(3):
        site(q, k, v)
    called: list[str] = []

    def seen(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    import sys

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        site(q, k, v)
    finally:
        sys.setprofile(before)
    assert called[0] == DenseSite.__call__.__name__
    assert not [name for name in called if "place" in name.lower() or name == "at"]
