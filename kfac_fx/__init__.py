"""K-FAC for PyTorch: a torch.fx compiler that finds every use of every parameter, and the optimizer that it feeds."""

import sys

from kfac_fx import losses
from kfac_fx.compiled import layer_collection
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.compiled.compiler import compile
from kfac_fx.compiled.layer_collection import (
    AUTO_REUSE,
    VARIABLE_SCOPE,
    CapturedModel,
    LayerCollection,
    capture,
    fisher_blocks,
    get_default_layer_collection,
    set_default_layer_collection,
    variable_scope,
)
from kfac_fx.compiled.report import Report
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.estimator.fitting import fit_spectrum, load_spectrum, save_spectrum
from kfac_fx.estimator.model_spectrum import ModelSpectrum
from kfac_fx.estimator.queries import Batch, Queries
from kfac_fx.fisher.spectrum import Relative, Spectrum
from kfac_fx.linalg.operators import ConvergenceWarning, Solution
from kfac_fx.optim import metrics, plot
from kfac_fx.optim.loss_scale import LossScaleWarning
from kfac_fx.optim.metrics import Metrics
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.passes.errors import (
    AlreadyAttachedError,
    AmbiguousRegistrationError,
    ApproximationError,
    FactorNotReady,
    LayerError,
    LinkError,
    LossError,
    ModelChangedError,
    NotRegisteredError,
    RegistrationError,
    ReuseError,
    TargetsMissing,
    UntraceableError,
)
from kfac_fx.passes.layers import as_rows, by_group, layer
from kfac_fx.passes.tracing.functions import plain_backward

__version__ = "0.1.0"

# `import kfac_fx.plot` works, as `kfac_fx.plot` does, although the modules lie in rooms.
sys.modules |= {
    f"kfac_fx.{name}": module
    for name, module in {
        "fisher_blocks": fisher_blocks,
        "layer_collection": layer_collection,
        "metrics": metrics,
        "plot": plot,
    }.items()
}

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
