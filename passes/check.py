"""check_registration: uses found in the graph behind the losses, counted without the matcher, equal uses registered.

A Fisher that leaves a use out is wrong, not approximate. The pass makes such a registration generic, with its reason,
or refuses under `strict`; the function refuses always, with all culprits in one error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from .errors import RegistrationError, nearest, table
from .ir import WANTED, Program, Registration, where
from .labels import Edge, labels, parameters_behind, use_edges
from .operations import op_name

Edges = Mapping[str, set[Edge]]  # of a parameter; empty if it has none


def check(program: Program) -> Program:
    """Demote what misses a use; raise for everything generic under `strict`."""
    found, registered = uses_found(program), uses_registered(program)
    kept: list[Registration] = []
    for one in program.registrations:
        wrong = [name for name in one.parameters if not one.generic and found[name] != registered[name]]
        reason = "; ".join(too_few(name, found[name], registered[name]) for name in wrong)
        kept += [program.generic(name, reason) for name in one.parameters] if wrong else [one]
    program = program.but(registrations=tuple(kept))
    if program.options.strict:
        refuse_generic(program)
    refuse(culprits(program, None, found, registered))
    return program


def too_few(name: str, found: set[Edge], registered: set[Edge]) -> str:
    missing = dict.fromkeys(act for _, act in ordered(found - registered))
    places = ", ".join(where(node) for node in missing)
    return f"{name} has {len(found)} uses, {len(registered)} of them matched; missing {places}"


def ordered(edges: set[Edge]) -> list[Edge]:
    """In graph order."""
    graphs = {act.graph for _, act in edges}  # one, or none
    order = {node: n for graph in graphs for n, node in enumerate(graph.nodes)}
    return sorted(edges, key=lambda edge: (order[edge[1]], order[edge[0]]))


def uses_found(program: Program) -> Edges:
    """Every edge over which a parameter enters the graph behind the losses; counted without the matcher."""
    label = labels(program.graph, program.parameters, cases=program.cases)
    found: dict[str, set[Edge]] = defaultdict(set)
    for pure, act in use_edges(program.graph, label, program.outputs):
        for name in parameters_behind(pure, label, program.behind):
            found[name].add((pure, act))
    return found


def uses_registered(program: Program) -> Edges:
    """The edges that the uses of the registrations account for."""
    label = labels(program.graph, program.parameters, cases=program.cases)
    by_node: dict[object, list[Edge]] = defaultdict(list)
    for pure, act in use_edges(program.graph, label, program.outputs):
        by_node[act].append((pure, act))
    registered: dict[str, set[Edge]] = defaultdict(set)
    for one in program.registrations:
        for use in one.uses:
            names = use.parameter_set
            for node in use.nodes:
                for pure, act in by_node[node]:
                    for name in names & parameters_behind(pure, label, program.behind):
                        registered[name].add((pure, act))
    return registered


def check_registration(program: Program, variables: Iterable[str] | None = None) -> None:
    """Prove that every use of every parameter is registered.

    Args:
        variables: names that must be registered, and no others; default: all trainable parameters in use.

    Raises RegistrationError with every culprit: not registered, registered with a use missing, registered but not
    among `variables`, or an unknown name.
    """
    refuse(culprits(program, variables, uses_found(program), uses_registered(program)))


def culprits(program: Program, variables: Iterable[str] | None, found: Edges, registered: Edges) -> list[str]:
    by_name = {name: one for one in program.registrations for name in one.parameters}
    in_use = {name for name in program.parameters if any(found.get(one) for one in program.parts(name))}
    own = [name for name in program.parameters if name in in_use or name in program.python]
    wanted = list(variables) if variables is not None else own
    errors: list[str] = []
    for name in wanted:
        if name not in program.aliases and name in program.pieces:
            errors.append(f"{name!r} is a piece; the variables are whole parameters, here {program.owner(name)}")
            continue
        if name not in program.aliases:
            errors.append(f"{name!r} is not a parameter of the model.{nearest(name, program.aliases)}")
            continue
        parts = program.parts(program.aliases[name])
        for name in parts if len(parts) == 1 else [part for part in parts if found[part]]:
            if name not in by_name:
                errors.append(f"{name} is not registered{used_in(found[name])}")
            elif not by_name[name].generic and found[name] != registered[name]:
                errors.append(wrong_count(name, by_name[name], found[name], registered[name]))
    asked = {part for name in wanted for part in program.parts(program.aliases.get(name, name))}
    extra = [name for name in by_name if name not in asked]
    if extra:
        errors.append(f"{len(extra)} registered parameters were not included in the list: {', '.join(extra)}")
    return errors


def refuse(errors: list[str]) -> None:
    if errors:
        raise RegistrationError(
            "found the following errors with the registration of parameters:\n"
            + "\n".join("  " + line for error in errors for line in error.splitlines())
            + "\nA Fisher that leaves a use out is wrong, not approximate. Register every use, or make the parameter "
            "generic."
        )


def used_in(edges: set[Edge]) -> str:
    places = ", ".join(where(act) for _, act in ordered(edges))
    return f"; it is used in {places}" if places else "; the losses do not depend on it"


def wrong_count(name: str, one: Registration, found: set[Edge], registered: set[Edge]) -> str:
    lines = [f"{name} has {len(found)} uses in the graph but {len(registered)} in its registration {one}:"]
    lines += [f"  registered   {where(act)}" for _, act in ordered(registered)]
    lines += [f"  missing      {where(act)}: it enters {op_name(act)}" for _, act in ordered(found - registered)]
    return "\n".join(lines)


def refuse_generic(program: Program) -> None:
    generic = [one for one in program.registrations if one.generic and one.reason != WANTED]
    if generic:
        rows = [(", ".join(one.parameters), one.reason or "") for one in generic]
        raise RegistrationError(
            f"{len(generic)} of {len(program.parameters)} trainable parameters are in no structured Fisher block:\n"
            f"{table(rows)}\n"
            "Let them be generic with compile(..., strict=False), declare a layer of their form with layers=[...], "
            "or freeze them with requires_grad_(False)."
        )
