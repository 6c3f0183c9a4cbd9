"""Handlers of kinds of errors that are also raised for want of memory, by a failed device, or by a bug of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROAD = {"BaseException", "Exception", "RuntimeError", "AssertionError", "MemoryError"}
FILES = sorted(
    path for folder in ("kfac_fx", "passes") for path in (ROOT / folder).rglob("*.py")
    if (ROOT / "kfac_fx" / "passes") not in path.parents
)  # fmt: skip


def names(kinds: ast.expr | None) -> set[str]:
    if kinds is None:
        return {"BaseException"}
    return {node.id for node in ast.walk(kinds) if isinstance(node, ast.Name)}


def silent(source: str) -> Iterator[int]:
    """The lines of broad handlers that never raise."""
    handlers = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler))
    for handler in handlers:
        raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
        if names(handler.type) & BROAD and not raises:
            yield handler.lineno


def test_a_handler_that_never_raises_is_found() -> None:
    lines = ["try:", "    f()", "except (ValueError, RuntimeError):", "    pass"]
    assert list(silent("\n".join(lines))) == [3]
    assert list(silent("\n".join([*lines[:3], "    if fatal(error):", "        raise"]))) == []


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_no_broad_handler_is_silent(path: Path) -> None:
    """Guards that torch.export writes raise AssertionError where inputs do not fit: that is their answer."""
    allowed = {"trace.py": "except AssertionError:\n            return False"}
    source = path.read_text()
    lines = source.splitlines()
    found = [line for line in silent(source) if "\n".join(lines[line - 1 : line + 1]).strip() != allowed.get(path.name)]
    assert not found, f"{path}: call fatal() and raise, in the handlers at lines {found}"
