"""A Program of several submodules that were captured one by one.

Their graphs lie side by side in one graph and share the nodes of parameters and buffers. So every pass sees every use,
and uses of one parameter in several submodules are one registration. The Python code between the submodules is not in
the graph; a parameter that it reads is generic. The number of calls of a submodule is known at run time only, and a use
counts as often as its submodule is called.

    encoder:  x -> linear(x, w)     decoder:  h -> linear(h, v)
    graph:    (encoder_x, decoder_h) -> ((linear(encoder_x, w),), (linear(decoder_h, v),))
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import fx, nn

from .approximations import ORDER_UNKNOWN
from .complex_parameters import original
from .graphs.edit import attribute, holder
from .graphs.labels import Label, has_gradient, is_size, labels, labels_of, parameters_behind, symbolic_sizes, use_edges
from .graphs.operations import EXPANDS, LOOKED_UP, LOOKUPS, SIZED_BY_CASES, op_name
from .graphs.spelling import sort_operands
from .ir import NUMBER, Program, Registration, Submodule, Use, copy_nodes
from .parametrization import with_nodes
from .torch_private import AUTOCAST_REGION, pytree


def in_model(
    program: Program,
    path: str,
    parameters: Mapping[str, nn.Parameter],
    aliases: Mapping[str, str],
    names: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """A submodule's program with the model's names, parameters and aliases.

    names: of attributes that have another name in the model than `path` and their own.
    """
    graph = fx.Graph()
    held: dict[str, Any] = {}
    for node, copy in copy_nodes(program.graph.nodes, graph).items():
        if node.op in ("get_attr", "call_module"):
            name = names.get(str(node.target), f"{path}.{node.target}")
            copy.target = aliases.get(name, name)
            held[str(copy.target)] = attribute(program.root, str(node.target))
    return program.but(graph=graph, root=holder(held), parameters=parameters, aliases=aliases)


def in_autocast(program: Program) -> list[str]:
    """Trainable parameters that enter a region of autocast in forward, which is closed to passes."""
    regions = (node for node in program.graph.nodes if op_name(node) == AUTOCAST_REGION)
    read = (str(node.target) for region in regions for node in region.all_input_nodes if node.op == "get_attr")
    return list(dict.fromkeys(name for name in read if name in program.aliases))


def join(empty: Program, captured: Sequence[tuple[Submodule, Program]]) -> Program:
    """One program of several normalized ones with the model's names. empty: the program of no submodule."""
    graph = fx.Graph()
    read: dict[str, fx.Node] = {}
    held: dict[str, Any] = {}
    inputs = [
        {node: placeholder(graph, node, number, part) for node in program.inputs}
        for number, (part, program) in enumerate(captured)
    ]
    outputs = []
    for number, ((_, program), copies) in enumerate(zip(captured, inputs, strict=True)):

        def shared(node: fx.Node, number: int = number, root: nn.Module = program.root) -> fx.Node | None:
            if node.op != "get_attr":
                return None
            name = str(node.target)
            value = attribute(root, name)
            first = held.setdefault(name, value)
            if original(first) is not original(value):  # a constant of another capture of this module
                name = f"{name}_{number}"
                held[name] = value
            if name not in read:
                read[name] = graph.get_attr(name)
                read[name].meta = dict(node.meta)
            return read[name]

        first = {size for node in program.inputs for size in symbolic_sizes(node)[:1] if size is not None}
        inside = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
        copy_nodes(inside, graph, shared, copies)
        for node in inside:
            if node.op != "get_attr":
                copies[node].meta |= {NUMBER: number} | sized_by_cases(node, first)
        outputs.append(fx.map_arg(program.returned, copies.__getitem__))
    graph.output(tuple(outputs))
    sort_operands(graph, empty.parameters)
    submodules = tuple(part for part, _ in captured)
    return empty.but(graph=graph, root=holder(held), submodules=submodules, history=())


def sized_by_cases(node: fx.Node, first: Container[str | None]) -> dict[str, bool]:
    """Meta of an expansion to a size of an input, and of ones or zeros of the first size of an input. The size is taken
    for the number of cases, which no submodule knows. first: the sizes of the inputs' first dimensions that vary."""
    sizes = node.args[1] if op_name(node) in EXPANDS and len(node.args) > 1 else ()
    size = sizes[0] if isinstance(sizes, (list, tuple)) and sizes else None
    of_input = next(iter(symbolic_sizes(node)), None) in first
    return {SIZED_BY_CASES: True} if of_input or (isinstance(size, fx.Node) and is_size(size)) else {}


def placeholder(graph: fx.Graph, node: fx.Node, number: int, submodule: Submodule) -> fx.Node:
    name = re.sub(r"\W+", "_", f"in_{submodule.path}_{number}_{node.name}")
    copy = graph.create_node("placeholder", name, name=name)
    copy.meta = {**node.meta, NUMBER: number}
    return copy


def graph_of(program: Program, number: int) -> Program:
    """One submodule's part of the program: its graph and outputs, and all registrations with its uses only."""
    graph, copies, owner = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, Any]()
    for node in program.graph.nodes:
        if node.op == "output":
            outputs = node.args[0][number]
            graph.output(fx.map_arg(outputs, lambda n: copy_of(graph, n, copies)))
            break
        if node.op == "get_attr":
            continue
        operands = (owner.get(operand) for operand in node.all_input_nodes)
        owner[node] = node.meta.get(NUMBER, next((n for n in operands if n is not None), None))
        assert owner[node] is not None, f"bug in kfac_fx: {node.name} belongs to no captured submodule"
        if owner[node] == number:
            copies[node] = graph.node_copy(node, lambda n: copy_of(graph, n, copies))
    read = ReadByUses(graph, copies)
    with graph.inserting_before(next(iter(graph.nodes))):
        registrations = tuple(
            replace(registration, uses=tuple(part_of(use, read) for use in registration.uses if use.output in copies))
            for registration in program.registrations
        )
    return program.but(graph=graph, registrations=registrations, outputs=(), parameter_exprs={}, behind={})


def copy_of(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """The copy of `node`. Nodes of parameters and buffers are copied at their first reader."""
    if node not in copies:
        assert node.op == "get_attr", f"bug in kfac_fx: {node.name} is read by another captured submodule"
        copies[node] = graph.get_attr(str(node.target))
        copies[node].meta = dict(node.meta)
    return copies[node]


class ReadByUses(dict[fx.Node, fx.Node]):
    """The copies of nodes. A constant that no node reads, as the map of a table, is copied for the use that does."""

    def __init__(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        super().__init__(copies)
        self.graph = graph

    def __missing__(self, node: fx.Node) -> fx.Node:
        return copy_of(self.graph, node, self)


def part_of(use: Use, copies: Mapping[fx.Node, fx.Node]) -> Use:
    """The same use in the graph of its own submodule."""
    return with_nodes(replace(use, nodes=use.nodes & copies.keys()), copies)


def of_parameters_alone(program: Program) -> bool:
    """Whether all that a submodule returns is computed from parameters.

    Such a submodule stays Python, which is followed to the uses of its results.
    """
    label = labels_of(program)
    return bool(leaves := returned_nodes(program)) and all(label[leaf] is Label.PURE for leaf in leaves)


def returned_nodes(program: Program) -> list[fx.Node]:
    """The nodes that a program returns and that may have a gradient."""
    return [leaf for leaf in pytree.tree_leaves(program.returned) if isinstance(leaf, fx.Node) and has_gradient(leaf)]


# --- passes ---------------------------------------------------------------------------------------------------------


def find_outputs(program: Program) -> Program:
    """Take all that the submodules return for the Fisher's outputs, because Python computes the losses."""
    return program.but(outputs=tuple(dict.fromkeys(returned_nodes(program))))


def give_lookups(program: Program) -> Program:
    """Make one embedding of a lookup that does not depend on the batch and that a submodule returns.

    Other submodules use the result, too, as all blocks of T5 use the biases of the first one. The gradient of the
    embedding is the sum of theirs. A table that is read in other ways, too, stays as it is.
    """
    label, names = labels(program.graph, program.parameters), program.parameters
    if not any(True for node in program.outputs for _ in lookups_behind(node, label)):
        return program
    program = program.copied()
    label = labels(program.graph, program.parameters)
    lookups = {lookup: table for node in program.outputs for lookup, table in lookups_behind(node, label)}
    for node in lookups:
        node.meta[LOOKED_UP] = True
    label = labels(program.graph, program.parameters)
    edges = use_edges(program.graph, label, program.outputs)
    others = set().union(*(parameters_behind(pure, label) for pure, user in edges if user not in lookups))
    for node, table in lookups.items():
        if table in others or table not in names:
            del node.meta[LOOKED_UP]
    return program


def lookups_behind(node: fx.Node, label: Mapping[fx.Node, Label]) -> Iterator[tuple[fx.Node, str]]:
    """The lookups from which alone a node is computed, and their tables."""
    while label[node] is Label.PURE and node.op != "get_attr":
        operands = [operand for operand in node.all_input_nodes if label[operand] is Label.PURE]
        if len(operands) != 1:
            return
        (operand,) = operands
        if op_name(node) in LOOKUPS and operand.op == "get_attr":
            yield node, str(operand.target)
        node = operand


def leave_python(program: Program) -> Program:
    """Make parameters generic that the Python code between the submodules reads, and count every use as often as its
    submodule was called."""
    registrations: list[Registration] = []
    for registration in program.registrations:
        reasons = [f"{name} is {program.python[name]}" for name in registration.owners if name in program.python]
        if registration.generic and not reasons:
            registrations.append(registration)
        elif reasons:
            registrations += [program.generic(name, "; ".join(reasons)) for name in registration.parameters]
        else:
            registrations.append(with_calls(program, registration))
    registered = {name for registration in registrations for name in registration.parameters}
    registrations += [
        program.generic(part, f"{name} is {reason}")
        for name, reason in program.python.items()
        for part in program.parts(name)
        if part not in registered
    ]
    unused = tuple(name for name in program.unused if program.owner(name) not in program.python)
    return program.but(registrations=tuple(registrations), unused=unused)


def with_calls(program: Program, registration: Registration) -> Registration:
    """Its uses with the calls of their submodules on the examples, and an approximation that allows for several."""
    uses = tuple(replace(use, calls=program.submodules[use.output.meta[NUMBER]].calls) for use in registration.uses)
    repeated = len(uses) > 1 or any(use.calls and use.calls > 1 for use in uses)
    if registration.structure.series:
        why = f"{ORDER_UNKNOWN}, so not {registration.approximation!r}"
        reason = f"{registration.reason}; {why}" if registration.reason else why
        return replace(registration, uses=uses, called=True, approximation="kron_indep", reason=reason)
    indep = registration.approximation == "kron" and repeated
    return replace(
        registration, uses=uses, called=True, approximation="kron_indep" if indep else registration.approximation
    )
