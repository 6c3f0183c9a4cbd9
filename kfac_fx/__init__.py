"""K-FAC for PyTorch: a torch.fx compiler that finds every use of every parameter, and the optimizer that it feeds."""

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

__version__ = "0.1.0"

__all__ = [
    "AlreadyAttachedError",
    "AmbiguousRegistrationError",
    "ApproximationError",
    "FactorNotReady",
    "LayerError",
    "LinkError",
    "LossError",
    "ModelChangedError",
    "RegistrationError",
    "TargetsMissing",
    "UntraceableError",
]
