"""`kfac-fx explain MODEL PARAMETER`: every use of one parameter, its block, and what to write for another.

`kfac-fx passes MODEL`: the captured graph, and the changes of every pass.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from torch import fx

from kfac_fx.cli.problem import CommandError, Problem, failure
from kfac_fx.passes.approximations import APPROXIMATIONS, ORDER_UNKNOWN
from kfac_fx.passes.choose import lacking
from kfac_fx.passes.divided.divide import divide
from kfac_fx.passes.errors import UntraceableError, nearest, plural
from kfac_fx.passes.expressions import express
from kfac_fx.passes.graphs.labels import NUMBER, entries
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.ir import Options, Pass, Program, Registration, Use, source_line, where
from kfac_fx.passes.layers import LAYERS, collect
from kfac_fx.passes.near import NearMatch, near_matches
from kfac_fx.passes.pipeline import PIPELINE, SUBMODULES, run
from kfac_fx.passes.trace import trace_model
from kfac_fx.recording.emitted_submodules import number_of_examples
from kfac_fx.report.report import Report
from kfac_fx.report.rows import factor_text

LINE_WIDTH = 100
NEAR = 3  # the layers that nearly match at one place; others are further away


def explain(program: Program, name: str) -> str:
    """The explanation of one parameter of a compiled model, as text.

    Args:
        name: any name of the parameter in the model.

    Raises:
        CommandError: the model has no such trainable parameter.
    """
    if name not in program.aliases:
        inside = [other for other in program.aliases if other.startswith(f"{name}.")]
        hint = f" {name} has the parameters {', '.join(inside)}." if inside else nearest(name, program.aliases)
        raise CommandError(f"the model has no trainable parameter {name!r}.{hint}")
    parameter = program.aliases[name]
    registrations = [registration for registration in program.registrations if parameter in registration.owners]
    lines = [*heading(program, parameter), ""]
    for registration in registrations:
        lines += [*block_lines(program, registration), ""]
    if not registrations:
        lines += [*absence(program, parameter), ""]
    lines += [f"dropped: {note.subject}: {note.reason}" for note in program.dropped if parameter in note.subject]
    lines += [*place_lines(program, parameter, registrations)]
    lines += ["", *ways_to_change(program, parameter, registrations)]
    return "\n".join(wrapped for line in lines for wrapped in wrap_indented(line)).rstrip()


def wrap_indented(line: str) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, LINE_WIDTH, subsequent_indent=f"{indent}  ", break_on_hyphens=False) or [""]


def heading(program: Program, parameter: str) -> Iterator[str]:
    tensor = program.parameters[parameter]
    shape = " x ".join(map(str, tensor.shape)) or "a number"
    yield f"{parameter}: {shape}, {str(tensor.dtype).removeprefix('torch.')}"
    if others := [alias for alias in program.names[parameter] if alias != parameter]:
        yield f"other names: {', '.join(others)}"
    if pieces := program.pieces_of.get(parameter):
        yield f"used in {plural(len(pieces), 'piece')}: {', '.join(pieces)}"


def absence(program: Program, parameter: str) -> Iterator[str]:
    if parameter in program.unused:
        yield "no Fisher block: no loss depends on this parameter"
    elif parameter in program.python:
        yield f"no Fisher block: Python outside the captured graphs reads it ({program.python[parameter]})"
    else:
        yield "no Fisher block: it was not registered"


def block_lines(program: Program, registration: Registration) -> Iterator[str]:
    number = program.registrations.index(registration)
    row = Report(program).rows[number]
    yield f"Fisher block {number}: {row.block}, {row.factors_text}"
    if shared := [name for name in registration.parameters if len(registration.parameters) > 1]:
        yield f"  parameters: {', '.join(shared)}"
    if registration.reason:
        yield f"  reason: {registration.reason}"


def place_lines(program: Program, parameter: str, registrations: list[Registration]) -> Iterator[str]:
    """Every place where the parameter meets the data: its layer, or the layers that nearly match.

    Places that follow each other and have the same layers, as the steps of a recurrent module, are one line.
    """
    parts = set(program.parts(parameter))
    edges = [act for (_, act), names in entries(program).items() if names & parts]
    places = list(dict.fromkeys(edges))
    expressed = program if program.submodules else express(program)  # `cut` has removed the expressions
    yield f"{plural(len(places), 'place')} where it meets the data:"
    layers = {place: layers_at(place, parts, registrations) for place in places}
    alike = [(layers[place], op_name(place), source_line(place)) if layers[place] else place for place in places]
    for _, group in groupby(zip(alike, places, strict=True), key=itemgetter(0)):
        (_, first), *others = group
        last = f" to {where(others[-1][1])}" if others else ""
        yield f"  {node_words(program, first)}{last}: {layers[first] or 'no layer'}"
        if not layers[first]:
            yield from map(near_line, near_matches(expressed, first)[:NEAR])


def layers_at(place: fx.Node, parts: set[str], registrations: list[Registration]) -> str:
    return ", ".join(
        f"{use.layer}, as {role}{calls(use)}"
        for registration in registrations
        for use in registration.uses
        if place in use.nodes
        for role, bound in use.parameters.items()
        if bound.parameter in parts
    )


def calls(use: Use) -> str:
    """How often the example inputs reach a use in a submodule that is captured on its own."""
    return "" if use.calls in (None, 1) else f", {use.calls} calls"


def near_line(near: NearMatch) -> str:
    if near.condition is None:
        return f"    {near.layer} matches here, but is not used: see the reason above"
    return f"    not {near.layer}: {near.condition}"


def node_words(program: Program, place: fx.Node) -> str:
    """`"linear at linear_1 (model.py:33)"`, or the submodule if that was captured on its own, without a line."""
    inside = f" in {program.submodules[place.meta[NUMBER]].path}" if NUMBER in place.meta else ""
    at = where(place) if source_line(place) else f"{place.name}{inside}"
    return f"{op_name(place) if place.op != 'output' else 'the output'} at {at}"


def ways_to_change(program: Program, parameter: str, registrations: list[Registration]) -> Iterator[str]:
    """The lines to write to change the block."""
    structured = [registration for registration in registrations if not registration.generic]
    for registration in structured:
        layer = program.layers[registration.layer]
        others = [name for name in layer.approximations if name != registration.approximation]
        lacks = {name: lacking(APPROXIMATIONS[name], program.layers, registration.uses) for name in others}
        if registration.called:
            lacks |= {name: ORDER_UNKNOWN for name in others if APPROXIMATIONS[name].series}
        if possible := [name for name, lack in lacks.items() if lack is None]:
            yield f"for another block write approximations={{{parameter!r}: {possible[0]!r}}}, or one of "
            yield f"  {', '.join(possible)}"
        for lack in dict.fromkeys(lack for lack in lacks.values() if lack is not None):
            yield f"  not {', '.join(name for name, reason in lacks.items() if reason == lack)}: {lack}"
    if registrations and not structured:
        yield "for a structured block, write the operation as a layer that nearly matches, or declare its form:"
        yield "  kfac_fx.compile(model, layers=[...]), see kfac_fx.layer and the page on layers of your own"
        full = factor_text("F", (program.parameters[parameter].numel(),) * 2)
        yield f"for all products of its elements write approximations={{{parameter!r}: 'full'}}: {full}"
    if parameter in program.parameters and registrations:
        yield f"to leave it out of training, call requires_grad_(False) on {parameter} before compile"


# --- kfac-fx passes ---------------------------------------------------------------------------------------------------


CAPTURE = "capture"
CONTEXT = 2  # unchanged lines around a change


def passes(problem: Problem, only: str | None = None) -> Iterator[str]:
    """The program after the capture, and the difference that each pass makes, as text.

    The program of a model that is captured in parts holds the graphs of all of them.

    Args:
        only: the name of a pass, to print the whole programs before and after it; None: all passes, as differences.

    Raises:
        CommandError: the model cannot be captured, or no pass has this name.
    """
    program, steps = captured(problem)
    names = [step.__name__ for step in steps]
    if only is not None and only not in names:
        raise CommandError(f"there is no pass {only!r}, only {', '.join(names)}.{nearest(only, names)}")
    if only is None:
        yield titled(CAPTURE, program)
    for number, step in enumerate(steps):
        before = program
        try:
            program = run(program, steps[number : number + 1])
        except ValueError as error:
            raise CommandError(f"{step.__name__}: {type(error).__name__}: {error}", status=1) from error
        if step.__name__ == only:
            yield titled(f"before {only}", before)
            yield titled(f"after {only}", program)
        elif only is None:
            yield f"{header(step.__name__)}{program.history[-1].summary}\n{changes(before, program)}"


def captured(problem: Problem) -> tuple[Program, tuple[Pass, ...]]:
    """The program before its passes, and these. Raises CommandError."""
    model, args, kwargs = problem.model, problem.args, problem.kwargs
    options = Options(loss_given=problem.loss is not None, strict=problem.strict)
    layers = collect(*LAYERS.values(), *problem.layers)
    try:
        return trace_model(model, args, kwargs, options=options, layers=layers).program, PIPELINE
    except UntraceableError as error:
        try:
            cases = number_of_examples(args, kwargs)
            return divide(model, args, kwargs, options, layers, error, cases=cases).program, SUBMODULES
        except (ValueError, RuntimeError) as failed:
            raise failure(failed) from failed


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
