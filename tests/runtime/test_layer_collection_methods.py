"""The table of register methods and default approximations: signatures, types, help, errors."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
import torch.nn.functional as F

import kfac_fx
from kfac_fx import LayerCollection
from kfac_fx.compiled.fisher_blocks import KINDS, FisherBlock
from kfac_fx.compiled.register_methods import RegisterMethods
from kfac_fx.losses.declared import RegisteredLoss
from kfac_fx.passes.errors import ApproximationError, RegistrationError, ReuseError
from tests.runtime.collections_of_toys import affine, collection

METHODS = [name for name in vars(RegisterMethods) if name.startswith("register_")]
LOSSES = [name for name in METHODS if name.endswith(("_loss", "_distribution"))]
BLOCKS = [value for name, value in vars(kfac_fx.fisher_blocks).items() if name.endswith("FB")]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_help_of_every_argument(name: str) -> None:
    method = getattr(LayerCollection, name)
    names = list(inspect.signature(method).parameters)
    text = inspect.getdoc(method)
    assert names[0] == "self" and method.__name__ == name and method.__qualname__ == f"RegisterMethods.{name}"
    assert text and text.startswith("Register ") or text and text.startswith("As `register_")
    assert [line.split(":")[0].strip() for line in text.splitlines() if line[:4] == " " * 4 != line[4:8]] == names[1:]
    assert "{" not in text and " Raises " in text and max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_types_of_every_argument(name: str) -> None:
    method = getattr(LayerCollection, name)
    types = typing.get_type_hints(method)
    result = types.pop("return")
    blocks = tuple[FisherBlock, FisherBlock] if name == "register_separable_conv2d" else FisherBlock
    assert result == (RegisteredLoss if name in LOSSES else blocks)
    assert list(types) == list(inspect.signature(method).parameters)[1:]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in LOSSES])
def test_the_help_lists_the_approximations_that_the_method_takes(name: str) -> None:
    text = " ".join((inspect.getdoc(getattr(LayerCollection, name)) or "").split())
    shown = [kind for kind in KINDS if f"else `default_{kind}_approximation`" in text]
    assert len(shown) == 1
    assert ", ".join(f'"{value}"' for value in KINDS[shown[0]].approximations) in text


def test_a_wrong_argument_is_refused_with_the_name_of_the_method() -> None:
    lc: Any = affine()
    with pytest.raises(TypeError, match=r"register_fully_connected\(\) got an unexpected keyword argument 'aprox'"):
        lc.register_fully_connected("w", None, "matmul", aprox="kron")
    with pytest.raises(TypeError, match=r"register_embedding\(\) missing a required argument: 'outputs'"):
        lc.register_embedding("w", None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_of_a_kind_is_read_and_set_by_name_and_by_its_own_members(kind: str) -> None:
    lc, name = affine(), f"default_{kind}_approximation"
    assert getattr(lc, name) == lc.default_approximation(kind) == KINDS[kind].default
    for value in KINDS[kind].approximations:
        getattr(lc, f"set_{name}")(value=value)
        assert getattr(lc, name) == lc.default_approximation(kind) == value
    with pytest.raises(ApproximationError, match=f"{kind}: approximation 'best' is none of '"):
        getattr(lc, f"set_{name}")("best")
    with pytest.raises(AttributeError):
        setattr(lc, name, "diagonal")


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_of_a_kind_has_help(kind: str) -> None:
    name = f"default_{kind}_approximation"
    default, set_default = inspect.getattr_static(LayerCollection, name), getattr(LayerCollection, f"set_{name}")
    assert f"The approximation of {kind} if" in default.__doc__
    assert (
        list(inspect.signature(set_default).parameters) == ["self", "value"] and set_default.__name__ == f"set_{name}"
    )
    assert all(f'"{value}"' in set_default.__doc__ for value in KINDS[kind].approximations)


@pytest.mark.parametrize("owner", [LayerCollection, kfac_fx.CapturedModel, FisherBlock, *BLOCKS])
def test_every_public_member_has_help(owner: type) -> None:
    assert inspect.getdoc(owner)
    members = {name: inspect.getattr_static(owner, name) for name in dir(owner) if not name.startswith("_")}
    callable_or_property = {name: m for name, m in members.items() if callable(m) or isinstance(m, property)}
    assert (
        callable_or_property
        and [name for name in callable_or_property if not inspect.getdoc(getattr(owner, name))] == []
    )


# --- nothing is half registered -------------------------------------------------------------------------------------


def separable() -> LayerCollection:
    return collection(lambda x, d, p: F.conv2d(F.conv2d(x, d, groups=2), p), d=(2, 1, 1, 1), p=(3, 2, 1, 1))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"strides": 2}, RegistrationError),
        ({"approx": "kron_series_1"}, ApproximationError),
        ({"reuse": True}, ReuseError),
    ],
    ids=["strides", "approx", "reuse"],
)
def test_a_separable_convolution_is_registered_whole_or_not_at_all(options: Any, error: type[Exception]) -> None:
    lc = separable()
    with pytest.raises(error):
        lc.register_separable_conv2d("d", "p", "x", "conv2d", "conv2d_1", **options)
    assert len(lc.fisher_blocks) == 0
    depthwise, pointwise = lc.register_separable_conv2d("d", "p", "x", "conv2d", "conv2d_1", approx="diagonal")
    assert (depthwise.params, pointwise.params) == (("d",), ("p",))
    assert (depthwise.approximation, pointwise.approximation) == ("diagonal", "diagonal")


def test_the_dilations_of_a_convolution_have_three_names() -> None:
    for method, name in (("conv2d", "dilations"), ("convolution", "dilation_rate")):
        lc: Any = collection(lambda x, c: F.conv2d(x, c, dilation=3), c=(2, 2, 3, 3))
        register = getattr(lc, f"register_{method}")
        with pytest.raises(RegistrationError, match=r"dilations=\[2, 2\], but the graph's conv2d\(c\) has \[3, 3\]"):
            register("c", inputs="x", outputs="conv2d", **{name: 2})
        register("c", inputs="x", outputs="conv2d", **{name: 3})
    lc = collection(lambda x, d: F.conv2d(x, d, groups=2, dilation=3), d=(2, 1, 2, 2))
    with pytest.raises(RegistrationError, match=r"dilations=\[2, 2\], but the graph's .* has \[3, 3\]"):
        lc.register_depthwise_conv2d("d", "x", "conv2d", rate=2)
    lc.register_depthwise_conv2d("d", "x", "conv2d", rate=3)
