"""A Fisher block as a `LayerCollection` holds it: what is registered, and the products with it.

Its numbers are those of `kfac_fx.blocks.block`, which knows matrices and no layers. It multiplies once an estimator was
built on its collection, or after `instantiate_factors` on tensors of one's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from kfac_fx.blocks import block as blocks
from kfac_fx.collection.declared_block import DeclaredBlock
from kfac_fx.collection.sums import joined, summed
from kfac_fx.factors.factor import NotRegisteredError
from kfac_fx.linalg.matrices import Root
from kfac_fx.passes.errors import FactorNotReady
from kfac_fx.passes.ir import Use


class FisherBlock(DeclaredBlock):
    """A declared block with numbers: the estimator's, or those of one batch."""

    # What a block starts with; all of them are replaced, never changed.
    _roots: tuple[Root, ...] = ()
    _batch: tuple[dict[str, Tensor], int, float | Tensor] | None = None
    _own: blocks.FisherBlock | None = None

    def add_tower(self, uses: Iterable[Use]) -> None:
        super().add_tower(uses)
        self._own = None

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

        Raises ValueError for tensors in the place of lists, and for tensors that are not of the block's uses.
        """
        registration = self.registration
        if isinstance(grads_list, Tensor) or not len(grads_list):
            raise ValueError(f"grads_list of {self} must hold a list for every source; {NESTED}")
        values = self.flat(inputs, "inputs")
        sums = [
            summed(registration, self.flat(grads, f"grads_list[{n}]"), values, self.layer_collection.layers)
            for n, grads in enumerate(grads_list)
        ]
        first = [next(iter(flattened(tower))) for tower in grads_list[0]]
        counted = sum(grad.shape[0] // (self.num_uses or 1) for grad in first)
        self.take(joined(sums), cases or counted, damping)

    def flat(self, tensors: Sequence[Any], said: str) -> list[Tensor]:
        """One a use, in the order of the uses. Raises ValueError for another number."""
        if isinstance(tensors, Tensor):
            raise ValueError(
                f"{said} of {self} is one tensor, in the place of a list with one for every tower; {NESTED}"
            )
        found = [tensor for tower in tensors for tensor in flattened(tower)]
        if len(found) != (uses := sum(map(len, self.towers))):
            several = "1 use" if uses == 1 else f"{uses} uses"
            raise ValueError(f"{self} has {several} in its towers, and {said} has {len(found)} tensors; {NESTED}")
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
            self._roots = (*self._roots, root)
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
        """Raises NotRegisteredError for a root that was not registered, ValueError for another number of tensors."""
        if isinstance(vector, Mapping):
            return self.product(method, vector, *args)
        parts = vector if isinstance(vector, (tuple, list)) else (vector,)
        if len(parts) != len(self.params):
            raise ValueError(f"a vector of {self} has {len(self.params)} tensors, and got {len(parts)}")
        product = self.product(method, dict(zip(self.params, parts, strict=True)), *args)
        tensors = tuple(product[name] for name in self.params)
        return tensors if isinstance(vector, (tuple, list)) else tensors[0]

    def product(self, method: str, vector: Mapping[str, Tensor], *args: Any) -> dict[str, Tensor]:
        operator = self.operator
        try:
            found: dict[str, Tensor] = getattr(operator, method)(vector, *args)
        except NotRegisteredError as error:
            if operator is not self._own or vector.keys() != set(self.registration.parameters):
                raise
            raise NotRegisteredError(
                f"{self} does not keep what {method} needs: call {REGISTERED_BY[method]} before"
            ) from error
        return found


NESTED = "write instantiate_factors([[gradient]], damping, [input]) for one source, one tower and one use"


def flattened(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


REGISTERED_BY = {
    "multiply_inverse": "register_inverse()",
    "multiply_matpower": "register_matpower(exp)",
    "multiply_cholesky": "register_cholesky()",
    "multiply_cholesky_inverse": "register_cholesky_inverse()",
}
