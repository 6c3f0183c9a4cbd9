"""The precision of the forwards that check a step.

A difference quotient of outputs loses its digits where the forward rounds coarsely. So these forwards compute in the
precision of the parameters, whatever the user's forward was allowed: autocast around them is off, and products of
float32 are computed in float32.

Three things still round coarsely: parameters and inputs of half precision, casts that the graph has, and autocast in a
part of forward. Where casts or inputs need the autocast that was around the user's forward, so that their dtypes meet
those of the parameters, the check's forwards have it, too. So have models without a single graph, whose submodules were
captured under it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import convolutions_are_full, full_precision, products_are_full
from kfac_fx.passes.graphs.labels import named_dtypes
from kfac_fx.passes.torch_private import pytree
from kfac_fx.passes.tracing.signature import autocast, ignoring_autocast_of_graphs, kinds
from kfac_fx.recording.equivalence import coarsest_rounding
from kfac_fx.recording.recorder import Recorder

COARSE = 1e-6  # of itself, by which a rounding changes a number
# The autocast of the precision that is entered at present; None: none is.
ENTERED: ContextVar[tuple[tuple[str, torch.dtype], ...] | None] = ContextVar("ENTERED", default=None)


@dataclass(frozen=True)
class CheckPrecision:
    """How the check's forwards of one call compute.

    Attributes:
        rounding: the ε of the coarsest precision that takes part in them.
        as_returned: whether the user's forward computed in the same precision, so that a check may take what it
            returned.
        autocast: (kind of device, dtype) pairs of the autocast around them; usually none.
    """

    rounding: float = 0.0
    as_returned: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    @staticmethod
    def of_call(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CheckPrecision:
        """That for a call of the model, in the settings of which the user's forward has just run."""
        around = tuple((dict(autocast()) | dict(recorder.program.autocast)).items())
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if is_real(leaf)]
        cast = max_rounding(named_dtypes(recorder.program)) if recorder.whole else 0.0
        mixed = not recorder.whole or max(cast, max_rounding({leaf.dtype for leaf in tensors})) > COARSE
        around_check = around if mixed else ()
        rounding = max(cast, coarsest_rounding(recorder, (args, kwargs), around=bool(around_check)))
        devices = {parameter.device.type for parameter in recorder.model.parameters()}
        full = products_are_full() and convolutions_are_full(devices)
        return CheckPrecision(rounding, full and around == around_check, around_check)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Forwards inside have this precision. All settings are restored at the end."""
        if ENTERED.get() == self.autocast:  # nothing would change
            yield
            return
        with full_precision(everything=True), ignoring_autocast_of_graphs(), ExitStack() as stack:
            stack.callback(ENTERED.reset, ENTERED.set(self.autocast))
            chosen = dict(self.autocast)
            for kind in kinds():
                # Without a cache: dual numbers and tensors of a transformation must not outlive their level.
                dtype = chosen.get(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False))
            yield


OWN_PRECISION = CheckPrecision()  # of parameters and inputs that do not round


def is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def max_rounding(dtypes: set[torch.dtype]) -> float:
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
