"""Taps: the modules beside a use in an emitted module, which compute its statistics in the backward pass."""
