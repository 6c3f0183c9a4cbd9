"""A mask as one more input of every submodule, under its own sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_fx.passes.errors import ModelChangedError, RegistrationError
from kfac_fx.passes.ir import ROW_MASK, Options, Program, Submodule
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.pipeline import SUBMODULES, run
from kfac_fx.passes.submodules import in_model, join
from kfac_fx.passes.trace import named_parameters, trace_model
from kfac_fx.recording.masks import SITES, MaskedInputs, masked_part, with_masks

X, FLAT = torch.randn(5, 7, 3), torch.randn(11, 3)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.flat = nn.Linear(3, 2), nn.Linear(3, 2)


def program(*inputs: Tensor) -> Program:
    model = Parts()
    parameters, aliases = named_parameters(model)
    parts = []
    for (path, module), x in zip(model.named_children(), inputs, strict=True):
        traced = trace_model(module, (x,), options=Options(loss_given=True), layers=LAYERS).program
        parts.append((Submodule(path, 1), normalize(in_model(traced, path, parameters, aliases))))
    return run(join(parts[0][1], parts), SUBMODULES)


def masked(found: Program) -> dict[str, bool]:
    return {
        registration.parameters[0]: any(ROW_MASK in use.attrs for use in registration.uses)
        for registration in found.registrations
    }


def inputs_of(found: Program) -> dict[str, Any]:
    return {node.name: node.meta.get(SITES) for node in found.graph.nodes if node.op == "placeholder"}


def test_the_mask_is_the_last_input_of_each_with_the_places_of_its_sizes() -> None:
    found = with_masks(program(X, X.transpose(0, 1)), [(5, 7), (5, 7)])
    assert inputs_of(found) == {
        "in_rows_0_input_1": None,
        "padding_mask": ((0, 0), (0, 1)),
        "in_flat_1_input_1": None,
        "padding_mask_1": ((0, 1), (0, 0)),
    }
    assert masked(found) == {"rows.weight": True, "flat.weight": True}


def test_sizes_are_those_when_a_submodule_was_captured() -> None:
    found = with_masks(program(X, torch.randn(4, 6, 3)), [(5, 7), (4, 6)])
    assert masked(found) == {"rows.weight": True, "flat.weight": True}


def test_a_submodule_without_these_sizes_is_told_as_unmasked() -> None:
    found = with_masks(program(X, FLAT), [(5, 7), (5, 7)])
    assert masked(found) == {"rows.weight": True, "flat.weight": False}
    (note,) = found.unmasked
    assert note.reason == "it is not clear which sizes of flat are cases and positions"


def test_a_part_has_the_mask_that_fits_it() -> None:
    found = with_masks(program(X, FLAT), [(5, 7), (5, 7)])
    first, last = masked_part(found, 0), masked_part(found, 1)
    assert masked(first) == {"rows.weight": True, "flat.weight": False}
    assert masked(last) == {"rows.weight": False, "flat.weight": False}
    (use,) = first.registrations[0].uses
    assert use.mask_dims == (0, 1)


def test_one_size_that_may_be_cases_or_positions_is_not_clear() -> None:
    """Even if no other size of the inputs is as large."""
    with pytest.raises(RegistrationError, match="5 cases and 5 positions, and no captured submodule has"):
        with_masks(program(X, FLAT), [(5, 5), (5, 5)])


def test_without_a_mask_nothing_changes() -> None:
    before = program(X, FLAT)
    assert with_masks(before, [None, None]) is before


def test_sizes_that_no_submodule_has_are_an_error() -> None:
    with pytest.raises(RegistrationError, match="2 cases and 9 positions, and no captured submodule has"):
        with_masks(program(X, FLAT), [(2, 9), (2, 9)])


def masked_inputs() -> MaskedInputs:
    return MaskedInputs((((0, 1), (1, 0)), None), ("encoder", "head"))


def inputs() -> tuple[Tensor, Tensor]:
    """5 cases in dimension 1 of the first, 7 positions in dimension 0 of the second."""
    return torch.zeros(2, 5), torch.zeros(7, 2)


def test_the_mask_is_the_last_input_of_submodules_that_have_one() -> None:
    mask = torch.ones(5, 7)
    assert masked_inputs().of_call(0, inputs(), mask)[-1] is mask
    assert len(masked_inputs().of_call(1, inputs(), mask)) == 2


def test_without_a_mask_all_is_real() -> None:
    assert torch.equal(masked_inputs().of_call(0, inputs(), None)[-1], torch.ones(5, 7))


def test_a_mask_of_another_shape_names_the_submodule_and_the_sizes() -> None:
    with pytest.raises(ModelChangedError) as failure:
        masked_inputs().of_call(0, inputs(), torch.ones(5, 8))
    first, advice = str(failure.value).splitlines()
    assert first.startswith("padding_mask has shape [5, 8], but encoder is called on 5 cases and 7 positions;")
    assert advice.startswith("Compile with an example in which the numbers of cases and positions differ")


def test_the_places_of_the_mask_are_read_off_the_graphs() -> None:
    node, other = SimpleNamespace(meta={"kfac_fx_mask": ((0, 0), (0, 1))}), SimpleNamespace(meta={})
    parts: Any = [SimpleNamespace(graph=SimpleNamespace(nodes=nodes)) for nodes in ([other, node], [])]
    assert MaskedInputs.of(parts, ["a", "b"]).sites == (((0, 0), (0, 1)), None)
