"""What the register functions of a `LayerCollection` take: which layers, and which approximations under which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kfac_fx.collection.registry import Key
from kfac_fx.fisher_blocks import CONVOLUTIONS, DEPTHWISE, EMBEDDINGS, LINEAR, SCALES
from kfac_fx.passes.approximations import APPROXIMATIONS
from kfac_fx.passes.errors import ApproximationError, RegistrationError, nearest


@dataclass(frozen=True)
class Kind:
    """What one register function takes. approximations: the seed's names of them -> ours."""

    layers: tuple[str, ...]
    approximations: Mapping[str, str]
    default: str
    multi: bool = False

    def own(self, approx: str) -> str | None:
        return self.approximations.get(approx)


INDEP = {"kron_indep": "kron_indep"} | {
    one.multi_name: one.name for one in APPROXIMATIONS.values() if one.multi_name is not None
}


def kind_of(name: str, layers: tuple[str, ...], default: str, multi: bool = False, **renamed: str) -> tuple[str, Kind]:
    """The kind of this name, with the approximations that are declared for it; products first, the default foremost."""
    taken = [one for one in APPROXIMATIONS.values() if name in one.kinds]
    taken.sort(key=lambda one: (not one.kronecker, one.name != default))
    names = {(one.multi_name or one.name) if multi else one.name: one.name for one in taken}
    return name, Kind(layers, renamed | names, default, multi)


KINDS: Mapping[str, Kind] = dict(
    (
        kind_of("generic", (), "diagonal"),
        kind_of("fully_connected", LINEAR, "kron"),
        kind_of("conv2d", CONVOLUTIONS, "kron"),
        kind_of("depthwise_conv2d", DEPTHWISE, "diagonal"),
        kind_of("embedding", EMBEDDINGS, "kron", kron="kron_in_diag"),
        kind_of("scale_and_shift", SCALES, "full"),
        kind_of("fully_connected_multi", LINEAR, "kron_indep", multi=True),
        kind_of("conv2d_multi", CONVOLUTIONS, "kron_indep", multi=True),
        kind_of("embedding_multi", EMBEDDINGS, "kron_indep", multi=True, kron_indep="kron_in_diag"),
    )
)


def checked_kind(kind: str) -> str:
    """Raises ApproximationError for a kind that does not exist."""
    if kind not in KINDS:
        raise ApproximationError(f"{kind!r} is no kind of layer; there are {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    return kind


def known(kind: str) -> str:
    return ", ".join(name for name in KINDS[kind].approximations if KINDS[kind].own(name))


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
