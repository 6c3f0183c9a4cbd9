"""Uses: the single applications of layers that a graph holds, and what they say about their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from ..matrix import Layout, MatrixForm, Shape
from ..parametrization import Parametrization, Transposed
from .pieces import Made, Region, Slope

Attrs = Mapping[str, Any]
Dims = tuple[int, ...]
KEPT = "kept"  # among the attributes of a use: a mask [N, S] of the rows that are no padding
JACOBIAN = "jacobian"  # among the attributes of a flat use: of the tensor in the role, [its elements, the parameter's]
CASES = "cases"  # among the attributes of a use that is free of the batch: the number of cases that share it
STEP = "step"  # in the meta of a node: at which step of a recurrent layer it is, and of how many
UNROLLED = "unrolled"  # in the meta of a node that the capture wrote as a part of another: of which


@dataclass(frozen=True)
class Bound:
    """A parameter in a role of a use; `used` leads from the parameter to the tensor that enters the operation,
    `canonical` from there to the layer's matrix ([g, o, i] for a weight, [g, o] for a bias). The operation sees
    `scale` times it, and perhaps a constant more."""

    parameter: str
    used: Layout
    canonical: Layout
    scale: float = 1.0

    @property
    def layout(self) -> Layout:
        return Layout(self.used.shape, self.used.steps + self.canonical.steps)


@dataclass(frozen=True)
class Gain:
    """What a gain multiplies: every slice of normalized filters by a number of its own.

    filters: from v to the matrix [g, o, i]. side: "outputs" or "inputs", where the slices lie; there they repeat,
    (before, after): the numbers of slices along it, flattened, are those of [before, slices, after]. ids: the rows are.
    """

    slope: Slope
    filters: Layout
    side: str
    repeats: tuple[int, int] = (1, 1)
    ids: bool = False

    @property
    def of_outputs(self) -> bool:
        """Whether every output has a gain of its own, in their order."""
        return self.side == "outputs" and self.repeats == (1, 1)


@dataclass(frozen=True)
class Factor:
    """Of a weight that is a product; see `passes.matching.products`.

    steps: (kind, shape of the other factor as a matrix, whether it is turned), the last first. turned: the layer's
    matrix is the product transposed.
    """

    steps: tuple[tuple[str, Shape, bool], ...]
    turned: bool

    @property
    def repeats(self) -> bool:
        """Whether a position has several rows."""
        return any(kind.startswith("kron") for kind, *_ in self.steps)


@dataclass(frozen=True)
class Use:
    """One application of a layer: `output = layer(input, **attrs, **parameters)`.

    As long as it may still be dropped it is called a match. `attrs` holds literals, shapes of the bound parameters
    under their roles' names, and graph nodes where an argument is a tensor.
    """

    layer: str
    form: int
    input: fx.Node
    output: fx.Node
    parameters: Mapping[str, Bound]
    attrs: Attrs
    nodes: frozenset[fx.Node] = field(repr=False)
    batch_dim: int | None = 0  # of the output; None: the cases are merged with other positions
    part_of: str | None = None  # the composite layer that this use is a part of
    tower: int = 0  # which of the mini-batches that the graph computes at once
    steps: int = 1  # how many uses its rows hold one after another
    steps_in_positions: bool = False  # time-major along the positions, not along the cases
    through: tuple[Parametrization, ...] = ()  # from the operation to the parameters
    made: Mapping[str, tuple[Made, Layout]] = field(default_factory=dict)  # until `cut`: roles that are expressions
    region: Region | None = None  # of the layer's matrix, if the parameters are only a part of it
    slopes: tuple[Slope, ...] = ()  # functions between its one parameter and the operation
    slope_side: str | None = None  # what they multiply: gradient rows ("outputs") or rows ("inputs")
    gain_of: Gain | None = None  # the parameter is the gain of these filters
    factor: Factor | None = None  # the parameter is one factor of the weight
    flat: Layout | None = None  # from the tensor in the role to the layer's matrix, where the gradients of whole cases
    # take the place of rows: the parameter's own matrix has a group for every element, and rows of ones
    mask_dims: Dims = ()  # of the output, along which the mask in `attrs` goes, if it is not one of rows as it is; one
    # twice if cases and positions are merged in it
    calls: int | None = None  # of its submodule on the first batch, where that is captured on its own: may be any

    @cached_property
    def parameter_set(self) -> frozenset[str]:
        return frozenset(bound.parameter for bound in self.parameters.values())

    @property
    def free(self) -> bool:
        """Whether it does not see the batch: its output's gradient is a sum over the cases."""
        return CASES in self.attrs

    @property
    def transposed(self) -> bool:
        """Whether rows and gradient rows change sides, as of a tied output layer."""
        return any(isinstance(step, Transposed) for step in self.through)

    @property
    def matrix(self) -> MatrixForm:
        entry = {role: (bound.parameter, bound.layout) for role, bound in self.parameters.items()}
        return MatrixForm(weight=entry.get("weight"), bias=entry.get("bias"))

    def __str__(self) -> str:
        return f"{self.layer}({', '.join(b.parameter for b in self.parameters.values())})"


def tensor_attrs(use: Use) -> dict[str, fx.Node]:
    """The tensors that rows may need beside the input: attributes, and nodes of parametrizations, as `"0.index"`.
    Attributes named `other` and `_...` exist for matching only."""
    nodes = {key: value for key, value in use.attrs.items() if isinstance(value, fx.Node)}
    nodes = {key: value for key, value in nodes.items() if key != "other" and not key.startswith("_")}
    for number, step in enumerate(use.through):
        nodes |= {f"{number}.{key}": node for key, node in step.nodes.items()}
    return nodes
