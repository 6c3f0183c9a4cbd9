"""A mask of padding where submodules are captured one by one: each has it as one more input, under its own sizes.

The symbols of a submodule's sizes are its own. Those of the cases and of the positions are told by the example: they
are the only ones that are as large as the mask, among the inputs or, if several are, among the outputs of uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..errors import RegistrationError
from ..graphs.sizes import NUMBER, in_example, shape_of
from ..ir import KEPT, Note, Program, Use
from ..padding import made_of, padding
from ..registration import where
from ..submodules import graph_of

SITES = "kfac_fx_mask"  # in the meta of a mask's placeholder: (input, dimension) of the cases and of the positions
Site = tuple[int, int]
Sizes = tuple[int, int]  # of a mask


def with_masks(program: Program, sizes: Sequence[Sizes | None]) -> Program:
    """The joined program with its uses masked. sizes: of the mask when a submodule was captured; None: there was none.

    Raises RegistrationError if no submodule can have a mask.
    """
    masks = [masked_input(program, number, one) for number, one in enumerate(sizes)]
    found = [mask for mask in masks if mask is not None]
    if not found:
        known = next((one for one in sizes if one is not None), None)
        if known is None:
            return program
        raise RegistrationError(
            f"padding_mask has {known[0]} cases and {known[1]} positions, and no captured submodule has inputs of just "
            "these sizes.\nCompile with an example of which both numbers are unlike each other and all other sizes."
        )
    uses = {(r, n): use for r, one in enumerate(program.registrations) for n, use in enumerate(one.uses)}
    notes: list[Note] = []
    for number, (mask, one) in enumerate(zip(masks, program.submodules, strict=True)):
        mine = [key for key, use in uses.items() if use.output.meta[NUMBER] == number]
        if mask is None:
            reason = f"it is not clear which sizes of {one.path} are cases and positions"
            notes += [Note(f"{program.registrations[r]} at {where(uses[r, n].output)}", reason) for r, n in mine]
            continue
        part = padded(program, number)
        notes += part.unmasked
        own = [use for registration in part.registrations for use in registration.uses]
        for key, use in zip(mine, own, strict=True):
            if KEPT in use.attrs:
                kept = use.attrs[KEPT]  # the part's mask, or made of it
                own_mask = mask if kept is part.mask else made_of(mask, kept.target, *kept.args[1:])
                uses[key] = replace(uses[key], attrs={**uses[key].attrs, KEPT: own_mask}, mask_dims=use.mask_dims)
    registrations = tuple(
        replace(one, uses=tuple(uses[r, n] for n in range(len(one.uses))))
        for r, one in enumerate(program.registrations)
    )
    return program.but(registrations=registrations, mask=found[0], unmasked=tuple(notes))


def padded(program: Program, number: int) -> Program:
    """One submodule's part of the program, its uses masked where the mask fits them."""
    part = graph_of(program, number)
    mask = next((node for node in part.graph.nodes if SITES in node.meta), None)
    bare = tuple(replace(one, uses=tuple(map(unmasked, one.uses))) for one in part.registrations)
    return part.but(registrations=bare) if mask is None else padding(part.but(registrations=bare, mask=mask))


def unmasked(use: Use) -> Use:
    return replace(use, attrs={name: one for name, one in use.attrs.items() if name != KEPT}, mask_dims=())


def masked_input(program: Program, number: int, sizes: Sizes | None) -> fx.Node | None:
    """A placeholder for the mask, behind the submodule's own; None if its sizes are not clear."""
    own = [one for one in program.graph.nodes if one.op == "placeholder" and one.meta[NUMBER] == number]
    if sizes is None or not own:
        return None
    outputs = [use.output for one in program.registrations for use in one.uses if use.output.meta[NUMBER] == number]
    seen = {str(size) for node in outputs for size in shape_of(node)}
    cases, positions = (the_size(own, one, seen) for one in sizes)
    if cases is None or positions is None or cases[1] == positions[1]:
        return None
    with program.graph.inserting_after(own[-1]):
        name = "padding_mask" if number == 0 else f"padding_mask_{number}"
        mask = program.graph.create_node("placeholder", name, name=name)
    with own[cases[1][0]].meta["val"].fake_mode:
        value = torch.empty(cases[0], positions[0])
    mask.meta = {"val": value, NUMBER: number, SITES: (cases[1], positions[1])}
    return mask


def the_size(inputs: Sequence[fx.Node], number: int, seen: Iterable[str]) -> tuple[Any, Site] | None:
    """The one symbolic size that is `number` in the example, and where it is."""
    found: dict[str, tuple[Any, Site]] = {}
    for place, node in enumerate(inputs):
        for dim, size in enumerate(shape_of(node)):
            if isinstance(size, torch.SymInt) and in_example(size) == number:
                found.setdefault(str(size), (size, (place, dim)))
    if len(found) > 1:
        found = {name: one for name, one in found.items() if name in seen}
    return next(iter(found.values())) if len(found) == 1 else None
