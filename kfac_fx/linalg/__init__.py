"""Pure functions of tensors, and vectors of tensors by name. No function here knows a model."""
