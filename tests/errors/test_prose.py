"""No sentence of a docstring, a comment or a page opens with What, Of, Nobody or Nothing."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ("kfac_fx", "passes", "examples", "benchmarks", "tests")
PAGES = ("*.md", "docs/*.md", ".github/**/*.md")
WORD = r"(?:What|Of(?! course)|Nobody|Nothing)\b"
OPENER = re.compile(rf"(?:^|[.:!?] ){WORD}.{{,60}}")


def paragraphs(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every paragraph of the docstrings, and of every comment, on one line each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            yield from ((getattr(node, "lineno", 1), " ".join(part.split())) for part in re.split(r"\n\s*\n", text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def page_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """The same of a page, without its code, its headings and the cells of its tables."""
    text = re.sub(r"```.*?```|^( {4}|#|\|).*?$", lambda match: "\n" * match[0].count("\n"), text, flags=re.S | re.M)
    for match in re.finditer(r"(?:^.*\S.*\n?)+", text, re.M):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()).removeprefix("- ")


def openers(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if re.search(rf"\b{WORD}", text) is None:  # to parse a file takes long
        return []
    parts = paragraphs(text) if path.suffix == ".py" else page_paragraphs(text)
    return [f"{path.relative_to(ROOT)}:{line}: {match[0]}" for line, part in parts for match in OPENER.finditer(part)]


@pytest.mark.parametrize("folder", PYTHON)
def test_sentences_of_python_files_name_their_subject(folder: str) -> None:
    assert [line for path in sorted((ROOT / folder).rglob("*.py")) for line in openers(path)] == []


def test_sentences_of_pages_name_their_subject() -> None:
    assert [line for pattern in PAGES for path in sorted(ROOT.glob(pattern)) for line in openers(path)] == []


@pytest.mark.parametrize(
    "source",
    ['"""What it does."""', "x = 1  # It is so. Nothing is left", 'def f() -> None:\n    """Sum.\n\n    Of all."""'],
)
def test_an_opener_is_seen(source: str) -> None:
    assert any(OPENER.search(text) for _, text in paragraphs(source))


def test_an_opener_is_seen_in_a_page() -> None:
    page = "# What is it\n\nIt is. What\nelse?\n\n```\nOf code\n```\n\n- Nobody\n"
    assert [(line, bool(OPENER.search(text))) for line, text in page_paragraphs(page)] == [(3, True), (10, True)]
