"""What a plugin announces: backends with their providers, limits and rules, and platforms. Data only.

Nothing here imports torch or a vendor library; targets are dotted strings, imported at first use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from .capability import Constraint, Row, _condition, _known
from .request import AttentionRequest

__all__ = [
    "Accuracy",
    "Alias",
    "AutoRule",
    "BackendInfo",
    "ConfigField",
    "Defect",
    "DeviceReport",
    "EvidenceLevel",
    "Fallback",
    "PairRule",
    "PlatformInfo",
    "Provider",
    "Requirement",
    "Witness",
    "conditions",
]

EvidenceLevel = Literal["hardware", "interpreter", "vendor code", "emulator", "compiled", "declared"]


def conditions(**fields: Any) -> dict[str, Constraint]:
    """Conditions on a request in the shorthand of a row's `when`: `conditions(arch=("sm90",), cross=True)`."""
    return {_known(k): c for k, v in fields.items() if (c := _condition(k, v))}


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A distribution a provider needs.

    Attributes:
        distribution: its name on the registry, normalised (PEP 503).
        versions: a version specifier, empty = any.
        module: a dotted module that must be findable (not imported): the proof that it is the right package.
        hint: the one thing to do when it is missing.
        impostor: what a package of a similar name on the registry really is, when there is one.
        also: other names people and installers use for the same distribution.
        warning: what people who have it must know (an ended project, an advisory); `polyattn doctor` says it.
        check: "package.module:function" that says why this process cannot use it although it is installed: None, or
            (why, what to do). Asked before anything is selected, it imports neither the distribution nor torch.
    """

    distribution: str
    versions: str = ""
    module: str = ""
    hint: str = ""
    impostor: str = ""
    also: tuple[str, ...] = ()
    warning: str = ""
    check: str = ""


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The class of a provider that quantises Q, K or P: what conformance holds it to, in place of the exact gates.

    Attributes:
        cosine: the least cosine similarity of a result to the reference.
        error: its largest relative L2 error; of an LSE, whose absolute error is the relative error of a partial's
            weight, the largest root mean square of that.
    """

    cosine: float
    error: float


@dataclasses.dataclass(frozen=True)
class Defect:
    """A known fault of a library, and what polyattn does about it.

    Attributes:
        library: whose fault it is, by its name on the registry where it has one.
        what: what goes wrong, for people.
        source: where the fault is reported, or what shows it, on which device, versions and date.
        done: `refused`: selection refuses the requests of `when`. `by name`: no such request is given to the library
            unless somebody asks for its backend. `mended`: the adapter goes another way, `how` says which.
            `undeclared`: no capability row takes such a request.
        when: conditions on the request; empty = any. versions: specifier of the versions that have the fault, empty =
            all that are known.
        how: of a fault that is mended.
        witness: a request of `when`; one that is `refused` is asked for by the conformance kit.
    """

    library: str
    what: str
    source: str
    done: Literal["refused", "by name", "mended", "undeclared"]
    when: Mapping[str, Constraint] = dataclasses.field(default_factory=dict)
    versions: str = ""
    how: str = ""
    witness: AttentionRequest | None = None

    def __hash__(self) -> int:
        return hash((self.library, self.what))


@dataclasses.dataclass(frozen=True)
class Provider:
    """One way to get a backend: a distribution, an adapter, and the limits they have together.

    Attributes:
        name: short name, unique within the backend (`flash-attn-3`, `vllm`, `sgl-kernel`).
        rows: capability rows (OR).
        target: "package.module:Class" of the adapter; empty = planned (never selected, named as planned).
        requires: all of these distributions.
        accuracy: of a provider that quantises Q, K or P; None = exact.
        defects: known faults of its libraries.
    """

    name: str
    rows: tuple[Row, ...]
    target: str = ""
    requires: tuple[Requirement, ...] = ()
    accuracy: Accuracy | None = None
    defects: tuple[Defect, ...] = ()

    @property
    def planned(self) -> bool:
        return not self.target

    @property
    def is_method(self) -> bool:
        """Whether it serves calls with a place only: its target is then a `polyattn.contract.Method`."""
        return any("place" in row.when for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Alias:
    """Another name of a backend, valid in `families` only, optionally bound to one provider.

    `fa3` in the dense and varlen families is `fa` restricted to its FA3 provider: it never becomes FA2.
    """

    name: str
    families: tuple[str, ...] = ()
    provider: str = ""


@dataclasses.dataclass(frozen=True)
class Fallback:
    """A documented replacement when this backend was asked for and cannot serve. Warned once; strict: an error.

    Attributes:
        to: backend name on the same platform.
        why: the sentence shown to people.
        when: conditions on the request; empty = any failure.
        family: the family the replacement is asked in, empty = unchanged.
        rule: a division of labour, not a failure: the backend is here, and such requests are never its own. It is
            recorded and never warned about, is no error in strict mode, and where `to` cannot serve, whoever would be
            chosen without a name does.
        first: `to` is a kernel of the same library in another class of accuracy, and is asked before this backend
            itself, which serves where `to` does not, and in strict mode.
    """

    to: str
    why: str
    when: Mapping[str, Constraint] = dataclasses.field(default_factory=dict)
    family: str = ""
    rule: bool = False
    first: bool = False


@dataclasses.dataclass(frozen=True)
class AutoRule:
    """'Choose me': a platform rule for automatic selection. Lower `rank` is asked first, across all plugins."""

    rank: int
    why: str
    when: Mapping[str, Constraint] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PairRule:
    """A combination of phases that does not work: this backend in `phase` with one of `others` in `other_phase`."""

    phase: str
    other_phase: str
    others: tuple[str, ...]
    why: str
    when: Mapping[str, Constraint] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Witness:
    """One refusal that the plugin's `polyattn_report_capability` adds to the rows: they accept `request`, it does not.

    Every kind of refusal has one; the conformance kit asks the hook, and reports a narrowing without a witness.

    Attributes:
        request: in normal form or not. Its `arch`, if it has one, stands; else it is asked of the machine at hand.
        why: the limit, for people.
    """

    request: AttentionRequest
    why: str


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """One option of a backend's typed schema (`--attention-backend-config`).

    Attributes:
        name: the key.
        type: bool, int, float, str, path, or list[...] / literal choices as `choices`.
        default: value when not given; ... (Ellipsis) = required.
        doc: one line.
        choices: allowed values, empty = any.
        low, high: inclusive bounds of numbers.
        length: number of entries of a list, 0 = any.
        needed: pairs (option, value): a value that is not empty is required where one of these options has this value.
    """

    name: str
    type: Literal["bool", "int", "float", "str", "path", "list[int]", "list[float]", "list[str]"]
    default: Any = ...
    doc: str = ""
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    length: int = 0
    needed: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class BackendInfo:
    """One backend on one platform; identity is (name, platform), printed `fa@rocm`.

    Attributes:
        name: the field's name, lower case.
        platform: the platform it runs on.
        providers: any one of these serves; asked in order.
        summary: one line for lists.
        priority: order of automatic selection when no rule chose; higher first; None = never automatic
            (lossy or approximate methods, and methods a person must ask for).
        aliases, fallbacks, auto, pairs: data described in their classes.
        config: the typed schema of its options.
        narrowed: a witness for each kind of refusal that the plugin's capability hook adds to the rows.
        evidence: the least the plugin claims; an evidence file beside the plugin raises it.
        lossy: accuracy class for approximate methods (quantised, sparse), empty = exact.
        upstream: where the kernels come from.
        note: what a reader of the matrix must know.
        compiles: a program is compiled for each kind of request, for seconds: conformance draws fewer cases.
    """

    name: str
    platform: str
    providers: tuple[Provider, ...]
    summary: str
    priority: int | None = 0
    aliases: tuple[Alias, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    auto: tuple[AutoRule, ...] = ()
    pairs: tuple[PairRule, ...] = ()
    config: tuple[ConfigField, ...] = ()
    evidence: EvidenceLevel = "declared"
    lossy: str = ""
    upstream: str = ""
    note: str = ""
    narrowed: tuple[Witness, ...] = ()
    compiles: bool = False

    @property
    def id(self) -> str:
        return f"{self.name}@{self.platform}"

    @property
    def planned(self) -> bool:
        return all(p.planned for p in self.providers)

    def __str__(self) -> str:
        return self.id

    def __hash__(self) -> int:
        return hash((self.name, self.platform))


@dataclasses.dataclass(frozen=True)
class PlatformInfo:
    """A device kind.

    Attributes:
        name: cuda, rocm, xpu, musa, npu, mps, cpu, or a plugin's own.
        device_type: torch device type its tensors carry (ROCm tensors say "cuda").
        detect: "package.module:function"; returns a `DeviceReport` without initialising a device.
        plugin: entry name of the vendor's plugin: broken, it is an error on this device, not a warning.
        archs: examples of architecture names.
        fallback: backend that replaces what is asked for by name (MPS): names without a backend there, and those of
            its own plugin that could be chosen by themselves; the reason is in `fallback_why`.
    """

    name: str
    device_type: str
    detect: str
    plugin: str = ""
    archs: tuple[str, ...] = ()
    fallback: str = ""
    fallback_why: str = ""


@dataclasses.dataclass(frozen=True)
class DeviceReport:
    """What detection found: `present`, architecture names, toolkit version, machine features, and the evidence."""

    present: bool
    detail: str
    archs: tuple[str, ...] = ()
    toolkit: tuple[int, ...] = ()
    features: tuple[str, ...] = ()
    torch_build: str = ""
