"""Series by hand: what `register_fully_connected_multi` takes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kfac_fx
from kfac_fx import ApproximationError, RegistrationError
from kfac_fx.compiled.fisher_blocks import FullyConnectedSeriesFB
from tests.runtime.collections_of_toys import collection
from tests.runtime.fisher_cases import SERIES, sequence_statistics
from tests.runtime.series_models import empirical, same_fisher

FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of x [T, N, S, i] times w, in the order that it returns
    "a list": lambda x, w: torch.stack([row @ w for row in x]),
    "[T, N, S, i]": lambda x, w: x @ w,
    "[T N, S, i]": lambda x, w: (x.flatten(0, 1) @ w).unflatten(0, (3, -1)),
    "[T, N S, i]": lambda x, w: (x.flatten(1, 2) @ w).unflatten(1, (-1, 2)),
    "[T N S, i]": lambda x, w: (x.flatten(0, 2) @ w).unflatten(0, (3, -1, 2)),
    "[N, T, S, i]": lambda x, w: (x.transpose(0, 1) @ w).transpose(0, 1),
}
pytestmark = pytest.mark.usefixtures("float64")


def summed_up(h: Tensor) -> Tensor:
    return torch.tanh(h[0]) + 2 * h[1] + h[2]


@pytest.mark.parametrize(
    ("form", "approximation"), [*zip(FORMS, SERIES * 2, strict=True), ("[T N, S, i]", "kron_series_2")]
)
def test_uses_in_a_list_folded_and_unfolded_are_the_same_series(form: str, approximation: str) -> None:
    x, y = torch.randn(3, 5, 2, 4), torch.randn(5, 2, 6)
    lc = collection(lambda x, w: summed_up(FORMS[form](x, w)), x, w=(4, 6))
    nodes = [node.name for node in lc.graph.nodes if node.name.startswith("matmul")]
    given: dict[str, Any] = {"outputs": nodes} if form == "a list" else {"outputs": nodes[0], "num_uses": 3}
    block = lc.register_fully_connected_multi("w", inputs=None, approx=approximation, **given)
    assert type(block) is FullyConnectedSeriesFB and block.registration.steps == 3
    lc.register_normal_predictive_distribution(next(n for n in reversed(lc.graph.nodes) if n.op == "call_function"))
    found = empirical(lc, x, targets=y).blocks["w",]
    z = (x @ lc.parameters["w"]).detach().requires_grad_()
    kfac_fx.losses.Normal(summed_up(z), targets=y).evaluate().backward()
    assert z.grad is not None
    sums = sequence_statistics(x[:, :, :, None], z.grad[:, :, :, None], False, (1, 6, 4))
    for name in ("A", "G", "A1", "G1"):
        torch.testing.assert_close(found.factors[name].value, sums[name] / 30)
    assert found.factors["positions"].value == 6 and found.group.steps().tolist() == [3]


@pytest.mark.parametrize(("form", "approximation"), [("a list", "kron_series_2"), ("[T N, S, i]", "kron_series_1")])
def test_towers_are_series_of_their_own(form: str, approximation: str) -> None:
    """Two mini-batches of one graph, of different sizes, are the whole batch: no step of one follows the other's."""
    x, y = torch.randn(3, 6, 2, 4), torch.randn(6, 2, 5)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return summed_up(FORMS[form](x, w))

    split = collection(lambda x, w: (run(x[:, :4], w), run(x[:, 4:], w)), x, w=(4, 5))
    whole = collection(run, x, w=(4, 5))
    whole.model.load_state_dict(split.model.state_dict())
    for lc, towers in ((split, 2), (whole, 1)):
        names = [node.name for node in lc.graph.nodes if node.name.startswith("matmul")]
        uses, outputs = len(names) // towers, [node for node in lc.graph.nodes if node.op == "output"][0].args[0]
        for tower in range(towers):
            own = names[tower * uses : (tower + 1) * uses]
            given: dict[str, Any] = {"outputs": own} if form == "a list" else {"outputs": own[0], "num_uses": 3}
            lc.register_fully_connected_multi("w", inputs=None, approx=approximation, reuse=tower > 0, **given)
            lc.register_normal_predictive_distribution(outputs[tower], name="loss", reuse=tower > 0)
    one, other = empirical(split, x, targets=(y[:4], y[4:])), empirical(whole, x, targets=y)
    same_fisher(one, other)
    assert one.blocks["w",].registration.steps == 3 and one.blocks["w",].registration.towers == 2


@pytest.mark.parametrize("folded", [False, True])
def test_a_block_of_tensors_of_ones_own(folded: bool) -> None:
    x, d = torch.randn(3, 5, 2), torch.randn(3, 5, 4)
    if folded:
        lc = collection(lambda x, w: (x.reshape(-1, 2) @ w).reshape(3, -1, 4).sum(0), x, w=(2, 4))
        block = lc.register_fully_connected_multi("w", None, "matmul", num_uses=3, approx="kron_series_1")
        block.register_inverse()
        block.instantiate_factors([[d.flatten(0, 1)]], 0.1, [x.flatten(0, 1)])
    else:
        lc = collection(lambda x, w: x[0] @ w + x[1] @ w + x[2] @ w, x, w=(2, 4))
        nodes = ["matmul", "matmul_1", "matmul_2"]
        block = lc.register_fully_connected_multi("w", None, nodes, approx="kron_series_1")
        block.register_inverse()
        block.instantiate_factors([[list(d)]], 0.1, [list(x)])
    sums = sequence_statistics(x[:, :, None, None], d[:, :, None, None], False, (1, 4, 2))
    for name in ("A", "G", "A1", "G1"):
        torch.testing.assert_close(block.operator.factors[name].value, sums[name] / 15)
    v = torch.randn(2, 4)
    torch.testing.assert_close(block.multiply_inverse(block.multiply(v)), v)


def test_default_series_are_found_by_the_scan_and_named_where_they_do_not_fit() -> None:
    x = torch.randn(5, 3, 4)
    lc = collection(lambda x, w, v: (x[:, 0] @ w + x[:, 1] @ w) @ v @ v.t(), x, w=(4, 4), v=(4, 3))
    lc.set_default_fully_connected_multi_approximation("kron_series_2")
    lc.register_normal_predictive_distribution("matmul_3")
    lc.auto_register_layers()
    assert lc.fisher_blocks["w"].approximation == "kron_series_2"
    assert lc.fisher_blocks["v"].approximation == "kron_indep"
    assert "its use at matmul_3" in str(lc.fisher_blocks["v"].reason)


# --- what is no series ------------------------------------------------------------------------------------------------


def test_what_a_collection_is_told_must_be_a_series() -> None:
    def nodes(*inputs: Tensor) -> kfac_fx.LayerCollection:
        return collection(lambda x, w: x[0] @ w + x[1] @ w + x[2] @ w, *inputs, w=(2, 4))

    def multi(lc: kfac_fx.LayerCollection, outputs: Any, **options: Any) -> None:
        lc.register_fully_connected_multi("w", None, outputs, approx="kron_series_1", **options)

    x = torch.randn(3, 5, 2)
    with pytest.raises(RegistrationError, match="takes its uses in the order of time, and the graph computes matmul, "):
        multi(nodes(x), ["matmul", "matmul_2", "matmul_1"])
    multi(nodes(x), ["matmul_2", "matmul_1", "matmul"])  # backward in time is as good
    lc = nodes(x)
    multi(lc, ["matmul", "matmul_1"], reuse=False)
    with pytest.raises(ApproximationError, match="w: its towers have 1 and 2 uses, so not 'kron_series_1'"):
        multi(lc, ["matmul_2"], reuse=True)
    with pytest.raises(ApproximationError, match="transposed"):
        multi(collection(lambda x, w: x @ w @ w.t(), x[0], w=(2, 4)), ["matmul", "matmul_1"])
    whole = collection(lambda x, w: (x @ w).sum(0), x, w=(2, 4))
    with pytest.raises(RegistrationError, match=r"\[3, 5\] rows do not hold num_uses=4 one after another"):
        multi(whole, "matmul", num_uses=4)
    square = collection(lambda x, w: (x @ w).sum(0), torch.randn(3, 3, 2), w=(2, 4))
    with pytest.raises(RegistrationError, match=r"num_uses=3 is the size of dimensions \[0, 1\]"):
        multi(square, "matmul", num_uses=3)
    left = collection(lambda x, w: (w @ x).sum(1), torch.randn(2, 6), w=(4, 2))
    with pytest.raises(RegistrationError, match="register the uses as a list; they cannot be told apart"):
        multi(left, "matmul", num_uses=3)


def test_a_tensor_that_does_not_hold_the_uses_at_run_time() -> None:
    lc = collection(lambda x, w: x @ w, w=(2, 4))
    lc.register_fully_connected_multi("w", None, "matmul", num_uses=3, approx="kron_series_2")
    lc.register_normal_predictive_distribution("matmul")
    net = kfac_fx.compile(lc, verify=False)
    with pytest.raises(RegistrationError, match="should hold 3 uses, but its rows are not a multiple of that"):
        net.record((torch.randn(7, 2),), {})
