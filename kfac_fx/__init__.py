"""K-FAC for PyTorch: a torch.fx compiler that finds every use of every parameter, and the optimizer that it feeds."""

import sys

from kfac_fx import losses
from kfac_fx.compiled import fisher_blocks, layer_collection
from kfac_fx.compiled.compiled_module import CompiledModule, capture, compile, detach, with_real_parameters
from kfac_fx.compiled.layer_collection import (
    LayerCollection,
    get_default_layer_collection,
    set_default_layer_collection,
)
from kfac_fx.compiled.loss_scale import LossScaleWarning
from kfac_fx.compiled.names import CapturedModel
from kfac_fx.compiled.register_methods import AUTO_REUSE, VARIABLE_SCOPE, variable_scope
from kfac_fx.compiled.report import Report
from kfac_fx.estimator.batches import Batch
from kfac_fx.estimator.estimator import FisherEstimator
from kfac_fx.estimator.fitting import fit_spectrum, load_queries, load_spectrum, save_queries, save_spectrum
from kfac_fx.estimator.model_spectrum import ModelSpectrum
from kfac_fx.estimator.queries import Queries
from kfac_fx.fisher.spectrum import Relative, Spectrum
from kfac_fx.linalg.vectors import ConvergenceWarning, Solution
from kfac_fx.optim import metrics, plot, rules
from kfac_fx.optim.checks import StalledWarning
from kfac_fx.optim.metrics import Metrics
from kfac_fx.optim.optimizer import KFAC
from kfac_fx.passes import errors
from kfac_fx.passes.errors import *  # noqa: F403
from kfac_fx.passes.layers import as_rows, by_group, layer
from kfac_fx.passes.tracing.functions import plain_backward, plain_function

__version__ = "0.1.0"

# `import kfac_fx.plot` works, as `kfac_fx.plot` does, although the modules lie in rooms.
sys.modules |= {
    f"kfac_fx.{name}": module
    for name, module in {
        "fisher_blocks": fisher_blocks,
        "layer_collection": layer_collection,
        "metrics": metrics,
        "plot": plot,
        "rules": rules,
    }.items()
}

__all__ = [
    "AUTO_REUSE",
    "KFAC",
    "VARIABLE_SCOPE",
    "Batch",
    "CapturedModel",
    "CompiledModule",
    "ConvergenceWarning",
    "FisherEstimator",
    "LayerCollection",
    "LossScaleWarning",
    "Metrics",
    "ModelSpectrum",
    "Queries",
    "Relative",
    "Report",
    "Solution",
    "Spectrum",
    "StalledWarning",
    "as_rows",
    "by_group",
    "capture",
    "compile",
    "detach",
    "fisher_blocks",
    "fit_spectrum",
    "get_default_layer_collection",
    "layer",
    "load_queries",
    "load_spectrum",
    "losses",
    "plain_backward",
    "plain_function",
    "plot",
    "rules",
    "save_queries",
    "save_spectrum",
    "set_default_layer_collection",
    "variable_scope",
    "with_real_parameters",
]
__all__ += errors.__all__
