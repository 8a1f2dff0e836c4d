"""A tiny model that reads images, of Qwen2.5-VL's shape, and what transformers' own `generate` says of some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
WORDS = ["<unk>", "<end>", *SPECIAL, *(f"w{number}" for number in range(58))]
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }} {% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|> {% else %}{{ p['text'] }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def saved(folder: Path) -> Path:
    """Save a model of random weights, whose patches have 4 pixels a side, with a tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", additional_special_tokens=SPECIAL
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=4096
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
            "initializer_range": 0.4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
            "out_hidden_size": 32, "initializer_range": 0.4,
        },
        image_token_id=2, video_token_id=3, vision_start_token_id=4, vision_end_token_id=5,
    )  # fmt: skip
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    return transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()


def picture(number: int, height: int = 24, width: int = 36) -> Image.Image:
    """An image of noise."""
    pixels = numpy.random.default_rng(number).integers(0, 256, (height, width, 3), dtype="uint8")
    return Image.fromarray(pixels)


class Processor(transformers.Qwen2_5_VLProcessor):
    """The model's own processor without its part for videos, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def conversation(*parts: str | Image.Image) -> list[dict[str, Any]]:
    """A turn of a user with texts and images."""
    shown = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": shown}]


def expected(folder: Path, turns: Sequence[dict[str, Any]], count: int) -> list[int]:
    """The tokens that transformers' own processor and `generate` continue a conversation by."""
    processor = Processor(
        transformers.AutoImageProcessor.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder),
        chat_template=TEMPLATE,
    )  # fmt: skip
    inputs = processor.apply_chat_template(
        list(turns), tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
    )
    out = loaded(folder).generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]
