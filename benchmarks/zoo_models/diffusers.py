"""Models of diffusers: U-Nets, autoencoders and control nets, in tiny configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from . import torchvision
from .diffusers_transformers import TRANSFORMERS
from .entry import Call, Entry, classes, floats, keywords, steps

LIKE = {"UNet2DModel": "U-Net", "UNet2DConditionModel": "U-Net"}


LATENT = keywords(sample=floats(4, 16, 16), timestep=steps, encoder_hidden_states=floats(6, 8))
PLAIN = keywords(sample=floats(3, 16, 16), timestep=steps)
PICTURE = keywords(sample=floats(3, 32, 32))
SMALL = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
DOWN_UP = {
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
}
CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 8,
    "attention_head_dim": 8,
    **SMALL,
}

# name: (configuration, call); the name may carry a suffix behind a dot where a class comes twice.
MODELS: dict[str, tuple[Mapping[str, Any], Callable[[int], Call]]] = {
    "UNet2DModel": (
        {
            "sample_size": 16,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
            **SMALL,
        },
        PLAIN,
    ),
    "UNet2DConditionModel": ({"sample_size": 16, **CROSS}, LATENT),
    "UNet2DConditionModel.sdxl": (
        {
            "sample_size": 16,
            **CROSS,
            "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 8 + 6 * 4,
        },
        lambda batch: (
            (),
            {
                **LATENT(batch)[1],
                "added_cond_kwargs": {"text_embeds": torch.randn(batch, 8), "time_ids": torch.rand(batch, 6)},
            },
        ),
    ),
    "UNet1DModel": (
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D"),
            "up_block_types": ("UpResnetBlock1D",),
            "mid_block_type": "MidResTemporalBlock1D",
            "out_block_type": "OutConv1DBlock",
            "act_fn": "swish",
            "use_timestep_embedding": True,
            "downsample_each_block": False,
            "layers_per_block": 1,
        },
        keywords(sample=floats(4, 16), timestep=steps),
    ),
    "UNet3DConditionModel": (
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 8,
            "attention_head_dim": 8,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            **SMALL,
        },
        keywords(sample=floats(4, 3, 16, 16), timestep=steps, encoder_hidden_states=floats(6, 8)),
    ),
    "UNetSpatioTemporalConditionModel": (
        {
            "sample_size": 16,
            "in_channels": 8,
            "cross_attention_dim": 8,
            "num_attention_heads": (1, 2),
            "num_frames": 3,
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 12,
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "block_out_channels": (32, 64),
        },
        keywords(
            sample=floats(3, 8, 16, 16), timestep=steps, encoder_hidden_states=floats(1, 8), added_time_ids=floats(3)
        ),
    ),
    "UVit2DModel": (
        {
            "hidden_size": 16,
            "cond_embed_dim": 8,
            "micro_cond_encode_dim": 2,
            "micro_cond_embed_dim": 10,
            "encoder_hidden_size": 8,
            "vocab_size": 32,
            "codebook_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "block_out_channels": 16,
            "in_channels": 16,
            "block_num_heads": 2,
            "num_res_blocks": 1,
            "sample_size": 8,
            "intermediate_size": 32,
            "use_bias": True,
        },
        keywords(
            input_ids=classes(32, 8, 8),
            encoder_hidden_states=floats(6, 8),
            pooled_text_emb=floats(8),
            micro_conds=floats(5),
        ),
    ),
    "AutoencoderKL": ({"latent_channels": 4, **DOWN_UP, **SMALL}, PICTURE),
    "AsymmetricAutoencoderKL": (
        {
            "latent_channels": 4,
            "down_block_out_channels": (8, 16),
            "up_block_out_channels": (8, 16),
            "layers_per_down_block": 1,
            "layers_per_up_block": 1,
            "norm_num_groups": 4,
            **DOWN_UP,
        },
        PICTURE,
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        PICTURE,
    ),
    "AutoencoderDC": (
        {
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 16),
            "decoder_block_out_channels": (8, 16),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "attention_head_dim": 8,
            "latent_channels": 4,
            "downsample_block_type": "pixel_unshuffle",
            "decoder_norm_types": "rms_norm",
            "decoder_act_fns": "silu",
            "upsample_block_type": "pixel_shuffle",
        },
        PICTURE,
    ),
    "AutoencoderOobleck": (
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
            "audio_channels": 1,
            "channel_multiples": [1, 2],
        },
        keywords(sample=floats(1, 64)),
    ),
    "VQModel": ({"latent_channels": 4, "num_vq_embeddings": 16, "vq_embed_dim": 4, **DOWN_UP, **SMALL}, PICTURE),
    "AutoencoderKLTemporalDecoder": (
        {
            "latent_channels": 4,
            "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
        },
        lambda batch: ((), {"sample": torch.randn(3 * batch, 3, 16, 16), "num_frames": 3}),
    ),
    "ControlNetModel": (
        {
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "cross_attention_dim": 8,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "attention_head_dim": 8,
            "conditioning_embedding_out_channels": (8, 16),
        },
        keywords(
            sample=floats(4, 16, 16),
            timestep=steps,
            encoder_hidden_states=floats(6, 8),
            controlnet_cond=floats(3, 32, 32),
        ),
    ),
    "T2IAdapter": (
        {
            "in_channels": 3,
            "channels": [8, 16],
            "num_res_blocks": 1,
            "downscale_factor": 4,
            "adapter_type": "full_adapter",
        },
        keywords(x=floats(3, 32, 32)),
    ),
    "StableCascadeUNet": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "timestep_ratio_embedding_dim": 8,
            "patch_size": 1,
            "conditioning_dim": 16,
            "block_out_channels": (16, 16),
            "num_attention_heads": (2, 2),
            "down_num_layers_per_block": (1, 1),
            "up_num_layers_per_block": (1, 1),
            "down_blocks_repeat_mappers": (1, 1),
            "up_blocks_repeat_mappers": (1, 1),
            "block_types_per_layer": (
                ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
                ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
            ),
            "clip_text_in_channels": 8,
            "clip_text_pooled_in_channels": 8,
            "clip_image_in_channels": 8,
            "clip_seq": 2,
            "kernel_size": 3,
            "self_attn": (True, True),
            "timestep_conditioning_type": ("sca",),
            "dropout": (0.1, 0.1),
        },
        keywords(sample=floats(4, 8, 8), timestep_ratio=lambda batch: torch.rand(batch), clip_text_pooled=floats(1, 8)),
    ),
}


def load() -> None:
    torchvision.load()
    import diffusers

    diffusers.utils.logging.set_verbosity_error()


def build(name: str, configuration: Mapping[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, name.partition(".")[0])(**configuration)
        return model

    return make


ENTRIES = tuple(
    Entry("diffusers", name, build(name, configuration), call, like=LIKE.get(name, ""))
    for name, (configuration, call) in (MODELS | TRANSFORMERS).items()
)
