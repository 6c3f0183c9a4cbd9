"""Models that return objects: dataclasses, objects with attributes, subclasses of dict, classes that torch knows."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import LossError, UntraceableError
from kfac_fx.passes import results
from kfac_fx.passes.torch_private import pytree
from tests.tables import pairs

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)


class Plain:
    def __init__(self, logits: Tensor, cache: Any = None) -> None:
        self.logits, self.cache = logits, cache


class Slotted:
    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class WithProperty:
    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    @property
    def logits(self) -> Tensor:
        return self._logits


class ByAttribute(dict[str, Tensor]):
    @property
    def logits(self) -> Tensor:
        return self["logits"]


class Ordered(OrderedDict[str, Tensor]):
    """As the outputs of language models that are written by hand."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class OrderedTwice(OrderedDict[str, Tensor]):
    """Items that are attributes, too."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits=logits)
        self.logits = logits


class Defaulting(defaultdict[str, Any]):
    @property
    def logits(self) -> Any:
        return self["logits"]


class FirstOfList(list[Tensor]):
    @property
    def logits(self) -> Tensor:
        return self[0]


class FirstOfTuple(tuple[Tensor, ...]):
    __slots__ = ()

    def __new__(cls, *parts: Tensor) -> FirstOfTuple:
        return super().__new__(cls, parts)

    @property
    def logits(self) -> Tensor:
        return self[0]


class FirstOfDeque(deque[Tensor]):
    @property
    def logits(self) -> Tensor:
        return self[0]


class OfNamed(namedtuple("Pair", ["logits", "number"])):
    """A subclass of a named tuple, with a method."""

    def doubled(self) -> Any:
        return 2 * self.number


class Wrapped(UserDict[str, Tensor]):
    @property
    def logits(self) -> Tensor:
        return self["logits"]


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    name: str = "frozen"


@dataclass
class Exported:
    logits: Tensor


class Registered(Plain):
    """Known to torch's pytree by a function of the user's."""


class Named(NamedTuple):
    logits: Tensor
    number: int


torch.export.register_dataclass(Exported, serialized_type_name="kfac_fx.tests.Exported")
pytree.register_pytree_node(
    Registered, lambda value: ([value.logits], None), lambda values, _: Registered(*values), flatten_with_keys_fn=None
)
MODES = ("empirical", "exact")
Make = Callable[[Tensor, Tensor], Any]
OUTPUTS: dict[str, Make] = {
    "object": lambda logits, h: Plain(logits, [h.detach()]),
    "object with an object": lambda logits, h: Plain(logits, Plain(h)),
    "slots": lambda logits, h: Slotted(logits),
    "property": lambda logits, h: WithProperty(logits),
    "subclass of dict": lambda logits, h: ByAttribute(logits=logits, h=h),
    "subclass of OrderedDict": lambda logits, h: Ordered(h=h, logits=logits),
    "subclass of OrderedDict with attributes": lambda logits, h: OrderedTwice(logits),
    "subclass of defaultdict": lambda logits, h: Defaulting(list, {"logits": logits}),
    "subclass of list": lambda logits, h: FirstOfList([logits, h]),
    "subclass of tuple": lambda logits, h: FirstOfTuple(logits, h),
    "subclass of deque": lambda logits, h: FirstOfDeque([logits, h]),
    "subclass of a named tuple": lambda logits, h: OfNamed(logits, 3),
    "UserDict": lambda logits, h: Wrapped(logits=logits),
    "frozen dataclass": lambda logits, h: Frozen(logits),
    "registered dataclass": lambda logits, h: Exported(logits),
    "registered class": lambda logits, h: Registered(logits),
    "named tuple": lambda logits, h: Named(logits, 3),
}


class Model(nn.Module):
    """branches: Python asks for a value, so that no single graph holds the model."""

    def __init__(self, make: Make, branches: bool = False) -> None:
        super().__init__()
        self.first, self.head, self.make, self.branches = nn.Linear(4, 5), nn.Linear(5, 3), make, branches

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        if self.branches and bool(h.sum() > 1e9):
            h = 2 * h
        return self.make(self.head(h), h)


class WithLoss(Model):
    """Its first output is the loss."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(torch.tanh(self.first(x)))
        return self.make(F.cross_entropy(logits, y), logits)


def loss(outputs: Any) -> kfac_fx.losses.Categorical:
    return kfac_fx.losses.Categorical(outputs.logits)


@pytest.fixture(scope="module")
def wanted() -> Any:
    torch.manual_seed(0)
    net = kfac_fx.compile(Model(lambda logits, h: logits), (X,), loss="categorical")
    return [net.record((X,), {}, mode=mode, targets=Y).statistics for mode in MODES]


@pairs(("branches", {"one graph": False, "parts": True}), ("make", OUTPUTS))
def test_the_statistics_are_those_of_a_model_that_returns_a_tensor(make: Make, branches: bool, wanted: Any) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Model(make, branches), (X,), loss=loss)
    assert bool(net.program.submodules) is branches
    found = [net.record((X,), {}, mode=mode, targets=Y).statistics for mode in MODES]
    torch.testing.assert_close(found, wanted)


@pairs(
    ("mode", ["gradients", "empirical"]),
    ("make", {name: make for name, make in OUTPUTS.items() if name != "object with an object"}),
)
def test_training_returns_the_object_and_trains(make: Make, mode: str) -> None:
    torch.manual_seed(0)
    model = Model(make)
    net = kfac_fx.compile(model, (X,), loss=loss)
    optimizer, losses = kfac_fx.KFAC(net, estimation_mode=mode), list[float]()
    for _ in range(10):
        optimizer.zero_grad()
        outputs = net(X)
        assert type(outputs) is type(model(X))
        value = F.cross_entropy(outputs.logits, Y)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < 0.9 * losses[0] and "not checked" not in str(net.report)


def test_a_dataclass_is_captured_at_the_first_training_forward() -> None:
    net = kfac_fx.compile(Model(lambda logits, h: Frozen(logits)), loss=loss)
    text = r"has no graph yet.*write kfac_fx\.compile\(model, \(x,\), \.\.\.\)(?s:.*)Model returns a Frozen"
    with pytest.raises(kfac_fx.UntraceableError, match=text):
        kfac_fx.KFAC(net)
    assert isinstance(net(X), Frozen)
    statistics = net.record((X,), {}, mode="exact").statistics
    assert {"first.weight,first.bias", "head.weight,head.bias"} == {",".join(key) for key in statistics}
    kfac_fx.KFAC(net)


WITHOUT_INPUTS = [
    name for name in OUTPUTS if name.startswith("subclass") and name.split()[-1] not in ("deque", "tuple")
]
OF_CLASSES = {"subclass of a named tuple": "OfNamed", "named tuple": "Named", "frozen dataclass": "Frozen"}


@pytest.mark.parametrize("name", [*WITHOUT_INPUTS, "subclass of tuple"])
def test_a_subclass_of_a_container_trains_without_example_inputs(name: str) -> None:
    """Forward computes the loss."""
    torch.manual_seed(0)
    model = WithLoss(OUTPUTS[name])
    net = kfac_fx.compile(model)
    optimizer, losses = kfac_fx.KFAC(net), list[float]()
    for _ in range(10):
        optimizer.zero_grad()
        outputs = net(X, Y)
        assert type(outputs) is type(model(X, Y))
        value = outputs.logits  # the first output
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", [*WITHOUT_INPUTS, "subclass of tuple"])
def test_a_loss_function_takes_the_subclass_without_example_inputs(name: str, wanted: Any) -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(Model(OUTPUTS[name]), loss=loss)
    torch.testing.assert_close([net.record((X,), {}, mode=mode, targets=Y).statistics for mode in MODES], wanted)


@pytest.mark.parametrize("name", OF_CLASSES)
def test_without_example_inputs_an_object_whose_tensors_torch_fx_does_not_see_asks_for_them(name: str) -> None:
    text = f"WithLoss returns a {OF_CLASSES[name]}, and torch.fx does not see the tensors in it"
    net = kfac_fx.compile(WithLoss(OUTPUTS[name]))
    with pytest.raises(UntraceableError, match=text) as caught:
        kfac_fx.KFAC(net)
    assert "Give kfac_fx.compile example inputs" in str(caught.value)


def test_a_loss_by_name_says_which_attribute_to_take() -> None:
    text = "leave loss= out.\nFor the loss of an output write loss=lambda outputs: kfac_fx.losses.Categorical(outputs.l"
    with pytest.raises(LossError, match=re.escape(text)):
        kfac_fx.compile(Model(OUTPUTS["object"]), (X,), loss="categorical")


@dataclass
class LossAndLogits:
    loss: Tensor | None = None
    logits: Tensor | None = None


@pairs(("kind", [LossAndLogits, dict]), ("spec", ["categorical", "cross_entropy", "of a function"]))
def test_a_loss_on_a_model_that_returns_its_own_names_the_logits(kind: Any, spec: str) -> None:
    """It named the first attribute, which was the loss."""
    model = Model(lambda logits, h: kind(loss=F.cross_entropy(logits, Y), logits=logits))
    output = "outputs['logits']" if kind is dict else "outputs.logits"
    given: Any = spec
    if spec == "of a function":
        given = lambda outputs: kfac_fx.losses.Categorical(outputs["loss"] if kind is dict else outputs.loss)  # noqa: E731
    with pytest.raises(
        LossError, match=re.escape(f"loss=lambda outputs: kfac_fx.losses.Categorical({output})")
    ) as told:
        kfac_fx.compile(model, (X,), loss=given)
    text = str(told.value)
    assert "leave loss= out" in text
    if spec != "of a function":  # the shortest way is the first
        assert text.index("leave loss= out") < text.index("Categorical")


def test_a_loss_that_the_training_leaves_out_is_asked_for_as_the_model_returns_it() -> None:
    class WithTargets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            logits = self.layer(x)
            return LossAndLogits(None if y is None else F.cross_entropy(logits, y), logits)

    net = kfac_fx.compile(WithTargets(), (X, Y))
    opt = kfac_fx.KFAC(net)
    with pytest.warns(
        UserWarning, match=re.escape("lambda outputs: kfac_fx.losses.Categorical(outputs.logits)). Else")
    ):
        net(X)
    assert opt.estimator.estimation_mode == "empirical"


def test_an_object_next_to_tensors_is_left_out() -> None:
    """As the caches of language models, which are no outputs of the Fisher."""
    net = kfac_fx.compile(Model(lambda logits, h: (logits, Plain(h))), (X,), loss=lambda out: loss(Plain(out[0])))
    assert [recorder.capture.effects for recorder in net.captures.all] == [("returns a Plain",)]


@pytest.mark.parametrize("named", [False, True])
def test_a_distribution_next_to_tensors_is_an_output(named: bool) -> None:
    """As the policy and the value of an actor and critic."""
    torch.manual_seed(0)
    model = Model(lambda logits, h: (torch.distributions.Categorical(logits=logits), h.sum(1)))
    plain = copy.deepcopy(model)
    net = kfac_fx.compile(model, (X,), loss=(lambda out: loss(out[0])) if named else None)
    optimizer, losses = kfac_fx.KFAC(net), list[float]()

    def trained_loss(of: Any) -> Tensor:
        policy, value = of(X)
        total: Tensor = value.square().mean() - policy.log_prob(Y).mean() - 0.01 * policy.entropy().mean()
        return total

    trained_loss(plain).backward()
    for step in range(10):
        optimizer.zero_grad()
        value = trained_loss(net)
        value.backward()
        for parameter, of_plain in zip(net.parameters(), plain.parameters(), strict=True):
            assert step > 0 or torch.equal(cast(Any, parameter.grad), cast(Any, of_plain.grad))
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < 0.9 * losses[0] and not net.report.unused
    assert not any("returns a" in effect for recorder in net.captures.all for effect in recorder.capture.effects)


def test_an_object_is_put_together_again() -> None:
    logits, h = torch.zeros(2), torch.ones(3)
    for make in OUTPUTS.values():
        value = make(logits, h)
        leaves, spec = results.tree_flatten(value)
        assert len(leaves) == len({*map(id, leaves)})
        assert spec.num_leaves == len(leaves) and any(leaf is logits for leaf in leaves)
        again = results.tree_unflatten(leaves, spec)
        assert type(again) is type(value) and again.logits is logits
        assert not isinstance(value, dict) or list(again.items()) == list(value.items())
        assert getattr(again, "default_factory", None) is getattr(value, "default_factory", None)
        assert results.tree_flatten(again)[1] == spec
    without_tensors = Plain(cast(Any, [1, 2]))
    assert results.tree_leaves((without_tensors, 3)) == [without_tensors, 3]
