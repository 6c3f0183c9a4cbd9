"""The arguments of the operations that layers and losses are made of, in the functions' order and in ATen's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

REQUIRED = object()
SPELLED_OUT: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    # canonical name: (function, {parameter: default}) in the function's own order
    "linear": (F.linear, {"input": REQUIRED, "weight": REQUIRED, "bias": None}),
    "embedding": (
        F.embedding,
        {
            "input": REQUIRED, "weight": REQUIRED, "padding_idx": None, "max_norm": None, "norm_type": 2.0,
            "scale_grad_by_freq": False, "sparse": False,
        },
    ),
    "embedding_bag": (
        torch.embedding_bag,
        {
            "weight": REQUIRED, "indices": REQUIRED, "offsets": REQUIRED, "scale_grad_by_freq": False, "mode": 0,
            "sparse": False, "per_sample_weights": None, "include_last_offset": False, "padding_idx": None,
        },
    ),
    "layer_norm": (
        F.layer_norm,
        {"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
    ),
    "rms_norm": (F.rms_norm, {"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "eps": None}),
    "group_norm": (
        F.group_norm,
        {"input": REQUIRED, "num_groups": REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
    ),
    "batch_norm": (
        F.batch_norm,
        {
            "input": REQUIRED, "running_mean": REQUIRED, "running_var": REQUIRED, "weight": None, "bias": None,
            "training": False, "momentum": 0.1, "eps": 1e-5,
        },
    ),
    "instance_norm": (
        F.instance_norm,
        {
            "input": REQUIRED, "running_mean": None, "running_var": None, "weight": None, "bias": None,
            "use_input_stats": True, "momentum": 0.1, "eps": 1e-5,
        },
    ),
    "bilinear": (F.bilinear, {"input1": REQUIRED, "input2": REQUIRED, "weight": REQUIRED, "bias": None}),
    "addmm": (torch.addmm, {"input": REQUIRED, "mat1": REQUIRED, "mat2": REQUIRED}),
    "addbmm": (torch.addbmm, {"input": REQUIRED, "batch1": REQUIRED, "batch2": REQUIRED}),
    "baddbmm": (torch.baddbmm, {"input": REQUIRED, "batch1": REQUIRED, "batch2": REQUIRED}),
    "matmul": (torch.matmul, {"input": REQUIRED, "other": REQUIRED}),
    "cross_entropy": (
        F.cross_entropy,
        {
            "input": REQUIRED, "target": REQUIRED, "weight": None, "size_average": None, "ignore_index": -100,
            "reduce": None, "reduction": "mean", "label_smoothing": 0.0,
        },
    ),
    "mse_loss": (
        F.mse_loss,
        {
            "input": REQUIRED, "target": REQUIRED, "size_average": None, "reduce": None, "reduction": "mean",
            "weight": None,
        },
    ),
    "binary_cross_entropy_with_logits": (
        F.binary_cross_entropy_with_logits,
        {
            "input": REQUIRED, "target": REQUIRED, "weight": None, "size_average": None, "reduce": None,
            "reduction": "mean", "pos_weight": None,
        },
    ),
}  # fmt: skip
for _kind in ("conv1d", "conv2d", "conv3d"):
    _rest = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    SPELLED_OUT[_kind] = (getattr(F, _kind), {"input": REQUIRED, "weight": REQUIRED, **_rest})
    _rest = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    _name = _kind.replace("conv", "conv_transpose")
    SPELLED_OUT[_name] = (getattr(F, _name), {"input": REQUIRED, "weight": REQUIRED, **_rest})

# ATen's own order of arguments, where it is another than the function's
ATEN_ORDER: dict[str, tuple[str, ...]] = {
    "embedding": ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse"),
    "batch_norm": (
        "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled",
    ),
    "instance_norm": (
        "input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps", "cudnn_enabled",
    ),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
    "cross_entropy": ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing"),
    "mse_loss": ("input", "target", "reduction"),
    "binary_cross_entropy_with_logits": ("input", "target", "weight", "pos_weight", "reduction"),
}  # fmt: skip
RENAMED = {
    "cross_entropy_loss": "cross_entropy", "mm": "matmul", "bmm": "matmul", "mv": "matmul", "__matmul__": "matmul",
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "truediv": "div",
}  # fmt: skip
REDUCTIONS = ("none", "mean", "sum")
