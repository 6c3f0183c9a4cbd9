"""What the register functions of a `LayerCollection` take: which layers, and which approximations under which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kfac_fx.collection.registry import Key
from kfac_fx.fisher_blocks import CONVOLUTIONS, DEPTHWISE, EMBEDDINGS, LINEAR, SCALES
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.errors import ApproximationError, RegistrationError, nearest


@dataclass(frozen=True)
class Kind:
    """One `register_*` method of a LayerCollection.

    Attributes:
        name: of the method, without the prefix "register_".
        layers: the declared layers that it registers; none: parameters of no layer.
        default: the approximation that it takes if the user names none.
        multi: whether it registers several uses.
        aliases: further names of approximations -> ours.
    """

    name: str
    layers: tuple[str, ...]
    default: str
    multi: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def approximations(self) -> Mapping[str, str]:
        """TF K-FAC's names of the approximations that it takes -> ours; products come first, with the default."""
        taken = [one for one in APPROXIMATIONS.values() if self.name in one.kinds]
        taken.sort(key=lambda one: (not one.kronecker, one.name != self.default))
        names = {(one.multi_name or one.name) if self.multi else one.name: one.name for one in taken}
        return {**self.aliases, **names}

    def own(self, approx: str) -> str | None:
        return self.approximations.get(approx)


INDEP = {"kron_indep": "kron_indep"} | {
    one.multi_name: one.name for one in APPROXIMATIONS.values() if one.multi_name is not None
}
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("generic", (), "diagonal"),
        Kind("fully_connected", LINEAR, "kron"),
        Kind("conv2d", CONVOLUTIONS, "kron"),
        Kind("depthwise_conv2d", DEPTHWISE, "diagonal"),
        Kind("embedding", EMBEDDINGS, "kron", aliases={"kron": "kron_in_diag"}),
        Kind("scale_and_shift", SCALES, "full"),
        Kind("fully_connected_multi", LINEAR, "kron_indep", multi=True),
        Kind("conv2d_multi", CONVOLUTIONS, "kron_indep", multi=True),
        Kind("embedding_multi", EMBEDDINGS, "kron_indep", multi=True, aliases={"kron_indep": "kron_in_diag"}),
    )
}


def checked_kind(kind: str) -> str:
    """Raises ApproximationError for a kind that does not exist."""
    if kind not in KINDS:
        raise ApproximationError(f"{kind!r} is no kind of layer; there are {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    return kind


def known(kind: str) -> str:
    return ", ".join(KINDS[kind].approximations)


def check_num_uses(names: Key, num_uses: int | None, uses: int | None) -> None:
    """uses: the length of the lists, None for a single tensor."""
    said = ", ".join(names)
    if uses is None and num_uses is None:
        raise RegistrationError(
            f"{said}: You must supply a value for num_uses with inputs and outputs that are single nodes"
        )
    if num_uses is not None and num_uses < 1:
        raise RegistrationError(f"{said}: num_uses={num_uses} must be at least 1")
    if uses is not None and num_uses not in (None, uses):
        raise RegistrationError(f"{said}: num_uses={num_uses}, but the lists hold {uses} uses")
