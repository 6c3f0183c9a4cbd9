"""Recording: the emitted module run on a batch of its own, or riding on the user's, and what comes out of it.

Recording never changes training. The recording pass works on detached parameters, copies of the buffers and a forked
random stream; a ride returns the very outputs of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import dense
from kfac_fx.linalg.pieces import split
from kfac_fx.linalg.precision import full_precision
from kfac_fx.losses.sources import check_mode, is_exact, one_source
from kfac_fx.passes.errors import UntraceableError
from kfac_fx.recording.backends import lasting
from kfac_fx.recording.exact import ExactPass
from kfac_fx.recording.output_losses import OutputLosses
from kfac_fx.recording.pullback import MEMORY, SavedBytes
from kfac_fx.statistics.moments import Key, Moments, Ride, flat
from kfac_fx.taps.tap import make_probes


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
