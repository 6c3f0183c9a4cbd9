"""K-FAC for PyTorch: a torch.fx compiler that finds every use of every parameter, and the optimizer that it feeds."""

from kfac_fx import losses
from kfac_fx.compiler import CompiledModule, compile
from kfac_fx.estimator import FisherEstimator
from kfac_fx.factors import NotRegisteredError
from kfac_fx.optimizer import KFAC
from kfac_fx.passes.errors import (
    AlreadyAttachedError,
    AmbiguousRegistrationError,
    ApproximationError,
    FactorNotReady,
    LayerError,
    LinkError,
    LossError,
    ModelChangedError,
    RegistrationError,
    TargetsMissing,
    UntraceableError,
)
from kfac_fx.passes.layers import as_rows, by_group, layer
from kfac_fx.report import Report

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "AlreadyAttachedError",
    "AmbiguousRegistrationError",
    "ApproximationError",
    "CompiledModule",
    "FactorNotReady",
    "FisherEstimator",
    "LayerError",
    "LinkError",
    "LossError",
    "ModelChangedError",
    "NotRegisteredError",
    "RegistrationError",
    "Report",
    "TargetsMissing",
    "UntraceableError",
    "as_rows",
    "by_group",
    "compile",
    "layer",
    "losses",
]
