"""Plain text for a report: names that are folded, tables that fit a width, and characters that every terminal shows.

Two kinds of names are written as one. Those of one module are `stem.{weight, bias}`. Those that differ in one number,
as the names of equal layers do, are `layers.0..11.weight`.
"""

from __future__ import annotations

import functools
import math
import re
import textwrap
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest

WIDTH = 80  # characters of a line
SECTION_LINES = 8  # of one section, before a line says how many more there are
FOLDED_FROM = 3  # names that differ in one number, before they are written as one
GAP = "  "  # between two columns
MOST_BREAKS = 12  # widths of a column that are tried

# --- names ------------------------------------------------------------------------------------------------------------


def fold(names: Iterable[str]) -> str:
    """`("stem.weight", "stem.bias")` -> `"stem.{weight, bias}"`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        prefix, dot, last = name.rpartition(".")
        groups.setdefault(prefix + dot, []).append(last)
    return ", ".join(p + (lasts[0] if len(lasts) == 1 else f"{{{', '.join(lasts)}}}") for p, lasts in groups.items())


@dataclass(frozen=True)
class Alike:
    """Texts that differ in one number.

    Attributes:
        places: of the texts in their list.
        text: `"layers.0..11.weight"`; of a single text itself.
    """

    places: tuple[int, ...]
    text: str

    @property
    def counted(self) -> str:
        """`"layers.0..11.weight (12 x)"`."""
        return f"{self.text} ({len(self.places):,} x)" if len(self.places) > 1 else self.text


NUMBER = re.compile(r"(?<![\w\[:-])(\d+)(?![\w\]:])")  # a part of a dotted name; not an end of a piece, as in `w[0:64]`


def alike(texts: Sequence[str], keys: Sequence[Hashable] = ()) -> list[Alike]:
    """The texts, with those as one that differ in one number, in the order of their first ones.

    keys: one a text; texts of different keys are never alike.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        groups[NUMBER.sub("#", text), keys[place] if keys else None].append(place)
    result = [group for places in groups.values() for group in alike_in(texts, places)]
    return sorted(result, key=lambda group: group.places[0])


def alike_in(texts: Sequence[str], places: Sequence[int]) -> Iterator[Alike]:
    """The same of texts that differ in numbers only: `a.0.x`, `a.1.x`, `b.0.x` differ in two, of which one counts."""
    numbers = {place: NUMBER.findall(texts[place]) for place in places}
    columns = list(zip(*numbers.values(), strict=True))
    counting = max(columns, key=lambda column: len(set(column)), default=())
    rest: dict[Hashable, list[int]] = defaultdict(list)
    for place in places:
        others = tuple(n for n, column in zip(numbers[place], columns, strict=True) if column != counting)
        rest[others].append(place)
    for members in rest.values():
        counted = sorted({int(numbers[place][columns.index(counting)]) for place in members}) if counting else []
        if len(members) < FOLDED_FROM or len(counted) != len(members):
            yield from (Alike((place,), texts[place]) for place in members)
            continue
        span = f"{counted[0]}..{counted[-1]}"
        parts = NUMBER.split(texts[members[0]])  # every second one is a number
        parts[1::2] = [span if column == counting else n for n, column in zip(parts[1::2], columns, strict=True)]
        yield Alike(tuple(members), "".join(parts))


# --- tables and paragraphs --------------------------------------------------------------------------------------------


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int = WIDTH
) -> list[str]:
    """A table in lines of at most `width` characters: what is too long for its column goes on in the next line.

    right: whether the cells of a column end at its right.
    """
    widths = column_widths([columns, *rows], width)

    def lines(cells: Sequence[str]) -> Iterator[str]:
        parts = [cell_lines(cell, room) for cell, room in zip(cells, widths, strict=True)]
        for line in zip_longest(*parts, fillvalue=""):
            aligned = (p.rjust(w) if r else p.ljust(w) for p, w, r in zip(line, widths, right, strict=True))
            yield GAP.join(aligned).rstrip()

    return [line for cells in (columns, ["-" * room for room in widths], *rows) for line in lines(cells)]


def column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The widths of the columns of a table with the fewest lines of at most `width` characters."""
    columns = [list(dict.fromkeys(cells)) for cells in zip(*rows, strict=True)]
    room = width - len(GAP) * (len(columns) - 1)
    wanted = [max(1, *map(len, cells)) for cells in columns]
    if sum(wanted) <= room:
        return wanted
    wanted = [min(most, room) for most in wanted]
    places = [{cell: n for n, cell in enumerate(cells)} for cells in columns]
    kinds = Counter(tuple(place[cell] for place, cell in zip(places, cells, strict=True)) for cells in rows)

    def height(chosen: Sequence[tuple[int, Sequence[int]]]) -> int:
        return sum(
            count * max(lines[n] for (_, lines), n in zip(chosen, kind, strict=True)) for kind, count in kinds.items()
        )

    least = [max(len(word.rstrip()) for cell in cells for word in words(cell)) for cells in columns]
    for narrowest in range(min(max(least), room), 0, -1):  # words are cut if they have to be
        choices = [breaks(*column, narrowest) for column in zip(columns, least, wanted, strict=True)]
        fitting = [chosen for chosen in product(*choices) if sum(most for most, _ in chosen) <= room]
        if fitting:
            return [most for most, _ in min(fitting, key=height)]
    return [1] * len(columns)


def breaks(cells: Sequence[str], least: int, wanted: int, narrowest: int) -> list[tuple[int, tuple[int, ...]]]:
    """(width, lines that every cell takes) for the widths of a column at which a cell takes fewer lines, the narrowest
    first. least: the width of the longest word; narrowest: that the column may have whatever its words are."""
    options: dict[tuple[int, ...], int] = {}
    for width in range(max(1, min(least, wanted, narrowest)), wanted + 1):
        options.setdefault(tuple(height_of(cell, width) for cell in cells), width)
    return [(width, lines) for lines, width in options.items()][:MOST_BREAKS]


@functools.lru_cache(maxsize=2**14)
def height_of(cell: str, width: int) -> int:
    return len(cell_lines(cell, width))


# Where no line ends: inside of numbers such as `0..11`, of shapes such as `G 28 x 28`, and of counts such as `(6 x)`.
JOINED = re.compile(r"(?<=\d) (?=x\b)|(?<= x) (?=\d)|(?<=\b[A-Z]) (?=\d)|(?<=\b[A-Z]\d) (?=\d)")


def words(text: str) -> list[str]:
    """The parts of a text that a line may end behind: at spaces, commas and single dots."""
    parts = re.findall(r"(?:[^ ,.]|\.\.)+[,.]? ?|[,.] ?| ", JOINED.sub("\xa0", text)) or [""]
    return [part.replace("\xa0", " ") for part in parts]


def cell_lines(text: str, width: int) -> list[str]:
    """The text in lines. A word that is longer than a line is cut."""
    lines = [""]
    for word in words(text):
        if lines[-1] and len((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.strip() for line in lines]


def shortened(entries: Sequence[str]) -> list[str]:
    """The first entries, and a line with the number of the others."""
    hidden = len(entries) - SECTION_LINES
    return (
        [*entries]
        if hidden <= 1
        else [*entries[:SECTION_LINES], f"... and {hidden:,} more, all in to_text(expand=True)"]
    )


def wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False) or [""]


# --- numbers and characters -------------------------------------------------------------------------------------------


def memory_text(count: float) -> str:
    """`"36.2 KiB"`; numbers below one KiB in bytes."""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:,.1f} {unit}"
    return f"{count / 1024:,.1f} TiB"


def percent(part: int, whole: int) -> str:
    """Rounded down, so that "100 %" means all."""
    return f"{math.floor(10000 * part / whole) / 100:g} %"


def ascii_only(text: str) -> str:
    return printable(text).encode("ascii", "backslashreplace").decode("ascii")


def printable(text: str) -> str:
    """The text with control characters written out, so that a name with escapes changes no terminal."""
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
