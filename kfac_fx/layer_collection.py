"""`LayerCollection`: what is registered of a model, by hand and by scanning its graph.

lc = kfac_fx.LayerCollection(kfac_fx.capture(model, (x,)))
lc.register_fully_connected(("fc1.weight", "fc1.bias"), lc.inputs_of("fc1"), lc.outputs_of("fc1"))
lc.register_categorical_predictive_distribution(lc.outputs_of("fc2"))
lc.auto_register_layers()  # the rest
est = kfac_fx.FisherEstimator(lc, damping=1e-3)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor, fx

from kfac_fx.collection.captured import CapturedModel
from kfac_fx.collection.recaptured import recaptured
from kfac_fx.collection.register_layers import LayerRegistrations
from kfac_fx.collection.register_losses import LossRegistrations
from kfac_fx.collection.scan import Scan, block_of
from kfac_fx.fisher_blocks import FisherBlock
from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.losses.registered import LossSpec, RegisteredLoss
from kfac_fx.passes.check import check_registration, uses_found
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.graphs.labels import entries, everything_behind, symbolic_sizes
from kfac_fx.passes.graphs.sizes import in_example
from kfac_fx.passes.ir import LossSite, Program, Registration, where
from kfac_fx.passes.padding import padding
from kfac_fx.passes.pipeline import verify
from kfac_fx.recording.masks import checked
from kfac_fx.recording.recorder import graph_loss


class LayerCollection(LayerRegistrations, LossRegistrations):
    """See the module's docstring. An estimator makes it final; a second one is refused."""

    def __init__(self, graph: CapturedModel, name: str = "LayerCollection") -> None:
        super().__init__(graph, name)
        self._losses = []
        self.padding_mask: fx.Node | None = None

    @classmethod
    def of(cls, captured: CapturedModel, program: Program, loss: LossSpec | None) -> LayerCollection:
        """What `kfac_fx.compile` made of the model; final. A loss that is a function of all outputs is not shown."""
        made = cls(replace(captured, program=program.but(registrations=(), matches=(), outputs=(), losses=())))
        if loss is None:
            made._losses = [of_site(site) for site in program.losses]
        elif loss.named and len(program.outputs) == 1:
            made._losses = [RegisteredLoss("loss", loss.name, program.outputs, loss.make, None, 1.0, None)]
        for one in program.registrations:
            made.fisher_blocks[one.parameters] = block_of(made, one, [one.uses])
        made.finalized = True
        return made

    @property
    def registrations(self) -> tuple[Registration, ...]:
        return tuple(block.registration for block in self.fisher_blocks.values())

    @property
    def program(self) -> Program:
        """All that is registered, for the rest of the library."""
        bare = self.in_pieces(self.bare_program)
        found, taken = uses_found(entries(bare)), set(self.registered_variables)
        unused = tuple(name for name in bare.shapes if name not in taken and name not in found)
        whole = bare.but(registrations=self.registrations, unused=unused, mask=self.padding_mask)
        return verify(padding(whole), after="LayerCollection")

    def in_pieces(self, bare: Program) -> Program:
        """With the pieces of the parameters of which some piece is registered."""
        if self.captured.program.pieces or not (asked := self.asked_pieces()):
            return bare
        cut = self.finder.cut(self.scope())
        own = {piece.parameter for piece in asked}
        behind = {
            node: frozenset(name if cut.owner(name) in own else cut.owner(name) for name in names)
            for node, names in cut.behind.items()
        }
        return bare.but(pieces={n: one for n, one in cut.pieces.items() if one.parameter in own}, behind=behind)

    # --- padding ----------------------------------------------------------------------------------------------------

    def define_padding_mask(self, mask: fx.Node | str) -> None:
        """What is padding in sequences enters no factor and is no case, of whatever is registered.

        mask: a node [cases, positions], nonzero where a position is real, computed from inputs alone.

        Raises RegistrationError for another node.
        """
        self.check_open()
        node = checked(self.node(mask))
        if any(one.op == "get_attr" for one in everything_behind([node])):
            raise RegistrationError(f"the padding mask at {where(node)} must be computed from inputs alone")
        self.padding_mask = node

    # --- automatic registration -------------------------------------------------------------------------------------

    def auto_register_layers(
        self, var_list: Iterable[Any] | None = None, batch_size: int | None = None
    ) -> dict[tuple[str, ...], FisherBlock]:
        """Register what is not registered yet: as layers of the graph behind the losses, else as generic.

        Args:
            var_list: the parameters to register; None: all trainable ones that the losses depend on.
            batch_size: tells uses that are folded into the batch (num_uses * batch_size rows); None: every row that
                the loss does not count is a weight-sharing position, which is the same Fisher.

        Returns the new blocks. Raises LossError without losses, RegistrationError for losses of different numbers of
        towers and for a size that is no multiple of batch_size, LinkError for linked parameters that no layer has.
        """
        self.check_open()
        self.create_subgraph()
        wanted = self.captured.program.parameters if var_list is None else self.names_of(list(var_list))
        made = Scan(self, list(wanted), batch_size).blocks()
        for names, block in made.items():
            self.register_block(names, block, reuse=False)
        return made

    # --- checks -----------------------------------------------------------------------------------------------------

    def check_registration(self, variables: Iterable[Any] | None = None) -> None:
        """Every use of every parameter, in the graph behind the losses, is registered, and registered once.

        Args:
            variables: the parameters that must be registered, and no others; None: all that the losses depend on.

        Raises RegistrationError with all culprits, LossError without losses.
        """
        subgraph = self.create_subgraph()
        names = None if variables is None else [one if isinstance(one, str) else self.name_of(one) for one in variables]
        errors = list(self.misplaced(subgraph))
        try:
            check_registration(self.program, names)
        except RegistrationError as error:
            errors.insert(0, str(error))
        if errors:
            raise RegistrationError("\n".join(errors))

    def misplaced(self, subgraph: frozenset[fx.Node]) -> Iterator[str]:
        """What counting edges does not show: uses registered twice, uses that no loss depends on, and several uses of
        one mini-batch registered as several mini-batches."""
        several = max((len(towers) for towers in self.towers_by_loss), default=1) > 1
        all_cases = {symbolic_sizes(node)[0] for one in self.losses for node in one.inputs if symbolic_sizes(node)}
        for names, block in self.fisher_blocks.items():
            uses = dict.fromkeys(use.output for tower in block.towers for use in tower)
            whole = [where(node) for node in uses if symbolic_sizes(node)[:1] == [*all_cases]]
            if len(block.towers) > 1 and not several and None not in all_cases and len(whole) > 1:
                yield (
                    f"{', '.join(names)} has {len(block.towers)} towers, which are mini-batches of their own, but all "
                    f"cases of the losses at each of {', '.join(whole)}: register the uses of one mini-batch together, "
                    "with the _multi function"
                )
            outputs = Counter((use.output, use.region) for use in block.registration.uses)
            for (output, _), times in outputs.items():
                if times > 1:
                    yield f"{', '.join(names)} is registered with {times} uses at {where(output)}, which is 1 use"
                if output not in subgraph:
                    yield f"{', '.join(names)} is registered at {where(output)}; the losses do not depend on it"

    # --- for an estimator -------------------------------------------------------------------------------------------

    def finalize(self, variables: Iterable[Any] | None = None) -> None:
        """Check, and take no more registrations. Raises RegistrationError the second time: it serves one estimator."""
        if self.finalized:
            raise RegistrationError("this LayerCollection serves another estimator already; make one for each")
        self.check_registration(variables)
        self.finalized = True

    def on(self, traced: Program) -> Program:
        """The same registrations on another capture of the model. Raises ModelChangedError if it is another graph."""
        own = self.program
        return own if traced is self.captured.capture.program else recaptured(own, traced, self.model)

    # --- the default collection -------------------------------------------------------------------------------------

    @contextmanager
    def as_default(self) -> Iterator[LayerCollection]:
        """Inside, `get_default_layer_collection()` is this one."""
        set_default_layer_collection(self)
        try:
            yield self
        finally:
            set_default_layer_collection(None)


def of_site(site: LossSite) -> RegisteredLoss:
    """A loss that forward computes; a mean over elements shows in the coefficient, where the graph knows the sizes."""
    value = site.inputs.meta.get("val")
    mean = site.kind != "categorical" and site.reduction == "mean" and value is not None
    coefficient = 1.0 / prod(in_example(size) for size in value.shape[1:]) if mean and value is not None else 1.0

    def make(inputs: Tensor) -> LossFunction:
        return graph_loss(site.kind, site.reduction, inputs, None)[1]

    return RegisteredLoss(site.node.name, site.kind, (site.inputs,), make, site.targets, coefficient, None)


_default: LayerCollection | None = None


def get_default_layer_collection() -> LayerCollection:
    """Raises RegistrationError if none was set."""
    if _default is None:
        raise RegistrationError("there is no default LayerCollection; call set_default_layer_collection(lc) first")
    return _default


def set_default_layer_collection(layer_collection: LayerCollection | None) -> None:
    """None clears it. Raises RegistrationError if there is one already."""
    global _default
    if layer_collection is not None and _default is not None:
        raise RegistrationError("there is a default LayerCollection already; clear it with None first")
    _default = layer_collection
