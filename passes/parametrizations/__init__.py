"""Parametrizations, one module for each mechanism that may stand between a parameter and its layer's matrix."""
