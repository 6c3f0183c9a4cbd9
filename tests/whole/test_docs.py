"""Every Python block of the documents runs: the blocks of one file in order, in one namespace."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n+```text\n(?P<output>.*?)^```$)?", re.DOTALL | re.MULTILINE)


def run_blocks(text: str, name: str) -> int:
    """Executes the blocks and returns their number; a traceback shows the line of the document.

    A block of text directly below a block of code is what the code prints.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(text))
    for block in blocks:
        line = text.count("\n", 0, block.start("code"))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block["code"], name, "exec"), namespace)
        if block["output"] is not None:
            assert printed.getvalue() == block["output"], f"{name}:{line + 1} prints other text than the page shows"
    return len(blocks)


# Trainers are an extra: tests/trainers/test_recipes.py runs their page where they are. The pages of many devices and of
# sharded models are of several processes, which test_devices_page.py and test_fsdp.py start.
ELSEWHERE = ("trainers.md", "devices.md", "sharded.md")
OF_PROCESSES = "\n## Several processes\n"  # the section of statistics.md that test_statistics_of_processes.py runs


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name not in ELSEWHERE], ids=lambda path: path.name)
def test_the_code_of_the_document_runs(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # a snippet may save a file
    run_blocks(document.read_text(encoding="utf-8").partition(OF_PROCESSES)[0], document.name)


def test_output_that_a_page_shows_is_compared() -> None:
    page = "```python\nprint(1)\n```\n\n```text\n{}\n```\n"
    run_blocks(page.format("1"), "page.md")
    with pytest.raises(AssertionError, match="page.md:2 prints other text than the page shows"):
        run_blocks(page.format("2"), "page.md")


def test_blocks_share_one_namespace_and_report_their_line() -> None:
    text = "# Title\n\n```python\nx = 1\n```\n\n```bash\nnot python\n```\n\n```python\nassert x == 1\nx / 0\n```\n"
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(text, "page.md")
    assert caught.traceback[-1].lineno == 12  # counted from 0: the 13th line of the text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    folders = r"(?:kfac_fx|passes|tests|examples|benchmarks|docs)/"
    named = set(re.findall(rf"`({folders}[\w/.]+)`", text))
    linked = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text))
    missing = sorted(name for name in named if not (ROOT / name).exists())
    missing += sorted(link for link in linked if not (document.parent / link).exists())
    assert not missing, f"{document.name} names files that do not exist: {', '.join(missing)}"


def test_every_block_of_the_readme_runs_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [block[0] for block in BLOCK.finditer(text)]
    assert len(blocks) == 3
    for block in blocks:
        assert run_blocks(block, "README.md") == 1
