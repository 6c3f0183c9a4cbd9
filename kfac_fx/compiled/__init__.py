"""The module that a user gets from `compile`, registration by hand, and the report."""
