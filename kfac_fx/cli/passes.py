"""`kfac-fx passes MODEL`: the captured graph, and the changes of every pass."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from kfac_fx.cli.problem import CommandError, Problem
from kfac_fx.passes.errors import UntraceableError, first_line, nearest
from kfac_fx.passes.ir import Options, Program
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.pipeline import PIPELINE, run
from kfac_fx.passes.trace import trace_model

CAPTURE = "capture"
CONTEXT = 2  # unchanged lines around a change


def passes(problem: Problem, only: str | None = None) -> Iterator[str]:
    """The program after the capture, and the difference that each pass makes, as text.

    Args:
        only: the name of a pass, to print the whole programs before and after it; None: all passes, as differences.

    Raises:
        CommandError: torch.export cannot capture the whole model, or no pass has this name.
    """
    names = [step.__name__ for step in PIPELINE]
    if only is not None and only not in names:
        raise CommandError(f"there is no pass {only!r}, only {', '.join(names)}.{nearest(only, names)}")
    options = Options(loss_given=problem.loss is not None, strict=problem.strict)
    try:
        program = trace_model(problem.model, problem.args, problem.kwargs, options=options, layers=LAYERS).program
    except UntraceableError as error:
        text = f"the model cannot be captured whole, and the parts have passes of their own: {first_line(error)}"
        raise CommandError(text, status=1) from error
    if only is None:
        yield titled(CAPTURE, program)
    for number, step in enumerate(PIPELINE):
        before = program
        try:
            program = run(program, PIPELINE[number : number + 1])
        except ValueError as error:
            raise CommandError(f"{step.__name__}: {type(error).__name__}: {error}", status=1) from error
        if step.__name__ == only:
            yield titled(f"before {only}", before)
            yield titled(f"after {only}", program)
        elif only is None:
            yield f"{header(step.__name__)}{program.history[-1].summary}\n{changes(before, program)}"


def header(title: str) -> str:
    return f"--- {title} ".ljust(100, "-") + "\n"


def titled(title: str, program: Program) -> str:
    return f"{header(title)}{program}\n"


def changes(before: Program, after: Program) -> str:
    """The lines that differ, marked with - and +."""
    old, new = (str(program).splitlines() for program in (before, after))
    difference = difflib.unified_diff(old, new, n=CONTEXT, lineterm="")
    lines = [line for line in difference if not line.startswith(("---", "+++"))]
    return "".join(f"{line}\n" for line in lines) or "nothing that is printed has changed\n"
