"""This module says who would serve each phase of `polyattn serve`, and why, without a device and without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rich.text import Text

from ..errors import BackendUnavailableError, ConfigError, UnsupportedRequestError
from ..selection.inspection import explain, what_if
from ..selection.select import Selection
from .causal_lm import check_tower, folder_of, linear_choice, load_config
from .explain import assumed, checked, here
from .reasons import reasons_table
from .rendering import facts, panel, screen, show_json, standing

if TYPE_CHECKING:
    from ..selection.config import Settings
    from ..serving.attention.phases import Asked
    from ..serving.kv_cache.pool import KVCacheConfig
    from ..serving.layer import AttentionLayer

__all__ = ["cache_for", "fitting_pages", "print_plan"]

T = TypeVar("T")
PAGE_SIZES = (16, 64, 128, 32, 1)
"""Tried in this order where nobody names one: several kernels take one size only."""

_USUAL: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
WORDS = {
    "extend": "prefill",
    "decode": "decode",
    "verify": "verify",
    "image": "images",
    "linear_extend": "linear prefill",
    "linear_decode": "linear decode",
    "linear_target_verify": "linear verify",
}


def print_plan(
    model: str,
    given: Mapping[str, Any],
    settings: Settings,
    platform: str | None,
    installed: str | None,
    *,
    as_json: bool,
) -> None:
    """Print who serves each phase.

    Args:
        model: a folder, or a name. given: the shared flags. platform, installed: of another machine, None = this one.

    Raises:
        UnsupportedRequestError, BackendUnavailableError: a phase has no backend; they name the flags.
        ConfigError: a flag names a backend for layers that the model does not have.
    """
    layers, dtype, note = _layers(model)
    size, found = fitting_pages(
        settings,
        lambda size: [
            (layer, phase, selection)
            for layer in layers
            for phase, selection in _phases(layer, dtype, given, settings, size, platform, installed).items()
        ],
        lambda found: [selection for _, _, selection in found],
    )
    linear, more = _linear(model, dtype, given, settings, platform, installed)
    note = note or more
    found = [*((layers[0], phase, selection) for phase, selection in linear.items()), *found]
    tower = _tower(model, dtype, settings, platform, installed)
    check_tower(given, "" if tower else f"the config of {model} has no tower of images, or is not here")
    if tower:
        found.insert(0, (layers[0], "image", tower))
    if as_json:
        show_json(
            {"note": note, "page_size": size, "phases": [{"phase": WORDS[p], **s.to_dict()} for _, p, s in found]}
        )
        return
    console = screen()
    if note:
        console.print(f"note: {note}")
    for _, phase, selection in found:
        head = Text.assemble((WORDS[phase], "name"), " by ", (selection.backend, "name"), f" on {selection.platform}")
        pairs: list[tuple[str, Any]] = [
            ("asked for", selection.request.summary()),
            ("decided by", f"{selection.source}: {selection.why}"),
            ("provider", selection.provider),
            ("evidence", standing(selection.evidence)),
        ]
        if selection.lowerings:
            pairs.append(("rewritten by", Text("\n".join(selection.steps()), style="warn")))
        pairs += [("note", one) for one in selection.notes]
        console.print(panel(head, facts(pairs)))
    if rejected := found[-1][2].rejected:
        console.print(reasons_table(rejected))


def fitting_pages(
    settings: Settings, choose: Callable[[int], T], selections: Callable[[T], list[Selection]]
) -> tuple[int, T]:
    """Return the page size that was asked for, or else the first that the backends of all phases take; and what
    `choose` gives for it. A backend that the platform's rule prefers is not lost for its pages: its size is taken.

    Args:
        choose: given tokens per page; raises where a phase has no backend.
        selections: what was chosen, of what `choose` gave, in one order for every size.

    Raises:
        UnsupportedRequestError, BackendUnavailableError: what `choose` raises for the size that fewest backends refuse.
    """
    refusals: list[UnsupportedRequestError | BackendUnavailableError] = []
    best: tuple[int, T] | None = None
    for size in (settings.page_size,) if settings.page_size else PAGE_SIZES:
        try:
            found = choose(size)
        except (UnsupportedRequestError, BackendUnavailableError) as exc:
            refusals.append(exc)
            continue
        if best is None or _preferred(selections(found), selections(best[1])):
            best = size, found
        if not any(_for_its_pages(one) for one in selections(best[1])):
            break
    if best is None:
        raise min(refusals, key=_for_its_pages)
    return best


def _preferred(new: list[Selection], old: list[Selection]) -> bool:
    """Whether the platform's rule takes others at the new page size, whose pages had kept them out, though those of the
    old size could serve at the new one too."""
    changed = [(one, before) for one, before in zip(new, old, strict=True) if one.backend != before.backend]
    return bool(changed) and all(
        one.source == "platform rule"
        and before.backend not in one.rejected  # not in `others`: a run asks no more backends than it needs
        and any("page_size=" in reason for reason in before.rejected.get(one.backend, ()))
        for one, before in changed
    )


def _for_its_pages(refusal: UnsupportedRequestError | BackendUnavailableError | Selection) -> int:
    """How many reasons of a refusal, or of a choice against others, are the page size."""
    rejected = getattr(refusal, "rejected", {})
    return sum("page_size=" in reason for reasons in rejected.values() for reason in reasons)


def _layers(model: str) -> tuple[list[AttentionLayer], Any, str]:
    """Return one attention layer of each kind that the model has, its dtype, and what was assumed."""
    import torch

    from ..integrations.transformers.chunks import chunks_of
    from ..serving.layer import AttentionLayer

    try:
        config = load_config(folder_of(model)).get_text_config(decoder=True)
    except ConfigError as exc:
        words = ", ".join(f"{name} {value}" for name, value in _USUAL.items())
        return [AttentionLayer(0, **_USUAL)], torch.bfloat16, f"{exc}. Assumed instead, in bfloat16: {words}"
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    heads, chunks = config.num_attention_heads, chunks_of(config)
    if rank := getattr(config, "kv_lora_rank", 0):
        rope, plain = config.qk_rope_head_dim, config.qk_nope_head_dim
        scale = (rope + plain) ** -0.5
        listed = getattr(config, "index_topk", None) or 0  # DeepSeek sparse attention: an indexer lists the tokens
        layer = AttentionLayer(0, heads, 1, rank + rope, rank, scale=scale, latent=True, token_topk=listed)
        return [layer], dtype, ""
    usual: dict[str, Any] = {
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "softcap": getattr(config, "attn_logit_softcapping", None) or 0.0,
        "dual_chunk": chunks,
    }
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = [-1] if not window or (kinds and "sliding_attention" not in kinds) else [window - 1]
    if window and "full_attention" in kinds and windows != [-1]:
        windows = [-1, window - 1]
    return [AttentionLayer(number, window=one, **usual) for number, one in enumerate(windows)], dtype, ""


def _phases(
    layer: AttentionLayer,
    dtype: Any,
    given: Mapping[str, Any],
    settings: Settings,
    page_size: int,
    platform: str | None,
    installed: str | None,
) -> dict[str, Selection]:
    import torch

    from ..serving.attention.phases import Asked, choose_phases

    asked = Asked(topk=_topk(given), batch_invariant=given["batch_invariant"])
    cache = _cache(settings, given, page_size)
    if platform is None and installed is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        chosen = choose_phases(_requests(layer, cache, dtype, device, asked), asked)
        return {phase: one.selection for phase, one in chosen.items()}

    return {
        phase: what_if(
            request,
            **_machine(platform, installed),
            backend=settings.attention_backend,
            prefill_backend=settings.prefill_attention_backend,
            decode_backend=settings.decode_attention_backend,
            speculative_attention_mode=settings.speculative_attention_mode or "prefill",
            strict=settings.strict,
        )
        for phase, request in _requests(layer, cache, dtype, torch.device("cpu"), asked).items()
    }


def _machine(platform: str | None, installed: str | None) -> dict[str, Any]:
    return {
        "platform": assumed(here()) if platform is None else checked(platform),
        "installed": [name.strip() for name in (installed or "").split(",") if name.strip()],
    }


def _tower(model: str, dtype: Any, settings: Settings, platform: str | None, installed: str | None) -> Selection | None:
    """Return who computes images, None where no config here has a tower for them."""
    import torch

    from ..serving.attention.multimodal import vision_attention

    try:
        vision: Any = getattr(load_config(folder_of(model)), "vision_config", None)
    except ConfigError:
        return None
    if not hasattr(vision, "spatial_merge_size"):
        return None
    other = not (platform is None and installed is None)
    device = torch.device("cuda" if torch.cuda.is_available() and not other else "cpu")
    patches = torch.zeros(4, vision.num_heads, vision.hidden_size // vision.num_heads, dtype=dtype, device=device)
    ends = torch.tensor([0, 4], dtype=torch.int32, device=device)
    # Of another machine only the request is taken from here, where the reference serves everything.
    found = explain(vision_attention, patches, patches, patches, ends, 4, backend="reference" if other else None)
    if not other:
        return found
    backend = settings.mm_attention_backend or settings.attention_backend
    return what_if(found.request, **_machine(platform, installed), backend=backend, strict=settings.strict)


def _linear(
    model: str,
    dtype: Any,
    given: Mapping[str, Any],
    settings: Settings,
    platform: str | None,
    installed: str | None,
) -> tuple[dict[str, Selection], str]:
    """Return who computes linear attention in each phase, and why that cannot be told of a model that has it."""
    import torch

    from ..dispatch.linear import linear_attention
    from ..serving.step.batch import ForwardMode

    try:
        config: Any = load_config(folder_of(model)).get_text_config(decoder=True)
    except ConfigError:
        config = None
    has = "linear_attention" in (getattr(config, "layer_types", None) or ())
    choice = linear_choice(given, f"the config of {model}" if config else "what is assumed", has=has)
    if not has:
        return {}, ""
    if not (heads := getattr(config, "linear_num_value_heads", 0)):
        return {}, f"the config of {model} has no sizes of its linear attention that are known here: it is left out"
    D, D_v = config.linear_key_head_dim, config.linear_value_head_dim
    other = not (platform is None and installed is None)
    device = torch.device("cuda" if torch.cuda.is_available() and not other else "cpu")
    modes = (ForwardMode.EXTEND, ForwardMode.DECODE, *((ForwardMode.TARGET_VERIFY,) if _topk(given) else ()))
    found = {}
    for mode in modes:
        tokens, verifies = 1 if mode is ForwardMode.DECODE else 4, mode is ForwardMode.TARGET_VERIFY
        rows, values = (torch.zeros(1, tokens, heads, d, dtype=dtype, device=device) for d in (D, D_v))
        beta = values[..., 0]
        name = choice.of(mode)
        asked = explain(
            linear_attention, rows, rows, values, gate=beta.float(), beta=beta, qk_norm=True,
            state=torch.zeros(2, heads, D, D_v, device=device),
            state_slots=torch.zeros(1, dtype=torch.int64, device=device),
            # A step of decode has one token for each request, which the engine hands over as rows.
            cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32, device=device) if mode is modes[0] else None,
            every_state=verifies,
            # Of another machine only the request is taken from here, where the reference serves everything.
            backend="reference" if other else name,
        )  # fmt: skip
        if other:
            # The names of attention's phases are none of its own: a name that is given there would not reach it.
            asked = what_if(asked.request, **_machine(platform, installed), backend=name, strict=settings.strict)
        found[f"linear_{mode.name.lower()}"] = asked
    return found, ""


def _topk(given: Mapping[str, Any]) -> int:
    return (given["speculative_eagle_topk"] or 1) if given["speculative_draft_model_path"] is not None else 0


def _cache(settings: Settings, given: Mapping[str, Any], page_size: int) -> KVCacheConfig:
    from ..serving.kv_cache.pool import KVCacheConfig

    return KVCacheConfig(settings.kv_cache_dtype or "auto", page_size, scales=given["kv_cache_scales"] or "")


def _requests(layer: AttentionLayer, cache: KVCacheConfig, dtype: Any, device: Any, asked: Asked) -> dict[Any, Any]:
    """Return what a layer asks for in each phase."""
    from ..serving.attention.choosing import layer_requests
    from ..serving.kv_cache.pool import KVPool

    # Of one page: what a layer's cache says of itself does not depend on its size.
    small = KVPool([layer], cache, 1, requests=1, dtype=dtype, device=device)
    return {**layer_requests(layer, small.cache(layer.layer_id).request_fields(), small, asked, ())}


def cache_for(runner: Any, settings: Settings, given: Mapping[str, Any]) -> KVCacheConfig:
    """Return how a model's caches are kept: as the flags say, in pages that its backends take.

    Raises:
        UnsupportedRequestError, BackendUnavailableError: a phase has no backend; they name the flags.
    """
    from ..serving.attention.phases import Asked, choose_phases
    from ..serving.kv_cache.pool import attention_layers

    asked = Asked(topk=_topk(given), batch_invariant=given["batch_invariant"])

    def choose(size: int) -> list[Selection]:
        found: list[Selection] = []
        for layer in attention_layers(runner.layers):
            requests = _requests(layer, _cache(settings, given, size), runner.dtype, runner.device, asked)
            found += [one.selection for one in choose_phases(requests, asked).values()]
        return found

    return _cache(settings, given, fitting_pages(settings, choose, list)[0])
