"""The exact Fisher of one batch times vectors, F v, without a matrix.

F = Σ over the losses of c Jᵀ H J / cases, where J is the Jacobian of the inputs of a loss by the parameters, and H the
Fisher of its distribution, case by case. J v takes a forward in forward mode, and Jᵀ (H J v) another forward and a
backward (Schraudolph 2002, "Fast curvature matrix-vector products for second-order gradient descent"). The blocks of a
`FisherEstimator` approximate this matrix; `ModelSpectrum.solve` takes such a product as its curvature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfac_fx.fisher.block import one_by_one
from kfac_fx.linalg.linear_maps import applied
from kfac_fx.linalg.matrices import dense, full_precision
from kfac_fx.linalg.processes import unsharded
from kfac_fx.linalg.vectors import Vector, check_fits, check_kinds, leading, like_vector, real_vector
from kfac_fx.losses.distributions import LossFunction
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.matrix import precise, real_numbers, real_parameters
from kfac_fx.passes.trace import forward_mode
from kfac_fx.passes.tracing.random_streams import RandomState, accelerators, same_random
from kfac_fx.recording.evaluation import BAGS, BagsByLookups

LossTerms = Sequence[tuple[float, LossFunction]]


def at_least_one(cases: int | Tensor) -> int | Tensor:
    return cases.clamp(min=1) if isinstance(cases, Tensor) else max(1, cases)


class FisherProduct:
    """F v of the batch behind one call of a model; `CompiledModule.fisher_product` makes it.

    The parameters are those at the time of a product; the noise of dropout is that of the time when this was made.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Mapping[str, Tensor]], LossTerms],
        *,
        ggn: bool = False,
        capture: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            losses: from parameters by name to the (coefficient, loss) pairs of the batch; pure.
            ggn: the generalized Gauss-Newton matrix instead of the Fisher.
            capture: captures the call, which is impossible inside of a derivative. The mode of the model may be another
                one at every product.
        """
        self.model, self.losses, self.ggn, self.capture = model, losses, ggn, capture
        self.devices = accelerators(model.parameters())
        self.random = RandomState.now(self.devices)

    def __call__(self, vector: Vector) -> dict[str, Tensor]:
        """F v, without a damping.

        Args:
            vector: by parameter name, of all parameters or of some, whose part of F it is then. All its tensors may
                have the same additional dimensions in front, for many vectors, which are multiplied one by one.

        Raises NotRegisteredError if the vector does not fit, RuntimeError if an operation of the model has no
        forward-mode derivative.
        """
        self.capture()
        named = real_parameters(self.model.named_parameters())
        check_fits(vector, {}, alone=False)
        given, vector = vector, real_vector(vector)
        shapes = {name: parameter.shape for name, parameter in named.items() if name in vector} or {
            name: parameter.shape for name, parameter in named.items()
        }
        check_kinds(vector, shapes)
        lead = leading(vector, shapes)
        check_fits(vector, {name: (*lead, *shape) for name, shape in shapes.items()}, alone=True)

        def product(vector: dict[str, Tensor], transposed: bool) -> dict[str, Tensor]:
            return one_by_one(self.of_one, vector, shapes)  # F is symmetric

        return like_vector(applied(product, {name: dense(unsharded(tensor)) for name, tensor in vector.items()}), given)

    def terms(self, parameters: Mapping[str, Tensor]) -> LossTerms:
        """The losses at these parameters, with the same noise every time."""
        with same_random(self.devices):
            self.random.restore()
            return self.losses(parameters)

    def of_one(self, vector: Vector) -> dict[str, Tensor]:
        """F v of one vector."""
        names = list(vector)
        whole = {name: unsharded(real_numbers(self.model.get_parameter(name).detach())) for name in names}
        point = tuple(whole.values())
        pairs: list[tuple[float, LossFunction]] = []

        def inputs_of_losses(*values: Tensor) -> tuple[Tensor, ...]:
            pairs[:] = self.terms(dict(zip(names, values, strict=True)))
            return tuple(loss.inputs for _, loss in pairs)

        tangents = tuple(vector[name].to(value.dtype) for name, value in whole.items())
        with (
            full_precision(),
            sdpa_kernel(SDPBackend.MATH),
            forward_mode(),
        ):  # attention in pieces has no such derivative
            inputs, pushed = self.forward(inputs_of_losses, point, tangents)
            cotangents = [
                self.of_loss(coefficient, loss.at(at), tangent)
                for (coefficient, loss), at, tangent in zip(pairs, inputs, pushed, strict=True)
            ]
            with torch.enable_grad():
                leaves = [value.detach().requires_grad_() for value in point]
                here = inputs_of_losses(*leaves)
                live = [n for n, value in enumerate(here) if value.requires_grad]
                pulled = torch.autograd.grad(
                    [here[n] for n in live],
                    leaves,
                    [cotangents[n].to(here[n].dtype) for n in live],
                    allow_unused=True,
                    materialize_grads=True,
                )
        return {name: dense(gradient).to(vector[name].dtype) for name, gradient in zip(names, pulled, strict=True)}

    def forward(
        self, function: Callable[..., tuple[Tensor, ...]], point: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        try:
            values, pushed = torch.func.jvp(function, point, tangents)[:2]
        except (RuntimeError, KeyError) as error:
            if fatal(error):
                raise
            if BAGS in str(error):
                with BagsByLookups():
                    return torch.func.jvp(function, point, tangents)[:2]
            raise RuntimeError(
                "the exact product F v needs a forward-mode derivative of the model, and torch has none: "
                f"{first_line(error)}\nTake the product of an approximation, FisherEstimator(net).spectrum().multiply."
            ) from error
        return values, pushed

    def of_loss(self, coefficient: float, loss: LossFunction, tangent: Tensor) -> Tensor:
        """c H t / cases for a vector t in the space of the inputs."""
        multiply = loss.multiply_ggn if self.ggn else loss.multiply_fisher
        product = multiply(precise(tangent))
        return (
            coefficient / at_least_one(loss.cases) * (product if loss.weights is None else product * loss.weights.abs())
        )
