"""The zoo's measurement of one model: its registrations, and whether they are right at another batch size.

It does not trust the compiler's own proof. On a batch of another size than the captured one, the emitted graph is
held to the original's outputs and gradients; for every structured registration the sum of grad_rows^T rows is held to
autograd's gradient; and a parameter that is in no Fisher block must have no gradient.
"""

from __future__ import annotations

import resource
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import kfac_fx
from benchmarks.zoo_models.entry import Entry
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.passes.errors import LayerError, LossError, ModelChangedError, RegistrationError, UntraceableError
from kfac_fx.passes.ir import Program
from kfac_fx.recording import equivalence, proof
from kfac_fx.recording.emitted_submodules import EmittedSubmodules
from kfac_fx.recording.recorder import Recorder

CAPTURED, OTHER = 3, 5  # batch sizes
RELATIVE = 1e-3  # right ones agree to about 1e-6, wrong ones differ by about 1
ROUNDING = 1e-2  # of the largest gradient, or of what rows could sum to, for gradients that cancel to nothing
DENSE_LIMIT = 1024  # wider factor sides are diagonal, so that a zoo of full-width models fits a small machine
REFUSALS = (UntraceableError, RegistrationError, LayerError, LossError, ModelChangedError)


def measure(entry: Entry) -> dict[str, Any]:
    """One line of the results. Never raises for what the model or the compiler does."""
    found: dict[str, Any] = {"model": entry.key, "like": entry.like, "status": "refused"}
    torch.manual_seed(0)
    try:
        model = entry.build().train()
        first, other = entry.call(CAPTURED), entry.call(OTHER)
        model(*first[0], **first[1])
    except Exception as error:
        return found | {"status": "no model", "error": said(error)}
    torch.manual_seed(0)
    start = time.process_time()
    try:
        options = {"dense_limit": DENSE_LIMIT, "approximations": entry.approximations}
        net = kfac_fx.compile(model, *first, loss=entry.loss, **options)
    except REFUSALS as error:
        return found | {"error": said(error), "seconds": time.process_time() - start}
    except Exception as error:
        return found | {"status": "bug", "error": said(error), "seconds": time.process_time() - start}
    found |= {"seconds": time.process_time() - start} | registered(net)
    stir(net.model)
    try:
        found |= elsewhere(net, *other)
        found["status"] = "wrong" if found["wrong"] else "works"
    except REFUSALS as error:
        found |= {"status": "refused elsewhere", "error": said(error)}
    except Exception as error:
        found |= {"status": "bug elsewhere", "error": said(error)}
    return found | {"megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """Parameters that start at zero, as many heads, gains and adapters do, hide the gradients of all before them."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.any():
            parameter.normal_(std=0.02)


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def registered(net: CompiledModule) -> dict[str, Any]:
    """The kinds of blocks of the trainable parameters. A tensor is structured if all of its pieces are."""
    program, rows, first = net.program, net.report.rows, net.captures.first
    generic = {name for registration in program.registrations if registration.generic for name in registration.owners}
    used = {name for registration in program.registrations for name in registration.owners}
    unused = set(program.parameters) - used
    return {
        "captured": parts(first.emitted) if isinstance(first.emitted, EmittedSubmodules) else "whole",
        "nodes": len(program.graph.nodes),
        "tensors": {"used": len(used), "structured": len(used - generic), "unused": len(unused)},
        "elements": {
            "used": sum(row.elements for row in rows),
            "structured": sum(row.elements for row in rows if not row.generic),
            "unused": sum(program.parameters[name].numel() for name in unused),
        },
        "layers": dict(Counter(registration.layer for registration in program.registrations)),
        "uses": sum(len(registration.uses) for registration in program.registrations),
        "shared": sum(len(registration.uses) > 1 for registration in program.registrations),
        "generic": [[row.names, row.elements, row.reason or ""] for row in rows if row.generic],
        "unproven": sum("proof" in (row.reason or "") for row in rows if row.generic),
        "passes": {record.name: round(record.seconds, 3) for record in program.history},
    }


def parts(emitted: EmittedSubmodules) -> str:
    """How much of a model was captured one by one; operations of the Python between submodules are no submodules."""
    return f"{sum(not submodule.is_read for submodule in emitted.captured)} submodules"


def elsewhere(net: CompiledModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Worst relative differences on a batch that was not captured, and what is wrong."""
    first = net.captures.first
    assert first is not None, "compiled with inputs"

    def compared(recorder: Recorder, values: Any) -> dict[str, Any]:
        return {"anew": recorder.capture is not first.capture} | differences(recorder, values, args, kwargs)

    found = net.captures.run(args, kwargs, compared)
    statistics = net.record(args, kwargs).statistics
    endless = [
        key for key, held in statistics.items() if not all(bool(tensor.isfinite().all()) for tensor in held.values())
    ]
    found["wrong"] += [f"statistics of {', '.join(key)} are not finite" for key in endless]
    return found | {"wrong": found["wrong"][:20]}


def differences(recorder: Recorder, values: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The distances of the graph from the model, and of the rows from autograd."""
    prover, program = proof.with_proof_taps(recorder), recorder.program
    torch.manual_seed(1)
    outputs, gradients, _ = equivalence.results_of_model(prover, args, kwargs)
    torch.manual_seed(1)
    its_outputs, its_gradients, _ = equivalence.results_of_graph(prover, values)
    torch.manual_seed(1)
    pairs = proof.proof_gradients(prover, values).pairs
    largest = max((float(gradient.norm()) for gradient in gradients.values() if gradient is not None), default=0.0)
    of_outputs = [relative(a, b, 1e-6) for a, b in zip(outputs, its_outputs, strict=True) if isinstance(a, Tensor)]
    of_gradients = {
        name: relative(gradient, its_gradients[name], ROUNDING * largest) for name, gradient in gradients.items()
    }
    of_rows: dict[tuple[str, ...], float] = {}
    with_gradient = 0
    for parameter, wanted, got, bound in pairs:  # the matrices of one registration at a time
        of_rows[parameter.parameters] = relative(wanted, got, ROUNDING * float(bound))
        with_gradient += bool(wanted.any())
    missed = [
        name
        for name, gradient in gradients.items()
        if gradient is not None and bool(outside(program, name, gradient).any())
    ]
    wrong = [f"outputs differ by {max(of_outputs):.2g}"] * (not max(of_outputs, default=0.0) <= RELATIVE)
    wrong += [f"gradient of {name} differs by {e:.2g}" for name, e in of_gradients.items() if not e <= RELATIVE]
    wrong += [f"rows of {', '.join(key)} differ by {e:.2g}" for key, e in of_rows.items() if not e <= RELATIVE]
    wrong += [f"{name} is in no Fisher block and has a gradient" for name in missed]
    return {
        "outputs": max(of_outputs, default=0.0),
        "gradients": max(of_gradients.values(), default=0.0),
        "rows": max(of_rows.values(), default=0.0),
        "proven": len(of_rows),
        "with_gradient": with_gradient,
        "wrong": wrong,
    }


def outside(program: Program, name: str, gradient: Tensor) -> Tensor:
    """The part of a parameter's gradient that belongs to elements in no Fisher block."""
    left = gradient.clone()
    for registration in program.registrations:
        if name in registration.parameters:
            left.zero_()
        for piece in registration.pieces:
            if piece.parameter == name:
                piece.of(left).zero_()
    return left


def relative(one: Tensor | None, other: Any, least: float) -> float:
    """|one - other| / (|one| + least); None is zero."""
    if one is None and other is None:
        return 0.0
    mine = torch.zeros_like(other) if one is None else one.detach()
    its = torch.zeros_like(mine) if other is None else other.detach()
    if mine.shape != its.shape:
        return float("inf")
    if not mine.is_floating_point():
        return 0.0 if torch.equal(mine, its) else float("inf")
    apart = float((mine.double() - its.double()).norm())
    return apart / (float(mine.double().norm()) + least) if apart else 0.0


def quiet() -> None:
    """Ignore the libraries' own deprecation warnings."""
    warnings.simplefilter("ignore")
