"""Which approximation a registration gets, and why if it is not the obvious one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from math import prod

from .errors import ApproximationError, table
from .ir import KRONECKER, Program, Use
from .matrix import MatrixForm

PER_CASE = ("full", "diagonal")
SIDES = {
    (False, False): "kron",
    (True, False): "kron_in_diag",
    (False, True): "kron_out_diag",
    (True, True): "kron_both_diag",
}


def choose(
    program: Program, layer: str, matrix: MatrixForm | None, uses: Sequence[Use], *names: str
) -> tuple[str, str | None]:
    """(approximation, reason). What the user asks for by name wins over linked groups, those over module class and
    layer name, those over the layer's default; then sides that are too wide become diagonal."""
    parameters = names or (matrix.parameters if matrix is not None else ())
    asked = requested(program, parameters, layer)
    if matrix is None:
        return (asked if asked in PER_CASE else "diagonal"), None
    default = program.layers[layer].default
    chosen = asked or default
    reason: str | None = None
    if chosen in PER_CASE and not all(cases_apart(program, use) for use in uses):
        reason = f"cases are merged with positions at its output, so not {chosen!r}"
        chosen = "kron"
    if len(uses) > 1 and chosen == "kron":
        chosen = "kron_indep"
    limited = narrow(chosen, matrix, program.options.dense_limit)
    if limited != chosen and asked is None:
        wide = f"a side is wider than dense_limit={program.options.dense_limit}"
        return limited, f"{reason}; {wide}" if reason else wide
    return chosen, reason


def cases_apart(program: Program, use: Use) -> bool:
    return use.batch_dim == 0 or (use.batch_dim is not None and program.layers[use.layer].forms[use.form].leading)


def narrow(chosen: str, matrix: MatrixForm, limit: int) -> str:
    """`chosen` with every side wider than `limit` made diagonal."""
    _, outputs, inputs = matrix.shape
    if chosen == "full":
        return "full" if prod(matrix.shape) <= limit else "diagonal"
    if chosen not in (*KRONECKER, "kron_indep"):
        return chosen
    in_diag = inputs > limit or chosen in ("kron_in_diag", "kron_both_diag")
    out_diag = outputs > limit or chosen in ("kron_out_diag", "kron_both_diag")
    sides = SIDES[in_diag, out_diag]
    return chosen if sides == "kron" else sides


def requested(program: Program, parameters: Iterable[str], layer: str) -> str | None:
    parameters = list(parameters)
    keys = program.options.approximations
    exact = {keys[key] for key in keys if key in parameters}
    pattern = {
        value for key, value in keys.items()
        if isinstance(key, str) and any(fnmatchcase(name, key) for p in parameters for name in (p, *owners(p)))
    }  # fmt: skip
    linked = {value for group, value in program.options.linked.items() if group == set(parameters) and value}
    direct = [program.options.modules.get(owner, object) for p in parameters for owner in owners(p)[:1]]
    modules = {
        value for key, value in keys.items() if isinstance(key, type) and any(issubclass(kind, key) for kind in direct)
    }
    by_layer = {keys[layer]} if layer in keys else set()
    for found in (exact, pattern, linked, modules, by_layer):
        if len(found) > 1:
            rows = [(", ".join(parameters), " and ".join(sorted(found)))]
            raise ApproximationError(f"two keys of `approximations` ask for different things:\n{table(rows)}")
        if found:
            return next(iter(found))
    return None


def owners(parameter: str) -> list[str]:
    """The module paths above a parameter, innermost first."""
    parts = parameter.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
