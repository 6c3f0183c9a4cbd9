"""`kfac_fx.compile` and `kfac_fx.capture`: their arguments, checked, and the model, made ready for a capture.

`compile` returns a module of the same signature that can record its Fisher statistics. `capture` returns one graph, to
register its layers by hand in a LayerCollection, which `compile` takes in the place of a model.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from kfac_fx.compiled.captured_model import CapturedModel
from kfac_fx.compiled.compiled_module import CompiledModule
from kfac_fx.compiled.layer_collection import LayerCollection
from kfac_fx.compiled.names import as_written
from kfac_fx.linalg.arguments import a_flag, choice
from kfac_fx.losses.spec import loss_from
from kfac_fx.passes.errors import ApproximationError, LayerError, LinkError, RegistrationError, UntraceableError
from kfac_fx.passes.ir import Options
from kfac_fx.passes.layers import LAYERS, Layer, collect
from kfac_fx.passes.pipeline import CAPTURED, run
from kfac_fx.passes.trace import trace_model
from kfac_fx.recording.backends import COMPILE_BACKENDS
from kfac_fx.recording.captures import CompileArguments
from kfac_fx.recording.masks import PaddingMask
from kfac_fx.recording.model_checks import refuse_compiled, refuse_inference_mode, refuse_unfit, unwrapped
from kfac_fx.recording.taps import read_sampling

DENSE_LIMIT = Options.dense_limit
ONE_GRAPH = (
    "A LayerCollection is registered on the nodes of one graph. kfac_fx.compile captures such a model in parts: say "
    "there what you would register by hand, with approximations=..., linked=... and layers=...."
)


def compile(
    model: nn.Module | LayerCollection,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Any = None,
    linked: Sequence[Iterable[str]] | Mapping[Sequence[str], str] = (),
    approximations: Mapping[Any, str] | None = None,
    layers: Sequence[Layer] = (),
    strict: bool = False,
    verify: bool = True,
    backend: str = "eager",
    dense_limit: int = DENSE_LIMIT,
    padding_mask: PaddingMask | None = None,
    batch_dim: int | None = None,
    sub_sample_inputs: bool | float = False,
    sub_sample_patches: bool | float = False,
    variables: Iterable[Any] | None = None,
    in_place: bool = False,
) -> CompiledModule:
    """Capture `model` and register every use of every parameter.

    Args:
        model: any module, also in a wrapper of data parallelism or torch.compile; parameters have the names of the
            module inside, and stay the same objects. Or a LayerCollection, whose registrations and losses are used.
        example_inputs, example_kwargs: inputs to capture with. Without them torch.fx traces the model at once or, if it
            cannot trace all of it, the model is captured at its first training forward.
        loss: the name of a loss of torch with its mean, such as "cross_entropy", "mse" or "bce_with_logits"; the name
            of a distribution whose loss is a sum over the elements of a case, such as "categorical", "normal"
            (variance 0.5) or "multi_bernoulli"; a class of `kfac_fx.losses`; or a function of the model's outputs that
            returns a loss. None: the loss is found in the graph of forward.
        linked: groups of parameter names that belong in one Fisher block, or {group: approximation}.
        approximations: {parameter or module name, with *; layer name; module class: approximation}. The table
            `kfac_fx.passes.approximations` lists them: "kron" and its variants with diagonal sides; "kron_reduce", with
            one row per case where positions share a weight; "kron_series_1" and "kron_series_2" for uses in the order
            of time; "kron_sua" for convolutions; "diagonal", "full", and "generic" for parameters of no layer.
        layers: the user's own layer declarations; they win over those of the library with the same form.
        strict: raise an error for a parameter that would become generic.
        verify: compare the graph with the model on the first batch, and prove that rows reproduce the autograd
            gradient. This takes about the time of three training steps and at most the memory of one, one more gradient
            of all parameters, three times the largest matrix and twice the patches of the largest convolution: 1.5
            times a step's tensors for a ResNet-50, 1.2 times for a small GPT. If `approximations` asks for "diagonal"
            or "full", there are two more backwards for every bit of the number of cases. False: nothing is run or
            proved.
        backend: "eager", "inductor" or "cudagraphs" (inductor with CUDA graphs), for recording, training and KFAC.
        dense_limit: the width of the largest dense factor. A wider side keeps diagonal blocks or, if it makes the
            Fisher's outputs, its diagonal, which take no more memory; the report says so.
        padding_mask: the name of an argument of forward [cases, positions], nonzero where a position is real, such as
            "attention_mask"; or a function of forward's arguments that computes it, such as lambda ids: ids != 0.
            Padding enters no factor and is no case; a mask that fits no use is an error, and a warning and the report
            say where it does not fit. The mean of the loss should leave padding out, too, as it does with targets of
            -100.
        batch_dim: the dimension of the cases in the inputs, 1 for [positions, cases, features]. None: recurrent layers
            and attention of torch know it, from their `batch_first`; without them it is the first one, and a model
            whose outputs mix along the first dimension and not along another is refused. The report says which.
        sub_sample_inputs: compute input factors from this share of the cases. True means 0.2.
        sub_sample_patches: use at most this many rows per input dimension of A, for weights that are shared over
            positions. True means 3. Both samples are right in expectation, and differ in every recording.
        variables: the parameters of a LayerCollection that must be registered, and no others; the rest follows KFAC's
            first-order rule. None: all that its losses depend on.
        in_place: the model itself records, too: while an optimizer is attached, a call of `model` is a call of the
            module that is returned. For trainers, which inspect, wrap and save the object that they call. Copies and
            pickles of the model do not record.

    Returns a module with the calls, parameters, buffers, state and modes of `model`.

    Raises:
        UntraceableError: the model cannot be captured.
        RegistrationError (or a subclass): registrations or arguments contradict each other, or under `strict` a
            parameter would be generic.
        LossError, LayerError: wrong losses or layer declarations.
        ValueError, TypeError: an unknown backend; no module.

    Each error names all culprits.
    """
    for option, flag in {"strict": strict, "verify": verify, "in_place": in_place}.items():
        a_flag(option, flag)
    choice("backend", backend, COMPILE_BACKENDS)
    refuse_inference_mode("a model is compiled")
    refuse_other_inputs(example_inputs, example_kwargs)
    if isinstance(model, LayerCollection):
        of_collection = {
            "example_inputs": example_inputs,
            "example_kwargs": example_kwargs,
            "loss": loss,
            "linked": linked,
            "approximations": approximations,
            "layers": layers,
            "strict": strict,
            "dense_limit": dense_limit != DENSE_LIMIT,
            "padding_mask": padding_mask,
            "batch_dim": batch_dim is not None,
            "sub_sample_inputs": sub_sample_inputs,
            "sub_sample_patches": sub_sample_patches,
        }
        if names := ", ".join(name for name, value in of_collection.items() if value):
            raise RegistrationError(
                f"with a LayerCollection, do not pass {names}: set them on the collection or in kfac_fx.capture(...)"
            )
        return compiled_collection(model, variables, verify=verify, backend=backend, in_place=in_place)
    if variables is not None:
        raise RegistrationError(
            "variables are for a LayerCollection; of a model, every parameter is registered that is not frozen with "
            "requires_grad_(False)"
        )
    inside, options, declared = prepared(model, "kfac_fx.compile", layers, dense_limit)
    refuse_other_approximations(approximations, inside)
    refuse_other_links(linked, inside)
    groups = linked if isinstance(linked, Mapping) else dict.fromkeys(map(tuple, linked))
    options = replace(
        options,
        linked={frozenset([group] if isinstance(group, str) else group): value for group, value in groups.items()},
        approximations=approximations or {},
        strict=strict,
        loss_given=loss is not None,
        batch_dim=read_batch_dim(batch_dim),
        sampling=read_sampling(sub_sample_inputs, sub_sample_patches),
    )
    arguments = CompileArguments(
        options,
        declared,
        None if loss is None else loss_from(loss),
        verify,
        backend,
        padding_mask=padding_mask,
    )
    return CompiledModule(inside, arguments, example_inputs, example_kwargs, wrapper=model, in_place=in_place)


def compiled_collection(
    collection: LayerCollection,
    variables: Iterable[Any] | None = None,
    *,
    verify: bool = True,
    backend: str = "eager",
    in_place: bool = False,
) -> CompiledModule:
    """A module with the registrations and the losses of a collection, which becomes final if no error is raised.

    variables: the parameters that must be registered, and no others; None: all that the losses depend on.

    Raises RegistrationError and its kinds, LossError.
    """
    collection.check_final(variables)
    captured = collection.captured
    arguments = CompileArguments(
        captured.program.options, collection.layers, collection.registered_losses, verify, backend, collection.on
    )
    net = CompiledModule(
        captured.model,
        arguments,
        captured.args,
        captured.kwargs,
        captured.capture,
        wrapper=captured.wrapper,
        in_place=in_place,
    )
    net._collection, collection.finalized = collection, True
    return net


def capture(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    layers: Sequence[Layer] = (),
    dense_limit: int = DENSE_LIMIT,
) -> CapturedModel:
    """Capture a model as one graph, to register its layers in a `LayerCollection`.

    Args:
        model: the model, also in a wrapper of data parallelism or torch.compile. Its parameters stay the same objects,
            and have the names of the module inside.
        example_inputs, example_kwargs: inputs to capture with, a tuple or one tensor. Without them torch.fx traces the
            model symbolically, if the model allows it.
        layers: the user's own layer declarations, see `kfac_fx.layer`.
        dense_limit: `auto_register_layers` makes a factor side that is wider than this block-diagonal.

    Raises UntraceableError if no single graph holds the model, LayerError for declarations that contradict others,
    RegistrationError for a compiled module and for a model with compiled submodules.
    """
    refuse_inference_mode("a model is captured")
    refuse_other_inputs(example_inputs, example_kwargs)
    inside, options, declared = prepared(model, "kfac_fx.capture", layers, dense_limit)
    args = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    options = replace(
        options, loss_given=True, strict=True
    )  # a registration by hand that the proof refutes is an error
    try:
        traced = trace_model(inside, args, example_kwargs, options=options, layers=declared)
    except UntraceableError as error:
        raise UntraceableError(f"{error}\n{ONE_GRAPH}") from error
    return CapturedModel(inside, traced, run(traced.program, CAPTURED), args, dict(example_kwargs or {}), model)


# --- arguments --------------------------------------------------------------------------------------------------------


def prepared(
    model: nn.Module, by: str, layers: Sequence[Layer], dense_limit: int
) -> tuple[nn.Module, Options, dict[str, Layer]]:
    """(the module inside of wrappers, the options that all captures of it have, all layers by name).

    by: the function that takes the model.

    Raises TypeError for anything but a module, UntraceableError for one that no capture can do anything with,
    RegistrationError for a compiled one and for another limit, LayerError for other layers.
    """
    refuse_other_models(model, by)
    model = unwrapped(model)
    refuse_compiled(model, by)
    refuse_unfit(model)
    refuse_unfit_names(model)
    refuse_other_limit(dense_limit)
    modules = {name: type(module) for name, module in model.named_modules(remove_duplicate=False) if name}
    return (
        model,
        Options(modules=modules, dense_limit=dense_limit),
        collect(*LAYERS.values(), *refuse_other_layers(layers)),
    )


def refuse_other_models(model: Any, by: str) -> None:
    """Raises TypeError for anything but a module."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"{by} takes a torch.nn.Module, and got the class: write {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{by} takes a torch.nn.Module, not a {type(model).__name__}")


UNFIT = "\"'\\\n\r\0"  # characters that generated code does not quote


def refuse_unfit_names(model: nn.Module) -> None:
    """Raises UntraceableError for names of modules and parameters that torch cannot write into the code of a graph.

    Quotes in a name would be executed as code.
    """
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    unfit = [
        name
        for name in dict.fromkeys(names)
        if any(c in UNFIT for c in name) or any(map(keyword.iskeyword, name.split(".")))
    ]
    if unfit:
        raise UntraceableError(
            f"torch cannot write these names into the code of a graph: {', '.join(map(ascii, unfit))}.\n"
            "Rename the modules and parameters, without quotes, backslashes, line breaks and keywords of Python."
        )


def refuse_other_inputs(args: Any, kwargs: Any) -> None:
    """Raises TypeError unless these are the arguments of a call: several or one tensor, and some by name."""
    if args is not None and not isinstance(args, (tuple, list, Tensor)):
        wanted = "example_kwargs={'x': x} for arguments by name" if isinstance(args, Mapping) else "(x,) for one tensor"
        raise TypeError(f"example_inputs is a {type(args).__name__}; it must be a tuple: write {wanted}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"example_kwargs is a {type(kwargs).__name__}; it must be a dict, as in {{'mask': mask}}")


def refuse_other_layers(layers: Any) -> list[Any]:
    """The layers. Raises LayerError unless there are several; what they are is checked where they are collected."""
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        kind = type(layers).__name__
        raise LayerError(f"layers takes a list of layers that @kfac_fx.layer(...) declares, and got a {kind}")
    return list(layers)


def refuse_other_approximations(approximations: Any, model: nn.Module) -> None:
    """Raises ApproximationError unless this is {name or class: approximation}."""
    if approximations is None:
        return
    if not isinstance(approximations, Mapping):
        raise ApproximationError(
            'approximations takes {name of a parameter or a module: approximation}, as in approximations={"*": '
            f'"diagonal"}}, and got {approximations!r}'
        )
    if wrong := [key for key in approximations if not isinstance(key, (str, type))]:
        raise ApproximationError(
            f"the keys of approximations are names or classes of modules: {as_written(wrong, model)}"
        )


def refuse_other_links(linked: Any, model: nn.Module) -> None:
    """Raises LinkError unless these are groups of names; a key of a mapping may be one name."""
    groups = list(linked) if isinstance(linked, Iterable) and not isinstance(linked, (str, Tensor)) else [linked]
    groups = [(group,) if isinstance(group, str) and isinstance(linked, Mapping) else group for group in groups]
    if wrong := [group for group in groups if isinstance(group, (str, Tensor)) or not isinstance(group, Iterable)]:
        kind = "names" if isinstance(wrong[0], str) else f"a {type(wrong[0]).__name__}"
        raise LinkError(f'linked takes groups of names, as in linked=[("fc.weight", "fc.bias")], not {kind}')
    members = [member for group in groups for member in group]
    if wrong := [member for member in members if not isinstance(member, str)]:
        raise LinkError(f"linked takes groups of names: {as_written(wrong, model)}")


def refuse_other_limit(limit: Any) -> None:
    """Raises RegistrationError unless the width of a factor is a whole number, at least 1."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise RegistrationError(f"dense_limit is {limit!r}; it must be a whole number of columns, at least 1")


def read_batch_dim(dim: Any) -> int | None:
    """Raises RegistrationError for anything but a dimension."""
    if dim is None or (isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0):
        return dim
    raise RegistrationError(
        f"batch_dim is {dim!r}; it must be the number of a dimension of the inputs, counted from 0, as in batch_dim=1 "
        "for [positions, cases, features]"
    )
