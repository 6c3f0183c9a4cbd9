"""Whether a graph computes the same as the model: at its capture, and later in its recordings.

**At its capture** (`check_equivalence`) one batch goes through both, with the same random numbers. Outputs and
gradients must agree, because statistics of another function would be wrong. The effects of forward on buffers and
attributes may be missing in a recording, which leaves no trace; they rule out recording during training.

**Later** (`OutputWatch`) the model may compute something else, because forward reads what nothing watches: a file, a
clock, the state of a library. So the outputs of a recording are compared with those of the model's own forward on the
same inputs, parameters, buffers and random numbers, on the device. Where recordings have no such forward beside them,
`OutputWatch.due` says which of them are compared. Both compute the same operations, so they are equal bit for bit but
for recurrent layers, whose graph is one of steps. Outputs agree if no difference is above √ε of the largest element,
with the ε of the coarsest precision that takes part: half of the digits. Rounding in a forward stays far below, and a
function that is as close has statistics that are as close. A smaller difference is not reported until it grows past
this bound. Fillings such as masked logits are no largest elements.

**Evaluations** of a model at other parameters, without statistics and derivatives, as the checks of a step need them.

A recording runs the graph with the steps of recurrent layers written out (`passes.unroll`). An evaluation runs the same
capture with torch's kernels for these layers (`passes.unroll`), which takes a fraction of the operations. Both are one
function. The first evaluation of a capture compares their outputs, those of the Fisher included; the host waits. Where
they differ, or a kernel does not run, the steps stay written out, and the report says so.

torch draws the same dropout between recurrent layers from the same random stream, but cuDNN has a stream of its own. So
cuDNN is off where there is such dropout. Where the lengths of packed sequences are on an accelerator, the host would
have to read them, so the steps stay written out.

A part of a batch has the outputs of the batch where those of an example do not depend on the others
(`difference_of_part`).

A product with the Jacobian needs forward-mode derivatives, which not all kernels have. So only `evaluated` runs
them, and `BagsByLookups` computes bags of embeddings by operations that have such derivatives.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kfac_fx.linalg.matrices import (
    HostCopy,
    dense,
    full_precision,
    is_differentiable,
    strided_parts,
    without_cudnn,
)
from kfac_fx.passes import results
from kfac_fx.passes.complex_parameters import original
from kfac_fx.passes.errors import ModelChangedError, UntraceableError, fatal, first_line, with_users_steps
from kfac_fx.passes.ir import Program
from kfac_fx.passes.matrix import real_numbers
from kfac_fx.passes.pipeline import EVALUATED, run
from kfac_fx.passes.torch_private import class_of, has_hooks, pytree
from kfac_fx.passes.tracing.calls import call_with, map_tensors
from kfac_fx.passes.tracing.effects import (
    OfOneRun,
    Trace,
    attributes,
    buffers_kept,
    counts,
    model_restored,
    parameters_kept,
    untouched,
)
from kfac_fx.passes.tracing.functions import PLAIN_FUNCTIONS
from kfac_fx.passes.tracing.settings import ForwardSettings
from kfac_fx.passes.tracing.signature import copy_with_strides, input_names, named_arguments, objects_kept, tensors_in
from kfac_fx.passes.tracing.substitutes import EverywhereElse, custom_functions
from kfac_fx.passes.unroll import draws_noise, lengths_of, recurrent_stacks
from kfac_fx.recording.emitted import EmittedGraph, RunOutputs
from kfac_fx.recording.model_checks import DOES_NOT_RUN, ConstantDerivatives, place_of_own, what_to_correct
from kfac_fx.recording.recorder import Recorder

GRADIENT_TOLERANCE = 1e-3  # relative
MOST_ROUNDING = 0.1  # relative, of gradients that rounding changes
COMPARISON_INTERVAL = 1000  # recordings between two comparisons, after those with numbers 1, 2, 4, 8, ...
MOST_ELEMENTS = 1 << 18  # the most elements of an output that are compared, evenly spread
EXTREME = 1e3  # elements that are so many times larger than the median are fillings, such as masked logits
HOOKED = (
    "hooks of parameters change the gradients of {}, which are right without them: the Fisher is that of the model, "
    "and a step is made of the gradients behind the hooks. A step of a Kronecker block mixes the elements of a "
    "gradient, so elements whose gradient a hook sets to zero move, too; those of a diagonal block stay: "
    "approximations={}"
)
UNSTABLE = (
    "gradients of the model differ from those of its graph by more than rounding. They also change by {} if every "
    "parameter is rounded once more, so the model is too sensitive to rounding to be compared in this precision. To "
    "compare it, compile it in float64"
)
MADE_BEFORE = (
    "{} computes with tensors that were made from {} before forward, such as an attribute self.wt = self.w.t() of "
    "__init__, and a graph has these for constants.\nMake them in forward."
)
WITHOUT_INPUTS = "Give kfac_fx.compile example inputs, so that torch.export captures it."
REVERSIBLE = (
    "A recording runs on other tensors than the parameters, and a backward of an autograd.Function that runs modules "
    "again, as those of reversible layers and of adjoint solvers do, finds the parameters in them. Say what the "
    "Function computes: kfac_fx.plain_function(MyFunction, lambda *arguments: ...). Or let autograd take the gradient, "
    "as with odeint for the odeint_adjoint of torchdiffeq, and adjoint=False for torchcde and torchsde."
)
Results = tuple[list[Any], dict[str, Tensor | None], dict[str, Tensor]]  # outputs, gradients, buffers


def check_equivalence(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Compare outputs and gradients; buffers that differ join the effects of the capture.

    Returns what the user is to know of hooks of the parameters, in sentences.

    Raises UntraceableError if outputs or gradients differ.
    """
    name = class_of(recorder.model).__name__
    if recorder.capture.assigned:
        refuse_state(recorder, args, kwargs)
    copied = copies(args, kwargs)
    with objects_kept(dict(named_arguments(recorder.model, args, kwargs))) as changed:
        outputs, gradients, buffers = results_of_model(recorder, *copied)
    effects = changes_outside(recorder, args, kwargs, outputs) + inputs_written(recorder, (args, kwargs), copied)
    effects += [OfOneRun(f"changes its input {argument}") for argument in changed]
    del copied  # a batch may be larger than the model
    values = recorder.capture.flatten(args, kwargs)
    try:
        graph_outputs, graph_gradients, graph_buffers = results_of_graph(recorder, values)
    except (TypeError, RuntimeError, ValueError) as error:
        if fatal(error):
            raise
        raise UntraceableError(
            f"the graph of {name} does not run on these inputs: {first_line(error)}\n"
            f"{REVERSIBLE if is_exported(recorder) else WITHOUT_INPUTS}"
        ) from error
    except AttributeError as error:
        refuse_attribute_of_parameter(recorder, error)
        raise
    rounding = coarsest_rounding(recorder, values)
    if differences := [
        difference(output, graph_output)
        for output, graph_output in zip(outputs, graph_outputs, strict=True)
        if isinstance(output, Tensor) and not equal_up_to_rounding(output, graph_output, rounding)
    ]:
        what = (
            f"{name} computes something else than its graph"
            if recorder.whole
            else f"{name} computes something else in a second forward pass, with the same inputs and random numbers"
        )
        advice = (
            "A capture does not include clocks, random numbers from outside of torch, or state outside of the model. "
            "Compute these with torch, or pass them as inputs."
        )
        if not recorder.whole and PLAIN_FUNCTIONS:
            advice += f" Or correct what kfac_fx.plain_function declares for {', '.join(PLAIN_FUNCTIONS)}."
        raise UntraceableError(f"{what}: outputs differ by {max(differences):.2g}.\n{advice}")
    if not recorder.whole:
        refuse_other_without_gradients(recorder, values, graph_outputs, rounding)
    tolerance = max(GRADIENT_TOLERANCE, 4 * rounding)
    norms = [float(gradient.norm()) for gradient in gradients.values() if gradient is not None]
    least = 1e-2 * tolerance * max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    other = [key for key, grad in gradients.items() if not close(grad, graph_gradients[key], tolerance, least)]
    if made_before := [key for key in other if graph_gradients[key] is None]:
        raise UntraceableError(MADE_BEFORE.format(name, ", ".join(made_before)))
    hooked = [key for key in other if has_hooks(original(recorder.program.parameters[key]))]
    unhooked = gradients_without_hooks(recorder, *copies(args, kwargs)) if other else {}
    wrong = [key for key in other if not close(unhooked[key], graph_gradients[key], tolerance, least)]
    told = HOOKED.format(", ".join(hooked), f"{{{hooked[0]!r}: 'diagonal'}}") if hooked and not wrong else None
    if elsewhere := [key for key in other if key not in (*hooked, *wrong)]:
        raise UntraceableError(
            f"the gradients of {name} for {', '.join(elsewhere)} are others where it runs on copies of its parameters."
            f"\n{REVERSIBLE}"
        )
    if wrong:
        rounded = gradients_without_hooks(recorder, *copies(args, kwargs), rounded=True)
        share = max(relative_difference(unhooked[key], rounded[key]) for key in wrong)
        most = min(4 * share, MOST_ROUNDING)
        wrong = [key for key in wrong if not close(unhooked[key], graph_gradients[key], most, least)]
        told = UNSTABLE.format(f"{share:.1%}")
    if wrong:
        raise UntraceableError(
            f"{name} has other gradients than its graph, in {', '.join(wrong)}.\n"
            "A capture does not include hooks of modules and activations that change gradients, nor custom backward "
            "functions. Use ordinary operations, or torch.library.custom_op with register_autograd."
        )
    effects += [
        f"updates the buffer {key}" for key, value in buffers.items()
        if not equal_up_to_rounding(value, graph_buffers.get(key))
    ]  # fmt: skip
    if effects:
        every = dict.fromkeys((*recorder.capture.effects, *effects))
        recorder.emitted.capture = dataclasses.replace(recorder.capture, effects=tuple(every))
    return [] if told is None else [told]


def is_exported(recorder: Recorder) -> bool:
    """Whether example inputs were given: torch.export knows the inputs of its graphs."""
    return not recorder.whole or any("val" in node.meta for node in recorder.program.inputs)


def refuse_state(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises UntraceableError if a second forward differs from the first, which a graph would repeat."""
    model, name, assigned = recorder.model, class_of(recorder.model).__name__, recorder.capture.assigned
    outputs, numbers = [], []
    kept = objects_kept({"": (args, kwargs)})
    with kept, untouched(model), custom_functions(), as_unrolled(recorder.program):
        for _ in range(2):
            with recorder.emitted.isolated(), parameters_kept(model), buffers_kept(model):
                copied_args, copied_kwargs = copies(args, kwargs)
                outputs.append(detached(results.tree_leaves(model(*copied_args, **copied_kwargs))))
            values = dict(attributes(model))
            numbers.append({attribute: counts(values.get(attribute)) for attribute in assigned})
    first, second = numbers
    if counters := [attribute for attribute in assigned if first[attribute] != second[attribute]]:
        raise UntraceableError(
            f"{name} updates the Python counter(s) {', '.join(counters)} in every forward pass. A captured graph would "
            "keep the first value.\nMove the counter out of the model and pass it as a tensor."
        )
    pairs = zip(*outputs, strict=True)
    if any(isinstance(value, Tensor) and not equal_up_to_rounding(value, other) for value, other in pairs):
        raise UntraceableError(
            f"{name} keeps {', '.join(assigned)} between forward passes, and its outputs depend on it. A captured "
            "graph would repeat the first forward pass.\nPass this state as an input, or keep it in a buffer."
        )


def refuse_attribute_of_parameter(recorder: Recorder, error: AttributeError) -> None:
    """Raises UntraceableError if the attribute that a graph's tensor lacks is one that a parameter has."""
    parameters = recorder.model.named_parameters()
    if names := [name for name, parameter in parameters if error.name in vars(parameter)]:
        raise UntraceableError(
            f"{class_of(recorder.model).__name__} reads the attribute {error.name!r} of a parameter in forward or in a "
            f"backward of its own ({', '.join(names)} {'has' if len(names) == 1 else 'have'} it). A recording runs on "
            "other tensors than the parameters, which have no attributes of the user's.\n"
            "Keep the value in a buffer or an attribute of the module, and let autograd accumulate gradients in .grad."
        ) from error


def changes_outside(
    recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: list[Any]
) -> list[str]:
    """The effects of forward on what is outside of the model, which are put back. Its values are no settings any more.

    outputs: of the forward that was just run. A change that only it made, such as a cache that it filled, is no
        effect.

    Raises UntraceableError if the outputs of another forward differ because of them.
    """
    model, settings = recorder.model, recorder.settings
    if settings is None or settings.hold():
        return []
    changed, again = settings.changed(), settings.anew()
    copied_args, copied_kwargs = copies(args, kwargs)
    with objects_kept({"": (args, kwargs)}), model_kept(recorder):
        others = detached(results.tree_leaves(model(*copied_args, **copied_kwargs)))
    repeated = again.changed()
    settings.put_back()
    settings.leave_out((*changed, *repeated))
    pairs = zip(outputs, others, strict=True)
    if repeated and any(isinstance(value, Tensor) and not equal_up_to_rounding(value, other) for value, other in pairs):
        raise UntraceableError(
            f"{class_of(model).__name__} changes {', '.join(repeated)} in every forward pass, and its outputs depend "
            "on it. A captured graph would repeat the first forward pass.\nPass this state as an input, or keep it "
            "in a buffer."
        )
    return [f"changes {name}" for name in repeated]


def inputs_written(
    recorder: Recorder, inputs: tuple[Any, Mapping[str, Any]], after: tuple[Any, Mapping[str, Any]]
) -> list[str]:
    """The effects of forward on its tensors and containers. after: the copies that it was given."""
    specs, others = (
        {name: pytree.tree_flatten(argument)[1] for name, argument in named_arguments(recorder.model, *inputs_now)}
        for inputs_now in (inputs, after)
    )
    if specs != others:
        return [OfOneRun(f"changes its input {name}") for name in specs if specs[name] != others[name]]
    leaves = zip(input_names(recorder.model, *inputs), tensors_in(*inputs), tensors_in(*after), strict=True)
    written = (name for name, leaf, copy in leaves if not equal_up_to_rounding(leaf, copy))
    return [OfOneRun(f"writes into its input {name}") for name in written]


@contextmanager
def model_kept(recorder: Recorder) -> Iterator[Trace]:
    """Inside, the model itself runs as it is recorded, and keeps what it was."""
    with (
        recorder.emitted.isolated(),
        model_restored(recorder.model) as trace,
        as_unrolled(recorder.program),  # some devices' own kernels draw other random numbers
        torch.compiler.set_stance("force_eager"),  # torch.compile would compile what watches the model, too
    ):
        yield trace


def results_of_model(recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Results:
    """args, kwargs: copies, into which forward may write."""
    model, derivatives = recorder.model, ConstantDerivatives()
    with model_kept(recorder) as trace:
        try:
            with derivatives:
                outputs = results.tree_leaves(model(*args, **kwargs))
        except Exception as error:
            if not fatal(error):
                if (told := derivatives.told(error)) is not None:
                    error.add_note(told)
                error.add_note(
                    f"{class_of(model).__name__} {DOES_NOT_RUN}: the error is of its own forward, which runs here to "
                    "be compared with its graph."
                )
                for line in (*place_of_own(model, error), what_to_correct(model, error)):
                    error.add_note(line)
                with_users_steps(error)
            raise
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
        try:
            gradients = every_gradient(outputs, {n: original(p) for n, p in recorder.program.parameters.items()})
        except RuntimeError as error:
            if (told := derivatives.told(error)) is not None:
                error.add_note(told)
            raise
    written = [name for name in trace.written if name not in recorder.emitted.buffer_names]
    if written and recorder.whole:
        raise UntraceableError(
            f"{class_of(model).__name__} writes into its parameters {', '.join(written)} in forward, which a "
            "graph would repeat in every recording.\n"
            "Write into them after optimizer.step(), or use buffers for values that follow the parameters."
        )
    return detached(outputs), gradients, buffers


def gradients_without_hooks(
    recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any], rounded: bool = False
) -> dict[str, Tensor | None]:
    """The model's gradients at tensors that are as its parameters and have none of their hooks.

    args, kwargs: copies, into which forward may write. rounded: the tensors are next to the parameters, as far as one
        rounding goes.
    """
    parameters = {name: original(parameter) for name, parameter in recorder.program.parameters.items()}
    values = {name: value.detach() for name, value in parameters.items()}
    if rounded:
        values = {name: one_rounding_away(value) for name, value in values.items()}
    leaves = {name: value.requires_grad_(parameters[name].requires_grad) for name, value in values.items()}
    with model_kept(recorder), EverywhereElse(parameters.values(), leaves.values()):
        outputs = results.tree_leaves(call_with(recorder.model, leaves, args, kwargs))
        return gradients_by_name(outputs, leaves)


def as_unrolled(program: Program) -> AbstractContextManager[Any]:
    """Without cuDNN if recurrent layers are unrolled in the graph.

    cuDNN draws the dropout between recurrent layers from a random stream of its own and rounds to TF32.
    """
    return without_cudnn() if program.unrolled else nullcontext()


def results_of_graph(recorder: Recorder, values: tuple[Any, ...]) -> Results:
    live = recorder.live_parameters()
    live = {name: value.detach().requires_grad_(value.requires_grad) for name, value in live.items()}
    buffers = recorder.copied_buffers()
    names = recorder.program.parameters
    with recorder.emitted.isolated():
        output, _ = recorder.run_without_taps(live, buffers, values)
        outputs = results.tree_leaves(recorder.capture.unflatten(output))
        gradients = gradients_by_name(outputs, {name: live[name] for name in names if name in live})
    live_buffers = recorder.live_buffers()
    by_buffer = {id(live_buffers[name]): value for name, value in buffers.items()}  # under every alias
    every_name = recorder.model.named_buffers(remove_duplicate=False)
    after = {name: by_buffer.get(id(buffer), buffer) for name, buffer in every_name}
    return detached(outputs), {name: gradients.get(name) for name in names}, after


def coarsest_rounding(recorder: Recorder, values: tuple[Any, ...], around: bool = True) -> float:
    """The rounding of the least exact dtype that takes part: a parameter's, an input's or autocast's.

    around: count autocast that is on now, around the forward, and that of a graph.
    """
    tensors = [*recorder.model.parameters(), *(leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    devices = {tensor.device.type for tensor in tensors}
    enabled = (device for device in devices if around and torch.is_autocast_enabled(device))
    dtypes |= {torch.get_autocast_dtype(device) for device in enabled}
    dtypes |= recorder.emitted.autocast_dtypes() if around or not recorder.whole else set()
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def refuse_other_without_gradients(
    recorder: Recorder, values: tuple[Any, ...], outputs: list[Any], rounding: float
) -> None:
    """Raises UntraceableError if Python between the captured submodules computes other outputs where no parameter
    needs a gradient. A check of a step evaluates the loss with such parameters."""
    constants = {name: value.detach() for name, value in recorder.live_parameters().items()}
    try:
        with recorder.emitted.isolated():
            output, _ = recorder.run_without_taps(constants, recorder.copied_buffers(), values)
    except RuntimeError as error:  # forward itself differentiates by its parameters; a check would raise it again
        if fatal(error):
            raise
        return
    others = results.tree_leaves(recorder.capture.unflatten(output))
    same = len(outputs) == len(others) and all(
        not isinstance(value, Tensor) or equal_up_to_rounding(value, other, rounding)
        for value, other in zip(outputs, others, strict=True)
    )
    if not same:
        name = class_of(recorder.model).__name__
        raise UntraceableError(
            f"{name} computes something else where its parameters need no gradients, as in the forwards that check a "
            f"step of KFAC. {name} is captured in submodules, between which it may ask whether a tensor needs a "
            "gradient (requires_grad, is_leaf or grad_fn).\n"
            "Let it decide by self.training, by an attribute of its own, or by an argument."
        )


def random_cotangents(outputs: Mapping[int, Tensor]) -> list[Tensor]:
    """The same numbers at every call for the same place of an output, whatever other outputs there are."""
    generator = torch.Generator()
    return [
        torch.randn(out.shape, generator=generator.manual_seed(place), dtype=torch.float32).to(out)
        for place, out in outputs.items()
    ]


def gradients_by_name(outputs: list[Any], parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Gradients for random cotangents, of real and imaginary parts.

    An output may require a gradient in the model alone, such as an input that forward gives back.
    """
    is_root = (isinstance(out, Tensor) and out.requires_grad for out in outputs)
    roots = {place: real_numbers(outputs[place]) for place, root in enumerate(is_root) if root}
    if not roots or not parameters:
        return dict.fromkeys(parameters)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # the user's, which are welcome
        grads = torch.autograd.grad(
            list(roots.values()), list(parameters.values()), random_cotangents(roots), allow_unused=True
        )
    real = [None if grad is None else real_numbers(dense(grad)) for grad in grads]
    return dict(zip(parameters, real, strict=True))


def every_gradient(outputs: list[Any], parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """`gradients_by_name`, and what a backward adds to `.grad` on the way, as that of a reversible layer does."""
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.grad = None
        gradients = gradients_by_name(outputs, parameters)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                added, gradient = real_numbers(dense(parameter.grad)), gradients[name]
                gradients[name] = added if gradient is None else gradient + added
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
    return gradients


def detached(values: list[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, Tensor) else value for value in values]


def copies(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with copies of all tensors."""
    if all(type(value) is Tensor for value in (*args, *kwargs.values())):  # a walk takes longer than most copies
        return tuple(map(copy_with_strides, args)), {name: copy_with_strides(value) for name, value in kwargs.items()}
    copied: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(copy_with_strides, (args, dict(kwargs)))
    return copied


def equal_up_to_rounding(value: Tensor, other: Any, rounding: float = 0.0) -> bool:
    """Equal up to the rounding of their dtype, or a coarser one that took part, at the size of the largest element."""
    if not isinstance(other, Tensor) or value.shape != other.shape or value.layout != other.layout:
        return False
    if value.layout is not torch.strided:
        parts = zip(strided_parts(value), strided_parts(other), strict=True)
        return all(equal_up_to_rounding(*part, rounding) for part in parts)
    if value.is_complex() and other.dtype is value.dtype:
        value, other = real_numbers(value), real_numbers(other)
    if not value.is_floating_point():
        return torch.equal(value, other)
    if value.dtype.itemsize == 1:  # torch computes nothing in 8 bits
        value, other, rounding = value.float(), other.float(), max(rounding, torch.finfo(value.dtype).eps)
    coarse = 4 * max(rounding, torch.finfo(value.dtype).eps)
    largest = float(value.detach().abs().nan_to_num(0.0, 0.0).max()) if value.numel() else 0.0
    return torch.allclose(value, other, rtol=max(1e-4, coarse), atol=max(1e-5, coarse * largest), equal_nan=True)


def difference(value: Tensor, other: Any) -> float:
    comparable = isinstance(other, Tensor) and value.shape == other.shape
    return float((value.double() - other.double()).abs().max()) if comparable else float("inf")


def close(value: Tensor | None, other: Tensor | None, relative: float, absolute: float) -> bool:
    """Whether two gradients agree; None is zero, and gradients that are not finite agree with all."""
    if value is None and other is None:
        return True
    value = torch.zeros_like(other) if value is None else value  # type: ignore[arg-type]  # not both are None
    other = torch.zeros_like(value) if other is None else other
    if not bool(value.isfinite().all() & other.isfinite().all()):
        return True
    return float((value - other).norm()) <= relative * float(value.norm()) + absolute


def relative_difference(value: Tensor | None, other: Tensor | None) -> float:
    """|value - other| / |value|; 0 if one of them is None, zero, or not finite."""
    if value is None or other is None or not bool(value.isfinite().all() & other.isfinite().all()):
        return 0.0
    norm = float(value.norm())
    return float((value - other).norm()) / norm if norm else 0.0


def one_rounding_away(value: Tensor) -> Tensor:
    """Every other element, multiplied with 1 + ε of its dtype."""
    if not (value.is_floating_point() or value.is_complex()):
        return value.clone()
    factor = 1.0 + torch.finfo(value.dtype).eps * (torch.arange(value.numel(), device=value.device) % 2)
    return value * factor.to(value.dtype).reshape(value.shape)


# --- later, by outputs alone ------------------------------------------------------------------------------------------


def sampled_elements(leaves: Sequence[Any]) -> list[Tensor]:
    """Elements of the outputs of a forward, which take little memory. Outputs that are no numbers are left out.

    A single number beside others is left out, too: a sum may cancel, and its relative error says little then.
    """
    tensors = [dense(leaf.detach()) for leaf in leaves if is_differentiable(leaf) and not leaf.is_nested]
    several = [tensor for tensor in tensors if tensor.numel() > 1]
    return [taken(tensor) for tensor in several or tensors]


def taken(tensor: Tensor) -> Tensor:
    step = math.ceil(tensor.numel() / MOST_ELEMENTS) | 1  # odd, so that it is in step with few sizes
    flat = tensor.reshape(-1)
    return (flat if step == 1 else flat[::step]).clone()


def are_equal(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two samples have the same numbers of the same precision, none of them NaN. Waits for the device."""
    same = len(outputs) == len(others)
    return same and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(outputs, others, strict=True))


def differ(outputs: Sequence[Tensor], others: Sequence[Tensor], rounding: float) -> Tensor:
    """Whether two samples are of different functions; a 0-dim bool on their device."""
    device = next((tensor.device for tensor in (*outputs, *others)), torch.device("cpu"))
    if [tensor.shape for tensor in outputs] != [tensor.shape for tensor in others]:
        return torch.ones((), dtype=torch.bool, device=device)
    result = torch.zeros((), dtype=torch.bool, device=device)
    for output, other in zip(outputs, others, strict=True):
        if not output.numel() or (device.type == "cpu" and output.dtype == other.dtype and torch.equal(output, other)):
            continue
        dtype = torch.promote_types(torch.promote_types(output.dtype, other.dtype), torch.float32)
        left, right = output.to(dtype), other.to(dtype)
        coarsest = max(rounding, torch.finfo(output.dtype).eps, torch.finfo(other.dtype).eps)
        finite = left.isfinite() & right.isfinite()
        size = torch.where(finite, right, 0).abs()
        difference = torch.where(finite, left - right, 0).abs()
        usual = EXTREME * size.median()
        largest = torch.where((size <= usual) | (usual == 0), size, 0).max()
        apart = difference > math.sqrt(coarsest) * torch.maximum(size, largest)
        result = result | (apart | (left.isfinite() != right.isfinite())).any()
    return result.to(device)


def differs_from_model(
    recorder: Recorder,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    values: Any,
    recorded: Sequence[Tensor] | None = None,
) -> Tensor:
    """Whether the graph and the model compute different outputs now, in forwards that leave no trace.

    values: the inputs, as `capture.flatten` returns them. recorded: a sample of the outputs of a recording with the
        kernels of the model's own forward (`CompiledModule.repeats_recordings`); None: the graph runs.
    """
    model = recorder.model
    copied_args, copied_kwargs = copies(args, kwargs)
    outside = outside_now(recorder)
    with full_precision(everything=recorded is None), as_unrolled(recorder.program):
        with objects_kept({"": (args, kwargs)}), model_kept(recorder):
            of_model = sampled_elements(results.tree_leaves(model(*copied_args, **copied_kwargs)))
        outside.put_back()
        if recorded is None:
            output, _ = recorder.outputs({}, values)
            recorded = sampled_elements(results.tree_leaves(output))
    if all(tensor.device.type == "cpu" for tensor in (*recorded, *of_model)) and are_equal(recorded, of_model):
        return torch.zeros((), dtype=torch.bool)
    return differ(recorded, of_model, coarsest_rounding(recorder, values))


def outside_now(recorder: Recorder) -> ForwardSettings:
    """The present settings of all that forward reads from outside, to be put back behind a forward. They are those of a
    capture if these hold, unless forward itself changes some of them."""
    settings = recorder.settings
    if settings is not None and settings.whole and not settings.without and settings.hold():
        return settings
    return ForwardSettings(recorder.model, recorder.capture.outside, everything=True)


class OutputWatch:
    """The comparisons of one estimator.

    Attributes:
        recordings: the number of those that were asked about, see `due`.
        pending: whether one since the last step differed, 0-dim on the device; None if there was none.
    """

    def __init__(self) -> None:
        self.recordings = 0
        self.pending: Tensor | None = None
        self.failed: Tensor | None = None  # whether any differed that the host does not know of, on the device
        self.told: HostCopy | None = None

    def due(self) -> bool:
        """Whether this recording is compared: those with the numbers 1, 2, 4, 8, ..., and every 1000th."""
        self.recordings += 1
        return self.recordings & (self.recordings - 1) == 0 or self.recordings % COMPARISON_INTERVAL == 0

    def add(self, differs: Tensor) -> None:
        self.pending = differs if self.pending is None else self.pending | differs

    def check(self, model: str) -> None:
        """Raises ModelChangedError if an earlier comparison is known to have failed. The host does not wait."""
        if self.told is not None and self.told.arrived:
            failed, self.told = self.told.value, None
            self.failed = None if failed else self.failed
            refuse_changed_model(failed, model)

    def take(self, model: str, differs: Tensor) -> Tensor:
        """Whether what was recorded since the last step may be used, 0-dim on the device.

        On a CPU, which needs not wait, raises ModelChangedError if it may not. An accelerator tells it to `check`.
        """
        self.pending = None
        if differs.device.type == "cpu":
            refuse_changed_model(differs, model)
            return ~differs
        self.failed = differs if self.failed is None else self.failed | differs
        if self.told is None:
            self.told = HostCopy(self.failed)
        return ~differs


def refuse_changed_model(differs: Tensor, model: str) -> None:
    """Raises ModelChangedError if a 0-dim tensor on the host is true."""
    if differs:
        raise ModelChangedError(
            f"{model} computes other outputs now than its captured graph, on the same inputs and random numbers. "
            "Nothing of this batch was used.\nForward reads something that changed and that cannot be watched, such as "
            "a file, a clock, another process or the state of a library. Pass it to forward as an argument, or keep it "
            "in a buffer or an attribute of the model; or compile the model again after every change."
        )


def evaluated(recorder: Recorder, parameters: Mapping[str, Tensor], values: Any) -> RunOutputs:
    """As `recorder.outputs`, for values that nothing differentiates.

    values: the inputs, as `capture.flatten` returns them.
    """
    if not recorder.looked_for_kernels:
        recorder.looked_for_kernels = True
        if (kernels := emitted_with_kernels(recorder)) is not None:
            recorder.kernels_reason = against(kernels, recorder, parameters, values)
            recorder.kernels = kernels if recorder.kernels_reason is None else None
    if recorder.kernels is None:
        return recorder.outputs(parameters, values, taps=False)
    return by_kernels(recorder.kernels, recorder, parameters, values)


def emitted_with_kernels(recorder: Recorder) -> EmittedGraph | None:
    """The capture with torch's kernels; None if it has no stack of recurrent layers."""
    captured = recorder.capture.program
    stacks = recurrent_stacks(captured.graph) if recorder.whole else []
    if not stacks or recorder.by_hand or any(is_on_accelerator(lengths_of(stack)) for stack in stacks):
        return None
    return EmittedGraph(recorder.capture, run(captured, EVALUATED), recorder.model)


def is_on_accelerator(node: fx.Node | None) -> bool:
    return node is not None and node.meta["val"].device.type != "cpu"


def by_kernels(kernels: EmittedGraph, recorder: Recorder, parameters: Mapping[str, Tensor], values: Any) -> RunOutputs:
    noise = any(map(draws_noise, recurrent_stacks(kernels.program.graph)))
    with warnings.catch_warnings(), without_cudnn() if noise else nullcontext():
        # Other parameters than the module's lie apart, as the user cannot change.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        return recorder.outputs(parameters, values, kernels, taps=False)


def against(kernels: EmittedGraph, recorder: Recorder, parameters: Mapping[str, Tensor], values: Any) -> str | None:
    """Why the kernels are no measure of the graph; None if they compute the same."""
    try:
        outputs, fisher = by_kernels(kernels, recorder, parameters, values)
    except (RuntimeError, NotImplementedError) as error:  # a kernel that this device does not have
        if fatal(error):
            raise
        return f"torch's kernel does not run: {first_line(error)}"
    written_out = recorder.outputs(parameters, values)
    samples = [
        sampled_elements([leaf for leaf in results.tree_leaves(values) if isinstance(leaf, torch.Tensor)])
        for values in ((outputs, list(fisher)), (written_out[0], list(written_out[1])))
    ]
    apart = differ(samples[0], samples[1], coarsest_rounding(recorder, values))
    return "torch's kernel has other outputs" if bool(apart) else None


def first_rows(tensor: Tensor, dim: int, total: int, wanted: int) -> Tensor:
    """The rows of the first `wanted` of `total` examples, of which every one has equally many."""
    return tensor.narrow(dim, 0, wanted * (tensor.shape[dim] // total))


@torch.no_grad()
def difference_of_part(
    recorder: Recorder, values: Any, wanted: int, parameters: Mapping[str, Tensor], rounding: float
) -> str | None:
    """In words, how the outputs of the first `wanted` examples differ from those in a batch with as many others; None
    if they do not. The host waits.

    Noise in a part is that of other numbers, so then the other examples are replaced by the first ones instead.

    values: the inputs of the one graph of the model. rounding: as of `differ`.
    """
    emitted = recorder.emitted
    assert isinstance(emitted, EmittedGraph), "bug in kfac_fx: a part of a batch without a single graph"
    total = emitted.examples(values)
    more = emitted.first_examples(values, total, min(total, 2 * wanted))
    number = emitted.examples(more)

    def outputs_on(inputs: Any) -> Sequence[Tensor]:
        return recorder.outputs(parameters, inputs)[1]

    try:
        with_others, alone = outputs_on(more), outputs_on(emitted.first_examples(values, total, wanted))
        dims = emitted.dims_of_cases(len(alone))
        for output, part, dim in zip(with_others, alone, dims, strict=True):
            rows, left = divmod(output.shape[dim] if output.dim() else 1, number)
            shape = list(output.shape)
            if left or not output.dim() or [*shape[:dim], wanted * rows, *shape[dim + 1 :]] != list(part.shape):
                return f"outputs {shape} of {number} examples are {list(part.shape)} of {wanted}"
        if emitted.random:
            alone = outputs_on(emitted.repeated_examples(more, number, wanted))
            alone = [first_rows(output, dim, number, wanted) for output, dim in zip(alone, dims, strict=True)]
    except RuntimeError as error:  # a graph of one size of batches
        if fatal(error):
            raise
        return f"the graph does not run on it ({first_line(error)})"
    expected = [first_rows(output, dim, number, wanted) for output, dim in zip(with_others, dims, strict=True)]
    apart = differ(sampled_elements(list(expected)), sampled_elements(list(alone)), rounding)
    return "the outputs of an example depend on the others" if bool(apart) else None


# --- bags of embeddings -----------------------------------------------------------------------------------------------

BAGS = "embedding_bag"  # in torch's words that it has no derivative
BAG = signature(F.embedding_bag)
MODES = ("sum", "mean", "max")  # by torch's number of the mode
LOOKUP, LOOKUP_OF_ATEN = signature(F.embedding), ("weight", "input", "padding_idx", "scale_grad_by_freq")


class LookupsAsInBackward(TorchFunctionMode):
    """Inside, a lookup of an embedding has the derivative in forward mode that its backward has.

    The backward leaves out the row of `padding_idx`, and divides by the numbers of lookups with `scale_grad_by_freq`.
    torch's derivative in forward mode does neither.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.embedding:
            given = LOOKUP.bind(*args, **kwargs).arguments
        elif func is torch.embedding:
            given = dict(zip(LOOKUP_OF_ATEN, args, strict=False)) | {
                "input" if name == "indices" else name: value for name, value in kwargs.items()
            }
            if given.get("padding_idx") == -1:  # ATen writes "none" as -1
                del given["padding_idx"]
        else:
            return result
        ids, padding = given["input"], given.get("padding_idx")
        if given.get("scale_grad_by_freq"):
            times = torch.bincount(ids.flatten(), minlength=given["weight"].shape[0])[ids].unsqueeze(-1)
            result = result.detach() + (result - result.detach()) / times
        if padding is None:
            return result
        return torch.where((ids == padding % given["weight"].shape[0]).unsqueeze(-1), result.detach(), result)


class BagsByLookups(TorchFunctionMode):
    """Inside, bags of embeddings are lookups that are added up. torch's own have no forward-mode derivative, and their
    backward has none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding_bag:
            call = BAG.bind(*args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            if given["max_norm"] is None:
                names = ("offsets", "mode", "per_sample_weights", "include_last_offset", "padding_idx")
                return bags(given["input"], given["weight"], *(given[name] for name in names))
        if func is torch.embedding_bag:
            others, named = pytree.tree_map_only(Tensor, Tensor.detach, (args, dict(kwargs)))
            return by_numbers(*args, **kwargs), *func(*others, **named)[1:]
        return func(*args, **kwargs)


def by_numbers(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`bags` with the arguments of `torch.embedding_bag`."""
    return bags(indices, weight, offsets, MODES[mode], per_sample_weights, include_last_offset, padding_idx)


def bags(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    """The result [bags, dim] of `F.embedding_bag`. A bag without ids is zero.

    ids: [bags, ids], or flat with the `offsets` of the bags.
    """
    if offsets is None:
        number, size = ids.shape
        bag = torch.arange(number, device=ids.device).repeat_interleave(size)
    else:
        number = offsets.shape[0] - include_last_offset
        place = torch.arange(ids.shape[0], device=ids.device, dtype=offsets.dtype)
        bag = torch.searchsorted(offsets[:number].contiguous(), place, right=True) - 1
    ids = ids.reshape(-1)
    counted = torch.ones_like(ids, dtype=torch.bool)
    if padding_idx is not None:
        counted = ids != padding_idx % weight.shape[0]
    if mode == "max":
        rows = torch.where(counted.unsqueeze(1), weight.detach()[ids], -torch.inf)
        largest = rows.new_full((number, weight.shape[1]), -torch.inf)
        largest = largest.scatter_reduce(0, bag.unsqueeze(1).expand_as(rows), rows, "amax")
        place = torch.arange(len(ids), device=ids.device).unsqueeze(1).expand_as(rows)
        of_largest = torch.where(
            counted.unsqueeze(1) & (rows == largest[bag]), place, len(ids)
        )  # of several equal ones the first
        first = torch.full_like(largest, len(ids), dtype=torch.long)
        first = first.scatter_reduce(0, bag.unsqueeze(1).expand_as(rows), of_largest, "amin")
        there = first < len(ids)
        last = first.clamp(max=max(0, len(ids) - 1))
        return torch.where(there, weight.gather(0, ids[last]), 0) if len(ids) else torch.zeros_like(largest)
    share = counted.to(weight.dtype)
    if per_sample_weights is not None:
        share = share * per_sample_weights.reshape(-1)
    total = weight.new_zeros(number, weight.shape[1]).index_add(0, bag, weight[ids] * share.unsqueeze(1))
    if mode == "sum":
        return total
    sizes = counted.new_zeros(number, dtype=weight.dtype).index_add(0, bag, counted.to(weight.dtype))
    return total / sizes.clamp(min=1).unsqueeze(1)
