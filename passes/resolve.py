"""Matches become registrations.

Rules, in this order:

0. - 3. matches that others take the place of go (`passes.claiming.claims`);
4. a parameter that is still claimed by different parameter sets, or laid out in different ways, takes an exact
   treatment where there is one: biases are split off a shared weight, a tied output layer is an embedding with its
   roles swapped; otherwise the registration is ambiguous and the user must choose;
5. what no match claims is generic, or unused if nothing behind the losses reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from math import prod

import torch

from .claiming.approximation import check_requests, choose, side_blocks
from .claiming.claims import claims
from .claiming.flattened import flat
from .claiming.gains import reads_ids
from .claiming.leftovers import leftovers
from .errors import AmbiguousRegistrationError, table
from .ir import GENERIC, UNROLLED, Note, Program, Registration, Use, where
from .words.matrix import Layout, MatrixForm
from .words.pieces import viewed, whole

FREE = "free of the batch: one gradient for all cases, right in expectation over sampled targets"


def resolve(program: Program) -> Program:
    """See the module's docstring. Raises AmbiguousRegistrationError and LinkError with all culprits."""
    kept, notes = claims(program)
    kept, more = without_functions(kept)
    notes += more
    matches, reasons = split_shared(program, kept)
    groups = grouped(matches)
    check_requests(program, [(uses[0].layer, sorted(uses[0].parameter_set)) for uses in groups])
    registrations = [registration(program, uses, reasons) for uses in groups]
    taken = {name for one in registrations for name in one.parameters}
    generics, unused = leftovers(program, taken)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    registrations.sort(key=lambda one: order[one.uses[0].output])
    return program.but(
        registrations=(*registrations, *generics), unused=unused, dropped=(*program.dropped, *notes), matches=()
    )


def without_functions(matches: list[Use]) -> tuple[list[Use], list[Note]]:
    """Without the uses of parameters behind functions that are matrices elsewhere: what is left of these is generic."""
    matrices = {
        bound.parameter
        for use in matches
        for role, bound in use.parameters.items()
        if use.flat is None and flat(replace(use, parameters={role: bound})) is None
    }
    kept: list[Use] = []
    notes: list[Note] = []
    for use in matches:
        if use.flat is not None and use.parameter_set & matrices:
            notes.append(Note(str(use), "a function of a parameter that is a matrix elsewhere"))
        else:
            kept.append(use)
    return kept, notes


def split_shared(program: Program, matches: list[Use]) -> tuple[list[Use], dict[frozenset[str], str]]:
    """Biases leave weights that are shared by different parameter sets, and the other way round; what cannot be told
    apart so is ambiguous."""
    sets: dict[str, set[frozenset[str]]] = defaultdict(set)
    for use in matches:
        for name in use.parameter_set:
            sets[name].add(use.parameter_set)
    shared = {name for name, groups in sets.items() if len(groups) > 1}
    result: list[Use] = []
    reasons: dict[frozenset[str], str] = {}
    for use in matches:
        culprits = sorted(shared & use.parameter_set)
        if not culprits or len(use.parameters) == 1:
            result.append(use)
            continue
        for role, bound in use.parameters.items():
            result.append(replace(use, parameters={role: bound}))
            reasons[frozenset({bound.parameter})] = f"{', '.join(culprits)} is shared by uses with other parameters"
    merged: list[Use] = []
    clashes: list[tuple[list[str], str]] = []
    for uses in grouped(result):
        alike = align(uses)
        if alike is None:
            places = " and ".join(dict.fromkeys(f"{use.layer} ({where(use.output)})" for use in uses))
            clashes.append((sorted(uses[0].parameter_set), places))
        else:
            merged += alike
    if clashes:
        many = "1 parameter is" if len(clashes) == 1 else f"{len(clashes)} parameters are"
        choice = ", ".join(f'"{names[0]}": "{GENERIC}"' for names, _ in clashes)
        raise AmbiguousRegistrationError(
            f"{many} matched by uses that lay them out differently:\n"
            f"{table((', '.join(names), places) for names, places in clashes)}\n"
            f"Use separate parameters, or let them be generic: compile(..., approximations={{{choice}}})."
        )
    return merged, reasons


def grouped(matches: Iterable[Use]) -> list[list[Use]]:
    """Uses of one parameter set, in graph order."""
    groups: dict[frozenset[str], list[Use]] = defaultdict(list)
    for use in matches:
        groups[use.parameter_set].append(use)
    return list(groups.values())


def align(uses: list[Use]) -> list[Use] | None:
    """Uses of one parameter set over one matrix: equal layouts, or transposed ones, or that of the elements where all
    scale or shift; None if they differ otherwise."""
    return aligned(uses) or aligned_flat(uses)


def aligned_flat(uses: list[Use]) -> list[Use] | None:
    if any(len(use.parameters) > 1 for use in uses):
        return None
    found = [one for one in map(flat, uses) if one is not None]
    return found if len(found) == len(uses) else None


def aligned(uses: list[Use]) -> list[Use] | None:
    first = next((use for use in uses if reads_ids(use)), uses[0])  # ids have no transposed rows
    found: list[Use] = []
    for use in uses:
        if set(use.parameters) != set(first.parameters):
            return None
        if same_matrix(first, use):
            found.append(use)
        elif set(use.parameters) == {"weight"} and same_matrix(first, use, transposed=True):
            found.append(replace(use, transposed=True))
        else:
            return None
    return found


def same_matrix(first: Use, other: Use, transposed: bool = False) -> bool:
    """Whether both put every element of their parameters in the same place."""
    for role, bound in first.parameters.items():
        its = other.parameters[role]
        if bound.parameter != its.parameter or not same_elements(bound.layout, its.layout, transposed):
            return False
    return True


def same_elements(one: Layout, other: Layout, transposed: bool) -> bool:
    """Whether both have the same elements of the parameter in the same places, those of `other` transposed."""
    if one == other and not transposed:
        return True
    mine, its = viewed(one, whole(one.shape)), viewed(other, whole(other.shape))
    if mine is None or its is None:  # some elements are copied on the way: compare their numbers
        numbers = torch.arange(prod(one.shape)).reshape(one.shape)
        mine, its = one.apply(numbers), other.apply(numbers)
        return torch.equal(mine, its.mT if transposed else its)
    its = its.mT if transposed else its
    sides = zip(mine.shape, mine.stride(), its.stride(), strict=True)
    return mine.shape == its.shape and all(size == 1 or stride == other for size, stride, other in sides)


def registration(program: Program, uses: list[Use], reasons: dict[frozenset[str], str]) -> Registration:
    first = next((use for use in uses if not use.transposed), uses[0])
    matrix: MatrixForm = first.matrix
    reason = reasons.get(first.parameter_set) or first.output.meta.get(UNROLLED)
    if reason is None and (part := next((use for use in uses if use.region is not None), None)):
        reason = f"a part of the {part.layer} at {where(part.output)}, apart from the rest of its outputs or inputs"
    if first.part_of:
        reason = f"part of {first.part_of}"
    if any(use.transposed for use in uses):
        reason = "tied: some uses are transposed, their inputs and output gradients change sides"
    chosen, why = choose(program, first.layer, matrix, uses)
    free = FREE if any(use.free for use in uses) else None
    said = "; ".join(text for text in (reason, free, why) if text) or None
    pieces = program.pieces_among(matrix.parameters)
    return Registration(
        first.layer,
        matrix,
        matrix.parameters,
        tuple(uses),
        chosen,
        said,
        pieces,
        sampling=program.options.sampling,
        blocks=side_blocks(program, first.layer, chosen, matrix),
    )
