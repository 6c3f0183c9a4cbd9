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
    said = {"strides": (spatial(strides, attrs), "stride"), "dilations": (spatial(dilations, attrs), "dilation")}
    for name, (given, attribute) in said.items():
        if given is not None and given != (found := per_axis(attribute, attrs)):
            return f"{name}={given}", found
    wanted = padding.lower() if isinstance(padding, str) else padding  # "SAME", as TensorFlow spells it
    if padding is not None and same_or_given({**attrs, "padding": wanted}) != same_or_given(attrs):
        return f"padding={padding!r}", repr(attrs["padding"])
    return None


def spatial(sizes: Any, attrs: Attrs) -> list[int] | None:
    """One an axis; of TensorFlow's lists with batch and channels, the spatial part."""
    axes = len(attrs["weight"]) - 2
    if sizes is None or isinstance(sizes, int):
        return None if sizes is None else [sizes] * axes
    given = list(sizes)
    return given[1:-1] if len(given) == axes + 2 else given * (axes // len(given))
