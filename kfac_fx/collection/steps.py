"""Which uses of a block that a user registers are the steps of a series, and where a single tensor holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kfac_fx.collection.registry import Key
from kfac_fx.passes.claiming.approximation import why_no_series
from kfac_fx.passes.errors import ApproximationError, RegistrationError
from kfac_fx.passes.graphs.sizes import in_example
from kfac_fx.passes.ir import Use, where
from kfac_fx.passes.layers import Layer


def in_time(
    params: Key, approximation: str, towers: Sequence[Sequence[Use]], layers: Mapping[str, Layer], num_uses: int | None
) -> tuple[Use, ...]:
    """The last of `towers`, with what is known of its steps.

    Raises ApproximationError if these uses are no series, RegistrationError if they are in another order than the graph
    computes them in, or if a tensor cannot hold `num_uses` of them.
    """
    said, (*known, last) = ", ".join(params), towers
    if num_uses is not None:
        last = [with_steps(said, use, layers[use.layer], num_uses) for use in last]
    if why := why_no_series([replace(use, tower=n) for n, tower in enumerate([*known, last]) for use in tower], 1):
        raise ApproximationError(f"{said}: {why}, so not {approximation!r}")
    order = {node: n for n, node in enumerate(last[0].output.graph.nodes)}
    places = [order[use.output] for use in last]
    if places not in (sorted(places), sorted(places, reverse=True)):
        raise RegistrationError(
            f"{said}: {approximation!r} takes its uses in the order of time, and the graph computes "
            f"{', '.join(use.output.name for use in last)} in another"
        )
    return tuple(last)


def with_steps(said: str, use: Use, layer: Layer, num_uses: int) -> Use:
    """A use whose output holds `num_uses` one after another: along its first dimension, or along one of that size."""
    value = use.output.meta.get("val")
    sizes = [] if value is None else [in_example(size) for size in value.shape[:-1]]
    if not layer.forms[use.form].leading:
        raise RegistrationError(
            f"{said} at {where(use.output)}: register the uses as a list; they cannot be told apart"
        )
    alone = [dim for dim, size in enumerate(sizes) if size == num_uses] if len(sizes) > 1 else []
    if len(alone) > 1:
        raise RegistrationError(
            f"{said} at {where(use.output)}: num_uses={num_uses} is the size of dimensions {alone}, so that time could "
            "be either; capture the model with another number of cases"
        )
    time = alone[0] if alone else 0
    cases = use.batch_dim or 0
    positions = [dim for dim in range(len(sizes)) if dim != cases]
    if sizes and (sizes[time] % num_uses or (time != cases and time != positions[0])):
        raise RegistrationError(
            f"{said} at {where(use.output)}: {sizes} rows do not hold "
            f"num_uses={num_uses} one after another, as [num_uses * batch, ...] or [num_uses, batch, ...]"
        )
    return replace(use, steps=num_uses, steps_in_positions=time != cases)
