"""Capture: how a model is traced, and what happens while it is."""
