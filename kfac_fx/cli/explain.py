"""`kfac-fx explain` and `kfac-fx passes`: what the compiler did with a parameter, and with the graph in every pass.

`match` keeps what fits and drops the rest without a word. A user whose parameter is generic asks for the rest: which
layer did the library look for there, and what would have to be different? So the layers that match or nearly match at
a place of the graph are listed, with the condition that each of the latter fails.
"""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter

from torch import fx

from kfac_fx.cli.problem import PROBLEM, CommandError, Problem, Subcommand, argument, failure, read
from kfac_fx.compiled.report import Report, factor_text
from kfac_fx.passes.approximations import APPROXIMATIONS, ORDER_UNKNOWN
from kfac_fx.passes.divide import divide
from kfac_fx.passes.errors import UntraceableError, nearest, plural, source_line, where
from kfac_fx.passes.expressions import express
from kfac_fx.passes.graphs.labels import entries
from kfac_fx.passes.graphs.operations import op_name
from kfac_fx.passes.ir import NUMBER, Note, Options, Pass, Program, Registration, Use
from kfac_fx.passes.layers import LAYERS, collect
from kfac_fx.passes.match import NearMatch, near_matches
from kfac_fx.passes.pipeline import PIPELINE, SUBMODULES, run
from kfac_fx.passes.resolve import lacking
from kfac_fx.passes.trace import trace_model
from kfac_fx.recording.emitted_submodules import number_of_examples

LINE_WIDTH = 100
LISTED_NAMES = 12  # parameters in an error
NEAR = 3  # the layers that nearly match at one place; others are further away


def explain(program: Program, name: str) -> str:
    """The explanation of one parameter of a compiled model, as text.

    Args:
        name: any name of the parameter in the model, or a pattern such as "head.*", which explains all that fit.

    Raises:
        CommandError: the model has no such trainable parameter.
        TypeError: `program` is something else, such as the compiled model.
    """
    if not isinstance(program, Program):
        raise TypeError(
            f"explain takes the program of a compiled model, and got a {type(program).__name__}: write "
            f"explain(net.program, {name!r})."
        )
    if name not in program.aliases:
        fitting = {parameter: None for other, parameter in program.aliases.items() if fnmatchcase(other, name)}
        if fitting:
            return "\n\n".join(explain(program, parameter) for parameter in fitting)
        inside = [other for other in program.aliases if other.startswith(f"{name}.")]
        hint = f" {name} has the parameters {', '.join(inside)}." if inside else others_than(name, program)
        raise CommandError(f"the model has no trainable parameter {name!r}.{hint}")
    parameter = program.aliases[name]
    registrations = [registration for registration in program.registrations if parameter in registration.owners]
    lines = [*heading(program, parameter), ""]
    for registration in registrations:
        lines += [*block_lines(program, registration), ""]
    if not registrations:
        lines += [*absence(program, parameter), ""]
    lines += [f"dropped: {note.subject}: {note.reason}" for note in notes_of(program, parameter)]
    lines += [*place_lines(program, parameter, registrations)]
    lines += ["", *ways_to_change(program, parameter, registrations)]
    return "\n".join(wrapped for line in lines for wrapped in wrap_indented(line)).rstrip()


def others_than(name: str, program: Program) -> str:
    """The sentence that names the nearest parameter, or all of a model that has few, or the first of many."""
    if near := nearest(name, program.aliases):
        return near
    names, more = list(program.parameters), len(program.parameters) - LISTED_NAMES
    if not names:
        return " It has none."
    return f" It has {', '.join(names[:LISTED_NAMES])}{f' and {more:,} more, as kfac-fx report shows' * (more > 0)}."


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


def notes_of(program: Program, parameter: str) -> list[Note]:
    """The notes of dropped matches that name a parameter, or a piece of it."""
    named = re.compile(rf"(?<![\w.]){re.escape(parameter)}(?![\w.])")
    return [note for note in program.dropped if named.search(note.subject)]


def place_lines(program: Program, parameter: str, registrations: list[Registration]) -> Iterator[str]:
    """Every place where the parameter meets the data: its layer, or the layers that nearly match. Layers of the user
    that are not the layer there are always among these.

    Places that follow each other and have the same layers, as the steps of a recurrent module, are one line.
    """
    parts = set(program.parts(parameter))
    edges = [act for (_, act), names in entries(program).items() if names & parts]
    places = list(dict.fromkeys(edges))
    expressed = program if program.submodules else express(program)  # `cut` has removed the expressions
    users = any(LAYERS.get(name) is not layer for name, layer in program.layers.items())
    yield f"{plural(len(places), 'place')} where it meets the data:"
    layers = {place: layers_at(place, parts, registrations) for place in places}
    alike = [(layers[place], op_name(place), source_line(place)) if layers[place] else place for place in places]
    for _, group in groupby(zip(alike, places, strict=True), key=itemgetter(0)):
        (_, first), *others = group
        last = f" to {where(others[-1][1])}" if others else ""
        yield f"  {node_words(program, first)}{last}: {layers[first] or 'no layer'}"
        used = {use.layer for use, _ in uses_at(first, parts, registrations)}
        if not used or users:
            near = near_matches(expressed, first)
            wanted = [match for match in near if not used or (match.declared and match.layer not in used)]
            for match in wanted[:NEAR]:
                yield near_line(match, match.condition or why_unused(program, parameter, registrations, match, used))


def uses_at(place: fx.Node, parts: set[str], registrations: list[Registration]) -> list[tuple[Use, str]]:
    """The uses of some parameters at a place, each with the role of the parameter."""
    return [
        (use, role)
        for registration in registrations
        for use in registration.uses
        if place in use.nodes
        for role, bound in use.parameters.items()
        if bound.parameter in parts
    ]


def layers_at(place: fx.Node, parts: set[str], registrations: list[Registration]) -> str:
    return ", ".join(f"{use.layer}, as {role}{calls(use)}" for use, role in uses_at(place, parts, registrations))


def calls(use: Use) -> str:
    """How often the example inputs reach a use in a submodule that is captured on its own."""
    return "" if use.calls in (None, 1) else f", {use.calls} calls"


def near_line(near: NearMatch, why: str) -> str:
    return (
        f"    {near.layer} matches here, but is not used: {why}"
        if near.condition is None
        else f"    not {near.layer}: {why}"
    )


def why_unused(
    program: Program, parameter: str, registrations: Iterable[Registration], near: NearMatch, used: Collection[str]
) -> str:
    """Why a layer that matches at a place has no use there. used: the layers that have one."""
    dropped = [note.reason for note in notes_of(program, parameter) if note.subject.startswith(f"{near.layer}(")]
    reasons = [registration.reason for registration in registrations if registration.reason]
    instead = [f"{' and '.join(sorted(used))} has this use"] if used else list(absence(program, parameter))
    return (dropped or reasons or instead)[0]


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


# --- the commands -----------------------------------------------------------------------------------------------------


def print_explanation(options: argparse.Namespace) -> None:
    print(explain(read(options).compiled().program, options.parameter))


def print_passes(options: argparse.Namespace) -> None:
    for program in passes(read(options), options.only):
        print(program)


EXPLAIN = Subcommand(
    "explain",
    print_explanation,
    "every use of one parameter, its block, and what to write for another",
    "Print every use of one parameter with its line and its layer, the layers that nearly match, the parameter's "
    "Fisher block, and what to write for another one.",
    [
        *PROBLEM,
        argument("parameter", metavar="PARAMETER", help="a name of model.named_parameters(), or a pattern: 'head.*'"),
    ],
    "example: kfac-fx explain mine.py:Net encoder.0.weight --input 2,64",
)
PASSES = Subcommand(
    "passes",
    print_passes,
    "the captured graph of a model, and the changes of every pass",
    "Print the captured graph of a model, and the lines that every pass of the compiler changes.",
    [
        *PROBLEM,
        argument("--pass", dest="only", metavar="NAME", help="print the whole graph before and after this pass"),
    ],
    "example: kfac-fx passes mine.py:Net --input 2,64 --pass normalize",
)
