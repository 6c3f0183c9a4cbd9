"""`x.data` while a model is traced: what `x.detach()` is, which torch.export knows.

On a parameter (`linear(x, self.weight.data)`, as adapters read the weights that they were put beside) it would give
torch.export a tensor that it takes for a constant without numbers. What forward writes through it is seen in the model
itself; see `writes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a property, which torch's types do not say


class Detached(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0].detach() if func == DATA else func(*args, **(kwargs or {}))
