"""What the passes say to each other: plain, frozen data about one captured graph.

A `Program` holds the graph and all that is known about it so far; a pass takes one and returns another. Nothing here
holds a function: a layer is a name, so a Program prints, compares and pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from torch import fx, nn

from .matrix import Layout, MatrixForm, Shape
from .pieces import Made, Piece, Region, Slope

Attrs = Mapping[str, Any]
Dims = tuple[int, ...]
KRONECKER = ("kron", "kron_in_diag", "kron_out_diag", "kron_both_diag")
OWN_FOLDER = str(Path(__file__).parent)
EVERY_LAYER = (*KRONECKER, "kron_indep", "diagonal", "full")
SERIES = ("kron_series_1", "kron_series_1_abs", "kron_series_2")  # of layers whose rows are no ids
SUA = "kron_sua"  # of layers that declare pixels
APPROXIMATIONS = (*EVERY_LAYER, *SERIES, SUA)
GENERIC = "generic"  # as an approximation: claimed by no layer, whatever its form
WANTED = "declared generic"  # the reason of what is
KEPT = "kept"  # among the attributes of a use: a mask [N, S] of the rows that are no padding
CASES = "cases"  # among the attributes of a use that is free of the batch: the number of cases that share it
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
    transposed: bool = False  # the roles of input and output gradient are swapped (a tied output layer)
    part_of: str | None = None  # the composite layer that this use is a part of
    tower: int = 0  # which of the mini-batches that the graph computes at once
    steps: int = 1  # how many uses its rows hold one after another
    steps_in_positions: bool = False  # time-major along the positions, not along the cases
    made: Mapping[str, tuple[Made, Layout]] = field(default_factory=dict)  # until `cut`: roles that are expressions
    region: Region | None = None  # of the layer's matrix, if the parameters are only a part of it
    slopes: tuple[Slope, ...] = ()  # functions between its one parameter and the operation
    slope_side: str | None = None  # what they multiply: gradient rows ("outputs") or rows ("inputs")
    gain_of: tuple[Slope, Layout] | None = None  # the parameter is the gain of these filters, whose matrix is [g, o, i]
    mask_dims: Dims = ()  # of the output, along which the mask in `attrs` goes, if it is not one of rows as it is; one
    # twice if cases and positions are merged in it
    calls: int | None = None  # of its submodule on the first batch, where that is captured on its own: may be any

    @property
    def parameter_set(self) -> frozenset[str]:
        return frozenset(bound.parameter for bound in self.parameters.values())

    @property
    def free(self) -> bool:
        """Whether it does not see the batch: its output's gradient is a sum over the cases."""
        return CASES in self.attrs

    @property
    def matrix(self) -> MatrixForm:
        entry = {role: (bound.parameter, bound.layout) for role, bound in self.parameters.items()}
        return MatrixForm(weight=entry.get("weight"), bias=entry.get("bias"))

    def __str__(self) -> str:
        return f"{self.layer}({', '.join(b.parameter for b in self.parameters.values())})"


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
    approximation: str
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
        """((groups, outputs, inputs), bias) of the rows that statistics are summed over: those of the matrix; for
        "kron_sua" the pixels of the input, [c], with a column of ones."""
        assert self.matrix is not None, "bug in kfac_fx: rows of a generic registration"
        (g, o, i), bias = self.matrix.shape, self.matrix.bias is not None
        return ((g, o, (i - bias) // self.kernel + 1), True) if self.approximation == SUA else ((g, o, i), bias)

    def __str__(self) -> str:
        return f"{self.layer}({', '.join(self.parameters)})"


@dataclass(frozen=True)
class Note:
    """A match or a declaration that did not become a registration, and why."""

    subject: str
    reason: str


@dataclass(frozen=True)
class Submodule:
    """One that was captured on its own; see `passes.submodules`."""

    path: str
    calls: int  # on the first batch; 0: captured without inputs, for none of the examples reached it


@dataclass(frozen=True)
class LossSite:
    """A loss that forward itself computes: its distribution's parameters are a node of the graph."""

    kind: str  # "categorical" | "normal" | "multi_bernoulli"
    inputs: fx.Node
    targets: fx.Node
    reduction: str  # "mean", "sum" or "none", as forward wrote it
    node: fx.Node


@dataclass(frozen=True)
class Options:
    """What the user declared; checked by the `link` pass."""

    linked: Mapping[frozenset[str], str | None] = field(default_factory=dict)
    approximations: Mapping[Any, str] = field(default_factory=dict)
    strict: bool = False
    loss_given: bool = False  # the user named the loss: do not look for one in the graph
    modules: Mapping[str, type] = field(default_factory=dict)  # module path -> class, for approximations by module
    dense_limit: int = 4096  # no factor takes more memory than a dense one of this width
    sampling: Sampling | None = None  # of all input factors


@dataclass(frozen=True)
class PassRecord:
    """What one pass did, for the report."""

    name: str
    nodes: int
    summary: str
    seconds: float


@dataclass(frozen=True)
class Program:
    """A captured graph and what is known of it.

    graph: flat; placeholders are the model's inputs, `get_attr` nodes its parameters and buffers under their names in
        the model, the output node returns what the model returns.
    parameters: trainable parameters by canonical name, the first of its aliases; the same objects as the model's.
    aliases: every name of every trainable parameter -> its canonical name.
    """

    graph: fx.Graph
    root: nn.Module
    parameters: Mapping[str, nn.Parameter]
    aliases: Mapping[str, str]
    options: Options = field(default_factory=Options)
    layers: Mapping[str, Any] = field(default_factory=dict)  # name -> passes.layers.Layer, opaque to the IR
    losses: tuple[LossSite, ...] = ()
    outputs: tuple[fx.Node, ...] = ()  # the nodes behind the losses: the Fisher's outputs
    cases: str | None = None  # the symbolic size of the cases; None if the graph knows no sizes
    mask: fx.Node | None = None  # [N, S], nonzero where a position of a case is no padding; None: everywhere
    mask_dims: tuple[Dims | None, ...] = ()  # of every output, along which the mask goes
    unmasked: tuple[Note, ...] = ()  # uses that the mask does not fit
    made: Mapping[fx.Node, Made] = field(default_factory=dict)  # expressions of parameters that layers may be made of
    pieces: Mapping[str, Piece] = field(default_factory=dict)  # of parameters that are used in pieces, by their names
    behind: Mapping[fx.Node, frozenset[str]] = field(default_factory=dict)  # the pieces that a node is made of
    matches: tuple[Use, ...] = ()
    registrations: tuple[Registration, ...] = ()
    unused: tuple[str, ...] = ()
    dropped: tuple[Note, ...] = ()
    history: tuple[PassRecord, ...] = ()
    submodules: tuple[Submodule, ...] = ()  # whose graphs these are; none: the graph is the whole model
    left: tuple[Note, ...] = ()  # modules that stay Python, and why
    python: Mapping[str, str] = field(default_factory=dict)  # parameters that this Python reads, "read at net.py:12"

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Canonical name -> all of a parameter's names."""
        names: dict[str, list[str]] = {}
        for alias, name in self.aliases.items():
            names.setdefault(name, []).append(alias)
        return {name: tuple(all_) for name, all_ in names.items()}

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Of what is registered: parameters, and pieces in the place of those that are used in pieces."""
        found: dict[str, Shape] = {}
        for name, parameter in self.parameters.items():
            whole = tuple(parameter.shape)
            for part in self.parts(name):
                found[part] = self.pieces[part].shape(whole) if part in self.pieces else whole
        return found

    def owner(self, name: str) -> str:
        """The parameter that a name in `shapes` belongs to."""
        return self.pieces[name].parameter if name in self.pieces else name

    def parts(self, parameter: str) -> tuple[str, ...]:
        """The names in `shapes` of a parameter: those of its pieces in their order, or its own."""
        pieces = tuple(name for name, piece in self.pieces.items() if piece.parameter == parameter)
        return pieces or (parameter,)

    def generic(self, name: str, reason: str | None, approximation: str = "diagonal") -> Registration:
        return Registration("generic", None, (name,), (), approximation, reason, self.pieces_among([name]))

    def pieces_among(self, names: Iterable[str]) -> tuple[Piece, ...]:
        return tuple(self.pieces[name] for name in names if name in self.pieces)

    def but(self, **changes: Any) -> Program:
        return replace(self, **changes)

    def __str__(self) -> str:
        lines = [f"{len(self.graph.nodes)} nodes, {len(self.parameters)} parameters"]
        lines += [f"match         {use} at {where(use.output)}" for use in self.matches]
        lines += [f"registration  {r} {r.approximation}, {len(r.uses)} uses" for r in self.registrations]
        lines += [f"dropped       {note.subject}: {note.reason}" for note in self.dropped]
        lines += [f"unused        {name}" for name in self.unused]
        return "\n".join(lines)


Pass = Callable[[Program], Program]


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


def tensor_attrs(use: Use) -> dict[str, fx.Node]:
    """Attributes that are tensors at run time and that rows may need; `other` and `_...` are only there to match."""
    nodes = {key: value for key, value in use.attrs.items() if isinstance(value, fx.Node)}
    return {key: value for key, value in nodes.items() if key != "other" and not key.startswith("_")}
