"""Classes of Fisher blocks, kinds of layers and factors under their names in TF K-FAC.

The classes differ in the layers that they may be registered for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kfac_fx.compiled.layer_collection.blocks import FisherBlock as FisherBlock
from kfac_fx.compiled.layer_collection.blocks import listed_tensors
from kfac_fx.compiled.layer_collection.find_use import Nodes
from kfac_fx.linalg.vectors import split
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.errors import ApproximationError, nearest
from kfac_fx.passes.ir import GENERIC, Registration, Use
from kfac_fx.passes.layers import LAYERS
from kfac_fx.recording.statistics.moments import additive
from kfac_fx.recording.taps.rows import scales

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

LINEAR = ("linear",)
EMBEDDINGS = ("embedding", "embedding_bag")
CONVOLUTIONS = tuple(name for name in LAYERS if name.startswith("conv"))
DEPTHWISE = tuple(name for name in LAYERS if name.startswith("depthwise"))
SCALES = ("scale_and_shift", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")


# --- by approximation -----------------------------------------------------------------------------------------------


class FullFB(FisherBlock, default="full"):
    """The full F of the block's parameters: the mean over cases of the outer products of gradients."""


class DiagonalFB(FisherBlock, default="diagonal"):
    """The diagonal of F: the mean over cases of squared gradients."""


class KroneckerProductFB(FisherBlock):
    """c A ⊗ G of an input and an output factor (Martens & Grosse 2015, section 3); c: see `kfac_fx.fisher.factor`."""

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

    With "kron_sua" and its relatives A is of pixels (section 4.2 there; `kfac_fx.fisher.group_kinds`).
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
CLASSES: Mapping[tuple[str, ...], Mapping[str, type[FisherBlock]]] = {
    LINEAR: {
        KRON: FullyConnectedKFACBasicFB,
        MULTI: FullyConnectedMultiIndepFB,
        "diagonal": FullyConnectedDiagonalFB,
        "series": FullyConnectedSeriesFB,
    },
    EMBEDDINGS: {KRON: EmbeddingKFACFB, MULTI: EmbeddingKFACMultiIndepFB},
    CONVOLUTIONS: {KRON: ConvKFCBasicFB, MULTI: ConvKFCBasicMultiIndepFB, "diagonal": ConvDiagonalFB},
    DEPTHWISE: {KRON: DepthwiseConvKFCBasicFB, "diagonal": DepthwiseConvDiagonalFB},
    SCALES: {"full": ScaleAndShiftFullFB, "diagonal": ScaleAndShiftDiagonalFB},
    (GENERIC,): {"full": NaiveFullFB, "diagonal": NaiveDiagonalFB},
}
OTHERS: Mapping[str, type[FisherBlock]] = {"full": FullFB, "diagonal": DiagonalFB}


def block_class(layer: str, approximation: str, multi: bool) -> type[FisherBlock]:
    """The class that TF K-FAC has for this, or the plain one of the approximation's kind if it has none."""
    named = next((classes for layers, classes in CLASSES.items() if layer in layers), {})
    if approximation in OTHERS:
        return named.get(approximation, OTHERS[approximation])
    kind = "series" if APPROXIMATIONS[approximation].series else MULTI if multi else KRON
    return named.get(kind, KroneckerProductFB)


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
    if not isinstance(kind, str) or kind not in KINDS:
        raise ApproximationError(f"{kind!r} is no kind of layer; there are {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    return KINDS[kind]


def check_approximation(approximation: str | None) -> None:
    """Raises ApproximationError for a name that no kind of layer has."""
    if approximation is not None and not any(kind.ours(approximation) for kind in KINDS.values()):
        names = dict.fromkeys(name for kind in KINDS.values() for name in kind.approximations)
        raise ApproximationError(f"{approximation!r} is no approximation.{nearest(approximation, names)}")


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
    for side in (registration.structure.left, registration.structure.right):
        if side is not None:
            same = registration.structure.variant, source_of(registration, side.factor)
            yield side.factor, side.diagonal, same


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
