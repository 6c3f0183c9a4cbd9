"""K-FAC for PyTorch: a torch.fx compiler that finds every use of every parameter, and the optimizer that it feeds."""

from kfac_fx import fisher_blocks, losses, plot
from kfac_fx.blocks.spectrum import Relative, Spectrum
from kfac_fx.compiled_module import CompiledModule
from kfac_fx.compiler import compile
from kfac_fx.estimator import FisherEstimator
from kfac_fx.factors.factor import NotRegisteredError
from kfac_fx.fitting import fit_spectrum, load_spectrum, save_spectrum
from kfac_fx.layer_collection import (
    AUTO_REUSE,
    VARIABLE_SCOPE,
    CapturedModel,
    LayerCollection,
    capture,
    get_default_layer_collection,
    set_default_layer_collection,
    variable_scope,
)
from kfac_fx.linalg.operators import ConvergenceWarning, Solution
from kfac_fx.metrics import Metrics
from kfac_fx.optim.loss_scale import LossScaleWarning
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
    ReuseError,
    TargetsMissing,
    UntraceableError,
)
from kfac_fx.passes.layers import as_rows, by_group, layer
from kfac_fx.passes.tracing.functions import plain_backward
from kfac_fx.report import Report
from kfac_fx.spectrum.model_spectrum import ModelSpectrum
from kfac_fx.spectrum.queries import Batch, Queries

__version__ = "0.1.0"

__all__ = [
    "AUTO_REUSE",
    "KFAC",
    "VARIABLE_SCOPE",
    "AlreadyAttachedError",
    "AmbiguousRegistrationError",
    "ApproximationError",
    "Batch",
    "CapturedModel",
    "CompiledModule",
    "ConvergenceWarning",
    "FactorNotReady",
    "FisherEstimator",
    "LayerCollection",
    "LayerError",
    "LinkError",
    "LossError",
    "LossScaleWarning",
    "Metrics",
    "ModelChangedError",
    "ModelSpectrum",
    "NotRegisteredError",
    "Queries",
    "RegistrationError",
    "Relative",
    "Report",
    "ReuseError",
    "Solution",
    "Spectrum",
    "TargetsMissing",
    "UntraceableError",
    "as_rows",
    "by_group",
    "capture",
    "compile",
    "fisher_blocks",
    "fit_spectrum",
    "get_default_layer_collection",
    "layer",
    "load_spectrum",
    "losses",
    "plain_backward",
    "plot",
    "save_spectrum",
    "set_default_layer_collection",
    "variable_scope",
]
