"""What the user's backward sends into the Fisher's outputs, watched from the forward on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from kfac_fx.losses.loss_function import LossFunction
from kfac_fx.passes.errors import LossError, out_of_memory
from kfac_fx.passes.graphs import pytree
from kfac_fx.passes.tracing.devices import RandomState, same_random
from kfac_fx.recording.recorder import Recorder

LIMIT = 1 << 22  # elements of the Fisher's outputs; of more, only the first cases are watched


@dataclass
class Watched:
    """One forward of the first step.

    outputs: the leaves of what the model returned; places: where the Fisher's outputs are among them, () if they are
    inside the forward. fisher: the values of the Fisher's outputs. inner: their gradients, of every number that the
    forward returns instead. cases: how many of them are kept, all if None; part: of the batch. gradients: what has
    arrived so far, by leaf.
    """

    recorder: Recorder
    outputs: list[Any]
    spec: Any
    places: Sequence[int]
    fisher: list[Tensor]
    targets: Any
    inner: dict[int, list[Tensor]]
    cases: int | None
    part: float
    autocast: bool
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def take(self, leaf: int, gradient: Tensor) -> None:
        gradient = first(gradient.detach(), None if self.inner else self.cases).clone()
        self.gradients[leaf] = gradient + self.gradients[leaf] if leaf in self.gradients else gradient

    def arrived(self) -> list[Tensor]:
        """The gradient of every one of the Fisher's outputs."""
        found = [torch.zeros_like(one) for one in self.fisher]
        for leaf, gradient in self.gradients.items():
            for n, one in enumerate(found):
                if self.inner:
                    found[n] = one + gradient * self.inner[leaf][n]
                elif self.places[n] == leaf:
                    found[n] = gradient
        return found

    def losses(self) -> tuple[list[Tensor], list[tuple[float, float, LossFunction]]]:
        """The Fisher's outputs as constants, and on them (coefficient as registered, weight of its mean over its
        own cases, loss)."""
        constants = [one.detach().requires_grad_(one.is_floating_point()) for one in self.fisher]
        outputs = list(self.outputs)
        for place, one in zip(self.places, constants, strict=False):
            outputs[place] = one
        made = self.recorder.losses(pytree.unflatten(outputs, self.spec), tuple(constants), self.targets)
        pairs = zip(made, self.recorder.averaged(made), strict=True)
        return constants, [(registered, own, loss) for (registered, loss), (own, _) in pairs]


def watch(
    recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, start: RandomState
) -> Watched | None:
    """Watch the gradients of `outputs`, what the model returned; None where they would not tell.

    start: the random streams before the forward.
    """
    leaves, spec = pytree.flatten(outputs)
    (end,) = (node for node in recorder.program.graph.nodes if node.op == "output")
    nodes = pytree.leaves(recorder.capture.unflatten(end.args[0]))
    wanted, values = recorder.program.outputs, recorder.capture.flatten(args, kwargs)
    if not wanted or len(nodes) != len(leaves):
        return None
    place = {node: number for number, node in enumerate(nodes) if isinstance(node, fx.Node)}
    inner: dict[int, list[Tensor]] = {}
    places = [place[node] for node in wanted] if all(node in place for node in wanted) else []
    if places:
        watched, fisher = places, [leaves[n].detach() for n in places]
    else:
        tensors = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad}
        watched = [n for n, leaf in tensors.items() if leaf.numel() == 1]
        if not watched:
            return None
        try:
            fisher, inner = within(recorder, values, watched, start)
        except RuntimeError as error:
            if out_of_memory(error):  # the user's own forward is in memory, too
                return None
            raise
    cases, part = enough(fisher)
    if cases == 0:
        return None
    found = Watched(
        recorder,
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        spec,
        places,
        [first(one, cases).clone() for one in fisher],  # a CUDA graph may write over them before the step
        pytree.mapped(lambda one: first(one, cases) if isinstance(one, Tensor) else one, targets(recorder, values)),
        {leaf: [first(one, cases) for one in grads] for leaf, grads in inner.items()},
        cases,
        part,
        any(torch.is_autocast_enabled(one.device.type) for one in fisher),
    )
    for leaf in watched:
        if leaves[leaf].requires_grad:
            leaves[leaf].register_hook(partial(found.take, leaf))
    return found


def enough(fisher: Sequence[Tensor]) -> tuple[int | None, float]:
    """(how many cases to keep, their part of all): None, all of them; 0, it cannot be a part."""
    elements, sizes = sum(one.numel() for one in fisher), {one.shape[:1] for one in fisher}
    if elements <= LIMIT:
        return None, 1.0
    if len(sizes) > 1 or not min(sizes):
        return 0, 0.0
    ((all_cases,),) = sizes
    cases = max(1, all_cases * LIMIT // elements)
    return cases, cases / all_cases


def first(tensor: Tensor, cases: int | None) -> Tensor:
    """Of the first cases, in memory of its own, so that the rest can go."""
    return tensor if cases is None or not tensor.dim() else tensor[:cases].clone()


def targets(recorder: Recorder, values: tuple[Any, ...]) -> Any:
    """Those that forward hands to its losses; None if they depend on parameters, or are not all known."""
    try:
        found = recorder.graph_targets(values)
    except LossError:
        return None
    return found if found and all(one is not None for one in found) else None


def within(
    recorder: Recorder, values: tuple[Any, ...], watched: Sequence[int], start: RandomState
) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    """The Fisher's outputs inside a forward that returns numbers, and the gradients of those numbers."""
    live = {name: value.detach().requires_grad_() for name, value in recorder.live_parameters().items()}
    with same_random(start.devices):
        start.restore()
        output, fisher = recorder.outputs(live, values)
    leaves, learned = pytree.leaves(output), [one for one in fisher if one.requires_grad]
    inner = {}
    for n in watched:
        grads = torch.autograd.grad(leaves[n], learned, retain_graph=True, allow_unused=True, materialize_grads=True)
        found = iter(grads)
        inner[n] = [next(found) if one.requires_grad else torch.zeros_like(one) for one in fisher]
    return [one.detach() for one in fisher], inner
