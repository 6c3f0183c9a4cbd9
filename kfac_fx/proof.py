"""The registration proof: on one batch, for every structured registration,

    sum over uses of grad_rowsᵀ · rows  ==  the gradient that autograd gives.

It catches a wrong axis, a wrong dilation, a wrong layout and a missed use alike. What fails becomes generic.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kfac_fx.passes import pytree
from kfac_fx.passes.errors import RegistrationError, UntraceableError, table
from kfac_fx.passes.ir import Program, Registration, Use
from kfac_fx.passes.layers import Layer

from .recorder import Recorder, tree_map
from .tap import BothRows, Tap

Gradients = dict[tuple[str, ...], Tensor]
PER_CASE = ("full", "diagonal")
RELATIVE = 1e-3  # right ones agree to about 1e-6 in float32, wrong ones differ by about 1
ROUNDING = 1e-5  # of the largest sum that the rows could make, for gradients that cancel to nothing


class ProofTap(Tap):
    """A tap whose rows may be wrong: it keeps what went wrong instead of raising in the middle of a backward."""

    failure: str | None = None
    cases: int | None = None

    def both_rows(self, registration: Registration, use: Use, layer: Layer) -> BothRows:
        assert registration.matrix is not None, "bug in kfac_fx: a proof of a generic registration"
        both = super().both_rows(registration, use, layer)
        g, o, i = self.matrix
        inputs = i - (registration.matrix.bias is not None)

        def guarded(output_grad: Tensor, input: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            try:
                rows, grad_rows = both(output_grad, input, *tensors)
                self.cases = grad_rows.shape[0]
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                self.failure = f"its rows could not be made: {str(error).splitlines()[0]}"
                return output_grad.new_zeros(1, 1, g, inputs), output_grad.new_zeros(1, 1, g, o)
            return rows, grad_rows

        return guarded


@dataclass(frozen=True)
class Verdict:
    """What the proof found: the program with failures demoted, and the reasons by registration."""

    program: Program
    failed: Mapping[tuple[str, ...], str]
    conclusive: bool = True  # False: the batch has no finite gradients to compare with


def prove(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Verdict:
    """Run the proof. Raises UntraceableError if the graph's outputs are not the model's, RegistrationError under
    `strict` if a registration fails."""
    prover = replace_taps(recorder)
    values = recorder.capture.flatten(args, kwargs)
    compare_outputs(prover, args, kwargs)
    wanted, got, bound = gradients(prover, values)
    if not all(bool(one.isfinite().all()) for one in wanted.values()):
        return Verdict(recorder.program, {}, conclusive=False)
    coarse = max(1.0, 4 * coarsest(recorder, values) / RELATIVE)  # autograd's gradients are rounded to the dtype
    failed: dict[tuple[str, ...], str] = {}
    merged: set[tuple[str, ...]] = set()
    taps = tap_list(prover)
    for one in recorder.program.registrations:
        if one.generic:
            continue
        reason = next((tap.failure for tap in taps[one.parameters] if tap.failure), None)
        if reason is None and one.matrix is not None:
            error = float((got[one.parameters] - wanted[one.parameters]).norm())
            size, rounding = float(wanted[one.parameters].norm()), float(bound[one.parameters]) * ROUNDING
            if not error <= coarse * (RELATIVE * size + rounding):
                apart = f"{error / size:.0%} apart" if size else "autograd's is zero"
                reason = f"the proof failed: rows give another gradient than autograd ({apart})"
        if reason is not None:
            failed[one.parameters] = reason
        elif one.approximation in PER_CASE and any(
            tap.cases != prover.examples(values) for tap in taps[one.parameters]
        ):
            merged.add(one.parameters)
    if failed and recorder.program.options.strict:
        rows = [(", ".join(names), reason) for names, reason in failed.items()]
        raise RegistrationError(f"{len(failed)} registrations failed the proof:\n{table(rows)}")
    return Verdict(demoted(recorder.program, failed, merged), failed)


def coarsest(recorder: Recorder, values: tuple[Any, ...]) -> float:
    """The rounding of the least exact type that takes part: a parameter's, an input's or autocast's."""
    tensors = [*recorder.live_parameters().values(), *(value for value in values if isinstance(value, Tensor))]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    kinds = {tensor.device.type for tensor in tensors}
    dtypes |= {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def replace_taps(recorder: Recorder) -> Recorder:
    needed = {
        one.parameters: ("gradient", "A_diag", "G_diag") for one in recorder.program.registrations if not one.generic
    }
    return Recorder(
        recorder.capture, recorder.program, recorder.model, recorder.loss, needed, backend="eager", make_tap=ProofTap
    )


def tap_list(prover: Recorder) -> dict[tuple[str, ...], list[ProofTap]]:
    taps = iter(list(prover.emitted.taps.children()) if hasattr(prover.emitted, "taps") else [])
    return {one.parameters: [next(taps) for _ in one.uses] for one in prover.program.registrations if not one.generic}


def compare_outputs(prover: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """The graph must compute what the model computes: Python randomness or values kept between calls show here."""
    model, capture = prover.model, prover.capture
    values = capture.flatten(args, kwargs)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = tree_map(copied, (args, dict(kwargs)))  # forward may change its inputs
    with prover.isolated(), torch.no_grad():
        expected = model(*args, **kwargs)
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    got, _ = prover.outputs({}, values)  # isolated too: both start from the same random stream
    for one, other in zip(pytree.leaves(expected), pytree.leaves(got), strict=True):
        if isinstance(one, Tensor) and not same(one, other):
            raise UntraceableError(
                f"{type(model).__name__} computes something else than its graph: outputs differ by "
                f"{float((one - other).abs().max()):.2g}.\nPython randomness, and values kept between calls, are "
                "lost in a capture; compute them with torch, or hand them in as inputs."
            )


def same(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=max(1e-4, 4 * precision(one)), atol=1e-5, equal_nan=True)


def precision(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def gradients(prover: Recorder, values: tuple[Any, ...]) -> tuple[Gradients, Gradients, Gradients]:
    """(autograd's gradients, the rows' gradients, bounds on both) for random cotangents, as matrices."""
    registrations = [one for one in prover.program.registrations if not one.generic]
    with prover.isolated():
        live = {name: value.detach().requires_grad_() for name, value in prover.live_parameters().items()}
        probes = prover.make_probes(prover.examples(values), next(iter(live.values())))
        _, fisher = prover.call(live, prover.copied_buffers(), values, probes)
        generator = torch.Generator().manual_seed(0)
        outputs = [out for out in fisher if out.requires_grad]
        cotangents = [torch.randn(out.shape, generator=generator, dtype=torch.float32).to(out) for out in outputs]
        names = [name for one in registrations for name in one.parameters]
        leaves = [live[name] for name in names] + [probe for one in probes for probe in one.values()]
        grads = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    found = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
    by_name = dict(zip(names, found, strict=False))
    statistics = iter(found[len(names) :])
    wanted: Gradients = {}
    got: Gradients = {}
    bound: Gradients = {}
    for one in registrations:
        assert one.matrix is not None, "bug in kfac_fx: a structured registration without a matrix"
        wanted[one.parameters] = one.matrix.pack(by_name)
        got[one.parameters] = next(statistics)
        bound[one.parameters] = (next(statistics).sum() * next(statistics).sum()).sqrt()
    return wanted, got, bound


def demoted(program: Program, failed: Mapping[tuple[str, ...], str], merged: set[tuple[str, ...]]) -> Program:
    kept: list[Registration] = []
    for one in program.registrations:
        if one.parameters in failed:
            reason = f"{one.layer}: {failed[one.parameters]}"
            kept += [Registration("generic", None, (name,), (), "diagonal", reason) for name in one.parameters]
        elif one.parameters in merged:
            why = f"cases are merged with positions at its output, so not {one.approximation!r}"
            kept.append(replace(one, approximation="kron", reason=why))
        else:
            kept.append(copy.copy(one))
    return program.but(registrations=tuple(kept))
