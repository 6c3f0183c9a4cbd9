"""The work behind the methods of `LayerCollection` that register layers, blocks and losses.

A loss has values on a batch. Towers of one loss have one name. They are summed as the cases of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor, fx

from kfac_fx.compiled.layer_collection.find_use import Collection, listed
from kfac_fx.compiled.layer_collection.fisher_blocks import EMBEDDINGS, KINDS, FisherBlock, block_class
from kfac_fx.compiled.layer_collection.names import AUTO_REUSE, VARIABLE_SCOPE, Reuse, resolved
from kfac_fx.linalg.arguments import optional, whole_number
from kfac_fx.losses.declared import RegisteredLoss, evaluated, likelihood
from kfac_fx.losses.distributions import LossFunction, Normal, check_variance
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.errors import LossError, RegistrationError, ReuseError
from kfac_fx.passes.graphs.labels import in_example
from kfac_fx.passes.ir import GENERIC, LossSite, Sampling, Use
from kfac_fx.passes.layers.conv import disagreement
from kfac_fx.passes.torch_losses import BY_NAME
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.moments import Key
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.taps import ALL_ROWS, read_sampling


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


# --- losses -----------------------------------------------------------------------------------------------------------


Node = fx.Node | str
Targets = Tensor | Node | None


def register_loss_function(
    self: Collection,
    loss: Callable[..., LossFunction],
    inputs: Node | Sequence[Node],
    base_name: str,
    name: str | None = None,
    coeff: float = 1.0,
    seed: int | None = None,
    targets: Targets = None,
    reuse: Reuse = VARIABLE_SCOPE,
) -> RegisteredLoss:
    """Register any loss.

    Args:
        loss: a class of `kfac_fx.losses`, or a function from the values of `inputs` to one.
        inputs: the nodes that the loss is a function of. Their first dimension counts cases.
        base_name: the name if there is no `name`, with a number if it is taken.
        name: the name of the loss, under which it gets more towers.
        coeff: multiplies the loss and its Fisher.
        seed: of sampled targets; None: torch's own generator.
        targets: a tensor, or a node if the model has them as an input; None if nothing needs them.
        reuse: True adds a tower to the loss of this name, False registers a new loss, AUTO_REUSE either.

    Raises ReuseError if `reuse` is True and there is no loss of this name, or False and there is one; RegistrationError
    if it is True without a name or with a seed, and if the coefficient is not positive or not that of the first tower.
    """
    reuse, by_name = resolved(reuse), self.registered_losses.by_name
    if reuse is True and name is None:
        raise RegistrationError("reuse=True adds a tower to a loss: say to which one with name=")
    if reuse is True and seed is not None:
        raise RegistrationError("reuse=True: a tower has the seed of its loss, give none")
    if not coeff > 0:
        raise RegistrationError(f"coeff={coeff} must be positive")
    name = name or unique(base_name, by_name)
    if reuse is True and name not in by_name:
        raise ReuseError(f"reuse=True, but no loss {name!r} was registered")
    if reuse is False and name in by_name:
        raise ReuseError(f"a loss {name!r} is registered already; reuse=True adds a tower")
    if (reuse is True or reuse == AUTO_REUSE) and name in by_name:
        first = by_name[name][0]
        if coeff != first.coeff:
            raise RegistrationError(f"loss {name!r} has coeff={first.coeff}, its new tower {coeff}")
        seed = first.seed
    nodes = tuple(self.node(node) for node in listed(inputs))
    kind = loss.__name__ if isinstance(loss, type) else base_name
    target = targets if targets is None or isinstance(targets, Tensor) else self.node(targets)
    return self.file_loss(RegisteredLoss(name, kind, nodes, loss, target, float(coeff), seed))


def register_distribution(
    collection: Collection,
    *,
    distribution: type[LossFunction],
    base_name: str,
    name: str | None,
    coeff: float,
    seed: int | None,
    targets: Targets,
    reuse: Reuse,
    var: float = 0.5,
    logits: Node = "",
    mean: Node = "",
    prediction: Node = "",
) -> RegisteredLoss:
    """The one node has the name of the parameter that it is of the distribution."""
    check_variance(var)
    loss = (lambda mean: Normal(mean, var)) if distribution is Normal else distribution
    node = next((node for node in (logits, mean) if node != ""), prediction)
    return register_loss_function(collection, loss, node, base_name, name, coeff, seed, targets, reuse)


def unique(base: str, taken: dict[str, Any]) -> str:
    names = (base, *(f"{base}_{number}" for number in range(1, len(taken) + 1)))
    return next(name for name in names if name not in taken)


def loss_of_site(site: LossSite) -> RegisteredLoss:
    """A loss that forward computes; a mean over elements shows in the coefficient, where the graph knows the sizes."""
    value = site.inputs.meta.get("val")
    of_torch = BY_NAME[site.loss]
    mean = of_torch.averages_elements and site.reduction == "mean" and value is not None
    coefficient = 1.0 / prod(in_example(size) for size in value.shape[1:]) if mean and value is not None else 1.0

    def make(inputs: Tensor) -> LossFunction:
        return likelihood(of_torch, site.reduction, inputs)[1]

    return RegisteredLoss(site.node.name, of_torch.distribution, (site.inputs,), make, site.targets, coefficient, None)


# --- losses on a batch ------------------------------------------------------------------------------------------------


def eval_losses(
    self: Collection,
    *inputs: Any,
    targets: Any = None,
    target_mode: str = "data",
    coeff_mode: str = "regular",
    **kwargs: Any,
) -> list[Tensor]:
    """The value of every tower of every loss, a 0-d tensor summed over its cases. Parameters get gradients from it.

    Args:
        inputs, kwargs: the arguments of forward; none: the captured example.
        targets: a tuple with one entry per tower; None: those registered.
        target_mode: "data" or "sample", which draws targets from the predictive distributions.
        coeff_mode: "regular" multiplies by the coefficients, "sqrt" by their roots, "off" by 1.

    Raises LossError without losses or without inputs, TargetsMissing, ValueError for another mode.
    """
    self.create_subgraph()
    captured = self.captured
    args = captured.args if not inputs and not kwargs else inputs
    if args is None and not captured.kwargs:
        raise LossError("the model was captured without an example, so that a batch must be given: lc.total_loss(x)")
    emitted = EmittedGraph(captured.capture, self.bare_program, captured.model)
    recorder = Recorder(emitted, self.registered_losses)
    values = captured.capture.flatten(args or (), kwargs or captured.kwargs)
    _, fisher = recorder.outputs(recorder.live_parameters(), values)
    if target_mode == "data" and targets is None:
        targets = recorder.losses.targets_in_graph(values)
    return evaluated(self.registered_losses.on(fisher, targets), target_mode, coeff_mode)


def eval_losses_on_samples(self: Collection, *inputs: Any, coeff_mode: str = "regular", **kwargs: Any) -> list[Tensor]:
    """As `eval_losses`, with targets drawn from the predictive distributions."""
    return eval_losses(self, *inputs, target_mode="sample", coeff_mode=coeff_mode, **kwargs)


def total_loss(
    self: Collection, *inputs: Any, targets: Any = None, coeff_mode: str = "regular", **kwargs: Any
) -> Tensor:
    """The sum of `eval_losses`, a 0-d tensor."""
    values = eval_losses(self, *inputs, targets=targets, coeff_mode=coeff_mode, **kwargs)
    return sum(values[1:], values[0])


def total_sampled_loss(self: Collection, *inputs: Any, coeff_mode: str = "regular", **kwargs: Any) -> Tensor:
    """The sum of `eval_losses_on_samples`, a 0-d tensor."""
    values = eval_losses_on_samples(self, *inputs, coeff_mode=coeff_mode, **kwargs)
    return sum(values[1:], values[0])
