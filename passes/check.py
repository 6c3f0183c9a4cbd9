"""Two passes that check: the user's declarations at the start, and at the end that no use is missing.

`link` brings declarations to canonical parameter names. Linked parameters belong in one Fisher block; an approximation
is asked for by parameter or module name (with `*`), by layer name or by module class.

`check` counts the uses in the graph behind the losses without the matcher; equal uses must be registered. A Fisher that
leaves a use out is wrong, not approximate. The pass makes such a registration generic, with its reason, or refuses
under `strict`; `check_registration` refuses always, with all culprits in one error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from .approximations import APPROXIMATIONS
from .errors import ApproximationError, LinkError, RegistrationError, nearest, table, where
from .graphs.labels import Edge, entries
from .graphs.operations import op_name
from .ir import GENERIC, WANTED, Program, Registration
from .layers import LAYERS, Layer

MOST_PLACES = 5  # that a reason names

# --- declarations -----------------------------------------------------------------------------------------------------


def link(program: Program) -> Program:
    """Raises LinkError or ApproximationError, each with all its culprits."""
    check_linked_names(program)
    linked = {
        frozenset(program.aliases.get(name, name) for name in group): approximation
        for group, approximation in program.options.linked.items()
    }
    check_disjoint(linked)
    check_approximations(program, linked)
    return program.but(options=replace(program.options, linked=linked))


def check_linked_names(program: Program) -> None:
    names = {*program.aliases, *(piece.name for piece in program.options.pieces)}
    unknown = sorted({name for group in program.options.linked for name in group if name not in names})
    rows = [(repr(name), what_is(name, program)) for name in unknown]
    if len(rows) == 1:
        raise LinkError(f"linked parameter {' '.join(rows[0])}")
    if rows:
        raise LinkError(f"{len(rows)} linked parameters are no trainable parameters of the model:\n{table(rows)}")


def what_is(name: str, program: Program) -> str:
    if name in dict(program.root.named_parameters(remove_duplicate=False)):
        return "is frozen: its requires_grad is False."
    return f"is not a parameter of the model.{nearest(name, program.aliases)}"


def check_disjoint(linked: Mapping[frozenset[str], str | None]) -> None:
    count = Counter(name for group in linked for name in group)
    if twice := [name for name, groups in count.items() if groups > 1]:
        rows = [
            (name, " and ".join(f"({', '.join(sorted(g))})" for g in linked if name in g)) for name in sorted(twice)
        ]
        raise LinkError(
            f"parameters linked in more than one group:\n{table(rows)}\nJoin the groups, or take the name out of one."
        )


def check_approximations(program: Program, linked: Mapping[frozenset[str], str | None]) -> None:
    rows: list[tuple[str, str]] = []
    names = {*program.aliases, *program.options.modules, *program.layers}
    values = (*APPROXIMATIONS, GENERIC)
    for key, value in program.options.approximations.items():
        if value not in values:
            rows.append((shown(key), f"{value!r} is no approximation.{nearest(str(value), values)}"))
        elif key not in names and not names_something(key, program):
            rows.append((shown(key), f"names no parameter, module or layer of the model.{nearest(shown(key), names)}"))
    for group, asked in linked.items():
        if asked is not None and asked not in APPROXIMATIONS:
            rows.append((", ".join(sorted(group)), f"{asked!r} is no approximation.{nearest(asked, APPROXIMATIONS)}"))
    if rows:
        raise ApproximationError(
            f"approximations that cannot be honored:\n{table(rows)}\nApproximations are {', '.join(values)}."
        )


def shown(key: Any) -> str:
    return key.__name__ if isinstance(key, type) else str(key)


def names_something(key: Any, program: Program) -> bool:
    if isinstance(key, type):
        return any(issubclass(kind, key) for kind in program.options.modules.values())
    named = [*program.aliases, *program.options.modules]
    return key == GENERIC or any(fnmatchcase(name, key) for name in named)


# --- uses -------------------------------------------------------------------------------------------------------------

Edges = Mapping[str, Collection[Edge]]  # of a parameter; empty if it has none


def check(program: Program) -> Program:
    """Demote what misses a use; raise for everything generic under `strict`."""
    edges = entries(program)
    used, registered = uses_in_graph(edges), uses_registered(program, edges)
    registrations: list[Registration] = []
    for registration in program.registrations:
        wrong = [
            name
            for name in registration.parameters
            if not registration.generic and unregistered(name, used, registered)
        ]
        reason = "; ".join(too_few(name, used, registered) for name in wrong)
        registrations += (
            [program.generic(name, reason) for name in registration.parameters] if wrong else [registration]
        )
    program = program.but(registrations=tuple(registrations))
    if program.options.strict:
        refuse_generic(program)
    refuse(culprits(program, None, used, registered))
    return program


def unregistered(name: str, used: Edges, registered: Edges) -> list[Edge]:
    return [edge for edge in used[name] if edge not in registered[name]]


def too_few(name: str, used: Edges, registered: Edges) -> str:
    missing = list(dict.fromkeys(act for _, act in unregistered(name, used, registered)))
    places = ", ".join(where(act) for act in missing[:MOST_PLACES])
    more = f" and {len(missing) - MOST_PLACES} more" if len(missing) > MOST_PLACES else ""
    return f"{name} has {len(used[name])} uses, {len(registered[name])} of them matched; missing {places}{more}"


def uses_in_graph(edges: Mapping[Edge, set[str]]) -> Edges:
    """Every edge over which a parameter enters the graph behind the losses, in graph order; counted without the
    matcher."""
    used: dict[str, list[Edge]] = defaultdict(list)
    for edge, names in edges.items():
        for name in names:
            used[name].append(edge)
    return used


def uses_registered(program: Program, edges: Mapping[Edge, set[str]]) -> Edges:
    """The edges that the uses of the registrations account for."""
    by_node: dict[object, list[Edge]] = defaultdict(list)
    for edge in edges:
        by_node[edge[1]].append(edge)
    registered: dict[str, set[Edge]] = defaultdict(set)
    for registration in program.registrations:
        for use in registration.uses:
            names = use.parameter_set
            for node in use.nodes:
                for edge in by_node.get(node, ()):
                    for name in names & edges[edge]:
                        registered[name].add(edge)
    return registered


def check_registration(program: Program, variables: Iterable[str] | None = None) -> None:
    """Prove that every use of every parameter is registered.

    Args:
        variables: names that must be registered, and no others; default: all trainable parameters in use.

    Raises RegistrationError with every culprit: not registered, registered with a use missing, registered but not
    among `variables`, or an unknown name.
    """
    if not isinstance(program, Program):
        raise RegistrationError(
            f"check_registration takes a Program and got a {type(program).__name__}: a compiled model has it as "
            "net.program, as in check_registration(net.program)"
        )
    edges = entries(program)
    refuse(culprits(program, variables, uses_in_graph(edges), uses_registered(program, edges)))


def culprits(program: Program, variables: Iterable[str] | None, used: Edges, registered: Edges) -> list[str]:
    by_name = {name: registration for registration in program.registrations for name in registration.parameters}
    in_use = {name for name in program.parameters if any(map(used.get, program.parts(name)))}
    empty = {name for name in by_name if 0 in program.shapes[name]}  # the weight of a layer of 0 inputs, with its bias
    needed = [name for name in program.parameters if name in in_use or name in program.python or name in empty]
    wanted = list(variables) if variables is not None else needed
    errors: list[str] = []
    for name in wanted:
        if name not in program.aliases and name in program.pieces:
            errors.append(f"{name!r} is a piece; the variables are whole parameters, here {program.owner(name)}")
            continue
        if name not in program.aliases:
            errors.append(f"{name!r} is not a parameter of the model.{nearest(name, program.aliases)}")
            continue
        parts = program.parts(program.aliases[name])
        read = program.owner(parts[0]) in program.python
        for name in parts if len(parts) == 1 or read else [part for part in parts if used[part]]:
            if name not in by_name:
                errors.append(f"{name} is not registered{used_in(used[name])}")
            elif not by_name[name].generic and unregistered(name, used, registered):
                errors.append(wrong_count(name, by_name[name], used, registered))
    asked = {part for name in wanted for part in program.parts(program.aliases.get(name, name))}
    extra = [name for name in by_name if name not in asked]
    if extra:
        many = f"{len(extra)} registered parameters were" if len(extra) > 1 else "1 registered parameter was"
        errors.append(f"{many} not included in the list: {', '.join(extra)}")
    return errors


def refuse(errors: list[str]) -> None:
    if errors:
        raise RegistrationError(
            "found the following errors with the registration of parameters:\n"
            + "\n".join("  " + line for error in errors for line in error.splitlines())
            + "\nA Fisher that leaves a use out is wrong, not approximate. Register every use, or make the parameter "
            "generic."
        )


def used_in(edges: Collection[Edge]) -> str:
    places = ", ".join(where(act) for _, act in edges)
    return f"; it is used in {places}" if places else "; the losses do not depend on it"


def wrong_count(name: str, registration: Registration, used: Edges, registered: Edges) -> str:
    absent = unregistered(name, used, registered)
    counts = f"{len(used[name])} uses in the graph but {len(registered[name])}"
    lines = [f"{name} has {counts} in its registration {registration}:"]
    lines += [f"  registered   {where(edge[1])}" for edge in used[name] if edge in registered[name]]
    lines += [f"  missing      {where(act)}: it enters {op_name(act)}" for _, act in absent]
    return "\n".join(lines)


NOWHERE = (
    "the layer {!r} of layers=[...] is nowhere in the graph: {}. `kfac-fx explain MODEL PARAMETER --layer FILE:NAME` "
    "says the same of every place of a parameter"
)
CLAIMED = "other layers have the operations that it matches"


def unmatched(layers: Mapping[str, Layer], program: Program) -> list[str]:
    """A sentence for each of the user's layers that no use has, and that no reason speaks of."""
    used = {use.layer for registration in program.registrations for use in registration.uses}
    reasons = [registration.reason or "" for registration in program.registrations]
    told = " ".join([*reasons, *map(str, program.dropped)])
    mine = [name for name, layer in layers.items() if LAYERS.get(name) is not layer and not layer.parts]
    absent = [name for name in mine if name not in used and f"{name}:" not in told and f"{name}(" not in told]
    return [NOWHERE.format(name, program.nowhere.get(name, CLAIMED)) for name in absent]


def refuse_unmatched(program: Program) -> None:
    """Raises RegistrationError under `strict` for layers of the user that no use has: the block that was meant is
    another one."""
    absent = unmatched(program.layers, program) if program.options.strict else []
    if absent:
        raise RegistrationError(
            "\n".join(f"{sentence}." for sentence in absent)
            + "\nCorrect its form, leave it out of layers=[...], or compile with strict=False."
        )


def refuse_generic(program: Program, known: Container[Registration] = ()) -> None:
    """Raises RegistrationError for generic registrations that nobody asked for. known: others, which may stay."""
    generic = [
        registration
        for registration in program.registrations
        if registration.generic and registration.reason != WANTED and registration not in known
    ]
    if generic:
        rows = [(", ".join(registration.parameters), registration.reason or "") for registration in generic]
        absent = "".join(f"\nBesides, {sentence}." for sentence in unmatched(program.layers, program))
        unsized = program.inputs and not any("val" in node.meta for node in program.inputs)
        sizes = "Some layers are told by sizes, so give kfac_fx.compile example inputs. Or let" if unsized else "Let"
        raise RegistrationError(
            f"{len(generic)} of {len(program.parameters)} trainable parameters are in no structured Fisher block:\n"
            f"{table(rows)}\n"
            f"{sizes} them be generic with compile(..., strict=False), declare a layer of their form with "
            f"layers=[...], or freeze them with requires_grad_(False).{absent}"
        )
