"""Sizes of what a node computes: numbers, or symbols where only the batch knows them.

Where the cases are in a use's output, and how many there are.

Which rows of a use are padding, said in the graph: an identity behind the output of the use.

y = linear(x, w, b);  f(y)      ->      y = linear(x, w, b);  f(counted(y, kept))
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..computed import Computed
from ..ir import CASES, KEPT, Use
from ..torch_private import size_hint
from . import pytree
from .labels import symbolic_sizes


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


# --- cases ------------------------------------------------------------------------------------------------------------


NUMBER = "kfac_fx_submodule"  # in the meta of a node of several submodules' graphs side by side: which it belongs to


def with_batch_dim(use: Use, cases: str) -> Use:
    """Where the cases are in the use's output; None if no dimension has their size."""
    sizes = symbolic_sizes(use.output)
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
    return next((int(leaf.shape[dim]) for leaf in pytree.leaves(value) if isinstance(leaf, Tensor) and leaf.dim()), 1)


# --- masks ------------------------------------------------------------------------------------------------------------


def counted(output: Tensor, mask: Tensor) -> Tensor:
    """`output`; of its rows [N, S] only those count where `kept` is true, whatever the others hold."""
    return output


def with_mask(use: Use) -> Use:
    """The use with its mask among its attributes, if the graph says one."""
    readers = list(use.output.users)
    if len(readers) != 1 or readers[0].target is not counted or readers[0].args[0] is not use.output:
        return use
    return replace(use, attrs={**use.attrs, KEPT: readers[0].args[1]})
