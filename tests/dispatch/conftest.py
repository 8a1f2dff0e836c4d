"""A stranger's plugin with an opaque kernel and a backward of its own, for what core's torch backends never need."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from polyattn.contract import BackendInfo, Bound, Provider, Range, hookimpl, row
from polyattn.registry.manager import PluginManager, reset_manager
from polyattn.semantics.reference import visible


def _weights(request, q, k, lse):
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * (request.scale or request.head_dim**-0.5)
    seen = visible(q.shape[1], k.shape[1], causal=request.causal)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if lse is None:
        lse = scores.logsumexp(-1)
    else:
        lse = lse.transpose(1, 2).double()
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]), lse.transpose(1, 2)


class Opaque:
    """fp64 attention that hides from autograd and dynamo, as a compiled kernel would. MHA, BSHD, no masks."""

    calls = 0

    def bind(self, request):
        def forward(query, key, value, *, attn_mask=None, sinks=None, out=None):
            if torch.compiler.is_dynamo_compiling():
                raise RuntimeError("dynamo traced into an opaque kernel")
            Opaque.calls += 1
            with torch.no_grad():
                p, lse = _weights(request, query, key, None)
                if sinks is not None:
                    p = p * torch.sigmoid(lse.transpose(1, 2) - sinks.double()[:, None])[..., None]
                result = torch.einsum("bhij,bjhd->bihd", p, value.double()).to(query.dtype)
                lse = lse if query.dtype == torch.float64 else lse.float()
            if out is not None:
                result = out.copy_(result)
            return (result, lse) if request.lse or request.grad else result

        def backward(dout, query, key, value, out, lse, *, attn_mask=None):
            with torch.no_grad():
                p, _ = _weights(request, query, key, lse)
                dout, out = dout.double(), out.double()
                delta = (dout * out).sum(-1).transpose(1, 2)
                dp = torch.einsum("bihd,bjhd->bhij", dout, value.double())
                ds = p * (dp - delta[..., None]) * (request.scale or request.head_dim**-0.5)
                dq = torch.einsum("bhij,bjhd->bihd", ds, key.double())
                dk = torch.einsum("bhij,bihd->bjhd", ds, query.double())
                dv = torch.einsum("bhij,bihd->bjhd", p, dout)
            return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)

        return Bound(forward, backward)


ROWS = (
    row(
        family="dense",
        dtype=("float32", "bfloat16", "float64"),
        head_dim=Range(1, 256),
        v_head_dim=Range(1, 256),
        causal=("none", "bottom_right"),
        scale=True,
        lse=True,
        sinks=True,
        grad=("query", "key", "value", "sinks", "lse"),
        s_relation=("equal", "one", "fewer", "more"),
        zero_size=True,
    ),
)

NARROW = (
    row(
        family="dense",
        dtype=("float32", "bfloat16", "float64"),
        dims=((32, 32),),
        layout="BSHD",
        causal=("none", "bottom_right"),
        scale=True,
        lse=True,
        grad=("query", "key", "value", "lse"),
        s_relation=("equal", "one", "fewer", "more"),
    ),
)
"""The same kernel for one head dim, one layout, no GQA and no sinks: most calls reach it through exact rewrites."""


@pytest.fixture
def opaque(monkeypatch):
    """A manager that also has backends `opaque` and `narrow`; yields their class."""
    module = types.ModuleType("polyattn_opaque_plugin")
    module.Opaque = Opaque
    target, summary = "polyattn_opaque_plugin:Opaque", "a kernel nobody can trace"
    infos = [
        BackendInfo(name, "cpu", (Provider(name, rows, target),), summary=summary, priority=None)
        for name, rows in (("opaque", ROWS), ("narrow", NARROW))
    ]

    @hookimpl
    def polyattn_register_backends():
        return infos

    module.polyattn_register_backends = polyattn_register_backends
    monkeypatch.setitem(sys.modules, module.__name__, module)
    manager = PluginManager(environ={"POLYATTN_PLUGINS": "", "POLYATTN_EXTRA_PLUGINS": ""}).load()
    reset_manager(manager)
    manager.register(module, "opaque")
    Opaque.calls = 0
    yield Opaque
    reset_manager()
