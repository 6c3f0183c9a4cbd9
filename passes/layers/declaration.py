"""The declaration of a layer: the graph it looks like, how its tensors become rows, and an example for the tests.

    @layer(rows=as_rows, grad_rows=as_rows, example=lambda: (nn.Linear(5, 3), torch.randn(4, 7, 5)))
    def linear(x, *, weight, bias=None):
        return F.linear(x, weight, bias)

The compiler and the blocks know matrices and rows, and read layers off their declarations. So do the kinds of TF
K-FAC, which a LayerCollection registers by hand, and the tables of torch's functions in `graphs/operations.py`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..approximations import APPROXIMATIONS, EVERY_LAYER, FROM_PIXELS, WITHOUT_PIXELS
from ..errors import LayerError, nearest
from ..graphs.operations import Spelling, spell
from ..ir import ADDED, CASES, ROW_MASK, Attrs
from ..matrix import Layout, Shape, named_axes

RowsFn = Callable[[Tensor, Attrs], Tensor]
MomentFn = Callable[[Tensor, Attrs], tuple[Tensor, Tensor]]
LayoutSpec = str | Callable[[Layout, Attrs], Layout]
BiasShape = Callable[[Attrs, int | None], Shape | None]
Example = Callable[[], tuple[nn.Module, Tensor]]
ROLES = ("weight", "bias")
INNER = (ADDED, CASES, ROW_MASK, "other")  # attributes that are for the compiler, as are "_..." and "0.index"


@dataclass(frozen=True)
class Form:
    """One way to write a layer. The fields are the arguments of `layer`.

    `layouts` lead from the tensors in the roles "weight" and "bias" to the matrices [g, o, i] and [g, o].
    """

    function: Callable[..., Any]
    layouts: Mapping[str, LayoutSpec]
    rows: RowsFn
    grad_rows: RowsFn
    pixels: RowsFn | None
    second_moment: MomentFn | None
    where: Callable[[Attrs], bool]
    sizes: Callable[[Attrs], dict[str, int]]
    leading: bool
    bias_along: int | BiasShape | None
    examples: tuple[Example, ...]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the positional arguments: the input, then attributes."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The names of the parameters."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)

    @cached_property
    def needs_bias(self) -> bool:
        """Whether the form has a bias, and not as an option."""
        bias = inspect.signature(self.function).parameters.get("bias")
        return bias is not None and bias.default is inspect.Parameter.empty

    def takes_bias(self, attrs: Attrs, order: Shape | None) -> bool:
        """Whether the sum of the form's output and a bias of shape attrs["bias"] is one layer: the bias varies along
        all groups and outputs, and along nothing else.

        order: of the output's dimensions in the sum; None if their number is not known.

        Raises:
            LayerError: the weight has another shape than the layer takes.
        """
        assert self.bias_along is not None, "bug in kfac_fx: a bias that no declaration expects"
        if isinstance(self.bias_along, int):
            g, o, _ = self.layout("weight", Layout(attrs["weight"]), attrs).result
            shape: Shape | None = (1, g * o, *(1,) * (-1 - self.bias_along))
        else:
            shape = self.bias_along(attrs, None if order is None else len(order))
        if shape is None:
            return False
        if order is None or (list(order) == list(range(len(order))) and len(order) <= len(shape)):
            return same_size(attrs["bias"], shape, len(shape))
        along = with_dims(shape, len(order))
        return len(along) == len(order) and same_size(attrs["bias"], tuple(along[dim] for dim in order), len(order))

    def layout(self, role: str, used: Layout, attrs: Attrs) -> Layout:
        """From the tensor in `role`, of shape `used.result`, to the layer's matrix.

        Raises:
            LayerError: the tensor has another shape than the layer takes.
        """
        start, spec = Layout(used.result), self.layouts[role]
        if role == "bias" and ADDED in attrs:
            start = as_in_output(start, attrs[ADDED])
            start = start.reshape((math.prod(start.result),)) if isinstance(spec, str) else start
        if not isinstance(spec, str):
            laid_out = spec(start, attrs)
            if len(laid_out.result) != AXES_OF[role][-1]:
                raise LayerError(f"the layout of {role} leads to {list(laid_out.result)}, {NO_MATRIX[role]}")
            return laid_out
        layout = start.rearrange(spec, **self.sizes(attrs))
        return layout if len(layout.result) == AXES_OF[role][-1] else layout.reshape((1, *layout.result))


def unknown_attribute(error: KeyError, attrs: Iterable[str]) -> str:
    """The text of an attribute that a function of a declaration reads, and that its form has not.

    attrs: the names that the function could read; those of the compiler are not shown.
    """
    key = error.args[0] if error.args else None
    if key in (attrs := list(attrs)):
        return f"a mapping without {key!r}"
    names = [name for name in attrs if name not in INNER and not name.startswith("_") and "." not in name]
    return f"an attribute {key!r} that the form has not: it has {', '.join(names) or 'none'}.{nearest(key, names)}"


def with_dims(shape: Shape, dims: int) -> Shape:
    """The shape with so many dimensions: with sizes of 1 in front, or without those that it has there."""
    extra = len(shape) - dims
    return shape[extra:] if extra > 0 and set(shape[:extra]) == {1} else (1,) * -extra + shape


def same_size(bias: Shape, shape: Shape, dims: int) -> bool:
    return len(bias) <= dims and with_dims(bias, dims) == shape


def as_in_output(bias: Layout, order: Shape | None) -> Layout:
    """A bias that is added to an output with permuted dimensions -> as if it were added to the output itself."""
    if order is None or list(order) == list(range(len(order))):
        return bias
    back = tuple(sorted(range(len(order)), key=order.__getitem__))
    return bias.reshape(with_dims(bias.result, len(order))).permute(back)


@dataclass
class Layer:
    """A declared kind of parameterized map; see the module's docstring.

    Attributes:
        name: the layer's name in reports and in `approximations={...}`.
        forms: the ways to write it; the first gives the others their defaults.
        default: the name of the approximation if the user names none.
        approximations: the names of all that the layer has.
        parts: the layers of a composite, which matches as a whole and registers each part with a block of its own.
        tf_kind: the kind that TF K-FAC counts it among, under which a LayerCollection registers it by hand; None: none.
        location: "file:line" of the first form.
    """

    name: str
    forms: list[Form]
    default: str
    approximations: tuple[str, ...]
    parts: tuple[str, ...]
    location: str
    tf_kind: str | None = None

    @property
    def dense_rows(self) -> bool:
        """Whether its rows are values of their case: no ids, and not routed to experts. Layers of other rows declare
        EVERY_LAYER, the approximations that do not need this."""
        return self.approximations != EVERY_LAYER and not self.parts

    def form(
        self, *, example: Example | tuple[Example, ...], spelled: Spelling | None = None, **changed: Any
    ) -> Callable[[Callable[..., Any]], Form]:
        """Decorator: another way to write the same layer.

        Args:
            example: examples of this form.
            spelled: as of `layer`, of this form.
            changed: arguments of `layer` that differ from the first form's.
        """

        def add(function: Callable[..., Any]) -> Form:
            first, new = self.forms[0], changed.pop("layouts", {})
            layouts = {**first.layouts, **new}
            form = replace(first, function=function, layouts=layouts, examples=as_tuple(example), **changed)
            check_roles(self.name, form)
            check_layouts(self.name, form, new)
            self.forms.append(form)
            if spelled is not None:
                spell(spelled)
            return form

        return add


def layer(
    function: Callable[..., Any] | None = None,
    /,
    *,
    rows: RowsFn | None = None,
    grad_rows: RowsFn | None = None,
    example: Example | tuple[Example, ...] | None = None,
    layouts: Mapping[str, LayoutSpec] | None = None,
    sizes: Callable[[Attrs], dict[str, int]] = lambda attrs: {},
    where: Callable[[Attrs], bool] = lambda attrs: True,
    leading: bool = False,
    bias_along: int | BiasShape | None = None,
    default: str | None = None,
    approximations: tuple[str, ...] = WITHOUT_PIXELS,
    pixels: RowsFn | None = None,
    second_moment: MomentFn | None = None,
    spelled: Spelling | None = None,
    tf_kind: str | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Layer]:
    """Declare a layer. It decorates the form, the computation that the layer is.

    The positional arguments of the form are the input and then attributes. The keyword-only arguments are the
    parameters, `weight` and `bias`, with the default None if the layer also exists without them.

    Rows are [N, S, i] or, for a layer with g groups, [N, S, g, i]: N cases, S weight-sharing positions, i inputs
    without the bias column. Integer rows [N, S] are one-hot, and -1 stands for a row of zeros. Gradient rows are
    [N, S, o] or [N, S, g, o]. Rows with N = 1 belong to an input that all cases share. The declaration is right if
    `sum over n, s of grad_rows[n, s] rows[n, s]ᵀ` is the gradient of the weight's matrix [g, o, i].

    Args:
        rows, grad_rows: functions of (input, attrs) and (gradient of the output, attrs) to rows and gradient rows.
            `attrs` holds the values of the form's other positional arguments, also tensors, except those whose name
            begins with `_`, and under "weight" and "bias" the shapes of the parameters. The value of an argument named
            `value` is the weight itself.
        example: (a module that contains the layer once, an input for it), made by a function; or several of these.
        layouts: views in named axes from a parameter to its matrix, if they are not "o i -> o i" and "o -> o".
        sizes: from the attributes to the sizes of named axes that the shape alone does not give.
        where: whether attributes are those of the layer. Attributes that the graph computes are nodes here.
        leading: whether all dimensions but the last are treated alike, so that any of them may count the cases.
        bias_along: the dimension of the output, counted from its end as -1, that holds the groups and outputs. Then
            `form(x, weight) + bias` is the layer, too, if the bias varies along this dimension and no other. If it is
            not a single dimension: a function of the attributes and the number of the output's dimensions (None where
            the graph does not know it), to the shape of such a bias, as long as it may be (None: there is none).
        default: the approximation if the user names none, one of `approximations`; "kron", or the first without it.
        approximations: the names of the approximations that the layer has.
        pixels: from the input to [N, pixels, g, c], without patches, if rows are its patches in the order (c, kernel)
            and the weight is [o, c, *kernel]. The layer then has "kron_sua" and its relatives, too.
        second_moment: from the input to (Σ r rᵀ [g, i, i], Σ r [g, i]) over all rows, in at least float32, if
            there is a faster way than by the rows. The input may have half precision.
        spelled: torch's function that the form calls, if some of its arguments may be left out; see
            `kfac_fx.passes.graphs.operations.Spelling`.
        tf_kind: for the layers of this library, the kind of TF K-FAC that a LayerCollection registers it as.
        name: the layer's name; the function's, unless given.

    Raises:
        LayerError: the form has no parameters, or others than `weight` and `bias`; or rows, gradient rows or the
            example are missing.
    """
    if function is not None or rows is None or grad_rows is None or example is None:
        raise incomplete(function, {"rows": rows, "grad_rows": grad_rows, "example": example})
    functions = {"rows": rows, "grad_rows": grad_rows, "where": where, "sizes": sizes}
    optional = {"pixels": pixels, "second_moment": second_moment}
    functions |= {argument: value for argument, value in optional.items() if value is not None}
    functions |= {f"example {number}": make for number, make in enumerate(as_tuple(example))}
    refuse_other_arguments(functions, {"layouts": layouts or {}}, approximations)

    def declare(function: Callable[..., Any]) -> Layer:
        refuse_other_arguments({"form": function}, {}, approximations)
        form = Form(
            function=function,
            layouts={"weight": "o i -> o i", "bias": "o -> o", **(layouts or {})},
            rows=rows,
            grad_rows=grad_rows,
            pixels=pixels,
            second_moment=second_moment,
            where=where,
            sizes=sizes,
            leading=leading,
            bias_along=bias_along,
            examples=as_tuple(example),
        )
        layer_name = name or function.__name__
        check_roles(layer_name, form)
        check_layouts(layer_name, form, layouts or {})
        names = approximations if pixels is None else (*approximations, *FROM_PIXELS)
        first = default or ("kron" if "kron" in names else names[0] if names else "")
        check_declared_approximations(layer_name, first, names)
        if spelled is not None:
            spell(spelled)
        return Layer(layer_name, [form], first, names, (), location(function), tf_kind)

    return declare


def incomplete(function: object, given: Mapping[str, object]) -> LayerError:
    """The error for a declaration that lacks some of what every layer has. function: that stands in its place."""
    missing = ", ".join(f"{argument}=" for argument, value in given.items() if value is None)
    of = "" if function is None else f" of {getattr(function, '__name__', type(function).__name__)}"
    return LayerError(
        f"the declaration{of} lacks {missing or 'brackets'}: write @kfac_fx.layer(rows=lambda x, attrs: ..., "
        "grad_rows=lambda dy, attrs: ..., example=lambda: (module, input)) above the form. The rows of a batch are "
        "[N, S, i], its gradient rows [N, S, o], and the example a module that contains the layer once, with an input."
    )


def composite(
    *,
    parts: tuple[str, ...],
    example: Example | tuple[Example, ...],
    where: Callable[[Attrs], bool] = lambda attrs: True,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Layer]:
    """Declare a layer that is made of other layers. It is matched in their place, and each part gets its own block.

    Its parameters may have any names; the attributes that `where` gets include their shapes.
    """

    def declare(function: Callable[..., Any]) -> Layer:
        form = Form(function, {}, no_rows, no_rows, None, None, where, lambda attrs: {}, False, None, as_tuple(example))
        return Layer(name or function.__name__, [form], "", (), parts, location(function))

    return declare


def no_rows(tensor: Tensor, attrs: Attrs) -> Tensor:
    raise AssertionError("bug in kfac_fx: a composite layer has no rows of its own")


def as_tuple(example: Example | tuple[Example, ...]) -> tuple[Example, ...]:
    return example if isinstance(example, tuple) else (example,)


def refuse_other_arguments(functions: Mapping[str, Any], mappings: Mapping[str, Any], names: Any) -> None:
    """Raises LayerError with all arguments of a declaration that are of another kind."""
    wrong = [f"{name} is {value!r}, not a function" for name, value in functions.items() if not callable(value)]
    wrong += [f"{name} is {value!r}, not a dict" for name, value in mappings.items() if not isinstance(value, Mapping)]
    if not isinstance(names, tuple):
        wrong.append(f"approximations is {names!r}, not a tuple of names, as in approximations=('kron', 'diagonal')")
    if wrong:
        raise LayerError("a layer is declared with arguments of another kind: " + "; ".join(wrong))


AXES = re.compile(r"[^\W\d]\w*")
AXES_OF = {"weight": (2, 3), "bias": (1, 2)}  # of the matrix, without and with groups
NO_MATRIX = {
    "weight": "no matrix [o, i] or [g, o, i]: outputs, inputs, and groups before them. () is an axis of size 1, so a "
    "vector of inputs is 'i -> () i', and a vector of outputs 'o -> o ()'",
    "bias": "no bias [o] or [g, o]: outputs, and groups before them. () is an axis of size 1, so a bias of one number "
    "is 'o -> o', and one of every group 'g -> g ()'",
}


def check_layouts(name: str, form: Form, layouts: Mapping[str, LayoutSpec]) -> None:
    """Raises LayerError for layouts of unknown parameters, and for axes on one side only, which would match nothing."""
    place = f"layer {name!r} ({location(form.function)})"
    for role, spec in layouts.items():
        if role not in ROLES:
            raise LayerError(f"{place} has a layout for {role!r}, and not weight or bias.{nearest(role, ROLES)}")
        if callable(spec):
            continue
        left, arrow, right = spec.partition("->")
        axes = [AXES.findall(side) for side in (left, right)]
        if not arrow or sorted(axes[0]) != sorted(axes[1]):
            single = ", ".join(sorted(set(axes[0]) ^ set(axes[1]))) or "none"
            raise LayerError(
                f"{place} has the layout {spec!r} for {role}: every axis must be on both sides of '->' once, as in "
                f"'i o -> o i'; on one side only: {single}"
            )
        if len(named_axes(right)) not in AXES_OF[role]:
            raise LayerError(f"{place} has the layout {spec!r} for {role}, which leads to {NO_MATRIX[role]}")


def check_declared_approximations(name: str, default: str, names: tuple[str, ...]) -> None:
    if not names:
        raise LayerError(f"layer {name!r} has no approximations: name some, as in approximations=('kron', 'diagonal')")
    for approximation in (default, *names):
        if approximation not in APPROXIMATIONS:
            raise LayerError(
                f"layer {name!r}: there is no approximation {approximation!r}.{nearest(approximation, APPROXIMATIONS)}"
            )
    if default not in names:
        raise LayerError(
            f"layer {name!r} has the default {default!r}, which is not among its approximations {', '.join(names)}: "
            "take one of these, or add it to approximations="
        )


def check_roles(name: str, form: Form) -> None:
    wrong = [role for role in form.roles if role not in ROLES]
    if wrong or not form.roles:
        raise LayerError(
            f"layer {name!r} ({location(form.function)}) has parameters {list(form.roles)}; "
            "its form must take `weight`, `bias` or both as keyword-only arguments."
        )


def location(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def collect(*declared: Layer) -> dict[str, Layer]:
    """Layers by name.

    Raises:
        LayerError: two declarations have the same name, or an argument is not a declaration.
    """
    layers: dict[str, Layer] = {}
    for declaration in declared:
        if not isinstance(declaration, Layer):
            kind = declaration.__name__ if isinstance(declaration, type) else type(declaration).__name__
            raise LayerError(f"layers=[...] takes layers that @kfac_fx.layer(...) declares, and got {kind}")
        if other := layers.get(declaration.name):
            places = f"{other.location} and {declaration.location}"
            raise LayerError(
                f"layer {declaration.name!r} is declared twice: {places}. If these are two layers, or one of the "
                f"library and one of your own, rename one: @kfac_fx.layer(..., name='my_{declaration.name}')."
            )
        layers[declaration.name] = declaration
    return layers


def refuse_other_examples(layers: Iterable[Layer]) -> None:
    """Raises LayerError for examples that are no (module, input), as a tensor alone."""
    for of in layers:
        for example in (make() for form in of.forms for make in form.examples):
            module, x = example if isinstance(example, tuple) and len(example) == 2 else (None, None)
            if not (isinstance(module, nn.Module) and isinstance(x, Tensor)):
                raise LayerError(
                    f"the example of layer {of.name!r} ({of.location}) returns a {type(example).__name__} and not "
                    "(module, input): write example=lambda: (Module(...), torch.randn(...)), with a module that "
                    "contains the layer once, and an input for it"
                )


# --- shared by several families: from tensors to rows, and the module of the examples ---------------------------------


def as_rows(tensor: Tensor, attrs: Attrs) -> Tensor:
    """[N, ..., d] -> [N, S, d]. A vector [d] is a single case."""
    if tensor.dim() == 2:  # the most, and every operation counts where a batch is small
        return tensor.unsqueeze(1)
    return tensor.flatten(1, -2) if tensor.dim() > 2 else tensor.view(1, 1, -1)


def by_group(tensor: Tensor, shape: Shape) -> Tensor:
    """[N, ..., d] -> [N, S, g, d]: a group for each element of a parameter of `shape`, which broadcasts with [N, ...].

    If the parameter varies along the first dimension, that dimension does not count cases, and N = 1.
    """
    leading, last = tensor.shape[:-1], tuple(shape)
    if leading[len(leading) - len(last) :] != last:  # which is rare, and `broadcast_shapes` takes 20 µs
        leading = torch.broadcast_shapes(leading, last)
        tensor = tensor.expand(*leading, tensor.shape[-1])
    shape = (1,) * (len(leading) - len(last)) + last
    if not shape or shape[0] != 1:
        tensor, shape = tensor.unsqueeze(0), (1, *shape)
    varies = [dim for dim, size in enumerate(shape) if size != 1]
    shared = [dim for dim, size in enumerate(shape) if size == 1]  # the first counts the cases
    cases, *positions = (tensor.shape[dim] for dim in shared)
    return tensor.permute(*shared, *varies, -1).reshape(cases, math.prod(positions), math.prod(shape), tensor.shape[-1])


def elements(x: Tensor, attrs: Attrs) -> Tensor:
    """[N, ...] -> [N, S, g, 1], for parameters along the last dimensions."""
    return by_group(x.unsqueeze(-1), attrs["weight"])


def weights(weight: Layout, attrs: Attrs) -> Layout:
    return weight.reshape((math.prod(weight.result), 1, 1))


def biases(bias: Layout, attrs: Attrs) -> Layout:
    return bias.reshape((math.prod(bias.result), 1))


ELEMENTWISE: dict[str, Any] = {
    "layouts": {"weight": weights, "bias": biases},
    "bias_along": lambda attrs, dims: attrs["weight"],
    "default": "full",
    "tf_kind": "scale_and_shift",
}


class Written(nn.Module):
    """A module that applies `function` to its input and to parameters of these shapes."""

    def __init__(self, function: Callable[..., Any], shapes: Mapping[str, Shape]) -> None:
        super().__init__()
        self.function, self.names = function, tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, **{name: getattr(self, name) for name in self.names})


def written(function: Callable[..., Any], x: Shape, **shapes: Shape) -> Example:
    """An example: a `Written` module, and an input of shape `x`."""
    return lambda: (Written(function, shapes), torch.randn(x))
