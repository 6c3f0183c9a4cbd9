"""Padding masks at record time: from `padding_mask=` to a node of the graph, or to a tensor; and the real losses.

`padding_mask` is the name of an argument of forward or a function of its arguments. In one graph of the whole model it
is a node (`program_with_mask`); for a divided model it is computed from every call (`mask_of_call`). The uses that it
goes with are found in `passes.padding`. `real_losses` keeps padding out of the losses.

Each submodule of a divided model has the mask as one more input, with its own symbolic sizes (`with_masks`). Those of
the cases and of the positions are found by the example: they are the only ones as large as the mask, among the inputs
or, if several inputs have them, among the outputs of uses.

The losses on the outputs of one run: of which distributions, over how many cases, and without padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from kfac_fx.linalg.matrices import is_differentiable
from kfac_fx.losses import Categorical, LossFunction
from kfac_fx.losses.distributions import IGNORE_INDEX
from kfac_fx.losses.registered import LossSpec, RegisteredLosses, WeightedLosses, cases_by_loss, likelihood
from kfac_fx.passes.cases import without_mask
from kfac_fx.passes.errors import (
    LossError,
    ModelChangedError,
    RegistrationError,
    fatal,
    first_line,
    nearest,
    plural,
    table,
)
from kfac_fx.passes.graphs.labels import in_example, shape_of
from kfac_fx.passes.ir import NUMBER, ROW_MASK, Dims, LossSite, Note, Program
from kfac_fx.passes.padding import padding, spread
from kfac_fx.passes.parametrization import with_nodes
from kfac_fx.passes.submodules import graph_of
from kfac_fx.passes.torch_losses import BY_DISTRIBUTION, BY_NAME
from kfac_fx.passes.torch_private import class_of, pytree
from kfac_fx.passes.users_code import warn_user, where
from kfac_fx.recording.emitted import EmittedModel, ObservedLoss

PaddingMask = str | Callable[..., Tensor]
LISTED_USES = 8  # uses in a message
WANTED_SHAPE = "wanted [cases, positions], nonzero where a position is real"
SITES = "kfac_fx_mask"  # in the meta of a mask's placeholder: (input, dimension) of the cases and of the positions
Site = tuple[int, int]
MaskSizes = tuple[int, int]


# --- the mask ---------------------------------------------------------------------------------------------------------


def program_with_mask(
    program: Program, declared: PaddingMask, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Program:
    """The program with its uses masked.

    Raises RegistrationError if `declared` gives no mask [cases, positions].
    """
    if isinstance(declared, str):
        refuse_unknown(declared, model)
        node = next((n for n in placeholders(program) if str(n.target) == declared), None)
        if node is None:  # this call does without the argument
            return program
    else:
        node = traced_mask(program, declared, args, kwargs)
    return padding(program.but(mask=checked_mask(node)))


def refuse_unfit_mask(program: Program) -> None:
    """Raises RegistrationError if the mask fits no use; warns if there may be padding in the rows of some."""
    uses = [use for registration in program.registrations for use in registration.uses]
    if program.mask is None or not uses:
        return
    if not any(ROW_MASK in use.attrs for use in uses):
        raise RegistrationError(
            f"padding_mask fits none of the {plural(len(uses), 'use')}, so padding would be in every factor:\n"
            f"{listed_notes(program.unmasked)}\n"
            "Give a mask with the cases and positions of the layers' outputs, and an example with different numbers of "
            "cases and positions; or leave padding_mask out."
        )
    if program.padded:
        warn_user(
            UserWarning(
                f"padding_mask does not fit {len(program.padded):,} of {plural(len(uses), 'use')}, whose factors may "
                f"have padding:\n{listed_notes(program.padded)}"
            )
        )


def listed_notes(notes: Sequence[Note]) -> str:
    """The first notes as a table, and the number of the others."""
    more = f"\n  and {len(notes) - LISTED_USES:,} more, in net.report" if len(notes) > LISTED_USES else ""
    return table([(note.subject, note.reason) for note in notes[:LISTED_USES]]) + more


def mask_of_call(
    declared: PaddingMask, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The mask of one call of the model; None if the call does without the argument.

    Raises RegistrationError if it is no mask [cases, positions].
    """
    if isinstance(declared, str):
        refuse_unknown(declared, model)
        value = inspect.signature(model.forward).bind(*args, **kwargs).arguments.get(declared, kwargs.get(declared))
        if value is None:
            return None
    else:
        value = declared(*args, **kwargs)
    if not isinstance(value, Tensor):
        raise RegistrationError(f"padding_mask has the type {type(value).__name__}, {WANTED_SHAPE}")
    refuse_shape(value)
    return value


def refuse_unknown(name: str, model: nn.Module) -> None:
    """Raises RegistrationError if forward has no argument of this name."""
    arguments = inspect.signature(model.forward).parameters
    takes_any = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
    if name not in arguments and not takes_any:
        raise RegistrationError(
            f"padding_mask={name!r} is no argument of {class_of(model).__name__}.forward.{nearest(name, arguments)}"
        )


def refuse_shape(mask: Tensor) -> None:
    if mask.dim() != 2:
        shape = [size if isinstance(size, int) else str(size) for size in mask.shape]
        raise RegistrationError(f"padding_mask has shape {shape}, {WANTED_SHAPE}")


def traced_mask(
    program: Program, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.Node:
    """`function` of the model's arguments, written into the graph behind its inputs."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    inputs = placeholders(program)

    def called_on(values: Sequence[Any]) -> Any:
        tensors = iter(values)
        replaced = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        its_args, its_kwargs = pytree.tree_unflatten(replaced, spec)
        return function(*its_args, **its_kwargs)

    shapes = [node.meta["val"] for node in inputs]
    try:
        with getattr(shapes[0], "fake_mode", nullcontext()):
            value = called_on(shapes)
        with program.graph.inserting_before(inputs[-1].next):
            result = called_on([fx.Proxy(node) for node in inputs])
    except Exception as error:
        if fatal(error):
            raise
        raise RegistrationError(
            f"padding_mask cannot be traced: {first_line(error)}\nWrite it with tensor operations on the "
            "arguments of forward, as in padding_mask=lambda ids: ids != 0."
        ) from error
    if not isinstance(result, fx.Proxy):
        raise RegistrationError(f"padding_mask returned a {type(value).__name__} that does not depend on the inputs")
    result.node.meta["val"] = value
    return result.node


def checked_mask(node: fx.Node) -> fx.Node:
    """`node`, if it is a mask [cases, positions]. Raises RegistrationError if not."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise RegistrationError(
            f"padding_mask, at {node.name}, has no shape in this graph: capture the model with example inputs"
        )
    refuse_shape(value)
    return node


def placeholders(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"]


# --- the masks of submodules ------------------------------------------------------------------------------------------


def with_masks(program: Program, sizes: Sequence[MaskSizes | None]) -> Program:
    """The joined program of a divided model, with its uses masked by a mask that is an input of every submodule.

    sizes: of the mask when each submodule was captured; None: there was none.

    Raises RegistrationError if no submodule can have a mask.
    """
    example = next((its_sizes for its_sizes in sizes if its_sizes is not None), None)
    if example is None:
        return program
    program = program.copied()
    masks = [masked_input(program, number, its_sizes) for number, its_sizes in enumerate(sizes)]
    if not any(masks):
        raise RegistrationError(
            f"padding_mask has {example[0]} cases and {example[1]} positions, and no captured submodule has inputs of "
            "exactly these sizes.\n"
            "Compile with an example in which the numbers of cases and positions differ from all other sizes."
        )
    uses = {
        (r, n): use for r, registration in enumerate(program.registrations) for n, use in enumerate(registration.uses)
    }
    notes: list[Note] = []
    padded: list[Note] = []
    for number, (mask, submodule) in enumerate(zip(masks, program.submodules, strict=True)):
        keys = [key for key, use in uses.items() if use.output.meta[NUMBER] == number]
        if mask is None:
            reason = f"it is not clear which sizes of {submodule.path} are cases and positions"
            notes += [Note(f"{program.registrations[r]} at {where(uses[r, n].output)}", reason) for r, n in keys]
            padded += notes[len(notes) - len(keys) :]
            continue
        part = masked_part(program, number)
        notes += part.unmasked
        padded += part.padded
        uses_of_part = [use for registration in part.registrations for use in registration.uses]
        for key, use in zip(keys, uses_of_part, strict=True):
            if ROW_MASK in use.attrs:
                assert part.mask is not None, "bug in kfac_fx: a use with a mask in a submodule without one"
                joined_mask = with_nodes(use.attrs[ROW_MASK], {part.mask: mask})
                attrs = {**uses[key].attrs, ROW_MASK: joined_mask}
                uses[key] = replace(uses[key], attrs=attrs, mask_dims=use.mask_dims)
    registrations = tuple(
        replace(registration, uses=tuple(uses[r, n] for n in range(len(registration.uses))))
        for r, registration in enumerate(program.registrations)
    )
    return program.but(
        registrations=registrations, mask=next(filter(None, masks)), unmasked=tuple(notes), padded=tuple(padded)
    )


def masked_part(program: Program, number: int) -> Program:
    """One submodule's part of the program, its uses masked where the mask fits them."""
    part = graph_of(program, number)
    mask = next((node for node in part.graph.nodes if SITES in node.meta), None)
    bare = tuple(
        replace(registration, uses=tuple(map(without_mask, registration.uses))) for registration in part.registrations
    )
    return part.but(registrations=bare) if mask is None else padding(part.but(registrations=bare, mask=mask))


def masked_input(program: Program, number: int, sizes: MaskSizes | None) -> fx.Node | None:
    """A placeholder for the mask, behind those of the submodule; None if its sizes are not clear."""
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.meta[NUMBER] == number]
    if sizes is None or not inputs:
        return None
    outputs = [
        use.output
        for registration in program.registrations
        for use in registration.uses
        if use.output.meta[NUMBER] == number
    ]
    symbols = {str(size) for node in outputs for size in shape_of(node)}
    cases, positions = (the_size(inputs, size, symbols) for size in sizes)
    if cases is None or positions is None or cases[1] == positions[1]:
        return None
    with program.graph.inserting_after(inputs[-1]):
        name = "padding_mask" if number == 0 else f"padding_mask_{number}"
        mask = program.graph.create_node("placeholder", name, name=name)
    with inputs[cases[1][0]].meta["val"].fake_mode:
        value = torch.empty(cases[0], positions[0])
    mask.meta = {"val": value, NUMBER: number, SITES: (cases[1], positions[1])}
    return mask


def the_size(inputs: Sequence[fx.Node], number: int, symbols: Iterable[str]) -> tuple[Any, Site] | None:
    """The one symbolic size that is `number` in the example, and its place; of several, the one among `symbols`."""
    places: dict[str, tuple[Any, Site]] = {}
    for place, node in enumerate(inputs):
        for dim, size in enumerate(shape_of(node)):
            if isinstance(size, torch.SymInt) and in_example(size) == number:
                places.setdefault(str(size), (size, (place, dim)))
    if len(places) > 1:
        places = {symbol: size_and_site for symbol, size_and_site in places.items() if symbol in symbols}
    return next(iter(places.values())) if len(places) == 1 else None


@dataclass(frozen=True)
class MaskedInputs:
    """The mask of a call of the model as one more input of its captured submodules.

    sites: of every submodule, the (input, dimension) of the cases and of the positions; None: it has no mask.
    """

    sites: tuple[tuple[Site, Site] | None, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, parts: Sequence[Program], paths: Sequence[str]) -> MaskedInputs:
        sites = (next((node.meta[SITES] for node in part.graph.nodes if SITES in node.meta), None) for part in parts)
        return cls(tuple(sites), tuple(paths))

    def of_call(self, number: int, values: tuple[Any, ...], mask: Tensor | None) -> tuple[Any, ...]:
        """The inputs of a submodule and the mask behind them; `mask` is None if nothing is padding.

        Raises ModelChangedError if the mask does not fit the inputs.
        """
        site = self.sites[number]
        if site is None:
            return values
        sizes = tuple(values[place].shape[dim] for place, dim in site)
        if mask is None:
            return *values, torch.ones(sizes, device=values[site[0][0]].device)
        if tuple(mask.shape) != sizes:
            raise ModelChangedError(
                f"padding_mask has shape {list(mask.shape)}, but {self.paths[number]} is called on {sizes[0]} cases "
                f"and {sizes[1]} positions; with the first inputs these numbers were equal.\n"
                "Compile with an example in which the numbers of cases and positions differ from all other sizes."
            )
        return *values, mask


# --- the losses -------------------------------------------------------------------------------------------------------


def real_losses(
    build: Callable[[Sequence[Tensor]], WeightedLosses],
    outputs: Sequence[Tensor],
    dims: Sequence[Dims | None],
    mask: Tensor,
) -> WeightedLosses:
    """The losses without padding, which is a constant of them and no case.

    build: from values of the Fisher's outputs to the losses.
    dims: the dimensions of every output along which the mask goes; None: all of it is real.
    """
    real = [None if d is None else spread(mask != 0, d, output.shape) for output, d in zip(outputs, dims, strict=True)]
    pairs = list(zip(outputs, real, strict=True))
    losses = build([output if r is None else torch.where(r, output, output.detach()) for output, r in pairs])
    with torch.no_grad():  # a case is real if it changes with the real values, whatever the losses make of these
        changed = build([perturbed(o) if r is None else torch.where(r, perturbed(o), o) for o, r in pairs])
    for (_, loss), (_, other) in zip(losses, changed, strict=True):
        differs = loss.inputs != other.inputs
        real_cases = differs.reshape(*differs.shape[: loss.case_axes], -1).any(-1)
        loss.real_cases = int((real_cases if loss.kept is None else real_cases & loss.kept).sum())
    return losses


def dims_in(value: Tensor, mask: Tensor) -> Dims | None:
    """The dimensions of the cases and of the positions in a tensor of which only the sizes are known."""
    (cases, positions), sizes = mask.shape, tuple(value.shape)
    if sizes[:1] == (cases,) and positions in sizes[1:]:
        return 0, 1 + sizes[1:].index(positions)
    return (0, 0) if sizes[:1] == (cases * positions,) else None


def perturbed(value: Tensor) -> Tensor:
    """Another value everywhere. The difference is not constant, because a softmax ignores a constant."""
    steps = torch.linspace(1, 2, value.shape[-1] if value.dim() else 1, dtype=value.dtype, device=value.device)
    return value + steps.view(value.shape[-1:])


# --- losses on the outputs of one run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputLosses:
    """The losses whose Fisher is recorded.

    Attributes:
        emitted: the model that computes the outputs.
        declared: the user's losses, on the model's outputs or on nodes of the graph; None: those that forward computes.
    """

    emitted: EmittedModel
    declared: LossSpec | RegisteredLosses | None

    @property
    def are_known(self) -> bool:
        return bool(self.declared or self.emitted.loss_sites)

    def on(
        self, output: Any, fisher: tuple[Tensor, ...], targets: Any = None, kept: Sequence[Tensor | None] = ()
    ) -> WeightedLosses:
        """(coefficient, loss) of each output distribution.

        Args:
            output: what the model returned; a `LossSpec` is applied to it.
            fisher: the Fisher's outputs; registered losses, and losses that forward computes, are applied to these.
            targets: one a loss, in a list or tuple, or one for all; None: there are none.
            kept: see `kept`.

        Raises LossError if no loss is known.
        """
        dims = self.emitted.case_dims
        if isinstance(self.declared, RegisteredLosses):
            pairs, nodes = self.declared.on(fisher, targets), 0
            for registered, (_, loss) in zip(self.declared.losses, pairs, strict=True):
                loss.with_cases_at(dims[nodes] if dims else 0)
                nodes += len(registered.inputs)
            return without_ignored(pairs)
        if self.declared is not None:
            if not fisher and not self.emitted.whole:
                name = class_of(self.emitted.model).__name__
                raise LossError(f"{name} returns no tensor in tuples, lists and dictionaries to build a loss on")
            pairs = self.declared(output, targets, next(iter(dims), 0))
            for number, (_, loss) in enumerate(pairs if dims and not self.declared.places_cases else ()):
                loss.with_cases_at(self.axis_of_cases(number, loss, output, fisher))
            return without_ignored(pairs)
        sites = self.emitted.loss_sites
        if not sites:
            *others, last = BY_NAME
            raise LossError(
                "no loss is known: the Fisher is that of an output distribution.\n"
                'Name it with compile(..., loss="categorical"), "normal", "multi_bernoulli" or a function of the '
                f"model's outputs, or let forward compute {', '.join(others)} or {last}."
            )
        by_site = targets if isinstance(targets, (list, tuple)) else [targets] * len(fisher)
        each = zip(sites, fisher, by_site, dims or [0] * len(sites), kept or [None] * len(sites), strict=True)
        return [
            likelihood(BY_DISTRIBUTION[site.kind], site.reduction, inputs, target, dim, its_kept)
            for site, inputs, target, dim, its_kept in each
        ]

    def misfits(self, output: Any, fisher: tuple[Tensor, ...], values: Any) -> list[str]:
        """Sentences about declared losses with rows that the padding mask does not tell apart.

        Raises LossError, or the error of the user's function, for losses that do not fit the outputs of a run.
        """
        if not isinstance(self.declared, LossSpec):
            return []
        losses = self.on(self.rebuilt(output, (), ()), fisher)
        padding = self.emitted.padding(values, fisher)
        if padding is None or any(dims is not None for dims in padding[1]):
            return []
        return [
            f"padding may count as cases of the {type(loss).__name__} loss, whose rows are not the cases and positions "
            "of padding_mask: return outputs [cases, positions, ...] of all positions, in their order. Nothing is "
            "wrong if these rows are never padding, or have targets of -100 there"
            for _, loss in losses
            if loss.all_cases > len(padding[0])
        ]

    def axis_of_cases(self, number: int, loss: LossFunction, output: Any, fisher: Sequence[Tensor]) -> int:
        """The axis of the cases in the inputs of a declared loss, where they are not the first in all outputs.

        It is that of the output that the inputs are; or, of inputs that are computed from outputs, the one along which
        only the first place changes if the first case does.

        Raises LossError if there is none.
        """
        assert isinstance(self.declared, LossSpec), "bug in kfac_fx: the cases of a loss that is not declared"
        placed = list(zip(fisher, self.emitted.case_dims, strict=True))
        for value, dim in placed:
            if loss.inputs is value:
                return dim
        with torch.no_grad():
            changed = [value.clone() for value, _ in placed]
            for value, (_, dim) in zip(changed, placed, strict=True):
                value.select(dim, 0).copy_(perturbed(value.select(dim, 0)))
            other = self.declared(replaced(output, fisher, changed))[number][1]
            differs = (
                (loss.inputs != other.inputs).movedim(-1, 0).any(0)
                if loss.inputs.ndim > 1
                else loss.inputs != other.inputs
            )
            axes = [axis for axis in range(differs.ndim) if not differs.movedim(axis, 0)[1:].any()]
        if len(axes) == 1 or (axes and differs.shape[axes[0]] > 1):
            return axes[0]
        raise LossError(
            f"{self.declared.name} gives a {type(loss).__name__} of inputs {list(loss.inputs.shape)}, and no axis of "
            "it has one place for every case. The cases of the model are on another dimension than the first "
            "(net.report): keep them apart, as in loss=lambda outputs: "
            f"kfac_fx.losses.{type(loss).__name__}(outputs.movedim(1, 0))."
        )

    # --- cases ------------------------------------------------------------------------------------------------------

    @property
    def ignoring(self) -> bool:
        """Whether forward computes losses that ignore some targets."""
        return self.declared is None and any(site.ignored is not None for site in self.emitted.loss_sites)

    def kept(self, values: Any, targets: Any = None) -> list[Tensor | None]:
        """A mask of the targets that are not ignored, for every loss that forward computes; None: all, or not known.

        targets: as of `on`; None: those that forward hands to its losses.
        """
        if not self.ignoring:
            return []
        sites = self.emitted.loss_sites
        by_site = targets if isinstance(targets, (list, tuple)) else [targets] * len(sites)
        return [self.not_ignored(site, values, target) for site, target in zip(sites, by_site, strict=True)]

    def not_ignored(self, site: LossSite | ObservedLoss, values: Any, target: Any) -> Tensor | None:
        if site.ignored is None:
            return None
        try:
            target = self.emitted.target_values(site.targets, values) if target is None else target
        except LossError:
            return None
        if not isinstance(target, Tensor) or target.is_floating_point():  # probabilities of classes
            return None
        kept: Tensor = target != self.emitted.target_values(site.ignored, values)
        return kept

    def cases_by_loss(self, losses: WeightedLosses) -> list[int | Tensor]:
        return cases_by_loss(losses, self.declared.names if isinstance(self.declared, RegisteredLosses) else None)

    def cases(self, losses: WeightedLosses) -> int | Tensor:
        """The number of terms in the mean of the first loss, which is the number of cases of the batch."""
        return self.cases_by_loss(losses)[0]

    def summed(self, losses: WeightedLosses) -> WeightedLosses:
        """Coefficients with which the sum over cases is `cases` times the mean loss, where every loss is a mean over
        its own cases. Losses of equally many cases keep theirs."""
        each = self.cases_by_loss(losses)
        return [(c * share(each[0], n), loss) for (c, loss), n in zip(losses, each, strict=True)]

    def averaged(self, losses: WeightedLosses) -> WeightedLosses:
        """Coefficients of means over the cases of all towers: a tower has the weight of its cases."""
        if not isinstance(self.declared, RegisteredLosses):
            return losses
        each = self.cases_by_loss(losses)
        return [(c * share(loss.cases, n), loss) for (c, loss), n in zip(losses, each, strict=True)]

    def tower_cases(self, fisher: tuple[Tensor, ...]) -> list[int]:
        """The first dimension of every tower's outputs; one entry if no towers were registered."""
        if not isinstance(self.declared, RegisteredLosses):
            return [0]
        losses = zip(self.declared.names, self.declared.on(fisher), strict=True)
        return [loss.inputs.shape[0] for name, (_, loss) in losses if name == self.declared.names[0]]

    # --- on one batch -----------------------------------------------------------------------------------------------

    def real(
        self, rebuilt: Callable[[Sequence[Tensor]], Any], fisher: Sequence[Tensor], values: Any, targets: Any = None
    ) -> WeightedLosses:
        """The losses without padding and without ignored targets.

        Args:
            rebuilt: from values of the Fisher's outputs to what the model returns.
            values: the model's inputs, which tell what is padding.
        """

        kept = self.kept(values, targets)

        def build(outputs: Sequence[Tensor]) -> WeightedLosses:
            return self.on(rebuilt(outputs), tuple(outputs), targets, kept)

        padding = self.emitted.padding(values, fisher)
        if padding is None:
            return build(fisher)
        mask, dims = padding
        return real_losses(build, fisher, dims, mask)

    def rebuilt(self, output: Any, fisher: Sequence[Tensor], replacements: Sequence[Tensor]) -> Any:
        """The model's result with other tensors for the Fisher's outputs. output: flat, as a run returns it."""
        return self.emitted.capture.unflatten(replaced(output, fisher, replacements))

    def of_constants(
        self, output: Any, fisher: tuple[Tensor, ...], values: Any, mode: str, targets: Any
    ) -> tuple[list[Tensor], WeightedLosses]:
        """The Fisher's outputs as leaves of a graph of their own, and the losses on these."""
        leaves = [value.detach().requires_grad_(is_differentiable(value)) for value in fisher]
        if mode == "empirical" and targets is None and not isinstance(self.declared, LossSpec):
            targets = self.targets_in_graph(values)
        return leaves, self.real(lambda outputs: self.rebuilt(output, fisher, outputs), leaves, values, targets)

    def targets_in_graph(self, values: Any) -> list[Any]:
        """The targets of registered losses, or of those that forward computes. Raises LossError unless they are
        computed from inputs alone."""
        declared = self.declared
        sites = declared.losses if isinstance(declared, RegisteredLosses) else self.emitted.loss_sites
        return [self.emitted.target_values(site.targets, values) for site in sites]


def without_ignored(pairs: WeightedLosses) -> WeightedLosses:
    """The losses, of which targets of -100 are no cases, as in the means of `F.cross_entropy`."""
    for _, loss in pairs:
        targets = loss.targets
        if not isinstance(loss, Categorical) or not isinstance(targets, Tensor) or targets.is_floating_point():
            continue
        if targets.shape == loss.inputs.shape[:-1] and targets.device == loss.inputs.device:  # else `evaluate` raises
            loss.keeping(targets.ne(IGNORE_INDEX))
    return pairs


def replaced(tree: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
    """A tree with `new` tensors for `old` ones."""
    by_id = {id(before): after for before, after in zip(old, new, strict=True)}
    return pytree.tree_map(lambda value: by_id.get(id(value), value), tree)


def share(cases: int | Tensor, of: int | Tensor) -> Any:
    """cases / of; exactly 1 for one number of cases, without a look at what only the device knows."""
    return 1.0 if cases is of or (isinstance(cases, int) and cases == of) else cases / of
