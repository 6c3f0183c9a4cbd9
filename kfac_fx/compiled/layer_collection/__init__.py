"""Registration by hand, on the nodes of a model's graph, under the names of TF K-FAC (docs/specification.md).

- `capture` makes the graph, whose nodes and parameters have names (`names`).
- `LayerCollection` (`collection`) files blocks and losses. The methods that register them are in one table (`methods`),
  and their work in `registering` and `losses`.
- A use is found at a node (`find_use`). `FisherBlock` (`blocks`) holds the uses of its parameters; its classes are in
  `fisher_blocks`.
- The parameters that are left are registered by a scan of the graph (`scan`).
"""

from kfac_fx.compiled.layer_collection.collection import (
    LayerCollection,
    get_default_layer_collection,
    set_default_layer_collection,
)
from kfac_fx.compiled.layer_collection.fisher_blocks import FisherBlock, FisherFactor
from kfac_fx.compiled.layer_collection.names import (
    AUTO_REUSE,
    VARIABLE_SCOPE,
    CapturedModel,
    LayerParametersDict,
    capture,
    variable_scope,
)

__all__ = [
    "AUTO_REUSE",
    "VARIABLE_SCOPE",
    "CapturedModel",
    "FisherBlock",
    "FisherFactor",
    "LayerCollection",
    "LayerParametersDict",
    "capture",
    "get_default_layer_collection",
    "set_default_layer_collection",
    "variable_scope",
]
