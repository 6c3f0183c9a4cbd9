"""Capture: a module and example inputs -> a flat Program over the module's own parameters.

With inputs, `torch.export` traces the model, non-strict, with as many dynamic dimensions of its tensors as the model
allows. Inputs that are no tensors are part of the capture's key.

Without inputs, `torch.fx` traces models that are plain Python. Refused is all that torch.fx would capture wrongly
without an error: random numbers of no input, modes that change inside forward, autograd.Functions, and buffers that are
assigned.

Some forwards take derivatives of a network by its inputs, with torch.autograd.grad or torch.func. torch.export captures
forward above autograd. Here such a model is traced below autograd, so that its derivatives are ordinary operations that
contain uses of the parameters:

    u = linear(x, w)                                        u = matmul(x, w.t())
    (du,) = torch.autograd.grad(u.sum(), x, ...)            du = matmul(ones, w)

The graph can be differentiated again. The trace has no symbolic sizes, so a capture holds for the sizes of the example.
In such a trace autograd detaches the tensors that it saves. These detachments are removed; forward's own are marked and
stay.

**Nested tensors** inside of forward, while a model is traced.

    x = torch.nested.nested_tensor_from_jagged(values, offsets)
    self.layer(x)             ->  linear(values, weight, bias)
    x.to_padded_tensor(0.0)   ->  new_full(values, ...).index_put((document, place), values)

torch computes with a nested tensor by operations on its values, the rows of all documents below one another.
torch.export meets operations before torch has written them so. `nested_values` lets torch do that first: an operation
on a nested tensor is dispatched without the tracer, and those on its values with it. So the graph has the rows of all
documents in one tensor, and holds for any number and any lengths of documents.

Attention is written as attention over all rows with a mask of blocks, because torch's own kernels read lengths. It has
the same result, and needs memory for the square of the number of rows.
"""

from __future__ import annotations

import inspect
import io
import itertools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.overrides import TorchFunctionMode

from .complex_parameters import real_parameter, with_real_parts
from .errors import LayerError, UntraceableError, fatal, kind_and_line, line_of, where
from .graphs.edit import ask_for_gradients, attribute, holder
from .graphs.operations import KINDS_OF_CALLS, PARTS, SHAPE_ONLY, SIZED_BY_CASES, VIEWS, op_name
from .ir import Autocast, Copies, Options, Program, copy_nodes, returned_by
from .results import subclasses_in
from .torch_private import (
    ADD_BATCH_DIM,
    ASSERT,
    ASSERT_IS_NONE,
    AUTOCAST_REGION,
    FORWARD_MODE,
    GUARDS,
    LOGGERS,
    NESTED,
    REMOVE_BATCH_DIM,
    UNSAFE_VIEW,
    VMAP,
    BatchNorm,
    DispatchMode,
    DispatchState,
    InstanceNorm,
    differentiates,
    differentiates_forward,
    make_fx,
    nested_int,
    pytree,
    without_functional,
)
from .tracing.calls import backward_hooks, call_with, forward_hooks, map_tensors, without_backward_hooks, without_trace
from .tracing.effects import OfOneRun, cumulative_averages, python_random, untouched
from .tracing.functions import own_backwards
from .tracing.settings import ForwardSettings, Observer, Outside
from .tracing.signature import (
    FlatModel,
    Returned,
    autocast,
    constants,
    copy_with_strides,
    flat_graph,
    input_names,
    is_nested,
    kinds,
    layout,
    layouts,
    own_tensors,
    refuse_drawn,
    refuse_hidden_tensors,
    refuse_nested,
    refuse_no_tensors,
    refuse_shadowed_names,
    same_memory,
    signature_of,
    tensors_in,
    trained,
)
from .tracing.substitutes import (
    DATA,
    Substitutes,
    ThreadTracer,
    compute,
    custom_functions,
    moves_left_out,
    packs_in,
    recurrent_layers,
    refuse_custom,
    refuse_packed,
    replaced_in_thread,
    symbolic_lengths,
    with_sparse_products,
)

RAGGED = 1  # the dimension of documents' lengths in [documents, lengths, ...]


@contextmanager
def nested_values() -> Iterator[None]:
    """Inside, and in this thread, operations on nested tensors are traced as those on their values."""
    states: list[DispatchState] = []  # that of the tracer
    sizes: dict[int, tuple[Tensor, Any]] = {}  # id of offsets -> (the offsets, the size that stands for the lengths)
    numbers = itertools.count()

    def function(below: Callable[..., Any], cls: type, *call: Any, **kwargs: Any) -> Any:
        state = DispatchState.now()
        outermost = not states
        states.extend([state] if outermost else [])
        try:
            with state.without_tracer():
                return below(cls, *call, **kwargs)
        finally:
            del states[:outermost]

    def dispatch(below: Callable[..., Any], cls: type, *call: Any, **kwargs: Any) -> Any:
        with states[0].entered() if states else nullcontext():
            if call[0] is torch.ops.aten.to_padded_tensor.default:
                return as_padded(*call[2], **(call[3] or {}))
            return below(cls, *call, **kwargs)

    def attended(below: Callable[..., Any], *call: Any, **kwargs: Any) -> Any:
        with states[0].entered() if states else nullcontext():
            return attention(*call, **kwargs)

    def size_of(below: Callable[..., Any], offsets: Tensor, *, coeff: int = 1) -> Any:
        plain = without_functional(offsets)
        if id(plain) not in sizes:
            sizes[id(plain)] = plain, nested_int(-1 - next(numbers))
        return sizes[id(plain)][1] * coeff

    replaced = (
        (NESTED.kind, "__torch_function__", function),
        (NESTED.kind, "__torch_dispatch__", dispatch),
        (NESTED.kind, "values", lambda below, documents: NESTED.values(documents)),
        (NESTED.module, "get_tensor_symint", size_of),
        (NESTED.module, "nested_view_from_values_offsets", of_values_and_offsets),
        (NESTED.module, "nested_view_from_values_offsets_lengths", of_lengths),
        (NESTED.operations, "jagged_scaled_dot_product_attention", attended),
        (NESTED.tracer, "is_fx_tracing", lambda below: False),  # which refuses to make nested tensors
    )
    with ExitStack() as stack:
        known = all(
            hasattr(owner, name) for owner, name, _ in replaced
        )  # else torch is another, and refuses them itself
        for owner, name, instead in replaced if known else ():
            stack.enter_context(replaced_in_thread(owner, name, instead))
        yield


def of_values_and_offsets(
    below: Callable[..., Any], values: Tensor, offsets: Tensor, *more: Any, **sizes: Any
) -> Tensor:
    return nested(values, offsets, *more, **sizes)


def of_lengths(
    below: Callable[..., Any], values: Tensor, offsets: Tensor, lengths: Tensor | None, *more: Any, **sizes: Any
) -> Tensor:
    if lengths is not None:
        raise with_gaps()
    return nested(values, offsets, *more, **sizes)


def with_gaps() -> UntraceableError:
    return UntraceableError(
        "a nested tensor with both offsets and lengths has gaps between its documents, which no graph keeps.\n"
        "Leave the rows of the gaps out: torch.nested.nested_tensor_from_jagged(values, offsets)."
    )


def nested(
    values: Tensor,
    offsets: Tensor,
    ragged_idx: int = RAGGED,
    min_seqlen: int | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """A nested tensor around these values themselves; torch's own is a view, which the tracer would meet."""
    known = {"min_seqlen": min_seqlen, "max_seqlen": max_seqlen}
    cache = {name: values.new_empty(size, 0) for name, size in known.items() if size is not None}
    result: Tensor = NESTED.kind(values, offsets, _ragged_idx=ragged_idx, _metadata_cache=cache)
    return result


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """That of nested [documents, heads, lengths, features]: all rows [1, heads, rows, features], where a row sees those
    of its document."""
    if attn_mask is not None or dropout_p:
        raise UntraceableError(
            f"attention of nested tensors with {'a mask' if attn_mask is not None else 'dropout'} is not captured.\n"
            "Write it for padded documents, nested.to_padded_tensor(0.0), or use attention without it."
        )
    (q, q_document, q_place), (k, k_document, k_place), (v, _, _) = map(rows_of, (query, key, value))
    mask = q_document[:, None] == k_document
    if is_causal:
        mask = mask & (q_place[:, None] >= k_place)
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return nested(result[0], NESTED.offsets(query), 2)


def rows_of(documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the rows [1, heads, rows, features], the document of every row, the place of every row in its document)."""
    values, offsets = NESTED.values(documents), NESTED.offsets(documents)
    return (values[None], *document_and_place(offsets, values.shape[-2]))


def as_padded(documents: Tensor, padding: float, output_size: list[int] | None = None) -> Tensor:
    """[documents, longest, ...] of a nested tensor. torch's own operation for it has no derivative by its values."""
    offsets, ragged, known = NESTED.offsets(documents), NESTED.dimension(documents), NESTED.longest(documents)
    rows = NESTED.values(documents).movedim(ragged - 1, 0)
    document, place = document_and_place(offsets, rows.shape[0])
    longest = output_size[ragged] if output_size is not None else rows.shape[0] if known is None else known
    empty = rows.new_full((offsets.shape[0] - 1, longest, *rows.shape[1:]), padding)
    return empty.index_put((document, place), rows).movedim(1, ragged)


def document_and_place(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(the document of every row, the place of every row in its document)."""
    numbers = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    document = torch.searchsorted(offsets, numbers, right=True) - 1
    return document, numbers - offsets[document]


IMAGE = 4  # the dimensions of a batch of images; videos have more
ASSIGNED = r"The tensor attributes? .* assigned during export"  # a warning of torch; `untouched` notes the names, too


@dataclass(frozen=True)
class Capture:
    """A Program with its calling convention.

    Attributes:
        program: the graph and the tensors that it reads.
        flatten: (args, kwargs) -> the values of the graph's placeholders, in order.
        unflatten: the value of the graph's output node -> the outputs of the model.
        holds: whether the capture is valid for (args, kwargs): their sizes, and arguments that are constants in it.
        effects: what forward does and the graph does not, as in "sets memory.last".
        assigned: the attributes that forward sets, whose values the graph does not read.
        outside: what forward reads from outside of the model and of its inputs.
        as_returned: as `unflatten`, with the nested tensors that the model returns instead of their values.
        nested: whether it returns some.
    """

    program: Program
    flatten: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]
    unflatten: Callable[[Any], Any]
    holds: Callable[[tuple[Any, ...], Mapping[str, Any]], bool]
    effects: tuple[str, ...] = ()
    assigned: tuple[str, ...] = ()
    outside: Outside = Outside()
    as_returned: Callable[[Any], Any] = field(default=lambda output: output)
    nested: bool = False

    def settings(self, model: nn.Module, inside: bool = False) -> ForwardSettings:
        """The present values that the graph is specialized to beside its inputs. inside: see `ForwardSettings`."""
        root = self.program.root
        tensors = [*root.buffers(), *root.parameters(), *model.buffers()]
        return ForwardSettings(model, self.outside, self.assigned, tensors, inside)


def trace_model(
    model: nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
    layers: Mapping[str, Any] | None = None,
    every_size: bool = True,
    whole: bool = True,
) -> Capture:
    """Trace a model.

    Args:
        args, kwargs: example inputs; without them the model is traced by torch.fx.
        every_size: capture for images of all heights and widths, which takes torch.export several times as long.
        whole: see `refuse_nested`.

    Raises:
        UntraceableError: the model cannot be captured; the text names the module and the line where torch failed.
        LayerError: the layers are no dict.
    """
    options, layers = options or Options(), {} if layers is None else layers
    if not isinstance(layers, Mapping):
        raise LayerError(
            f"trace_model takes layers by name and got a {type(layers).__name__}: write "
            "layers=collect(*LAYERS.values(), my_layer), with both names of kfac_fx.passes.layers"
        )
    if args is None and not kwargs:
        return symbolic_trace(model, options, layers)
    return exported(model, args or (), kwargs or {}, options, layers, every_size, whole)


def named_parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Trainable parameters by canonical name, one entry for each object, and of complex ones the real and imaginary
    parts; and every name -> its canonical name."""
    first: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        canonical = first.setdefault(id(parameter), name)
        if canonical == name:
            parameters[name] = real_parameter(parameter)
        aliases[name] = canonical
    return parameters, aliases


def exported(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    layers: Mapping[str, Any],
    every_size: bool,
    whole: bool,
    longest: Sequence[int] = (),
    gaps: bool = False,
    lengths: bool = True,
) -> Capture:
    """Trace with inputs.

    Args:
        whole: see `refuse_nested`.
        longest: see `recurrent_layers`.
        gaps: keep gaps between the elements of inputs.
        lengths: see `symbolic_lengths`.
    """
    name = type(model).__name__
    refuse_packed(name, (args, kwargs))
    refuse_shadowed_names(model)
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    refuse_nested(name, leaves, whole)
    refuse_hidden_tensors(name, leaves)
    refuse_no_tensors(name, "takes", leaves)
    flat = FlatModel(model, leaves, spec, whole)
    flat.training = model.training  # of this module only: submodules may be in other modes
    # For a view torch.export would guard its base; the next batch need not be a view.
    inputs = tensors_in(args, kwargs)
    copy = copy_with_strides if gaps else torch.clone
    tensors = tuple(copy(leaf.detach()).requires_grad_(leaf.requires_grad) for leaf in inputs)
    names = input_names(model, args, kwargs)
    with untouched(model), own_backwards(model) as functions, quiet():
        averages = cumulative_averages(model)
        given: list[Any] = []
        try:
            with (
                torch.enable_grad(),
                Substitutes(),
                moves_left_out(),
                nested_values(),
                symbolic_lengths(model) if lengths else nullcontext(given) as given,
            ):
                module, guards = graph_module(flat, tensors, every_size, longest)
        except Exception as error:
            if given and not fatal(error):
                return exported(model, args, kwargs, options, layers, every_size, whole, longest, gaps, lengths=False)
            if fatal(error) or isinstance(error, UntraceableError):
                raise
            functions.check()
            raise untraceable(model, error) from error
    functions.check()
    functions.restore(module)
    refuse_drawn(name, flat.returned.drawn)
    refuse_no_tensors(name, "returns", flat.returned.leaves)
    under = open_regions(module, whole)
    for region in module.modules():  # those that stay closed run as they are
        if region is not module and isinstance(region, fx.GraphModule):
            with_sparse_products(region.graph)
            compute(region.graph)
            region.recompile()
    graph, root = flat_graph(module, names, model)
    ask_for_gradients(graph, [returned_by(graph)[place] for place in flat.returned.asking])
    root = with_real_parts(graph, root, dict(model.named_parameters(remove_duplicate=False)))
    with_sparse_products(graph)
    packs = packs_in(graph, root)
    if packs is not None and (seen := packs.longest(inputs)) != packs.steps:
        return exported(model, args, kwargs, options, layers, every_size, whole, seen, gaps, lengths)
    outside = flat.returned.observer.outside()
    if outside.reads_layout and not gaps and list(map(layout, tensors)) != list(map(layout, inputs)):
        return exported(model, args, kwargs, options, layers, every_size, whole, longest, True, lengths)
    facts = [(fact, fact(args, kwargs)) for fact in read_facts(outside)]

    def holds(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        values = tensors_in(args, kwargs)
        try:
            if guards is not None:
                guards(*values)
        except AssertionError:
            return False
        if any(fact(args, kwargs) != value for fact, value in facts):
            return False
        return packs is None or packs.longest(values) == packs.steps

    parameters, aliases = named_parameters(model)
    assigned = tuple(dict.fromkeys(flat.returned.assigned))
    told_cases = tuple(dict.fromkeys((layer, str(cases)) for layer, cases in flat.returned.told))
    captured = Program(graph, root, parameters, aliases, options, layers, told_cases=told_cases, autocast=under)
    marks = [torch.empty(0) for _ in pytree.tree_leaves(captured.returned)]
    captured = captured.but(named_loss=place_of_loss(flat.unflatten(marks), marks))
    returned = (OfOneRun(f"returns a {kind}") for kind in flat.returned.left_out.values())
    hooks = (*forward_hooks(model), *(later := backward_hooks(model)))
    outside = replace(outside, read=None) if later else outside  # which do not run in a trace
    effects = (*(f"sets {name}" for name in assigned), *averages, *hooks, *outside.effects, *returned)
    nested = flat.as_returned, bool(flat.returned.nested)
    return Capture(captured, tensors_in, flat.unflatten, holds, effects, assigned, outside, *nested)


def place_of_loss(returned: Any, leaves: Sequence[Any]) -> int | None:
    """Which of the leaves of what a model returns it calls "loss"; None if none of them."""
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    return next((n for n, leaf in enumerate(leaves) if loss is not None and leaf is loss), None)


def read_facts(outside: Outside) -> list[Callable[[tuple[Any, ...], Mapping[str, Any]], Any]]:
    """Functions of the inputs whose values a forward may branch on, beside those of `call_key`: what is deep in its
    arguments that are no tensors, how tensors lie in memory, and whether they need gradients."""
    facts = [partial(constants, outside.names)]
    return facts + [layouts] * outside.reads_layout + [trained] * outside.reads_trained


def graph_module(
    flat: FlatModel, tensors: tuple[Tensor, ...], every_size: bool, longest: Sequence[int]
) -> tuple[fx.GraphModule, Callable[..., None] | None]:
    """The traced module, and a function of the inputs that raises AssertionError if it is not valid for them."""
    try:
        # A size of 1 is static: torch would specialize it anyway, and print a warning.
        free = [t.dim() if every_size or t.dim() < IMAGE else 2 for t in tensors]
        shapes = tuple({d: Dim.AUTO for d in range(n) if t.shape[d] > 1} for t, n in zip(tensors, free, strict=True))
        with warnings.catch_warnings(), forward_mode(), recurrent_layers(longest) as told:
            warnings.filterwarnings("ignore", message=ASSIGNED)
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            warnings.filterwarnings("ignore", message="A model attribute .* requires gradient")  # see `flat_graph`
            dynamic = {"tensors": shapes} if tensors else {}
            result = torch.export.export(flat, tensors, dynamic_shapes=dynamic, strict=False)
            lost = keeps_other_tensors(result, flat.model) and takes_derivatives(flat, tensors)
            module = result.module()
        lost = lost or any(op_name(node) in FORWARD_MODE for node in module.graph.nodes)
        if not lost and not maps_parameters(module):
            flat.returned.told = told
            return module, getattr(module, GUARDS, None)
    except Exception as error:
        if fatal(error) or not takes_derivatives(flat, tensors):
            raise
    flat.returned = Returned()
    with custom_functions() as custom, recurrent_layers(longest):
        try:
            traced = traced_below_autograd(flat, tensors)
        except Exception:
            refuse_custom(flat.model, custom)
            raise
    refuse_custom(flat.model, custom)
    return traced


CHECKED_INPUTS = (  # their forward branches on the rank of its input, which a proxy does not have
    BatchNorm,
    InstanceNorm,
)


class _Tracer(ThreadTracer):
    """Traces into torch's own modules, so that each operation has one spelling. Buffers are nodes of the graph."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.record_stack_traces = True  # for errors and the report, which name the user's line
        self.modes = modes()
        self.constants: set[str] = set()  # the names that torch.fx gives to the constants of the graph
        self.latest: Any = None  # the argument that was made last: in the end that of the output

    def get_fresh_qualname(self, prefix: str) -> str:
        name = super().get_fresh_qualname(prefix)
        self.constants.add(name)
        return name

    def create_arg(self, a: Any) -> Any:
        is_subclass = isinstance(a, tuple) and not hasattr(a, "_fields")  # torch.fx would call its class with a list
        argument = super().create_arg(tuple(a) if is_subclass else a)
        self.latest = a
        return argument

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        return isinstance(module, CHECKED_INPUTS)

    @cached_property
    def names(self) -> dict[int, str]:
        """The first name of every parameter and buffer, by id."""
        named = (*self.root.named_parameters(), *self.root.named_buffers())
        return {id(tensor): name for name, tensor in reversed(named)}

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """As torch.fx, which searches all tensors of the model at every read and is quadratic in the model's depth."""
        if not self.traces_this_thread:
            return attr_val
        name = self.names.get(id(attr_val))
        if name is None:
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        if modes() != self.modes:
            raise ValueError("torch.fx does not see no_grad, enable_grad and autocast inside forward")
        return super().create_proxy(*args, **kwargs)


def modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in kinds())


def symbolic_trace(model: nn.Module, options: Options, layers: Mapping[str, Any]) -> Capture:
    """Trace a model without inputs. Arguments with defaults are constants.

    Raises UntraceableError if torch.fx fails, or would capture something wrongly.
    """
    signature = signature_of(model)
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    observer = Observer()
    with untouched(model), custom_functions() as custom:
        averages = cumulative_averages(model)
        with untouched(model) as assigned:
            try:
                with (
                    torch.enable_grad(),
                    no_random_numbers(),
                    python_random() as drawn,
                    without_backward_hooks(model),  # `effects` names them
                ):
                    tracer = _Tracer()
                    with observer.observing():
                        graph = tracer.trace(model, concrete_args=defaults)
            except Exception as error:
                if fatal(error):
                    raise
                refuse_custom(model, custom, exported=False)
                raise untraceable(model, error) from error
            targets = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
            root = holder({target: attribute(model, target) for target in sorted(targets)})
            frozen = {target for target in tracer.constants & targets if attribute(model, target).requires_grad}
    refuse_custom(model, custom, exported=False)
    if learned := [node for node in graph.nodes if node.op == "get_attr" and node.target in frozen]:
        raise UntraceableError(
            f"{type(model).__name__} computes with parameters that torch.fx takes for constants, at "
            f"{where(next(iter(learned[0].users)))}, because forward reads them through named_parameters(), "
            "parameters() or a container of its own.\n"
            "Give kfac_fx.compile example inputs."
        )
    refuse_drawn(type(model).__name__, drawn)
    # torch.fx keeps the constants of the graph, such as torch.arange(3), as attributes of the model while it traces.
    assigned = [name for name in assigned if name not in tracer.constants]
    if assigned_buffers := sorted({name for name, _ in model.named_buffers(remove_duplicate=False)} & set(assigned)):
        raise UntraceableError(
            f"{type(model).__name__} assigns a new tensor to its buffer {assigned_buffers[0]}, which torch.fx does not "
            "see.\nGive kfac_fx.compile example inputs."
        )
    if made := [leaf.target for leaf in pytree.tree_leaves(returned_by(graph)) if is_call_of_class(leaf)]:
        raise UntraceableError(
            f"{type(model).__name__} returns a {made[0].__name__}, and torch.fx does not see the tensors in it.\n"
            "Give kfac_fx.compile example inputs."
        )
    drop_asserts(graph)
    root = with_real_parts(graph, root, dict(model.named_parameters(remove_duplicate=False)))

    def bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def holds(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:  # the next capture says what is wrong
            return False
        if any(map(is_nested, pytree.tree_leaves(arguments))):  # torch.fx does not see the operations on their values
            return False
        return all(value is defaults[name] for name, value in arguments.items() if name in defaults)

    outside, hooks = observer.outside(), (*forward_hooks(model), *backward_hooks(model))
    outside = replace(outside, read=None) if hooks else outside  # torch.fx runs none of layers
    effects = (*(f"sets {name}" for name in assigned), *averages, *hooks, *outside.effects)
    program = Program(graph, root, *named_parameters(model), options, layers)
    program = program.but(named_loss=place_of_loss(program.returned, pytree.tree_leaves(program.returned)))
    unflatten = subclasses_in(tracer.latest)
    return Capture(program, bind, unflatten, holds, effects, tuple(assigned), outside, unflatten)


def is_call_of_class(leaf: Any) -> bool:
    """Whether a leaf is a named tuple or a dataclass, which torch.fx makes by a node."""
    return isinstance(leaf, fx.Node) and leaf.op == "call_function" and isinstance(leaf.target, type)


@contextmanager
def no_random_numbers() -> Iterator[None]:
    """Raises ValueError if random numbers are drawn inside: a graph of torch.fx would repeat them."""
    with torch.random.fork_rng(devices=[]):
        before = torch.random.get_rng_state()
        yield
        if not torch.equal(before, torch.random.get_rng_state()):
            raise ValueError("torch.fx does not see random numbers that do not depend on an input, such as torch.rand")


def drop_asserts(graph: fx.Graph) -> None:
    """Remove the checks that arguments have their defaults; `Capture.holds` makes them."""
    for node in reversed(list(graph.nodes)):
        if op_name(node) in (ASSERT, ASSERT_IS_NONE):
            operands = node.all_input_nodes
            graph.erase_node(node)
            for operand in operands:
                if operand.op != "placeholder" and not operand.users:
                    graph.erase_node(operand)


# --- forwards that take derivatives -----------------------------------------------------------------------------------

DETACH, MARKED = torch.ops.aten.detach.default, torch.ops.aten.detach_copy.default
RESHAPED = {"view", UNSAFE_VIEW, "reshape", "squeeze", "squeeze_", "unsqueeze", "unsqueeze_", "alias"}
STOPS = {torch.detach, Tensor.detach, DATA}  # they stop gradients


UNDER_ANY_AUTOCAST = VIEWS | PARTS | SHAPE_ONLY  # they compute the same


def open_regions(module: fx.GraphModule, whole: bool) -> Autocast:
    """Write regions of autocast into the graph around them, which passes can read. Returns the autocast that the graph
    then runs under, next to that which is on now.

    with torch.autocast("cpu", enabled=False): y = x @ w        ->  y = x @ w      where autocast is off

    A region that is all of forward but for casts and views, as trainers wrap it, gives its autocast to the graph:

    with torch.autocast("cpu", torch.bfloat16): y = x @ w       ->  y = x @ w
    return y.float()                                                return y.float()     the graph under autocast

    whole: whether the module is the whole model, whose graph can run under an autocast.
    """
    regions = [node for node in module.graph.nodes if op_name(node) == AUTOCAST_REGION]
    of_graph = autocast_of_all(module.graph, regions) if whole else ()
    under: dict[str, torch.dtype | None] = dict(autocast())
    under.update(of_graph)
    while regions:
        region = regions.pop()
        inner, *operands = region.args[4:]
        kind, dtype = setting_of(region)
        if under.get(kind) != dtype:
            continue
        target = str(inner.target)
        body = attribute(module, target).graph
        copies: Copies = dict(zip(body.find_nodes(op="placeholder"), operands, strict=True))
        with module.graph.inserting_before(region):
            for node in body.nodes:
                if node.op == "get_attr":
                    copies[node] = module.graph.get_attr(f"{target}.{node.target}")
                    copies[node].meta = dict(node.meta)
                elif node.op not in ("placeholder", "output"):
                    copies[node] = module.graph.node_copy(node, copies.__getitem__)
                    regions += [copies[node]] * (op_name(node) == AUTOCAST_REGION)
        results = fx.map_arg(returned_by(body), copies.__getitem__)
        for reader in list(region.users):
            if op_name(reader) != "getitem":
                raise AssertionError("bug in kfac_fx: a region of autocast that is read as a whole")
            reader.replace_all_uses_with(results[reader.args[1]])
            module.graph.erase_node(reader)
        module.graph.erase_node(region)
        if not inner.users:
            module.graph.erase_node(inner)
    return of_graph


def setting_of(region: fx.Node) -> tuple[str, torch.dtype | None]:
    """(the kind of devices, the dtype that autocast rounds to in a region; None: it is off)."""
    kind, dtype, enabled = str(region.args[0]), region.args[1], region.args[2]
    if not enabled:
        return kind, None
    return kind, dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(kind)


def autocast_of_all(graph: fx.Graph, regions: Collection[fx.Node]) -> Autocast:
    """The autocast that all regions of a graph have, if they hold all of its operations but those that autocast leaves
    as they are."""
    settings = {setting_of(region) for region in regions}
    kind, dtype = settings.pop() if len(settings) == 1 else ("", None)
    outside = (node for node in graph.nodes if node.op in KINDS_OF_CALLS and node not in regions)
    names = {op_name(node) for node in outside if isinstance(node.meta.get("val"), Tensor)}
    return () if dtype is None or not names <= UNDER_ANY_AUTOCAST else ((kind, dtype),)


def keeps_other_tensors(exported: torch.export.ExportedProgram, model: nn.Module) -> bool:
    """Whether a graph has constants with a gradient that are no tensors of the model: torch.export keeps those that
    torch.func.vjp differentiates by, with the shapes of the trace and without values."""
    held = list(own_tensors(model).values())
    constants = (value for value in exported.constants.values() if isinstance(value, Tensor) and value.requires_grad)
    return any(not any(same_memory(value, tensor) for tensor in held) for value in constants)


def maps_parameters(module: fx.GraphModule) -> bool:
    """Whether trained parameters enter operations inside of torch.func.vmap, as those of a network that is mapped over
    the cases. torch.export writes the region without the mapping, so it cannot run with taps, or at other sizes."""
    inside: set[fx.Node] = set()
    trained: set[fx.Node] = set()
    for node in module.graph.nodes:
        operands, name = node.all_input_nodes, op_name(node)
        if node.op == "get_attr":
            value = attribute(module, str(node.target))
            trained |= {node} if isinstance(value, nn.Parameter) and value.requires_grad else set()
        elif not trained.isdisjoint(operands):
            trained.add(node)
        if name == ADD_BATCH_DIM or (name != REMOVE_BATCH_DIM and not inside.isdisjoint(operands)):
            inside.add(node)
            if node in trained:
                return True
    return False


def takes_derivatives(model: nn.Module, tensors: Sequence[Tensor]) -> bool:
    """Whether forward calls torch.autograd.grad, a function of torch.func that differentiates, or torch.func.vmap.

    It runs once, without a trace. False if it fails.
    """
    return bool(runs(model, tensors, lambda code: differentiates(code) or code is VMAP))


def runs(model: nn.Module, tensors: Sequence[Tensor], wanted: Callable[[CodeType], bool]) -> bool | None:
    """Whether forward runs code that is wanted; without a trace. None if it fails."""
    seen: set[bool] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and wanted(frame.f_code):
            seen.add(True)

    before = sys.getprofile()
    try:
        with without_trace(model), forward_mode():
            sys.setprofile(look)
            model(*map_tensors(Tensor.clone, tuple(tensors)))
    except Exception as error:
        if fatal(error):
            raise
        return None  # the caller reports the failure of its own run
    finally:
        sys.setprofile(before)
    return bool(seen)


@contextmanager
def forward_mode() -> Iterator[None]:
    """Inside, torch does not warn about its own use of torch.jit.script, which loads the forward-mode formulas."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
        yield


# By these Python reads the values of a tensor. A number that it computes from them would be a constant of the graph.
VALUE_READS = ("numpy", "tolist", "__array__", "data_ptr")


class WithoutReads(TorchFunctionMode):
    """In a trace with real tensors: raises RuntimeError where Python reads values, as fakes do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in VALUE_READS:
            raise RuntimeError(f"Python reads the values of a tensor by {name}")
        return func(*args, **(kwargs or {}))


class WithoutSizes(DispatchMode):
    """In a trace with real tensors: raises RuntimeError where a size depends on values, as fakes do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags:
            raise RuntimeError(f"the size of the result of {func} depends on values")
        return func(*args, **(kwargs or {}))


class Marked(TorchFunctionMode):
    """Follows every detachment that forward makes by `detach_copy`, an operation that autograd itself never writes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stops = func in STOPS or not torch.is_grad_enabled()
        stops |= func is torch.autograd.grad and not (kwargs or {}).get("create_graph", False)
        result = func(*args, **(kwargs or {}))
        return map_tensors(marked, result) if stops else result


def marked(value: Tensor) -> Tensor:
    return torch.detach_copy(value.detach()) if value.is_floating_point() or value.is_complex() else value


def traced_below_autograd(model: nn.Module, tensors: Sequence[Tensor]) -> tuple[fx.GraphModule, Callable[..., None]]:
    """Trace a model below autograd.

    Returns:
        A module like those of torch.export, with the model's tensors as attributes; and a function of the inputs that
        raises AssertionError if their sizes differ from the example's.

    Raises:
        Exception: torch's own, if the model cannot be traced.
    """
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sizes = [tensor.shape for tensor in tensors]
    module = traced(model, held, tensors)
    note_sizes(module, lambda inputs: traced(model, held, inputs), tensors)

    def guards(*values: Tensor) -> None:
        if [value.shape for value in values] != sizes:
            raise AssertionError(f"captured for inputs of sizes {sizes}")

    return below_autograd(module, held), guards


def traced(model: nn.Module, held: dict[str, Tensor], tensors: Sequence[Tensor]) -> fx.GraphModule:
    def forward(held: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Any:
        with Marked():
            return call_with(model, held, tensors)

    failure: Exception | None = None
    differentiates = runs(model, tensors, differentiates_forward)
    if differentiates is None:  # a trace that fails inside of forward mode leaves torch without autograd
        model(*map_tensors(Tensor.clone, tuple(tensors)))
    if not differentiates:
        try:
            with torch.enable_grad(), forward_mode():
                return make_fx(forward, tracing_mode="fake", record_stack_traces=True)(held, tuple(tensors))
        except Exception as error:
            if fatal(error) or isinstance(error, UntraceableError):
                raise
            failure = error
    # Forward mode fails with symbolic sizes, and with fakes next to its zeros. Fakes do not meet tensors that are
    # neither inputs nor parameters nor buffers, such as attributes and globals. So forward computes here.
    copies = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors)
    try:
        with without_trace(model), forward_mode(), WithoutReads(), WithoutSizes():  # type: ignore[no-untyped-call]
            return make_fx(forward, tracing_mode="real", record_stack_traces=True)(held, copies)
    except Exception as error:
        if failure is None or fatal(error):
            raise
        raise failure from None


def note_sizes(
    module: fx.GraphModule, again: Callable[[Sequence[Tensor]], fx.GraphModule], tensors: Sequence[Tensor]
) -> None:
    """Mark the nodes whose size depends on the number of cases: it changes in a trace with one case more."""
    cases = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    for grows in (lambda t: t.dim() > 0, lambda t: t.shape[:1] == (cases,)):
        try:
            other = again([torch.cat([t, t[:1]]) if grows(t) else t for t in tensors])  # type: ignore[no-untyped-call]
        except Exception as error:
            if fatal(error):
                raise
            continue  # the first dimension of some inputs may not count cases
        pairs = list(zip(module.graph.nodes, other.graph.nodes, strict=False))
        if len(module.graph.nodes) == len(other.graph.nodes) and all(a.target == b.target for a, b in pairs):
            for node, twin in pairs:
                node.meta[SIZED_BY_CASES] = shape(node) != shape(twin)
            return


def below_autograd(module: fx.GraphModule, held: Mapping[str, Any]) -> fx.GraphModule:
    """The module with attributes instead of its first inputs, without autograd's own detachments and sizes."""
    graph, copies = fx.Graph(), Copies()
    waiting, held = iter(held), dict(held)

    def write(node: fx.Node) -> fx.Node | None:
        name = next(waiting, None) if node.op == "placeholder" else None
        if name is not None:
            copy = graph.get_attr(name)
        elif node.op == "get_attr":
            held[str(node.target)] = attribute(module, str(node.target))
            copy = graph.get_attr(str(node.target))
        elif node.target is DETACH or unchanged(node):
            return copies[unchanged(node) or node.all_input_nodes[0]]
        elif node.op == "output":
            copy = graph.output([copies.get(leaf, leaf) for leaf in pytree.tree_leaves(node.args[0])])
        else:
            return None
        copy.meta = {key: node.meta[key] for key in ("stack_trace", SIZED_BY_CASES) if key in node.meta}
        return copy

    for node, copy in copy_nodes(module.graph.nodes, graph, write, copies).items():
        if node.target is MARKED:
            copy.target = DETACH
    return fx.GraphModule(holder(held), graph)


def unchanged(node: fx.Node) -> fx.Node | None:
    """The node that `node` is a view of with the same shape, if any; torch.func.vmap writes such views."""
    source = node
    while op_name(source) in RESHAPED:
        (source,) = source.all_input_nodes
        if shape(source) == shape(node):
            return source
    return None


def shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return str(tuple(value.shape)) if isinstance(value, Tensor) else ""


# --- captures that fail -----------------------------------------------------------------------------------------------

# Words of torch's errors about branches on values of tensors.
VALUE_ERRORS = ("data-dependent", "control flow", "numpy", "Proxy", "Proxies", "unbacked", "boolean value")
SEE_THAT_IT_RUNS = (
    "See that the model runs on these inputs. If it does, write this line with other tensor operations, or compile the "
    "parts of the model that torch.export accepts."
)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch prints nothing about a failed capture; the error that follows says it."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    printed = io.StringIO()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(printed):
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclass(frozen=True)
class Failing:
    """The innermost module that an error comes from, and the innermost line of the user's in it.

    Attributes:
        path: of the module; None if the error is of no module's call.
        module: that of the path.
        inputs: the tensors that it was called with.
        line: as `"model.py:33"`, or empty.
        source: of the line.
    """

    path: str | None = None
    module: nn.Module | None = None
    inputs: tuple[Tensor, ...] = ()
    line: str = ""
    source: str = ""

    @classmethod
    def of(cls, model: nn.Module, error: Exception) -> Failing:
        found, step = cls(), error.__traceback__
        paths = {id(module): path for path, module in model.named_modules()}
        while step is not None:
            frame = step.tb_frame
            owner = first_argument(frame)
            if (path := paths.get(id(owner))) is not None:
                found = replace(found, path=path, module=owner)
                if frame.f_code.co_name == "forward":
                    arguments = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
                    values = [frame.f_locals.get(name) for name in arguments]
                    found = replace(found, inputs=tuple(value for value in values if isinstance(value, Tensor)))
            if found.path is not None and (line := line_of(step)) is not None:
                found = replace(found, line=line[0], source=line[1])
            step = step.tb_next
        return found

    def place(self, model: nn.Module) -> str:
        """`"layers.0 (model.py:33)"`; the class of the model itself."""
        return f"{self.path or type(model).__name__}{self.line and f' ({self.line})'}"


def untraceable(model: nn.Module, error: Exception) -> UntraceableError:
    """The error of a capture that failed. It names the innermost module and the innermost line of the user's."""
    failing = Failing.of(model, error)
    gave_up = "" if failing.path is None else f"torch gave up in {failing.place(model)}"
    source = failing.source
    lines = [text for text in (source, without_symbols(kind_and_line(error))) if text]
    if any(word in str(error) for word in VALUE_ERRORS):
        advice = (
            "Replace what depends on the values of tensors (if, while, .item(), .numpy()) by tensor operations such as "
            "torch.where."
        )
    else:
        advice = SEE_THAT_IT_RUNS
    shown = "".join(f"  {line}\n" for line in lines)
    failed = f"{type(model).__name__} could not be captured as a graph{gave_up and '; '}{gave_up}:"
    failure = UntraceableError(f"{failed}\n{shown}{advice}")
    failure.cause, failure.advice = gave_up and f"{gave_up}: {lines[0]}", advice
    return failure


def without_symbols(text: str) -> str:
    """`"[s87, 4]"` -> `"[any size, 4]"`: a symbol of torch's tells a user nothing."""
    return re.sub(r"\[[^][]*\]", lambda sizes: re.sub(r"\bs\d+\b", "any size", sizes[0]), text)


def first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if frame.f_code.co_argcount and names else None
