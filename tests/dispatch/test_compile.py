"""torch.compile: one graph, few compilations, overrides that still switch, and opaque kernels behind a custom op."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import polyattn
from polyattn.dispatch.compile import op_plans
from polyattn.dispatch.compile.errors import raising
from polyattn.nn import LocalAttention


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(s_q=5, s_k=5, h=4, h_kv=2, d=16, d_v=16, grad=False):
    torch.manual_seed(s_q * 31 + s_k)
    shapes = ((1, s_q, h, d), (1, s_k, h_kv, d), (1, s_k, h_kv, d_v))
    return tuple(torch.randn(s, requires_grad=grad) for s in shapes)


def compile_(function, **kw):
    counter = CompileCounter()
    return torch.compile(function, fullgraph=True, backend=counter, **kw), counter


@pytest.mark.parametrize("s_q", [1, None], ids=["decode", "prefill"])
def test_at_most_two_compilations_over_lengths(s_q):
    call, counter = compile_(lambda q, k, v: polyattn.attention(q, k, v, causal=True))
    for s_k in (1, 2, 3, 17, 64, 100, 1023, 2048, 4095, 4096) if s_q else (1, 2, 3, 17, 64, 100, 512):
        args = qkv(s_q or s_k, s_k)
        torch.testing.assert_close(call(*args), polyattn.attention(*args, causal=True))
    assert counter.frame_count <= 2


def test_dynamic_true_keeps_heads_and_options_constant():
    call, counter = compile_(lambda q, k, v: polyattn.attention(q, k, v, window=(3, 0), scale=0.25), dynamic=True)
    for s in (5, 9, 33):
        args = qkv(s, s)
        torch.testing.assert_close(call(*args), polyattn.attention(*args, window=(3, 0), scale=0.25))
    assert counter.frame_count == 1


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "top_left"},
        {"window": (2, 1)},
        {"return_lse": True},
        {"softcap": 4.0, "backend": "reference"},
        {"softcap": 4.0, "return_lse": True, "backend": "flex_attention"},
        {"deterministic": True, "return_lse": True},
    ],
    ids=str,
)
def test_options_inline_in_one_graph(options):
    args = qkv(5, 9)
    call, counter = compile_(lambda q, k, v: polyattn.attention(q, k, v, **options))
    torch.testing.assert_close(call(*args), polyattn.attention(*args, **options))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_and_sinks(kind):
    q, k, v = qkv(5, 9)
    mask = torch.rand(1, 1, 5, 9) > 0.4
    mask = mask if kind == "bool" else torch.zeros(1, 1, 5, 9).masked_fill(~mask, float("-inf"))
    sinks = torch.randn(4)
    call, _ = compile_(lambda q, k, v, m, s: polyattn.attention(q, k, v, attn_mask=m, sinks=s))
    torch.testing.assert_close(call(q, k, v, mask, sinks), polyattn.attention(q, k, v, attn_mask=mask, sinks=sinks))


def test_drop_in_traces():
    q, k, v = (t.transpose(1, 2) for t in qkv(5, 5, h_kv=4))
    call, counter = compile_(lambda q, k, v: polyattn.scaled_dot_product_attention(q, k, v, is_causal=True))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(call(q, k, v), expected)
    assert counter.frame_count == 1


def test_layer_and_bind_trace():
    args = qkv()
    with polyattn.use_backend("reference"):
        layer = LocalAttention(causal=True, scale=0.3)
    call, _ = compile_(layer)
    torch.testing.assert_close(call(*args), polyattn.attention(*args, causal=True, scale=0.3))
    site = polyattn.bind(causal=True)
    call, _ = compile_(lambda q, k, v: site(q, k, v))
    torch.testing.assert_close(call(*args), polyattn.attention(*args, causal=True))


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=str)
def test_gradients_in_one_graph(options):
    def loss(q, k, v):
        result = polyattn.attention(q, k, v, causal=True, **options)
        return sum(t.square().sum() for t in (result if isinstance(result, tuple) else (result,)))

    eager, traced = qkv(grad=True), qkv(grad=True)
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*traced).backward()
    for a, b in zip(eager, traced, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_use_backend_after_compilation_takes_effect(opaque):
    q, k, v = qkv(h_kv=4)
    call, counter = compile_(lambda q, k, v: polyattn.attention(q, k, v))
    plain = call(q, k, v)
    assert opaque.calls == 0
    with polyattn.use_backend("opaque"):
        torch.testing.assert_close(call(q, k, v), plain)
        assert opaque.calls == 1
    call(q, k, v)
    assert opaque.calls == 1
    assert counter.frame_count == 2


def test_force_backend_after_compilation_takes_effect(opaque):
    q, k, v = qkv(h_kv=4)
    call, _ = compile_(lambda q, k, v: polyattn.attention(q, k, v))
    call(q, k, v)
    polyattn.force_backend("opaque")
    try:
        call(q, k, v)
        assert opaque.calls == 1
    finally:
        polyattn.force_backend(None)


def test_use_backend_inside_a_compiled_function(opaque):
    def function(q, k, v):
        a = polyattn.attention(q, k, v)
        with polyattn.use_backend("opaque"):
            b = polyattn.attention(q, k, v)
        return a, b, polyattn.attention(q, k, v)

    call, _ = compile_(function)
    a, b, c = call(*qkv(h_kv=4))
    assert opaque.calls == 1
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a, c)


def test_two_threads_with_two_backends_at_once(opaque):
    q, k, v = qkv(h_kv=4)
    call, _ = compile_(lambda q, k, v: polyattn.attention(q, k, v))
    call(q, k, v)
    with polyattn.use_backend("opaque"):
        call(q, k, v)
    start, counts = threading.Barrier(2), {}

    def work(name):
        with polyattn.use_backend(name):
            start.wait()
            for _ in range(200):
                call(q, k, v)
            counts[name] = True

    before = opaque.calls
    threads = [threading.Thread(target=work, args=(n,)) for n in ("opaque", "torch_sdpa")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {"opaque": True, "torch_sdpa": True}
    assert opaque.calls == before + 200


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_a_compiled_call_follows_its_task(opaque, kind):
    """Another task runs between the beginning of a block and the call in it, and threads inherit the block."""
    q, k, v = qkv(h_kv=4)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    # What `opaque` refuses tells who was asked: packed sequences it has none of.
    call = torch.compile(
        {"dense": lambda: polyattn.attention(q, k, v), "packed": lambda: packed(q[0], k[0], v[0], cu, cu)}[kind]
    )

    def asked():
        before = opaque.calls
        try:
            call()
        except polyattn.UnsupportedRequestError as error:
            return "opaque" if "opaque, asked for by use_backend" in str(error) else str(error)
        return "opaque" if opaque.calls > before else ""

    async def main():
        inside, over = asyncio.Event(), asyncio.Event()

        async def with_override():
            with polyattn.use_backend("opaque"):
                inside.set()
                await over.wait()
                return [asked(), await asyncio.to_thread(asked), contextvars.copy_context().run(asked)]

        async def without():
            await inside.wait()
            found = [asked()]
            with polyattn.component("vae"):
                found.append(asked())
            over.set()
            return found

        return await asyncio.gather(with_override(), without())

    assert asyncio.run(main()) == [["opaque"] * 3, ["", ""]]


def test_a_block_inside_a_graph_stands_on_those_around_it(opaque):
    def function(q, k, v):
        with polyattn.component("vae"):
            a = polyattn.attention(q, k, v)
            with polyattn.use_backend(None):
                b = polyattn.attention(q, k, v)
        return a, b

    call, counter = compile_(function)
    args = qkv(h_kv=4)
    with polyattn.use_backend("opaque"):
        for calls in (1, 2):
            call(*args)
            assert opaque.calls == calls
    call(*args)
    assert opaque.calls == 2
    assert counter.frame_count == 2


def _plan(opaque, **request):
    from polyattn.contract import AttentionRequest
    from polyattn.dispatch.binding import choose

    fields = {"platform": "cpu", "dtype": "float64", "head_dim": 16, "v_head_dim": 8, "heads": 4, "kv_heads": 4}
    chosen = choose(AttentionRequest(**fields, **request).normalised(), "opaque", ("", "", ""))
    return op_plans.op_plan(chosen.request, chosen.selection)


def test_opcheck_dense(opaque):
    plan = _plan(opaque, causal="bottom_right", lse=True, sinks=True, grad=("query", "key", "value", "sinks", "lse"))
    q, k, v = (torch.randn(2, 5, 4, d, dtype=torch.float64, requires_grad=True) for d in (16, 16, 8))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.polyattn.dense.default, (q, k, v, None, sinks, plan))
    q, k, v = (t.detach() for t in (q, k, v))
    torch.library.opcheck(torch.ops.polyattn.dense.default, (q, k, v, None, None, _plan(opaque)))


def test_opcheck_varlen():
    from polyattn.contract import AttentionRequest
    from polyattn.dispatch.binding import choose

    request = AttentionRequest(
        family="varlen", layout="THD", dtype="float32", head_dim=16, heads=4, kv_heads=2, lse=True, s_relation="equal",
        causal="bottom_right", grad=("query", "key", "value", "lse"),
    ).normalised()  # fmt: skip
    chosen = choose(request, "torch_native", ("", "", ""))
    plan = op_plans.op_plan(chosen.request, chosen.selection)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    q, k, v = (torch.randn(7, h, 16, requires_grad=True) for h in (4, 2, 2))
    torch.library.opcheck(torch.ops.polyattn.varlen.default, (q, k, v, None, None, cu, cu, 4, 4, plan))


@pytest.mark.parametrize("lse", [False, True])
def test_opaque_kernel_trains_in_one_graph(opaque, lse):
    def loss(q, k, v, sinks):
        result = polyattn.attention(q, k, v, causal=True, sinks=sinks, return_lse=lse, backend="opaque")
        out, weight = result if lse else (result, torch.zeros(()))
        return out.square().sum() + weight.square().sum()

    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        args = (*qkv(h_kv=4, d_v=8, grad=True), torch.linspace(-1, 1, 4).requires_grad_())
        function(*args).backward()
        grads.append([t.grad for t in args])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    assert opaque.calls == 2


def test_packed_sequences_are_one_opaque_op():
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)

    def loss(q, k, v, cu):
        out, lse = polyattn.varlen_attention(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4, causal=True, return_lse=True
        )
        return out.square().sum() + lse.sum()

    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        args = [torch.randn(7, h, 16, requires_grad=True) for h in (4, 2, 2)]
        function(*args, cu).backward()
        grads.append([t.grad for t in args])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_plan_is_text_another_process_can_run(opaque):
    plan = _plan(opaque, lse=True)
    op_plans._bound.cache_clear()
    q, k, v = (torch.randn(1, 3, 4, d, dtype=torch.float64) for d in (16, 16, 8))
    out, lse = torch.ops.polyattn.dense(q, k, v, None, None, plan)
    expected = polyattn.attention(q, k, v, return_lse=True, backend="reference")
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:, :4], v), "batch and key lengths"),
        (lambda q, k, v: (q[..., :8], k, v), "head dims"),
        (lambda q, k, v: (q.double(), k, v), "dtypes"),
    ],
    ids=["lengths", "head dims", "dtypes"],
)
def test_bad_input_while_tracing_names_itself(change, message):
    call, _ = compile_(lambda q, k, v: polyattn.attention(q, k, v))
    with pytest.raises(Exception, match=message):
        call(*change(*qkv()))


def broken(*args, **options):
    return polyattn.attention(*args, **options)


REFUSED = (
    (lambda q, k, v: broken(q, k[..., :8], v), polyattn.InvalidInputError, "head dims 16, 8, 16"),
    (lambda q, k, v: broken(q[0], k, v), polyattn.InvalidInputError, "have 3, 4 and 4 dimensions; 4 are needed"),
    (lambda q, k, v: broken(q, k, v, backend="tourch_sdpa"), polyattn.BackendUnavailableError, "'tourch_sdpa'"),
    (lambda q, k, v: broken(q, k, v, softcap=3.0, backend="torch_sdpa"), polyattn.UnsupportedRequestError, "softcap=3"),
    (lambda q, k, v: packed(q[0], k[0], v[0, ..., :8], *[torch.tensor([0, 5])] * 2), ValueError, "cu_seqlens int32"),
)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_a_compiled_call_raises_polyattns_own_errors(call, error, message):
    counter = CompileCounter()
    compiled = torch.compile(call, backend=counter)
    for _ in range(2):
        with pytest.raises(error, match=message) as caught:
            compiled(*qkv())
        assert isinstance(caught.value, polyattn.PolyattnError)
    if error is polyattn.UnsupportedRequestError:
        assert caught.value.rejected["torch_sdpa"] == ["softcap=3.0 is not declared"]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_with_fullgraph_dynamos_own_error_quotes_polyattns(call, error, message):
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"reason: it raises .*Error: .*{message}"):
        compiled(*qkv())


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_of_a_refused_call_says_why(strict):
    model = Dense(lambda q, k, v: polyattn.attention(q, k, v, softcap=3.0, backend="torch_sdpa"))
    error = torch._dynamo.exc.Unsupported if strict else polyattn.UnsupportedRequestError
    with pytest.raises(error, match=r"torch_sdpa, asked for by argument, cannot serve .*softcap=3\.0 is not declared"):
        torch.export.export(model, (torch.randn(2, 4, 4, 16),), strict=strict)


def test_a_refused_call_can_be_caught_and_leaves_later_calls_compiled():
    def serve(q, k, v):
        try:
            return polyattn.attention(q, k, v, softcap=3.0, backend="torch_sdpa")
        except polyattn.UnsupportedRequestError:
            return polyattn.attention(q, k, v)

    args = qkv()
    torch.testing.assert_close(torch.compile(serve, backend="eager")(*args), polyattn.attention(*args))
    counter = CompileCounter()
    call = torch.compile(lambda q, k, v: polyattn.attention(q, k, v), backend=counter)
    with pytest.raises(polyattn.InvalidInputError):
        call(args[0], args[1][..., :8], args[2])
    frames = counter.frame_count
    torch.testing.assert_close(call(*args), polyattn.attention(*args))
    assert counter.frame_count == frames + 1


def test_an_error_that_a_trace_remembers_holds_no_tensors_and_keeps_its_cause():
    class Failed(polyattn.PluginError):
        def __init__(self, message, part):
            super().__init__(message)
            self.part = part

    error = Failed("the plugin failed", "part")
    error.__cause__ = OSError("no compiler")
    plan, seen = raising(error), []
    for _ in range(2):
        with pytest.raises(Failed, match="the plugin failed") as caught:
            plan(torch.ones(1))
        assert caught.value.part == "part"
        assert caught.value.__cause__ is error.__cause__
        seen.append(caught.value)
    assert seen[0] is not seen[1] is not error
    assert error.__traceback__ is None


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("s_q", "s_k"), [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"causal": "top_left", "return_lse": True}])
def test_sizes_of_zero_are_part_of_a_traced_request(s_q, s_k, options):
    # PyTorch's flash kernel divides by the lengths: asked for as usual, it ends the process.
    call, _ = compile_(lambda q, k, v: polyattn.attention(q, k, v, **options), dynamic=True)
    for lengths in ((5, 5), (s_q, s_k)):
        args = qkv(*lengths)
        torch.testing.assert_close(call(*args), polyattn.attention(*args, **options))


def test_large_tensors_are_part_of_a_traced_request():
    q, k = torch.empty(1, 2**20, 32, 64, device="meta"), torch.empty(1, 8, 32, 64, device="meta")
    call, _ = compile_(lambda q, k: polyattn.attention(q, k, k, backend="flex_attention"))
    with pytest.raises(Exception, match="large=True is not declared"):
        call(q, k)


def packed(q, k, v, cu_q, cu_k, longest=5, **options):
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return polyattn.varlen_attention(q, k, v, **given, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed_call", [False, True])
def test_a_jit_trace_is_refused(packed_call):
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)

    def call(q):
        return packed(q[0], q[0], q[0], cu, cu) if packed_call else polyattn.attention(q, q, q)

    with pytest.raises(polyattn.InvalidInputError, match=r"under torch.jit.trace, .*; use torch.export.export or"):
        torch.jit.trace(call, (torch.randn(1, 5, 4, 16),))


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_packed_call_on_tensors_without_contents_gives_shapes(kind):
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        for tokens in (7, 9, 9, 9):
            q, k, v = (torch.randn(tokens, h, d, requires_grad=True) for h, d in ((4, 16), (2, 16), (2, 8)))
            cu = torch.empty(3, dtype=torch.int32)
            out, lse = packed(q, k, v, cu, cu, causal=True, return_lse=True)
            out.sum().backward()
            assert (out.shape, lse.shape, q.grad.shape) == ((tokens, 4, 8), (tokens, 4), q.shape)
        with pytest.raises(polyattn.InvalidInputError, match="key has 9 tokens, value 7"):
            packed(q, k, v[:7], cu, cu)


def test_a_dense_call_on_fake_tensors_gives_shapes():
    """torch warns of whoever asks where a fake tensor is; here a warning is an error."""
    with FakeTensorMode():
        for length in (5, 6, 6, 6):
            q, k, v = (torch.randn(2, length, h, d, requires_grad=True) for h, d in ((4, 16), (2, 16), (2, 8)))
            out, lse = polyattn.attention(q, k, v, causal=True, return_lse=True)
            out.sum().backward()
            assert (out.shape, lse.shape, q.grad.shape) == ((2, length, 4, 8), (2, length, 4), q.shape)
        with pytest.raises(polyattn.InvalidInputError, match="heads 4, 2, 2 and head dims 16, 8, 8"):
            polyattn.attention(q, v, v)


def test_float64_stays_float64_in_a_compiled_packed_call_under_autocast():
    call, _ = compile_(packed)
    q, cu = torch.randn(5, 4, 16, dtype=torch.float64), torch.tensor([0, 2, 5], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = call(q, q, q, cu, cu), packed(q, q, q, cu, cu)
    assert out.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": (1, 2, 3)}, r"window=\(1, 2, 3\) must be a pair"),
        ({"window": (1.5, 0)}, r"window=\(1\.5, 0\): the left bound must be an integer"),
        ({"attn_mask": torch.zeros(1, 1, 5, 5, dtype=torch.int32)}, "attn_mask is torch.int32; bool"),
        ({"sinks": torch.zeros(1)}, r"sinks must be \[4\]"),
        ({"out": torch.empty(2, 5, 4, 16)}, "out .* must be torch.float32 and shaped like query"),
        ({"out": torch.empty(1, 5, 4, 16, dtype=torch.float64)}, "out .* must be torch.float32"),
    ],
)
def test_what_eager_calls_refuse_is_refused_while_tracing(change, message):
    call, _ = compile_(lambda q, k, v: polyattn.attention(q, k, v, **change))
    with pytest.raises(Exception, match=message):
        call(*qkv())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_k": torch.tensor([0, 1, 2, 5], dtype=torch.int32)}, "cu_seqlens_q has 3 entries, cu_seqlens_k 4"),
        ({"v": torch.randn(4, 4, 16)}, "key has 5 tokens, value 4"),
        ({"cu_q": torch.tensor([0, 2, 4], dtype=torch.int32)}, "cu_seqlens_q ends at 4, the packed batch has 5"),
        ({"longest": 2}, "max_seqlen_q=2 is less than the longest sequence, 3"),
    ],
)
def test_a_compiled_packed_call_is_checked_when_it_runs(change, message):
    call, _ = compile_(packed)
    q, cu = torch.randn(5, 4, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(polyattn.InvalidInputError, match=message):
        call(**{"q": q, "k": q, "v": q, "cu_q": cu, "cu_k": cu.clone(), **change})


class Packed(torch.nn.Module):
    def forward(self, q, cu):
        return packed(q, q, q, cu, cu, causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_a_packed_call_is_exported(strict):
    q, cu = torch.randn(5, 4, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    program = torch.export.export(Packed(), (q, cu), dynamic_shapes=({0: torch.export.Dim.AUTO}, None), strict=strict)
    longer, other = torch.randn(8, 4, 16), torch.tensor([0, 5, 8], dtype=torch.int32)
    torch.testing.assert_close(program.module()(longer, other), Packed()(longer, other))


class Dense(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "layer",
    [polyattn.nn.LocalAttention(causal=True, window=(2, 0)), lambda q, k, v: polyattn.attention(q, k, v, causal=True)],
)
def test_a_dense_call_is_exported_with_lengths_that_change(strict, layer):
    lengths = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)},)
    model = Dense(layer)
    program = torch.export.export(model, (torch.randn(2, 4, 4, 16),), dynamic_shapes=lengths, strict=strict)
    other = torch.randn(3, 9, 4, 16)
    torch.testing.assert_close(program.module()(other), model(other))


@pytest.fixture
def distributed(tmp_path):
    """Makes DTensors on a job of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/job", rank=0, world_size=1)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    yield lambda tensor: torch.distributed.tensor.distribute_tensor(tensor, mesh)
    torch.distributed.destroy_process_group()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_call_refuses_dtensors_as_eager_calls_do(distributed, fullgraph):
    q, cu = torch.randn(1, 5, 4, 16), torch.tensor([0, 5], dtype=torch.int32)
    calls = (
        ("query", lambda x: polyattn.attention(x, q, q), q),
        ("value", lambda x: polyattn.attention(q, q, x, return_lse=True), q),
        ("sinks", lambda x: polyattn.attention(q, q, q, sinks=x), q[0, 0, :, 0]),
        ("query", lambda x: packed(x, x, x, cu, cu), q[0]),
        ("query", lambda x: polyattn.scaled_dot_product_attention(x, x, x), q),
    )
    for name, call, tensor in calls:
        for function in (call, torch.compile(call, backend="eager", fullgraph=fullgraph)):
            with pytest.raises(Exception, match=f"{name} is a DTensor; attention is local: pass {name}.to_local"):
                function(distributed(tensor))
