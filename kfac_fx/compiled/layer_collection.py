"""`LayerCollection`: the Fisher blocks and losses of a model, registered by hand or by a scan of its captured graph.

Its methods have the names of TF K-FAC (docs/specification.md). Those that register one layer or one loss are declared
in `register_methods`; their work is here. A block is filed under its parameters and holds their uses, by tower: a tower
is one more mini-batch. Towers of one loss have one name and are summed as the cases of one batch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor, fx

from kfac_fx.compiled.fisher_blocks import (
    EMBEDDINGS,
    INDEP,
    KINDS,
    FisherBlock,
    FisherFactor,
    block_class,
    check_approximation,
    factor_keys,
    kind_named,
)
from kfac_fx.compiled.names import (
    CapturedModel,
    Finder,
    LayerParametersDict,
    Nodes,
    ParameterNames,
    listed,
    on_another_capture,
)
from kfac_fx.compiled.register_methods import (
    AUTO_REUSE,
    VARIABLE_SCOPE,
    Node,
    RegisterMethods,
    Reuse,
    Targets,
    resolved,
)
from kfac_fx.linalg.arguments import choice, optional, whole_number
from kfac_fx.losses.declared import LossSpec, RegisteredLoss, RegisteredLosses, evaluated, likelihood
from kfac_fx.losses.distributions import LossFunction, Normal, check_variance
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.cases import size_of_cases, with_batch_dim
from kfac_fx.passes.check import check_registration, uses_in_graph
from kfac_fx.passes.errors import ApproximationError, LinkError, LossError, RegistrationError, ReuseError, where
from kfac_fx.passes.graphs.labels import (
    ancestors,
    entries,
    everything_behind,
    in_example,
    symbolic_sizes,
)
from kfac_fx.passes.ir import GENERIC, LossSite, Program, Registration, Sampling, Use
from kfac_fx.passes.layers.conv import disagreement
from kfac_fx.passes.padding import padding
from kfac_fx.passes.parametrization import Piece
from kfac_fx.passes.pipeline import after_registrations, run, verify
from kfac_fx.passes.resolve import cut_sides
from kfac_fx.passes.torch_losses import BY_NAME
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.masks import checked_mask
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics import Key
from kfac_fx.recording.taps import ALL_ROWS, read_sampling


class LayerCollection(RegisterMethods):
    """The Fisher blocks and losses that are registered for one captured model.

    lc = kfac_fx.LayerCollection(kfac_fx.capture(model, (x,)))
    lc.register_fully_connected(("fc1.weight", "fc1.bias"), lc.inputs_of("fc1"), lc.outputs_of("fc1"))
    lc.register_categorical_predictive_distribution(lc.outputs_of("fc2"))
    lc.auto_register_layers()  # the rest
    est = kfac_fx.FisherEstimator(lc, damping=1e-3)

    A collection serves one estimator, which makes it final. Nodes are given as nodes or by name. Parameters are given
    by name or as the objects, and so are pieces of them: `"w[0:64]"`, `"table[:, 2:5]"`, `model.w[0:64]`.

    Attributes:
        model, parameters, layers: the model, its trainable parameters by name, the layer declarations by name.
        fisher_blocks, fisher_factors: blocks by their parameters, in the order of registration; factors asked for.
        padding_mask: the node of the padding mask; None: no padding.
        estimator: the estimator that was built on the collection; None: none yet.
        finalized: whether registrations are refused.
    """

    def __init__(self, graph: CapturedModel | None = None, name: str = "LayerCollection") -> None:
        """graph: of `kfac_fx.capture`; name: for printing. Raises RegistrationError for what is no captured model."""
        if not isinstance(graph, CapturedModel):
            got = "none" if graph is None else f"a {type(graph).__name__}"
            raise RegistrationError(
                f"a LayerCollection is built on a captured model and got {got}: "
                "LayerCollection(kfac_fx.capture(model, example_inputs))"
            )
        self.captured, self.name, self.model = graph, name, graph.model
        self.layers, self.parameters = graph.program.layers, graph.program.parameters
        self.finder = Finder(graph)
        self._names = ParameterNames(graph.program)
        self.pieces = self._names.pieces
        self.fisher_blocks: LayerParametersDict[FisherBlock] = LayerParametersDict(self._names, self.pieces)
        self.fisher_factors: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._linked: dict[frozenset[str], str | None] = {}
        self._losses: tuple[RegisteredLoss, ...] = ()
        self.sampling: Sampling | None = None
        self.padding_mask: fx.Node | None = None
        self.estimator: Any = None
        self.finalized = False
        self._defaults = {name: kind.default for name, kind in KINDS.items()}

    def __repr__(self) -> str:
        return f"{self.name}({len(self.fisher_blocks)} blocks)"

    @classmethod
    def of(cls, captured: CapturedModel, program: Program, loss: LossSpec | None) -> LayerCollection:
        """The registrations of a compiled module, final. A loss that is a function of all outputs is not shown."""
        bare = program.but(registrations=(), matches=(), outputs=(), losses=())
        collection = cls(replace(captured, program=bare))
        if loss is None:
            collection._losses = tuple(loss_of_site(site) for site in program.losses)
        elif loss.named and len(program.outputs) == 1:
            collection._losses = (RegisteredLoss("loss", loss.name, program.outputs, loss.make, None, 1.0, None),)
        for registration in program.registrations:
            block = block_of(collection, registration, [registration.uses])
            collection.fisher_blocks[registration.parameters] = block
        collection.finalized = True
        return collection

    # --- names ------------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> fx.Graph:
        """The normalized graph whose nodes are registered."""
        return self.captured.graph

    def node(self, name: str | fx.Node) -> fx.Node:
        """The node of this name. Raises RegistrationError if there is none, or for a node of another graph."""
        return self.captured.node(name)

    def inputs_of(self, module: str) -> fx.Node | list[fx.Node]:
        """The node that a submodule reads, or one per call. Raises RegistrationError if a call reads several."""
        return self.captured.inputs_of(module)

    def outputs_of(self, module: str) -> fx.Node | list[fx.Node]:
        """The node that a submodule computes, or one per call. Raises RegistrationError if a call computes several."""
        return self.captured.outputs_of(module)

    def name_of(self, parameter: Any) -> str:
        """The name of a parameter or a piece. Raises RegistrationError for others than the model's trainable ones."""
        return self._names(parameter)

    def names_of(self, params: Any) -> Key:
        """The names of a parameter or of several. Raises RegistrationError for others than the model's."""
        return self.fisher_blocks.names(params)

    @property
    def registered_variables(self) -> Key:
        """The names of all registered parameters, in the order of registration."""
        return tuple(name for key in self.fisher_blocks for name in key)

    def asked_pieces(self, *more: str) -> tuple[Piece, ...]:
        """The pieces that something is registered or linked for, and those among `more` names."""
        names = (*self.registered_variables, *(name for group in self.linked_parameters for name in group), *more)
        return tuple(dict.fromkeys(self.pieces[name] for name in names if name in self.pieces))

    def check_cuts(self, names: Iterable[str]) -> None:
        """Raises RegistrationError for pieces that the graph's uses do not let a parameter be cut into."""
        if any(name in self.pieces for name in names):
            self.finder.check_cuts(self.asked_pieces(*names), self.scope(*names), self.scope())

    # --- approximations ---------------------------------------------------------------------------------------------

    @property
    def linked_parameters(self) -> dict[frozenset[str], str | None]:
        """The approximation of every linked group; None for the default."""
        return dict(self._linked)

    def define_linked_parameters(self, params: Any, approximation: str | None = None) -> None:
        """Keep parameters together in one block.

        approximation: that of the block, unless its registration asks for another; None: the default.

        Raises LinkError if some are registered in a block of other parameters, or are linked already;
        ApproximationError for a name that no layer has.
        """
        names = frozenset(self.names_of(params))
        check_approximation(approximation)
        self.check_cuts(names)
        text = ", ".join(sorted(names))
        if taken := self.fisher_blocks.overlapping(names):
            raise LinkError(f"({text}) cannot be linked: registered already in {', '.join(map(str, taken))}")
        if groups := [group for group in self.linked_parameters if self.fisher_blocks.shared(group, names)]:
            others = " and ".join(f"({', '.join(sorted(group))})" for group in groups)
            raise LinkError(f"({text}) cannot be linked: already part of the linked group {others}")
        self._linked[names] = approximation

    def default_approximation(self, kind: str) -> str:
        """The default of a kind of layer, such as "conv2d". Raises ApproximationError for an unknown kind."""
        kind_named(kind)
        return self._defaults[kind]

    def set_default_approximation(self, kind: str, value: str) -> None:
        """Raises ApproximationError if the kind of layer does not have this approximation, or is unknown."""
        known = kind_named(kind).approximations
        self._defaults[kind] = choice(f"{kind}: approximation", value, known, ApproximationError)

    def set_default_sub_sampling(self, inputs: bool | float = False, patches: bool | float = False) -> None:
        """Compute the input factors that are registered from now on from a share of the rows.

        inputs, patches: `sub_sample_inputs` and `sub_sample_patches` of `kfac_fx.compile`.
        """
        self.sampling = read_sampling(inputs, patches)

    def chosen(self, kind: str, names: Key, approx: str | None) -> str:
        """Our name of `approx`, else of the approximation of these linked parameters, else of the kind's default."""
        asked = approx or self.linked_parameters.get(frozenset(names)) or self._defaults[kind]
        known = KINDS[kind].approximations
        return known[choice(f"{', '.join(names)}: approximation", asked, known, ApproximationError)]

    # --- blocks -----------------------------------------------------------------------------------------------------

    def find_uses(self, layers: Iterable[str], params: Key, inputs: Nodes, outputs: Nodes) -> tuple[Use, ...]:
        """See `Finder.find`."""
        return self.finder.find(tuple(layers), params, inputs, outputs, self.scope(*params))

    def register_block(self, layer_key: Any, fisher_block: FisherBlock, reuse: Reuse = VARIABLE_SCOPE) -> FisherBlock:
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

    def _register_layer(
        self,
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
        block = self._layer_block(patch_mask=patch_mask, **arguments)
        block.sampling = sampling or block.sampling
        if resolved(reuse) and block.params in self.fisher_blocks:
            self.fisher_blocks[block.params].check_rows(sampling, patch_mask)
        return self._file(block, reuse)

    def _layer_block(
        self,
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
        """A new block with one tower, not yet filed.

        geometry: strides, padding and dilations under any of their names.
        """
        names, several = self.names_of(params), isinstance(outputs, (list, tuple))
        if KINDS[kind].multi:
            check_num_uses(names, num_uses, len(outputs) if several else None)
        elif several:
            raise RegistrationError(f"{', '.join(names)}: several outputs; register them with the _multi function")
        if data_format is not None and not data_format.upper().startswith("NC"):
            raise RegistrationError(
                f"data_format={data_format!r}: the channels of PyTorch's convolutions come second, as in 'NCHW'"
            )
        self.check_cuts(names)
        uses = self.find_uses((layers or KINDS[kind].layers) if dense_inputs else EMBEDDINGS, names, inputs, outputs)
        if geometry:
            check_geometry(uses, **geometry)
        approximation = self.chosen(kind, names, approx)
        layer = next((use.layer for use in uses if use.layer in KINDS[kind].layers), uses[0].layer)
        block_type = block_class(layer, approximation, KINDS[kind].multi)
        block = block_type(self, names, approximation, num_uses=None if several else num_uses)
        if patch_mask is not None:
            check_patch_mask(names, approximation, uses, patch_mask)
            block.patch_mask = patch_mask.detach()
        block.add_tower(uses)
        return block

    def _register_separable(
        self,
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
        depthwise = self._layer_block(kind="depthwise_conv2d", **first, **geometry)
        pointwise = self._layer_block(kind=kind, layers=layers, approx=approx, **second)
        return self._file(depthwise, reuse), self._file(pointwise, reuse)

    def _register_generic(
        self,
        *,
        kind: str,
        layers: Sequence[str],
        params: Any,
        batch_size: int | None,
        approx: str | None,
        reuse: Reuse,
    ) -> FisherBlock:
        optional(whole_number(1, "cases"), "batch_size", batch_size)
        names = self.names_of(params)
        approximation = self.chosen(kind, names, approx)
        block = block_class(GENERIC, approximation, False)(self, names, approximation)
        block.register_additional_tower()
        return self._file(block, reuse)

    def _file(self, block: FisherBlock, reuse: Reuse) -> FisherBlock:
        """As `register_block`. A block that is there already gets the towers of the new one."""
        filed = self.register_block(block.params, block, reuse)
        if filed is not block:
            for tower in block.towers:
                filed.add_tower(tower)
        return filed

    def auto_register_layers(
        self, var_list: Iterable[Any] | None = None, batch_size: int | None = None
    ) -> dict[Key, FisherBlock]:
        """Register the remaining parameters: as layers of the graph behind the losses, else as generic.

        Args:
            var_list: the parameters to register; None: all trainable ones that the losses depend on.
            batch_size: the number of cases, which tells uses that are folded into the batch, as num_uses * batch_size
                rows; None: every row that the loss does not count is a weight-sharing position. The Fisher is the same.

        Returns the new blocks. Raises LossError without losses, RegistrationError for losses of different numbers of
        towers and for a size that is no multiple of batch_size, LinkError for linked parameters that no layer has.
        """
        self.check_open()
        optional(whole_number(1, "cases"), "batch_size", batch_size)
        self.create_subgraph()
        wanted = self.parameters if var_list is None else self.names_of(list(var_list))
        blocks = Scan(self, list(wanted), batch_size).blocks()
        for names, block in blocks.items():
            self.register_block(names, block, reuse=False)
        return blocks

    def get_blocks(self) -> Iterable[FisherBlock]:
        """All blocks, in the order of registration."""
        return self.fisher_blocks.values()

    def make_or_get_factor(self, cls: type[Any], args: tuple[Any, ...]) -> Any:
        """`cls(*args)`, made once for equal arguments. Raises TypeError if they cannot be hashed."""
        key = (cls, args)
        if key not in self.fisher_factors:
            self.fisher_factors[key] = cls(*args)
        return self.fisher_factors[key]

    def get_factors(self) -> list[Any]:
        """All factors, in the order of the blocks. A factor that several blocks have in common is listed once."""
        for block in self.fisher_blocks.values():
            for key in factor_keys(block.registration):
                factor: FisherFactor = self.make_or_get_factor(FisherFactor, key)
                if block not in factor.blocks:
                    factor.blocks.append(block)
        return list(self.fisher_factors.values())

    # --- losses -----------------------------------------------------------------------------------------------------

    def register_loss_function(
        self,
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

        Raises ReuseError if `reuse` is True and there is no loss of this name, or False and there is one;
        RegistrationError if it is True without a name or with a seed, and if the coefficient is not positive or not
        that of the first tower.
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

    def _register_distribution(
        self,
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
        return self.register_loss_function(loss, node, base_name, name, coeff, seed, targets, reuse)

    def eval_losses(
        self,
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
            raise LossError(
                "the model was captured without an example, so that a batch must be given: lc.total_loss(x)"
            )
        emitted = EmittedGraph(captured.capture, self.bare_program, captured.model)
        recorder = Recorder(emitted, self.registered_losses)
        values = captured.capture.flatten(args or (), kwargs or captured.kwargs)
        _, fisher = recorder.outputs(recorder.live_parameters(), values)
        if target_mode == "data" and targets is None:
            targets = recorder.losses.targets_in_graph(values, fisher)
        return evaluated(self.registered_losses.on(fisher, targets), target_mode, coeff_mode)

    def eval_losses_on_samples(self, *inputs: Any, coeff_mode: str = "regular", **kwargs: Any) -> list[Tensor]:
        """As `eval_losses`, with targets drawn from the predictive distributions."""
        return self.eval_losses(*inputs, target_mode="sample", coeff_mode=coeff_mode, **kwargs)

    def total_loss(self, *inputs: Any, targets: Any = None, coeff_mode: str = "regular", **kwargs: Any) -> Tensor:
        """The sum of `eval_losses`, a 0-d tensor."""
        values = self.eval_losses(*inputs, targets=targets, coeff_mode=coeff_mode, **kwargs)
        return sum(values[1:], values[0])

    def total_sampled_loss(self, *inputs: Any, coeff_mode: str = "regular", **kwargs: Any) -> Tensor:
        """The sum of `eval_losses_on_samples`, a 0-d tensor."""
        values = self.eval_losses_on_samples(*inputs, coeff_mode=coeff_mode, **kwargs)
        return sum(values[1:], values[0])

    def file_loss(self, loss: RegisteredLoss) -> RegisteredLoss:
        """Add a loss. Raises RegistrationError if the collection is final."""
        self.check_open()
        self._losses = (*self._losses, loss)
        return loss

    @property
    def losses(self) -> tuple[RegisteredLoss, ...]:
        """All towers of all losses. The loss to be minimized is their sum."""
        return self._losses

    @property
    def registered_losses(self) -> RegisteredLosses:
        """The same as one object."""
        return RegisteredLosses(self.losses)

    @property
    def towers_by_loss(self) -> tuple[tuple[RegisteredLoss, ...], ...]:
        """For every loss its towers. Towers of one loss are summed as the cases of one batch."""
        return tuple(self.registered_losses.by_name.values())

    @property
    def loss_coeffs(self) -> dict[RegisteredLoss, float]:
        """The coefficient of every tower."""
        return {loss: loss.coeff for loss in self.losses}

    @property
    def loss_colocation_ops(self) -> dict[RegisteredLoss, tuple[fx.Node, ...]]:
        """The nodes that every tower is a function of."""
        return {loss: loss.inputs for loss in self.losses}

    def create_subgraph(self) -> frozenset[fx.Node]:
        """The nodes behind the inputs of the losses. Raises LossError if there are none."""
        if not self.losses:
            raise LossError("Must have at least one registered loss: the Fisher is that of an output distribution")
        return frozenset(ancestors(self.registered_losses.nodes))

    @property
    def subgraph(self) -> frozenset[fx.Node]:
        """`create_subgraph()`."""
        return self.create_subgraph()

    def define_padding_mask(self, mask: fx.Node | str) -> None:
        """Exclude padded positions from every factor and from the number of cases.

        mask: a node [cases, positions], nonzero where a position is real, computed from inputs alone.

        Raises RegistrationError for another node.
        """
        self.check_open()
        node = checked_mask(self.node(mask))
        if any(operand.op == "get_attr" for operand in everything_behind([node])):
            raise RegistrationError(f"the padding mask at {where(node)} must be computed from inputs alone")
        self.padding_mask = node

    # --- programs ---------------------------------------------------------------------------------------------------

    @property
    def bare_program(self) -> Program:
        """The graph with the outputs of the losses, and no registrations."""
        outputs = self.registered_losses.nodes
        return self.captured.program.but(outputs=outputs, cases=size_of_cases(self.captured.program, outputs)[0])

    def scope(self, *names: str) -> Program:
        """The graph behind the losses, or behind all outputs without losses, with all pieces that are asked for."""
        options = replace(self.captured.program.options, pieces=self.asked_pieces(*names))
        return (self.bare_program if self.losses else self.finder.program).but(options=options)

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """The registrations, in the order of the blocks."""
        return tuple(block.registration for block in self.fisher_blocks.values())

    @property
    def program(self) -> Program:
        """The graph with all registrations, for the rest of the library."""
        bare, asked = self.bare_program, self.asked_pieces()
        if asked:
            bare = self.finder.in_pieces(bare, self.scope(), {piece.parameter for piece in asked})
        used, taken = uses_in_graph(entries(bare)), set(self.registered_variables)
        unused = tuple(name for name in bare.shapes if name not in taken and name not in used)
        whole = bare.but(registrations=self.registrations, unused=unused, mask=self.padding_mask)
        return verify(padding(whole), after="LayerCollection")

    def on(self, traced: Program) -> Program:
        """The same registrations on another capture of the model. Raises ModelChangedError if it is another graph."""
        same = traced is self.captured.capture.program
        return self.program if same else on_another_capture(self.program, traced, self.model)

    # --- checks -----------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises RegistrationError if the collection serves an estimator already."""
        if self.finalized:
            raise RegistrationError("this LayerCollection serves an estimator already; nothing more can be registered")

    def check_final(self, variables: Iterable[Any] | None = None) -> None:
        """Raises RegistrationError if the collection serves an estimator already, and as `check_registration` does."""
        if self.finalized:
            raise RegistrationError("this LayerCollection serves another estimator already; make one for each")
        self.check_registration(variables)

    def check_registration(self, variables: Iterable[Any] | None = None) -> None:
        """Check that every use of every parameter, in the graph behind the losses, is registered once.

        variables: the parameters that must be registered, and no others; None: all that the losses depend on.

        Raises RegistrationError with all culprits, LossError without losses.
        """
        subgraph = self.create_subgraph()
        names = None if variables is None else [n if isinstance(n, str) else self.name_of(n) for n in variables]
        errors = list(misplaced(self, subgraph))
        try:
            check_registration(self.program, names)
        except RegistrationError as error:
            errors.insert(0, str(error))
        if errors:
            raise RegistrationError("\n".join(errors))

    # --- the default collection -------------------------------------------------------------------------------------

    @contextmanager
    def as_default(self) -> Iterator[LayerCollection]:
        """Inside, `get_default_layer_collection()` is this one."""
        set_default_layer_collection(self)
        try:
            yield self
        finally:
            set_default_layer_collection(None)


_default: LayerCollection | None = None


def get_default_layer_collection() -> LayerCollection:
    """The default collection. Raises RegistrationError if none was set."""
    if _default is None:
        raise RegistrationError("there is no default LayerCollection; call set_default_layer_collection(lc) first")
    return _default


def set_default_layer_collection(layer_collection: LayerCollection | None) -> None:
    """None clears it. Raises RegistrationError if there is one already."""
    global _default
    if layer_collection is not None and _default is not None:
        raise RegistrationError("there is a default LayerCollection already; clear it with None first")
    _default = layer_collection


# --- the scan ---------------------------------------------------------------------------------------------------------


class Scan:
    """One scan of a collection's graph for blocks of the parameters that are not registered yet.

    Attributes:
        wanted: the names of parameters and pieces that are to be registered.
        owners: the parameters that these names belong to.
        taken: the names that are registered already.
        behind: for every tower of the losses the nodes behind it. Losses were registered in the order of towers.
    """

    def __init__(self, collection: LayerCollection, wanted: Sequence[str], batch_size: int | None) -> None:
        self.collection, self.batch_size = collection, batch_size
        self.taken, self.owner = collection.registered_variables, collection.fisher_blocks.owner
        self.wanted = frozenset(
            name for name in wanted if name not in self.taken and self.owner(name) not in self.taken
        )
        self.owners = {self.owner(name) for name in self.wanted}
        by_loss = collection.towers_by_loss
        if len({len(towers) for towers in by_loss}) > 1:
            rows = ", ".join(f"{towers[0].name}: {len(towers)}" for towers in by_loss)
            raise RegistrationError(f"every loss must be registered for the same number of towers, not {rows}")
        self.behind = [
            ancestors([node for loss in tower for node in loss.inputs]) for tower in zip(*by_loss, strict=True)
        ]

    def open(self, name: str) -> bool:
        """Whether a parameter or a piece is to be registered."""
        return bool({name, self.owner(name)} & self.wanted) and not self.collection.fisher_blocks.shared(
            self.taken, [name]
        )

    def blocks(self) -> dict[Key, FisherBlock]:
        """See `LayerCollection.auto_register_layers`."""
        program = run(self.program(), after_registrations(self.without_taken))
        return {
            registration.parameters: self.block(registration)
            for registration in program.registrations
            if all(self.open(name) for name in registration.parameters)
        }

    def program(self) -> Program:
        """The graph, in which only the parameters that are to be registered count as parameters."""
        collection = self.collection
        defaults: dict[str, str] = {}
        for name, kind in KINDS.items():
            default = collection.default_approximation(name)
            if not kind.multi and default != kind.default:
                defaults |= dict.fromkeys(kind.layers or (name,), kind.approximations[default])
        bare = collection.bare_program
        pieces = tuple(piece for piece in collection.asked_pieces(*self.wanted) if piece.parameter in self.owners)
        options = replace(bare.options, strict=False, linked=self.linked(), approximations=defaults, pieces=pieces)
        return bare.but(
            parameters={name: value for name, value in bare.parameters.items() if name in self.owners},
            aliases={alias: name for alias, name in bare.aliases.items() if name in self.owners},
            options=options,
        )

    def linked(self) -> dict[frozenset[str], str | None]:
        """Groups to keep together. Raises LinkError for one that is registered in part."""
        groups: dict[frozenset[str], str | None] = {}
        for group, approximation in self.collection.linked_parameters.items():
            unregistered = {name for name in group if self.open(name)}
            if group == unregistered:
                groups[group] = approximation if approximation in APPROXIMATIONS else INDEP.get(approximation or "")
            elif unregistered:
                whole, rest = ", ".join(sorted(group)), ", ".join(sorted(unregistered))
                raise LinkError(f"{rest} in linked group ({whole}) was not matched: the others are registered already")
        return groups

    def without_taken(self, program: Program) -> Program:
        """Registered parameters as if they were frozen, and every use with its cases where those of its loss are."""
        self.collection.pieces.update(program.pieces)
        (first, *_) = self.collection.towers_by_loss
        matches = []
        for use in program.matches:
            places = {role: place for role, place in use.parameters.items() if self.open(place.parameter)}
            if not places:
                continue
            use = replace(use, parameters=places)
            cases = symbolic_sizes(first[self.tower_of(use)].inputs[0])[:1]  # towers may be of different sizes
            matches.append(with_batch_dim(use, cases[0]) if use.batch_dim is None and cases and cases[0] else use)
        return program.but(matches=tuple(matches))

    def tower_of(self, use: Use) -> int:
        return next((number for number, nodes in enumerate(self.behind) if use.output in nodes), 0)

    # --- blocks -----------------------------------------------------------------------------------------------------

    def block(self, registration: Registration) -> FisherBlock:
        """The block of a registration, with its uses by tower."""
        towers: list[tuple[Use, ...]] = [
            tuple(use for use in registration.uses if self.tower_of(use) == number)
            for number in range(len(self.behind))
        ]
        if not registration.generic:
            towers = [tower for tower in towers if tower]
        num_uses = self.folded(registration)
        multi = any(len(tower) > 1 for tower in towers) or (num_uses or 1) > 1
        name = self.approximation(registration, multi)
        blocks = cut_sides(APPROXIMATIONS[name], registration.blocks)
        registration = replace(registration, approximation=name, blocks=blocks)
        try:
            return block_of(self.collection, registration, towers, num_uses)
        except RegistrationError as error:
            if not registration.structure.series or self.asked(registration) is not None:
                raise
            registration = replace(registration, approximation="kron_indep", reason=str(error))
        return block_of(self.collection, registration, towers, num_uses)

    def approximation(self, registration: Registration, multi: bool) -> str:
        """Towers are no uses: one use in each is a plain layer. Several take the default of the kind's multi form."""
        kinds = [name for name, kind in KINDS.items() if registration.layer in (kind.layers or (name,))]
        if self.asked(registration) is not None:
            return self.linked_approximation(registration, kinds)
        if not multi:
            return "kron" if registration.approximation == "kron_indep" else registration.approximation
        kind = next((name for name in kinds if KINDS[name].multi), None)
        if kind is None or registration.approximation not in ("kron", "kron_indep", "diagonal"):
            return registration.approximation
        return KINDS[kind].ours(self.collection.default_approximation(kind)) or registration.approximation

    def asked(self, registration: Registration) -> str | None:
        """The approximation of the linked group that these parameters are."""
        return self.collection.linked_parameters.get(frozenset(registration.parameters))

    def linked_approximation(self, registration: Registration, kinds: Sequence[str]) -> str:
        """Our name. Raises ApproximationError if parameters of no layer do not have it."""
        asked = self.asked(registration) or ""
        ours = next((ours for kind in kinds if (ours := KINDS[kind].ours(asked))), None)
        if registration.generic and ours is None:
            name = f"the linked {registration}, which no layer has: approximation"
            choice(name, asked, KINDS["generic"].approximations, ApproximationError)
        return registration.approximation if ours is None or ours == asked else ours

    def folded(self, registration: Registration) -> int | None:
        """How many uses the rows of an output hold, one after another, if batch_size tells."""
        if self.batch_size is None or registration.layer not in ("linear", "embedding", "conv2d"):
            return None
        use = registration.uses[0]
        value = use.output.meta.get("val")
        sizes = [] if value is None else [in_example(size) for size in value.shape]
        rows = sizes[:1] if registration.layer == "conv2d" else sizes[:-1]
        if not sizes:
            return None
        if self.batch_size in rows:
            return prod(rows) // self.batch_size if prod(rows) > self.batch_size else None
        if rows and rows[0] % self.batch_size == 0:
            return rows[0] // self.batch_size
        raise RegistrationError(
            f"{registration} at {where(use.output)} has {rows} rows, which is no multiple of "
            f"batch_size={self.batch_size}"
        )


def block_of(
    collection: LayerCollection,
    registration: Registration,
    towers: Sequence[tuple[Use, ...]],
    num_uses: int | None = None,
) -> FisherBlock:
    """The block of a registration that the compiler made."""
    multi = any(len(tower) > 1 for tower in towers) or (num_uses or 1) > 1
    make = block_class(registration.layer, registration.approximation, multi)
    names, name = registration.parameters, registration.approximation
    block = make(collection, names, name, num_uses=num_uses, reason=registration.reason)
    block.sampling, block.side_blocks = registration.sampling or collection.sampling, registration.blocks
    for tower in towers:
        if registration.generic:
            block.register_additional_tower()
        else:
            block.add_tower(tower)
    return block


def misplaced(collection: LayerCollection, subgraph: frozenset[fx.Node]) -> Iterator[str]:
    """Errors that counting edges does not show: uses registered twice, uses that no loss depends on, and several
    uses of one mini-batch registered as several mini-batches."""
    several = max((len(towers) for towers in collection.towers_by_loss), default=1) > 1
    all_cases = {sizes[0] for node in collection.registered_losses.nodes if (sizes := symbolic_sizes(node))}
    for names, block in collection.fisher_blocks.items():
        uses = dict.fromkeys(use.output for tower in block.towers for use in tower)
        whole = [where(node) for node in uses if symbolic_sizes(node)[:1] == [*all_cases]]
        if len(block.towers) > 1 and not several and None not in all_cases and len(whole) > 1:
            yield (
                f"{', '.join(names)} has {len(block.towers)} towers, which are mini-batches of their own, but all "
                f"cases of the losses at each of {', '.join(whole)}: register the uses of one mini-batch together, "
                "with the _multi function"
            )
        outputs = Counter((use.output, use.through) for use in block.registration.uses)
        for (output, _), times in outputs.items():
            if times > 1:
                yield f"{', '.join(names)} is registered with {times} uses at {where(output)}, which is 1 use"
            if output not in subgraph:
                yield f"{', '.join(names)} is registered at {where(output)}; the losses do not depend on it"


# --- checks of arguments ----------------------------------------------------------------------------------------------


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
