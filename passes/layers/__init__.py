"""The declarations of layers, one file for each family. `LAYERS` has all of them by name."""

from . import conv, elementwise, embedding, linear
from .declaration import Form, Layer, as_rows, by_group, collect, composite, layer

FAMILIES = (linear, conv, embedding, elementwise)
LAYERS: dict[str, Layer] = collect(
    *(value for family in FAMILIES for value in vars(family).values() if isinstance(value, Layer))
)

__all__ = ["LAYERS", "Form", "Layer", "as_rows", "by_group", "collect", "composite", "layer"]
