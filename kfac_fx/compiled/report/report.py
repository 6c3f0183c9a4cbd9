"""The report: which Fisher block every parameter got, and why; as text, on a rich terminal, as data, page or graph.

The text answers in this order: whether anything is left out; the block of each parameter; the reason for everything
that is not the default; the cost; what the compiler did. It is plain ASCII and contains no timings, so that two reports
can be compared.
"""

from __future__ import annotations

import json
import math
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from kfac_fx.compiled.report.page import Contents, TableCell, fragment, page
from kfac_fx.compiled.report.rows import ReportRow, block_graph, casts, factor_dtype, memory_text, rows
from kfac_fx.passes.errors import plural
from kfac_fx.passes.graphs.labels import symbolic_sizes
from kfac_fx.passes.ir import KEPT, Note, PassRecord, Program
from kfac_fx.recording.taps.subsample import described

if TYPE_CHECKING:
    import networkx
    from rich.console import RenderableType

Counters = Callable[[], Mapping[str, int]]
Fallbacks = Callable[[], Sequence[str]]  # lines of text
COLUMNS = ("", "layer", "parameters", "uses", "Fisher block", "factors")
WIDTH = 101  # of wrapped lines; the table may be wider
NAME_WIDTH = 44
SECTION_LINES = 8  # of one section, before a line says how many more there are


class Report:
    """The registrations of a compiled module; `print(net.report)`.

    Args:
        program: the result of the last pass.
        counters: the numbers of events since, such as {"skipped updates": 0}; called whenever the report is shown.
        fallbacks: what was done in another way than intended, and why; called whenever the report is shown.
        intervals: how often the optimizer records and inverts; called whenever the report is shown.
    """

    def __init__(
        self,
        program: Program,
        counters: Counters | None = None,
        fallbacks: Fallbacks = lambda: (),
        intervals: Fallbacks = lambda: (),
    ) -> None:
        self.program, self.counters, self.fallbacks, self.intervals = program, counters, fallbacks, intervals

    @cached_property
    def rows(self) -> tuple[ReportRow, ...]:
        """One row for every registration."""
        return rows(self.program)

    @property
    def dropped(self) -> tuple[Note, ...]:
        """The matches that are not registered, with the reason."""
        return self.program.dropped

    @property
    def unused(self) -> tuple[str, ...]:
        """The parameters that no loss depends on."""
        return self.program.unused

    @property
    def left_out(self) -> tuple[str, ...]:
        """The parameters that are used, but that a LayerCollection did not register."""
        registered = {name for registration in self.program.registrations for name in registration.owners}
        registered |= {self.program.owner(name) for name in self.unused}
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
        count = self.elements
        text = (
            f"kfac_fx registered {count['registered']:,} of {count['total']:,} trainable parameters "
            f"in {plural(len(self.rows), 'Fisher block')}"
        )
        if count["generic"]:
            text += f", {percent(count['structured'], count['registered'])} of them structured"
        return text

    @property
    def memory(self) -> str:
        """The memory of the factors and of their inverses, as text."""
        total = memory_text(sum(row.bytes for row in self.rows))
        dtypes = {factor_dtype(registration, self.program) for registration in self.program.registrations}
        kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"{total} of factors, {total} of inverses ({kinds or 'none'})"

    @property
    def captured(self) -> list[str]:
        """The submodules that were captured, if there is no graph of the whole model."""
        parts = dict.fromkeys((submodule.path, submodule.read) for submodule in self.program.submodules)
        modules, reads = ([path for path, read in parts if read is which] for which in (False, True))
        what = "one submodule" if len(modules) == 1 else f"{len(modules)} submodules, one by one"
        lines = [f"{what}: {', '.join(modules)}"] if modules else []
        return lines + ([f"and of Python between them: {', '.join(reads)}"] if reads else [])

    @property
    def cases(self) -> list[str]:
        """The dimension that counts the cases, and why, where there is a choice."""
        program = self.program
        for node in program.graph.find_nodes(op="placeholder") if program.cases_reason else ():
            if program.cases in (sizes := symbolic_sizes(node)):
                return [f"counted by dimension {sizes.index(program.cases)} of {node.target}: {program.cases_reason}"]
        return []

    @property
    def python(self) -> list[str]:
        """The submodules that stay Python, and why."""
        return texts(self.program.left)

    def sections(self) -> list[tuple[str, list[str]]]:
        """The sections below the table: (title, lines)."""
        program = self.program
        generic = [f"{row.names}: {row.reason or 'no layer has this form'}" for row in self.rows if row.generic]
        reasons = [f"{row.names}: {row.reason}" for row in self.rows if row.reason and not row.generic]
        left_out = [f"{', '.join(self.left_out)}: not registered, so they follow KFAC's first-order rule"]
        passes = ", ".join(f"{record.name} {record.summary or f'{record.nodes:,} nodes'}" for record in self.history)
        sections = {
            "cases": self.cases,
            "generic": generic or ["none"],
            "reasons": reasons,
            "dropped": texts(self.dropped) or ["none"],
            "unused": list(self.unused) or ["none"],
            "left out": left_out if self.left_out else [],
            "captured": self.captured,
            "python": self.python,
            "memory": [self.memory],
            "passes": [passes or "none"],
            "sampling": described(program),
            "casts": casts(program),
        }
        if program.mask is not None:
            uses = [use for registration in program.registrations for use in registration.uses]
            masked = sum(KEPT in use.attrs for use in uses)
            all_masked = f"{program.mask.name} masks {masked:,} of {plural(len(uses), 'use')}"
            sections["padding"] = [all_masked, *texts(program.unmasked)]
        sections["every"] = list(self.intervals())
        if self.counters is not None:
            counted = ", ".join(f"{name} {count:,}" for name, count in self.counters().items())
            sections["runtime"] = [counted or "none"]
        sections["fallback"] = list(self.fallbacks())
        return [(title, lines) for title, lines in sections.items() if lines]

    # --- formats ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [self.headline, "", *self._table(), ""]
        for title, entries in self.sections():
            wrapped = [line for entry in shortened(entries) for line in wrap(entry)]
            lines += [f"{head:<8}  {line}" for head, line in zip(chain([title], repeat("")), wrapped, strict=False)]
        return "\n".join(ascii_only(line.rstrip()) for line in lines)

    __repr__ = __str__

    def _table(self) -> list[str]:
        names = told_apart([row.names for row in self.rows])
        cells = [
            (str(number), layer, name, *rest)
            for number, ((layer, _, *rest), name) in enumerate(
                zip((row.cells for row in self.rows), names, strict=True)
            )
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
        for number, row in enumerate(self.rows):
            table.add_row(
                *(Text(printable(cell)) for cell in (str(number), *row.cells)), style="yellow" if row.generic else ""
            )
        below = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        below.add_column(style="bold")
        below.add_column(overflow="fold")
        for title, entries in self.sections():
            below.add_row(Text(title), Text("\n".join(shortened(entries))))
        return Group(table, Text(), below)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data.

        Returns:
            "parameters": the numbers of `elements`, and the names of the unused ones. "registrations":
            `ReportRow.to_dict` of every block. "dropped", "python": lists of a subject and a reason. "submodules":
            those that were captured, with the number of their calls. "cases", "sampling", "casts", "fallbacks": lines
            of text. "passes": name, nodes, seconds.
        """
        program = self.program
        return {
            "parameters": {**self.elements, "unused": list(self.unused)},
            "registrations": [row.to_dict() for row in self.rows],
            "dropped": [{"subject": note.subject, "reason": note.reason} for note in self.dropped],
            "submodules": [{"module": submodule.path, "calls": submodule.calls} for submodule in program.submodules],
            "cases": self.cases,
            "python": [{"module": note.subject, "reason": note.reason} for note in program.left],
            "sampling": described(program),
            "casts": casts(program),
            "fallbacks": list(self.fallbacks()),
            "passes": [{"name": r.name, "nodes": r.nodes, "seconds": r.seconds} for r in self.history],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """One self-contained page: a table to search and sort, and the graph of the uses.

        A click on a row selects its uses in the graph, and the reverse; the source line of a use is shown with it. The
        page is light or dark as the reader's system is.
        """
        return printable(page(self._contents))

    def _repr_html_(self) -> str:
        """The headline and the table, for a notebook."""
        return fragment(self._contents)

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
        return block_graph(self.program, self.rows)

    def to_dot(self) -> str:
        """The blocks, their uses and the data between uses, in Graphviz' language."""
        return dot(self.to_networkx())


# --- words ----------------------------------------------------------------------------------------------------------


def texts(notes: Sequence[Note]) -> list[str]:
    """Every note as a line."""
    return [f"{note.subject}: {note.reason}" for note in notes]


def shorten(text: str, width: int = NAME_WIDTH) -> str:
    """The two ends of a long name: the part of the model and that of the parameter."""
    if len(text) <= width:
        return text
    tail = (width - 3) * 2 // 3
    return f"{text[: width - 3 - tail]}...{text[-tail:]}"


def told_apart(names: Sequence[str]) -> list[str]:
    """The names, shortened to the width of those that shortening would make equal."""
    counts = Counter(map(shorten, names))
    width = max((len(name) for name in names if counts[shorten(name)] > 1), default=NAME_WIDTH)
    return [shorten(name, width) for name in names]


def percent(part: int, whole: int) -> str:
    """Rounded down, so that "100 %" means all."""
    return f"{math.floor(10000 * part / whole) / 100:g} %"


def shortened(entries: list[str]) -> list[str]:
    """The first entries, and a line with the number of the others."""
    hidden = len(entries) - SECTION_LINES
    return entries if hidden <= 1 else [*entries[:SECTION_LINES], f"... and {hidden:,} more, all in to_dict()"]


def wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 10, subsequent_indent="  ", break_on_hyphens=False) or [""]


def ascii_only(text: str) -> str:
    return printable(text).encode("ascii", "backslashreplace").decode("ascii")


def printable(text: str) -> str:
    """The text with control characters written out, so that a name with escapes changes no terminal."""
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


# --- Graphviz' language -----------------------------------------------------------------------------------------------

STYLES = {  # of the nodes that are drawn: the letter of their names, and their attributes
    "block": ("r", 'shape=box, style="filled,rounded", fillcolor="#dbe9f6", '),
    "use": ("u", ""),
    "operation": ("n", "shape=plaintext, "),
}
GENERIC_STYLE = "shape=box, style=dashed, "


def dot(graph: networkx.DiGraph) -> str:
    """The blocks, uses and operations of a `block_graph` in Graphviz' language.

    A box is a block. A dashed line leads from a block to each of its uses, an arrow along the data.
    """
    names: dict[Any, str] = {}
    lines = ["digraph kfac_fx {", "  rankdir=TB;", '  node [fontname="Helvetica", fontsize=10];']
    for kind in STYLES:
        for number, key in enumerate(key for key, data in graph.nodes(data=True) if data["kind"] == kind):
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
