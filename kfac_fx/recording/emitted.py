"""A capture, emitted as a module: how it is run, and which part of a batch it is run on.

A run never changes training: it works on the parameters it is given, copies of the buffers and a forked random stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from kfac_fx.losses.loss_spec import LossSpec
from kfac_fx.losses.registered_losses import RegisteredLosses
from kfac_fx.passes.capture.devices import accelerators, same_random
from kfac_fx.passes.graphs import pytree
from kfac_fx.passes.graphs.labels import symbolic_sizes
from kfac_fx.passes.graphs.operations import OWN_BACKWARD, is_random, op_name
from kfac_fx.passes.ir import Program, Registration, Use
from kfac_fx.passes.rewrite import rewrite
from kfac_fx.passes.trace import Capture
from kfac_fx.recording.backends import CompiledOrPlain, compiled_function
from kfac_fx.statistics.moments import Key
from kfac_fx.taps.link import Link
from kfac_fx.taps.subsample import PHASES
from kfac_fx.taps.tap import Tap


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
