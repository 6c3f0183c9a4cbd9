"""Every layer's declaration, against autograd: each of its examples is captured, matched, and must keep the promise

    sum over n, s of grad_rows[n, s] rows[n, s]ᵀ  =  the gradient, as a matrix [g, o, i]

both in sum and, where the output has a dimension of cases, case by case.
"""

from __future__ import annotations

import copy
import itertools
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import kfac_fx
from kfac_fx.passes import layers
from kfac_fx.passes.check import check, link
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.ir import Program, Use, literal_attrs, tensor_attrs
from kfac_fx.passes.layers import LAYERS, Layer
from kfac_fx.passes.layers.declaration import Example, Form, as_rows, written
from kfac_fx.passes.losses import find_losses
from kfac_fx.passes.match import match
from kfac_fx.passes.matrix import MatrixForm, Shape
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.parametrization import Value
from kfac_fx.passes.pipeline import MATCHED, run
from kfac_fx.passes.resolve import resolve
from kfac_fx.passes.trace import trace_model
from tests.contract.values import Values
from tests.tables import every


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def declared(composite: bool) -> Iterator[Any]:
    for layer in LAYERS.values():
        for form in layer.forms if bool(layer.parts) is composite else ():
            for number, example in enumerate(form.examples):
                name = form.function.__name__
                yield pytest.param(layer.name, form, example, id=f"{layer.name}-{name}-{number}")


def test_every_module_of_layers_is_a_family() -> None:
    modules = {module.name for module in pkgutil.iter_modules(layers.__path__)} - {"declaration"}
    families = {family.__name__.rpartition(".")[2] for family in layers.FAMILIES}
    assert modules == families, "add the module to FAMILIES in passes/layers/__init__.py"


def prepared(example: Example) -> tuple[nn.Module, Tensor]:
    """The example with no parameter or statistic at a value that hides mistakes."""
    module, x = example()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 2.0)
    return nn.Sequential(module).train(
        module.training
    ), x  # as a part of a model: what torch.fx asks of roots is not asked of layers


def matches(module: nn.Module, x: Tensor, exported: bool) -> Program:
    program = find_losses(normalize(trace_model(module, (x,) if exported else None, layers=LAYERS).program))
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    (returned,) = [node for node in output.all_input_nodes if node.op != "placeholder"]
    return match(program.but(outputs=(returned,)))


@cache  # for all tests of the example, which draw what else they need behind it
def computed(example: Example, exported: bool) -> tuple[Program, Values, Tensor]:
    """The program of an example, the values of its nodes, and its input."""
    torch.manual_seed(0)
    module, x = prepared(example)
    program = matches(module, x, exported)
    values = Values(program)
    values.run(x)
    return program, values, x


def largest_use(uses: Sequence[Use], program: Program, layer: str) -> Use:
    """The use with the most operations among those that a test asks for."""
    operations = ", ".join(dict.fromkeys(op_name(node) for node in program.graph.nodes if node.op == "call_function"))
    assert uses, (
        f"no use of the layer {layer} has all parameters of its example, whose graph has the operations {operations}: "
        "the form has to have the same. An operation that is another one with example inputs than without and in "
        "forms, as x[:, order] with a buffer is, has to be written in one way, as x.index_select(1, order), or needs a "
        "rule in passes/graphs/spelling.py."
    )
    return max(uses, key=lambda use: len(use.nodes))


def evaluated(value: Value, values: Mapping[str, Any]) -> Any:
    """The value of a node, or of what `rewrite` computes from nodes."""
    if isinstance(value, fx.Node):
        return values[value.name]
    return value.function(*(values[item.name] if isinstance(item, fx.Node) else item for item in value.arguments))


def rows_of(use: Use, form: Form, values: Mapping[str, Any], grad: Tensor) -> tuple[Tensor, Tensor]:
    """([N, S, g, i with the bias column], [N, S, g, o])"""
    attrs = {**literal_attrs(use), **{key: evaluated(value, values) for key, value in tensor_attrs(use).items()}}
    rows, grad_rows = form.rows(values[use.input.name], attrs), form.grad_rows(grad, attrs)
    grad_rows = grad_rows if grad_rows.dim() == 4 else grad_rows.unsqueeze(2)
    if not rows.is_floating_point():
        rows = (rows.unsqueeze(-1) == torch.arange(use.matrix.shape[2])).to(grad.dtype)
    rows = (rows if rows.dim() == 4 else rows.unsqueeze(2)).to(grad.dtype)
    if "bias" in use.parameters:
        rows = (
            torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)
            if rows.shape[-1]
            else rows.new_ones(*rows.shape[:-1], 1)
        )
    return rows.expand(grad_rows.shape[0], *rows.shape[1:]), grad_rows


def second_moment_of(use: Use, form: Form, values: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    return None if form.second_moment is None else form.second_moment(values[use.input.name], literal_attrs(use))


def gradient(program: Program, matrix: MatrixForm, output: Tensor, grad: Tensor) -> Tensor:
    parameters = [program.parameters[name] for name in matrix.parameters]
    grads = torch.autograd.grad(output, parameters, grad, retain_graph=True)
    return matrix.pack(dict(zip(matrix.parameters, grads, strict=True)))


def ids() -> Tensor:
    return torch.randint(0, 5, (4, 7))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("layer", "form", "example", "exported"),
    [
        pytest.param(
            *case.values, exported, id=f"{case.id}-{way}", marks=pytest.mark.slow if later and exported else ()
        )
        for case, later in ((case, case.id[-1] > "1") for case in declared(composite=False))
        for way, exported in (("symbolic", False), ("exported", True))
    ],
)
def test_rows_make_the_gradient(layer: str, form: Form, example: Example, exported: bool) -> None:
    program, values, _ = computed(example, exported)
    torch.manual_seed(1)
    whole = [use for use in program.matches if use.layer == layer and len(use.parameters) == len(program.parameters)]
    use = largest_use(whole, program, layer)
    assert exported or LAYERS[layer].forms[use.form] is form, "another form takes the example"
    output = values.value[use.output.name]
    grad = torch.randn_like(output)

    rows, grad_rows = rows_of(use, LAYERS[layer].forms[use.form], values.value, grad)

    assert rows.shape[:3] == grad_rows.shape[:3]
    assert (rows.shape[2], grad_rows.shape[3], rows.shape[3]) == use.matrix.shape
    moment = second_moment_of(use, LAYERS[layer].forms[use.form], values.value)
    if moment is not None:
        own = rows[..., :-1] if "bias" in use.parameters else rows
        torch.testing.assert_close(moment, (torch.einsum("nsgi,nsgj->gij", own, own), own.sum((0, 1))))
    found = torch.einsum("nsgo,nsgi->ngoi", grad_rows, rows)
    torch.testing.assert_close(found.sum(0), gradient(program, use.matrix, output, grad))
    if len(found) > 1:
        dim = output.shape.index(len(found))  # the one dimension of this size
        for case, case_rows in enumerate(found):
            alone = torch.zeros_like(grad)
            alone.select(dim, case).copy_(grad.select(dim, case))
            torch.testing.assert_close(case_rows, gradient(program, use.matrix, output, alone))


def indexed(select: Callable[[Tensor, Tensor], Tensor]) -> Layer:
    """A layer that reads the inputs in the order of a buffer."""

    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5))
            self.register_buffer("order", torch.tensor([1, 0, 2, 4, 3]))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(select(x, self.order)), self.weight)  # type: ignore[arg-type]

    @kfac_fx.layer(rows=as_rows, grad_rows=as_rows, example=lambda: (Ordered(), torch.randn(4, 5)))
    def ordered(x: Tensor, order: Tensor, *, weight: Tensor) -> Tensor:
        return F.linear(torch.tanh(select(x, order)), weight)

    return ordered


def test_a_form_that_its_example_does_not_have_is_told_with_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_of(layer: Layer, exported: bool) -> Use:
        monkeypatch.setitem(LAYERS, "ordered", layer)
        program = matches(*prepared(layer.forms[0].examples[0]), exported)
        return largest_use([use for use in program.matches if use.layer == "ordered"], program, "ordered")

    by_brackets, by_name = indexed(lambda x, order: x[:, order]), indexed(lambda x, order: x.index_select(1, order))
    assert use_of(by_brackets, exported=False).layer == "ordered"
    with pytest.raises(AssertionError, match=r"no use of the layer ordered .* operations .*index.*, tanh, linear"):
        use_of(by_brackets, exported=True)
    assert use_of(by_name, exported=False).layer == use_of(by_name, exported=True).layer == "ordered"


@pytest.mark.parametrize(
    ("layer", "form", "example"), every(6, [case for case in declared(composite=False) if case.id.endswith("-0")])
)
def test_rows_compile_without_graph_breaks(layer: str, form: Form, example: Example) -> None:
    torch.compiler.reset()
    program, values, _ = computed(example, exported=False)
    use = largest_use([use for use in program.matches if use.layer == layer], program, layer)
    grad = torch.randn_like(values.value[use.output.name])

    known = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.value.items()}

    def both(grad: Tensor) -> tuple[Tensor, Tensor]:
        return rows_of(use, LAYERS[layer].forms[use.form], known, grad)

    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend="eager")(grad), both(grad))


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize(("layer", "form", "example"), list(declared(composite=True)))
def test_a_composite_is_found_whole_and_in_parts(layer: str, form: Form, example: Example, exported: bool) -> None:
    program = matches(*prepared(example), exported)
    whole = next(use for use in program.matches if use.layer == layer)
    parts = {use.layer: use.parameter_set for use in program.matches if use.nodes < whole.nodes}
    assert set(parts) == set(LAYERS[layer].parts)
    assert frozenset().union(*parts.values()) == whole.parameter_set


NOT_SEPARABLE = {
    "the second kernel is wide": [{"groups": 4}, {"kernel_size": 3}],
    "the second strides": [{"groups": 4}, {"kernel_size": 1, "stride": 2}],
    "the second is grouped": [{"groups": 4}, {"kernel_size": 1, "groups": 2}],
    "the first is not depthwise": [{"groups": 2}, {"kernel_size": 1}],
}


@pytest.mark.parametrize("options", NOT_SEPARABLE.values(), ids=NOT_SEPARABLE.keys())
def test_other_pairs_of_convolutions_are_not_separable(options: list[dict[str, Any]]) -> None:
    first, second = ({"kernel_size": 3, **given} for given in options)
    pair = nn.Sequential(nn.Conv2d(4, 8, **first), nn.Conv2d(8, 6, **second))
    found = matches(pair, torch.randn(3, 4, 9, 7), exported=False).matches
    assert len(found) == 2
    assert not any(LAYERS[use.layer].parts for use in found)


NO_LAYER: dict[str, Example] = {
    "embedding that renormalizes its weight": lambda: (nn.Embedding(5, 3, max_norm=1.0), ids()),
    "embedding that scales its gradient": lambda: (nn.Embedding(5, 3, scale_grad_by_freq=True), ids()),
    "largest of a bag": lambda: (nn.EmbeddingBag(5, 3, mode="max"), ids()),
    "einsum that sums the weight": written(lambda x, w: torch.einsum("ni,ijo->no", x, w), (4, 5), w=(5, 2, 3)),
    "einsum of a diagonal": written(lambda x, w: torch.einsum("ni,ii->ni", x, w), (4, 5), w=(5, 5)),
    "base of a power": written(lambda x, w: w.exp() ** x, (4, 5), w=(5,)),
    "side of a triangle": written(lambda x, w: torch.hypot(x, w), (4, 5), w=(5,)),
    "rest of a division": written(lambda x, w: x % w, (4, 5), w=(5,)),
}


@pytest.mark.parametrize("example", NO_LAYER.values(), ids=NO_LAYER.keys())
def test_what_is_not_linear_in_the_parameters_or_not_in_their_gradient_is_no_layer(example: Example) -> None:
    assert matches(*prepared(example), exported=False).matches == ()


# --- a form and its bias are one block --------------------------------------------------------------------------------


class Sums(nn.Module):
    """Copies of a module with a bias each: `shapes` of those added to its output, `turned` to its output turned around,
    as they are before the turn."""

    def __init__(self, module: nn.Module, shapes: Sequence[Shape], turned: Sequence[Shape]) -> None:
        super().__init__()
        self.order, self.plain = tuple(reversed(range(len(shapes[0])))), len(shapes)
        both = [*shapes, *(shape[::-1] for shape in turned)]
        self.copies = nn.ModuleList(copy.deepcopy(module) for _ in both)
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in both)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = [module(x) for module in self.copies]
        turned = [output.permute(self.order) for output in outputs[self.plain :]]
        return tuple(output + bias for output, bias in zip(outputs[: self.plain] + turned, self.biases, strict=True))


def without_bias() -> Iterator[Any]:
    """The examples that have one parameter, which is a weight, and return the output of the form."""
    for param in declared(composite=False):
        name, form, example = param.values
        one = form.roles[0] == "weight" and len(list(example()[0].parameters())) == 1
        if one and not form.inputs[0].startswith("_"):
            marks = () if str(param.id).endswith("-0") else pytest.mark.slow
            yield pytest.param(name, form, example, id=param.id, marks=marks)


def bias_shapes(output: Tensor) -> list[Shape]:
    """All shapes that a bias can have which is as large as the output along some dimensions, and has all dimensions."""
    return sorted(set(itertools.product(*((1, size) for size in output.shape))))


def is_a_bias(shape: Shape, layer: str, form: Form, use: Use, values: Mapping[str, Any]) -> bool:
    """Whether an added tensor of this shape is a column of the matrix: it has one element for every group and output,
    and the same one for all cases and positions."""
    if not LAYERS[layer].dense_rows:
        return False
    number = math.prod(shape)
    numbers = torch.arange(number).to(torch.float64).view(shape).expand(values[use.output.name].shape)
    _, elements = rows_of(use, form, values, numbers)
    groups, outputs, _ = use.matrix.shape
    constant = bool((elements == elements[:1, :1]).all())
    return constant and sorted(elements[0, 0].flatten().tolist()) == list(range(number)) and number == groups * outputs


def registered(module: nn.Module, x: Tensor, exported: bool) -> Program:
    program = find_losses(normalize(trace_model(module, (x,) if exported else None, layers=LAYERS).program))
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    (returned,) = output.args
    assert isinstance(returned, (tuple, list))
    return run(program.but(outputs=tuple(returned)), (link, *MATCHED, resolve, check))


def bias_column(use: Use, layer: str, values: Mapping[str, Any], last: Tensor) -> tuple[Tensor, Tensor]:
    """(the gradient by rows, the gradient of autograd) of the sum `last`, both [g, o, i]."""
    form, grad = LAYERS[layer].forms[use.form], torch.randn_like(last)
    parameters = {name: values[name.replace(".", "_")] for name in use.matrix.parameters}
    at_output, *grads = torch.autograd.grad(last, [values[use.output.name], *parameters.values()], grad)
    rows, grad_rows = rows_of(use, form, values, at_output)
    exact = use.matrix.pack(dict(zip(parameters, grads, strict=True)))
    return torch.einsum("nsgo,nsgi->goi", grad_rows, rows), exact


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("every_turn", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("layer", "form", "example", "exported"),
    [
        *(
            pytest.param(*case.values, False, id=f"{case.id}-symbolic", marks=case.marks)
            for case in every(4, without_bias())
        ),
        *(pytest.param(*case.values, True, id=f"{case.id}-exported", marks=case.marks) for case in without_bias()),
    ],
)
def test_a_form_and_its_bias_are_one_block_and_other_sums_are_not(
    layer: str, form: Form, example: Example, exported: bool, every_turn: bool
) -> None:
    """every_turn: whether biases of all shapes are added to the turned output, and not only those that are a column of
    the matrix, and the smallest and the largest."""
    program, values, x = computed(example, exported=True)
    torch.manual_seed(1)
    module, _ = prepared(example)
    use = largest_use([use for use in program.matches if use.layer == layer], program, layer)
    output = values.value[use.output.name]
    shapes = bias_shapes(output)
    columns = [is_a_bias(shape, layer, form, use, values.value) for shape in shapes]
    turned = [n for n, column in enumerate(columns) if every_turn or column or n in (0, len(shapes) - 1)]
    expected = columns + [columns[n] for n in turned]

    program = registered(Sums(module, shapes, [shapes[n] for n in turned]), x, exported)

    blocks = {name: block for block in program.registrations for name in block.parameters}
    joined = [len(blocks[f"biases.{number}"].parameters) == 2 for number in range(len(expected))]
    if exported:
        apart = [
            shape
            for shape, is_joined, is_bias in zip(shapes, joined, expected, strict=False)
            if is_joined is not is_bias
        ]
        assert joined == expected, f"`bias_along` of {layer} fits its rows for no bias of shapes {apart}"
    else:
        assert all(expected[number] for number, one_block in enumerate(joined) if one_block)
    values = Values(program)
    values.run(x)
    for number in (number for number, one_block in enumerate(joined) if one_block):
        (use,) = blocks[f"biases.{number}"].uses
        by_rows, exact = bias_column(use, layer, values.value, values.value[program.outputs[number].name])
        torch.testing.assert_close(by_rows, exact)


def conv2d_of_one_case(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x, w) + b.view(1, -1, 1, 1)


ONE_BLOCK: dict[str, Example] = {
    "conv1d": written(lambda x, w, b: F.conv1d(x, w) + b.view(1, -1, 1), (4, 2, 9), w=(3, 2, 3), b=(3,)),
    "conv2d": written(lambda x, w, b: F.conv2d(x, w) + b, (4, 2, 9, 7), w=(3, 2, 3, 3), b=(3, 1, 1)),
    "conv2d of one case": written(conv2d_of_one_case, (2, 9, 7), w=(3, 2, 3, 3), b=(3,)),
    "conv2d of groups": written(
        lambda x, w, b: F.conv2d(x, w, groups=2) + b[:, None, None], (4, 4, 9, 7), w=(6, 2, 3, 3), b=(6,)
    ),
    "conv_transpose2d": written(
        lambda x, w, b: F.conv_transpose2d(x, w) + b.view(-1, 1, 1), (4, 2, 9, 7), w=(2, 3, 3, 3), b=(3,)
    ),
    "depthwise conv2d": written(
        lambda x, w, b: b.view(-1, 1, 1) + F.conv2d(x, w, groups=4), (4, 4, 9, 7), w=(8, 1, 3, 3), b=(8,)
    ),
    "bilinear": written(lambda x, w, b: F.bilinear(x, x[..., :2].sin(), w) - b, (4, 5), w=(3, 5, 2), b=(3,)),
    "product with a vector, and a number": written(lambda x, w, b: x @ w + b, (4, 5), w=(5,), b=()),
    "product with a vector, and one element": written(lambda x, w, b: x @ w + b, (4, 7, 5), w=(5,), b=(1,)),
    "linear with one output, and a number": written(lambda x, w, b: F.linear(x, w) + b, (4, 5), w=(1, 5), b=()),
    "linear and a row": written(lambda x, w, b: b + F.linear(x, w), (4, 5), w=(3, 5), b=(1, 3)),
    "addmm and a row": written(lambda x, w, b: torch.addmm(b, x, w), (4, 5), w=(5, 3), b=(1, 3)),
    "scale and a shift of fewer dimensions": written(lambda x, w, b: b + x * w, (4, 7, 5), w=(1, 5), b=(5,)),
    "scale and shift": written(lambda x, w, b: x.mul(w).add_(b), (4, 7, 2, 5), w=(7, 1, 5), b=(7, 1, 5)),
    "scale from one and shift": written(lambda x, w, b: x * (w + 1.0) + b, (4, 7, 5), w=(5,), b=(5,)),
}
ONE_BLOCK_IF_SIZES_ARE_KNOWN: dict[str, Example] = {
    "bmm of experts, turned back": written(
        lambda x, w, b: torch.bmm(x.transpose(0, 1), w).transpose(0, 1) + b, (4, 2, 5), w=(2, 5, 3), b=(2, 3)
    ),
    "product from the left, turned back": written(lambda x, w, b: (w @ x.T).T + b, (4, 5), w=(3, 5), b=(3,)),
    "convolution, its channels last": written(
        lambda x, w, b: F.conv1d(x.mT, w).permute(0, 2, 1) + b, (4, 7, 5), w=(3, 5, 1), b=(3,)
    ),
    "linear and a row of more dimensions": written(
        lambda x, w, b: F.linear(x, w) + b, (4, 7, 5), w=(3, 5), b=(1, 1, 3)
    ),
    "group norm and a shift of channels": written(
        lambda x, w, b: F.group_norm(x, 2, w) + b.view(-1, 1), (4, 6, 5), w=(6,), b=(6,)
    ),
    "experts by einsum, turned": written(
        lambda x, w, b: torch.einsum("ni,gio->gno", x, w).permute(1, 2, 0) + b.mT, (4, 5), w=(2, 5, 3), b=(2, 3)
    ),
}


@pytest.mark.parametrize("exported", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize(
    ("example", "sized"),
    [
        *(pytest.param(example, False, id=name) for name, example in ONE_BLOCK.items()),
        *(pytest.param(example, True, id=name) for name, example in ONE_BLOCK_IF_SIZES_ARE_KNOWN.items()),
    ],
)
def test_every_spelling_of_a_bias_is_one_block(example: Example, sized: bool, exported: bool) -> None:
    torch.manual_seed(0)
    module, x = example()
    net = kfac_fx.compile(module, (x,) if exported else None, loss="normal")
    joined = [registration.parameters for registration in net.program.registrations] == [("w", "b")]
    assert joined or (sized and not exported)
    kfac_fx.FisherEstimator(net, estimation_mode="exact").update_covariances(x)  # compares rows with autograd
