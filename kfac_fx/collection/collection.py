"""What all registrations share: blocks by parameters, linked groups, approximations, `reuse`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from kfac_fx.collection.captured import CapturedModel
from kfac_fx.collection.find_use import Finder, Nodes, listed
from kfac_fx.collection.fisher_factor import FisherFactor, factor_keys
from kfac_fx.collection.kinds import KINDS, check_num_uses, checked_kind, known
from kfac_fx.collection.names import Names
from kfac_fx.collection.registry import VARIABLE_SCOPE, Key, LayerParametersDict, resolved
from kfac_fx.fisher_blocks import FisherBlock, block_class
from kfac_fx.passes.errors import ApproximationError, LinkError, RegistrationError, ReuseError, nearest
from kfac_fx.passes.ir import Program, Sampling, Use
from kfac_fx.passes.pieces import Piece


class BaseCollection(Names):
    """fisher_blocks: by their parameters, in the order of registration. estimator: the one built on it, if any."""

    def __init__(self, graph: CapturedModel, name: str = "LayerCollection") -> None:
        super().__init__(graph)
        self.name = name
        self.finder = Finder(graph)
        self.fisher_blocks: LayerParametersDict[FisherBlock] = LayerParametersDict(self.name_of, self.pieces.get)
        self.fisher_factors: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._linked: dict[frozenset[str], str | None] = {}
        self._defaults = {kind: one.default for kind, one in KINDS.items()}
        self.estimator: Any = None
        self.sampling: Sampling | None = None
        self.finalized = False

    def __repr__(self) -> str:
        return f"{self.name}({len(self.fisher_blocks)} blocks)"

    # --- names ------------------------------------------------------------------------------------------------------

    def asked_pieces(self, *more: str) -> tuple[Piece, ...]:
        """Those that something is registered or linked for, and those among `more` names."""
        names = (*self.registered_variables, *(name for group in self._linked for name in group), *more)
        return tuple(dict.fromkeys(self.pieces[name] for name in names if name in self.pieces))

    def names_of(self, params: Any) -> Key:
        return self.fisher_blocks.names(params)

    @property
    def registered_variables(self) -> Key:
        """The names of all registered parameters, in the order of registration."""
        return tuple(name for key in self.fisher_blocks for name in key)

    # --- linked parameters and approximations -----------------------------------------------------------------------

    @property
    def linked_parameters(self) -> dict[frozenset[str], str | None]:
        return dict(self._linked)

    def define_linked_parameters(self, params: Any, approximation: str | None = None) -> None:
        """These parameters belong in one block, of this approximation unless the registration asks for another.

        Raises LinkError if some are registered in a block of other parameters, or are linked already;
        ApproximationError for what no layer has.
        """
        names = frozenset(self.names_of(params))
        if approximation is not None and not any(kind.own(approximation) for kind in KINDS.values()):
            known_to_some = dict.fromkeys(name for kind in KINDS.values() for name in kind.approximations)
            raise ApproximationError(f"{approximation!r} is no approximation.{nearest(approximation, known_to_some)}")
        self.check_cuts(names)
        said = ", ".join(sorted(names))
        if taken := self.fisher_blocks.overlapping(names):
            raise LinkError(f"({said}) cannot be linked: registered already in {', '.join(map(str, taken))}")
        if groups := [group for group in self._linked if self.fisher_blocks.shared(group, names)]:
            others = " and ".join(f"({', '.join(sorted(group))})" for group in groups)
            raise LinkError(f"({said}) cannot be linked: already part of the linked group {others}")
        self._linked[names] = approximation

    def default_approximation(self, kind: str) -> str:
        return self._defaults[checked_kind(kind)]

    def set_default_approximation(self, kind: str, value: str) -> None:
        """Raises ApproximationError for what the kind of layer has not, and for a kind that does not exist."""
        if KINDS[checked_kind(kind)].own(value) is None:
            raise ApproximationError(f"{value!r} is not a valid approximation for {kind}; valid are {known(kind)}")
        self._defaults[kind] = value

    def chosen(self, kind: str, names: Key, approx: str | None) -> str:
        """What is asked for here, else for exactly these linked parameters, else for the kind; in our names."""
        asked = approx or self._linked.get(frozenset(names)) or self._defaults[kind]
        own = KINDS[kind].own(asked)
        if own is None:
            raise ApproximationError(f"Bad value {asked!r} for approx of {', '.join(names)}; {kind} has {known(kind)}")
        return own

    # --- registration -----------------------------------------------------------------------------------------------

    def find_uses(self, layers: Sequence[str], params: Key, inputs: Nodes, outputs: Nodes) -> tuple[Use, ...]:
        return self.finder.find(layers, params, inputs, outputs, self.scope(*params))

    def scope(self, *names: str) -> Program:
        """The graph behind the losses, or behind all outputs as long as there are none, with all pieces that are asked
        for: see `Finder.cut`."""
        whole = self.finder.program
        return whole.but(options=replace(whole.options, pieces=self.asked_pieces(*names)))

    def check_cuts(self, names: Iterable[str]) -> None:
        """Raises RegistrationError for pieces that the graph's uses do not let a parameter be cut into."""
        if not any(name in self.pieces for name in names):
            return
        cut = self.finder.cut(self.scope(*names))
        for piece in self.asked_pieces(*names):
            if piece.name not in cut.pieces:
                parts = self.finder.cut(self.scope()).parts(piece.parameter)
                raise RegistrationError(
                    f"{piece.name} cannot be registered by itself: in the graph's uses {piece.parameter} comes as "
                    f"{', '.join(parts)}"
                )

    def register(
        self,
        kind: str,
        params: Any,
        inputs: Nodes,
        outputs: Nodes,
        approx: str | None,
        reuse: bool | str | None,
        num_uses: int | None = None,
        layers: Sequence[str] = (),
        sampling: Sampling | None = None,
        patch_mask: Tensor | None = None,
    ) -> FisherBlock:
        """Find the uses, then file them: a new block, or a tower of an old one. On an error nothing has changed.

        sampling, patch_mask: of the input factor; None: the collection's and none, or those of the old block.
        """
        names, single = self.names_of(params), not isinstance(outputs, (list, tuple))
        if KINDS[kind].multi:
            check_num_uses(names, num_uses, None if single else len(listed(outputs)))
        elif not single:
            raise RegistrationError(f"{', '.join(names)}: several outputs; register them with the _multi function")
        self.check_cuts(names)
        uses = self.find_uses(layers or KINDS[kind].layers, names, inputs, outputs)
        chosen = self.chosen(kind, names, approx)
        layer = next((use.layer for use in uses if use.layer in KINDS[kind].layers), uses[0].layer)
        made = block_class(layer, chosen, KINDS[kind].multi)
        block = made(self, names, chosen, num_uses=num_uses if single else None)
        block.sampling, block.patch_mask = sampling or block.sampling, patch_mask
        block.add_tower(uses)
        if resolved(reuse) and names in self.fisher_blocks:
            self.fisher_blocks[names].check_rows(sampling, patch_mask)
        return self.filed(names, block, reuse)

    def filed(self, names: Key, block: FisherBlock, reuse: bool | str | None) -> FisherBlock:
        """`register_block`; a block that is there already gets the towers of the new one."""
        kept = self.register_block(names, block, reuse)
        if kept is not block:
            for tower in block.towers:
                kept.add_tower(tower)
        return kept

    def register_block(
        self, layer_key: Any, fisher_block: FisherBlock, reuse: bool | str | None = VARIABLE_SCOPE
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
        reuse, names = resolved(reuse), self.names_of(layer_key)
        said = f"({', '.join(names)})"
        if names in self.fisher_blocks:
            if reuse is False:
                raise ReuseError(f"FisherBlock for {said} is already in LayerCollection; reuse=True adds a tower")
            kept = self.fisher_blocks[names]
            old, new = (one.terms for one in (kept, fisher_block))
            if old != new:
                raise RegistrationError(f"Attempted to register FisherBlock of type {new} for {said}, which has {old}")
            return kept
        if reuse is True:
            raise ReuseError(f"reuse=True, but no FisherBlock for {said} was registered")
        if taken := self.fisher_blocks.overlapping(names):
            shared = [(name, key) for key in taken for name in self.fisher_blocks.shared(names, key)]
            rows = "; ".join(f"variable {name} was already registered in key {key}" for name, key in shared)
            raise RegistrationError(f"FisherBlock for {said}: {rows}")
        self.check_cuts(names)
        self.fisher_blocks[names] = fisher_block
        return fisher_block

    def check_open(self) -> None:
        if self.finalized:
            raise RegistrationError("this LayerCollection serves an estimator already; nothing more can be registered")

    # --- factors ----------------------------------------------------------------------------------------------------

    def make_or_get_factor(self, cls: type[Any], args: tuple[Any, ...]) -> Any:
        """`cls(*args)`, made once for equal arguments. Raises TypeError if they cannot be hashed."""
        key = (cls, args)
        if key not in self.fisher_factors:
            self.fisher_factors[key] = cls(*args)
        return self.fisher_factors[key]

    def get_factors(self) -> list[Any]:
        """All factors, in the order of the blocks; one that several blocks have in common once."""
        for block in self.fisher_blocks.values():
            for key in factor_keys(block.registration):
                factor: FisherFactor = self.make_or_get_factor(FisherFactor, key)
                if block not in factor.blocks:
                    factor.blocks.append(block)
        return list(self.fisher_factors.values())

    def get_blocks(self) -> Iterable[FisherBlock]:
        return self.fisher_blocks.values()
