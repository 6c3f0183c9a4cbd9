"""A Fisher block as a `LayerCollection` holds it: a declaration of parameters, an approximation, and uses by tower.

Its numbers are those of `kfac_fx.blocks`, which knows matrices and no layers. It multiplies once an estimator was built
on its collection, or after `instantiate_factors` on tensors of one's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from torch import Tensor, fx

from kfac_fx import blocks
from kfac_fx.linalg import Root
from kfac_fx.passes.errors import ApproximationError, FactorNotReady, RegistrationError
from kfac_fx.passes.ir import APPROXIMATIONS, SERIES, SUA, Registration, Sampling, Use
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.pieces import Piece
from kfac_fx.passes.resolve import align
from kfac_fx.registry import Key
from kfac_fx.steps import in_time
from kfac_fx.sums import joined, summed

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


class FisherBlock:
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
            approximation: one of `passes.ir.APPROXIMATIONS`; None: the class's own.
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
        self.towers: list[tuple[Use, ...]] = []
        self._roots: list[Root] = []
        self._batch: tuple[dict[str, Tensor], int, float | Tensor] | None = None
        self._own: blocks.FisherBlock | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.params)}, {self.approximation}, {len(self.towers)} towers)"

    # --- what is registered -----------------------------------------------------------------------------------------

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
        layer that has not the block's approximation, and both as `steps.in_time` does for series."""
        tower = tuple(uses)
        places = ", ".join(use.output.name for use in tower)
        aligned = align([use for one in (*self.towers, tower) for use in one])
        if aligned is None:
            raise RegistrationError(f"{', '.join(self.params)}: the use at {places} lays them out differently")
        for use in aligned:
            known = self.layer_collection.layers[use.layer].approximations
            if self.approximation not in known or (self.approximation == SUA and use.transposed):
                kind = f"a transposed {use.layer}" if use.transposed else use.layer
                raise ApproximationError(
                    f"{', '.join(self.params)} at {use.output.name}: {kind} has no {self.approximation!r}, but "
                    f"{', '.join(name for name in known if name != self.approximation)}"
                )
        if self.approximation in SERIES:
            layers = self.layer_collection.layers
            latest = aligned[len(aligned) - len(tower) :]
            tower = in_time(self.params, self.approximation, (*self.towers, latest), layers, self.num_uses)
        self.towers.append(tower)
        self._own = None

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
        )

    def pieces(self, names: Key) -> tuple[Piece, ...]:
        known = self.layer_collection.pieces
        return tuple(known[name] for name in names if name in known)

    def tensors_to_compute_grads(self) -> list[list[fx.Node]] | tuple[str, ...]:
        """The outputs of every tower; of a generic block, the names of its parameters."""
        return [[use.output for use in tower] for tower in self.towers]

    # --- numbers ----------------------------------------------------------------------------------------------------

    def instantiate_factors(
        self, grads_list: Sequence[Any], damping: float | Tensor, inputs: Sequence[Any] = (), cases: int | None = None
    ) -> None:
        """Make the factors from one batch of tensors, without an estimator.

        Args:
            grads_list: for every source, for every tower (for every use, if there are several) the gradient of the
                loss, summed over cases, with respect to the output.
            damping: λ of F + λ I.
            inputs: for every tower (and use) the value of the layer's input.
            cases: of the batch; None: the first dimension of the outputs, over all towers.
        """
        registration = self.registration
        sums = [
            summed(registration, self.flat(grads), self.flat(inputs), self.layer_collection.layers)
            for grads in grads_list
        ]
        first = [next(iter(flattened(tower))) for tower in grads_list[0]]
        counted = sum(grad.shape[0] // (self.num_uses or 1) for grad in first)
        self.take(joined(sums), cases or counted, damping)

    def flat(self, tensors: Sequence[Any]) -> list[Tensor]:
        """One a use, in the order of the uses. Raises ValueError for another number."""
        found = [tensor for tower in tensors for tensor in flattened(tower)]
        if len(found) != (uses := sum(map(len, self.towers))):
            raise ValueError(f"{self} has {uses} uses in its towers, and got {len(found)} tensors")
        return found

    def take(self, sums: dict[str, Tensor], cases: int, damping: float | Tensor) -> None:
        self._batch, self._own = (sums, cases, damping), None

    @property
    def operator(self) -> blocks.FisherBlock:
        """The estimator's block, or that of the batch of `instantiate_factors`. Raises FactorNotReady without both."""
        if self._own is not None:
            return self._own
        if self._batch is None:
            if self.layer_collection.estimator is None:
                raise FactorNotReady(
                    f"{self} has no factors yet: build a FisherEstimator on its layer collection, or call "
                    "instantiate_factors with the gradients of a batch."
                )
            made: blocks.FisherBlock = self.layer_collection.estimator.blocks[self.registration.parameters]
            return made
        sums, cases, damping = self._batch
        self._own = blocks.make_block(
            self.registration,
            parameters=self.layer_collection.parameters,
            damping=damping,
            roots=self._roots,
            dtype=next(iter(sums.values())).dtype,
        )
        self._own.update(sums, cases, decay=0.0)
        self._own.update_inverses()
        return self._own

    def register_matpower(self, exp: float) -> None:
        """Keep this power for `multiply_matpower`. An estimator takes `exps` instead."""
        self.register_root(float(exp))

    def register_inverse(self) -> None:
        self.register_root(-1.0)

    def register_cholesky(self) -> None:
        self.register_root("cholesky")

    def register_cholesky_inverse(self) -> None:
        self.register_root("cholesky_inverse")

    def register_root(self, root: Root) -> None:
        if root != 1 and root not in self._roots:
            self._roots.append(root)
            self._own = None

    def multiply(self, vector: Any) -> Any:
        """(F + λ I) v. Vectors are dicts by name, or tensors in the order of `params`."""
        return self.applied("multiply", vector)

    def multiply_inverse(self, vector: Any) -> Any:
        return self.applied("multiply_inverse", vector)

    def multiply_matpower(self, vector: Any, exp: float) -> Any:
        return self.applied("multiply_matpower", vector, exp)

    def multiply_cholesky(self, vector: Any, transpose: bool = False) -> Any:
        return self.applied("multiply_cholesky", vector, transpose)

    def multiply_cholesky_inverse(self, vector: Any, transpose: bool = False) -> Any:
        return self.applied("multiply_cholesky_inverse", vector, transpose)

    def full_fisher_block(self) -> Tensor:
        """The undamped block as one matrix, in the order of the flattened matrix [g, o, i]."""
        return self.operator.full_fisher_block()

    def applied(self, method: str, vector: Any, *args: Any) -> Any:
        if isinstance(vector, Mapping):
            return getattr(self.operator, method)(vector, *args)
        parts = vector if isinstance(vector, (tuple, list)) else (vector,)
        product = getattr(self.operator, method)(dict(zip(self.params, parts, strict=True)), *args)
        tensors = tuple(product[name] for name in self.params)
        return tensors if isinstance(vector, (tuple, list)) else tensors[0]


def flattened(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)
