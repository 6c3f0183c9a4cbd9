"""Sums of rows as plain autograd gives them, and a recorder that gives nothing else."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.pipeline import run
from kfac_fx.passes.trace import trace_model
from kfac_fx.recording.emitted import EmittedGraph
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics import Moments

KEYS = ("count", "A", "G")
Statistics = dict[str, dict[str, Tensor]]


def recorder(model: nn.Module, *inputs: Any, **options: Any) -> Recorder:
    """The recorder of the sums of rows, whatever the blocks would need; without a proof."""
    program = run(trace_model(model, inputs, layers=LAYERS).program)
    needs = {registration.parameters: KEYS for registration in program.registrations if not registration.generic}
    emitted = EmittedGraph(trace_model(model, inputs, layers=LAYERS), program, model, **options)
    return Recorder(emitted, None, needs)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def by_hand(model: nn.Module, inputs: tuple[Any, ...], loss: Any) -> Statistics:
    """Sums of rows of every module with a weight, from its inputs and from the gradients of its outputs; `loss`:
    from the model's output to a sum over cases."""
    seen: list[tuple[str, nn.Module, Any, Tensor]] = []
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):

            def keep(own: nn.Module, given: Any, out: Tensor, name: str = name) -> Tensor:
                out.retain_grad()
                seen.append((name, own, given[0].detach(), out))
                return out.clone()  # what follows may write into it

            hooks.append(module.register_forward_hook(keep))
    before = copy.deepcopy(dict(model.named_buffers()))
    loss(model(*inputs)).backward()
    for hook in hooks:
        hook.remove()
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    model.zero_grad()
    found: Statistics = {}
    for name, module, x, out in seen:
        rows, grads = rows_of(module, x, out.grad)  # type: ignore[arg-type]  # retain_grad
        own = {"count": torch.tensor(float(len(rows))), "A": rows.mT @ rows, "G": grads.mT @ grads}
        found[name] = {key: value + found.get(name, {}).get(key, 0) for key, value in own.items()}
    return found


def rows_of(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(module, nn.Embedding):
        return F.one_hot(x, module.num_embeddings).flatten(0, -2).float(), grad.flatten(0, -2)
    if isinstance(module, nn.Conv2d):
        x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
        grad = grad.flatten(2).mT
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    bias = getattr(module, "bias", None)
    return (x if bias is None else torch.cat([x, torch.ones_like(x[:, :1])], dim=1)), grad


def same(moments: Moments, expected: Statistics) -> None:
    got = {names[0].removesuffix(".weight"): statistic for names, statistic in moments.statistics.items()}
    assert got.keys() - {"norm"} == expected.keys()
    for name, statistics in expected.items():
        for key, value in statistics.items():
            torch.testing.assert_close(got[name][key].squeeze(0), value, msg=lambda m: f"{name} {key}: {m}")  # noqa: B023


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.inner(self.table(ids)))
        return self.head(torch.tanh(self.inner(x)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.ReLU(inplace=True), nn.Linear(5, 3)
    )
