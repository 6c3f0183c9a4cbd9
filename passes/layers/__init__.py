"""One declaration a layer, a file a family."""

from .declaration import Form, Layer, collect, composite, layer

__all__ = ["Form", "Layer", "collect", "composite", "layer"]
