"""Models of images and videos of transformers; what differs from a tiny configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Options = Mapping[str, Any]

CONVOLUTIONAL = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
WINDOWS = {"patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
PYRAMID = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [8, 16],
    "num_attention_heads": [1, 2],
    "sr_ratios": [2, 1],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
}


def tiny_backbone() -> Any:
    import transformers

    return transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


IMAGES: dict[str, Options] = {
    "BeitForImageClassification": {
        "use_mask_token": False,
        "use_relative_position_bias": True,
        "use_absolute_position_embeddings": True,
    },
    "BitForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2},
    "ConvNextForImageClassification": CONVOLUTIONAL,
    "ConvNextV2ForImageClassification": CONVOLUTIONAL,
    "Dinov2ForImageClassification": {},
    "DPTForDepthEstimation": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
        "is_hybrid": False,
        "readout_type": "project",
    },
    "EfficientNetForImageClassification": {
        "hidden_dim": 1280,
        "in_channels": [32, 8],
        "out_channels": [8, 16],
        "kernel_sizes": [3, 3],
        "strides": [1, 2],
        "num_block_repeats": [1, 1],
        "expand_ratios": [1, 2],
        "depthwise_padding": [],
        "width_coefficient": 1.0,
    },
    "FocalNetForImageClassification": {
        "embed_dim": 8,
        "depths": [1, 1],
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
        "hidden_sizes": [8, 16],
        "patch_size": 4,
    },
    "GLPNForDepthEstimation": {**PYRAMID, "decoder_hidden_size": 8},
    "HieraForImageClassification": {
        "embed_dim": 8,
        "image_size": [32, 32],
        "patch_size": [3, 3],
        "patch_stride": [4, 4],
        "patch_padding": [1, 1],
        "depths": [1, 1],
        "num_heads": [1, 2],
        "masked_unit_size": [4, 4],
        "query_stride": [2, 2],
        "num_query_pool": 1,
        "masked_unit_attention": [True, False],
    },
    "LevitForImageClassification": {
        "image_size": 64,
        "hidden_sizes": [16, 16, 16],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "patch_size": 16,
        "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 2, 4, 2, 2]],
    },
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25},
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.35},
    "MobileViTForImageClassification": {
        "patch_size": 2,
        "hidden_sizes": [16, 16, 16],
        "neck_hidden_sizes": [8, 8, 8, 8, 16, 16, 32],
    },
    "MobileViTV2ForImageClassification": {"image_size": 64, "patch_size": 1, "width_multiplier": 0.25},
    "PoolFormerForImageClassification": {
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "num_encoder_blocks": 2,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
    },
    "PvtV2ForImageClassification": {**PYRAMID, "num_key_value_heads": None},
    "RegNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "SegformerForSemanticSegmentation": {**PYRAMID, "decoder_hidden_size": 8},
    "SwiftFormerForImageClassification": {"image_size": 32, "depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16]},
    "SwinForImageClassification": WINDOWS,
    "Swinv2ForImageClassification": WINDOWS,
    "Swin2SRForImageSuperResolution": {**WINDOWS, "patch_size": 1},
    "TextNetForImageClassification": {},
    "TimesformerForVideoClassification": {"num_frames": 2},
    "UperNetForSemanticSegmentation": {
        "backbone_config": tiny_backbone,
        "use_auxiliary_head": False,
        "hidden_size": 16,
    },
    "ViTForImageClassification": {},
    "ViTMAEForPreTraining": {
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32,
    },
    "VitDetModel": {"pretrain_image_size": 32},
    "VivitForVideoClassification": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "YolosForObjectDetection": {"num_detection_tokens": 3, "image_size": [32, 32]},
    "Dinov2WithRegistersForImageClassification": {},
    "DINOv3ViTModel": {},
    "HGNetV2ForImageClassification": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 8, 16, 16],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [8, 16, 16, 16],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [1, 1, 1, 1],
        "hidden_sizes": [8, 16, 16, 16],
        "depths": [1, 1, 1, 1],
    },
    "DetrForObjectDetection": {
        "backbone_config": tiny_backbone,
        "use_timm_backbone": False,
        "backbone": None,
        "num_queries": 5,
    },
}

LARGER = {f"{name}ForImageClassification" for name in ("Levit", "SwiftFormer", "MobileViTV2", "Pvt")} | {
    "DetrForObjectDetection",
    "UperNetForSemanticSegmentation",
}
