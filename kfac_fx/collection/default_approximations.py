"""The approximations that a `LayerCollection` takes when neither the registration nor a linked group names one."""

from __future__ import annotations

from kfac_fx.collection.collection import BaseCollection
from kfac_fx.taps.subsample import read_sampling


class Defaults(BaseCollection):
    """Setters raise ApproximationError for what the kind of layer has not."""

    def set_default_sub_sampling(self, inputs: bool | float = False, patches: bool | float = False) -> None:
        """Of all input factors that are registered from now on; see `kfac_fx.compile`."""
        self.sampling = read_sampling(inputs, patches)

    @property
    def default_generic_approximation(self) -> str:
        return self.default_approximation("generic")

    def set_default_generic_approximation(self, value: str) -> None:
        self.set_default_approximation("generic", value)

    @property
    def default_fully_connected_approximation(self) -> str:
        return self.default_approximation("fully_connected")

    def set_default_fully_connected_approximation(self, value: str) -> None:
        self.set_default_approximation("fully_connected", value)

    @property
    def default_conv2d_approximation(self) -> str:
        return self.default_approximation("conv2d")

    def set_default_conv2d_approximation(self, value: str) -> None:
        self.set_default_approximation("conv2d", value)

    @property
    def default_depthwise_conv2d_approximation(self) -> str:
        return self.default_approximation("depthwise_conv2d")

    def set_default_depthwise_conv2d_approximation(self, value: str) -> None:
        self.set_default_approximation("depthwise_conv2d", value)

    @property
    def default_embedding_approximation(self) -> str:
        return self.default_approximation("embedding")

    def set_default_embedding_approximation(self, value: str) -> None:
        self.set_default_approximation("embedding", value)

    @property
    def default_scale_and_shift_approximation(self) -> str:
        return self.default_approximation("scale_and_shift")

    def set_default_scale_and_shift_approximation(self, value: str) -> None:
        self.set_default_approximation("scale_and_shift", value)

    @property
    def default_fully_connected_multi_approximation(self) -> str:
        return self.default_approximation("fully_connected_multi")

    def set_default_fully_connected_multi_approximation(self, value: str) -> None:
        self.set_default_approximation("fully_connected_multi", value)

    @property
    def default_conv2d_multi_approximation(self) -> str:
        return self.default_approximation("conv2d_multi")

    def set_default_conv2d_multi_approximation(self, value: str) -> None:
        self.set_default_approximation("conv2d_multi", value)

    @property
    def default_embedding_multi_approximation(self) -> str:
        return self.default_approximation("embedding_multi")

    def set_default_embedding_multi_approximation(self, value: str) -> None:
        self.set_default_approximation("embedding_multi", value)
