"""Models of which an argument, an attribute, a mode or chance decides which modules run, after public ones."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kfac_fx
from tests.whole.beside_adamw import by_adamw, same_gradients, trained

G = torch.Generator().manual_seed(0)
X = torch.randn(48, 6, generator=G)
Y = X[:, :3].argmax(1)
REAL = torch.randn(32, 6, generator=G) + 1
NOISE = torch.randn(32, 4, generator=G)


def inner(model: Any) -> Any:
    """The module whose attributes users set."""
    return getattr(model, "model", model)


class Adapters(nn.Module):
    """Adapters that take turns by an attribute, as those of peft do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.active = nn.Linear(6, 12), nn.Linear(12, 3), "a"
        self.adapters = nn.ModuleDict({
            name: nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 12, bias=False)) for name in "ab"
        })  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x) + self.adapters[self.active](x)))


def turn(model: Any, step: int) -> Tensor:
    inner(model).active = "ab"[step % 2]
    return F.cross_entropy(model(X), (Y + step % 2) % 3)


class Adversarial(nn.Module):
    """A generator and a discriminator in one module; an argument decides which of them is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(4, 6)
        self.discriminator = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        fake = self.generator(noise)
        return self.discriminator(fake if real is None else torch.cat([fake.detach(), real]))


def play(model: Any, step: int) -> Tensor:
    """The loss of the generator, and that of the discriminator."""
    if step % 2 == 0:
        return F.binary_cross_entropy_with_logits(model(NOISE), torch.ones(32, 1))
    return F.binary_cross_entropy_with_logits(model(NOISE, REAL), torch.cat([torch.zeros(32, 1), torch.ones(32, 1)]))


class Exits(nn.Module):
    """A head behind every block; an attribute says where to leave."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(depth)])
        self.heads = nn.ModuleList([nn.Linear(12, 3) for _ in range(depth)])
        self.exit = depth - 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks[: self.exit + 1]:
            h = h + torch.tanh(block(h))
        return self.heads[self.exit](h)


def leave(model: Any, step: int) -> Tensor:
    inner(model).exit = (2, 0, 1)[step % 3]
    return F.cross_entropy(model(X), Y)


class Growing(Exits):
    """A curriculum: one head behind more and more blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks[: self.exit]:
            h = h + torch.tanh(block(h))
        return self.heads[0](h)


def grow(model: Any, step: int) -> Tensor:
    inner(model).exit = min(3, step // 6)
    return F.cross_entropy(model(X), Y)


class Dropped(nn.Module):
    """Layers that are dropped at random, by Python's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            if not self.training or random.random() > 0.3:
                h = h + torch.tanh(block(h))
        return self.head(h)


def drop(model: Any, step: int) -> Tensor:
    random.seed(step)
    return F.cross_entropy(model(X), Y)


class Auxiliary(nn.Module):
    """A head that only training has, as in Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.auxiliary = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.body(x))
        return (self.head(h), self.auxiliary(h)) if self.training else self.head(h)


def of_heads(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return kfac_fx.losses.Categorical(outputs)
    return [kfac_fx.losses.Categorical(outputs[0]), (0.4, kfac_fx.losses.Categorical(outputs[1]))]


def with_auxiliary(model: Any, step: int) -> Tensor:
    outputs = model(X)
    return F.cross_entropy(outputs[0], Y) + 0.4 * F.cross_entropy(outputs[1], Y)


class Tasks(nn.Module):
    """A string names the task, its branch and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.branches = nn.ModuleDict({"kind": nn.Linear(12, 3), "size": nn.Linear(12, 2)})

    def forward(self, x: Tensor, task: str, y: Tensor) -> Tensor:
        z = self.branches[task](torch.tanh(self.body(x)))
        return F.cross_entropy(z, y) if task == "kind" else F.mse_loss(z, y)


class Branching(Adapters):
    """One path is a graph, the other branches on values, so that its submodules have graphs."""

    def forward(self, x: Tensor) -> Tensor:
        if self.active == "b" and float(x.detach().sum()) > 1e9:
            x = 2 * x
        return super().forward(x)


def of_task(model: Any, step: int) -> Tensor:
    loss: Tensor = model(X, "kind", Y) if step % 2 == 0 else model(X, "size", X[:, :2])
    return loss


SITUATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], Tensor], Any, Any, int]] = {
    "adapters": (Adapters, turn, (X,), "categorical", 2),
    "branch on one path": (Branching, turn, (X,), "categorical", 2),
    "early exits": (Exits, leave, (X,), "categorical", 3),
    "curriculum of depth": (Growing, grow, (X,), "categorical", 1),
    "dropped layers": (Dropped, drop, (X,), "categorical", 4),
    "auxiliary head": (Auxiliary, with_auxiliary, (X,), of_heads, 1),
    "tasks": (Tasks, of_task, (X, "kind", Y), None, 2),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_all_paths_train_below_adamw_and_the_report_is_complete(name: str) -> None:
    """Below on the geometric mean of two starts, because a training of 36 steps is a matter of its start, too."""
    make, loss_of, inputs, loss, paths = SITUATIONS[name]
    parts = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = make()
        net = kfac_fx.compile(copy.deepcopy(model), inputs, loss=loss)
        same_gradients(copy.deepcopy(model), net, loss_of, 4)
        net = kfac_fx.compile(copy.deepcopy(model), inputs, loss=loss)
        optimizer = kfac_fx.KFAC(net)
        parts.append(trained(net, optimizer, loss_of, 36, paths) / by_adamw(model, loss_of, 36, paths))
    assert math.prod(parts) <= 1
    unused = [f"heads.{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")] if make is Growing else []
    assert {name for row in net.report.rows for name in row.parameters} == {
        name for name, _ in net.named_parameters() if name not in unused
    }
    assert list(net.report.unused) == unused
    assert optimizer.counters()["skipped statistics"] == 0


def test_a_game_of_two_in_one_module_is_that_of_two_optimizers_of_one_net() -> None:
    """The step leaves alone what had no gradient."""
    torch.manual_seed(0)
    model = Adversarial()
    net = kfac_fx.compile(copy.deepcopy(model), (NOISE,), loss="bce_with_logits")
    same_gradients(copy.deepcopy(model), net, play, 4)
    optimizer = kfac_fx.KFAC(net)
    for step in range(6):
        before = [p.detach().clone() for p in net.model.generator.parameters()]
        optimizer.zero_grad()
        play(net, step).backward()
        optimizer.step()
        moved = not all(map(torch.equal, before, net.model.generator.parameters()))
        assert moved == (step % 2 == 0)
    torch.manual_seed(0)
    net = kfac_fx.compile(copy.deepcopy(model), (NOISE,), loss="bce_with_logits")
    found = [trained(net, kfac_fx.KFAC(net), play, 60, 2), by_adamw(model, play, 60, 2)]
    assert found[0] <= found[1]


# --- blocks and steps -------------------------------------------------------------------------------------------------

OF_B = (("adapters.b.0.weight",), ("adapters.b.1.weight",))


def adapters(**options: Any) -> tuple[Any, kfac_fx.KFAC]:
    torch.manual_seed(0)
    net = kfac_fx.compile(Adapters(), (X,), loss="categorical")
    return net, kfac_fx.KFAC(net, seed=0, **options)


def step(net: Any, optimizer: kfac_fx.KFAC, number: int) -> None:
    optimizer.zero_grad()
    turn(net, number).backward()
    optimizer.step()


def test_a_block_has_the_statistics_of_the_calls_that_use_it() -> None:
    """Two calls of one batch: the cases of both are those of the mean, and every block has the rows of its own."""
    torch.manual_seed(0)
    model = Adapters()
    net, alone = (kfac_fx.compile(model, (X[:4],), loss="categorical") for _ in range(2))
    both, single = (kfac_fx.FisherEstimator(of, estimation_mode="exact") for of in (net, alone))
    single.update_covariances(X[:30])
    both.update_covariances(X[:30], fold=False)
    model.active = "b"
    both.update_covariances(X[30:40], fold=False)
    both.fold()
    key = ("adapters.a.1.weight",)
    torch.testing.assert_close(both.blocks[key].full_fisher_block(), single.blocks[key].full_fisher_block() * 30 / 40)
    before = both.blocks[key].full_fisher_block().clone()
    both.update_covariances(X)
    assert torch.equal(both.blocks[key].full_fisher_block(), before)


@pytest.mark.parametrize("mode", ["gradients", "empirical"])
def test_a_block_has_factors_at_the_first_step_that_uses_it_though_no_statistics_are_due(mode: str) -> None:
    net, optimizer = adapters(cov_update_every=100, invert_every=100, estimation_mode=mode)
    net.model.active = "a"
    for number in (0, 2, 4, 1):
        assert not any(key in optimizer.estimator.blocks for key in OF_B)
        before = [p.detach().clone() for p in net.model.adapters["b"].parameters()]
        step(net, optimizer, number)
    assert all(optimizer.estimator.blocks[key].has_factors for key in OF_B)
    assert not any(map(torch.equal, net.model.adapters["b"].parameters(), before))
    state = optimizer.state[net.model.adapters["b"][0].weight]
    assert "last_update" in state and "exp_avg" not in state
    weights = {key: float(optimizer.estimator.blocks[key].factors["A"].total_weight) for key in OF_B}
    step(net, optimizer, 0)
    assert weights == {key: float(optimizer.estimator.blocks[key].factors["A"].total_weight) for key in OF_B}


def test_micro_batches_of_one_step_may_take_different_paths() -> None:
    for options in ({}, {"estimation_mode": "empirical"}, {"momentum_type": "qmodel", "damping": 0.1}):
        net, optimizer = adapters(**options)
        first = sum(float(turn(net, number).detach()) for number in range(2))
        for _ in range(8):
            optimizer.zero_grad()
            for number in range(2):
                (turn(net, number) / 2).backward()
            optimizer.step()
        assert sum(float(turn(net, number).detach()) for number in range(2)) < first / 2


def test_groups_keep_their_number_their_order_and_their_lr() -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(model := Adapters(), (X,), loss="categorical")
    b, rest = model.adapters["b"], [p for name, p in model.named_parameters() if "adapters" not in name]
    groups = [{"params": rest}, {"params": b.parameters(), "lr": 0.3}, {"params": model.adapters["a"].parameters()}]
    optimizer = kfac_fx.KFAC(net, params=groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)
    assert [group["first_order"] for group in optimizer.param_groups] == [False, True, False]
    for number in range(2):
        step(net, optimizer, number)
        schedule.step()
    assert [(len(g["params"]), g["lr"], g["first_order"]) for g in optimizer.param_groups] == [
        (4, 0.25, False), (2, 0.075, False), (2, 0.25, False)
    ]  # fmt: skip
    net = kfac_fx.compile(model := Adapters(), (X,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, params=[{"params": model.head.parameters()}, {"params": model.adapters.parameters()}])
    given = [*model.adapters.parameters()]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2, 2]
    for number in range(2):
        step(net, optimizer, number)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4, 0]
    assert all(a is b for a, b in zip(optimizer.param_groups[1]["params"], given, strict=True))
    net = kfac_fx.compile(model := Adapters(), (X,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, params=[{"params": rest}, {"params": model.adapters["b"].parameters()}][1:], lr=0.5)
    step(net, optimizer, 1)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_state_of_several_paths_loads_where_each_was_run_once() -> None:
    net, optimizer = adapters()
    for number in range(5):
        step(net, optimizer, number)
    state = copy.deepcopy(optimizer.state_dict())
    assert [len(group["params"]) for group in state["param_groups"]] == [8]
    other = kfac_fx.compile(copy.deepcopy(net.model), loss="categorical")
    other.model.active = "a"
    other.recorder((X,), {})
    loading = kfac_fx.KFAC(other, seed=3)
    with pytest.raises(ValueError, match="no call of this net has used so far") as failure:
        loading.load_state_dict(state)
    first, advice = str(failure.value).splitlines()
    assert first.endswith("when one does: adapters.b.0.weight, adapters.b.1.weight.")
    assert advice.startswith("Call net.recorder((x,), {}) once for every path")
    other.model.active = "b"
    other.recorder((X,), {})
    loading.load_state_dict(state)
    for number in range(5, 9):
        step(net, optimizer, number)
        step(other, loading, number)
    for number in range(2):  # blocks are stacked in another order, which rounds otherwise
        torch.testing.assert_close(turn(net, number), turn(other, number), rtol=1e-3, atol=1e-4)


def test_a_training_goes_on_as_it_would_have_where_the_blocks_of_two_paths_are_stacked_otherwise() -> None:
    """The block of a later path gets its bases at other steps than that of an earlier one, in a stack with it, too."""

    def made(paths: str) -> tuple[Any, kfac_fx.KFAC]:
        torch.manual_seed(0)
        net = kfac_fx.compile(Adapters().double(), loss="categorical")
        for path in paths:
            net.model.active = path
            net.recorder((X.double(),), {})
        return net, kfac_fx.KFAC(net, seed=0, exact_steps=False)

    def train(net: Any, optimizer: kfac_fx.KFAC, numbers: range) -> Tensor:
        for number in numbers:
            inner(net).active = "ab"[number % 2]
            optimizer.zero_grad()
            F.cross_entropy(net(X.double()), Y).backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])

    net, optimizer = made("a")
    train(net, optimizer, range(6))
    other, loading = made("ab")
    assert len(loading.estimator.groups) < len(optimizer.estimator.groups)
    other.load_state_dict(net.state_dict())
    loading.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = train(net, optimizer, range(6, 9))
    torch.testing.assert_close(train(other, loading, range(6, 9)), expected, rtol=1e-8, atol=1e-8)


def test_a_state_of_fewer_paths_is_refused_where_there_are_more_blocks() -> None:
    net, optimizer = adapters()
    step(net, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    step(net, optimizer, 1)
    with pytest.raises(ValueError, match=r"lacks blocks that calls of this net have used: adapters\.b\.0\.weight; ada"):
        optimizer.load_state_dict(state)


def test_scores_and_corrections_of_a_path_have_zeros_in_the_blocks_of_the_others() -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(model := Adapters(), (X,), loss="categorical")
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    for model.active in "ab":
        estimator.update_covariances(X)
    spectrum = estimator.spectrum(damping=0.1)
    model.active = "a"
    queries = spectrum.precondition((X[:3], Y[:3]))
    scores = spectrum.self_scores((X[:3], Y[:3]), by="block")
    assert not any(scores[key].any() for key in OF_B) and all(scores[key].all() for key in scores if key not in OF_B)
    torch.testing.assert_close(queries.scores((X[:3], Y[:3])).diagonal(), torch.stack([*scores.values()]).sum(0))
    model.active = "b"
    assert queries.scores((X, Y)).shape == (3, 48)
    corrected = spectrum.correct([(X, Y)])
    values = {key: system.values[index] for key, (system, index) in corrected.places().items()}
    assert all(bool(values[key].any()) == ("adapters.a" not in key[0]) for key in values)


class Otherwise(nn.Module):
    """A bias that another path multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.scaled = nn.Linear(6, 6), nn.Linear(6, 3), False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x * self.inner.bias if self.scaled else self.inner(x)))


def otherwise(model: Any, number: int) -> Tensor:
    inner(model).scaled = number % 2 == 1
    return F.cross_entropy(model(X), Y)


def test_parameters_that_no_block_of_a_layer_serves_train_in_a_diagonal_one() -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(model := Otherwise(), (X,), loss="categorical")
    plain = copy.deepcopy(model)
    same_gradients(copy.deepcopy(model), net, otherwise, 2)
    optimizer = kfac_fx.KFAC(net)
    assert trained(net, optimizer, otherwise, 36, 2) <= by_adamw(plain, otherwise, 36, 2)
    reasons = {row.parameters: row.reason for row in net.report.rows if row.generic}
    assert reasons.keys() == {("inner.weight",), ("inner.bias",)}
    assert all("scale_and_shift with 1 use, of inner.bias" in str(reason) for reason in reasons.values())
    assert optimizer.estimator.blocks.keys() == {*reasons, ("head.weight", "head.bias")}


def test_a_parameter_that_is_unfrozen_on_one_path_has_its_new_block_on_all() -> None:
    net, optimizer = adapters()
    model = net.model
    model.adapters["b"][0].weight.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    net = kfac_fx.compile(model, (X,), loss="categorical")
    optimizer = kfac_fx.KFAC(net, damping_adaptation_interval=100)  # a check behind step 3 would ask for all paths
    for number in range(6):
        if number == 3:
            model.requires_grad_(True)
        step(net, optimizer, number)
    assert [row.parameters for row in net.report.rows if row.generic] == []
    assert ("head.weight", "head.bias") in optimizer.estimator.blocks and OF_B[0] in optimizer.estimator.blocks
    assert net.captures.stale == {
        ("adapters.a.0.weight",),
        ("adapters.a.1.weight",),
    }  # no call has asked for them since
    model.active = "a"
    net.recorder((X,), {})
    assert len(net.registrations) == 6 and not net.captures.stale


def test_a_path_that_a_check_meets_first_has_its_blocks_in_this_step() -> None:
    net, optimizer = adapters(cov_update_every=100, invert_every=100, damping_adaptation_interval=1)
    net.captures.looks = 2
    for _ in range(3):
        step(net, optimizer, 0)
    step(net, optimizer, 1)
    assert OF_B[0] in optimizer.estimator.blocks and optimizer.skipped == 0


def test_paths_are_looked_for_only_as_long_as_a_parameter_may_still_be_used() -> None:
    net, optimizer = adapters(cov_update_every=100, invert_every=100, exact_steps=False)
    net.captures.looks = 2
    for _ in range(3):
        step(net, optimizer, 0)
    assert net.captures.looks == 0 and net.captures.waiting
    step(net, optimizer, 1)  # nothing looks: the first-order rule takes this step
    assert "exp_avg" in optimizer.state[net.model.adapters["b"][0].weight]
    assert net.captures.looks > 0
    step(net, optimizer, 1)
    assert not net.captures.waiting and OF_B[0] in optimizer.estimator.blocks


def test_a_model_that_is_compiled_in_place_takes_its_paths_itself() -> None:
    torch.manual_seed(0)
    net = kfac_fx.compile(model := Adapters(), (X,), loss="categorical", in_place=True)
    optimizer = kfac_fx.KFAC(net)
    losses = []
    for number in range(12):
        optimizer.zero_grad()
        loss = turn(model, number)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert len(net.registrations) == 6 and losses[-1] < losses[1] / 2


class Twins(nn.Module):
    """One encoder of two batches, which forward never computes with together."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))

    def forward(self, first: Tensor, second: Tensor) -> Any:
        return self.encoder(first), self.encoder(second)


UNTIED = (
    "it is used on another input than that which counts the cases, and forward does not need as many of both, so not "
    "'full'"
)


def test_two_batches_of_one_encoder_are_not_said_to_be_merged() -> None:
    rows = kfac_fx.compile(Twins(), (torch.randn(8, 5), torch.randn(8, 5))).report.rows
    assert [(row.uses, row.reason) for row in rows] == [(2, None), (2, UNTIED)]


class Adaptive(nn.Module):
    """A field with a slope, at points inside and on the border. derived: residuals are derivatives."""

    def __init__(self, derived: bool, *sizes: int) -> None:
        super().__init__()
        self.derived, self.inner, self.slope = derived, nn.Linear(2, 8), nn.Parameter(torch.ones(sizes))
        self.outer = nn.Linear(8, 1)

    def field(self, x: Tensor) -> Tensor:
        u: Tensor = self.outer(torch.tanh(self.slope * self.inner(x)))
        return u

    def forward(self, inside: Tensor, border: Tensor) -> tuple[Tensor, Tensor]:
        if not self.derived:
            return self.field(inside), self.field(border)
        inside = inside.requires_grad_()
        u = self.field(inside)
        (residual,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
        return residual[:, :1] + u, self.field(border)


@pytest.mark.parametrize(
    ("derived", "sizes", "asked"),
    [(derived, (), asked) for derived in (False, True) for asked in (None, "full", "diagonal")]
    + [(False, (8,), "diagonal"), (True, (8,), "full"), (True, (8,), None)],
)
def test_a_scale_is_exact_between_batches_of_different_lengths(
    derived: bool, sizes: tuple[int, ...], asked: str | None
) -> None:
    """A layer's block takes the rows for independent, which those of one number are not, nor those of several uses that
    a case has of a scale; and an approximation that was given by name was not honored."""
    torch.manual_seed(0)
    model = Adaptive(derived, *sizes).double()
    batch = torch.rand(9, 2).double(), torch.rand(4, 2).double()
    net = kfac_fx.compile(
        model,
        batch,
        loss=lambda out: [kfac_fx.losses.Normal(of) for of in out],
        approximations={"slope": asked} if asked else None,
    )
    assert [row.block for row in net.report.rows if row.names == "slope"] == [f"generic {asked or 'diagonal'}"]
    expected = torch.zeros(sizes).double()
    for values in model(*batch):
        slopes = [torch.autograd.grad(v, model.slope, retain_graph=True)[0] for v in values[:, 0]]
        expected += 2 * torch.stack(slopes).square().mean(0)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact", damping=0.0)
    estimator.update_covariances(*batch)
    torch.testing.assert_close(estimator.spectrum().diagonal(1)["slope"], expected)


def test_a_block_of_whole_examples_meets_two_batches_of_different_lengths() -> None:
    net = kfac_fx.compile(Twins())
    optimizer = kfac_fx.KFAC(net, cov_update_every=1)
    for length in (8, 8, 5, 8):
        optimizer.zero_grad()
        first, second = net(torch.randn(8, 5), torch.randn(length, 5))
        (first.tanh().mean() - second[:, 0].mean()).backward()
        optimizer.step()
    assert [row.generic for row in net.report.rows] == [False, True, True]
    assert UNTIED in (net.report.rows[1].reason or "")
