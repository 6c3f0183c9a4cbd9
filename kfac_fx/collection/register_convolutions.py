"""The register functions of a `LayerCollection` for convolutions.

Strides and the like are read from the graph, at every use; what the caller says must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from kfac_fx.collection.default_approximations import Defaults
from kfac_fx.collection.find_use import Nodes, listed
from kfac_fx.collection.registry import VARIABLE_SCOPE, Reuse
from kfac_fx.fisher_blocks import CONVOLUTIONS, DEPTHWISE, FisherBlock
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import Sampling
from kfac_fx.passes.layers.conv import disagreement
from kfac_fx.taps.subsample import ALL, read_sampling

Sizes = Sequence[int] | int | None
Share = bool | float | None


class ConvolutionRegistrations(Defaults):
    """As those of `kfac_fx.collection.register_layers`."""

    def register_conv1d(
        self,
        params: Any,
        strides: Sizes = None,
        padding: Any = None,
        inputs: Nodes = None,
        outputs: Nodes = None,
        dilations: Sizes = None,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
        sub_sample_inputs: Share = None,
        sub_sample_patches: Share = None,
    ) -> FisherBlock:
        self.check_geometry(params, CONVOLUTIONS, inputs, outputs, strides, padding, dilations, None)
        layers, sampling = ("conv1d", "conv_transpose1d"), own_sampling(sub_sample_inputs, sub_sample_patches)
        return self.register("conv2d", params, inputs, outputs, approx, reuse, layers=layers, sampling=sampling)

    def register_conv2d(
        self,
        params: Any,
        strides: Sizes = None,
        padding: Any = None,
        inputs: Nodes = None,
        outputs: Nodes = None,
        data_format: str | None = None,
        dilations: Sizes = None,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
        sub_sample_inputs: Share = None,
        sub_sample_patches: Share = None,
        patch_mask: Tensor | None = None,
    ) -> FisherBlock:
        """
        Args:
            approx: "kron" (KFC), "diagonal", or, with pixels in the place of patches (`kfac_fx.factors.sua`),
                "kron_sua", "kron_sua_zero_mean" or "kron_sua_centered".
            sub_sample_inputs, sub_sample_patches: see `kfac_fx.compile`; None: those of the collection.
            patch_mask: [channels in a group, *kernel], what every patch is multiplied with; for weights that are masked
                alike for all outputs.
        """
        self.check_geometry(params, CONVOLUTIONS, inputs, outputs, strides, padding, dilations, data_format)
        rows = self.rows("conv2d", params, inputs, outputs, approx, sub_sample_inputs, sub_sample_patches, patch_mask)
        layers = ("conv2d", "conv_transpose2d")
        return self.register("conv2d", params, inputs, outputs, approx, reuse, layers=layers, **rows)

    def register_conv2d_multi(
        self,
        params: Any,
        strides: Sizes = None,
        padding: Any = None,
        inputs: Nodes = None,
        outputs: Nodes = None,
        num_uses: int | None = None,
        data_format: str | None = None,
        dilations: Sizes = None,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
        sub_sample_inputs: Share = None,
        sub_sample_patches: Share = None,
        patch_mask: Tensor | None = None,
    ) -> FisherBlock:
        """As `register_fully_connected_multi`; the geometry may differ from use to use.
        approx: "kron_indep", or what `register_conv2d` takes besides "kron"."""
        self.check_geometry(params, CONVOLUTIONS, inputs, outputs, strides, padding, dilations, data_format)
        kind = "conv2d_multi"
        rows = self.rows(kind, params, inputs, outputs, approx, sub_sample_inputs, sub_sample_patches, patch_mask)
        return self.register(kind, params, inputs, outputs, approx, reuse, num_uses, **rows)

    def register_convolution(
        self,
        params: Any,
        inputs: Nodes,
        outputs: Nodes,
        padding: Any = None,
        strides: Sizes = None,
        dilation_rate: Sizes = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
        sub_sample_inputs: Share = None,
        sub_sample_patches: Share = None,
    ) -> FisherBlock:
        """Of one, two or three dimensions, transposed ones included."""
        self.check_geometry(params, CONVOLUTIONS, inputs, outputs, strides, padding, dilation_rate, data_format)
        sampling = own_sampling(sub_sample_inputs, sub_sample_patches)
        return self.register("conv2d", params, inputs, outputs, approx, reuse, sampling=sampling)

    def register_depthwise_conv2d(
        self,
        params: Any,
        inputs: Nodes,
        outputs: Nodes,
        strides: Sizes = None,
        padding: Any = None,
        rate: Sizes = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> FisherBlock:
        """approx: "diagonal" or "kron", a product for every channel."""
        self.check_geometry(params, DEPTHWISE, inputs, outputs, strides, padding, rate, data_format)
        return self.register("depthwise_conv2d", params, inputs, outputs, approx, reuse)

    def register_separable_conv2d(
        self,
        depthwise_params: Any,
        pointwise_params: Any,
        inputs: Nodes,
        depthwise_outputs: Nodes,
        pointwise_outputs: Nodes,
        strides: Sizes = None,
        padding: Any = None,
        rate: Sizes = None,
        data_format: str | None = None,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> tuple[FisherBlock, FisherBlock]:
        """The depthwise block, diagonal, and the pointwise one, of `approx`."""
        # Both are looked for first, so that an error leaves nothing half registered.
        self.find_uses(DEPTHWISE, self.names_of(depthwise_params), inputs, depthwise_outputs)
        self.find_uses(CONVOLUTIONS, self.names_of(pointwise_params), depthwise_outputs, pointwise_outputs)
        depthwise = self.register_depthwise_conv2d(
            depthwise_params, inputs, depthwise_outputs, strides, padding, rate, data_format, reuse=reuse
        )
        pointwise = self.register("conv2d", pointwise_params, depthwise_outputs, pointwise_outputs, approx, reuse)
        return depthwise, pointwise

    def rows(
        self,
        kind: str,
        params: Any,
        inputs: Nodes,
        outputs: Nodes,
        approx: str | None,
        sub_sample_inputs: Share,
        sub_sample_patches: Share,
        patch_mask: Tensor | None,
    ) -> dict[str, Any]:
        """Of which rows the input factor is, for `register`. Raises RegistrationError for a mask that is not one of the
        patches of every use."""
        sampling = own_sampling(sub_sample_inputs, sub_sample_patches)
        if patch_mask is None:
            return {"sampling": sampling}
        names = self.names_of(params)
        if APPROXIMATIONS[chosen := self.chosen(kind, names, approx)].needs_pixels:
            raise RegistrationError(f"{', '.join(names)}: patch_mask needs patches, and {chosen!r} has pixels")
        for use in self.find_uses(CONVOLUTIONS, names, inputs, outputs):
            kernel, columns = use.attrs["weight"][2:], use.matrix.shape[2] - ("bias" in use.parameters)
            wanted = [columns // prod(kernel), *kernel]
            if list(patch_mask.shape) != wanted:
                raise RegistrationError(
                    f"{', '.join(names)}: patch_mask has shape {list(patch_mask.shape)}, the patches have {wanted}"
                )
        return {"sampling": sampling, "patch_mask": patch_mask.detach()}

    def check_geometry(
        self,
        params: Any,
        layers: Sequence[str],
        inputs: Nodes,
        outputs: Nodes,
        strides: Sizes,
        padding: Any,
        dilations: Sizes,
        data_format: str | None,
    ) -> None:
        """Raises RegistrationError where the caller says something else than the graph."""
        if data_format is not None and not data_format.upper().startswith("NC"):
            raise RegistrationError(
                f"data_format={data_format!r}: the channels of PyTorch's convolutions come second, as in 'NCHW'"
            )
        for use in self.find_uses(layers, self.names_of(params), listed(inputs) if inputs else None, listed(outputs)):
            if found := disagreement(use.attrs, strides, padding, dilations):
                raise RegistrationError(f"{found[0]}, but the graph's {use} has {found[1]}")


def own_sampling(inputs: Share, patches: Share) -> Sampling | None:
    """None if nothing is said. Both False: all rows, whatever the collection's defaults are."""
    if inputs is None and patches is None:
        return None
    return read_sampling(inputs or False, patches or False) or ALL
