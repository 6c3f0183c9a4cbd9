"""The data that passes exchange: a captured graph, the uses of its parameters, and the registrations made of them.

A `Program` holds the graph and all that is known about it so far; a pass takes one and returns another. A `Use` is one
application of a layer. A `Registration` holds the parameters and the uses that one Fisher block is made from. All are
frozen, and no class here holds a function: a layer is a name, so a Program prints, compares and pickles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from .approximations import APPROXIMATIONS, PER_CASE, Approximation, Matrix, Side, Statistic
from .errors import plural, where
from .matrix import Layout, MatrixForm, Shape
from .parametrization import ParameterExpr, Parametrization, Piece, Transposed, Value, with_nodes

# --- uses -------------------------------------------------------------------------------------------------------------

Attrs = Mapping[str, Any]
Dims = tuple[int, ...]
ROW_MASK = "kept"  # among the attributes of a use: a mask [N, S] of the rows that are no padding
CASES = "cases"  # among the attributes of a use that is free of the batch: the number of cases that share it
# Among the attributes of a use that adds its bias: the order of the output's dimensions in the sum; None: not known.
ADDED = "added"
STEP = "step"  # in the meta of a node: at which step of a recurrent layer it is, and of how many
NUMBER = "kfac_fx_submodule"  # in the meta of a node of several submodules' graphs side by side: which it belongs to
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
    loss_mask: whether the mask is that of a loss: rows that it leaves out count if they have a gradient, as those of
        a prompt that attention reads.
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
    loss_mask: bool = False
    calls: int | None = None

    @cached_property
    def parameter_set(self) -> frozenset[str]:
        return frozenset(bound.parameter for bound in self.parameters.values())

    @property
    def batch_independent(self) -> bool:
        """Whether it does not see the batch: the gradient of its output is a sum over the cases."""
        return CASES in self.attrs

    @property
    def is_complex(self) -> bool:
        """Whether the graph says that its output is of complex numbers."""
        value = self.output.meta.get("val")
        return isinstance(value, Tensor) and value.is_complex()

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
CONTAINED = "contained in {}, which is kept"  # the reason of a match that a larger one has, as is usual


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
        """How many places of the input meet in one row: the size of the kernel of a weight [o, c, *kernel], and 1 for
        layers that are no convolutions."""
        weight = None if self.matrix is None else self.matrix.weight
        positions = () if weight is None else weight[1].shape[2:]
        convolved = bool(positions) and (self.structure.needs_pixels or "stride" in self.uses[0].attrs)
        return prod(positions) if convolved else 1

    @property
    def rows(self) -> tuple[Matrix, bool]:
        """((groups, outputs, inputs), bias) of the rows that statistics are summed over: those of the matrix;
        for an approximation that needs pixels those of the input, [c], with a column of ones."""
        assert self.matrix is not None, "bug in kfac_fx: rows of a generic registration"
        (g, o, i), bias = self.matrix.shape, self.matrix.bias is not None
        return ((g, o, (i - bias) // self.kernel + 1), True) if self.structure.needs_pixels else ((g, o, i), bias)

    def statistic(self, side: Side) -> Statistic:
        """The sum that the factor of a side is made of."""
        outputs, inputs = self.blocks
        return side.statistic.in_blocks({"A": inputs, "G": outputs}.get(side.factor, 1))

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The sums that taps and links compute; () if the block needs the gradient of the batch."""
        approximation = self.structure
        left, right = approximation.left, approximation.right
        if self.generic:
            return ()
        if right is not None:
            return approximation.count, self.statistic(right), self.statistic(left), *approximation.lagged
        # The square of a sum over uses is not the sum of squares: several uses of one case must add up first.
        if self.one_use_a_case and (left.diagonal or len(self.uses) > 1):
            return (left.statistic,)
        return (PER_CASE,)

    def factor_shape(self, side: Side, matrix: Matrix) -> Shape:
        """The shape of the factor of a side. matrix: [g, o, i] of the block's vectors."""
        return self.statistic(side).shape(self.rows[0] if self.structure.needs_pixels else matrix)

    def factor_shapes(self, elements: int) -> dict[str, Shape]:
        """The shapes of the block's factors by name, without numbers such as the positions; a diagonal F is flat.

        elements: of the parameters.
        """
        approximation = self.structure
        if approximation.right is None:
            return {"F": (elements,) if approximation.left.diagonal else (elements, elements)}
        matrix, sides = self.rows[0], (approximation.right, approximation.left)
        shapes = {side.factor: self.factor_shape(side, matrix) for side in sides}
        return shapes | {lagged.name: lagged.shape(matrix) for lagged in approximation.lagged if lagged.side}

    def __str__(self) -> str:
        return f"{self.layer}({', '.join(self.parameters)})"


# --- a captured graph -------------------------------------------------------------------------------------------------


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
    read: bool = False  # it is one operation of the Python between the others, and `path` says which


@dataclass(frozen=True)
class Way:
    """The operations from a loss that forward computes to the losses that it returns; see `passes.losses`.

    nodes: in the order of the graph; the first is the loss. ends: the returned ones among them.
    dropped: operands of sums that are no part of the loss.
    linear: whether the returned loss is linear in this one.
    elementwise: whether a weight of zero says that a row is left out, whatever its value.
    constant: the weight of the loss where it is the same for all inputs; None: it depends on the inputs.
    divisors: the single numbers that the loss is divided by, nodes or constants, each with the exponent 1; or with -1
        if the loss is multiplied with the inverse.
    of_outputs: whether the weight depends on the inputs of losses, without a gradient, as that of a causal loss.
    unknown: factors and divisors that the inputs do not tell, which count as one.
    """

    nodes: tuple[fx.Node, ...]
    ends: tuple[fx.Node, ...]
    dropped: tuple[fx.Node, ...] = ()
    linear: bool = True
    elementwise: bool = True
    constant: float | None = None
    divisors: tuple[tuple[Any, int], ...] = ()
    of_outputs: bool = False
    unknown: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class LossSite:
    """A loss that forward itself computes: its distribution's parameters are a node of the graph."""

    loss: str  # the name of torch's function, see `torch_losses.BY_NAME`
    inputs: fx.Node
    targets: fx.Node
    reduction: str  # "mean", "sum" or "none", as forward wrote it
    node: fx.Node
    ignored: Any = None  # the target that is no case, a number or a node; None: every target is one
    class_weights: Any = None  # of the classes, a node; None: all are 1
    way: Way | None = None  # to what forward returns; None: it cannot be followed
    chunk_of: int = 0  # the loss that it is computed as a part of, over some of its rows: the number of the first part


@dataclass(frozen=True)
class Options:
    """The declarations of the user, which the `link` pass checks."""

    linked: Mapping[frozenset[str], str | None] = field(default_factory=dict)
    approximations: Mapping[Any, str] = field(default_factory=dict)
    strict: bool = False
    loss_given: bool = False  # the user named the loss: do not look for one in the graph
    batch_dim: int | None = None  # the dimension of the cases in the inputs, as the user said
    modules: Mapping[str, type] = field(default_factory=dict)  # module path -> class, for approximations by module
    dense_limit: int = 4096  # no factor takes more memory than a dense one of this width
    sampling: Sampling | None = None  # of all input factors
    pieces: tuple[Piece, ...] = ()  # asked for by name: parameters are cut here, too, if their uses allow it

    @cached_property
    def groups(self) -> Mapping[str, frozenset[str]]:
        """Parameter -> the linked group that it is in."""
        return {name: group for group in self.linked for name in group}

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """Those keys of `approximations` that have wildcards."""
        return tuple(key for key in self.approximations if isinstance(key, str) and any(c in key for c in "*?["))

    @cached_property
    def classes(self) -> tuple[type, ...]:
        """Those keys of `approximations` that are classes of modules."""
        return tuple(key for key in self.approximations if isinstance(key, type))


@dataclass(frozen=True)
class PassRecord:
    """The record of one pass, for the report."""

    name: str
    nodes: int
    summary: str
    seconds: float


ELEMENTS = "elements"  # in a node's meta, with nodes in it: see `passes.parametrizations.tables`
# The fields of a Program that refer to nodes.
WITH_NODES = (
    "losses",
    "returned_losses",
    "cut",
    "unsized",
    "outputs",
    "mask",
    "parameter_exprs",
    "behind",
    "matches",
    "registrations",
)


Copies = dict[fx.Node, fx.Node]  # old node -> new node
Autocast = tuple[tuple[str, torch.dtype], ...]  # kinds of devices for which it is on, with its dtypes


def copy_nodes(
    nodes: Iterable[fx.Node],
    graph: fx.Graph,
    write: Callable[[fx.Node], fx.Node | None] = lambda _: None,
    copies: Copies | None = None,
) -> Copies:
    """Copy nodes, with their meta, to the end of another graph. Returns the copies of all nodes.

    Args:
        nodes: in the order of their graph.
        write: writes the node that stands for a node, where that is not its copy.
        copies: of nodes before these.
    """
    copies, nodes = {} if copies is None else copies, list(nodes)
    for node in nodes:
        copies[node] = write(node) or graph.node_copy(node, copies.__getitem__)
    for node in nodes:
        if ELEMENTS in node.meta:
            copies[node].meta[ELEMENTS] = with_nodes(node.meta[ELEMENTS], copies)
    return copies


def returned_by(graph: fx.Graph) -> Any:
    """The argument of the graph's output node."""
    (output,) = graph.find_nodes(op="output")
    return output.args[0]


LABELED_BY = {"graph", "root", "parameters", "cases"}  # the fields of a Program that `labeled` depends on


@dataclass(frozen=True)
class Program:
    """A captured graph and what is known of it.

    graph: flat; placeholders are the model's inputs, `get_attr` nodes its parameters and buffers under their names in
        the model, the output node returns what the model returns.
    parameters: trainable parameters by canonical name, the first of its aliases; the same objects as the model's, or
        the real and imaginary parts of a complex one.
    aliases: every name of every trainable parameter -> its canonical name.
    """

    graph: fx.Graph
    root: nn.Module
    parameters: Mapping[str, nn.Parameter]
    aliases: Mapping[str, str]
    options: Options = field(default_factory=Options)
    layers: Mapping[str, Any] = field(default_factory=dict)  # name -> passes.layers.Layer, opaque to the IR
    losses: tuple[LossSite, ...] = ()
    returned_losses: tuple[fx.Node, ...] = ()  # what forward returns of these losses
    cut: tuple[fx.Node, ...] = ()  # the last activations of their other terms, see `passes.losses`
    unsized: tuple[fx.Node, ...] = ()  # activations of their other terms, in a graph that knows no sizes
    likelihood: bool = True  # whether they are weighted sums of `losses` and nothing else
    named_loss: int | None = None  # which of the returned values forward calls "loss"
    unfollowed: str = ""  # why no loss is known of one that forward seems to return
    lost: bool = False  # whether that one has terms that are known, see `passes.losses`
    outputs: tuple[fx.Node, ...] = ()  # the nodes behind the losses: the Fisher's outputs
    cases: str | None = None  # the symbolic size of the cases; None if the graph knows no sizes
    cases_reason: str = ""  # why this size, where there was a choice
    autocast: Autocast = ()  # of forward's own, which the graph runs under
    told_cases: tuple[tuple[str, str], ...] = ()  # the layers that know their cases, in words, and the size of these
    mask: fx.Node | None = None  # [N, S], nonzero where a position of a case is no padding; None: everywhere
    mask_dims: tuple[Dims | None, ...] = ()  # of every output, along which the mask goes
    unmasked: tuple[Note, ...] = ()  # uses that the mask does not fit
    padded: tuple[Note, ...] = ()  # those of them that may have padding in their rows
    parameter_exprs: Mapping[fx.Node, ParameterExpr] = field(
        default_factory=dict
    )  # expressions of parameters that layers may be made of
    pieces: Mapping[str, Piece] = field(default_factory=dict)  # of parameters that are used in pieces, by their names
    behind: Mapping[fx.Node, frozenset[str]] = field(default_factory=dict)  # the pieces that a node is made of
    matches: tuple[Use, ...] = ()
    nowhere: Mapping[str, str] = field(default_factory=dict)  # the user's layers without a match, and why
    registrations: tuple[Registration, ...] = ()
    unused: tuple[str, ...] = ()
    dropped: tuple[Note, ...] = ()
    history: tuple[PassRecord, ...] = ()
    submodules: tuple[Submodule, ...] = ()  # whose graphs these are; none: the graph is the whole model
    left: tuple[Note, ...] = ()  # modules that stay Python, and why
    python: Mapping[str, str] = field(default_factory=dict)  # parameters that this Python reads, "read at net.py:12"
    labeled: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # by `graphs.labels.once`

    @property
    def inputs(self) -> list[fx.Node]:
        """The model's inputs, in the order of the graph."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def returned(self) -> Any:
        """The nodes that the graph returns, in the structure that the model returns."""
        return returned_by(self.graph)

    @cached_property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Canonical name -> all of a parameter's names."""
        names: dict[str, list[str]] = {}
        for alias, name in self.aliases.items():
            names.setdefault(name, []).append(alias)
        return {name: tuple(all_) for name, all_ in names.items()}

    @cached_property
    def unrolled(self) -> bool:
        """Whether the graph has the steps of recurrent layers."""
        return any(UNROLLED in node.meta for node in self.graph.nodes)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of parameters, and of pieces instead of the parameters that are used in pieces."""
        shapes: dict[str, Shape] = {}
        for name, parameter in self.parameters.items():
            whole = tuple(parameter.shape)
            for part in self.parts(name):
                shapes[part] = self.pieces[part].shape(whole) if part in self.pieces else whole
        return shapes

    @cached_property
    def case_dims(self) -> tuple[int, ...]:
        """The dimension of the cases in every one of `outputs`; 0 where no dimension has their size."""
        sizes = [[str(size) for size in getattr(node.meta.get("val"), "shape", ())] for node in self.outputs]
        return tuple(shape.index(self.cases) if self.cases in shape else 0 for shape in sizes)

    def owner(self, name: str) -> str:
        """The parameter that a name in `shapes` belongs to."""
        return self.pieces[name].parameter if name in self.pieces else name

    def parts(self, parameter: str) -> tuple[str, ...]:
        """The names in `shapes` of a parameter: those of its pieces in their order, or its own."""
        return tuple(self.pieces_of.get(parameter, (parameter,)))

    @cached_property
    def pieces_of(self) -> Mapping[str, list[str]]:
        """Parameter that is used in pieces -> their names in their order."""
        names: dict[str, list[str]] = {}
        for name, piece in self.pieces.items():
            names.setdefault(piece.parameter, []).append(name)
        return names

    def generic(self, name: str, reason: str | None, approximation: str = "diagonal") -> Registration:
        return Registration("generic", None, (name,), (), approximation, reason, self.pieces_among([name]))

    def pieces_among(self, names: Iterable[str]) -> tuple[Piece, ...]:
        return tuple(self.pieces[name] for name in names if name in self.pieces)

    def but(self, **changes: Any) -> Program:
        """The same Program with other values of some fields."""
        if LABELED_BY.isdisjoint(changes):
            return replace(self, **changes)
        return replace(self, **{"labeled": {}, **changes})

    def on(self, graph: fx.Graph, nodes: Mapping[fx.Node, fx.Node]) -> Program:
        """The same Program on another graph. nodes: the nodes of the other graph, by those of this one."""
        return self.but(graph=graph, **{name: with_nodes(getattr(self, name), nodes) for name in WITH_NODES})

    def copied(self) -> Program:
        """The same on a graph of its own, for passes that write into it: other Programs may share the one of this."""
        graph = fx.Graph()
        return self.on(graph, copy_nodes(self.graph.nodes, graph))

    def __str__(self) -> str:
        """The graph as Python, without torch's deletions of names, then what the passes have found in it."""
        source = self.graph.python_code("self").src.strip()
        lines = [re.sub(r";  [\w = ]+ = None$", "", source, flags=re.MULTILINE), ""]
        lines += [f"{len(self.graph.nodes)} nodes, {len(self.parameters)} parameters"]
        lines += [f"match         {use} at {where(use.output)}" for use in self.matches]
        lines += [f"registration  {r} {r.approximation}, {plural(len(r.uses), 'use')}" for r in self.registrations]
        lines += [f"dropped       {note.subject}: {note.reason}" for note in self.dropped]
        lines += [f"unused        {name}" for name in self.unused]
        return "\n".join(lines)


Pass = Callable[[Program], Program]
