"""All sequences of passes. Print a tuple, run one pass alone, or run them all. A new pass is a module, a place in these
sequences and a line of `SUMMARIES`.

`verify` checks the grammar of a Program between passes. A violation is a bug in kfac_fx; the error names the pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import fx

from .check import check, link
from .errors import plural
from .expressions import cut, express
from .ir import Pass, PassRecord, Program, Use
from .losses import find_losses
from .match import match
from .normalize import normalize
from .resolve import resolve
from .submodules import find_outputs, give_lookups, leave_python
from .unroll import as_kernels, unroll

CAPTURED: tuple[Pass, ...] = (unroll, normalize)  # one spelling of the graph
MATCHED: tuple[Pass, ...] = (express, match, cut)  # the uses of parameters
PIPELINE: tuple[Pass, ...] = (*CAPTURED, find_losses, link, *MATCHED, resolve, check)  # of a whole model
EVALUATED: tuple[Pass, ...] = (as_kernels, normalize, find_losses)  # of a whole model, without uses of parameters
SUBMODULES: tuple[Pass, ...] = (  # of submodules, each captured, whose graphs are joined
    find_outputs, give_lookups, link, *MATCHED, resolve, leave_python, check,
)  # fmt: skip


def after_registrations(select: Pass) -> tuple[Pass, ...]:
    """The passes over a graph on which a user registered layers by hand: `select` keeps the matches of what is left."""
    return (link, *MATCHED, select, resolve, check)


def run(program: Program, passes: Sequence[Pass] = PIPELINE) -> Program:
    """Apply `passes`, verifying the Program after each, and note in `history` what each did."""
    for step in passes:
        start = time.perf_counter()
        program = verify(step(program), after=step.__name__)
        seconds = time.perf_counter() - start
        record = PassRecord(step.__name__, len(program.graph.nodes), summary(step, program), seconds)
        program = program.but(history=(*program.history, record))
    return program


def summary(step: Pass, program: Program) -> str:
    """The result of a pass in a few words: its line of SUMMARIES, else the number of nodes."""
    return SUMMARIES[step](program) if step in SUMMARIES else plural(len(program.graph.nodes), "node")


SUMMARIES: dict[Pass, Callable[[Program], str]] = {
    find_losses: lambda program: plural(len(program.outputs), "output"),
    find_outputs: lambda program: plural(len(program.submodules), "submodule"),
    leave_python: lambda program: f"{plural(len(program.python), 'parameter')} left",
    link: lambda program: plural(len(program.options.linked), "group"),
    express: lambda program: plural(len(program.parameter_exprs), "expression"),
    match: lambda program: plural(len(program.matches), "use"),
    cut: lambda program: plural(len(program.pieces), "piece"),
    resolve: lambda program: f"{plural(len(program.registrations), 'registration')}, {len(program.dropped)} dropped",
    check: lambda program: "ok",
}


# --- verify -----------------------------------------------------------------------------------------------------------


def verify(program: Program, after: str) -> Program:
    """Returns `program` if it is well-formed; AssertionError names the pass and what it left behind."""
    program.graph.lint()
    nodes = set(program.graph.nodes)
    for use in program.matches:
        check_use(use, program, nodes, after)
    seen: set[str] = set()
    for registration in program.registrations:
        for name in registration.parameters:
            assert name in program.shapes, f"bug in kfac_fx: {after} registered {name}, no parameter of the model"
            assert name not in seen, f"bug in kfac_fx: {after} registered {name} twice"
            seen.add(name)
        assert registration.generic == (not registration.uses), (
            f"bug in kfac_fx: {after} left {registration} with the wrong number of uses"
        )
        for use in registration.uses:
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
