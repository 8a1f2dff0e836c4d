"""This module gives the engine a model's images: `Tower` computes what stands at their tokens, `ImageReader` makes a
prompt of messages with images.

It is for models that place an image's tokens by time, row and column, such as Qwen2.5-VL's. It asks the model and has
no list of names.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ...serving.attention.multimodal import multimodal
from ...serving.engine.media import Media
from .attention import make_forward
from .keywords import HARMLESS
from .probing import attending, configs_of
from .registry import interfaces

__all__ = ["ImageReader", "Tower", "no_images_because"]

TOWER = "polyattn_flash_tower"
"""Where a name has `flash` in it, towers pack their images and say where each begins."""

_SIZES = ("spatial_merge_size", "temporal_patch_size", "patch_size")
"""What a configuration says of patches."""


def no_images_because(model: Any) -> str:
    """Say why the engine does not serve images of a model, "" = it does."""
    inner: Any = getattr(model, "model", None)
    if not hasattr(inner, "get_image_features"):
        return f"{type(model).__name__} reads text only"
    if not hasattr(inner, "get_rope_index"):
        return f"{type(model).__name__} does not place the tokens of an image by time, row and column"
    config = model.config
    vision = getattr(config, "vision_config", None)
    wanted = {"image_token_id": config, **dict.fromkeys(_SIZES, vision), "language_model": inner}
    if missing := [name for name, owner in wanted.items() if not hasattr(owner, name)]:
        return f"{type(model).__name__} has no {missing[0]} where models such as Qwen2.5-VL have it"
    if "deepstack_visual_embeds" in inspect.signature(inner.language_model.forward).parameters:
        return f"the tower of {type(model).__name__} speaks to several layers of the language model"
    return ""


class Tower:
    """Computes the embeddings of images by a model's own tower, whose attention is polyattn's.

    Args:
        model: one that `no_images_because` says nothing of.

    Raises:
        UnsupportedRequestError, BackendUnavailableError: no backend serves the tower's attention, or not the one of
            `mm_attention_backend`.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._configs = model, configs_of(model)
        interfaces()[0].register(TOWER, make_forward(None, HARMLESS))
        vision = model.config.vision_config
        side, channels = vision.spatial_merge_size, getattr(vision, "in_channels", 3)
        pixels = channels * vision.temporal_patch_size * vision.patch_size**2
        self._run(torch.zeros(side * side, pixels), torch.tensor([[1, side, side]]))  # what is refused is refused now

    def encode(self, media: Media) -> Tensor:
        """Return the embeddings of a prompt's images, [R, hidden].

        Raises:
            InvalidInputError: they are not as many as the prompt has places. Others: as the tower's attention.
        """
        found = self._run(media.inputs["pixel_values"], media.inputs["image_grid_thw"])
        if len(found) != len(media.at):
            raise InvalidInputError(f"the tower gave {len(found)} embeddings for {len(media.at)} places of the prompt")
        return found

    @torch.no_grad()
    def _run(self, pixels: Tensor, grid: Tensor) -> Tensor:
        model = self._model
        with attending(self._configs, TOWER), multimodal():
            out = model.model.get_image_features(pixels.to(model.device), grid.to(model.device))
        found = getattr(out, "pooler_output", out)
        return found if isinstance(found, Tensor) else torch.cat(list(found))


class ImageReader:
    """Reads messages with images; for everything else it is the tokenizer.

    Args:
        model: one that `no_images_because` says nothing of. tokenizer: a fast one, with the model's chat template.
        processor: the model's image processor.
    """

    def __init__(self, model: Any, tokenizer: Any, processor: Any) -> None:
        self._model, self.tokenizer, self._processor = model.model, tokenizer, processor
        self._image, self._merge = model.config.image_token_id, model.config.vision_config.spatial_merge_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Tokenize."""
        return self.tokenizer(*given, **options)

    def apply_chat_template(self, conversation: Sequence[Any], **options: Any) -> Any:
        """Return the tokens of a conversation, and with images its `media`.

        Args:
            conversation: messages; images are parts {"type": "image", "image": of PIL}. options: as the tokenizer
                takes them.

        Raises:
            InvalidInputError: the template does not put one place for each image, or the processor refuses one.
        """
        parts = [
            part for message in conversation if isinstance(message["content"], list) for part in message["content"]
        ]
        images = [part["image"] for part in parts if part["type"] == "image"]
        if not images:
            return self.tokenizer.apply_chat_template(conversation, **options)
        text = self.tokenizer.apply_chat_template(conversation, **{**options, "tokenize": False, "return_dict": False})
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if (places := ids.count(self._image)) != len(images):
            raise InvalidInputError(
                f"the chat template puts {places} places for {len(images)} images; is it this model's, and has no text "
                f"{self.tokenizer.convert_ids_to_tokens(self._image)!r} in it?"
            )
        tokens, media = self._placed(ids, images)
        return {"input_ids": tokens, "media": media}

    def _placed(self, ids: Sequence[int], images: Sequence[Any]) -> tuple[list[int], Media]:
        try:
            inputs = dict(self._processor(images=[image.convert("RGB") for image in images], return_tensors="pt"))
        except ValueError as exc:  # such as an image that is a line
            raise InvalidInputError(f"{type(self._processor).__name__} refuses an image: {exc}") from exc
        grid, pixels = inputs["image_grid_thw"], inputs["pixel_values"]
        patches = grid.prod(-1).tolist()
        numbers = iter(
            [(_number(own, size), count // self._merge**2)
             for own, size, count in zip(pixels.split(patches), grid.tolist(), patches, strict=True)]
        )  # fmt: skip
        tokens: list[int] = []
        keys: list[int] = []
        for token in ids:
            number, count = next(numbers) if token == self._image else (token, 1)
            tokens += [token] * count
            keys += [number] * count
        at = [place for place, token in enumerate(tokens) if token == self._image]
        row = torch.tensor([tokens])
        known = {"input_ids": row, "mm_token_type_ids": (row == self._image).int(), "image_grid_thw": grid}
        takes = inspect.signature(self._model.get_rope_index).parameters
        positions, _ = self._model.get_rope_index(**{name: given for name, given in known.items() if name in takes})
        return tokens, Media({"pixel_values": pixels, "image_grid_thw": grid}, at, keys, positions[:, 0])


def _number(pixels: Tensor, grid: Sequence[int]) -> int:
    """Return a number for an image, which is no token's."""
    digest = hashlib.sha256(pixels.contiguous().numpy().tobytes() + repr(grid).encode()).digest()
    return -1 - int.from_bytes(digest[:16], "big")
