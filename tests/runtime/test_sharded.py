"""Tensors that are divided among processes: kfac_fx/linalg/processes.py, kfac_fx/recording/emitted.py, and the order of
compile, fully_shard and KFAC. tests/whole/test_fsdp.py trains with several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import kfac_fx
from kfac_fx.linalg import processes as sharding
from kfac_fx.linalg.processes import ShardLayout, Shards
from kfac_fx.passes.errors import ModelChangedError

pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
X, Y = torch.randn(6, 5), torch.randint(2, (6,))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.data())
def test_filled_shards_join_to_the_whole(shape: list[int], data: st.DataObject) -> None:
    ranks, dim = data.draw(st.integers(1, 5)), data.draw(st.integers(0, len(shape) - 1))
    layout, whole = ShardLayout(torch.Size(shape), dim, ranks, None), torch.randn(shape)
    parts = [layout.part(whole, rank) for rank in range(ranks)]
    assert [tuple(part.shape) for part in parts if part.numel()] == [tuple(p.shape) for p in whole.chunk(ranks, dim)]
    filled = [layout.fill(part) for part in parts]
    assert all(torch.equal(layout.unfill(tensor, rank), parts[rank]) for rank, tensor in enumerate(filled))
    assert torch.equal(layout.join(torch.stack(filled)), whole)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Scaled(Net):
    """Depends on a file, which nothing watches."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.file.read_text())


class Branching(Net):
    """No single graph holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.last(y if (x - X).abs().sum() == 0 else self.inner(y[:, None]).squeeze(1))


@pytest.fixture
def shard() -> Iterator[Callable[..., None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

    def sharded(module: nn.Module, *shape: int) -> None:
        names = ("replicas", "shards")[2 - len(shape or (1,)) :]
        fully_shard(module, mesh=init_device_mesh("cpu", shape or (1,), mesh_dim_names=names))

    yield sharded
    dist.destroy_process_group()


def compiled(model: nn.Module | None = None, **options: Any) -> kfac_fx.CompiledModule:
    return kfac_fx.compile(Net() if model is None else model, (X,), loss="categorical", **options)


def test_one_message_brings_shards_to_their_owners_and_back(
    shard: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = compiled()
    shard(net.model)
    shards = Shards.of(net.named_parameters(), net.model.modules())
    assert shards is not None
    parts = {name: parameter.detach().to_local() for name, parameter in net.named_parameters()}  # type: ignore[operator]
    owners, messages = dict.fromkeys(parts, 0), []
    for module, name in ((dist, "all_to_all_single"), (sharding, "all_gather")):
        send = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, send=send, **how: (messages.append(send), send(*args, **how)))
    wholes = shards.to_owners(parts, owners)
    back = shards.from_owners(wholes, owners, parts)
    gathered = shards.gathered(parts)
    assert len(messages) == 3
    for name, part in parts.items():
        assert torch.equal(wholes[name], part) and torch.equal(back[name], part)
        assert torch.equal(gathered[name], part)


def test_a_sharded_model_is_refused_with_the_order_to_write(shard: Callable[..., None]) -> None:
    model = Net()
    shard(model)
    with pytest.raises(
        ValueError, match="sharded already, so that no process can run the model to capture it"
    ) as error:
        compiled(model)
    assert str(error.value).endswith(
        ": first.weight, first.bias, last.weight, last.bias.\n"
        "Compile first, with example inputs, and shard then: net = kfac_fx.compile(model, (x,)), "
        "torch.distributed.fsdp.fully_shard on the units and on the model, and optimizer = kfac_fx.KFAC(net)."
    )


def test_errors_name_the_class_of_the_user_and_not_the_one_that_fsdp_made(
    shard: Callable[..., None], tmp_path: Path
) -> None:
    scale = tmp_path / "scale"
    scale.write_text("1")
    net = compiled(Scaled(scale), in_place=True)
    other = compiled(net.model, in_place=True)
    shard(net.model)
    assert type(net.model).__name__ == "FSDPScaled"
    optimizer = kfac_fx.KFAC(net)
    with pytest.raises(kfac_fx.AlreadyAttachedError, match="this Scaled was compiled in place before"):
        kfac_fx.KFAC(other)
    scale.write_text("2")
    F.cross_entropy(net.model(X), Y).backward()
    with pytest.raises(kfac_fx.ModelChangedError, match="^Scaled computes other outputs"):
        optimizer.step()


def test_an_optimizer_of_whole_parameters_is_refused(shard: Callable[..., None]) -> None:
    net = compiled()
    optimizer = kfac_fx.KFAC(net)
    shard(net.model)
    with pytest.raises(RuntimeError, match="sharded after the optimizer was made, .*\n.* and then optimizer = "):
        net(X)
    assert optimizer.counter == 0


def test_a_call_that_was_not_captured_before_is_refused(shard: Callable[..., None]) -> None:
    net = compiled()
    shard(net.model)
    with pytest.raises(ValueError, match="Net is called in a way that was not captured before it was sharded") as error:
        net.record((X.double(),), {})
    assert "call net.recorder((x,), {}) for every further kind of call, before fully_shard" in str(error.value)


def test_a_module_that_was_replaced_before_the_model_was_sharded_is_told(shard: Callable[..., None]) -> None:
    net = compiled(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)))
    net.model[1] = nn.ReLU()  # type: ignore[index, operator]
    shard(net.model)
    for _ in range(2):
        with pytest.raises(ModelChangedError, match=r"1 parameter or module was replaced, .* kfac_fx.compile: '1'\."):
            net(X)


def test_a_call_that_was_captured_before_is_served(shard: Callable[..., None]) -> None:
    net = compiled()
    whole = net.eval().record((X,), {}, mode="exact")
    net.train()
    shard(net.model)
    sharded = net.eval().record((X,), {}, mode="exact")
    for key, sums in whole.statistics.items():
        for name, value in sums.items():
            torch.testing.assert_close(sharded.statistics[key][name], value)


def test_all_parameters_must_be_sharded(shard: Callable[..., None]) -> None:
    net = compiled()
    shard(net.model.first)
    with pytest.raises(ValueError, match="cannot train 2 of 4 parameters that are sharded as they are") as error:
        kfac_fx.KFAC(net)
    assert "last.weight" in str(error.value) and "is whole in every process, and others are not" in str(error.value)
    assert "fully_shard on the model itself, after its units" in str(error.value)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2, bias=False, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.to(torch.complex64)).abs()
        return y


def test_complex_parameters_that_are_sharded_are_refused_with_a_way_to_real_ones(shard: Callable[..., None]) -> None:
    net = kfac_fx.compile(Waves(), (X,), loss="categorical")
    shard(net.model)
    with pytest.raises(ValueError, match="cannot train 1 of 1 parameters that are sharded as they are") as error:
        kfac_fx.KFAC(net)
    advice = "layer.weight  is complex: write model = kfac_fx.with_real_parameters(model) before compile"
    assert advice in str(error.value)
    net = kfac_fx.compile(kfac_fx.with_real_parameters(Waves()), (X,), loss="categorical")
    shard(net.model)
    optimizer = kfac_fx.KFAC(net)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()


def test_blocks_of_fully_sharded_parameters_have_owners(shard: Callable[..., None]) -> None:
    """In several processes no one else has all factors; a model that is whole in every process has all of them."""
    net = compiled()
    assert kfac_fx.KFAC(compiled()).options.strategy is None
    shard(net.model)
    assert kfac_fx.KFAC(net).options.strategy == "owners"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # what torch itself loads late
def test_compiled_graphs_are_refused(shard: Callable[..., None]) -> None:
    net = compiled(backend="inductor", verify=False)
    shard(net.model)
    optimizer = kfac_fx.KFAC(net)
    with pytest.raises(ValueError, match="backend='inductor' cannot gather its parameters where its graph reads them"):
        net(X)
    assert optimizer.counter == 0


class Wrapping(Net):
    """Its subclasses have another forward, as those of a layer of transformers with gradient checkpointing."""

    def __init_subclass__(cls) -> None:
        forward = cls.forward
        cls.forward = lambda self, x: forward(self, x)  # type: ignore[method-assign]


class Wrapped(Wrapping):
    pass


def test_the_class_that_sharding_makes_is_no_change_of_the_model(shard: Callable[..., None]) -> None:
    net = compiled(Wrapped())
    shard(net.model)
    assert "forward" in vars(type(net.model)) and net.record((X,), {}).statistics


def test_a_branch_that_was_not_captured_before_is_refused(shard: Callable[..., None]) -> None:
    torch.manual_seed(0)
    net = compiled(Branching())
    net.record((X,), {}, mode="exact")
    shard(net.model)
    net.record((X,), {}, mode="exact")
    with pytest.raises(
        ValueError, match="on these inputs Branching calls inner in a way that was not captured"
    ) as error:
        net.record((-X,), {}, mode="exact")
    assert "Call net.record((x,), {}) with inputs that take every branch of its Python, before fully_shard" in str(
        error.value
    )
    assert str(error.value).endswith("DistributedDataParallel(net), with KFAC(net, placement='owners').")


@pytest.mark.parametrize("mode", ["gradients", "exact", "empirical"])
def test_a_divided_model_records_on_shards_what_it_records_whole(shard: Callable[..., None], mode: str) -> None:
    torch.manual_seed(0)
    net, generator = compiled(Branching()), torch.Generator()
    options = {"mode": mode, "targets": Y if mode == "empirical" else None}
    whole = net.record((X,), {}, generator=generator.manual_seed(0), **options)
    shard(net.model)
    hooks = [dict(module._forward_pre_hooks) for module in net.model.modules()]
    on_shards = net.record((X,), {}, generator=generator.manual_seed(0), **options)
    assert [dict(module._forward_pre_hooks) for module in net.model.modules()] == hooks and any(hooks)
    for key, sums in whole.statistics.items():
        for name, value in sums.items():
            torch.testing.assert_close(on_shards.statistics[key][name], value)


def test_a_divided_model_scores_examples_on_shards_as_whole(shard: Callable[..., None]) -> None:
    scores = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        net = compiled(Branching())
        if is_sharded:
            shard(net.model)
        estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
        estimator.update_covariances(X)
        scores.append(estimator.spectrum(damping=0.1).self_scores((X, Y)))
    torch.testing.assert_close(*scores)


def test_a_closure_without_a_backward_is_told(shard: Callable[..., None]) -> None:
    net = compiled()
    shard(net.model)
    with pytest.raises(ValueError, match="the closure of step\\(closure\\) returned a loss and called no backward"):
        kfac_fx.KFAC(net).step(lambda: F.cross_entropy(net(X), Y))


def test_an_estimator_gathers_the_gradients_that_it_multiplies(shard: Callable[..., None]) -> None:
    products = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        net = compiled()
        if is_sharded:
            shard(net.model)
        estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
        estimator.update_covariances(X)
        estimator.update_inverses()
        F.cross_entropy(net(X), Y).backward()
        products.append(estimator.multiply_inverse({name: p.grad for name, p in net.named_parameters()}))
    for name, product in products[0].items():
        torch.testing.assert_close(products[1][name], product)


def test_a_spectrum_that_a_sharded_model_saved_is_that_of_the_whole_model(
    shard: Callable[..., None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, whole = compiled(), compiled()
    whole.load_state_dict(net.state_dict())
    shard(net.model)
    estimator = kfac_fx.FisherEstimator(net, estimation_mode="exact")
    estimator.update_covariances(X)
    kfac_fx.save_spectrum(estimator.spectrum(damping=0.1), tmp_path)
    loaded = kfac_fx.load_spectrum(whole, tmp_path, damping=0.1)
    vector = {name: torch.ones_like(parameter) for name, parameter in whole.named_parameters()}
    expected = estimator.spectrum(damping=0.1).multiply_inverse(vector)
    for name, product in loaded.multiply_inverse(vector).items():
        torch.testing.assert_close(product, expected[name])


def test_metrics_have_the_norms_of_shards(shard: Callable[..., None]) -> None:
    values = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        net = compiled()
        if is_sharded:
            shard(net.model)
        optimizer = kfac_fx.KFAC(net, momentum_type="adaptive", estimation_mode="exact")
        metrics = kfac_fx.Metrics(optimizer, every=1)
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()
        values.append(metrics.values)
    for name in ("norm/gradient", "norm/update", "damping", "condition/A"):
        assert values[1][name] == pytest.approx(values[0][name]) != 0


def test_parameters_that_are_frozen_after_sharding_keep_their_blocks_and_stand_still(
    shard: Callable[..., None],
) -> None:
    net = compiled()
    shard(net.model)
    opt = kfac_fx.KFAC(net, seed=0)
    for step in range(3):
        net.model.first.requires_grad_(step != 1)
        before = net.model.first.weight.detach().to_local().clone()
        opt.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        opt.step()
        assert torch.equal(before, net.model.first.weight.detach().to_local()) == (step == 1)


def test_a_graph_that_fails_leaves_no_gathered_parameters(shard: Callable[..., None]) -> None:
    """The model is run for its own error. Parameters that it gathers would hide from forwards what a step moves."""
    net = compiled()
    shard(net.model)

    def fail(recorder: Any, values: Any) -> None:
        raise RuntimeError("no formula")

    with pytest.raises(RuntimeError, match="no formula"):
        net.captures.run((X,), {}, fail)
    assert all(map(sharding.is_sharded, net.parameters()))


@pytest.mark.parametrize(
    "options", [{"momentum_type": "qmodel", "momentum": None, "damping": 0.3}, {}], ids=["qmodel", "default"]
)
def test_frozen_parameters_of_a_sharded_model_are_constants_in_forward_mode(
    shard: Callable[..., None], options: dict[str, Any]
) -> None:
    trained: list[dict[str, Tensor]] = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Net()
        model.first.requires_grad_(False)
        net = compiled(model)
        if sharded:
            shard(net.model)
        opt = kfac_fx.KFAC(net, seed=0, estimation_mode="exact", **options)
        opt._step_state.multiply_jacobian.dual = False  # as of a model that has a derivative of its own
        for _ in range(3):
            opt.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            opt.step()
        assert not opt.fallbacks()
        trained.append({name: sharding.unsharded(p.detach()) for name, p in net.named_parameters()})
    torch.testing.assert_close(*trained)
