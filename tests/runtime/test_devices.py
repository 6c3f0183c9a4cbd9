"""On a machine without an accelerator: every tensor is where the model is, and the host waits where it says, and only
there. See tests/devices: the walks run in a process of their own, for a backend is for a whole process."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kfac_fx.passes.tracing.effects import RandomState, accelerators, same_random
from tests.devices.walks import QUICK, WALKS, WRONG

ROOT = Path(__file__).parents[2]


@functools.cache
def outcomes(names: tuple[str, ...]) -> dict[str, str]:
    """The errors of each walk, in one process for all of them. Its tensors have shapes alone, which torch keeps."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices", *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_FAKE_TENSOR_DISPATCH_CACHE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: text for name, (text, _) in json.loads(done.stdout).items()}


def test_on_an_accelerator_nothing_mixes_devices_and_the_host_waits_only_on_purpose() -> None:
    wrong = {name: outcome for name, outcome in outcomes((*QUICK, *WRONG)).items() if outcome and name not in WRONG}
    assert not wrong


@pytest.mark.slow
def test_so_it_is_for_every_model_and_option() -> None:
    others = tuple(name for name in WALKS if name not in QUICK)
    assert not {name: outcome for name, outcome in outcomes(others).items() if outcome}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("two devices", "device"),
        ("a number read", "the host waits: .*reads"),
        ("numbers moved", "the host waits: .*copies from cpu"),
        ("a generator", "a generator of cpu"),
    ],
)
def test_what_a_device_would_refuse_or_wait_for_is_seen(name: str, said: str) -> None:
    assert re.search(said, outcomes((*QUICK, *WRONG))[name])


def test_random_streams_are_put_back_and_seeded_as_torch_seeds_them() -> None:
    devices = accelerators(nn.Linear(2, 2).parameters())
    before = torch.get_rng_state()
    with same_random(devices):
        RandomState.seeded(3, []).restore()
        drawn = torch.rand(4)
        torch.manual_seed(3)
        assert torch.equal(drawn, torch.rand(4))
    assert torch.equal(before, torch.get_rng_state())
    with same_random([], enabled=False):
        torch.rand(1)
    assert not torch.equal(before, torch.get_rng_state())


def test_a_model_on_the_cpu_or_without_numbers_has_no_other_streams() -> None:
    assert accelerators([torch.ones(1), torch.ones(1, device="meta")]) == ()
    assert RandomState.now([]).devices == ()
