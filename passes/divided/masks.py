"""A padding mask where submodules are captured one by one: each has it as one more input, with its own symbolic sizes.

The symbols of a submodule's sizes are its own. Those of the cases and of the positions are found by the example: they
are the only ones as large as the mask, among the inputs or, if several inputs have them, among the outputs of uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..errors import RegistrationError
from ..graphs.labels import NUMBER, in_example, shape_of
from ..ir import KEPT, Note, Program
from ..padding import padding, without_mask
from ..parametrization import with_nodes
from ..registration import where
from ..submodules import graph_of

SITES = "kfac_fx_mask"  # in the meta of a mask's placeholder: (input, dimension) of the cases and of the positions
Site = tuple[int, int]
MaskSizes = tuple[int, int]


def with_masks(program: Program, sizes: Sequence[MaskSizes | None]) -> Program:
    """The joined program with its uses masked.

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
            if KEPT in use.attrs:
                assert part.mask is not None, "bug in kfac_fx: a use with a mask in a submodule without one"
                joined_mask = with_nodes(use.attrs[KEPT], {part.mask: mask})
                uses[key] = replace(uses[key], attrs={**uses[key].attrs, KEPT: joined_mask}, mask_dims=use.mask_dims)
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
