"""A package whose backends do what no backend should: they crash, hang, lie or write where they must not.

They take dense requests of head dim 24, which nobody else in the tests uses; `sleepy` takes any, and has a rule that
chooses it. `several` and `mixed` have kernels of several libraries.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from polyattn.contract import Alias, AutoRule, BackendInfo, Bound, Provider, Range, hookspecs, row

DIM = 24
ROW = row(
    family="dense",
    dtype=("float32", "bfloat16"),
    head_dim=(DIM,),
    group=True,
    causal=("none", "bottom_right"),
    s_relation=("equal", "one", "fewer", "more"),
    scale=True,
)
NAMES = (
    "aborts",
    "exits",
    "hangs",
    "lies",
    "raises",
    "scribbles",
    "quick",
    "greedy",
    "killed",
    "chatty",
    "slow",
    "slower",
    "slowest",
    "second",
    "grows",
    "later",
)


@hookspecs.hookimpl
def polyattn_register_backends():
    wanted = os.environ.get("ODD_BACKENDS", ",".join(NAMES)).split(",")
    for name in (n for n in NAMES if n in wanted):
        provider = Provider("odd", (ROW,), f"{__name__}:{name.capitalize()}")
        yield BackendInfo(name, "cpu", (provider,), f"it {name}", priority=-50, evidence="vendor code")
    for name, kinds in (("several", ("sleepy", "quick", "lies")), ("mixed", ("lies", "quick"))):
        if name in wanted:
            providers = tuple(Provider(f"{kind}/odd", (ROW,), f"{__name__}:{kind.capitalize()}") for kind in kinds)
            aliases = tuple(Alias(f"{name}_{kind}", provider=kind) for kind in kinds)
            more = {"summary": "it is several", "priority": -50, "evidence": "vendor code", "aliases": aliases}
            yield BackendInfo(name, "cpu", providers, **more)
    if "sleepy" in wanted:
        common = {"family": "dense", "dtype": ("float32",), "head_dim": Range(1), "group": True, "scale": True}
        common |= {"causal": ("none", "bottom_right"), "s_relation": ("equal", "one"), "mask": ("none", "bool")}
        provider = Provider("odd", (row(**common),), f"{__name__}:Sleepy")
        rule = AutoRule(-1, "it thinks that it is fast")
        yield BackendInfo("sleepy", "cpu", (provider,), "it sleeps", auto=(rule,), evidence="vendor code")


def _right(request, query, key, value, attn_mask=None):
    import torch

    axis = (1, 2) if request.layout == "BSHD" else (1, 1)
    q, k, v = (t.transpose(*axis) for t in (query, key, value))
    found = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask, is_causal=request.causal != "none", scale=request.scale, enable_gqa=True
    )
    return found.transpose(*axis)


class _Odd:
    def bind(self, request):
        def forward(query, key, value, *, attn_mask=None, sinks=None, out=None):
            found = self.compute(request, query, key, value, *([] if attn_mask is None else [attn_mask]))
            return found if out is None else out.copy_(found)

        return Bound(forward)

    def compute(self, request, query, key, value):
        return _right(request, query, key, value)


class Aborts(_Odd):
    def compute(self, *args):
        os.abort()


class Exits(_Odd):
    def compute(self, *args):
        print("so be it", file=sys.stderr, flush=True)
        os._exit(3)


class Hangs(_Odd):
    def compute(self, *args):
        time.sleep(36_000)


class Lies(_Odd):
    def compute(self, *args):
        return _right(*args) * 1.02


class Raises(_Odd):
    def compute(self, *args):
        raise RuntimeError("an illegal memory access was encountered")


class Scribbles(_Odd):
    def compute(self, request, query, key, value):
        found = _right(request, query, key, value)
        key.mul_(0.5)
        return found


class Quick(_Odd):
    """Nothing is wrong with this one."""


class Greedy(_Odd):
    def compute(self, *args):
        import torch

        torch.empty(2**45)
        return _right(*args)


class Chatty(_Odd):
    def compute(self, *args):
        print("tuning ...", end="")
        os.write(1, b"polyattn-probe:{}\n")
        return _right(*args)


class Killed(_Odd):
    def compute(self, *args):
        os.kill(os.getpid(), signal.SIGKILL)


class Slow(_Odd):
    def compute(self, *args):
        time.sleep(1)
        return _right(*args)


Slower = Slowest = Slow


class Second(_Odd):
    calls = 0

    def compute(self, *args):
        Second.calls += 1
        if Second.calls > 1:
            os.abort()
        return _right(*args)


class Grows(_Odd):
    def compute(self, request, query, key, value):
        if key.shape[1] % 16:
            os.abort()
        return _right(request, query, key, value)


class Later(_Odd):
    """Nothing is wrong with it in a process of its own."""

    def compute(self, *args):
        if "probe" not in sys.argv[0]:
            os.abort()
        return _right(*args)


class Sleepy(_Odd):
    """Right, and slow."""

    def compute(self, *args):
        time.sleep(0.02)
        return _right(*args)
