"""The site shows the examples and CONTRIBUTING.md, which lie outside of docs/, as pages of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Examples but the modules that Python itself needs.
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))


def on_files(files: Any, config: Any) -> Any:
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        files.append(File.generated(config, f"examples/{path.stem}.md", content=f"# {path.stem}\n\n```py\n{text}```\n"))
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](examples/", "](../examples/")
    # Files of the repository that are no pages are named and not linked.
    text = re.sub(r"\[([\w.]+)\]\(\1\)", r"`\1`", text)
    files.append(File.generated(config, "contributing.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In the repository, pages link to the examples beside docs/; on the site, the examples are pages."""
    for path in EXAMPLES:
        markdown = markdown.replace(f"](../examples/{path.name})", f"](examples/{path.stem}.md)")
    return markdown
