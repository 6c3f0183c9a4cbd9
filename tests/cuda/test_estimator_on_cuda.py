"""On a GPU: the estimator's numbers are those of the CPU, and its steady state never waits for the device."""

from __future__ import annotations

import copy

import torch

from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.linalg.matrices import Root
from tests.cuda.on_cuda import ON_CUDA, waiting_is_an_error
from tests.runtime.fake_net import EXACT, FakeNet, deep, mixed, noise

pytestmark = ON_CUDA


def on_gpu(net: FakeNet) -> FakeNet:
    return FakeNet(copy.deepcopy(net.model).cuda(), net.approximations)


def test_products_are_those_of_the_cpu() -> None:
    for make in (deep, mixed):
        here = make()
        there, x = on_gpu(here), torch.randn(6, 3, dtype=torch.float64)
        results = []
        roots: list[Root] = [-1.0, -0.5, "cholesky", "cholesky_inverse"]
        v = {name: torch.randn_like(p) for name, p in here.named_parameters()}
        for net, device in ((here, "cpu"), (there, "cuda")):
            est = FisherEstimator(
                net, damping=0.1, exps=(-1, -0.5), compute_cholesky=True, compute_cholesky_inverse=True
            )
            est.accumulate(net.record((x.to(device),), {}, **EXACT))
            est.fold()
            est.update_inverses()
            mine = {name: v[name].to(device) for name in est.parameters}
            results.append([est._multiply(mine, root) for root in roots] + [est.multiply(mine)])
        for on_cpu, on_cuda in zip(*results, strict=True):
            torch.testing.assert_close(on_cuda, {name: tensor.cuda() for name, tensor in on_cpu.items()})


def test_the_steady_state_does_not_wait_for_the_device() -> None:
    net = on_gpu(deep())
    est = FisherEstimator(net, damping=0.1, compute_cholesky=True)
    moments = [net.record((torch.randn(6, 3, dtype=torch.float64, device="cuda"),), {}, **EXACT) for _ in range(2)]
    est.accumulate(moments[0])
    est.fold()
    est.update_inverses()  # the first one may wait
    v = noise(est)
    with waiting_is_an_error():
        est.accumulate(moments[1])
        est.fold(accept=torch.ones((), dtype=torch.bool, device="cuda"))
        est.update_inverses()
        est.multiply_inverse(v)
        est.multiply_cholesky(v, transpose=True)
        est.multiply(v)
    assert est.failures == (0, 0)
