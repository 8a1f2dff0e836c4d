"""Saved programs: what they hold, that ONNX Runtime computes what eager calls do, and what they say without polyattn's
plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import polyattn
from polyattn.dispatch.compile import op_plans

GENERATOR = torch.Generator().manual_seed(3)
MASK = torch.rand(1, 1, 5, 9, generator=GENERATOR) > 0.4
MASK[..., 1, :] = False
SINKS = torch.randn(4, generator=GENERATOR)
DENSE = {
    "plain": ({}, 5),
    "causal": ({"causal": True}, 5),
    "causal decode": ({"causal": True}, 1),
    "top-left": ({"causal": "top_left", "return_lse": True}, 5),
    "lse": ({"return_lse": True}, 5),
    "lse decode": ({"return_lse": True, "causal": True}, 1),
    "sinks": ({"sinks": SINKS, "causal": True}, 5),
    "sinks decode": ({"sinks": SINKS}, 1),
    "window": ({"window": (2, 1), "return_lse": True}, 5),
    "bool mask": ({"attn_mask": MASK, "return_lse": True, "sinks": SINKS}, 5),
    "additive mask": ({"attn_mask": MASK * 1.0, "return_lse": True}, 5),
    "softcap": ({"softcap": 4.0, "return_lse": True, "backend": "reference"}, 5),
    "scale": ({"scale": -0.3, "return_lse": True}, 5),
    "deterministic": ({"deterministic": True, "return_lse": True}, 5),
    "heads first": ({"layout": "BHSD", "return_lse": True, "sinks": SINKS}, 5),
}


class Model(torch.nn.Module):
    """Weights that want gradients before the attention, and sinks that do."""

    def __init__(self, options):
        super().__init__()
        self.options = dict(options)
        self.heads = torch.nn.Linear(16, 16, bias=False)
        if "sinks" in options:
            self.sinks = torch.nn.Parameter(self.options.pop("sinks").clone())

    def forward(self, q, k, v):
        sinks = {"sinks": self.sinks} if hasattr(self, "sinks") else {}
        return polyattn.attention(self.heads(q), self.heads(k), v, **self.options, **sinks)


def qkv(s_q, layout="BSHD", d_v=16):
    torch.manual_seed(s_q)
    tensors = (torch.randn(2, s, h, d) for s, h, d in ((s_q, 4, 16), (9, 2, 16), (9, 2, d_v)))
    return tuple(t if layout == "BSHD" else t.transpose(1, 2).contiguous() for t in tensors)


def tuples(result):
    return result if isinstance(result, tuple) else (result,)


def called(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_an_exported_dense_call_holds_public_operators_alone(name, strict, gradients):
    options, s_q = DENSE[name]
    model, args = Model(options), qkv(s_q, options.get("layout", "BSHD"))
    with torch.set_grad_enabled(gradients):
        # What was compiled before an export must not be what the export holds.
        compiled = torch.compile(model, backend="eager", fullgraph=True)(*args)
        program = torch.export.export(model, args, strict=strict)
    assert not [target for target in called(program) if "polyattn" in target or "_flash_" in target]
    for a, b, c in zip(tuples(program.module()(*args)), tuples(model(*args)), tuples(compiled), strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


def test_an_exported_call_trains_with_sinks_and_lse():
    model, args = Model({"sinks": SINKS, "return_lse": True, "causal": True}), qkv(5)
    program = torch.export.export(model, args).module()
    found = []
    for one in (model, program):
        out, lse = one(*args)
        (out.square().sum() + lse.sum()).backward()
        found.append({name: p.grad for name, p in one.named_parameters()})
        model.zero_grad()
    assert found[0].keys() == found[1].keys() == {"sinks", "heads.weight"}
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name])


def test_what_a_lowering_stands_before_is_exported_alike():
    options = {"sinks": SINKS, "return_lse": True, "window": (3, 0)}
    model, args = Model(options), qkv(5, d_v=8)
    program = torch.export.export(model, args)
    assert not [target for target in called(program) if "polyattn" in target or "_flash_" in target]
    for a, b in zip(program.module()(*args), model(*args), strict=True):
        torch.testing.assert_close(a, b)


def test_eager_and_compiled_calls_keep_their_kernel():
    options = {"return_lse": True}
    model, args = Model(options), qkv(5)
    with torch.no_grad():
        torch.export.export(model, args)
        with torch.profiler.profile() as profile:
            model(*args)
    assert any("flash_attention_for_cpu" in event.name for event in profile.events())


@pytest.mark.slow(keep=1)
@pytest.mark.filterwarnings("default")  # the exporter's own
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_onnx_runtime_computes_what_eager_calls_do(name, gradients, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    options, s_q = DENSE[name]
    model, args = Model(options), qkv(s_q, options.get("layout", "BSHD"))
    model.eval()
    file = str(tmp_path / "model.onnx")
    with torch.set_grad_enabled(gradients):
        torch.onnx.export(model, args, dynamo=True, verbose=False).save(file)
        wanted = tuples(model(*args))
    session = runtime.InferenceSession(file)
    names = [one.name for one in session.get_inputs()]
    found = session.run(None, {n: t.numpy() for n, t in zip(names, args, strict=True)})
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b.detach())


class Packed(torch.nn.Module):
    def forward(self, q, cu):
        lens = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 5}
        return polyattn.varlen_attention(q, q, q, causal=True, **lens)


@pytest.mark.filterwarnings("default")
def test_onnx_refuses_a_packed_call_by_its_name():
    pytest.importorskip("onnxscript")
    args = (torch.randn(8, 4, 16), torch.tensor([0, 3, 8], dtype=torch.int32))
    with pytest.raises(Exception, match=r"polyattn\.varlen"):
        torch.onnx.export(Packed().eval(), args, dynamo=True, verbose=False)


def python(code, *args, **env):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], env={**os.environ, **env}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.fixture
def saved(tmp_path):
    args = (torch.randn(8, 4, 16), torch.tensor([0, 3, 8], dtype=torch.int32))
    program = torch.export.export(Packed(), args)
    torch.export.save(program, tmp_path / "packed.pt2")
    torch.save((args, Packed()(*args)), tmp_path / "packed.pt")
    return tmp_path / "packed"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("first", ["import polyattn, torch", "import torch, polyattn"])
def test_a_saved_program_loads_after_the_imports_alone(saved, first):
    code = (
        f"{first}, sys\n"
        "program = torch.export.load(sys.argv[1] + '.pt2').module()\n"
        "args, wanted = torch.load(sys.argv[1] + '.pt')\n"
        "torch.testing.assert_close(program(*args), wanted)\n"
        "print('same')\n"
    )
    assert python(code, saved).endswith("same\n")


def test_the_ops_come_with_torch_and_nothing_else_does():
    code = (
        "import sys, polyattn\n"
        "assert 'torch' not in sys.modules\n"
        "before = len(sys.meta_path)\n"
        "import torch\n"
        "torch.ops.polyattn.dense, torch.ops.polyattn.varlen\n"
        "print(sorted(name for name in sys.modules if name.startswith('polyattn')))\n"
        "print(len(sys.meta_path) < before)\n"
    )
    listed, fewer = python(code).splitlines()[-2:]
    rooms = ["polyattn", "polyattn.dispatch", "polyattn.dispatch.compile"]
    ops = ["polyattn.dispatch.compile.custom_ops", "polyattn.dispatch.compile.registration"]
    assert listed == str([*rooms, *ops, "polyattn.methods", "polyattn.methods.custom_op"])
    assert fewer == "True"


def _plan(**changed):
    from polyattn.contract import AttentionRequest
    from polyattn.dispatch.binding import choose

    request = AttentionRequest(dtype="float32", head_dim=16, heads=4, kv_heads=4).normalised()
    chosen = choose(request, "torch_sdpa", ("", "", ""))
    return json.dumps({**json.loads(op_plans.op_plan(chosen.request, chosen.selection)), **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"backend": "acme"},
            r"calls backend 'acme' on platform 'cpu', which no plugin of this process has\..*Install",
        ),
        ({"backend": "torch_sdpaa"}, r"Did you mean 'torch_sdpa' or"),
        ({"platform": "moon"}, r"on platform 'moon', .* Here are, on moon: none"),
        ({"provider": "gone"}, r"calls provider 'gone' of torch_sdpa@cpu, which has only torch.* or export again"),
    ],
)
def test_a_saved_program_whose_backend_is_absent_says_so(changed, message):
    q = torch.randn(1, 3, 4, 16)
    with pytest.raises(polyattn.BackendUnavailableError, match=message):
        torch.ops.polyattn.dense(q, q, q, None, None, _plan(**changed))


def counts(function, *args):
    with FlopCounterMode(display=False) as counter:
        result = function(*args)
        forward = counter.get_total_flops()
        sum(t.sum() for t in tuples(result)).backward()
    return forward, counter.get_total_flops() - forward


def test_torchs_counter_sees_a_kernel_that_is_no_operator(opaque):
    def attend(q, k, v):
        return polyattn.attention(q, k, v, causal=True, backend="opaque")

    q, k, v = (torch.randn(2, s, 4, 16, requires_grad=True) for s in (5, 9, 9))
    for _ in range(3):
        attend(q, k, v)  # kept for the quick way
    shapes = [tuple(t.transpose(1, 2).shape) for t in (q, k, v)]
    torchs = sdpa_flop_count(*shapes), sdpa_backward_flop_count(shapes[0], *shapes)
    assert counts(attend, q, k, v) == torchs == (23040, 57600)


@pytest.mark.parametrize("kind", ["real", "meta"])
def test_torchs_counter_sees_packed_sequences(kind):
    cu = torch.tensor([0, 3, 8], dtype=torch.int32, device="cpu" if kind == "real" else "meta")
    q = torch.randn(8, 4, 16, device=cu.device, requires_grad=True)
    model = Packed()
    for _ in range(2):
        model(q, cu)
    pairs = 9 + 25 if kind == "real" else 25 + 25  # contents that nobody knows count as the longest
    assert counts(model, q, cu) == (2 * 4 * 32 * pairs, 2 * 4 * 80 * pairs)


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        with polyattn.use_backend("reference"):
            self.layer = polyattn.nn.LocalAttention(causal=True, window=(2, 0))

    def forward(self, x, mask, cu):
        x = self.layer(x, x, x)
        x = x + polyattn.attention(x, x, x, attn_mask=mask, layout="BSHD", scale=0.5)
        x = x + polyattn.scaled_dot_product_attention(x, x, x, is_causal=True)
        lens = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": 3}
        return x[0] + polyattn.varlen_attention(x[0], x[0], x[0], causal=True, **lens)


def test_a_symbolic_trace_records_calls_as_nodes():
    model = Layers()
    args = (torch.randn(1, 5, 4, 16), torch.rand(1, 1, 5, 5) > 0.2, torch.tensor([0, 3, 5], dtype=torch.int32))
    model(*args)
    model(*args)  # kept for the quick way
    traced = torch.fx.symbolic_trace(model)
    calls = [node for node in traced.graph.nodes if getattr(node.target, "__module__", "").startswith("polyattn")]
    assert [node.target for node in calls] == [
        polyattn.attention, polyattn.attention, polyattn.scaled_dot_product_attention, polyattn.varlen_attention,
    ]  # fmt: skip
    assert calls[0].kwargs == {"causal": True, "window": (2, 0), "backend": "reference"}
    torch.testing.assert_close(traced(*args), model(*args))


def test_a_symbolic_trace_inside_a_component_is_refused():
    def call(x):
        return polyattn.attention(x, x, x)

    message = "inside component 'vae' is traced by torch.fx, .*; trace outside of it, or name a backend"
    with polyattn.component("vae"):
        with pytest.raises(polyattn.InvalidInputError, match=message):
            torch.fx.symbolic_trace(call)
        with polyattn.use_backend("reference"):
            (node,) = [n for n in torch.fx.symbolic_trace(call).graph.nodes if n.op == "call_function"]
    assert node.kwargs == {"backend": "reference"}
