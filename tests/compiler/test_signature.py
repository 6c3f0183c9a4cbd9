"""Inputs and outputs of a captured model: tensors cross its border, other objects are left out or refused."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfac_fx
from kfac_fx import UntraceableError
from kfac_fx.passes.trace import trace_model
from kfac_fx.passes.tracing.effects import python_random
from kfac_fx.passes.tracing.signature import call_key, capture_key, copy_with_strides, holds_tensor, layout
from tests.whole.training import differences, step

X = torch.randn(5, 3)


class Cache:
    """Keys of past positions, of a class that torch does not know."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Attention(nn.Module):
    """Fills a cache on the way, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, cache: Cache | None = None) -> dict[str, Any]:
        cache = Cache() if cache is None else cache
        cache.keys.append(self.key(x))
        return {"logits": self.head(cache.keys[-1].tanh()), "cache": cache}


def test_a_returned_cache_is_left_out_of_the_graph() -> None:
    net = kfac_fx.compile(Attention(), (X,), loss=lambda out: kfac_fx.losses.Categorical(out["logits"]))
    assert [str(registration) for registration in net.registrations] == [
        "linear(key.weight, key.bias)",
        "linear(head.weight, head.bias)",
    ]
    assert net.record((X,), {}).cases == 5
    assert isinstance(net(X)["cache"], Cache)
    outputs, _ = net.functional({}, (X,), {})
    assert repr(outputs["cache"]) == "<Cache, left out of the graph>"
    with pytest.raises(
        UntraceableError,
        match=r"a captured graph does not return the Cache, so its attribute 'keys' cannot be read.\nBuild",
    ):
        _ = outputs["cache"].keys
    with pytest.raises(
        UntraceableError,
        match="statistics cannot be recorded during training, because the forward of Attention(.|\n)*returns a Cache",
    ):
        net.record_in_training((X,), {})


@dataclass
class Batch:
    features: Tensor
    names: tuple[str, ...] = ()


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def test_tensors_inside_of_objects_are_found() -> None:
    assert holds_tensor(Batch(X)) and holds_tensor(Slotted({"a": [Batch(X)]})) and holds_tensor(Slotted(X))
    assert not holds_tensor(Slotted(3)) and not holds_tensor("x") and not holds_tensor(nn.Linear(2, 2))
    assert not holds_tensor(Batch) and not holds_tensor(torch.float32) and not holds_tensor(F.relu)


def test_an_argument_that_hides_tensors_is_no_constant() -> None:
    class Model(nn.Linear):
        def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
            return super().forward(batch.features)

    with pytest.raises(UntraceableError) as failure:
        trace_model(Model(3, 2), (Batch(X),))
    first, advice = str(failure.value).splitlines()
    assert (
        first
        == "Model takes Batch, objects that hold tensors. A captured graph would treat these tensors as constants."
    )
    assert "in tuples, lists or dictionaries, or register the class" in advice


class Drawing(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.inner, self.draw = nn.Linear(3, 2), draw

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) * (1 if self.draw() < 0.5 else 2)


@pytest.mark.parametrize("inputs", [None, (X,)], ids=["symbolic", "exported"])
@pytest.mark.parametrize(("draw", "name"), [(random.random, "random"), (np.random.rand, r"numpy\.random")])
def test_numbers_drawn_by_python_are_no_constants(draw: Any, name: str, inputs: Any) -> None:
    stream, array = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    with pytest.raises(
        UntraceableError, match=rf"Drawing draws random numbers from module {name}\. .*\nDraw them with torch"
    ):
        trace_model(Drawing(draw), inputs)
    assert random.getstate() == stream and np.random.get_state()[1].tolist() == array  # type: ignore[index, union-attr]


def test_the_streams_of_python_are_put_back_after_an_error() -> None:
    stream = random.getstate()
    with pytest.raises(ZeroDivisionError), python_random() as drawn:
        random.random()
        1 / 0  # noqa: B018
    assert random.getstate() == stream and drawn == ["random"]


def test_numpy_is_watched_with_every_bit_generator() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with python_random() as drawn:
            number = np.random.rand()
        assert drawn == ["numpy.random"] and np.random.rand() == number
    finally:
        np.random.set_bit_generator(before)


class Checkpointed(nn.Module):
    """Its first segment needs an input with a gradient, as all reentrant checkpoints do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        h = checkpoint(lambda t: F.dropout(torch.tanh(self.inner(t)), 0.3), self.first(x), use_reentrant=True)
        return self.last(h)


def test_what_a_reentrant_checkpoint_wraps_is_captured() -> None:
    model = Checkpointed()
    twin = copy.deepcopy(model)
    net = kfac_fx.compile(model, (X,), loss="normal")
    assert [registration.parameters[0] for registration in net.registrations] == [
        "first.weight",
        "inner.weight",
        "last.weight",
    ]
    net.record((X,), {})
    assert differences(step(twin, lambda: twin(X)), step(model, lambda: net(X))) == []
    assert differences(step(twin, lambda: twin(X)), step(model, lambda: net.record_in_training((X,), {})[0])) == []


def refusal(model: nn.Module, *inputs: Any) -> list[str]:
    with pytest.raises(UntraceableError) as failure:
        trace_model(model, inputs)
    return str(failure.value).splitlines()


def test_a_model_without_tensors_has_no_cases() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, scale: float) -> Any:
            return self.inner(scale * torch.ones(4, 3))

    first, advice = refusal(Constant(), 2.0)
    assert first == "Constant takes no tensors, but float."
    assert advice.startswith("The cases are counted in its inputs, and the loss is a function of its outputs")


def test_a_model_without_inputs_has_no_cases_either() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.w * 2

    assert refusal(Constant())[0] == "Constant takes no tensors."


def test_an_output_without_tensors_is_no_output() -> None:
    class Yielding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            return iter([self.inner(x)])

    assert refusal(Yielding(), torch.ones(4, 3))[0] == "Yielding returns no tensors, but list_iterator."


def test_a_call_is_told_by_all_that_a_capture_holds_for() -> None:
    x = torch.randn(5, 3)
    key = call_key((x,), {"scale": 2.0})
    assert key == call_key((torch.randn(7, 4),), {"scale": 2.0})  # sizes are told by the capture
    assert key != call_key((x[None],), {"scale": 2.0})
    assert key != call_key((x.double(),), {"scale": 2.0})
    assert key != call_key((x,), {"scale": 3.0})
    assert key != call_key((x,), {"other": 2.0})
    torch.set_default_dtype(torch.float64)
    try:
        assert key != call_key((x,), {"scale": 2.0})
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert key != call_key((x,), {"scale": 2.0})


def test_a_capture_is_of_the_modes_of_all_modules() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout()), torch.randn(5, 3)

    def key_of(model: nn.Module) -> Any:
        return capture_key(model.modules(), model.parameters(), (x,), {})

    key = key_of(model)
    model[1].eval()
    assert key_of(model) != key
    model[1].train()
    assert key_of(model) == key
    assert key_of(model.double()) != key


def test_dimensions_of_one_place_do_not_say_how_a_tensor_lies_in_memory() -> None:
    x = torch.randn(3, 1, 4)
    assert layout(x) == layout(x.as_strided((3, 1, 4), (4, 1, 1))) == layout(x.as_strided((3, 1, 4), (4, 99, 1)))
    assert layout(x) != layout(torch.randn(4, 1, 3).transpose(0, 2))
    assert layout(torch.randn(6, 4)[::2]) == (8, 1)  # with gaps


class Unlisted(nn.Module):
    """Layers in a plain list, so that torch does not know them; their parameters are in a list of torch's."""

    def __init__(self, name: str = "held", derivatives: bool = False) -> None:
        super().__init__()
        self.blocks, self.derivatives = [nn.Linear(3, 4), nn.Linear(4, 2)], derivatives
        setattr(self, name, nn.ParameterList([p for block in self.blocks for p in block.parameters()]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(self.derivatives)
        y = self.blocks[1](torch.tanh(self.blocks[0](x)))
        if not self.derivatives:
            return y  # type: ignore[no-any-return]
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.cat([y, slope], 1)


@pytest.mark.parametrize("derivatives", [False, True])
def test_parameters_in_modules_of_a_plain_list_have_their_blocks(derivatives: bool) -> None:
    torch.manual_seed(0)
    model = Unlisted(derivatives=derivatives)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = kfac_fx.compile(model, (X,), loss="mse", strict=True)
    assert net.captures.first.whole and not net.report.unused
    assert {registration.layer for registration in net.registrations} == {"linear"}
    optimizer = kfac_fx.KFAC(net)
    before = [parameter.clone() for parameter in model.parameters()]
    net(X).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_submodule_with_the_name_of_a_method_is_told() -> None:
    with pytest.raises(UntraceableError, match=r"names of attributes of their class, such as methods: parameters"):
        kfac_fx.compile(Unlisted("parameters"), (X,), loss="normal")


def test_a_submodule_without_tensors_may_have_the_name_of_a_method() -> None:
    class WithLoss(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.loss = nn.MSELoss()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self(x), y)

    assert len(kfac_fx.compile(WithLoss(), (X,), loss="mse").registrations) == 1


@pytest.mark.parametrize("expanded", [lambda x: x[:, None].expand(-1, 4, -1), lambda x: x[:1].expand(6, 5)])
def test_a_copy_of_an_expanded_tensor_is_expanded(expanded: Callable[[Tensor], Tensor]) -> None:
    tensor = expanded(torch.randn(3, 5))
    copied = copy_with_strides(tensor)
    assert torch.equal(copied, tensor) and copied.stride() == tensor.stride()
    assert copied.data_ptr() != tensor.data_ptr() and not copied._is_view()
