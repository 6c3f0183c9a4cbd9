"""A model of which only submodules are captured, emitted: the model itself runs, and they run as their graphs.

Between the submodules the model's own Python runs: branches, loops and random numbers happen as they do without us. It
works on copies and leaves no trace, as all recordings do; only a file that it writes is written. Python may read any
parameter at any time, so those of a sharded model are all gathered before it runs.

`EmittedSubmodules` is the emitted model. In one forward, `Frames` replaces the forward of every captured submodule,
`ServedReads` replaces operations between the submodules that read parameters (see `passes.divide`), and `LossWatch`
notes the losses that Python computes there.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from kfac_fx.linalg.matrices import is_differentiable
from kfac_fx.linalg.processes import averaged_unsharded, unsharded
from kfac_fx.linalg.vectors import Tensors
from kfac_fx.losses.declared import ObservedLoss
from kfac_fx.passes import results
from kfac_fx.passes.complex_parameters import original
from kfac_fx.passes.divide import (
    NOT_CAPTURED,
    CapturedSubmodule,
    Division,
    Operation,
    Read,
    Reads,
    differentiable,
    key_of_read,
)
from kfac_fx.passes.errors import ModelChangedError
from kfac_fx.passes.ir import ROW_MASK, Dims, Program
from kfac_fx.passes.losses import is_by_case
from kfac_fx.passes.matrix import complex_numbers
from kfac_fx.passes.rewrite import renamed, rewrite
from kfac_fx.passes.submodules import graph_of
from kfac_fx.passes.torch_losses import TORCH_LOSSES
from kfac_fx.passes.torch_private import BACKWARD_HOOKS, FORWARD_HOOKS, class_of, pytree, transforms
from kfac_fx.passes.trace import Capture, place_of_loss
from kfac_fx.passes.tracing.calls import Lent, call_with, hooked_by_user, map_tensors, without_sharding_hooks
from kfac_fx.passes.tracing.effects import python_random, untouched
from kfac_fx.passes.tracing.functions import plain_functions
from kfac_fx.passes.tracing.signature import call_key, tensors_held
from kfac_fx.passes.tracing.substitutes import custom_functions
from kfac_fx.recording.emitted import (
    CompiledOrPlain,
    EmittedModel,
    RunOutputs,
    attributes_read,
    compiled_graph,
    isolated,
    renamed_tensors,
    tap_factory,
)
from kfac_fx.recording.masks import (
    MaskedInputs,
    MaskSizes,
    PaddingMask,
    dims_in,
    mask_of_call,
    masked_part,
    refuse_unfit_mask,
    with_masks,
)
from kfac_fx.recording.taps import is_tapped

LOSSES = {loss.function: loss for loss in TORCH_LOSSES}


class UncapturedCall(BaseException):
    """A submodule is called in a way that is not captured, or not proved yet; `CaptureCache` catches it.

    It is no Exception, so that no model catches it.

    Attributes:
        path: of the submodule.
        captured: whether the call is captured, and only to be proved.
        asks: whether the submodule asks which tensors need gradients.
    """

    def __init__(self, path: str, captured: bool, asks: bool = False) -> None:
        super().__init__(path)
        self.path, self.captured, self.asks = path, captured, asks


class LossWatch(TorchFunctionMode):
    """Notes the losses that are computed outside of the captured submodules.

    Attributes:
        has_gradients: whether one of them has a gradient of its own.
        by_case: the steps of autograd behind them that divide each case by a number of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[ObservedLoss] = []
        self.by_case = set[Any]()
        self.paused = self.has_gradients = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.losses and not self.paused and divides_cases(result, args):
            self.by_case.add(result.grad_fn)
        if not self.paused and func in LOSSES and torch.is_grad_enabled():
            bound, loss = inspect.signature(func).bind(*args, **(kwargs or {})), LOSSES[func]
            bound.apply_defaults()
            if loss.changed(loss.by_default, bound.arguments):
                return result
            inputs, targets, reduction = (bound.arguments[name] for name in ("input", "target", "reduction"))
            ignored = bound.arguments.get("ignore_index")
            smoothed = bool(loss.changed(["label_smoothing"], bound.arguments))
            by_class = bound.arguments.get("weight") if loss.classes_second and not smoothed else None
            number = len(self.losses)
            self.has_gradients = self.has_gradients or result.requires_grad
            if not result.requires_grad and not transforms():  # so that what is returned tells its weights
                result = result.detach().requires_grad_().clone()
            self.losses.append(
                ObservedLoss(
                    loss.name, reduction, inputs, targets, result, ignored, by_class, chunk_of=number, number=number
                )
            )
        return result


def divides_cases(result: Any, args: Sequence[Any]) -> bool:
    """Whether a result of torch is the quotient of a tensor and of one number a case."""
    step = result.grad_fn if isinstance(result, Tensor) else None
    return step is not None and operation(step) == "Div" and len(args) > 1 and is_by_case(*args[:2])


def among_returned(returned: Any, of_losses: Sequence[Tensor]) -> list[Tensor]:
    """The losses among the tensors that a model returned: the one that it calls "loss", or all that are neither a part
    nor a function of an earlier one, where one of several is their total.

    of_losses: the results of the functions of torch that computed losses.
    """
    leaves = results.tree_leaves(returned)
    learned = {id(leaf): leaf for leaf in leaves if is_differentiable(leaf) and leaf.requires_grad}
    by_name = {str(number): result for number, result in enumerate(of_losses) if result.requires_grad}
    losses = [leaf for leaf in learned.values() if reached((leaf,), by_name)]
    named = place_of_loss(returned, leaves)
    if named is not None and any(leaf is leaves[named] for leaf in losses):
        return [leaves[named]]
    kept: list[Tensor] = []
    for leaf in losses:
        parts = [other for other in kept if reached((leaf,), {"": other})]
        if len(parts) > 1:
            kept = [other for other in kept if all(other is not part for part in parts)]
        if len(parts) != 1 and not any(reached((other,), {"": leaf}) for other in kept):
            kept.append(leaf)
    return kept


def weighed(returned: Any, watch: LossWatch, before: Sequence[ObservedLoss] | None) -> list[ObservedLoss]:
    """The losses with their weights in what the model returned; in a transformation of torch.func with those of the
    run before. Losses that the returned ones do not depend on are left out, and so are those that have a gradient from
    their targets alone, as `F.mse_loss(codes.detach(), h)`. A run without gradients has the losses of the run before.
    """
    losses = watch.losses
    if watch.has_gradients and not transforms():
        losses = [loss for loss in losses if loss.inputs.requires_grad]
    elif before is not None and all(other.number < len(losses) for other in before):
        losses = [losses[other.number] for other in before]
        if transforms():
            return [with_weights_of(other, loss) for loss, other in zip(losses, before, strict=True)]
    if transforms():
        return list(losses)
    of_losses = [loss.result for loss in losses]
    roots = among_returned(returned, of_losses)
    if not roots:
        return list(losses)
    by_name = {str(number): result for number, result in enumerate(of_losses) if result.requires_grad}
    used = {int(name) for name in reached(tuple(roots), by_name)}
    found: list[ObservedLoss] = []
    for loss in (losses[number] for number in sorted(used)):
        weights: Tensor | float = 1.0
        linear = elementwise = divided = True
        selects, by_case, divisor = False, False, None
        if len(roots) > 1 or loss.result is not roots[0]:
            ones = [torch.ones_like(root) for root in roots]
            (weights,) = torch.autograd.grad(roots, loss.result, ones, retain_graph=True)
            linear, elementwise, divided, selects, between = way_back(roots, loss.result)
            by_case = not between.isdisjoint(watch.by_case)
            divisor = inverse_weight(weights, divided) if weights.numel() else None
        sources = [source_of_piece(other.inputs) for other in found]
        source = source_of_piece(loss.inputs)
        first = len(found) if source is None or source not in sources else found[sources.index(source)].chunk_of
        weighted = replace(loss, weights=weights, chunk_of=first, divisor=divisor, divided=divided)
        by_all = divisor is not None and bool(divisor.round() == loss.result.numel())
        counted = (by_all or not divided) and not selects
        weighted = replace(weighted, counts_left_out=counted, averages_cases=by_case)
        found.append(replace(weighted, linear=linear, elementwise=elementwise))
    return found


def with_weights_of(other: ObservedLoss, loss: ObservedLoss) -> ObservedLoss:
    weights = other.weights
    if isinstance(weights, Tensor) and weights.shape != loss.result.shape:  # of another batch
        weights = None
    return replace(loss, weights=weights, linear=other.linear, divisor=other.divisor, divided=other.divided)


def inverse_weight(weights: Tensor, divided: bool) -> Tensor:
    """The number that a returned loss divides another one by, [], as its weights tell: 1 / the largest. Without a
    division it is one if it is a whole number from 3 on and no power of ten, as in a product with 1 / 37; else 1."""
    inverse = 1.0 / weights.abs().max()
    exponent = inverse.log10()
    whole = ((inverse - inverse.round()).abs() <= 1e-6 * inverse) & (inverse > 2.5)
    return inverse if divided else torch.where(whole & ((exponent - exponent.round()).abs() > 1e-4), inverse, 1.0)


# Operations by the names of their backwards.
VIEWED = {"View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Clone", "ToCopy", "Squeeze", "Unsqueeze"}
PIECES = {"Split", "SplitWithSizes", "Select", "Slice", "Unbind", "Narrow"}
ADDS = {"Add", "Sub", "Rsub", "Stack", "Cat", "Where"}
PRODUCTS = {"Mul", "Div", "Dot", "Mv", "Mm", "Bmm"}
SELECTS = {"Index", "IndexSelect", "MaskedSelect"}
ONE_BY_ONE = {"Sum", "Mean", "Neg", "MaskedFill", "Expand", "Gather", *SELECTS}
SMOOTH = {"Exp", "Expm1", "Log", "Log1P", "Pow", "Sqrt", "Sigmoid", "Tanh", "Softplus"}


def operation(step: Any) -> str:
    name: str = step.name().rstrip("0123456789")
    return name.removesuffix("Backward")


def way_back(roots: Sequence[Tensor], result: Tensor) -> tuple[bool, bool, bool, bool, set[Any]]:
    """(whether the roots are linear in the result, whether all operations between act on single elements, or are
    linear, whether one of them is a division, whether one selects elements, these operations): by the names that
    autograd has for them.
    """
    target, order, seen, stack = result.grad_fn, list[Any](), set[Any](), [(root.grad_fn, False) for root in roots]
    while stack:
        step, left = stack.pop()
        if left:
            order.append(step)
        elif step is not None and step not in seen and step is not target:
            seen.add(step)
            stack += [(step, True), *((following, False) for following, _ in step.next_functions)]
    between, linear, elementwise, names = {target}, True, True, set[str]()
    for step in order:
        inside = sum(following in between for following, _ in step.next_functions if following is not None)
        if inside:
            between.add(step)
            name = operation(step)
            single = name in PRODUCTS and inside == 1
            its_linear = single or name in VIEWED | PIECES | ADDS | ONE_BY_ONE
            linear = linear and its_linear
            elementwise = elementwise and (its_linear or name in SMOOTH | {"Mul", "Div"})
            names.add(name)
    return linear, elementwise, "Div" in names, not names.isdisjoint(SELECTS), between


def source_of_piece(tensor: Tensor) -> Any:
    """The step of autograd that made the tensor which this one is a piece of; None if it is no piece."""
    step = tensor.grad_fn
    while step is not None and operation(step) in VIEWED:
        step = step.next_functions[0][0]
    pieces = None
    while step is not None and operation(step) in PIECES:
        pieces = step = step.next_functions[0][0]
    return pieces


@dataclass
class Frames:
    """The captured submodules of one forward, with the tensors that their graphs run on.

    Attributes:
        checked: the numbers of the captures that may run; None: all.
        ran: receives the numbers of the captures that run.
        functions: one a capture; runs its graph.
        held: one a capture; the parameters and buffers that its graph runs on.
        inputs: from (number of the capture, its flat inputs) to what its graph runs on.
        lent: tells which modules run on parameters that are not the model's; these stay Python.
        tolerant: whether a call that no capture serves runs as it is; it is then kept as `uncaptured`.
        watchers: modes that look at what is done outside of the graphs, and pause inside of them.
    """

    captured: Sequence[CapturedSubmodule]
    checked: Collection[int] | None
    ran: set[int]
    functions: Sequence[Callable[..., Any]]
    held: Sequence[Mapping[str, Tensor]]
    probes: Any
    inputs: Callable[[int, tuple[Any, ...]], tuple[Any, ...]]
    lent: Lent
    tolerant: bool
    watchers: list[Any] = field(default_factory=list)
    uncaptured: UncapturedCall | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The submodules call their graphs. Backward hooks of a captured submodule are effects."""
        submodules = [captured.module for captured in self.captured if not captured.is_read]
        modules = list({id(module): module for module in submodules}.values())
        names = ("forward", *FORWARD_HOOKS, *BACKWARD_HOOKS)
        before = [{name: module.__dict__[name] for name in names if name in module.__dict__} for module in modules]
        try:
            for module in modules:
                self.enter(module)
            yield
        finally:
            for module, attributes in zip(modules, before, strict=True):
                module.__dict__.pop("forward", None)
                module.__dict__.update(attributes)

    def enter(self, module: nn.Module) -> None:
        """`module` calls its graph. A user's hooks are Python around it; torch's own hooks are in the graph."""
        names = BACKWARD_HOOKS if hooked_by_user(module) else (*FORWARD_HOOKS, *BACKWARD_HOOKS)
        original, hooks = module.forward, {name: module.__dict__[name] for name in names}

        def forward(*args: Any, **kwargs: Any) -> Any:
            number = self.serving(module, args, kwargs)
            if number is not None:
                return self.graph(number, args, kwargs)
            if hooked_by_user(module):
                return original(*args, **kwargs)
            module.__dict__.update(hooks, forward=original)  # as the model would: nothing of it reaches the losses
            try:
                return module(*args, **kwargs)
            finally:
                module.__dict__.update({name: OrderedDict() for name in names}, forward=forward)

        module.__dict__.update({name: OrderedDict() for name in names}, forward=forward)

    def serving(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """The number of the capture that serves a call; None if the call runs as it is."""
        if not torch.is_grad_enabled() or self.lent.others(module):
            return None
        numbers = [number for number, captured in enumerate(self.captured) if captured.module is module]
        try:
            return self.find(numbers, args, kwargs, call_key(args, kwargs))
        except UncapturedCall as uncaptured:
            self.miss(uncaptured)
            return None

    def find(self, numbers: Sequence[int], args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> int:
        """Which of these captures serves a call. Raises UncapturedCall if none does."""
        number = next((n for n in numbers if self.captured[n].serves(args, kwargs, key)), None)
        if number is None or (self.checked is not None and number not in self.checked):
            captured = [self.captured[n] for n in numbers]
            path = captured[0].submodule.path if captured else ""
            asks = any(submodule.capture.outside.reads_trained for submodule in captured)
            raise UncapturedCall(path, number is not None, asks)
        self.ran.add(number)
        return number

    def miss(self, uncaptured: UncapturedCall) -> None:
        if not self.tolerant:
            raise uncaptured
        self.uncaptured = uncaptured

    def graph(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the graph of a capture."""
        capture = self.captured[number].capture
        values = self.inputs(number, capture.flatten(args, kwargs))
        for watcher in self.watchers:
            watcher.paused = True
        function = self.functions[number]
        is_compiled = isinstance(function, CompiledOrPlain)  # around it, `Reads` leaves no torch.compile on
        try:
            with torch.compiler.set_stance("default") if is_compiled else nullcontext():
                output, _ = function(self.held[number], values, self.probes)
        finally:
            for watcher in self.watchers:
                watcher.paused = False
        return map_tensors(copy_of_tapped, capture.unflatten(output))


class TangentsCut(TorchFunctionMode):
    """Python in forward-mode differentiation: torch.no_grad leaves that on, and here its results have no tangents."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() or any(result is argument for argument in args):
            return result
        return map_tensors(Tensor.detach, result)


class HooksOfConstants(TorchFunctionMode):
    """Hooks of activations without a gradient are never called. torch refuses them, and a forward that registers one
    runs here without gradients, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.register_hook, Tensor.retain_grad) and not args[0].requires_grad:
            return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))


def copy_of_tapped(output: Tensor) -> Tensor:
    """A tensor into which Python may write, as it may into what a submodule returns."""
    return output.clone() if is_tapped(output) else output


def one_call(module: fx.GraphModule) -> Callable[..., Any]:
    names = renamed(module)

    def call(held: dict[str, Tensor], values: tuple[Any, ...], probes: Any) -> Any:
        return functional_call(module, renamed_tensors(held, names), (*values, probes))

    return call


# --- reads of parameters by Python ------------------------------------------------------------------------------------


class ServedReads(Reads):
    """Runs the graphs of captured reads in one forward.

    parameters: by name, the tensors that Python sees. structured: the names of those with a block of their own.
    """

    def __init__(
        self, frames: Frames, parameters: Mapping[str, Tensor], structured: Collection[str], cases: int
    ) -> None:
        self.by_key: dict[Any, list[int]] = {}  # the numbers of captured reads
        for number, captured in enumerate(frames.captured):
            if isinstance(captured.module, Operation):
                self.by_key.setdefault(captured.module.read_key, []).append(number)
        names = {name for captured in frames.captured if captured.is_read for name in captured.names.values()}
        self.read_names = names & set(structured)
        super().__init__(parameters if self.read_names else {}, cases)
        self.frames, self.lost_names = frames, set[str]()
        frames.watchers.append(self)

    def served(self) -> AbstractContextManager[Any]:
        """While Python runs, if there is anything to serve."""
        return self if self.read_names else nullcontext()

    def met(self, read: Read, operation: Callable[[], Any]) -> Any:
        if self.read_names.isdisjoint(read.names) or not self.lost_names.isdisjoint(read.names):
            return operation()
        try:
            key = key_of_read(read.key, read.inputs)
            number = self.frames.find(self.by_key.get(read.key, ()), read.inputs, {}, key)
        except UncapturedCall as uncaptured:
            result = operation()
            if differentiable(read, result):
                self.frames.miss(UncapturedCall(str(read), uncaptured.captured))
            return result
        output = self.frames.graph(number, read.inputs, {})
        if read.written is None:
            return output
        read.written.copy_(output)
        return None if read.function is Tensor.__setitem__ else read.written

    def lost(self, names: Iterable[str], why: str = NOT_CAPTURED) -> None:
        """Stop serving these parameters: what was computed from them may be stale. `refuse_read` finds their uses."""
        self.lost_names |= set(names)


def refuse_read(model: nn.Module, stand_ins: Mapping[str, Tensor], fisher: tuple[Tensor, ...]) -> None:
    """Raises ModelChangedError for structured parameters that Python read: nothing recorded such a use."""
    if stand_ins and (names := sorted(reached(fisher, stand_ins))):
        raise ModelChangedError(
            f"on these inputs {class_of(model).__name__} reads {', '.join(names)} outside of its captured "
            "submodules, as it did not on the first inputs.\n"
            "Compile with inputs on which it does, or make these parameters generic: "
            f'compile(..., approximations={{"{names[0]}": "generic"}}).'
        )


def reached(roots: tuple[Tensor, ...], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that a gradient of the roots would reach."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    leaves = {id(root) for root in roots if root.grad_fn is None}
    seen = set(stack)
    while stack:
        node = stack.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        stack += new
    return [
        name for name, tensor in tensors.items()
        if (tensor.grad_fn in seen if tensor.grad_fn is not None else id(tensor) in leaves)
    ]  # fmt: skip


# --- the examples in inputs of any structure --------------------------------------------------------------------------


def examples_in(value: Any) -> int | None:
    """The number of examples in one argument; None if it has no tensors."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    if isinstance(value, (list, tuple)) and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
        return len(value)
    return next((tensor.shape[0] for tensor in tensors_held(value) if tensor.dim()), None)


def number_of_examples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """That of the first argument with examples: the length of a list or tuple, the first dimension of a tensor."""
    lengths = (examples_in(value) for value in (*args, *kwargs.values()))
    return next((n for n in lengths if n is not None), 1)


def first_examples(value: Any, total: int, wanted: int) -> Any:
    """The first `wanted` of `total` examples: of a list of that length, or of the tensors in anything else."""
    if isinstance(value, (list, tuple)) and len(value) == total and type(value) in (list, tuple):
        return value[:wanted]

    def shortened(leaf: Any) -> Any:
        has_all = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == total
        return leaf[:wanted] if has_all else leaf

    return pytree.tree_map(shortened, value)


# --- the emitted model ------------------------------------------------------------------------------------------------


@dataclass
class EmittedSubmodules(EmittedModel):
    """The captured submodules of a model, whose programs are joined in `program`.

    Attributes:
        division: what was captured, and what is left to Python.
        returns_loss: whether the losses are on what the model returns; else on what Python hands to torch's losses, if
            it does.
        padding_mask: the user's, of a call of the model.
        mask_sizes: the shape of the mask when each submodule was captured.
        checked: the submodules that were proved, by their places in the division; None: all may run.
        ran: the submodules that did run, in this or in another emission of this capture.
        observed: the losses that Python computed in the last run; None: there was none.
        uncaptured: the first call of the last training forward that no graph serves.
    """

    whole: ClassVar[bool] = False

    division: Division = field(kw_only=True)
    returns_loss: bool = False
    padding_mask: PaddingMask | None = None
    mask_sizes: tuple[MaskSizes | None, ...] = ()
    checked: set[int] | None = None
    ran: set[int] = field(default_factory=set)
    observed: list[ObservedLoss] | None = field(default=None, init=False)
    uncaptured: UncapturedCall | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.like = None
        registrations = self.program.registrations
        self.structured = {
            name for registration in registrations if not registration.generic for name in registration.owners
        }
        masked = any(ROW_MASK in use.attrs for registration in registrations for use in registration.uses)
        part_of = masked_part if masked else graph_of
        parts = [part_of(self.program, number) for number in range(len(self.captured))]
        self.masked_inputs = MaskedInputs.of(parts, [captured.submodule.path for captured in self.captured])
        tap_of = tap_factory(self.taps, self.make_tap, self.program.layers)
        modules = [rewrite(part, tap_of) for part in parts]
        self.read = [attributes_read(module) for module in modules]
        self.plain = [one_call(module) for module in modules]
        self.compiled = [
            compiled_graph(function, module.graph, self.backend)
            for function, module in zip(self.plain, modules, strict=True)
        ]
        self.parameter_names = [name for name, _ in self.model.named_parameters()]
        self.buffer_names = [name for name, _ in self.model.named_buffers()]
        first_names = {id(buffer): name for name, buffer in self.model.named_buffers()}
        every_name = self.model.named_buffers(remove_duplicate=False)
        self.canonical_buffers = {name: first_names[id(buffer)] for name, buffer in every_name}

    @property
    def captured(self) -> tuple[CapturedSubmodule, ...]:
        return self.division.captured

    @property
    def loss_sites(self) -> Sequence[ObservedLoss]:
        return self.observed or []

    @property
    def graphs(self) -> Sequence[Callable[..., Any]]:
        return self.compiled

    def autocast_dtypes(self) -> set[torch.dtype]:
        return {dtype for captured in self.captured for _, dtype in captured.autocast}

    def extends(self, earlier: EmittedSubmodules) -> None:
        """Take over which submodules were proved in `earlier`."""
        proved = {id(captured): number in earlier.ran for number, captured in enumerate(earlier.captured)}
        self.ran |= {number for number, captured in enumerate(self.captured) if proved.get(id(captured))}

    # --- running ----------------------------------------------------------------------------------------------------

    def run(
        self, parameters: Tensors, buffers: Tensors, values: Any, probes: Sequence[Any], compiled: bool = True
    ) -> RunOutputs:
        written = self.division.written
        parameters = {name: unsharded(value) for name, value in parameters.items()}
        parameters = {name: value.clone() if name in written else value for name, value in parameters.items()}
        python = {
            name: value.detach().requires_grad_()
            for name, value in parameters.items()
            if any(probes) and name in self.structured and not value.requires_grad
        }
        seen = self.as_in_model({**parameters, **python})
        frames = self.frames(parameters, buffers, seen, values, probes, compiled=compiled)
        with untouched(self.model), HooksOfConstants():  # forward may write into its inputs, too
            copies = map_tensors(Tensor.clone, values)
            output, fisher = self.forward(frames, {**seen, **buffers}, copies)
        refuse_read(self.model, python, fisher)
        return output, fisher

    def run_in_training(self, parameters: Tensors, buffers: Tensors, values: Any, probes: Sequence[Any]) -> RunOutputs:
        """The model's own forward with its submodules as graphs, so that its Python code runs once.

        A call that no graph serves runs as it is, and `uncaptured` holds it: then nothing was recorded.
        """
        parameters = {name: averaged_unsharded(value) for name, value in parameters.items()}
        python = {name: parameters[name][...] for name in sorted(self.structured) if parameters[name].requires_grad}
        seen, models_own = self.as_in_model({**parameters, **python}), dict(self.model.named_parameters())
        frames = self.frames(parameters, buffers, seen, values, probes, tolerant=True)
        views = {name: value for name, value in seen.items() if value is not models_own[name]}
        output, fisher = self.forward(frames, views, values)
        self.uncaptured = frames.uncaptured
        if self.uncaptured is None:
            refuse_read(self.model, python, fisher)
        return output, fisher

    def as_in_model(self, parameters: Tensors) -> Tensors:
        """Parameters by name, complex as the model has them: Python sees these."""
        own = dict(self.model.named_parameters())
        return {name: complex_numbers(value, own[name]) for name, value in parameters.items()}

    def frames(
        self,
        parameters: Tensors,
        buffers: Tensors,
        seen: Tensors,
        values: Any,
        probes: Sequence[Any],
        compiled: bool = True,
        tolerant: bool = False,
    ) -> Frames:
        """seen: the tensors that Python sees instead of the model's parameters."""
        named = {**parameters, **{name: buffers[first] for name, first in self.canonical_buffers.items()}}
        mask = self.mask(values)
        return Frames(
            self.captured,
            self.checked,
            self.ran,
            self.compiled if compiled else self.plain,
            [{name: named[name] for name in read if name in named} for read in self.read],
            probes,
            lambda number, inputs: self.masked_inputs.of_call(number, inputs, mask),
            Lent(self.model, seen),
            tolerant,
        )

    def forward(self, frames: Frames, named: Tensors, values: Any) -> RunOutputs:
        """named: the parameters and buffers that Python sees, where they are not the model's."""
        args, kwargs = values
        watch = LossWatch()
        frames.watchers.append(watch)
        seen = {name: named.get(name, original(parameter)) for name, parameter in self.program.parameters.items()}
        reads = ServedReads(frames, seen, self.structured, self.examples(values))
        losses = nullcontext() if self.returns_loss else watch
        cut = TangentsCut() if transforms() else nullcontext()
        with (
            without_sharding_hooks(self.model),
            custom_functions(),
            plain_functions(),
            frames.in_place(),
            losses,
            cut,
            reads.served(),
        ):
            output = call_with(self.model, named, args, kwargs)
        self.observed = weighed(output, watch, self.observed)
        if self.observed:
            return output, tuple(loss.inputs for loss in self.observed)
        return output, tuple(filter(is_differentiable, results.tree_leaves(output)))

    def has_losses_of(self, other: EmittedSubmodules) -> None:
        """Take which losses the last run of another emission of the same model had: this run had gradients, which tell
        outputs from constants."""
        observed = other.observed or []
        self.observed = [replace(of, inputs=of.inputs.detach(), result=of.result.detach()) for of in observed]

    @contextmanager
    def isolated(self) -> Iterator[None]:
        with isolated(self.model), python_random():
            yield

    # --- the batch --------------------------------------------------------------------------------------------------

    def examples(self, values: Any) -> int:
        args, kwargs = values
        return number_of_examples(args, kwargs)

    def first_examples(self, values: Any, total: int, wanted: int) -> Any:
        args, kwargs = values
        shortened = {name: first_examples(value, total, wanted) for name, value in kwargs.items()}
        return tuple(first_examples(value, total, wanted) for value in args), shortened

    def mask(self, values: Any) -> Tensor | None:
        """[cases, positions] of one call; None: nothing is padding."""
        return None if self.padding_mask is None else mask_of_call(self.padding_mask, self.model, *values)

    def padding(self, values: Any, fisher: Sequence[Tensor]) -> tuple[Tensor, Sequence[Dims | None]] | None:
        mask = self.mask(values)
        return None if mask is None else (mask, [dims_in(output, mask) for output in fisher])


def emitted_division(
    division: Division,
    program: Program,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    backend: str,
    returns_loss: bool,
    padding_mask: PaddingMask | None,
    earlier: EmittedSubmodules | None,
) -> EmittedSubmodules:
    """program: the division's, with registrations. earlier: an emission whose captures are among these."""
    mask = None if padding_mask is None else mask_of_call(padding_mask, model, args, kwargs)
    size = None if mask is None else (mask.shape[0], mask.shape[1])
    sizes_before = {} if earlier is None else dict(zip(map(id, earlier.captured), earlier.mask_sizes, strict=True))
    sizes = tuple(sizes_before.get(id(captured), size) for captured in division.captured)
    program = with_masks(program, sizes)
    if earlier is None:
        refuse_unfit_mask(program)
    effects = dict.fromkeys(effect for captured in division.captured for effect in captured.effects)
    capture = Capture(
        program, lambda args, kwargs: (args, dict(kwargs)), lambda output: output, lambda *_: True, tuple(effects)
    )
    emitted = EmittedSubmodules(
        capture,
        program,
        model,
        backend,
        division=division,
        returns_loss=returns_loss,
        padding_mask=padding_mask,
        mask_sizes=sizes,
    )
    if earlier is not None:
        emitted.extends(earlier)
    return emitted
