"""`LayerCollection`: the Fisher blocks and losses of a model, registered by hand and by scanning its graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import fx

from kfac_fx.compiled.layer_collection import registering
from kfac_fx.compiled.layer_collection.find_use import Finder, Nodes
from kfac_fx.compiled.layer_collection.fisher_blocks import (
    KINDS,
    FisherBlock,
    FisherFactor,
    check_approximation,
    factor_keys,
    kind_named,
)
from kfac_fx.compiled.layer_collection.methods import RegisterMethods
from kfac_fx.compiled.layer_collection.names import (
    CapturedModel,
    LayerParametersDict,
    ParameterNames,
    on_another_capture,
)
from kfac_fx.compiled.layer_collection.scan import Scan, block_of, misplaced
from kfac_fx.linalg.arguments import choice, optional, whole_number
from kfac_fx.losses.registered import LossSpec, RegisteredLoss, RegisteredLosses
from kfac_fx.passes.check import check_registration, uses_in_graph
from kfac_fx.passes.errors import ApproximationError, LinkError, LossError, RegistrationError
from kfac_fx.passes.graphs.labels import ancestors, entries, everything_behind
from kfac_fx.passes.ir import Program, Registration, Sampling, Use, where
from kfac_fx.passes.losses import size_of_cases
from kfac_fx.passes.padding import padding
from kfac_fx.passes.pieces import Piece
from kfac_fx.passes.pipeline import verify
from kfac_fx.recording.masks import checked_mask
from kfac_fx.recording.moments import Key
from kfac_fx.recording.taps import read_sampling


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

    def __init__(self, graph: CapturedModel, name: str = "LayerCollection") -> None:
        """graph: of `kfac_fx.capture`; name: for printing. Raises RegistrationError for what is no captured model."""
        if not isinstance(graph, CapturedModel):
            raise RegistrationError(
                f"a LayerCollection is built on a captured model and got a {type(graph).__name__}: "
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
            collection._losses = tuple(registering.loss_of_site(site) for site in program.losses)
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

    register_block = registering.register_block

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

    register_loss_function = registering.register_loss_function
    eval_losses = registering.eval_losses
    eval_losses_on_samples = registering.eval_losses_on_samples
    total_loss = registering.total_loss
    total_sampled_loss = registering.total_sampled_loss

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
