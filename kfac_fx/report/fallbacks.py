"""The slower or unproved ways that were taken since compilation, with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kfac_fx.capturing import CompileArguments
from kfac_fx.passes.ir import Program
from kfac_fx.passes.layers import LAYERS, Layer
from kfac_fx.recording.case_recorder import CaseRecorder
from kfac_fx.recording.recorder import Recorder


def fallbacks(
    arguments: CompileArguments, program: Program, first: Recorder | None, cases: Iterable[CaseRecorder]
) -> list[str]:
    """A sentence for every fallback of a compiled module.

    first: the first capture, if there is one. cases: the recorders of gradients of single examples.
    """
    sentences = [] if arguments.verify else ["no registration was proved: verify=False"]
    sentences += [
        f"the layer {name!r} of layers=[...] is nowhere in the graph: no operation has its form. "
        "`kfac-fx explain --layer` says which condition fails"
        for name in unmatched(arguments.layers, program)
    ]
    if first is not None and first.loop_reason is not None:
        sentences.append(f"sources of the exact modes are sent back one by one: {first.loop_reason}")
    if first is not None and first.emitted.plain_reason is not None:
        sentences.append(f"recordings are not compiled: {first.emitted.plain_reason}")
    apart = {key: reason for recorder in cases for key, reason in recorder.apart.items()}
    sentences += [
        f"gradients of single examples of {', '.join(key)} take one backward each: {reason}"
        for key, reason in apart.items()
    ]
    return sentences


def unmatched(layers: Mapping[str, Layer], program: Program) -> list[str]:
    """The user's layers that no use has, and that no reason speaks of."""
    used = {use.layer for registration in program.registrations for use in registration.uses}
    reasons = [registration.reason or "" for registration in program.registrations]
    told = " ".join([*reasons, *map(str, program.dropped)])
    mine = [name for name, layer in layers.items() if LAYERS.get(name) is not layer and not layer.parts]
    return [name for name in mine if name not in used and f"{name}:" not in told and f"{name}(" not in told]
