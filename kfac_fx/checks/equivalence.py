"""Whether a graph is the model: one batch through both, with the same random numbers.

Outputs and gradients must agree, or nothing that is recorded would be true. What forward does beside that, to its
buffers and attributes, a recording need not do; a ride must, since it runs in the model's place.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kfac_fx.linalg.matrices import dense, without_cudnn
from kfac_fx.passes.errors import UntraceableError, fatal, first_line
from kfac_fx.passes.graphs import pytree
from kfac_fx.passes.ir import UNROLLED, Program
from kfac_fx.passes.tracing.attributes import attributes, counts, untouched
from kfac_fx.passes.tracing.substitutes import parameters_kept
from kfac_fx.passes.tracing.watch import custom_functions
from kfac_fx.recording.recorder import Recorder

RELATIVE = 1e-3
Results = tuple[list[Any], dict[str, Tensor | None], dict[str, Tensor]]  # outputs, gradients, buffers


def compare(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises UntraceableError if outputs or gradients differ; buffers that do join the capture's effects."""
    name = type(recorder.model).__name__
    if recorder.capture.assigned:
        refuse_kept(recorder, args, kwargs)
    outputs, gradients, buffers = of_model(recorder, args, kwargs)
    values = recorder.capture.flatten(args, kwargs)
    try:
        its_outputs, its_gradients, its_buffers = of_graph(recorder, values)
    except (TypeError, RuntimeError, ValueError) as error:
        if fatal(error):
            raise
        raise UntraceableError(
            f"the graph of {name} does not run on these inputs: {first_line(error)}\n"
            "Give kfac_fx.compile example inputs, so that torch.export captures it."
        ) from error
    pairs, rounding = zip(outputs, its_outputs, strict=True), coarsest(recorder, values)
    unlike = [(one, other) for one, other in pairs if isinstance(one, Tensor) and not same(one, other, rounding)]
    apart = [difference(one, other) for one, other in unlike]
    if apart:
        how = (
            "than its graph"
            if recorder.whole
            else "at a second forward, on the same inputs with the same random numbers"
        )
        raise UntraceableError(
            f"{name} computes something else {how}: outputs differ by {max(apart):.2g}.\n"
            "Clocks, randomness from outside of torch, and what is kept outside of the model are lost in a capture; "
            "compute them with torch, or hand them in as inputs."
        )
    coarse = max(RELATIVE, 4 * rounding)
    norms = [float(one.norm()) for one in gradients.values() if one is not None]
    largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    wrong = [
        key for key, one in gradients.items() if not close(one, its_gradients[key], coarse, 1e-2 * coarse * largest)
    ]
    if wrong:
        raise UntraceableError(
            f"{name} has other gradients than its graph, in {', '.join(wrong)}.\n"
            "Hooks that change gradients, and backward functions of one's own, are lost in a capture; write them with "
            "ordinary operations, or register them with torch.library.custom_op and register_autograd."
        )
    updated = [f"updates the buffer {key}" for key, one in buffers.items() if not same(one, its_buffers.get(key))]
    if updated:
        effects = dict.fromkeys((*recorder.capture.effects, *updated))
        recorder.capture = dataclasses.replace(recorder.capture, effects=tuple(effects))


def refuse_kept(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises UntraceableError if a second forward is another one than the first, which a graph would repeat."""
    model, name, kept = recorder.model, type(recorder.model).__name__, recorder.capture.assigned
    outputs, numbers = [], []
    with untouched(model), parameters_kept(model), custom_functions(), written_out(recorder.program):
        for _ in range(2):
            with recorder.isolated(), buffers_kept(model):
                given, named = pytree.mapped(copied, (args, dict(kwargs)))
                outputs.append(detached(pytree.leaves(model(*given, **named))))
            held = dict(attributes(model))
            numbers.append({one: counts(held.get(one)) for one in kept})
    first, second = numbers
    if counted := [one for one in kept if first[one] != second[one]]:
        raise UntraceableError(
            f"{name} counts in {', '.join(counted)} at every forward, of which a graph would keep one number.\n"
            "Count outside of the model, and hand the number in as a tensor."
        )
    pairs = zip(*outputs, strict=True)
    if any(isinstance(one, Tensor) and not same(one, other) for one, other in pairs):
        raise UntraceableError(
            f"{name} keeps {', '.join(kept)} between forwards, and computes something else with it; a graph would "
            "repeat the first forward.\nHand in what is kept as an input, or keep it in a buffer."
        )


@contextmanager
def buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """The buffers, and what is in them, as they were."""
    held = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffers, own in held:
            buffers.update(own)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def of_model(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Results:
    model = recorder.model
    args, kwargs = pytree.mapped(copied, (args, dict(kwargs)))  # forward may change its inputs
    # Reentrant checkpoints have no autograd.grad, and some devices' own kernels other random numbers.
    with (
        recorder.isolated(),
        untouched(model),
        buffers_kept(model),
        parameters_kept(model) as written,
        custom_functions(),
        written_out(recorder.program),
    ):
        outputs = pytree.leaves(model(*args, **kwargs))
        after = {name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
        found = gradients(outputs, recorder.program.parameters)
    if written and recorder.whole:
        raise UntraceableError(
            f"{type(model).__name__} writes into its parameters {', '.join(written)} in forward, which a graph would "
            "do again at every recording.\n"
            "Write into them after optimizer.step(), or keep what follows them in buffers."
        )
    return detached(outputs), found, after


def written_out(program: Program) -> AbstractContextManager[Any]:
    """Recurrent layers without cuDNN, which draws the dropout between them from a stream of its own and rounds to TF32;
    without it they compute what the graph has written out for them."""
    unrolled = any(UNROLLED in node.meta for node in program.graph.nodes)
    return without_cudnn() if unrolled else nullcontext()


def of_graph(recorder: Recorder, values: tuple[Any, ...]) -> Results:
    live = recorder.live_parameters()
    live = {name: value.detach().requires_grad_(value.requires_grad) for name, value in live.items()}
    buffers = recorder.copied_buffers()
    with recorder.isolated():
        output, _ = recorder.call(live, buffers, values, [None] * len(recorder.program.registrations))
        outputs = pytree.leaves(recorder.capture.unflatten(output))
        found = gradients(outputs, {name: live[name] for name in recorder.program.parameters if name in live})
    by_buffer = {id(recorder.model.get_buffer(name)): value for name, value in buffers.items()}  # under every alias
    held = recorder.model.named_buffers(remove_duplicate=False)
    after = {name: by_buffer.get(id(buffer), buffer) for name, buffer in held}
    return detached(outputs), {name: found.get(name) for name in recorder.program.parameters}, after


def coarsest(recorder: Recorder, values: tuple[Any, ...]) -> float:
    """The rounding of the least exact type that takes part: a parameter's, an input's or autocast's."""
    tensors = [
        *recorder.live_parameters().values(),
        *(leaf for leaf in pytree.leaves(values) if isinstance(leaf, Tensor)),
    ]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    kinds = {tensor.device.type for tensor in tensors}
    dtypes |= {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    dtypes |= recorder.cast_to()
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def gradients(outputs: list[Any], parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """With random cotangents, the same at every call."""
    roots = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad and not one.is_complex()]
    if not roots or not parameters:
        return dict.fromkeys(parameters)
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(one.shape, generator=generator, dtype=torch.float32).to(one) for one in roots]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # the user's, which are welcome
        found = torch.autograd.grad(roots, list(parameters.values()), cotangents, allow_unused=True)
    return {name: None if one is None else dense(one) for name, one in zip(parameters, found, strict=True)}


def detached(values: list[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, Tensor) else value for value in values]


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def same(one: Tensor, other: Any, rounding: float = 0.0) -> bool:
    """Up to the rounding of the values' own type, or a coarser one that took part, at the size of the largest."""
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    coarse = 4 * max(rounding, torch.finfo(one.dtype).eps)
    largest = float(one.detach().abs().nan_to_num(0.0, 0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=max(1e-4, coarse), atol=max(1e-5, coarse * largest), equal_nan=True)


def difference(one: Tensor, other: Any) -> float:
    comparable = isinstance(other, Tensor) and one.shape == other.shape
    return float((one.double() - other.double()).abs().max()) if comparable else float("inf")


def close(one: Tensor | None, other: Tensor | None, relative: float, absolute: float) -> bool:
    """A gradient that is not finite is compared with nothing."""
    if one is None and other is None:
        return True
    mine = torch.zeros_like(other) if one is None else one  # type: ignore[arg-type]  # not both are None
    its = torch.zeros_like(mine) if other is None else other
    if not bool(mine.isfinite().all() & its.isfinite().all()):
        return True
    return float((mine - its).norm()) <= relative * float(mine.norm()) + absolute
