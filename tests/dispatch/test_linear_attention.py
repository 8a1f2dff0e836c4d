"""`linear_attention`: the identities of the gated delta rules, its state, and typed errors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import polyattn
from polyattn.errors import InvalidInputError, UnsupportedRequestError
from polyattn.semantics.reference import unit_rows

B, S, H, H_V, D, D_V = 2, 13, 2, 4, 6, 5
METHODS = ("gdn", "kda")


@pytest.fixture(autouse=True, params=["", "reference"])
def serving(request) -> Iterator[str]:
    """Who serves: whoever is chosen, or the definition."""
    with polyattn.use_backend(request.param or None):
        yield request.param


def inputs(method: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(4)
    gates = (B, S, H_V, D) if method == "kda" else (B, S, H_V)
    return {
        "query": torch.randn(B, S, H, D, dtype=dtype),
        "key": torch.nn.functional.normalize(torch.randn(B, S, H, D, dtype=dtype), dim=-1),
        "value": torch.randn(B, S, H_V, D_V, dtype=dtype),
        "gate": -torch.rand(gates, dtype=dtype),
        "beta": torch.rand(B, S, H_V, dtype=dtype),
    }


def call(given: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    return polyattn.linear_attention(**given, **options)


def part(given: dict[str, Tensor], tokens: slice) -> dict[str, Tensor]:
    return {name: tensor[:, tokens] for name, tensor in given.items()}


def chunked(given: dict[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
    """The chunked form of the paper, one head at a time: other operations in another order."""
    q, k = (given[n].repeat_interleave(H_V // H, 2) for n in ("query", "key"))
    gate = given["gate"] if given["gate"].ndim == 4 else given["gate"][..., None].expand(-1, -1, -1, D)
    outs, states = torch.empty(B, S, H_V, D_V, dtype=torch.float64), torch.zeros(B, H_V, D, D_V, dtype=torch.float64)
    for b in range(B):
        for h in range(H_V):
            state = states[b, h]
            for start in range(0, S, size):
                at = (b, slice(start, start + size), h)
                G, beta = gate[at].cumsum(0), given["beta"][at]
                decay = (G[:, None] - G[None]).exp()  # [i, j, D]
                kk = torch.einsum("id,jd,ijd->ij", k[at], k[at], decay)
                lower = torch.tril(beta[:, None] * kk, -1)
                T = torch.linalg.inv(torch.eye(len(beta), dtype=torch.float64) + lower)
                fresh = T @ (beta[:, None] * given["value"][at]) - T @ (beta[:, None] * k[at] * G.exp()) @ state
                qk = torch.tril(torch.einsum("id,jd,ijd->ij", q[at], k[at], decay))
                outs[b, start : start + size, h] = ((q[at] * G.exp()) @ state + qk @ fresh) * D**-0.5
                state = G[-1].exp()[:, None] * state + (k[at] * (G[-1] - G).exp()).T @ fresh
            states[b, h] = state
    return outs, states


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("method", METHODS)
def test_it_is_the_chunked_form(method, size):
    given = inputs(method)
    out, state = call(given, method=method)
    right, right_state = chunked(given, size)
    torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, right_state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_in_two_calls_gives_what_it_gives_in_one(method, layout):
    given = inputs(method)
    out, state = call(given, method=method)
    first, carried = call(part(given, slice(0, 5)), method=method, state_layout=layout)
    kept = carried.clone()
    rest, last = call(part(given, slice(5, None)), method=method, state=carried, state_layout=layout)
    assert torch.equal(carried, kept), "the state given is not written"
    torch.testing.assert_close(torch.cat([first, rest], 1), out)
    torch.testing.assert_close(last if layout == "KV" else last.mT, state)


def test_tokens_one_by_one_are_decode():
    given, state, outs = inputs("gdn"), None, []
    for t in range(S):
        now = part(given, slice(t, t + 1))
        assert polyattn.explain(polyattn.linear_attention, **now, state=state).request.phase == "decode"
        found, state = call(now, state=state)
        outs.append(found)
    torch.testing.assert_close(torch.cat(outs, 1), call(given)[0])


@pytest.mark.parametrize("method", METHODS)
def test_packed_sequences_do_not_see_each_other(method):
    given = inputs(method)
    flat = {name: tensor.reshape(1, B * S, *tensor.shape[2:]) for name, tensor in given.items()}
    cu = torch.tensor([0, 4, 4, S, 2 * S], dtype=torch.int32)
    first = torch.randn(4, H_V, D, D_V, dtype=torch.float64)
    out, states = call(flat, method=method, cu_seqlens=cu, state=first)
    for n, (start, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        right, state = call(part(flat, slice(start, end)), method=method, state=first[n : n + 1])
        torch.testing.assert_close(out[:, start:end], right)
        torch.testing.assert_close(states[n : n + 1], state)
    assert torch.equal(states[1], first[1]), "a sequence without tokens keeps its state"


def test_identities():
    given = inputs("gdn")
    broad = {**given, "gate": given["gate"][..., None].expand(-1, -1, -1, D)}
    torch.testing.assert_close(call(broad, method="kda"), call(given))
    state = torch.randn(B, H_V, D, D_V, dtype=torch.float64)
    nothing = {**given, "gate": torch.zeros_like(given["gate"]), "beta": torch.zeros_like(given["beta"])}
    assert torch.equal(call(nothing, state=state)[1], state)
    # Orthonormal keys, no decay and beta 1: what is asked for by its key comes back.
    keys = torch.eye(D, dtype=torch.float64)[None, :, None].expand(B, D, H, D)
    now = {**part(given, slice(0, D)), "query": keys, "key": keys}
    now |= {"gate": torch.zeros_like(now["gate"]), "beta": torch.ones_like(now["beta"])}
    torch.testing.assert_close(call(now, scale=1.0)[0], now["value"])


def test_unit_rows_and_scale():
    given = inputs("gdn")
    long = {**given, "key": given["key"] * 3, "query": given["query"] * 2}
    normed = {**given, "key": unit_rows(long["key"]), "query": unit_rows(long["query"])}
    torch.testing.assert_close(call(long, qk_norm=True, scale=0.7), call(normed, scale=0.7))
    torch.testing.assert_close(unit_rows(long["key"]).norm(dim=-1), torch.ones(B, S, H, dtype=torch.float64))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_every_tensor(method):
    given = {n: t[:1, :4].clone().requires_grad_() for n, t in inputs(method).items()}
    state = torch.randn(1, H_V, D, D_V, dtype=torch.float64, requires_grad=True)

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return call(dict(zip(given, tensors, strict=False)), method=method, state=tensors[-1], qk_norm=True)

    assert torch.autograd.gradcheck(outputs, (*given.values(), state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_state_is_float32(dtype):
    given = {name: tensor.to(dtype) for name, tensor in inputs("gdn").items()}
    out, state = call(given)
    assert (out.dtype, state.dtype) == (dtype, torch.float32)
    right, right_state = call({name: tensor.double() for name, tensor in given.items()})
    torch.testing.assert_close(state, right_state.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, right.to(dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["gate", "beta", "a_log"])
def test_the_state_has_the_dtype_that_the_next_call_takes(name):
    given = {name: tensor.float() for name, tensor in inputs("gdn").items()} | {"a_log": torch.zeros(H_V)}
    given[name] = given[name].double()
    out, state = call(given)
    assert (out.dtype, state.dtype) == (torch.float32, torch.float32)
    assert call(given, state=state)[1].dtype == torch.float32


def test_no_sequences():
    none = {name: tensor[:0] for name, tensor in inputs("kda").items()}
    out, state = call(none, method="kda")
    assert (out.shape, state.shape) == ((0, S, H_V, D_V), (0, H_V, D, D_V))
    row, cu = part({name: tensor[:1] for name, tensor in GDN.items()}, slice(0)), torch.zeros(1, dtype=torch.int32)
    out, state = call(row, cu_seqlens=cu, state_layout="VK")
    assert (out.shape, state.shape) == ((1, 0, H_V, D_V), (0, H_V, D_V, D))


def test_autocast_and_compiled_code():
    given = inputs("gdn", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = call(given)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)

    @torch.compile(backend="eager")
    def compiled(query: Tensor) -> Tensor:
        return call({**given, "query": query * 2})[0] + 1

    torch.testing.assert_close(compiled(given["query"]), call({**given, "query": given["query"] * 2})[0] + 1)


def test_no_tokens():
    given = part(inputs("gdn"), slice(0, 0))
    state = torch.randn(B, H_V, D, D_V, dtype=torch.float64)
    out, last = call(given, state=state)
    assert out.shape == (B, 0, H_V, D_V)
    assert torch.equal(last, state)


def test_out():
    given = inputs("gdn")
    room = torch.empty(B, S, H_V, D_V, dtype=torch.float64)
    out, _ = call(given, out=room)
    assert out.data_ptr() == room.data_ptr()
    torch.testing.assert_close(room, call(given)[0])


def test_explain_and_a_backend_that_cannot(serving):
    given = inputs("gdn")
    said = polyattn.explain(polyattn.linear_attention, **given)
    assert (said.backend, said.request.family, said.request.method) == (serving or "torch_native", "linear", "gdn")
    assert (said.request.heads, said.request.kv_heads, said.request.state_layout) == (H_V, H, "KV")
    with pytest.raises(UnsupportedRequestError, match="family='linear'"):
        call(given, backend="torch_sdpa")


GDN, KDA = inputs("gdn"), inputs("kda")
STATE = torch.zeros(B, H_V, D, D_V, dtype=torch.float64)
CU = torch.tensor([0, S], dtype=torch.int32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"method": "gnd"}, r"method='gnd' must be one of gdn, kda\. Did you mean 'gdn'\?"),
        ({"method": None}, "method=None must be one of gdn, kda"),
        ({"state_layout": "kv"}, "state_layout='kv' must be one of KV, VK"),
        ({"qk_norm": "yes"}, "qk_norm='yes' is a str; it must be True or False"),
        ({"qk_norm": 1.0}, "qk_norm=1.0 is a float; it must be True or False"),
        ({"qk_norm": None}, "qk_norm=None is a NoneType; it must be True or False"),
        ({"scale": True}, "scale=True must be a finite number"),
        ({"scale": float("inf")}, "scale=inf must be a finite number"),
        ({"query": [1]}, r"query is a list, a tensor \[B, S, H, D\] is needed"),
        ({"key": GDN["key"][:, 1:]}, r"key has the shape \(2, 12, 2, 6\); needed is \(2, 13, 2, 6\)"),
        ({"value": GDN["value"][:1]}, r"value has the shape \(1, 13, 4, 5\); needed is \(2, 13, 4, 5\)"),
        ({"value": GDN["value"][:, :, :3]}, "value has 3 heads, query and key 2; a multiple of theirs is needed"),
        ({"key": GDN["key"].float()}, r"query is torch\.float64, key torch\.float32, value torch\.float64; one of"),
        ({"gate": KDA["gate"]}, r"gate has 4 dimensions \(2, 13, 4, 6\), 3 are needed: \[B, S, H_v\]"),
        ({"gate": GDN["gate"][:, :, :2]}, r"gate has the shape \(2, 13, 2\); needed is \(2, 13, 4\)"),
        ({"beta": GDN["beta"].int()}, r"beta is torch\.int32; a float is needed"),
        ({"beta": GDN["beta"].to("meta")}, "beta is on meta, query on cpu; move it"),
        ({"value": GDN["value"].to("meta")}, "value is on meta, query on cpu; move it"),
        ({"state": STATE.mT}, r"state has the shape .* needed is \(2, 4, 6, 5\): \[N, H_v, D, D_v\], N=2"),
        (
            {"state": STATE.float()},
            r"state is torch\.float32; torch\.float64 is needed beside values of",
        ),
        (
            {"query": GDN["query"][..., :0], "key": GDN["key"][..., :0]},
            "head dims are 0 and 5; both must be at least 1",
        ),
        ({"value": GDN["value"][..., :0]}, "head dims are 6 and 0; both must be at least 1"),
        ({"out": torch.empty_like(GDN["value"]).requires_grad_()}, "out= cannot be used while gradients are wanted"),
        ({"out": torch.empty(1)}, r"out has 1 dimensions \(1,\), 4 are needed"),
        ({"out": torch.empty(B, S, H_V, D_V)}, r"out is \(2, 13, 4, 5\) torch\.float32 on cpu; .* torch\.float64"),
        ({"cu_seqlens": CU}, "cu_seqlens with a batch of 2: lay the sequences behind each other, B = 1"),
        (
            {"cu_seqlens": CU.long()},
            r"cu_seqlens is torch\.int64 \(2,\) on cpu; torch\.int32 \[N\+1\] on cpu",
        ),
    ],
)
def test_what_is_wrong_is_refused(change, message):
    with pytest.raises(InvalidInputError, match=message):
        polyattn.linear_attention(**{**GDN, **change})


@pytest.mark.parametrize("flag", [np.True_, np.int64(1), 1])
def test_numpys_flags_and_numbers_are_taken_as_pythons(flag):
    plain, other = call(GDN, qk_norm=True, scale=0.5), call(GDN, qk_norm=flag, scale=np.float32(0.5))
    assert all(torch.equal(a, b) for a, b in zip(other, plain, strict=True))
    without = call(GDN, qk_norm=False)
    assert all(torch.equal(a, b) for a, b in zip(call(GDN, qk_norm=np.False_), without, strict=True))


def test_lengths_are_read_where_that_is_free():
    flat = {name: tensor[:1] for name, tensor in GDN.items()}
    with pytest.raises(InvalidInputError, match=r"cu_seqlens ends at 12, .* 13 tokens; .* \[:, :12\] of each"):
        call(flat, cu_seqlens=torch.tensor([0, 12], dtype=torch.int32))
