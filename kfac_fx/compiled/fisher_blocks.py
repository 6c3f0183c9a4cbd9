"""Fisher blocks of a `LayerCollection`, kinds of layers and factors, under their names in TF K-FAC.

A `FisherBlock` holds its parameters, its approximation and its uses by tower. Its classes differ in the layers that
they may be registered for. Its numbers are those of `kfac_fx.fisher.block`, which knows matrices and no layers. It
multiplies once an estimator was built on its collection, or after `instantiate_factors` on the user's own tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, fx, nn

from kfac_fx.compiled.names import Nodes
from kfac_fx.fisher import block as blocks
from kfac_fx.linalg.arguments import choice
from kfac_fx.linalg.matrices import Root
from kfac_fx.linalg.vectors import split
from kfac_fx.passes.approximations import APPROXIMATIONS, Approximation
from kfac_fx.passes.errors import ApproximationError, FactorNotReady, NotRegisteredError, RegistrationError, where
from kfac_fx.passes.graphs.labels import in_example
from kfac_fx.passes.ir import GENERIC, Registration, Sampling, Use
from kfac_fx.passes.layers import LAYERS, Layer
from kfac_fx.passes.parametrization import Piece
from kfac_fx.passes.resolve import align, cases_apart, lacking
from kfac_fx.recording.statistics import Key, additive
from kfac_fx.recording.taps import over_sources, over_uses, scales

__all__ = [
    "ConvDiagonalFB",
    "ConvKFCBasicFB",
    "ConvKFCBasicMultiIndepFB",
    "DepthwiseConvDiagonalFB",
    "DepthwiseConvKFCBasicFB",
    "DiagonalFB",
    "EmbeddingKFACFB",
    "EmbeddingKFACMultiIndepFB",
    "FisherBlock",
    "FisherFactor",
    "FullFB",
    "FullyConnectedDiagonalFB",
    "FullyConnectedKFACBasicFB",
    "FullyConnectedMultiIndepFB",
    "FullyConnectedSeriesFB",
    "KroneckerProductFB",
    "NaiveDiagonalFB",
    "NaiveFB",
    "NaiveFullFB",
    "ScaleAndShiftDiagonalFB",
    "ScaleAndShiftFullFB",
]

REGISTERED_BY = {
    "multiply_inverse": "register_inverse()",
    "multiply_matpower": "register_matpower(exp)",
    "multiply_cholesky": "register_cholesky()",
    "multiply_cholesky_inverse": "register_cholesky_inverse()",
}
NESTED = "write instantiate_factors([[gradient]], damping, [input]) for one source, one tower and one use"


class Collection(Protocol):
    """The members of a `LayerCollection` that its blocks use. The collection is made of blocks, so it imports them."""

    layers: Mapping[str, Layer]
    parameters: Mapping[str, nn.Parameter]
    pieces: dict[str, Piece]
    sampling: Sampling | None
    estimator: Any

    def names_of(self, params: Any) -> Key: ...
    def find_uses(self, layers: Sequence[str], params: Key, inputs: Nodes, outputs: Nodes) -> tuple[Use, ...]: ...


class FisherBlock:
    """One block of the Fisher. Vectors are dicts by name, or tensors in the order of `params`.

    Attributes:
        layers, default: the declared layers that the class may stand for, empty for any; its approximation.
        params: the names of the parameters.
        towers: for every mini-batch the uses of the parameters in it.
        num_uses: how many uses one output holds, one after another; None: one.
        reason: why the block is not the default one; None if it is.
        sampling, patch_mask: the rows that the input factor is computed from, and what patches are multiplied with.
        side_blocks: into how many diagonal blocks the factors of the outputs and of the inputs are cut.
    """

    layers: ClassVar[tuple[str, ...]] = ()
    default: ClassVar[str] = "kron"

    def __init_subclass__(cls, layers: tuple[str, ...] | None = None, default: str | None = None) -> None:
        super().__init_subclass__()
        cls.layers, cls.default = layers or cls.layers, default or cls.default

    def __init__(
        self,
        layer_collection: Collection,
        params: Any,
        approximation: str | None = None,
        *,
        num_uses: int | None = None,
        reason: str | None = None,
    ) -> None:
        """A block without uses. approximation: a name of `passes.approximations`; None: the default of the class.

        Raises RegistrationError for parameters that the model does not have, ApproximationError for an unknown name.
        """
        self.layer_collection = layer_collection
        self.params = layer_collection.names_of(params)
        self.approximation = choice("approximation", approximation or self.default, APPROXIMATIONS, ApproximationError)
        self.num_uses, self.reason = num_uses, reason
        self.sampling: Sampling | None = layer_collection.sampling
        self.patch_mask: Tensor | None = None
        self.side_blocks = (1, 1)
        self.towers: list[tuple[Use, ...]] = []
        self._roots: tuple[Root, ...] = ()
        self._batch: tuple[dict[str, Tensor], int, float | Tensor] | None = None
        self._operator: blocks.BlockOperator | None = None  # made of the batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.params)}, {self.approximation}, {len(self.towers)} towers)"

    # --- uses -------------------------------------------------------------------------------------------------------

    @property
    def structure(self) -> Approximation:
        """The approximation that `approximation` names."""
        return APPROXIMATIONS[self.approximation]

    @property
    def terms(self) -> str:
        """The facts that another registration of the same parameters must agree with."""
        uses = "" if self.num_uses is None else f", num_uses={self.num_uses}"
        return f"{type(self).__name__} ({self.approximation}{uses})"

    def check_rows(self, sampling: Sampling | None, patch_mask: Tensor | None) -> None:
        """Raises RegistrationError if its input factor is of other rows. None agrees with everything."""
        names = ", ".join(self.params)
        if sampling is not None and sampling != (self.sampling or Sampling()):
            raise RegistrationError(f"{names}: its input factor is of {self.sampling or Sampling()}, not of {sampling}")
        same = self.patch_mask is not None and patch_mask is not None and torch.equal(self.patch_mask, patch_mask)
        if patch_mask is not None and not same:
            there = "no patch_mask" if self.patch_mask is None else "another patch_mask"
            raise RegistrationError(f"{names}: its first registration has {there}; all towers have one")

    @property
    def num_registered_towers(self) -> int:
        """The number of mini-batches that were registered."""
        return len(self.towers)

    num_registered_minibatches = num_registered_towers

    def register_additional_tower(self, inputs: Nodes = None, outputs: Nodes = None) -> None:
        """Add the uses of one more mini-batch: the layer at `outputs`, a node or a list with one node per use.

        Raises RegistrationError if there is no such layer with these parameters; else as `add_tower`.
        """
        self.add_tower(self.layer_collection.find_uses(self.layers, self.params, inputs, outputs))

    register_additional_minibatch = register_additional_tower

    def add_tower(self, uses: Iterable[Use]) -> None:
        """Add uses that were found.

        Raises RegistrationError if the uses lay out the parameters differently, ApproximationError if one is of a
        layer or a place that does not have the block's approximation, and both as `in_time` does for series.
        """
        tower = tuple(uses)
        places = ", ".join(use.output.name for use in tower)
        aligned = align([use for uses in (*self.towers, tower) for use in uses])
        if aligned is None:
            raise RegistrationError(f"{', '.join(self.params)}: the use at {places} lays them out differently")
        layers = self.layer_collection.layers
        for use in aligned:
            available = layers[use.layer].approximations
            apart = not all(step.keeps_pixels for step in use.through)
            if self.approximation not in available or (self.structure.needs_pixels and apart):
                kind = f"{'a transposed' if use.transposed else 'a part of a'} {use.layer}" if apart else use.layer
                raise ApproximationError(
                    f"{', '.join(self.params)} at {use.output.name}: {kind} has no {self.approximation!r}, but "
                    f"{', '.join(name for name in available if name != self.approximation)}"
                )
            left_out = next((step.left_out for step in use.through if step.left_out), None)
            if self.structure.needs_exact_rows and left_out:
                raise ApproximationError(
                    f"{', '.join(self.params)} at {use.output.name}: {left_out}; "
                    f"{self.approximation!r} needs the whole gradient: take 'kron'"
                )
            if self.structure.needs_cases and not cases_apart(layers, use):
                raise ApproximationError(
                    f"{', '.join(self.params)} at {use.output.name}: the cases are merged with positions there, and "
                    f"{self.approximation!r} needs the gradient of every case: keep their dimension, or take 'kron'"
                )
        if self.structure.series:
            latest = aligned[len(aligned) - len(tower) :]
            tower = in_time(self.params, self.approximation, (*self.towers, latest), layers, self.num_uses)
        self.towers.append(tower)
        self._operator = None

    @property
    def registration(self) -> Registration:
        """The block as the rest of the library sees it."""
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
        """The pieces of parameters among `names`."""
        return tuple(self.layer_collection.pieces[name] for name in names if name in self.layer_collection.pieces)

    def tensors_to_compute_grads(self) -> list[list[fx.Node]] | tuple[str, ...]:
        """The output nodes of every tower; of a generic block the names of its parameters."""
        return [[use.output for use in tower] for tower in self.towers]

    # --- factors of one batch ---------------------------------------------------------------------------------------

    def instantiate_factors(
        self, grads_list: Sequence[Any], damping: float | Tensor, inputs: Sequence[Any] = (), cases: int | None = None
    ) -> None:
        """Make the factors from the tensors of one batch, without an estimator.

        Args:
            grads_list: for every source, for every tower (for every use, if there are several) the gradient of the
                loss, summed over cases, with respect to the output, shaped as the output.
            damping: λ of F + λ I.
            inputs: for every tower (and use) the value of the layer's input.
            cases: the number of cases in the batch; None: the first dimension of the outputs, over all towers.

        Raises ValueError for tensors instead of lists, and for tensors that are not of the block's uses.
        """
        if isinstance(grads_list, Tensor) or not len(grads_list):
            raise ValueError(f"grads_list of {self} must hold a list for every source; {NESTED}")
        registration, layers = self.registration, self.layer_collection.layers
        values = self._by_use(inputs, "inputs")
        by_source = [self._by_use(grads, f"grads_list[{n}]") for n, grads in enumerate(grads_list)]
        sums = [over_uses(registration, grads, values, layers) for grads in by_source]
        first = [next(iter(listed_tensors(tower))) for tower in grads_list[0]]
        counted = sum(grad.shape[0] // (self.num_uses or 1) for grad in first)
        self._take(over_sources(sums), cases or counted, damping)

    def _by_use(self, tensors: Sequence[Any], argument: str) -> list[Tensor]:
        if isinstance(tensors, Tensor):
            text = f"{argument} of {self} is one tensor, instead of a list with one for every tower"
            raise ValueError(f"{text}; {NESTED}")
        values = [tensor for tower in tensors for tensor in listed_tensors(tower)]
        if len(values) != (uses := sum(map(len, self.towers))):
            several = "1 use" if uses == 1 else f"{uses} uses"
            raise ValueError(f"{self} has {several} in its towers, and {argument} has {len(values)} tensors; {NESTED}")
        return values

    def _take(self, sums: dict[str, Tensor], cases: int, damping: float | Tensor) -> None:
        self._batch, self._operator = (sums, cases, damping), None

    @property
    def operator(self) -> blocks.BlockOperator:
        """The block with numbers: of the batch of `instantiate_factors`, else the estimator's.

        Raises FactorNotReady without both.
        """
        if self._operator is not None:
            return self._operator
        if self._batch is None:
            if (estimator := self.layer_collection.estimator) is None:
                raise FactorNotReady(
                    f"{self} has no factors yet: build a FisherEstimator on its layer collection, or call "
                    "instantiate_factors with the gradients of a batch."
                )
            block: blocks.BlockOperator = estimator.blocks[self.registration.parameters]
            return block
        sums, cases, damping = self._batch
        parameters, dtype = self.layer_collection.parameters, next(iter(sums.values())).dtype
        self._operator = blocks.make_block(
            self.registration, parameters=parameters, damping=damping, roots=self._roots, dtype=dtype
        )
        self._operator.update(sums, cases, decay=0.0)
        self._operator.update_inverses()
        return self._operator

    # --- products ---------------------------------------------------------------------------------------------------

    def register_matpower(self, exp: float) -> None:
        """Keep the power `exp` of F + λ I for `multiply_matpower`. An estimator takes `exps` instead."""
        self._register_root(float(exp))

    def register_inverse(self) -> None:
        """Keep the inverse for `multiply_inverse`. An estimator keeps it unless `exps` leaves it out."""
        self._register_root(-1.0)

    def register_cholesky(self) -> None:
        """Keep the Cholesky factor for `multiply_cholesky`. An estimator takes `compute_cholesky` instead."""
        self._register_root("cholesky")

    def register_cholesky_inverse(self) -> None:
        """Keep its inverse for `multiply_cholesky_inverse`. An estimator takes `compute_cholesky_inverse` instead."""
        self._register_root("cholesky_inverse")

    def _register_root(self, root: Root) -> None:
        if root != 1 and root not in self._roots:
            self._roots, self._operator = (*self._roots, root), None

    def multiply(self, vector: Any) -> Any:
        """(F + λ I) v, with tensors of the shapes of the parameters. Raises as `multiply_matpower`."""
        return self._applied("multiply", vector)

    def multiply_inverse(self, vector: Any) -> Any:
        """(F + λ I)⁻¹ v. Raises as `multiply_matpower`."""
        return self._applied("multiply_inverse", vector)

    def multiply_matpower(self, vector: Any, exp: float) -> Any:
        """(F + λ I)^exp v.

        Raises FactorNotReady without an estimator and before `instantiate_factors`, NotRegisteredError for a root that
        was not registered, ValueError for another number of tensors.
        """
        return self._applied("multiply_matpower", vector, exp)

    def multiply_cholesky(self, vector: Any, transpose: bool = False) -> Any:
        """L v, or Lᵀ v with `transpose`, where L Lᵀ = F + λ I. Raises as `multiply_matpower`."""
        return self._applied("multiply_cholesky", vector, transpose)

    def multiply_cholesky_inverse(self, vector: Any, transpose: bool = False) -> Any:
        """L⁻¹ v, or L⁻ᵀ v with `transpose`. Raises as `multiply_matpower`."""
        return self._applied("multiply_cholesky_inverse", vector, transpose)

    def full_fisher_block(self) -> Tensor:
        """F without damping as a dense matrix [p, p], in the order of the flattened matrix [g, o, i]."""
        return self.operator.full_fisher_block()

    def _applied(self, method: str, vector: Any, *args: Any) -> Any:
        listed = isinstance(vector, (tuple, list))
        if isinstance(vector, Mapping):
            named_vector = vector
        else:
            parts = vector if listed else (vector,)
            if len(parts) != len(self.params):
                raise ValueError(f"a vector of {self} has {len(self.params)} tensors, and got {len(parts)}")
            named_vector = dict(zip(self.params, parts, strict=True))
        operator = self.operator
        try:
            product: dict[str, Tensor] = getattr(operator, method)(named_vector, *args)
        except NotRegisteredError as error:
            if operator is not self._operator or named_vector.keys() != set(self.registration.parameters):
                raise
            text = f"{self} does not keep what {method} needs: call {REGISTERED_BY[method]} before"
            raise NotRegisteredError(text) from error
        if isinstance(vector, Mapping):
            return product
        return tuple(product[name] for name in self.params) if listed else product[self.params[0]]


def listed_tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


# --- series of uses ---------------------------------------------------------------------------------------------------


def in_time(
    params: Key, approximation: str, towers: Sequence[Sequence[Use]], layers: Mapping[str, Layer], num_uses: int | None
) -> tuple[Use, ...]:
    """The last of `towers`, whose uses are the steps of a series or hold `num_uses` steps each.

    Raises ApproximationError if these uses are no series, RegistrationError if their order is not the order in which
    the graph computes them, or if a tensor cannot hold `num_uses` of them.
    """
    names, (*earlier, last) = ", ".join(params), towers
    if num_uses is not None:
        last = [with_steps(names, use, layers[use.layer], num_uses) for use in last]
    uses = [replace(use, tower=n) for n, tower in enumerate([*earlier, last]) for use in tower]
    if why := lacking(APPROXIMATIONS[approximation], layers, uses, but=("several uses",)):
        raise ApproximationError(f"{names}: {why}, so not {approximation!r}")
    order = {node: n for n, node in enumerate(last[0].output.graph.nodes)}
    positions = [order[use.output] for use in last]
    if positions not in (sorted(positions), sorted(positions, reverse=True)):
        raise RegistrationError(
            f"{names}: {approximation!r} takes its uses in the order of time, and the graph computes "
            f"{', '.join(use.output.name for use in last)} in another"
        )
    return tuple(last)


def with_steps(names: str, use: Use, layer: Layer, num_uses: int) -> Use:
    """The use, whose output holds `num_uses` steps: in its first dimension, or in the one dimension of that size."""
    value = use.output.meta.get("val")
    sizes = [] if value is None else [in_example(size) for size in value.shape[:-1]]
    if not layer.forms[use.form].leading:
        raise RegistrationError(
            f"{names} at {where(use.output)}: register the uses as a list; they cannot be told apart"
        )
    dims = [dim for dim, size in enumerate(sizes) if size == num_uses] if len(sizes) > 1 else []
    if len(dims) > 1:
        raise RegistrationError(
            f"{names} at {where(use.output)}: num_uses={num_uses} is the size of dimensions {dims}, so that time could "
            "be either; capture the model with another number of cases"
        )
    time = dims[0] if dims else 0
    cases = use.batch_dim or 0
    positions = [dim for dim in range(len(sizes)) if dim != cases]
    if sizes and (sizes[time] % num_uses or (time != cases and time != positions[0])):
        raise RegistrationError(
            f"{names} at {where(use.output)}: {sizes} rows do not hold "
            f"num_uses={num_uses} one after another, as [num_uses * batch, ...] or [num_uses, batch, ...]"
        )
    return replace(use, steps=num_uses, steps_in_positions=time != cases)


# --- the classes ------------------------------------------------------------------------------------------------------


def layers_of(kind: str) -> tuple[str, ...]:
    """The names of the declared layers that are of a kind of TF K-FAC."""
    return tuple(name for name, layer in LAYERS.items() if layer.tf_kind == kind)


LINEAR, EMBEDDINGS = layers_of("fully_connected"), layers_of("embedding")
CONVOLUTIONS, DEPTHWISE = layers_of("conv2d"), layers_of("depthwise_conv2d")
SCALES = layers_of("scale_and_shift")


# --- by approximation -----------------------------------------------------------------------------------------------


class FullFB(FisherBlock, default="full"):
    """The full F of the block's parameters: the mean over cases of the outer products of gradients."""


class DiagonalFB(FisherBlock, default="diagonal"):
    """The diagonal of F: the mean over cases of squared gradients."""


class KroneckerProductFB(FisherBlock):
    """c A ⊗ G of an input and an output factor (Martens & Grosse 2015, section 3); c: see `kfac_fx.fisher.groups`."""

    @property
    def diagonal_approx_for_input(self) -> bool:
        """Whether A is diagonal."""
        return self.structure.diagonal_inputs

    @property
    def diagonal_approx_for_output(self) -> bool:
        """Whether G is diagonal."""
        return self.structure.diagonal_outputs


# --- generic --------------------------------------------------------------------------------------------------------


class NaiveFB(FisherBlock, default="diagonal"):
    """From the squared gradient of a batch's summed loss: unbiased under sampled targets, with a high variance."""

    def register_additional_tower(self, inputs: Nodes = None, outputs: Nodes = None) -> None:
        """Add one more mini-batch. The gradient of the parameters is summed over all of them, so no node is needed."""
        self.towers.append(())

    @property
    def registration(self) -> Registration:
        return Registration(GENERIC, None, self.params, (), self.approximation, self.reason, self.pieces(self.params))

    def tensors_to_compute_grads(self) -> tuple[str, ...]:
        return self.params

    def instantiate_factors(
        self, grads_list: Sequence[Any], damping: float | Tensor, inputs: Sequence[Any] = (), cases: int | None = None
    ) -> None:
        """Make the factors from the gradients of one batch, without an estimator.

        Args:
            grads_list: for every source the gradients of the parameters, of the loss summed over `cases` cases.
            damping: λ of F + λ I.
            inputs: not used.
            cases: the number of cases in the batch.

        Raises ValueError without `cases`, and for tensors of other shapes.
        """
        parameters = split(self.layer_collection.parameters, [self.registration])
        wanted = [list(parameters[name].shape) for name in self.params]
        for n, grads in enumerate(grads_list):
            if (shapes := [list(grad.shape) for grad in listed_tensors(grads)]) != wanted:
                raise ValueError(
                    f"grads_list[{n}] of {self} has tensors of shapes {shapes}, and the parameters have {wanted}: "
                    "write instantiate_factors([[gradient]], damping, cases=...) for one source and one parameter"
                )
        if cases is None:
            raise ValueError(f"{self}: how many cases were summed over is not in a parameter's gradient; pass cases=")
        sources = torch.stack([torch.cat([grad.flatten() for grad in listed_tensors(grads)]) for grads in grads_list])
        self._take(additive(self.structure, {"gradient": sources}), cases, damping)


class NaiveFullFB(NaiveFB, FullFB, default="full"):
    """g gᵀ / N of a batch of N cases."""


class NaiveDiagonalFB(NaiveFB, DiagonalFB, default="diagonal"):
    """g² / N of a batch of N cases."""


# --- by layer -------------------------------------------------------------------------------------------------------


class FullyConnectedKFACBasicFB(KroneckerProductFB, layers=LINEAR):
    """A ⊗ G of one use, with one row per case; c A ⊗ G with c of them (Martens & Grosse 2015, section 3)."""


class FullyConnectedDiagonalFB(DiagonalFB, layers=LINEAR):
    """The exact diagonal: the gradients of single cases are squared, not their sum."""


class FullyConnectedMultiIndepFB(KroneckerProductFB, layers=LINEAR, default="kron_indep"):
    """T A ⊗ G: T uses of one weight, assumed to be independent (Martens, Ba & Johnson 2018)."""


class FullyConnectedSeriesFB(KroneckerProductFB, layers=LINEAR, default="kron_series_1"):
    """Uses in the order of time, a Markov chain (Martens, Ba & Johnson 2018; `kfac_fx.fisher.series`)."""


class ConvKFCBasicFB(KroneckerProductFB, layers=CONVOLUTIONS):
    """c A ⊗ G of patches and gradients, with c output positions (Grosse & Martens 2016, equation 23).

    With "kron_sua" and its relatives A is of pixels (section 4.2 there; `kfac_fx.fisher.block_diagonal`).
    """


class ConvDiagonalFB(DiagonalFB, layers=CONVOLUTIONS):
    """The exact diagonal: the gradient of a case is summed over positions, then squared."""


class ConvKFCBasicMultiIndepFB(KroneckerProductFB, layers=CONVOLUTIONS, default="kron_indep"):
    """As ConvKFCBasicFB, with the output positions of all uses. The geometry may differ from use to use."""


class DepthwiseConvKFCBasicFB(KroneckerProductFB, layers=DEPTHWISE):
    """One Kronecker product for every channel."""


class DepthwiseConvDiagonalFB(DiagonalFB, layers=DEPTHWISE):
    """As ConvDiagonalFB, for kernels that read one channel each."""


class EmbeddingKFACFB(KroneckerProductFB, layers=EMBEDDINGS, default="kron_in_diag"):
    """With a diagonal input factor, which is exact for one id per case."""


class EmbeddingKFACMultiIndepFB(KroneckerProductFB, layers=EMBEDDINGS + LINEAR, default="kron_in_diag"):
    """Several uses. The transposed use of a tied output layer may be one of them."""


class ScaleAndShiftFullFB(FullFB, layers=SCALES):
    """The full F of all scales and shifts together, from the gradients of single cases."""


class ScaleAndShiftDiagonalFB(DiagonalFB, layers=SCALES):
    """The diagonal of ScaleAndShiftFullFB."""


KRON, MULTI = "kron", "multi"
CLASSES: Mapping[str, Mapping[str, type[FisherBlock]]] = {  # by kind
    "fully_connected": {
        KRON: FullyConnectedKFACBasicFB,
        MULTI: FullyConnectedMultiIndepFB,
        "diagonal": FullyConnectedDiagonalFB,
        "series": FullyConnectedSeriesFB,
    },
    "embedding": {KRON: EmbeddingKFACFB, MULTI: EmbeddingKFACMultiIndepFB},
    "conv2d": {KRON: ConvKFCBasicFB, MULTI: ConvKFCBasicMultiIndepFB, "diagonal": ConvDiagonalFB},
    "depthwise_conv2d": {KRON: DepthwiseConvKFCBasicFB, "diagonal": DepthwiseConvDiagonalFB},
    "scale_and_shift": {"full": ScaleAndShiftFullFB, "diagonal": ScaleAndShiftDiagonalFB},
    GENERIC: {"full": NaiveFullFB, "diagonal": NaiveDiagonalFB},
}
OTHERS: Mapping[str, type[FisherBlock]] = {"full": FullFB, "diagonal": DiagonalFB}


def block_class(layer: str, approximation: str, multi: bool) -> type[FisherBlock]:
    """The class that TF K-FAC has for this, or the plain one of the approximation's kind if it has none."""
    kind = LAYERS[layer].tf_kind if layer in LAYERS else layer
    named = CLASSES.get(kind or "", {})
    if approximation in OTHERS:
        return named.get(approximation, OTHERS[approximation])
    structure = "series" if APPROXIMATIONS[approximation].series else MULTI if multi else KRON
    return named.get(structure, KroneckerProductFB)


# --- kinds of layers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of layer, as TF K-FAC distinguishes them.

    Attributes:
        name: the name of its `register_*` method, without the prefix.
        layers: the declared layers; empty for parameters of no layer.
        default: the approximation if none is asked for, by TF K-FAC's name.
        multi: whether there are several uses.
        aliases: more names of approximations -> ours.
    """

    name: str
    layers: tuple[str, ...]
    default: str
    multi: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def approximations(self) -> Mapping[str, str]:
        """TF K-FAC's names of the approximations -> ours. Kronecker products come first, with the default."""
        rows = [row for row in APPROXIMATIONS.values() if self.name in row.kinds]
        rows.sort(key=lambda row: (not row.kronecker, row.name != self.default))
        names = {(row.multi_name or row.name) if self.multi else row.name: row.name for row in rows}
        return {**self.aliases, **names}

    def ours(self, approx: str) -> str | None:
        """Our name of an approximation; None if the kind does not have it."""
        return self.approximations.get(approx) if isinstance(approx, str) else None


INDEP = {"kron_indep": "kron_indep"} | {
    row.multi_name: row.name for row in APPROXIMATIONS.values() if row.multi_name is not None
}
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("generic", (), "diagonal"),
        Kind("fully_connected", LINEAR, "kron"),
        Kind("conv2d", CONVOLUTIONS, "kron"),
        Kind("depthwise_conv2d", DEPTHWISE, "diagonal"),
        Kind("embedding", EMBEDDINGS, "kron", aliases={"kron": "kron_in_diag"}),
        Kind("scale_and_shift", SCALES, "full"),
        Kind("fully_connected_multi", LINEAR, "kron_indep", multi=True),
        Kind("conv2d_multi", CONVOLUTIONS, "kron_indep", multi=True),
        Kind("embedding_multi", EMBEDDINGS, "kron_indep", multi=True, aliases={"kron_indep": "kron_in_diag"}),
    )
}


def kind_named(kind: str) -> Kind:
    """Raises ApproximationError for a kind that does not exist."""
    return KINDS[choice("kind of layer", kind, KINDS, ApproximationError)]


def check_approximation(approximation: str | None) -> None:
    """Raises ApproximationError for a name that no kind of layer has."""
    if approximation is not None:
        known = dict.fromkeys(name for kind in KINDS.values() for name in kind.approximations)
        choice("approximation", approximation, known, ApproximationError)


# --- factors ----------------------------------------------------------------------------------------------------------


class FisherFactor:
    """One factor of one or several blocks. Blocks that read the same rows have equal input factors.

    Every block averages its own tensor, because blocks are stacked by shape. Equal factors hold equal numbers.

    Attributes:
        name: "A" (of the rows), "G" (of the gradient rows) or "F" (of all parameters of a block).
        diagonal: whether only the diagonal is kept.
        source: equal for equal factors.
        blocks: the blocks that have the factor.
    """

    def __init__(self, name: str, diagonal: bool, source: Hashable) -> None:
        self.name, self.diagonal, self.source = name, diagonal, source
        self.blocks: list[Any] = []

    def __repr__(self) -> str:
        return f"FisherFactor({self.name}, of {', '.join(map(repr, self.blocks))})"

    @property
    def value(self) -> Tensor:
        """Its average, [groups, d, d], or [groups, d] if it is diagonal. Raises FactorNotReady before an update."""
        value: Tensor = self.blocks[0].operator.factors[self.name].value
        return value


def factor_keys(registration: Registration) -> Iterator[tuple[str, bool, Hashable]]:
    """The arguments of `FisherFactor` for each factor of a block."""
    for side in registration.structure.sides:
        yield side.factor, side.diagonal, (side.statistic, source_of(registration, side.factor))


def source_of(registration: Registration, factor: str) -> Hashable:
    if factor == "F" or registration.matrix is None:
        return registration.parameters, registration.generic
    if factor == "G":
        return tuple(
            (use.output, use.through, scales(use)[1], registration.matrix.shape[:2]) for use in registration.uses
        )
    g, _, i = registration.matrix.shape
    if registration.structure.needs_pixels:
        return (g, "pixels", *(use.input for use in registration.uses))
    return (g, i, registration.matrix.bias is None, *(rows_key(use) for use in registration.uses))


def rows_key(use: Use) -> Hashable:
    """The input, and all that its rows depend on besides: geometry, but not the number of outputs."""
    weight: Any = use.attrs.get("weight")
    literals = {name: value for name, value in use.attrs.items() if name not in ("weight", "bias")}
    literal = repr(sorted(literals.items()))
    return use.input, use.layer, use.form, use.through, scales(use)[0], weight and weight[2:], literal
