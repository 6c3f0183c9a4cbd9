"""Manifests: what differs is named, and what is no manifest is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kfac_fx
from kfac_fx.estimator.files import (
    NAME,
    digest,
    digest_of_weights,
    read_manifest,
    refuse_other,
    words_of_loss,
    write_manifest,
)

HERE = {"format": 2, "model": "Net", "blocks": {"a": {"sides": [1, 1]}, "b": 2}}


def test_a_manifest_is_read_as_it_was_written_and_written_again(tmp_path: Path) -> None:
    for manifest in (HERE, {**HERE, "model": "Other"}):
        write_manifest(tmp_path / "new", manifest)
        assert read_manifest(tmp_path / "new") == manifest
        assert [path.name for path in (tmp_path / "new").iterdir()] == [NAME]


def test_all_differences_are_named(tmp_path: Path) -> None:
    other = {"format": 2, "model": "Other", "blocks": {"a": {"sides": [1, 2]}, "c": 3}}
    with pytest.raises(ValueError, match="holds something else:") as caught:
        refuse_other(tmp_path, HERE, other)
    lines = [line.split(maxsplit=0)[0] for line in str(caught.value).splitlines()[1:-1]]
    assert [line.split("  ")[0].strip() for line in lines] == ["model", "blocks: a: sides", "blocks: b", "blocks: c"]
    assert "is 'Net' in the folder, and 'Other' here" in str(caught.value)
    assert "is only in the folder" in str(caught.value) and "is not in the folder" in str(caught.value)


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no manifest\.json: nothing was saved there"):
        read_manifest(tmp_path)
    (tmp_path / NAME).write_text("{")
    with pytest.raises(ValueError, match=r"is no manifest: "):
        read_manifest(tmp_path)
    for text, format in (('{"format": 7}', "7"), ("[]", "None")):
        (tmp_path / NAME).write_text(text)
        with pytest.raises(ValueError, match=rf"has the format {format}, and this version of kfac_fx reads 2"):
            read_manifest(tmp_path)


def test_weights_have_a_digest_by_name_whatever_class_holds_them() -> None:
    class Cached(nn.BatchNorm1d):
        def __init__(self) -> None:
            super().__init__(2)
            self.register_buffer("cache", torch.randn(3), persistent=False)

    model, other = nn.BatchNorm1d(2), Cached()
    assert digest_of_weights(model) == digest_of_weights(other)  # a buffer that is not in the state is no weight
    other.get_buffer("running_mean").add_(1)
    assert digest_of_weights(model) != digest_of_weights(other)
    model.load_state_dict(other.state_dict())
    assert digest_of_weights(model) == digest_of_weights(other)
    before = digest_of_weights(model)
    assert digest_of_weights(model.double()) != before


def logit(place: int, times: float = 1.0) -> Any:
    def measured(logits: Any, scale: float = times) -> Any:
        return scale * logits[:, place]

    return measured


X = torch.arange(6.0)
DIFFERENT = {
    "numbers": lambda: X,
    "their order": lambda: X.flip(0),
    "their shape": lambda: X.view(2, 3),
    "their precision": lambda: X.double(),
    "complex": lambda: torch.complex(X, -X),
    "its conjugate": lambda: torch.complex(X, -X).conj(),
    "two tensors": lambda: (X, X),
    "a mapping": lambda: {"ids": X},
    "another name": lambda: {"mask": X},
    "a number": lambda: 1,
    "a number of another kind": lambda: 1.0,
    "nothing": lambda: None,
    "a word": lambda: "None",
    "a function": lambda: logit(0),
    "another cell": lambda: logit(1),
    "another default": lambda: logit(0, 0.0),
    "a part of a function": lambda: partial(logit, 0),
    "another part": lambda: partial(logit, times=0),
    "another constant": lambda: lambda logits: logits[:, 2],
    "another attribute": lambda: lambda logits: logits.T[:, 2],
    "an inner constant": lambda: lambda logits: [(lambda k: k + 1)(k) for k in logits],
    "another inner constant": lambda: lambda logits: [(lambda k: k + 2)(k) for k in logits],
    "a class": lambda: nn.Linear,
    "another class": lambda: nn.Conv2d,
}


def test_digests_differ_where_values_do() -> None:
    by_digest: dict[str, str] = {}
    for name, make in DIFFERENT.items():
        assert digest(make()) == digest(make()), name
        assert by_digest.setdefault(digest(make()), name) == name
    assert digest(X.view(2, 3).mT.contiguous().mT) == digest(X.view(2, 3))  # of other strides


def test_modules_and_their_methods_are_told_by_their_numbers() -> None:
    module = nn.BatchNorm1d(2)
    before = digest(module), digest(module.forward)
    assert before == (digest(module), digest(module.forward))
    module.get_buffer("running_mean").add_(1)
    assert digest(module) != before[0] and digest(module.forward) != before[1]


def test_a_function_that_calls_itself_has_a_digest() -> None:
    def down(n: int) -> int:
        return down(n - 1) if n else 0

    assert digest(down) == digest(down)


class Trained(nn.Linear):
    def forward(self, x: Any) -> Any:
        return nn.functional.mse_loss(super().forward(x), x)


def test_a_loss_is_told_by_its_name_and_a_function_by_its_code() -> None:
    x, model = torch.randn(3, 2), nn.Linear(2, 2)

    def told(loss: Any) -> str:
        return words_of_loss(kfac_fx.compile(model, (x,), loss=loss))

    assert told("categorical") == "'categorical'" and told("mse") == "'mse'"
    assert told(kfac_fx.losses.Normal) == "Normal"
    functions = [told(lambda out, c=c: (c, kfac_fx.losses.Normal(out))) for c in (1.0, 1.0, 2.0)]
    assert functions[0] == functions[1] != functions[2] and functions[0].startswith("a function, ")
    assert words_of_loss(kfac_fx.compile(Trained(2, 2), (x,))) == "mse_loss in forward, mean"
    collection = kfac_fx.LayerCollection(kfac_fx.capture(model, (x,)))
    collection.register_normal_predictive_distribution("linear", var=1.0, name="one")
    collection.auto_register_layers()
    assert words_of_loss(kfac_fx.compile(collection)) == "1 normal_predictive_distribution one"
