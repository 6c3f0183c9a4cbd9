"""Approximations of Fisher blocks, and the statistics that they are made of: one table, which everything else reads.

A registration holds the name of its approximation, and `Registration.structure` is the row of this table. A row holds
objects: its statistics, and its algebra, which is a class of blocks. This package does not know the runtime. So the
runtime fills in the functions that compute statistics, and the classes, with the decorators `computes` and `blocks_of`;
`check_filled` tells if one is missing. To add an approximation, write its row; to add a statistic, declare it here and
compute it in `kfac_fx.recording.statistics`.

An approximation is a Kronecker product c A ⊗ G of an input and an output factor, or one factor F of all parameters:

    kron, kron_indep          A ⊗ G of one use, and of several that are taken to be independent
    kron_*_diag               the same with a diagonal A, a diagonal G, or both
    kron_reduce               A ⊗ G of one row per case, the mean over positions (`recording.statistics`)
    diagonal, full            F from the gradients of single cases
    kron_series_*             several uses as a Markov chain in time (`kfac_fx.fisher.series`)
    kron_sua, kron_sua_*      convolutions, A from pixels instead of patches (`kfac_fx.fisher.block_diagonal`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from .matrix import Shape, block_width

Needs = Mapping[str, str]  # what all uses must have, a key of `LACKS` in `passes.resolve` -> the words if not
Matrix = tuple[int, int, int]  # (g, o, i): groups, outputs and inputs, with the bias column
SumOfRows = TypeVar("SumOfRows", bound=Callable[..., Tensor])
Group = TypeVar("Group", bound=type[Any])

# --- statistics -------------------------------------------------------------------------------------------------------

STATISTICS: dict[str, Statistic] = {}
IN_BLOCKS: dict[str, Statistic] = {}  # those of sides in diagonal blocks, once a registration has such a side


@dataclass(eq=False)
class Statistic:
    """A sum over the rows r [i] and the gradient rows d [o] of uses, from which factors are made.

    It is equal to itself alone. It is not frozen, because Dynamo takes frozen dataclasses apart to hash a `Side`.

    Attributes:
        name: its name in probes and moments.
        sizes: its shape, from g, o, i and the number of cases.
        power: the power p of the gradient in it: a loss times s makes the statistic times s^p. Over several sources,
            those with the power 0 count once, with 1 they are side by side, and with 2 they add up.
        side: "A" if it is a sum of rows alone, "G" if of gradient rows alone, else "".
        per_case: whether it has an entry for every case.
        lagged: whether it is a sum over pairs of consecutive uses.
        kind_of: the statistic whose place it takes in the sums of a block; None: it has a place of its own.
        blocks: the number of diagonal blocks that are computed of every matrix.
        transposed: whether it sums over transposed uses only. Their rows and gradient rows have changed sides.
        function: computes it from the rows of a use (`recording.statistics.Rows`), or of two; and the number of blocks,
            if this is not 1.
        twin: the same sum over transposed uses, which must be apart until all uses are of one loss.
    """

    name: str
    sizes: Callable[[int, int, int, int], Shape]
    power: int
    side: str = ""
    per_case: bool = False
    lagged: bool = False
    kind_of: Statistic | None = None
    blocks: int = 1
    transposed: bool = False
    function: Callable[..., Tensor] | None = field(default=None, init=False)
    twin: Statistic | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        table = STATISTICS if self.blocks == 1 else IN_BLOCKS
        assert self.name not in table, f"bug in kfac_fx: there are two statistics {self.name!r}"
        table[self.name] = self
        if self.side and not (self.lagged or self.transposed):
            self.twin = replace(self, name=f"{self.name}/turned", power=2 - self.power, kind_of=self, transposed=True)

    def shape(self, matrix: Matrix, cases: int = 0) -> Shape:
        shape = self.sizes(*matrix, cases)
        if self.blocks == 1:
            return shape
        groups, width = shape[0], block_width(shape[1], self.blocks)
        return groups * self.blocks, width, width

    @property
    def needs_rows(self) -> bool:
        """Whether it contains rows, and not only gradient rows or the number of both."""
        return self.side == "A" or (not self.side and self.power > 0)

    def of(self, *rows: Any) -> Tensor:
        """The sum over the rows of a use, a new tensor; over a later and an earlier use if it is `lagged`."""
        function = self.function if self.kind_of is None or self.blocks == 1 else self.kind_of.function
        assert function is not None, f"bug in kfac_fx: no module computes {self.name!r}"
        return function(*rows) if self.blocks == 1 else function(*rows, self.blocks)

    @property
    def whole(self) -> Statistic:
        """The statistic that has the place of this one in the sums of a block."""
        return self if self.kind_of is None else self.kind_of.whole

    def in_blocks(self, blocks: int) -> Statistic:
        """The diagonal blocks of its matrices, [g·k, b, b] of [g, d, d]."""
        if blocks == 1:
            return self
        name = f"{self.name}/{blocks}"
        return IN_BLOCKS[name] if name in IN_BLOCKS else replace(self, name=name, kind_of=self, blocks=blocks)


def named(name: str) -> Statistic:
    """The statistic of this name, `"A"` or `"A/8"`."""
    return STATISTICS[name] if name in STATISTICS else IN_BLOCKS[name]


def computes(statistic: Statistic) -> Callable[[SumOfRows], SumOfRows]:
    """Decorator of the function that computes a statistic."""

    def fill(function: SumOfRows) -> SumOfRows:
        assert statistic.function is None, f"bug in kfac_fx: {statistic.name!r} is computed twice"
        statistic.function = function
        return function

    return fill


COUNT = Statistic("count", lambda g, o, i, n: (), power=0)
A = Statistic("A", lambda g, o, i, n: (g, i, i), power=0, side="A")
A_DIAG = Statistic("A_diag", lambda g, o, i, n: (g, i), power=0, side="A")
G = Statistic("G", lambda g, o, i, n: (g, o, o), power=2, side="G")
G_DIAG = Statistic("G_diag", lambda g, o, i, n: (g, o), power=2, side="G")
GRADIENT = Statistic("gradient", lambda g, o, i, n: (g, o, i), power=1)
PER_CASE = Statistic("per_case", lambda g, o, i, n: (n, g * o * i), power=1, per_case=True)
SQUARE = Statistic("square", lambda g, o, i, n: (g, o, i), power=2)
OUTER = Statistic("outer", lambda g, o, i, n: (g * o * i, g * o * i), power=2)
A1 = Statistic("A1", lambda g, o, i, n: (g, i, i), power=0, side="A", lagged=True)
G1 = Statistic("G1", lambda g, o, i, n: (g, o, o), power=2, side="G", lagged=True)
PAIRS = Statistic("pairs", lambda g, o, i, n: (), power=0, lagged=True)
LAGGED = A1, G1, PAIRS
COUNT_REDUCED = replace(COUNT, name="count/reduced", kind_of=COUNT)
A_REDUCED = replace(A, name="A/reduced", kind_of=A)
G_REDUCED = replace(G, name="G/reduced", kind_of=G)

# --- approximations ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Algebra:
    """How blocks are multiplied, inverted and decomposed: a class of groups of blocks, which `kfac_fx.fisher` fills in.

    Attributes:
        name: for errors.
        eigenbasis: whether every side has eigenvectors of its own.
        group: the class, see `kfac_fx.fisher.groups.BlockGroup`.
    """

    name: str
    eigenbasis: bool = False
    group: type[Any] | None = field(default=None, init=False)


def blocks_of(algebra: Algebra) -> Callable[[Group], Group]:
    """Decorator of the class of groups of an algebra."""

    def fill(group: Group) -> Group:
        assert algebra.group is None, f"bug in kfac_fx: there are two classes of {algebra.name}"
        algebra.group = group
        return group

    return fill


PRODUCT_OF_SIDES = Algebra("products of sides", eigenbasis=True)
SERIES = Algebra("series")
UNCORRELATED = Algebra("uncorrelated places")


@dataclass(frozen=True)
class Side:
    """One operand of a block's Kronecker product; a block that is no product has one side, of all its parameters."""

    factor: str
    statistic: Statistic = field(compare=False)  # sides of one kind are stacked, whatever they are sums of
    diagonal: bool
    part: str = ""  # of a factor that is decomposed in parts

    def size(self, matrix: Matrix) -> int:
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
        algebra: the class of its blocks.
        count: the number of rows that the sums of its sides are divided by.
        lagged: the statistics that it needs beside those of single uses.
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
    algebra: Algebra = PRODUCT_OF_SIDES
    count: Statistic = COUNT
    lagged: tuple[Statistic, ...] = ()
    series: bool = False
    needs: Needs = field(default_factory=dict, hash=False)
    needs_dense_rows: bool = False
    needs_exact_rows: bool = False
    needs_all_rows: str | None = None
    resizable: bool = False
    words: str = ""
    kinds: tuple[str, ...] = ()
    multi_name: str | None = None

    def __deepcopy__(self, memo: object) -> Approximation:
        """Itself: blocks ask which approximation they are by `is`, and copies of blocks do, too."""
        return self

    @property
    def kronecker(self) -> bool:
        """Whether it is a Kronecker product."""
        return self.right is not None

    @property
    def diagonal(self) -> bool:
        """Whether all sides are diagonal."""
        return all(side.diagonal for side in self.sides)

    @property
    def diagonal_inputs(self) -> bool:
        """Whether the input factor of the product is diagonal."""
        return self.right is not None and self.right.diagonal

    @property
    def diagonal_outputs(self) -> bool:
        """Whether the output factor of the product is diagonal."""
        return self.right is not None and self.left.diagonal

    @property
    def sides(self) -> tuple[Side, ...]:
        """The side of the outputs and that of the inputs, or that of all parameters."""
        return (self.left,) if self.right is None else (self.left, self.right)

    @property
    def has_eigenbasis(self) -> bool:
        """Whether every side has eigenvectors of its own."""
        return self.algebra.eigenbasis

    @property
    def needs_cases(self) -> bool:
        """Whether it needs the rows of every case apart."""
        return "cases" in self.needs

    @property
    def needs_pixels(self) -> bool:
        """Whether its rows are the pixels of the input."""
        return "pixels" in self.needs


INPUTS, INPUTS_DIAGONAL = Side("A", A, False), Side("A", A_DIAG, True)
OUTPUTS, OUTPUTS_DIAGONAL = Side("G", G, False), Side("G", G_DIAG, True)
GRADIENTS, GRADIENTS_SQUARED = Side("F", OUTER, False), Side("F", SQUARE, True)

LINEAR_KINDS = ("fully_connected", "fully_connected_multi")
CONVOLUTION_KINDS = ("conv2d", "conv2d_multi")
EMBEDDING_KINDS = ("embedding", "embedding_multi")
ALL_CASES = "needs the gradients of all cases"
MERGED = "forward merges its cases with positions, as x.flatten(0, 1) does"
UNTIED = "it is used on another input than that which counts the cases, and forward does not need as many of both"
OTHER_ROWS = (
    "its rows are not those of an input, as where a row is a graph of many nodes or a position that a mask selects"
)
POOLED = "several of its rows meet in one row of the outputs, as the nodes of a graph do"
SUMMED = "its gradient is summed over cases at its output"
PIECES = "forward takes its cases in pieces, as those of x.chunk(4)"
UNREACHED = "the first batch sent no gradient through it, which would tell its cases"
CASES_APART: Needs = {"batch": SUMMED, "cases": "{why}"}
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
    left=replace(OUTPUTS, statistic=G_REDUCED),
    right=replace(INPUTS, statistic=A_REDUCED),
    count=COUNT_REDUCED,
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
    algebra=SERIES,
    lagged=LAGGED,
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
    algebra=UNCORRELATED,
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


def check_filled() -> None:
    """Raises AssertionError if no module has filled in the class of an algebra, or the function of a statistic."""
    filled: dict[str, object] = {}
    for row in APPROXIMATIONS.values():
        filled[row.algebra.name] = row.algebra.group
        filled |= {s.name: s.function for s in (row.count, *(side.statistic for side in row.sides), *row.lagged)}
    missing = [name for name, value in filled.items() if value is None]
    assert not missing, (
        f"bug in kfac_fx: no module that is imported fills in {', '.join(missing)}: write @computes(...) above the "
        "function of a statistic in kfac_fx/recording/statistics.py, and @blocks_of(...) above the class of an algebra "
        "in a module that kfac_fx/fisher/block.py imports"
    )


LONGEST = 1023  # the number of steps that every block is prepared for: ten bits of T


def longest(steps: int) -> int:
    """The number of steps that a block is prepared for, if its first batch has `steps`."""
    return max(LONGEST, steps)
