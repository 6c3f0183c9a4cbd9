"""Which approximation a registration gets, and why if it is not the obvious one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import fx

from .approximations import (
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
from .errors import ApproximationError, table
from .graphs.operations import VIEWS, op_name
from .ir import GENERIC, ROW_MASK, Program, Use, literal_attrs, tensor_attrs
from .layers import LAYERS, Layer
from .matrix import MatrixForm
from .users_code import where

FULL_LIMIT = 512  # the widest full block by default: its inverse costs the cube of its width
Fields = Mapping[str, str]  # of words with names in braces
BY_DIAGONAL_SIDES = {  # by (diagonal inputs, diagonal outputs)
    (False, False): KRON,
    (True, False): KRON_IN_DIAG,
    (False, True): KRON_OUT_DIAG,
    (True, True): KRON_BOTH_DIAG,
}


def choose(
    program: Program, layer: str, matrix: MatrixForm | None, uses: Sequence[Use], *names: str
) -> tuple[Approximation, str | None]:
    """(approximation, reason). A request by name wins over linked groups, those over module class and layer name, those
    over the layer's default. Then sides that are too wide become diagonal."""
    parameters = names or (matrix.parameters if matrix is not None else ())
    asked = next(iter(requested(program, parameters, layer)), None)
    if matrix is None:
        return (FULL if asked == FULL.name else DIAGONAL), None
    steps = [step for use in uses for step in use.through]
    of_layer = program.layers[layer].default
    default, why = next((step.default for step in steps if step.default), (of_layer, ""))
    chosen = APPROXIMATIONS[asked or default]
    reason = next((step.left_out for step in steps if step.left_out), None)
    timeless = chosen.series and program.submodules  # `leave_python` looks at the order of uses there
    if reason and chosen.needs_exact_rows:
        reason, chosen = f"{reason}, so not {chosen.name!r}", KRON
    elif not timeless and (obstacle := lacking(chosen, program.layers, uses)):
        obstacle = f"{obstacle}, so not {chosen.name!r}"
        reason = f"{reason}; {obstacle}" if reason else obstacle
        plain = [product for product in BY_DIAGONAL_SIDES.values() if product.name == default and chosen.kronecker]
        chosen = next(iter(plain), KRON)
    if len(uses) > 1 and chosen == KRON:
        chosen = KRON_INDEP
    if asked is not None:
        return chosen, reason
    if chosen.name == default != of_layer:
        reason = "; ".join(filter(None, (reason, f"{why}, so not {of_layer!r}")))
    limit = program.options.dense_limit
    limited = narrow(chosen, matrix, limit, makes_outputs(program, uses))
    if limited != chosen or side_blocks(program, layer, chosen, matrix) != (1, 1):
        wide = (
            f"a full block is wider than {FULL_LIMIT}"
            if chosen == FULL and limit > FULL_LIMIT
            else f"a side is wider than dense_limit={limit}"
        )
        return limited, f"{reason}; {wide}" if reason else wide
    return chosen, reason


def lacking(
    approximation: Approximation, layers: Mapping[str, Layer], uses: Sequence[Use], but: Collection[str] = ()
) -> str | None:
    """The words for the first of its needs, `but` some, that these uses lack; None if they lack none."""
    for need, words in approximation.needs.items():
        if need not in but and (fields := LACKS[need](layers, uses)) is not None:
            return words.format(**fields)
    return None


def cases_apart(layers: Mapping[str, Layer], use: Use) -> bool:
    if use.batch_independent:
        return False
    return use.batch_dim == 0 or (use.batch_dim is not None and layers[use.layer].forms[use.form].leading)


def has_pixels(layers: Mapping[str, Layer], use: Use) -> bool:
    form = layers[use.layer].forms[use.form]
    return form.pixels is not None and all(step.keeps_pixels for step in use.through)


def first_use(uses: Iterable[Use], lacks: Callable[[Use], bool]) -> Fields | None:
    use = next(filter(lacks, uses), None)
    return None if use is None else {"layer": use.layer, "place": where(use.output)}


def unequal_towers(layers: Mapping[str, Layer], uses: Sequence[Use]) -> Fields | None:
    numbers = {sum(use.steps for use in tower) for tower in by_tower(uses)}
    return {"numbers": " and ".join(map(str, sorted(numbers)))} if len(numbers) > 1 else None


def single_use(layers: Mapping[str, Layer], uses: Sequence[Use]) -> Fields | None:
    return {} if any(sum(use.steps for use in tower) < 2 for tower in by_tower(uses)) else None


def unlike(layers: Mapping[str, Layer], uses: Sequence[Use]) -> Fields | None:
    """Two uses that differ in what makes their rows. Towers may be batches of different sizes."""
    for tower in by_tower(uses):
        for use in tower:
            if kind_of(use) != kind_of(uses[0]) or sizes(use) != sizes(tower[0]):
                first = tower[0] if kind_of(use) == kind_of(uses[0]) else uses[0]
                return {"first": where(first.output), "place": where(use.output)}
    return None


def by_tower(uses: Iterable[Use]) -> list[list[Use]]:
    towers: dict[int, list[Use]] = defaultdict(list)
    for use in uses:
        towers[use.tower].append(use)
    return list(towers.values())


LACKS: Mapping[str, Callable[[Mapping[str, Layer], Sequence[Use]], Fields | None]] = {
    # by the keys of `Approximation.needs`: what the words name, None if no use lacks it
    "batch": lambda layers, uses: first_use(uses, lambda use: use.batch_independent),
    "cases": lambda layers, uses: first_use(uses, lambda use: not cases_apart(layers, use)),
    "dense rows": lambda layers, uses: first_use(uses, lambda use: not layers[use.layer].dense_rows),
    "pixels": lambda layers, uses: first_use(uses, lambda use: not has_pixels(layers, use)),
    "equal towers": unequal_towers,
    "several uses": single_use,
    "no transpose": lambda layers, uses: first_use(uses, lambda use: use.transposed),
    "own rows": lambda layers, uses: first_use(uses, lambda use: bool(tensor_attrs(use).keys() - {ROW_MASK})),
    "alike": unlike,
}


def kind_of(use: Use) -> tuple[Any, ...]:
    """All that the rows of a use depend on beside its input."""
    scales = tuple(bound.scale for bound in use.parameters.values())
    return use.layer, use.form, use.batch_dim, use.through, scales, repr(sorted(literal_attrs(use).items()))


def sizes(use: Use) -> tuple[str, ...] | None:
    """The sizes of the output, if the graph knows them."""
    value = use.output.meta.get("val")
    return None if value is None else tuple(str(size) for size in value.shape)


def narrow(chosen: Approximation, matrix: MatrixForm, limit: int, last: bool = False) -> Approximation:
    """`chosen` with sides made diagonal that are wider than `limit` and that blocks do not help. A full block is no
    wider than `FULL_LIMIT` either.

    last: the outputs are those of the Fisher, a vocabulary, say. Their second moment is diagonal, or up to rank one, by
    nature: blocks of neighbors would hold nothing else.
    """
    _, outputs, inputs = matrix.shape
    if chosen == FULL:
        return FULL if prod(matrix.shape) <= min(limit, FULL_LIMIT) else DIAGONAL
    if not chosen.resizable:
        return chosen
    in_diag = cuts(inputs, limit, has_bias(matrix)) is None or chosen.diagonal_inputs
    out_diag = cuts(outputs, limit) is None or chosen.diagonal_outputs
    out_diag = out_diag or (last and outputs > limit)
    return BY_DIAGONAL_SIDES[in_diag, out_diag] if in_diag or out_diag else chosen


def side_blocks(program: Program, layer: str, approximation: Approximation, matrix: MatrixForm) -> tuple[int, int]:
    """Into how many diagonal blocks the dense sides, outputs and inputs, are cut: as few as keep every factor within
    the memory of a dense one of width `dense_limit`. An approximation that the user asks for by name stays dense."""
    if not approximation.resizable or requested(program, matrix.parameters, layer):
        return 1, 1
    _, outputs, inputs = matrix.shape
    limit = program.options.dense_limit
    return cut_sides(approximation, (cuts(outputs, limit) or 1, cuts(inputs, limit, has_bias(matrix)) or 1))


def cut_sides(approximation: Approximation, blocks: tuple[int, int]) -> tuple[int, int]:
    """`blocks` of the sides that are dense, outputs and inputs."""
    if not approximation.resizable:
        return 1, 1
    outputs, inputs = blocks
    return 1 if approximation.diagonal_outputs else outputs, 1 if approximation.diagonal_inputs else inputs


def has_bias(matrix: MatrixForm) -> bool:
    """Whether the bias is one more column than a layer has inputs."""
    return matrix.weight is not None and matrix.bias is not None


def cuts(width: int, limit: int, bias: bool = False) -> int | None:
    """The number of blocks b wide with width · b within limit², 1 within the limit; None: not even two are together.

    bias: whether the last column is a bias, which does not make a layer of 4096 inputs too wide.
    """
    if width - bias <= limit:
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
    return any(not ends.isdisjoint(use.nodes) for use in uses)


def check_requests(program: Program, groups: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Raises ApproximationError for all (layer, parameters) that are asked to be two things, or what the layer has
    not."""
    rows: list[tuple[str, str]] = []
    for layer, names in groups:
        parameters = tuple(names)
        asked = sorted(requested(program, parameters, layer))
        available = (*program.layers[layer].approximations, GENERIC)
        if len(asked) > 1:
            rows.append((", ".join(parameters), f"is asked to be {' and '.join(asked)}"))
        elif asked and asked[0] not in available:
            rows.append((", ".join(parameters), f"{layer} has no {asked[0]!r}, but {', '.join(available)}"))
    if rows:
        raise ApproximationError(f"approximations that cannot be honored:\n{table(rows)}")


def requested(program: Program, parameters: Iterable[str], layer: str) -> set[str]:
    """The approximations that the most specific keys for these parameters ask for; empty if no key names them.

    Keys name parameters, under any of their names, then modules, the innermost first, then either with `*`, then
    linked groups, then module classes, then layers.
    """
    options, asked = program.options, program.options.approximations
    if not asked and not options.linked:
        return set()
    in_pieces = frozenset(parameters)
    canonical = frozenset(program.owner(name) for name in in_pieces)
    names = [name for parameter in sorted(canonical) for name in program.names.get(parameter, ())]
    paths = sorted({path for name in names for path in owners(name)}, key=lambda path: -path.count("."))
    classes = [options.modules.get(path, object) for name in names for path in owners(name)[:1]]
    patterns = [key for key in options.patterns if key not in program.aliases and key not in options.modules]
    wild = {key for key in patterns if any(fnmatchcase(name, key) for name in (*names, *paths))}
    levels: list[set[str]] = [
        {asked[name] for name in names if name in asked},
        *({asked[path]} for path in paths if path in asked),
        {asked[key] for key in wild},
        {value for value in map(options.linked.get, (canonical, in_pieces)) if value},
        {asked[key] for key in options.classes if any(issubclass(kind, key) for kind in classes)},
        {asked[layer]} if layer in asked else set(),
    ]
    return next(filter(None, levels), set())


def declared_generic(program: Program, use: Use) -> bool:
    return GENERIC in requested(program, use.parameter_set, use.layer)


def declared_by_user(program: Program, use: Use) -> bool:
    """Whether its layer is declared by the user."""
    return program.layers[use.layer] is not LAYERS.get(use.layer)


def owners(parameter: str) -> list[str]:
    """The module paths above a parameter, innermost first."""
    parts = parameter.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
