"""How a backend is called by the kit: through the public calls where they can say what a case asks, else as bound."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..contract import Accuracy, AttentionRequest, BackendInfo, Defect, Provider, Rejected, Row
from ..contract.lengths import head_axis
from ..dispatch.binding import choose, device_facts
from ..dispatch.call_key import runner
from ..errors import BackendUnavailableError, ConfigError, PolyattnError, UnsupportedRequestError, did_you_mean
from ..registry.bound_check import checked
from ..registry.defects import refusal
from ..registry.manager import _import_target, get_manager
from ..selection import inspection
from ..selection.inspection import catalogue, list_backends
from ..selection.overrides import SCOPE
from ..selection.select import Choice, Policy, select
from ..semantics.autograd import differentiable
from .cases import Case
from .families import Call, family_of
from .steps import planned
from .values import declared

__all__ = ["Installed", "OffChip", "Target", "is_interpreted", "natively", "out_of", "sayable"]


def _class_of(providers: Iterable[Provider]) -> Accuracy | None:
    """The class that all of these providers keep; None where all are exact."""
    found = [p.accuracy for p in providers if p.accuracy is not None]
    return max(found, key=lambda accuracy: accuracy.error, default=None)


def is_interpreted(info: BackendInfo) -> bool:
    """Return whether Triton's interpreter runs a backend's kernels, thousands of times slower than a device does."""
    return info.platform == "cpu" and info.evidence == "interpreter"


def sayable(case: Case) -> bool:
    """Return whether the public call of the family can ask for this case."""
    return family_of(case).sayable(case)


def natively(policy: Policy) -> Policy:
    """The policy without exact rewrites: what is judged is the backend itself, not what selection can make of it."""
    return dataclasses.replace(policy, lowering=False)


class Target(Protocol):
    """A backend that cases can be run against. One that quantises has an `accuracy` too (`records.Accuracy`)."""

    name: str
    device: torch.device

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        """out, or (out, lse): what the call of the family returns."""
        ...


class Installed:
    """A backend as this machine has it, on one of its devices.

    Raises:
        BackendUnavailableError: it is unknown, or cannot run here. ConfigError: `device` is none of torch's.
    """

    def __init__(self, name: str, device: torch.device | str = "cpu") -> None:
        self.name, self.device = name, _device(device)
        self.facts = device_facts(self.device)
        self.platform: str = self.facts["platform"]
        manager = get_manager()
        known = {n for n, platform in manager.backends if platform == self.platform}
        if name not in known:
            raise BackendUnavailableError(
                f"no backend {name!r} is registered for {self.platform}.{did_you_mean(name, known)} "
                f"Known: {', '.join(sorted(known))}; `polyattn list` shows all"
            )
        status = next(s for s in list_backends(self.platform) if s.name == name)
        if status.status != "available":
            raise BackendUnavailableError(f"{name}@{self.platform} is {status.status}: {'; '.join(status.reasons)}")
        self.info: BackendInfo = manager.backends[name, self.platform]
        offer = next(o for o in catalogue().offers if o.info is self.info)
        self.providers: tuple[Provider, ...] = tuple(
            p for p in self.info.providers if not p.planned and p.name not in offer.missing
        )
        self.defects: Mapping[Provider, tuple[Defect, ...]] = {p: offer.defects.get(p.name, ()) for p in self.providers}
        self.rows: tuple[Row, ...] = tuple(row for p in self.providers for row in p.rows)

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        if refused := self.refuse(case):
            raise refused
        if sayable(case):
            return _public(case, tensors, extra, out, self.name)
        chosen = choose(self.request(case), self.name, SCOPE.get())
        forward = runner(chosen, case.request.lse, False, head_axis(case.request))
        return _bound(forward, case, tensors, extra, out)

    def recordable(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> Callable[[], Any]:
        """The call as a graph records it: by itself, or as a layer of a planned step of a backend that plans."""
        if case.request.graph_capture != "session":
            return lambda: self.call(case, tensors, extra, None)
        if refused := self.refuse(case):
            raise refused
        bound = choose(self.request(case), self.name, SCOPE.get()).bound
        if bound.session is None:
            return lambda: _bound(bound.forward, case, tensors, extra, None)
        return planned(bound.session, case, tensors, extra, recorded=True)

    def request(self, case: Case) -> AttentionRequest:
        """The case's request on this machine, in normal form."""
        return dataclasses.replace(case.request, **self.facts).normalised()

    def asked(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> AttentionRequest:
        """Return what the public call makes of a case: nothing of it may be lost on the way."""
        call, positional, keywords = family_of(case).public(Call(case, tensors, extra))
        return inspection.explain(call, *positional, backend=self.name, **keywords).request

    def refuse(self, case: Case) -> PolyattnError | None:
        """The backend's own refusal of a request, None when it takes it as it is."""
        policy = natively(Policy(Choice(self.name, "conformance"), strict=True))
        try:
            selection = select(self.request(case), catalogue(), policy)
        except PolyattnError as exc:
            return exc
        if selection.rule:  # what others serve it does not
            reasons = "; ".join(selection.rejected[selection.rule])
            return UnsupportedRequestError(f"{self.name} leaves it to others ({selection.why}): {reasons}")
        return None

    @property
    def accuracy(self) -> Accuracy | None:
        """The class of the providers that are here."""
        return _class_of(self.providers)

    def faulty(self, request: AttentionRequest) -> bool:
        """Return whether each provider whose rows accept a request has a known fault for which it is refused."""
        request = request.normalised()
        taking = [p for p in self.providers if declared(p.rows, request)]
        return bool(taking) and all(refusal(self.defects[p], request, named=True) is not None for p in taking)

    @property
    def interpreted(self) -> bool:
        """See `is_interpreted`."""
        return is_interpreted(self.info)

    @property
    def narrows(self) -> bool:
        """Return whether its plugin has a `polyattn_report_capability`."""
        return get_manager().narrows(self.info)

    def narrowed(self, request: AttentionRequest) -> Rejected | None:
        """Return what that hook has against a request that the rows accept."""
        verdict = get_manager().narrow(self.info, request.normalised())
        return verdict if isinstance(verdict, Rejected) else None


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as exc:
        raise ConfigError(
            f"device {str(device)!r} is no device of torch: {exc}. Give one such as cpu or cuda:0"
        ) from exc
    if found.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError("torch finds no CUDA or ROCm device here; `polyattn doctor` says what it sees")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


class OffChip:
    """An adapter bound for another platform and run on the CPU: what a vendor-neutral adapter computes there.

    Args:
        name, platform: of the backend. options: of the backend, as `AttentionRequest.options`.
    """

    def __init__(self, name: str, platform: str, options: tuple[tuple[str, Any], ...] = ()) -> None:
        self.name, self.platform, self.options = name, platform, options
        self.device = torch.device("cpu")
        self.facts = {"platform": platform}
        self.info = get_manager().backends[name, platform]
        self.rows = tuple(row for p in self.info.providers if not p.planned for row in p.rows)

    @property
    def accuracy(self) -> Accuracy | None:
        """The class of its providers."""
        return _class_of(p for p in self.info.providers if not p.planned)

    def call(self, case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None) -> Any:
        request = dataclasses.replace(case.request, platform=self.platform, options=self.options).normalised()
        provider = next(p for p in self.info.providers if not p.planned and declared(p.rows, request))
        adapter: Any = _import_target(provider.target)()
        bound = checked(adapter.bind(request), request, self.name, get_manager().owner(self.info).api)
        forward = bound.forward
        if bound.backward is not None and request.grad:
            forward = differentiable(bound, request.lse, head_axis(request))
        return _bound(forward, case, tensors, extra, out)


def _bound(
    forward: Callable[..., Any],
    case: Case,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    out: Tensor | None,
) -> Any:
    family = family_of(case)
    given: dict[str, Any] = dict.fromkeys(family.optional)
    given |= {"attn_mask" if name == "mask" else name: tensor for name, tensor in tensors.items()}
    positional = [given.pop(name) for name in family.positional]
    return forward(*positional, **family.keywords(extra), **given, out=out)


def _public(case: Case, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], out: Tensor | None, name: str) -> Any:
    call, positional, keywords = family_of(case).public(Call(case, tensors, extra))
    if case.request.transform == "subclass":
        positional = tuple(t.as_subclass(_Labelled) for t in positional)
    if case.request.transform == "vmap":
        # Two samples of which the second is twice the first: mixing them up would be seen.
        stacked = [torch.stack([t, 2 * t]) for t in positional]
        mapped = torch.vmap(lambda q, k, v: call(q, k, v, backend=name, **keywords))(*stacked)
        return tuple(t[0] for t in mapped) if isinstance(mapped, tuple) else mapped[0]
    if around := _AROUND.get(case.request.transform):
        return around(lambda q, k, v: call(q, k, v, backend=name, **keywords), *positional)
    return call(*positional, backend=name, out=out, **keywords)


def _linearised(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Return what the function gives where its backward is about to be taken."""
    return torch.func.vjp(function, *tensors)[0]


_AROUND: Mapping[str, Callable[..., Any]] = {
    "functionalize": lambda function, *tensors: torch.func.functionalize(function)(*tensors),
    "grad": _linearised,
    "gradgrad": lambda function, *tensors: _linearised(functools.partial(_linearised, function), *tensors),
    "jvp": lambda function, *tensors: torch.func.jvp(function, tensors, tensors)[0],
}


class _Labelled(Tensor):
    """The plainest tensor subclass."""


def out_of(case: Case, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The `out=` of a case, full of NaN; None where the case gives none."""
    if not case.out:
        return None
    if case.out == "contiguous":
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    wide = torch.full((*shape[:-1], shape[-1] + 3), float("nan"), dtype=dtype, device=device)
    return wide[..., : shape[-1]]
