"""Where the graph of a model of the zoo tells that cases stay apart, no batch says something else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kfac_fx
from kfac_fx.passes.cases import kept_apart
from kfac_fx.recording.meeting_cases import LossRows, collecting, keys_that_meet
from tests.models import ZOO
from tests.tables import every


@pytest.mark.parametrize("name", every(16, ZOO))
def test_no_case_meets_another_that_the_graph_keeps_apart(name: str) -> None:
    torch.manual_seed(0)
    case = ZOO[name]
    args, kwargs = case.inputs(), dict(case.keywords())
    net = kfac_fx.compile(case.make(), args, loss=case.loss, layers=case.layers)
    recorder = net.recorder(args, kwargs)
    values = recorder.capture.flatten(args, kwargs)
    examples = recorder.emitted.examples(values)

    def rows(_: object, fisher: tuple[Tensor, ...]) -> LossRows:
        leaves = [output.detach().requires_grad_(output.is_floating_point()) for output in fisher]
        return LossRows(fisher, leaves, [leaf for leaf in leaves if leaf.dim() and len(leaf) == examples])

    apart = kept_apart(recorder.program, recorder.program.outputs) if recorder.whole else frozenset()
    parameters, buffers = recorder.live_parameters(), recorder.copied_buffers()
    if apart:
        meeting = keys_that_meet(collecting(recorder.emitted), parameters, buffers, values, rows, apart, apart)
        assert meeting == frozenset()
