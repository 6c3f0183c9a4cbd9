"""What the register functions of a `LayerCollection` take: which layers, and which approximations under which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kfac_fx.collection.registry import Key
from kfac_fx.fisher_blocks import CONVOLUTIONS, DEPTHWISE, EMBEDDINGS, LINEAR, SCALES
from kfac_fx.passes.errors import ApproximationError, RegistrationError, nearest
from kfac_fx.passes.ir import APPROXIMATIONS, SERIES, UNCORRELATED


@dataclass(frozen=True)
class Kind:
    """What one register function takes. approximations: the seed's names of them -> ours."""

    layers: tuple[str, ...]
    approximations: Mapping[str, str]
    default: str
    multi: bool = False

    def own(self, approx: str) -> str | None:
        ours = self.approximations.get(approx)
        return ours if ours in APPROXIMATIONS else None


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


KRON = same("kron", "kron_in_diag", "kron_out_diag", "kron_both_diag")
INDEP = {"kron_indep": "kron_indep"} | {
    f"kron_indep_{sides}": f"kron_{sides}" for sides in ("in_diag", "out_diag", "both_diag")
}
PER_CASE = same("diagonal", "full")  # of every layer, with any number of uses
EMBEDDED = {"kron_in_diag": "kron_in_diag", "kron_both_diag": "kron_both_diag"} | PER_CASE
KINDS: Mapping[str, Kind] = {
    "generic": Kind((), same("diagonal", "full"), "diagonal"),
    "fully_connected": Kind(LINEAR, KRON | PER_CASE, "kron"),
    "conv2d": Kind(CONVOLUTIONS, same("kron", *UNCORRELATED) | PER_CASE, "kron"),
    "depthwise_conv2d": Kind(DEPTHWISE, same("kron") | PER_CASE, "diagonal"),
    "embedding": Kind(EMBEDDINGS, {"kron": "kron_in_diag"} | EMBEDDED, "kron"),
    "scale_and_shift": Kind(SCALES, same("full", "diagonal"), "full"),
    "fully_connected_multi": Kind(LINEAR, INDEP | same(*SERIES) | PER_CASE, "kron_indep", multi=True),
    "conv2d_multi": Kind(CONVOLUTIONS, same("kron_indep", *UNCORRELATED) | PER_CASE, "kron_indep", multi=True),
    "embedding_multi": Kind(
        EMBEDDINGS,
        {"kron_indep": "kron_in_diag", "kron_indep_in_diag": "kron_in_diag"} | PER_CASE,
        "kron_indep",
        multi=True,
    ),
}


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
