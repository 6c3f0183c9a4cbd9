"""Names and shapes that torch allows work, or an error says which and what to write."""

from __future__ import annotations

import copy
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from benchmarks.hostile.settings import Of
from kfac_fx.passes.rewrite import names_of_modules
from kfac_fx.recording.model_checks import repeats_elements
from tests.tables import pairs

KINDS = ("child", "norm", "parameter", "buffer")
PLAIN = nn.Module()


class Named(nn.Module):
    """A chain of children, parameters or buffers of these names, and a layer."""

    def __init__(self, kind: str, names: Sequence[str]) -> None:
        super().__init__()
        self.lin, self.kind, self.names_of_kind = nn.Linear(3, 2), kind, names
        for name in names:
            match kind:
                case "child":
                    self.add_module(name, nn.Linear(3, 3))
                case "norm":
                    self.add_module(name, nn.BatchNorm1d(3))
                case "parameter":
                    self.register_parameter(name, nn.Parameter(torch.rand(3)))
                case "buffer":
                    self.register_buffer(name, torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names_of_kind:
            held = getattr(self, name)
            x = x + 0.1 * torch.tanh(held(x) if self.kind in ("child", "norm") else x * held)
        return self.lin(x)  # type: ignore[no-any-return]


def trained(model: nn.Module, x: Tensor, inputs: bool, in_place: bool = False) -> kfac_fx.CompiledModule:
    """The compiled model after three steps that a plain copy of the model can follow, and after a checkpoint."""
    net = kfac_fx.compile(model, (x,) if inputs else None, loss="mse", in_place=in_place)
    optimizer, before = kfac_fx.KFAC(net), copy.deepcopy(model)
    assert torch.equal(net.eval()(x), before.eval()(x))
    net.train()
    target = torch.randn_like(net(x))
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss((model if in_place else net)(x), target).backward()
        optimizer.step()
    for (name, parameter), old in zip(model.named_parameters(), before.parameters(), strict=True):
        assert not parameter.requires_grad or not parameter.numel() or not torch.equal(parameter, old), name
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.net.detach()
    return net


# --- names ------------------------------------------------------------------------------------------------------------


OF_COMPILED = sorted(
    name
    for name in {*dir(kfac_fx.CompiledModule), "backend", "captures", "in_place", "model", "_plain", "_wrapper"}
    if not hasattr(PLAIN, name) and not name.startswith("__")
)


@pairs(("kind", KINDS), ("in_place", [False, True]))
def test_names_of_attributes_of_the_compiled_module(kind: str, in_place: bool) -> None:
    assert {"report", "losses", "registrations", "record", "captures"} <= {*OF_COMPILED}
    torch.manual_seed(0)
    model = Named(kind, OF_COMPILED)
    net = trained(model, torch.randn(6, 3), inputs=False, in_place=in_place)
    assert net.state_dict().keys() == model.state_dict().keys()
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in model.named_parameters()]
    for name in OF_COMPILED:
        if kind in ("child", "norm"):
            assert net.get_submodule(name) is model.get_submodule(name)
            assert net.get_parameter(f"{name}.weight") is model.get_parameter(f"{name}.weight")
        elif kind == "parameter":
            assert net.get_parameter(name) is model.get_parameter(name)
        else:
            assert net.get_buffer(name) is model.get_buffer(name)
    assert isinstance(net.report, kfac_fx.Report) and net.backend == "eager" and net.in_place is in_place


TWINS = ["\ufb01", "fi", "\u00b5", "\u03bc", "\u017f", "s", "\u00aa", "\U0001d431"]  # letters that Python reads alike
PUNCTUATION = ["a,b", "a", "b", "a/b", "a b", "a{b}", "a[0:2]", "a:b", "a=b", "<b>", "$x", "a-b", "a_b", "0", "_0"]
OF_GRAPHS = ["graph", "code", "meta", "_graph", "_code", "recompile", "print_readable", "to_folder"]
OF_CODE = ["self", "probes", "taps", "links", "computed", "renamed", "torch", "input_1", "output", "print", "device"]
KEYWORDS = ["in", "class", "from", "lambda", "None"]  # as the keys of many a ModuleDict


def test_the_names_are_what_the_tests_are_of() -> None:
    read = [unicodedata.normalize("NFKC", name) for name in TWINS]
    assert read[0] == read[1] and read[2] == read[3] and read[4] == read[5]
    assert names_of_modules() >= {*OF_GRAPHS} and not any(hasattr(PLAIN, name) for name in OF_GRAPHS)


@pairs(
    ("names", {"twins": TWINS, "punctuation": PUNCTUATION, "graphs": OF_GRAPHS, "code": OF_CODE, "keywords": KEYWORDS}),
    ("kind, inputs", [*((kind, False) for kind in KINDS), ("child", True), ("buffer", True)]),
)
def test_names_that_code_cannot_have(names: Sequence[str], kind: str, inputs: bool) -> None:
    torch.manual_seed(0)
    model, x = Named(kind, names), torch.randn(6, 3)
    if names is KEYWORDS and inputs and kind != "buffer":
        with pytest.raises(kfac_fx.UntraceableError, match=r"keywords of Python: .*\n.*leave the example inputs out"):
            trained(model, x, inputs)
        return
    net = trained(model, x, inputs)
    report = net.report
    assert len(report.rows) == len(names) * (kind != "buffer") + 1 and "generic" not in {r.layer for r in report.rows}
    assert report.to_json() and report.to_html() and report.to_dot()
    estimator = kfac_fx.FisherEstimator(net, damping=0.1)
    estimator.update_covariances(x)
    estimator.load_state_dict(estimator.state_dict())
    assert len(estimator.blocks) == len(report.rows)


def test_a_divided_model_may_have_them_too() -> None:
    class Divided(Named):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y if float(y.detach().sum()) < 1e9 else 2 * y  # no graph holds this

    torch.manual_seed(0)
    names = ["graph", "\ufb01", "fi", "self", "a,b"]
    net = trained(Divided("child", names), torch.randn(6, 3), inputs=True)
    assert net.program.submodules and "generic" not in {row.layer for row in net.report.rows}


def test_a_key_that_is_a_name_is_no_pattern() -> None:
    model = Named("child", ["*", "a?", "ab"])
    net = kfac_fx.compile(model, loss="mse", approximations={"*": "diagonal", "a?": "full"})
    chosen = {row.parameters[0]: row.approximation for row in net.report.rows}
    assert chosen == {"*.weight": "diagonal", "a?.weight": "full", "ab.weight": "kron", "lin.weight": "kron"}


@pytest.mark.parametrize(("kind", "name"), [("child", "kfac/x"), ("parameter", "kfac")])
def test_names_that_are_those_of_the_state_are_refused(kind: str, name: str) -> None:
    with pytest.raises(kfac_fx.UntraceableError, match=r"begin with 'kfac/'.*: kfac.*\nRename the parameters"):
        kfac_fx.compile(Named(kind, [name]), loss="mse")
    trained(Named("child", ["kfac"]), torch.randn(6, 3), inputs=False)


@pairs(
    ("name", ["self", "torch", "probes", "taps", "output", "input_1", "targets", "overwritten"]),
    ("inputs", {"fx": False, "export": True}),
)
def test_names_of_arguments_that_the_code_has(name: str, inputs: bool) -> None:
    space: dict[str, Any] = {"nn": nn}
    exec(f"class M(nn.Module):\n  def forward(this, x, {name}):\n    return this.lin(x * {name})\n", space)
    model = space["M"]()
    model.lin = nn.Linear(3, 2)
    x, scale = torch.randn(6, 3), torch.randn(6, 3)
    net = kfac_fx.compile(model, (x, scale) if inputs else None, loss="mse")
    optimizer = kfac_fx.KFAC(net)
    net(x, scale).square().mean().backward()
    optimizer.step()
    assert optimizer.skipped == 0 and len(net.registrations) == 1


# --- shapes and dtypes ------------------------------------------------------------------------------------------------


def linear(inputs: int, outputs: int, **options: Any) -> nn.Linear:
    """A layer without elements; torch warns that it does not initialize them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return nn.Linear(inputs, outputs, **options)


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


WORKING: dict[str, Callable[[], nn.Module]] = {
    "a layer of 0 outputs and one of 0 inputs": lambda: Of(
        lambda m, x: m.b(m.a(x)) + m.c(x), a=linear(4, 0), b=linear(0, 2), c=nn.Linear(4, 2)
    ),
    "without biases": lambda: Of(
        lambda m, x: m.b(m.a(x)) + m.c(x), a=linear(4, 0, bias=False), b=linear(0, 2, bias=False), c=nn.Linear(4, 2)
    ),
    "a parameter without elements": lambda: Of(
        lambda m, x: m.c(x) + m.p.sum(), p=nn.Parameter(torch.zeros(0)), c=nn.Linear(4, 2)
    ),
    "a frozen expanded parameter": lambda: Of(
        lambda m, x: m.c(x * m.w), w=frozen(torch.rand(1).expand(4)), c=nn.Linear(4, 2)
    ),
    "frozen indices": lambda: Of(lambda m, x: m.c(x[:, m.i]), i=frozen(torch.tensor([3, 0])), c=nn.Linear(2, 2)),
    "a frozen mask": lambda: Of(
        lambda m, x: m.c(torch.where(m.i, x, 0.0)), i=frozen(torch.tensor([True, False, True, True])), c=nn.Linear(4, 2)
    ),
    "a weight of 8 bits": lambda: Of(
        lambda m, x: m.c(F.linear(x, m.q.float() * m.s)),
        q=frozen(torch.randint(-9, 9, (3, 4), dtype=torch.int8)), s=nn.Parameter(torch.rand(3, 1)), c=nn.Linear(3, 2),
    ),
    "a weight of float8": lambda: Of(
        lambda m, x: m.c(F.linear(x, m.q.float() * m.s)),
        q=frozen(torch.randn(3, 4).to(torch.float8_e4m3fn)), s=nn.Parameter(torch.rand(3, 1)), c=nn.Linear(3, 2),
    ),
    "a buffer of float8": lambda: Of(
        lambda m, x: m.c(F.linear(x, m.q.float())), q=torch.randn(3, 4).to(torch.float8_e5m2), c=nn.Linear(3, 2)
    ),
    "float32 and float64": lambda: Of(
        lambda m, x: m.b(torch.tanh(m.a(x)).double()).float(), a=nn.Linear(4, 3), b=nn.Linear(3, 2).double()
    ),
    "float64 and float32": lambda: Of(
        lambda m, x: m.b(torch.tanh(m.a(x.double())).float()), a=nn.Linear(4, 3).double(), b=nn.Linear(3, 2)
    ),
}  # fmt: skip


@pairs(("name", list(WORKING)), ("inputs", {"fx": False, "export": True}))
def test_shapes_and_dtypes_that_train(name: str, inputs: bool) -> None:
    torch.manual_seed(0)
    model, x = WORKING[name](), torch.randn(6, 4)
    net = trained(model, x, inputs)
    assert str(net.report)
    assert not inputs or "generic" not in {row.layer for row in net.report.rows}  # torch.fx knows no sizes
    estimator = kfac_fx.FisherEstimator(net, damping=0.1)
    estimator.update_covariances(x)
    estimator.update_inverses()
    named = {name: value for name, value in net.named_parameters() if value.requires_grad}
    known = {name: torch.randn_like(value) for name, value in named.items() if name not in net.report.unused}
    assert estimator.multiply_inverse(known).keys() == known.keys()


def test_the_report_says_that_parameters_without_elements_have_no_block() -> None:
    report = kfac_fx.compile(WORKING["a layer of 0 outputs and one of 0 inputs"](), loss="mse").report
    assert report.unused == ("a.weight", "a.bias")
    assert "linear(a.weight, a.bias): its parameters have no elements" in str(report)


REFUSED = {
    "float8": (
        lambda: Of(lambda m, x: F.linear(x, m.q.float()), q=nn.Parameter(torch.rand(2, 4).to(torch.float8_e4m3fn))),
        r"torch computes no steps in 8 bits, and these trained parameters have them: q\.\nTrain a parameter of 16 or 32"
        r" bits and cast it in forward, as in w\.to\(torch\.float8_e4m3fn\), or freeze it",
    ),
    "expanded": (
        lambda: Of(lambda m, x: m.c(x) + m.p, p=nn.Parameter(torch.zeros(1).expand(2)), c=nn.Linear(4, 2)),
        r"lie in one place of memory.*each of them a step: p\.\nMake the small tensor the parameter, and expand it in "
        r"forward; or give every element its own memory, as in nn\.Parameter\(w\.clone\(\)\)",
    ),
    "overlapping": (
        lambda: Of(lambda m, x: F.linear(x, m.w), w=nn.Parameter(torch.rand(6).as_strided((2, 4), (1, 1)))),
        r"each of them a step: w\.\n",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shapes_and_dtypes_that_cannot_train(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(kfac_fx.UntraceableError, match=text):
        kfac_fx.compile(make(), loss="mse")


@pytest.mark.parametrize("loss", ["mse", "normal", "cross_entropy", "bce_with_logits"])
def test_outputs_without_numbers_have_no_loss(loss: str) -> None:
    with pytest.raises(kfac_fx.LossError, match=r"got one of shape \[6, 0\]: give the last layer features, or name"):
        kfac_fx.compile(linear(4, 0), (torch.randn(6, 4),), loss=loss)


@pytest.mark.parametrize(
    ("tensor", "repeats"),
    [
        (torch.zeros(3, 4), False),
        (torch.zeros(3, 4).t(), False),
        (torch.zeros(8, 4)[::2, ::3], False),
        (torch.zeros(3, 1).expand(3, 4), True),
        (torch.zeros(3, 1).expand(3, 1), False),
        (torch.zeros(0).expand(4, 0), False),
        (torch.zeros(6).as_strided((2, 4), (1, 1)), True),
        (torch.zeros(6).as_strided((2, 2), (3, 1)), False),
        (torch.zeros(()), False),
    ],
)
def test_elements_in_one_place_of_memory(tensor: Tensor, repeats: bool) -> None:
    assert repeats_elements(tensor) is repeats
