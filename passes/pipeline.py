"""The passes in their order. Print the tuple, run one alone, or run them all.

The grammar of a Program, checked between passes. What breaks it is our fault, and is named with the pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import fx

from .check import check
from .cut import cut
from .expressions import express
from .ir import Pass, PassRecord, Program, Use
from .link import link
from .losses import find_losses
from .match import match
from .normalize import normalize
from .resolve import resolve
from .submodules import find_outputs, give_lookups, leave_python
from .unroll import unroll

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
        "express": f"{len(program.parameter_exprs)} expressions",
        "match": f"{len(program.matches)} uses",
        "cut": f"{len(program.pieces)} pieces",
        "resolve": f"{len(program.registrations)} registrations, {len(program.dropped)} dropped",
        "check": "ok",
    }.get(name, f"{len(program.graph.nodes)} nodes")


# --- verify -----------------------------------------------------------------------------------------------------------


def verify(program: Program, after: str) -> Program:
    """Returns `program` if it is well-formed; AssertionError names the pass and what it left behind."""
    program.graph.lint()
    nodes = set(program.graph.nodes)
    for use in program.matches:
        check_use(use, program, nodes, after)
    seen: set[str] = set()
    for one in program.registrations:
        for name in one.parameters:
            assert name in program.shapes, f"bug in kfac_fx: {after} registered {name}, no parameter of the model"
            assert name not in seen, f"bug in kfac_fx: {after} registered {name} twice"
            seen.add(name)
        assert one.generic == (not one.uses), f"bug in kfac_fx: {after} left {one} with the wrong number of uses"
        for use in one.uses:
            check_use(use, program, nodes, after)
    for name in program.unused:
        assert name not in seen, f"bug in kfac_fx: {after} calls {name} unused and registered it"
    for node in program.outputs:
        assert node in nodes, f"bug in kfac_fx: {after} left the output {node.name} behind"
    return program


def check_use(use: Use, program: Program, nodes: set[fx.Node], after: str) -> None:
    assert use.layer in program.layers, f"bug in kfac_fx: {after} left a use of the unknown layer {use.layer}"
    assert use.input in nodes, f"bug in kfac_fx: {after} left {use} without its input {use.input.name}"
    assert use.output in nodes, f"bug in kfac_fx: {after} left {use} without its output {use.output.name}"
    some = use.parameters or use.exprs
    assert some, f"bug in kfac_fx: {after} left {use.layer} at {use.output.name} without parameters"
    for bound in use.parameters.values():
        name = bound.parameter
        assert name in program.shapes, f"bug in kfac_fx: {after} bound {name}, no parameter of the model"
        shape = program.shapes[name]
        assert bound.used.shape == shape, (
            f"bug in kfac_fx: {after} lays out {name} from {bound.used.shape}, it is {shape}"
        )
