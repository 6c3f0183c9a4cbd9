"""Diffusion transformers of diffusers, in tiny configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .entry import Call, classes, floats, keywords, steps

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
PATCHES = {"in_channels": 4, "out_channels": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2, **HEADS}

TRANSFORMERS: dict[str, tuple[Mapping[str, Any], Callable[[int], Call]]] = {
    "DiTTransformer2DModel": (
        {
            **PATCHES,
            "num_embeds_ada_norm": 20,
        },
        keywords(hidden_states=floats(4, 8, 8), timestep=classes(20), class_labels=classes(10)),
    ),
    "PixArtTransformer2DModel": (
        {
            **PATCHES,
            "caption_channels": 8,
            "cross_attention_dim": 16,
            "use_additional_conditions": False,
        },
        lambda batch: (
            (),
            {
                "hidden_states": torch.randn(batch, 4, 8, 8),
                "encoder_hidden_states": torch.randn(batch, 6, 8),
                "timestep": steps(batch),
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            },
        ),
    ),
    "Transformer2DModel": (
        {"in_channels": 16, "num_layers": 2, "norm_num_groups": 4, "cross_attention_dim": 8, **HEADS},
        keywords(hidden_states=floats(16, 8, 8), encoder_hidden_states=floats(6, 8)),
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "caption_projection_dim": 16,
            "joint_attention_dim": 8,
            "pooled_projection_dim": 8,
            "pos_embed_max_size": 8,
            **HEADS,
        },
        keywords(
            hidden_states=floats(4, 8, 8),
            encoder_hidden_states=floats(6, 8),
            pooled_projections=floats(8),
            timestep=steps,
        ),
    ),
    "FluxTransformer2DModel": (
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 8,
            "pooled_projection_dim": 8,
            "axes_dims_rope": [4, 2, 2],
            **HEADS,
        },
        lambda batch: (
            (),
            {
                "hidden_states": torch.randn(batch, 16, 4),
                "encoder_hidden_states": torch.randn(batch, 6, 8),
                "pooled_projections": torch.randn(batch, 8),
                "timestep": torch.rand(batch),
                "img_ids": torch.zeros(16, 3),
                "txt_ids": torch.zeros(6, 3),
            },
        ),
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "caption_projection_dim": 16,
            "joint_attention_dim": 8,
            "out_channels": 4,
            "pos_embed_max_size": 16,
            **HEADS,
        },
        keywords(hidden_states=floats(4, 8, 8), encoder_hidden_states=floats(6, 8), timestep=steps),
    ),
    "SanaTransformer2DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "sample_size": 8,
            "patch_size": 1,
            **HEADS,
        },
        keywords(hidden_states=floats(4, 8, 8), encoder_hidden_states=floats(6, 8), timestep=steps),
    ),
    "CogVideoXTransformer3DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 4,
            "text_embed_dim": 8,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "patch_size": 2,
            "temporal_compression_ratio": 4,
            "max_text_seq_length": 6,
            **HEADS,
        },
        keywords(hidden_states=floats(3, 4, 8, 8), encoder_hidden_states=floats(6, 8), timestep=steps),
    ),
    "LTXVideoTransformer3DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "caption_channels": 8,
            "cross_attention_dim": 16,
            "qk_norm": "rms_norm_across_heads",
            **HEADS,
        },
        lambda batch: (
            (),
            {
                "hidden_states": torch.randn(batch, 2 * 4 * 4, 4),
                "encoder_hidden_states": torch.randn(batch, 6, 8),
                "timestep": steps(batch),
                "encoder_attention_mask": torch.ones(batch, 6),
                "num_frames": 2,
                "height": 4,
                "width": 4,
            },
        ),
    ),
    "WanTransformer3DModel": (
        {
            "patch_size": (1, 2, 2),
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 8,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
        },
        keywords(hidden_states=floats(4, 2, 8, 8), timestep=steps, encoder_hidden_states=floats(6, 8)),
    ),
    "PriorTransformer": (
        {"num_layers": 2, "embedding_dim": 8, "num_embeddings": 5, "additional_embeddings": 4, **HEADS},
        keywords(hidden_states=floats(8), timestep=steps, proj_embedding=floats(8), encoder_hidden_states=floats(5, 8)),
    ),
    "StableAudioDiTModel": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "num_key_value_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": 8,
            "time_proj_dim": 8,
            "global_states_input_dim": 8,
            "cross_attention_input_dim": 8,
        },
        keywords(
            hidden_states=floats(4, 8),
            timestep=steps,
            encoder_hidden_states=floats(6, 8),
            global_hidden_states=floats(1, 8),
        ),
    ),
    "HunyuanDiT2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "hidden_size": 16,
            "cross_attention_dim": 8,
            "cross_attention_dim_t5": 8,
            "pooled_projection_dim": 4,
            "text_len": 4,
            "text_len_t5": 4,
            "activation_fn": "gelu-approximate",
            "use_style_cond_and_image_meta_size": False,
        },
        lambda batch: (
            (),
            {
                "hidden_states": torch.randn(batch, 4, 8, 8),
                "timestep": steps(batch).float(),
                "encoder_hidden_states": torch.randn(batch, 4, 8),
                "text_embedding_mask": torch.ones(batch, 4),
                "encoder_hidden_states_t5": torch.randn(batch, 4, 8),
                "text_embedding_mask_t5": torch.ones(batch, 4),
                "image_rotary_emb": (torch.randn(16, 8), torch.randn(16, 8)),
            },
        ),
    ),
}
