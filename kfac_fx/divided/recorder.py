"""The mask of a model's call as one more input of its captured submodules.

From the division of a model to the recorder of it.

Recording with a model of which only submodules are captured: the model itself runs, and they run as their graphs.

What lies between them is the model's own Python: branches, loops and random numbers happen as they do. It runs on
copies and leaves no trace, as all recordings do; only a file that it writes is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kfac_fx.divided.frames import Frames, Loss, LossWatch, ServedReads, Unmet, one_call, refuse_read
from kfac_fx.losses import LossFunction
from kfac_fx.losses.registered import WeightedLosses
from kfac_fx.passes.divided.captured import Captured, key_of
from kfac_fx.passes.divided.divide import Division, divide
from kfac_fx.passes.divided.masks import SITES, Site, Sizes, padded, with_masks
from kfac_fx.passes.errors import (
    AmbiguousRegistrationError,
    LossError,
    ModelChangedError,
    UntraceableError,
    fatal,
    first_line,
)
from kfac_fx.passes.graphs import pytree
from kfac_fx.passes.ir import KEPT, Program
from kfac_fx.passes.pipeline import SUBMODULES, run
from kfac_fx.passes.rewrite import rewrite
from kfac_fx.passes.submodules import graph_of
from kfac_fx.passes.trace import Capture
from kfac_fx.passes.tracing.attributes import untouched
from kfac_fx.passes.tracing.calls import Lent, mapped
from kfac_fx.passes.tracing.signature import python_random
from kfac_fx.passes.tracing.watch import custom_functions
from kfac_fx.recording.agreement import Declared, needs
from kfac_fx.recording.examples import cut, examples
from kfac_fx.recording.masks import PaddingMask, along, of_call, real_losses
from kfac_fx.recording.recorder import Recorder, compiled, graph_loss


@dataclass(frozen=True)
class MaskedInputs:
    """sites: of every submodule, the (input, dimension) of the cases and of the positions; None: it has no mask."""

    sites: tuple[tuple[Site, Site] | None, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, parts: Sequence[Program], paths: Sequence[str]) -> MaskedInputs:
        found = (next((one.meta[SITES] for one in part.graph.nodes if SITES in one.meta), None) for part in parts)
        return cls(tuple(found), tuple(paths))

    def of_call(self, number: int, values: tuple[Any, ...], mask: Tensor | None) -> tuple[Any, ...]:
        """A submodule's inputs, and the mask behind them. None: everything is real.

        Raises ModelChangedError if the mask does not fit them.
        """
        site = self.sites[number]
        if site is None:
            return values
        sizes = tuple(values[place].shape[dim] for place, dim in site)
        if mask is None:
            return *values, torch.ones(sizes, device=values[site[0][0]].device)
        if tuple(mask.shape) != sizes:
            raise ModelChangedError(
                f"padding_mask has shape {list(mask.shape)}, and {self.paths[number]} is called on {sizes[0]} cases "
                f"and {sizes[1]} positions, which were as many on the first inputs.\n"
                "Compile with an example in which all of these numbers are unlike each other."
            )
        return *values, mask


# --- division recorder ------------------------------------------------------------------------------------------------


def division_of(
    model: nn.Module,
    declared: Declared,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: UntraceableError,
    known: Division | None,
) -> tuple[Division, Program]:
    """A division, and its program with registrations.

    error: why the whole was not captured; known: the division on other inputs. What Python reads of parameters in a way
    that does not go with what submodules do with them is left to Python.
    """

    for reads in (True, False):
        try:
            made = divide(
                model, args, kwargs, declared.options, declared.layers, error, known, examples(args, kwargs), reads
            )
        except UntraceableError:
            raise
        except Exception as failure:
            if fatal(failure):
                raise
            said = f"{type(failure).__name__}: {first_line(failure)}"
            raise UntraceableError(
                f"{type(model).__name__} does not run on these inputs: {said}\n"
                f"Correct the inputs or the model. What torch.export says:\n{error}"
            ) from failure
        try:
            return made, run(made.program, SUBMODULES)
        except AmbiguousRegistrationError:
            if not any(one.is_read for one in made.captured):
                raise
    raise AssertionError("bug in kfac_fx: a division without reads that has some")


def recorder_of(
    division: Division,
    program: Program,
    model: nn.Module,
    declared: Declared,
    earlier: DividedRecorder | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> DividedRecorder:
    """program: the division's, with registrations. earlier: the recorder whose captures are among these."""
    mask = None if declared.padding_mask is None else of_call(declared.padding_mask, model, args, kwargs)
    now = None if mask is None else (mask.shape[0], mask.shape[1])
    before = {} if earlier is None else dict(zip(map(id, earlier.captured), earlier.mask_sizes, strict=True))
    sizes = tuple(before.get(id(one), now) for one in division.captured)
    masked = with_masks(program, sizes)
    return DividedRecorder(
        as_it_is(division, masked),
        masked,
        model,
        declared.loss,
        needs(masked),
        declared.backend,
        division=division,
        padding_mask=declared.padding_mask,
        mask_sizes=sizes,
    )


def as_it_is(division: Division, program: Program) -> Capture:
    """A capture of a model whose Python runs, with what its submodules do beside their graphs."""
    effects = dict.fromkeys(effect for one in division.captured for effect in one.effects)
    return Capture(
        program, lambda args, kwargs: (args, dict(kwargs)), lambda output: output, lambda *_: True, tuple(effects)
    )


# --- divided ----------------------------------------------------------------------------------------------------------


@dataclass
class DividedRecorder(Recorder):
    """checked: the submodules that were proved, by their places in the division; None: all may run."""

    division: Division | None = None
    padding_mask: PaddingMask | None = None
    mask_sizes: tuple[Sizes | None, ...] = ()  # when each submodule was captured
    checked: set[int] | None = None
    ran: set[int] = field(default_factory=set)  # those that did, in this or another recorder of this capture
    found: list[Loss] = field(default_factory=list, init=False)  # of the last forward
    unmet: Unmet | None = field(default=None, init=False)  # of the last ride

    @property
    def captured(self) -> tuple[Captured, ...]:
        assert self.division is not None, "bug in kfac_fx: a divided model without its division"
        return self.division.captured

    @property
    def written(self) -> frozenset[str]:
        return self.division.written if self.division is not None else frozenset()

    @property
    def whole(self) -> bool:
        return False

    def cast_to(self) -> set[torch.dtype]:
        return {dtype for one in self.captured for _, dtype in one.autocast}

    def note_proof(self, made: bool) -> None:
        self.checked = set(self.ran) if made else None

    def extends(self, earlier: DividedRecorder) -> None:
        """What was proved in `earlier` need not be proved again."""
        before = {id(one): number in earlier.ran for number, one in enumerate(earlier.captured)}
        self.ran |= {number for number, one in enumerate(self.captured) if before.get(id(one))}

    @property
    def has_loss(self) -> bool:
        return bool(self.loss or self.found)

    def __post_init__(self) -> None:
        self.structured = {name for one in self.program.registrations if not one.generic for name in one.owners}
        masked = any(KEPT in use.attrs for one in self.program.registrations for use in one.uses)
        part = padded if masked else graph_of
        graphs = [part(self.program, number) for number in range(len(self.captured))]
        self.masked_inputs = MaskedInputs.of(graphs, [one.submodule.path for one in self.captured])
        self.emitted = [rewrite(one, self.tap_of) for one in graphs]
        self.targets = [{str(n.target) for n in one.graph.nodes if n.op == "get_attr"} for one in self.emitted]
        self.parameter_names = [name for name, _ in self.model.named_parameters()]
        self.buffer_names = [name for name, _ in self.model.named_buffers()]
        self.random, self.recordings, self.placeholders = True, 0, []
        buffers = {id(buffer): name for name, buffer in self.model.named_buffers()}
        every = self.model.named_buffers(remove_duplicate=False)
        self.canonical = {name: buffers[id(buffer)] for name, buffer in every}
        self.plain: list[Callable[..., Any]] = [one_call(module) for module in self.emitted]
        self.compiled = [compiled(f, m.graph, self.backend) for f, m in zip(self.plain, self.emitted, strict=True)]
        self.by_module: dict[int, list[int]] = {}
        for number, one in enumerate(self.captured):
            self.by_module.setdefault(id(one.module), []).append(number)

        def run(*arguments: Any) -> Any:
            return self.through(self.compiled, *arguments)

        self.run = run

    # --- running ----------------------------------------------------------------------------------------------------

    def call(self, parameters: Any, buffers: Any, values: Any, probes: Any) -> tuple[Any, tuple[Tensor, ...]]:
        return self.through(self.plain, parameters, buffers, values, probes)

    def through(
        self,
        functions: list[Callable[..., Any]],
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        values: tuple[Any, ...],
        probes: Any,
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """(what the model returns, the Fisher's outputs), without a trace. functions: one a submodule."""
        parameters = {name: one.clone() if name in self.written else one for name, one in parameters.items()}
        python = self.stand_ins(parameters) if any(probes) else {}
        frames = self.frames(functions, parameters, python, buffers, probes)
        with untouched(self.model):  # forward may write into its inputs, too
            output, fisher = self.forward(frames, {**parameters, **python, **buffers}, mapped(Tensor.clone, values))
        refuse_read(self.model, python, fisher)
        return output, fisher

    def frames(
        self,
        functions: list[Callable[..., Any]],
        parameters: Mapping[str, Tensor],
        python: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        probes: Any,
    ) -> Frames:
        """python: what Python sees in the place of `parameters`."""
        named = {**parameters, **{name: buffers[first] for name, first in self.canonical.items()}}
        held = [{name: named[name] for name in targets if name in named} for targets in self.targets]
        lent = Lent(self.model, {**parameters, **python})
        return Frames(self.captured, self.number_of, functions, held, lent, probes, LossWatch())

    def mask(self, values: tuple[Any, ...]) -> Tensor | None:
        """[cases, positions] of one call; None: nothing is padding."""
        return None if self.padding_mask is None else of_call(self.padding_mask, self.model, *values)

    def forward(
        self, frames: Frames, named: Mapping[str, Tensor], values: tuple[Any, ...]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        args, kwargs = values
        mask = self.mask(values)
        frames.inputs = lambda number, own: self.masked_inputs.of_call(number, own, mask)
        seen = {name: named.get(name, one) for name, one in self.program.parameters.items()}
        reads = ServedReads(frames, seen, self.structured, self.examples(values), self.serving)
        with (
            custom_functions(),
            frames.in_place(),
            frames.watch if self.loss is None else nullcontext(),
            reads.served(),
        ):
            output = functional_call(self.model, dict(named), args, kwargs)
        self.found = frames.watch.found
        if self.loss is None:
            return output, tuple(one.inputs for one in self.found)
        leaves = (leaf for leaf in pytree.leaves(output) if isinstance(leaf, Tensor))
        return output, tuple(leaf for leaf in leaves if leaf.is_floating_point())

    def ridden(
        self, live: dict[str, Tensor], buffers: dict[str, Tensor], values: tuple[Any, ...], probes: Any
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """The model's own forward with its submodules as graphs, so that all that its Python does is done once.

        A call that no graph serves runs as it is, and `unmet` says so: then nothing was recorded.
        """
        python = {name: live[name][...] for name in sorted(self.structured) if live[name].requires_grad}
        frames = self.frames(self.compiled, live, python, buffers, probes)
        frames.tolerant = True
        views = {name: one for name, one in live.items() if one.grad_fn is not None}
        output, fisher = self.forward(frames, {**views, **python}, values)
        self.unmet = frames.unmet
        if self.unmet is None:
            refuse_read(self.model, python, fisher)
        return output, fisher

    def stand_ins(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What Python sees of the structured parameters: that none of it may reach the Fisher's outputs."""
        return {
            name: value.detach().requires_grad_()
            for name, value in parameters.items()
            if name in self.structured and not value.requires_grad
        }

    def number_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Which capture serves a call. Raises Unmet if none does."""
        return self.serving(self.by_module[id(module)], args, kwargs, key_of(module, args, kwargs))

    def serving(self, mine: Sequence[int], args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> int:
        """Which of the captures `mine` does."""
        number = next((n for n in mine if self.captured[n].serves(args, kwargs, key)), None)
        if number is None or (self.checked is not None and number not in self.checked):
            raise Unmet(self.captured[mine[0]].submodule.path if mine else "", number is not None)
        self.ran.add(number)
        return number

    @contextmanager
    def isolated(self) -> Iterator[None]:
        with super().isolated(), python_random():
            yield

    # --- the batch --------------------------------------------------------------------------------------------------

    def examples(self, values: tuple[Any, ...]) -> int:
        return examples(*values)

    def part(self, values: tuple[Any, ...], fraction: float) -> tuple[Any, ...]:
        if fraction >= 1.0:
            return values
        total = self.examples(values)
        kept = max(1, math.ceil(total * fraction))
        args, kwargs = values
        return tuple(cut(one, total, kept) for one in args), {k: cut(one, total, kept) for k, one in kwargs.items()}

    def real_losses(
        self, build: Callable[[Sequence[Tensor]], WeightedLosses], fisher: Sequence[Tensor], values: tuple[Any, ...]
    ) -> WeightedLosses:
        mask = self.mask(values)
        if mask is None:
            return build(fisher)
        return real_losses(build, fisher, [along(mask, one) for one in fisher], mask)

    # --- losses -----------------------------------------------------------------------------------------------------

    def losses(self, output: Any, fisher: tuple[Tensor, ...], targets: Any = None) -> list[tuple[float, LossFunction]]:
        if self.loss is not None or not self.found:
            if self.loss is not None and not fisher:
                name = type(self.model).__name__
                raise LossError(f"{name} returns no tensor in tuples, lists and dictionaries to build a loss on")
            return super().losses(output, fisher, targets)
        given = targets if isinstance(targets, (list, tuple)) else [targets] * len(fisher)
        sites = zip(self.found, fisher, given, strict=True)
        return [graph_loss(one.kind, one.reduction, inputs, target) for one, inputs, target in sites]

    def graph_targets(self, values: tuple[Any, ...]) -> list[Any]:
        return [one.targets for one in self.found]
