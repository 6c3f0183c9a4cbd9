"""Exact inner products in the Fisher of a mini-batch, through Jacobian-vector products.

K-FAC's step size, momentum and damping rule need the quadratic model with the true Fisher of the batch, not with its
Kronecker approximation (Martens & Grosse 2015, sections 6.4 and 7). With F = sum over losses of c Jᵀ B Bᵀ J / cases,
where J is the Jacobian of a loss's inputs, the inner product <d, F e> is c <Bᵀ J d, Bᵀ J e> / cases. It takes one
product with the Jacobian for each of a few vectors, and no backward.

**Precision.** A difference quotient of outputs loses its digits where the forward rounds coarsely. So the forwards
that check a step compute in the precision of the parameters (`CheckPrecision`), whatever the user's forward was
allowed: autocast around them is off, and products of float32 are computed in float32.

Three things still round coarsely: parameters and inputs of half precision, casts that the graph has, and autocast in a
part of forward. Where casts or inputs need the autocast that was around the user's forward, so that their dtypes meet
those of the parameters, the check's forwards have it, too. So have models without a single graph, whose submodules were
captured under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.linalg.matrices import convolutions_are_full, full_precision, products_are_full
from kfac_fx.linalg.processes import Replicas, in_place_of, shard
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.losses.distributions import LossFunction
from kfac_fx.passes.errors import fatal, first_line
from kfac_fx.passes.graphs.labels import named_dtypes
from kfac_fx.passes.matrix import precise
from kfac_fx.passes.torch_private import pytree
from kfac_fx.passes.trace import forward_mode
from kfac_fx.passes.tracing.signature import autocast, ignoring_autocast_of_graphs, kinds
from kfac_fx.recording.equivalence import coarsest_rounding
from kfac_fx.recording.recorder import Recorder

COARSE = 1e-6  # of itself, by which a rounding changes a number
RELATIVE = 1e-3  # of what the terms of an inner product sum to without their signs
COTANGENTS = 4  # of a check: one alone fits a wrong backward by chance, for one batch in sixty of a small model
LossTerms = Sequence[tuple[float, LossFunction]]
Total = Callable[[Tensor], Tensor]  # a sum over processes

# --- precision --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckPrecision:
    """How the check's forwards of one call compute.

    Attributes:
        rounding: the ε of the coarsest precision that takes part in them.
        as_returned: whether the user's forward computed in the same precision, so that a check may take what it
            returned.
        autocast: (kind of device, dtype) pairs of the autocast around them; usually none.
    """

    rounding: float = 0.0
    as_returned: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    @staticmethod
    def of_call(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CheckPrecision:
        """That for a call of the model, in the settings of which the user's forward has just run."""
        around = tuple((dict(autocast()) | dict(recorder.program.autocast)).items())
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if is_real(leaf)]
        cast = max_rounding(named_dtypes(recorder.program)) if recorder.whole else 0.0
        mixed = not recorder.whole or max(cast, max_rounding({leaf.dtype for leaf in tensors})) > COARSE
        around_check = around if mixed else ()
        rounding = max(cast, coarsest_rounding(recorder, (args, kwargs), around=bool(around_check)))
        devices = {parameter.device.type for parameter in recorder.model.parameters()}
        full = products_are_full() and convolutions_are_full(devices)
        return CheckPrecision(rounding, full and around == around_check, around_check)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Forwards inside have this precision. All settings are restored at the end."""
        with full_precision(everything=True), ignoring_autocast_of_graphs(), ExitStack() as stack:
            chosen = dict(self.autocast)
            for kind in kinds():
                # Without a cache: dual numbers and tensors of a transformation must not outlive their level.
                dtype = chosen.get(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False))
            yield


OWN_PRECISION = CheckPrecision()  # of parameters and inputs that do not round


def is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def max_rounding(dtypes: set[torch.dtype]) -> float:
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


# --- inner products ---------------------------------------------------------------------------------------------------


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
    names = list(vectors[0])
    constant = {
        name: in_place_of(value, shard(value.detach())) for name, value in parameters.items() if name not in vectors[0]
    }
    point = tuple(shard(parameters[name].detach()) for name in names)
    pairs: LossTerms = []

    def inputs_of_losses(*values: Tensor) -> tuple[Tensor, ...]:
        nonlocal pairs
        here = {name: in_place_of(parameters[name], value) for name, value in zip(names, values, strict=True)}
        pairs = losses({**constant, **here})
        return tuple(loss.inputs for _, loss in pairs)

    # Parameters may be half precision; a direction is converted to what the model computes with.
    stacked = tuple(
        torch.stack([vector[name] for vector in vectors]).to(value.dtype)
        for name, value in zip(names, point, strict=True)
    )
    multiply_jacobian = multiply_jacobian or JacobianProducts()
    inputs, tangents = multiply_jacobian(inputs_of_losses, point, stacked)
    total = torch.zeros((), device=inputs[0].device)
    for (coefficient, loss), at, tangent in zip(pairs, inputs, tangents, strict=True):
        here = loss.at(at)  # it was built on a tensor of the differentiation, which is over
        multiply = here.multiply_ggn_factor_transpose if ggn else here.multiply_fisher_factor_transpose
        rows = multiply(precise(tangent)).flatten(1)
        total = total + coefficient / at_least_one(here.cases) * torch.stack([(rows * row).sum(1) for row in rows])
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


def local(values: Tensor) -> Tensor:
    """The sum over one process."""
    return values


def at_least_one(cases: int | Tensor) -> int | Tensor:
    return cases.clamp(min=1) if isinstance(cases, Tensor) else max(1, cases)


@contextmanager
def outside_autocast() -> Iterator[Callable[[Callable[..., Any] | None], Callable[..., Any] | None]]:
    """Inside, nothing is rounded by an autocast that a user has entered. Yields a function that returns a user's
    function as it runs outside: under that autocast."""
    ambient = autocast()

    def as_outside(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if function is None or not ambient:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for kind, dtype in ambient:
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
                return function(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for kind, _ in ambient:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield as_outside


class JacobianProducts:
    """Products with the Jacobian of one model: in forward mode or, from the first operation on that has no forward-mode
    derivative, in reverse mode twice.

    Attributes:
        reason: the operation, in torch's words; None as long as forward mode works.
    """

    def __init__(self, total: Total = local) -> None:
        """total: the sum over processes; they check reverse mode together."""
        self.reason: str | None = None
        self.dual = True  # until an operation refuses dual numbers
        self.total = total

    def fallbacks(self) -> list[str]:
        """For the report: what is slower than it should be, and why."""
        if self.reason is None:
            return []
        return [
            "the exact quadratic model runs in reverse mode twice, a multiple of the time and memory of forward mode: "
            f"{self.reason}"
        ]

    def __call__(
        self, function: Callable[..., tuple[Tensor, ...]], point: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The values of `function` and its derivatives in k directions, [k, ...] each; `tangents` are [k, ...] too."""
        # Only the plain formula of attention can be differentiated in forward mode, or twice.
        with sdpa_kernel(SDPBackend.MATH):
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
                if isinstance(error, KeyError):  # of the table of the rules of an operation such as torch.cond
                    reason = f"an operation of higher order has no rule for {reason}"
                try:
                    result = in_reverse_mode_twice(function, point, tangents, check=self.total)
                except RuntimeError as second:
                    if fatal(second):
                        raise
                    raise RuntimeError(
                        "the exact quadratic model needs products with the Jacobian, and torch has none for this "
                        f"model.\n  in forward mode: {reason}\n  in reverse mode, twice: {first_line(second)}\n"
                        "momentum_type='regular' and 'adam' need none."
                    ) from second
                self.reason = reason
                return result


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


def in_reverse_mode_twice(
    function: Callable[..., tuple[Tensor, ...]],
    point: tuple[Tensor, ...],
    tangents: tuple[Tensor, ...],
    check: Total | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """check: run `check_linear` with this sum over processes; the host waits for it."""
    with torch.enable_grad():
        leaves = [value.clone().requires_grad_() for value in point]
        values = function(*leaves)
        dummies = [torch.ones_like(value, requires_grad=True) for value in values]
        live = [n for n, value in enumerate(values) if value.requires_grad]
        pulled = torch.autograd.grad(
            [values[n] for n in live], leaves, [dummies[n] for n in live], create_graph=True, materialize_grads=True
        )
    pushed = [
        # Reading all k directions off one graph: a vmapped second pass would need the very rules that were missing.
        torch.autograd.grad(
            [p for p in pulled if p.requires_grad],
            dummies,
            [t[n] for t, p in zip(tangents, pulled, strict=True) if p.requires_grad],
            retain_graph=True,
            materialize_grads=True,
        )
        for n in range(tangents[0].shape[0])
    ]
    if check is not None:
        for number in range(COTANGENTS):
            cotangents = [normal_like(value, number) for value in values]
            pulled = torch.autograd.grad(
                [values[n] for n in live],
                leaves,
                [cotangents[n] for n in live],
                retain_graph=True,
                materialize_grads=True,
            )
            check_linear(cotangents, pulled, tangents, pushed, check)
    return tuple(v.detach() for v in values), tuple(torch.stack(products) for products in zip(*pushed, strict=True))


def normal_like(value: Tensor, seed: int) -> Tensor:
    """Standard normal numbers that are the same at every call. The random state of the training stays as it is."""
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value)


def check_linear(
    cotangents: Sequence[Tensor],
    pulled: Sequence[Tensor],
    tangents: Sequence[Tensor],
    pushed: Sequence[Sequence[Tensor]],
    total: Total = local,
) -> None:
    """Raises RuntimeError if <u, J d> is not <Jᵀ u, d>.

    A user's backward may detach its gradient, or clip it. Its derivative is then not J.

    Args:
        cotangents: u, in the form of the outputs.
        pulled: Jᵀ u by the backward itself, in the form of the parameters.
        tangents: the directions d, k in front.
        pushed: J d of every direction, by the derivative of the backward.
        total: the sum over processes.
    """
    tolerance = max(RELATIVE, *(16 * torch.finfo(tensor.dtype).eps for tensor in (*pulled, *pushed[0])))
    for n, products in enumerate(pushed):
        right = torch.cat([(p * t[n]).double().flatten() for p, t in zip(pulled, tangents, strict=True)])
        left = torch.cat([(u * p).double().flatten() for u, p in zip(cotangents, products, strict=True)])
        sums = total(torch.stack([left.sum() - right.sum(), left.abs().sum() + right.abs().sum()]))
        if bool(sums[0].abs() > tolerance * sums[1]):
            raise RuntimeError("the backward of an autograd.Function is not linear in the gradient, or hides it")


@cache
def load_forward_mode() -> None:
    """torch loads its forward-mode formulas at the first use, with a function that torch itself has deprecated."""
    with forward_mode():
        torch.func.jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))
