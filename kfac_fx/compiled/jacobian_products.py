"""Exact inner products in the Fisher of a mini-batch, through Jacobian-vector products.

K-FAC's step size, momentum and damping rule need the quadratic model with the true Fisher of the batch, not with its
Kronecker approximation (Martens & Grosse 2015, sections 6.4 and 7). With F = sum over losses of c Jᵀ B Bᵀ J / cases,
where J is the Jacobian of a loss's inputs, the inner product <d, F e> is c <Bᵀ J d, Bᵀ J e> / cases. It takes one
product with the Jacobian for each of a few vectors, and no backward.

J d is the change of the outputs. So it has the row that an embedding looks up for its `padding_idx`, though the
backward leaves this row out: a step without weight decay does not move it, but weight decay does, as does another use
of a tied weight. `CompiledModule.fisher_product` has the Fisher of the gradients, without this row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfac_fx.compiled.compiled_module import CompiledModule, LossTerms, at_least_one
from kfac_fx.linalg.processes import Replicas, in_place_of, shard
from kfac_fx.linalg.vectors import Tensors, Total, check_backward, in_reverse_mode_twice, local
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.matrix import precise
from kfac_fx.passes.trace import forward_mode
from kfac_fx.passes.tracing.effects import accelerators, same_random
from kfac_fx.recording.equivalence import BAGS, BagsByLookups

LENGTHS = (1.0, 1 / 4, 1 / 16)  # of differences, as parts of the usual length: a shorter one for a function that bends


def fisher_inner_products(
    losses: Callable[[Tensors], LossTerms],
    parameters: Mapping[str, Tensor],
    vectors: Sequence[Mapping[str, Tensor]],
    *,
    ggn: bool = False,
    multiply_jacobian: JacobianProducts | None = None,
) -> Tensor:
    """<d_i, F d_j> for all pairs of `vectors`, [k, k], with the mean Fisher of the batch behind `losses`.

    Args:
        losses: from parameters by name to the (coefficient, loss) pairs of the batch; pure.
        vectors: k directions by parameter name, all with the same names. The other parameters are constants.
        ggn: use the generalized Gauss-Newton factor of the losses.
        multiply_jacobian: remembers, for the next batch and for the report, whether forward mode works.

    All vectors go through one forward pass in forward mode. If an operation has no forward-mode derivative, reverse
    mode is used twice: Jᵀu is linear in u, and its derivative in direction d is J d.
    """
    pairs: LossTerms = []

    def inputs_of_losses(at: Tensors) -> tuple[Tensor, ...]:
        nonlocal pairs
        pairs = losses(at)
        return tuple(loss.inputs for _, loss in pairs)

    inputs, tangents = (multiply_jacobian or JacobianProducts()).along(inputs_of_losses, parameters, vectors)
    # They were built on tensors of the differentiation, which is over.
    here = [(weight, loss.at(at)) for (weight, loss), at in zip(pairs, inputs, strict=True)]
    return products_of_tangents(here, tangents, ggn)


def products_of_tangents(losses: LossTerms, tangents: Sequence[Tensor], ggn: bool) -> Tensor:
    """<J d_i, F J d_j>, [k, k], with the mean Fisher of the losses at their inputs. tangents: J d, [k, ...] a loss."""
    total = torch.zeros((), device=tangents[0].device)
    for (coefficient, loss), tangent in zip(losses, tangents, strict=True):
        multiply = loss.multiply_ggn_factor_transpose if ggn else loss.multiply_fisher_factor_transpose
        rows = multiply(precise(tangent)).flatten(1)
        total = total + coefficient / at_least_one(loss.cases) * torch.stack([(rows * row).sum(1) for row in rows])
    return total


def exact_products(
    net: CompiledModule,
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    parameters: Tensors,
    vectors: Sequence[Tensors],
    *,
    ggn: bool,
    multiply_jacobian: JacobianProducts,
    replicas: Replicas,
    scalar: Tensor,
) -> Tensor:
    """<d_i, F d_j> in the exact Fisher of several calls of the net, in all processes, averaged by cases: [k, k].

    Args:
        calls: arguments of forward.
        parameters: all of the net, by name.
        vectors, ggn, multiply_jacobian: as of `fisher_inner_products`.
        scalar: a zero with the dtype and the device of the result.
    """
    total = scalar
    cases: int | Tensor = 0
    for args, kwargs in calls:
        pairs: LossTerms = []

        def losses(at: Tensors, args: Any = args, kwargs: Any = kwargs) -> LossTerms:
            nonlocal pairs
            pairs = net.losses(*net.functional(at, args, kwargs), call=(args, kwargs))
            return pairs

        of_call = fisher_inner_products(losses, parameters, vectors, ggn=ggn, multiply_jacobian=multiply_jacobian)
        total, cases = total + pairs[0][1].cases * of_call, cases + pairs[0][1].cases
    if replicas.number > 1:  # batches may have different sizes, and no cases at all
        total, cases = replicas.total([total, torch.as_tensor(cases).to(total)])
    return total / at_least_one(cases)


class JacobianProducts:
    """Products with the Jacobian of one model: in forward mode or, from the first operation on that has no forward-mode
    derivative, in reverse mode twice. A backward that has no derivative, as the solver in a hook of an equilibrium
    model, leaves differences of two forwards.

    Attributes:
        reason: the operation, in torch's words; None as long as forward mode works.
        reason_of_differences: why reverse mode, twice, does not work either; None as long as it does.
        length: the part of the usual length that differences have; the longest of `LENGTHS` that was right.
    """

    def __init__(self, total: Total = local) -> None:
        """total: the sum over processes; they check reverse mode together."""
        self.reason: str | None = None
        self.reason_of_differences: str | None = None
        self.length = LENGTHS[0]
        self.dual = True  # until an operation refuses dual numbers
        self.has_bags = False  # of embeddings, which have no forward-mode derivative
        self.total = total

    def fallbacks(self) -> list[str]:
        """For the report: what is slower than it should be, and why."""
        if self.reason is None:
            return []
        if self.reason_of_differences is not None:
            return [
                "the exact quadratic model takes differences of two forwards for every direction, with their rounding "
                f"error, because torch has no derivative in forward mode: {self.reason}\nand none in reverse mode, "
                f"twice: {self.reason_of_differences}"
            ]
        return [
            "the exact quadratic model runs in reverse mode twice, a multiple of the time and memory of forward mode: "
            f"{self.reason}"
        ]

    def along(
        self,
        function: Callable[[Tensors], tuple[Tensor, ...]],
        parameters: Mapping[str, Tensor],
        vectors: Sequence[Mapping[str, Tensor]],
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The values of a function of parameters by name, and its derivatives along k vectors, [k, ...] each.

        vectors: directions by parameter name, all with the same names. The other parameters are constants.
        """
        names = list(vectors[0])
        point = tuple(shard(parameters[name].detach()) for name in names)
        constant = {
            name: in_place_of(value, shard(value.detach()))
            for name, value in parameters.items()
            if name not in vectors[0]
        }

        def at(*values: Tensor) -> tuple[Tensor, ...]:
            here = {name: in_place_of(parameters[name], value) for name, value in zip(names, values, strict=True)}
            return function({**constant, **here})

        # Parameters may be half precision; a direction is converted to what the model computes with.
        stacked = tuple(
            torch.stack([vector[name] for vector in vectors]).to(value.dtype)
            for name, value in zip(names, point, strict=True)
        )
        return self(at, point, stacked)

    def __call__(
        self, function: Callable[..., tuple[Tensor, ...]], point: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The values of `function` and its derivatives in k directions, [k, ...] each; `tangents` are [k, ...] too."""
        # Only the plain formula of attention can be differentiated in forward mode, or twice.
        with sdpa_kernel(SDPBackend.MATH), BagsByLookups() if self.has_bags else nullcontext():
            if self.reason_of_differences is not None:
                return by_differences(function, point, tangents, self.total, self.length)
            if self.reason is not None:
                return in_reverse_mode_twice(function, point, tangents)
            if self.dual and tangents[0].shape[0] == 1:
                try:
                    return by_dual_numbers(function, point, tangents)
                except (RuntimeError, KeyError) as error:
                    if fatal(error):
                        raise
                    self.dual = False  # torch.func knows more, or says what is missing
            try:
                return in_forward_mode(function, point, tangents)
            except (RuntimeError, KeyError) as error:  # no forward-mode formula, or no vmap rule
                if fatal(error):
                    raise
                reason = first_line(error)
                if BAGS in reason and not self.has_bags:
                    self.has_bags = True
                    return self(function, point, tangents)
                if isinstance(error, KeyError):  # of the table of the rules of an operation such as torch.cond
                    reason = f"an operation of higher order has no rule for {reason}"
                try:
                    result = in_reverse_mode_twice(function, point, tangents, check=self.total)
                except RuntimeError as second:
                    if fatal(second):
                        raise
                    result = self.by_checked_differences(function, point, tangents, reason, first_line(second))
                self.reason = reason
                return result

    def by_checked_differences(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        point: tuple[Tensor, ...],
        tangents: tuple[Tensor, ...],
        forward: str,
        reverse: str,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Raises RuntimeError if no differences are those of the backward. forward, reverse: why these modes do not
        work."""
        for length in LENGTHS:
            try:
                result = by_differences(function, point, tangents, self.total, length, check=True)
            except RuntimeError as error:
                if fatal(error):
                    raise
                said = first_line(error)
                continue
            self.reason_of_differences, self.length = reverse, length
            return result
        raise RuntimeError(
            "the exact quadratic model needs products with the Jacobian, and torch has none for this "
            f"model.\n  in forward mode: {forward}\n  in reverse mode, twice: {reverse}\n"
            f"  by differences: {said}\nmomentum_type='regular' and 'adam' need none."
        )


def by_dual_numbers(
    function: Callable[..., tuple[Tensor, ...]], point: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """`in_forward_mode` for one direction. Operations take half the time that they take inside of a transformation of
    torch.func, but a function with a forward-mode derivative of its own is refused: dual numbers do not nest."""
    load_forward_mode()
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(value, tangent[0]) for value, tangent in zip(point, tangents, strict=True)]
        pairs = [forward_ad.unpack_dual(value) for value in function(*duals)]
        zeros = (torch.zeros_like(value) if tangent is None else tangent for value, tangent in pairs)
        return tuple(value for value, _ in pairs), tuple(tangent.unsqueeze(0) for tangent in zeros)


def in_forward_mode(
    function: Callable[..., tuple[Tensor, ...]], point: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    load_forward_mode()

    def push(*tangent: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values, pushed = torch.func.jvp(function, point, tangent)[:2]
        return values, pushed

    if tangents[0].shape[0] == 1:
        values, pushed = push(*(tangent[0] for tangent in tangents))
        return values, tuple(product.unsqueeze(0) for product in pushed)
    # The values do not depend on the direction, so vmap computes them once; noise is the same for all directions.
    value_and_direction: Any = (None, 0)
    result: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    result = torch.func.vmap(push, out_dims=value_and_direction, randomness="same")(*tangents)
    return result


def by_differences(
    function: Callable[..., tuple[Tensor, ...]],
    point: tuple[Tensor, ...],
    tangents: tuple[Tensor, ...],
    total: Total = local,
    length: float = 1.0,
    *,
    check: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(f(p + h d) - f(p - h d)) / 2h, of forwards with the same noise.

    |h d| is the third root of ε times 1 + |p|, where the error of the formula is about that of rounding if third
    derivatives are about as large as values.

    Args:
        total: the sum over processes, which must agree on h.
        length: a factor of h.
        check: compare the differences with the backward; the host waits for it.
    """
    devices, eps = accelerators(point), max(torch.finfo(value.dtype).eps for value in point)
    directions = [[tangent[n] for tangent in tangents] for n in range(tangents[0].shape[0])]
    of_point, *lengths = total(torch.stack([squared_length(vector) for vector in (point, *directions)])).sqrt()
    pushed = []
    with torch.enable_grad():  # forward may differentiate
        for direction, of_direction in zip(directions, lengths, strict=True):
            h = length * eps ** (1 / 3) * (1 + of_point) / torch.where(of_direction == 0, 1, of_direction)
            ends = []
            for step in (h, -h):
                moved = [value + step.to(value) * d for value, d in zip(point, direction, strict=True)]
                with same_random(devices):
                    ends.append([value.detach() for value in function(*moved)])
            pushed.append([(there - back) / (2 * h).to(there) for there, back in zip(*ends, strict=True)])
        leaves = [value.clone().requires_grad_(check) for value in point]
        values = function(*leaves)
    if check:
        live = [n for n, value in enumerate(values) if value.requires_grad]
        said = "they are not those of the backward"

        def anew() -> list[Tensor]:
            """The backward of a Function that saves memory may run once: it writes into what it kept."""
            with torch.enable_grad(), same_random(devices):
                again = function(*leaves)
            return [again[n] for n in live]

        check_backward(anew, leaves, live, tangents, pushed, total, said)
    return tuple(v.detach() for v in values), tuple(torch.stack(products) for products in zip(*pushed, strict=True))


def squared_length(vector: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double().square().sum() for part in vector]).sum()


@cache
def load_forward_mode() -> None:
    """torch loads its forward-mode formulas at the first use, with a function that torch itself has deprecated."""
    with forward_mode():
        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))
