"""A capture, emitted as a module: how it is run, and which part of a batch it is run on.

A run never changes training: it works on the parameters it is given, copies of the buffers and a forked random stream.

The losses on the outputs of one run: of which distributions, over how many cases, without what is padding.

Recording: the emitted module run on a batch of its own, or riding on the user's, and what comes out of it.

Recording never changes training. The recording pass works on detached parameters, copies of the buffers and a forked
random stream; a ride returns the very outputs of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from kfac_fx.linalg.matrices import dense, full_precision
from kfac_fx.linalg.vectors import split
from kfac_fx.losses import LossFunction
from kfac_fx.losses.registered import NAMES, LossSpec, RegisteredLosses, WeightedLosses, cases_by_loss
from kfac_fx.losses.sources import check_mode, is_exact, one_source
from kfac_fx.passes.errors import LossError, UntraceableError
from kfac_fx.passes.graphs import pytree
from kfac_fx.passes.graphs.labels import symbolic_sizes
from kfac_fx.passes.graphs.operations import OWN_BACKWARD, is_random, op_name
from kfac_fx.passes.ir import Program, Registration, Use
from kfac_fx.passes.rewrite import rewrite
from kfac_fx.passes.trace import Capture
from kfac_fx.passes.tracing.devices import accelerators, same_random
from kfac_fx.recording.backends import CompiledOrPlain, compiled_function, lasting
from kfac_fx.recording.exact import MEMORY, ExactPass, SavedBytes
from kfac_fx.recording.masks import real_losses
from kfac_fx.statistics.moments import Key, Moments, Ride, flat
from kfac_fx.taps.link import Link
from kfac_fx.taps.subsample import PHASES
from kfac_fx.taps.tap import Tap, make_probes


@dataclass
class Emitted:
    """One capture, emitted, with the ways to run it.

    statistics: by registration (its parameters), the names of the statistics that its block needs.
    loss: the user's, from the model's outputs or from nodes of the graph; None if forward computes it.
    """

    capture: Capture
    program: Program
    model: nn.Module
    loss: LossSpec | RegisteredLosses | None
    statistics: Mapping[Key, tuple[str, ...]]
    backend: str = "eager"
    make_tap: type[Tap] = Tap
    proven: bool = False
    settings: tuple[Mapping[str, Any], ...] | None = None  # of the model: what the graph holds for; None: any
    emitted: Any = field(init=False)
    taps: dict[Key, list[Tap]] = field(default_factory=dict, init=False)  # one a use, in their order

    def __post_init__(self) -> None:
        layers = self.program.layers
        self.emitted = rewrite(
            self.program,
            self.tap_of,
            lambda one, use, first, last: Link(one, use, layers[use.layer], first, last),
        )
        targets = {str(node.target) for node in self.emitted.graph.nodes if node.op == "get_attr"}
        self.parameter_names = [name for name, _ in self.model.named_parameters() if name in targets]
        self.buffer_names = [name for name, _ in self.model.named_buffers(remove_duplicate=False) if name in targets]
        self.random = any(is_random(node) for node in self.emitted.graph.nodes)
        self.placeholders = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        self.compiled = [compiled(self.call, self.emitted.graph, self.backend)]
        self.run = self.compiled[0]
        self.recordings = 0

    def tap_of(self, one: Registration, use: Use) -> Tap:
        tap = self.make_tap(one, use, self.program.layers[use.layer])
        self.taps.setdefault(one.parameters, []).append(tap)
        return tap

    @property
    def plain_reason(self) -> str | None:
        """Why a graph runs without the compiler that it was to run under; None if none does."""
        return next((reason for one in self.compiled if (reason := getattr(one, "reason", None))), None)

    @property
    def sampled(self) -> list[Tap]:
        return [tap for taps in self.taps.values() for tap in taps if tap.sampling is not None]

    @property
    def whole(self) -> bool:
        """Whether one graph is the whole model, so that none of its Python runs."""
        return True

    def cast_to(self) -> set[torch.dtype]:
        """What autocast inside of forward makes of its tensors, as far as the captures know of it."""
        return set()

    def note_proof(self, made: bool) -> None:
        """Called when the batch that a proof was made on, or would have been, is through."""

    # --- running the emitted module ---------------------------------------------------------------------------------

    def call(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], values: tuple[Any, ...], probes: Any
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """(what the model returns, flat; the Fisher's outputs) as a pure function but for what `buffers` go through."""
        result: tuple[Any, tuple[Tensor, ...]] = functional_call(
            self.emitted, {**parameters, **buffers}, (*values, probes)
        )
        return result

    def live_parameters(self) -> dict[str, Tensor]:
        return {name: self.model.get_parameter(name) for name in self.parameter_names}

    def copied_buffers(self) -> dict[str, Tensor]:
        return {name: self.model.get_buffer(name).clone() for name in self.buffer_names}

    def sample_anew(self, generator: torch.Generator | None) -> None:
        """Other rows than last time for input factors that are computed from a part of them."""
        if not self.sampled:
            return
        self.recordings += 1
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if generator is not None:
            phases = torch.rand(2, generator=generator, dtype=torch.float64, device=generator.device).to(device)
        else:  # written there by a kernel each, since the host would wait for a copy
            numbers = (self.recordings * step % 1.0 for step in PHASES)
            phases = torch.stack([torch.full((), one, dtype=torch.float64, device=device) for one in numbers])
        for tap in self.sampled:
            tap.phases = phases

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Gradients on, and the global random stream as it was afterwards."""
        with torch.enable_grad(), same_random(accelerators(self.model.parameters()), enabled=self.random):
            yield

    # --- the batch --------------------------------------------------------------------------------------------------

    def case_axis(self, position: int, value: Any) -> int | None:
        """Which axis of an input counts the cases; the first where the graph knows no sizes."""
        if not isinstance(value, Tensor):
            return None
        if self.program.cases is None:
            return 0 if value.dim() else None
        sizes = symbolic_sizes(self.placeholders[position])
        return sizes.index(self.program.cases) if self.program.cases in sizes else None

    def examples(self, values: tuple[Any, ...]) -> int:
        axes = ((value, self.case_axis(position, value)) for position, value in enumerate(values))
        found = [value.shape[axis] for value, axis in axes if axis is not None]
        if not found and self.program.cases is None:  # torch.fx takes lists and dictionaries of tensors as one input
            found = [leaf.shape[0] for leaf in pytree.leaves(values) if isinstance(leaf, Tensor) and leaf.dim()]
        return found[0] if found else 1

    def part(self, values: tuple[Any, ...], fraction: float) -> tuple[Any, ...]:
        """The first `fraction` of the examples of every input that has them."""
        if fraction >= 1.0:
            return values
        total = self.examples(values)
        kept = math.ceil(total * fraction)

        def cut(position: int, value: Any) -> Any:
            axis = self.case_axis(position, value)
            return value if axis is None or value.shape[axis] != total else value.narrow(axis, 0, kept)

        return tuple(cut(position, value) for position, value in enumerate(values))

    def part_of_targets(self, targets: Any, values: tuple[Any, ...], fraction: float) -> Any:
        """What belongs to `part(values, fraction)`: cases are first in targets."""
        total, kept = self.examples(values), self.examples(self.part(values, fraction))

        def cut(value: Any) -> Any:
            has_all = isinstance(value, Tensor) and value.dim() and value.shape[0] == total
            return value[:kept] if has_all else value

        return targets if kept == total else pytree.mapped(cut, targets)


def compiled(function: Callable[..., Any], graph: fx.Graph, backend: str) -> Callable[..., Any]:
    """What runs `graph`, under `backend`."""
    own = any(op_name(node) == OWN_BACKWARD for node in graph.nodes)
    return CompiledOrPlain(function, backend) if own and backend != "eager" else compiled_function(function, backend)


# --- output losses ----------------------------------------------------------------------------------------------------


class OutputLosses(Emitted):
    """An emitted module that knows the losses behind what it returns."""

    @property
    def has_loss(self) -> bool:
        """Whether it is known what the Fisher is of."""
        return bool(self.loss or self.program.losses)

    def losses(self, output: Any, fisher: tuple[Tensor, ...], targets: Any = None) -> WeightedLosses:
        """(coefficient, loss) for each output distribution.

        Args:
            output: what the model returned; the user's loss is built on it.
            fisher: the Fisher's outputs; a loss that the graph computes is built on them.
        """
        if isinstance(self.loss, RegisteredLosses):
            return self.loss.on(fisher, targets)
        if self.loss is None and not self.program.losses:
            raise LossError(
                "no loss is known: the Fisher is that of an output distribution.\n"
                'Name it with compile(..., loss="categorical"), "normal", "multi_bernoulli" or a function of the '
                "model's outputs, or let forward compute cross_entropy, mse_loss or binary_cross_entropy_with_logits."
            )
        if self.loss is not None:
            return self.loss(output, targets)
        given = targets if isinstance(targets, (list, tuple)) else [targets] * len(fisher)
        sites = zip(self.program.losses, fisher, given, strict=True)
        return [graph_loss(site.kind, site.reduction, inputs, target) for site, inputs, target in sites]

    def cases_by_loss(self, losses: WeightedLosses) -> list[int]:
        return cases_by_loss(losses, self.loss.names if isinstance(self.loss, RegisteredLosses) else None)

    def cases(self, losses: WeightedLosses) -> int:
        """Of a batch: how many terms the mean of the loss has; of several losses, the first."""
        return self.cases_by_loss(losses)[0]

    def summed(self, losses: WeightedLosses) -> WeightedLosses:
        """With coefficients that make the sum over cases `cases` times the mean loss, where every loss is a mean over
        its own cases: losses of as many cases keep theirs."""
        each = self.cases_by_loss(losses)
        return [(c if n == each[0] else c * each[0] / n, loss) for (c, loss), n in zip(losses, each, strict=True)]

    def averaged(self, losses: WeightedLosses) -> WeightedLosses:
        """With coefficients for means over the cases of every tower: a tower weighs as much as it has cases."""
        each = self.cases_by_loss(losses)
        return [(c if n == loss.cases else c * loss.cases / n, loss) for (c, loss), n in zip(losses, each, strict=True)]

    def tower_cases(self, fisher: tuple[Tensor, ...]) -> list[int]:
        """The first dimension of every tower's outputs; one entry if towers were not registered."""
        if not isinstance(self.loss, RegisteredLosses):
            return [0]
        found = zip(self.loss.names, self.loss.on(fisher), strict=True)
        return [loss.inputs.shape[0] for name, (_, loss) in found if name == self.loss.names[0]]

    def losses_of_constants(
        self, output: Any, fisher: tuple[Tensor, ...], values: tuple[Any, ...], mode: str, targets: Any
    ) -> tuple[list[Tensor], WeightedLosses]:
        """The Fisher's outputs as leaves of a graph of their own, and the losses made of those."""
        leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in fisher]
        if mode == "empirical" and targets is None and not isinstance(self.loss, LossSpec):
            targets = self.graph_targets(values)
        return leaves, self.real_losses(
            lambda given: self.losses(self.rebuilt(output, fisher, given), tuple(given), targets), leaves, values
        )

    def real_losses(
        self, build: Callable[[Sequence[Tensor]], WeightedLosses], fisher: Sequence[Tensor], values: tuple[Any, ...]
    ) -> WeightedLosses:
        """The losses that `build` makes of the Fisher's outputs, without what is padding for these inputs."""
        if self.program.mask is None:
            return build(fisher)
        mask = evaluated(self.program.mask, dict(zip(self.placeholders, values, strict=True)))
        return real_losses(build, fisher, self.program.mask_dims, mask)

    def rebuilt(self, output: Any, fisher: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
        """What the model returned, with the Fisher's outputs replaced by `leaves`."""
        return self.capture.unflatten(replaced(output, fisher, leaves))

    def graph_targets(self, values: tuple[Any, ...]) -> list[Any]:
        """The targets that forward hands to the losses it computes, which must be inputs of the model."""
        known = dict(zip(self.placeholders, values, strict=True))
        sites = self.loss.losses if isinstance(self.loss, RegisteredLosses) else self.program.losses
        return [evaluated(s.targets, known) if isinstance(s.targets, fx.Node) else s.targets for s in sites]


def replaced(tree: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
    by_id = {id(before): after for before, after in zip(old, new, strict=True)}
    return pytree.mapped(lambda value: by_id.get(id(value), value), tree)


def graph_loss(kind: str, reduction: str, inputs: Tensor, targets: Any) -> tuple[float, LossFunction]:
    """The distribution behind a loss that forward computes, and its weight in the mean over cases."""
    if kind == "categorical" and inputs.dim() > 2:
        inputs = inputs.movedim(1, -1)  # F.cross_entropy has the classes second
    loss = NAMES[kind](inputs, targets=targets)
    if kind == "categorical" or reduction != "mean":
        return 1.0, loss
    return loss.cases / inputs.numel(), loss  # F.mse_loss and the like also average over a case's elements


def evaluated(node: Any, known: dict[Any, Any]) -> Any:
    """The value of a node that depends on inputs only through operations without parameters."""
    if node in known:
        return known[node]
    args = fx.map_arg(node.args, lambda n: evaluated(n, known))
    kwargs = fx.map_arg(node.kwargs, lambda n: evaluated(n, known))
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    if node.op != "call_function":
        raise LossError(f"the targets of the loss at {node.name} are computed from parameters; pass `targets`")
    return node.target(*args, **kwargs)


# --- recorder ---------------------------------------------------------------------------------------------------------


@dataclass
class Recorder(OutputLosses):
    """One capture, emitted, with the ways to record from it."""

    loop_reason: str | None = field(default=None, init=False)  # of the last exact pass; see `Pullback`

    def record(
        self,
        values: tuple[Any, ...],
        *,
        mode: str = "gradients",
        targets: Any = None,
        fraction: float = 1.0,
        generator: torch.Generator | None = None,
        params_stats: bool = False,
        memory: int = MEMORY,
    ) -> Moments:
        """Statistics of one batch from a forward and a backward of our own.

        mode: "gradients" samples the targets from the model's own distribution (Martens & Grosse 2015, §5);
            "empirical" takes the true ones, from `targets` or, where forward computes the loss, from its inputs;
            "curvature_prop", "exact" and either with "_GGN": see `sources`. The exact modes run without a compiler.
        params_stats: sum the parameters' gradients, too.
        memory: bytes that a chunk of the exact modes' sources may take.
        """
        check_mode(mode)
        self.sample_anew(generator)
        targets = self.part_of_targets(targets, values, fraction)
        values, saved = self.part(values, fraction), SavedBytes()
        run, watched = (self.call, saved.watched) if is_exact(mode) else (self.run, nullcontext)
        with self.isolated(), full_precision():
            live = {name: value.detach() for name, value in self.live_parameters().items()}
            generic = [name for one in self.program.registrations if one.generic for name in one.owners]
            named = {
                name: live[name].requires_grad_() for name in (self.program.parameters if params_stats else generic)
            }
            probes = self.make_probes(self.examples(values), next(iter(live.values()), torch.empty(())))
            with watched():
                output, fisher = run(live | named, self.copied_buffers(), values, probes)
            constants, losses = self.losses_of_constants(output, fisher, values, mode, targets)
            if is_exact(mode):
                registrations = self.program.registrations
                exact = ExactPass(
                    mode, registrations, fisher, constants, self.summed(losses), probes, named, saved.total, memory
                )
                statistics, gradients = exact.statistics(), exact.gradients() if params_stats else {}
                self.loop_reason = exact.loop_reason
                return Moments(statistics, self.cases(losses), gradients)
            cotangents = one_source(mode, self.summed(losses), constants, generator)
            leaves = [*(probe for one in probes for probe in one.values()), *named.values()]
            pairs = [(o, c) for o, c in zip(fisher, cotangents, strict=True) if c is not None and o.requires_grad]
            grads = pulled(pairs, leaves)
        found = [
            torch.zeros_like(leaf) if grad is None else lasting(dense(grad), self.backend)
            for leaf, grad in zip(leaves, grads, strict=True)
        ]
        gradients = dict(zip(named, found[len(leaves) - len(named) :], strict=True))
        moments = self.gathered(probes, iter(found), gradients)
        return Moments(moments, self.cases(losses), gradients if params_stats else {})

    def make_probes(self, examples: int, like: Tensor) -> list[dict[str, Tensor]]:
        return [
            {} if one.generic else make_probes(one, self.statistics[one.parameters], examples, like)
            for one in self.program.registrations
        ]

    def gathered(
        self, probes: list[dict[str, Tensor]], found: Iterator[Tensor], gradients: Mapping[str, Tensor]
    ) -> dict[Key, dict[str, Tensor]]:
        """Statistics by registration. found: of all probes in their order; gradients: of generic parameters."""
        statistics: dict[Key, dict[str, Tensor]] = {}
        for one, mine in zip(self.program.registrations, probes, strict=True):
            if one.generic:
                statistics[one.parameters] = {"gradient": flat(list(split(gradients, [one]).values()))}
            else:
                statistics[one.parameters] = {name: next(found) for name in mine}
        return statistics

    def ride(self, values: tuple[Any, ...], generator: torch.Generator | None = None) -> tuple[Any, Ride]:
        """Forward of the emitted module in the place of the model's; the user's backward then fills the probes.

        generator: of the sample of rows, where input factors are computed from one.

        Raises UntraceableError if forward does more than the emitted module would.
        """
        if self.capture.effects:
            done = "\n".join(f"  {effect}" for effect in self.capture.effects)
            raise UntraceableError(
                f"a ride runs in the place of {type(self.model).__name__}, whose forward does more than its graph:\n"
                f"{done}\n"
                'Record in a pass of its own, with estimation_mode="gradients" or net.record(...), or return what '
                "forward keeps."
            )
        self.sample_anew(generator)
        live = self.live_parameters()
        generic = {name: live[name] for one in self.program.registrations if one.generic for name in one.owners}
        views = {name: parameter[...] for name, parameter in generic.items()}  # not `view_as`: sparse gradients pass
        for view in views.values():
            view.retain_grad()  # this forward's part of the parameter's gradient, whatever becomes of `.grad`
        live |= views
        buffers = {name: self.model.get_buffer(name) for name in self.buffer_names}
        examples = self.examples(values)
        probes = self.make_probes(examples, next(iter(live.values()), torch.empty(())))
        if self.backend == "cudagraphs":
            for one in (*views.values(), *(probe for mine in probes for probe in mine.values())):
                one.register_hook(partial(lasting, backend=self.backend))
        output, fisher = self.ridden(live, buffers, values, probes)
        cases = (
            self.cases(
                self.real_losses(
                    lambda given: self.losses(self.rebuilt(output, fisher, given), tuple(given)), fisher, values
                )
            )
            if self.has_loss
            else examples
        )
        ride = Ride(probes, self.program.registrations, views, cases)
        return self.capture.unflatten(output), ride

    def ridden(
        self, live: dict[str, Tensor], buffers: dict[str, Tensor], values: tuple[Any, ...], probes: Any
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """(what the model returns, the Fisher's outputs), in the place of the model's own forward."""
        return self.run(live, buffers, values, probes)  # type: ignore[no-any-return]

    def outputs(self, parameters: Mapping[str, Tensor], values: tuple[Any, ...]) -> tuple[Any, tuple[Tensor, ...]]:
        """(what the model returns, the Fisher's outputs) at other parameters; touches nothing of the model."""
        given = {name: parameters.get(name, value.detach()) for name, value in self.live_parameters().items()}
        with self.isolated():
            output, fisher = self.call(given, self.copied_buffers(), values, [None] * len(self.program.registrations))
        return self.capture.unflatten(output), fisher


def pulled(pairs: list[tuple[Tensor, Tensor]], leaves: list[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of all leaves from (output, cotangent) pairs."""
    if not pairs or not leaves:
        return [None] * len(leaves)
    return torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
