"""What stands in an emitted module beside a use, and computes its statistics in the backward pass."""
