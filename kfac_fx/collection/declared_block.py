"""What is registered of one Fisher block: its parameters, its approximation, and its uses by tower."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, fx

from kfac_fx.collection.registry import Key
from kfac_fx.collection.steps import in_time
from kfac_fx.passes.approximations import APPROXIMATIONS, Approximation
from kfac_fx.passes.claiming.approximation import cases_apart
from kfac_fx.passes.errors import ApproximationError, RegistrationError
from kfac_fx.passes.ir import Registration, Sampling, Use
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.pieces import Piece
from kfac_fx.passes.resolve import align

Nodes = Any  # a node, its name, or a sequence of them, one a use


class Collection(Protocol):
    """What a block asks of the collection that it is in."""

    estimator: Any
    sampling: Sampling | None

    @property
    def layers(self) -> Mapping[str, Layer]: ...
    @property
    def parameters(self) -> Mapping[str, Tensor]: ...
    @property
    def pieces(self) -> Mapping[str, Piece]: ...
    def names_of(self, params: Any) -> Key: ...
    def find_uses(self, layers: Sequence[str], params: Key, inputs: Nodes, outputs: Nodes) -> tuple[Use, ...]: ...


class DeclaredBlock:
    """One block. layers: the declared layers that it may stand for, () for any; default: its approximation."""

    layers: ClassVar[tuple[str, ...]] = ()
    default: ClassVar[str] = "kron"

    def __init__(
        self,
        layer_collection: Collection,
        params: Any,
        approximation: str | None = None,
        *,
        num_uses: int | None = None,
        reason: str | None = None,
    ) -> None:
        """
        Args:
            params: a parameter or several, as names or as the objects.
            approximation: a name of `passes.approximations.APPROXIMATIONS`; None: the class's own.
            num_uses: of a tensor that holds the uses one after another.

        Raises RegistrationError for parameters that the model has not.
        """
        self.layer_collection = layer_collection
        self.params = layer_collection.names_of(params)
        self.approximation = approximation or self.default
        if self.approximation not in APPROXIMATIONS:
            raise ApproximationError(
                f"{self.approximation!r} is no approximation; known are {', '.join(APPROXIMATIONS)}"
            )
        self.num_uses, self.reason = num_uses, reason
        self.sampling: Sampling | None = layer_collection.sampling
        self.patch_mask: Tensor | None = None
        self.side_blocks = (1, 1)  # into how many diagonal blocks its sides are cut, outputs and inputs
        self.towers: list[tuple[Use, ...]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.params)}, {self.approximation}, {len(self.towers)} towers)"

    @property
    def structure(self) -> Approximation:
        """The approximation that `approximation` names."""
        return APPROXIMATIONS[self.approximation]

    @property
    def terms(self) -> str:
        """What another registration of the same parameters must agree with."""
        uses = f", num_uses={self.num_uses}" if self.num_uses is not None else ""
        return f"{type(self).__name__} ({self.approximation}{uses})"

    def check_rows(self, sampling: Sampling | None, patch_mask: Tensor | None) -> None:
        """Raises RegistrationError if its input factor is of other rows; None: nothing is said of it."""
        said = ", ".join(self.params)
        if sampling is not None and sampling != (self.sampling or Sampling()):
            raise RegistrationError(f"{said}: its input factor is of {self.sampling or Sampling()}, not of {sampling}")
        same = self.patch_mask is not None and patch_mask is not None and torch.equal(self.patch_mask, patch_mask)
        if patch_mask is not None and not same:
            there = "no patch_mask" if self.patch_mask is None else "another patch_mask"
            raise RegistrationError(f"{said}: its first registration has {there}; all towers have one")

    @property
    def num_registered_towers(self) -> int:
        return len(self.towers)

    num_registered_minibatches = num_registered_towers

    def register_additional_tower(self, inputs: Nodes = None, outputs: Nodes = None) -> None:
        """One more mini-batch: the layer at `outputs`, a node or one for every use.

        Raises RegistrationError if there is no such layer with these parameters.
        """
        self.add_tower(self.layer_collection.find_uses(self.layers, self.params, inputs, outputs))

    register_additional_minibatch = register_additional_tower

    def add_tower(self, uses: Iterable[Use]) -> None:
        """Raises RegistrationError if the uses lay out the parameters differently, ApproximationError if one is of a
        layer or a place that has not the block's approximation, and both as `steps.in_time` does for series."""
        tower = tuple(uses)
        places = ", ".join(use.output.name for use in tower)
        aligned = align([use for one in (*self.towers, tower) for use in one])
        if aligned is None:
            raise RegistrationError(f"{', '.join(self.params)}: the use at {places} lays them out differently")
        for use in aligned:
            known = self.layer_collection.layers[use.layer].approximations
            apart = not all(step.keeps_pixels for step in use.through) or bool(
                use.region or use.factor
            )  # its pixels are not those of the input
            if self.approximation not in known or (self.structure.needs_pixels and apart):
                kind = f"{'a transposed' if use.transposed else 'a part of a'} {use.layer}" if apart else use.layer
                raise ApproximationError(
                    f"{', '.join(self.params)} at {use.output.name}: {kind} has no {self.approximation!r}, but "
                    f"{', '.join(name for name in known if name != self.approximation)}"
                )
            if self.structure.needs_cases and not cases_apart(self.layer_collection.layers, use):
                raise ApproximationError(
                    f"{', '.join(self.params)} at {use.output.name}: the cases are merged with positions there, and "
                    f"{self.approximation!r} needs the gradient of every case: keep their dimension, or take 'kron'"
                )
        if self.structure.series:
            layers = self.layer_collection.layers
            latest = aligned[len(aligned) - len(tower) :]
            tower = in_time(self.params, self.approximation, (*self.towers, latest), layers, self.num_uses)
        self.towers.append(tower)

    @property
    def registration(self) -> Registration:
        """What the rest of the library knows of this block."""
        uses = align([replace(use, tower=n) for n, tower in enumerate(self.towers) for use in tower])
        assert uses, f"bug in kfac_fx: {self} without uses"
        first = next((use for use in uses if not use.transposed), uses[0])
        names = first.matrix.parameters
        return Registration(
            first.layer,
            first.matrix,
            names,
            tuple(uses),
            self.approximation,
            self.reason,
            self.pieces(names),
            self.sampling,
            None if self.patch_mask is None else tuple(self.patch_mask.flatten().tolist()),
            self.side_blocks,
        )

    def pieces(self, names: Key) -> tuple[Piece, ...]:
        known = self.layer_collection.pieces
        return tuple(known[name] for name in names if name in known)

    def tensors_to_compute_grads(self) -> list[list[fx.Node]] | tuple[str, ...]:
        """The outputs of every tower; of a generic block, the names of its parameters."""
        return [[use.output for use in tower] for tower in self.towers]
