"""`kfac_fx.compile`: from a model to a module of the same signature that can record its Fisher statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from kfac_fx.checks.unchanged import refuse_unfit, unwrapped
from kfac_fx.compiled_module import CompiledModule
from kfac_fx.layer_collection import LayerCollection
from kfac_fx.losses.registered import loss_from
from kfac_fx.passes.errors import LinkError, RegistrationError, nearest
from kfac_fx.passes.ir import Options
from kfac_fx.passes.layers import LAYERS, Layer, collect
from kfac_fx.recording.agreement import Declared
from kfac_fx.recording.backends import BACKENDS
from kfac_fx.recording.masks import PaddingMask
from kfac_fx.taps.subsample import read_sampling

DENSE_LIMIT = 4096


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
    sub_sample_inputs: bool | float = False,
    sub_sample_patches: bool | float = False,
    variables: Iterable[Any] | None = None,
) -> CompiledModule:
    """Capture `model` and register every use of every parameter.

    Args:
        model: any module; its parameters stay the same objects. In a wrapper of data parallelism or torch.compile,
            names are those of the module inside. Or a LayerCollection, which says the rest, too.
        example_inputs, example_kwargs: inputs to capture with; without them the model is traced symbolically at once
            or, where that cannot see it whole, captured at its first training forward.
        loss: "categorical", "normal", "multi_bernoulli", a class of `kfac_fx.losses`, or a function of the model's
            outputs that returns a loss; None: found in the graph where forward computes it.
        linked: groups of parameter names that belong in one Fisher block, or {group: approximation}.
        approximations: {parameter or module name, with *; layer name; module class: approximation}.
        layers: the user's own layer declarations; they win over ours of the same form.
        strict: a parameter that would become generic is an error.
        verify: compare the graph with the model on the first batch, and prove that rows reproduce the autograd
            gradient. Takes about three training steps' time, and at most the memory of one, one more gradient of all
            parameters, three times the largest matrix and twice the patches of the largest convolution: 1.5 times a
            step's tensors for a ResNet-50, 1.2 times for a small GPT. False: nothing is run, nothing proved.
        backend: "eager", "inductor" or "cudagraphs" (inductor with CUDA graphs), for recording, training and KFAC.
        dense_limit: no factor takes more memory than a dense one of this width: a wider side keeps diagonal blocks
            only, or its diagonal if it makes the Fisher's outputs, and the report says so.
        padding_mask: the name of an argument of forward, [cases, positions], nonzero where a position is real, such as
            "attention_mask"; or a function of forward's arguments that computes it, such as lambda ids: ids != 0. What
            is padding enters no factor and is no case; the report says where the mask does not fit. The loss's mean
            should leave padding out, too, as with targets of -100.
        sub_sample_inputs: compute input factors from this share of the cases; True: 0.2.
        sub_sample_patches: and from so many rows for each of their inputs at most, as there are many where a weight is
            shared by positions; True: 3. Both are right in expectation, with other rows at every recording.
        variables: of a LayerCollection, the parameters that must be registered, and no others; None: all that its
            losses depend on. What is left out follows KFAC's first-order rule.

    Raises UntraceableError, RegistrationError and its kinds, LossError, LayerError; each names all culprits.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is none of {', '.join(BACKENDS)}.{nearest(backend, BACKENDS)}")
    if isinstance(model, LayerCollection):
        given = {
            "example_inputs": example_inputs,
            "example_kwargs": example_kwargs,
            "loss": loss,
            "linked": linked,
            "approximations": approximations,
            "layers": layers,
            "strict": strict,
            "dense_limit": dense_limit != DENSE_LIMIT,
            "padding_mask": padding_mask,
            "sub_sample_inputs": sub_sample_inputs,
            "sub_sample_patches": sub_sample_patches,
        }
        if said := ", ".join(name for name, value in given.items() if value):
            raise RegistrationError(f"a LayerCollection says these itself, or its capture does; leave them out: {said}")
        return compiled_collection(model, variables, verify=verify, backend=backend)
    if variables is not None:
        raise RegistrationError(
            "variables belong to a LayerCollection; of a model every parameter is registered, but for those that are "
            "frozen with requires_grad_(False)"
        )
    if isinstance(model, CompiledModule):
        raise RegistrationError("the module is compiled already; hand kfac_fx.compile the original model, net.model")
    if not isinstance(model, nn.Module):
        raise TypeError(f"kfac_fx.compile takes a torch.nn.Module, not a {type(model).__name__}")
    wrapper, model = model, unwrapped(model)
    if inner := [name for name, one in model.named_modules() if isinstance(one, CompiledModule)]:
        raise RegistrationError(
            f"modules inside are compiled already, and would be captured twice: {', '.join(inner)}; put net.model there"
        )
    refuse_unfit(model)
    if isinstance(linked, str) or (not isinstance(linked, Mapping) and any(isinstance(group, str) for group in linked)):
        raise LinkError('linked takes groups of names, as in linked=[("fc.weight", "fc.bias")]; names were given')
    groups = linked if isinstance(linked, Mapping) else dict.fromkeys(map(tuple, linked))
    options = Options(
        linked={frozenset([group] if isinstance(group, str) else group): value for group, value in groups.items()},
        approximations=approximations or {},
        strict=strict,
        loss_given=loss is not None,
        modules={name: type(module) for name, module in model.named_modules(remove_duplicate=False) if name},
        dense_limit=dense_limit,
        sampling=read_sampling(sub_sample_inputs, sub_sample_patches),
    )
    declared = Declared(
        options,
        collect(*LAYERS.values(), *layers),
        None if loss is None else loss_from(loss),
        verify,
        backend,
        padding_mask=padding_mask,
    )
    return CompiledModule(model, declared, example_inputs, example_kwargs, wrapper=wrapper)


def compiled_collection(
    collection: LayerCollection,
    variables: Iterable[Any] | None = None,
    *,
    verify: bool = True,
    backend: str = "eager",
) -> CompiledModule:
    """A module with the registrations and the losses of a collection, which becomes final if no error is raised.

    variables: the parameters that must be registered, and no others; None: all that the losses depend on.
    """
    collection.check_final(variables)
    captured = collection.captured
    declared = Declared(
        captured.program.options, collection.layers, collection.registered_losses, verify, backend, collection.on
    )
    net = CompiledModule(captured.model, declared, captured.args, captured.kwargs, captured.capture)
    net._collection, collection.finalized = collection, True
    return net
