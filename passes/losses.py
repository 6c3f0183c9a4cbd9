"""Where the Fisher's outputs are: a loss that forward computes itself, or what the model returns.

logits = self.head(h);  return F.cross_entropy(logits, y)      ->  categorical, inputs = logits, targets = y
return (self.net(x) - y).square().mean()                       ->  normal, inputs = self.net(x) - y, targets = 0
return -logits.log_softmax(1).gather(1, y[:, None]).mean()     ->  categorical, inputs = logits.log_softmax(1)

A squared error or a cross-entropy that is written by hand is found where the returned loss is a weighted sum of these
and of nothing else, and next to losses of torch.

**Returned losses**: from a loss that forward computes to the loss that forward returns: the operations between, and
what else is in it.

    ce = F.cross_entropy(z, y, reduction="none")
    loss = (ce * mask).sum() / mask.sum() + 0.1 * h.square().mean()

The *way* of `ce` is mul, sum, div, add. It is linear in `ce`, and the mask is computed from inputs, so the weight of
every case in the returned loss, ∂loss / ∂ce, is known without a forward. A factor that is not known counts as one, such
as weights that are computed from another run of the network: so a mean over elements is one in the Fisher, too. A term
such as that of h is on no way. Its gradient enters at the last node with a row for every case, here the square: the
*cut* has these nodes.

A graph without sizes does not tell which nodes have a row for every case. Its other terms are *unsized*, and the model
is captured with a batch.

A returned loss is a *likelihood* if it is a weighted sum of losses of torch and nothing else. Then its Fisher is that
of the distributions, weighted. Every other loss has a gradient, and no Fisher with a name.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.func import grad

from .cases import size_of_cases
from .errors import where
from .graphs.edit import attribute
from .graphs.labels import (
    Label,
    ancestors,
    differentiated,
    has_gradient,
    in_example,
    labels,
    labels_of,
    operands_read,
    parameters_behind,
    shape_of,
    sizes_of,
    symbolic_sizes,
)
from .graphs.operations import (
    CASTS,
    JOINS,
    PARTS,
    PERMUTES,
    VIEWS,
    adds_up,
    changes_memory,
    computed,
    dims_of,
    is_random,
    no_grad_region,
    op_name,
)
from .graphs.spelling import sort_operands, spell_out
from .ir import LossSite, Note, Program, Way
from .torch_losses import BY_NAME
from .torch_private import pytree

ADDS = {"add", "sub", "rsub"}
LINEAR = VIEWS | PARTS | CASTS | {
    "sum", "mean", "neg", "index", "index_select", "gather", "take", "take_along_dim", "masked_select", "masked_fill",
    "expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "view_as", "reshape_as", "type_as", "ravel",
    "flip", "roll", "tril", "triu", "cumsum", "unsafe_view", "nan_to_num",
}  # fmt: skip
PRODUCTS = {"mul", "matmul", "dot", "inner", "vdot", "vecdot", "einsum", "tensordot"}
SMOOTH = {
    "exp",
    "expm1",
    "log",
    "log1p",
    "pow",
    "square",
    "sqrt",
    "sigmoid",
    "tanh",
    "softplus",
    "mul",
    "div",
    "detach",
}
SCATTERS = {"scatter_add", "index_add"}
LEAVES_OUT = {"index", "index_select", "masked_select"}
KEEPS_VALUE = "kfac_fx_keeps_value"  # in the meta of a node without a gradient that takes a value away again
OF_MEMORY = {"device", "pin_memory", "layout"}  # arguments of `arange` that change no number
KEEP_ORDER = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "ravel", "select"}
ValueOf = Callable[[fx.Node], Any]


def returned_losses(returned: Iterable[fx.Node], sites: Collection[fx.Node], named: fx.Node | None) -> list[fx.Node]:
    """The returned values that the losses are behind: the one that is named "loss"; or all that are neither a part nor
    a function of an earlier one, as the perplexity behind a loss and the terms behind their sum are. One of several
    earlier ones is their total, which takes their place.

    sites: the nodes of the losses. named: the value that forward returns under the name "loss".
    """
    behind = {node: ancestors([node]) for node in dict.fromkeys(returned)}
    losses = [node for node, nodes in behind.items() if not nodes.isdisjoint(sites)]
    if named in losses:
        return [node for node in losses if node is named]
    kept: list[fx.Node] = []
    for node in losses:
        parts = [other for other in kept if other in behind[node]]
        if len(parts) > 1:
            kept = [other for other in kept if other not in parts]
        if len(parts) != 1 and not any(node in behind[other] for other in kept):
            kept.append(node)
    return kept


# --- the way of a loss ------------------------------------------------------------------------------------------------


def way_of(
    site: fx.Node,
    ends: Sequence[fx.Node],
    behind: Container[fx.Node],
    unknown: Container[fx.Node],
    learned: Collection[fx.Node] = (),
) -> Way | None:
    """The way from a loss to the returned ones; None if an operation on it cannot be repeated from the inputs of the
    model and of its losses, and from this loss alone.

    ends: the returned losses; behind: all nodes that a gradient of them reaches. unknown: that depend on anything else.
    learned: known nodes that depend on parameters, so that they count no cases.
    """
    inside = {site: None}
    for node in site.graph.nodes:
        of_site = any(operand in inside for operand in node.all_input_nodes)
        if node in behind and node is not site and of_site and KEEPS_VALUE not in node.meta:
            inside[node] = None
    linear, elementwise, dropped, read = True, True, dict[fx.Node, None](), False
    for node in [node for node in inside if node is not site]:
        name, others = op_name(node), [operand for operand in node.all_input_nodes if operand not in inside]
        lost = [operand for operand in others if operand in unknown]
        if node.op not in ("call_function", "call_method") or changes_memory(node) or is_random(node):
            return None
        adds = name in ADDS or ((name in JOINS or name == "where") and all(map(has_fixed_shape, lost)))
        if lost and not adds:
            return None
        dropped |= dict.fromkeys(lost)
        read |= len(others) > len(lost)
        its_linear = is_linear(node, inside) if not adds else name != "where" or node.args[0] not in inside
        linear, elementwise = linear and its_linear, elementwise and (its_linear or name in SMOOTH)
    found = [divisor_of(node, inside) for node in list(inside)[1:]]
    divisors = counts_among(divisor for divisor in found if divisor is not None and divisor[0] not in learned)
    reached = tuple(end for end in ends if end in inside)
    way = Way(tuple(inside), reached, tuple(dropped), linear, elementwise, divisors=divisors)
    has_rows = bool(shape_of(site)) or ("val" not in site.meta and "none" in site.args)
    if len(inside) > 1 and (not linear or read or has_rows):
        return way
    leaf = torch.ones((), dtype=torch.float64)
    return replace(way, constant=float(weights_on(way, leaf, lambda _: None)))


def unknown_factors(
    program: Program, site: fx.Node, behind: Container[fx.Node], unknown: Container[fx.Node]
) -> list[fx.Node]:
    """The unknown tensors that elements of a loss are multiplied with or divided by on its way, in front of views, if
    inputs tell their shapes. A single number that divides is none, because it may count the cases.

    behind, unknown: as of `way_of`.
    """
    sizes = {size for of in program.inputs for size in symbolic_sizes(of)}
    inside, factors = {site: None}, dict[fx.Node, None]()
    for node in site.graph.nodes:
        if node not in behind or node is site or not any(operand in inside for operand in node.all_input_nodes):
            continue
        of_loss = [operand for operand in node.all_input_nodes if operand in inside]
        lost = [operand for operand in node.all_input_nodes if operand not in inside and operand in unknown]
        inside[node] = None
        is_product = op_name(node) == "mul" or (op_name(node) == "div" and of_loss[0] is node.args[0])
        if not is_product or len(lost) != 1 or len(of_loss) != 1 or sizes_of(of_loss[0]) != sizes_of(node):
            continue
        (factor,) = lost
        while op_name(factor) in VIEWED | {"detach", "unflatten"} and factor.args[0] in unknown:
            factor = factor.args[0]
        counts = op_name(node) == "div" and math.prod(shape_of(factor)) == 1
        if "val" in factor.meta and not counts and sizes.issuperset(size for size in symbolic_sizes(factor) if size):
            factors[factor] = None
    return list(factors)


def with_ones(way: Way | None, factors: Sequence[fx.Node]) -> Way | None:
    """A way on which factors count as one; None if it is another function of its loss."""
    return replace(way, unknown=tuple(factors)) if way is not None and way.linear else None


def counts_among(divisors: Iterable[tuple[Any, int]]) -> tuple[tuple[Any, int], ...]:
    """The divisors that may be numbers of cases: those that forward is given, or else whole constants, or else inverses
    of these. Other constants are factors of the loss, such as ln 2."""
    every = list(divisors)
    given = tuple(pair for pair in every if isinstance(pair[0], fx.Node))
    constants = [pair for pair in every if pair not in given]
    whole = tuple(pair for pair in constants if pair[1] > 0 and float(pair[0]).is_integer() and pair[0] > 1)
    return given or whole or tuple(pair for pair in constants if pair[1] < 0)


def divisor_of(node: fx.Node, inside: Container[fx.Node]) -> tuple[Any, int] | None:
    """The single number that an operation divides a loss `inside` by, and 1; or the one that it multiplies with, as an
    inverse is, and -1; None if it does neither."""
    name, operands = op_name(node), [operand for operand in node.args if operand not in inside]
    if name not in ("div", "mul") or len(operands) != 1 or (name == "div" and operands[0] is node.args[0]):
        return None
    (operand,) = operands
    if isinstance(operand, fx.Node):
        value = operand.meta.get("val")
        if isinstance(value, Tensor) and math.prod(shape_of(operand)) != 1:
            return None
    if name == "div":
        return operand, 1
    return (operand, -1) if is_inverse(operand) else None


def is_inverse(operand: Any) -> bool:
    """Whether an operand is 1 / n of something, times numbers; or such a number itself, with a whole n from 3 on.
    Powers of ten are factors of a loss."""
    if isinstance(operand, float):
        inverse = 1.0 / operand if operand > 0 else 0.0
        whole = 2.5 < inverse < math.inf and abs(inverse - round(inverse)) <= 1e-6 * inverse
        return whole and str(round(inverse)).strip("0") != "1"
    if not isinstance(operand, fx.Node):
        return False
    name = op_name(operand)
    if name in ("mul", *CASTS, *VIEWS):
        return any(map(is_inverse, operand.args))
    return name in ("reciprocal", "div") or (name == "pow" and operand.args[1] in (-1, -1.0))


def mask_on(way: Way) -> fx.Node | None:
    """The node that the rows of a loss are multiplied with, or chosen by, on its way: [cases, positions]; None if there
    is none of this shape."""
    for node in way.nodes[1:]:
        if op_name(node) not in ("mul", "where", "index", "masked_select") or way.unknown:
            continue
        for operand in (o for o in node.all_input_nodes if o not in way.nodes and o not in way.dropped):
            while op_name(operand) in VIEWS and isinstance(operand.args[0], fx.Node):
                operand = operand.args[0]
            if len(shape_of(operand)) == 2 and (op_name(node) == "mul" or operand.meta["val"].dtype is torch.bool):
                return operand
    return None


def is_linear(node: fx.Node, inside: Container[fx.Node]) -> bool:
    """Whether an operation is linear in its operands that are `inside`."""
    name, operands = op_name(node), [operand for operand in node.all_input_nodes if operand in inside]
    if name in LINEAR or name == "div":
        return operands == [node.args[0]]
    if name in PRODUCTS:
        taken: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), taken.append)
        return len(operands) == 1 and taken.count(operands[0]) == 1
    return name in SCATTERS and operands == [node.args[-1]]


def has_fixed_shape(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


def unknowable(program: Program, known: Container[fx.Node] = ()) -> set[fx.Node]:
    """The nodes whose values are not known from the inputs: they depend on parameters, or on random numbers.

    known: nodes whose values a run tells.
    """
    unknown = set[fx.Node]()
    for node in program.graph.nodes:
        follows = not unknown.isdisjoint(operands_read(node))
        if node not in known and (is_parameter(program, node) or follows or may_draw(program, node)):
            unknown.add(node)
    return unknown


def may_draw(program: Program, node: fx.Node) -> bool:
    """Whether a node may draw random numbers; a region without gradients, whether an operation in it may."""
    if node.op not in ("call_function", "call_method") or not is_random(node):
        return False
    region = attribute(program.root, str(node.all_input_nodes[0].target)) if no_grad_region(node) else None
    return not isinstance(region, fx.GraphModule) or any(may_draw(program, inner) for inner in region.graph.nodes)


def told_by(program: Program, outputs: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The nodes whose values the values of `outputs` tell, and the output that does: tensors that it is a reshape of,
    and those that have the same value, because forward computes it twice, once without a gradient."""
    by_source = {node: output for output in outputs for node in reshaped_from(program, output)}
    if any(changes_memory(node) for node in program.graph.nodes):
        return by_source
    first, same = dict[Any, fx.Node](), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        names: Any = fx.map_arg((node.args, node.kwargs), lambda operand: same[operand].name)
        calls = node.op in ("call_function", "call_method") and not may_draw(program, node)
        key = (node.op, node.target, str(names)) if calls or node.op == "get_attr" else node
        same[node] = first.setdefault(key, node)
    by_first = {same[node]: output for node, output in by_source.items()}
    return {node: by_first[of] for node, of in same.items() if of in by_first}


def reshaped_from(program: Program, node: fx.Node) -> list[fx.Node]:
    """A node, and those that it is a reshape of, if their sizes are numbers or sizes of inputs."""
    sizes, nodes = {size for of in program.inputs for size in symbolic_sizes(of)}, [node]
    while op_name(node) in KEEP_ORDER and isinstance(source := node.args[0], fx.Node) and shape_of(source):
        drops = op_name(node) == "select" and str(math.prod(shape_of(source))) != str(math.prod(shape_of(node)))
        if drops:
            break
        node = source
        if sizes.issuperset(size for size in symbolic_sizes(node) if size):
            nodes.append(node)
    return nodes


def shape_on(program: Program, node: fx.Node, inputs: Sequence[Any]) -> tuple[int, ...]:
    """The shape of one of the nodes of `reshaped_from` on some inputs, the values of `program.inputs`."""
    known = {
        name: size
        for of, value in zip(program.inputs, inputs, strict=True)
        if isinstance(value, Tensor)
        for name, size in zip(symbolic_sizes(of), value.shape, strict=True)
    }
    return tuple(
        size if name is None else known[name] for name, size in zip(symbolic_sizes(node), shape_of(node), strict=True)
    )


def is_parameter(program: Program, node: fx.Node) -> bool:
    return node.op == "get_attr" and node.target in program.parameters


def with_gradient(program: Program) -> set[fx.Node]:
    """The nodes that a gradient goes through to a parameter."""
    learned = set[fx.Node]()
    for node in program.graph.nodes:
        if is_parameter(program, node) or not learned.isdisjoint(differentiated(node)):
            learned.add(node)
    return learned


def weights_on(way: Way, leaf: Tensor, value_of: ValueOf) -> Tensor:
    """The gradient of the returned losses with respect to the loss at the beginning of a way.

    leaf: a value of that loss. value_of: of the nodes that are known from the inputs.
    """

    def returned(loss: Tensor) -> Tensor:
        values: dict[fx.Node, Any] = {way.nodes[0]: loss}

        def operand(node: fx.Node) -> Any:
            if node in values:
                return values[node]
            if node not in way.dropped:
                return value_of(node)
            return loss.new_zeros(shape_of(node) if has_fixed_shape(node) else ())

        for node in way.nodes[1:]:
            args: Any = fx.map_arg(node.args, operand)
            kwargs: Any = fx.map_arg(node.kwargs, operand)
            values[node] = computed(node, args, kwargs)
        return torch.stack([values[end].sum() for end in way.ends]).sum()

    weights: Tensor = grad(returned)(leaf)  # of torch.func, because a product with a Jacobian may run around it
    return weights


def counts_left_out(way: Way) -> bool:
    """Whether a mean on a way counts the rows that a mask leaves out: forward neither selects rows, nor divides by
    values, as those of the sum of a mask are."""
    operands = [node.args[1] for node in way.nodes[1:] if op_name(node) == "div"] + [
        number for number, _ in way.divisors
    ]
    by_values = any(
        isinstance(operand, fx.Node) and isinstance(operand.meta.get("val"), Tensor) for operand in operands
    )
    return not by_values and not any(op_name(node) in LEAVES_OUT for node in way.nodes[1:])


def averages_cases(way: Way) -> bool:
    """Whether a mean on a way is over the cases of a batch: forward divides each by a number of its own, [cases], as by
    the number of positions that a mask keeps."""
    quotients = [node.args[:2] for node in way.nodes[1:] if op_name(node) == "div"]
    values = [[n.meta.get("val") for n in operands if isinstance(n, fx.Node)] for operands in quotients]
    return any(len(pair) == 2 and is_by_case(*pair) for pair in values)


def is_by_case(dividend: Any, divisor: Any) -> bool:
    """Whether a divisor has one number for each case of the dividend, [cases] or [cases, 1, ...]."""
    if not (isinstance(dividend, Tensor) and isinstance(divisor, Tensor)) or not dividend.dim() == divisor.dim() > 0:
        return False
    (cases, *others), (same, *_) = (tuple(map(str, tensor.shape)) for tensor in (divisor, dividend))
    return cases == same and all(size == "1" for size in others)  # text, because sizes may be symbols


# --- what else is in a returned loss ----------------------------------------------------------------------------------


def other_terms(
    program: Program, ends: Sequence[fx.Node], inputs: Container[fx.Node], behind: Collection[fx.Node]
) -> tuple[tuple[fx.Node, ...], tuple[str, ...], tuple[fx.Node, ...]]:
    """(activations that enter the returned losses around the inputs of the losses, parameters that enter behind the
    sums over cases, activations that enter around the inputs and whose sizes are not known).

    The first are the last nodes with a row for every case. Together with the inputs of the losses they cut the graph:
    the gradient of a returned loss passes one of them, once, on every way to a parameter that enters before.
    """
    label, sizes = labels_of(program), sizes_of_cases(program)
    learned = {node for node in behind if node.op == "get_attr" and node.target in program.parameters}
    order = {node: number for number, node in enumerate(program.graph.nodes)}
    with_gradient, of_inputs = set(learned), set[fx.Node]()
    for node in sorted(behind, key=order.__getitem__):
        operands = differentiated(node)
        if not with_gradient.isdisjoint(operands):
            with_gradient.add(node)
        if node in inputs or not of_inputs.isdisjoint(operands):
            of_inputs.add(node)
    cut, beside, unsized = dict[fx.Node, None](), dict[str, None](), dict[fx.Node, None]()
    seen, stack = set[fx.Node](), list(ends)
    while stack:
        node = stack.pop()
        if node in seen or node not in with_gradient or node in inputs:
            continue
        seen.add(node)
        operands = [operand for operand in differentiated(node) if operand in with_gradient]
        reads = any(label[operand] is Label.PURE for operand in operands)
        if node in learned:
            beside[str(node.target)] = None
        elif label[node].activation and "val" not in node.meta and node not in of_inputs:
            unsized[node] = None
        elif label[node].activation and has_cases(node, sizes) and (reads or node not in of_inputs):
            cut[node] = None
        else:
            stack += operands
    nodes, others = (tuple(sorted(of, key=order.__getitem__)) for of in (cut, unsized))
    return nodes, tuple(beside), others


def sizes_of_cases(program: Program) -> set[str] | None:
    """The symbols of the sizes that count cases. torch.export does not tie those of all inputs; untied ones are first
    sizes that are as large in the example. None if the graph knows no sizes."""
    if program.cases is None or program.cases.isdigit():
        return None
    pairs = [
        (str(size), in_example(size), dim) for node in program.inputs for dim, size in enumerate(shape_of(node))
        if isinstance(size, torch.SymInt)
    ]  # fmt: skip
    number = next((size for name, size, _ in pairs if name == program.cases), None)
    return {program.cases} | {name for name, size, dim in pairs if dim == 0 and size == number}


def has_cases(node: fx.Node, sizes: Collection[str] | None) -> bool:
    """Whether a node has a row for every case."""
    if sizes is None:
        return bool(shape_of(node))
    names = "|".join(sizes)
    return any(size and re.search(rf"\b({names})\b", size) for size in symbolic_sizes(node))


def has_other_rows(program: Program) -> bool:
    """Whether outputs have rows, and none those of the inputs, as where a row is a graph of many nodes. The number that
    forward returns for a loss has no rows."""
    known = program.cases is not None and any(map(shape_of, program.outputs))
    return known and not any(has_cases(node, sizes_of_cases(program)) for node in program.outputs)


def without_penalties(program: Program, outputs: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The outputs without numbers that are computed from parameters alone, and from those behind other outputs, such as
    the divergence of Bayesian layers from their prior. They have no cases, so no curvature of a loss of examples, and
    are no uses. A number of its own parameters, such as a scale, may be an argument of the loss."""
    outputs = tuple(outputs)
    numbers = {node for node in outputs if "val" in node.meta and not shape_of(node)}
    if not numbers or len(outputs) == len(numbers):
        return outputs
    label = labels(program.graph, program.parameters)
    trained = {node.target for node in ancestors(set(outputs) - numbers) if node.op == "get_attr"}
    penalties = {
        node for node in numbers if label[node] is Label.PURE and trained.issuperset(parameters_behind(node, label))
    }
    return tuple(node for node in outputs if node not in penalties)


VIEWED = CASTS | PERMUTES | {"reshape", "view", "flatten", "squeeze", "unsqueeze", "ravel", "masked_fill"}


def find_losses(program: Program) -> Program:
    """Set `outputs` and `cases`; and `losses`, with the way to the loss that forward returns, where the graph computes
    them and the user named none."""
    leaves = pytree.tree_leaves(program.returned)
    returned = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    named = None if program.named_loss is None else leaves[program.named_loss]
    sites, by_hand = () if program.options.loss_given else loss_sites(program, returned), ByHand()
    if not program.options.loss_given and (by_hand := losses_by_hand(program, returned, named, sites)).found:
        for node, loss in by_hand.found.items():
            name_loss(program.graph, node, loss)
        sites = loss_sites(program, returned)
    ends = returned_losses(returned, {site.node for site in sites}, named) if sites else []
    behind = ancestors(ends)
    sites = tuple(site for site in sites if site.node in behind)
    outputs = tuple(site.inputs for site in sites) or without_penalties(program, filter(has_gradient, returned))
    cases, cases_reason = size_of_cases(program, outputs)
    sort_operands(program.graph, program.parameters, cases)
    program = program.but(outputs=outputs, cases=cases, cases_reason=cases_reason)
    if not sites:
        return program.but(unfollowed=by_hand.unfollowed, lost=by_hand.lost)
    unknown = unknowable(program)
    ways = [way_of(site.node, ends, behind, unknown) for site in sites]
    if None in ways:
        # A run tells what has no gradient and depends on the inputs of the losses alone, such as causal weights.
        beyond = unknowable(program, told_by(program, outputs)) | (unknown & with_gradient(program))
        again = [way_of(site.node, ends, behind, beyond) for site in sites]
        ways = [way or (other and replace(other, of_outputs=True)) for way, other in zip(ways, again, strict=True)]
    if None in ways:  # a recording reads parameters that forward weighs its losses with, such as log-variances
        label = labels_of(program)
        learned = {node for node, of in label.items() if of is Label.PURE and not may_draw(program, node)}
        again = [way_of(site.node, ends, behind, unknown - learned, learned) for site in sites]
        ways = [way or other for way, other in zip(ways, again, strict=True)]
    for number, (site, way) in enumerate(zip(sites, ways, strict=True)):
        if way is None and (factors := unknown_factors(program, site.node, behind, unknown)):
            ways[number] = with_ones(way_of(site.node, ends, behind, unknowable(program, factors)), factors)
    sites = in_chunks(program, [replace(site, way=way) for site, way in zip(sites, ways, strict=True)])
    cut, _, unsized = other_terms(program, ends, set(outputs), behind)
    around, alone, of_unknown_size = other_terms(program, ends, {site.node for site in sites}, behind)
    notes = left_out(sites, (*around, *of_unknown_size), alone)
    return program.but(
        losses=sites,
        returned_losses=tuple(ends),
        cut=cut,
        unsized=unsized,
        likelihood=not notes and not any(map(has_soft_targets, sites)),
        dropped=(*program.dropped, *notes),
    )


class TargetKind(Enum):
    """The kinds of targets of a cross-entropy by hand."""

    NUMBERS = auto()
    PROBABILITIES = auto()
    LOGARITHMS = auto()  # of probabilities


@dataclass(frozen=True)
class OfClasses:
    """A cross-entropy that is written by hand, for every case.

    Attributes:
        inputs: logits, which logarithms of probabilities are, too.
        targets: numbers of classes, without the axis of the classes or with one number on it; or probabilities.
        axis: of the classes in the inputs, not the first.
        kind: of the targets.
        reduction: "none" or "sum".
        sign: of the cross-entropy in the node.
    """

    inputs: fx.Node
    targets: fx.Node
    axis: int
    kind: TargetKind = TargetKind.NUMBERS
    reduction: str = "none"
    sign: int = -1


SEVERAL_VALUES = (
    "forward returns {} values with a gradient, and does not say which is the loss: if one is, name it and detach the "
    'others, as in return {{"loss": loss, "part": part.detach()}}'
)
NOT_FOLLOWED = (
    "the loss that forward returns is not followed at {}: known are squares of residuals, cross-entropies, and the "
    "losses of torch in {}, and weighted sums of these. For the Fisher of a known loss let forward return the inputs "
    "of all losses, compute the loss outside of it, and write a distribution that is near for each, as in "
    "loss=lambda outputs: [kfac_fx.losses.Normal(outputs[0]), (0.1, kfac_fx.losses.Normal(outputs[1]))]"
)
NEAR_SQUARES = {"huber_loss", "smooth_l1_loss"}
LISTED_PLACES = 3


@dataclass(frozen=True)
class ByHand:
    """The losses by hand in the returned loss.

    Attributes:
        found: squares of activations, which have None, and cross-entropies.
        unfollowed: why no loss is known of one that forward seems to return.
        lost: whether it has terms that are known, or near squares, and returns numbers alone.
    """

    found: Mapping[fx.Node, OfClasses | None] = field(default_factory=dict)
    unfollowed: str = ""
    lost: bool = False


def losses_by_hand(
    program: Program, returned: Sequence[fx.Node], named: fx.Node | None, sites: Sequence[LossSite]
) -> ByHand:
    """The squares of activations and the cross-entropies by hand that the returned loss is a weighted sum of. If no
    loss of torch is in this sum, there are none where it has another term with cases, or the square of what has no
    cases, such as a mean over the batch.

    named: the value that forward returns under the name "loss"; otherwise the only one with a gradient that it returns
    is the loss, or those behind which a loss of torch is. A loss is a sum or a mean over everything, so that squares
    that the model returns as its outputs are none. Its parts may be returned behind it. A number next to outputs, as in
    (logits, loss), is a loss if a cross-entropy is in it: one of squares may be a penalty, next to which the outputs
    are trained. sites: the losses of torch.
    """
    losses, learned = {site.node for site in sites}, with_gradient(program)
    trained = [value for value in dict.fromkeys(returned) if value in learned]
    alone = [named] if named is not None else trained
    next_to_outputs, several = False, ""
    if len(alone) > 1:
        of_one = [value for value in trained if "val" in value.meta and not shape_of(value)]
        alone = returned_losses(of_one, of_one, None)
        next_to_outputs = len(of_one) < len(trained)
        alone = alone if len(alone) == 1 else []
        several = SEVERAL_VALUES.format(len(trained)) if of_one else ""
    ends = returned_losses(returned, losses, named) if sites else alone
    sized = any("val" in node.meta for node in program.inputs)
    number = next((v for v in alone if not sites and (v is named or ("val" in v.meta and not shape_of(v)))), None)
    if not any(op_name(end) in LINEAR | ADDS | PRODUCTS | {"div"} or is_square(end) for end in ends):
        # before labels, which take time
        return of_unfollowed([] if number is None or next_to_outputs else [number], several, lost=False)
    entropies = {node: loss for node in program.graph.nodes if (loss := entropy_by_hand(node, learned))}
    if (not entropies and number is None and not any(map(is_square, program.graph.nodes))) or (sites and not sized):
        return ByHand(unfollowed=several)
    by_hand, numbers = dict[fx.Node, OfClasses | None](), set[fx.Node]()
    for node in program.graph.nodes:
        if is_one_number(node, numbers):
            numbers.add(node)
    label = labels(program.graph, program.parameters)
    behind, walked, others = ancestors(ends), set[fx.Node](), list[fx.Node]()
    learned = {node for node in learned if label[node] is not Label.PURE}  # others are no part of any case
    stack = [(end, "val" in end.meta and end in numbers, 1) for end in ends]
    while stack:
        node, is_sum, sign = stack.pop()
        walked.add(node)
        operands, name = [operand for operand in differentiated(node) if operand in learned], op_name(node)
        is_sum = is_sum or is_total(node)
        if node not in learned or node in losses:
            continue
        residual = squared_by(node) if is_sum and sign > 0 else None
        of_cases = residual is not None and label[residual] is Label.ACT and has_size(residual)
        if of_cases and residual not in numbers and losses.isdisjoint(ancestors([node])):
            by_hand[node] = None
        elif node in entropies and is_sum and sign == entropies[node].sign:
            by_hand[node] = entropies[node]
        elif (name in ("add", *JOINS) and "alpha" not in node.kwargs and (sized or name == "add")) or (
            name in LINEAR | PRODUCTS | {"div"} and is_linear(node, learned)
        ):
            factors = [arg for arg in node.args if isinstance(arg, (int, float)) and name in ("mul", "div")]
            negative = name == "neg" or any(factor < 0 for factor in factors)
            stack += [(operand, is_sum, -sign if negative else sign) for operand in operands]
        elif name == "sub":
            stack += [(operand, is_sum, sign if operand is node.args[0] else -sign) for operand in operands]
        elif not sites and number is None:
            return ByHand(unfollowed=several)
        elif not sites:
            others.append(node)
    if others:
        return of_unfollowed([] if next_to_outputs else others, several, lost=bool(by_hand))
    if next_to_outputs and not sites and not any(by_hand.values()):
        return ByHand(unfollowed=several)
    # A square that another term is a function of, as the distance in a contrastive loss, is no loss alone.
    beyond = ancestors(node for node in behind if node not in walked)
    return ByHand({node: loss for node, loss in by_hand.items() if node not in beyond})


def of_unfollowed(places: Sequence[fx.Node], several: str, lost: bool) -> ByHand:
    """No losses, because the returned one is another function at some places. lost: whether it has known terms."""
    if not places:
        return ByHand(unfollowed=several)
    near = any(op_name(node) in NEAR_SQUARES for node in places)
    known = ", ".join(f"F.{name}" for name in BY_NAME)
    lines = {
        re.sub(r"_\d+(?= \(|$)", "", where(node)): node for node in reversed(places)
    }  # the first of those of a loop
    first = ", ".join(map(where, list(reversed(lines.values()))[:LISTED_PLACES]))
    more = f" and {len(lines) - LISTED_PLACES} more" if len(lines) > LISTED_PLACES else ""
    return ByHand({}, NOT_FOLLOWED.format(first + more, known), lost or near)


def entropy_by_hand(node: fx.Node, learned: Container[fx.Node]) -> OfClasses | None:
    """The cross-entropy that a node is, up to its sign, or None. learned: the nodes with a gradient.

    z.log_softmax(1).gather(1, y), z.log_softmax(1)[torch.arange(n), y]: of log-probabilities
    z.logsumexp(1) - z[torch.arange(n), y]: of logits
    (p * z.log_softmax(1)).sum(1), F.kl_div(z.log_softmax(1), p, reduction="sum"): of probabilities p
    """
    name, args = op_name(node), cast(Any, node.args)
    if name in ("gather", "index"):
        loss = of_picked(node)
        return loss if loss is not None and adds_up(loss.inputs, loss.axis, dims_of(loss.inputs)) else None
    if name == "sub" and len(args) == 2 and not node.kwargs and all(isinstance(arg, fx.Node) for arg in args):
        for sign, total, picked in ((1, *args), (-1, *reversed(args))):
            loss = of_picked(picked.args[0] if op_name(picked) == "squeeze" else picked)
            if loss is not None and op_name(total) == "logsumexp" and total.args[0] is loss.inputs:
                dims = total.args[1] if isinstance(total.args[1], (list, tuple)) else [total.args[1]]
                return replace(loss, sign=sign) if [d % dims_of(loss.inputs) for d in dims] == [loss.axis] else None
    if name == "sum" and isinstance(args[0], fx.Node) and not node.kwargs:
        return of_probabilities(args[0], args[1] if len(args) > 1 else None, learned)
    if name == "kl_div" and args[2:] == (2,):
        return of_probabilities(node, None, learned)
    return None


def of_picked(node: Any) -> OfClasses | None:
    """The number of one class for every case, which a node picks out of its inputs along one axis; or None."""
    args: Any = node.args if isinstance(node, fx.Node) else ()
    if op_name(node) == "gather" and len(args) == 3:
        source, dim, index = args
        axis, sizes = dim % max(1, dims_of(source)), sizes_of(source)
        index = before_expansion(index, axis)
        of_index = sizes_of(index)
        one_each = bool(of_index) and of_index[axis] == "1" and len(of_index) == len(sizes) > 1
        fit = one_each and all(alike(*pair) for n, pair in enumerate(zip(sizes, of_index, strict=True)) if n != axis)
        return OfClasses(source, index, axis) if fit and axis else None
    if op_name(node) == "index" and len(args) == 2 and isinstance(args[1], (list, tuple)) and len(args[1]) == 2:
        source, (rows, index) = args
        if not isinstance(rows, fx.Node) or not isinstance(index, fx.Node):
            return None  # z[:, order]
        counted = op_name(rows) == "arange" and len(rows.args) == 1 and rows.kwargs.keys() <= OF_MEMORY
        fit = counted and dims_of(source) == 2 and dims_of(index) == 1 and alike(sizes_of(source)[0], sizes_of(rows)[0])
        return OfClasses(source, index, 1) if fit else None
    return None


def before_expansion(index: fx.Node, axis: int) -> fx.Node:
    """`y.expand_as(z)[:, :1]` of one number for every case is y, which torch.distributions writes so."""
    args: Any = index.args
    if op_name(index) != "slice" or args[1:] != (axis, 0, 1) or op_name(args[0]) != "expand_as":
        return index
    source = args[0].args[0]
    sizes, before = sizes_of(index), sizes_of(source)
    return source if len(sizes) == len(before) and all(map(alike, sizes, before)) else index


def of_probabilities(terms: fx.Node, dims: Any, learned: Container[fx.Node]) -> OfClasses | None:
    """The sum of terms along the classes, or over everything if `dims` is None.

    terms: probabilities times the logarithms of others, or their divergence from these by element.
    """
    divergence, args = op_name(terms) == "kl_div", terms.args
    if not divergence and (op_name(terms) != "mul" or len(args) != 2):
        return None
    if divergence and (not terms.kwargs.keys() <= {"log_target"} or (dims is not None and args[2:] != (0,))):
        return None
    for logarithms, others in [args[:2]] if divergence else [args, reversed(args)]:
        if not isinstance(logarithms, fx.Node) or not isinstance(others, fx.Node) or others in learned:
            continue
        number, sizes = dims_of(logarithms), sizes_of(logarithms)
        if not sizes or number != dims_of(others) or not all(map(alike, sizes, sizes_of(others))):
            continue
        wanted = [dim % number for dim in ([dims] if isinstance(dims, int) else dims or range(number))]
        axis = next((axis for axis in wanted if axis and adds_up(logarithms, axis, number)), None)
        if axis is not None and (dims is None or wanted == [axis]):
            reduction, sign = "sum" if dims is None else "none", 1 if divergence else -1
            kind = TargetKind.LOGARITHMS if terms.kwargs.get("log_target") else TargetKind.PROBABILITIES
            return OfClasses(logarithms, others, axis, kind, reduction, sign)
    return None


def alike(size: str, other: str) -> bool:
    """Whether two sizes may be the same; torch tells in a run."""
    return size == other or not (size.isdigit() and other.isdigit())


def has_size(node: fx.Node) -> bool:
    """Whether a tensor has the size of an input, which a mean over the batch has not; or depends on no input with a
    free size."""

    def is_free(of: fx.Node) -> bool:
        return any(size and not size.isdigit() for size in symbolic_sizes(of))

    return is_free(node) or not any(of.op == "placeholder" and is_free(of) for of in ancestors([node]))


def is_total(node: fx.Node) -> bool:
    """Whether a node is a sum, a mean or a norm over all elements."""
    name, further = op_name(node), len(node.args) > 1 or bool(node.kwargs)
    return (name in ("sum", "mean") and not further) or (
        name in ("linalg_vector_norm", "dist") and len(node.args) < 3 and "dim" not in node.kwargs
    )


def is_one_number(node: fx.Node, numbers: Container[fx.Node]) -> bool:
    """Whether a node is a single number, whose square is that of no case: a loss over cases has rows.

    numbers: the nodes before it that are.
    """
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return not shape_of(node)
    operands = node.all_input_nodes
    return is_total(node) or (bool(operands) and all(operand in numbers for operand in operands))


def is_square(node: fx.Node) -> bool:
    """Whether a node is `r.square()`, `r ** 2` or `r * r`."""
    name, args = op_name(node), node.args
    return name == "square" or (name == "pow" and args[1:] == (2,)) or (name == "mul" and args[0] is args[1])


def squared_by(node: fx.Node) -> fx.Node | None:
    """The tensor whose squares a node has, by element or as the square of its norm; None if it has none."""
    source = node.args[0] if is_square(node) else None
    if not isinstance(source, fx.Node):
        return None
    is_norm = is_euclidean(source) and isinstance(source.args[0], fx.Node)
    return cast(fx.Node, source.args[0]) if is_norm else source


def is_euclidean(node: fx.Node) -> bool:
    """Whether a node is the root of a sum of squares, over all elements or along some dimensions."""
    name, further = op_name(node), node.args[1:]
    if "dtype" in node.kwargs:
        return False
    return (name == "linalg_vector_norm" and further[:1] in ((), (2,))) or (
        name == "linalg_norm" and not any(further) and not node.kwargs  # with an order it may be that of a matrix
    )


def name_loss(graph: fx.Graph, node: fx.Node, loss: OfClasses | None) -> None:
    """Spell a loss by hand as that of torch.

    `r.square()` -> `F.mse_loss(r, torch.zeros_like(r), reduction="none")`: the loss of a normal distribution
    `r.norm() ** 2` -> the sum of this
    `g = z.log_softmax(1).gather(1, y)` -> `c - c.detach() + g.detach()`, with
        `c = -F.cross_entropy(z.log_softmax(1), y.squeeze(1), reduction="none")[:, None]`
    """
    with graph.inserting_before(node):
        if loss is not None:
            name_entropy(graph, node, loss)
            return
        residual, source = squared_by(node), node.args[0]
        assert residual is not None and isinstance(source, fx.Node), "bug in kfac_fx: the square of a number"
        zeros = graph.call_function(torch.zeros_like, (residual,))
        zeros.meta = dict(residual.meta)
        squares = node
        if residual is not source:
            squares = graph.call_function(F.mse_loss, (residual, zeros), {"reduction": "none"})
            squares.meta = {**node.meta, **({"val": residual.meta["val"]} if "val" in residual.meta else {})}
            node.op, node.target = "call_function", torch.sum
            node.args, node.kwargs = (squares, *source.args[2:]), dict(source.kwargs)
    squares.op, squares.target = "call_function", F.mse_loss
    squares.args, squares.kwargs = (residual, zeros), {"reduction": "none"}
    spell_out(squares, "mse_loss")


def name_entropy(graph: fx.Graph, node: fx.Node, loss: OfClasses) -> None:
    """Write a cross-entropy before a node, which gets its gradient and keeps the value that it has by hand: rounding
    differs, and more than a small loss.
    """

    def call(function: Any, *args: Any, val: Tensor) -> fx.Node:
        write = graph.call_method if isinstance(function, str) else graph.call_function
        written = write(function, args)
        written.meta = {**node.meta, "val": val}
        return written

    def classes_second(of: fx.Node) -> fx.Node:
        value = of.meta["val"]
        order = (0, loss.axis, *(dim for dim in range(1, value.dim()) if dim != loss.axis))
        return of if loss.axis == 1 else call(torch.permute, of, order, val=value.permute(order))

    inputs, target, value = loss.inputs, loss.targets, loss.inputs.meta["val"].select(loss.axis, 0)
    value = value.sum() if loss.reduction == "sum" else value
    if loss.kind is TargetKind.LOGARITHMS:
        target = call(torch.exp, target, val=target.meta["val"])
    if loss.kind is not TargetKind.NUMBERS:
        typed = call("type_as", target, inputs, val=target.meta["val"].to(inputs.meta["val"].dtype))
        target = classes_second(typed)
    elif dims_of(target) == dims_of(inputs):
        target = call(torch.squeeze, target, loss.axis, val=target.meta["val"].squeeze(loss.axis))
    arguments = (classes_second(inputs), target, None, None, -100, None, loss.reduction, 0.0)
    entropy = call(F.cross_entropy, *arguments, val=value)
    if dims_of(node) > value.dim():
        entropy = call(torch.unsqueeze, entropy, loss.axis, val=value.unsqueeze(loss.axis))
    if loss.sign < 0:
        entropy = call(torch.neg, entropy, val=entropy.meta["val"])
    by_hand = graph.node_copy(node)
    same = call(torch.detach, entropy, val=entropy.meta["val"])
    same.meta[KEEPS_VALUE] = True
    nothing = call(torch.sub, entropy, same, val=entropy.meta["val"])
    constant = call(torch.detach, by_hand, val=node.meta["val"])
    node.op, node.target, node.args, node.kwargs = "call_function", torch.add, (nothing, constant), {}


def has_soft_targets(site: LossSite) -> bool:
    """Whether the targets are probabilities of classes, and not their numbers."""
    value = site.targets.meta.get("val")
    return BY_NAME[site.loss].classes_second and isinstance(value, Tensor) and value.is_floating_point()


OTHER_SCALE = (
    ", whose scale may be another one. For the right one return the inputs of the loss, and write its coefficient, as "
    "in loss=lambda outputs: (0.5, kfac_fx.losses.Normal(outputs))"
)
ONES = (
    "its factors at {} are not computed from the inputs of the model and of the loss alone, so they count as one in "
    "the Fisher, whose scale may be off, as by their mean. To have them in it, compute them before the call, and give "
    "them to forward"
)


def left_out(sites: Sequence[LossSite], around: Sequence[fx.Node], beside: Sequence[str]) -> tuple[Note, ...]:
    """One note for everything in the returned loss that is no weighted log-likelihood.

    around: activations of other terms. beside: parameters of other terms.
    """
    notes = []
    for site in sites:
        loss, values = BY_NAME[op_name(site.node)], loss_arguments(site.node)
        name = f"{loss.name} at {where(site.node)}"
        if outside := loss.changed(loss.outside, values):
            are = f"its {' and '.join(outside)} {'is' if len(outside) == 1 else 'are'}"
            reason = f"{are} no part of the Fisher, which is that of its distribution"
            notes.append(Note(name, reason))
        if site.way is None or not site.way.linear:
            step = "" if site.way is None else " with other weights than those of its cases"
            reason = f"forward returns a function of it{step}; the Fisher is that of its distribution{OTHER_SCALE}"
            notes.append(Note(name, reason))
        elif site.way.unknown:
            notes.append(Note(name, ONES.format(", ".join(map(where, site.way.unknown)))))
    for node in around:
        reason = "it is in the loss that forward returns, and no part of the Fisher, which is that of the distributions"
        notes.append(Note(f"the term of {where(node)}", reason))
    if beside:
        reason = "the loss that forward returns has a term of these parameters alone, which is no part of any case"
        notes.append(Note(", ".join(beside), reason))
    return tuple(notes)


def loss_sites(program: Program, returned: list[fx.Node]) -> tuple[LossSite, ...]:
    """The losses behind what the model returns whose inputs depend on parameters and on the batch."""
    label = labels(program.graph, program.parameters)
    behind = ancestors(returned)
    return tuple(
        loss_site(node)
        for node in program.graph.nodes
        if node in behind
        and op_name(node) in BY_NAME
        and not BY_NAME[op_name(node)].changed(BY_NAME[op_name(node)].by_default, loss_arguments(node))
        and label[node] is Label.ACT
        and of_parameters(node.args[0], label)
    )


def in_chunks(program: Program, sites: Sequence[LossSite]) -> tuple[LossSite, ...]:
    """The losses, with the number of the first of those that are one loss, computed over some of its rows each: their
    targets are pieces of one tensor, and their inputs depend on the same parameters."""
    label = labels(program.graph, program.parameters)
    pieces = [piece_of(site.targets) for site in sites]
    learned = [
        {str(node.target) for node in ancestors([site.inputs]) if node.op == "get_attr" and label[node] is Label.PURE}
        for site in sites
    ]
    found: list[LossSite] = []
    for number, (site, piece) in enumerate(zip(sites, pieces, strict=True)):
        first = number
        for other in range(number):
            alike = piece is not None and pieces[other] is not None and site.loss == sites[other].loss
            if alike and piece[0] is pieces[other][0] and learned[number] == learned[other]:  # type: ignore[index]
                same_place = any(
                    pieces[n] == piece for n in range(number) if found[n].chunk_of == found[other].chunk_of
                )
                first = number if same_place else found[other].chunk_of
                break
        found.append(replace(site, chunk_of=first))
    return tuple(found)


def piece_of(node: Any) -> tuple[fx.Node, tuple[Any, ...]] | None:
    """(the tensor that a node is a piece of, which piece); None if it is none."""
    node = without_views(node)
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source, name = without_views(node.args[0]), op_name(node)
    if name == "getitem" and op_name(source) in ("chunk", "split", "split_with_sizes", "unbind"):
        return without_views(source.args[0]), (name, source, node.args[1])
    return (source, (name, *node.args[1:])) if name in ("slice", "select", "narrow") else None


def without_views(node: Any) -> Any:
    """The node whose elements in another shape are this one's."""
    while isinstance(node, fx.Node) and node.args and (op_name(node) in VIEWED or is_whole(node)):
        node = node.args[0]
    return node


def is_whole(node: fx.Node) -> bool:
    """Whether a node is a slice of everything, as the first of `y[:, t]` is."""
    if op_name(node) != "slice":
        return False
    start, end, step = (node.args[place] if place < len(node.args) else None for place in (2, 3, 4))
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= sys.maxsize)) and step in (None, 1)


def of_parameters(inputs: Any, label: Mapping[fx.Node, Label]) -> bool:
    return isinstance(inputs, fx.Node) and any(label[node] is Label.PURE for node in ancestors([inputs]))


def loss_site(node: fx.Node) -> LossSite:
    inputs, targets = (before_broadcast(arg) for arg in node.args[:2])
    reduction = next(arg for arg in node.args if arg in ("mean", "sum", "none"))
    loss, arguments = BY_NAME[op_name(node)], loss_arguments(node)
    ignored, weights = arguments.get("ignore_index"), arguments.get("weight")
    # Others are weights of elements. A smoothed target has a part of all classes, so that its case always counts.
    smoothed = bool(loss.changed(["label_smoothing"], arguments))
    by_class = weights if loss.classes_second and not smoothed else None
    return LossSite(loss.name, inputs, targets, str(reduction), node, ignored, by_class)


def loss_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a loss of torch, by name."""
    return dict(zip(BY_NAME[op_name(node)].arguments, node.args, strict=False))


def before_broadcast(node: Any) -> fx.Node:
    """F.mse_loss begins with `broadcast_tensors(inputs, targets)`; where that changes nothing, we look behind it."""
    assert isinstance(node, fx.Node), "bug in kfac_fx: a loss of constants"
    source = node.args[0] if op_name(node) == "getitem" else None
    if not isinstance(source, fx.Node) or op_name(source) != "broadcast_tensors":
        return node
    operand = source.all_input_nodes[node.args[1]]  # type: ignore[index]  # getitem's index is a number here
    same = str(operand.meta["val"].shape) == str(node.meta["val"].shape)
    return operand if same else node
