"""Uses found at the nodes that a user names: which layer, which of its parts, and series of uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx import ApproximationError, LayerCollection, RegistrationError
from kfac_fx.compiled.fisher_blocks import in_time, with_steps
from kfac_fx.compiled.names import Finder, listed
from kfac_fx.passes.ir import Use
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.parametrizations.parts import region_of
from tests.runtime.collections_of_toys import affine, collection

N, T = 4, 7
X = torch.randn(N, T, 5)


def find(lc: LayerCollection, params: str, output: str, layers: tuple[str, ...] = (), read: Any = None) -> list[Use]:
    return list(lc.find_uses(layers, lc.names_of(params.split()), read, output))


# --- one node -------------------------------------------------------------------------------------------------------


def test_the_smallest_layer_that_has_the_parameters_is_taken() -> None:
    """w alone is the product's; with b it is the sum's."""
    lc = affine()
    (product,), (linear,) = find(lc, "w", "matmul"), find(lc, "w b", "add")
    assert (product.output.name, str(product)) == ("matmul", "linear(w)")
    assert (linear.output.name, str(linear)) == ("add", "linear(w, b)")


def test_only_the_parameters_that_were_asked_for_are_in_the_use() -> None:
    (use,) = find(affine(), "w", "add", ("linear",))
    assert set(use.parameters) == {"weight"} and use.output.name == "add"


def test_of_two_forms_the_one_that_covers_more_nodes_is_taken() -> None:
    """A convolution and a product by its output: the node is that of a scale, too."""
    lc = collection(lambda x, w, s: F.linear(x, w) * s, w=(3, 5), s=(3,))
    (use,) = find(lc, "s", "mul")
    assert use.layer == "scale_and_shift" and use.input.name == "linear"


def test_the_input_chooses_between_two_sides() -> None:
    lc = collection(lambda x, w: torch.matmul(x.tanh(), w), w=(5, 5))
    assert find(lc, "w", "matmul", read="tanh")[0].input.name == "tanh"
    with pytest.raises(RegistrationError, match="computes matmul .* from x"):
        find(lc, "w", "matmul", read="x")


def test_a_weight_that_is_put_together_has_a_use_for_every_part() -> None:
    lc = collection(lambda x, w, v: F.linear(x, torch.cat([w, v])), X, w=(2, 5), v=(1, 5))
    (first,), (second,) = find(lc, "w", "linear"), find(lc, "v", "linear")
    assert region_of(first) == ((0, 1), (0, 2), (0, 5)) and region_of(second) == ((0, 1), (2, 3), (0, 5))


def test_the_cases_are_where_the_outputs_of_the_model_have_them() -> None:
    lc = collection(lambda x, w: F.linear(x.transpose(0, 1), w).transpose(0, 1), X, w=(3, 5))
    assert find(lc, "w", "linear")[0].batch_dim == 1


def test_every_use_has_its_own_output_and_lists_are_as_long_as_each_other() -> None:
    lc = collection(lambda x, w: torch.matmul(torch.matmul(x, w), w), w=(5, 5))
    uses = lc.find_uses((), ("w",), None, ["matmul", "matmul_1"])
    assert [use.output.name for use in uses] == ["matmul", "matmul_1"]
    for inputs, outputs in ((["x"], ["matmul", "matmul_1"]), ([], [])):
        with pytest.raises(RegistrationError, match="give one a use"):
            lc.find_uses((), ("w",), inputs, outputs)


def test_what_is_there_is_listed_if_no_layer_fits() -> None:
    lc = affine()
    with pytest.raises(RegistrationError) as caught:
        find(lc, "b", "matmul", ("linear", "embedding"))
    head, graph, *rows = str(caught.value).splitlines()
    assert head.startswith("no linear or embedding layer with b computes matmul (")
    assert graph == "The graph has:" and [row.split()[0] for row in rows] == [
        "linear(w)",
        "linear(w,",
        "scale_and_shift(b)",
    ]


@pytest.mark.parametrize(
    ("nodes", "several"), [("x", ["x"]), (["x", "y"], ["x", "y"]), (("x",), ["x"]), (None, [None])]
)
def test_one_node_is_a_list_of_one(nodes: Any, several: list[Any]) -> None:
    assert listed(nodes) == several


def test_the_matches_of_a_scope_are_found_once() -> None:
    lc = affine()
    finder = Finder(lc.captured)
    scope = finder.program.but(outputs=tuple(node for node in finder.program.graph.nodes if node.name == "add"))
    assert finder.cut(scope) is finder.cut(scope)
    assert finder.cut(scope) is not finder.cut(scope.but(outputs=(scope.outputs[0].args[0],)))


# --- series ---------------------------------------------------------------------------------------------------------


def linear_use(function: Any, x: Tensor) -> Use:
    lc = collection(function, x, w=(3, 5))
    return find(lc, "w", "linear")[0]


@pytest.mark.parametrize(
    ("x", "num_uses", "in_positions"),
    [
        (torch.randn(T, N, 5), T, True),  # time first, the cases behind it
        (torch.randn(T * N, 5), T, False),  # folded into the cases
    ],
)
def test_steps_are_in_the_positions_or_in_the_cases(x: Tensor, num_uses: int, in_positions: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        return y.transpose(0, 1) if y.dim() == 3 else y

    use = with_steps("w", linear_use(function, x), LAYERS["linear"], num_uses)
    assert (use.steps, use.steps_in_positions) == (num_uses, in_positions)


@pytest.mark.parametrize(
    ("x", "num_uses", "text"),
    [
        (torch.randn(T * N, 5), 3, r"\[28\] rows do not hold num_uses=3"),
        (torch.randn(N, T, 2, 5), 2, r"\[4, 7, 2\] rows do not hold num_uses=2"),  # time is the last dimension
        (torch.randn(T, T, 5), T, r"num_uses=7 is the size of dimensions \[0, 1\]"),
    ],
)
def test_rows_that_cannot_hold_the_steps_are_refused(x: Tensor, num_uses: int, text: str) -> None:
    with pytest.raises(RegistrationError, match=text):
        with_steps("w", linear_use(lambda x, w: F.linear(x, w), x), LAYERS["linear"], num_uses)


def test_steps_of_a_layer_whose_dimensions_differ_are_to_be_listed() -> None:
    lc = collection(lambda x, w: torch.matmul(w, x), torch.randn(N, 5, T), w=(3, 5))
    (use,) = find(lc, "w", "matmul")
    with pytest.raises(RegistrationError, match="register the uses as a list"):
        with_steps("w", use, LAYERS["linear"], T)


def steps_of(order: list[int]) -> tuple[Use, ...]:
    lc = collection(
        lambda x, w: torch.matmul(torch.matmul(torch.matmul(x, w).tanh(), w).tanh(), w), torch.randn(N, 5), w=(5, 5)
    )
    names = ["matmul", "matmul_1", "matmul_2"]
    return lc.find_uses((), ("w",), None, [names[n] for n in order])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_a_series_runs_forward_or_backward_through_the_graph(order: list[int]) -> None:
    uses = steps_of(order)
    assert in_time(("w",), "kron_series_1", [uses], LAYERS, None) == uses


def test_a_series_in_another_order_is_refused() -> None:
    with pytest.raises(RegistrationError, match="the graph computes matmul, matmul_2, matmul_1 in another"):
        in_time(("w",), "kron_series_1", [steps_of([0, 2, 1])], LAYERS, None)


def test_towers_of_different_lengths_are_no_series() -> None:
    uses = steps_of([0, 1, 2])
    with pytest.raises(ApproximationError, match="its towers have 2 and 3 uses, so not 'kron_series_1'"):
        in_time(("w",), "kron_series_1", [uses, uses[:2]], LAYERS, None)
