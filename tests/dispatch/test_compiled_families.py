"""Block-sparse and linear calls in one graph: torch.compile(fullgraph=True), export, and the schemas of all ops."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import polyattn
from polyattn.contract.families import FAMILY_SPECS, Argument
from polyattn.dispatch.compile.custom_ops import SCHEMAS
from polyattn.errors import InvalidInputError, UnsupportedRequestError

SHAPE = (16, 16)


def declared(one: Argument) -> str:
    """An argument in torch's words."""
    return f"{ {'optional': 'Tensor?', 'int': 'SymInt'}.get(one.kind, 'Tensor') } {one.name}"


def test_the_ops_are_those_of_the_families() -> None:
    cached = ("paged", "mla")  # test_compiled_caches.py has theirs
    specs = [spec for spec in FAMILY_SPECS.values() if spec.name not in cached]
    assert list(SCHEMAS) == [spec.name for spec in specs]
    for spec in specs:
        forward = getattr(torch.ops.polyattn, spec.name).default
        backward = getattr(torch.ops.polyattn, f"{spec.name}_backward").default
        given = ", ".join(map(declared, spec.arguments))
        plan = "".join(["str plan", *(f", {declared(one)}=None" for one in spec.added)])
        assert str(forward._schema) == f"polyattn::{spec.name}({given}, {plan}) -> (Tensor, Tensor)"
        second = "lse" if spec.second == "lse" else "final_state"
        grads = f"Tensor? dout, Tensor? d{spec.second}, {given}, Tensor out, Tensor {second}"
        assert str(backward._schema) == f"polyattn::{spec.name}_backward({grads}, {plan}) -> Tensor[]"


def test_the_schemas_of_saved_graphs_stay() -> None:
    """Saved programs name these: a changed one could not be loaded any more. What was added has a default."""
    added = "Tensor? alibi=None, Tensor? q_segments=None, Tensor? k_segments=None"
    assert str(torch.ops.polyattn.dense.default._schema) == (
        "polyattn::dense(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, str plan, "
        f"{added}) -> (Tensor, Tensor)"
    )
    assert str(torch.ops.polyattn.dense_backward.default._schema) == (
        "polyattn::dense_backward(Tensor? dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor? "
        f"attn_mask, Tensor? sinks, Tensor out, Tensor lse, str plan, {added}) -> Tensor[]"
    )
    lengths = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
    assert str(torch.ops.polyattn.varlen.default._schema) == (
        f"polyattn::varlen(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, {lengths}, str "
        "plan, Tensor? alibi=None) -> (Tensor, Tensor)"
    )
    assert str(torch.ops.polyattn.varlen_backward.default._schema) == (
        "polyattn::varlen_backward(Tensor? dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor? "
        f"attn_mask, Tensor? sinks, {lengths}, Tensor out, Tensor lse, str plan, Tensor? alibi=None) -> "
        "Tensor[]"
    )


def qkv(s_q: int = 40, s_k: int = 52, *, requires_grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((2, s_q, 4, 16), (2, s_k, 2, 16), (2, s_k, 2, 8))
    return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in shapes]


def block_map(s_q: int = 40, s_k: int = 52) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.rand(1, 4, -(-s_q // 16), -(-s_k // 16), generator=generator) > 0.4


def linear(method: str = "gdn", length: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    gates = (2, length, 4) if method == "gdn" else (2, length, 4, 8)
    shapes = {"query": (2, length, 2, 8), "key": (2, length, 2, 8), "value": (2, length, 4, 6)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["gate"] = -torch.rand(gates, generator=generator)
    made["beta"] = torch.rand(2, length, 4, generator=generator)
    made["state"] = torch.randn(2, 4, 8, 6, generator=generator)
    return made


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)  # type: ignore[no-any-return]


def with_gradients(call: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of all of them."""
    results = call(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    total = sum((one * torch.linspace(0.5, 1.5, one.numel()).view(one.shape)).sum() for one in results)
    return [*(one.detach() for one in results), *torch.autograd.grad(total, tensors)]  # type: ignore[arg-type]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("given", ["map", "lists", "valid"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_block_sparse_call_is_one_graph(layout: str, given: str, return_lse: bool) -> None:
    seen = block_map()
    seen[..., 0] = True  # no row without keys: an LSE of -inf has no gradient to compare
    options: dict[str, Any] = {"block_map": seen}
    if given == "lists":
        counts, order = seen.sum(-1, dtype=torch.int32), (~seen).to(torch.uint8).argsort(dim=-1, stable=True)
        options = {"lists": (counts, order.to(torch.int32))}
    if given == "valid":
        options["block_valid"] = torch.tensor([16, 3, 16, 4], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return polyattn.block_sparse_attention(
            q, k, v, block_shape=SHAPE, layout=layout, return_lse=return_lse, **options
        )

    tensors = qkv(requires_grad=True)
    if layout == "BHSD":
        tensors = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in tensors]
    for found, right in zip(with_gradients(compiled(call), tensors), with_gradients(call, tensors), strict=True):
        torch.testing.assert_close(found, right, atol=2e-5, rtol=2e-5)


def test_lengths_of_block_sparse_calls_stay_symbolic() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def call(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        out: Tensor = polyattn.block_sparse_attention(q, k, v, block_map=seen, block_shape=SHAPE)
        return out

    for s_q, s_k in ((40, 70), (50, 100), (90, 150)):
        q, k, v = qkv(s_q, s_k)
        seen = block_map(s_q, s_k)
        right = polyattn.block_sparse_attention(q, k, v, block_map=seen, block_shape=SHAPE)
        torch.testing.assert_close(call(q, k, v, seen), right)
    assert counter.frame_count <= 2


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("method", ["gdn", "kda"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("state_layout", ["KV", "VK"])
def test_a_linear_call_is_one_graph(method: str, qk_norm: bool, state_layout: str) -> None:
    given = linear(method)
    if state_layout == "VK":
        given["state"] = given["state"].mT.contiguous()

    def call(*tensors: Tensor) -> Any:
        q, k, v, gate, beta, state = tensors
        return polyattn.linear_attention(
            q, k, v, gate=gate, beta=beta, state=state, method=method, qk_norm=qk_norm, state_layout=state_layout
        )

    tensors = [t.requires_grad_() for t in given.values()]
    for found, right in zip(with_gradients(compiled(call), tensors), with_gradients(call, tensors), strict=True):
        torch.testing.assert_close(found, right, atol=2e-5, rtol=2e-5)


def test_packed_linear_sequences_are_one_graph_and_gradients_may_be_of_gates_alone() -> None:
    given = {name: t[:1].contiguous() for name, t in linear().items()}
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)

    def call(gate: Tensor) -> Any:
        q, k, v, beta = (given[name] for name in ("query", "key", "value", "beta"))
        return polyattn.linear_attention(q, k, v, gate=gate, beta=beta, cu_seqlens=cu)

    gate = [given["gate"].requires_grad_()]
    for found, right in zip(with_gradients(compiled(call), gate), with_gradients(call, gate), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("out", [False, True])
def test_autocast_and_out_reach_compiled_calls(out: bool) -> None:
    q, k, v = qkv()
    given = linear()

    def sparse(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return polyattn.block_sparse_attention(q, k, v, block_map=block, block_shape=SHAPE, out=out)

    def recurrent(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return polyattn.linear_attention(q, k, v, gate=given["gate"], beta=given["beta"], out=out)[0]

    block = block_map()
    for call, tensors, shape in (
        (sparse, (q, k, v), (2, 40, 4, 8)),
        (recurrent, (given["query"], given["key"], given["value"]), (2, 9, 4, 6)),
    ):
        where = torch.empty(shape, dtype=torch.bfloat16) if out else None
        found = compiled(call)(*tensors, where)
        right = call(*tensors, None)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, right)
        if where is not None:
            torch.testing.assert_close(where, right)


class Sparse(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Any:
        return polyattn.block_sparse_attention(q, k, v, block_map=seen, block_shape=SHAPE)


class Recurrent(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, state: Tensor) -> Any:
        return polyattn.linear_attention(query, key, value, gate=gate, beta=beta, state=state)


@pytest.mark.parametrize("family", ["block_sparse", "linear"])
def test_an_exported_call_holds_the_op(family: str) -> None:
    module: torch.nn.Module = Sparse() if family == "block_sparse" else Recurrent()
    args = (*qkv(), block_map()) if family == "block_sparse" else tuple(linear().values())
    program = torch.export.export(module, args)
    assert any(node.target == getattr(torch.ops.polyattn, family).default for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*args), module(*args))


@pytest.mark.parametrize("family", ["block_sparse", "linear"])
def test_opcheck(family: str) -> None:
    from polyattn.contract import AttentionRequest
    from polyattn.dispatch.binding import choose
    from polyattn.dispatch.compile import op_plans

    fields: dict[str, Any] = {"dtype": "float32", "heads": 4, "kv_heads": 2, "grad": ("query", "key", "value")}
    if family == "block_sparse":
        fields |= {"head_dim": 16, "v_head_dim": 8, "layout": "BHSD", "s_relation": "fewer"}
        fields |= {"block_map": True, "block_shape": SHAPE}
    else:
        fields |= {"head_dim": 8, "v_head_dim": 6, "method": "gdn", "state_layout": "KV"}
    request = AttentionRequest(family=family, **fields).normalised()  # type: ignore[arg-type]
    chosen = choose(request, None, ("", "", ""))
    plan = op_plans.op_plan(chosen.request, chosen.selection)
    if family == "block_sparse":
        q, k, v = (t.transpose(1, 2).contiguous().requires_grad_() for t in qkv())
        seen = block_map()
        lists = (seen.sum(-1, dtype=torch.int32), (~seen).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32))
        torch.library.opcheck(torch.ops.polyattn.block_sparse.default, (q, k, v, *lists, None, plan))
    else:
        tensors = [t.requires_grad_() for t in linear().values()]
        torch.library.opcheck(torch.ops.polyattn.linear.default, (*tensors, None, plan))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block_map": None}, "neither of block_map and lists"),
        ({"lists": (1, 2, 3)}, "lists must be a pair"),
        ({"lists": (torch.ones(1), torch.ones(1))}, "both of block_map and lists"),
        ({"block_shape": (16, 0)}, "block_shape=.* must be two numbers"),
        ({"block_shape": 16}, "block_shape=.* must be two numbers"),
        ({"block_map": torch.ones(1, 1, 2, 4, dtype=torch.bool)}, "block_map .* does not fit"),
        ({"block_map": torch.ones(1, 1, 3, 4)}, r"block_map \(torch.float32\)"),
        ({"value": torch.ones(2, 51, 2, 8)}, "batch and key lengths"),
        ({"key": torch.ones(2, 52, 3, 16)}, "do not fit"),
        ({"scale": "large"}, "scale"),
    ],
)
def test_bad_block_sparse_calls_are_told_while_they_are_compiled(change: dict[str, Any], says: str) -> None:
    given = {**dict(zip(("query", "key", "value"), qkv(), strict=True)), "block_map": block_map(), **change}
    given = {"block_shape": SHAPE, **given}
    torch._dynamo.reset()
    call = torch.compile(lambda: polyattn.block_sparse_attention(**given), backend="eager")
    with pytest.raises(InvalidInputError, match=says):
        call()


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": "dgn"}, "method='dgn' must be one of gdn, kda"),
        ({"state_layout": "KK"}, "state_layout='KK'"),
        ({"value": torch.ones(2, 9, 3, 6)}, "H_v a multiple of H"),
        ({"key": torch.ones(2, 8, 2, 8)}, "lengths differ"),
        ({"gate": torch.ones(2, 9, 3)}, "gate has the shape"),
        ({"state": torch.ones(1, 4, 8, 6)}, "state has the shape"),
        ({"dt_bias": torch.ones(4)}, "dt_bias is given without a_log"),
        ({"gate_bound": -5.0}, "gate_bound is given without a_log"),
        ({"beta_range": 2}, "beta_range is given without a_log"),
        ({"a_log": torch.ones(4), "beta_range": 3}, "beta_range=3; 1 or 2 is needed"),
        ({"a_log": torch.ones(4), "gate_bound": 5.0}, r"gate_bound=5\.0; a number below 0"),
        ({"a_log": torch.ones(1)}, r"a_log has the shape \(1,\); needed is \(4,\)"),
        ({"a_log": torch.ones(4), "dt_bias": torch.ones(1)}, r"dt_bias has the shape \(1,\)"),
        ({"a_log": torch.ones(4), "gate": torch.ones(2, 9, 1)}, "gate has the shape"),
        ({"a_log": torch.ones(4), "beta": torch.ones(2, 9, 4, dtype=torch.int32)}, r"beta is torch\.int32"),
        ({"query": torch.ones(2, 9, 2, 0), "key": torch.ones(2, 9, 2, 0), "state": None}, "all at least 1"),
    ],
)
def test_bad_linear_calls_are_told_while_they_are_compiled_or_when_they_run(change: Any, says: str) -> None:
    given = {**linear(), **change}
    torch._dynamo.reset()
    call = torch.compile(lambda: polyattn.linear_attention(**given), backend="eager")
    with pytest.raises(InvalidInputError, match=says):
        call()


def test_lists_are_checked_when_a_graph_runs() -> None:
    q, k, v = qkv()
    counts = torch.ones(1, 1, 3, dtype=torch.int32)

    def call(indices: Tensor) -> Any:
        return polyattn.block_sparse_attention(q, k, v, lists=(counts, indices), block_shape=SHAPE)

    run = compiled(call)
    run(torch.zeros(1, 1, 3, 1, dtype=torch.int32))
    with pytest.raises(InvalidInputError, match="lists block 7"):
        run(torch.full((1, 1, 3, 1), 7, dtype=torch.int32))


def test_no_transform_looks_into_the_ops() -> None:
    q, k, v = qkv()

    def loss(q: Tensor) -> Tensor:
        return polyattn.block_sparse_attention(q, k, v, block_map=block, block_shape=SHAPE).sum()  # type: ignore[no-any-return]

    block = block_map()
    torch._dynamo.reset()
    with pytest.raises(UnsupportedRequestError, match="transform"):
        torch.compile(torch.func.grad(loss), backend="eager")(q)


def test_a_second_derivative_of_a_compiled_linear_call_is_refused() -> None:
    tensors = [t.requires_grad_() for t in linear().values()]
    out = compiled(Recurrent())(*tensors)[0]
    (first,) = torch.autograd.grad(out.sum(), tensors[:1], create_graph=True)
    with pytest.raises((UnsupportedRequestError, RuntimeError)):
        torch.autograd.grad(first.sum(), tensors[:1])


def test_the_plan_of_a_linear_op_names_its_request() -> None:
    program = torch.export.export(Recurrent(), tuple(linear().values()))
    (node,) = [n for n in program.graph.nodes if n.target == torch.ops.polyattn.linear.default]
    request = json.loads(node.args[-1])["request"]
    assert (request["family"], request["method"], request["heads"], request["kv_heads"]) == ("linear", "gdn", 4, 2)


def test_calls_keep_their_kernel_for_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn.dispatch import block_sparse, call_key
    from polyattn.dispatch import linear as linear_calls

    asked: list[str] = []
    choose = call_key.choose
    monkeypatch.setattr(
        call_key, "choose", lambda request, *rest: asked.append(request.family) or choose(request, *rest)
    )
    for module in (block_sparse, linear_calls):
        monkeypatch.setattr(module, "_table", type(module._table)())
    for s_k in (52, 70):
        q, k, v = qkv(40, s_k)
        polyattn.block_sparse_attention(q, k, v, block_map=block_map(40, s_k), block_shape=SHAPE)
    for length in (9, 5):
        polyattn.linear_attention(**linear(length=length))
    assert asked == ["block_sparse", "linear"]
    polyattn.linear_attention(**linear("kda"), method="kda")
    q, k, v = qkv(requires_grad=True)
    polyattn.block_sparse_attention(q, k, v, block_map=block_map(), block_shape=SHAPE)
    assert asked[2:] == ["linear", "block_sparse"]


def test_torchs_counter_sees_block_sparse_and_linear_calls() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    seen = torch.zeros(1, 1, 3, 4, dtype=torch.bool)
    seen[..., 0] = True  # one block of 16 keys for each of the 48 queries of three blocks
    tensors = qkv(requires_grad=True)

    def sparse(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return polyattn.block_sparse_attention(q, k, v, block_map=seen, block_shape=SHAPE)

    with FlopCounterMode(display=False) as counter:
        sparse(*tensors).sum().backward()
    pairs = 2 * 4 * 3 * 16 * 16
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts["polyattn.block_sparse"] == 2 * pairs * (16 + 8)
    assert counts["polyattn.block_sparse_backward"] == 2 * pairs * (3 * 16 + 2 * 8)

    given = [t.requires_grad_() for t in linear().values()]
    with FlopCounterMode(display=False) as counter:
        Recurrent()(*given)[0].sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts["polyattn.linear"] == 6 * 2 * 9 * 4 * 8 * 6
    assert counts["polyattn.linear_backward"] == 2 * counts["polyattn.linear"]
