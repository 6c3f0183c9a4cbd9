"""From the division of a model to the recorder of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from kfac_fx.captures.agreement import needs
from kfac_fx.captures.declared import Declared
from kfac_fx.captures.divided import DividedRecorder
from kfac_fx.passes.divide import Division, divide
from kfac_fx.passes.errors import AmbiguousRegistrationError, UntraceableError
from kfac_fx.passes.graphs.failures import fatal, first_line
from kfac_fx.passes.ir import Program
from kfac_fx.passes.pipeline import SUBMODULES, run
from kfac_fx.passes.submodule_masks import with_masks
from kfac_fx.passes.trace import Capture
from kfac_fx.recording.examples import examples
from kfac_fx.recording.masks import of_call


def division_of(
    model: nn.Module,
    declared: Declared,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: UntraceableError,
    known: Division | None,
) -> tuple[Division, Program]:
    """A division, and its program with registrations.

    error: why the whole was not captured; known: the division on other inputs. What Python reads of parameters in a way
    that does not go with what submodules do with them is left to Python.
    """

    for reads in (True, False):
        try:
            made = divide(
                model, args, kwargs, declared.options, declared.layers, error, known, examples(args, kwargs), reads
            )
        except UntraceableError:
            raise
        except Exception as failure:
            if fatal(failure):
                raise
            said = f"{type(failure).__name__}: {first_line(failure)}"
            raise UntraceableError(
                f"{type(model).__name__} does not run on these inputs: {said}\n"
                f"Correct the inputs or the model. What torch.export says:\n{error}"
            ) from failure
        try:
            return made, run(made.program, SUBMODULES)
        except AmbiguousRegistrationError:
            if not any(one.is_read for one in made.captured):
                raise
    raise AssertionError("bug in kfac_fx: a division without reads that has some")


def recorder_of(
    division: Division,
    program: Program,
    model: nn.Module,
    declared: Declared,
    earlier: DividedRecorder | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> DividedRecorder:
    """program: the division's, with registrations. earlier: the recorder whose captures are among these."""
    mask = None if declared.padding_mask is None else of_call(declared.padding_mask, model, args, kwargs)
    now = None if mask is None else (mask.shape[0], mask.shape[1])
    before = {} if earlier is None else dict(zip(map(id, earlier.captured), earlier.mask_sizes, strict=True))
    sizes = tuple(before.get(id(one), now) for one in division.captured)
    masked = with_masks(program, sizes)
    return DividedRecorder(
        as_it_is(division, masked),
        masked,
        model,
        declared.loss,
        needs(masked),
        declared.backend,
        division=division,
        padding_mask=declared.padding_mask,
        mask_sizes=sizes,
    )


def as_it_is(division: Division, program: Program) -> Capture:
    """A capture of a model whose Python runs, with what its submodules do beside their graphs."""
    effects = dict.fromkeys(effect for one in division.captured for effect in one.effects)
    return Capture(
        program, lambda args, kwargs: (args, dict(kwargs)), lambda output: output, lambda *_: True, tuple(effects)
    )
