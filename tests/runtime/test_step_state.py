"""Counters and reasons that the state of a step gives the report."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kfac_fx import KFAC, compile
from kfac_fx.optim.step_state import first_three


def test_counters_tell_steps_and_those_that_changed_nothing() -> None:
    net = compile(nn.Linear(3, 2), loss="categorical")
    optimizer = KFAC(net, seed=0)
    for x in (torch.randn(4, 3), torch.full((4, 3), torch.nan)):
        optimizer.zero_grad()
        F.cross_entropy(net(x), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()
    counters = optimizer.counters()
    assert (counters["steps"], counters["skipped steps"], counters["inverses kept from before"]) == (2, 1, 0)


def test_long_lists_of_blocks_are_cut_behind_the_third() -> None:
    registrations = compile(nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))), (torch.randn(2, 3),)).registrations
    words = [str(registration) for registration in registrations]
    assert first_three(registrations) == f"{words[0]}, {words[1]}, {words[2]} and 2 more"
    assert first_three(registrations[:3]) == ", ".join(words[:3])
