"""torch's vmap gives wrong gradients of `torch.cdist`: whatever is recorded first, they are seen and not used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kfac_fx

pytestmark = pytest.mark.usefixtures("float64")


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(-torch.cdist(x, self.centers.expand(len(x), -1, -1)))


@pytest.mark.parametrize("first", ["head", "centers"])
def test_exact_factors_do_not_depend_on_what_is_recorded_first(first: str) -> None:
    """A part that passes no distance was compared with vmap, and the next part was not."""
    torch.manual_seed(0)
    model, x = Distances(), torch.randn(4, 3, 4)
    parts = [["head.weight", "head.bias"], ["centers"]]
    whole, divided = (
        kfac_fx.fit_spectrum(kfac_fx.compile(model, (x,), loss="categorical"), [x], mode="exact", parts=chosen)
        for chosen in (1, parts if first == "head" else parts[::-1])
    )
    of_whole = whole.diagonal()
    assert all(torch.equal(tensor, of_whole[name]) for name, tensor in divided.diagonal().items())


def test_variances_of_a_generic_parameter_alone_are_those_of_its_jacobian() -> None:
    """Gradients of parameters were taken by vmap without a comparison."""
    torch.manual_seed(0)
    model, x = Distances(), torch.randn(4, 3, 4)
    net = kfac_fx.compile(model, (x,), loss="categorical", approximations={"centers": "generic"})
    spectrum = kfac_fx.fit_spectrum(net, [x], mode="exact", damping=0.1).part(["centers"])
    outputs = model(x).flatten(1)
    rows = [torch.autograd.grad(output, model.centers, retain_graph=True)[0].flatten() for output in outputs.flatten()]
    jacobian, inverse = torch.stack(rows).view(4, 9, 20), spectrum.diagonal(-1)["centers"].flatten()
    torch.testing.assert_close(spectrum.functional_variance(x), (jacobian * inverse) @ jacobian.mT)
