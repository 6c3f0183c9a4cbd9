"""The declarations of layers, one file for each family. `LAYERS` has all of them by name."""

from . import conv, elementwise, embedding, linear
from .declaration import Form, Layer, as_rows, by_group, collect, composite, layer

LAYERS: dict[str, Layer] = collect(
    linear.linear,
    linear.bilinear,
    linear.experts,
    conv.conv1d,
    conv.conv2d,
    conv.conv3d,
    conv.depthwise_conv1d,
    conv.depthwise_conv2d,
    conv.depthwise_conv3d,
    conv.conv_transpose1d,
    conv.conv_transpose2d,
    conv.conv_transpose3d,
    conv.separable_conv1d,
    conv.separable_conv2d,
    embedding.embedding,
    embedding.embedding_bag,
    elementwise.layer_norm,
    elementwise.rms_norm,
    elementwise.group_norm,
    elementwise.batch_norm,
    elementwise.instance_norm,
    elementwise.scale_and_shift,
    elementwise.prelu,
)

__all__ = ["LAYERS", "Form", "Layer", "as_rows", "by_group", "collect", "composite", "layer"]
