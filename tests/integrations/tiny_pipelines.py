"""Pipelines of diffusers that are small and random: `tiny("wan")` builds one, `call(...)` says how it is run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

TEXT, WORDS = 32, 8


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import T5TokenizerFast

    letters = "\u2581abcdefghijklmnopqrstuvwxyz"  # the first stands for a blank
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -3.0) for letter in letters)]
    words = Tokenizer(models.Unigram(vocab, unk_id=2))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    return T5TokenizerFast(tokenizer_object=words, model_max_length=WORDS)


def _t5(width: int = TEXT) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=64, d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=4))


def _clip(width: int = TEXT) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    sizes = {"hidden_size": width, "intermediate_size": 32, "projection_dim": 32, "num_attention_heads": 4}
    return CLIPTextModelWithProjection(
        CLIPTextConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=WORDS, **sizes)
    )


def _flow() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler()


def _image_vae(channels: int = 4) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(4,), latent_channels=channels, norm_num_groups=1, layers_per_block=1, shift_factor=0.0,
        scaling_factor=1.0, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def wan() -> Any:
    from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel

    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return WanPipeline(
        tokenizer=_tokenizer(), text_encoder=_t5(), vae=vae, transformer=_wan_dit(WanTransformer3DModel),
        scheduler=_flow(),
    )  # fmt: skip


def _wan_dit(kind: Any) -> Any:
    return kind(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=16, out_channels=16,
        text_dim=TEXT, freq_dim=32, ffn_dim=32, num_layers=3, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip


def wan22() -> Any:
    """Two transformers, one for steps of much noise."""
    from diffusers import WanPipeline, WanTransformer3DModel

    whole = wan()
    parts = {name: part for name, part in whole.components.items() if part is not None}
    return WanPipeline(**parts, transformer_2=_wan_dit(WanTransformer3DModel), boundary_ratio=0.875)


def flux() -> Any:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    dit = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=TEXT, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return FluxPipeline(
        scheduler=_flow(), vae=_image_vae(), text_encoder=None, tokenizer=None, text_encoder_2=_t5(),
        tokenizer_2=_tokenizer(), transformer=dit,
    )  # fmt: skip


def sd3() -> Any:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    dit = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        caption_projection_dim=32, joint_attention_dim=TEXT, pooled_projection_dim=64, out_channels=4,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    empty = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return StableDiffusion3Pipeline(
        transformer=dit, scheduler=_flow(), vae=_image_vae(), text_encoder_3=_t5(), tokenizer_3=_tokenizer(), **empty
    )


def hunyuan() -> Any:
    from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoPipeline, HunyuanVideoTransformer3DModel

    dit = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2, num_single_layers=2,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=TEXT,
        pooled_projection_dim=32, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    vae = AutoencoderKLHunyuanVideo(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4, up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        norm_num_groups=4, mid_block_add_attention=True,
    )  # fmt: skip
    return HunyuanVideoPipeline(
        transformer=dit, vae=vae, scheduler=_flow(), text_encoder=None, text_encoder_2=_clip(), tokenizer=None,
        tokenizer_2=None,
    )  # fmt: skip


def ltx() -> Any:
    from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel

    dit = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=TEXT,
    )  # fmt: skip
    vae = AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False), decoder_spatio_temporal_scaling=(True, True, False, False),
    )  # fmt: skip
    return LTXPipeline(transformer=dit, vae=vae, scheduler=_flow(), text_encoder=_t5(), tokenizer=_tokenizer())


def ltx2() -> Any:
    """Video and sound, and connectors between the text encoder and the transformer."""
    from diffusers import (
        AutoencoderKLLTX2Audio,
        AutoencoderKLLTX2Video,
        LTX2Pipeline,
        LTX2VideoTransformer3DModel,
    )
    from diffusers.pipelines.ltx2 import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    dit = LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, patch_size=1, patch_size_t=1, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2,
        audio_attention_head_dim=8, audio_cross_attention_dim=16, num_layers=2, qk_norm="rms_norm_across_heads",
        caption_channels=TEXT, rope_double_precision=False, rope_type="split",
    )  # fmt: skip
    sizes: dict[str, Any] = {}
    for name in ("video", "audio"):
        sizes |= {f"{name}_connector_num_attention_heads": 4, f"{name}_connector_attention_head_dim": 8}
        sizes |= {f"{name}_connector_num_layers": 1, f"{name}_connector_num_learnable_registers": None}
    connectors = LTX2TextConnectors(
        caption_channels=TEXT, text_proj_in_factor=3, connector_rope_base_seq_len=32, rope_theta=10000.0,
        rope_double_precision=False, causal_temporal_positioning=False, rope_type="split", **sizes,
    )  # fmt: skip
    vae = AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
        decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_residual=(False,),
        upsample_factor=(1,), timestep_conditioning=False, patch_size=1, patch_size_t=1, encoder_causal=True,
        decoder_causal=False,
    )  # fmt: skip
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=4, output_channels=2, ch_mult=(1,), num_res_blocks=1, attn_resolutions=None, in_channels=2,
        resolution=32, latent_channels=2, norm_type="pixel", causality_axis="height", dropout=0.0,
        mid_block_add_attention=False, sample_rate=16000, mel_hop_length=160, is_causal=True, mel_bins=8,
    )  # fmt: skip
    vocoder = LTX2Vocoder(
        in_channels=16, hidden_channels=32, out_channels=2, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], leaky_relu_negative_slope=0.1,
        output_sampling_rate=16000,
    )  # fmt: skip
    return LTX2Pipeline(
        transformer=dit, vae=vae, audio_vae=audio_vae, scheduler=_flow(), text_encoder=None, tokenizer=None,
        connectors=connectors, vocoder=vocoder,
    )  # fmt: skip


def cogvideox() -> Any:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

    dit = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=TEXT, num_layers=2, sample_width=4, sample_height=4, sample_frames=9, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=WORDS,
    )  # fmt: skip
    vae = AutoencoderKLCogVideoX(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
        down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4, norm_num_groups=2,
        temporal_compression_ratio=4,
    )  # fmt: skip
    return CogVideoXPipeline(
        transformer=dit, vae=vae, scheduler=CogVideoXDDIMScheduler(), text_encoder=_t5(), tokenizer=_tokenizer()
    )


def mochi() -> Any:
    from diffusers import AutoencoderKLMochi, MochiPipeline, MochiTransformer3DModel

    dit = MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=12, out_channels=None, qk_norm="rms_norm", text_embed_dim=TEXT, time_embed_dim=4,
    )  # fmt: skip
    vae = AutoencoderKLMochi(
        latent_channels=12, out_channels=3, encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
    )  # fmt: skip
    return MochiPipeline(transformer=dit, vae=vae, scheduler=_flow(), text_encoder=_t5(), tokenizer=_tokenizer())


def pixart() -> Any:
    from diffusers import DDIMScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel

    dit = PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, caption_channels=TEXT,
        in_channels=4, cross_attention_dim=24, out_channels=8, attention_bias=True, norm_type="ada_norm_single",
        norm_elementwise_affine=False, norm_eps=1e-6, num_embeds_ada_norm=1000, use_additional_conditions=False,
    )  # fmt: skip
    return PixArtAlphaPipeline(
        transformer=dit, vae=_image_vae(), scheduler=DDIMScheduler(), text_encoder=_t5(), tokenizer=_tokenizer()
    )


def qwen() -> Any:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel

    dit = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=TEXT, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    return QwenImagePipeline(transformer=dit, vae=vae, scheduler=_flow(), text_encoder=None, tokenizer=None)


PIPELINES: dict[str, Callable[[], Any]] = {
    made.__name__: made for made in (wan, wan22, flux, sd3, hunyuan, ltx, ltx2, cogvideox, mochi, pixart, qwen)
}
VIDEO = {"height": 32, "width": 32, "num_frames": 9}
IMAGE = {"height": 16, "width": 16}


def tiny(name: str) -> Any:
    """Build a pipeline; the same weights each time."""
    torch.manual_seed(0)
    pipe = PIPELINES[name]()
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
            for weight in part.parameters():
                # So large that attention is no plain average, and so small that nothing overflows.
                weight.data = 0.2 * torch.randn(weight.shape, generator=generator) if weight.ndim > 1 else weight.data
    return pipe


@functools.cache
def _embeds(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def call(name: str) -> dict[str, Any]:
    """Say how a pipeline is run: two steps, embeddings in the place of a prompt."""
    text = _embeds(1, WORDS, TEXT)
    mask = torch.ones(1, WORDS, dtype=torch.bool)
    masked = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask}
    both = {"prompt_embeds": text, "negative_prompt_embeds": -text}
    own: dict[str, dict[str, Any]] = {
        "wan": {**VIDEO, **both},
        "wan22": {**VIDEO, **both},
        "flux": {**IMAGE, "prompt_embeds": text, "pooled_prompt_embeds": _embeds(1, 32)},
        "sd3": {
            **IMAGE,
            **both,
            "pooled_prompt_embeds": _embeds(1, 64),
            "negative_pooled_prompt_embeds": -_embeds(1, 64),
        },
        "hunyuan": {
            **VIDEO,
            "prompt_embeds": text,
            "pooled_prompt_embeds": _embeds(1, 32),
            "prompt_attention_mask": torch.tensor([[1] * 5 + [0] * 3]),
        },
        "ltx": {**VIDEO, **both, **masked},
        "ltx2": {
            **VIDEO,
            "prompt_embeds": _embeds(1, WORDS, 3 * TEXT),
            "prompt_attention_mask": mask,
            "guidance_scale": 1.0,
            "audio_guidance_scale": 1.0,
            "stg_scale": 0.0,
            "audio_stg_scale": 0.0,
            "modality_scale": 1.0,
            "audio_modality_scale": 1.0,
            "spatio_temporal_guidance_blocks": None,
            "frame_rate": 25.0,
        },
        "cogvideox": {**VIDEO, **both},
        "mochi": {**VIDEO, "num_frames": 7, **both, **masked},
        "pixart": {**IMAGE, **both, **masked, "prompt": None, "negative_prompt": None, "use_resolution_binning": False},
        "qwen": {**IMAGE, "prompt_embeds": text, "prompt_embeds_mask": torch.ones(1, WORDS, dtype=torch.long)},
    }
    return {**own[name], "num_inference_steps": 2, "output_type": "latent"}


def frames(pipe: Any, name: str, **more: Any) -> torch.Tensor:
    """Run a pipeline: its latents."""
    with torch.no_grad():
        out = pipe(**{**call(name), **more}, generator=torch.Generator().manual_seed(0), return_dict=False)
    found: torch.Tensor = out[0]
    return found
