"""The site shows the examples, which lie outside of docs/, as pages of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add the examples, without the modules that Python itself needs."""
    for path in sorted((ROOT / "examples").glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        files.append(File.generated(config, f"examples/{path.stem}.md", content=f"# {path.stem}\n\n```py\n{text}```\n"))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In the repository, pages link to the examples beside docs/; on the site, the examples are pages."""
    for path in (ROOT / "examples").glob("[!_]*.py"):
        markdown = markdown.replace(f"](../examples/{path.name})", f"](examples/{path.stem}.md)")
    return markdown
