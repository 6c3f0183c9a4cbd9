"""The form of a layer's declaration: the graph it looks like, how its tensors become rows, an example for the tests.

    @layer(rows=as_rows, grad_rows=as_rows, example=lambda: (nn.Linear(5, 3), torch.randn(4, 7, 5)))
    def linear(x, *, weight, bias=None):
        return F.linear(x, weight, bias)

Positional arguments of the form are the input and then attributes; keyword-only arguments are the parameters, named
`weight` and `bias`, with the default None where the layer also exists without. Nothing else in the project names a
layer.

Rows are [N, S, i] or, for a layer with g groups, [N, S, g, i]: N cases, S weight-sharing positions, i inputs without
the bias column; integer rows [N, S] are one-hot, -1 stands for no input at all. Gradient rows are [N, S, o] or
[N, S, g, o]. N = 1 in the rows stands for an input that all cases share. The declaration is right if
`sum over n, s of grad_rows[n, s] rows[n, s]ᵀ` is the gradient of the weight's matrix [g, o, i].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ..approximations import EVERY_LAYER, FROM_PIXELS, WITHOUT_PIXELS
from ..errors import LayerError
from ..ir import Attrs
from ..matrix import Layout

RowsFn = Callable[[Tensor, Attrs], Tensor]
MomentFn = Callable[[Tensor, Attrs], tuple[Tensor, Tensor]]
LayoutSpec = str | Callable[[Layout, Attrs], Layout]
Example = Callable[[], tuple[nn.Module, Tensor]]
ROLES = ("weight", "bias")


@dataclass(frozen=True)
class Form:
    """One way a layer is written. `layouts` lead from the tensors bound to the roles to [g, o, i] and [g, o]."""

    function: Callable[..., Any]
    layouts: Mapping[str, LayoutSpec]
    rows: RowsFn
    grad_rows: RowsFn
    pixels: RowsFn | None
    second_moment: MomentFn | None
    where: Callable[[Attrs], bool]
    sizes: Callable[[Attrs], dict[str, int]]
    leading: bool
    examples: tuple[Example, ...]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)

    def layout(self, role: str, used: Layout, attrs: Attrs) -> Layout:
        """From the tensor in `role` (shape `used.result`) to the layer's matrix. Raises LayerError if none fits."""
        start, spec = Layout(used.result), self.layouts[role]
        if not isinstance(spec, str):
            return spec(start, attrs)
        layout = start.rearrange(spec, **self.sizes(attrs))
        full = 3 if role == "weight" else 2
        return layout if len(layout.result) == full else layout.reshape((1, *layout.result))


@dataclass
class Layer:
    """A declared kind of parameterized map; see the module's docstring.

    `parts` makes it a composite: it matches as a whole, and the matches inside it are registered, one block each.
    """

    name: str
    forms: list[Form]
    default: str
    approximations: tuple[str, ...]
    parts: tuple[str, ...]
    location: str

    @property
    def dense_rows(self) -> bool:
        """Whether its rows are values of their case: no ids, and not routed to experts. Layers of other rows declare
        EVERY_LAYER, the approximations that do not need this."""
        return self.approximations != EVERY_LAYER and not self.parts

    def form(self, *, example: Example | tuple[Example, ...], **changed: Any) -> Callable[[Callable[..., Any]], Form]:
        """Decorator: another way to write the same layer, with examples of its own; `changed` takes `layer`'s other
        arguments, and what is not in it is as in the first form."""

        def add(function: Callable[..., Any]) -> Form:
            first = self.forms[0]
            layouts = {**first.layouts, **changed.pop("layouts", {})}
            form = replace(first, function=function, layouts=layouts, examples=several(example), **changed)
            check_roles(self.name, form)
            self.forms.append(form)
            return form

        return add


def layer(
    *,
    rows: RowsFn,
    grad_rows: RowsFn,
    example: Example | tuple[Example, ...],
    layouts: Mapping[str, LayoutSpec] | None = None,
    sizes: Callable[[Attrs], dict[str, int]] = lambda attrs: {},
    where: Callable[[Attrs], bool] = lambda attrs: True,
    leading: bool = False,
    default: str = "kron",
    approximations: tuple[str, ...] = WITHOUT_PIXELS,
    pixels: RowsFn | None = None,
    second_moment: MomentFn | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Layer]:
    """Declare a layer; see the module's docstring for the form and for what rows are.

    Args:
        rows, grad_rows: from the input, and from the gradient of the output, to rows; `attrs` holds the values of the
            form's other positional arguments (but not of those whose name begins with `_`) and, under "weight" and
            "bias", the shapes of the bound tensors. One with the name `value` is the tensor that is the weight.
        example: a module that contains the layer once, and an input for it; or several.
        layouts: views in named axes from a parameter to its matrix, where they are not "o i -> o i" and "o -> o".
        sizes: sizes of named axes that a shape alone does not give, from the attributes.
        where: refuses a match by its attributes; an attribute that is computed in the graph is a node there.
        leading: the layer treats all dimensions in front alike, so that any of them may be moved to the front as the
            one that counts cases.
        default: the Fisher block's approximation when the user asks for none.
        pixels: [N, pixels, g, c], the input without patches, where the rows are patches of it in the order (c, kernel)
            and the weight is [o, c, *kernel]; such a layer has "kron_sua" and its kin, too.
        second_moment: from the input to (Σ r rᵀ [g, i, i], Σ r [g, i]) of all rows, in its precision, where there is a
            shorter way than over the rows.

    Raises LayerError for a form without parameters or with other roles than `weight` and `bias`.
    """

    def declare(function: Callable[..., Any]) -> Layer:
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
            examples=several(example),
        )
        chosen = name or function.__name__
        check_roles(chosen, form)
        known = approximations if pixels is None else (*approximations, *FROM_PIXELS)
        return Layer(chosen, [form], default, known, (), location(function))

    return declare


def composite(
    *,
    parts: tuple[str, ...],
    example: Example | tuple[Example, ...],
    where: Callable[[Attrs], bool] = lambda attrs: True,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Layer]:
    """Declare a layer made of other layers: it wins over its parts, and each part gets a block of its own.

    Its parameters may have any names; the shapes of those that are bound are in `where`'s attributes.
    """

    def declare(function: Callable[..., Any]) -> Layer:
        form = Form(function, {}, no_rows, no_rows, None, None, where, lambda attrs: {}, False, several(example))
        return Layer(name or function.__name__, [form], "", (), parts, location(function))

    return declare


def no_rows(tensor: Tensor, attrs: Attrs) -> Tensor:
    raise AssertionError("bug in kfac_fx: a composite layer has no rows of its own")


def several(example: Example | tuple[Example, ...]) -> tuple[Example, ...]:
    return example if isinstance(example, tuple) else (example,)


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
    """Layers by name. Raises LayerError for a second declaration of one name, with both places, and for anything else
    than a declaration."""
    layers: dict[str, Layer] = {}
    for one in declared:
        if not isinstance(one, Layer):
            given = one.__name__ if isinstance(one, type) else type(one).__name__
            raise LayerError(f"layers=[...] takes what @kfac_fx.layer(...) makes of a function, and got {given}")
        if one.name in layers:
            raise LayerError(f"layer {one.name!r} declared twice: {layers[one.name].location} and {one.location}")
        layers[one.name] = one
    return layers
