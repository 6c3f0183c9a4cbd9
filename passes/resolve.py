"""Matches become registrations.

Rules, in this order; order in the graph or among the layers never decides which match stays:

1. a match of parameters that the user wants generic goes, and one of parameters without elements;
2. a match that splits a linked group goes;
3. a match of a layer of ours goes where one of the user's own layers claims the same use, unless ours explains more of
   the graph around it;
4. a match of `x @ w + b` goes if `b` is also added elsewhere: the two smaller matches stay;
5. a match of a function of a parameter goes where another has the parameter as a matrix at the same place;
6. a match whose nodes are a strict subset of another's that shares a parameter goes; inside a composite layer the parts
   stay and the composite goes. Two that still claim one use are an error: a use that is registered twice counts twice;
7. a parameter that is still claimed by different parameter sets, or laid out in different ways, takes an exact
   treatment where there is one: biases are split off a shared weight, a tied output layer is an embedding with its
   roles swapped; a small matrix has the block of its elements; a larger one that is also scaled or added as it is, as
   in `w - lr * gradient`, is generic; other registrations are ambiguous and the user must choose;
8. a parameter that no match claims is generic where a loss depends on it, and unused where none does.

**Approximations**: which one a registration gets, and why if it is not the obvious one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
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
    MERGED,
    OTHER_ROWS,
    PIECES,
    POOLED,
    SUMMED,
    TIME,
    UNTIED,
    Approximation,
)
from .errors import AmbiguousRegistrationError, ApproximationError, LinkError, nearest, source_line, table, where
from .graphs.labels import Edge, ancestors, entries, labels_of, sizes_of, symbolic_sizes
from .graphs.operations import OWN_BACKWARD, PARTS, VIEWS, op_name
from .ir import (
    CONTAINED,
    GENERIC,
    ROW_MASK,
    UNROLLED,
    WANTED,
    Note,
    Program,
    Registration,
    Use,
    literal_attrs,
    tensor_attrs,
)
from .layers import LAYERS, Layer
from .matrix import MatrixForm
from .parametrization import Complex, ComplexOutputs, Transposed, same_elements
from .parametrizations.functions import PerCase, as_per_case, has_size_of_inputs, too_large
from .parametrizations.parts import reads_ids, region_of

PIECES_OF = {"chunk", "split", "split_with_sizes"}
FULL_LIMIT = 512  # the widest full block by default: its inverse costs the cube of its width
FULL_TOO_WIDE = (
    f"its full block would be {{width:,}} wide, and the default ends at {FULL_LIMIT}; "
    "approximations={{name: 'full'}} asks for it"
)
TRANSPOSED = (
    "some uses have its transpose, as derivatives by the inputs and tied output layers do; there its inputs and output "
    "gradients change sides"
)
Fields = Mapping[str, str]  # of words with names in braces
SYMBOL = re.compile(r"[a-z]+\d+")  # of a size, such as s0
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
            FULL_TOO_WIDE.format(width=prod(matrix.shape))
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


def without_cases(layers: Mapping[str, Layer], uses: Sequence[Use]) -> Fields | None:
    """Why the rows of the first use without cases of their own have none."""
    use = next((use for use in uses if not cases_apart(layers, use)), None)
    if use is None:
        return None
    return {"why": why_without_cases(use)}


def why_without_cases(use: Use) -> str:
    """`PIECES`, `UNTIED`, `OTHER_ROWS` or `MERGED`, as the input and the sizes of the output tell. A product or sum of
    sizes of inputs merges these."""
    if is_piece(use):
        return PIECES
    first, *others = symbolic_sizes(use.output) or [None]
    inputs = [symbolic_sizes(node) for node in use.output.graph.find_nodes(op="placeholder")]
    symbols = {name for sizes in inputs for size in sizes for name in SYMBOL.findall(size or "")}
    if use.batch_dim is not None or "val" not in use.output.meta:
        return MERGED
    if first is not None and first in {size for sizes in inputs for size in sizes[:1]}:
        return UNTIED
    computed = [size for size in (first, *others) if size and not SYMBOL.fullmatch(size)]
    return MERGED if any(not symbols.isdisjoint(SYMBOL.findall(size)) for size in computed) else OTHER_ROWS


def is_piece(use: Use) -> bool:
    """Whether its input is one of several pieces of a tensor along the first dimension, which have no row in common."""
    source = use.input.args[0] if op_name(use.input) == "getitem" else None
    if not isinstance(source, fx.Node) or op_name(source) not in PIECES_OF:
        return False
    dim = source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0)
    return isinstance(dim, int) and dim == 0


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
    "cases": lambda layers, uses: without_cases(layers, uses),
    "dense rows": lambda layers, uses: first_use(uses, lambda use: not layers[use.layer].dense_rows),
    "pixels": lambda layers, uses: first_use(uses, lambda use: not has_pixels(layers, use)),
    "equal towers": unequal_towers,
    "several uses": single_use,
    "no transpose": lambda layers, uses: first_use(uses, lambda use: use.transposed),
    "own rows": lambda layers, uses: first_use(uses, lambda use: bool(tensor_attrs(use).keys() - {ROW_MASK})),
    "alike": unlike,
}


def check_needs(rows: Iterable[Approximation]) -> None:
    """Raises AssertionError, at the import of kfac_fx, for needs of an approximation that no use is asked for."""
    wrong = [f"{row.name} needs {need!r}.{nearest(need, LACKS)}" for row in rows for need in row.needs.keys() - LACKS]
    assert not wrong, (
        f"bug in kfac_fx: {' '.join(wrong)} The keys of needs= in passes/approximations.py are {', '.join(LACKS)}; for "
        "another one write in LACKS of passes/resolve.py which uses lack it"
    )


check_needs(APPROXIMATIONS.values())


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


Reason = Callable[[Use], str | None]  # why a match goes; None: it stays
EMPTY = "its parameters have no elements"
WITHOUT_ROWS = "{}, so the rows of its layer tell no gradients of cases"
FREE = "free of the batch: one gradient for all cases, right in expectation over sampled targets"


def resolve(program: Program) -> Program:
    """See the module's docstring. Raises AmbiguousRegistrationError and LinkError with all culprits."""
    notes: list[Note] = []
    matches, reasons = split_shared(without_functions(claims(program, notes), notes))
    matches, mixed = without_mixed(matches)
    groups = grouped(matches)
    check_requests(program, [(uses[0].layer, sorted(uses[0].parameter_set)) for uses in groups])
    registrations = [registration(program, uses, reasons) for uses in groups]
    without = {
        name: (why, of.layer) for of in registrations if (why := without_rows(program, of)) for name in of.parameters
    }
    registrations = [registered for registered in registrations if without.keys().isdisjoint(registered.parameters)]
    refuse_others(program, registrations)
    taken = {name for registered in registrations for name in registered.parameters}
    of_layers = {name: layer for name, (_, layer) in without.items()}
    generics, unused = leftovers(program, taken, mixed | {name: why for name, (why, _) in without.items()}, of_layers)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    registrations.sort(key=lambda registered: order[registered.uses[0].output])
    return program.but(
        registrations=(*registrations, *generics), unused=unused, dropped=(*program.dropped, *notes), matches=()
    )


# --- the matches that stay --------------------------------------------------------------------------------------------


def claims(program: Program, notes: list[Note]) -> list[Use]:
    """The matches that stay; a note for each of the others. Raises AmbiguousRegistrationError with all culprits."""
    matches = drop(program.matches, lambda use: WANTED if declared_generic(program, use) else None, notes)
    matches = drop(matches, lambda use: EMPTY if is_empty(program, use) else None, notes)
    matches = drop(matches, lambda use: split_linked_group(program, use), notes)
    matches = drop(matches, users_layers(program, matches), notes)
    matches = drop(matches, joined_elsewhere(program, matches), notes)
    matches = drop(matches, matrices_there(matches), notes)
    matches = drop_contained(program, matches, notes)
    refuse_claimed_twice(program, matches)
    return matches


def drop(matches: Iterable[Use], reason: Reason, notes: list[Note]) -> list[Use]:
    """The matches that have no reason to go; a note with the reason of each of the others."""
    remaining: list[Use] = []
    for use in matches:
        if (words := reason(use)) is None:
            remaining.append(use)
        else:
            notes.append(Note(str(use), words))
    return remaining


def is_empty(program: Program, use: Use) -> bool:
    return all(0 in program.shapes[name] for name in use.parameter_set)


def split_linked_group(program: Program, use: Use) -> str | None:
    names, owners = use.parameter_set, {program.owner(name) for name in use.parameter_set}
    groups = (program.options.groups.get(name) for name in sorted(owners | names))
    split = [group for group in groups if group is not None and group not in (owners, names)]
    if not split or program.layers[use.layer].parts:
        return None
    return f"splits the linked group ({', '.join(sorted(split[0]))})"


def users_layers(program: Program, matches: Sequence[Use]) -> Reason:
    """Why a match of a layer of ours goes: one of the user's own layers claims the same use."""
    order = {id(use): number for number, use in enumerate(matches)}
    by_node = uses_by_node(use for use in matches if declared_by_user(program, use))

    def reason(use: Use) -> str | None:
        near = () if declared_by_user(program, use) else (rival for node in use.nodes for rival in by_node[node])
        rival = min((rival for rival in near if rivals(use, rival)), key=lambda rival: order[id(rival)], default=None)
        return None if rival is None else f"{rival} is of a layer of your own, which wins"

    return reason


def uses_by_node(uses: Iterable[Use]) -> dict[fx.Node, list[Use]]:
    by_node: dict[fx.Node, list[Use]] = defaultdict(list)
    for use in uses:
        for node in use.nodes:
            by_node[node].append(use)
    return by_node


def rivals(use: Use, other: Use) -> bool:
    """Whether both claim one use, and neither is a part of the other."""
    apart = use.nodes < other.nodes or other.nodes < use.nodes
    return not apart and bool(use.nodes & other.nodes and use.parameter_set & other.parameter_set)


def joined_elsewhere(program: Program, matches: Sequence[Use]) -> Reason:
    """Why a match of a layer with its shift goes: the shift is a layer of its own elsewhere. Apart, both are exact."""
    by_node = uses_by_node(matches)
    alone: dict[tuple[str, frozenset[str]], list[Use]] = defaultdict(list)
    for use in matches:
        if len(use.parameter_set) == 1:
            alone[use.layer, use.parameter_set].append(use)

    def reason(use: Use) -> str | None:
        inside = {id(inner): inner for node in use.nodes for inner in by_node[node] if inner.nodes < use.nodes}.values()
        sets = {inner.parameter_set for inner in inside}
        elsewhere = (
            f"{inner} by itself, as {other} at {where(other.output)}"
            for inner in inside
            if use.nodes.isdisjoint(inner.output.users)  # the last of the two
            and inner.layer != use.layer
            and use.parameter_set - inner.parameter_set in sets
            for other in alone[inner.layer, inner.parameter_set]
            if not any(other.nodes < joined.nodes for joined in by_node[other.output])
        )
        return None if program.layers[use.layer].parts else next(elsewhere, None)

    return reason


def matrices_there(matches: Sequence[Use]) -> Reason:
    """Why a match of a function of a parameter goes: at the same place another layer has the parameter as a matrix. The
    other roles of the function's own match, as the weight of `x * a + a.exp()`, are uses next to it."""
    by_node = uses_by_node(use for use in matches if not by_cases(use))

    def reason(use: Use) -> str | None:
        near = [other for node in use.nodes for other in by_node[node]] if by_cases(use) else []
        near = [other for other in near if use.parameter_set <= other.parameter_set]
        if any(parts_of_one(use, other) for other in near):
            near = [other for other in near if not other.nodes <= use.nodes]
        return f"a function of a parameter that is a matrix there, in {near[0]}" if near else None

    return reason


def drop_contained(program: Program, matches: Sequence[Use], notes: list[Note]) -> list[Use]:
    """Without the matches whose activations a larger match has, too. One of `x * (1 + a)` is inside of one of
    `x * (1 + a) + b`, whose weight may be an expression without a node of its own."""
    by_node, label = uses_by_node(matches), labels_of(program)
    activations = {id(use): frozenset(node for node in use.nodes if label[node].activation) for use in matches}
    remaining: list[Use] = []
    for use in matches:
        parts = program.layers[use.layer].parts
        if parts:
            notes.append(Note(str(use), f"registered as its parts, {' and '.join(parts)}"))
            continue
        larger = [
            other
            for other in by_node[use.output]
            if use.parameter_set & other.parameter_set
            and (
                activations[id(use)] < activations[id(other)]
                or use.nodes < other.nodes
                or (use.nodes == other.nodes and use.parameter_set < other.parameter_set)
            )
        ]
        whole = next((other for other in larger if program.layers[other.layer].parts), None)
        if whole is not None and use.layer in program.layers[whole.layer].parts:
            others = [other for other in larger if not program.layers[other.layer].parts]
            if not others:
                remaining.append(replace(use, part_of=str(whole)))
                continue
        if larger:
            container = "a larger match of this layer" if str(use) == str(larger[0]) else str(larger[0])
            notes.append(Note(str(use), CONTAINED.format(container)))
        else:
            remaining.append(use)
    return remaining


def parts_of_one(use: Use, other: Use) -> bool:
    """Whether `cut` made both of one match: of a parameter in two of its roles."""
    return (use.layer, use.form, use.nodes) == (other.layer, other.form, other.nodes)


def refuse_claimed_twice(program: Program, matches: Sequence[Use]) -> None:
    by_node: dict[fx.Node, list[Use]] = defaultdict(list)
    rows: dict[tuple[str, str], None] = {}
    for use in matches:
        for node in use.nodes:
            for other in by_node[node]:
                shared = sorted(use.parameter_set & other.parameter_set)
                if shared and not parts_of_one(use, other):
                    layers = (program.layers[claim.layer] for claim in (other, use))
                    declared = " and ".join(f"{layer.name} ({layer.location})" for layer in layers)
                    rows[", ".join(shared), f"at {where(use.output)}: {declared}"] = None
            by_node[node].append(use)
    if rows:
        many = "1 use is" if len(rows) == 1 else f"{len(rows)} uses are"
        raise AmbiguousRegistrationError(
            f"{many} claimed by two layers:\n{table(rows)}\n"
            "Leave one of them out of layers=[...], or let its `where` refuse what is not meant."
        )


# --- uses that share parameters ---------------------------------------------------------------------------------------


def without_functions(matches: list[Use], notes: list[Note]) -> list[Use]:
    """Without the uses of parameters behind functions that are matrices elsewhere: what is left of these is generic."""
    matrices = {
        bound.parameter
        for use in matches
        for role, bound in use.parameters.items()
        if not by_cases(use) and as_per_case(replace(use, parameters={role: bound}), matrices=True) is None
    }

    def reason(use: Use) -> str | None:
        matrix_elsewhere = by_cases(use) and use.parameter_set & matrices
        return "a function of a parameter that is a matrix elsewhere" if matrix_elsewhere else None

    return drop(matches, reason, notes)


def by_cases(use: Use) -> bool:
    return any(isinstance(step, PerCase) for step in use.through)


def split_shared(matches: list[Use]) -> tuple[list[Use], dict[frozenset[str], str]]:
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
    return result, reasons


def without_mixed(matches: Sequence[Use]) -> tuple[list[Use], dict[str, str]]:
    """The uses over one matrix for each parameter set; and the parameters that are matrices in some of their uses and
    scale or shift in others, with the reason why they are generic. Raises AmbiguousRegistrationError with all others.
    """
    merged: list[Use] = []
    mixed: dict[str, str] = {}
    clashes: list[tuple[list[str], str]] = []
    for uses in grouped(matches):
        alike = align(uses)
        if alike is not None:
            merged += alike
            continue
        places = " and ".join(dict.fromkeys(f"{use.layer} ({where(use.output)})" for use in uses))
        if any(as_per_case(use) is not None for use in uses) and any(as_per_case(use) is None for use in uses):
            mixed |= dict.fromkeys(
                uses[0].parameter_set, f"a matrix in one use, and scaled or added in another: {places}"
            )
        else:
            clashes.append((sorted(uses[0].parameter_set), places))
    if clashes:
        many = "1 parameter is" if len(clashes) == 1 else f"{len(clashes)} parameters are"
        choice = ", ".join(f'"{names[0]}": "{GENERIC}"' for names, _ in clashes)
        raise AmbiguousRegistrationError(
            f"{many} matched by uses that lay them out differently:\n"
            f"{table((', '.join(names), places) for names, places in clashes)}\n"
            f"Use separate parameters, or let them be generic: compile(..., approximations={{{choice}}})."
        )
    return merged, mixed


def grouped(matches: Iterable[Use]) -> list[list[Use]]:
    """Uses of one parameter set, in graph order."""
    groups: dict[frozenset[str], list[Use]] = defaultdict(list)
    for use in matches:
        groups[use.parameter_set].append(use)
    return list(groups.values())


def align(uses: list[Use]) -> list[Use] | None:
    """Uses of one parameter set over one matrix: equal layouts, or transposed ones, or that of the elements where all
    scale or shift; None if they differ otherwise."""
    return aligned(uses) or aligned_per_case(uses)


def aligned_per_case(uses: list[Use]) -> list[Use] | None:
    """Over the elements: where all scale or shift, or are a small matrix."""
    if any(len(use.parameters) > 1 for use in uses):
        return None
    per_case = [aligned for use in uses if (aligned := as_per_case(use, matrices=True)) is not None]
    return per_case if len(per_case) == len(uses) else None


def aligned(uses: list[Use]) -> list[Use] | None:
    first = next((use for use in uses if reads_ids(use)), uses[0])  # ids have no transposed rows
    turned: list[Use] = []
    for use in uses:
        if set(use.parameters) != set(first.parameters):
            return None
        if same_matrix(first, use):
            turned.append(use)
        elif set(use.parameters) == {"weight"} and same_matrix(first, use, transposed=True):
            turned.append(use if use.transposed else replace(use, through=(*use.through, Transposed())))
        else:
            return None
    return turned


def same_matrix(first: Use, other: Use, transposed: bool = False) -> bool:
    """Whether both put every element of their parameters in the same place."""
    for role, bound in first.parameters.items():
        its = other.parameters[role]
        if bound.parameter != its.parameter or not same_elements(bound.layout, its.layout, transposed):
            return False
    return True


def registration(program: Program, uses: list[Use], reasons: dict[frozenset[str], str]) -> Registration:
    first = next((use for use in uses if not use.transposed), uses[0])
    matrix: MatrixForm = first.matrix
    reason = reasons.get(first.parameter_set) or first.output.meta.get(UNROLLED)
    if any(
        of_complex(use) and {"weight", "bias"} <= use.attrs.keys() and use.attrs["bias"] is not None for use in uses
    ):
        reason = "of complex numbers: a weight and its bias have a block each"
    if reason is None and (part := next((use for use in uses if region_of(use) is not None), None)):
        reason = f"it is in some of the outputs or inputs of the {part.layer} at {where(part.output)}: they are a block"
    if first.part_of:
        reason = f"part of {first.part_of}"
    if any(use.transposed for use in uses):
        reason = TRANSPOSED
    chosen, why = choose(program, first.layer, matrix, uses)
    free = FREE if any(use.batch_independent for use in uses) else None
    words = "; ".join(text for text in (reason, free, why) if text) or None
    pieces = program.pieces_among(matrix.parameters)
    return Registration(
        first.layer,
        matrix,
        matrix.parameters,
        tuple(uses),
        chosen.name,
        words,
        pieces,
        sampling=program.options.sampling,
        blocks=side_blocks(program, first.layer, chosen, matrix),
    )


def without_rows(program: Program, registration: Registration) -> str | None:
    """Why it is right as a generic parameter alone; None if its rows may be taken.

    Its uses have other rows than those of cases, so its rows tell no gradients of cases. And it is asked to be diagonal
    or full; or its layer's block is made of gradients of cases, and it is one number, or a case has several uses of it.
    No independence of rows is near then.
    """
    why = next((why for why in (SUMMED, UNTIED, OTHER_ROWS, POOLED) if why in (registration.reason or "")), None)
    if why is None or registration.matrix is None:
        return None
    asked = requested(program, registration.parameters, registration.layer)
    by_case = (
        APPROXIMATIONS[program.layers[registration.layer].default].needs_cases and registration.structure.kronecker
    )
    batches = {size for use in registration.uses for size in sizes_of(use.output)[:1]}
    several = len(registration.uses) > len(batches) > 0  # none where no sizes are known
    dependent = by_case and why != SUMMED and (several or prod(registration.matrix.shape) == 1)
    return WITHOUT_ROWS.format(why) if asked & {FULL.name, DIAGONAL.name} or (not asked and dependent) else None


def refuse_others(program: Program, registrations: Iterable[Registration]) -> None:
    """Raises ApproximationError under `strict` for all registrations that have another approximation than the user
    asked for by name."""
    rows: list[tuple[str, str]] = []
    for registration in registrations if program.options.strict else ():
        asked = requested(program, registration.parameters, registration.layer) & APPROXIMATIONS.keys()
        honored = asked | {KRON_INDEP.name} if KRON.name in asked else asked
        reason = registration.reason or ""
        # The Kronecker product of one use is its series, too.
        if asked and registration.approximation not in honored and TIME["several uses"] not in reason:
            rows.append((", ".join(registration.parameters), reason))
    if rows:
        raise ApproximationError(
            f"approximations that cannot be honored:\n{table(rows)}\n"
            "Ask for another one, as 'kron', or compile with strict=False, which keeps the product of the layer."
        )


def of_complex(use: Use) -> bool:
    return use.is_complex or any(isinstance(step, (Complex, ComplexOutputs)) for step in use.through)


# --- leftovers --------------------------------------------------------------------------------------------------------


MOVES = VIEWS | PARTS | {"expand", "reshape_as"}


def leftovers(
    program: Program, taken: set[str], reasons: Mapping[str, str], layers: Mapping[str, str]
) -> tuple[list[Registration], tuple[str, ...]]:
    """Generic registrations for what is used but unclaimed, and the names of what is not used at all.

    reasons: why parameters with uses are unclaimed, where that is known. layers: the layers of their uses, where their
        rows are of no use.
    """
    edges: dict[str, list[Edge]] = defaultdict(list)
    for edge, names in entries(program).items():
        for name in names:
            edges[name].append(edge)
    wanted = {name: WANTED for use in program.matches if declared_generic(program, use) for name in use.parameter_set}
    generics: list[Registration] = []
    unmatched: list[tuple[str, str]] = []
    for name in program.shapes:
        if name in taken or name not in edges:
            continue
        owner = program.owner(name)
        group = program.options.groups.get(owner) or program.options.groups.get(name, frozenset())
        if len(group) > 1:
            others = ", ".join(sorted(group - {owner, name}))
            unmatched.append((name, f"linked with {others}; enters {enters(edges[name])}"))
        if GENERIC in requested(program, (name,), "generic"):
            wanted[name] = WANTED
        approximation, _ = choose(program, layers.get(name, "generic"), None, (), name)
        entering = edges[name][0][0]
        large = too_large(program, labels_of(program), entering) or has_size_of_inputs(program, entering)
        unknown = (
            reasons.get(name)
            or function_entered(edges[name], owner)
            or f"no layer has the form of {enters(edges[name])}{large}"
        )
        generics.append(program.generic(name, wanted.get(name, unknown), approximation.name))
    if unmatched:
        raise LinkError(
            f"linked parameters that no layer matched as a group:\n{table(unmatched)}\n"
            "A block has one matrix, of a weight, of a bias, or of both, with one bias for each output: other groups "
            "cannot be linked. Take them out of `linked`; or, for a weight and its bias, declare a layer that has both "
            "in its form: compile(..., layers=[...])."
        )
    return generics, tuple(name for name in program.shapes if name not in taken and name not in edges)


def function_entered(edges: list[Edge], parameter: str) -> str | None:
    """The first autograd.Function of a user's that the parameter enters, if it does."""
    for pure, act in edges:
        between = [act, *ancestors([pure])]
        for node in (node for node in between if op_name(node) == OWN_BACKWARD):
            if any(behind.op == "get_attr" and behind.target == parameter for behind in ancestors([node])):
                name, more = node.target.function.__name__, len(edges) - 1  # type: ignore[union-attr]  # see `own_backwards`
                others = f", and has {more} more use{'s' if more > 1 else ''}" if more else ""
                return f"enters {name} at {source_line(node) or node.name}, whose backward is its own{others}"
    return None


def enters(edges: list[Edge]) -> str:
    others = len(edges) - 1
    more = f" and {others} more use{'s' if others > 1 else ''}" if others else ""
    (pure, act), *_ = edges
    while pure.op != "get_attr" and op_name(pure) in MOVES and isinstance(pure.args[0], fx.Node):
        pure = pure.args[0]
    through = f" through {op_name(pure)}" if pure.op != "get_attr" else ""
    return where(act) + through + more
