"""Checks of a model: before it is captured, and after, because a capture relies on what the model was then.

**Before**: wrappers are taken off, and refusals name all culprits.

**After**: a capture relies on its modules, parameters and shapes, as they were then.

`Structure` notices what was replaced, and `Trained` parameters that were frozen until now.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kfac_fx.linalg.arguments import listed
from kfac_fx.linalg.processes import is_sharded
from kfac_fx.passes.errors import (
    InputError,
    ModelChangedError,
    RegistrationError,
    UntraceableError,
    fatal,
    kind_and_line,
    nearest,
    running_line,
    table,
    users_line,
)
from kfac_fx.passes.ir import Registration
from kfac_fx.passes.results import tree_leaves
from kfac_fx.passes.torch_private import class_of, compiled_from, in_functional_call, parameters_of, submodules_of
from kfac_fx.passes.trace import Failing
from kfac_fx.passes.tracing.effects import accelerators, address, same_random, values_kept
from kfac_fx.passes.tracing.signature import signature_of

# --- wrappers ---------------------------------------------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of data parallelism and of torch.compile."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    original = compiled_from(model)
    return unwrapped(original) if isinstance(original, nn.Module) else model


def refuse_wrapped(net: Any, by: str) -> None:
    """Raises ValueError for a wrapper of a compiled module, which hides the parameters' names from what uses them."""
    inner = unwrapped(net) if isinstance(net, nn.Module) else net
    if inner is not net and is_compiled(inner):
        raise ValueError(
            f"{by} takes the module that kfac_fx.compile returned, and got {type(net).__name__} around it: write "
            f"{by}(net, ...) with net = kfac_fx.compile(model, ...), and call the wrapper, as in wrapper(x)"
        )


def compiled(name: str, value: Any) -> None:
    """A check of KFAC's `net`."""
    refuse_wrapped(value, "KFAC")
    if not is_compiled(value):
        of_trainer = (
            ""
            if isinstance(value, nn.Module)
            else (
                ". If a trainer makes the optimizer, give it a function that compiles the model and returns KFAC(net), "
                "see the page on training loops of others"
            )
        )
        raise ValueError(
            f"KFAC needs a compiled module and got a {type(value).__name__}: write net = kfac_fx.compile(model, ...) "
            f"and KFAC(net), and call net instead of model{of_trainer}"
        )


def is_compiled(value: Any) -> bool:
    """Whether this is what `kfac_fx.compile` returns."""
    return hasattr(type(value), "attach") and hasattr(type(value), "registrations")  # a model may have such children


def refuse_compiled(model: nn.Module, by: str) -> None:
    """Raises RegistrationError for a compiled module, and for a model with compiled submodules. by: who takes it."""
    if is_compiled(model):
        raise RegistrationError(f"the module is already compiled; pass the original model, net.model, to {by}")
    if inner := [name for name, module in model.named_modules() if is_compiled(module)]:
        raise RegistrationError(
            f"submodules are already compiled and would be captured twice: {', '.join(inner)}; use their .model instead"
        )


def averages_gradients(wrapper: nn.Module) -> bool:
    """Whether DistributedDataParallel is among the wrappers of a model."""
    if isinstance(wrapper, nn.parallel.DistributedDataParallel):
        return True
    inner = wrapper.module if isinstance(wrapper, nn.DataParallel) else compiled_from(wrapper)
    return isinstance(inner, nn.Module) and averages_gradients(inner)


# --- models that no capture can handle --------------------------------------------------------------------------------


def repeats_elements(tensor: Tensor) -> bool:
    """Whether two elements of a tensor lie in one place of memory."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    end = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < end:
            return True
        end += (size - 1) * stride
    return False


TensorTest = Callable[[Tensor], bool]
Culprits = Callable[[nn.Module], list[str]]


def parameters_that(holds: TensorTest) -> Culprits:
    return lambda model: [name for name, param in model.named_parameters() if holds(param)]


def sharded(model: nn.Module) -> list[str]:
    fsdp = imported("torch.distributed.fsdp", "FullyShardedDataParallel")
    dtensor = imported("torch.distributed.tensor", "DTensor")
    modules = [
        name or "the model itself" for name, module in model.named_modules() if fsdp and isinstance(module, fsdp)
    ]
    return [*modules, *(name for name, param in model.named_parameters() if dtensor and isinstance(param, dtensor))]


def imported(module: str, name: str) -> Any:
    """A class, if its module is imported."""
    return getattr(sys.modules.get(module), name, None)


def scripted(model: nn.Module) -> list[str]:
    """The outermost TorchScript modules."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    outer = [name for name in names if not any(other == "" or name.startswith(f"{other}.") for other in names)]
    return outer or names and ["the model itself"]


def without_shapes(model: nn.Module) -> list[str]:
    lazy = (nn.UninitializedParameter, nn.UninitializedBuffer)
    return [name for name, t in (*model.named_parameters(), *model.named_buffers()) if isinstance(t, lazy)]


UNFIT_MODELS: tuple[tuple[Culprits, str], ...] = (
    (
        sharded,
        "these parameters are sharded already, so that no process can run the model to capture it: {names}.\n"
        "Compile first, with example inputs, and shard then: net = kfac_fx.compile(model, (x,)), "
        "torch.distributed.fsdp.fully_shard on the units and on the model, and optimizer = kfac_fx.KFAC(net).",
    ),
    (
        scripted,
        "TorchScript modules have no Python code and cannot be captured: {names}.\n"
        "Pass kfac_fx.compile the module that torch.jit.script or torch.jit.trace was called on.",
    ),
    (
        without_shapes,
        "these parameters have no shape yet: {names}.\n"
        "Run the model once on a batch, as in model(*example_inputs), before you compile it.",
    ),
    (
        parameters_that(lambda param: param.is_inference()),
        "these parameters were made in torch.inference_mode and cannot be trained: {names}.\n"
        "Make the model outside of torch.inference_mode.",
    ),
    (
        parameters_that(lambda param: param.requires_grad and param.is_floating_point() and param.dtype.itemsize == 1),
        "torch computes no steps in 8 bits, and these trained parameters have them: {names}.\n"
        "Train a parameter of 16 or 32 bits and cast it in forward, as in w.to(torch.float8_e4m3fn), or freeze it with "
        "requires_grad_(False).",
    ),
    (
        parameters_that(lambda param: param.requires_grad and repeats_elements(param)),
        "several elements of these trained parameters lie in one place of memory, as those of an expanded tensor do, "
        "so that no optimizer can give each of them a step: {names}.\n"
        "Make the small tensor the parameter, and expand it in forward; or give every element its own memory, as in "
        "nn.Parameter(w.clone()).",
    ),
    (
        parameters_that(lambda param: param.is_conj()),
        "these complex parameters are views that conjugate other numbers, so that their real and imaginary parts do "
        "not lie in memory: {names}.\n"
        "Write p.data = p.data.resolve_conj() for each of them before the model is compiled.",
    ),
)
WITHOUT_VALUES: tuple[Culprits, str] = (
    parameters_that(lambda param: param.is_meta),
    "these parameters are on the meta device and have no values, so nothing can be verified, recorded or trained: "
    "{names}.\n"
    "Give them values first, as with model.to_empty(device=...) and load_state_dict. For the report alone, compile "
    "without example inputs or with verify=False.",
)


DOES_NOT_RUN = "itself does not run on these inputs"  # in the note of an error of the model's own forward


BEYOND_A_TABLE = (
    "Correct the inputs or the model: an index must be below the number of entries, as a token below num_embeddings of "
    "its nn.Embedding."
)


@contextmanager
def own_errors_told(
    model: nn.Module, parameters: Iterable[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], first: bool
) -> Iterator[None]:
    """Raises InputError for an error of the model's own forward or gradient whose cause is known: inputs of other
    dtypes than the parameters, or a derivative that lacks create_graph=True. torch's words name neither.

    first: no call was captured before, as with example inputs, so that every other error of the model's own forward
        becomes an InputError, too, as for inputs of a wrong shape or an index beyond a table.
    """
    try:
        yield
    except IndexError as error:
        if first and of_own_forward(error):
            raise InputError(f"{not_running(model, error)}\n{BEYOND_A_TABLE}") from error
        raise
    except (RuntimeError, ValueError) as error:
        own = of_own_forward(error)
        if constants := [note for note in getattr(error, "__notes__", ()) if LACKS_GRAPH in note]:
            no_gradient = f"{class_of(model).__name__} runs on these inputs, and its outputs have no gradient."
            raise InputError(f"{not_running(model, error) if own else no_gradient}\n{constants[0]}") from error
        if words := of_other_dtypes(parameters, args, kwargs, error):
            error.add_note(words)
        if own and (words or first):
            raise InputError(f"{not_running(model, error)}\n{words or what_to_correct(model, error)}") from error
        raise


def of_other_dtypes(
    parameters: Iterable[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> str:
    """The line of an error of forward about inputs whose dtype is not that of the parameters; empty if they have it.

    Inputs of integers are often meant, so they are told only where the error is about dtypes.
    """
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    of_parameters = {tensor.dtype for tensor in parameters if tensor.is_floating_point()}
    if len(of_parameters) != 1 or any(torch.is_autocast_enabled(tensor.device.type) for tensor in tensors):
        return ""
    (dtype,) = of_parameters
    others = {tensor.dtype for tensor in tensors} - of_parameters
    floating = {other for other in others if other.is_floating_point}
    if not (told := floating or (others if any(text in str(error) for text in OF_DTYPES) else floating)):
        return ""
    written = {torch.float32: "float()", torch.float64: "double()"}.get(dtype, f"to({dtype})")
    have = f"{HAVE_DTYPE} {dtype}, and the inputs {', '.join(sorted(map(str, told)))}"
    if not floating:
        return f"{have}: write x.{written} of the inputs."
    return f"{have}. If that is not meant, write x.{written} of the inputs, or convert the model before it is compiled."


HAVE_DTYPE = "The parameters have the dtype"
# what torch's errors about two dtypes say
OF_DTYPES = ("same dtype", "should be the same", "expected scalar type", "not implemented for")


def of_own_forward(error: Exception) -> bool:
    """Whether an error is of the model's own forward, which was run to be compared with its graph."""
    return any(DOES_NOT_RUN in note for note in getattr(error, "__notes__", ()))


# (an attribute of torch's layers that counts the features of their input, their dimension in the input of a module)
SIZES: tuple[tuple[str, Callable[[Any], int]], ...] = (
    ("in_features", lambda module: -1),
    ("input_size", lambda module: -1),
    ("embed_dim", lambda module: -1),
    ("in_channels", lambda module: -1 - len(module.kernel_size)),
    ("num_features", lambda module: 1),
    ("num_channels", lambda module: 1),
)
CORRECT = "Correct the inputs or the model."


def not_running(model: nn.Module, error: Exception) -> str:
    """The first lines of the error for inputs on which the model's own forward fails: torch's words, and the place."""
    failed = f"{class_of(model).__name__} does not run on these inputs: {kind_and_line(error)}"
    return "\n".join([failed, *place_of_own(model, error)])


def place_of_own(model: nn.Module, error: Exception) -> list[str]:
    """The lines about the module and the line of the user's that an error of forward comes from; none without one."""
    failing = Failing.of(model, error)
    if failing.path is None:
        return []
    shapes = ", ".join(str(list(tensor.shape)) for tensor in failing.inputs)
    got = f", which got {shapes}" if shapes else ""
    said = f"The error is of {failing.place(model)}{got}"
    return [f"{said}:", f"  {failing.source}"] if failing.source else [f"{said}."]


def what_to_correct(model: nn.Module, error: Exception) -> str:
    """The last line of the error for inputs on which the model's own forward fails."""
    failing = Failing.of(model, error)
    for name, dimension_of in SIZES if failing.inputs and is_layer_of_torch(failing.module) else ():
        size, shape = getattr(failing.module, name, None), failing.inputs[0].shape
        dimension = dimension_of(failing.module) if isinstance(size, int) else len(shape)
        if -len(shape) <= dimension < len(shape) and shape[dimension] != size:
            return (
                f"{failing.path or class_of(model).__name__} has {name}={size}, and its input {list(shape)} has "
                f"{shape[dimension]} on dimension {dimension % len(shape)}: write {name}={shape[dimension]} where it "
                f"is made, or give it an input with {size} there."
            )
    return CORRECT


def is_layer_of_torch(module: nn.Module | None) -> bool:
    """Whether a module is a layer of torch, or is derived from one, so that its attributes have torch's meaning."""
    layers = (kind.__module__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules."))
    return any(not name.endswith((".module", ".container")) for name in layers)


class ConstantDerivatives(TorchFunctionMode):
    """Inside, notes the lines of forward that take derivatives by torch.autograd.grad without create_graph=True."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad and not (kwargs or {}).get("create_graph", False):
            self.lines.append(running_line())
        return func(*args, **(kwargs or {}))

    def told(self, error: Exception) -> str | None:
        """The sentence about an error that such a derivative causes; None if there is no such derivative, or the error
        is another."""
        if not self.lines or not any(text in str(error) for text in OF_CONSTANTS):
            return None
        lines = list(dict.fromkeys(self.lines))
        many = f"derivative at {lines[0]} has" if len(lines) == 1 else f"derivatives at {listed(lines)} have"
        return (
            f"The {many} {LACKS_GRAPH}, and the graph is freed: write "
            "torch.autograd.grad(..., create_graph=True) in every derivative that forward takes."
        )


LACKS_GRAPH = "no create_graph=True, so the result is a constant"
WITHOUT_GRADIENT = "does not require grad"
OF_CONSTANTS = (WITHOUT_GRADIENT, "backward through the graph a second time")


@contextmanager
def call_noted(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Adds a note to the error of a call that does not fit the arguments of forward, and to that of a forward that
    takes derivatives and runs without gradients, as in an evaluation. Inputs of other dtypes raise the model's own
    error in a call, as without the library."""
    try:
        yield
    except InputError as error:
        own = error.__cause__
        if isinstance(own, RuntimeError) and any(HAVE_DTYPE in note for note in getattr(own, "__notes__", ())):
            raise own from None
        raise
    except TypeError as error:
        if wrong := misfit_of_call(model, args, kwargs):
            error.add_note(f"This call does not fit {wrong}. {how_to_call(model, args, kwargs)}")
        raise
    except RuntimeError as error:
        if not torch.is_grad_enabled() and WITHOUT_GRADIENT in str(error):
            place = f" at {line}" if (line := users_line(error)) else ""
            error.add_note(
                f"Forward takes a derivative{place}, and gradients are off here: call the module outside of "
                + (
                    "torch.inference_mode()."
                    if torch.is_inference_mode_enabled()
                    else "torch.no_grad(), or write with torch.enable_grad(): in forward, around all that it derives."
                )
            )
        raise


def of_derivatives(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> str:
    """The line of an error of the model's own forward that derivatives without create_graph=True cause; one forward,
    if the error is of that kind."""
    if not any(text in str(error) for text in OF_CONSTANTS):
        return ""
    with same_random(accelerators(model.parameters())), values_kept(model.buffers()):
        derivatives = ConstantDerivatives()
        try:
            with derivatives:
                model(*args, **kwargs)
        except Exception as models_own:
            if fatal(models_own):
                raise
            told = derivatives.told(models_own)
            return told or ""
    return ""


def misfit_of_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call does not fit the arguments of forward, with all culprits; None if it does."""
    try:
        signature = signature_of(model)
    except (TypeError, ValueError):  # of a callable of C
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        pass
    else:
        return None
    arguments = signature.parameters.values()
    kinds = {argument.kind for argument in arguments}
    by_place = [a.name for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    by_name = [a.name for a in arguments if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)]
    given = {*by_place[: len(args)], *(name for name in kwargs if name in by_name)}
    culprits = []
    if missing := [name for name in required_arguments(model) if name not in given]:
        culprits.append(f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if inspect.Parameter.VAR_KEYWORD not in kinds and (unknown := [name for name in kwargs if name not in by_name]):
        left = [name for name in by_name if name not in given]
        nearly = {name: nearest(name, left).strip() for name in unknown}
        named = (f"{name} ({near[0].lower()}{near[1:]})" if near else name for name, near in nearly.items())
        culprits.append(f"it has no argument {listed(named)}")
    if twice := [name for name in by_place[: len(args)] if name in kwargs]:
        culprits.append(f"{listed(twice)} {'is' if len(twice) == 1 else 'are'} given twice")
    if inspect.Parameter.VAR_POSITIONAL not in kinds and len(args) > len(by_place):
        culprits.append(f"it takes {len(by_place)} by their places, and got {len(args)}")
    return f"{class_of(model).__name__}.forward({', '.join(signature.parameters)}): {', and '.join(culprits)}"


def refuse_misfit_of_function(
    option: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises RegistrationError for a user's function of forward's arguments that does not take those of a call.

    option: the argument of `compile` that the function is.
    """
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        names = [name for name, of in inspect.signature(function).parameters.items() if of.kind not in kinds]
        if len(args) < len(names) and not kwargs.keys() >= set(names[len(args) :]):  # the call names others
            names = [*names[: len(args)], *list(kwargs)[: len(names) - len(args)]]
        raise RegistrationError(
            f"{option} is called with all arguments that forward gets, and does not take those of this call: {error}. "
            f"Write {option}=lambda {', '.join([*names, '*args', '**kwargs'])}: ..., with a default for an argument "
            "that a call leaves out."
        ) from error
    except ValueError:  # a function without a signature
        pass


NAMED_BY_MAPPING = (
    "A mapping of forward's arguments is no argument itself: write net(**batch) in a call, "
    "kfac_fx.compile(model, example_kwargs=batch), and update_covariances(**batch)."
)


def how_to_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The sentences of an error that say how a call fits the arguments of forward."""
    if mapping_of_arguments(model, args) is not None:
        return NAMED_BY_MAPPING
    arguments = signature_of(model).parameters.values()
    by_place = [a.name for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    if required_arguments(model):
        places, names = required_by_kind(model)
        names += [name for name in names_of_arguments(model) if name in kwargs and name not in (*places, *names)]
        call = ", ".join([*places, *(f"{name}={name}" for name in names)])
        text = f"Write net({call}) in a call, and kfac_fx.compile(model, {as_examples(places, names)}) before."
    else:
        known = [a.name for a in arguments if a.kind is not a.VAR_KEYWORD and a.kind is not a.VAR_POSITIONAL]
        close = [name for given in kwargs for name in get_close_matches(given, known, n=1)]
        name = (close or known)[0]
        text = f"Write net({name}=...) in a call, and example_kwargs={{{name!r}: ...}} in compile."
    labels = any(re.search("label|target", name) and name not in names_of_arguments(model) for name in kwargs)
    if len(args) <= len(by_place) and not labels:
        return text
    return f"{text} Targets are no arguments of this forward: where a method of kfac_fx takes them, write targets=y."


def how_to_give_examples(model: nn.Module) -> str:
    """The words of an error that say how `compile` takes example inputs of this model."""
    try:
        number, (places, names) = len(signature_of(model).parameters), required_by_kind(model)
    except (TypeError, ValueError):  # of a callable of C
        number, places, names = 1, ["x"], []
    if not number:
        return "write kfac_fx.compile(model, (), ...), since forward has no arguments"
    by_name = "kfac_fx.compile(model, example_kwargs=batch, ...) for a batch that it is called with as model(**batch)"
    if not places and not names:
        return f"write {by_name}"
    by_place = f"write kfac_fx.compile(model, {as_examples(places, names)}, ...) for the arguments of one batch"
    return by_place if number == 1 else f"{by_place}, or {by_name}"


def as_examples(places: Sequence[str], names: Sequence[str]) -> str:
    """`"(x,), example_kwargs={'mask': mask}"`: arguments of `compile` for these of forward."""
    examples = [f"({', '.join(places)}{',' * (len(places) == 1)})"] if places else []
    return ", ".join([*examples, *([f"example_kwargs={{{', '.join(f'{n!r}: {n}' for n in names)}}}"] if names else [])])


def mapping_of_arguments(model: nn.Module, args: Sequence[Any]) -> Mapping[str, Any] | None:
    """The argument by position that is a mapping of forward's arguments by name, as a batch of a loader is."""
    try:
        names = signature_of(model).parameters.keys()
    except (TypeError, ValueError):  # of a callable of C
        return None
    return next((arg for arg in args if isinstance(arg, Mapping) and arg and names >= arg.keys()), None)


def required_arguments(model: nn.Module) -> list[str]:
    """The names of forward's arguments that have no default."""
    places, names = required_by_kind(model)
    return [*places, *names]


def required_by_kind(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of forward's arguments without a default: (those given by place, those given by name alone)."""
    arguments = signature_of(model).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [a for a in arguments if a.default is inspect.Parameter.empty and a.kind not in optional]
    return [a.name for a in required if a.kind is not a.KEYWORD_ONLY], [
        a.name for a in required if a.kind is a.KEYWORD_ONLY
    ]


def names_of_arguments(model: nn.Module) -> list[str]:
    """The names by which forward takes arguments."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, argument in signature_of(model).parameters.items() if argument.kind in kinds]


def with_targets(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any, declared: bool
) -> dict[str, Any]:
    """The arguments by name of a call, with the targets of a batch where forward has an argument of that name that the
    call does not give. Those of a declared loss are in them only if forward needs them.

    declared: whether the loss is declared, and not computed by forward.
    """
    if targets is None:
        return dict(kwargs)
    try:
        signature = signature_of(model)
        given = {**signature.bind_partial(*args).arguments, **kwargs}
    except (TypeError, ValueError):  # of a callable of C, or too many arguments
        return dict(kwargs)
    argument = signature.parameters.get("targets")
    by_name = argument is not None and argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    if argument is None or not by_name or "targets" in given:
        return dict(kwargs)
    return {**kwargs, "targets": targets} if not declared or argument.default is argument.empty else dict(kwargs)


def how_to_give_labels(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The sentence of an error about a call that lacks what forward computes its loss from."""
    try:
        names = names_of_arguments(model)
        given = [name for name in names if name in {**signature_of(model).bind_partial(*args).arguments, **kwargs}]
    except (TypeError, ValueError):  # of a callable of C
        names, given = [], []
    left = [name for name in names if name not in given]
    labels = next((name for name in left if re.search("label|target", name)), (*left, "labels")[0])
    known = [name if n < len(args) else f"{name}={name}" for n, name in enumerate(given)] or ["ids"]
    pair = "" if labels == "targets" else "; a pair (x, y) has y for targets= of a declared loss, and not for forward"
    return f"Pass it as forward takes it, as in kfac_fx.Batch({', '.join([*known, f'{labels}=y'])}){pair}."


def refuse(model: nn.Module, culprits: Culprits, message: str) -> None:
    """Raises UntraceableError with the names of all culprits."""
    if names := culprits(model):
        raise UntraceableError(message.format(names=", ".join(names)))


def refuse_unfit(model: nn.Module) -> None:
    """Raises UntraceableError for what no capture can do anything with, with all culprits."""
    for culprits, message in UNFIT_MODELS:
        refuse(model, culprits, message)
    refuse_without_forward(model)
    refuse_overlapping(model)


def refuse_without_forward(model: nn.Module) -> None:
    """Raises UntraceableError for a module that is called by methods of its own alone, or that only holds others."""
    if getattr(type(model), "forward", None) is not nn.Module.forward or "forward" in vars(model):
        return
    parts = [name for name, part in model.named_children() if any(p.requires_grad for p in part.parameters())]
    by_parts = (
        f"; or compile the submodules that the training calls, of {', '.join(parts)}, each with an optimizer of its own"
        if parts
        else ""
    )
    raise UntraceableError(
        f"{class_of(model).__name__} has no forward, and a capture is one of forward: give it one that computes what "
        "the training needs, and call the module instead of its other methods, as in "
        f"`def forward(self, x): return self.encoder(x), self.head(x)`{by_parts}"
    )


def refuse_without_values(model: nn.Module) -> None:
    """Raises UntraceableError for parameters on the meta device."""
    refuse(model, *WITHOUT_VALUES)


def refuse_overlapping(model: nn.Module) -> None:
    """Raises UntraceableError for trained parameters that share elements in memory.

    Autograd would give each of them a gradient and an optimizer a step. Parts of one long vector may lie side by side.
    """
    by_memory: dict[tuple[int, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad and param.numel() and (place := address(param)):
            by_memory.setdefault((place, param.dtype), []).append((name, param.detach()))
    pairs = [pair for members in by_memory.values() if len(members) > 1 for pair in overlaps(members)]
    if pairs:
        rows = table((later, f"has elements of {earlier}") for earlier, later in pairs)
        raise UntraceableError(
            f"parameters share memory and are not the same parameter:\n{rows}\n"
            f"Tie them by name, as in model.{pairs[0][1]} = model.{pairs[0][0]}, or clone one."
        )


def overlaps(members: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Names of tensors in one memory, each behind an earlier one that shares elements with it."""
    ends = sorted((tensor.storage_offset(), tensor.storage_offset() + extent(tensor)) for _, tensor in members)
    if all(end <= start for (_, end), (start, _) in pairwise(ends)):
        return
    owner = torch.full((max(end for _, end in ends),), -1)
    for number, (name, tensor) in enumerate(members):
        distinct = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        places = owner.as_strided(distinct, tensor.stride(), tensor.storage_offset())
        if (taken := int(places.max())) >= 0:
            yield members[taken][0], name
        places.fill_(number)


def extent(tensor: Tensor) -> int:
    """The number of elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# --- calls that record nothing ----------------------------------------------------------------------------------------


def refuse_inference_mode(what: str) -> None:
    """Raises RuntimeError in `torch.inference_mode`, whose tensors autograd cannot use afterwards."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{what} in torch.inference_mode, whose tensors autograd cannot use afterwards: leave the block before, or "
            "write torch.no_grad() in its place"
        )


def refuse_untrained(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises RegistrationError if none of the named parameters is trained, because then there is no Fisher."""
    parameters = dict(named)
    if not any(param.requires_grad for param in parameters.values()):
        what = f"all {len(parameters):,} are frozen, with requires_grad=False" if parameters else "the model has none"
        raise RegistrationError(
            f"the Fisher is of trained parameters, and there are none: {what}.\n"
            "Unfreeze the parameters to train, as with model.requires_grad_(True), before kfac_fx.compile."
        )


def refuse_without_blocks(registrations: Sequence[Registration], named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises RegistrationError if there is no registration to make a Fisher block of."""
    if not registrations:
        refuse_untrained(named := list(named))
        trained = ", ".join(name for name, param in named if param.requires_grad)
        raise RegistrationError(
            "there is no Fisher block: none of the trained parameters is registered, because the losses depend on none "
            f"of them or `variables` names none: {trained}.\n"
            "print(net.report) says what became of each. Let forward return values that are computed from them. Usual "
            "causes are torch.no_grad(), a detach(), and a derivative by torch.autograd.grad(..., create_graph=False): "
            "without create_graph=True it is a constant."
        )


NAMED = 6  # culprits, of a list of many


class Structure:
    """The modules and parameters of a model when it was compiled. A check costs one dictionary look-up for each."""

    def __init__(self, model: nn.Module, on_shards: Callable[[], None]) -> None:
        """on_shards: called when FSDP2 was seen to have sharded the parameters; it calls `follow_shards`, or raises."""
        self.model, self.on_shards = model, on_shards
        self.objects = named_objects(model)
        self.modules = list(model.modules())
        self.holders = [held(module) for module in self.modules for held in (parameters_of, submodules_of)]
        self.held: list[dict[str, Any]] = [dict(holder) for holder in self.holders]
        self.shapes = {name: (parameter, parameter.shape) for name, parameter in model.named_parameters()}
        self.sharded = False  # FSDP2 swaps the parameters of its units, so that names and shapes tell what they are

    def follow_shards(self) -> None:
        """Take the shards that FSDP2 has made of the parameters for these. Frees the memory of the whole parameters,
        which this and the captured graph hold: they are NaN from now on."""
        for name, now in self.model.named_parameters(remove_duplicate=False):
            before = self.objects.get(name, now)
            if before is not now:
                before.grad = None
                before.data = torch.full((), torch.nan, dtype=before.dtype, device=before.device).expand(before.shape)
        self.sharded = True
        self.shapes = {name: (parameter, parameter.shape) for name, parameter in self.model.named_parameters()}

    @property
    def parameters(self) -> Iterable[Tensor]:
        """Those of the model, after `check`: a walk through a model of many layers takes longer than one of them."""
        return self.model.parameters() if self.sharded else (parameter for parameter, _ in self.shapes.values())

    @property
    def same(self) -> bool:
        """Whether the model holds the modules and parameters that it held then."""
        return all(map(same_objects, self.holders, self.held))

    @property
    def lent(self) -> bool:
        """Whether other tensors stand for parameters in this call alone, as in torch.func.functional_call. Only there
        tensors that are no parameters are held as such."""
        if self.same or self.sharded:
            return False
        kinds = (isinstance(tensor, nn.Parameter) for tensor in self.model.parameters())
        return in_functional_call() or not all(kinds)

    def check(self, same: bool = False) -> None:
        """Raises ModelChangedError with the names of all that was replaced, added or removed, or has another shape.

        same: whether `same` is known to be true."""
        if same or self.same:
            self.check_shapes()
            return
        if not self.sharded and any(map(is_sharded, self.model.parameters())):
            self.on_shards()
        now = named_objects(self.model)
        changed = [
            name
            for name in dict.fromkeys((*self.objects, *now))
            if not self.is_same(self.objects.get(name), now.get(name))
        ]
        if not changed:
            return
        if self.lent:
            raise ModelChangedError(
                "statistics are recorded of the model's own parameters, and other tensors stand for them in this call, "
                f"as in torch.func.functional_call: {', '.join(changed)}.\n"
                "Record outside of it, with the values of these tensors: net.record((x,), {}, parameters={name: "
                "tensor})."
            )
        inner = [name for name in changed if not any(other.startswith(f"{name}.") for other in changed)]
        many = "1 parameter or module was" if len(inner) == 1 else f"{len(inner)} parameters or modules were"
        raise ModelChangedError(
            f"{many} replaced, added or removed after kfac_fx.compile: {', '.join(map(repr, inner[:NAMED]))}"
            f"{f' and {len(inner) - NAMED} more' if len(inner) > NAMED else ''}.\n"
            "The factors and the optimizer still hold the old ones. Compile again, or change values in place with "
            "parameter.data.copy_(...) or load_state_dict without assign=True, which replaces parameters."
        )

    def check_shapes(self) -> None:
        """Raises ModelChangedError for parameters whose `data` was replaced by a tensor of another shape."""
        changed = [
            (name, f"was {list(shape)} and is {list(parameter.shape)}")
            for name, (parameter, shape) in self.shapes.items()
            if parameter.shape != shape
        ]
        if changed:
            raise ModelChangedError(
                f"parameters have another shape than when kfac_fx.compile was called:\n{table(changed)}\n"
                "Their factors and momenta have the old shape. Compile again, and create the optimizer again."
            )

    def is_same(self, before: Any, now: Any) -> bool:
        """Whether a module or a parameter is what it was, up to the shards that FSDP2 makes of it."""
        if before is now or not self.sharded or not isinstance(before, Tensor) or not isinstance(now, Tensor):
            return before is now
        return before.shape == now.shape and before.dtype == now.dtype


def same_objects(holder: dict[str, Any], held: dict[str, Any]) -> bool:
    return len(holder) == len(held) and all(map(is_, map(holder.get, held), held.values()))


def named_objects(model: nn.Module) -> dict[str, Any]:
    """All modules and parameters under all their names."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    return modules | dict(model.named_parameters(remove_duplicate=False))


class Trained:
    """The parameters of a model that were trained at any time since it was compiled.

    A parameter that was trained once stays registered. While it is frozen its statistics pause, and captures treat it
    as if it were trained, so that it keeps its block. A parameter that is trained for the first time after compile
    needs captures in which it is registered.
    """

    def __init__(self, model: nn.Module) -> None:
        self.registered = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.dormant = {name: p for name, p in model.named_parameters() if not p.requires_grad}

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take these instead of those that FSDP2 has sharded."""
        self.registered = {name: parameters[name] for name in self.registered}
        self.dormant = {name: parameters[name] for name in self.dormant}

    @property
    def any_now(self) -> bool:
        """Whether any parameter is trained at present."""
        return any(p.requires_grad for p in self.registered.values()) or self.unfrozen

    @property
    def unfrozen(self) -> bool:
        """Whether a parameter is trained that was frozen in all captures."""
        return any(p.requires_grad for p in self.dormant.values())

    def take_unfrozen(self) -> list[str]:
        """Register what was unfrozen. Returns the names."""
        names = [name for name, p in self.dormant.items() if p.requires_grad]
        self.registered |= {name: self.dormant.pop(name) for name in names}
        return names

    @contextmanager
    def in_captures(self) -> Iterator[None]:
        """Inside, all that was ever trained requires gradients."""
        frozen = [p for p in self.registered.values() if not p.requires_grad]
        try:
            for p in frozen:
                p.requires_grad_(True)
            yield
        finally:
            for p in frozen:
                p.requires_grad_(False)
