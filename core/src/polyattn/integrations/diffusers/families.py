"""This module knows where models of diffusers put their video: its grid of tokens, and on which side their text is.

A model hands its attention tokens, not a grid. What the grid is can be read from what the model itself was called with.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["FAMILIES", "Family", "family_of"]

Grid = tuple[int, int, int]
Given = Mapping[str, Any]
"""Arguments of a model's `forward` by name."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A family is a group of models that order their tokens alike.

    Attributes:
        blocks: attributes of the model that hold the blocks which attend over the video, in the order in which they
            run. Attention elsewhere, in a refiner of text for example, has no place.
        grid: takes the model and what it was called with, gives (T, H, W); None where the tokens are on no grid.
        text: where text tokens are that are attended together with the video: "front", "back", or "" where text is
            another sequence.
        beside: names of layers in the blocks that attend over something else, sound for example.
    """

    blocks: tuple[str, ...]
    grid: Callable[[Any, Given], Grid | None]
    text: str = ""
    beside: tuple[str, ...] = ()


def _patched(frames: int, height: int, width: int, patch: tuple[int, int, int]) -> Grid:
    return frames // patch[0], height // patch[1], width // patch[2]


def _video(model: Any, given: Given) -> Grid:
    """Latents [B, C, T, H, W], cut by `patch_size`: one number for each axis, or one for both of a frame."""
    *_, frames, height, width = given["hidden_states"].shape
    config, patch = model.config, model.config.patch_size
    if isinstance(patch, int):
        patch = getattr(config, "patch_size_t", None) or 1, patch, patch
    return _patched(frames, height, width, patch)


def _frames_first(model: Any, given: Given) -> Grid:
    """Latents [B, T, C, H, W]."""
    _, frames, _, height, width = given["hidden_states"].shape
    patch = model.config.patch_size
    return _patched(frames, height, width, (model.config.patch_size_t or 1, patch, patch))


def _image(model: Any, given: Given) -> Grid:
    """Latents [B, C, H, W]."""
    *_, height, width = given["hidden_states"].shape
    patch = model.config.patch_size
    return _patched(1, height, width, (1, patch, patch))


def _named_sizes(model: Any, given: Given) -> Grid | None:
    """Tokens [B, S, C], and the sizes of their grid beside them."""
    sizes = given.get("num_frames"), given.get("height"), given.get("width")
    return None if None in sizes else sizes  # type: ignore[return-value]


def _position_ids(model: Any, given: Given) -> Grid | None:
    """Tokens [B, S, C], and the position of each [S, 3]: of an image, in its rows, in its columns. They are read from
    their device, once for each tensor of them."""
    ids = given["img_ids"]
    known = getattr(model, "_polyattn_grid", None)
    if known is None or known[0] is not ids or known[1] != ids._version:
        _, rows, columns = (int(last) + 1 for last in ids.reshape(-1, 3).amax(0).tolist())
        known = model._polyattn_grid = ids, ids._version, (1, rows, columns)
    grid: Grid = known[2]
    # Images to be edited follow the one that is made, and are on no grid with it.
    return grid if grid[1] * grid[2] == ids.shape[-2] else None


def _image_shapes(model: Any, given: Given) -> Grid | None:
    """Tokens [B, S, C], and for each sequence the shapes of its images."""
    shapes = given.get("img_shapes") or [None]
    first = shapes[0]
    images = first if isinstance(first, list) else [first]
    return None if len(images) != 1 or images[0] is None else tuple(images[0])


_BLOCKS = ("transformer_blocks",)
_SOUND = "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"
_DOUBLE_AND_SINGLE = ("transformer_blocks", "single_transformer_blocks")

FAMILIES: dict[str, Family] = {
    "WanTransformer3DModel": Family(("blocks",), _video),
    "WanVACETransformer3DModel": Family(("blocks",), _video),
    "SkyReelsV2Transformer3DModel": Family(("blocks",), _video),
    "HunyuanVideoTransformer3DModel": Family(_DOUBLE_AND_SINGLE, _video, "back"),
    "MochiTransformer3DModel": Family(_BLOCKS, _video, "back"),
    "CogVideoXTransformer3DModel": Family(_BLOCKS, _frames_first, "front"),
    "LTXVideoTransformer3DModel": Family(_BLOCKS, _named_sizes),
    "LTX2VideoTransformer3DModel": Family(_BLOCKS, _named_sizes, beside=_SOUND),
    "FluxTransformer2DModel": Family(_DOUBLE_AND_SINGLE, _position_ids, "front"),
    "SD3Transformer2DModel": Family(_BLOCKS, _image, "back"),
    "QwenImageTransformer2DModel": Family(_BLOCKS, _image_shapes, "front"),
    "PixArtTransformer2DModel": Family(_BLOCKS, _image),
}
"""By the class of the model; a class that is made from one of these is of its family."""


def family_of(model: Any) -> Family | None:
    """Return the family of a model, None where nothing is known of it."""
    return next((FAMILIES[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in FAMILIES), None)


def given_to(model: Any, args: tuple[Any, ...], kwargs: Given) -> Given:
    """Name the arguments of a model's `forward`."""
    if not args:
        return kwargs
    names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
    return {**dict(zip(names, args, strict=False)), **kwargs}
