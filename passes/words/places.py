"""Where a node stands in the user's own code."""

from __future__ import annotations

from pathlib import Path

from torch import fx

OWN_FOLDER = str(Path(__file__).parents[1])  # the compiler


def where(node: fx.Node) -> str:
    """`"linear_1 (model.py:33)"`: the node and the last line of the user's own code behind it."""
    line = source_line(node)
    return f"{node.name} ({line})" if line else node.name


def source_line(node: fx.Node) -> str | None:
    """`"model.py:33"`, the innermost frame outside torch; None when the capture kept no stack."""
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    found = None
    for frame in frames:
        if frame.startswith('File "') and "/torch/" not in frame and OWN_FOLDER not in frame:
            path, _, rest = frame.removeprefix('File "').partition('", line ')
            found = f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
    return found
