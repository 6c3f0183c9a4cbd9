"""Checks: the proof of registrations, the comparison of graph and model, and what must not change after `compile`."""
