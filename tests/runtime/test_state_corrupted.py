"""Every entry of every rule's state, corrupted: it is named in one error that leaves all as it was, or changes nothing.

The entries are found by walking the state_dict.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.hostile.corrupted import CHOICES, REMOVED, WAYS, Path, corrupted, is_legal, label, walk
from examples.own_rule import OneSidedSoap
from kfac_fx import KFAC, FisherEstimator
from kfac_fx.compiled.compiled_module import CompiledModule, compile
from kfac_fx.fisher.block import key_text
from kfac_fx.linalg.arguments import ORTHOGONAL, fault
from kfac_fx.rules import Regular, Values
from tests.runtime.slow_kfac import batch, mlp
from tests.runtime.toy_optimizers import KINDS, assert_same, backward, flat_state, made, values

STEPS = 3


class Spare(nn.Module):
    """A layer, a diagonal block, and parameters in no block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.scale, self.spare = mlp(), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x * self.scale.to(x.dtype))
        return outputs


@dataclass(frozen=True, kw_only=True, eq=False)
class Counted(Regular):
    """A rule of a user that declares something of its entries."""

    name: ClassVar[str] = "counted"
    scalars = {"calls": 0.0, "best": float("inf")}  # noqa: RUF012
    values = {"calls": Values(least=0)}  # noqa: RUF012


def without_lr(**options: Any) -> dict[str, Any]:
    return {"lr": None, "damping": None, **options}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda options=options: dict(options) for name, options in KINDS.items()},
    "late": lambda: {"adapt_damping": True, "update_damping_immediately": False, "damping_adaptation_interval": 1},
    "norm_constraint": lambda: {"norm_constraint": 0.01, "weight_decay": 0.1},
    "own rule with bases": lambda: {"damping": None, "rule": OneSidedSoap()},
    "own rule": lambda: {"damping": None, "rule": Counted(damping=0.1)},
}

QUICK = [
    "adaptive",
    "regular",
    "eigen_moments",
    "late",
    "own rule with bases",
]  # their trainings take a second


def trained(case: str) -> tuple[CompiledModule, KFAC]:
    net, opt = made(Spare(), invert_every=2, first_order={"lr": 1e-3}, **CASES[case]())
    step(net, opt, STEPS)
    return net, opt


def step(net: CompiledModule, opt: KFAC, steps: int) -> None:
    for number in range(steps):
        opt.zero_grad()
        loss = backward(net, number)
        net.spare.sin().sum().backward()
        opt.step(loss=loss, evaluate=lambda: torch.tensor(0.5), previous=lambda: torch.tensor(0.4))


@functools.cache
def trained_once(case: str) -> tuple[CompiledModule, KFAC, dict[str, Any], dict[str, Tensor]]:
    net, opt = trained(case)
    return net, opt, copy.deepcopy(opt.state_dict()), values(net)


def trained_state(case: str) -> tuple[CompiledModule, KFAC, dict[str, Any], list[str]]:
    """A training in the state in which it ended, its state, and the names of its parameters."""
    net, opt, state, weights = trained_once(case)
    opt.load_state_dict(state)
    net.load_state_dict(weights)
    names = [opt.names[parameter] for group in opt.param_groups for parameter in group["params"]]
    return net, opt, copy.deepcopy(state), names


@pytest.mark.parametrize("case", QUICK)
@pytest.mark.parametrize("way", WAYS)
def test_one_error_names_all_entries_that_are_corrupted(case: str, way: str) -> None:
    """All entries at once, but those of which another value is legal."""
    net, opt, state, names = trained_state(case)
    before = flat_state(opt.state_dict())
    changes = {
        path: WAYS[way](entry) for path, entry in walk(state) if path[-1] != "params" and not is_legal(way, path)
    }
    # The last two contradict other entries, if these are right.
    others = [
        *CHOICES,
        "kfac/late/cpu",
        *(f"{key_text(key)}/ready" for key in opt.estimator.blocks if way == "negative"),
    ]
    changes = {path: value for path, value in changes.items() if value is not None and path[-1] not in others}
    with pytest.raises(ValueError) as failure:
        opt.load_state_dict(corrupted(state, changes))
    lines = str(failure.value).splitlines()
    assert re.match(
        r"the state does not fit this optimizer, and nothing of it is loaded: \d+ entries are wrong$", lines[0]
    )
    named = {line[2:].partition("  ")[0] for line in lines[1:]}
    assert {label(path, names) for path in changes} <= named
    assert_same(before, flat_state(opt.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_corrupted_entry_is_refused_told_or_changes_nothing(case: str) -> None:
    """One entry after another, in every way."""
    silent = [entry for entry, verdict in graded(case, 1.0) if verdict == "silent"]
    assert silent == []


@pytest.mark.parametrize("case", QUICK)
def test_a_corrupted_entry_that_was_drawn_is_refused_told_or_changes_nothing(case: str) -> None:
    verdicts = list(graded(case, 0.03))
    assert [entry for entry, verdict in verdicts if verdict == "silent"] == []
    assert len(verdicts) > 5


def graded(case: str, part: float) -> Iterator[tuple[tuple[str, Path], str]]:
    """Corrupt a part of the entries, each in every way: "refused", "told", "same" or "legal", and "silent"."""
    net, opt, state, names = trained_state(case)
    weights, drawn = values(net), random.Random(case)

    def after(given: dict[str, Any]) -> dict[str, Any]:
        """The state of a training that goes on."""
        opt.load_state_dict(copy.deepcopy(given))
        net.load_state_dict(weights)
        step(net, opt, 2)
        trained = flat_state(opt.state_dict()) | values(net)
        opt.load_state_dict(copy.deepcopy(state))
        net.load_state_dict(weights)
        return trained

    expected = after(state)
    before = flat_state(opt.state_dict())
    for path, entry in walk(state):
        for way, change in WAYS.items():
            value = change(entry)
            if value is None or drawn.random() >= part:
                continue
            try:
                trained = after(corrupted(state, {path: value}))
            except ValueError as error:
                named = path[-1] in ("params", *CHOICES) or label(path, names) in str(error)
                verdict = "refused" if named else "silent"
                assert_same(before, flat_state(opt.state_dict()))
            except UserWarning:
                verdict = "told" if is_legal(way, path) else "silent"
                assert_same(before, flat_state(opt.state_dict()))
            else:
                same = all(torch.equal(tensor, trained[name]) for name, tensor in expected.items() if name in weights)
                verdict = "same" if same else "legal" if is_legal(way, path) else "silent"
            yield (way, path), verdict


# --- further faults ---------------------------------------------------------------------------------------------------


def refused(opt: KFAC, state: dict[str, Any], text: str) -> None:
    before = flat_state(opt.state_dict())
    with pytest.raises(ValueError, match=text):
        opt.load_state_dict(state)
    assert_same(before, flat_state(opt.state_dict()))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("state", 0, "kfac/counter"), torch.tensor(2**62), "kfac/counter  is 4.61169e.18, too large$"),
        (("state", 0, "kfac/counter"), torch.tensor(0), "kfac/moved   is of a step after the last, 0$"),
        (("state", 0, "kfac/intervals"), torch.zeros(3, dtype=torch.int64), "kfac/intervals  has values below 1$"),
        (("state", 0, "kfac/generator"), torch.zeros(5056, dtype=torch.uint8), "is no state of a random gen"),
        (("param_groups", 0, "lr"), True, r"param_groups\[0\]\['lr'\]  is True; it must be a number"),
        (("param_groups", 0, "first_order"), True, r"\['first_order'\]  is True, and must be False: whether no Fisher"),
        (("param_groups", 0, "params"), [0, 0, 1, 2, 3], "param_groups +has a parameter twice"),
        (("state", 1, "0.weight,0.bias/ready"), torch.tensor([True, False]), "ready  is unknown here"),
        (("state", 1, "kfac/counter"), torch.tensor(3), "kfac/counter  is there twice"),
        (("state", "else"), {"velocity": torch.zeros(2)}, "parameter else  is unknown here, where 6 are"),
        (("state", 0, "kfac/damping"), torch.empty((), device="meta"), "damping  is on the meta device, w"),
        (("state", 0, "kfac/damping"), torch.zeros(()), "kfac/damping  is 0, and must be positive"),
        (("state", 0, "checkpoint"), torch.ones(3).to_sparse(), "checkpoint of scale  is a tensor of layout .* must"),
    ],
)  # fmt: skip
def test_further_faults(path: Path, value: Any, text: str) -> None:
    _, opt, state, _ = trained_state("adaptive")
    refused(opt, corrupted(state, {path: value}), text)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        *((name, 0.5, "is 0.5, and must be a whole number") for name in ("bounded", "long", "undone", "others")),
        *((name, 0.5, "is 0.5, and must be a whole number") for name in ("repeats", "taken", "exact_steps", "steps")),
        ("phase", 33.25, "is 33.25, and must be a whole number"),
        *((name, 4.0, "counts 4 steps, and there were 3") for name in ("taken", "exact_steps", "steps")),
        ("held", 1e30, r"is 1e\+30, too large"),
        ("exact_damping", 1e35, r"is 1e\+35, too large"),
    ],
)
def test_numbers_of_exact_steps_that_no_training_has_are_refused(name: str, value: float, text: str) -> None:
    """A phase that is half one of bounded steps would never end."""
    _, opt, state, _ = trained_state("eigen_moments")
    path = ("state", 0, f"kfac/{name}")
    refused(opt, corrupted(state, {path: torch.full_like(state["state"][0][path[-1]], value)}), f"{path[-1]}  {text}$")


def test_numbers_of_a_tensor_are_whole_or_refused() -> None:
    whole, counts = torch.tensor([1.0, 2.0]), Values(whole=True)
    assert fault(whole, whole, counts) is None
    assert fault(whole / 2, whole, counts) == "has values that are not whole"


def test_readiness_that_contradicts_the_factors_is_refused() -> None:
    _, opt, state, _ = trained_state("regular")
    name = "layers.0.weight,layers.0.bias/ready"
    for ready in ([False, False], [False, True], [True, False]):
        text = f"{name}  contradicts the factors or inverses of the block$"
        refused(opt, corrupted(state, {("state", 1, name): torch.tensor(ready)}), text)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bases_may_have_another_precision_and_columns_of_zeros(dtype: torch.dtype) -> None:
    _, opt, state, _ = trained_state("eigen_moments")
    path = ("state", 1, "layers.0.weight,layers.0.bias/basis/A")
    basis = state["state"][1][path[-1]]
    padded = basis.clone()
    padded[..., :, 0] = 0
    for matrix in (basis, padded):
        given = corrupted(state, {path: matrix.to(dtype)})
        lower = torch.finfo(dtype).eps > torch.finfo(basis.dtype).eps
        text = "1 entry of the state was saved in a lower precision, such as layers.0.weight,layers.0.bias/basis/A"
        with pytest.warns(UserWarning, match=text) if lower else contextlib.nullcontext():
            opt.load_state_dict(given)
    for wrong in (1.2 * basis, basis + 0.1, basis.abs()):
        refused(opt, corrupted(state, {path: wrong.to(dtype)}), "basis/A  is no orthogonal matrix$")


def test_a_basis_in_blocks_is_orthogonal_block_by_block() -> None:
    torch.manual_seed(0)
    blocks = [torch.linalg.qr(torch.randn(2, width, width).double()).Q for width in (4, 3)]
    basis = torch.cat([blocks[0], F.pad(blocks[1], (0, 1))], dim=-2)
    assert basis.shape == (2, 7, 4)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        like = basis.to(dtype)
        assert fault(like, like, ORTHOGONAL) is None
        for row in (0, 5):
            wrong = basis.clone()
            wrong[1, row] *= 1.5
            assert fault(wrong.to(dtype), like, ORTHOGONAL) == "is no orthogonal matrix"


def test_the_random_stream_of_another_kind_of_device_begins_anew() -> None:
    net, opt, state, _ = trained_state("regular")
    cuda = torch.zeros(16, dtype=torch.uint8)
    opt.generator.manual_seed(5)
    before = opt.generator.get_state()
    with pytest.warns(UserWarning, match="of another kind of device.*the stream of the sampled targets begins anew"):
        opt.load_state_dict(corrupted(state, {("state", 0, "kfac/generator"): cuda}))
    assert torch.equal(opt.generator.get_state(), before)
    step(net, opt, 1)
    refused(opt, corrupted(state, {("state", 0, "kfac/generator"): cuda[:15]}), r"kfac/generator  has shape \[15\]")


def test_a_factor_is_symmetric() -> None:
    _, opt, state, _ = trained_state("regular")
    name = "layers.0.weight,layers.0.bias/A/moment"
    for matrix, text in ((torch.triu, "is no symmetric matrix"), (torch.neg, "has values below 0")):
        refused(opt, corrupted(state, {("state", 1, name): matrix(state["state"][1][name])}), f"{name}  {text}$")


def test_parameters_in_another_order_are_refused() -> None:
    """Two biases of one shape."""
    net = made(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4)).double())[0]
    names = list(dict(net.named_parameters()))
    names[1], names[3] = names[3], names[1]
    opt = KFAC(net, lr=0.1, damping=0.1)
    backward(net, 0)
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    other = made(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4)).double())[0]
    again = KFAC(other, lr=0.1, damping=0.1, params=[other.get_parameter(name) for name in names])
    text = "kfac/name of 1.bias  is that of 0.bias: the parameters are in another order"
    refused(again, state, text)
    for entries in state["state"].values():
        entries.pop("kfac/name")  # a state of an earlier version
    again.load_state_dict(state)


def test_numbers_in_another_precision_are_taken_in_that_of_the_optimizer() -> None:
    net, opt, state, _ = trained_state("regular")
    halves = {path: entry.half() for path, entry in walk(state) if path[-1] == "velocity"}
    with pytest.warns(UserWarning, match="5 entries of the state were saved in a lower precision, such as vel"):
        opt.load_state_dict(corrupted(state, halves))
    assert opt.state[net.get_parameter("scale")]["velocity"].dtype is torch.float32


@pytest.mark.parametrize("rule", ["regular", "qmodel_fixedmu", "eigen_moments"])
def test_numbers_in_a_precision_that_no_parameter_has_are_rounded(rule: str) -> None:
    """A dot product of a vector in float64 with one in float32 would be an error of torch."""
    net, opt = made(mlp().float(), **CASES[rule]())

    def train() -> dict[str, Tensor]:
        opt.zero_grad()
        x, y = batch(0)
        F.cross_entropy(net(x.float()), y).backward()
        opt.step()
        return values(net)

    train()
    state, weights = copy.deepcopy(opt.state_dict()), values(net)
    expected = train()
    wide = {p: v.double() for p, v in walk(state) if isinstance(v, Tensor) and v.is_floating_point()}
    opt.load_state_dict(corrupted(state, wide))
    net.load_state_dict(weights)
    assert_same(expected, train())


def test_parameters_without_a_state_are_told() -> None:
    _, opt, state, _ = trained_state("regular")
    state["state"][2].clear()
    text = "the state has nothing of 1 parameter, which begin anew: layers.0.bias. That is as it should be if they were"
    with pytest.warns(UserWarning, match=text):
        opt.load_state_dict(state)


def test_options_that_differ_are_told_in_one_line() -> None:
    _, saved = made(weight_decay=0.1, momentum=0.5, first_order={"lr": 0.1})
    _, opt = made(invert_every=5, relative_damping=0.1, damping=None, momentum_type="regular")
    with pytest.warns(UserWarning) as told:
        opt.load_state_dict(saved.state_dict())
    (text,) = [str(entry.message) for entry in told]
    assert text == (
        "the state was saved by a KFAC with other options. These go on from the state: weight_decay was 0.1 there, and "
        "0 is given here, momentum was 0.5 there, and 0.9 is given here. To have those of here, write "
        "optimizer.param_groups[...]['weight_decay'] and optimizer.param_groups[...]['momentum'] after loading. These "
        "are as given here: invert_every was None and is 5 here, first_order is FirstOrder(lr=0.001, betas=(0.9, "
        "0.999), eps=1e-08, weight_decay=None) here, damping was 0.1 and is None here, relative_damping was None and "
        "is 0.1 here."
    )
    assert opt.param_groups[0]["momentum"] == 0.5 and opt.param_groups[0]["weight_decay"] == 0.1


def test_a_tensor_that_needs_a_gradient_is_a_value_like_others() -> None:
    net, opt, state, _ = trained_state("regular")
    needing = {p: v.clone().requires_grad_() for p, v in walk(state) if isinstance(v, Tensor) and v.is_floating_point()}
    opt.load_state_dict(corrupted(state, needing))
    assert_same(flat_state(state), flat_state(opt.state_dict()))
    assert not any(entry.requires_grad for _, entry in walk(opt.state_dict()) if isinstance(entry, Tensor))
    step(net, opt, 1)


@pytest.mark.parametrize("kind", ["register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"])
def test_a_hook_that_fails_leaves_the_optimizer_as_it_was(kind: str) -> None:
    net, opt, state, _ = trained_state("regular")
    step(net, opt, 1)
    before = flat_state(opt.state_dict())

    def fail(*_: Any) -> None:
        raise KeyError("a hook")

    handle = getattr(opt, kind)(fail)
    with pytest.raises(KeyError, match="a hook"):
        opt.load_state_dict(state)
    handle.remove()
    assert_same(before, flat_state(opt.state_dict()))
    step(net, opt, 1)


# --- estimators -------------------------------------------------------------------------------------------------------


class Several(nn.Module):
    """Blocks of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.scale = nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Parameter(torch.ones(3, 1, 1))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head((self.norm(self.conv(x)) * self.scale).flatten(1))
        return outputs


@pytest.mark.parametrize("approximation", ["kron", "diagonal", "full", "kron_sua"])
@pytest.mark.parametrize("way", WAYS)
def test_the_state_of_an_estimator_is_loaded_as_a_whole_or_not_at_all(approximation: str, way: str) -> None:
    net, est = estimated(approximation)
    state = {name: tensor.clone() for name, tensor in est.state_dict().items()}
    changes = {name: WAYS[way](tensor) for name, tensor in state.items() if not signed(way, name)}
    changes = {name: value for name, value in changes.items() if value is not None}
    given = {name: changes.get(name, tensor) for name, tensor in state.items()}
    with pytest.raises(
        ValueError, match=r"^the state does not fit this estimator, and nothing of it is loaded: "
    ) as failure:
        est.load_state_dict({name: value for name, value in given.items() if value is not REMOVED})
    named = {line[2:].partition("  ")[0] for line in str(failure.value).splitlines()[1:]}
    assert changes.keys() <= named
    assert_same(state, est.state_dict())


def signed(way: str, name: str) -> bool:
    """Whether an entry may have negative numbers, or contradicts others if these are right."""
    return way == "negative" and (name.endswith(("cholesky", "cholesky_inverse", "ready")))


@functools.cache
def estimated(approximation: str) -> tuple[CompiledModule, FisherEstimator]:
    x = torch.randn(6, 2, 3, 3)
    net = compile(Several(), (x,), loss="categorical", approximations={"conv": approximation})
    est = FisherEstimator(net, damping=0.1, exps=(-1, -0.5), compute_cholesky=True, seed=0)
    est.update_covariances(x)
    est.update_inverses()
    return net, est
