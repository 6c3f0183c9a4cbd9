"""Tensors by the names of the model's parameters, and by those of the registrations, which know some only in pieces.

This is where the two meet: users, gradients and optimizers have whole parameters, blocks have pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kfac_fx.passes.ir import Registration


def split(whole: Mapping[str, Tensor], registrations: Iterable[Registration], lead: int = 0) -> dict[str, Tensor]:
    """By every name of the registrations; pieces are views.

    lead: how many dimensions are in front of those of the parameters.
    """
    parts: dict[str, Tensor] = {}
    for one in registrations:
        pieces = {piece.name: piece for piece in one.pieces}
        for name in one.parameters:
            piece = pieces.get(name)
            parts[name] = whole[name] if piece is None else piece.of(whole[piece.parameter], lead)
    return parts


def joined(
    parts: Mapping[str, Tensor], registrations: Iterable[Registration], whole: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of `split`, in the order and the shapes of `whole`; zero where no piece is: nothing reads it."""
    pieces = [piece for one in registrations for piece in one.pieces]
    cut = {piece.parameter for piece in pieces}
    found = {name: torch.zeros_like(tensor) if name in cut else parts[name] for name, tensor in whole.items()}
    for piece in pieces:
        piece.of(found[piece.parameter]).copy_(parts[piece.name])
    return found
