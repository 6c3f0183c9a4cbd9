"""Cases: which size of a graph counts them, which dimension of a use's output they are, and which of its rows count.

A case is what the mean of the loss averages over. Their number is a symbolic size, since only a batch knows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from .errors import RegistrationError
from .graphs.labels import sizes_of, symbolic_sizes
from .ir import CASES, NUMBER, ROW_MASK, Program, Use
from .parametrization import Computed
from .torch_private import pytree

OF_ROWS = "[cases, features]"  # the inputs of a recurrent cell, in the words of `Program.told_cases`
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
    inputs = program.inputs
    conventional = case_size(program.graph, outputs)
    if (dim := program.options.batch_dim) is not None:
        return said_by_user(dim, inputs, conventional), f"batch_dim={dim}"
    in_inputs = {size for node in inputs for size in symbolic_sizes(node) if size}
    in_outputs = {size for node in outputs for size in sizes_of(node)}
    told: dict[str, str] = {}
    for layer, size in program.told_cases:
        # The rows of a cell may be nodes of graphs, which the outputs have one row of.
        if size in in_inputs and (size in in_outputs or not layer.endswith(OF_ROWS)):
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
    inputs = [size for node in graph.find_nodes(op="placeholder") for size in symbolic_sizes(node) if size]
    first = [size for node in outputs for size in symbolic_sizes(node)[:1]]
    if first[:1] == [None] and single(graph):
        return None
    return next((size for size in (*first, *inputs) if size in inputs), None)


def single(graph: fx.Graph) -> bool:
    """Whether the first input was captured with one row, or none: sizes that are numbers in a graph."""
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return next((value.shape[0] <= 1 for value in values if isinstance(value, Tensor) and value.dim()), False)


# --- in a use ---------------------------------------------------------------------------------------------------------


def with_batch_dim(use: Use, cases: str, outputs_last: bool = False) -> Use:
    """Where the cases are in the use's output; None if no dimension has their size. A forward that reads the size as a
    number, as `range(len(x))` does, has a number for it; several dimensions may have this.

    outputs_last: the last dimension holds the outputs of the layer, and counts no cases.
    """
    numbers = sizes_of(use.output)[: -1 if outputs_last else None]
    number = cases.isdigit() and numbers.count(cases) == 1
    sizes = numbers if number else symbolic_sizes(use.output)
    if use.batch_independent:
        use = replace(use, attrs={**use.attrs, CASES: number_of_cases(use.output, cases)})
    return replace(use, batch_dim=sizes.index(cases) if cases in sizes else None) if sizes else use


def number_of_cases(output: fx.Node, cases: str | None) -> Computed:
    """The size of the cases; where it is not known, the first size of the first input, of the same submodule.

    A use that does not depend on the batch has the same Fisher with any number of cases: `count` grows with the number,
    and G falls.
    """
    submodule = output.meta.get(NUMBER)
    inputs = [node for node in output.graph.find_nodes(op="placeholder") if node.meta.get(NUMBER) == submodule]
    candidates = [
        (node, symbolic_sizes(node).index(cases)) for node in inputs if cases in symbolic_sizes(node) and cases
    ]
    return Computed(size, candidates[0] if candidates else (inputs[0], 0))


def size(value: Any, dim: int) -> int:
    """The size of an input along `dim`. The input is a tensor, or a container; its first tensor counts."""
    return next(
        (int(leaf.shape[dim]) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.dim()), 1
    )


# --- masks ------------------------------------------------------------------------------------------------------------


def with_row_mask(output: Tensor, mask: Tensor) -> Tensor:
    """`output`; of its rows [N, S] only those count where `mask` is true, whatever the others hold.

    It stands behind the output of a use in a graph: `f(linear(x, w, b))` -> `f(with_row_mask(linear(x, w, b), mask))`.
    """
    return output


def with_mask(use: Use) -> Use:
    """The use with its mask among its attributes, if the graph says one."""
    readers = list(use.output.users)
    if len(readers) != 1 or readers[0].target is not with_row_mask or readers[0].args[0] is not use.output:
        return use
    return replace(use, attrs={**use.attrs, ROW_MASK: readers[0].args[1]})


def without_mask(use: Use) -> Use:
    """The use with all of its rows."""
    return replace(use, attrs={name: value for name, value in use.attrs.items() if name != ROW_MASK}, mask_dims=())
