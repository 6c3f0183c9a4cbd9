"""Real and imaginary parts as the parameters of a model with complex ones, whose Fisher is that of the parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class AsComplex(nn.Module):
    """The parametrization of torch from real and imaginary parts [..., 2] to complex numbers [...]."""

    def forward(self, parts: Tensor) -> Tensor:
        return torch.view_as_complex(parts)

    def right_inverse(self, numbers: Tensor) -> tuple[Tensor]:
        return (torch.view_as_real(numbers.resolve_conj()),)  # a tuple may have another dtype than the numbers


def with_real_parameters(model: nn.Module) -> nn.Module:
    """Let the real and imaginary parts of all trained complex parameters be the parameters.

    Models that are sharded need it; others train with their complex parameters, and have the same Fisher.

    `model.weight` stays complex, and computes from `model.parametrizations.weight.original0` [..., 2], which
    `named_parameters` and `state_dict` list instead; see `torch.nn.utils.parametrize`. Parameters that were tied stay
    tied. Call it before the model is compiled and before an optimizer is made;
    `torch.nn.utils.parametrize.remove_parametrizations(module, name)` takes one back.

    Returns the model itself.
    """
    parts: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not (parameter.requires_grad and parameter.is_complex()):
                continue
            parametrize.register_parametrization(module, name, AsComplex())
            held: Any = module.parametrizations
            held = held[name]
            held.original0 = parts.setdefault(id(parameter), held.original0)
    return model
