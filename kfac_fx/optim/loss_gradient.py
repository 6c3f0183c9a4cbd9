"""The gradient that the user's backward sends into the Fisher's outputs, and its factor.

The gradient is watched from the forward on. For every registered loss there are targets that fit it best; if it is a
multiple of that loss's own gradient, the multiple is the factor of the trained loss.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from kfac_fx.linalg.matrices import is_differentiable, real_numbers
from kfac_fx.losses import Categorical, Normal
from kfac_fx.losses.distributions import IGNORE_INDEX
from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.passes.errors import LossError, out_of_memory
from kfac_fx.passes.torch_private import backward_roots, pytree
from kfac_fx.passes.tracing.effects import RandomState, same_random
from kfac_fx.recording.recorder import Recorder

LIMIT = 1 << 22  # elements of the Fisher's outputs; of more, only the first cases are watched
PROPORTIONAL = 1e-3  # relative error of a gradient that is a multiple of another, in float32
EXACT = 1e-4  # of a factor that is only told by the loss's value, which may hold other terms


@dataclass
class Watched:
    """One forward of the first step."""

    recorder: Recorder
    outputs: list[Any]  # the leaves of what the model returned
    spec: Any  # their structure
    places: Sequence[int]  # of the Fisher's outputs among them; () if they are inside the forward
    fisher: list[Tensor]  # the values of the Fisher's outputs
    targets: Any  # those that forward hands to its losses, if they are known
    inner: dict[int, list[Tensor]]  # if () above: the gradients of the Fisher's outputs, of every number returned
    cases: int | None  # how many of them are kept; None for all
    part: float  # of the batch that is kept
    autocast: bool
    gradients: dict[int, Tensor] = field(default_factory=dict)  # arrived so far, by leaf
    kept: Sequence[Tensor | None] = ()  # see `OutputLosses.kept`
    thread: int = field(default_factory=threading.get_ident)  # of the forward, and of the backward
    roots: dict[int, Tensor] = field(default_factory=dict)  # what was differentiated, by identity

    @torch.compiler.disable(reason="it reads the frames of the backward")  # type: ignore[untyped-decorator]
    def take(self, leaf: int, gradient: Tensor) -> None:
        self.roots |= {id(root): root.detach() for root in backward_roots(self.thread)}
        gradient = first(gradient.detach(), None if self.inner else self.cases).clone()
        self.gradients[leaf] = gradient + self.gradients[leaf] if leaf in self.gradients else gradient

    @property
    def value(self) -> float | None:
        """The value of the loss that was differentiated; None if it was not one number."""
        values = list(self.roots.values())
        return float(values[0]) if len(values) == 1 and values[0].numel() == 1 else None

    def arrived(self) -> list[Tensor]:
        """The gradient of every one of the Fisher's outputs."""
        gradients = [torch.zeros_like(value) for value in self.fisher]
        for leaf, gradient in self.gradients.items():
            for n, before in enumerate(gradients):
                if self.inner:
                    gradients[n] = before + gradient * self.inner[leaf][n]
                elif self.places[n] == leaf:
                    gradients[n] = gradient
        return gradients

    def left_out(self) -> set[int]:
        """The Fisher's outputs that the trained loss does not depend on, by number.

        If they are inside the forward, those that only returned numbers depend on which no gradient has arrived at.
        """
        if not self.inner:
            return {n for n, place in enumerate(self.places) if place not in self.gradients}
        result = set()
        for n in range(len(self.fisher)):
            leaves = {leaf for leaf, gradients in self.inner.items() if bool(gradients[n].any())}
            result |= {n} if leaves and leaves.isdisjoint(self.gradients) else set()
        return result

    def losses(self) -> tuple[list[Tensor], list[tuple[float, float, LossFunction]]]:
        """The Fisher's outputs as constants, and the losses on them.

        A loss comes as (coefficient as registered, weight of its mean over its own cases, loss).
        """
        constants = [value.detach().requires_grad_(is_differentiable(value)) for value in self.fisher]
        outputs = list(self.outputs)
        for place, constant in zip(self.places, constants, strict=False):
            outputs[place] = constant
        tree, of = pytree.tree_unflatten(outputs, self.spec), self.recorder.losses
        pairs = of.on(tree, tuple(constants), self.targets, self.kept)
        weights = [weight for weight, _ in self.recorder.losses.averaged(pairs)]
        return constants, [(c, weight, loss) for (c, loss), weight in zip(pairs, weights, strict=True)]


def watch(
    recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, start: RandomState
) -> Watched | None:
    """Watch the gradients of `outputs`, what the model returned; None if they would not tell the factor.

    start: the random streams before the forward.
    """
    leaves, spec = pytree.tree_flatten(outputs)
    values = recorder.capture.flatten(args, kwargs)
    hooked, at_outputs = hooked_leaves(recorder, leaves)
    if not hooked:
        return None
    inner: dict[int, list[Tensor]] = {}
    places = hooked if at_outputs else []
    if places:
        fisher = [leaves[n].detach() for n in places]
    else:
        try:
            fisher, inner = within(recorder, values, hooked, start)
        except RuntimeError as error:
            if out_of_memory(error):  # the user's own forward is in memory, too
                return None
            raise
    cases, part = enough(fisher) if not recorder.emitted.case_dims else (None, 1.0)
    if cases == 0:
        return None
    watched = Watched(
        recorder,
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        spec,
        places,
        [first(value, cases).clone() for value in fisher],  # a CUDA graph may write over them before the step
        pytree.tree_map_only(Tensor, lambda leaf: first(leaf, cases), targets(recorder, values)),
        {leaf: [first(gradient, cases) for gradient in gradients] for leaf, gradients in inner.items()},
        cases,
        part,
        any(torch.is_autocast_enabled(value.device.type) for value in fisher),
        kept=[None if kept is None else first(kept, cases) for kept in recorder.losses.kept(values)],
    )
    for leaf in hooked:
        if leaves[leaf].requires_grad:
            leaves[leaf].register_hook(partial(watched.take, leaf))
    return watched


def hooked_leaves(recorder: Recorder, leaves: Sequence[Any]) -> tuple[list[int], bool]:
    """(numbers of the returned leaves through which the loss is trained, whether they are the Fisher's outputs).

    Otherwise they are the numbers that forward returns, such as the loss; none if the structure tells nothing. The
    joined graph of a divided model has the outputs of its submodules, which do not tell what forward returns.
    """
    tensors = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    numbers = [n for n, leaf in tensors.items() if leaf.requires_grad and leaf.numel() == 1]
    if not recorder.whole:
        if recorder.losses.declared is None:  # Python computes the loss inside
            return numbers, False
        return [n for n, leaf in tensors.items() if is_differentiable(leaf)], True
    (end,) = (node for node in recorder.program.graph.nodes if node.op == "output")
    nodes = pytree.tree_leaves(recorder.capture.unflatten(end.args[0]))
    wanted = recorder.program.outputs
    if not wanted or len(nodes) != len(leaves):
        return [], False
    place = {node: number for number, node in enumerate(nodes) if isinstance(node, fx.Node)}
    if all(node in place for node in wanted):
        return [place[node] for node in wanted], True
    return numbers, False


def enough(fisher: Sequence[Tensor]) -> tuple[int | None, float]:
    """(how many cases to keep, their part of all): None for all cases, 0 if a part of them is not possible."""
    elements, sizes = sum(value.numel() for value in fisher), {value.shape[:1] for value in fisher}
    if elements <= LIMIT:
        return None, 1.0
    if len(sizes) > 1 or not min(sizes):
        return 0, 0.0
    ((all_cases,),) = sizes
    cases = max(1, all_cases * LIMIT // elements)
    return cases, cases / all_cases


def first(tensor: Tensor, cases: int | None) -> Tensor:
    """The first cases, in memory of their own, so that the rest can go."""
    return tensor if cases is None or not tensor.dim() else tensor[:cases].clone()


def targets(recorder: Recorder, values: tuple[Any, ...]) -> Any:
    """Those that forward hands to its losses; None if they depend on parameters, or are not all known."""
    try:
        of_losses = recorder.losses.targets_in_graph(values)
    except LossError:
        return None
    return of_losses if of_losses and all(target is not None for target in of_losses) else None


def within(
    recorder: Recorder, values: tuple[Any, ...], hooked: Sequence[int], start: RandomState
) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    """The Fisher's outputs inside a forward that returns numbers, and the gradients of those numbers."""
    live = {name: value.detach().requires_grad_() for name, value in recorder.live_parameters().items()}
    with same_random(start.devices):
        start.restore()
        output, fisher = recorder.outputs(live, values)
    leaves, learned = pytree.tree_leaves(output), [value for value in fisher if value.requires_grad]
    inner = {}
    for n in hooked:
        grads = iter(
            torch.autograd.grad(leaves[n], learned, retain_graph=True, allow_unused=True, materialize_grads=True)
        )
        inner[n] = [next(grads) if value.requires_grad else torch.zeros_like(value) for value in fisher]
    return [value.detach() for value in fisher], inner


# --- factors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossFactor:
    """The trained loss as a multiple of the mean of a registered loss."""

    multiple: float
    loss: LossFunction  # the registered one
    coefficient: float  # its weight
    cases: int  # of the whole batch, also those without a target
    with_targets: float  # the part of the cases that has a target
    spec: object  # the origin of the loss


def factors(watched: Watched, value: float | None, parts: int = 1, loss_scale: float = 1.0) -> list[LossFactor]:
    """The factors of the registered losses, as far as they can be told.

    Args:
        value: of the user's whole loss, if known, without a loss scale.
        parts: the number of losses that the user may have divided it into.
        loss_scale: the factor of the loss in the backward, if it is known.
    """
    arrived, spec = watched.arrived(), watched.recorder.loss
    leaves, weighted = watched.losses()
    known: list[LossFactor] = []
    taken: set[int] = set()
    for registered, weight, loss in weighted:
        gradient = gradient_behind(loss.inputs, leaves, arrived)
        if gradient is None or not bool(gradient.isfinite().all()):
            continue
        if loss.targets is None:
            targets = loss.targets_behind(gradient)
            if targets is None:
                alone = len(weighted) == 1 and watched.part == 1
                multiple = factor_of_value(weight, loss, gradient / loss_scale, value, parts) if alone else None
                if multiple is not None:
                    known.append(LossFactor(multiple * loss_scale, loss, registered, loss.all_cases, 1.0, spec))
                continue
            loss.with_targets(targets)
        expected = torch.autograd.grad(
            weight * loss.evaluate() / loss.all_cases, leaves, allow_unused=True, retain_graph=True
        )
        reached = {n: gradient for n, gradient in enumerate(expected) if gradient is not None}
        multiple = None if taken & {*reached} else ratio([arrived[n] for n in reached], [*reached.values()])
        taken |= {*reached}
        if multiple is not None:
            cases = round(loss.all_cases / watched.part)
            known.append(LossFactor(multiple / watched.part, loss, registered, cases, part_with_targets(loss), spec))
    return known


def gradient_behind(inputs: Tensor, leaves: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor | None:
    """The gradient g of `inputs` that arrives at the leaves as `vectors`, v = Jᵀ g.

    Every element of `inputs` must be a function of one element of the leaves. Then g = J v / diag(J Jᵀ). Products with
    J are those of reverse mode, twice. None if `inputs` needs no gradient.
    """
    if not inputs.requires_grad:
        return None
    dummy = torch.zeros_like(inputs, requires_grad=True)
    wanted = [n for n, leaf in enumerate(leaves) if leaf.requires_grad]
    pulled = torch.autograd.grad(
        inputs, [leaves[n] for n in wanted], dummy, create_graph=True, retain_graph=True, materialize_grads=True
    )
    live = [(product, n) for product, n in zip(pulled, wanted, strict=True) if product.requires_grad]

    def derivative(directions: Sequence[Tensor]) -> Tensor:
        cotangents = [directions[n].to(product) for product, n in live]
        (result,) = torch.autograd.grad([product for product, _ in live], dummy, cotangents, retain_graph=True)
        return result

    ones = torch.autograd.grad(
        inputs, leaves, torch.ones_like(inputs), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return derivative(vectors) / derivative(ones)


def ratio(arrived: Sequence[Tensor], expected: Sequence[Tensor]) -> float | None:
    """f if the first gradient is f times the second."""
    d, r = (torch.cat([real_numbers(g).flatten().double() for g in gradients]) for gradients in (arrived, expected))
    size = float(r @ r)
    if not size or not bool(d.isfinite().all()) or not float(d.norm()):
        return None
    factor = float(d @ r) / size
    rounding = max(PROPORTIONAL, *(16 * torch.finfo(gradient.dtype).eps for gradient in arrived))
    apart = float((d - factor * r).norm())
    return factor if factor > 0 and apart <= rounding * float(d.norm()) else None


def part_with_targets(loss: LossFunction) -> float:
    """The part of the cases that has a target."""
    if not isinstance(loss, Categorical) or loss.targets is None or loss.targets.is_floating_point():
        return 1.0
    return max(1, int((loss.targets != IGNORE_INDEX).sum())) / loss.all_cases


def factor_of_value(
    weight: float, loss: LossFunction, gradient: Tensor, value: float | None, parts: int = 1
) -> float | None:
    """The factor of a squared error with this value and this gradient, if it is one that people write.

    |f c (m - t) / (var N)|² = 2 f c / (var N) · f c |m - t|² / (2 var N); other terms of the loss would hide it.
    """
    if not isinstance(loss, Normal) or not value or not 0 < value < math.inf:
        return None
    factor = float(gradient.double().square().sum()) * loss.var * loss.all_cases / (2 * weight * value)
    cases, elements = loss.all_cases, loss.inputs.numel() / loss.all_cases
    usual = (1 / elements, cases, 0.5, 2.0, 0.5 / elements, cases / 2, cases / elements)
    some = [*usual, *(number / parts for number in (1.0, *usual))] if parts > 1 else usual
    return next((float(number) for number in some if abs(factor - number) <= EXACT * number), None)
