"""The register functions of a `LayerCollection` for layers.

All take graph nodes, or their names, as inputs and outputs; `inputs=None` takes what the graph says. Geometry, strides
and the like are read from the graph, too; what the caller says must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from kfac_fx.default_approximations import Defaults
from kfac_fx.find_use import Nodes, listed
from kfac_fx.fisher_blocks import CONVOLUTIONS, DEPTHWISE, EMBEDDINGS, LINEAR, FisherBlock, block_class
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import GENERIC, UNCORRELATED, Sampling, Use
from kfac_fx.passes.layers.conv import per_axis, same_or_given
from kfac_fx.registry import VARIABLE_SCOPE
from kfac_fx.subsample import ALL, read_sampling

Reuse = bool | str | None
Sizes = Sequence[int] | int | None
Share = bool | float | None


class LayerRegistrations(Defaults):
    """Each returns the block. Raises RegistrationError if the graph has no such layer there, ReuseError, and
    ApproximationError for an `approx` that the layer has not."""

    def register_fully_connected(
        self,
        params: Any,
        inputs: Nodes,
        outputs: Nodes,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
        *,
        dense_inputs: bool = True,
    ) -> FisherBlock:
        """approx: "kron", "kron_in_diag", "kron_out_diag", "kron_both_diag" or "diagonal".
        dense_inputs: False if the inputs are ids, in the place of one-hot vectors."""
        layers = LINEAR if dense_inputs else EMBEDDINGS
        return self.register("fully_connected", params, inputs, outputs, approx, reuse, layers=layers)

    def register_fully_connected_multi(
        self,
        params: Any,
        inputs: Nodes,
        outputs: Nodes,
        num_uses: int | None = None,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
        *,
        dense_inputs: bool = True,
    ) -> FisherBlock:
        """Several uses of one weight, as in a recurrent network.

        Args:
            inputs, outputs: lists, one a use in the order of time; or single nodes that hold `num_uses` uses one after
                another, [num_uses * batch, ...].
            approx: "kron_indep", with "_in_diag", "_out_diag" or "_both_diag"; "kron_series_1" or "kron_series_2", for
                uses in the order of time.
        """
        layers = LINEAR if dense_inputs else EMBEDDINGS
        return self.register("fully_connected_multi", params, inputs, outputs, approx, reuse, num_uses, layers)

    def register_embedding(
        self, params: Any, inputs: Nodes, outputs: Nodes, approx: str | None = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """approx: "kron", whose input factor is diagonal."""
        return self.register("embedding", params, inputs, outputs, approx, reuse)

    def register_embedding_multi(
        self,
        params: Any,
        inputs: Nodes,
        outputs: Nodes,
        num_uses: int | None = None,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> FisherBlock:
        """As `register_fully_connected_multi`; the output layer that is tied to the embedding is one more use."""
        layers = EMBEDDINGS + LINEAR
        return self.register("embedding_multi", params, inputs, outputs, approx, reuse, num_uses, layers)

    def register_scale_and_shift(
        self, params: Any, inputs: Nodes, outputs: Nodes, approx: str | None = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """`x * scale + shift`, or a normalization with its own scale and shift. approx: "full" or "diagonal"."""
        return self.register("scale_and_shift", params, inputs, outputs, approx, reuse)

    def register_generic(
        self, params: Any, batch_size: int | None = None, approx: str | None = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """Parameters of no layer. approx: "diagonal" or "full". batch_size is known without being said."""
        if batch_size is not None and batch_size < 1:
            raise RegistrationError(f"batch_size={batch_size} must be at least 1")
        names = self.names_of(params)
        chosen = self.chosen(GENERIC, names, approx)
        block = block_class(GENERIC, chosen, False)(self, names, chosen)
        block.register_additional_tower()
        return self.filed(names, block, reuse)

    # --- convolutions -----------------------------------------------------------------------------------------------

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
        sampling = own_sampling(sub_sample_inputs, sub_sample_patches)
        block = self.register("conv2d", params, inputs, outputs, approx, reuse, layers=("conv1d", "conv_transpose1d"))
        block.sampling = sampling or block.sampling
        return block

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
            approx: "kron" (KFC), "diagonal", or, with pixels in the place of patches (`kfac_fx.sua`), "kron_sua",
                "kron_sua_zero_mean" or "kron_sua_centered".
            sub_sample_inputs, sub_sample_patches: see `kfac_fx.compile`; None: those of the collection.
            patch_mask: [channels in a group, *kernel], what every patch is multiplied with; for weights that are masked
                alike for all outputs.
        """
        self.check_geometry(params, CONVOLUTIONS, inputs, outputs, strides, padding, dilations, data_format)
        sampling = own_sampling(sub_sample_inputs, sub_sample_patches)
        if patch_mask is not None:
            self.check_patch_mask(params, inputs, outputs, approx, patch_mask)
        block = self.register("conv2d", params, inputs, outputs, approx, reuse, layers=("conv2d", "conv_transpose2d"))
        block.sampling = sampling or block.sampling
        block.patch_mask = block.patch_mask if patch_mask is None else patch_mask.detach()
        return block

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
    ) -> FisherBlock:
        """As `register_fully_connected_multi`; the geometry may differ from use to use.
        approx: "kron_indep", or what `register_conv2d` takes besides "kron"."""
        self.check_geometry(params, CONVOLUTIONS, inputs, outputs, strides, padding, dilations, data_format)
        return self.register("conv2d_multi", params, inputs, outputs, approx, reuse, num_uses)

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
        block = self.register("conv2d", params, inputs, outputs, approx, reuse)
        block.sampling = sampling or block.sampling
        return block

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

    def check_patch_mask(self, params: Any, inputs: Nodes, outputs: Nodes, approx: str | None, mask: Tensor) -> None:
        """Raises RegistrationError for a mask that is not one of the patches."""
        names = self.names_of(params)
        (use, *_) = self.find_uses(CONVOLUTIONS, names, inputs, outputs)
        kernel, columns = use.attrs["weight"][2:], use.matrix.shape[2] - ("bias" in use.parameters)
        wanted = [columns // prod(kernel), *kernel]
        if (chosen := self.chosen("conv2d", names, approx)) in UNCORRELATED:
            raise RegistrationError(f"{', '.join(names)}: patch_mask needs patches, and {chosen!r} has pixels")
        if list(mask.shape) != wanted:
            raise RegistrationError(
                f"{', '.join(names)}: patch_mask has shape {list(mask.shape)}, the patches have {wanted}"
            )

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
            said: dict[str, tuple[list[int] | None, list[int]]] = {
                "strides": (spatial(strides, use), per_axis("stride", use.attrs)),
                "dilations": (spatial(dilations, use), per_axis("dilation", use.attrs)),
            }
            for name, (given, found) in said.items():
                if given is not None and given != found:
                    raise RegistrationError(f"{name}={given}, but the graph's {use} has {found}")
            if padding is not None and ends(padding, use) != ends(use.attrs["padding"], use):
                raise RegistrationError(f"padding={padding!r}, but the graph's {use} has {use.attrs['padding']!r}")


def own_sampling(inputs: Share, patches: Share) -> Sampling | None:
    """None if nothing is said. Both False: all rows, whatever the collection's defaults are."""
    if inputs is None and patches is None:
        return None
    return read_sampling(inputs or False, patches or False) or ALL


def spatial(sizes: Sizes, use: Use) -> list[int] | None:
    """One an axis; of TensorFlow's lists with batch and channels, the spatial part."""
    axes = len(use.attrs["weight"]) - 2
    if sizes is None or isinstance(sizes, int):
        return None if sizes is None else [sizes] * axes
    given = list(sizes)
    return given[1:-1] if len(given) == axes + 2 else given * (axes // len(given))


def ends(padding: Any, use: Use) -> list[tuple[int, int]]:
    """At both ends of every axis."""
    return same_or_given({**use.attrs, "padding": padding.lower() if isinstance(padding, str) else padding})
