"""`fa` on NPUs: the kit over an emulator of npu_fusion_attention, and what it is really given."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn import what_if
from polyattn.contract import AttentionRequest
from polyattn.errors import BackendUnavailableError, PolyattnError
from polyattn.semantics import reference
from polyattn.semantics.merge_lse import merge
from polyattn.testing import Case
from polyattn.testing.emulators import Emulated, Library
from polyattn_ascend import fusion, sparsity

from .emulators import torch_npu

TARGET = Emulated("fa", "torch-npu", "npu:ascend910b@8.5")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return torch_npu.library().install(monkeypatch)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("--polyattn-full")
        some = [*TARGET.cases(per_row=1, dtypes=("bfloat16",)), *TARGET.cases(per_row=1, dtypes=("float32",))[::3]]
        metafunc.parametrize("case", TARGET.cases(per_row=24) if full else some, ids=str)


@pytest.mark.slow(keep=40)
def test_conformance(case: Case, library: Library) -> None:
    TARGET.passes(case, library)


# ------------------------------------------------------------------------------------------------ what it is given

USUAL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64}
LENS = {
    "cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 6, 13], dtype=torch.int32),
    "max_seqlen_q": 5,
    "max_seqlen_k": 7,
}


def tensors(s_q: int, s_k: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (2, s_q, 4, 64), (2, s_k, 2, 64), (2, s_k, 2, 64)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def packed() -> list[Tensor]:
    q, k, v = tensors(9, 13)
    return [q[0], k[0], v[0]]


def test_only_tensors_are_given_by_position(library: Library) -> None:
    TARGET.bind(**USUAL).forward(*tensors(5, 5))
    bound = TARGET.bind(**USUAL, family="varlen", grad=("query", "key", "value"))
    out, lse = bound.forward(*packed(), **LENS)
    bound.backward(out, *packed(), out, lse, **LENS)
    assert [(call.name, call.positional) for call in library.calls] == [
        ("npu_fusion_attention", 3),
        ("npu_fusion_attention", 3),
        ("npu_fusion_attention_grad", 4),
    ]
    assert all(call.given["scale" if "scale" in call.given else "scale_value"] == 0.125 for call in library.calls)
    assert all(call.given["head_num"] == 4 for call in library.calls)


MODES = [
    ({}, {"sparse_mode": 0}),
    ({"causal": "bottom_right"}, {"sparse_mode": 3}),
    ({"causal": "top_left", "s_relation": "fewer"}, {"sparse_mode": 2}),
    ({"causal": "bottom_right", "window": (3, -1)}, {"sparse_mode": 4, "pre_tockens": 3, "next_tockens": 0}),
    ({"window": (3, 2)}, {"sparse_mode": 4, "pre_tockens": 3, "next_tockens": 2}),
    ({"window": (-1, 2)}, {"sparse_mode": 4, "pre_tockens": 2**31 - 1, "next_tockens": 2}),
]


@pytest.mark.parametrize("family", ["dense", "varlen"])
@pytest.mark.parametrize(("fields", "mode"), MODES)
def test_each_rule_has_its_mode(family: str, fields: dict[str, Any], mode: dict[str, Any], library: Library) -> None:
    bound = TARGET.bind(**{**USUAL, "s_relation": "fewer", **fields}, family=family)
    bound.forward(*packed(), **LENS) if family == "varlen" else bound.forward(*tensors(9, 13))
    arguments = library.calls[-1].arguments
    assert {name: arguments[name] for name in mode} == mode
    mask = arguments["atten_mask"]
    assert (mask is None) is (mode == {"sparse_mode": 0})
    assert mask is None or (mask.shape == (2048, 2048) and bool(mask[0, 1]) and not bool(mask[1, 0])), "True hides"


def test_a_mask_is_inverted_and_has_one_of_the_known_shapes(library: Library) -> None:
    mask = torch.rand(1, 4, 9, 13) > 0.3
    mask[:, :, :, 0] = True
    TARGET.bind(**USUAL, s_relation="fewer", mask="bool").forward(*tensors(9, 13), attn_mask=mask)
    given = library.calls[-1].given
    assert given["atten_mask"].shape == (2, 4, 9, 13)
    assert torch.equal(given["atten_mask"][0], ~mask[0])
    assert given["sparse_mode"] == 1


def test_a_band_along_the_upper_left_is_spelt_out(library: Library) -> None:
    fields = {"s_relation": "fewer", "causal": "top_left", "window": (2, -1)}
    TARGET.bind(**USUAL, **fields).forward(*tensors(9, 13))
    hidden = library.calls[-1].given["atten_mask"]
    assert hidden.shape == (1, 1, 9, 13)
    assert [int(n) for n in (~hidden)[0, 0].sum(1)] == [1, 2, *[3] * 7]


def test_lengths_are_running_sums_on_the_host(library: Library) -> None:
    TARGET.bind(**USUAL, family="varlen", lse=True).forward(*packed(), **LENS)
    given = library.calls[-1].given
    assert (given["actual_seq_qlen"], given["actual_seq_kvlen"]) == ([4, 9], [6, 13])
    assert (given["input_layout"], given["softmax_layout"]) == ("TND", "TND")
    TARGET.bind(**USUAL, family="varlen").forward(*packed(), **LENS)
    assert "softmax_layout" not in library.calls[-1].given, "only where statistics are read"


@pytest.mark.parametrize(("layout", "named"), [("BSHD", "BSND"), ("BHSD", "BNSD")])
def test_tensors_are_read_where_they_lie(layout: str, named: str, library: Library) -> None:
    q, k, v = tensors(5, 5)
    if layout == "BHSD":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    TARGET.bind(**USUAL, layout=layout).forward(q, k, v)
    given = library.calls[-1].given
    assert given["input_layout"] == named
    assert given["query"] is q


def test_the_gradient_of_a_part_from_the_merged_result(library: Library) -> None:
    """As a ring has it: each part's share, from out and LSE of the whole."""
    q, k, v = tensors(6, 10)
    bound = TARGET.bind(**USUAL, s_relation="fewer", grad=("query", "key", "value"))
    parts = [(k[:, :4], v[:, :4]), (k[:, 4:], v[:, 4:])]
    out, lse = merge(*zip(*(bound.forward(q, *part) for part in parts), strict=True))
    dout = torch.randn_like(q)
    shares = [bound.backward(dout, q, *part, out, lse) for part in parts]
    whole = [t.double().requires_grad_() for t in (q, k, v)]
    reference.attention(*whole, layout="BSHD").backward(dout.double())
    found = (
        shares[0][0].double() + shares[1][0],
        *(torch.cat(g, 1).double() for g in zip(*(s[1:] for s in shares), strict=True)),
    )
    for mine, right in zip(found, whole, strict=True):
        assert float((mine - right.grad).norm() / right.grad.norm()) < 8e-3
    given = library.calls[-1].given
    assert bool((given["softmax_sum"] == 1).all())
    assert given["softmax_max"].shape == (2, 4, 6, 8)


def test_dropout_leaves_the_gradient_to_the_operator(library: Library) -> None:
    bound = TARGET.bind(**USUAL, dropout=0.25, grad=("query", "key", "value"))
    assert bound.backward is None
    q, k, v = (t.requires_grad_() for t in tensors(5, 5))
    bound.forward(q, k, v).sum().backward()
    assert library.calls[-1].given["keep_prob"] == 0.75
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v))


# ------------------------------------------------------------------------------------------------ planted errors


def _unscaled(self: Any, request: Any, init: Any = fusion._Fusion.__init__) -> None:
    init(self, request)
    self.scale = 1.0


def _one_more(request: Any, device: torch.device, rule: Any = sparsity.by_position) -> Any:
    found = rule(request, device)
    return found._replace(before=found.before + 1) if found is not None and found.mode == sparsity.BAND else found


def _upper_left(request: Any, device: torch.device, rule: Any = sparsity.by_position) -> Any:
    found = rule(request, device)
    return found._replace(mode=2) if found is not None and found.mode == sparsity.LOWER_RIGHT else found


def _heads_first(self: Any, request: Any, init: Any = fusion._Fusion.__init__) -> None:
    init(self, request)
    self.order = {}


def _base_two(tensor: Tensor, log: Any = Tensor.log) -> Tensor:
    return log(tensor) / 0.6931471805599453


def _uninverted(self: Any, query: Tensor, *rest: Any, whole: Any = fusion._Fusion._whole) -> Any:
    shape = whole(self, query, *rest)
    return shape._replace(rule=shape.rule._replace(mask=~shape.rule.mask))


PLANTED: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "the scale is dropped": (fusion._Fusion, "__init__", _unscaled, {}),
    "a mask is not inverted": (fusion._Fusion, "_whole", _uninverted, {"mask": "bool"}),
    "a band is one key too wide": (fusion, "by_position", _one_more, {"window": (17, -1)}),
    "causal starts at the upper left": (fusion, "by_position", _upper_left, {"causal": "bottom_right"}),
    "statistics of packed sequences stay heads first": (fusion._Fusion, "__init__", _heads_first, {"lse": True}),
    "the LSE is of base 2": (Tensor, "log", _base_two, {"lse": True}),
    "rows without keys keep what the operator left": (fusion, "blind_rows", lambda *_: 0, {"s_relation": "more"}),
}


@functools.cache
def drawn() -> list[Case]:
    return TARGET.cases(per_row=4, dtypes=("bfloat16",))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found(error: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, telling = PLANTED[error]
    told = [c for c in drawn() if all(getattr(c.request, field) == value for field, value in telling.items())]
    told = [c for c in told if c.request.family == "varlen" or "heads first" not in error]
    assert told
    monkeypatch.setattr(where, name, wrong)
    assert TARGET.caught(told[:6])


# ------------------------------------------------------------------------------------------------ refusals

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"softcap": 30.0}, "npu", "softcap=30.0 is not declared"),
    ({"mask": "additive"}, "npu", "mask='additive' is not"),
    ({"alibi": True}, "npu", "alibi=True is not declared"),
    ({"head_dim": 769}, "npu", "head_dim=769 is not 1 to 768"),
    ({"heads": 257}, "npu", "heads=257 is not 1 to 256"),
    ({"dtype": "float64"}, "npu", "dtype='float64' is not"),
    ({"deterministic": True}, "npu", "deterministic=True is not declared"),
    ({"graph_capture": True}, "npu", "graph_capture=True is not declared"),
    ({"dropout": 0.1, "lse": True}, "npu", "dropout=0.1 is not declared"),
]


@pytest.mark.parametrize(("changes", "platform", "words"), REFUSED)
def test_refusals(changes: dict[str, Any], platform: str, words: str) -> None:
    try:
        selection = what_if(
            AttentionRequest(**changes), platform=platform, installed=("torch-npu",), backend="fa", strict=True
        )
    except PolyattnError as error:
        said = str(error)
    else:
        said = f"served by {selection.id} with {selection.lowerings}"
    assert words in said


INSIDE: list[dict[str, Any]] = [
    {"head_dim": 768, "heads": 256, "dtype": "float32"},
    {"head_dim": 192, "v_head_dim": 128, "lse": True, "grad": ("query", "key", "value")},
    {"family": "varlen", "causal": "top_left", "s_relation": "fewer", "lse": True},
    {"family": "varlen", "window": (7, 3), "s_relation": "more"},
    {"mask": "bool", "dropout": 0.1, "grad": ("query",)},
]


@pytest.mark.parametrize("changes", INSIDE)
def test_limits_are_taken(changes: dict[str, Any]) -> None:
    request = AttentionRequest(**changes)
    selection = what_if(request, platform="npu:ascend910b@8.3", installed=("torch-npu",), backend="fa", strict=True)
    assert (selection.backend, selection.lowerings) == ("fa", ())


LOWERED: list[tuple[dict[str, Any], str, str]] = [
    ({"head_dim": 128, "v_head_dim": 192}, "npu", "pad_head_dim"),
    ({"family": "varlen", "mask": "bool"}, "npu", "pad_sequences"),
    ({"family": "varlen", "causal": "top_left", "s_relation": "fewer", "window": (3, -1)}, "npu", "pad_sequences"),
    # CANN 8.2 gives no statistics of packed sequences in the order of the output.
    ({"family": "varlen", "lse": True}, "npu:ascend910b@8.2", "pad_sequences"),
]


@pytest.mark.parametrize(("changes", "platform", "lowering"), LOWERED)
def test_what_exact_rewrites_serve(changes: dict[str, Any], platform: str, lowering: str) -> None:
    request = AttentionRequest(**changes)
    selection = what_if(request, platform=platform, installed=("torch-npu",), backend="fa", strict=True)
    assert selection.lowerings == (lowering,)


def test_sinks_come_from_the_lse() -> None:
    for grad in ((), ("query", "key", "value", "sinks")):
        request = AttentionRequest(sinks=True, grad=grad)
        selection = what_if(request, platform="npu", installed=("torch-npu",), backend="fa", strict=True)
        assert selection.lowerings == ("sinks_from_lse",)


def test_an_older_torch_npu_is_named(library: Library) -> None:
    def npu_fusion_attention(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str) -> None: ...

    library.add("torch_npu", npu_fusion_attention=npu_fusion_attention)
    with pytest.raises(
        BackendUnavailableError, match=r"torch-npu 2\.13\.0 takes no 'softmax_layout', which the LSE of"
    ):
        TARGET.bind(**USUAL, family="varlen", lse=True)
