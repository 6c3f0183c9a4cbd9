"""The Fisher blocks under the names that they have in TF K-FAC; they differ in what they may be registered for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac_fx.collection.declared_block import Nodes
from kfac_fx.collection.registered_block import FisherBlock as FisherBlock
from kfac_fx.collection.registered_block import flattened
from kfac_fx.factors.factor import additive
from kfac_fx.linalg.vectors import split
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.ir import GENERIC, Registration
from kfac_fx.passes.layers import LAYERS

LINEAR = ("linear",)
EMBEDDINGS = ("embedding", "embedding_bag")
CONVOLUTIONS = tuple(name for name in LAYERS if name.startswith("conv"))
DEPTHWISE = tuple(name for name in LAYERS if name.startswith("depthwise"))
SCALES = ("scale_and_shift", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")


# --- by the kind of approximation -----------------------------------------------------------------------------------


class FullFB(FisherBlock):
    """F of the block's parameters as it is: the mean over cases of the outer products of gradients."""

    default = "full"


class DiagonalFB(FisherBlock):
    """The diagonal of F: the mean over cases of squared gradients."""

    default = "diagonal"


class KroneckerProductFB(FisherBlock):
    """c A ⊗ G, of an input and an output factor (Martens & Grosse 2015, section 3); scale: `kfac_fx.factors.factor`."""

    @property
    def diagonal_approx_for_input(self) -> bool:
        return self.structure.diagonal_inputs

    @property
    def diagonal_approx_for_output(self) -> bool:
        return self.structure.diagonal_outputs


# --- generic --------------------------------------------------------------------------------------------------------


class NaiveFB(FisherBlock):
    """From the gradient of a batch's summed loss, squared: unbiased under sampled targets, of high variance."""

    default = "diagonal"

    def register_additional_tower(self, inputs: Nodes = None, outputs: Nodes = None) -> None:
        """One more mini-batch; what it is, the gradient knows."""
        self.towers.append(())

    @property
    def registration(self) -> Registration:
        return Registration(GENERIC, None, self.params, (), self.approximation, self.reason, self.pieces(self.params))

    def tensors_to_compute_grads(self) -> tuple[str, ...]:
        return self.params

    def instantiate_factors(
        self, grads_list: Sequence[Any], damping: float | Tensor, inputs: Sequence[Any] = (), cases: int | None = None
    ) -> None:
        """grads_list: for every source the gradients of the parameters, of the loss summed over `cases` cases. Raises
        ValueError without `cases`, and for tensors of other shapes."""
        parameters = split(self.layer_collection.parameters, [self.registration])
        wanted = [list(parameters[name].shape) for name in self.params]
        for n, grads in enumerate(grads_list):
            if (found := [list(grad.shape) for grad in flattened(grads)]) != wanted:
                raise ValueError(
                    f"grads_list[{n}] of {self} has tensors of shapes {found}, and the parameters have {wanted}: write "
                    "instantiate_factors([[gradient]], damping, cases=...) for one source and one parameter"
                )
        flat = [torch.cat([grad.flatten() for grad in flattened(grads)]) for grads in grads_list]
        if cases is None:
            raise ValueError(f"{self}: how many cases were summed over is not in a parameter's gradient; pass cases=")
        self.take(additive(self.structure, {"gradient": torch.stack(flat)}), cases, damping)


class NaiveFullFB(NaiveFB, FullFB):
    """g gᵀ / N of a batch of N cases."""

    default = "full"


class NaiveDiagonalFB(NaiveFB, DiagonalFB):
    """g² / N."""

    default = "diagonal"


# --- by layer -------------------------------------------------------------------------------------------------------


class FullyConnectedKFACBasicFB(KroneckerProductFB):
    """A ⊗ G of one use, with a row a case; c A ⊗ G with c of them (Martens & Grosse 2015, section 3)."""

    layers = LINEAR


class FullyConnectedDiagonalFB(DiagonalFB):
    """Exact: gradients of single cases are squared, and not their sum."""

    layers = LINEAR


class FullyConnectedMultiIndepFB(KroneckerProductFB):
    """T A ⊗ G: T uses of one weight, taken to be independent (Martens, Ba & Johnson 2018)."""

    layers = LINEAR
    default = "kron_indep"


class FullyConnectedSeriesFB(KroneckerProductFB):
    """Uses in the order of time, a Markov chain (Martens, Ba & Johnson 2018; `kfac_fx.blocks.series`)."""

    layers = LINEAR
    default = "kron_series_1"


class ConvKFCBasicFB(KroneckerProductFB):
    """c A ⊗ G of patches and gradients, with c output positions (Grosse & Martens 2016, equation 23); with "kron_sua"
    and its kin A is of pixels (section 4.2 there; `kfac_fx.factors.sua`)."""

    layers = CONVOLUTIONS


class ConvDiagonalFB(DiagonalFB):
    """Exact: the gradient of a case is summed over positions, then squared."""

    layers = CONVOLUTIONS


class ConvKFCBasicMultiIndepFB(KroneckerProductFB):
    """As ConvKFCBasicFB, with the output positions of all uses, whatever the geometry of each."""

    layers = CONVOLUTIONS
    default = "kron_indep"


class DepthwiseConvKFCBasicFB(KroneckerProductFB):
    """A Kronecker product for every channel."""

    layers = DEPTHWISE


class DepthwiseConvDiagonalFB(DiagonalFB):
    """As ConvDiagonalFB, of kernels that see one channel each."""

    layers = DEPTHWISE


class EmbeddingKFACFB(KroneckerProductFB):
    """With a diagonal input factor, which is exact for one id a case."""

    layers = EMBEDDINGS
    default = "kron_in_diag"


class EmbeddingKFACMultiIndepFB(KroneckerProductFB):
    """Several uses, the transposed one of a tied output layer among them."""

    layers = EMBEDDINGS + LINEAR
    default = "kron_in_diag"


class ScaleAndShiftFullFB(FullFB):
    """F of all scales and shifts together, from the gradients of single cases."""

    layers = SCALES


class ScaleAndShiftDiagonalFB(DiagonalFB):
    """Its diagonal."""

    layers = SCALES


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
