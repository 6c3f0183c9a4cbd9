"""Tables that data look up along any dimension."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx.passes.layers.declaration import Written
from kfac_fx.passes.matrix import Shape

LOOKUPS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Shape]] = {
    "columns": (lambda x, w: w[:, x].movedim(0, -1), (4, 6)),
    "columns by a table of ids": (lambda x, w: w[:, torch.stack([x, 5 - x])].movedim(0, -1).sum(0), (4, 6)),
    "the last of three": (lambda x, w: w[..., x].movedim(-1, 0).flatten(1), (2, 3, 6)),
    "the middle of three": (lambda x, w: w[:, x].transpose(0, 1).flatten(1), (2, 6, 3)),
    "index_select": (lambda x, w: w.index_select(-1, x).mT, (4, 6)),
    "a function": (lambda x, w: w.log_softmax(-1)[:, x].mT, (4, 6)),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_data_may_look_up_along_any_dimension(lookup: str) -> None:
    function, shape = LOOKUPS[lookup]
    torch.manual_seed(0)
    model = Written(function, {"w": shape})
    net = kfac_fx.compile(model, (torch.randint(6, (5,)),), loss="normal", strict=True)
    (registration,) = net.registrations
    assert registration.layer == "embedding" and len(registration.uses) == 1
    other = torch.randint(6, (8,))
    torch.testing.assert_close(net.functional({}, (other,), {})[0], model(other))
    assert net.record((other,), {}).cases == 8


def test_constant_columns_stay_parts_of_their_matrix() -> None:
    columns = torch.tensor([4, 0, 2])
    torch.manual_seed(0)
    model = Written(lambda x, w: F.linear(x, w[:, columns]), {"w": (5, 6)})
    (registration,) = kfac_fx.compile(model, (torch.randn(4, 3),), loss="normal", strict=True).registrations
    assert registration.layer == "linear"


class Members(nn.Module):
    """An ensemble whose members share a batch, each with the scales and the shifts of its own part."""

    def __init__(self, in_turn: bool) -> None:
        super().__init__()
        self.in_turn = in_turn
        self.scale, self.shift = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 2))
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0] // 4
        if self.in_turn:
            turns: Tensor = self.layer(x * self.scale.repeat(n, 1)) + self.shift.repeat(n, 1)
            return turns
        y: Tensor = self.layer(x * self.scale.repeat_interleave(n, 0)) + torch.repeat_interleave(self.shift, n, dim=0)
        return y


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("exported", [True, False])
def test_rows_that_are_repeated_for_parts_of_the_batch_are_looked_up(exported: bool, in_turn: bool) -> None:
    torch.manual_seed(0)
    model = Members(in_turn).double()
    examples = (torch.randn(12, 3).double(),) if exported else None
    net = kfac_fx.compile(model, examples, loss="normal")
    for cases in (12, 8):
        x, y = torch.randn(cases, 3).double(), torch.randn(cases, 2).double()
        found = net.record((x,), {}, mode="empirical", targets=y).statistics
        layers = {registration.parameters: registration.layer for registration in net.registrations}
        assert layers["scale",] == layers["shift",] == "embedding"
        for name in ("scale", "shift"):
            wanted = torch.zeros(model.get_parameter(name).shape[1], dtype=torch.float64)
            outputs = model(x)
            for case, target in zip(outputs, y, strict=True):
                loss = kfac_fx.losses.Normal(case[None], targets=target[None]).evaluate()
                (gradient,) = torch.autograd.grad(loss, model.get_parameter(name), retain_graph=True)
                wanted += gradient.sum(0).square()  # of a case, in whose row alone it is not zero
            torch.testing.assert_close(found[name,]["G"].squeeze().diagonal(), wanted)
            assert float(found[name,]["count"]) == cases
