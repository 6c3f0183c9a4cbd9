"""The report: which Fisher block every parameter got, and why; as text, on a rich terminal, as data, page or graph.

The text answers in this order: whether anything is left out; the block of each parameter; the reason for everything
that is not the default; the cost; what the compiler did. It is plain ASCII of 80 columns and contains no timings, so
that two reports can be compared. Equal layers of a deep model are one row; `to_text(expand=True)` has all rows.

The graph, of networkx, leads from parameters, or pieces of them, to uses and on to Fisher blocks:

    "stem.weight" --parameter--> "use conv2d" --block--> ("stem.weight", "stem.bias")

Uses are also connected along the data of the model. Operations between uses are nodes only if data of different origin
meets there, or if they read a parameter with a generic block, which has no uses; they lead to this block.

As one HTML page it is a table to search and sort, next to the graph of the uses. The page loads nothing, and every text
is escaped. Its policy lets the browser run the script of this module only, so a name in a model cannot become code.

**Plain text** for a report: names that are folded, tables that fit a width, and characters that every terminal shows.

Two kinds of names are written as one. Those of one module are `stem.{weight, bias}`. Those that differ in one number,
as the names of equal layers do, are `layers.0..11.weight`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
import textwrap
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import chain, product, repeat, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from kfac_fx.passes.check import unmatched
from kfac_fx.passes.errors import plural, source_line, where
from kfac_fx.passes.graphs.labels import (
    labels_of,
    parameters_behind,
    symbolic_sizes,
    use_edges,
    without_loss,
)
from kfac_fx.passes.graphs.operations import CASTS, VIEWS, op_name
from kfac_fx.passes.ir import CONTAINED, ROW_MASK, Note, PassRecord, Program, Registration
from kfac_fx.passes.losses import has_other_rows
from kfac_fx.passes.torch_losses import BY_NAME
from kfac_fx.recording.captures import CompileArguments
from kfac_fx.recording.case_gradients import CaseRecorder
from kfac_fx.recording.proof import NO_LOSS
from kfac_fx.recording.recorder import Recorder
from kfac_fx.recording.statistics import Key
from kfac_fx.recording.taps import described

if TYPE_CHECKING:
    import networkx
    from rich.console import RenderableType


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


Shapes = dict[str, tuple[int, ...]]
CASTS_TO = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}  # by name, without an argument
Counters = Callable[[], Mapping[str, int]]
Fallbacks = Callable[[], Sequence[str]]  # lines of text
COLUMNS = ("", "layer", "parameters", "uses", "Fisher block", "factors")
RIGHT = (True, False, False, True, False, False)  # the columns whose cells end at the right
LONG_TABLE = 20  # rows, from which on those of equal layers are one
TITLE_WIDTH = 10  # of the titles of sections
NO_KNOWN_LOSS = (
    "what forward returns depends on it, and no loss that is known does, so it follows KFAC's first-order rule, AdamW "
    "with an lr of 0.001: name its loss with compile(..., loss=lambda outputs: [...]), or write "
    'KFAC(net, first_order={"lr": 0.01}) for another lr'
)
OF_OUTPUTS = (
    "counted by the rows of the outputs, which are not those of an input, as where a row is a graph of many nodes or a "
    "position that a mask selects: scores and true targets need compile(..., examples=...)"
)
NEGATIVE = (
    "{} has a negative weight in the loss that forward returns, and the Fisher has the absolute value of the weight"
)
FROZEN = "not trained while requires_grad is False; the blocks are kept"
UNNAMED = "takes factors from training gradients because it knows no loss, and "
REPEATED = (
    "a recording in training runs forward a second time, because the graph leaves out that it {}; gradients that reach "
    "the loss through this are in no factor"
)
COPY = re.compile(r"_\d+\b")  # what tells nodes of one operation apart
STYLES = {  # of the nodes that are drawn: the letter of their names, and their attributes
    "block": ("r", 'shape=box, style="filled,rounded", fillcolor="#dbe9f6", '),
    "use": ("u", ""),
    "operation": ("n", "shape=plaintext, "),
}
GENERIC_STYLE = "shape=box, style=dashed, "


class Report:
    """The registrations of a compiled module; `print(net.report)`.

    Args:
        program: the result of the last pass.
        counters: the numbers of events since, such as {"skipped steps": 0}; called whenever the report is shown.
        fallbacks: what was done in another way than intended, and why; called whenever the report is shown.
        intervals: how often the optimizer records and inverts; called whenever the report is shown.
        unnamed: whether no loss is known.
        sources: a program that has each registration, by its parameters, in their order; calls of other kinds may take
            other paths than `program`.
    """

    def __init__(
        self,
        program: Program,
        counters: Counters | None = None,
        fallbacks: Fallbacks = lambda: (),
        intervals: Fallbacks = lambda: (),
        unnamed: bool = False,
        sources: Mapping[Key, Program] = MappingProxyType({}),
        without_gradient: Fallbacks = tuple,
    ) -> None:
        self.program, self.counters, self.fallbacks, self.intervals = program, counters, fallbacks, intervals
        self.unnamed, self._without_gradient = unnamed, without_gradient
        self.paths = paths(program, sources)
        self._place = {key: place for place, key in enumerate(sources)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Report cannot be copied or pickled, because it has the graph of the model. Keep its text, "
            "str(net.report), or its data, net.report.to_dict()."
        )

    @cached_property
    def rows(self) -> tuple[ReportRow, ...]:
        """One row for every registration."""
        every = [row for path in self.paths for row in rows(path)]
        return tuple(sorted(every, key=lambda row: self._place.get(row.parameters, len(self._place))))

    @property
    def dropped(self) -> tuple[Note, ...]:
        """The matches that are not registered, with the reason; without those that larger ones contain."""
        usual = CONTAINED.partition("{}")[0]
        notes = (note for path in self.paths for note in path.dropped if not note.reason.startswith(usual))
        return tuple(dict.fromkeys(notes))

    @property
    def unused(self) -> tuple[str, ...]:
        """The parameters that no loss depends on, in all calls so far."""
        in_blocks = {name for path in self.paths for r in path.registrations for name in (*r.parameters, *r.owners)}
        return tuple(name for name in self.program.unused if name not in in_blocks)

    @property
    def registered(self) -> set[str]:
        """The parameters in blocks."""
        return {name for path in self.paths for registration in path.registrations for name in registration.owners}

    @property
    def behind_no_loss(self) -> tuple[str, ...]:
        """Those of the unused parameters that the model's outputs depend on: their losses are not known."""
        lost = {name for path in self.paths for name in without_loss(path)}
        return tuple(name for name in self.unused if name in lost)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The parameters in blocks that no longer require a gradient."""
        registered = self.registered
        return tuple(name for name in self._without_gradient() if name in registered)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parameters that are used, but that a LayerCollection did not register."""
        registered = self.registered | {self.program.owner(name) for name in self.unused}
        return tuple(name for name in self.program.parameters if name not in registered)

    @property
    def history(self) -> tuple[PassRecord, ...]:
        """The passes of the compiler, in order."""
        return self.program.history

    @property
    def elements(self) -> dict[str, int]:
        """The number of elements of the trainable parameters: "total", "registered", "structured" and "generic"."""
        structured = sum(row.elements for row in self.rows if not row.generic)
        generic = sum(row.elements for row in self.rows if row.generic)
        total = sum(parameter.numel() for parameter in self.program.parameters.values())
        return {"total": total, "registered": structured + generic, "structured": structured, "generic": generic}

    @property
    def headline(self) -> str:
        """The first line: the share of the parameters that has blocks."""
        count, unnamed = self.elements, UNNAMED * self.unnamed
        text = (
            f"kfac_fx {unnamed}registered {count['registered']:,} of {count['total']:,} trainable parameters "
            f"in {plural(len(self.rows), 'Fisher block')}"
        )
        if count["generic"]:
            text += f", {percent(count['structured'], count['registered'])} of them structured"
        if silent := sum(row.reason == NO_LOSS for row in self.rows):
            text += (
                f", {plural(silent, 'block')} without curvature: no loss depends on {'it' if silent == 1 else 'them'}"
            )
        return text

    @property
    def memory(self) -> str:
        """The memory of the factors and of their inverses, as text."""
        total = memory_text(sum(row.bytes for row in self.rows))
        dtypes = {factor_dtype(block, path.parameters) for path in self.paths for block in path.registrations}
        kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"{total} of factors, {total} of inverses ({kinds or 'none'})"

    @property
    def captured(self) -> list[str]:
        """The submodules that were captured, if there is no graph of the whole model."""
        submodules = [submodule for path in self.paths for submodule in path.submodules]
        parts = dict.fromkeys((submodule.path, submodule.read) for submodule in submodules)
        modules, reads = ([path for path, read in parts if read is which] for which in (False, True))
        what = "one submodule" if len(modules) == 1 else f"{len(modules)} submodules, one by one"
        lines = [f"{what}: {', '.join(modules)}"] if modules else []
        return lines + ([f"and of Python between them: {', '.join(reads)}"] if reads else [])

    @property
    def cases(self) -> list[str]:
        """The dimension that counts the cases, and why, where there is a choice."""
        program = self.program
        if has_other_rows(program) and not program.submodules:
            return [OF_OUTPUTS]
        for node in program.inputs if program.cases_reason else ():
            if program.cases in (sizes := symbolic_sizes(node)):
                return [f"counted by dimension {sizes.index(program.cases)} of {node.target}: {program.cases_reason}"]
        return []

    @property
    def losses(self) -> list[tuple[str, str]]:
        """The losses that forward computes and returns, and the distributions of the Fisher behind them; of a loss over
        chunks of the rows the first one."""
        sites = [s for path in self.paths for number, s in enumerate(path.losses) if s.chunk_of == number]
        return list(dict.fromkeys((where(site.node), BY_NAME[site.loss].distribution) for site in sites))

    @property
    def other_paths(self) -> list[str]:
        """The blocks that came with other kinds of calls than the first."""
        names = [", ".join(fold(registration.parameters) for registration in path.registrations) for path in self.paths]
        return [f"{of_path}: used by another kind of calls than the first" for of_path in names[1:]]

    @property
    def python(self) -> list[str]:
        """The submodules that stay Python, and why."""
        return texts(dict.fromkeys(note for path in self.paths for note in path.left))

    def sections(self, expand: bool = True) -> list[tuple[str, list[str]]]:
        """The sections below the table: (title, lines). expand: one line for each of several that are alike."""
        program = self.program
        generic = [(row.names, row.reason or "no layer has this form") for row in self.rows if row.generic]
        reasons = [(row.names, row.reason) for row in self.rows if row.reason and not row.generic]
        left_out = [f"{', '.join(self.left_out)}: not registered, so they follow KFAC's first-order rule"]
        passes = ", ".join(f"{record.name} {record.summary or f'{record.nodes:,} nodes'}" for record in self.history)
        unused, no_loss = [name for name in self.unused if name not in self.behind_no_loss], fold(self.behind_no_loss)
        sections = {
            "cases": self.cases,
            "losses": with_reasons(self.losses, expand),
            "generic": with_reasons(generic, expand) or ["none"],
            "reasons": with_reasons(reasons, expand),
            "dropped": with_reasons([(note.subject, note.reason) for note in self.dropped], expand) or ["none"],
            "unused": (unused if expand else [group.counted for group in alike(unused)]) or ["none"],
            "no loss": [f"{no_loss}: {NO_KNOWN_LOSS}"] if no_loss else [],
            "left out": left_out if self.left_out else [],
            "frozen": [f"{fold(self.frozen)}: {FROZEN}"] if self.frozen else [],
            "captured": self.captured,
            "python": self.python,
            "paths": self.other_paths,
            "memory": [self.memory],
            "passes": [passes or "none"],
            "sampling": [*dict.fromkeys(line for path in self.paths for line in described(path))],
            "casts": [*dict.fromkeys(line for path in self.paths for line in casts(path))],
        }
        if program.mask is not None:
            uses = [use for path in self.paths for registration in path.registrations for use in registration.uses]
            masked = sum(ROW_MASK in use.attrs for use in uses)
            all_masked = f"{program.mask.name} masks {masked:,} of {plural(len(uses), 'use')}"
            sections["padding"] = [all_masked, *texts(dict.fromkeys(n for path in self.paths for n in path.unmasked))]
        sections["every"] = list(self.intervals())
        if self.counters is not None:
            counted = ", ".join(f"{name} {count:,}" for name, count in self.counters().items())
            sections["runtime"] = [counted or "none"]
        sections["fallback"] = list(self.fallbacks())
        return [(title, lines) for title, lines in sections.items() if lines]

    # --- formats ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def to_text(self, *, expand: bool = False, width: int = WIDTH) -> str:
        """The report as plain text, which `print(net.report)` shows.

        Args:
            expand: a row for each of several equal layers, and all lines of all sections.
            width: characters of a line.
        """
        headline = self.headline if len(self.headline) <= width else self.headline.replace(", ", ",\n  ")
        lines = [
            *(line for clause in headline.split("\n") for line in wrap(clause, width)),
            "",
            *table_lines(COLUMNS, self._cells(expand), RIGHT, width),
            "",
        ]
        for title, entries in self.sections(expand):
            shown = entries if expand else shortened(entries)
            wrapped = [line for entry in shown for line in wrap(entry, width - TITLE_WIDTH)]
            heads = chain([title], repeat(""))
            lines += [f"{head:<{TITLE_WIDTH - 2}}  {line}" for head, line in zip(heads, wrapped, strict=False)]
        return "\n".join(ascii_only(line.rstrip()) for line in lines)

    def _cells(self, expand: bool) -> list[tuple[str, ...]]:
        """The cells of all rows of the table; rows of equal layers are one, unless `expand`."""
        cells = [row.cells for row in self.rows]
        if expand or len(cells) < LONG_TABLE:
            return [(str(number), *values) for number, values in enumerate(cells)]
        groups = alike([names for _, names, *_ in cells], [(layer, *rest) for layer, _, *rest in cells])
        return [
            (str(group.places[0]), cells[group.places[0]][0], group.counted, *cells[group.places[0]][2:])
            for group in groups
        ]

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.headline, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in COLUMNS:
            table.add_column(name or "#", justify="right" if name in ("", "uses") else "left", overflow="fold")
        for cells in self._cells(expand=False):
            generic = self.rows[int(cells[0])].generic
            table.add_row(*(Text(printable(cell)) for cell in cells), style="yellow" if generic else "")
        below = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        below.add_column(style="bold")
        below.add_column(overflow="fold")
        for title, entries in self.sections(expand=False):
            below.add_row(Text(title), Text("\n".join(shortened(entries))))
        return Group(table, Text(), below)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data.

        Returns:
            "parameters": the numbers of `elements`, and the names of the unused ones, of those behind no loss, and of
            those frozen since.
            "registrations": `ReportRow.to_dict` of every block. "dropped", "python": lists of a subject and a reason.
            "submodules": those that were captured, with their numbers of calls. "losses": those that forward
            returns, with their distributions. "cases", "paths", "sampling", "casts", "fallbacks": lines of text.
            "passes": name, nodes, seconds.
        """
        return {
            "parameters": {
                **self.elements,
                "unused": list(self.unused),
                "behind no loss": list(self.behind_no_loss),
                "frozen": list(self.frozen),
            },
            "registrations": [row.to_dict() for row in self.rows],
            "dropped": [{"subject": note.subject, "reason": note.reason} for note in self.dropped],
            "submodules": [{"module": s.path, "calls": s.calls} for path in self.paths for s in path.submodules],
            "cases": self.cases,
            "losses": [{"loss": loss, "distribution": distribution} for loss, distribution in self.losses],
            "python": [{"module": n.subject, "reason": n.reason} for path in self.paths for n in path.left],
            "paths": self.other_paths,
            "sampling": [line for path in self.paths for line in described(path)],
            "casts": [line for path in self.paths for line in casts(path)],
            "fallbacks": list(self.fallbacks()),
            "passes": [{"name": r.name, "nodes": r.nodes, "seconds": r.seconds} for r in self.history],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page: a table to search and sort, and the graph of the uses.

        A click on a row selects its uses in the graph, and the reverse; the source line of a use is shown with it. The
        page is light or dark as the reader's system is.

        path: of a file that is written, too; None: the page is returned alone.
        """
        text = printable(page(self._contents))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        """The headline and the table, for a notebook; rows of equal layers are one, as in the text."""
        rows = [tuple(map(TableCell, cells)) for cells in self._cells(expand=False)]
        return f"<div><p>{escape(self.headline)}</p>{html_table(BLOCK_COLUMNS[: len(COLUMNS)], rows)}</div>"

    @property
    def _contents(self) -> Contents:
        share = {name: self.elements[name] for name in ("structured", "generic")}
        share["unused"] = self.elements["total"] - self.elements["registered"]
        blocks = [
            (
                *map(TableCell, row.cells[:2]),
                TableCell(row.cells[2], row.uses),
                *map(TableCell, row.cells[3:]),
                TableCell(f"{row.elements:,}", row.elements),
                TableCell(memory_text(row.bytes), row.bytes),
            )
            for row in self.rows
        ]
        passes = [tuple(map(TableCell, (r.name, f"{r.nodes:,}", r.summary, f"{r.seconds:.3f}"))) for r in self.history]
        sections = [(title, lines) for title, lines in self.sections() if title != "passes"]
        return Contents(self.headline, share, blocks, passes, sections, self.to_networkx())

    def to_networkx(self) -> networkx.DiGraph:
        """A directed graph from parameters through pieces and uses to Fisher blocks.

        The node of a parameter or a piece is its name, the node of a block the tuple of its names, as in
        `estimator.blocks`. The node of a use is "use " and the name of its node in the graph of the model, the node of
        an operation where data meets "operation " and its name.

        Every node has a `kind` ("parameter", "piece", "use", "operation" or "block") and a `label`. Parameters and
        pieces have a `shape`, uses the `line` of the user's code, blocks the entries of `ReportRow.to_dict` and
        `generic`. Every edge has a `kind`: "piece", "parameter" (into a use), "block" (into a block) or "data" (between
        uses). The report lists no uses of generic parameters, so their edges lead to their block.
        """
        import networkx

        numbers = {row.parameters: number for number, row in enumerate(self.rows)}
        graph = block_graph(self.paths[0], self.rows, numbers)
        for place, path in enumerate(self.paths[1:], 1):
            of_path = block_graph(path, self.rows, numbers)
            kinds = networkx.get_node_attributes(of_path, "kind")
            again = [node for node in of_path if node in graph and kinds[node] in ("use", "operation")]
            graph = networkx.compose(graph, networkx.relabel_nodes(of_path, {n: f"{n} of path {place}" for n in again}))
        return graph

    def to_dot(self) -> str:
        """The blocks, their uses and the data between uses, in Graphviz' language."""
        return dot(self.to_networkx())


def paths(program: Program, sources: Mapping[Key, Program]) -> tuple[Program, ...]:
    """The program, and the others with those of their registrations alone that no program before has."""
    found, seen = [program], {registration.parameters for registration in program.registrations}
    for key, source in sources.items():
        if key not in seen:
            new = tuple(r for r in source.registrations if r.parameters in sources and r.parameters not in seen)
            seen |= {registration.parameters for registration in new}
            found.append(source.but(registrations=new))
    return tuple(found)


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportRow:
    """One registration.

    Attributes:
        uses: the number of uses; of generic parameters, the number of places where they meet the data.
        block: the approximation in words, such as "kronecker, independent".
        approximation: its name.
        factors: the shape of each factor: A [g, i, i] or [g, i], G [g, o, o] or [g, o], F [p, p] or [p]; a diagonal
            side has no last dimension.
        elements: the number of elements of the parameters.
        bytes: the memory of the factors.
        groups: g.
    """

    layer: str
    parameters: tuple[str, ...]
    uses: int
    block: str
    approximation: str
    factors: Shapes
    reason: str | None
    generic: bool
    elements: int
    bytes: int
    groups: int

    @property
    def names(self) -> str:
        """The names of the parameters, folded: `"stem.{weight, bias}"`."""
        return fold(self.parameters)

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table: layer, names, uses, block and factors."""
        return self.layer, self.names, f"{self.uses:,}", self.block, self.factors_text

    @property
    def factors_text(self) -> str:
        """`"A 28 x 28, G 16 x 16"`, `"16 of (A 10 x 10, G 1 x 1)"`, `"A diag 50, G 8 x 8"`, `"F diag 320"`."""
        if "F" in self.factors:
            return factor_text("F", self.factors["F"])
        text = ", ".join(factor_text(name, shape[1:], shape[0] // self.groups) for name, shape in self.factors.items())
        return text if self.groups == 1 else f"{self.groups:,} of ({text})"

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data: layer, parameters, uses, block, approximation, shapes of the factors, reason."""
        return {
            "layer": self.layer,
            "parameters": list(self.parameters),
            "uses": self.uses,
            "block": self.block,
            "approximation": self.approximation,
            "factors": {name: list(shape) for name, shape in self.factors.items()},
            "reason": self.reason,
        }


def rows(program: Program) -> tuple[ReportRow, ...]:
    places = generic_places(program) if any(r.generic for r in program.registrations) else Counter()
    return tuple(row_of(registration, program, places) for registration in program.registrations)


def row_of(registration: Registration, program: Program, places: Counter[str]) -> ReportRow:
    shapes = registration.factor_shapes(elements_of(registration, program))
    dtype = factor_dtype(registration, program.parameters)
    return ReportRow(
        layer=registration.layer,
        parameters=registration.parameters,
        uses=uses_of(registration, places),
        block=block_words(registration, program),
        approximation=registration.approximation,
        factors=shapes,
        reason=registration.reason,
        generic=registration.generic,
        elements=elements_of(registration, program),
        bytes=sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize,
        groups=1 if registration.matrix is None else registration.matrix.shape[0],
    )


def uses_of(registration: Registration, places: Counter[str]) -> int:
    """The number of uses in the graph; in submodules that were captured one by one, those of the first batch."""
    if registration.generic:
        return max(places[name] for name in registration.parameters)
    return sum(use.calls or 0 for use in registration.uses) if registration.called else len(registration.uses)


def elements_of(registration: Registration, program: Program) -> int:
    return sum(math.prod(program.shapes[name]) for name in registration.parameters)


def generic_places(program: Program) -> Counter[str]:
    """The number of places where each parameter meets the data; generic registrations list no uses."""
    label = labels_of(program)
    outputs = program.outputs or tuple(program.graph.find_nodes(op="output"))
    edges = use_edges(program.graph, label, outputs)
    return Counter(name for source, _ in edges for name in parameters_behind(source, label, program.behind))


def factor_dtype(registration: Registration, parameters: Mapping[str, Tensor]) -> torch.dtype:
    """The precision of the factors: that of the block's first parameter, but at least float32."""
    return torch.promote_types(parameters[registration.owners[0]].dtype, torch.float32)


def block_words(registration: Registration, program: Program) -> str:
    """See `ReportRow.block`: `"kronecker"`, `"kronecker per channel"`, `"diagonal"`, `"full (linked)"`, ..."""
    approximation, words = registration.structure, registration.approximation
    if registration.matrix is not None and approximation.kronecker:
        groups, outputs, _ = registration.matrix.shape
        words = "kronecker"
        if groups > 1:
            words += " per channel" if outputs == 1 else " per group"
        if uses_of(registration, Counter()) > 1 and not approximation.series:
            words += ", independent"
        if approximation.words:
            words += f", {approximation.words}"
    elif registration.generic:
        words = f"generic {words}"
    if registration.patch_mask is not None:
        words += ", masked patches"
    return f"{words} (linked)" if frozenset(registration.owners) in program.options.linked else words


def casts(program: Program) -> list[str]:
    """Where forward casts parameters to a coarser precision: one line a cast.

    The uses behind it, and their part of the gradient, have that precision; sums of uses agree up to its rounding.
    """
    lines = []
    for node in program.graph.nodes:
        source = node
        while source.op != "get_attr" and op_name(source) in VIEWS and isinstance(source.args[0], fx.Node):
            source = source.args[0]
        name = program.owner(str(source.target))
        if op_name(node) not in CASTS or source.op != "get_attr" or name not in program.parameters:
            continue
        given = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, torch.dtype)]
        dtype = next(iter(given), CASTS_TO.get(op_name(node)))
        of = program.parameters[name].dtype
        if dtype is not None and dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(of).eps:
            text = f"{name}: cast to {str(dtype).removeprefix('torch.')} in {where(node)}"
            lines.append(f"{text}; what is recorded behind it is rounded to that, as its gradient is")
    return lines


# --- fallbacks --------------------------------------------------------------------------------------------------------


def fallbacks(
    arguments: CompileArguments, program: Program, captures: Iterable[Recorder], cases: Iterable[CaseRecorder]
) -> list[str]:
    """A sentence for every slower or unproved way that a compiled module has taken, with the reason.

    captures: of all kinds of calls so far. cases: the recorders of gradients of single examples.
    """
    sentences = [] if arguments.verify else ["no registration was proved: verify=False"]
    sentences += unmatched(arguments.layers, program)
    for capture in captures:
        if capture.loop_reason is not None:
            sentences.append(f"sources of the exact modes are sent back one by one: {capture.loop_reason}")
        sentences += capture.misfits
        negative = (s.node for s in capture.program.losses if s.way is not None and (s.way.constant or 0.0) < 0)
        sentences += [NEGATIVE.format(where(node)) for node in negative]
        if capture.mean_reason is not None:
            kind = "mean" if capture.is_mean else "sum"
            sentences.append(
                f"the loss that forward returns is taken for a {kind} over its cases, as it is written: "
                f"{capture.mean_reason}"
            )
        if capture.division is not None:
            counted = "elements" if capture.division.of_elements else "cases"
            sentences.append(
                f"forward divides its sum by a number that it is given, such as num_items_in_batch, which is read as "
                f"that of {counted}, also of several micro-batches together, and nothing is wrong if it is. Return the "
                "sum and divide behind forward if it is another number"
            )
        if capture.rows_reason is not None:
            sentences.append(f"the exact modes send back one row of a loss at a time: {capture.rows_reason}")
        if capture.kernels_reason is not None:
            sentences.append(
                f"the checks of a step compute recurrent layers step by step, which takes longer: "
                f"{capture.kernels_reason}"
            )
        if capture.repeated:
            sentences.append(REPEATED.format(", ".join(capture.repeated)))
        if capture.emitted.plain_reason is not None:
            sentences.append(f"recordings are not compiled: {capture.emitted.plain_reason}")
    apart = {key: reason for recorder in cases for key, reason in recorder.apart.items()}
    sentences += [
        f"gradients of single examples of {', '.join(key)} take one backward each: {reason}"
        for key, reason in apart.items()
    ]
    return list(dict.fromkeys(sentences))


# --- the graph --------------------------------------------------------------------------------------------------------


def block_graph(program: Program, rows: Sequence[ReportRow], numbers: Mapping[Key, int]) -> networkx.DiGraph:
    """The graph of one path of `Report.to_networkx`. numbers: of the rows, by parameters."""
    import networkx

    graph = networkx.DiGraph()
    for name, parameter in program.parameters.items():
        graph.add_node(name, kind="parameter", label=name, shape=tuple(parameter.shape))
    for registration in program.registrations:
        number = numbers[registration.parameters]
        row = rows[number]
        block, label = registration.parameters, f"{number}  {row.layer}\n{row.names}\n{row.block}: {row.factors_text}"
        graph.add_node(block, kind="block", label=label, generic=row.generic, **row.to_dict())
        for piece in registration.pieces:
            graph.add_node(piece.name, kind="piece", label=piece.name, shape=program.shapes[piece.name])
            graph.add_edge(piece.parameter, piece.name, kind="piece")
        for use in registration.uses:
            line, key = source_line(use.output), f"use {use.output.name}"  # registrations that were split share it
            graph.add_node(key, kind="use", label="\n".join(filter(None, (use.output.name, line))), line=line)
            graph.add_edges_from([(name, key) for name in sorted(use.parameter_set)], kind="parameter")
            graph.add_edge(key, block, kind="block")
        if registration.generic:
            graph.add_edges_from([(name, block) for name in block], kind="block")
    add_data(program, graph)
    return graph


def add_data(program: Program, graph: networkx.DiGraph) -> None:
    """Add the edges along the data, and the operations where data meets."""
    uses = {use.output: use.nodes for registration in program.registrations for use in registration.uses}
    inside = {node for nodes in uses.values() for node in nodes}
    generic = {name: block.parameters for block in program.registrations if block.generic for name in block.owners}
    origin: dict[fx.Node, str | None] = {}  # of the data in a node: the last node of `graph` on its way
    for node in program.graph.nodes:
        entered = sorted(uses.get(node, [node]))
        operands = [
            operand for inner in entered for operand in inner.all_input_nodes if operand not in uses.get(node, ())
        ]
        origins = list(dict.fromkeys(key for operand in operands if (key := origin.get(operand)) is not None))
        read = [str(operand.target) for operand in operands if operand.op == "get_attr" and operand.target in generic]
        if node in uses:
            key = f"use {node.name}"
        elif (len(origins) > 1 or read) and node not in inside and node.op != "output":
            key = f"operation {node.name}"
            graph.add_node(key, kind="operation", label=op_name(node), line=source_line(node))
            graph.add_edges_from([(name, key) for name in read], kind="parameter")
            graph.add_edges_from([(key, generic[name]) for name in read], kind="block")
        else:
            origin[node] = origins[0] if origins else None
            continue
        graph.add_edges_from([(source, key) for source in origins], kind="data")
        origin[node] = key


def dot(graph: networkx.DiGraph) -> str:
    """The blocks, uses and operations of a `block_graph` in Graphviz' language.

    A box is a block. A dashed line leads from a block to each of its uses, an arrow along the data.
    """
    names: dict[Any, str] = {}
    lines = ["digraph kfac_fx {", "  rankdir=TB;", '  node [fontname="Helvetica", fontsize=10];']
    for kind in STYLES:
        for number, key in enumerate(key for key, _ in of_kind(graph, kind)):
            names[key] = f"{STYLES[kind][0]}{number}"
    for key, name in names.items():
        data = graph.nodes[key]
        style = GENERIC_STYLE if data.get("generic") else STYLES[data["kind"]][1]
        lines.append(f"  {name} [{style}label={quote(data['label'])}];")
    for target, name in names.items():
        for source in (source for source in graph.predecessors(target) if source in names):
            block = graph.edges[source, target]["kind"] == "block"
            lines.append(
                f"  {name} -> {names[source]} [style=dashed, arrowhead=none];"
                if block
                else f"  {names[source]} -> {name};"
            )
    return "\n".join([*lines, "}"]) + "\n"


def quote(text: str) -> str:
    """The text as a string of Graphviz."""
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# --- words ------------------------------------------------------------------------------------------------------------


def factor_text(name: str, shape: tuple[int, ...], blocks: int = 1) -> str:
    """`"A 10 x 10"`, `"A diag 50"`, `"A 8 blocks of 64 x 64"`."""
    if len(shape) == 1:
        return f"{name} diag {shape[0]:,}"
    return f"{name} {f'{blocks:,} blocks of ' if blocks > 1 else ''}{shape[0]:,} x {shape[1]:,}"


def with_reasons(entries: Sequence[tuple[str, str]], expand: bool) -> list[str]:
    """Names with their reasons, a line each; those of equal layers with one reason are one line, unless `expand`."""
    if expand:
        return [f"{names}: {reason}" for names, reason in entries]
    groups = alike([names for names, _ in entries], [COPY.sub("", reason) for _, reason in entries])
    return [f"{group.counted}: {entries[group.places[0]][1]}" for group in groups]


def texts(notes: Iterable[Note]) -> list[str]:
    """Every note as a line."""
    return [f"{note.subject}: {note.reason}" for note in notes]


# --- the page ---------------------------------------------------------------------------------------------------------

BLOCK_COLUMNS = ("#", *COLUMNS[1:], "elements", "memory")
PASS_COLUMNS = ("pass", "nodes", "result", "seconds")
NUMERIC_COLUMNS = {"#", "uses", "elements", "memory", "nodes", "seconds"}

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6675; --paper: #fdfdfc; --line: #dfe3e8; --band: #f3f5f7;
  --on: #fff1c9; --structured: #2f6db3; --generic: #b9640f; --unused: #b8bfc8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --soft: #9aa5b1; --paper: #14181d; --line: #2c343d;
  --band: #1b2128; --on: #4a3d12; --structured: #5b9be0; --generic: #e89b4c; --unused: #4a545f; } }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1.5rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; font-weight: 600; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .75rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--structured); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
#blocks tbody tr { cursor: pointer; } #blocks tr[hidden] { display: none; }
tbody tr:hover { background: var(--band); } tbody tr.on { background: var(--on); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.text { white-space: nowrap; } .name { min-width: 12rem; overflow-wrap: anywhere; }
td.name { font-family: ui-monospace, monospace; font-size: .9em; }
.bar { display: flex; height: .6rem; border-radius: .3rem; overflow: hidden; background: var(--line); }
.key, .count, .where { color: var(--soft); margin: .4rem 0; } .key span { margin-right: 1.5rem; white-space: nowrap; }
.key i { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; margin-right: .4rem; }
input { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line); border-radius: .3rem;
  padding: .35rem .6rem; width: min(26rem, 100%); box-sizing: border-box; margin-top: 1rem; }
#graph { max-height: 75vh; overflow: auto; border: 1px solid var(--line); border-radius: .3rem; }
svg { display: block; } svg text { fill: var(--ink); font: 12px ui-monospace, monospace; }
svg path { fill: none; stroke: var(--unused); stroke-width: 1.5; } svg g { cursor: pointer; }
svg g.operation text { fill: var(--soft); } svg g rect { fill: transparent; } svg g.on rect { fill: var(--on); }
svg g:focus-visible { outline: none; } svg g:focus-visible rect { stroke: var(--structured); }
ul { margin: 0; padding-left: 1.2rem; } li { overflow-wrap: anywhere; }
@media (max-width: 46rem) { body { padding: 0 .8rem; margin: 1rem auto; }
  #blocks, #blocks thead, #blocks tbody, #blocks tr, #blocks td { display: block; }
  #blocks thead tr { display: flex; flex-wrap: wrap; gap: 0 1rem; } #blocks th { border: 0; padding: 0; min-width: 0; }
  #blocks thead tr::before { content: "sort by"; color: var(--soft); }
  #blocks tbody tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
  #blocks td { border: 0; padding: 0 0 0 7rem; text-align: left; white-space: normal; min-height: 1.5em; }
  #blocks td::before { content: attr(data-column); float: left; margin-left: -7rem; color: var(--soft);
    font: 15px/1.5 system-ui, sans-serif; } }
"""

# Rows and nodes carry the numbers of their blocks in data-blocks. A click on either selects both.
SCRIPT = """
"use strict";
const table = document.getElementById("blocks"), body = table.tBodies[0], rows = [...body.rows];
const nodes = [...document.querySelectorAll("#graph g")], where = document.getElementById("where");
const numbers = element => element.dataset.blocks ? element.dataset.blocks.split(" ") : [];
const search = document.getElementById("search"), count = document.getElementById("count");
function filter() {
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  const shown = rows.filter(row => !row.hidden).length;
  count.textContent = words.length ? `${shown} of ${rows.length} blocks` : "";
}
search.addEventListener("input", filter);
[...table.tHead.rows[0].cells].forEach((head, column) => head.firstChild.addEventListener("click", () => {
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[column].dataset.sort ?? row.cells[column].textContent;
  const numeric = head.classList.contains("number");
  const order = (a, b) => numeric ? key(a) - key(b) : key(a).localeCompare(key(b), undefined, { numeric: true });
  body.append(...rows.slice().sort((a, b) => up ? order(a, b) : order(b, a)));
}));
function select(element, others) {
  const chosen = numbers(element);
  for (const each of [...rows, ...nodes])
    each.classList.toggle("on", each === element || numbers(each).some(number => chosen.includes(number)));
  const selected = others.filter(each => each.classList.contains("on"));
  if (selected.length) selected[0].scrollIntoView({ block: "nearest", inline: "nearest" });
  const uses = nodes.filter(node => node.classList.contains("on"));
  where.textContent = (element.dataset.where ? [element] : uses).map(node => node.dataset.where).join("; ");
}
for (const [elements, others] of [[rows, nodes], [nodes, rows]])
  for (const element of elements) {
    element.addEventListener("click", () => select(element, others));
    element.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); select(element, others); }
    });
  }
"""


def script_source(script: str) -> str:
    """The entry of a content security policy that lets a browser run this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src {script_source(SCRIPT)}"


@dataclass(frozen=True)
class TableCell:
    """A cell of a table. sort: the number that it is sorted by, if its text is none."""

    text: str
    sort: float | None = None


@dataclass(frozen=True)
class Contents:
    """The data of the page.

    Attributes:
        headline: the title.
        share: the number of elements by kind, for the bar under the headline.
        blocks, passes: the cells of every row of the two tables, without the number of the row.
        sections: (title, lines).
        graph: of `Report.to_networkx`.
    """

    headline: str
    share: Mapping[str, int]
    blocks: Sequence[Sequence[TableCell]]
    passes: Sequence[Sequence[TableCell]]
    sections: Sequence[tuple[str, Sequence[str]]]
    graph: networkx.DiGraph


def page(contents: Contents) -> str:
    """The page as text."""
    headline = escape(contents.headline)
    body = [
        f"<h1>{headline}</h1>",
        bar(contents.share),
        '<input id="search" type="search" placeholder="filter by layer, parameter or block" '
        'aria-label="filter the blocks">\n<p class="count" id="count" aria-live="polite"></p>',
        block_table(contents.blocks),
        '<h2>graph</h2>\n<p class="where" id="where" aria-live="polite">Select a row or a node.</p>\n'
        f'<div id="graph">{drawing(contents.graph)}</div>',
        *(section(title, lines) for title, lines in contents.sections),
        f"<h2>passes</h2>\n{html_table(PASS_COLUMNS, contents.passes)}",
        f"<script>{SCRIPT}</script>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{headline}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


# --- parts of the page ------------------------------------------------------------------------------------------------


def section(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{escape(title)}</h2>\n<ul>{items}</ul>"


def bar(share: Mapping[str, int]) -> str:
    """A bar with one part for every kind, and its key."""
    present = {kind: count for kind, count in share.items() if count}
    parts = "".join(f'<div style="flex:{count};background:var(--{kind})"></div>' for kind, count in present.items())
    key = "".join(f'<span><i style="background:var(--{kind})"></i>{kind} {n:,}</span>' for kind, n in present.items())
    return f'<div class="bar">{parts}</div>\n<p class="key">{key}</p>'


def block_table(blocks: Sequence[Sequence[TableCell]]) -> str:
    """The table of blocks, with what the script needs to sort it and to connect it with the graph."""
    numbered = [(TableCell(str(number)), *cells) for number, cells in enumerate(blocks)]
    attributes = [f' data-blocks="{number}" tabindex="0"' for number in range(len(blocks))]
    return html_table(BLOCK_COLUMNS, numbered, attributes)


def html_table(
    columns: Sequence[str], rows: Sequence[Sequence[TableCell]], attributes: Sequence[str] | None = None
) -> str:
    """A table. attributes: of every row, if the script sorts the table."""
    label = "<button>{}</button>" if attributes is not None else "{}"
    heads = (f'<th class="{cell_class(column)}">{label.format(escape(column))}</th>' for column in columns)
    lines = (
        f"<tr{mark}>{''.join(map(cell_text, columns, cells))}</tr>\n"
        for mark, cells in zip(attributes or [""] * len(rows), rows, strict=True)
    )
    name = ' id="blocks"' if attributes is not None else ""
    body = f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>"
    return f'<div class="wide"><table{name}>\n{body}\n</table></div>'


def cell_text(column: str, cell: TableCell) -> str:
    sort = "" if cell.sort is None else f' data-sort="{cell.sort}"'
    return f'<td class="{cell_class(column)}" data-column="{escape(column)}"{sort}>{escape(cell.text)}</td>'


def cell_class(column: str) -> str:
    """The CSS class of the cells of a column."""
    return "number" if column in NUMERIC_COLUMNS else {"parameters": "name", "result": "name"}.get(column, "text")


# --- the drawing of the graph -----------------------------------------------------------------------------------------

ROW, LANE, MARGIN, CHARACTER = 22, 14, 14, 7.4  # pixels
HUE = 137.508  # degrees between the colors of neighboring blocks: the golden angle keeps them apart


@dataclass
class Lanes:
    """The columns of a drawing with one row a node, as of a history of commits.

    The lines of a node go down its lane as far as the last node that reads it, and no other node is in their way. A
    node goes on in the lane of its first predecessor if that is free, or else in the first lane that is.
    """

    graph: networkx.DiGraph
    free: list[int] = field(default_factory=list)  # of every lane, the first row that is free again
    lane: dict[Any, int] = field(default_factory=dict)
    row: dict[Any, int] = field(default_factory=dict)

    def place(self, order: Sequence[Any]) -> None:
        self.row = {node: number for number, node in enumerate(order)}
        for node, row in self.row.items():
            before = sorted(self.graph.predecessors(node), key=self.row.__getitem__)
            wanted = [self.lane[source] for source in before] + list(range(len(self.free)))
            lane = next((lane for lane in wanted if self.free[lane] <= row), len(self.free))
            readers = [self.row[reader] for reader in self.graph.successors(node)]
            self.lane[node] = lane
            self.free[lane : lane + 1] = [max(readers, default=row + 1)]

    def point(self, node: Any) -> tuple[int, int]:
        return MARGIN + LANE * self.lane[node], MARGIN + ROW * self.row[node]


def drawing(graph: networkx.DiGraph) -> str:
    """The uses and the operations between them as SVG, in the order of the data, in the colors of their blocks."""
    import networkx

    numbers = {node: number for number, (node, data) in enumerate(of_kind(graph, "block"))}
    shown = [node for kind in ("use", "operation") for node, _ in of_kind(graph, kind)]
    data = graph.edge_subgraph([edge for edge in graph.edges if graph.edges[edge]["kind"] == "data"])
    flow = networkx.DiGraph(data)
    flow.add_nodes_from(shown)
    position = {node: number for number, node in enumerate(graph)}
    order = list(networkx.lexicographical_topological_sort(flow, key=position.__getitem__))
    lanes = Lanes(flow)
    lanes.place(order)
    left = 2 * MARGIN + LANE * max(1, len(lanes.free))
    labels = {node: label(graph, node, numbers) for node in order}
    width = left + CHARACTER * max((len(text) for text in labels.values()), default=0) + MARGIN
    edges = "".join(f'<path d="{curve(*lanes.point(a), *lanes.point(b))}"/>' for a, b in flow.edges)
    groups = "".join(node_text(graph, node, numbers, lanes.point(node), left, width, labels[node]) for node in order)
    height = 2 * MARGIN + ROW * max(0, len(order) - 1)
    return f'<svg width="{width:.0f}" height="{height}" role="group" aria-label="uses">{edges}{groups}</svg>'


def of_kind(graph: networkx.DiGraph, kind: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    return ((node, data) for node, data in graph.nodes(data=True) if data["kind"] == kind)


def blocks_of(graph: networkx.DiGraph, node: Any, numbers: Mapping[Any, int]) -> list[int]:
    """The numbers of the blocks that a use is in, or whose parameters an operation reads."""
    return [numbers[block] for block in graph.successors(node) if block in numbers]


def label(graph: networkx.DiGraph, node: Any, numbers: Mapping[Any, int]) -> str:
    """`"3 linear  head.weight, head.bias"` for a use, `"exp: 4 generic  scale"` for an operation."""
    data = graph.nodes[node]
    blocks = [block for block in graph.successors(node) if block in numbers]
    parts = "; ".join(f"{numbers[block]} {graph.nodes[block]['layer']}  {', '.join(block)}" for block in blocks)
    if not parts:
        return str(data["label"])
    return parts if data["kind"] == "use" else f"{data['label']}: {parts}"


def node_text(
    graph: networkx.DiGraph,
    node: Any,
    numbers: Mapping[Any, int],
    point: tuple[int, int],
    left: float,
    width: float,
    text: str,
) -> str:
    (x, y), data, blocks = point, graph.nodes[node], blocks_of(graph, node, numbers)
    name = str(data["label"]).splitlines()[0]
    place = f"{name} at {data['line']}" if data.get("line") else name
    color = f"hsl({HUE * blocks[0] % 360:.0f} 60% 52%)" if blocks else "var(--unused)"
    mark = f'<circle cx="{x}" cy="{y}" r="{5 if blocks else 3}" fill="{color}"/>'
    marks = f'class="{data["kind"]}" data-blocks="{" ".join(map(str, blocks))}" data-where="{escape(place)}"'
    return (
        f'<g {marks} tabindex="0">'
        f"<title>{escape(place)}</title>"
        f'<rect x="0" y="{y - ROW // 2}" width="{width:.0f}" height="{ROW}"/>{mark}'
        f'<text x="{left}" y="{y + 4}">{escape(text)}</text></g>'
    )


def curve(x0: int, y0: int, x1: int, y1: int) -> str:
    """A path that goes straight down its lane, and into the other one in the last row."""
    if x0 == x1:
        return f"M{x0} {y0}V{y1}"
    return f"M{x0} {y0}V{y1 - ROW}C{x0} {y1} {x1} {y1 - ROW} {x1} {y1}"
