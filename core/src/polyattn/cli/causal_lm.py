"""This module loads what commands run models with: a causal LM of transformers, its tokenizer and its draft model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .devices import to_device

if TYPE_CHECKING:
    from ..serving.engine import Speculative
    from ..serving.recurrent import LinearChoice

__all__ = [
    "check_tower",
    "folder_of",
    "linear_choice",
    "load_config",
    "load_images",
    "load_model",
    "load_tokenizer",
    "runner_of",
    "speculative_of",
    "stop_tokens_of",
]


def folder_of(name: str) -> Path:
    """Return the folder of a model.

    Args:
        name: a folder, or the name of a model in Hugging Face's cache; nothing is downloaded.

    Raises:
        ConfigError: it is neither.
    """
    if (path := Path(name)).is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except (ImportError, ValueError, OSError) as exc:  # its errors of a name, and of what is not there
        raise ConfigError(
            f"{name} is neither a folder nor a model in Hugging Face's cache here: give a folder that save_pretrained "
            f"wrote, or download it first (hf download {name})"
        ) from exc


def _load(kind: str, path: Path, **options: Any) -> Any:
    """Load a part of a checkpoint from a folder; nothing is downloaded."""
    from ..integrations.transformers.registry import interfaces

    interfaces()  # says what to install where transformers is not here
    import transformers

    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give one that save_pretrained wrote, with config.json in it")
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        return getattr(transformers, kind).from_pretrained(path, local_files_only=True, **options)
    except Exception as exc:  # every format of weights has errors of its own
        reason = str(exc).strip() or type(exc).__name__
        raise ConfigError(f"{path} cannot be loaded as {kind}: {reason}; save it again with save_pretrained") from exc


def load_config(path: Path, **options: Any) -> Any:
    """Load what a folder says of its model."""
    return _load("AutoConfig", path, **options)


def load_tokenizer(path: Path, **options: Any) -> Any:
    """Load the tokenizer of a folder."""
    return _load("AutoTokenizer", path, **options)


def load_model(path: Path, device: str, **options: Any) -> Any:
    """Load the causal LM of a folder.

    Args:
        device: a torch device, or auto. options: of `from_pretrained`.

    Raises:
        ConfigError: there is none, it lacks weights, or the device is not here.
    """
    kind = "AutoModelForCausalLM" if _writes_alone(path, **options) else "AutoModelForImageTextToText"
    model, loaded = _load(kind, path, dtype="auto", output_loading_info=True, **options)
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigError(
            f"{path} lacks {len(missing)} of the model's weights, {missing[0]} among them, which would be random "
            f"numbers; save it again with save_pretrained"
        )
    model.eval()
    return to_device(model, device)


def _writes_alone(path: Path, **options: Any) -> bool:
    """Tell whether a folder's model is a causal LM, and not one that transformers knows with its tower for images
    only."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if not path.is_dir():
        return True  # `_load` says so
    kind = type(load_config(path, **options))
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def load_images(path: Path, model: Any, tokenizer: Any) -> tuple[Any, str]:
    """Return what reads a model's prompts with images; None and the reason where nothing does.

    Args:
        path: of its folder. model, tokenizer: from there.
    """
    from ..integrations.transformers.images import ImageReader, no_images_because

    if reason := no_images_because(model):
        return None, reason
    if not (path / "preprocessor_config.json").is_file():
        return None, f"{path} has no preprocessor_config.json, which says how images become patches"
    return ImageReader(model, tokenizer, _load("AutoImageProcessor", path)), ""


def check_tower(given: Mapping[str, Any], why_not: str) -> None:
    """Refuse a backend for a tower that nothing reaches.

    Args:
        given: the shared flags. why_not: why no image is read, "" = they are.

    Raises:
        ConfigError: there is no tower, and a flag names its backend.
    """
    if why_not and given["mm_attention_backend"] is not None:
        raise ConfigError(f"--mm-attention-backend {given['mm_attention_backend']}: {why_not}; leave it out")


def runner_of(model: Any, needed: int) -> Any:
    """Make a runner for the positions that are needed. A model whose keys change at some length is served below it."""
    from ..integrations.transformers.serving import CausalLMRunner

    known = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", 0) or 0
    return CausalLMRunner(model, max_positions=needed if 0 < needed < known else None)


def linear_choice(given: Mapping[str, Any], model: str, *, has: bool) -> LinearChoice:
    """Return who serves linear attention, as the flags say.

    Args:
        given: the shared flags. model: what it is called. has: whether it has layers of linear attention.

    Raises:
        ConfigError: a flag is given, and the model has no such layer.
    """
    from ..serving.recurrent import LinearChoice

    names = {
        f"linear_attn_{phase}backend": given[f"linear_attn_{phase}backend"] for phase in ("", "prefill_", "decode_")
    }
    found = [name for name, backend in names.items() if backend is not None]
    if found and not has:
        raise ConfigError(
            f"--{found[0].replace('_', '-')} {names[found[0]]}: {model} has no layer of linear attention; leave it out"
        )
    return LinearChoice(*names.values())


def speculative_of(model: Any, needed: int, steps: int | None, topk: int | None, nodes: int | None) -> Speculative:
    """Make the speculation of a draft model for positions that are needed; None = what is usual."""
    from ..serving.engine import Speculative

    return Speculative(runner_of(model, needed), 3 if steps is None else steps, 1 if topk is None else topk, nodes or 0)


def stop_tokens_of(model: Any) -> tuple[int, ...]:
    """Return the tokens that end a text of a model."""
    ends = model.generation_config.eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
