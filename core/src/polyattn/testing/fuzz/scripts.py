"""A failing call as a script that needs torch and polyattn only: people send it, run it, and see it fail."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import pprint
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...dispatch.device_facts import device_facts
from ...registry.manager import get_manager
from ..cases import Case
from .drawing import Drawn
from .judging import Failure, arguments
from .wrong import spoil

__all__ = ["exit_code", "script"]

_TABLES = ("cu_seqlens_q", "cu_seqlens_k", "page_table", "seq_lens")
_OPTIONS = ("sinks", "attn_mask", "k_scale", "v_scale")

_LITERAL = 40
"""Numbers up to which such a tensor is written out."""


def script(drawn: Drawn, failure: Failure, backend: str | None, device: torch.device, origin: str) -> str:
    """A script that exits with 0 when the bug is not there.

    It is plain torch code around the public call. What that cannot show (memory written to, an `out=` not used, other
    bits in a second run, an error that needs the very numbers of the kit) is shown by the kit's own check of the case.

    Args:
        drawn: the call. failure: what was found. backend: None = automatic selection. device: where.
        origin: the command that found it.
    """
    head = _head(failure, drawn, backend, device, origin)
    if drawn.wrong:
        return head + _refused(drawn, backend, device)
    if drawn.way:
        return head + _by_the_kit(drawn.case, backend, device, f"way={drawn.way!r}")
    if drawn.saying:
        return head + _by_the_kit(drawn.case, backend, device, f"saying={drawn.saying!r}")
    plain = _plainly(drawn.case, failure, backend, device)
    return head + (_by_the_kit(drawn.case, backend, device) if plain is None else plain)


def exit_code(text: str) -> int:
    """Run a script in this process and say how it would have ended."""
    return _run(text)[0]


def _run(text: str) -> tuple[int, dict[str, Any]]:
    """(exit code, what the script had by then)."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
            exec(compile(text, "reproducer", "exec"), names)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None), names
    except Exception:  # noqa: BLE001 - a script that shows an error raises it
        return 1, names
    return 0, names


def _head(failure: Failure, drawn: Drawn, backend: str | None, device: torch.device, origin: str) -> str:
    name = backend or "automatic selection"
    lines = [
        f"{name}: {failure}",
        f"Found by `{origin}` with polyattn {__version__}, torch {torch.__version__}, on {device}.",
        "Exit code 0: the bug is not there (any more).",
    ]
    if needs := _needs(backend, device):
        lines.append(needs)
    lines.append(f"Case: {drawn.id}")
    text = "\n".join(textwrap.fill(line, 116, break_on_hyphens=False) for line in lines)
    return '"""{}\n"""\n'.format(text.replace("\\", "\\\\").replace('"""', "'''"))


def _needs(backend: str | None, device: torch.device) -> str:
    """How a stranger gets the backend."""
    manager = get_manager()
    info = manager.backends.get((backend or "", device_facts(device)["platform"]))
    if info is None or (owner := manager.owner(info)).name == "core":
        return ""
    if owner.distribution:
        return f"Needs {owner.distribution} {owner.version}."
    return f"Needs the plugin module {owner.module}: run it with POLYATTN_EXTRA_PLUGINS={owner.module}"


# --- plain torch


def _refused(drawn: Drawn, backend: str | None, device: torch.device) -> str:
    """A call that must be refused."""
    call, given = arguments(drawn.case, device)
    given.pop("out", None)
    spoilt = spoil(drawn.case.request.family, drawn.wrong, given)
    if spoilt is None:
        raise ValueError(f"this call cannot be spoilt in this way: {drawn.wrong}")
    asked = spoilt.pop("backend", backend)
    code = _Code(trained=True)
    changed = {name for name, value in spoilt.items() if value is not given.get(name, _MISSING)}
    lines = _arguments(code, spoilt, asked, changed)
    lines += [_assigned("tensors", "dict", {name: name for name in code.floats}), ""]
    return "\n".join([*lines, _REFUSED.format(call=f"polyattn.{call.__name__}", wrong=drawn.wrong)]) + "\n"


def _plainly(case: Case, failure: Failure, backend: str | None, device: torch.device) -> str | None:
    """A call compared with the reference, or None when that does not show the failure."""
    call, given = arguments(case, device)
    code = _Code(trained=False)
    made = _arguments(code, given, backend)

    def text(asked: str | None, allowed: Mapping[str, float]) -> str:
        lines = [f"BACKEND = {asked!r}" if line.startswith("BACKEND = ") else line for line in made]
        return "\n".join([*lines, *_comparison(case, code, f"polyattn.{call.__name__}", allowed)]) + "\n"

    if failure.check in ("call", "gradients"):
        return text(backend, {}) if exit_code(text(backend, {})) and not exit_code(text("reference", {})) else None
    least, most = (_error(_run(text(asked, {}))[1], failure.check) for asked in ("reference", backend))
    if least is None or most is None or most <= _TELLING * least:
        return None
    # Between the two, so that neither other numbers nor another machine make it a matter of luck.
    return text(backend, {failure.check: math.sqrt(most * least) if math.isfinite(most) else _TELLING * least})


_TELLING = 8
"""How many times the rounding of the reference an error must be to be shown by a plain comparison."""


def _error(names: Mapping[str, Any], what: str) -> float | None:
    """The largest error of a result of a script, no less than a rounding; None where it has no such result."""
    found, right = names.get("found", {}).get(what), names.get("right", {}).get(what)
    if found is None or right is None:
        return None
    if found.shape != right.shape:
        return math.inf
    finite = right[right.isfinite()].double().abs()
    rounding = torch.finfo(found.dtype).eps * float(finite.max() if finite.numel() else 1.0)
    error = (found.double() - right.double()).abs().masked_fill(found.double() == right.double(), 0.0)
    return max(float(error.nan_to_num(math.inf).max()) if error.numel() else 0.0, rounding)


_MISSING = object()


def _arguments(code: _Code, given: Mapping[str, Any], backend: Any, changed: Collection[str] = ()) -> list[str]:
    """The lines that make every argument: tensors by name, and `options` for the rest. What is off is left out, but
    for what was changed."""
    told = {name: value for name, value in given.items() if name in changed or _said(name, value)}
    said = {name: code.value(name, value) for name, value in told.items()}
    options = {name: text for name, text in said.items() if name not in code.floats}
    head = ["import torch", "", "import polyattn", *code.before, "", f"BACKEND = {backend!r}", "torch.manual_seed(0)"]
    return [*head, *code.lines, _assigned("options", "dict", options)]


def _said(name: str, value: Any) -> bool:
    off = {"window": (-1, -1), "softcap": 0.0, "dropout_p": 0.0, "layout": "BSHD", "kv_layout": "NHD"}
    if value is None or (value is False and name != "causal"):
        return False
    return not (name in off and type(value) is type(off[name]) and value == off[name])


_REFUSED = """\
try:
    {call}(**tensors, **options, backend=BACKEND)
except polyattn.PolyattnError as refusal:
    print("refused, as it must be:", refusal)
else:
    raise SystemExit("answered, although it is wrong: {wrong}")"""


class _Code:
    """Python code that makes the arguments of a call."""

    def __init__(self, trained: bool) -> None:
        self.trained = trained
        self.before: list[str] = []
        self.lines: list[str] = []
        self.floats: list[str] = []
        self._known: dict[int, str] = {}

    def value(self, name: str, value: Any) -> str:
        """The code of an argument; a tensor becomes a variable of its name first."""
        if not isinstance(value, Tensor):
            return _literal(value)
        if id(value) in self._known:
            return self._known[id(value)]
        self._known[id(value)] = name
        if value.is_floating_point() or value.dtype == torch.bool or value.is_complex():
            self.floats.append(name)
        grad = ".requires_grad_()" if self.trained and value.requires_grad else ""
        self.lines.append(f"{name} = {self._tensor(name, value)}{grad}")
        return name

    def _tensor(self, name: str, tensor: Tensor) -> str:
        shape, dtype = ", ".join(map(str, tensor.shape)), str(tensor.dtype)
        if tensor.device.type == "meta":
            return f'torch.empty({shape or "()"}, dtype={dtype}, device="meta")'
        made = self._values(name, tensor.detach())
        where = "" if tensor.device.type == "cpu" else f'.to("{tensor.device}")'
        if tensor.numel() and not tensor.is_contiguous():
            made = self._laid(made + where, tensor)
            where = ""
        return made + where

    def _values(self, name: str, tensor: Tensor) -> str:
        """Values of the same kind: small tables and options as they are, the rest drawn anew."""
        shape, size = ", ".join(map(str, tensor.shape)) or "()", tuple(tensor.shape)
        cast = "" if tensor.dtype == torch.float32 else f".to({tensor.dtype})"
        if name in _TABLES or (name in _OPTIONS and tensor.numel() <= _LITERAL):
            text = pprint.pformat(tensor.tolist(), width=100, compact=True).replace("inf", 'float("inf")')
            reshaped = f".reshape({shape})" if 0 in size else ""
            return f"torch.tensor({text}, dtype={tensor.dtype}){reshaped}"
        if name == "out":
            return f'torch.full({size}, float("nan")){cast}'
        if name.endswith("_scale"):
            return f"(2.0 ** -torch.randint(1, 4, {size})){cast}"
        if tensor.dtype == torch.bool:
            return f"(torch.rand({shape}) < 0.7)"
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return f"torch.randint(0, 9, {size}, dtype={tensor.dtype})"
        centre = _centre(tensor)
        if centre:
            return f"(torch.randn({shape}) / 2 + {centre:.3g}){cast}"
        hidden = tensor.is_floating_point() and bool(tensor.float().isinf().any())
        mask = f'.masked_fill(torch.rand({shape}) < 0.3, float("-inf"))' if hidden else ""
        return f"torch.randn({shape}){mask}{cast}"

    def _laid(self, made: str, tensor: Tensor) -> str:
        """The same values in the memory layout that failed."""
        self.before = [_LAID]
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        size = 1 + tensor.storage_offset() + reach
        return f"laid({made}, {size}, {tuple(tensor.stride())}, {tensor.storage_offset()})"


def _centre(tensor: Tensor) -> float:
    """Around which number its values lie, where that is not 0: logits far from 0 are made of such."""
    known = tensor[tensor.isfinite()].double() if tensor.dtype in _PLAIN_FLOATS else tensor.new_zeros(0)
    centre = float(known.mean()) if known.numel() else 0.0
    return centre if known.numel() > 8 and abs(centre) > 2 * float(known.std()) else 0.0


_PLAIN_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_LAID = '''

def laid(values, size, stride, offset):
    """`values` with these strides; an axis of stride 0 shares its first entry."""
    gaps = float("nan") if values.is_floating_point() else 1
    view = torch.full((size,), gaps, dtype=values.dtype, device=values.device).as_strided(values.shape, stride, offset)
    own = tuple(slice(1) if step == 0 else slice(None) for step in stride)
    view[own] = values[own]
    return view
'''


def _literal(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(_literal, value))
        tail = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"({inside}{tail})" if isinstance(value, tuple) else f"[{inside}]"
    return repr(value)


def _assigned(name: str, kind: str, entries: Mapping[str, str]) -> str:
    inside = ", ".join(f"{key}={text}" for key, text in entries.items())
    line = f"{name} = {kind}({inside})"
    if len(line) <= 110:
        return line
    return f"{name} = {kind}(\n" + "".join(f"    {key}={text},\n" for key, text in entries.items()) + ")"


def _comparison(case: Case, code: _Code, call: str, allowed: Mapping[str, float]) -> list[str]:
    request = case.request
    wide = {"mla": ("query", "cache"), "paged": ("query",)}.get(request.family, ("query", "key", "value"))
    gradients = [name for name in request.grad if name != "lse"]
    leaves = ", ".join(f'given["{"attn_mask" if name == "mask" else name}"]' for name in gradients)
    through_lse = request.lse and not {"query", "key", "mask"}.isdisjoint(gradients)
    used = '("out", "lse")' if through_lse else '("out",)'
    bounds = ", ".join(f'"{name}": {bound:.2g}' for name, bound in allowed.items())
    out = ", out=None if wide else out" if "out" in code.floats else ""
    lines = [
        _assigned("tensors", "dict", {name: name for name in code.floats if name != "out"}),
        f"ALLOWED = {{{bounds}}}  # largest absolute errors",
        "",
        "",
        "def results(backend, wide=()):",
        '    """What comes back, by name; the tensors named in `wide` are float64."""',
        "    given = {name: t.to(torch.float64 if name in wide else t.dtype) for name, t in tensors.items()}",
    ]
    if gradients:
        lines += [f"    leaves = [{leaves}]", "    for leaf in leaves:", "        leaf.requires_grad_()"]
    lines += [
        f"    raw = {call}(**given, **options, backend=backend{out})",
        '    found = dict(zip(("out", "lse"), raw if isinstance(raw, tuple) else (raw,)))',
    ]
    if gradients:
        names = ", ".join(f'"grad {name}"' for name in gradients)
        lines += [
            "    torch.manual_seed(1)",
            f"    outputs = [found[name] for name in {used}]",
            "    upstream = [torch.randn(o.shape).to(query.dtype).to(o) for o in outputs]",
            "    grads = torch.autograd.grad(outputs, leaves, upstream, materialize_grads=True)",
            f"    found |= zip(({names},), grads)",
        ]
    return [
        *lines,
        "    return {name: t.detach() for name, t in found.items()}",
        "",
        "",
        f'right = results("reference", wide={wide})',
        "found = results(BACKEND)",
        "for name, allowed in ALLOWED.items():",
        "    torch.testing.assert_close(found[name].double(), right[name].double(), rtol=0, atol=allowed)",
        'print("they agree")',
    ]


# --- the kit's own check


def _by_the_kit(case: Case, backend: str | None, device: torch.device, how: str = "") -> str:
    request, others = ", ".join(_changed(case.request)), ", ".join(_changed(case, but=("request",)))
    template = _JUDGED if how else _KIT
    return template.format(how=how, request=request, others=others, backend=backend, device=str(device))


def _changed(record: Any, but: tuple[str, ...] = ()) -> list[str]:
    """The fields of a record that are not what they are by default, as keywords."""
    fields = [f for f in dataclasses.fields(record) if f.name not in but]
    return [f"{f.name}={_literal(getattr(record, f.name))}" for f in fields if getattr(record, f.name) != f.default]


_JUDGED = """\
import torch
from polyattn.contract import AttentionRequest
from polyattn.testing import Case
from polyattn.testing.fuzz import Drawn, judge

request = AttentionRequest({request})
case = Case(request=request, {others})
verdict = judge(Drawn(case, {how}), {backend!r}, torch.device("{device}"))
print(verdict)
raise SystemExit(1 if verdict.word == "failed" else 0)
"""

_KIT = """\
from polyattn.contract import AttentionRequest
from polyattn.testing import Case, run_case
from polyattn.testing.fuzz import Calls

BACKEND = {backend!r}
request = AttentionRequest({request})
outcome = run_case(Calls(BACKEND, "{device}"), Case(request=request, {others}))
print(outcome)
raise SystemExit(0 if outcome.verdict == "passed" else 1)
"""
