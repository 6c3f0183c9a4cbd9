"""Sums over the rows and gradient rows of a batch."""
