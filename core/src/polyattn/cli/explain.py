"""`polyattn explain` says which backend serves a request, here or on a machine that is only described, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from ..contract import AttentionRequest
from ..errors import ConfigError
from ..registry.manager import get_manager
from ..registry.platforms import parse_platform
from ..selection.config import backend_names, check_settings
from ..selection.inspection import catalogue, detect, served_by, what_if
from ..selection.overrides import SCOPE, configure_by, current_settings
from ..selection.phase_pairs import both_phases, check_drafting, select_pair
from ..selection.select import Choice, Policy, Selection, select
from ..selection.tuned_policy import current_policy
from .options import Json, Option, with_options
from .questions import SERVING, ask
from .reasons import reasons_table
from .rendering import facts, panel, screen, show_json, standing
from .request_flags import REQUEST, request_flags

__all__ = ["assumed", "checked", "explain", "here"]

MACHINE = "Which machine"


def here() -> dict[str, Any]:
    """Return the request fields of this machine: its accelerator if there is one, else its CPU."""
    reports = {name: detect(name) for name in get_manager().platforms}
    found = [name for name, report in reports.items() if report.present]
    name = next((n for n in found if n != "cpu"), "cpu")
    report = reports[name]
    arch = report.archs[0] if report.archs else ""
    return {"platform": name, "arch": arch, "toolkit": report.toolkit, "features": report.features}


def assumed(fields: dict[str, Any]) -> str:
    """Describe this machine in the words of --assume-platform."""
    if fields["platform"] == "cpu":
        return ":".join(("cpu", *(["+".join(fields["features"])] if fields["features"] else [])))
    toolkit = ".".join(map(str, fields["toolkit"]))
    arch = f":{fields['arch']}" if fields["arch"] else ""
    return f"{fields['platform']}{arch}{'@' + toolkit if toolkit and arch else ''}"


def _either(name: str, given: Mapping[str, Any]) -> bool | None:
    """Read the two flags of a switch with three answers; None = neither is given."""
    yes, no = bool(given[name]), bool(given[f"no_{name}"])
    if yes and no:
        flag = name.replace("_", "-")
        raise ConfigError(f"--{flag} and --no-{flag} exclude each other: leave one out")
    return yes if yes or no else None


def checked(words: str) -> str:
    """Return the words of --assume-platform, once they are known to mean a machine."""
    try:
        parse_platform(words, get_manager().platforms)
    except ConfigError as exc:
        raise ConfigError(f"--assume-platform {exc}") from exc
    return words


def _on_this_machine(
    request: AttentionRequest, backend: str | None, pair: dict[str, str | None], mode: str, strict: bool
) -> Selection:
    """Choose as a call here would, with the backends of the two phases where they are given."""
    policy = dataclasses.replace(current_policy(backend, SCOPE.get(), request), strict=strict)
    if any(pair.values()):
        policy = _hybrid(request, policy, pair, mode)
    else:
        check_drafting(request, catalogue(), policy)
    return select(request, catalogue(), policy, full=True)


def _hybrid(request: AttentionRequest, policy: Policy, pair: dict[str, str | None], mode: str) -> Policy:
    """Return the policy of the request's own phase, once the two phases are known to work together."""
    if request.family not in SERVING:
        raise ConfigError(
            f"--prefill-attention-backend and --decode-attention-backend are for the serving families "
            f"{' and '.join(SERVING)}, not {request.family}: use --attention-backend, or --family paged"
        )
    policies = {
        phase: dataclasses.replace(policy, choice=Choice(own, f"{phase} argument")) if own else policy
        for phase, own in pair.items()
    }
    chosen = select_pair(*both_phases(request), catalogue(), policies)
    if request.phase == "verify":
        return dataclasses.replace(policy, choice=Choice(served_by(chosen[mode]), f"speculative_attention_mode={mode}"))
    return policies["decode" if request.phase == "decode" else "prefill"]


MORE = (
    Option("mla", bool, "Ask for --family mla (128 heads, rows of 576).", "", REQUEST),
    Option(
        "causal_alignment",
        str,
        "The alignment of the causal mask: bottom_right, or top_left (means --causal).",
        "WORD",
        REQUEST,
        usual="bottom_right",
    ),
    Option("role", str, "Whose keys these are: self or cross (as --cross).", "WORD", REQUEST),
    Option(
        "grid",
        str,
        "The call has a place with such a grid of tokens, which methods such as sparse video attention need.",
        "T,H,W",
        REQUEST,
    ),
)
"""Flags of a request that are no field of it."""


@with_options("explain", (*(option for flag in request_flags() for option in flag.options()), *MORE))
def explain(
    assume_platform: Annotated[
        str | None,
        typer.Option(
            metavar="PLATFORM",
            help="The machine that is asked about: cuda:sm90, cuda:sm90@12.3 (with the toolkit), rocm:gfx942, npu, "
            "xpu, musa, mps, cpu, cpu:amx. Default: this machine.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    assume_installed: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Distributions that count as installed there, comma separated: NAME or NAME==VERSION. Planned "
            "adapters count as built.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    *,
    given: Mapping[str, Any],
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show every reason of every backend, not only those that matter most."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say which backend serves a request, what it needs to be rewritten, who decided, and why not the others.

    Nothing is run and no device is needed: a laptop can ask about any machine.
    """
    switches = {flag.name: _either(flag.name, given) for flag in request_flags() if flag.kind == "either"}
    question = {**given, **switches}
    backend = given["attention_backend"]
    pair = {phase: given[f"{phase}_attention_backend"] for phase in ("prefill", "decode")}
    mode = given["speculative_attention_mode"] or "prefill"
    if mode not in ("prefill", "decode"):
        raise ConfigError(f"--speculative-attention-mode {mode!r} must be prefill or decode")
    words = {name: given[name] for name in ("attention_backend", "attention_backend_config", "rules")}
    if words["attention_backend_config"] is not None or words["rules"] is not None:
        settings = configure_by("the command line", {name: word for name, word in words.items() if word is not None})
        if problems := check_settings(settings, backend_names(get_manager().backends.values())):
            raise ConfigError("; ".join(problems))
    strict = given["strict"] or current_settings().strict
    elsewhere = assume_platform is not None or assume_installed is not None
    request = ask(question) if elsewhere else ask(question, here())
    backend = _of_linear(request, given) or backend
    if not elsewhere:
        selection = _on_this_machine(request, backend, pair, mode, strict)
    else:
        selection = what_if(
            request,
            platform=assumed(here()) if assume_platform is None else checked(assume_platform),
            installed=[name.strip() for name in (assume_installed or "").split(",") if name.strip()],
            backend=backend,
            prefill_backend=pair["prefill"],
            decode_backend=pair["decode"],
            speculative_attention_mode=mode,
            strict=strict,
        )
    if as_json:
        show_json(selection.to_dict())
    else:
        _print(selection, verbose)


def _of_linear(request: AttentionRequest, given: Mapping[str, Any]) -> str | None:
    """Return the backend that the flags of linear attention name for a request; a phase's own wins."""
    named = {name: given[name] for name in given if name.startswith("linear_attn_") and given[name] is not None}
    if named and request.family != "linear":
        flag = f"--{next(iter(named)).replace('_', '-')}"
        raise ConfigError(
            f"{flag} is about linear attention, and the request is of family {request.family}: add --family linear"
        )
    own = "prefill" if request.phase in ("prefill", "extend") else "decode"
    found: str | None = named.get(f"linear_attn_{own}_backend", named.get("linear_attn_backend"))
    return found


def _print(selection: Selection, verbose: bool) -> None:
    console = screen()
    head = Text.assemble((selection.backend, "name"), f" on {selection.platform}")
    if selection.planned:
        head.append("  planned", style="later")
    pairs: list[tuple[str, Any]] = [
        ("asked for", selection.request.summary()),
        (
            "decided by",
            selection.why if selection.why.startswith(selection.source) else f"{selection.source}: {selection.why}",
        ),
        ("provider", selection.provider),
        ("evidence", standing(selection.evidence)),
    ]
    if selection.lowerings:
        pairs.append(("rewritten by", Text("\n".join(selection.steps()), style="warn")))
    if selection.planned:
        pairs.append(("planned", Text("its adapter is not part of this version: judged as if it were", style="later")))
    pairs += [("note", note) for note in selection.notes]
    if selection.others:
        # None of them needs a rewriting: what that moves, as the steps say, they do not.
        pairs.append(("without it" if selection.lowerings else "could serve too", ", ".join(selection.others)))
    pairs += [(f"{name} could, via", Text("\n".join(steps))) for name, steps in selection.rewritable.items()]
    console.print(panel(head, facts(pairs)))
    if selection.rejected:
        console.print()
        console.print(reasons_table(selection.rejected, everything=verbose))
