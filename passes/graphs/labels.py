"""Labels of nodes: which values a node depends on, and which parameter stands behind it.

    ACT     depends on the values of the model's inputs, or has a row for every case
    FREE    an activation that is free of the batch: computed by a layer, from parameters and constants only
    PURE    depends on parameters and constants only
    CONST   depends on neither (sizes, masks, buffers, anything detached)

An edge from PURE to ACT or FREE is a place where a parameter enters the computation: a use to be explained by a layer.

Labels are read off the sizes of nodes, too, which are numbers, or symbols where only the batch knows them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from ..errors import is_constant_derivative, source_line
from ..ir import Program
from ..torch_private import AUTOCAST_REGION, pytree, size_hint
from .operations import (
    AS,
    DATA_FIRST,
    EXPANDS,
    LOOKED_UP,
    NO_GRADIENT,
    OWN_BACKWARD,
    SHAPE_ONLY,
    SIZED_BY_CASES,
    STOPS_GRADIENT,
    no_grad_region,
    op_name,
)

Edge = tuple[fx.Node, fx.Node]  # (PURE node, activation that reads it)
T = TypeVar("T")


class Label(IntEnum):
    """An operation gets the smallest label of its operands."""

    ACT = 0
    FREE = 1
    PURE = 2
    CONST = 3

    @property
    def activation(self) -> bool:
        return self in (Label.ACT, Label.FREE)


def labels(
    graph: fx.Graph, parameters: Iterable[str], pure: Iterable[fx.Node] = (), cases: str | None = None
) -> dict[fx.Node, Label]:
    """Label every node.

    Args:
        pure: placeholders that stand for parameters, as in the form of a layer.
        cases: the symbolic size of the cases; what has one row a case, such as the zeros that a recurrent net starts
            from or a class token in front of every sequence, is an activation as any other. Where no sizes are known,
            an expansion to a size of an activation is taken for such.
    """
    names, forced = set(parameters), set(pure)
    first = {size for node in graph.find_nodes(op="placeholder") for size in sizes_of(node)[:1]}
    label: dict[fx.Node, Label] = {}
    for node in graph.nodes:
        if node in forced:
            label[node] = Label.PURE
        elif node.op == "placeholder":
            label[node] = Label.ACT
        elif node.op == "get_attr":
            label[node] = Label.PURE if node.target in names else Label.CONST
        elif (name := op_name(node)) in NO_GRADIENT or no_grad_region(node):
            acts = name not in SHAPE_ONLY and any(label[n] is Label.ACT for n in node.all_input_nodes)
            label[node] = Label.ACT if acts else Label.CONST
        else:
            label[node] = min((label[n] for n in node.all_input_nodes), default=Label.CONST)
            if label[node] is Label.PURE and is_layer_of_data(node, label):
                label[node] = Label.FREE
        if label[node] is not Label.ACT and node.op != "get_attr" and has_row_a_case(node, label[node], cases, first):
            label[node] = Label.ACT
    return label


def labels_of(program: Program) -> Mapping[fx.Node, Label]:
    """The labels of a Program's graph, computed once for all Programs that have its graph, parameters and cases.

    Passes do not write into a graph that they were given, so the labels stay right. A pass that writes into a copy of
    its own calls `labels`.
    """
    return once(labels_of, program, lambda: labels(program.graph, program.parameters, cases=program.cases))


def once(function: Callable[..., Any], program: Program, compute: Callable[[], T]) -> T:
    """The result of `function` for a program, which is computed once."""
    if function not in program.labeled:
        program.labeled[function] = compute()
    found: T = program.labeled[function]
    return found


def is_layer_of_data(node: fx.Node, label: Mapping[fx.Node, Label]) -> bool:
    """Whether a PURE node applies a layer with parameters to something else: coordinates, a learned table."""
    if op_name(node) == "learned" or LOOKED_UP in node.meta:
        return True
    if op_name(node) == "einsum":
        return maps_constant(node, label)
    data = node.args[0] if op_name(node) in DATA_FIRST and node.args else None
    others = [operand for operand in node.all_input_nodes if operand is not data]
    return isinstance(data, fx.Node) and any(label[operand] is Label.PURE for operand in others)


def maps_constant(node: fx.Node, label: Mapping[fx.Node, Label]) -> bool:
    """Whether an einsum is a layer that is applied to a constant: it sums over inputs, and keeps positions."""
    equation, *operands = node.args
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return False
    terms, _, result = equation.replace(" ", "").partition("->")
    sides = dict(zip((label[operand] for operand in node.all_input_nodes), terms.split(","), strict=False))
    data, weight = (set(sides.get(kind, "")) for kind in (Label.CONST, Label.PURE))
    return bool(data & weight - set(result)) and bool(data & set(result) - weight)


def has_row_a_case(node: fx.Node, label: Label, cases: str | None, first: Container[str]) -> bool:
    """If the node depends on parameters, only an expansion counts: a slice may be as long as there are cases.

    first: the first sizes of the inputs. torch.export does not tie all of them to the cases.
    """
    cases_known = cases is not None or SIZED_BY_CASES in node.meta
    of_cases = node.meta.get(SIZED_BY_CASES, False) or (
        cases is not None and any(size and re.search(rf"\b{cases}\b", size) for size in symbolic_sizes(node))
    )
    if label is Label.CONST or op_name(node) not in EXPANDS:
        return of_cases and label is Label.CONST
    if cases is not None and cases.isdigit() and repeats_for(node, cases):
        return True
    if cases_known:
        return of_cases or (cases is not None and next(iter(symbolic_sizes(node)), None) in first)
    if "val" in node.meta:  # an expansion to the cases has a number for them where there is a single one
        sizes = node.args[1] if len(node.args) > 1 else ()
        return "1" in first and isinstance(sizes, (list, tuple)) and sizes[:1] in ([1], (1,))
    return any(is_size(operand) for operand in node.all_input_nodes[1:])


def repeats_for(node: fx.Node, cases: str) -> bool:
    """Whether an expansion repeats its operand for every case. cases: a number, as a forward with `len(x)` makes it,
    which other dimensions may have, too."""
    before, after = (sizes_of(n) for n in (node.all_input_nodes[0], node))
    return after[:1] == [cases] and (len(before) < len(after) or before[:1] == ["1"])


def is_size(node: fx.Node) -> bool:
    """In a graph without sizes: a size of a tensor."""
    while op_name(node) == "getitem":
        node = node.all_input_nodes[0]
    return op_name(node) in ("size", "shape", "sym_size")


def symbolic_sizes(node: fx.Node) -> list[str | None]:
    """One entry a dimension of the node's tensor, None where the size is a number."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else ()
    return [str(size) if isinstance(size, torch.SymInt) else None for size in sizes]


def has_gradient(node: fx.Node) -> bool:
    """Whether the node's value can have one: not integers and truth values."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return not isinstance(value, (int, torch.SymInt, torch.SymBool))


def differentiated(node: fx.Node) -> list[fx.Node]:
    """The operands that a gradient can flow to from `node`."""
    name = op_name(node)
    if name in NO_GRADIENT or no_grad_region(node) or not has_gradient(node):
        return []
    if name == OWN_BACKWARD:
        return [operand for operand in dict.fromkeys(node.args) if isinstance(operand, fx.Node)]
    return operands_read(node)


def operands_read(node: fx.Node) -> list[fx.Node]:
    """The operands whose values `node` reads, and not their sizes or types alone."""
    name = op_name(node)
    return [] if name in SHAPE_ONLY else node.all_input_nodes[: 1 if name in AS else None]


def ancestors(
    roots: Iterable[fx.Node],
    last: Container[fx.Node] = (),
    operands: Callable[[fx.Node], Iterable[fx.Node]] = differentiated,
) -> set[fx.Node]:
    """`roots` and every node that a gradient of them reaches, no further than `last`: the graph behind the losses."""
    seen, stack = set[fx.Node](), list(roots)
    while stack:
        if (node := stack.pop()) not in seen:
            seen.add(node)
            stack += () if node in last else operands(node)
    return seen


def everything_behind(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """`roots` and all that they are computed from, sizes and what stops gradients among it."""
    return ancestors(roots, operands=lambda node: node.all_input_nodes)


def use_edges(graph: fx.Graph, label: Mapping[fx.Node, Label], outputs: Iterable[fx.Node]) -> list[Edge]:
    """Every edge from PURE to an activation behind the outputs, in graph order; an output that is PURE itself is an
    edge to itself."""
    outputs = list(outputs)
    behind = ancestors(outputs)
    return [(node, node) for node in outputs if label[node] is Label.PURE] + [
        (operand, node)
        for node in graph.nodes
        if label[node].activation and node in behind
        for operand in differentiated(node)
        if label[operand] is Label.PURE
    ]


def parameters_behind(
    node: fx.Node, label: Mapping[fx.Node, Label], pieces: Mapping[fx.Node, Iterable[str]] = MappingProxyType({})
) -> set[str]:
    """Canonical names of all parameters a PURE node is computed from; of nodes that are made of pieces, the pieces."""
    reached = ancestors([node], pieces)
    names = {str(n.target) for n in reached if n.op == "get_attr" and label[n] is Label.PURE and n not in pieces}
    return names.union(*(pieces[n] for n in reached if n in pieces))


def entries(program: Program) -> dict[Edge, set[str]]:
    """Every place where parameters enter the graph behind the losses, in graph order, and the parameters behind it.

    No loss depends on a parameter without elements, as those of a layer with 0 features have.
    """
    label = labels_of(program)
    edges = use_edges(program.graph, label, program.outputs)
    behind = {pure: parameters_behind(pure, label, program.behind) for pure, _ in edges}
    return {(pure, act): {name for name in behind[pure] if 0 not in program.shapes[name]} for pure, act in edges}


def without_loss(program: Program) -> tuple[str, ...]:
    """The unused parameters, and unused pieces, that what forward returns depends on: their losses are not known."""
    if not program.unused or program.submodules or not program.losses:
        return ()
    # Not `labels_of`: the mask of ignored targets comes into the graph after the passes.
    label = labels(program.graph, program.parameters, cases=program.cases)
    returned = [node for node in pytree.tree_leaves(program.returned) if isinstance(node, fx.Node)]
    edges = use_edges(program.graph, label, returned)
    reached = set[str]().union(*(parameters_behind(pure, label, program.behind) for pure, _ in edges))
    return tuple(name for name in program.unused if not reached.isdisjoint({name, program.owner(name)}))


# --- where gradients stop ---------------------------------------------------------------------------------------------

SUMS_AND_PRODUCTS = {"add", "sub", "mul", "div"}  # with coefficients, such as a learned viscosity
JUMPS = STOPS_GRADIENT | {"trunc", "frac", "heaviside", "remainder", "fmod", "floor_divide", "cond", OWN_BACKWARD}


def gradient_stop(program: Program) -> fx.Node | None:
    """The first node behind the losses that follows the parameters in steps, or in a way that no gradient tells: a
    rounded or detached value, a comparison, the index of a chosen expert, a user's autograd.Function. None if there is
    none. A value that is returned to be logged is behind no loss."""

    def first() -> fx.Node | None:
        behind = everything_behind([*program.outputs, *program.returned_losses])
        return next((node for node in computed_from_parameters(program) if node in behind and jumps(node)), None)

    return once(gradient_stop, program, first)


def constant_derivatives(program: Program) -> list[str]:
    """The user's lines of derivatives of parameters that enter the losses as constants, because they are taken without
    create_graph=True. Not those that forward detaches on purpose, nor those of a sampler, which enter layers again."""
    label = labels_of(program)

    def onward(node: fx.Node) -> list[fx.Node]:
        layer = op_name(node) not in SUMS_AND_PRODUCTS and any(label[n] is Label.PURE for n in node.all_input_nodes)
        return [] if layer else differentiated(node)

    reached = ancestors(program.outputs, operands=onward)
    constant = [node for node in computed_from_parameters(program) if node in reached and is_constant_derivative(node)]
    lines = [source_line(node) for node in constant if op_name(node.all_input_nodes[0]) != "detach"]
    return [line for line in dict.fromkeys(lines) if line is not None]


def jumps(node: fx.Node) -> bool:
    value = node.meta.get("val")
    whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return whole or op_name(node) in JUMPS or no_grad_region(node)


def computed_from_parameters(program: Program) -> Iterator[fx.Node]:
    """The nodes that depend on values of parameters, in the order of the graph."""
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "get_attr" and node.target in program.parameters:
            seen.add(node)
        elif not seen.isdisjoint(operands_read(node)):
            seen.add(node)
            yield node


ROUNDING_METHODS = {"half": torch.float16, "bfloat16": torch.bfloat16}


def named_dtypes(program: Program) -> set[torch.dtype]:
    """The dtypes of floating-point numbers that the graph itself converts to what follows the parameters: by a cast, or
    in a region of autocast."""
    root = program.root
    naming = once(
        named_dtypes,
        program,
        lambda: [node for node in computed_from_parameters(program) if dtypes_of_operation(node, root)],
    )
    # Not their dtypes: that of a region of autocast may be a setting of torch.
    return {dtype for node in naming for dtype in dtypes_of_operation(node, root) if dtype.is_floating_point}


def dtypes_of_operation(node: fx.Node, root: nn.Module) -> set[torch.dtype]:
    """The dtypes that a node names; of a region, those that its nodes name, and that of its autocast if it is on."""
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    if op_name(node) == AUTOCAST_REGION:
        kind, dtype, enabled = node.args[:3]
        dtype = dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(str(kind))
        named = {dtype} if enabled else set()
    else:
        named = {argument for argument in arguments if isinstance(argument, torch.dtype)}
        named |= {ROUNDING_METHODS[name] for name in (op_name(node),) if name in ROUNDING_METHODS}
    for operand in node.all_input_nodes:
        region = getattr(root, str(operand.target), None) if operand.op == "get_attr" else None
        if isinstance(region, fx.GraphModule):
            named = named.union(*(dtypes_of_operation(inner, region) for inner in region.graph.nodes))
    return named


# --- sizes: numbers, or symbols where only the batch knows them -------------------------------------------------------


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """The sizes of the node's tensor; empty if it has no tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def sizes_of(node: fx.Node) -> list[str]:
    return [str(size) for size in shape_of(node)]


def known_number(size: int | torch.SymInt) -> int | None:
    """The size as a number; None for a symbol that the capture did not find to be a number."""
    return int(str(size)) if str(size).isdigit() else None


def in_example(size: int | torch.SymInt) -> int:
    """The number that a size was on the inputs of the capture."""
    # Not `int(size)`, which makes the symbol this number everywhere, so that equal numbers look like the same size.
    return size if isinstance(size, int) else size_hint(size)
