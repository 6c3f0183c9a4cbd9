"""Predictive distributions registered on nodes, and their losses on a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.losses import NormalMeanVariance, OnehotCategorical
from kfac_fx.passes.errors import LossError, RegistrationError, ReuseError, TargetsMissing
from tests.runtime.collections_of_toys import collection

SQUARE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def identity(*inputs: Tensor) -> LayerCollection:
    return collection(lambda x, w: x * w, *inputs or (SQUARE,), w=())


def of(lc: LayerCollection) -> LayerCollection:
    """The parameter is 1, so that `mul` is x."""
    with torch.no_grad():
        lc.model.w.fill_(1.0)  # type: ignore[operator, union-attr]
    return lc


def test_a_loss_registered_twice_counts_twice() -> None:
    once, twice = of(identity(torch.eye(2))), of(identity(torch.eye(2)))
    once.register_categorical_predictive_distribution("mul", seed=200)
    for _ in range(2):
        twice.register_categorical_predictive_distribution("mul", seed=200)
    assert torch.equal(twice.total_sampled_loss(), 2 * once.total_sampled_loss())
    once, twice = of(identity()), of(identity())
    once.register_normal_predictive_distribution("mul", var=1.0, seed=200)
    for _ in range(2):
        twice.register_normal_predictive_distribution("mul", var=1.0, seed=200)
    torch.testing.assert_close(twice.total_sampled_loss(), 2 * once.total_sampled_loss())


def test_losses_are_told_apart_by_name() -> None:
    lc = identity()
    lc.register_categorical_predictive_distribution("mul", name="loss1")
    lc.register_categorical_predictive_distribution("mul", name="loss1", reuse=True)
    assert len(lc.towers_by_loss) == 1 and len(lc.towers_by_loss[0]) == len(lc.losses) == 2
    lc.register_categorical_predictive_distribution("mul", name="loss2")
    assert [len(towers) for towers in lc.towers_by_loss] == [2, 1]


def test_losses_without_a_name_get_their_own() -> None:
    lc = identity()
    for register in (
        lc.register_categorical_predictive_distribution,
        lc.register_categorical_predictive_distribution,
        lc.register_softmax_cross_entropy_loss,
        lc.register_normal_predictive_distribution,
        lc.register_squared_error_loss,
        lc.register_multi_bernoulli_predictive_distribution,
        lc.register_sigmoid_cross_entropy_loss,
    ):
        register("mul")
    assert [loss.name for loss in lc.losses] == [
        "categorical_predictive_distribution",
        "categorical_predictive_distribution_1",
        "sparse_softmax_cross_entropy_loss",
        "normal_predictive_distribution",
        "squared_error_loss",
        "multi_bernoulli_predictive_distribution",
        "sigmoid_cross_entropy_loss",
    ]
    assert str(lc.losses[0]) == "Categorical(mul, name='categorical_predictive_distribution', coeff=1)"


def test_towers_of_a_loss() -> None:
    lc = identity()
    lc.register_categorical_predictive_distribution("mul", name="loss1", seed=3)
    lc.register_categorical_predictive_distribution("mul", name="loss1", reuse=True)
    with kfac_fx.variable_scope(reuse=True):
        lc.register_categorical_predictive_distribution("mul", name="loss1")
    with pytest.raises(KeyError, match="a loss 'loss1' is registered already; reuse=True adds a tower"):
        lc.register_categorical_predictive_distribution("mul", name="loss1", reuse=False)
    with pytest.raises(ReuseError, match="registered already"):
        lc.register_categorical_predictive_distribution("mul", name="loss1")
    with pytest.raises(KeyError, match="reuse=True, but no loss 'loss2' was registered"):
        lc.register_categorical_predictive_distribution("mul", name="loss2", reuse=True)
    with pytest.raises(RegistrationError, match="say to which one with name="):
        lc.register_categorical_predictive_distribution("mul", reuse=True)
    with pytest.raises(RegistrationError, match="a tower has the seed of its loss, give none"):
        lc.register_categorical_predictive_distribution("mul", name="loss1", seed=4, reuse=True)
    with pytest.raises(RegistrationError, match=r"loss 'loss1' has coeff=1.0, its new tower 2.0"):
        lc.register_categorical_predictive_distribution("mul", name="loss1", coeff=2.0, reuse=True)
    assert [len(towers) for towers in lc.towers_by_loss] == [3] and {loss.seed for loss in lc.losses} == {3}


def test_a_coefficient_must_be_positive() -> None:
    with pytest.raises(RegistrationError, match="coeff=0 must be positive"):
        identity().register_categorical_predictive_distribution("mul", coeff=0)


def test_the_loss_of_targets_is_the_golden_number() -> None:
    lc = of(identity())
    lc.register_categorical_predictive_distribution("mul", targets=torch.tensor([0, 1]))
    torch.testing.assert_close(lc.total_loss(), torch.tensor(1.6265233))
    lc = of(identity())
    lc.register_normal_predictive_distribution("mul", var=4.0, targets=torch.tensor([[3.0, 1.0], [4.0, 2.0]]))
    torch.testing.assert_close(lc.total_loss(), torch.tensor(7.6983433))


def test_a_batch_of_one_case() -> None:
    lc = of(identity(torch.tensor([[1.0, 2.0]])))
    lc.register_categorical_predictive_distribution("mul", targets=torch.tensor([1]))
    assert lc.total_loss().shape == ()


def test_coefficients_multiply_losses_as_asked() -> None:
    lc = of(identity())
    targets = torch.tensor([0, 1])
    loss = lc.register_categorical_predictive_distribution("mul", targets=targets, coeff=4.0)
    plain = torch.tensor(1.6265233)
    for mode, factor in (("regular", 4.0), ("sqrt", 2.0), ("off", 1.0)):
        torch.testing.assert_close(lc.total_loss(coeff_mode=mode), factor * plain)
    assert lc.loss_coeffs == {loss: 4.0} and lc.loss_colocation_ops == {loss: (lc.node("mul"),)}
    with pytest.raises(ValueError, match="coeff_mode 'half' is none of 'regular', 'sqrt', 'off'"):
        lc.eval_losses(coeff_mode="half")
    with pytest.raises(ValueError, match="target_mode 'none' is none of 'data', 'sample'"):
        lc.eval_losses(target_mode="none")


def test_targets_may_be_an_input_of_the_model_or_come_with_the_call() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.w, y + 0

    targets = torch.tensor([0, 1])
    lc = LayerCollection(kfac_fx.capture(Model(), (SQUARE, targets)))
    lc.register_categorical_predictive_distribution("mul", targets="y")
    torch.testing.assert_close(lc.total_loss(), torch.tensor(1.6265233))
    torch.testing.assert_close(lc.total_loss(SQUARE, y=targets), torch.tensor(1.6265233))
    zeros = torch.zeros(2, dtype=torch.int64)
    assert not torch.equal(lc.total_loss(SQUARE, zeros), lc.total_loss())
    torch.testing.assert_close(lc.total_loss(SQUARE, targets, targets=(zeros,)), lc.total_loss(SQUARE, zeros))
    with pytest.raises(LossError, match="1 losses are registered: pass as many targets, in a tuple"):
        lc.total_loss(targets=(targets, targets))


def test_losses_without_targets_are_only_sampled() -> None:
    lc = of(identity())
    lc.register_multi_bernoulli_predictive_distribution("mul")
    assert len(lc.eval_losses_on_samples()) == 1
    with pytest.raises(TargetsMissing, match="1 of 1 losses were registered without targets: MultiBernoulli"):
        lc.eval_losses()


def test_without_losses_there_is_no_graph_behind_them() -> None:
    for call in (LayerCollection.create_subgraph, LayerCollection.total_loss, LayerCollection.check_registration):
        with pytest.raises(LossError, match="Must have at least one registered loss"):
            call(identity())


def test_the_subgraph_is_what_lies_behind_the_losses() -> None:
    lc = collection(lambda x, w: (x * w, torch.exp(x)), w=(2,))
    lc.register_normal_predictive_distribution("mul")
    names = {node.name for node in lc.subgraph if isinstance(node, fx.Node)}
    assert names == {"x", "w", "mul"} and lc.create_subgraph() == lc.subgraph


def test_any_loss_function_can_be_registered() -> None:
    lc = of(collection(lambda x, w: (x * w, torch.exp(x)), SQUARE, w=()))
    one_hot = torch.eye(2)
    lc.register_loss_function(OnehotCategorical, "mul", "one_hot", targets=one_hot)
    lc.register_loss_function(NormalMeanVariance, ("mul", "exp"), "normal", targets=SQUARE)
    first, second = lc.eval_losses()
    torch.testing.assert_close(first, torch.tensor(1.6265233))
    torch.testing.assert_close(second, NormalMeanVariance(SQUARE, SQUARE.exp(), SQUARE).evaluate())
