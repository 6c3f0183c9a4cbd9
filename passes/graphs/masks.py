"""Which rows of a use are padding, said in the graph: an identity behind the output of the use.

y = linear(x, w, b);  f(y)      ->      y = linear(x, w, b);  f(counted(y, kept))
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..ir import KEPT, Use


def counted(output: Tensor, kept: Tensor) -> Tensor:
    """`output`; of its rows [N, S] only those count where `kept` is true, whatever the others hold."""
    return output


def with_mask(use: Use) -> Use:
    """The use with its mask among its attributes, if the graph says one."""
    readers = list(use.output.users)
    if len(readers) != 1 or readers[0].target is not counted or readers[0].args[0] is not use.output:
        return use
    return replace(use, attrs={**use.attrs, KEPT: readers[0].args[1]})
