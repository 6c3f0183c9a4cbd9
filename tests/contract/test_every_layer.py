"""Every layer's declaration, against autograd: each of its examples is captured, matched, and must keep the promise

    sum over n, s of grad_rows[n, s] rows[n, s]ᵀ  =  the gradient, as a matrix [g, o, i]

both in sum and, where the output has a dimension of cases, case by case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from kfac_fx.passes.ir import Program, Use, literal_attrs, tensor_attrs
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.layers.declaration import Example, Form, written
from kfac_fx.passes.losses import find_losses
from kfac_fx.passes.match import match
from kfac_fx.passes.matrix import MatrixForm
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.parametrization import Value
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
    module, x = prepared(example)
    program = matches(module, x, exported)
    whole = [use for use in program.matches if use.layer == layer and len(use.parameters) == len(program.parameters)]
    use = max(whole, key=lambda use: len(use.nodes))
    assert exported or LAYERS[layer].forms[use.form] is form, "another form takes the example"
    values = Values(program)
    values.run(x)
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


@pytest.mark.parametrize(
    ("layer", "form", "example"), every(6, [case for case in declared(composite=False) if case.id.endswith("-0")])
)
def test_rows_compile_without_graph_breaks(layer: str, form: Form, example: Example) -> None:
    torch.compiler.reset()
    module, x = prepared(example)
    program = matches(module, x, exported=False)
    use = max((use for use in program.matches if use.layer == layer), key=lambda use: len(use.nodes))
    values = Values(program)
    values.run(x)
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
    "einsum with the weight's own rest": written(lambda x, w: torch.einsum("ni,i...->n...", x, w), (4, 5), w=(5, 3)),
    "power": written(lambda x, w: x**w, (4, 5), w=(5,)),
    "larger of two": written(lambda x, w: torch.maximum(x, w), (4, 5), w=(5,)),
    "rest of a division": written(lambda x, w: x % w, (4, 5), w=(5,)),
}


@pytest.mark.parametrize("example", NO_LAYER.values(), ids=NO_LAYER.keys())
def test_what_is_not_linear_in_the_parameters_or_not_in_their_gradient_is_no_layer(example: Example) -> None:
    assert matches(*prepared(example), exported=False).matches == ()


TWO_LAYERS: dict[str, tuple[Example, set[str]]] = {
    "product and a bias for every case": (
        written(lambda x, w, b: x @ w + b, (4, 5), w=(5, 3), b=(4, 3)),
        {"linear(w)", "scale_and_shift(b)"},
    ),
    "product and one bias for all outputs": (
        written(lambda x, w, b: x @ w + b, (4, 5), w=(5, 3), b=(1,)),
        {"linear(w)", "scale_and_shift(b)"},
    ),
    "product from the left and a bias along its columns": (
        written(lambda x, w, b: w @ x + b, (4, 5, 7), w=(3, 5), b=(7,)),
        {"linear(w)", "scale_and_shift(b)"},
    ),
    "einsum and a bias for every position": (
        written(lambda x, w, b: torch.einsum("nti,io->nto", x, w) + b, (4, 7, 5), w=(5, 3), b=(7, 3)),
        {"linear(w)", "scale_and_shift(b)"},
    ),
    "scale of an element, shift of a row": (
        written(lambda x, w, b: x * w + b, (4, 7, 5), w=(7, 5), b=(5,)),
        {"scale_and_shift(w)", "scale_and_shift(b)"},
    ),
}


@pytest.mark.parametrize(("example", "expected"), TWO_LAYERS.values(), ids=TWO_LAYERS.keys())
def test_a_bias_of_another_shape_is_a_layer_of_its_own(example: Example, expected: set[str]) -> None:
    module, x = example()
    assert {str(use) for use in matches(module, x, exported=False).matches} == expected
