"""A module that is compiled in place: the model is the object that is called, and copies of it are plain."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from tests.runtime.slow_kfac import batch, mlp
from tests.runtime.toy_optimizers import assert_same, flat_state, values

KINDS: dict[str, dict[str, Any]] = {
    "gradients": {"lr": 0.3},
    "empirical": {"lr": 0.3, "estimation_mode": "empirical"},
    "qmodel": {"lr": None, "momentum": None, "momentum_type": "qmodel", "adapt_damping": True},
}


def trained(called: Callable[[kfac_fx.CompiledModule], Any], model: nn.Module, **options: Any) -> dict[str, Any]:
    """The parameters and the state after six steps on what `called` chooses: the compiled module or its model."""
    given = {name: options.pop(name) for name in ("in_place", "backend") if name in options}
    net = kfac_fx.compile(model, loss="categorical", **given)
    opt = kfac_fx.KFAC(net, **{"damping": 0.1, "seed": 0, **options})
    forward = called(net)
    for number in range(6):
        x, y = batch(number)
        opt.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        opt.step(evaluate=lambda x=x, y=y: F.cross_entropy(forward(x), y))  # type: ignore[misc]
    return values(net) | flat_state(opt.state_dict()["state"])


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_calls_of_the_model_train_as_calls_of_the_compiled_module(options: dict[str, Any]) -> None:
    expected = trained(lambda net: net, mlp(), **options)
    assert_same(expected, trained(lambda net: net.model, mlp(), in_place=True, **options))
    assert_same(expected, trained(lambda net: net, mlp(), in_place=True, **options))


class Branches(nn.Module):
    """No single graph holds it, so recordings run its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return self.second(y) if y.sum() > 0 else self.second(-y)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_models_in_parts_train_in_place(options: dict[str, Any]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Branches()

    def train(called: Callable[[kfac_fx.CompiledModule], Any], in_place: bool) -> dict[str, Any]:
        net = kfac_fx.compile(model(), batch(0)[:1], loss="categorical", in_place=in_place)
        opt = kfac_fx.KFAC(net, **{"damping": 0.1, "seed": 0, **options})
        for number in range(4):
            x, y = batch(number)
            opt.zero_grad()
            F.cross_entropy(called(net)(x), y).backward()
            opt.step(evaluate=lambda x=x, y=y: F.cross_entropy(called(net)(x), y))  # type: ignore[misc]
        return values(net)

    assert_same(train(lambda net: net, False), train(lambda net: net.model, True))


def test_the_model_stays_what_it_is() -> None:
    model = mlp()
    before = model.state_dict()
    net = kfac_fx.compile(model, loss="categorical", in_place=True)
    assert "_compiled_call_impl" not in model.__dict__  # nothing records without an optimizer
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    assert type(model) is nn.Sequential and net.model is model and net.in_place
    assert model.state_dict().keys() == before.keys()
    x, y = batch(0)
    with torch.no_grad():
        expected = model.forward(x)
    model.eval()
    assert torch.equal(model(x), expected) and not opt._forwards.seen.forwards
    model.train()
    with torch.no_grad():
        assert torch.equal(model(x), expected) and not opt._forwards.seen.forwards
    calls: list[nn.Module] = []
    handle = model.register_forward_hook(lambda module, args, output: calls.append(module))
    F.cross_entropy(model(x), y).backward()
    assert set(calls) == {model} and opt._forwards.seen.forwards == 1
    handle.remove()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_of_the_model_drop_the_call_and_nothing_else(copied: Callable[[Any], Any]) -> None:
    model = mlp()
    net = kfac_fx.compile(model, loss="categorical", in_place=True)
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    other = copied(model)
    assert {**other.__dict__}.keys() == model.__dict__.keys() - {"_compiled_call_impl"}
    assert_same(values(model), values(other))
    other(batch(0)[0])
    assert opt._forwards.seen.forwards == 0
    kfac_fx.KFAC(kfac_fx.compile(other, loss="categorical", in_place=True), lr=0.1, damping=0.1)
    again = copy.deepcopy(net)
    assert again.in_place and again.model is not model


def test_detaching_gives_the_model_its_own_call_back() -> None:
    model, calls = mlp(), []
    net = kfac_fx.compile(model, loss="categorical", in_place=True)
    model._compiled_call_impl = lambda *args: (calls.append(args), model.forward(*args))[1]  # as model.compile() does
    mine = model._compiled_call_impl
    opt = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    model(batch(0)[0])
    assert opt._forwards.seen.forwards == 1 and len(calls) == 1  # which the user's call runs, and the proof does not
    net.detach()
    assert model._compiled_call_impl is mine
    net.detach()


def test_a_model_records_for_one_optimizer_alone() -> None:
    model = mlp()
    first = kfac_fx.compile(model, loss="categorical", in_place=True)
    opt = kfac_fx.KFAC(first, lr=0.1, damping=0.1)
    second = kfac_fx.compile(model, batch(0)[:1], loss="categorical", in_place=True)  # whose proof is no forward
    kfac_fx.FisherEstimator(second).update_covariances(batch(0)[0])
    assert opt._forwards.seen.forwards == 0
    with pytest.raises(kfac_fx.AlreadyAttachedError, match=r"compiled in place before.*\n.*kfac_fx\.detach\(model\)"):
        kfac_fx.KFAC(second, lr=0.1, damping=0.1)
    first.detach()
    other = kfac_fx.KFAC(second, lr=0.1, damping=0.1)
    model(batch(0)[0])
    assert (opt._forwards.seen.forwards, other._forwards.seen.forwards) == (0, 1)


def test_a_model_inside_of_another_records_for_itself() -> None:
    """A critic that a generator calls, each with an optimizer."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()
            self.held = [inner]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.held[0](self.layer(x))
            return y

    inner = mlp()
    opt = kfac_fx.KFAC(kfac_fx.compile(inner, loss="categorical", in_place=True), lr=0.1, damping=0.1)
    outer = Outer(inner)
    outer(batch(0)[0])
    assert opt._forwards.seen.forwards == 1


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()

    def forward(self, ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        y: Tensor = self.layer(ids) * scale
        return y


def test_the_signature_of_forward_is_that_of_the_model() -> None:
    model = Keywords()
    net = kfac_fx.compile(model, loss="categorical")
    assert inspect.signature(net.forward) == inspect.signature(model.forward)
    assert torch.equal(net(ids=batch(0)[0], scale=2.0), model(batch(0)[0], scale=2.0))
    assert inspect.signature(copy.deepcopy(net).forward) == inspect.signature(model.forward)


def test_wrappers_made_later_call_the_model_that_records() -> None:
    model = mlp()
    opt = kfac_fx.KFAC(kfac_fx.compile(model, loss="categorical", in_place=True), lr=0.1, damping=0.1)
    wrapped = nn.Sequential(model)
    F.cross_entropy(wrapped(batch(0)[0]), batch(0)[1]).backward()
    assert opt._forwards.seen.forwards == 1
    opt.step()
    assert opt.counter == 1


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_backend_compiles_the_forward_of_the_model() -> None:
    expected = trained(lambda net: net, mlp(), lr=0.3)
    in_place = trained(lambda net: net.model, mlp(), lr=0.3, in_place=True, backend="aot_eager")
    for name, value in expected.items():
        torch.testing.assert_close(in_place[name], value, equal_nan=True)


def test_a_model_whose_parts_are_called_is_told_to_compile_what_is_called() -> None:
    model = mlp()
    opt = kfac_fx.KFAC(kfac_fx.compile(model, loss="categorical", in_place=True), lr=0.1, damping=0.1)
    F.cross_entropy(model[1:](model[0](batch(0)[0])), batch(0)[1]).backward()
    with pytest.raises(kfac_fx.FactorNotReady, match="Sequential is compiled in place, and was not called") as error:
        opt.step()
    assert str(error.value).endswith(
        "Calls of its parts record nothing, such as those in the training_step of a LightningModule: compile the "
        "module that is called, as in kfac_fx.compile(self.model, ..., in_place=True). Neither do those of "
        "torch.compile(model), which traces past the recording: write kfac_fx.compile(torch.compile(model), ..., "
        "in_place=True) and call net(x)"
    )


def test_gradients_of_a_model_that_does_not_record_are_told_what_to_write() -> None:
    model = mlp()
    opt = kfac_fx.KFAC(kfac_fx.compile(model, loss="categorical"), lr=0.1, damping=0.1)
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    with pytest.raises(
        kfac_fx.FactorNotReady, match=r"net\(x\) and not the model.*compile\(model, ..., in_place=True\)"
    ):
        opt.step()
    opt.net(batch(0)[0])
    opt.step()
    F.cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
    with pytest.warns(RuntimeWarning, match="no forward was recorded before it.*\n.*in_place=True"):
        opt.step()


# --- a second optimizer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduled", [False, True], ids=["alone", "with a scheduler, which makes a circle"])
def test_a_second_compile_takes_over_from_an_optimizer_that_is_gone(scheduled: bool) -> None:
    model = mlp()

    def make() -> kfac_fx.KFAC:
        return kfac_fx.KFAC(kfac_fx.compile(model, loss="categorical", in_place=True), lr=0.3, damping=0.1, seed=0)

    def step(optimizer: kfac_fx.KFAC) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()

    start = {name: value.clone() for name, value in model.state_dict().items()}
    first = make()
    if scheduled:
        torch.optim.lr_scheduler.StepLR(first, 1)
    step(first)
    expected = values(model)
    model.load_state_dict(start)
    del first
    second = make()
    step(second)
    assert_same(expected, values(model))
    with pytest.raises(kfac_fx.AlreadyAttachedError, match="which is still there"):
        make()
    kfac_fx.detach(model)
    third = make()
    model(batch(0)[0])
    assert third._forwards.seen.forwards == 1


def test_a_model_whose_optimizer_is_gone_does_not_record() -> None:
    model = mlp()
    net = kfac_fx.compile(model, loss="categorical", in_place=True)
    optimizer = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    model(batch(0)[0]).sum().backward()
    kfac_fx.KFAC(net, lr=0.1, damping=0.1)


def test_detach_reaches_wrappers_and_modules_inside_and_leaves_others_alone() -> None:
    inner = mlp()
    outer = nn.Sequential(inner, nn.Linear(4, 4).double())
    optimizer = kfac_fx.KFAC(kfac_fx.compile(inner, loss="categorical", in_place=True), lr=0.1, damping=0.1)
    kfac_fx.detach(outer[1])
    inner(batch(0)[0])
    assert optimizer._forwards.seen.forwards == 1
    kfac_fx.detach(outer)
    assert "_compiled_call_impl" not in inner.__dict__
    inner(batch(0)[0])
    assert optimizer._forwards.seen.forwards == 1
    kfac_fx.detach(outer)  # there is nothing to detach
    wrapper = torch.compile(inner, backend="eager")
    net = kfac_fx.compile(wrapper, batch(0)[:1], loss="categorical", in_place=True)
    kept = kfac_fx.KFAC(net, lr=0.1, damping=0.1)
    with pytest.raises(kfac_fx.AlreadyAttachedError, match="compiled in place before"):
        kfac_fx.KFAC(kfac_fx.compile(inner, loss="categorical", in_place=True), lr=0.1, damping=0.1)
    kfac_fx.detach(inner)
    again = kfac_fx.KFAC(kfac_fx.compile(inner, loss="categorical", in_place=True), lr=0.1, damping=0.1)
    kfac_fx.detach(again.net)
    assert net._listener is None and kept is not None and "_compiled_call_impl" not in inner.__dict__
    with pytest.raises(TypeError, match=r"kfac_fx.detach takes a torch.nn.Module, not a list"):
        kfac_fx.detach([])  # type: ignore[arg-type]


def test_a_module_that_is_an_attribute_is_not_in_the_state_of_its_owner() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def compiled(self) -> kfac_fx.KFAC:
            self.net = kfac_fx.compile(self.model, loss="categorical", in_place=True)
            return kfac_fx.KFAC(self.net, lr=0.1, damping=0.1)

    owner, fresh = Owner(), Owner()
    plain = owner.state_dict()
    kept = owner.compiled()
    assert owner.state_dict().keys() == plain.keys()
    assert owner.net.state_dict().keys() == owner.model.state_dict().keys()  # its own has everything
    state = {name: value + 1 for name, value in owner.state_dict().items()}
    fresh.load_state_dict(state)  # before it is compiled
    owner.load_state_dict(state)  # and after
    assert_same(values(owner.model), values(fresh.model))
    owner.net.load_state_dict(plain, strict=False)
    owner.net.load_state_dict({name.removeprefix("model."): value for name, value in plain.items()})
    assert_same(values(owner.model), {name.removeprefix("model."): value for name, value in plain.items()})
    with pytest.raises(RuntimeError, match="Missing key"):
        owner.load_state_dict({})
    with pytest.raises(RuntimeError, match="Missing key"):
        owner.net.load_state_dict({})
    not_in_place = Owner()
    not_in_place.net = kfac_fx.compile(mlp(), loss="categorical")
    assert any(name.startswith("net.") for name in not_in_place.state_dict())  # it is the one that is called
    del kept
