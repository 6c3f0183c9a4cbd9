"""What became of every parameter, and why: as text, on a rich terminal, as data, as a page, as a graph.

The text answers, in order: is anything left out, what became of each parameter, why for everything that is not the
obvious choice, what it costs, and what the compiler did. It is plain ASCII and holds no timings, so it can be compared.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from kfac_fx.passes.ir import KEPT, Note, PassRecord, Program
from kfac_fx.report.formats import dot, page
from kfac_fx.report.rows import Row, factor_dtype, rows, size
from kfac_fx.taps.subsample import described

if TYPE_CHECKING:
    from rich.console import RenderableType

Counters = Callable[[], Mapping[str, int]]
Fallbacks = Callable[[], Sequence[str]]
COLUMNS = ("", "layer", "parameters", "uses", "Fisher block", "factors")
WIDTH = 101  # of wrapped lines; the table is as wide as it must be
NAME_WIDTH = 44
LISTED = 8  # lines of one section before it says how many more there are


class Report:
    """The registrations of a compiled module; `print(net.report)`.

    Args:
        program: after the last pass.
        counters: what happened since, read anew whenever the report is shown, e.g. {"skipped updates": 0}.
        fallbacks: what was done in another way than it should be, and why; read anew, too.
    """

    def __init__(self, program: Program, counters: Counters | None = None, fallbacks: Fallbacks = lambda: ()) -> None:
        self.program, self.counters, self.fallbacks = program, counters, fallbacks

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return rows(self.program)

    @property
    def dropped(self) -> tuple[Note, ...]:
        return self.program.dropped

    @property
    def unused(self) -> tuple[str, ...]:
        return self.program.unused

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parameters that a LayerCollection has uses of, and no registration."""
        known = {name for one in self.program.registrations for name in one.owners}
        known |= {self.program.owner(name) for name in self.unused}
        return tuple(name for name in self.program.parameters if name not in known)

    @property
    def history(self) -> tuple[PassRecord, ...]:
        return self.program.history

    @property
    def elements(self) -> dict[str, int]:
        """Element counts of the trainable parameters: total, registered, structured, generic."""
        structured = sum(one.elements for one in self.rows if not one.generic)
        generic = sum(one.elements for one in self.rows if one.generic)
        total = sum(parameter.numel() for parameter in self.program.parameters.values())
        return {"total": total, "registered": structured + generic, "structured": structured, "generic": generic}

    @property
    def headline(self) -> str:
        count, blocks = self.elements, len(self.rows)
        text = (
            f"kfac_fx registered {count['registered']:,} of {count['total']:,} trainable parameters "
            f"in {blocks:,} Fisher {'block' if blocks == 1 else 'blocks'}"
        )
        if count["generic"]:
            text += f", {percent(count['structured'], count['registered'])} of them structured"
        return text

    @property
    def memory(self) -> str:
        total = sum(one.bytes for one in self.rows)
        kinds = sorted({str(factor_dtype(r, self.program)).removeprefix("torch.") for r in self.program.registrations})
        return f"{size(total)} of factors, {size(total)} of inverses ({', '.join(kinds) or 'none'})"

    @property
    def captured(self) -> list[str]:
        """The submodules, if there is no graph of the whole model."""
        parts = dict.fromkeys((one.path, one.read) for one in self.program.submodules)
        modules, reads = ([path for path, read in parts if read is which] for which in (False, True))
        what = "one submodule" if len(modules) == 1 else f"{len(modules)} submodules, one by one"
        found = [f"{what}: {', '.join(modules)}"] if modules else []
        return found + ([f"and of Python between them: {', '.join(reads)}"] if reads else [])

    @property
    def python(self) -> list[str]:
        """What stays Python beside them, and why."""
        return [f"{note.subject}: {note.reason}" for note in self.program.left]

    def sections(self) -> list[tuple[str, list[str]]]:
        """What follows the table: (title, lines)."""
        generic = [f"{one.names}: {one.reason or 'no layer has this form'}" for one in self.rows if one.generic]
        reasons = [f"{one.names}: {one.reason}" for one in self.rows if one.reason and not one.generic]
        dropped = [f"{note.subject}: {note.reason}" for note in self.dropped]
        passes = ", ".join(f"{one.name} {one.summary or f'{one.nodes:,} nodes'}" for one in self.history)
        found = [("generic", generic or ["none"]), ("reasons", reasons), ("dropped", dropped or ["none"])]
        left_out = [f"{', '.join(self.left_out)}: not registered, so they follow KFAC's first-order rule"]
        found += [("unused", list(self.unused) or ["none"]), ("left out", left_out if self.left_out else [])]
        found += [("captured", self.captured), ("python", self.python)]
        found += [("memory", [self.memory]), ("passes", [passes or "none"])]
        found.append(("sampling", described(self.program)))
        if self.program.mask is not None:
            uses = [use for one in self.program.registrations for use in one.uses]
            masked = sum(KEPT in use.attrs for use in uses)
            said = [f"{self.program.mask.name} masks {masked:,} of {len(uses):,} uses"]
            found.append(("padding", said + [f"{note.subject}: {note.reason}" for note in self.program.unmasked]))
        if self.counters is not None:
            counted = ", ".join(f"{name} {count:,}" for name, count in self.counters().items())
            found.append(("runtime", [counted or "none"]))
        found.append(("fallback", list(self.fallbacks())))
        return [(title, lines) for title, lines in found if lines]

    def __str__(self) -> str:
        lines = [self.headline, "", *self._table(), ""]
        for title, entries in self.sections():
            wrapped = [line for entry in listed(entries) for line in wrap(entry)]
            lines += [f"{head:<8}  {line}" for head, line in zip(chain([title], repeat("")), wrapped, strict=False)]
        return "\n".join(ascii_only(line.rstrip()) for line in lines)

    __repr__ = __str__

    def _table(self) -> list[str]:
        names = told_apart([one.names for one in self.rows])
        cells = [
            (str(n), one.layer, name, f"{one.uses:,}", one.block, one.factors_text)
            for n, (one, name) in enumerate(zip(self.rows, names, strict=True))
        ]
        widths = [max(1, *map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
        right = (True, False, False, True, False, False)

        def line(values: Sequence[str]) -> str:
            aligned = (v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True))
            return "  ".join(aligned).rstrip()

        return [line(COLUMNS), line(["-" * width for width in widths]), *map(line, cells)]

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.headline, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in COLUMNS:
            table.add_column(name or "#", justify="right" if name in ("", "uses") else "left", overflow="fold")
        for n, one in enumerate(self.rows):
            cells = (str(n), one.layer, one.names, f"{one.uses:,}", one.block, one.factors_text)
            table.add_row(*map(Text, cells), style="yellow" if one.generic else "")
        below = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        below.add_column(style="bold")
        below.add_column(overflow="fold")
        for title, entries in self.sections():
            below.add_row(Text(title), Text("\n".join(listed(entries))))
        return Group(table, Text(), below)

    def to_dict(self) -> dict[str, Any]:
        return {
            "parameters": {**self.elements, "unused": list(self.unused)},
            "registrations": [one.to_dict() for one in self.rows],
            "dropped": [{"subject": note.subject, "reason": note.reason} for note in self.dropped],
            "submodules": [{"module": one.path, "calls": one.calls} for one in self.program.submodules],
            "python": [{"module": note.subject, "reason": note.reason} for note in self.program.left],
            "sampling": described(self.program),
            "fallbacks": list(self.fallbacks()),
            "passes": [{"name": one.name, "nodes": one.nodes, "seconds": one.seconds} for one in self.history],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """One self-contained page, light or dark as the reader's system is."""
        share = {name: self.elements[name] for name in ("structured", "generic")}
        share["unused"] = self.elements["total"] - self.elements["registered"]
        cells = [
            (one.layer, one.names, f"{one.uses:,}", one.block, one.factors_text, f"{one.elements:,}", size(one.bytes))
            for one in self.rows
        ]
        passes = [(one.name, f"{one.nodes:,}", one.summary, f"{one.seconds:.3f}") for one in self.history]
        sections = [(title, lines) for title, lines in self.sections() if title != "passes"]
        return page(self.headline, share, cells, sections, passes)

    def to_dot(self) -> str:
        """The registrations, their uses and how data flows between these, in Graphviz' language."""
        return dot(self.program.registrations, [f"{one.names}\n{one.block}: {one.factors_text}" for one in self.rows])


# --- words ----------------------------------------------------------------------------------------------------------


def shorten(text: str, width: int = NAME_WIDTH) -> str:
    """The two ends of a long name: the model's part and the parameter's own."""
    if len(text) <= width:
        return text
    tail = (width - 3) * 2 // 3
    return f"{text[: width - 3 - tail]}...{text[-tail:]}"


def told_apart(names: Sequence[str]) -> list[str]:
    """Short, but for those that would look alike."""
    short = [shorten(name) for name in names]
    counts = Counter(short)
    return [name if counts[one] > 1 else one for name, one in zip(names, short, strict=True)]


def percent(part: int, whole: int) -> str:
    """Rounded down, so that "100 %" means all."""
    return f"{math.floor(10000 * part / whole) / 100:g} %"


def listed(entries: list[str]) -> list[str]:
    hidden = len(entries) - LISTED
    return entries if hidden <= 1 else [*entries[:LISTED], f"... and {hidden:,} more, all in to_dict()"]


def wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 10, subsequent_indent="  ", break_on_hyphens=False) or [""]


def ascii_only(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")
