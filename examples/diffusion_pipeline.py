"""A pipeline of diffusers on polyattn, small and random: a Wan that needs no download and runs on a CPU.

    python examples/diffusion_pipeline.py                # run it, dense and sparse, and say who served what
    python examples/diffusion_pipeline.py --save DIR     # write it to a folder, for polyattn generate --model-path DIR

Its frames are noise. A pipeline of yours takes the same three lines: `WanPipeline.from_pretrained(path)`, `prepare`,
`report`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from polyattn.integrations.diffusers import prepare, report

WIDTH = 32
PROMPT: dict[str, Any] = {"prompt": "a cat that runs", "height": 96, "width": 96, "num_frames": 9}


def tokenizer() -> T5TokenizerFast:
    """A tokenizer of letters."""
    letters = "\u2581abcdefghijklmnopqrstuvwxyz"  # the first stands for a blank
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -3.0) for letter in letters)]
    words = Tokenizer(models.Unigram(vocab, unk_id=2))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    return T5TokenizerFast(tokenizer_object=words, model_max_length=512)


def tiny_wan() -> WanPipeline:
    """The parts of a Wan, a few thousand weights in all."""
    torch.manual_seed(0)
    text = UMT5Config(vocab_size=64, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=16, out_channels=16,
        text_dim=WIDTH, freq_dim=32, ffn_dim=32, num_layers=3, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    pipe = WanPipeline(
        tokenizer=tokenizer(), text_encoder=UMT5EncoderModel(text), vae=vae, transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the pipeline there and end")
    args = parser.parse_args()
    pipe = tiny_wan()
    if args.save is not None:
        pipe.save_pretrained(args.save)
        print(f"saved in {args.save}")
        return
    with torch.no_grad():
        prepare(pipe)
        print(report(pipe, **PROMPT, num_inference_steps=2), end="\n\n")
        prepare(pipe, {"transformer": "video_sparse_attn", "transformer.cross": "torch_sdpa"},
                config={"sparsity": 0.5, "coarse": "off"})  # fmt: skip
        print(report(pipe, **PROMPT, num_inference_steps=2))


if __name__ == "__main__":
    main()
