"""Parameters that are frozen and unfrozen during training: what is unchanged trains as if nothing had happened."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx.passes.errors import ModelChangedError
from tests.tables import pairs

FIRST, SECOND, LAST = ("0.weight", "0.bias"), ("2.weight", "2.bias"), ("4.weight", "4.bias")
MODES = ["gradients", "empirical"]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


def batch(number: int, cases: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(cases, 3, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


class Training:
    """A compiled model with its optimizer. inputs: for models that torch.fx alone cannot trace."""

    def __init__(self, model: nn.Module, params: Any = None, inputs: Any = None, **options: Any) -> None:
        self.model = model
        self.net = kfac_fx.compile(model, inputs, loss="categorical")
        options = {"lr": 0.1, "damping": 0.1, "momentum": 0.9, "seed": 0, **options}
        self.opt = kfac_fx.KFAC(self.net, params=params, **options)

    def step(self, number: int) -> None:
        x, y = batch(number)
        self.opt.zero_grad()
        F.cross_entropy(self.net(x), y).backward()
        self.opt.step()

    def block(self, key: tuple[str, ...]) -> dict[str, Tensor]:
        """Everything in a block: factors and inverses."""
        return {name: tensor.clone() for name, tensor in self.opt.estimator.blocks[key].state().items()}

    def velocity(self, layer: int) -> Tensor:
        velocity: Tensor = self.opt.state[self.model[layer].weight]["velocity"]
        return velocity.clone()


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def averages(block: dict[str, Tensor]) -> dict[str, Tensor]:
    """The factors of a block, without its inverses, which are computed anew also while it is frozen."""
    return {name: tensor for name, tensor in block.items() if name.endswith(("moment", "weight"))}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def still(model: nn.Sequential, layer: int) -> list[dict[str, Any]]:
    """Parameter groups in which one layer does not move."""
    held = list(model[layer].parameters())
    rest = [p for p in model.parameters() if all(p is not other for other in held)]
    return [{"params": rest}, {"params": held, "lr": 0.0}]


# --- freezing -------------------------------------------------------------------------------------------------------


@pairs(("mode", MODES), ("layer", [0, 2]))
def test_layers_that_are_not_frozen_train_as_beside_one_that_is_not_moved(layer: int, mode: str) -> None:
    key = (f"{layer}.weight", f"{layer}.bias")
    model, other = mlp(), mlp()
    frozen, reference = (
        Training(model, estimation_mode=mode),
        Training(other, still(other, layer), estimation_mode=mode),
    )
    reference.opt.param_groups[-1]["lr"] = 0.1  # in the first step, all layers move
    frozen.step(0)
    reference.step(0)
    before, velocity = frozen.block(key), frozen.velocity(layer)
    values = [p.clone() for p in model[layer].parameters()]
    model[layer].requires_grad_(False)
    reference.opt.param_groups[-1]["lr"] = 0.0
    for number in range(1, 5):
        frozen.step(number)
        reference.step(number)
        for name, p in other.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-12, atol=1e-14)
    for kept in {FIRST, SECOND, LAST} - {key}:
        assert all(map(torch.allclose, frozen.block(kept).values(), reference.block(kept).values()))
    assert all(map(torch.equal, model[layer].parameters(), values))
    assert equal(averages(frozen.block(key)), averages(before))
    model[layer].requires_grad_(True)
    frozen.step(5)
    assert not any(map(torch.equal, model[layer].parameters(), values))
    now = frozen.block(key)
    torch.testing.assert_close(now["A/total_weight"], 0.95 * before["A/total_weight"] + 1)
    decayed = now["A/moment"] - 0.95 * before["A/moment"]
    torch.testing.assert_close(
        decayed[-1, -1, -1], torch.ones((), dtype=torch.float64)
    )  # of one batch: its bias column
    natural = frozen.opt.estimator.multiply_inverse(gradients(model))
    torch.testing.assert_close(frozen.velocity(layer), 0.9 * velocity + natural[f"{layer}.weight"])
    assert len(frozen.net.captures.recorders) == 1  # freezing needs no capture


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_while_all_is_frozen_is_no_part_of_a_step(mode: str) -> None:
    """As a discriminator while the generator trains (pix2pix, Lightning's toggle_optimizer)."""
    runs = []
    for toggled in (False, True):
        training = Training(mlp(), estimation_mode=mode)
        for number in range(4):
            if toggled:
                training.model.requires_grad_(False)
                x = batch(number + 10)[0].requires_grad_()
                training.net(x).sum().backward()
                assert x.grad is not None
                training.model.requires_grad_(True)
            training.step(number)
        runs.append(training)
    plain, toggled_run = runs
    assert all(map(torch.equal, plain.model.parameters(), toggled_run.model.parameters()))
    assert all(equal(plain.block(key), toggled_run.block(key)) for key in (FIRST, SECOND, LAST))
    assert len(toggled_run.net.captures.recorders) == 1


def test_a_bias_beside_a_frozen_weight_trains_in_their_common_block() -> None:
    training = Training(mlp())
    training.step(0)
    training.model[2].weight.requires_grad_(False)
    before, values = training.block(SECOND), [p.clone() for p in training.model[2].parameters()]
    training.step(1)
    assert not torch.equal(training.block(SECOND)["G/moment"], before["G/moment"])
    assert [torch.equal(p, value) for p, value in zip(training.model[2].parameters(), values, strict=True)] == [
        True,
        False,
    ]


def test_a_layer_that_is_frozen_in_one_of_two_micro_batches_pauses_in_that_step() -> None:
    training = Training(mlp())
    training.step(0)
    before = training.block(FIRST)
    for frozen in (True, False):
        training.model[0].requires_grad_(not frozen)
        x, y = batch(int(frozen))
        (F.cross_entropy(training.net(x), y) / 2).backward()
    training.opt.step()
    assert torch.equal(training.block(FIRST)["A/moment"], before["A/moment"])
    assert not torch.equal(training.block(SECOND)["A/moment"], before["A/moment"])


@pytest.mark.parametrize("mode", MODES)
def test_generic_parameters_pause_too(mode: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = mlp(), nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x * torch.special.zeta(2.0, 1 + self.scale.exp()))
            return y

    training = Training(Scaled(), estimation_mode=mode)
    training.step(0)
    before = training.block(("scale",))
    training.model.scale.requires_grad_(False)
    training.step(1)
    assert torch.equal(training.block(("scale",))["F/moment"], before["F/moment"])
    training.model.scale.requires_grad_(True)
    training.step(2)
    assert not torch.equal(training.block(("scale",))["F/moment"], before["F/moment"])


# --- unfreezing -----------------------------------------------------------------------------------------------------


def fresh(model: nn.Module, number: int) -> kfac_fx.FisherEstimator:
    """The empirical Fisher of one batch alone, at the present parameters."""
    copied = copy.deepcopy(model).requires_grad_(True)
    x, y = batch(number)
    est = kfac_fx.FisherEstimator(kfac_fx.compile(copied, loss="categorical"), estimation_mode="empirical", damping=0.1)
    est.update_covariances(x, targets=y)
    est.update_inverses()
    return est


@pytest.mark.parametrize("options", [{}, {"cov_update_every": 4, "invert_every": 8}], ids=["always due", "not due"])
def test_a_layer_that_is_unfrozen_starts_with_factors_and_inverse_of_its_first_batch(options: dict[str, Any]) -> None:
    model, other = mlp(), mlp()
    model[0].requires_grad_(False)
    late = Training(model, estimation_mode="empirical", **options)
    reference = Training(other, still(other, 0), estimation_mode="empirical", **options)
    assert FIRST not in late.opt.estimator.blocks
    for number in range(3):
        late.step(number)
        reference.step(number)
    before = {key: late.block(key) for key in (SECOND, LAST)}
    model[0].requires_grad_(True)
    expected, start = fresh(model, 3), model[0].weight.clone()
    late.step(3)
    reference.step(3)
    block, wanted = late.opt.estimator.blocks[FIRST], expected.blocks[FIRST]
    for factor in ("A", "G", "positions"):
        torch.testing.assert_close(block.factors[factor].value, wanted.factors[factor].value)
    moved = expected.multiply_inverse(gradients(model))
    torch.testing.assert_close(model[0].weight - start, -0.1 * moved["0.weight"])
    for key in (SECOND, LAST):
        assert all(map(torch.allclose, late.block(key).values(), reference.block(key).values()))
        if options:
            assert equal(late.block(key), before[key])  # nothing was due
    for name in (*SECOND, *LAST):
        torch.testing.assert_close(model.get_parameter(name), other.get_parameter(name), rtol=1e-12, atol=1e-14)
    velocities = [t.opt.state[t.model[4].weight]["velocity"] for t in (late, reference)]
    torch.testing.assert_close(*velocities)


def test_inverses_of_later_blocks_follow_their_first_factors_closely() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    training = Training(model, invert_every=8)
    for number in range(3):
        training.step(number)
    model[0].requires_grad_(True)
    changed = []
    for number in range(3, 10):
        inverse, other = (training.opt.estimator.blocks.get(key) for key in (FIRST, LAST))
        before = [None if block is None else block.state()["A/-1.0"].clone() for block in (inverse, other)]
        training.step(number)
        after = [training.block(key)["A/-1.0"] for key in (FIRST, LAST)]
        changed.append([old is None or not torch.equal(old, new) for old, new in zip(before, after, strict=True)])
    ages = [age for age, (of_first, _) in enumerate(changed) if of_first]
    assert ages == [0, 1, 2, 5]  # age 5 is step 8, when all are due
    assert [age for age, (_, of_last) in enumerate(changed) if of_last] == [2, 5]  # steps 5 and 8


def test_gradual_unfreezing_continues_from_a_checkpoint_bit_for_bit() -> None:
    trainings = []
    for interrupted in (False, True):
        model = mlp()
        model[0].requires_grad_(False)
        training = Training(model, invert_every=6)
        for number in range(3):
            training.step(number)
        model[0].requires_grad_(True)
        training.step(3)
        if interrupted:
            state, weights = copy.deepcopy(training.opt.state_dict()), copy.deepcopy(model.state_dict())
            training = Training(mlp(), invert_every=6)
            training.model.load_state_dict(weights)
            training.opt.load_state_dict(state)
        for number in range(4, 9):
            training.step(number)
        trainings.append(training)
    assert all(map(torch.equal, *(training.model.parameters() for training in trainings)))


@pytest.mark.parametrize("added", [False, True], ids=["in the first group", "in a group of its own"])
def test_an_unfrozen_layer_follows_k_fac_and_what_has_no_block_follows_the_first_order_rule(added: bool) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.beside = mlp(), nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    model = Two()
    model.inner[0].requires_grad_(False)
    model.beside.requires_grad_(False)
    net = kfac_fx.compile(model, loss="categorical")
    params = [p for p in model.parameters() if p.requires_grad] if added else None
    opt = kfac_fx.KFAC(net, params=params, lr=0.1, damping=0.1, first_order={"lr": 0.01})

    def step(number: int) -> None:
        x, y = batch(number)
        opt.zero_grad()
        (F.cross_entropy(net(x), y) + model.beside.square().sum()).backward()
        opt.step()

    step(0)
    model.requires_grad_(True)
    if added:
        opt.add_param_group({"params": [*model.inner[0].parameters(), model.beside]})
    before = {name: p.clone() for name, p in model.named_parameters()}
    step(1)
    rules = {id(p): group["first_order"] for group in opt.param_groups for p in group["params"]}
    assert {name for name, p in model.named_parameters() if rules[id(p)]} == {"beside"}
    moves = {name: (p - before[name]).abs().max() for name, p in model.named_parameters()}
    torch.testing.assert_close(moves["beside"], torch.tensor(0.01, dtype=torch.float64))  # AdamW's first step
    assert moves["inner.0.weight"] > 0
    step(2)


# --- modes and adapters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_norm_is_frozen_and_thawed(mode: str) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()

    training = Training(model(), estimation_mode=mode)
    norm = training.model[1]
    training.step(0)
    before, mean = training.block(("1.weight", "1.bias")), norm.running_mean.clone()
    norm.eval().requires_grad_(False)
    for number in range(1, 3):
        training.step(number)
    assert equal(averages(training.block(("1.weight", "1.bias"))), averages(before))
    assert torch.equal(norm.running_mean, mean) and len(training.net.captures.recorders) == 2
    norm.train().requires_grad_(True)
    training.step(3)
    assert len(training.net.captures.recorders) == 2 and not torch.equal(norm.running_mean, mean)
    assert not torch.equal(training.block(("1.weight", "1.bias"))["F/moment"], before["F/moment"])


class Adapted(nn.Module):
    """A layer with an adapter that can be switched off, as those of peft."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.adapter = mlp(), nn.Linear(3, 2, bias=False).double()
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + self.adapter(x) if self.enabled else y

    def switch(self, enabled: bool) -> None:
        self.enabled = enabled
        self.adapter.requires_grad_(enabled)


def test_an_adapter_that_is_switched_off_keeps_its_block_and_its_momentum() -> None:
    training = Training(Adapted())
    training.step(0)
    before, velocity = training.block(("adapter.weight",)), training.opt.state[training.model.adapter.weight]
    held, value = velocity["velocity"].clone(), training.model.adapter.weight.clone()
    for number in range(1, 3):
        training.model.switch(False)
        training.step(number)
        assert torch.equal(training.block(("adapter.weight",))["A/moment"], before["A/moment"])
        assert torch.equal(training.model.adapter.weight, value)
    training.model.switch(True)
    assert torch.equal(training.opt.state[training.model.adapter.weight]["velocity"], held)
    training.step(3)
    block = training.block(("adapter.weight",))
    torch.testing.assert_close(block["A/total_weight"], 0.95 * before["A/total_weight"] + 1)
    assert len(training.net.captures.recorders) + sum(map(len, training.net.captures.recorders.values())) == 3


def test_an_adapter_that_is_trained_and_not_in_use_keeps_its_block() -> None:
    training = Training(Adapted())
    training.step(0)
    before = training.block(("adapter.weight",))
    training.model.switch(False)
    training.step(1)
    training.model.adapter.requires_grad_(True)
    training.step(2)
    assert torch.equal(training.block(("adapter.weight",))["A/moment"], before["A/moment"])
    training.model.switch(True)
    training.step(3)
    torch.testing.assert_close(
        training.block(("adapter.weight",))["A/total_weight"], 0.95 * before["A/total_weight"] + 1
    )


def test_a_base_that_is_unfrozen_while_its_adapter_is_off_leaves_the_adapters_block_as_it_is() -> None:
    model = Adapted()
    model.inner.requires_grad_(False)
    training = Training(model)
    training.step(0)
    before = training.block(("adapter.weight",))
    model.switch(False)
    model.inner.requires_grad_(True)
    training.step(1)
    assert training.opt.estimator.blocks.keys() == {
        ("adapter.weight",), *((f"inner.{a}", f"inner.{b}") for a, b in (FIRST, SECOND, LAST))
    }  # fmt: skip
    assert torch.equal(training.block(("adapter.weight",))["A/moment"], before["A/moment"])
    model.switch(True)
    training.step(2)
    assert not torch.equal(training.block(("adapter.weight",))["A/moment"], before["A/moment"])


class Branching(nn.Module):
    """A branch on values, so that only submodules have graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = mlp(), nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        z: Tensor = self.head(y if x.sum() > -1e9 else -y)
        return z


@pytest.mark.parametrize("mode", MODES)
def test_submodules_of_a_divided_model_are_frozen_and_unfrozen(mode: str) -> None:
    model = Branching()
    model.head.requires_grad_(False)
    training = Training(model, inputs=batch(0)[:1], estimation_mode=mode)
    training.step(0)
    assert ("head.weight", "head.bias") not in training.opt.estimator.blocks
    model.head.requires_grad_(True)
    model.inner[0].requires_grad_(False)
    before, start = training.block(("inner.0.weight", "inner.0.bias")), model.head.weight.clone()
    training.step(1)
    assert torch.equal(training.block(("inner.0.weight", "inner.0.bias"))["A/moment"], before["A/moment"])
    assert not torch.equal(model.head.weight, start)
    training.step(2)


@pytest.mark.parametrize("mode", ["gradients", "exact", "curvature_prop"])
def test_an_estimator_pauses_what_is_frozen_and_starts_what_is_unfrozen(mode: str) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    x, _ = batch(0)
    est = kfac_fx.FisherEstimator(kfac_fx.compile(model, loss="categorical"), estimation_mode=mode, seed=0)
    est.update_covariances(x)
    model.requires_grad_(True)
    model[4].requires_grad_(False)
    before = est.blocks[LAST].factors["A"].moment.clone()
    est.update_covariances(x)
    assert est.newcomers == {FIRST} and torch.equal(est.blocks[LAST].factors["A"].moment, before)
    est.update_inverses()
    assert est.multiply_inverse({name: torch.ones_like(p) for name, p in model.named_parameters()}).keys() == {
        *FIRST, *SECOND, *LAST
    }  # fmt: skip
    model.requires_grad_(False)
    est.update_covariances(x)  # nothing is recorded
    assert est.newcomers == frozenset()


def test_what_was_frozen_in_every_batch_waits_for_its_first() -> None:
    """Its parameters need not be in a vector, and its group is not decomposed."""
    model = mlp()
    x, _ = batch(0)
    est = kfac_fx.FisherEstimator(kfac_fx.compile(model, loss="categorical"), estimation_mode="exact")
    model[2].requires_grad_(False)
    est.update_covariances(x)
    est.update_inverses()
    vector = {name: torch.ones_like(p) for name, p in model.named_parameters() if name not in SECOND}
    assert est.multiply_inverse(vector).keys() == vector.keys() == est.multiply(vector).keys()
    with pytest.raises(kfac_fx.FactorNotReady):
        est.multiply_inverse({name: torch.ones_like(p) for name, p in model.named_parameters()})
    assert est.failures == (0, 0)


def test_a_collections_registrations_are_of_what_was_trained() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    x, _ = batch(0)
    lc = kfac_fx.LayerCollection(kfac_fx.capture(model, (x,)))
    lc.register_categorical_predictive_distribution(lc.captured.outputs_of("4"))
    lc.auto_register_layers()
    est = kfac_fx.FisherEstimator(lc, estimation_mode="exact")
    est.update_covariances(x)
    model[2].requires_grad_(False)
    est.update_covariances(x)
    model[0].requires_grad_(True)
    with pytest.raises(ModelChangedError, match=r"unfrozen after a LayerCollection .*: 0.weight, 0.bias\.\nIts regist"):
        est.update_covariances(x)


@pytest.mark.parametrize("options", [{}, {"lr": None, "damping": None, "momentum": None}], ids=["regular", "default"])
def test_a_training_that_froze_a_layer_goes_on_if_it_is_frozen_after_the_state_is_loaded(
    options: dict[str, Any],
) -> None:
    training = Training(mlp(), **options)
    training.step(0)
    training.model[0].requires_grad_(False)
    training.step(1)
    state, parameters = copy.deepcopy(training.opt.state_dict()), copy.deepcopy(training.model.state_dict())
    training.step(2)

    frozen = mlp()
    frozen.load_state_dict(parameters)
    frozen[0].requires_grad_(False)
    again = Training(frozen, **options)
    text = (
        r"the state has blocks of parameters that are frozen here: 0\.weight, 0\.bias\. They were trained "
        r"before it was saved\.\nCreate the optimizer while they have requires_grad=True, load the state, and freeze"
    )
    with pytest.raises(ValueError, match=text):
        again.opt.load_state_dict(state)

    trained = mlp()
    trained.load_state_dict(parameters)
    again = Training(trained, **options)
    again.opt.load_state_dict(state)
    again.model[0].requires_grad_(False)
    again.step(2)
    assert equal(again.model.state_dict(), training.model.state_dict())


@pytest.mark.parametrize("options", [{}, {"lr": None, "damping": None, "momentum": None}], ids=["regular", "default"])
@pytest.mark.parametrize("frozen", [["0.weight", "0.bias"], ["0.weight"], ["0.bias"]], ids=["layer", "weight", "bias"])
def test_a_state_of_after_layers_were_unfrozen_says_how_it_loads(frozen: list[str], options: dict[str, Any]) -> None:
    """The first call that follows registers them, and a state is loaded without a call."""

    def freeze(layers: nn.Module, is_frozen: bool) -> nn.Module:
        for name in frozen:
            layers.get_parameter(name).requires_grad_(not is_frozen)
        return layers

    training = Training(freeze(mlp(), True), **options)
    training.step(0)
    freeze(training.model, False)
    training.step(1)
    state, parameters = copy.deepcopy(training.opt.state_dict()), copy.deepcopy(training.model.state_dict())
    training.step(2)

    again = Training(freeze(mlp(), True), **options)
    again.model.load_state_dict(parameters)
    freeze(again.model, False)
    text = (
        "the state has blocks of parameters that were frozen when this net was compiled, and which get their blocks at "
        f"the next call: {', '.join(sorted(frozen))}.\nCompile the model while they have requires_grad=True; or call "
        "net.recorder((x,), {}) once, and load the state then."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        again.opt.load_state_dict(state)
    again.net.recorder((batch(2)[0],), {})
    again.opt.load_state_dict(state)
    again.step(2)
    assert equal(again.model.state_dict(), training.model.state_dict())

    compiled = Training(mlp(), **options)
    compiled.model.load_state_dict(parameters)
    compiled.opt.load_state_dict(state)
    compiled.step(2)
    assert equal(compiled.model.state_dict(), training.model.state_dict())


@pairs(
    ("options", {"regular": {}, "default": {"lr": None, "damping": None, "momentum": None}}),
    ("frozen", {"a layer": ["0.weight", "0.bias"], "a bias": ["0.bias"]}),
)
def test_a_training_that_unfroze_a_layer_goes_on_if_it_is_unfrozen_after_the_state_is_loaded(
    options: dict[str, Any], frozen: list[str]
) -> None:
    def model() -> nn.Sequential:
        layers = mlp()
        for name in frozen:
            layers.get_parameter(name).requires_grad_(False)
        return layers

    def unfreeze(layers: nn.Module) -> None:
        for name in frozen:
            layers.get_parameter(name).requires_grad_(True)

    training = Training(model(), **options)
    training.step(0)
    state, parameters = copy.deepcopy(training.opt.state_dict()), copy.deepcopy(training.model.state_dict())
    unfreeze(training.model)
    training.step(1)

    unfrozen = mlp()
    unfrozen.load_state_dict(parameters)
    text = (
        rf"the state has no block of parameters that are trained here: {re.escape(', '.join(frozen))}\. They were "
        r"frozen, or took no part, when it was saved\.\nIf they were frozen, create the optimizer while they have"
    )
    with pytest.raises(ValueError, match=text):
        Training(unfrozen, **options).opt.load_state_dict(state)

    again = Training(model(), **options)
    again.model.load_state_dict(parameters)
    again.opt.load_state_dict(state)
    unfreeze(again.model)
    again.step(1)
    assert equal(again.model.state_dict(), training.model.state_dict())


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum_type": "adam"}, {"momentum_type": "adaptive"}, {"lr": None, "damping": None, "momentum": None}],
    ids=["regular", "adam", "adaptive", "default"],
)
def test_a_training_that_unfroze_a_layer_goes_on_in_a_process_where_it_was_never_frozen(
    options: dict[str, Any],
) -> None:
    """There the layer was in one stack with another of its shape, which got new inverses when this layer did."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()

    training = Training(model(), **options)
    training.model[4].requires_grad_(False)
    for number in range(7):
        if number == 4:
            training.model[4].requires_grad_(True)
        training.step(number)
    again = Training(model(), **options)
    again.model.load_state_dict(copy.deepcopy(training.model.state_dict()))
    again.opt.load_state_dict(copy.deepcopy(training.opt.state_dict()))
    for number in range(7, 16):
        training.step(number)
        again.step(number)
    assert equal(again.model.state_dict(), training.model.state_dict())


def test_a_state_of_a_shallower_net_is_told_by_its_shapes() -> None:
    """It lacks a block, too, but its parameters were not frozen."""

    def net(*widths: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(i, o) for i, o in pairwise(widths)))

    def optimizer(model: nn.Module) -> kfac_fx.KFAC:
        net = kfac_fx.compile(model, (torch.randn(8, 4),), loss="categorical")
        opt = kfac_fx.KFAC(net)
        nn.functional.cross_entropy(net(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        opt.step()
        return opt

    state = optimizer(net(4, 5, 3)).state_dict()
    with pytest.raises(ValueError, match="nothing of it is loaded") as error:
        optimizer(net(4, 5, 5, 3)).load_state_dict(state)
    text = str(error.value)
    assert "frozen" not in text and re.search(r"2\.weight,2\.bias/ready +is missing", text)
    assert re.search(r"checkpoint of 1\.weight +has shape \[3, 5\], and needs \[5, 5\]", text)
