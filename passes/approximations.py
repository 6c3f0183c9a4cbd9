"""The approximations of Fisher blocks: one table of plain data, which everything else reads.

A registration holds the name of its approximation, and `Registration.structure` is the row of this table. To add an
approximation, write its row, and its statistics or the class of its blocks where these are new; the table
`kfac_fx.fisher.block.GROUPS` names the classes.

An approximation is a Kronecker product c A ⊗ G of an input and an output factor, or one factor F of all parameters:

    kron, kron_indep          A ⊗ G of one use, and of several that are taken to be independent
    kron_*_diag               the same with a diagonal A, a diagonal G, or both
    kron_reduce               A ⊗ G of one row per case, the mean over positions (`recording.row_sums`)
    diagonal, full            F from the gradients of single cases
    kron_series_*             several uses as a Markov chain in time (`kfac_fx.fisher.series`)
    kron_sua, kron_sua_*      convolutions, A from pixels in the place of patches (`kfac_fx.fisher.group_kinds`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Needs = Mapping[str, str]  # what all uses must have, a key of `LACKS` in `passes.choose` -> the words if not


@dataclass(frozen=True)
class Side:
    """One operand of a block's Kronecker product; a block that is no product has one side, of all its parameters."""

    factor: str
    statistic: str
    diagonal: bool
    part: str = ""  # of a factor that is decomposed in parts

    def shape(self, matrix: tuple[int, int, int]) -> tuple[int, ...]:
        """The factor's: [g, i, i] of A, [g, o, o] of G, [p, p] of F; if diagonal [g, i], [g, o] and [g, o, i]."""
        g, d = matrix[0], self.size(matrix)
        if self.factor == "F":
            return matrix if self.diagonal else (d, d)
        return (g, d) if self.diagonal else (g, d, d)

    def size(self, matrix: tuple[int, int, int]) -> int:
        """d of one of its matrices [d, d]."""
        g, o, i = matrix
        return {"F": g * o * i, "A": i, "G": o}[self.factor]

    def __str__(self) -> str:
        return f"{self.factor} {self.part}" if self.part else self.factor


@dataclass(frozen=True)
class Approximation:
    """One approximation.

    Attributes:
        name: the name that users write, as in `approximations={"head": "full"}`.
        left: the side of the outputs; of a block that is no Kronecker product, the side of all parameters.
        right: the side of the inputs; None if the block is no Kronecker product.
        group: the key of the class in `kfac_fx.fisher.block.GROUPS` that stacks its blocks.
        lagged: the statistics that it needs beside those of single uses.
        variant: which kind of the statistics of its product it needs: "count/x", "A/x" and "G/x" for "x", those of the
            rows as they are for "".
        series: it takes the uses of a weight in the order of time, one after another.
        needs: what it needs of all uses, and the words of the report for a use that lacks it. The words may name the
            {layer} and the {place} of that use. Checked in this order.
        needs_dense_rows: layers offer it only if their rows are no ids, and are not routed to experts.
        needs_exact_rows: it needs rows that leave out no part of the gradient. The words are those of the use.
        needs_all_rows: why its input factor cannot be computed from a sample of the rows; None if it can.
        resizable: whether a side that is wider than `dense_limit` may become diagonal, or keep diagonal blocks only.
        words: what the report adds to "kronecker".
        kinds: the `register_*` methods of a LayerCollection that accept it, without the prefix "register_".
        multi_name: its name in TF K-FAC for several uses, where that is not `name`.
    """

    name: str
    left: Side
    right: Side | None
    group: str = "stacked"
    lagged: tuple[str, ...] = ()
    variant: str = ""
    series: bool = False
    needs: Needs = field(default_factory=dict, hash=False)
    needs_dense_rows: bool = False
    needs_exact_rows: bool = False
    needs_all_rows: str | None = None
    resizable: bool = False
    words: str = ""
    kinds: tuple[str, ...] = ()
    multi_name: str | None = None

    @property
    def kronecker(self) -> bool:
        """Whether it is a Kronecker product."""
        return self.right is not None

    @property
    def diagonal(self) -> bool:
        """Whether all sides are diagonal."""
        return all(side.diagonal for side in (self.left, self.right) if side is not None)

    @property
    def diagonal_inputs(self) -> bool:
        """Whether the input factor of the product is diagonal."""
        return self.right is not None and self.right.diagonal

    @property
    def diagonal_outputs(self) -> bool:
        """Whether the output factor of the product is diagonal."""
        return self.right is not None and self.left.diagonal

    def statistic(self, name: str) -> str:
        """The name of its own kind of a statistic."""
        return f"{name}/{self.variant}" if self.variant else name

    @property
    def needs_cases(self) -> bool:
        """Whether it needs the rows of every case apart."""
        return "cases" in self.needs

    @property
    def needs_pixels(self) -> bool:
        """Whether its rows are the pixels of the input."""
        return "pixels" in self.needs


INPUTS, INPUTS_DIAGONAL = Side("A", "A", False), Side("A", "A_diag", True)
OUTPUTS, OUTPUTS_DIAGONAL = Side("G", "G", False), Side("G", "G_diag", True)
GRADIENTS, GRADIENTS_SQUARED = Side("F", "outer", False), Side("F", "square", True)

LINEAR_KINDS = ("fully_connected", "fully_connected_multi")
CONVOLUTION_KINDS = ("conv2d", "conv2d_multi")
EMBEDDING_KINDS = ("embedding", "embedding_multi")
ALL_CASES = "needs the gradients of all cases"
CASES_APART: Needs = {
    "batch": "its gradient is summed over cases at its output",
    "cases": "cases are merged with positions at its output",
}
PIXELS: Needs = {"pixels": "its use as {layer} at {place} has no pixels"}
TIME: Needs = {
    "equal towers": "its towers have {numbers} uses",
    "several uses": "it has one use",
    "no transpose": "its use at {place} is transposed",
    "batch": "its gradient at {place} is summed over cases",
    "own rows": "its rows at {place} depend on more than its input",
    "alike": "its uses at {first} and {place} are not alike",
}
ORDER_UNKNOWN = "the order of its uses is known at run time only"
ALL_KINDS = ("generic", *LINEAR_KINDS, *CONVOLUTION_KINDS, "depthwise_conv2d", *EMBEDDING_KINDS, "scale_and_shift")

KRON = Approximation(
    "kron",
    OUTPUTS,
    INPUTS,
    resizable=True,
    kinds=("fully_connected", "conv2d", "depthwise_conv2d"),
)
KRON_IN_DIAG = replace(
    KRON,
    name="kron_in_diag",
    right=INPUTS_DIAGONAL,
    kinds=(*LINEAR_KINDS, *EMBEDDING_KINDS),
    multi_name="kron_indep_in_diag",
)
KRON_OUT_DIAG = replace(
    KRON,
    name="kron_out_diag",
    left=OUTPUTS_DIAGONAL,
    kinds=LINEAR_KINDS,
    multi_name="kron_indep_out_diag",
)
KRON_BOTH_DIAG = replace(
    KRON,
    name="kron_both_diag",
    left=OUTPUTS_DIAGONAL,
    right=INPUTS_DIAGONAL,
    kinds=(*LINEAR_KINDS, "embedding"),
    multi_name="kron_indep_both_diag",
)
KRON_INDEP = replace(KRON, name="kron_indep", kinds=("fully_connected_multi", "conv2d_multi"))

DIAGONAL = Approximation(
    "diagonal",
    GRADIENTS_SQUARED,
    None,
    needs=CASES_APART,
    needs_exact_rows=True,
    needs_all_rows=ALL_CASES,
    kinds=ALL_KINDS,
)
FULL = replace(DIAGONAL, name="full", left=GRADIENTS)

KRON_REDUCE = replace(
    KRON,
    name="kron_reduce",
    variant="reduced",
    needs={"dense rows": "its rows at {place} are ids, or are routed to experts", **CASES_APART},
    needs_all_rows="needs the rows of all positions",
    resizable=False,
    words="reduced",
    kinds=(*LINEAR_KINDS, *CONVOLUTION_KINDS, "depthwise_conv2d"),
)

KRON_SERIES_1 = Approximation(
    "kron_series_1",
    OUTPUTS,
    INPUTS,
    group="series",
    lagged=("A1", "G1", "pairs"),
    series=True,
    needs=TIME,
    needs_dense_rows=True,
    needs_exact_rows=True,
    needs_all_rows=ALL_CASES,
    words="series 1",
    kinds=("fully_connected_multi",),
)
KRON_SERIES_1_ABS = replace(KRON_SERIES_1, name="kron_series_1_abs", words="series 1 abs")
KRON_SERIES_2 = replace(KRON_SERIES_1, name="kron_series_2", words="series 2")

KRON_SUA = Approximation(
    "kron_sua",
    OUTPUTS,
    INPUTS,
    group="pixels",
    needs=PIXELS,
    needs_exact_rows=True,
    words="uncorrelated places",
    kinds=CONVOLUTION_KINDS,
)
KRON_SUA_ZERO_MEAN = replace(KRON_SUA, name="kron_sua_zero_mean", words="uncorrelated places of zero mean")
KRON_SUA_CENTERED = replace(KRON_SUA, name="kron_sua_centered", words="uncorrelated places less their mean")

APPROXIMATIONS: Mapping[str, Approximation] = {
    approximation.name: approximation
    for approximation in (
        KRON,
        KRON_IN_DIAG,
        KRON_OUT_DIAG,
        KRON_BOTH_DIAG,
        KRON_INDEP,
        DIAGONAL,
        FULL,
        KRON_SERIES_1,
        KRON_SERIES_1_ABS,
        KRON_SERIES_2,
        KRON_SUA,
        KRON_SUA_ZERO_MEAN,
        KRON_SUA_CENTERED,
        KRON_REDUCE,
    )
}
EVERY_LAYER = tuple(
    name
    for name, approximation in APPROXIMATIONS.items()
    if not (approximation.needs_pixels or approximation.needs_dense_rows)
)
WITHOUT_PIXELS = tuple(name for name, approximation in APPROXIMATIONS.items() if not approximation.needs_pixels)
FROM_PIXELS = tuple(name for name, approximation in APPROXIMATIONS.items() if approximation.needs_pixels)


LONGEST = 1023  # the number of steps that every block is prepared for: ten bits of T


def longest(steps: int) -> int:
    """The number of steps that a block is prepared for, if its first batch has `steps`."""
    return max(LONGEST, steps)
