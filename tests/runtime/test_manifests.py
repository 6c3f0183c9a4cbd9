"""Manifests: what differs is named, and what is no manifest is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kfac_fx.spectrum.manifests import NAME, read_manifest, write_manifest

HERE = {"format": 1, "model": "Net", "blocks": {"a": {"sides": [1, 1]}, "b": 2}}


def test_a_manifest_is_read_as_it_was_written_and_written_again(tmp_path: Path) -> None:
    write_manifest(tmp_path / "new", HERE)
    assert read_manifest(tmp_path / "new") == HERE
    write_manifest(tmp_path / "new", HERE)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [NAME]


def test_all_differences_are_named(tmp_path: Path) -> None:
    write_manifest(tmp_path, HERE)
    other = {"format": 1, "model": "Other", "blocks": {"a": {"sides": [1, 2]}, "c": 3}}
    with pytest.raises(ValueError, match="holds something else:") as caught:
        write_manifest(tmp_path, other)
    lines = [line.split(maxsplit=0)[0] for line in str(caught.value).splitlines()[1:]]
    assert [line.split("  ")[0].strip() for line in lines] == ["model", "blocks: a: sides", "blocks: b", "blocks: c"]
    assert "is 'Net' in the folder, and 'Other' here" in str(caught.value)
    assert "is only in the folder" in str(caught.value) and "is not in the folder" in str(caught.value)


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no manifest\.json: nothing was saved there"):
        read_manifest(tmp_path)
    (tmp_path / NAME).write_text("{")
    with pytest.raises(ValueError, match=r"is no manifest: "):
        read_manifest(tmp_path)
    for text, format in (('{"format": 7}', "7"), ("[]", "None")):
        (tmp_path / NAME).write_text(text)
        with pytest.raises(ValueError, match=rf"has the format {format}, and this version of kfac_fx reads 1"):
            read_manifest(tmp_path)
