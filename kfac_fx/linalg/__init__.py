"""Pure functions of tensors, and vectors of tensors by name. Nothing here knows a model."""
