"""Hostile inputs: legal but odd things that users do to optimizers, graded by what their user sees."""
