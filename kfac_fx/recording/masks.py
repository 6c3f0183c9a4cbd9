"""Padding masks at record time: from `padding_mask=` to a node of the graph, or to a tensor of every call.

`padding_mask` is the name of an argument of forward or a function of its arguments. In one graph of the whole model it
is a node (`program_with_mask`); for a divided model it is computed from every call (`mask_of_call`). The uses that it
goes with are found in `passes.padding`, and `kfac_fx.recording.output_losses` keeps padding out of the losses.

Each submodule of a divided model has the mask as one more input, with its own symbolic sizes (`with_masks`). The sizes
of cases and positions are found in the example: we look for inputs as large as the mask. If several are, we take those
that outputs of uses also have.

**Ignored targets**: rows of cases without a target, such as -100, that are in input factors all the same.

    x [N, T, i] -> linear -> logits [N, T, V]; targets [N, T], of which some are -100

Losses leave such cases out: their gradient is zero, and they are not counted. A row that has no gradient for this
reason alone says nothing of the Fisher, but an A without a mask is a mean over it. `padding_mask=` and a loss of
[cases, positions] in one graph mask these rows; targets from outside, cases of one row and divided models do not.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from kfac_fx.linalg.arguments import listed
from kfac_fx.linalg.matrices import pulled, with_gradient
from kfac_fx.linalg.processes import unsharded
from kfac_fx.losses.declared import WeightedLosses
from kfac_fx.losses.distributions import Cotangents
from kfac_fx.passes.cases import without_mask
from kfac_fx.passes.errors import (
    ModelChangedError,
    RegistrationError,
    fatal,
    first_line,
    nearest,
    plural,
    table,
    warn_user,
    where,
)
from kfac_fx.passes.graphs.labels import everything_behind, in_example, shape_of, sizes_of
from kfac_fx.passes.graphs.operations import VIEWS, op_name
from kfac_fx.passes.ir import NUMBER, ROW_MASK, Dims, LossSite, Note, Program, Registration
from kfac_fx.passes.losses import mask_on, unknowable
from kfac_fx.passes.padding import OTHER_SEQUENCES, padding
from kfac_fx.passes.parametrization import with_nodes
from kfac_fx.passes.submodules import graph_of
from kfac_fx.passes.torch_private import class_of, make_fx, pytree
from kfac_fx.passes.trace import quiet
from kfac_fx.passes.tracing.signature import signature_of
from kfac_fx.passes.tracing.substitutes import lengths_in
from kfac_fx.recording.emitted import EmittedModel
from kfac_fx.recording.meeting_cases import collected, collecting_taps, revealing, row_probes
from kfac_fx.recording.model_checks import refuse_misfit_of_function
from kfac_fx.recording.statistics import Key, Rows
from kfac_fx.recording.taps import CollectingTap

PaddingMask = str | Callable[..., Tensor]
SUMS_OVER_ROWS = ("kron", "kron_in_diag", "kron_out_diag", "kron_both_diag")
WITH_LOSS_MASK = {*SUMS_OVER_ROWS, *(name.replace("kron", "kron_indep") for name in SUMS_OVER_ROWS)}
LISTED_USES = 8  # uses in a message
EXPECTED_OF_OTHERS = (
    "  {}: their steps are of other sequences than the mask's, or in another order. A mask has the padding of one "
    "sequence, so this is expected of a decoder if the mask is the encoder's: padding of the decoder's sequences is in "
    "the input factors A of these blocks. It is in nothing else if forward computes the loss, from targets of -100."
)
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
        node = next((n for n in program.inputs if str(n.target) == declared), None)
        if node is None:  # this call does without the argument
            return program
    else:
        place = place_of_cases(program)
        node = traced_mask(program, declared, args, kwargs)
        if place is not None:  # torch may have found that their symbol equals another one, or a number
            program = program.but(cases=sizes_of(place[0])[place[1]])
            refuse_fixed_cases(program)
    return padding(program.but(mask=checked_mask(node)))


def refuse_fixed_cases(program: Program) -> None:
    """Raises RegistrationError if the trace of a padding mask made the number of cases that of the example."""
    if program.cases is not None and program.cases.isdigit():
        raise RegistrationError(
            f"padding_mask holds for batches of {program.cases} cases alone: it reads their number as that of the "
            "example, by int(x.shape[0]) or len(x), or a tensor with a row for each of them that is no argument of "
            "forward.\n"
            "Write x.shape[0] for their number, and let forward take each tensor that has a row for each case."
        )


def program_with_loss_mask(program: Program) -> Program:
    """The program with the mask of its losses on the uses that it fits: rows that the losses leave out and that have no
    gradient are in no factor then. A mask is what a loss is multiplied with or chosen by, or the targets that it does
    not ignore; losses with different masks have none together."""
    masks = {mask_of_loss(program, site) for site in program.losses}
    if len(masks) != 1 or None in masks:
        return program
    (mask,) = masks
    assert mask is not None, "bug in kfac_fx: no mask of a loss"
    mask = mask.written(program) if isinstance(mask, IgnoringTargets) else mask
    fitted = padding(program.but(mask=mask), of_losses=True).registrations
    registrations = [
        replace(
            now, uses=tuple(replace(use, loss_mask=True) if use.mask_dims else use for use in now.uses)
        ) if now.approximation in WITH_LOSS_MASK else before
        for before, now in zip(program.registrations, fitted, strict=True)
    ]  # fmt: skip
    return program.but(registrations=tuple(registrations))


def mask_of_loss(program: Program, site: LossSite) -> fx.Node | IgnoringTargets | None:
    chosen = (None if site.way is None else mask_on(site.way)) or index_on(site.inputs)
    return ignoring_targets(program, site) if chosen is None else chosen


@dataclass(frozen=True)
class IgnoringTargets:
    """Targets [cases, positions] of which one number is no case.

    Attributes:
        node: the targets.
        ignored: the number.
        cut: how many positions the inputs of the loss leave out in front and behind, as logits[:, :-1] do.
    """

    node: fx.Node
    ignored: int
    cut: tuple[int, int]

    def written(self, program: Program) -> fx.Node:
        """The mask as a node behind the targets: which of the positions, with those that are cut, are cases."""
        node, value = self.node, self.node.meta["val"]
        if any(self.cut):
            node = inserted(program, node, F.pad, (list(self.cut), "constant", self.ignored))
        node = inserted(program, node, torch.ne, (self.ignored,))
        cases, positions = value.shape
        with getattr(value, "fake_mode", nullcontext()):  # to compute it would fix the number of cases
            node.meta["val"] = value.new_empty((cases, positions + sum(self.cut)), dtype=torch.bool)
        return node


def inserted(program: Program, node: fx.Node, function: Callable[..., Any], more: tuple[Any, ...]) -> fx.Node:
    """A call of the function with the node's value, behind it in the graph."""
    program.labeled.clear()  # they have none of the new node
    with program.graph.inserting_after(node):
        return program.graph.call_function(function, (node, *more))


def ignoring_targets(program: Program, site: LossSite) -> IgnoringTargets | None:
    """The targets of a loss that ignores some; None if it ignores none, or if they are not [cases, positions] or not
    computed from inputs."""
    node = behind_views(site.targets, 2)
    value = None if node is None else node.meta.get("val")
    if node is None or not isinstance(site.ignored, int) or not isinstance(value, Tensor) or value.is_floating_point():
        return None
    cut = positions_cut(site.inputs)
    return None if cut is None or node in unknowable(program) else IgnoringTargets(node, site.ignored, cut)


def positions_cut(inputs: fx.Node) -> tuple[int, int] | None:
    """How many positions the inputs of a loss leave out in front and behind; None if that is not a number."""
    node = behind_views(inputs)
    if op_name(node) != "slice":
        return 0, 0
    arguments: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, end, step = arguments
    start, end = start or 0, sys.maxsize if end is None else end
    if dim != 1 or step != 1 or not isinstance(start, int) or not isinstance(end, int):
        return None
    in_front = start >= 0 and (end < 0 or end == sys.maxsize)
    return (start, -end if end < 0 else 0) if in_front else None


def index_on(inputs: fx.Node) -> fx.Node | None:
    """The mask [cases, positions] that the inputs of a loss are chosen by; None if they are not."""
    node = behind_views(inputs)
    if op_name(node) != "index" or len(node.all_input_nodes) != 2:
        return None
    mask = node.all_input_nodes[1]
    value = mask.meta.get("val")
    return mask if isinstance(value, Tensor) and value.dtype is torch.bool and value.dim() == 2 else None


def behind_views(node: fx.Node, dims: int | None = None) -> Any:
    """The node whose elements in another shape are this one's: the first one that is no view, or that has so many
    dimensions; None if no node has these."""
    while dims is None or len(shape_of(node)) != dims:
        if op_name(node) not in VIEWS or not node.args or not isinstance(node.args[0], fx.Node):
            return None if dims is not None else node
        node = node.args[0]
    return node


IN_PIECES = (
    "\nForward computes its loss in pieces, and a mask of cases and positions fits no piece. Compute the loss in one "
    "piece, as in F.cross_entropy(head(x).flatten(0, 1), y.flatten()). If its logits need too much memory, leave it as "
    "it is: only the factors A of these uses have padding."
)


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
        in_pieces = any(site.chunk_of != number for number, site in enumerate(program.losses))
        warn_user(
            UserWarning(
                f"padding_mask does not fit {len(program.padded):,} of {plural(len(uses), 'use')}, whose factors may "
                f"have padding:\n{listed_misfits(program.padded)}{IN_PIECES if in_pieces else ''}"
            )
        )


def listed_misfits(notes: Sequence[Note]) -> str:
    """As `listed_notes`, with one paragraph for those about other sequences."""
    of_others = dict.fromkeys(note.subject.partition(" at ")[0] for note in notes if note.reason == OTHER_SEQUENCES)
    lines = [listed_notes(rest)] if (rest := [note for note in notes if note.reason != OTHER_SEQUENCES]) else []
    if of_others:
        named = ", ".join([*of_others][:LISTED_USES]) + ", ..." * (len(of_others) > LISTED_USES)
        lines.append(EXPECTED_OF_OTHERS.format(named))
    return "\n".join(lines)


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
        value = signature_of(model).bind(*args, **kwargs).arguments.get(declared, kwargs.get(declared))
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
    arguments = signature_of(model).parameters
    takes_any = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
    if name not in arguments and not takes_any:
        are = "arguments are" if len(arguments) > 1 else "only argument is"
        raise RegistrationError(
            f"padding_mask={name!r} is no argument of {class_of(model).__name__}.forward.{nearest(name, arguments)} "
            f"Its {are} {listed(arguments or ['none'])}."
        )


def tell_absent(declared: PaddingMask, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Warn of a mask whose name only the `**kwargs` of forward take, if the call has none and has other tensors by
    keyword, or one of nearly this name. Returns whether later calls need no look."""
    signature = signature_of(model)
    if not isinstance(declared, str) or declared in signature.parameters or kwargs.get(declared) is not None:
        return True
    given = {**signature.bind(*args, **kwargs).arguments, **kwargs}
    meant = nearest(declared, [name for name, value in given.items() if isinstance(value, Tensor)])
    if not meant and not any(isinstance(value, Tensor) for value in kwargs.values()):
        return False
    warn_user(
        UserWarning(
            f"padding_mask={declared!r} is in no call so far, so padding is in every factor and counts as cases."
            f"{meant} {class_of(model).__name__}.forward has no argument of this name, and takes it by **kwargs. If "
            "later calls have it, nothing is wrong."
        )
    )
    return True


def refuse_shape(mask: Tensor) -> None:
    if mask.dim() != 2:
        shape = [size if isinstance(size, int) else str(size) for size in mask.shape]
        raise RegistrationError(f"padding_mask has shape {shape}, {WANTED_SHAPE}")


def traced_mask(
    program: Program, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.Node:
    """`function` of the model's arguments, written into the graph behind its inputs. It is traced with the sizes of the
    graph, so its cases are those of the model.

    Raises RegistrationError if it cannot be traced, or if it does not depend on the inputs.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    inputs = program.inputs

    def called_on(*values: Any) -> Any:
        tensors = iter(values)
        replaced = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        its_args, its_kwargs = pytree.tree_unflatten(replaced, spec)
        return function(*its_args, **its_kwargs)

    refuse_misfit_of_function("padding_mask", function, args, kwargs)
    program.labeled.clear()  # they have none of the new nodes
    try:
        with lengths_in([function]), quiet():
            module = make_fx(called_on, tracing_mode="symbolic")(*(node.meta["val"] for node in inputs))
    except Exception as error:
        if fatal(error):
            raise
        raise RegistrationError(
            f"padding_mask cannot be traced: {first_line(error)}\n"
            "Write it with tensor operations on the arguments of forward, as in padding_mask=lambda ids: ids != 0."
        ) from error
    output = module.graph.output_node()
    result = output.args[0]
    if not isinstance(result, fx.Node) or not any(node.op == "placeholder" for node in everything_behind([result])):
        kind = type(result.meta.get("val") if isinstance(result, fx.Node) else result).__name__
        raise RegistrationError(f"padding_mask returned a {kind} that does not depend on the inputs")
    given = iter(inputs)
    copies: dict[fx.Node, fx.Node] = {}
    with program.graph.inserting_before(inputs[-1].next):
        for node in module.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(given)
            elif node is not output:
                copies[node] = program.graph.node_copy(node, copies.__getitem__)
                if node.op == "get_attr":
                    copies[node].target = constant_of_mask(program, getattr(module, str(node.target)))
    return copies[result]


def constant_of_mask(program: Program, value: Tensor) -> str:
    """The name of a new buffer for a tensor that a padding mask reads and that is no input."""
    name = next(name for n in itertools.count() if not hasattr(program.root, name := f"padding_mask_constant_{n}"))
    program.root.register_buffer(name, value.detach())
    return name


def place_of_cases(program: Program) -> tuple[fx.Node, int] | None:
    """An input whose size is the symbol of the cases, and the dimension; None if they are a number."""
    if program.cases is None or program.cases.isdigit():
        return None
    pairs = ((node, dim) for node in program.inputs for dim, size in enumerate(sizes_of(node)) if size == program.cases)
    return next(pairs, None)


def checked_mask(node: fx.Node) -> fx.Node:
    """`node`, if it is a mask [cases, positions]. Raises RegistrationError if not."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise RegistrationError(
            f"padding_mask, at {node.name}, has no shape in this graph: capture the model with example inputs"
        )
    refuse_shape(value)
    return node


def dims_in(value: Tensor, mask: Tensor) -> Dims | None:
    """The dimensions of the cases and of the positions in a tensor of which only the sizes are known."""
    (cases, positions), sizes = mask.shape, tuple(value.shape)
    if sizes[:1] == (cases,) and positions in sizes[1:]:
        return 0, 1 + sizes[1:].index(positions)
    return (0, 0) if sizes[:1] == (cases * positions,) else None


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
    inputs = [node for node in program.inputs if node.meta[NUMBER] == number]
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
    program.labeled.clear()  # they have none of the new node
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


@dataclass(frozen=True)
class LeftOut:
    """cases: without a target; all_cases: with these. rows: by block those of A without a gradient for this reason, and
    all. in_forward: whether forward computes the loss."""

    cases: int
    all_cases: int
    rows: Mapping[Key, tuple[int, int]]
    in_forward: bool = False

    def __str__(self) -> str:
        remedy = (
            ". If forward multiplies the losses with a mask, compute them in one piece, and write the mask"
            if self.in_forward
            else ", or let the forward of a model that one graph holds compute the loss, in one piece and with the mask"
        )
        worst, (left_out, rows) = max(self.rows.items(), key=lambda item: item[1][0] / item[1][1])
        return (
            f"{self.cases:,} of {plural(self.all_cases, 'case')} of the loss have no target, and the input factors A "
            f"of {plural(len(self.rows), 'block')} are means over all of their rows: {100 * left_out / rows:.0f}% of "
            f"those of {', '.join(worst)} have no gradient. The gradients, and so G, are of the cases with a target.\n"
            "Leave cases without a target out of the batch; if they are positions, name them with "
            f"compile(..., padding_mask=){remedy} in the sizes of the inputs, as (losses.view(len(x), -1) * "
            "mask).sum(). Pixels of images take no mask: F is A of all pixels times G of those with a target."
        )


def unmasked(registration: Registration) -> list[int]:
    """The numbers of the uses whose rows are all in A, unless all of its rows are the number 1: A is 1 then, with these
    rows and without them."""
    if registration.generic or not registration.structure.kronecker:
        return []
    if registration.approximation in WITH_LOSS_MASK and all(
        set(use.parameters) == {"bias"} and not use.through for use in registration.uses
    ):
        return []
    return [number for number, use in enumerate(registration.uses) if ROW_MASK not in use.attrs]


def rows_left_out(
    emitted: EmittedModel,
    parameters: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    values: Any,
    losses_of: Callable[[Any, tuple[Tensor, ...]], tuple[Sequence[Tensor], WeightedLosses]],
    registrations: Sequence[Registration],
) -> dict[Key, tuple[int, int]]:
    """By block with such rows their number, and that of all its rows. One forward and two backwards; the host waits.

    Args:
        emitted: with collecting taps.
        parameters, buffers: of the run; zero parameters get other values, because they would hide what is before them.
        losses_of: from (what the model returns, the Fisher's outputs) to (these as constants, their losses).
        registrations: those that are looked at.
    """
    uses = {registration.parameters: numbers for registration in registrations if (numbers := unmasked(registration))}
    if not uses:
        return {}
    taps = {key: [collecting_taps(emitted, key)[number] for number in numbers] for key, numbers in uses.items()}
    with emitted.isolated():
        live = {name: with_gradient(revealing(unsharded(value.detach()))) for name, value in parameters.items()}
        probes = row_probes(emitted.program.registrations, taps, next(iter(live.values())))
        leaves = [probe for by_name in probes for probe in by_name.values()]
        output, fisher = emitted.run(live, buffers, values, probes, compiled=False)
        constants, losses = losses_of(output, fisher)

        def reached(cotangents: Cotangents) -> dict[tuple[Key, CollectingTap], Tensor]:
            """Which rows have a gradient, by use [N, S]."""
            found: dict[tuple[Key, CollectingTap], Tensor] = {}

            def note(place: tuple[Key, CollectingTap], rows: Rows) -> None:
                found[place] = (rows.d != 0).flatten(2).any(2)

            sinks = {tap: partial(note, (key, tap)) for key, of_key in taps.items() for tap in of_key}
            with collected(sinks, reads_x=False):
                pulled(fisher, cotangents, leaves, keep=True)
            return found

        inputs = [loss.inputs for _, loss in losses]
        generator = torch.Generator(inputs[0].device).manual_seed(0)  # torch's own streams are the user's

        def drawn(tensors: Sequence[Tensor]) -> Cotangents:
            return [torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device) for t in tensors]

        of_kept = reached(pulled(inputs, drawn(inputs), constants, keep=True))
        of_all = reached(drawn(constants))
    totals: dict[Key, tuple[int, int]] = {}
    for (key, tap), rows in of_all.items():
        kept = of_kept.get((key, tap), torch.zeros_like(rows))
        left_out, number = totals.get(key, (0, 0))
        totals[key] = left_out + int((rows & ~kept).sum()), number + rows.numel()
    return {key: numbers for key, numbers in totals.items() if numbers[0]}
