"""Ordinary modules behind one another, in training mode: every pair compiles, and every parameter keeps its block."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence

import pytest
import torch

import kfac_fx
from benchmarks.pairs import IMAGES, SEQUENCES, SIDE, STEPS, WIDTH, Chain, Make, N

FAMILIES: dict[str, tuple[Mapping[str, Make], tuple[int, ...]]] = {
    "sequences": (SEQUENCES, (N, STEPS, WIDTH)),
    "images": (IMAGES, (N, WIDTH, SIDE, SIDE)),
}
# torch's own gradient of the norm is wrong there, as the difference quotients of the last test show. The proof sees it.
WRONG_IN_TORCH = {("InstanceNorm2d", "attention"), ("InstanceNorm2d", "LSTM over pixels")}
# The backward of torch 2.13 ends the process there, with plain modules: no test can wait for it.
CRASHES_IN_TORCH = {("channels last", "GroupNorm")}
QUICK = 6  # the chains of each family that a quick test compiles
Names = tuple[str, ...]


def drawn(family: str, length: int, number: int, seed: int) -> list[Names]:
    """Chains of this length by a seed."""
    generator = random.Random(f"{family} {length} {seed}")
    return [tuple(generator.choices(list(FAMILIES[family][0]), k=length)) for _ in range(number)]


def failures(family: str, chains: Iterable[Sequence[str]]) -> dict[Sequence[str], str]:
    """The chains that do not compile as one graph with a layer for every parameter, and why.

    `compile` compares outputs and gradients with those of the model on the same random numbers.
    """
    modules, shape = FAMILIES[family]
    failed: dict[Sequence[str], str] = {}
    for chain in chains:
        torch.manual_seed(0)
        model = Chain(*(modules[name]() for name in chain))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                net = kfac_fx.compile(model, (torch.randn(shape),), loss="categorical")
        except ValueError as error:
            failed[chain] = str(error)
            continue
        generic = [f"{r.parameters[0]}: {r.reason}" for r in net.registrations if r.generic]
        parts = [part.path for part in net.program.submodules]
        if generic or parts or net.program.unused:
            failed[chain] = f"generic {generic}, parts {parts}, unused {net.program.unused}"
    return failed


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_of_ordinary_modules_compile(family: str) -> None:
    """The pairs that once failed, and some that a seed draws."""
    known = {
        "sequences": [(kind, "Dropout") for kind in ("LSTM", "GRU", "RNN")] + [("drop path by len", "token")],
        "images": [("attention", "drop path by len"), ("drop path by len", "attention"), ("table", "Dropout")],
    }
    assert not failures(family, [*known[family], *drawn(family, 3, QUICK - len(known[family]), seed=0)])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "first"), [(family, name) for family in FAMILIES for name in FAMILIES[family][0]])
def test_every_pair_of_ordinary_modules_compiles(family: str, first: str) -> None:
    pairs = {(first, second) for second in FAMILIES[family][0]} - CRASHES_IN_TORCH
    assert failures(family, sorted(pairs)).keys() <= WRONG_IN_TORCH


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("family", FAMILIES)
def test_triples_of_ordinary_modules_compile(family: str, seed: int) -> None:
    left_out = WRONG_IN_TORCH | CRASHES_IN_TORCH
    chains = [chain for chain in drawn(family, 3, 40, seed) if not left_out & {chain[:2], chain[1:]}]
    assert not failures(family, chains)


@pytest.mark.parametrize("chain", sorted(WRONG_IN_TORCH))
def test_the_pairs_that_are_left_out_have_wrong_gradients_in_torch(chain: Names) -> None:
    torch.manual_seed(0)
    model, x = Chain(*(IMAGES[name]() for name in chain)).double(), torch.randn(N, WIDTH, SIDE, SIDE).double()
    norm, weights = model.modules_inside[0], torch.randn(N, 3).double()
    assert isinstance(norm, torch.nn.InstanceNorm2d)
    (gradient,) = torch.autograd.grad((model(x) * weights).sum(), [norm.weight])
    with torch.no_grad():
        norm.weight[0] += 1e-5
        above = (model(x) * weights).sum()
        norm.weight[0] -= 2e-5
        quotient = float((above - (model(x) * weights).sum()) / 2e-5)
    assert abs(float(gradient[0]) - quotient) > 0.1 * abs(quotient), "torch is right now: leave no pair out"
