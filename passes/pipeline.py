"""The passes in their order. Print the tuple, run one alone, or run them all."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .check import check
from .cut import cut
from .expressions import express
from .ir import Pass, PassRecord, Program
from .link import link
from .losses import find_losses
from .match import match
from .normalize import normalize
from .resolve import resolve
from .submodules import find_outputs, give_lookups, leave_python
from .unroll import unroll
from .verify import verify

PIPELINE: tuple[Pass, ...] = (unroll, normalize, find_losses, link, express, match, cut, resolve, check)
SUBMODULES: tuple[Pass, ...] = (  # of joined ones
    find_outputs, give_lookups, link, express, match, cut, resolve, leave_python, check,
)  # fmt: skip


def run(program: Program, passes: Sequence[Pass] = PIPELINE) -> Program:
    """Apply `passes`, verifying the Program after each, and note in `history` what each did."""
    for step in passes:
        start = time.perf_counter()
        program = verify(step(program), after=step.__name__)
        seconds = time.perf_counter() - start
        record = PassRecord(step.__name__, len(program.graph.nodes), summary(step.__name__, program), seconds)
        program = program.but(history=(*program.history, record))
    return program


def summary(name: str, program: Program) -> str:
    """The one number that says what a pass found."""
    return {
        "find_losses": f"{len(program.outputs)} outputs",
        "find_outputs": f"{len(program.submodules)} submodules",
        "leave_python": f"{len(program.python)} parameters left",
        "link": f"{len(program.options.linked)} groups",
        "express": f"{len(program.made)} expressions",
        "match": f"{len(program.matches)} uses",
        "cut": f"{len(program.pieces)} pieces",
        "resolve": f"{len(program.registrations)} registrations, {len(program.dropped)} dropped",
        "check": "ok",
    }.get(name, f"{len(program.graph.nodes)} nodes")
