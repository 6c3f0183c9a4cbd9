"""The geometry of a convolution, axis by axis, from the attributes of a use; and what a user says of it."""

from __future__ import annotations

from typing import Any

from ..ir import Attrs


def per_axis(name: str, attrs: Attrs) -> list[int]:
    value, axes = attrs[name], len(attrs["weight"]) - 2
    return list(value) * (axes // len(value)) if isinstance(value, (list, tuple)) else [value] * axes


def same_or_given(attrs: Attrs) -> list[tuple[int, int]]:
    """Padding at both ends of every axis; what is odd of "same" goes to the far end."""
    if attrs["padding"] == "valid":
        return [(0, 0) for _ in attrs["weight"][2:]]
    if attrs["padding"] != "same":
        return [(p, p) for p in per_axis("padding", attrs)]
    total = [d * (k - 1) for k, d in zip(attrs["weight"][2:], per_axis("dilation", attrs), strict=True)]
    return [(t // 2, t - t // 2) for t in total]


def disagreement(attrs: Attrs, strides: Any, padding: Any, dilations: Any) -> tuple[str, Any] | None:
    """("strides=[1, 2]", [2, 2]): what is said of a geometry, and what it is; None where nothing disagrees."""
    for name, sizes, attribute in (("strides", strides, "stride"), ("dilations", dilations, "dilation")):
        found = per_axis(attribute, attrs)
        given = [found] if sizes is None else readings(sizes, len(found))
        if found not in given:
            return f"{name}={given[0] if given else list(sizes)}", found
    wanted = padding.lower() if isinstance(padding, str) else padding  # "SAME", as TensorFlow spells it
    if padding is not None and same_or_given({**attrs, "padding": wanted}) != same_or_given(attrs):
        return f"padding={padding!r}", repr(attrs["padding"])
    return None


def readings(sizes: Any, axes: int) -> list[list[int]]:
    """One an axis; of TensorFlow's lists with batch and channels, in either order, the spatial part."""
    given = [sizes] if isinstance(sizes, int) else list(sizes)
    if len(given) == axes + 2:
        apart = (given[:1] + given[-1:], given[1:-1]), (given[:2], given[2:])
        return [spatial for others, spatial in apart if others == [1, 1]]
    return [given * axes if len(given) == 1 else given]
