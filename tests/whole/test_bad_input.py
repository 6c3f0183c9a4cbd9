"""One row for every wrong input over the whole API: the call, the kind of the error, and what it says to write.

Further rows of `compile` are in test_compiler.py, those of KFAC's options in test_options.py.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from kfac_fx import InputError, LossError, ModelChangedError, RegistrationError, UntraceableError, losses

X, Y = torch.randn(8, 4), torch.arange(8) % 3
META = torch.empty((), device="meta")


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x)}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def compiled(model: nn.Module | None = None, inputs: Any = None, **options: Any) -> Any:
    return kfac_fx.compile(model or mlp(), inputs, **{"loss": "categorical", **options})


def trained(**options: Any) -> tuple[Any, kfac_fx.KFAC]:
    net = compiled()
    opt = kfac_fx.KFAC(net, **{"lr": 0.1, "damping": 0.1, **options})
    train(net, opt)
    return net, opt


def train(net: Any, opt: kfac_fx.KFAC, x: Tensor = X) -> None:
    opt.zero_grad()
    F.cross_entropy(net(x), Y).backward()
    opt.step()


def estimated(**options: Any) -> Any:
    est = kfac_fx.FisherEstimator(compiled(), **{"damping": 0.1, **options})
    est.update_covariances(X)
    est.update_inverses()
    return est


def vector(entry: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {name: entry(torch.ones_like(parameter)) for name, parameter in mlp().named_parameters()}


def recorded(mode: str = "empirical", **options: Any) -> Any:
    return compiled().record((X,), {}, mode=mode, **options)


def collection() -> Any:
    lc = kfac_fx.LayerCollection(kfac_fx.capture(mlp(), (X,)))
    lc.register_categorical_predictive_distribution(lc.outputs_of("2"))
    return lc


def in_inference_mode(action: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return action()


def of_wider_parameters() -> None:
    net, opt = trained()
    net.model[0].weight.data, net.model[0].bias.data = torch.randn(7, 4), torch.randn(7)
    net.model[2].weight.data = torch.randn(3, 7)
    train(net, opt)


def loaded(change: Callable[[dict[str, Any]], Any]) -> None:
    _, opt = trained()
    state = copy.deepcopy(opt.state_dict())
    changed = change(state)
    opt.load_state_dict(state if changed is None else changed)


def no_lr(name: str, value: Any) -> None:
    net, opt = trained()
    opt.param_groups[0][name] = value
    train(net, opt)


def stepped(*args: Any, **kwargs: Any) -> None:
    net, opt = trained()
    F.cross_entropy(net(X), Y).backward()
    opt.step(*args, **kwargs)


Rows = dict[str, tuple[Callable[[], Any], type[Exception], str]]
INPUTS: Rows = {
    "KFAC of torch.compile(net)": (
        lambda: kfac_fx.KFAC(torch.compile(compiled(), backend="eager")), ValueError,
        r"KFAC takes the module that kfac_fx.compile returned, and got OptimizedModule around it: write KFAC\(net, ",
    ),
    "FisherEstimator of torch.compile(net)": (
        lambda: kfac_fx.FisherEstimator(torch.compile(compiled(), backend="eager")),  # type: ignore[arg-type]
        ValueError, r"got OptimizedModule around it: write FisherEstimator\(net, ",
    ),
    "KFAC of a list": (lambda: kfac_fx.KFAC([1]), ValueError, "KFAC needs a compiled module and got a list"),
    "a meta model": (
        lambda: kfac_fx.KFAC(compiled(mlp().to("meta"))), UntraceableError,
        "on the meta device and have no values, so nothing can be .* trained: 0.weight, 0.bias",
    ),
    "a record of a meta model": (
        lambda: compiled(mlp().to("meta"), (X.to("meta"),), verify=False).record((X.to("meta"),), {}),
        UntraceableError, "on the meta device and have no values",
    ),
    "capture(None)": (lambda: kfac_fx.capture(None), TypeError, "capture takes a torch.nn.Module, not a NoneType"),  # type: ignore[arg-type]
    "capture of a class": (
        lambda: kfac_fx.capture(nn.Linear), TypeError, r"capture takes .*, and got the class: write Linear\(\.\.\.\)",  # type: ignore[arg-type]
    ),
    "capture of a name that would be executed": (
        lambda: kfac_fx.capture(nn.Sequential(__import__("collections").OrderedDict({'a"b': nn.Linear(4, 3)})), (X,)),
        UntraceableError, "Rename the modules, parameters and buffers",
    ),
    "a surrogate in a name": (
        lambda: kfac_fx.compile(nn.Sequential(__import__("collections").OrderedDict({"a\ud800": nn.Linear(4, 3)}))),
        UntraceableError, r"'a\\ud800'.*\nRename the modules, .* line breaks and surrogates\.",
    ),
    "inputs, a number": (lambda: compiled(inputs=3), TypeError, r"example_inputs is a int; .* write \(x,\) for one"),
    "inputs, a dict": (lambda: compiled(inputs={"x": X}), TypeError, "must be a tuple: write example_kwargs={'x': x}"),
    "kwargs, a list": (lambda: compiled(example_kwargs=[X]), TypeError, "example_kwargs is a list; it must be a dict"),
    **{
        f"{option} is a text": (lambda option=option: compiled(**{option: "no"}), ValueError, f"{option} is 'no'; it m")
        for option in ("strict", "verify", "in_place")
    },
    "backend=3": (lambda: compiled(backend=3), ValueError, "backend 3 is none of 'eager', 'inductor'"),
    "linked=3": (lambda: compiled(linked=3), kfac_fx.LinkError, "linked takes groups of names, .*, not a int"),
    "linked=[3]": (lambda: compiled(linked=[3]), kfac_fx.LinkError, "linked takes groups of names, .*, not a int"),
    "layers=3": (lambda: compiled(layers=3), kfac_fx.LayerError, "layers takes a list of layers .*, and got a int"),
    **{
        f"sub_sample_{of}={value!r}": (
            lambda of=of, value=value: compiled(**{f"sub_sample_{of}": value}), RegistrationError,
            f"sub_sample_{of} is .*; it must be True, False or a finite number",
        )
        for of in ("inputs", "patches") for value in ("a", math.inf, None)
    },
    "record of a tensor": (
        lambda: compiled().record(X, {}), TypeError,
        r"a tuple and a dict, and not a Tensor and a dict: write .*, as in net.record\(\(x,\), \{\}\)",
    ),
    "functional of a tensor": (lambda: compiled().functional({}, X, {}), TypeError, "not a Tensor and a dict"),
    "record without kwargs": (lambda: compiled().record((X,), None), TypeError, "not a tuple and a NoneType"),
    "fraction=2": (lambda: recorded("gradients", fraction=2), ValueError, "fraction is 2; it must be above 0 and at m"),
    "fraction=0": (lambda: recorded("gradients", fraction=0), ValueError, "fraction is 0; it must be above 0 and at m"),
    "memory=-1": (lambda: recorded("exact", memory=-1), ValueError, "memory is -1; it must be a whole number of bytes"),
    "only, a name": (lambda: recorded("gradients", only="0.w"), ValueError, "only is '0.w'; it must be several names"),
    "only, a number": (lambda: recorded("gradients", only=3), ValueError, "only is 3; it must be several names"),
    "only, unknown names": (
        lambda: recorded("gradients", only=["0.weigth", 3]), ValueError,
        "only has entries that are no names of trained parameters: '0.weigth', 3. Did you mean '0.weight'?",
    ),
    **{
        f"functional of {parameters!r}": (
            lambda parameters=parameters: compiled().functional(parameters, (X,), {}), TypeError,
            r"parameters is a .*; it must be a dict of tensors by parameter name, as in dict",
        )
        for parameters in (None, 3)
    },
    "functional of numbers": (
        lambda: compiled().functional({"0.weight": 3}, (X,), {}), TypeError, "values that are no tensors: '0.weight'",
    ),
    "functional of other names": (
        lambda: compiled().functional({"0.weigth": X}, (X,), {}), ValueError,
        r"names that are not in net.named_parameters\(\): '0.weigth'. Did you mean '0.weight'?",
    ),
    **{
        f"attach({listener!r})": (
            lambda listener=listener: compiled().attach(listener), TypeError,
            r"attach takes an optimizer with the methods of ForwardListener, .*: KFAC\(net\) attaches itself",
        )
        for listener in (None, 3)
    },
    "a generator": (lambda: recorded("gradients", generator=3), ValueError, "generator is 3; it must be a torch.Gener"),
    "mode=None": (lambda: recorded(None), ValueError, "mode None is none of 'gradients', "),  # type: ignore[arg-type]
}  # fmt: skip
LOSSES: Rows = {
    "a loss of no outputs": (
        lambda: recorded("gradients") and compiled(loss=lambda: 1), LossError,
        "what the model returns, and does not take that: too many positional arguments. K-FAC draws targets from the ",
    ),
    "a loss of two": (lambda: compiled(loss=lambda o, y: 1), LossError, "missing a required argument: 'y'. K-FAC dr"),
    **{
        f"{name} of a mapping": (
            lambda name=name: compiled(Mapped(), (X,), loss=name), LossError,
            rf"loss='{name}' needs one output tensor, and the model returns a dict of 'logits': \[8, 2\]\.\nIf forward "
            r"returns a loss where it gets labels, .*leave loss= out\.\nFor the loss .*outputs\['logits'\]\)+$",
        )
        for name in ("categorical", "mse")
    },
    "a name of one loss for two outputs": (
        lambda: compiled(Heads(), (X,), loss="mse"), LossError,
        r"returns a tuple of \[8, 2\], \[8, 1\]\.\nFor .*outputs\[0\].*\nFor several outputs write loss=lambda out",
    ),
    "a function that fails on the outputs": (lambda: compiled(Mapped(), (X,), loss=lambda o: o[0]), KeyError, "0"),
    "a loss that is a class": (lambda: compiled(loss=int), LossError, "loss is a type; pass a name"),
    "a variance of text": (lambda: losses.Normal(X, var="a"), LossError, "var is 'a'; it must be a positive float"),  # type: ignore[arg-type]
    "no logits": (lambda: losses.Categorical(None), LossError, "Categorical takes tensors .*, and got a NoneType"),  # type: ignore[arg-type]
    "no mean": (lambda: losses.Normal(None), LossError, "Normal takes tensors that forward returns, and got a NoneT"),  # type: ignore[arg-type]
    **{
        f"targets of {dtype}": (
            lambda dtype=dtype: recorded(targets=Y.to(dtype)), LossError,
            f"Categorical: targets are of {dtype}, expected class numbers, .*: write targets.long()",
        )
        for dtype in (torch.float32, torch.int32)
    },
    "targets of numpy": (
        lambda: recorded(targets=Y.numpy()), LossError, r"targets are a ndarray; write torch.as_tensor\(targets\)",
    ),
    "targets without values": (
        lambda: recorded(targets=Y.to("meta")), LossError,
        "Categorical: targets are on the meta device and have no values, the outputs on cpu: write targets on cpu",
    ),
    "a dict of targets": (lambda: recorded(targets={"y": Y}), LossError, "targets are a dict; write torch.as_tensor"),
    "targets out of range": (
        lambda: recorded(targets=Y + 9), LossError, r"Target \d+ is out of bounds. There are 3 classes, counted from 0",
    ),
}  # fmt: skip
ESTIMATORS: Rows = {
    "cov_ema_decay": (lambda: estimated(cov_ema_decay="a"), ValueError, "cov_ema_decay is 'a'; it must be a number"),
    "damping=None": (lambda: estimated(damping=None), ValueError, "damping is None; it must be a number"),
    "damping of two": (lambda: estimated(damping=torch.ones(2)), ValueError, r"damping is tensor.*; it must be a numb"),
    "exps=-1": (lambda: estimated(exps=-1), ValueError, r"exps is -1; it must be several numbers, as in \(-1,\)"),
    "exps of nan": (lambda: estimated(exps=[math.nan]), ValueError, "a number in exps is nan; it must be finite"),
    "cholesky": (lambda: estimated(compute_cholesky="no"), ValueError, "compute_cholesky is 'no'; it must be True or"),
    "batch_size=0": (lambda: estimated(batch_size=0), ValueError, "batch_size is 0; it must be a whole number of cas"),
    "seed": (lambda: estimated(seed="a"), ValueError, "seed is 'a'; it must be a whole number"),
    "process_group": (
        lambda: estimated(process_group="world"), ValueError, "process_group is 'world'; it must be a group of torch.d",
    ),
    "variables, a name": (
        lambda: estimated(variables="0.weight"), RegistrationError, "variables is '0.weight'; it takes a list of na",
    ),
    "decay of a fold": (lambda: estimated().fold(decay="a"), ValueError, "decay is 'a'; it must be a number"),
    "accept of a fold": (lambda: estimated().fold(accept=3), ValueError, "accept is 3; it must be a 0-dim tensor of t"),
    "an exponent": (
        lambda: estimated().multiply_matpower({}, 3), ValueError, r"exp is \{\}; it must be a number",
    ),
    "a vector of texts": (
        lambda: estimated().multiply_inverse(vector(lambda v: "a")), TypeError, r"0.weight is a str: write torch.as_te",
    ),
    "a vector of numpy": (
        lambda: estimated().spectrum().multiply(vector(lambda v: v.numpy())), TypeError, "0.weight is a ndarray: write",
    ),
    "a vector by parameters": (
        lambda: estimated().multiply_inverse(dict.fromkeys(mlp().parameters(), X)), TypeError,
        "a vector is a dict of tensors by parameter name, and has a key that is a Parameter",
    ),
    "a spectrum of integers": (
        lambda: estimated().spectrum().multiply(vector(lambda v: v.long())), TypeError, "of torch.int64: write tensor.",
    ),
    "a scale": (lambda: estimated().spectrum(scale=torch.tensor(-1.0)), ValueError, "scale is tensor.*not be negative"),
    "a scale of text": (lambda: estimated().spectrum(scale="a"), ValueError, "scale is 'a'; it must be a number"),
    "a damping": (lambda: estimated().spectrum(damping=math.nan), ValueError, "damping is nan; it must be finite"),
    **{
        f"{count!r} samples": (
            lambda count=count: estimated().spectrum().sample(count), ValueError, "count is .*; .* of samples, at leas",
        )
        for count in (0, -1, 1.5, "a", None)
    },
    **{
        f"a state {state!r}": (
            lambda state=state: estimated().load_state_dict(state), ValueError,
            "a state is a dict of tensors by name, and not a .*: write estimator.state_dict",
        )
        for state in (None, 3, "x")
    },
    "a state of nothing": (
        lambda: (est := estimated()).load_state_dict(dict.fromkeys(est.state_dict())), ValueError,
        "the state does not fit this estimator, and nothing of it is loaded: 23 entries are wrong\n  damping  ",
    ),
}  # fmt: skip
OPTIMIZERS: Rows = {
    "step(3)": (lambda: stepped(3), TypeError, r"step takes a closure by position, and got a int: write step\(loss="),
    "a loss of text": (lambda: stepped(loss="a"), ValueError, "the loss of a step is 'a'; it must be a number"),
    "a meta loss": (lambda: stepped(loss=META), ValueError, "the loss of a step is .* on the meta device; it must be"),
    "evaluate=3": (lambda: stepped(evaluate=3), TypeError, r"step\(evaluate=\.\.\.\) takes a closure that returns a l"),
    "previous=3": (lambda: stepped(previous=3), TypeError, r"step\(previous=\.\.\.\) takes a closure that returns a l"),
    **{
        f"damping = {value!r}": (
            lambda value=value: setattr(trained()[1], "damping", value), ValueError, "damping is .*; it must be a numb",
        )
        for value in ("a", None, torch.ones(2), META)
    },
    **{
        f"{name} of a group": (lambda name=name: no_lr(name, "a"), ValueError, f"{name} of a parameter group is 'a'; i")
        for name in ("lr", "momentum", "weight_decay")
    },
    "lr of two": (lambda: no_lr("lr", torch.ones(2)), ValueError, r"lr is tensor\(\[1., 1.\]\); it must be a number"),
    "params by name": (
        lambda: trained(params=["0.weight"]), TypeError, r"has parameters, and not '0.weight': write net.get_paramet",
    ),
    "a group of none": (lambda: trained(params=[{"lr": 1}]), TypeError, "a parameter group is a dict such as .*and no"),
    "a group that is a number": (
        lambda: trained()[1].add_param_group(3), TypeError, "a parameter group is a dict such as .*, and not 3",
    ),
    **{
        f"a spectrum in {dtype!r}": (
            lambda dtype=dtype: estimated().spectrum(dtype=dtype), ValueError,
            "dtype is .*; it must be torch.float32 or torch.float64",
        )
        for dtype in ("f", torch.int32)
    },
    **{
        f"a spectrum on {device!r}": (
            lambda device=device: estimated().spectrum(device=device), ValueError,
            f"device is '{device}'; it must be a device of this machine",
        )
        for device in ("nope", "meta")
    },
    "lr=None in a group": (
        lambda: trained()[1].add_param_group({"params": [], "lr": None}), ValueError, "lr is None; it must be a number",
    ),
    **{
        f"a state {state!r}": (
            lambda state=state: loaded(lambda _: state), ValueError, r"this is no state_dict of an optimizer, which ha",
        )
        for state in (3, {"state": None, "param_groups": []}, {"state": {}, "param_groups": None})
    },
    **{
        f"a state with a {value!r}": (
            lambda value=value: loaded(lambda s: s["state"][0].update(velocity=value)), ValueError,
            "and nothing of it is loaded: an entry is wrong\n  velocity of 0.weight  is ",
        )
        for value in (None, 3, "a", META)
    },
    "a state of an unknown kind": (
        lambda: loaded(lambda s: s["state"][0].update({"kfac/momentum_type": torch.tensor(77)})), ValueError,
        "momentum_type  another one in the state, 'regular' here",
    ),
}  # fmt: skip
COLLECTIONS: Rows = {
    **{
        f"outputs_of({name!r})": (
            lambda name=name: collection().outputs_of(name), RegistrationError, "a module is named here, as in outputs",
        )
        for name in (None, 3)
    },
    **{
        f"batch_size={size!r}": (
            lambda size=size: collection().auto_register_layers(batch_size=size), ValueError,
            "batch_size is .*; it must be a whole number of cases, at least 1",
        )
        for size in (0, "a", -1)
    },
    **{
        f"kind {kind!r}": (
            lambda kind=kind: collection().default_approximation(kind), kfac_fx.ApproximationError, "kind of layer",
        )
        for kind in (None, [])
    },
    "no approximation": (
        lambda: collection().set_default_generic_approximation([]), kfac_fx.ApproximationError, r"\[\] is none",
    ),
}  # fmt: skip
INFERENCE: Rows = {
    "compile": (lambda: in_inference_mode(compiled), RuntimeError, "a model is compiled in torch.inference_mode"),
    "capture": (lambda: in_inference_mode(lambda: kfac_fx.capture(mlp())), RuntimeError, "a model is captured in"),
    "a model": (
        lambda: compiled(in_inference_mode(mlp)), UntraceableError,
        "these parameters were made in torch.inference_mode and cannot be trained: 0.weight, .*\nMake the model out",
    ),
    "KFAC": (lambda: (n := compiled(), in_inference_mode(lambda: kfac_fx.KFAC(n))), RuntimeError, "a KFAC is create"),
    "step": (lambda: in_inference_mode(trained()[1].step), RuntimeError, "a step is taken in torch.inference_mode"),
    "record": (
        lambda: (n := compiled(), in_inference_mode(lambda: n.record((X,), {}))), RuntimeError, "a batch is recorded i",
    ),
    "FisherEstimator": (
        lambda: (n := compiled(), in_inference_mode(lambda: kfac_fx.FisherEstimator(n))), RuntimeError, "is created in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", INPUTS)
def test_wrong_models_and_inputs(row: str) -> None:
    raises(*INPUTS[row])


@pytest.mark.parametrize("row", LOSSES)
def test_wrong_losses_and_targets(row: str) -> None:
    raises(*LOSSES[row])


@pytest.mark.parametrize("row", ESTIMATORS)
def test_wrong_arguments_of_an_estimator(row: str) -> None:
    raises(*ESTIMATORS[row])


@pytest.mark.parametrize("row", OPTIMIZERS)
def test_wrong_arguments_of_an_optimizer(row: str) -> None:
    raises(*OPTIMIZERS[row])


@pytest.mark.parametrize("row", COLLECTIONS)
def test_wrong_arguments_of_a_collection(row: str) -> None:
    raises(*COLLECTIONS[row])


@pytest.mark.parametrize("row", INFERENCE)
def test_inference_mode(row: str) -> None:
    raises(*INFERENCE[row])


def raises(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("error", [KeyError("mine"), LossError("mine")])
def test_an_error_in_a_loss_of_the_user_is_its_own_and_says_who_called_it(error: Exception) -> None:
    def loss(outputs: Tensor) -> Any:
        raise error

    net = compiled(loss=loss)
    optimizer = kfac_fx.KFAC(net)
    with pytest.raises(type(error)) as raised:
        net(X)
    assert optimizer.counter == 0
    assert raised.value is error and raised.traceback[-1].name == "loss"
    assert error.__notes__ == [
        "the function given as loss raised this, called with what the model returned: a Tensor [8, 3]"
    ]


@pytest.mark.parametrize("mode", ["gradients", "empirical"])
@pytest.mark.parametrize("x", [X.double(), torch.randn(8, 7)], ids=["another dtype", "another shape"])
def test_inputs_that_the_model_refuses_raise_its_own_error(
    mode: str, x: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    net, _ = trained(estimation_mode=mode)
    with pytest.raises(RuntimeError) as of_model:
        net.model(x)
    with pytest.raises(RuntimeError) as of_net:
        net(x)
    assert str(of_net.value) == str(of_model.value)
    assert not any("<eval_with_key>" in str(entry.path) for entry in of_net.traceback)
    assert capsys.readouterr().err == ""  # fx prints generated code


def test_parameters_of_another_shape_are_named() -> None:
    with pytest.raises(
        ModelChangedError, match=r"another shape than .*\n  0.weight  was \[5, 4\] and is \[7, 4\]\n  0"
    ):
        of_wider_parameters()


def test_a_state_that_is_refused_changes_nothing() -> None:
    _, opt = trained()
    before = copy.deepcopy(opt.state_dict())
    wrong = copy.deepcopy(before)
    wrong["state"][0]["kfac/damping"] = None
    wrong["state"][0]["velocity"].fill_(7.0)
    with pytest.raises(ValueError, match="kfac/damping  is a NoneType"):
        opt.load_state_dict(wrong)
    after = opt.state_dict()["state"][0]
    torch.testing.assert_close(after, before["state"][0], rtol=0, atol=0, equal_nan=True)


def test_numbers_with_one_dimension_are_taken() -> None:
    _, opt = trained(lr=torch.tensor([0.1]), damping=torch.tensor([0.2]))
    assert opt.damping.shape == () and opt.damping.item() == pytest.approx(0.2)
    opt.damping = torch.tensor([0.3])
    assert opt.damping.item() == pytest.approx(0.3)
    est = estimated(damping=torch.tensor([0.5]))
    est.damping = np.float32(0.25)
    assert est.damping.item() == 0.25


OF_ITS_OWN_FORWARD = (
    "Sequential itself does not run on these inputs: the error is of its own forward, which runs here to be compared "
    "with its graph."
)


def test_an_error_of_the_models_own_forward_says_so() -> None:
    """torch's words come from behind many lines of the library."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        compiled()(torch.randn(8, 5))
    assert error.value.__notes__ == [
        OF_ITS_OWN_FORWARD,
        "The error is of 0, which got [8, 5].",
        "0 has in_features=4, and its input [8, 5] has 5 on dimension 1: write in_features=5 where it is made, or give "
        "it an input with 4 there.",
    ]


class Spectral(nn.Module):
    """Its number of channels is on another dimension than that of a convolution, and it has no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels, self.weight = 4, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_an_attribute_of_the_users_has_not_the_meaning_of_torchs() -> None:
    with pytest.raises(UntraceableError, match="must match the size of tensor") as error:
        kfac_fx.compile(nn.Sequential(Spectral()), (torch.randn(8, 5),), loss="mse")
    assert str(error.value).splitlines()[-1] == "Correct the inputs or the model."


class Narrow(nn.Module):
    """Its last layer takes more features than the layer before it has."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize(
    ("layers", "inputs", "said"),
    [
        ((nn.Linear(4, 12), nn.Linear(10, 2)), X, "layers.1 has in_features=10, and its input [8, 12] has 12 on dim"),
        (
            (nn.Conv2d(3, 4, 3),),
            torch.randn(2, 1, 5, 5),
            "layers.0 has in_channels=3, and its input [2, 1, 5, 5] has",
        ),
        ((nn.BatchNorm1d(3),), X, "layers.0 has num_features=3, and its input [8, 4] has 4 on dimension 1: write"),
        ((nn.LayerNorm(3),), X, "Correct the inputs or the model."),
    ],
    ids=["linear", "conv2d", "batch_norm", "layer_norm"],
)
def test_a_shape_that_does_not_fit_is_told_with_its_submodule_and_without_the_frames_of_torch(
    layers: tuple[nn.Module, ...], inputs: Tensor, said: str
) -> None:
    line = Narrow.forward.__code__.co_firstlineno + 1
    with pytest.raises(InputError) as error:
        kfac_fx.compile(Narrow(*layers), (inputs,), loss="categorical")
    first, place, source, advice = str(error.value).splitlines()
    assert first.startswith("Narrow does not run on these inputs: ")
    assert place.startswith(f"The error is of layers.{len(layers) - 1} (test_bad_input.py:{line}), which got [")
    assert source == "  out: Tensor = self.layers(x)" and advice.startswith(said)
    cause = error.value.__cause__
    assert cause is not None and [f.name for f in traceback.extract_tb(cause.__traceback__)] == ["forward"]
    assert cause.__context__ is None, "torch.export's error, whose traceback has hundreds of lines"


class Derives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(self.layer(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [
        (torch.no_grad, "torch.no_grad(), or write with torch.enable_grad(): in forward, around all that it derives."),
        (torch.inference_mode, "torch.inference_mode()."),
    ],
    ids=["no_grad", "inference_mode"],
)
def test_a_forward_that_takes_derivatives_says_so_where_gradients_are_off(mode: Any, remedy: str) -> None:
    net = kfac_fx.compile(Derives(), loss="normal").eval()
    with mode(), pytest.raises(RuntimeError, match="does not require grad") as error:
        net(torch.randn(8, 4))
    line = Derives.forward.__code__.co_firstlineno + 2
    assert error.value.__notes__ == [
        f"Forward takes a derivative at test_bad_input.py:{line}, and gradients are off here: call the module outside "
        f"of {remedy}"
    ]


OF_OTHER_DTYPES = (
    "The parameters have the dtype torch.float64, and the inputs torch.float32. If that is not meant, write x.double() "
    "of the inputs, or convert the model before it is compiled."
)


def test_an_error_of_other_dtypes_says_which_they_are() -> None:
    """torch names two tensors inside the model."""
    with pytest.raises(RuntimeError, match="must have the same dtype") as error:
        kfac_fx.compile(mlp().double(), loss="categorical")(X)
    first, *_, last = error.value.__notes__
    assert (first, last) == (OF_ITS_OWN_FORWARD, OF_OTHER_DTYPES)
    with pytest.raises(UntraceableError) as other:
        kfac_fx.compile(mlp(), (X[:, :3],), loss="categorical")
    assert not hasattr(other.value, "__notes__")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("example", [True, False], ids=["captured", "symbolic"])
def test_a_batch_of_another_dtype_is_refused_by_every_query_as_one_of_another_shape(
    dtype: torch.dtype, example: bool
) -> None:
    """torch's words passed through all that take a batch after the first capture."""
    net = kfac_fx.compile(mlp().eval(), (X,) if example else None, loss="categorical")
    spectrum = kfac_fx.fit_spectrum(net, [(X, torch.zeros(len(X), dtype=torch.int64))], damping=0.1)
    wrong, labels = X.to(dtype), torch.zeros(len(X), dtype=torch.int64)
    queries: list[Callable[[], object]] = [
        lambda: kfac_fx.fit_spectrum(net, [(wrong, labels)]),
        lambda: spectrum.self_scores((wrong, labels)),
        lambda: spectrum.precondition((wrong, labels)),
        lambda: spectrum.functional_variance(wrong),
        lambda: kfac_fx.compile(mlp(), (wrong,), loss="categorical"),
    ]
    for query in queries:
        with pytest.raises(InputError, match=r"the inputs torch\.\w+.*\bwrite x\.float\(\) of the inputs") as error:
            query()
        assert "The error is of 0, which got [" in str(error.value)


def test_example_inputs_of_another_dtype_are_refused_as_those_of_another_shape() -> None:
    with pytest.raises(InputError) as error:
        kfac_fx.compile(mlp().double(), (X,), loss="categorical")
    first, _, last = str(error.value).splitlines()
    assert first.startswith("Sequential does not run on these inputs: RuntimeError: mat1 and mat2 must have the same ")
    assert last == OF_OTHER_DTYPES
    with pytest.raises(UntraceableError, match=r"write x\.float\(\) of the inputs"):
        kfac_fx.compile(mlp(), (X.double(),), loss="categorical")


class AllOptional(nn.Module):
    """As models of Hugging Face are, whose arguments all have defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, pixel_values: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        assert pixel_values is not None
        out: Tensor = self.layer(pixel_values)
        return out


def test_a_typo_in_an_example_keyword_is_told_with_the_argument_that_was_meant() -> None:
    with pytest.raises(InputError) as error:
        kfac_fx.compile(AllOptional(), (), {"pixel_value": X}, loss="categorical")
    assert str(error.value) == (
        "these inputs do not fit AllOptional.forward(pixel_values, mask): it has no argument pixel_value (did you mean "
        "'pixel_values'?).\n"
        "Write net(pixel_values=...) in a call, and example_kwargs={'pixel_values': ...} in compile."
    )


def test_targets_by_position_and_a_batch_as_one_argument_are_told_by_their_names() -> None:
    estimator = kfac_fx.FisherEstimator(kfac_fx.compile(nn.Linear(4, 2), loss="categorical"))
    text = r"it takes 1 by their places, and got 2\.\n.* where a method of kfac_fx takes them, write targets=y\.$"
    with pytest.raises(UntraceableError, match=text):
        estimator.update_covariances(X, torch.zeros(8, dtype=torch.long))
    text = (
        r"A mapping of forward's arguments is no argument itself: write net\(\*\*batch\) in a call, .*example_kwargs="
    )
    with pytest.raises(UntraceableError, match=text):
        kfac_fx.compile(AllOptional(), ({"pixel_values": X},), loss="categorical")


def test_example_inputs_that_do_not_fit_forward_are_told_with_its_arguments() -> None:
    with pytest.raises(UntraceableError) as error:
        kfac_fx.compile(nn.Bilinear(4, 4, 2), ((X, X),), {"mask": X}, loss="categorical")
    assert str(error.value) == (
        "these inputs do not fit Bilinear.forward(input1, input2): input2 is missing, and it has no argument mask.\n"
        "Write net(input1, input2) in a call, and kfac_fx.compile(model, (input1, input2)) before."
    )


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.layer(x)
        return out if mask is None else out * mask[:, None]


OF_MASKED = "Masked.forward(x, mask): it has no argument labels"


def test_the_advice_for_a_batch_by_name_keeps_optional_arguments_and_targets() -> None:
    batch = {"x": X, "mask": torch.ones(len(X)), "labels": torch.zeros(len(X), dtype=torch.long)}
    write = (
        "Write net(x, mask=mask) in a call, and kfac_fx.compile(model, (x,), example_kwargs={'mask': mask}) before. "
        "Targets are no arguments of this forward: where a method of kfac_fx takes them, write targets=y."
    )
    with pytest.raises(UntraceableError) as first:
        kfac_fx.compile(Masked(), example_kwargs=batch, loss="categorical")
    assert str(first.value) == f"these inputs do not fit {OF_MASKED}.\n{write}"
    net = kfac_fx.compile(Masked(), (X, batch["mask"]), loss="categorical")
    for mode in (True, False):
        with pytest.raises(TypeError, match="unexpected keyword argument 'labels'") as later:
            net.train(mode)(**batch)
        assert later.value.__notes__ == [f"This call does not fit {OF_MASKED}. {write}"]
    with pytest.raises(TypeError) as error:
        kfac_fx.fit_spectrum(net, [batch])
    assert str(error.value).splitlines()[1] == (
        "Name its parts, as in [kfac_fx.Batch(batch['x'], mask=batch['mask'], targets=batch['labels']) for batch in "
        "loader]."
    )


class ByName(nn.Module):
    """Takes its input by name alone, and branches on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.layer(x)
        return out * scale if out.sum() > 0 else out


def test_the_advice_for_a_model_that_is_called_by_keywords_is_of_keywords_and_the_last_line() -> None:
    by_name = "kfac_fx.compile(model, example_kwargs={'x': x}"
    by_mapping = "kfac_fx.compile(model, example_kwargs=batch)"
    given: Any
    for given, last in ((X, by_name), ({"x": X}, by_mapping), ({"pixel_values": X}, by_name)):
        with pytest.raises(UntraceableError) as error:
            kfac_fx.compile(ByName(), (given,), loss="categorical")
        assert last in str(error.value).splitlines()[-1]
    with pytest.raises(UntraceableError) as error:
        kfac_fx.compile(AllOptional(), ({"pixel_values": X},), loss="categorical")
    assert by_mapping in str(error.value).splitlines()[-1]
    with pytest.raises(UntraceableError) as error:
        kfac_fx.KFAC(kfac_fx.compile(ByName(), loss="categorical"))
    assert by_name in str(error.value).splitlines()[0]
