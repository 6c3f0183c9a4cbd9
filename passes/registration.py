"""Where a node stands in the user's own code.

Registrations: the parameters and the uses that one Fisher block is made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from torch import fx

from .approximations import APPROXIMATIONS, Approximation
from .errors import OWN_FOLDER
from .matrix import Layout, MatrixForm, block_width
from .parametrization import Parametrization, Transposed, Value
from .pieces import ParameterExpr, Piece


def where(node: fx.Node) -> str:
    """`"linear_1 (model.py:33)"`: the node and the last line of the user's own code behind it."""
    line = source_line(node)
    return f"{node.name} ({line})" if line else node.name


def source_line(node: fx.Node) -> str | None:
    """`"model.py:33"`, the innermost frame outside torch; None when the capture kept no stack."""
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    place = None
    for frame in frames:
        if frame.startswith('File "') and "/torch/" not in frame and OWN_FOLDER not in frame:
            path, _, rest = frame.removeprefix('File "').partition('", line ')
            place = f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
    return place


# --- uses -------------------------------------------------------------------------------------------------------------

Attrs = Mapping[str, Any]
Dims = tuple[int, ...]
KEPT = "kept"  # among the attributes of a use: a mask [N, S] of the rows that are no padding
CASES = "cases"  # among the attributes of a use that is free of the batch: the number of cases that share it
STEP = "step"  # in the meta of a node: at which step of a recurrent layer it is, and of how many
UNROLLED = "unrolled"  # in the meta of a node that the capture wrote as a part of another: of which


@dataclass(frozen=True)
class Bound:
    """A parameter in a role of a use.

    used: from the parameter to the tensor that enters the operation.
    canonical: from there to the layer's matrix, [g, o, i] for a weight, [g, o] for a bias.
    scale: the operation sees this multiple of it, and perhaps a constant more.
    """

    parameter: str
    used: Layout
    canonical: Layout
    scale: float = 1.0

    @property
    def layout(self) -> Layout:
        return Layout(self.used.shape, self.used.steps + self.canonical.steps)


@dataclass(frozen=True)
class Use:
    """One application of a layer: `output = layer(input, **attrs, **parameters)`. Before `resolve` it is a match.

    layer, form: the declared layer, by its name, and the number of its form.
    parameters: by their roles, "weight" and "bias".
    attrs: literals, shapes of the bound parameters under their roles' names, and values that the batch decides.
    nodes: all nodes that the form covers.
    batch_dim: the dimension of the cases in the output; None: they are merged with other positions.
    through: what stands between the operation and the parameters, in this order.
    exprs: before `cut`, the roles that expressions fill, and the layouts from there to the layer's matrix.
    part_of: the composite layer that this use is a part of.
    tower: the number of its mini-batch, if the graph computes several at once.
    steps: how many uses its rows hold one after another.
    steps_in_positions: these are time-major along the positions, not along the cases.
    mask_dims: the dimensions of the output along which the mask in `attrs` goes, if it is not a mask of rows as it is;
        one dimension twice if cases and positions are merged in it.
    calls: of its submodule on the first batch, if that is captured on its own; there may be any number later.
    """

    layer: str
    form: int
    input: fx.Node
    output: fx.Node
    parameters: Mapping[str, Bound]
    attrs: Attrs
    nodes: frozenset[fx.Node] = field(repr=False)
    batch_dim: int | None = 0
    through: tuple[Parametrization, ...] = ()
    exprs: Mapping[str, tuple[ParameterExpr, Layout]] = field(default_factory=dict)
    part_of: str | None = None
    tower: int = 0
    steps: int = 1
    steps_in_positions: bool = False
    mask_dims: Dims = ()
    calls: int | None = None

    @cached_property
    def parameter_set(self) -> frozenset[str]:
        return frozenset(bound.parameter for bound in self.parameters.values())

    @property
    def batch_independent(self) -> bool:
        """Whether it does not see the batch: the gradient of its output is a sum over the cases."""
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


def tensor_attrs(use: Use) -> dict[str, Value]:
    """The tensors that rows may need beside the input: attributes, and nodes of parametrizations, as `"0.index"`.
    Attributes named `other` and `_...` exist for matching only."""
    tensors = {key: value for key, value in use.attrs.items() if isinstance(value, Value)}
    tensors = {key: value for key, value in tensors.items() if key != "other" and not key.startswith("_")}
    for number, step in enumerate(use.through):
        tensors |= {f"{number}.{key}": value for key, value in step.nodes.items()}
    return tensors


def literal_attrs(use: Use) -> dict[str, Any]:
    """Attributes that are known without a batch."""
    return {key: value for key, value in use.attrs.items() if not isinstance(value, Value)}


# --- registration -----------------------------------------------------------------------------------------------------


GENERIC = "generic"  # as an approximation: claimed by no layer, whatever its form
WANTED = "declared generic"  # the reason of what is


@dataclass(frozen=True)
class Sampling:
    """The sample that an input factor is computed from: a share of the cases, and at most so many rows per input."""

    inputs: float = 1.0
    patches: float | None = None

    def __str__(self) -> str:
        rows = "" if self.patches is None else f", at most {self.patches:g} rows an input"
        return f"{self.inputs:.0%} of the cases{rows}"


@dataclass(frozen=True)
class Registration:
    """The parameters of one Fisher block with all their uses in graph order. No uses: generic."""

    layer: str
    matrix: MatrixForm | None  # None: generic, the parameters are a flat vector
    parameters: tuple[str, ...]
    uses: tuple[Use, ...]
    approximation: str  # a name of `passes.approximations`
    reason: str | None = None  # why this and not the obvious choice
    pieces: tuple[Piece, ...] = ()  # those of `parameters` that are pieces of parameters
    sampling: Sampling | None = None  # of its input factor; None: all rows
    patch_mask: tuple[float, ...] | None = None  # what every row is multiplied with, without the bias column
    blocks: tuple[int, int] = (1, 1)  # into how many diagonal blocks the output and the input side are cut
    called: bool = False  # its uses are in submodules that may be called any number of times

    @cached_property
    def owners(self) -> tuple[str, ...]:
        """The model's own names of `parameters`, each once."""
        whole = {piece.name: piece.parameter for piece in self.pieces}
        return tuple(dict.fromkeys(whole.get(name, name) for name in self.parameters))

    @property
    def generic(self) -> bool:
        return self.matrix is None

    @property
    def structure(self) -> Approximation:
        """The approximation that `approximation` names."""
        return APPROXIMATIONS[self.approximation]

    @property
    def towers(self) -> int:
        return 1 + max((use.tower for use in self.uses), default=0)

    @property
    def one_use_a_case(self) -> bool:
        """Whether the gradient of a case comes from a single use: every tower has cases of its own."""
        apart = len(self.uses) == 1 or len({use.tower for use in self.uses}) == len(self.uses)
        return apart and not self.called

    @property
    def steps(self) -> int:
        """How many uses a case goes through one after another."""
        tower = [use for use in self.uses if use.tower == self.uses[0].tower]
        return sum(use.steps for use in tower)

    @property
    def kernel(self) -> int:
        """How many places of the input meet in one row: the size of the kernel of a weight [o, c, *kernel]."""
        return prod(self.uses[0].attrs["weight"][2:])

    @property
    def rows(self) -> tuple[tuple[int, int, int], bool]:
        """((groups, outputs, inputs), bias) of the rows that statistics are summed over: those of the matrix;
        for an approximation that needs pixels those of the input, [c], with a column of ones."""
        assert self.matrix is not None, "bug in kfac_fx: rows of a generic registration"
        (g, o, i), bias = self.matrix.shape, self.matrix.bias is not None
        return ((g, o, (i - bias) // self.kernel + 1), True) if self.structure.needs_pixels else ((g, o, i), bias)

    def factor_shapes(self, elements: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the block's factors by name, without numbers such as the positions. elements: of the
        parameters."""
        approximation = self.structure
        if not approximation.kronecker:
            return {"F": (elements,) if approximation.left.diagonal else (elements, elements)}
        (groups, outputs, inputs), _ = self.rows
        output_blocks, input_blocks = self.blocks
        sides = {
            "A": (groups, inputs) if approximation.diagonal_inputs else dense_shape(groups, inputs, input_blocks),
            "G": (groups, outputs) if approximation.diagonal_outputs else dense_shape(groups, outputs, output_blocks),
        }
        return sides | {f"{name}1": shape for name, shape in sides.items()} if approximation.series else sides

    def __str__(self) -> str:
        return f"{self.layer}({', '.join(self.parameters)})"


def dense_shape(groups: int, width: int, blocks: int) -> tuple[int, ...]:
    """The shape of a dense side of this width in diagonal blocks."""
    return groups * blocks, block_width(width, blocks), block_width(width, blocks)
