"""Bases of wide sides: in diagonal blocks, and in bfloat16 where a CPU multiplies it fast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.own_rule import OneSidedSoap
from kfac_fx import KFAC, compile
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.fisher import bases
from kfac_fx.fisher.bases import basis_of, block_width, in_new_basis, means_of, turned, update_bases
from kfac_fx.fisher.groups import BlockGroup
from kfac_fx.linalg import matrices
from kfac_fx.linalg.matrices import blocks_of
from kfac_fx.optim.rules import EigenMoments
from tests.tables import pairs

WIDTH = 3  # of a block, at most


@pytest.fixture(params=[torch.float64, torch.float32])
def fisher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FisherEstimator:
    """A Fisher whose sides of width 8 and 9 have bases in blocks."""
    monkeypatch.setitem(bases.WIDEST, "cpu", WIDTH)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(request.param)
    fisher = FisherEstimator(compile(model, loss="normal"), exps=(), estimation_mode="exact")
    fisher.new_extras, fisher.relative_damping = EigenMoments().new_extras, 0.01
    recorded(fisher)
    return fisher


def recorded(fisher: FisherEstimator) -> None:
    dtype = next(fisher.net.parameters()).dtype  # type: ignore[attr-defined]
    fisher.update_covariances(torch.randn(20, 7, dtype=dtype))
    update_bases(fisher, carried=in_new_basis)


def dense(basis: Tensor) -> Tensor:
    """The basis of one side of one block, [d, w], as [d, d]."""
    return torch.block_diag(*(block for _, block in blocks_of(basis)))


def inside(basis: Tensor) -> Tensor:
    """Ones in the diagonal blocks of the basis of one side of one block."""
    return torch.block_diag(*(torch.ones(len(block), len(block)) for _, block in blocks_of(basis)))


def dense_basis(group: BlockGroup, index: int) -> Tensor:
    """Q of a block, for flattened [o, i]."""
    left, right = (dense(operator[index, 0]) for operator in basis_of(group))
    return torch.kron(left, right)


def test_a_block_is_as_wide_as_the_others_and_a_bias_does_not_count(fisher: FisherEstimator) -> None:
    sizes = {(group.size(side), block_width(group, side)) for group in fisher.groups for side in group.sides}
    assert sizes == {(8, 3), (9, 3), (2, 2)}


def test_a_basis_in_blocks_has_the_eigenvectors_of_the_diagonal_blocks_of_a_factor(fisher: FisherEstimator) -> None:
    for group in fisher.groups:
        for side, basis in zip(group.sides, basis_of(group), strict=True):
            for index in range(len(group)):
                q, factor = dense(basis[index, 0]), group.value(side)[index, 0]
                torch.testing.assert_close(q.T @ q, torch.eye(len(q), dtype=q.dtype))
                inside = torch.block_diag(
                    *(torch.ones(len(block), len(block)) for _, block in blocks_of(basis[index, 0]))
                )
                eigenvalues = q.T @ (factor * inside) @ q / factor.diagonal().amax()
                torch.testing.assert_close(eigenvalues, eigenvalues.diagonal().diag(), atol=1e-6, rtol=0)


def test_matrices_are_turned_by_the_blocks(fisher: FisherEstimator) -> None:
    for group in fisher.groups:
        w = torch.randn(len(group), *group.shape, dtype=group.dtype)
        there, back = (turned(group, w, basis_of(group), transpose) for transpose in (True, False))
        for index in range(len(group)):
            q = dense_basis(group, index)
            torch.testing.assert_close(there[index].flatten(), q.T @ w[index].flatten())
            torch.testing.assert_close(back[index].flatten(), q @ w[index].flatten())


def test_the_input_side_alone_is_turned_where_both_are_in_blocks(fisher: FisherEstimator) -> None:
    """As one-sided SOAP does."""
    for group in fisher.groups:
        w = torch.randn(len(group), *group.shape, dtype=group.dtype)
        there = turned(group, w, basis_of(group, outputs=False), transpose=True)
        for index in range(len(group)):
            torch.testing.assert_close(there[index, 0], w[index, 0] @ dense(basis_of(group)[1][index, 0]))


def test_a_new_basis_in_blocks_takes_the_means_with_it(fisher: FisherEstimator) -> None:
    for group in fisher.groups:
        for stack in means_of(group):
            stack.moment.uniform_()
    before = [[(dense_basis(group, n), *(stack.moment[n].flatten().clone() for stack in means_of(group)))
               for n in range(len(group))] for group in fisher.groups]  # fmt: skip
    recorded(fisher)
    for group, of_group in zip(fisher.groups, before, strict=True):
        for n, (old, m, v) in enumerate(of_group):
            change = dense_basis(group, n).T @ old
            assert not torch.allclose(change.abs(), torch.eye(len(change), dtype=change.dtype))
            average, squares = (stack.moment[n].flatten() for stack in means_of(group))
            torch.testing.assert_close(average, change @ m, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(squares, change.square() @ v, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dense_limit", "blocks"), [(4096, (1, 1)), (10, (2, 2)), (11, (1, 2))])
def test_a_factor_that_is_in_blocks_itself_is_cut_further(
    monkeypatch: pytest.MonkeyPatch, dense_limit: int, blocks: tuple[int, int]
) -> None:
    """Where the factors are zero outside of the blocks of the bases, these are eigenvectors of the whole factors."""
    monkeypatch.setitem(bases.WIDEST, "cpu", 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 11), nn.Tanh(), nn.Linear(11, 2)).double()
    net = compile(model, loss="normal", dense_limit=dense_limit)
    fisher = FisherEstimator(net, exps=(), estimation_mode="exact")
    fisher.new_extras, fisher.relative_damping = EigenMoments().new_extras, 0.01
    fisher.update_covariances(torch.randn(30, 12, dtype=torch.float64))
    group = fisher.groups[0]
    assert group.registrations[0].blocks == blocks
    widths = {side: block_width(group, side) for side in group.sides}
    assert set(widths.values()) <= {2, 3} and max(map(group.size, group.sides)) > 3
    for side, basis in zip(group.sides, basis_of(group), strict=True):
        group.factors[side.factor].moment.mul_(inside(basis[0, 0]))
    update_bases(fisher, carried=in_new_basis)
    values, _ = group.side_eigensystems(widths=widths)
    w = torch.randn(1, *group.shape, dtype=torch.float64)
    q = basis_of(group)
    product = turned(group, values[0].unsqueeze(-1) * turned(group, w, q, True) * values[1].unsqueeze(-2), q)
    torch.testing.assert_close(product, group.applied(w, [group.value(side) for side in group.sides]))


def test_a_block_whose_factor_is_not_finite_keeps_its_rounded_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    fast(monkeypatch, halves=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(140, 140), nn.Tanh(), nn.Linear(140, 140), nn.Tanh(), nn.Linear(140, 2))
    fisher = FisherEstimator(compile(model, loss="normal"), exps=(), estimation_mode="exact")
    fisher.new_extras, fisher.relative_damping = EigenMoments().new_extras, 0.01
    for broken in (False, True):
        fisher.update_covariances(torch.randn(20, 140))
        group = fisher.groups[0]
        before = [basis.clone() for basis in basis_of(group)]
        if broken:
            group.factors["A"].moment[0, 0, 0, 0] = torch.nan
        update_bases(fisher, carried=in_new_basis)
    assert len(group) == 2 and before[0].dtype is torch.bfloat16
    for last, basis in zip(before, basis_of(group), strict=True):
        assert torch.equal(last[0], basis[0]) and not torch.equal(last[1], basis[1])


# --- trainings ------------------------------------------------------------------------------------------------------


def trained(steps: int = 6, width: int = 140, **options: Any) -> tuple[KFAC, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 10))
    x, y = torch.randn(64, 20), torch.randint(10, (64,))
    net = compile(model, loss="categorical")
    optimizer = KFAC(net, seed=0, **options)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return optimizer, losses


def fast(monkeypatch: pytest.MonkeyPatch, halves: bool) -> None:
    monkeypatch.setattr(matrices, "has_fast_halves", lambda: halves)


def stored(optimizer: KFAC) -> set[torch.dtype]:
    return {
        tensor.dtype
        for group in optimizer.estimator.groups
        for name, tensor in group.extras.items()
        if name.startswith("basis/")
    }


def test_bases_in_bfloat16_train_as_those_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[Sequence[float]] = []
    for halves in (False, True):
        fast(monkeypatch, halves)
        optimizer, of_steps = trained(
            9, lr=0.1, exact_steps=False
        )  # whole steps fall so steeply that one more or less is twice the loss
        assert stored(optimizer) == {torch.bfloat16 if halves else torch.float32}
        losses.append(of_steps)
    full, rounded = map(torch.tensor, losses)
    assert not torch.equal(full, rounded)
    torch.testing.assert_close(rounded, full, rtol=0.05, atol=0)
    _, of_steps = trained(9)
    assert of_steps[-1] < 0.2 * of_steps[0]


@pytest.mark.parametrize(("width", "double"), [(100, False), (140, True)])
def test_narrow_bases_and_those_of_float64_are_not_rounded(
    monkeypatch: pytest.MonkeyPatch, width: int, double: bool
) -> None:
    fast(monkeypatch, halves=True)
    dtype = torch.float64 if double else torch.float32
    assert matrices.basis_dtype(torch.device("cpu"), dtype, width) is dtype
    assert matrices.basis_dtype(torch.device("meta"), torch.float32, 1000) is torch.float32


def test_a_cpu_is_asked_for_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Callable[[], dict[str, bool]]] = [dict, lambda: {"avx512_bf16": False}, lambda: {"amx_bf16": True}]
    results = []
    for answer in answers:
        matrices.has_fast_halves.cache_clear()
        monkeypatch.setattr(torch.cpu, "get_capabilities", answer, raising=False)
        results.append(matrices.has_fast_halves())
    matrices.has_fast_halves.cache_clear()
    assert results == [False, False, matrices.TORCH_BACKENDS.mkldnn.is_available()]


def test_the_report_names_the_bases_in_blocks_and_their_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bases.WIDEST, "cpu", 70)
    fast(monkeypatch, halves=True)
    optimizer, losses = trained()
    text = " ".join(str(optimizer.net.report).split())
    assert "in blocks, which cost less: 1 x 140 in blocks of 70, 1 x 141 in blocks of 71" in text
    assert "4 of 4 eigenbases are in bfloat16" in text  # the layers' other sides, too
    assert losses[-1] < 0.2 * losses[0]


def test_a_training_with_rounded_bases_in_blocks_resumes_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bases.WIDEST, "cpu", 70)
    fast(monkeypatch, halves=True)
    first, losses = trained(8)
    again, _ = trained(5)
    resumed, _ = trained(0)
    resumed.net.load_state_dict(again.net.state_dict())
    resumed.load_state_dict(again.state_dict())
    torch.manual_seed(0)
    nn.Sequential(nn.Linear(20, 140), nn.Tanh(), nn.Linear(140, 10))
    x, y = torch.randn(64, 20), torch.randint(10, (64,))
    later = []
    for _ in range(3):
        resumed.zero_grad()
        loss = F.cross_entropy(resumed.net(x), y)
        loss.backward()
        resumed.step()
        later.append(loss.item())
    assert later == losses[5:]
    assert first.net is not resumed.net


# --- patches ----------------------------------------------------------------------------------------------------------


def steps_on(optimizer: KFAC, x: Tensor, y: Tensor, steps: int) -> list[float]:
    """The losses of steps of a classifier on one batch."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(optimizer.net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def convolutional(optimizer: KFAC | None, steps: int) -> tuple[KFAC, list[float]]:
    """Patches of 9 x 4 + 1 numbers, a linear layer with a matrix of the same shape, and a wide one."""
    torch.manual_seed(0)
    narrow = nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Conv2d(4, 9, 1), nn.Tanh(), nn.Flatten(), nn.Linear(36, 4)
    model = nn.Sequential(*narrow, nn.Linear(4, 80), nn.Linear(80, 2))
    x, y = torch.randn(16, 4, 4, 4), torch.randint(2, (16,))
    optimizer = optimizer or KFAC(compile(model, (x,), loss="categorical"), invert_every=2)
    return optimizer, steps_on(optimizer, x, y, steps)


def widths_of(optimizer: KFAC) -> dict[str, set[int]]:
    return {
        registration.layer: {tensor.shape[-1] for name, tensor in group.extras.items() if name == "basis/A"}
        for group in optimizer.estimator.groups
        for registration in group.registrations
        if registration.matrix is not None and registration.matrix.shape[-1] == 37
    }


def test_patches_have_blocks_of_whole_channels_and_other_layers_of_this_shape_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bases, "WORTH_CUTTING", 10)
    optimizer, _ = convolutional(None, 3)
    assert widths_of(optimizer) == {"conv2d": {13}, "linear": {37}}  # 16 = 4 x 4 numbers at most: three blocks
    assert "1 x 37 in blocks of 13" in " ".join(str(optimizer.net.report).split())


def test_a_state_with_whole_patches_goes_on_with_these_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cpu", bases.WHOLE_PATCHES):
        monkeypatch.setitem(bases.WIDEST, kind, 40)
    _, wanted = convolutional(None, 6)
    before, _ = convolutional(None, 4)
    state, weights = copy.deepcopy(before.state_dict()), copy.deepcopy(before.net.state_dict())
    monkeypatch.setattr(bases, "WORTH_CUTTING", 10)
    resumed, _ = convolutional(None, 0)
    resumed.net.load_state_dict(weights)
    told = r"bases of convolutions in wider blocks, as earlier versions did\. .* costs more on a CPU"
    with pytest.warns(UserWarning, match=told):
        resumed.load_state_dict(state)
    assert widths_of(resumed) == {"conv2d": {37}, "linear": {37}}
    assert convolutional(resumed, 2)[1] == wanted[4:]


# --- states of another kind of device ---------------------------------------------------------------------------------


def gone_on(optimizer: KFAC, steps: int) -> list[float]:
    """The losses of further steps of `trained`."""
    torch.manual_seed(0)
    nn.Sequential(nn.Linear(20, 140), nn.Tanh(), nn.Linear(140, 10))
    x, y = torch.randn(64, 20), torch.randint(10, (64,))
    return steps_on(optimizer, x, y, steps)


KINDS = {"whole": "accelerator", "in blocks": "cpu"}
TOLD = {
    "whole": r"the state has the bases of wide layers whole, as a GPU does, and as earlier versions did\. The training "
    r"goes on with these, which costs more on a CPU\. To change to bases of this device, load the state of the model "
    r"alone\.$",
    "in blocks": r"the state has the bases of wide layers in blocks, as a CPU does\. The training goes on with these",
}


@pairs(("rule", ["eigen_moments", "own rule"]), ("saved", list(KINDS)))
def test_a_state_of_another_kind_of_device_goes_on_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, saved: str, rule: str
) -> None:
    """The bases stay as they are in the state, with new ones, new blocks and new states, too."""
    options = {"invert_every": 2} | ({"rule": OneSidedSoap(), "lr": 0.01} if rule == "own rule" else {})
    (other,) = KINDS.keys() - {saved}
    monkeypatch.setitem(bases.WIDEST, "cpu", 70)
    monkeypatch.setattr(bases, "kind_of", lambda device: KINDS[saved])
    _, losses = trained(9, **options)
    before, _ = trained(5, **options)
    state, weights = before.state_dict(), before.net.state_dict()
    monkeypatch.setattr(bases, "kind_of", lambda device: KINDS[other])
    resumed, _ = trained(0, **options)
    resumed.net.load_state_dict(weights)
    with pytest.warns(UserWarning, match=TOLD[saved]):
        resumed.load_state_dict(state)
    assert gone_on(resumed, 2) == losses[5:7]
    resumed.estimator.extend()
    again, _ = trained(2, **options)  # with bases of its own
    again.net.load_state_dict(resumed.net.state_dict())
    with pytest.warns(UserWarning, match=TOLD[saved]):
        again.load_state_dict(resumed.state_dict())
    assert gone_on(again, 2) == losses[7:]
    widths = {
        tensor.shape[-1] for group in again.estimator.groups for n, tensor in group.extras.items() if "basis/" in n
    }
    assert (140 in widths) is (saved == "whole")
    own, _ = trained(1, **options)
    again.load_state_dict(own.state_dict())
    assert again.estimator.bases_as is None


def test_bases_of_no_kind_of_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained(2)
    state = copy.deepcopy(whole.state_dict())
    monkeypatch.setitem(bases.WIDEST, "cpu", 70)
    in_blocks, _ = trained(2)
    name = "0.weight,0.bias/basis/G"
    (entries,) = [entries for entries in state["state"].values() if name in entries]
    entries[name] = entries[name][..., :50]
    with pytest.raises(ValueError, match="nothing of it is loaded") as error:
        in_blocks.load_state_dict(state)
    assert f"{name} has shape [1, 140, 50], and needs [1, 140, 70]" in " ".join(str(error.value).split())
    assert in_blocks.estimator.bases_as is None
    gone_on(in_blocks, 1)
