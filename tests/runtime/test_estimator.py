"""The estimator over many batches: averages, micro-batches, failures, state, and what a user may get wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.compiled.compiled_module import compile
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.passes.errors import FactorNotReady, ModelChangedError, NotRegisteredError, RegistrationError
from kfac_fx.recording.statistics import Moments
from tests.runtime.fake_net import EXACT, FakeNet, batch, deep, exact, mixed, noise


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def parts(net: FakeNet, x: Tensor, sizes: list[int]) -> Iterator[Moments]:
    for part in torch.split(x, sizes):
        yield net.record((part,), {}, mode="exact")


@pytest.mark.parametrize("make", [deep, lambda: deep("full")])
def test_micro_batches_add_up_to_the_whole(make: Callable[[], FakeNet]) -> None:
    net, x = make(), batch(6)
    whole = exact(net, x)
    est = FisherEstimator(net)
    for moments in parts(net, x, [1, 3, 2]):
        est.accumulate(moments)
    est.fold()
    for key, block in whole.blocks.items():
        for name, factor in block.factors.items():
            torch.testing.assert_close(est.blocks[key].factors[name].value, factor.value)


def test_batches_that_are_kept_are_folded_as_one() -> None:
    net, x = FakeNet(nn.Sequential(nn.Linear(3, 2, bias=False)), {"0": "kron"}), batch(7)
    est = FisherEstimator(net)
    for part in x.split(3):
        est.update_covariances(part, fold=False)
    with pytest.raises(FactorNotReady):
        est.update_inverses()
    est.fold()
    torch.testing.assert_close(est.blocks[("0.weight",)].factors["A"].value[0], x.mT @ x / 7)


def test_pending_rows_count_positions_and_of_generic_parameters_cases() -> None:
    """The cost model of the default's intervals reads them."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.mean, self.shift = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mean(torch.tanh(self.each(x)).mean(1)) + torch.cumsum(self.shift, 0)
            return y

    x = torch.randn(4, 5, 3)
    est = FisherEstimator(compile(Positions(), loss="normal"))
    assert est.pending_rows() == {}
    for part in (x, x[:1]):
        est.update_covariances(part, fold=False)
    assert est.pending_rows() == {("each.weight", "each.bias"): 25, ("mean.weight", "mean.bias"): 5, ("shift",): 5}


def test_a_block_without_factors_waits_for_them_while_some_of_its_parameters_are_trained() -> None:
    x = torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    est = FisherEstimator(compile(model, loss="normal"))
    blocks = {("0.weight", "0.bias"), ("2.weight", "2.bias")}
    assert est.unrecorded() == blocks
    model[0].bias.requires_grad_(False)
    assert est.unrecorded() == blocks
    model[0].weight.requires_grad_(False)
    assert est.unrecorded() == {("2.weight", "2.bias")}
    est.update_covariances(x)
    assert est.unrecorded() == frozenset()
    model[0].weight.requires_grad_(True)
    assert est.unrecorded() == {("0.weight", "0.bias")}


def test_accumulating_leaves_the_moments_alone() -> None:
    net, est = deep(), FisherEstimator(deep())
    moments = net.record((batch(),), {}, mode="exact")
    before = copy.deepcopy(moments)
    est.accumulate(moments)
    est.accumulate(moments)
    for key, statistic in before.statistics.items():
        assert_equal(statistic, moments.statistics[key])


def test_the_past_decays_and_in_burn_in_does_not() -> None:
    net = FakeNet(nn.Sequential(nn.Linear(3, 2, bias=False)), {"0": "kron"})
    xs = [batch() for _ in range(3)]
    moments = [x.mT @ x / len(x) for x in xs]
    for should_decay, weights in ((True, (0.25, 0.5, 1.0)), (False, (1.0, 1.0, 1.0))):
        est = FisherEstimator(net, cov_ema_decay=0.5)
        for x in xs:
            est.update_covariances(x, should_decay=should_decay)
        expected = sum(w * m for w, m in zip(weights, moments, strict=True)) / sum(weights)
        torch.testing.assert_close(est.blocks[("0.weight",)].factors["A"].value[0], expected)


@pytest.mark.parametrize("key", ["0", "0.weight", ("0.weight",), ("0.bias", "0.weight")])
def test_a_key_of_no_block_shows_the_one_that_was_meant(key: Any) -> None:
    with pytest.raises(NotRegisteredError) as failure:
        FisherEstimator(deep()).blocks[key]
    assert str(failure.value).splitlines() == [
        f"there is no block {key!r}: a key is the tuple of all parameters of a block, in their order, as in",
        "  ('0.weight', '0.bias')",
    ]


def test_a_key_of_nothing_shows_all_that_there_are() -> None:
    est = FisherEstimator(deep())
    with pytest.raises(KeyError) as failure:
        est.blocks[1]  # type: ignore[index]
    assert len(str(failure.value).splitlines()) == 1 + len(est.blocks)
    assert ("0.weight",) not in est.blocks
    assert est.blocks.get(("0.weight",)) is None


def test_a_vector_with_parameters_that_are_not_estimated_is_refused() -> None:
    est = exact(deep(), batch())
    with pytest.raises(NotRegisteredError) as failure:
        est.multiply({**noise(est), "frozen": torch.zeros(1)})
    assert str(failure.value).splitlines()[1:] == [
        "  unknown  frozen",
        "Pass only the parameters that are estimated: those in estimator.parameters or spectrum.shapes, or for "
        "net.fisher_product those of net.named_parameters().",
    ]


def test_folding_nothing_changes_nothing() -> None:
    est = exact(deep(), batch())
    before = {name: tensor.clone() for name, tensor in est.state_dict().items()}
    est.fold()
    assert_equal(est.state_dict(), before)


def test_sums_that_are_not_accepted_are_dropped_and_are_no_failure() -> None:
    est = exact(deep(), batch())
    before = {name: tensor.clone() for name, tensor in est.state_dict().items()}
    est.accumulate(est.net.record((batch(),), {}, **EXACT))
    est.fold(accept=torch.tensor(False))
    assert_equal(est.state_dict(), before)
    assert est.failures == (0, 0)
    est.accumulate(est.net.record((batch(),), {}, **EXACT))
    est.fold(accept=torch.tensor(True))
    assert est.blocks["0.weight", "0.bias"].factors["A"].total_weight.item() == pytest.approx(1.95)


def test_sums_are_accepted_if_the_caller_and_the_comparison_of_outputs_accept_them() -> None:
    est = exact(deep(), batch())
    est.usable = lambda: torch.tensor(True)  # type: ignore[method-assign]
    before = {name: tensor.clone() for name, tensor in est.state_dict().items()}
    est.accumulate(est.net.record((batch(),), {}, **EXACT))
    est.fold(accept=torch.tensor(False))
    assert_equal(est.state_dict(), before)


def test_a_micro_batch_that_is_not_finite_is_left_out_with_its_cases_and_counted() -> None:
    net, x = FakeNet(nn.Sequential(nn.Linear(3, 2, bias=False)), {"0": "kron"}), batch(6)
    whole, est = exact(net, x), FisherEstimator(net, estimation_mode="exact")
    est.update_covariances(x, fold=False)
    est.update_covariances(torch.full_like(x, torch.inf), fold=False)
    est.fold()
    (block,), (expected,) = est.blocks.values(), whole.blocks.values()
    for name, factor in expected.factors.items():
        torch.testing.assert_close(block.factors[name].value, factor.value)
    assert est.failures == (0, 1)


def test_a_batch_that_is_not_finite_is_skipped_and_counted_by_block() -> None:
    est = exact(deep(), batch())
    est.update_inverses()
    v = noise(est)
    inverse = est.multiply_inverse(v)
    moments = est.net.record((batch(),), {}, **EXACT)
    moments.statistics["2.weight", "2.bias"]["G"][0, 0, 0] = torch.inf
    others = est.blocks["0.weight", "0.bias"].factors["A"].total_weight.clone()
    est.accumulate(moments)
    est.fold()
    assert est.failures == (0, 1)
    assert est.blocks["2.weight", "2.bias"].failures == (0, 1)
    assert est.blocks["2.weight", "2.bias"].factors["G"].total_weight.item() == 1.0
    assert est.blocks["0.weight", "0.bias"].factors["A"].total_weight > others
    assert_equal(
        {n: t for n, t in est.multiply_inverse(v).items() if "2." in n}, {n: inverse[n] for n in inverse if "2." in n}
    )


def test_damping_is_a_tensor_that_can_be_written() -> None:
    est = exact(deep(), batch(), damping=0.1)
    shared = torch.tensor(0.1, dtype=torch.float64)
    other = exact(est.net, batch(), damping=shared)  # type: ignore[arg-type]
    assert other.damping is shared
    v = noise(est)
    product = est.multiply(v)
    est.damping = 0.7
    assert est.damping.item() == 0.7
    changed = est.multiply(v)
    assert not any(torch.equal(changed[name], product[name]) for name in v)
    est.damping.fill_(0.1)
    assert_equal(est.multiply(v), product)
    est.damping = torch.tensor([0.3], dtype=torch.float64)
    assert est.damping.shape == () and est.damping.item() == 0.3


def test_a_seed_makes_samples_repeatable_and_leaves_the_users_stream_alone() -> None:
    net, x = deep(), batch()
    states = []
    for _ in range(2):
        est = FisherEstimator(net, seed=5)
        before = torch.get_rng_state()
        est.update_covariances(x)
        assert torch.equal(torch.get_rng_state(), before)
        states.append(est.state_dict())
        torch.randn(3)
    assert_equal(*states)


def test_a_fraction_of_the_batch_is_recorded() -> None:
    net, x = deep(), batch(8)
    est = FisherEstimator(net, fraction=0.5)
    est.update_covariances(x)
    a = torch.cat([x[:4], torch.ones(4, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(est.blocks["0.weight", "0.bias"].factors["A"].value[0], a.mT @ a / 4)


@pytest.mark.parametrize("make", [deep, mixed])
def test_state_resumes_bit_for_bit(make: Callable[[], FakeNet]) -> None:
    net = make()
    options: dict[str, Any] = {"seed": 1, "exps": (-1, -0.5), "compute_cholesky": True}
    est, other = FisherEstimator(net, **options), FisherEstimator(net, **options)
    for _ in range(3):
        est.update_covariances(batch())
    est.update_inverses()
    est.damping = 0.3
    other.load_state_dict(copy.deepcopy(est.state_dict()))
    x, v = batch(), noise(est)
    for estimator in (est, other):
        estimator.update_covariances(x)
    assert_equal(est.state_dict(), other.state_dict())
    assert_equal(est.multiply_inverse(v), other.multiply_inverse(v))
    for either in (est, other):
        either.update_inverses()
    assert_equal(est.multiply_cholesky(v), other.multiply_cholesky(v))


# --- what a user may get wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"estimation_mode": "exakt"}, r"estimation_mode 'exakt' is none of 'gradients', .*'exact_GGN'\."),
        ({"cov_ema_decay": 1.5}, r"cov_ema_decay is 1\.5; it must be between 0 and 1"),
        ({"fraction": 0}, r"fraction is 0; it must be above 0 and at most 1"),
        ({"damping": -1.0}, r"damping is .*-1\.0?\)?; it must not be negative"),
        ({"damping": torch.tensor(-1.0)}, r"damping is .*-1\.0?\)?; it must not be negative"),
        ({"damping": torch.tensor(float("nan"))}, r"damping is tensor\(nan\); it must be finite"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FisherEstimator(deep(), **options)


def test_a_vector_must_name_every_parameter() -> None:
    est = exact(deep(), batch())
    v = noise(est)
    wrong = {("0.wieght" if name == "0.weight" else name): tensor for name, tensor in v.items()}
    text = (
        r"not fit the registered parameters:\n  missing  0\.weight\n  unknown  0\.wieght\. Did you mean '0\.weight'\?"
    )
    with pytest.raises(KeyError, match=text):
        est.multiply(wrong)
    turned = {**v, "0.weight": v["0.weight"].mT}
    shape = list(v["0.weight"].shape)
    with pytest.raises(KeyError) as failure:
        est.multiply(turned)
    assert str(failure.value).splitlines()[1:] == [f"  0.weight is {shape[::-1]}, the parameter {shape}"]


def test_inverses_before_factors_say_what_to_call() -> None:
    est = FisherEstimator(deep())
    with pytest.raises(FactorNotReady, match=r"factors of linear\(0\.weight, 0\.bias\) read before their first update"):
        est.update_inverses()


def test_a_spectrum_names_parameters_that_were_frozen_before_anything_was_recorded_of_them() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4)
    net = kfac_fx.compile(model, loss="categorical")
    model[0].requires_grad_(False)
    text = r"^0\.weight, 0\.bias were frozen after the model was compiled, so nothing is recorded of them, and their"
    with pytest.raises(FactorNotReady, match=text):
        kfac_fx.fit_spectrum(net, [x], damping=0.1)
    again = kfac_fx.compile(model, loss="categorical")
    assert kfac_fx.fit_spectrum(again, [x], damping=0.1).keys == [("2.weight", "2.bias")]
    model[0].requires_grad_(True)
    assert len(kfac_fx.fit_spectrum(net, [x], damping=0.1).keys) == 2


def test_moments_must_cover_every_registration() -> None:
    net = deep()
    moments = net.record((batch(),), {}, mode="exact")
    del moments.statistics["2.weight", "2.bias"]
    with pytest.raises(ValueError, match=r"moments lack 1 of 4 registrations, first \('2\.weight', '2\.bias'\)\."):
        FisherEstimator(net).accumulate(moments)


def test_a_batch_of_another_size_than_promised_is_refused() -> None:
    net = deep()
    est = FisherEstimator(net, batch_size=6)
    for moments in parts(net, batch(6), [1, 3, 2]):
        est.accumulate(moments)
    est.fold()
    est.accumulate(net.record((batch(5),), {}, mode="exact"))
    with pytest.raises(ValueError, match=r"a batch of 5 cases was recorded, but batch_size=6\."):
        est.fold()


def test_only_the_chosen_variables_are_estimated() -> None:
    net, x = deep(), batch()
    est = FisherEstimator(net, variables=["0.weight", "0.bias", "5.bias", "5.weight"])
    est.update_covariances(x)
    est.update_inverses()
    assert list(est.blocks) == [("0.weight", "0.bias"), ("5.weight", "5.bias")]
    assert list(est.multiply_inverse(noise(est))) == ["0.weight", "0.bias", "5.weight", "5.bias"]


def test_variables_must_fit_the_registrations() -> None:
    est = FisherEstimator(deep(), variables=["0.weight", "2.wieght"])
    text = r"fit the registrations:\n  0\.weight  shares a block with 0\.bias: .*\n  2\.wieght  is registered no"
    with pytest.raises(RegistrationError, match=text):
        _ = est.blocks


def test_a_state_of_another_estimator_is_refused() -> None:
    text = (
        r"(?s)does not fit this estimator, and nothing of it is loaded: \d+ entries are wrong\n.*  1\.scale,1\.shift/F"
    )
    with pytest.raises(ValueError, match=text):
        FisherEstimator(deep()).load_state_dict(FisherEstimator(mixed()).state_dict())


def test_a_state_of_before_parameters_were_unfrozen_or_frozen_says_so_and_what_loads_it() -> None:
    def made(trained: bool) -> tuple[nn.Sequential, FisherEstimator]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        model[0].requires_grad_(trained)
        return model, FisherEstimator(compile(model, (x,), loss="normal"), estimation_mode="exact")

    x = torch.randn(6, 3)
    model, est = made(False)
    est.update_covariances(x)
    frozen = copy.deepcopy(est.state_dict())
    model[0].requires_grad_(True)
    est.update_covariances(x)
    unfrozen = copy.deepcopy(est.state_dict())

    causes = "these parameters were frozen, no call had used them, or `variables` left them out"
    remedy = "compile the model while the same parameters have requires_grad=True"
    text = f"(?s)nothing of it is .*\nThe state has no block of 0.weight,0.bias: {causes} when it was .*{remedy}"
    with pytest.raises(ValueError, match=text):
        est.load_state_dict(frozen)
    assert_equal(est.state_dict(), unfrozen)
    model, other = made(False)
    text = f"(?s)nothing of it is .*\nThis estimator has no block of 0.weight,0.bias: {causes} when it was .*{remedy}"
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(unfrozen)
    other.load_state_dict(frozen)
    model[0].requires_grad_(True)
    other.update_covariances(x)
    assert_equal(other.state_dict(), unfrozen)
    _, whole = made(True)
    whole.load_state_dict(unfrozen)
    assert_equal(whole.state_dict(), unfrozen)
    wrong = {name: tensor for name, tensor in frozen.items() if name != "damping"}
    with pytest.raises(ValueError, match="damping .* is missing") as error:
        whole.load_state_dict(wrong)
    assert causes not in str(error.value)


def test_a_registration_that_changes_begins_without_factors_and_the_others_go_on() -> None:
    """A first batch may prove that a layer is not what it looked like, and a later path that no layer is right."""
    net = deep()
    est = FisherEstimator(net)
    key, others = ("5.weight", "5.bias"), ("0.weight", "0.bias")
    assert est.blocks[key].registration.approximation == "diagonal"
    net.registrations = (*net.registrations[:-1], replace(net.registrations[-1], approximation="kron"))
    est.update_covariances(batch())
    assert est.blocks[key].registration.approximation == "kron"
    before = {name: tensor.clone() for name, tensor in est.blocks[others].state().items()}
    net.registrations = (*net.registrations[:-1], replace(net.registrations[-1], approximation="diagonal"))
    est.follow_registrations()
    assert not est.blocks[key].has_factors and est.unrecorded() == {key}
    for name, tensor in est.blocks[others].state().items():
        assert torch.equal(tensor, before[name])
    est.update_covariances(batch())
    assert est.blocks[key].has_factors and est.newcomers == {key}


def test_a_loaded_state_forgets_batches_that_are_not_folded() -> None:
    est, other = exact(deep(), batch()), FisherEstimator(deep(), estimation_mode="exact")
    other.update_covariances(batch(3), fold=False)
    other.load_state_dict(est.state_dict())
    other.fold()
    assert_equal(other.state_dict(), est.state_dict())


def test_a_batch_of_another_size_is_dropped() -> None:
    net = deep()
    est = FisherEstimator(net, batch_size=6)
    with pytest.raises(ValueError, match=r"a batch of 5 cases was recorded, but batch_size=6\."):
        est.update_covariances(batch(5))
    est.update_covariances(batch(6))


def test_entries_of_a_vector_that_cannot_be_multiplied_are_told_at_once() -> None:
    est = exact(deep(), batch())
    v: dict[str, Any] = noise(est)
    names = list(v)[:3]
    v[names[0]], v[names[1]], v[names[2]] = None, v[names[1]].long(), v[names[2]].to("meta")
    with pytest.raises(TypeError) as failure:
        est.multiply(v)
    assert str(failure.value).splitlines()[1:] == [
        f"  {names[0]} is None: write zeros for a parameter without a gradient",
        f"  {names[1]} is of torch.int64: write tensor.float()",
        f"  {names[2]} is on the meta device, and has no values",
    ]


@pytest.mark.parametrize("value", [-1.0, float("nan"), 5.0])
def test_a_decay_and_a_damping_out_of_range_are_refused_and_change_nothing(value: float) -> None:
    est = exact(deep(), batch())
    before = copy.deepcopy(est.state_dict())
    est.update_covariances(batch(), fold=False)
    with pytest.raises(ValueError, match=r"decay is .*; it must be between 0 and 1"):
        est.fold(decay=value)
    assert est.recorded
    if value != 5.0:
        with pytest.raises(ValueError, match=r"damping is .*; it must (not be negative|be finite)"):
            est.damping = value
    assert_equal(est.state_dict(), before)


def test_moments_of_a_model_that_changed_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(model: str) -> NoReturn:
        raise ModelChangedError("not the model")

    est = exact(deep(), batch())
    est._pending.cases = 5
    monkeypatch.setattr(est.outputs, "check", changed)
    with pytest.raises(ModelChangedError):
        est.usable()
    assert est._pending.cases == 0


@pytest.mark.parametrize("other", [nn.Linear(3, 2), nn.Linear(3, 2, bias=False), nn.Identity()])
def test_blocks_of_a_model_with_a_replaced_module_are_refused(other: nn.Module) -> None:
    """They were a KeyError, or blocks of parameters that the capture does not know."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    net = kfac_fx.compile(model, loss="normal")
    model[2] = other
    message = r"were replaced, added or removed after kfac_fx.compile: '2.weight', '2.bias'.\n.* Compile again"
    for use in (lambda est: est.blocks, lambda est: est.update_inverses(), lambda est: est.state_dict()):
        with pytest.raises(ModelChangedError, match=message):
            use(FisherEstimator(net))
