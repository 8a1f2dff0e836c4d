"""`polyattn explain`: which backend serves a request, here or on a machine that is only described, and why."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.text import Text

from ..contract import AttentionRequest
from ..errors import ConfigError
from ..registry.manager import get_manager
from ..registry.platforms import parse_platform
from ..selection.inspection import catalogue, detect, served_by, what_if
from ..selection.overrides import SCOPE, current_settings
from ..selection.phase_pairs import both_phases, check_drafting, select_pair
from ..selection.select import Choice, Policy, Selection, select
from ..selection.tuned_policy import current_policy
from .asking import SERVING, Question, ask
from .reasons import reasons_table
from .rendering import facts, panel, screen, show_json, standing

__all__ = ["explain", "here"]

REQUEST, SERVE, WHO = "What is asked for", "Serving", "Which machine, which backend"


def here() -> dict[str, Any]:
    """Request fields of this machine: its accelerator if there is one, else its CPU."""
    reports = {name: detect(name) for name in get_manager().platforms}
    found = [name for name, report in reports.items() if report.present]
    name = next((n for n in found if n != "cpu"), "cpu")
    report = reports[name]
    arch = report.archs[0] if report.archs else ""
    return {"platform": name, "arch": arch, "toolkit": report.toolkit, "features": report.features}


def _assumed(fields: dict[str, Any]) -> str:
    """This machine in the words of --assume-platform."""
    if fields["platform"] == "cpu":
        return ":".join(("cpu", *(["+".join(fields["features"])] if fields["features"] else [])))
    toolkit = ".".join(map(str, fields["toolkit"]))
    arch = f":{fields['arch']}" if fields["arch"] else ""
    return f"{fields['platform']}{arch}{'@' + toolkit if toolkit and arch else ''}"


def _either(name: str, yes: bool, no: bool) -> bool | None:
    """What the two flags of a switch say; None = nothing."""
    if yes and no:
        raise ConfigError(f"--{name} and --no-{name} exclude each other: leave one out")
    return yes if yes or no else None


def _checked(words: str) -> str:
    """The words of --assume-platform, once they are known to mean a machine."""
    try:
        parse_platform(words, get_manager().platforms)
    except ConfigError as exc:
        raise ConfigError(f"--assume-platform {exc}") from exc
    return words


def _on_this_machine(
    request: AttentionRequest, backend: str | None, pair: dict[str, str | None], mode: str, strict: bool
) -> Selection:
    """As a call here would choose, with the backends of the two phases where they are given."""
    policy = dataclasses.replace(current_policy(backend, SCOPE.get(), request), strict=strict)
    if any(pair.values()):
        policy = _hybrid(request, policy, pair, mode)
    else:
        check_drafting(request, catalogue(), policy)
    return select(request, catalogue(), policy, full=True)


def _hybrid(request: AttentionRequest, policy: Policy, pair: dict[str, str | None], mode: str) -> Policy:
    """The policy of the request's own phase, once the two phases are known to work together."""
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


def explain(
    assume_platform: Annotated[
        str | None,
        typer.Option(
            metavar="PLATFORM",
            help="A machine to ask about: cuda:sm90, cuda:sm90@12.3 (toolkit), rocm:gfx942, npu, xpu, musa, mps, cpu, "
            "cpu:amx. Without it: this machine.",
            rich_help_panel=WHO,
        ),
    ] = None,
    assume_installed: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Distributions to take as installed there (name or name==version). Planned adapters count as built.",
            rich_help_panel=WHO,
        ),
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="The backend that is asked for.", rich_help_panel=WHO)
    ] = None,
    prefill_attention_backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="The backend of prefill and extend.", rich_help_panel=WHO)
    ] = None,
    decode_attention_backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="The backend of decode.", rich_help_panel=WHO)
    ] = None,
    speculative_attention_mode: Annotated[
        str, typer.Option(metavar="PHASE", help="Whose backend verifies: prefill or decode.", rich_help_panel=WHO)
    ] = "prefill",
    strict: Annotated[
        bool, typer.Option("--strict", help="A documented fallback is an error.", rich_help_panel=WHO)
    ] = False,
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            metavar="FAMILY",
            help="dense, varlen, paged, mla, block_sparse or linear. Default: paged when --phase, --page-size, "
            "--kv-dtype or --spec-topk is given, else dense.",
            rich_help_panel=REQUEST,
        ),
    ] = None,
    mla: Annotated[
        bool, typer.Option("--mla", help="Short for --family mla (128 heads, rows of 576).", rich_help_panel=REQUEST)
    ] = False,
    phase: Annotated[
        str | None,
        typer.Option(
            "--phase",
            metavar="PHASE",
            help="prefill, extend, decode or verify. Default: prefill.",
            rich_help_panel=REQUEST,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", metavar="DTYPE", help="Of the query: bf16, fp16, fp32, ...", rich_help_panel=REQUEST),
    ] = "bf16",
    head_dim: Annotated[
        int | None, typer.Option(metavar="D", help="Default: 128; 576 for mla.", rich_help_panel=REQUEST)
    ] = None,
    v_head_dim: Annotated[
        int | None,
        typer.Option(metavar="D_V", help="Default: as --head-dim; 512 for mla.", rich_help_panel=REQUEST),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(metavar="H_Q", help="Default: 32; 128 for mla.", rich_help_panel=REQUEST)
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(metavar="H_KV", help="Default: as --heads; 1 for mla.", rich_help_panel=REQUEST)
    ] = None,
    # Two flags each, since of one with two names the last that is typed would win in silence.
    causal: Annotated[
        bool, typer.Option("--causal", help="Default for paged and mla.", rich_help_panel=REQUEST)
    ] = False,
    no_causal: Annotated[
        bool, typer.Option("--no-causal", help="Default for the other families.", rich_help_panel=REQUEST)
    ] = False,
    causal_alignment: Annotated[
        str,
        typer.Option(metavar="WORD", help="bottom_right, or top_left (means --causal).", rich_help_panel=REQUEST),
    ] = "bottom_right",
    layout: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="Of dense calls: BSHD or BHSD. Default: BSHD.", rich_help_panel=REQUEST),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="LEFT,RIGHT",
            help="Keys to each side, -1 = no bound; a sliding window of 128 tokens is 127,0.",
            rich_help_panel=REQUEST,
        ),
    ] = None,
    softcap: Annotated[
        float, typer.Option(metavar="CAP", help="Logit softcap, 0 = off.", rich_help_panel=REQUEST)
    ] = 0.0,
    sinks: Annotated[bool, typer.Option("--sinks", help="Sink logits per head.", rich_help_panel=REQUEST)] = False,
    mask: Annotated[
        str, typer.Option(metavar="KIND", help="none, bool or additive.", rich_help_panel=REQUEST)
    ] = "none",
    scale: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Of the logits. Default: D ** -0.5; 192 ** -0.5 for mla.", rich_help_panel=REQUEST
        ),
    ] = None,
    lse: Annotated[bool, typer.Option("--lse", help="The LSE is wanted too.", rich_help_panel=REQUEST)] = False,
    grad: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Gradients wanted: query, key, value, mask, sinks, lse.", rich_help_panel=REQUEST
        ),
    ] = None,
    cross: Annotated[bool, typer.Option("--cross", help="Cross-attention.", rich_help_panel=REQUEST)] = False,
    role: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="Whose keys these are: self or cross (as --cross).", rich_help_panel=REQUEST),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            metavar="T,H,W",
            help="The call has a place, with such a grid of tokens: what methods such as sparse video attention need.",
            rich_help_panel=REQUEST,
        ),
    ] = None,
    dropout: Annotated[float, typer.Option(metavar="P", help="Dropout on the weights.", rich_help_panel=REQUEST)] = 0.0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits on every run.", rich_help_panel=REQUEST)
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of linear (gdn, kda; default gdn), mla (dsa) or paged (dual_chunk).",
            rich_help_panel=REQUEST,
        ),
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Of a KV page. Default: 64 for paged and mla.", rich_help_panel=SERVE),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Of the KV cache: auto, bf16, fp8_e4m3, fp8_e5m2, fp4_e2m1, ...",
            rich_help_panel=SERVE,
        ),
    ] = None,
    kv_scales: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Granularity of the cache's scales: tensor, head, token, block128, block16.",
            rich_help_panel=SERVE,
        ),
    ] = None,
    spec_topk: Annotated[
        int | None,
        typer.Option(
            metavar="K", help="Speculation: 1 = chain, more = tree (means --phase verify).", rich_help_panel=SERVE
        ),
    ] = None,
    save_kv_cache: Annotated[
        bool,
        typer.Option("--save-kv-cache", help="New K/V are given, and the backend writes them.", rich_help_panel=SERVE),
    ] = False,
    no_save_kv_cache: Annotated[
        bool,
        typer.Option("--no-save-kv-cache", help="New K/V are given, attended and not written.", rich_help_panel=SERVE),
    ] = False,
    chunked_prefix: Annotated[
        bool, typer.Option("--chunked-prefix", help="MLA: a prefix attended in chunks.", rich_help_panel=SERVE)
    ] = False,
    multimodal: Annotated[
        bool, typer.Option("--multimodal", help="The model has multimodal towers.", rich_help_panel=SERVE)
    ] = False,
    graph_capture: Annotated[
        str,
        typer.Option(
            metavar="WORD",
            help="Recorded into a device graph: call = by itself, session = as a layer of a planned step.",
            rich_help_panel=SERVE,
        ),
    ] = "none",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every reason of every backend.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, with every reason.")] = False,
) -> None:
    """Say which backend serves a request, what it needs to be rewritten, who decided, and why not the others.

    Nothing is run and no device is needed: a laptop can ask about any machine.
    """
    question = Question(
        family=family,
        phase=phase,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        heads=heads,
        kv_heads=kv_heads,
        page_size=page_size,
        causal=_either("causal", causal, no_causal),
        causal_alignment=causal_alignment,
        layout=layout,
        window=window,
        softcap=softcap,
        sinks=sinks,
        spec_topk=spec_topk,
        mla=mla,
        scale=scale,
        mask=mask,
        lse=lse,
        grad=grad,
        cross=cross,
        role=role,
        grid=grid,
        dropout=dropout,
        deterministic=deterministic,
        graph_capture=graph_capture,
        multimodal=multimodal,
        chunked_prefix=chunked_prefix,
        save_kv_cache=_either("save-kv-cache", save_kv_cache, no_save_kv_cache),
        kv_scales=kv_scales,
        method=method,
    )
    if speculative_attention_mode not in ("prefill", "decode"):
        raise ConfigError(f"--speculative-attention-mode {speculative_attention_mode!r} must be prefill or decode")
    strict = strict or current_settings().strict
    if assume_platform is None and assume_installed is None:
        pair = {"prefill": prefill_attention_backend, "decode": decode_attention_backend}
        request = ask(question, here())
        selection = _on_this_machine(request, attention_backend, pair, speculative_attention_mode, strict)
    else:
        selection = what_if(
            ask(question),
            platform=_assumed(here()) if assume_platform is None else _checked(assume_platform),
            installed=[name.strip() for name in (assume_installed or "").split(",") if name.strip()],
            backend=attention_backend,
            prefill_backend=prefill_attention_backend,
            decode_backend=decode_attention_backend,
            speculative_attention_mode=speculative_attention_mode,
            strict=strict,
        )
    if as_json:
        show_json(selection.to_dict())
    else:
        _print(selection, verbose)


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
        pairs.append(("could serve too", ", ".join(selection.others)))
    pairs += [(f"{name} could, via", Text("\n".join(steps))) for name, steps in selection.rewritable.items()]
    console.print(panel(head, facts(pairs)))
    if selection.rejected:
        console.print()
        console.print(reasons_table(selection.rejected, everything=verbose))
