"""Models of timm: one small variant of nearly every family, some families twice, at full width on small images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from . import torchvision
from .entry import CLASSES, Entry, images

LIKE = {
    "vit_tiny_patch16_224": "ViT",
    "swin_tiny_patch4_window7_224": "Swin",
    "convnext_atto": "ConvNeXt",
    "efficientnet_b0": "EfficientNet",
    "resnet18": "ResNet",
}
SIZE = 64

# Those that take any image size.
FREE = [
    "caformer_s18", "convmixer_768_32", "convnext_atto", "convnextv2_atto", "cs3darknet_s",
    "cspnext_tiny", "davit_tiny", "densenet121", "dla46_c", "ecaresnet26t", "edgenext_xx_small",
    "efficientnet_b0", "efficientvim_m1", "efficientvit_b0", "fasternet_t0", "fastvit_t8", "focalnet_tiny_srf",
    "ghostnet_050", "hgnetv2_b0", "hrnet_w18_small", "inception_next_atto",
    "lambda_resnet26t", "legacy_seresnet18", "mambaout_femto", "mixnet_s",
    "mobilenetv3_small_050", "mobilenetv4_conv_small_035", "mobilevit_xxs", "mobilevitv2_050",
    "nf_regnet_b0", "poolformer_s12", "pvt_v2_b0", "rdnet_tiny", "regnetx_002", "regnety_002",
    "regnetz_005", "repghostnet_050", "repvgg_a0", "repvit_m0_9", "res2net50_26w_4s", "resnest14d", "resnet18",
    "resnet50", "resnetv2_50x1_bit", "rexnet_100", "shvit_s1", "starnet_s050",
    "test_convnext", "test_efficientnet_evos", "test_nfnet", "tiny_vit_5m_224", "tinynet_e",
    "xcit_nano_12_p16_224",
]  # fmt: skip

# name: (image size, further arguments)
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "eca_botnext26ts_256": (256, {}),
    "beit_base_patch16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2}),
    "cait_xxs24_224": (64, {"img_size": 64, "depth": 4}),
    "coat_tiny": (64, {"img_size": 64}),
    "convit_tiny": (64, {"img_size": 64, "depth": 11}),
    "csatv2": (64, {}),
    "deit3_small_patch16_224": (64, {"img_size": 64, "depth": 4}),
    "efficientformer_l1": (224, {}),
    "efficientformerv2_s0": (64, {"img_size": 64}),
    "efficientvit_m0": (224, {}),
    "eva02_tiny_patch14_224": (56, {"img_size": 56, "depth": 4}),
    "vit_tiny_patch16_dinov3_qkvb": (64, {"img_size": 64, "depth": 4}),
    "gcvit_xxtiny": (64, {"img_size": 64}),
    "inception_v3": (96, {}),
    "levit_128s": (224, {}),
    "test_coatnet": (160, {}),
    "test_maxvit": (160, {}),
    "gmlp_ti16_224": (64, {"img_size": 64}),
    "resmlp_12_224": (64, {"img_size": 64}),
    "mixer_s16_224": (64, {"img_size": 64}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "nest_tiny": (64, {"img_size": 64}),
    "pit_ti_224": (64, {"img_size": 64}),
    "sequencer2d_s": (64, {"img_size": 64, "layers": [1, 1, 2, 1]}),
    "swiftformer_xs": (64, {}),
    "swin_tiny_patch4_window7_224": (64, {"img_size": 64, "window_size": 4}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64}),
    "tnt_s_patch16_224": (64, {"img_size": 64, "depth": 3}),
    "twins_svt_small": (64, {"img_size": 64}),
    "twins_pcpvt_small": (64, {"img_size": 64}),
    "vit_tiny_patch16_224": (64, {"img_size": 64, "depth": 4}),
    "vit_relpos_small_patch16_224": (64, {"img_size": 64, "depth": 3}),
    "vit_small_patch16_18x2_224": (64, {"img_size": 64, "depth": 3}),
    "vit_tiny_r_s16_p8_224": (64, {"img_size": 64, "depth": 3}),
    "samvit_base_patch16_224": (64, {"img_size": 64, "depth": 3, "embed_dim": 96, "num_heads": 3}),
    "volo_d1_224": (64, {"img_size": 64}),
    "test_vit": (160, {}),
    "naflexvit_base_patch16_gap": (64, {"depth": 2, "embed_dim": 64, "num_heads": 2}),
    "gemma4_vit_167m": (96, {"depth": 2}),
    "deepseek_vit_412m": (56, {"depth": 2}),
}


def load() -> None:
    torchvision.load()
    import timm  # noqa: F401


def build(name: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=CLASSES, **arguments)
        return model

    return make


ENTRIES = tuple(
    Entry("timm", name, build(name, arguments), images(3, size, size), like=LIKE.get(name, ""))
    for name, (size, arguments) in sorted(({name: (SIZE, {}) for name in FREE} | OTHERS).items())
)
