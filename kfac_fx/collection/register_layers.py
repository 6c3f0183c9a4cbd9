"""The register functions of a `LayerCollection` for layers.

All take graph nodes, or their names, as inputs and outputs; `inputs=None` takes what the graph says. Those of
convolutions are in `kfac_fx.collection.register_convolutions`.
"""

from __future__ import annotations

from typing import Any

from kfac_fx.collection.find_use import Nodes
from kfac_fx.collection.register_convolutions import ConvolutionRegistrations
from kfac_fx.collection.registry import VARIABLE_SCOPE, Reuse
from kfac_fx.fisher_blocks import EMBEDDINGS, LINEAR, FisherBlock, block_class
from kfac_fx.passes.errors import RegistrationError
from kfac_fx.passes.ir import GENERIC


class LayerRegistrations(ConvolutionRegistrations):
    """Each returns the block. Raises RegistrationError if the graph has no such layer there, ReuseError, and
    ApproximationError for an `approx` that the layer has not."""

    def register_fully_connected(
        self,
        params: Any,
        inputs: Nodes,
        outputs: Nodes,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
        *,
        dense_inputs: bool = True,
    ) -> FisherBlock:
        """approx: "kron", "kron_in_diag", "kron_out_diag", "kron_both_diag" or "diagonal".
        dense_inputs: False if the inputs are ids, in the place of one-hot vectors."""
        layers = LINEAR if dense_inputs else EMBEDDINGS
        return self.register("fully_connected", params, inputs, outputs, approx, reuse, layers=layers)

    def register_fully_connected_multi(
        self,
        params: Any,
        inputs: Nodes,
        outputs: Nodes,
        num_uses: int | None = None,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
        *,
        dense_inputs: bool = True,
    ) -> FisherBlock:
        """Several uses of one weight, as in a recurrent network.

        Args:
            inputs, outputs: lists, one a use in the order of time; or single nodes that hold `num_uses` uses one after
                another, [num_uses * batch, ...].
            approx: "kron_indep", with "_in_diag", "_out_diag" or "_both_diag"; "kron_series_1" or "kron_series_2", for
                uses in the order of time.
        """
        layers = LINEAR if dense_inputs else EMBEDDINGS
        return self.register("fully_connected_multi", params, inputs, outputs, approx, reuse, num_uses, layers)

    def register_embedding(
        self, params: Any, inputs: Nodes, outputs: Nodes, approx: str | None = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """approx: "kron", whose input factor is diagonal."""
        return self.register("embedding", params, inputs, outputs, approx, reuse)

    def register_embedding_multi(
        self,
        params: Any,
        inputs: Nodes,
        outputs: Nodes,
        num_uses: int | None = None,
        approx: str | None = None,
        reuse: Reuse = VARIABLE_SCOPE,
    ) -> FisherBlock:
        """As `register_fully_connected_multi`; the output layer that is tied to the embedding is one more use."""
        layers = EMBEDDINGS + LINEAR
        return self.register("embedding_multi", params, inputs, outputs, approx, reuse, num_uses, layers)

    def register_scale_and_shift(
        self, params: Any, inputs: Nodes, outputs: Nodes, approx: str | None = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """`x * scale + shift`, or a normalization with its own scale and shift. approx: "full" or "diagonal"."""
        return self.register("scale_and_shift", params, inputs, outputs, approx, reuse)

    def register_generic(
        self, params: Any, batch_size: int | None = None, approx: str | None = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """Parameters of no layer. approx: "diagonal" or "full". batch_size is known without being said."""
        if batch_size is not None and batch_size < 1:
            raise RegistrationError(f"batch_size={batch_size} must be at least 1")
        names = self.names_of(params)
        chosen = self.chosen(GENERIC, names, approx)
        block = block_class(GENERIC, chosen, False)(self, names, chosen)
        block.register_additional_tower()
        return self.filed(names, block, reuse)
