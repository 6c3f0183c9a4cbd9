"""The nodes, parameters and pieces of parameters of one captured model, as a user names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from kfac_fx.collection.captured import CapturedModel
from kfac_fx.linalg.vectors import piece_of_view, read_piece
from kfac_fx.passes.errors import RegistrationError, nearest
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.pieces import Piece


class Names:
    """Parameters are given as names, under any of their aliases, or as the objects, and are known by their canonical
    names. So are pieces of them: `"w[0:64]"`, `"table[:, 2:5]"`, or views such as `model.w[0:64]`.

    pieces: those that were met so far, by name.
    """

    def __init__(self, graph: CapturedModel) -> None:
        """Raises RegistrationError for what is no captured model."""
        if not isinstance(graph, CapturedModel):
            raise RegistrationError(
                f"a LayerCollection is built on a captured model and got a {type(graph).__name__}: "
                "LayerCollection(kfac_fx.capture(model, example_inputs))"
            )
        self.captured = graph
        self.pieces: dict[str, Piece] = dict(graph.program.pieces)
        self._by_object = {id(parameter): key for key, parameter in graph.program.parameters.items()}

    @property
    def graph(self) -> fx.Graph:
        return self.captured.graph

    @property
    def model(self) -> nn.Module:
        return self.captured.model

    @property
    def layers(self) -> Mapping[str, Layer]:
        return self.captured.program.layers

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self.captured.program.parameters

    def node(self, name: str | fx.Node) -> fx.Node:
        """A node of the graph by its name. Raises RegistrationError if there is none."""
        return self.captured.node(name)

    def inputs_of(self, module: str) -> fx.Node | list[fx.Node]:
        """What the call of a submodule reads; a list with one node a call if it is called several times."""
        return self.captured.inputs_of(module)

    def outputs_of(self, module: str) -> fx.Node | list[fx.Node]:
        """What the call of a submodule computes; a list with one node a call if it is called several times."""
        return self.captured.outputs_of(module)

    def name_of(self, parameter: Any) -> str:
        """The canonical name. Raises RegistrationError for what is no trainable parameter of the model, nor a piece of
        one."""
        aliases = self.captured.program.aliases
        if isinstance(parameter, str) and parameter in aliases:
            return aliases[parameter]
        if id(parameter) in self._by_object:
            return self._by_object[id(parameter)]
        piece: Piece | None = None
        if isinstance(parameter, str):
            piece = self.pieces.get(parameter) or read_piece(parameter, aliases, self.parameters)
        elif isinstance(parameter, Tensor):
            piece = piece_of_view(parameter, self.parameters)
        if piece is not None:
            if piece.stop - piece.start == self.parameters[piece.parameter].shape[piece.dim]:
                return piece.parameter
            return self.pieces.setdefault(piece.name, piece).name
        if isinstance(parameter, str):
            raise RegistrationError(
                f"{parameter!r} is not a trainable parameter of the model.{nearest(parameter, aliases)}"
            )
        raise RegistrationError(f"a {type(parameter).__name__} that is not a trainable parameter of the model")
