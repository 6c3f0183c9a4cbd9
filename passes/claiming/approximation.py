"""Which approximation a registration gets, and why if it is not the obvious one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import fx

from ..approximations import (
    APPROXIMATIONS,
    DIAGONAL,
    FULL,
    KRON,
    KRON_BOTH_DIAG,
    KRON_IN_DIAG,
    KRON_INDEP,
    KRON_OUT_DIAG,
    Approximation,
)
from ..errors import ApproximationError, table
from ..graphs.operations import VIEWS, op_name
from ..ir import GENERIC, KEPT, Program, Use, tensor_attrs, where
from ..layers import Layer
from ..matrix import MatrixForm

BY_DIAGONAL_SIDES = {  # by (diagonal inputs, diagonal outputs)
    (False, False): KRON,
    (True, False): KRON_IN_DIAG,
    (False, True): KRON_OUT_DIAG,
    (True, True): KRON_BOTH_DIAG,
}


def choose(
    program: Program, layer: str, matrix: MatrixForm | None, uses: Sequence[Use], *names: str
) -> tuple[Approximation, str | None]:
    """(approximation, reason). What the user asks for by name wins over linked groups, those over module class and
    layer name, those over the layer's default; then sides that are too wide become diagonal."""
    parameters = names or (matrix.parameters if matrix is not None else ())
    asked = next(iter(requested(program, parameters, layer)), None)
    if matrix is None:
        return (FULL if asked == FULL.name else DIAGONAL), None
    steps = [step for use in uses for step in use.through]
    default = next((step.default for step in steps if step.default), program.layers[layer].default)
    chosen = APPROXIMATIONS[asked or default]
    reason: str | None = None
    if chosen.needs_cases and not all(cases_apart(program.layers, use) for use in uses):
        how = (
            "its gradient is summed over cases"
            if any(u.batch_independent for u in uses)
            else "cases are merged with positions"
        )
        reason = f"{how} at its output, so not {chosen.name!r}"
        chosen = KRON
    if left_out := next((step.left_out for step in steps if step.left_out), None):
        reason = left_out
        if chosen.needs_exact_rows:
            reason, chosen = f"{reason}, so not {chosen.name!r}", KRON
    if chosen.needs_pixels and (other := next((use for use in uses if not has_pixels(program, use)), None)):
        place = f"its use as {other.layer} at {where(other.output)}"
        reason, chosen = f"{place} has no pixels, so not {chosen.name!r}", KRON
    if chosen.series and not program.submodules and (obstacle := why_no_series(uses)):  # else `leave_python` says it
        plain = [product for product in BY_DIAGONAL_SIDES.values() if product.name == default]
        reason, chosen = f"{obstacle}, so not {chosen.name!r}", next(iter(plain), KRON)
    if len(uses) > 1 and chosen == KRON:
        chosen = KRON_INDEP
    if asked is not None:
        return chosen, reason
    limited = narrow(chosen, matrix, program.options.dense_limit, makes_outputs(program, uses))
    if limited != chosen or side_blocks(program, layer, chosen, matrix) != (1, 1):
        wide = f"a side is wider than dense_limit={program.options.dense_limit}"
        return limited, f"{reason}; {wide}" if reason else wide
    return chosen, reason


def cases_apart(layers: Mapping[str, Layer], use: Use) -> bool:
    if use.batch_independent:
        return False
    return use.batch_dim == 0 or (use.batch_dim is not None and layers[use.layer].forms[use.form].leading)


def has_pixels(program: Program, use: Use) -> bool:
    form = program.layers[use.layer].forms[use.form]
    return form.pixels is not None and all(step.keeps_pixels for step in use.through)


def why_no_series(uses: Sequence[Use], least: int = 2) -> str | None:
    """Why these uses are not one use repeated in time, `least` times in every tower; None if they are."""
    towers: dict[int, list[Use]] = defaultdict(list)
    for use in uses:
        towers[use.tower].append(use)
    numbers = {sum(use.steps for use in tower) for tower in towers.values()}
    if len(numbers) > 1:
        return f"its towers have {' and '.join(map(str, sorted(numbers)))} uses"
    if min(numbers) < least:
        return "it has one use"
    if turned := next((use for use in uses if use.transposed), None):
        return f"its use at {where(turned.output)} is transposed"
    if free := next((use for use in uses if use.batch_independent), None):
        return f"its gradient at {where(free.output)} is summed over cases"
    if more := next((use for use in uses if tensor_attrs(use).keys() - {KEPT}), None):
        return f"its rows at {where(more.output)} depend on more than its input"
    for tower in towers.values():  # which may be batches of different sizes
        if other := next(
            (use for use in tower if kind_of(use) != kind_of(uses[0]) or sizes(use) != sizes(tower[0])), None
        ):
            first = tower[0] if kind_of(other) == kind_of(uses[0]) else uses[0]
            return f"its uses at {where(first.output)} and {where(other.output)} are not alike"
    return None


def kind_of(use: Use) -> tuple[Any, ...]:
    """All that the rows of a use depend on beside its input."""
    literals = {name: value for name, value in use.attrs.items() if not isinstance(value, fx.Node)}
    scales = tuple(bound.scale for bound in use.parameters.values())
    return use.layer, use.form, use.batch_dim, use.through, scales, repr(sorted(literals.items()))


def sizes(use: Use) -> tuple[str, ...] | None:
    """Of the output, where the graph knows them."""
    value = use.output.meta.get("val")
    return None if value is None else tuple(str(size) for size in value.shape)


def narrow(chosen: Approximation, matrix: MatrixForm, limit: int, last: bool = False) -> Approximation:
    """`chosen` with sides made diagonal that are wider than `limit` and that blocks do not help.

    last: the outputs are those of the Fisher, a vocabulary, say. Their second moment is diagonal, or up to rank one, by
    nature: blocks of neighbors would hold nothing else.
    """
    _, outputs, inputs = matrix.shape
    if chosen == FULL:
        return FULL if prod(matrix.shape) <= limit else DIAGONAL
    if not chosen.resizable:
        return chosen
    in_diag = cuts(inputs, limit) is None or chosen.diagonal_inputs
    out_diag = cuts(outputs, limit) is None or chosen.diagonal_outputs
    out_diag = out_diag or (last and outputs > limit)
    return BY_DIAGONAL_SIDES[in_diag, out_diag] if in_diag or out_diag else chosen


def side_blocks(program: Program, layer: str, approximation: Approximation, matrix: MatrixForm) -> tuple[int, int]:
    """Into how many diagonal blocks the dense sides, outputs and inputs, are cut: as few as keep every factor within
    the memory of a dense one of width `dense_limit`. What the user asks for by name stays dense."""
    if not approximation.resizable or requested(program, matrix.parameters, layer):
        return 1, 1
    _, outputs, inputs = matrix.shape
    limit = program.options.dense_limit
    return cut_sides(approximation, (cuts(outputs, limit) or 1, cuts(inputs, limit) or 1))


def cut_sides(approximation: Approximation, blocks: tuple[int, int]) -> tuple[int, int]:
    """`blocks` of the sides that are dense, outputs and inputs."""
    if not approximation.resizable:
        return 1, 1
    outputs, inputs = blocks
    return 1 if approximation.diagonal_outputs else outputs, 1 if approximation.diagonal_inputs else inputs


def cuts(width: int, limit: int) -> int | None:
    """The number of blocks b wide with width · b within limit², 1 within the limit; None: not even two are together."""
    if width <= limit:
        return 1
    widest = limit**2 // width
    return -(-width // widest) if widest > 1 else None


def makes_outputs(program: Program, uses: Iterable[Use]) -> bool:
    """Whether some use makes the Fisher's outputs, looking through views."""
    ends: set[fx.Node] = set()
    for node in program.outputs:
        ends.add(node)
        while op_name(node) in VIEWS and node.all_input_nodes:
            node = node.all_input_nodes[0]
            ends.add(node)
    return any(use.output in ends for use in uses)


def check_requests(program: Program, groups: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Raises ApproximationError for all (layer, parameters) that are asked to be two things, or what the layer has
    not."""
    rows: list[tuple[str, str]] = []
    for layer, names in groups:
        parameters = tuple(names)
        asked = sorted(requested(program, parameters, layer))
        known = (*program.layers[layer].approximations, GENERIC)
        if len(asked) > 1:
            rows.append((", ".join(parameters), f"is asked to be {' and '.join(asked)}"))
        elif asked and asked[0] not in known:
            rows.append((", ".join(parameters), f"{layer} has no {asked[0]!r}, but {', '.join(known)}"))
    if rows:
        raise ApproximationError(f"approximations that cannot be honored:\n{table(rows)}")


def requested(program: Program, parameters: Iterable[str], layer: str) -> set[str]:
    """What the most specific keys of `approximations` that name these parameters ask for; nothing, if none does.

    Keys name parameters, under any of their names, then modules, the innermost first, then either with `*`, then
    linked groups, then module classes, then layers.
    """
    options, asked = program.options, program.options.approximations
    if not asked and not options.linked:
        return set()
    own = frozenset(parameters)
    canonical = frozenset(program.owner(name) for name in own)
    names = [name for parameter in sorted(canonical) for name in program.names.get(parameter, ())]
    paths = sorted({path for name in names for path in owners(name)}, key=lambda path: -path.count("."))
    classes = [options.modules.get(path, object) for name in names for path in owners(name)[:1]]
    wild = {key for key in options.patterns if any(fnmatchcase(one, key) for one in (*names, *paths))}
    levels: list[set[str]] = [
        {asked[name] for name in names if name in asked},
        *({asked[path]} for path in paths if path in asked),
        {asked[key] for key in wild},
        {value for value in map(options.linked.get, (canonical, own)) if value},
        {asked[key] for key in options.classes if any(issubclass(kind, key) for kind in classes)},
        {asked[layer]} if layer in asked else set(),
    ]
    return next((found for found in levels if found), set())


def declared_generic(program: Program, use: Use) -> bool:
    return GENERIC in requested(program, use.parameter_set, use.layer)


def owners(parameter: str) -> list[str]:
    """The module paths above a parameter, innermost first."""
    parts = parameter.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
