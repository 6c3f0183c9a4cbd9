"""Where a node stands in the user's own code.

Registrations: the parameters and the uses that one Fisher block is made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import fx

from .approximations import APPROXIMATIONS, Approximation
from .matrix import MatrixForm
from .words.pieces import Piece
from .words.uses import Use

OWN_FOLDER = str(Path(__file__).parents[1])  # the compiler


def where(node: fx.Node) -> str:
    """`"linear_1 (model.py:33)"`: the node and the last line of the user's own code behind it."""
    line = source_line(node)
    return f"{node.name} ({line})" if line else node.name


def source_line(node: fx.Node) -> str | None:
    """`"model.py:33"`, the innermost frame outside torch; None when the capture kept no stack."""
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    found = None
    for frame in frames:
        if frame.startswith('File "') and "/torch/" not in frame and OWN_FOLDER not in frame:
            path, _, rest = frame.removeprefix('File "').partition('", line ')
            found = f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
    return found


# --- registration -----------------------------------------------------------------------------------------------------


GENERIC = "generic"  # as an approximation: claimed by no layer, whatever its form
WANTED = "declared generic"  # the reason of what is


@dataclass(frozen=True)
class Sampling:
    """What an input factor is computed from: a share of the cases, and so many rows for each of its inputs at most."""

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

    @property
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

    def __str__(self) -> str:
        return f"{self.layer}({', '.join(self.parameters)})"
