"""Arguments that are no tensors: what they may be does not depend on what was called before, and NumPy's are taken."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.contract.scalars import shown
from polyattn.dispatch import call_key
from polyattn.dispatch import dense as dispatch
from polyattn.dispatch.compile import trace as compiled
from polyattn.errors import InvalidInputError
from polyattn.integrations.transformers.attention import make_forward
from polyattn.serving import AttentionLayer

QUERY, KEY = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8)
NEXT = torch.tensor([0, 3, 6], dtype=torch.int32)
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
LENS = torch.tensor([5, 7], dtype=torch.int32)


def dense(**changes: Any) -> Any:
    return polyattn.attention(QUERY, KEY, KEY, **changes)


def traced(**changes: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(polyattn.attention, backend="eager")(QUERY, KEY, KEY, **changes)


def packed(**changes: Any) -> Any:
    given = {"cu_seqlens_q": NEXT, "cu_seqlens_k": NEXT, "max_seqlen_q": 3, "max_seqlen_k": 3}
    return polyattn.varlen_attention(QUERY[0], KEY[0], KEY[0], **{**given, **changes})


def paged(**changes: Any) -> Any:
    pages = KEY.reshape(-1)[: 4 * 4 * 2 * 4].reshape(4, 4, 2, 4)
    given = {"page_table": TABLE, "seq_lens": LENS, "cu_seqlens_q": NEXT, "max_seqlen_q": 3, "max_seqlen_k": 7}
    return polyattn.paged_attention(QUERY[0, :, :, :4].contiguous(), pages, pages, **{**given, **changes})


def latent(**changes: Any) -> Any:
    rows = KEY.reshape(-1)[: 4 * 4 * 8].reshape(4, 4, 8)
    given = {"page_table": TABLE, "seq_lens": LENS, "cu_seqlens_q": NEXT, "max_seqlen_q": 3, "max_seqlen_k": 7}
    return polyattn.mla_attention(QUERY[0], rows, **{**given, "scale": 0.3, "v_head_dim": 4, **changes})


def bound(**changes: Any) -> Any:
    return polyattn.bind(**changes)(QUERY, KEY, KEY)


Call = Callable[..., Any]
CALLS: dict[str, Call] = {
    "dense": dense,
    "traced": traced,
    "packed": packed,
    "paged": paged,
    "latent": latent,
    "bound": bound,
}


def answer(call: Call, given: dict[str, Any]) -> Any:
    """The output of a call, or what it says."""
    try:
        found = call(**given)
    except polyattn.PolyattnError as error:
        return f"{type(error).__name__}: {error}"
    return found[0] if isinstance(found, tuple) else found


def fresh() -> None:
    """As in a process that has called nothing."""
    dispatch._sites.clear()
    call_key._known_site.cache_clear()
    compiled._names.clear()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


EQUAL = [
    ("causal", True, (1, 1.0, np.True_, np.int64(1), np.float32(1), Fraction(1), 1 + 0j)),
    ("causal", False, (0, 0.0, -0.0, np.False_)),
    ("window", (1, 0), ((True, False), (1.0, 0.0), (np.int64(1), np.int32(0)), (np.True_, 0), (1 + 0j, 0), [1, 0])),
    ("softcap", 1.0, (True, 1, np.float32(1), np.float64(1), np.int64(1), np.True_, 1 + 0j)),
    ("softcap", 0.0, (False, 0, -0.0, np.False_)),
    ("scale", 1.0, (True, 1, np.float32(1), np.int8(1), np.True_, 1 + 0j)),
    ("dropout_p", 0.0, (False, 0, np.float32(0), np.False_)),
    ("return_lse", True, (1, 1.0, np.True_, np.int64(1))),
    ("deterministic", True, (1, 1.0, np.True_)),
]


LACKS = {"paged": {"dropout_p"}, "latent": {"dropout_p", "softcap"}}
"""Arguments that a call does not have."""
TAKEN = [
    pytest.param(name, *equal, id=f"{name} {equal[0]} {equal[1]}")
    for name in CALLS
    for equal in EQUAL
    if equal[0] not in LACKS.get(name, ())
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("name", "argument", "usual", "others"), TAKEN)
def test_what_is_taken_does_not_depend_on_what_was_called_before(name, argument, usual, others):
    """1, 1.0 and True are one key of a dict, and every call looks its arguments up in one."""
    call = CALLS[name]
    if call is traced:
        # Dynamo has no constants of NumPy's types: it does not call the plan's maker with them.
        others = [o for o in others if not isinstance(o, np.generic | complex | Fraction)]
    for other in others:
        fresh()
        alone = answer(call, {argument: other})
        fresh()
        assert not isinstance(answer(call, {argument: usual}), str)
        assert same(answer(call, {argument: other}), alone), (argument, other)
        fresh()
        answer(call, {argument: other})
        assert not isinstance(answer(call, {argument: usual}), str), (argument, other)


ROWS = torch.ones(1, 2, 6, 8)


def test_a_layer_of_transformers_does_not_depend_on_it_either():
    layer = torch.nn.Module()
    attend = make_forward(None, frozenset())

    def call(**given: Any) -> Any:
        return attend(layer, ROWS, ROWS, ROWS, None, **given)[0]

    for usual, other in (({"softcap": 1.0}, {"softcap": True}), ({"scaling": 1.0}, {"scaling": True})):
        call(**usual)
        with pytest.raises(InvalidInputError, match=f"{'scale' if 'scaling' in usual else 'softcap'}=True"):
            call(**other)


NUMPYS = [
    ({"causal": np.True_}, {"causal": True}),
    ({"causal": np.False_}, {"causal": False}),
    ({"window": (np.int64(2), np.int32(-1))}, {"window": (2, -1)}),
    ({"window": (np.uint8(2), 0)}, {"window": (2, 0)}),
    ({"scale": np.float16(0.5)}, {"scale": 0.5}),
    ({"softcap": np.float32(2)}, {"softcap": 2.0}),
    ({"softcap": np.int64(2)}, {"softcap": 2.0}),
    ({"deterministic": np.False_}, {"deterministic": False}),
    ({"return_lse": np.False_}, {"return_lse": False}),
    ({"max_seqlen_q": np.int64(3), "max_seqlen_k": np.uint16(7)}, {"max_seqlen_q": 3, "max_seqlen_k": 7}),
    ({"tree": np.False_, "chunked_prefix": np.False_}, {}),
    ({"save_kv_cache": np.False_}, {}),
    ({"v_head_dim": np.int64(4)}, {}),
    ({"window": (10**400, 2**63)}, {}),
    ({"window": (1e300, -1)}, {}),
    ({"window": (np.uint64(2**64 - 1), -1)}, {}),
]
ONLY = {
    "tree": (paged, latent),
    "save_kv_cache": (paged,),
    "v_head_dim": (latent,),
    "max_seqlen_q": (packed, paged, latent),
    "softcap": (dense, packed, paged, bound),
}


@pytest.mark.parametrize(("given", "meant"), NUMPYS, ids=[str(given)[:60] for given, _ in NUMPYS])
def test_values_are_what_they_say(given, meant):
    """NumPy's are Python's, and a bound of a window that no sequence reaches is none."""
    for call in ONLY.get(next(iter(given)), (dense, packed, paged, latent, bound)):
        assert same(answer(call, given), answer(call, meant)), call.__name__
        assert not isinstance(answer(call, given), str)


def test_a_backend_is_given_pythons_numbers(monkeypatch):
    """Adapters hand lengths and bounds to libraries, which take ints."""
    seen: dict[str, Any] = {}

    def note(chosen: Any) -> Any:
        def forward(*tensors: Tensor, **given: Any) -> Any:
            seen.update(given, window=chosen.request.window, softcap=chosen.request.softcap, lse=chosen.request.lse)
            return chosen.bound.forward(*tensors, **given)

        return forward

    monkeypatch.setattr(call_key, "runner", lambda chosen, *rest: note(chosen))
    fresh()
    lens = {"max_seqlen_q": np.int64(3), "max_seqlen_k": np.int64(3)}
    packed(**lens, window=(np.int64(2), 0), softcap=np.float32(2), return_lse=np.True_)
    numbers = (seen["max_seqlen_q"], seen["max_seqlen_k"], *seen["window"], seen["softcap"], seen["lse"])
    assert [type(number) for number in numbers] == [int, int, int, int, float, bool]
    fresh()


FLAGS = ["no", None, 2, -1, 1.0, [], np.array([True]), np.float32(1), torch.tensor(True), torch.ones(2).bool()]


@pytest.mark.parametrize("value", FLAGS, ids=[shown(value) for value in FLAGS])
@pytest.mark.parametrize(
    ("call", "flag"),
    [
        *((call, flag) for call in (dense, packed, paged, latent, bound) for flag in ("return_lse", "deterministic")),
        *((call, flag) for call in (paged, latent) for flag in ("tree", "chunked_prefix")),
        (paged, "save_kv_cache"),
    ],
)
def test_flags_are_true_or_false(call, flag, value):
    with pytest.raises(
        InvalidInputError, match=rf"^{flag}=.* is an? {type(value).__name__}; it must be True or False$"
    ):
        call(**{flag: value})


@pytest.mark.parametrize("call", [dense, packed, paged, bound], ids=lambda call: call.__name__)
@pytest.mark.parametrize("softcap", [1e39, 3e38, 1e31, 1e-31, 1e-46, 10**400, 10**5000], ids=lambda c: shown(c)[:9])
def test_a_softcap_that_float32_does_not_hold(call, softcap):
    """S5: 1e39 is infinite there, and tanh of 0 times it is NaN; kernels multiply by the inverse of others."""
    with pytest.raises(InvalidInputError, match=r"^softcap=.* must be 0, which is off, or from 1e-30 to 1e\+30"):
        call(softcap=softcap)


@pytest.mark.parametrize("softcap", [1e-30, 1e30], ids=str)
@pytest.mark.parametrize("backend", ["flex_attention", "reference"])
def test_the_softcaps_that_are_left_are_right(softcap, backend):
    got = dense(softcap=softcap, backend=backend)
    # Of a cap far above every logit nothing is seen, and one far below makes all of them 0.
    want = dense(scale=None if softcap > 1 else 0.0)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("call", [dense, packed, paged, latent, bound], ids=lambda call: call.__name__)
@pytest.mark.parametrize("scale", [1e39, -1e31, 10**400, -(10**5000)], ids=lambda c: shown(c)[:9])
def test_a_scale_that_float32_does_not_hold(call, scale):
    with pytest.raises(InvalidInputError, match=r"^scale=.* must be within -1e\+30 and 1e\+30: logits are float32$"):
        call(scale=scale)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 2**31}, None),
        ({"window": 10**400}, None),
        ({"window": np.int64(3)}, None),
        ({"window": True}, "window=True; a whole number of at least -1"),
        ({"window": 1.5}, "window=1.5; a whole number"),
        ({"softcap": 1e39}, "softcap=1e.39; it must be 0, which is off, or from 1e-30 to 1e.30"),
        ({"softcap": True}, "softcap=True; a number above 0 is needed, or 0"),
        ({"softcap": 10**400}, "softcap=1000.*; it must be 0"),
        ({"scale": 10**400}, "scale=1000.*; it must be within"),
        ({"scale": torch.ones(())}, "scale=tensor.*; a finite number is needed"),
        ({"latent": "no"}, "latent='no' is a str; it must be True or False"),
        ({"heads": np.int64(4), "softcap": np.float32(2), "latent": np.False_}, None),
    ],
    ids=str,
)
def test_layers_of_an_engine_take_the_same(changes, words):
    given = {"layer_id": 0, "heads": 4, "kv_heads": 2, "head_dim": 8, **changes}
    if words is None:
        AttentionLayer(**given)
        return
    with pytest.raises(InvalidInputError, match=words):
        AttentionLayer(**given)


def test_values_in_messages_are_short():
    assert shown("a") == "'a'"
    assert shown(torch.tensor([[1], [2]])) == "tensor([[1], [2]])"
    assert shown(10**5000) == "a number of 16610 bits"
    assert len(shown(list(range(1000)))) == 120
