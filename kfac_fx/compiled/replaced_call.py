"""The calls of a model, those that a compiled module takes in their place, and the optimizer that is told about them.

A module that is compiled in place takes the calls of its model, as `nn.Module.compile` does: the model stays the object
that users and trainers call, and copies of it have the plain call. kfac_fx calls the model itself, too, to capture it,
to compare it with its graph and to compute its outputs; those calls must run as they are. A Trainer of Hugging Face
needs a module that is compiled in place, and is told so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from torch import nn

from kfac_fx.passes.torch_private import class_of
from kfac_fx.passes.users_code import warn_user

RUNNING: ContextVar[frozenset[int]] = ContextVar("RUNNING", default=frozenset())  # the models that kfac_fx runs itself
OUTSIDE = "kfac_fx records outside of compiled code; kfac_fx.compile(model, backend=...) compiles what can be compiled"


@runtime_checkable
class ForwardListener(Protocol):
    """An optimizer, which a compiled module tells about its forwards."""

    def forgetting_on_error(self) -> AbstractContextManager[None]:
        """Entered around every forward in training mode with gradients enabled, which may raise."""

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before every forward in training mode with gradients enabled.

        Returns the outputs, or None if the model is to compute them.
        """

    def on_outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Called after every such forward, with the outputs that the user gets."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Called after the gradients of the module are zeroed."""


class HasModel(Protocol):
    @property
    def model(self) -> nn.Module: ...


HasModelT = TypeVar("HasModelT", bound=HasModel)
P = ParamSpec("P")
ResultT = TypeVar("ResultT")


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Calls of the model inside are no calls of the user."""
    token = RUNNING.set(RUNNING.get() | {id(model)})
    try:
        yield
    finally:
        RUNNING.reset(token)


def is_running(model: nn.Module) -> bool:
    return id(model) in RUNNING.get()


def runs_the_model(
    method: Callable[Concatenate[HasModelT, P], ResultT],
) -> Callable[Concatenate[HasModelT, P], ResultT]:
    """Decorate a method that calls the model itself; see `running`."""

    @functools.wraps(method)
    def inside(self: HasModelT, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        with running(self.model):
            return method(self, *args, **kwargs)

    return inside


def with_signature_of(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function `forward(self, ...)` with the signature of the model's forward, which tells trainers the inputs."""

    @functools.wraps(forward)
    def with_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # of a forward that is no Python function
        return forward
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    arguments = [argument for name, argument in signature.parameters.items() if name != "self"]
    cast(Any, with_signature).__signature__ = signature.replace(parameters=[itself, *arguments])
    return with_signature


def callers() -> Iterator[Any]:
    """The `self` of every frame above, from the nearest on."""
    frame = inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


def warn_of_trainer(net: nn.Module, model: nn.Module) -> None:
    """Warn if a Trainer of Hugging Face that called has the compiled module `net` in the place of its `model`.

    Trainer calls `save_pretrained` of a PreTrainedModel only. Anything else is saved as a state, which safetensors
    refuses if weights are tied, after all the steps to the first checkpoint.
    """
    if not hasattr(model, "save_pretrained"):
        return
    for caller in callers():
        is_trainer = any(
            f"{kind.__module__}.{kind.__name__}" == "transformers.trainer.Trainer" for kind in type(caller).__mro__
        )
        if is_trainer and getattr(caller, "model", None) is net:
            name = class_of(model).__name__
            warn_user(
                UserWarning(
                    f"Trainer has the compiled module in the place of {name}. Checkpoints of it have no configuration, "
                    "and safetensors refuses to save tied weights. Give Trainer the model itself, compiled in place: "
                    "net = kfac_fx.compile(model, ..., in_place=True), and Trainer(model, ...)."
                )
            )
            return
