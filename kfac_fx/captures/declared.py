"""What the user said to `compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kfac_fx.losses.loss_spec import LossSpec
from kfac_fx.losses.registered_losses import RegisteredLosses
from kfac_fx.passes.ir import Options, Program
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.pipeline import run
from kfac_fx.recording.masks import PaddingMask


@dataclass(frozen=True)
class Declared:
    """The arguments of `compile`, checked."""

    options: Options
    layers: Mapping[str, Layer]
    loss: LossSpec | RegisteredLosses | None
    verify: bool
    backend: str
    passes: Callable[[Program], Program] = run  # from a fresh capture to a program with registrations
    padding_mask: PaddingMask | None = None
