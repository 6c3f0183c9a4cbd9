"""Models of torchvision, detection and segmentation among them, at full width on small images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .entry import CLASSES, Call, Entry, images

LIKE = {
    "resnet18": "ResNet",
    "vit_b_32": "ViT",
    "swin_t": "Swin",
    "convnext_tiny": "ConvNeXt",
    "efficientnet_v2_s": "EfficientNet",
}

# name: (input shape, arguments of the builder)
CLASSIFIERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "alexnet": ((3, 64, 64), {}),
    "convnext_tiny": ((3, 64, 64), {}),
    "efficientnet_v2_s": ((3, 64, 64), {}),
    "googlenet": ((3, 64, 64), {"aux_logits": True, "init_weights": False}),
    "mobilenet_v2": ((3, 64, 64), {}),
    "mobilenet_v3_small": ((3, 64, 64), {}),
    "r3d_18": ((3, 4, 32, 32), {}),
    "regnet_y_400mf": ((3, 64, 64), {}),
    "resnet18": ((3, 64, 64), {}),
    "shufflenet_v2_x0_5": ((3, 64, 64), {}),
    "squeezenet1_1": ((3, 64, 64), {}),
    "swin3d_t": ((3, 4, 32, 32), {}),
    "swin_t": ((3, 64, 64), {}),
    "swin_v2_t": ((3, 64, 64), {}),
    "vgg11_bn": ((3, 32, 32), {}),
    "vit_b_32": ((3, 64, 64), {"image_size": 64}),
    "deeplabv3_mobilenet_v3_large": ((3, 64, 64), {}),
    "fcn_resnet50": ((3, 64, 64), {}),
    "lraspp_mobilenet_v3_large": ((3, 64, 64), {}),
}  # fmt: skip

BACKBONE = {"weights_backbone": None}
DENSE = dict.fromkeys(
    ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"), BACKBONE
)

# Models of two stages get few regions: pooling them takes seconds without torchvision's own operators.
REGIONS = {
    "rpn_pre_nms_top_n_train": 20,
    "rpn_post_nms_top_n_train": 6,
    "rpn_batch_size_per_image": 16,
    "box_batch_size_per_image": 4,
}
# name: image size, arguments of the builder
DETECTORS: dict[str, tuple[int, dict[str, Any]]] = {
    "fasterrcnn_resnet50_fpn": (64, REGIONS),
    "fcos_resnet50_fpn": (64, {}),
    "keypointrcnn_resnet50_fpn": (64, {**REGIONS, "num_classes": 2}),
    "maskrcnn_resnet50_fpn": (64, REGIONS),
    "retinanet_resnet50_fpn": (64, {}),
    "ssdlite320_mobilenet_v3_large": (320, {}),
}


def load() -> None:
    """Import the library. Its operators come with CUDA's libraries; where these are missing, two of them are named
    here so that the rest, all plain Python, can be imported."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor a, Tensor b, float c) -> Tensor")
        library.define("qnms(Tensor a, Tensor b, float c) -> Tensor")
        library.impl("nms", suppressed, "CPU")
        load.library = library  # type: ignore[attr-defined]  # it must live as long as the process
        import torchvision.ops

        torchvision.ops.boxes._assert_has_ops = lambda: None


def suppressed(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression: the boxes that no better one overlaps by more than the threshold, best first."""
    import torchvision.ops

    waiting, kept = scores.argsort(descending=True), []
    while len(waiting):
        best, waiting = waiting[0], waiting[1:]
        kept.append(best)
        waiting = waiting[torchvision.ops.box_iou(boxes[best][None], boxes[waiting])[0] <= threshold]
    return torch.stack(kept) if kept else scores.new_zeros(0, dtype=torch.long)


def classifier(name: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(
            name, weights=None, **DENSE.get(name, {}), **{"num_classes": CLASSES} | arguments
        )

    return build


def detector(name: str, size: int, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        sizes = {} if name.startswith("ssdlite") else {"min_size": size, "max_size": size}
        given = {"num_classes": CLASSES, **sizes, **arguments}
        return torchvision.models.get_model(name, weights=None, weights_backbone=None, **given)

    return build


def scenes(size: int) -> Callable[[int], Call]:
    """Images with a box each, the calls of detectors in training."""

    def call(batch: int) -> Call:
        target: dict[str, Tensor] = {
            "boxes": torch.tensor([[0.1, 0.2, 0.7, 0.9]]) * size,
            "labels": torch.tensor([1]),
            "masks": torch.ones(1, size, size, dtype=torch.uint8),
            "keypoints": torch.tensor([[0.5 * size, 0.5 * size, 1.0]]).repeat(1, 17, 1),
        }
        return ([torch.rand(3, size, size) for _ in range(batch)], [dict(target) for _ in range(batch)]), {}

    return call


def raft() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.optical_flow.raft_small(weights=None)
    return model


def frames(batch: int) -> Call:
    return (torch.randn(batch, 3, 128, 128), torch.randn(batch, 3, 128, 128)), {"num_flow_updates": 3}


ENTRIES = (
    *(
        Entry("torchvision", name, classifier(name, arguments), images(*shape), like=LIKE.get(name, ""))
        for name, (shape, arguments) in CLASSIFIERS.items()
    ),
    *(
        Entry("torchvision", name, detector(name, size, arguments), scenes(size))
        for name, (size, arguments) in DETECTORS.items()
    ),
    Entry("torchvision", "raft_small", raft, frames),
)
