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
# sharded models are of several processes, which test_devices_page.py and test_fsdp.py start. The blocks of the readme
# run alone, below.
ELSEWHERE = ("trainers.md", "devices.md", "sharded.md", "README.md")
OF_PROCESSES = "\n## Several processes\n"  # the section of spectra.md that test_statistics_of_processes.py runs


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


# --- the pages of jobs ------------------------------------------------------------------------------------------------

JOBS = ("influence", "laplace", "ewc", "merging", "pruning", "quantization", "trpo", "unlearning")


def lines_of(blocks: list[str]) -> int:
    """The lines of code, without imports and comments."""
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return sum(bool(line) and not line.startswith(("import ", "from ", "#")) for line in lines)


@pytest.mark.parametrize("job", JOBS)
def test_a_page_of_a_job_counts_its_lines_and_those_of_the_usual_library(job: str) -> None:
    text = (ROOT / "docs" / f"{job}.md").read_text(encoding="utf-8")
    shown = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    ours, theirs = (lines_of(re.findall(rf"^```{kind}\n(.*?)^```$", shown, re.S | re.M)) for kind in ("python", "py"))
    assert 0 < ours < 20 and "assert " in text, "the page is a test, too"
    told = re.search(r"Lines: (\d+) here(?:, (\d+) there)?\.", shown)
    assert told is not None and (int(told[1]), int(told[2] or 0)) == (ours, theirs)
    usual = shown.partition("## The usual library")[2]
    assert re.search(r"\d+\.\d+|not run|none that is in general use", usual), "the version that ran, or that none did"


def test_the_page_of_statistics_has_every_job() -> None:
    text = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| \[[^]]+\]\((\w+)\.md\) \| ", text, re.MULTILINE)
    assert tuple(rows) == JOBS
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [job for job in JOBS if not re.search(rf": {job}\.md$", navigation, re.MULTILINE)] == []
