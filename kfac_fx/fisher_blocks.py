"""The Fisher blocks that a `LayerCollection` registers, under their names in TF K-FAC."""

from kfac_fx.layer_collection.fisher_blocks import *  # noqa: F403
