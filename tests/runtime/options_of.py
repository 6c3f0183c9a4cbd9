"""The options of a KFAC without the optimizer, for tests of what reads them."""

from __future__ import annotations

import inspect
from typing import Any

from kfac_fx.optim.optimizer import KFAC
from kfac_fx.optim.options import KFACOptions


def options_of(net: Any, lr: Any = None, **options: Any) -> KFACOptions:
    """Those of `KFAC(net, lr, **options)`."""
    bound = inspect.signature(KFAC).bind(net, lr, **options)
    bound.apply_defaults()
    return KFACOptions.of(**bound.arguments)
