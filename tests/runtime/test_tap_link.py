"""Links, called by hand: what two consecutive uses of a weight have in common leaves in the gradients of probes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kfac_fx.passes.approximations import LAGGED
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.layers import LAYERS
from kfac_fx.recording.taps import Link, link_function
from tests.compiler.toy import Toy, before

pytestmark = pytest.mark.usefixtures("float64")

N, D = 4, 3


def registered() -> Registration:
    """Three uses of a weight [D, D] and a bias, one after another."""
    program = before("check", Toy(lambda x, w, b: torch.tanh(torch.tanh(x @ w + b) @ w + b) @ w + b, w=(D, D), b=(D,)))
    (registration,) = program.registrations
    assert len(registration.uses) == 3
    return registration


def link_of(registration: Registration, number: int, **changes: object) -> Link:
    use = replace(registration.uses[number], **changes)  # type: ignore[arg-type]
    return Link(registration, use, LAYERS["linear"], number == 0, number == len(registration.uses) - 1)


def probes_of(registration: Registration) -> dict[str, Tensor]:
    assert registration.matrix is not None
    shapes = {lagged.name: lagged.shape(registration.matrix.shape) for lagged in LAGGED}
    return {name: torch.zeros(shape, requires_grad=True) for name, shape in shapes.items()}


def test_pairs_of_neighbors_are_in_the_gradients_of_the_probes() -> None:
    """Against the rows and gradients of each use, read off autograd."""
    registration = registered()
    probes, links = probes_of(registration), [link_of(registration, n) for n in range(3)]
    w, b, v = torch.randn(D, D), torch.randn(D), torch.randn(N, D)
    inputs, outputs = [torch.randn(N, D, requires_grad=True)], []
    carried = earlier = None
    for link in links:
        plain = inputs[-1] @ w + b
        output, carrier = link(plain, inputs[-1], probes, carried, earlier)
        assert torch.equal(output, plain) and carrier is not None and not carrier.any()
        output.retain_grad()
        outputs.append(output)
        carried, earlier = carrier, inputs[-1]
        inputs.append(torch.tanh(output))
    (outputs[-1] * v).sum().backward()
    grads = [output.grad for output in outputs if output.grad is not None]
    ones = torch.ones(N, 1)
    rows = [torch.cat([x.detach(), ones], 1) for x in inputs[:3]]
    assert probes["A1"].grad is not None and probes["G1"].grad is not None and probes["pairs"].grad is not None
    torch.testing.assert_close(probes["A1"].grad[0], rows[1].mT @ rows[0] + rows[2].mT @ rows[1])
    torch.testing.assert_close(probes["G1"].grad[0], grads[1].mT @ grads[0] + grads[2].mT @ grads[1])
    assert float(probes["pairs"].grad) == 2 * N


def test_the_gradient_passes_a_link_unchanged() -> None:
    registration = registered()
    x = torch.randn(N, D, requires_grad=True)
    output, _ = link_of(registration, 0)(x * 2, x, probes_of(registration), None, None)
    (gradient,) = torch.autograd.grad(output, x, torch.ones(N, D))
    assert torch.equal(gradient, torch.full((N, D), 2.0))


def test_without_probes_a_link_does_nothing() -> None:
    output = torch.randn(N, D)
    for probes in (None, {}):
        same, carrier = link_of(registered(), 1)(output, output, probes, None, None)
        assert same is output and carrier is None


def test_a_use_of_another_shape_is_no_neighbor() -> None:
    registration = registered()
    link = link_of(registration, 1)
    output = torch.randn(N, D)
    with pytest.raises(RegistrationError, match=r"linear\(w, b\) at .* of shape \[4, 3\], but \[5, 3\] one use before"):
        link(output, output, probes_of(registration), torch.zeros(5, D), torch.zeros(5, D))


def by_time(tensor: Tensor, steps: int, in_positions: bool) -> Tensor:
    """[steps, N, d]"""
    return tensor.transpose(0, 1) if in_positions else tensor.view(steps, N, -1)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("in_positions", [False, True])
def test_uses_that_lie_behind_each_other_in_one_tensor_are_neighbors(in_positions: bool, steps: int) -> None:
    registration = replace(registered(), uses=registered().uses[:1])
    shape = (N, steps, D) if in_positions else (steps * N, D)
    link, probes = link_of(registration, 0, steps=steps, steps_in_positions=in_positions), probes_of(registration)
    x, y, v = torch.randn(shape), torch.randn(shape, requires_grad=True), torch.randn(shape)
    (link(y, x, probes, None, None)[0] * v).sum().backward()
    ones = torch.ones(*shape[:-1], 1)
    rows, grads = (by_time(tensor, steps, in_positions) for tensor in (torch.cat([x, ones], -1), v))
    assert probes["A1"].grad is not None and probes["G1"].grad is not None and probes["pairs"].grad is not None
    torch.testing.assert_close(probes["A1"].grad[0], sum(rows[t + 1].mT @ rows[t] for t in range(steps - 1)))
    torch.testing.assert_close(probes["G1"].grad[0], sum(grads[t + 1].mT @ grads[t] for t in range(steps - 1)))
    assert float(probes["pairs"].grad) == (steps - 1) * N


@pytest.mark.parametrize("steps", [1, 3])
def test_statistics_keep_their_digits_in_a_backward_under_autocast(steps: int) -> None:
    registration = registered()
    link = link_of(registration, 0 if steps > 1 else 1, steps=steps)
    x, earlier, y, g, later = torch.randn(5, steps * N, D, dtype=torch.float32)
    found = []
    for enabled in (False, True):
        probes = {name: torch.zeros_like(probe, dtype=torch.float32) for name, probe in probes_of(registration).items()}
        beside = (None, None) if steps > 1 else (torch.zeros_like(y), earlier)
        output, carrier = link(y, x, {name: probe.requires_grad_() for name, probe in probes.items()}, *beside)
        assert carrier is not None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            torch.autograd.backward([output, carrier], [g, later])
        found.append([probe.grad for probe in probes.values()])
    assert all(torch.equal(plain, cast) for plain, cast in zip(*found, strict=True))


@pytest.mark.parametrize("steps", [1, 3])
def test_rows_are_rounded_as_the_layer_rounds_them_under_autocast(steps: int) -> None:
    """Taps round them, too, so that A and A1 are moments of the same rows."""
    registration = registered()
    link = link_of(registration, 0 if steps > 1 else 1, steps=steps)
    x, earlier = torch.randn(2, steps * N, D, dtype=torch.float32)
    y, g, later = torch.randn(3, steps * N, D).bfloat16()
    found = []
    for rows in ((x, earlier), (x.bfloat16(), earlier.bfloat16())):
        probes = {name: torch.zeros_like(probe, dtype=torch.float32) for name, probe in probes_of(registration).items()}
        beside = (None, None) if steps > 1 else (torch.zeros_like(y), rows[1])
        output, carrier = link(y, rows[0], {name: probe.requires_grad_() for name, probe in probes.items()}, *beside)
        torch.autograd.backward([output, carrier], [g, later])
        found.append(probes["A1"].grad)
    assert torch.equal(*found) and found[0].any()


def test_rows_that_do_not_hold_the_steps_are_refused() -> None:
    registration = replace(registered(), uses=registered().uses[:1])
    link = link_of(registration, 0, steps=3)
    output = torch.randn(N, D, requires_grad=True)
    with pytest.raises(RegistrationError, match="should hold 3 uses, but its rows are not a multiple of that"):
        link(output, output.detach(), probes_of(registration), None, None)[0].sum().backward()


def test_masks_that_are_not_of_rows_become_so() -> None:
    """Here a mask of cases [N], whose rows are [N, 1]."""

    def both(output_grad: Tensor, x: Tensor, *mask: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, None, None], output_grad[:, None, None]

    def real(output: Tensor, mask: Tensor) -> Tensor:
        return mask.flip(0).unsqueeze(1)

    function = link_function(both, (1, D, D), False, (False, True, 1, False), ("", ""), real)
    x, earlier, output = torch.randn(N, D), torch.randn(N, D), torch.randn(N, D, requires_grad=True)
    mask, before = torch.tensor([True, True, True, False]), torch.tensor([True, True, False, True])
    probes = [torch.zeros(lagged.shape((1, D, D)), requires_grad=True) for lagged in LAGGED]
    carried = torch.zeros(N, D, requires_grad=True)
    result, _ = function.apply(output, x, carried, earlier, *probes, mask, before, before)  # type: ignore[no-untyped-call]
    result.sum().backward()
    kept = (mask & before).flip(0)
    assert probes[0].grad is not None and probes[2].grad is not None
    torch.testing.assert_close(probes[0].grad[0], x[kept].mT @ earlier[kept])
    assert float(probes[2].grad) == 2
