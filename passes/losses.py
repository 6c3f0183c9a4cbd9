"""Where the Fisher's outputs are: a loss that forward computes itself, or what the model returns.

logits = self.head(h);  return F.cross_entropy(logits, y)      ->  categorical, inputs = logits, targets = y
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from .errors import RegistrationError
from .graphs.labels import Label, ancestors, has_gradient, labels, sizes_of, symbolic_sizes
from .graphs.operations import op_name
from .graphs.spelling import order_operands
from .ir import LossSite, Note, Program, where
from .torch_losses import BY_NAME
from .torch_private import pytree


def find_losses(program: Program) -> Program:
    """Set `outputs` and `cases`, and `losses` where the graph computes them and the user named none."""
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    returned = [leaf for leaf in pytree.tree_leaves(output.args[0]) if isinstance(leaf, fx.Node)]
    sites = () if program.options.loss_given else loss_sites(program, returned)
    outputs = tuple(site.inputs for site in sites) or tuple(node for node in returned if has_gradient(node))
    cases, cases_reason = size_of_cases(program, outputs)
    order_operands(program.graph, program.parameters, cases=cases)  # now that it is known what has a row a case
    return program.but(
        losses=sites,
        outputs=outputs,
        cases=cases,
        cases_reason=cases_reason,
        dropped=(*program.dropped, *left_out(sites)),
    )


def left_out(sites: tuple[LossSite, ...]) -> tuple[Note, ...]:
    """One note for every loss with weights or label smoothing."""
    notes = []
    for site in sites:
        loss = BY_NAME[op_name(site.node)]
        values = dict(zip(loss.arguments, site.node.args, strict=False))
        if any(values.get(argument) not in (None, 0.0) for argument in loss.outside):
            reason = "its weights and label smoothing are no part of the Fisher, which is that of its distribution"
            notes.append(Note(f"{loss.name} at {where(site.node)}", reason))
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
        and label[node] is Label.ACT
        and of_parameters(node.args[0], label)
    )


def of_parameters(inputs: Any, label: Mapping[fx.Node, Label]) -> bool:
    return isinstance(inputs, fx.Node) and any(label[node] is Label.PURE for node in ancestors([inputs]))


# --- cases ------------------------------------------------------------------------------------------------------------


CONVENTION = "by convention, as no layer and no batch_dim= says another"
ANSWER = (
    "Write kfac_fx.compile(..., batch_dim=1) if the inputs are [positions, cases, ...], or batch_dim=0 if their first "
    "dimension counts the cases."
)


def size_of_cases(program: Program, outputs: tuple[fx.Node, ...]) -> tuple[str | None, str]:
    """(the size of the cases, why it is this one if there is a choice).

    The size comes from the user's `batch_dim`, from the layers that know which dimension of their inputs counts cases,
    or from the convention of `case_size`.

    Raises RegistrationError if `batch_dim` does not exist, or if layers contradict each other or the outputs.
    """
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    conventional = case_size(program.graph, outputs)
    if (dim := program.options.batch_dim) is not None:
        return said_by_user(dim, inputs, conventional), f"batch_dim={dim}"
    in_inputs = {size for node in inputs for size in symbolic_sizes(node) if size}
    told: dict[str, str] = {}
    for layer, size in program.told_cases:
        if size in in_inputs:
            told.setdefault(size, layer)
    if not told or conventional is None:
        choice = conventional is not None and any(size != conventional for size in free_sizes(inputs))
        return conventional, CONVENTION if choice else ""
    agreed = told if len(told) == 1 else {size: layer for size, layer in told.items() if size == conventional}
    if len(agreed) != 1:
        raise RegistrationError(
            "which dimension of the inputs counts the cases is not clear, since two layers contradict each other: "
            f"{' and '.join(told.values())}.\n{ANSWER}"
        )
    ((size, layer),) = agreed.items()
    shapes = [sizes_of(node) for node in outputs]
    if not any(size in shape for shape in shapes) and any(shape[:1] == [conventional] for shape in shapes):
        shape = ", ".join(shapes[0])
        raise RegistrationError(
            f"{layer}, and the output [{shape}] has no dimension of these cases: the first dimension of the inputs is "
            f"taken for positions by the layer, and for cases by the output.\n"
            "Write batch_first=True in the layer if its inputs are [cases, positions, features]; or, if all is meant "
            "as it is, kfac_fx.compile(..., batch_dim=0)."
        )
    return size, layer


def said_by_user(dim: int, inputs: list[fx.Node], conventional: str | None) -> str | None:
    """The size of dimension `dim` of the first input that has it. Raises RegistrationError if none has."""
    shapes = [symbolic_sizes(node) for node in inputs if symbolic_sizes(node)]
    long_enough = [sizes for sizes in shapes if len(sizes) > dim]
    if shapes and not long_enough:
        raise RegistrationError(f"batch_dim={dim}, and no input of forward has {dim + 1} dimensions.")
    size = next((sizes[dim] for sizes in long_enough), None)
    if size is None and dim:
        raise RegistrationError(
            f"batch_dim={dim}, and dimension {dim} of the inputs has one size for all batches in the captured graph: "
            "capture and train with batches of at least two cases, as a DataLoader with drop_last=True makes them."
        )
    return conventional if size is None else size


def free_sizes(inputs: list[fx.Node]) -> list[str]:
    """The sizes of the first two dimensions of all inputs that may be another in the next batch."""
    return [size for node in inputs for size in symbolic_sizes(node)[:2] if size and not size.isdigit()]


def case_size(graph: fx.Graph, outputs: tuple[fx.Node, ...]) -> str | None:
    """The size that is first in an output and somewhere in an input; else the first of the first input. None for a
    single case, whose size is a number."""
    inputs = [size for node in graph.nodes if node.op == "placeholder" for size in symbolic_sizes(node) if size]
    first = [size for node in outputs for size in symbolic_sizes(node)[:1]]
    if first[:1] == [None] and single(graph):
        return None
    return next((size for size in (*first, *inputs) if size in inputs), None)


def single(graph: fx.Graph) -> bool:
    """Whether the first input was captured with one row, or none: sizes that are numbers in a graph."""
    values = (node.meta.get("val") for node in graph.nodes if node.op == "placeholder")
    return next((value.shape[0] <= 1 for value in values if isinstance(value, Tensor) and value.dim()), False)


def loss_site(node: fx.Node) -> LossSite:
    inputs, targets = (before_broadcast(arg) for arg in node.args[:2])
    reduction = next(arg for arg in node.args if arg in ("mean", "sum", "none"))
    loss = BY_NAME[op_name(node)]
    ignored = dict(zip(loss.arguments, node.args, strict=False)).get("ignore_index")
    return LossSite(loss.name, inputs, targets, str(reduction), node, ignored)


def before_broadcast(node: Any) -> fx.Node:
    """F.mse_loss begins with `broadcast_tensors(inputs, targets)`; where that changes nothing, we look behind it."""
    assert isinstance(node, fx.Node), "bug in kfac_fx: a loss of constants"
    source = node.args[0] if op_name(node) == "getitem" else None
    if not isinstance(source, fx.Node) or op_name(source) != "broadcast_tensors":
        return node
    operand = source.all_input_nodes[node.args[1]]  # type: ignore[index]  # getitem's index is a number here
    same = str(operand.meta["val"].shape) == str(node.meta["val"].shape)
    return operand if same else node
