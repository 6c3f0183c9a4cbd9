"""The work behind the methods of `LayerCollection` that register layers and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from kfac_fx.layer_collection.blocks import FisherBlock
from kfac_fx.layer_collection.find_use import Collection
from kfac_fx.layer_collection.fisher_blocks import EMBEDDINGS, KINDS, block_class
from kfac_fx.layer_collection.names import VARIABLE_SCOPE, Reuse, resolved
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.errors import RegistrationError, ReuseError
from kfac_fx.passes.ir import GENERIC, Sampling, Use
from kfac_fx.passes.layers.conv import disagreement
from kfac_fx.statistics.moments import Key
from kfac_fx.taps.subsample import ALL_ROWS, read_sampling
from kfac_fx.values import optional, whole_number


def register_layer(
    collection: Collection,
    *,
    reuse: Reuse,
    sub_sample_inputs: bool | float | None = None,
    sub_sample_patches: bool | float | None = None,
    patch_mask: Tensor | None = None,
    **arguments: Any,
) -> FisherBlock:
    """Find the uses, then file them: a new block, or a tower of an old one. On an error nothing has changed."""
    sampling: Sampling | None = None  # that of the collection, or of the old block
    if sub_sample_inputs is not None or sub_sample_patches is not None:
        sampling = read_sampling(sub_sample_inputs or False, sub_sample_patches or False) or ALL_ROWS
    block = layer_block(collection, patch_mask=patch_mask, **arguments)
    block.sampling = sampling or block.sampling
    if resolved(reuse) and block.params in collection.fisher_blocks:
        collection.fisher_blocks[block.params].check_rows(sampling, patch_mask)
    return file(collection, block, reuse)


def layer_block(
    collection: Collection,
    *,
    kind: str,
    params: Any,
    inputs: Any,
    outputs: Any,
    approx: str | None = None,
    layers: Sequence[str] = (),
    num_uses: int | None = None,
    dense_inputs: bool = True,
    data_format: str | None = None,
    patch_mask: Tensor | None = None,
    **geometry: Any,
) -> FisherBlock:
    """A new block with one tower, not yet filed. geometry: strides, padding and dilations under any of their names."""
    names, several = collection.names_of(params), isinstance(outputs, (list, tuple))
    if KINDS[kind].multi:
        check_num_uses(names, num_uses, len(outputs) if several else None)
    elif several:
        raise RegistrationError(f"{', '.join(names)}: several outputs; register them with the _multi function")
    if data_format is not None and not data_format.upper().startswith("NC"):
        raise RegistrationError(
            f"data_format={data_format!r}: the channels of PyTorch's convolutions come second, as in 'NCHW'"
        )
    collection.check_cuts(names)
    uses = collection.find_uses((layers or KINDS[kind].layers) if dense_inputs else EMBEDDINGS, names, inputs, outputs)
    if geometry:
        check_geometry(uses, **geometry)
    approximation = collection.chosen(kind, names, approx)
    layer = next((use.layer for use in uses if use.layer in KINDS[kind].layers), uses[0].layer)
    block_type = block_class(layer, approximation, KINDS[kind].multi)
    block = block_type(collection, names, approximation, num_uses=None if several else num_uses)
    if patch_mask is not None:
        check_patch_mask(names, approximation, uses, patch_mask)
        block.patch_mask = patch_mask.detach()
    block.add_tower(uses)
    return block


def register_separable(
    collection: Collection,
    *,
    kind: str,
    layers: Sequence[str],
    depthwise_params: Any,
    pointwise_params: Any,
    inputs: Any,
    depthwise_outputs: Any,
    pointwise_outputs: Any,
    approx: str | None,
    reuse: Reuse,
    **geometry: Any,
) -> tuple[FisherBlock, FisherBlock]:
    """Both blocks are made before one is filed, so that an error leaves nothing half registered."""
    first = {"params": depthwise_params, "inputs": inputs, "outputs": depthwise_outputs}
    second = {"params": pointwise_params, "inputs": depthwise_outputs, "outputs": pointwise_outputs}
    depthwise = layer_block(collection, kind="depthwise_conv2d", **first, **geometry)
    pointwise = layer_block(collection, kind=kind, layers=layers, approx=approx, **second)
    return file(collection, depthwise, reuse), file(collection, pointwise, reuse)


def register_generic(
    collection: Collection,
    *,
    kind: str,
    layers: Sequence[str],
    params: Any,
    batch_size: int | None,
    approx: str | None,
    reuse: Reuse,
) -> FisherBlock:
    optional(whole_number(1, "cases"), "batch_size", batch_size)
    names = collection.names_of(params)
    approximation = collection.chosen(kind, names, approx)
    block = block_class(GENERIC, approximation, False)(collection, names, approximation)
    block.register_additional_tower()
    return file(collection, block, reuse)


def file(collection: Collection, block: FisherBlock, reuse: Reuse) -> FisherBlock:
    """As `register_block`. A block that is there already gets the towers of the new one."""
    filed = register_block(collection, block.params, block, reuse)
    if filed is not block:
        for tower in block.towers:
            filed.add_tower(tower)
    return filed


def register_block(
    self: Collection, layer_key: Any, fisher_block: FisherBlock, reuse: Reuse = VARIABLE_SCOPE
) -> FisherBlock:
    """File a block under its parameters; returns the one that is there if `reuse` allows it.

    Raises ReuseError, a ValueError and a KeyError, if there is one and `reuse` is False, or none and it is True;
    RegistrationError for a block of another type or approximation, and for parameters in another block.
    """
    self.check_open()
    if not isinstance(fisher_block, FisherBlock):
        raise RegistrationError(
            f"register_block takes a block of kfac_fx.fisher_blocks, not a {type(fisher_block).__name__}"
        )
    blocks, names, reuse = self.fisher_blocks, self.names_of(layer_key), resolved(reuse)
    text = f"({', '.join(names)})"
    if names in blocks:
        if reuse is False:
            raise ReuseError(f"FisherBlock for {text} is already in LayerCollection; reuse=True adds a tower")
        filed: FisherBlock = blocks[names]
        if filed.terms != (new := fisher_block.terms):
            raise RegistrationError(
                f"Attempted to register FisherBlock of type {new} for {text}, which has {filed.terms}"
            )
        return filed
    if reuse is True:
        raise ReuseError(f"reuse=True, but no FisherBlock for {text} was registered")
    if taken := blocks.overlapping(names):
        shared = [(name, key) for key in taken for name in blocks.shared(names, key)]
        rows = "; ".join(f"variable {name} was already registered in key {key}" for name, key in shared)
        raise RegistrationError(f"FisherBlock for {text}: {rows}")
    self.check_cuts(names)
    blocks[names] = fisher_block
    return fisher_block


# --- checks ---------------------------------------------------------------------------------------------------------


def check_num_uses(names: Key, num_uses: int | None, uses: int | None) -> None:
    """uses: the length of the lists, None for a single node."""
    if uses is None and num_uses is None:
        raise RegistrationError(
            f"{', '.join(names)}: You must supply a value for num_uses with inputs and outputs that are single nodes"
        )
    if num_uses is not None and num_uses < 1:
        raise RegistrationError(f"{', '.join(names)}: num_uses={num_uses} must be at least 1")
    if uses is not None and num_uses not in (None, uses):
        raise RegistrationError(f"{', '.join(names)}: num_uses={num_uses}, but the lists hold {uses} uses")


def check_geometry(
    uses: Sequence[Use], strides: Any, padding: Any, dilations: Any = None, rate: Any = None, dilation_rate: Any = None
) -> None:
    """Raises RegistrationError if an argument contradicts the graph."""
    asked = next((sizes for sizes in (dilations, rate, dilation_rate) if sizes is not None), None)
    for use in uses:
        if contradiction := disagreement(use.attrs, strides, padding, asked):
            raise RegistrationError(f"{contradiction[0]}, but the graph's {use} has {contradiction[1]}")


def check_patch_mask(names: Key, approximation: str, uses: Sequence[Use], mask: Tensor) -> None:
    """Raises RegistrationError for a mask that is not one of the patches of every use."""
    if APPROXIMATIONS[approximation].needs_pixels:
        raise RegistrationError(f"{', '.join(names)}: patch_mask needs patches, and {approximation!r} has pixels")
    for use in uses:
        kernel, columns = use.attrs["weight"][2:], use.matrix.shape[2] - ("bias" in use.parameters)
        wanted = [columns // prod(kernel), *kernel]
        if list(mask.shape) != wanted:
            raise RegistrationError(
                f"{', '.join(names)}: patch_mask has shape {list(mask.shape)}, the patches have {wanted}"
            )
