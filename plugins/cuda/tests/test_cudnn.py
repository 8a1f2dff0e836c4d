"""cuDNN through its front end and through PyTorch: conformance over an emulator, gradients too, and what is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.errors import BackendUnavailableError, UnsupportedRequestError
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library

from .emulators import cudnn as emulator
from .emulators.gpus import Gpus

FRONTEND, TORCH = (Emulated("cudnn", name, "cuda:sm90@12.8") for name in ("cudnn-frontend", "torch"))
AMPERE = Emulated("cudnn", "cudnn-frontend", "cuda:sm80@12.8")


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.frontend(monkeypatch)


@pytest.fixture
def torch_itself(monkeypatch: pytest.MonkeyPatch) -> Library:
    return emulator.torch_itself(monkeypatch)


@pytest.mark.slow(keep=58)
@pytest.mark.parametrize("case", [*FRONTEND.cases(per_row=10), *AMPERE.cases(per_row=2)], ids=str)
def test_conformance_of_the_front_end(case: Case, frontend: Library) -> None:
    FRONTEND.passes(case, frontend)


@pytest.mark.parametrize("case", TORCH.cases(per_row=10), ids=str)
def test_conformance_of_torch(case: Case, torch_itself: Library) -> None:
    TORCH.passes(case, torch_itself)


def tensors(*sizes: int) -> list[Tensor]:
    return [torch.randn(1, size, 4, 64).bfloat16() for size in sizes]


BANDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"is_causal": False, "causal_bottom_right": False, "window_left": -1, "window_right": -1}),
    ({"causal": "bottom_right"}, {"is_causal": True, "causal_bottom_right": False}),
    ({"causal": "bottom_right", "s_relation": "fewer"}, {"is_causal": True, "causal_bottom_right": True}),
    ({"causal": "bottom_right", "window": (3, -1)}, {"is_causal": True, "window_left": 4, "window_right": -1}),
    ({"window": (3, 2), "s_relation": "fewer"}, {"window_left": 4, "window_right": 2, "causal_bottom_right": True}),
    ({"window": (0, 5)}, {"is_causal": False, "window_left": 1, "window_right": 5}),
]


@pytest.mark.parametrize(("fields", "words"), BANDS)
def test_bands_in_its_words(fields: dict[str, Any], words: dict[str, Any], frontend: Library) -> None:
    few = fields.get("s_relation") == "fewer"
    FRONTEND.bind(heads=4, kv_heads=4, head_dim=64, **fields).forward(*tensors(6 if few else 9, 9, 9))
    assert frontend.calls[-1].given.items() >= words.items()
    assert frontend.calls[-1].positional == 3


def test_tensors_are_given_as_they_lie(frontend: Library) -> None:
    q, k, v = tensors(9, 9, 9)
    FRONTEND.bind(heads=4, kv_heads=4, head_dim=64).forward(q, k, v)
    given = frontend.calls[-1].given
    assert [given[name].data_ptr() for name in ("query", "key", "value")] == [t.data_ptr() for t in (q, k, v)]
    assert given["query"].shape == (1, 4, 9, 64)
    assert given["return_lse"] is False


def test_torch_is_asked_for_the_lse_only_where_it_is_needed(torch_itself: Library) -> None:
    for fields, wanted in (({}, False), ({"lse": True}, True), ({"grad": ("query",)}, True)):
        TORCH.bind(heads=4, kv_heads=4, head_dim=64, **fields).forward(*tensors(9, 9, 9))
        assert torch_itself.calls[-1].given["compute_log_sumexp"] is wanted


@pytest.mark.parametrize("value_dim", [64, 32])
def test_gradients_do_not_depend_on_the_layouts_of_earlier_calls(value_dim: int, torch_itself: Library) -> None:
    bound = TORCH.bind(heads=4, kv_heads=4, head_dim=64, v_head_dim=value_dim, grad=("query", "key", "value"))
    q, k, v = tensors(9, 9, 9)
    v = v[..., :value_dim].contiguous()
    out, lse = bound.forward(q, k, v)
    dout = torch.randn_like(out)
    heads_first, tokens_first = (
        [t.transpose(*order).contiguous().transpose(*order) for t in (dout, out)] for order in ((1, 2), (0, 0))
    )
    first, again = (bound.backward(d, q, k, v, o, lse) for d, o in (heads_first, tokens_first))
    assert heads_first[0].stride() != tokens_first[0].stride()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


PACKED = {"cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32), "max_seqlen_q": 5}
PACKED |= {"cu_seqlens_k": PACKED["cu_seqlens_q"], "max_seqlen_k": 5}


@pytest.mark.parametrize("lens", [{}, PACKED], ids=["dense", "packed"])
def test_the_device_of_the_tensors_is_current(
    lens: dict[str, Any], frontend: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus(monkeypatch)
    fields = {"family": "varlen", "layout": "THD"} if lens else {}
    bound = FRONTEND.bind(heads=4, kv_heads=4, head_dim=64, grad=("query", "key", "value"), **fields)
    q, k, v = (t[0] if lens else t for t in tensors(9, 9, 9))
    out, lse = bound.forward(q, k, v, **lens)
    bound.backward(torch.ones_like(out), q, k, v, out, lse, **lens)
    assert gpus.current == 0


@pytest.mark.parametrize(("s_q", "s_k"), [(128, 192), (128, 320), (7, 64), (1, 256), (1, 64), (128, 128), (128, 256)])
@pytest.mark.parametrize(
    ("through", "band"),
    [
        ("frontend", {}),
        ("frontend", {"causal": "bottom_right"}),
        ("frontend", {"causal": "bottom_right", "window": (40, -1)}),
        ("torch_itself", {}),
    ],
)
def test_gradients_of_queries_of_a_low_lse_are_finite(
    through: str, band: dict[str, Any], s_q: int, s_k: int, request: pytest.FixtureRequest
) -> None:
    """pytorch#196678: its own backward gives NaN where S_k % 128 is 64, or S_q is 1 and S_k % 64 is 0."""
    library: Library = request.getfixturevalue(through)
    target = FRONTEND if through == "frontend" else TORCH
    relation = "equal" if s_q == s_k else "one" if s_q == 1 else "fewer"
    fields = {**band, "s_relation": relation, "grad": ("query", "key", "value")}
    if relation == "one":
        fields.pop("causal", None)
    bound = target.bind(heads=4, kv_heads=4, head_dim=64, **fields)
    q, k, v = tensors(s_q, s_k, s_k)
    q, k = q * 0.1 + 3.6, k * 0.1 - 3.6
    out, lse = bound.forward(q, k, v)
    assert float(lse.min()) < -88.7
    dout = torch.randn_like(out)
    found = bound.backward(dout, q, k, v, out, lse)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    keep = seen_by(s_q, s_k, band)
    reference = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in exact), keep)
    wanted = torch.autograd.grad(reference.transpose(1, 2), exact, dout.double())
    assert library.calls
    assert all(bool(torch.isfinite(grad).all()) for grad in found)
    # Those of the values are not sums of what cancels.
    assert float((found[2].double() - wanted[2]).norm() / wanted[2].norm()) < 2e-2


@pytest.mark.parametrize("through", ["frontend", "torch_itself"])
def test_more_samples_than_a_backward_takes_are_several_calls(
    through: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Library = request.getfixturevalue(through)
    bound = (FRONTEND if through == "frontend" else TORCH).bind(
        heads=4, kv_heads=4, head_dim=64, grad=("query", "key", "value")
    )
    q, k, v = (torch.randn(5, 9, 4, 64).bfloat16() for _ in range(3))
    out, lse = bound.forward(q, k, v)
    dout = torch.randn_like(out)
    whole = bound.backward(dout, q, k, v, out, lse)
    before = len(library.calls)
    monkeypatch.setattr("polyattn.adapters.samples.MOST", 8)
    parts = bound.backward(dout, q, k, v, out, lse)
    assert len(library.calls) - before == 3
    for a, b in zip(whole, parts, strict=True):
        # A processor multiplies fewer rows in another order; a sample that is left out is off by 1.
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def seen_by(s_q: int, s_k: int, band: dict[str, Any]) -> Tensor:
    """What queries see, bool [S_q, S_k], from the lower right corner."""
    distance = torch.arange(s_k) - torch.arange(s_q)[:, None] - (s_k - s_q)
    seen = distance <= 0 if band else torch.ones(s_q, s_k, dtype=torch.bool)
    return seen & (distance >= -band["window"][0]) if "window" in band else seen


REFUSALS: list[tuple[str, dict[str, Any], str, str]] = [
    ("nvidia-cudnn-frontend", {"head_dim": 320}, "cuda:sm90", "head_dim=320"),
    ("nvidia-cudnn-frontend", {"softcap": 20.0}, "cuda:sm90", "softcap"),
    ("nvidia-cudnn-frontend", {"mask": "bool"}, "cuda:sm90", "mask"),
    ("nvidia-cudnn-frontend", {"dropout": 0.1}, "cuda:sm90", "dropout"),
    ("nvidia-cudnn-frontend", {"family": "paged", "page_size": 64}, "cuda:sm90", "family"),
    ("nvidia-cudnn-frontend", {}, "cuda:sm75", "arch='sm75'"),
    ("torch", {"window": (127, -1)}, "cuda:sm90", "window"),
]


@pytest.mark.parametrize(("installed", "changes", "platform", "reason"), REFUSALS)
def test_limits(installed: str, changes: dict[str, Any], platform: str, reason: str) -> None:
    with pytest.raises(UnsupportedRequestError) as refused:
        what_if(AttentionRequest(**changes), platform=platform, installed=(installed,), backend="cudnn")
    assert reason in str(refused.value)


def test_torch_serves_where_the_front_end_is_too_old() -> None:
    where: dict[str, Any] = {"platform": "cuda:sm90", "backend": "cudnn"}
    for version, provider in (("1.32.0", "cudnn-frontend"), ("1.18.0", "torch")):
        installed = ("torch==2.13.0", f"nvidia-cudnn-frontend=={version}")
        assert what_if(AttentionRequest(), installed=installed, **where).provider == provider


def test_an_older_signature_is_named(frontend: Library) -> None:
    def sdpa(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> None: ...

    frontend.add(emulator.MODULE, sdpa=sdpa)
    with pytest.raises(BackendUnavailableError, match=r"nvidia-cudnn-frontend 1\.32\.0 takes no 'is_causal'"):
        FRONTEND.bind(heads=4, kv_heads=4, head_dim=64)
