"""Names that are folded, and tables that fit a width."""

from __future__ import annotations

import pytest

from kfac_fx.compiled import report
from kfac_fx.compiled.report import alike, cell_lines, column_widths, table_lines, words


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("0.w 2.w 4.w", "0..4.w (3 x)"),
        ("0.w 2.w", "0.w; 2.w"),
        ("a.9.w a.10.w a.11.w b.w", "a.9..11.w (3 x); b.w"),
        ("b.w a.0.w a.1.w a.2.w", "b.w; a.0..2.w (3 x)"),
        ("a.0.m.0 a.0.m.2 a.1.m.0 a.1.m.2 a.2.m.0 a.2.m.2", "a.0..2.m.0 (3 x); a.0..2.m.2 (3 x)"),
        ("w[0:8] w[8:16] w[16:24]", "w[0:8]; w[8:16]; w[16:24]"),
        ("a1.w a2.w a3.w", "a1.w; a2.w; a3.w"),
        ("w w w", "w; w; w"),
    ],
)
def test_names_that_differ_in_one_number(names: str, text: str) -> None:
    assert "; ".join(group.counted for group in alike(names.split())) == text


def test_a_number_that_a_name_has_twice_counts_once() -> None:
    names = [f"a.{n}.w, b.{n}.w" for n in (3, 4, 5)]
    assert [group.text for group in alike(names)] == ["a.3..5.w, b.3..5.w"]


def test_names_of_different_keys_are_apart_and_all_places_are_there() -> None:
    groups = alike(["0", "1", "2", "3", "4", "5"], ["x", "y", "x", "y", "x", "x"])
    assert [group.places for group in groups] == [(0, 2, 4, 5), (1,), (3,)]
    assert [group.counted for group in groups] == ["0..5 (4 x)", "1", "3"]


def test_no_line_ends_inside_of_a_shape_or_a_count() -> None:
    assert words("A 28 x 28, G1 16 x 16") == ["A 28 x 28, ", "G1 16 x 16"]
    assert words("0..298.{weight, bias} (150 x)") == ["0..298.", "{weight, ", "bias} ", "(150 x)"]
    assert cell_lines("A 28 x 28, G 16 x 16", 12) == ["A 28 x 28,", "G 16 x 16"]
    assert cell_lines("abcdefgh", 3) == ["abc", "def", "gh"] and cell_lines("", 3) == [""]


def test_a_table_that_fits_stays_as_it_is_and_others_have_the_fewest_lines() -> None:
    rows = [["a", "b"], ["one two three", "A 2 x 2, G 3 x 3"]]
    assert column_widths(rows, 80) == [13, 16]
    assert table_lines(rows[0], rows[1:], [False, False], 22) == [
        "a        b",
        "-------  --------",
        "one two  A 2 x 2,",
        "three    G 3 x 3",
    ]
    for width in range(5, 40):  # words are cut if they have to be
        assert all(len(line) <= width for line in table_lines(rows[0], rows[1:], [False, True], width))


def test_a_name_of_a_thousand_letters_takes_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widths of columns that a line has no room for are not tried."""
    cut, calls = report.cell_lines, 0

    def counted(cell: str, width: int) -> list[str]:
        nonlocal calls
        calls += 1
        assert calls < 2000
        return cut(cell, width)

    monkeypatch.setattr(report, "cell_lines", counted)
    rows = [["b" * 1000, "c" * 300], ["short", "x"]]
    lines = report.table_lines(["name", "other"], rows, [False, False])
    assert max(map(len, lines)) <= report.WIDTH
    assert sum(line.count("b") for line in lines) == 1000 and sum(line.count("c") for line in lines) == 300
