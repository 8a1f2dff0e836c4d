"""The signature of a call is complete: calls that differ in one field only never share an entry where that matters."""

from __future__ import annotations

import contextlib

import pytest
import torch

import polyattn
from polyattn.dispatch.bound_table import Recent
from polyattn.dispatch.call_key import LARGE, CallKey, Static
from polyattn.dispatch.dense import DenseSite, _dense_key
from polyattn.semantics import reference


def tensors(**change):
    """A plain call [2, 5, 4, 16], with what `change` names made different."""
    size = {"b": 2, "s_q": 5, "s_k": 5, "h": 4, "h_kv": 2, "d": 16, "d_v": 16, "dtype": torch.float32, "device": "cpu"}
    size |= change
    make = {"dtype": size["dtype"], "device": size["device"]}
    return (
        torch.zeros(size["b"], size["s_q"], size["h"], size["d"], **make),
        torch.zeros(size["b"], size["s_k"], size["h_kv"], size["d"], **make),
        torch.zeros(size["b"], size["s_k"], size["h_kv"], size["d_v"], **make),
    )


def key(q, k, v, mask=None, sinks=None, out=None, bshd=True):
    return CallKey._make(_dense_key(q, k, v, mask, sinks, out, bshd))._asdict()


def changed(a, b):
    return {name for name in CallKey._fields if a[name] != b[name]}


q, k, v = tensors()
BASE = key(q, k, v)
MASK = torch.ones(2, 1, 5, 5, dtype=torch.bool)


def with_grad(*which):
    return [t.clone().requires_grad_() if i in which else t for i, t in enumerate((q, k, v))]


def misaligned():
    return torch.zeros(q.numel() + 1)[1:].view(q.shape)


def strided():
    return torch.zeros(2, 5, 16, 4).transpose(2, 3)


CASES = {
    "exact_types": lambda: key(torch.nn.Parameter(q, requires_grad=False), k, v),
    "query_dtype": lambda: key(q.double(), k, v),
    "key_dtype": lambda: key(q, k.double(), v),
    "value_dtype": lambda: key(q, k, v.double()),
    "query_device": lambda: key(q.to("meta"), k, v),
    "key_device": lambda: key(q, k.to("meta"), v),
    "value_device": lambda: key(q, k, v.to("meta")),
    "query_heads": lambda: key(*tensors(h=8)),
    "key_heads": lambda: key(q, tensors(h_kv=4)[1], v),
    "value_heads": lambda: key(q, k, tensors(h_kv=4)[2]),
    "query_dim": lambda: key(tensors(d=32)[0], k, v),
    "key_dim": lambda: key(q, tensors(d=32)[1], v),
    "value_dim": lambda: key(q, k, tensors(d_v=8)[2]),
    "relation": lambda: key(*tensors(s_k=9)),
    "lengths_agree": lambda: key(q, k, tensors(s_k=7)[2]),
    "zero_size": lambda: key(*tensors(b=0)),
    "dense_axes": lambda: key(strided(), k, v),
    "aligned": lambda: key(misaligned(), k, v),
    "grads": lambda: key(*with_grad(0)),
    "mask": lambda: key(q, k, v, MASK),
    "sinks": lambda: key(q, k, v, None, torch.zeros(4)),
    "out": lambda: key(q, k, v, None, None, torch.zeros(2, 5, 4, 16)),
}


def test_every_field_has_a_case():
    elsewhere = {"large", "autocast", "capture", "transform", "deterministic"}
    assert set(CASES) | elsewhere == set(CallKey._fields)


@pytest.mark.parametrize("field", CASES)
def test_field_is_in_the_key(field):
    assert field in changed(BASE, CASES[field]())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradient_need_is_per_input(which):
    assert changed(BASE, key(*with_grad(which))) == {"grads"}
    with torch.no_grad():
        assert key(*with_grad(which))["grads"] is None


def test_large_is_in_the_key():
    huge = torch.empty(LARGE, device="meta").view(1, -1, 1, 16)
    assert key(huge, huge, huge)["large"] is True
    assert BASE["large"] is False


def test_autocast_and_its_dtype_are_in_the_key():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bf16 = key(q, k, v)
    with torch.autocast("cpu", dtype=torch.float16):
        fp16 = key(q, k, v)
    assert len({BASE["autocast"], bf16["autocast"], fp16["autocast"]}) == 3


def test_determinism_is_in_the_key():
    torch.use_deterministic_algorithms(True)
    try:
        assert changed(BASE, key(q, k, v)) == {"deterministic"}
    finally:
        torch.use_deterministic_algorithms(False)


def test_transform_is_in_the_key():
    seen = []
    torch.func.vmap(lambda a, b, c: seen.append(key(a, b, c)["transform"]) or a)(q[None], k[None], v[None])
    assert seen == ["vmap"]


def test_capture_is_in_the_key(monkeypatch):
    monkeypatch.setattr("polyattn.dispatch.dense.capturing", lambda kind: True)
    assert changed(BASE, key(q, k, v)) == {"capture"}


@pytest.mark.parametrize(
    "mask",
    [
        MASK.float(),
        MASK.expand(2, 4, 5, 5),
        torch.ones(2, 1, 5, 4, dtype=torch.bool),
        MASK.float().requires_grad_(),
        MASK[0],
    ],
    ids=["additive", "per head is the same answer", "wrong length", "gradient", "rank"],
)
def test_mask_facts_are_in_the_key(mask):
    base = key(q, k, v, MASK)["mask"]
    same_answer = mask.shape == (2, 4, 5, 5)
    assert (key(q, k, v, mask)["mask"] == base) is same_answer


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, 5, 4, 8),
        torch.zeros(2, 5, 4, 16, dtype=torch.float64),
        torch.zeros(2, 5, 16, 4).transpose(2, 3),
        torch.zeros(2, 5, 4, 16, requires_grad=True),
        q,
    ],
    ids=["shape", "dtype", "strides", "gradient", "aliases the query"],
)
def test_out_facts_are_in_the_key(out):
    assert key(q, k, v, None, None, out)["out"] != key(q, k, v, None, None, torch.zeros(2, 5, 4, 16))["out"]


def test_statics_override_path_and_backend_name_different_sites():
    from polyattn.dispatch import dense as dispatch

    dispatch._sites.clear()
    calls = [
        {},
        {"causal": True},
        {"causal": "top_left"},
        {"window": (2, 0)},
        {"softcap": 5.0, "backend": "reference"},
        {"scale": 0.5},
        {"return_lse": True},
        {"deterministic": True, "backend": "reference"},
        {"backend": "flex_attention"},
        {"dropout_p": 0.5},
        {"layout": "BHSD"},
    ]
    same = torch.zeros(2, 4, 4, 16)
    for statics in calls:
        polyattn.attention(same, same, same, **statics)
    with polyattn.use_backend("reference"):
        polyattn.attention(same, same, same)
    with polyattn.component("encoder"):
        polyattn.attention(same, same, same)
    assert len(dispatch._sites) == len(calls) + 2


def test_random_lengths_do_not_miss():
    site = polyattn.bind(causal=True)
    for s in (2, 3, 7, 64, 100):
        site(*tensors(s_q=s, s_k=s))
        site(*tensors(s_q=1, s_k=s))
        site(*tensors(s_q=2, s_k=s + 1))
    relations = {signature[CallKey._fields.index("relation")] for signature in site._entries}
    assert relations == {"equal", "one", "fewer"}
    assert len(site._entries) == 3


def test_the_entries_are_bounded(monkeypatch):
    monkeypatch.setattr("polyattn.dispatch.dense.SIGNATURES_KEPT", 3)
    site = polyattn.bind()
    for d in range(8, 20):
        x = torch.zeros(1, 2, 1, d)
        site(x, x, x)
    assert len(site._entries) <= 3


def test_what_was_used_least_recently_is_forgotten():
    kept = Recent(8)
    for n in range(100):
        kept.keep(n, str(n))
        assert (kept.get(0) or kept.recall(0)) == "0", "it is asked for all the time"
        assert len(kept) + len(kept._old) <= 8
    for n in range(97, 100):
        assert (kept.get(n) or kept.recall(n)) == str(n)
    assert kept.get(50) is kept.recall(50) is None


def test_more_sites_than_are_kept_are_not_all_made_anew(monkeypatch):
    """Those that are called between all others stay."""
    made = []
    whole = DenseSite.__init__
    monkeypatch.setattr(DenseSite, "__init__", lambda self, *a: made.append(a[0].scale) or whole(self, *a))
    monkeypatch.setattr("polyattn.dispatch.dense._sites", Recent(8))
    x = torch.zeros(1, 1, 2, 8)
    for n in range(1, 21):
        polyattn.attention(x, x, x, scale=0.5)
        polyattn.attention(x, x, x, scale=float(n))
    assert made == [0.5, *map(float, range(1, 21))]
    polyattn.attention(x, x, x, scale=1.0)
    assert made[-1] == 1.0


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_grows_is_not_looked_up(monkeypatch, layout, dtype):
    site = polyattn.bind(layout=layout)

    def call(s_k, s_q=1, **mask):
        shape = {"batch": 2, "heads": 1, "rows": s_q, "columns": s_k, **mask}
        given = torch.randn(2, 4, s_q, 16), torch.randn(2, 2, s_k, 16), torch.randn(2, 2, s_k, 16)
        ones = torch.ones(*shape.values())
        seen = ones.bernoulli(0.5).index_fill_(-1, torch.tensor([0]), 1.0).to(dtype)
        views = given if layout == "BHSD" else [t.transpose(1, 2) for t in given]
        found = site(*views, seen)
        right = reference.attention(*given, attn_mask=seen, layout="BHSD")
        torch.testing.assert_close(found if layout == "BHSD" else found.transpose(1, 2), right)

    with counted(monkeypatch) as misses:
        for s_k in (5, 6):
            call(s_k)
        before = len(misses)
        for s_k in range(7, 50):
            call(s_k)
        for _ in range(40):
            call(50)
        call(51, batch=1, heads=4)
        assert len(misses) == before
        call(9, s_q=3)
        assert len(misses) == before + 1, "not the last token alone"
        for wrong in ({"columns": 8}, {"rows": 2}, {"batch": 3}, {"heads": 2}):
            with pytest.raises(polyattn.InvalidInputError, match="attn_mask"):
                call(9, **wrong)


@contextlib.contextmanager
def counted(monkeypatch):
    count = []
    whole = DenseSite._find
    monkeypatch.setattr(DenseSite, "_find", lambda self, *a: count.append(1) or whole(self, *a))
    yield count


def test_the_guarded_path_answers_like_the_full_one(monkeypatch):
    """Whatever changes after the guards were set falls through to the complete key."""
    with counted(monkeypatch) as misses:
        site = DenseSite(Static(causal=True))
        a, b, c = (torch.randn(2, 5, n, 16) for n in (4, 2, 2))
        for _ in range(3):
            site(a, b, c)
        before = len(misses)
        site(a, b, c)
        site(*(torch.randn(1, 7, n, 16) for n in (4, 2, 2)))
        assert len(misses) == before, "equal signatures, also of other lengths, must not look anything up"
        for change in (
            lambda: site(a.double(), b.double(), c.double()),
            lambda: site(a.requires_grad_(), b, c),
            lambda: site(a[:, :1], b, c),
            lambda: site(a[:, :3], b, c),
            lambda: site(a, b, c, torch.ones(2, 1, 5, 5, dtype=torch.bool)),
            lambda: site(a[:0], b[:0], c[:0]),
        ):
            before = len(misses)
            change()
            assert len(misses) == before + 1
        with pytest.raises(polyattn.InvalidInputError, match="key has 5 positions, value 4"):
            site(a, b, c[:, :4])
        with pytest.raises(polyattn.InvalidInputError, match="batch sizes differ: query 2, key 1"):
            site(a, b[:1], c[:1])


def test_grad_mode_and_determinism_are_watched_after_the_guards(monkeypatch):
    site = DenseSite(Static())
    a = torch.randn(2, 5, 4, 16, requires_grad=True)
    for _ in range(3):
        assert site(a, a, a).requires_grad
    with counted(monkeypatch) as misses:
        with torch.no_grad():
            assert not site(a, a, a).requires_grad
        torch.use_deterministic_algorithms(True)
        try:
            site(a, a, a)
        finally:
            torch.use_deterministic_algorithms(False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert site(a, a, a).dtype == torch.bfloat16
    assert len(misses) == 3


def test_on_a_gpu_alignment_and_a_recording_are_watched_after_the_guards(monkeypatch):
    site = DenseSite(Static())
    for _ in range(3):
        site(q, k, v)
    seen, state = [], {"recording": False, "stream": 7}
    monkeypatch.setattr(site._fast, "call", lambda *tensors: seen.append("fast"))
    monkeypatch.setattr(DenseSite, "_find", lambda *_: seen.append("found"))
    monkeypatch.setattr("polyattn.dispatch.dense.recording", lambda: state["recording"])
    monkeypatch.setattr("polyattn.dispatch.dense.raw_stream", lambda index: state["stream"])
    monkeypatch.setattr(site._fast, "cuda", True)
    monkeypatch.setattr(site._fast, "watch", True)
    aside = torch.zeros(2, 5, 4, 17)[..., :16]
    wide = torch.zeros(2, 5, 4, 20)[..., :16]
    for query in (q, misaligned(), aside, wide):
        site(query, k, v)
    state["recording"] = True
    site(q, k, v)
    assert seen == ["fast", "found", "found", "fast", "found"]


def test_the_default_stream_is_not_asked_whether_it_records(monkeypatch):
    site = DenseSite(Static())
    for _ in range(3):
        site(q, k, v)
    asked = []
    monkeypatch.setattr("polyattn.dispatch.dense.recording", lambda: asked.append("recording") or False)
    monkeypatch.setattr("polyattn.dispatch.dense.raw_stream", lambda index: asked.append(index) or 0)
    for name, value in (("cuda", True), ("watch", True), ("index", 3)):
        monkeypatch.setattr(site._fast, name, value)
    site(q, k, v)
    assert asked == [3]


def test_epoch_empties_every_site():
    site = polyattn.bind()
    x = torch.zeros(1, 2, 1, 8)
    for _ in range(3):
        site(x, x, x)
    polyattn.force_backend("reference")
    try:
        assert polyattn.explain(site, x, x, x).backend == "reference"
        site(x, x, x)
        assert site._fast is None
    finally:
        polyattn.force_backend(None)


def test_an_integral_float_in_a_window_is_that_integer_cold_and_warm():
    x = torch.randn(1, 6, 2, 8)
    cold = polyattn.attention(x, x, x, window=(4.0, 0))
    torch.testing.assert_close(cold, polyattn.attention(x, x, x, window=(4, 0)), rtol=0, atol=0)
    with pytest.raises(polyattn.InvalidInputError, match="left bound must be an integer"):
        polyattn.attention(x, x, x, window=(4.5, 0))


def test_a_mask_is_guarded_too(monkeypatch):
    site = DenseSite(Static())
    a, b, c = (torch.randn(2, 5, n, 16) for n in (4, 2, 2))
    mask = torch.rand(2, 1, 5, 5) > 0.3
    want = polyattn.attention(a, b, c, attn_mask=mask, backend="reference")
    other = polyattn.attention(a, b, c, attn_mask=~mask, backend="reference")
    with counted(monkeypatch) as misses:
        for _ in range(3):
            torch.testing.assert_close(site(a, b, c, mask), want)
        before = len(misses)
        torch.testing.assert_close(site(a, b, c, ~mask), other)
        assert len(misses) == before, "another mask of the same kind and shape needs no lookup"
        for change, more in (
            (lambda: site(a, b, c, mask.float()), 1),
            (lambda: site(a, b, c, mask[:1]), 0),
            (lambda: site(a, b, c), 1),
            (lambda: site(a[:1], b[:1], c[:1], mask[:1]), 0),
        ):
            before = len(misses)
            change()
            assert len(misses) == before + more
        with pytest.raises(polyattn.InvalidInputError, match="attn_mask has shape"):
            site(a, b, c, mask[..., :4])
        grad = mask.float().requires_grad_()
        for _ in range(3):
            assert site(a, b, c, grad).requires_grad
        with torch.no_grad():
            assert not site(a, b, c, grad).requires_grad
