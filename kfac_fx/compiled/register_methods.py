"""The methods of a LayerCollection that register one layer or one loss, as a table, and `reuse`, which they all have.

A row is a signature in the order of TF K-FAC, a first sentence, and in its decorator the kind of layer. The decorator
adds the body, the meaning of the arguments (ARGUMENTS) and the errors. Signatures are therefore written once, and
`help`, `inspect` and type checkers read them. `_register_layer`, `_register_generic`, `_register_separable` and
`_register_distribution` of `LayerCollection` do the work.

Strides, paddings and dilations are read from the graph at every use. If the caller gives them, they must agree.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor, fx

from kfac_fx.compiled.fisher_blocks import EMBEDDINGS, KINDS, LINEAR, FisherBlock
from kfac_fx.compiled.names import Nodes
from kfac_fx.losses.declared import RegisteredLoss
from kfac_fx.losses.distributions import Categorical, LossFunction, MultiBernoulli, Normal
from kfac_fx.passes.errors import RegistrationError

Method = TypeVar("Method", bound=Callable[..., Any])
Approx = str | None
Node = fx.Node | str
Targets = Tensor | Node | None
Reuse = bool | str | None
VARIABLE_SCOPE = "VARIABLE_SCOPE"  # the `reuse` of the innermost `variable_scope`; False outside of any
AUTO_REUSE = "AUTO_REUSE"  # add a tower if there is a registration, else make a new one
_reuse: ContextVar[bool | str] = ContextVar("reuse", default=False)
Share = bool | float | None
Sizes = Sequence[int] | int | None

PARAMS = 'a parameter or a tuple of them: names, the objects, or pieces such as "w[0:64]"'
ARGUMENTS = {
    "params": PARAMS,
    "depthwise_params": PARAMS,
    "pointwise_params": PARAMS,
    "inputs": "the node that the layer reads, or its name; None: as in the graph",
    "outputs": "the node that the layer computes, or its name",
    "depthwise_outputs": "the node that the first convolution computes",
    "pointwise_outputs": "the node that the second convolution computes",
    "num_uses": "the number of uses that single nodes hold; None for lists",
    "batch_size": "not needed, since the losses have the number of cases",
    "strides": "a number, or one per spatial dimension; None: as in the graph",
    "padding": 'as in torch.nn.functional.conv2d, or "SAME" or "VALID"; None: as in the graph',
    "dilations": "as `strides`",
    "rate": "the dilations, as `strides`",
    "dilation_rate": "the dilations, as `strides`",
    "data_format": 'a format whose channels come second, as "NCHW"',
    "approx": "{approximations}; None: that of the linked group, else `default_{kind}_approximation`",
    "reuse": "True adds a tower, one more mini-batch, to the registration that is there; False makes a new one; "
    "AUTO_REUSE does either; VARIABLE_SCOPE is the value of the innermost `variable_scope`, else False",
    "sub_sample_inputs": "see `kfac_fx.compile`; None: as `set_default_sub_sampling` says",
    "sub_sample_patches": "see `kfac_fx.compile`; None: as `set_default_sub_sampling` says",
    "patch_mask": "[channels in a group, *kernel], multiplies every patch, for weights that are masked alike for all "
    "outputs",
    "dense_inputs": "False if the inputs are ids and not one-hot vectors",
    "logits": "the node of the logits; the first dimension counts cases",
    "mean": "the node of the mean, [cases, ...]",
    "prediction": "the node of the prediction, [cases, ...]",
    "var": "the variance; with 0.5 the loss is |target - mean|², with 1.0 half of it",
    "seed": "of sampled targets; None: torch's own generator",
    "targets": "a tensor, or a node if the model has them as an input; None if nothing needs them",
    "name": "the name of the loss, under which it gets more towers; None: a new one",
    "coeff": "multiplies the loss and its Fisher",
}
LAYER_RAISES = """
Returns the block. Raises RegistrationError if the graph has no such layer there, or if a parameter is in another block;
ApproximationError if the layer does not have the approximation; ReuseError, a KeyError, if `reuse` is True and these
parameters are not registered, or False and they are."""
LOSS_RAISES = """
Returns the loss. Raises LossError if the variance is no positive float, and as `register_loss_function`."""


@contextmanager
def variable_scope(reuse: bool | str) -> Iterator[None]:
    """Inside, `reuse=VARIABLE_SCOPE`, the default of all register functions, means this `reuse`.

    Raises ValueError if `reuse` is none of True, False, AUTO_REUSE and VARIABLE_SCOPE.
    """
    token = _reuse.set(resolved(reuse))
    try:
        yield
    finally:
        _reuse.reset(token)


def resolved(reuse: Reuse) -> bool | str:
    """True, False or AUTO_REUSE. Raises ValueError for anything else."""
    if reuse == VARIABLE_SCOPE:
        return _reuse.get()
    if reuse is None:
        return False
    if reuse is True or reuse is False or reuse == AUTO_REUSE:
        return reuse
    raise ValueError(f"reuse={reuse!r} is none of True, False, AUTO_REUSE and VARIABLE_SCOPE")


# --- rows -------------------------------------------------------------------------------------------------------------


def declared(function: Method, run: str, fixed: dict[str, Any], raises: str, **words: str) -> Method:
    """The method with the signature of `function` that calls the method `run` with all arguments by name, and those
    that are `fixed`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        bound.apply_defaults()
        collection = bound.arguments.pop("self")
        nodes = [name for name in ("strides", "padding") if isinstance(bound.arguments.get(name), fx.Node)]
        if nodes or bound.arguments.get("outputs", ()) is None:
            wrong = f"has a node as {' and '.join(nodes)}" if nodes else f"lacks outputs=, {ARGUMENTS['outputs']}"
            raise RegistrationError(
                f"{function.__name__} {wrong}. Its arguments are ({', '.join(bound.arguments)}), in the order of TF "
                "K-FAC: give inputs= and outputs= by name."
            )
        return getattr(collection, run)(**bound.arguments, **fixed)

    lines = [inspect.cleandoc(function.__doc__ or ""), "", "Args:"]
    for name in list(signature.parameters)[1:]:
        text = f"{name}: {ARGUMENTS[name].format(**words)}."
        lines.append(textwrap.fill(text, 112, initial_indent=" " * 4, subsequent_indent=" " * 8))
    method.__doc__ = "\n".join([*lines, raises])
    method.run = run  # type: ignore[attr-defined]
    return method  # type: ignore[return-value]


def layer_row(kind: str, layers: tuple[str, ...] = (), run: str = "_register_layer") -> Callable[[Method], Method]:
    """A row for a layer. kind: of KINDS; layers: the declared layers to search for, empty: those of the kind."""
    words = {"kind": kind, "approximations": ", ".join(f'"{name}"' for name in KINDS[kind].approximations)}
    fixed = {"kind": kind, "layers": layers}
    return lambda function: declared(function, run, fixed, LAYER_RAISES, **words)


def loss_row(distribution: type[LossFunction], base_name: str) -> Callable[[Method], Method]:
    """A row for a loss. base_name: its name in a collection, with a number if it is taken."""
    fixed = {"distribution": distribution, "base_name": base_name}
    return lambda function: declared(function, "_register_distribution", fixed, LOSS_RAISES)


class Setter(Protocol):
    def __call__(self, value: str) -> None: ...


class Default(property):
    """The property `default_<kind>_approximation`, of type str."""

    def __init__(self, kind: str) -> None:
        def default(self: Any) -> str:
            approximation: str = self.default_approximation(kind)
            return approximation

        super().__init__(default)
        self.__doc__ = f"The approximation of {kind} if neither its registration nor a linked group names one."

    if TYPE_CHECKING:

        def __get__(self, instance: Any, owner: Any = None) -> str: ...  # type: ignore[override]


class SetDefault:
    """The method `set_default_<kind>_approximation`."""

    def __init__(self, kind: str) -> None:
        def set_default(self: Any, value: str) -> None:
            self.set_default_approximation(kind, value)

        valid = ", ".join(f'"{name}"' for name in KINDS[kind].approximations)
        set_default.__doc__ = (
            f"Set `default_{kind}_approximation`.\n\nvalue: {valid}. Raises ApproximationError for other values."
        )
        self.method = set_default

    def __set_name__(self, owner: type, name: str) -> None:
        self.method.__name__, self.method.__qualname__ = name, f"{owner.__qualname__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Setter:
        bound: Setter = self.method.__get__(instance, owner)
        return bound


# fmt: off
class RegisterMethods:
    """See the module's docstring."""

    @layer_row("generic", run="_register_generic")
    def register_generic(
        self, params: Any, batch_size: int | None = None, approx: Approx = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """Register parameters that belong to no layer."""

    @layer_row("fully_connected")
    def register_fully_connected(
        self, params: Any, inputs: Nodes, outputs: Nodes, approx: Approx = None, reuse: Reuse = VARIABLE_SCOPE, *,
        dense_inputs: bool = True
    ) -> FisherBlock:
        """Register a fully connected layer."""

    @layer_row("fully_connected_multi")
    def register_fully_connected_multi(
        self, params: Any, inputs: Nodes, outputs: Nodes, num_uses: int | None = None, approx: Approx = None,
        reuse: Reuse = VARIABLE_SCOPE, *, dense_inputs: bool = True
    ) -> FisherBlock:
        """Register a fully connected layer with several uses, as in a recurrent network.

        `inputs` and `outputs` are lists, with one node per use in the order of time; or single nodes that hold
        `num_uses` uses one after another, [num_uses * batch, ...] or [num_uses, batch, ...].
        """

    @layer_row("embedding")
    def register_embedding(
        self, params: Any, inputs: Nodes, outputs: Nodes, approx: Approx = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """Register an embedding. Its input factor is diagonal."""

    @layer_row("embedding_multi", EMBEDDINGS + LINEAR)
    def register_embedding_multi(
        self, params: Any, inputs: Nodes, outputs: Nodes, num_uses: int | None = None, approx: Approx = None,
        reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """Register an embedding with several uses, as `register_fully_connected_multi`.

        The output layer that is tied to the embedding is one more use.
        """

    @layer_row("scale_and_shift")
    def register_scale_and_shift(
        self, params: Any, inputs: Nodes, outputs: Nodes, approx: Approx = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """Register `x * scale + shift`, or a normalization with its own scale and shift."""

    @layer_row("conv2d", ("conv1d", "conv_transpose1d"))
    def register_conv1d(
        self, params: Any, strides: Sizes = None, padding: Any = None, inputs: Nodes = None, outputs: Nodes = None,
        dilations: Sizes = None, approx: Approx = None, reuse: Reuse = VARIABLE_SCOPE, sub_sample_inputs: Share = None,
        sub_sample_patches: Share = None
    ) -> FisherBlock:
        """Register a convolution over one dimension, grouped and transposed ones included."""

    @layer_row("conv2d", ("conv2d", "conv_transpose2d"))
    def register_conv2d(
        self, params: Any, strides: Sizes = None, padding: Any = None, inputs: Nodes = None, outputs: Nodes = None,
        data_format: str | None = None, dilations: Sizes = None, approx: Approx = None, reuse: Reuse = VARIABLE_SCOPE,
        sub_sample_inputs: Share = None, sub_sample_patches: Share = None, patch_mask: Tensor | None = None
    ) -> FisherBlock:
        """Register a convolution over two dimensions, grouped and transposed ones included.

        The input factor of "kron" is of patches (KFC), that of the "kron_sua" family of pixels
        (`kfac_fx.fisher.uncorrelated`).
        """

    @layer_row("conv2d_multi")
    def register_conv2d_multi(
        self, params: Any, strides: Sizes = None, padding: Any = None, inputs: Nodes = None, outputs: Nodes = None,
        num_uses: int | None = None, data_format: str | None = None, dilations: Sizes = None, approx: Approx = None,
        reuse: Reuse = VARIABLE_SCOPE, sub_sample_inputs: Share = None, sub_sample_patches: Share = None,
        patch_mask: Tensor | None = None
    ) -> FisherBlock:
        """Register a convolution with several uses, as `register_fully_connected_multi`. Their geometry may differ."""

    @layer_row("conv2d")
    def register_convolution(
        self, params: Any, inputs: Nodes, outputs: Nodes, padding: Any = None, strides: Sizes = None,
        dilation_rate: Sizes = None, data_format: str | None = None, approx: Approx = None,
        reuse: Reuse = VARIABLE_SCOPE, sub_sample_inputs: Share = None, sub_sample_patches: Share = None
    ) -> FisherBlock:
        """Register a convolution over one, two or three dimensions, grouped and transposed ones included."""

    @layer_row("depthwise_conv2d")
    def register_depthwise_conv2d(
        self, params: Any, inputs: Nodes, outputs: Nodes, strides: Sizes = None, padding: Any = None,
        rate: Sizes = None, data_format: str | None = None, approx: Approx = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> FisherBlock:
        """Register a depthwise convolution. "kron" is one product per channel."""

    @layer_row("conv2d", run="_register_separable")
    def register_separable_conv2d(
        self, depthwise_params: Any, pointwise_params: Any, inputs: Nodes, depthwise_outputs: Nodes,
        pointwise_outputs: Nodes, strides: Sizes = None, padding: Any = None, rate: Sizes = None,
        data_format: str | None = None, approx: Approx = None, reuse: Reuse = VARIABLE_SCOPE
    ) -> tuple[FisherBlock, FisherBlock]:
        """Register a depthwise convolution, with the default of its kind, and the pointwise one that reads it.

        `strides`, `padding` and `rate` are of the first, `approx` is of the second one.
        """

    @loss_row(Categorical, "categorical_predictive_distribution")
    def register_categorical_predictive_distribution(
        self, logits: Node, seed: int | None = None, targets: Targets = None, name: str | None = None,
        coeff: float = 1.0, reuse: Reuse = VARIABLE_SCOPE
    ) -> RegisteredLoss:
        """Register a categorical distribution. Every distribution is a case, as in torch's cross_entropy."""

    @loss_row(Categorical, "sparse_softmax_cross_entropy_loss")
    def register_softmax_cross_entropy_loss(
        self, logits: Node, seed: int | None = None, targets: Targets = None, name: str | None = None,
        coeff: float = 1.0, reuse: Reuse = VARIABLE_SCOPE
    ) -> RegisteredLoss:
        """As `register_categorical_predictive_distribution`."""

    @loss_row(Normal, "normal_predictive_distribution")
    def register_normal_predictive_distribution(
        self, mean: Node, var: float = 0.5, seed: int | None = None, targets: Targets = None, name: str | None = None,
        coeff: float = 1.0, reuse: Reuse = VARIABLE_SCOPE
    ) -> RegisteredLoss:
        """Register a normal distribution with a fixed variance."""

    @loss_row(Normal, "squared_error_loss")
    def register_squared_error_loss(
        self, prediction: Node, seed: int | None = None, targets: Targets = None, name: str | None = None,
        coeff: float = 1.0, reuse: Reuse = VARIABLE_SCOPE
    ) -> RegisteredLoss:
        """Register |target - prediction|², a normal distribution with variance 0.5."""

    @loss_row(MultiBernoulli, "multi_bernoulli_predictive_distribution")
    def register_multi_bernoulli_predictive_distribution(
        self, logits: Node, seed: int | None = None, targets: Targets = None, name: str | None = None,
        coeff: float = 1.0, reuse: Reuse = VARIABLE_SCOPE
    ) -> RegisteredLoss:
        """Register independent bits, each with its own logit."""

    @loss_row(MultiBernoulli, "sigmoid_cross_entropy_loss")
    def register_sigmoid_cross_entropy_loss(
        self, logits: Node, seed: int | None = None, targets: Targets = None, name: str | None = None,
        coeff: float = 1.0, reuse: Reuse = VARIABLE_SCOPE
    ) -> RegisteredLoss:
        """As `register_multi_bernoulli_predictive_distribution`."""

    default_generic_approximation = Default("generic")
    default_fully_connected_approximation = Default("fully_connected")
    default_conv2d_approximation = Default("conv2d")
    default_depthwise_conv2d_approximation = Default("depthwise_conv2d")
    default_embedding_approximation = Default("embedding")
    default_scale_and_shift_approximation = Default("scale_and_shift")
    default_fully_connected_multi_approximation = Default("fully_connected_multi")
    default_conv2d_multi_approximation = Default("conv2d_multi")
    default_embedding_multi_approximation = Default("embedding_multi")
    set_default_generic_approximation = SetDefault("generic")
    set_default_fully_connected_approximation = SetDefault("fully_connected")
    set_default_conv2d_approximation = SetDefault("conv2d")
    set_default_depthwise_conv2d_approximation = SetDefault("depthwise_conv2d")
    set_default_embedding_approximation = SetDefault("embedding")
    set_default_scale_and_shift_approximation = SetDefault("scale_and_shift")
    set_default_fully_connected_multi_approximation = SetDefault("fully_connected_multi")
    set_default_conv2d_multi_approximation = SetDefault("conv2d_multi")
    set_default_embedding_multi_approximation = SetDefault("embedding_multi")
# fmt: on
