"""Which match stays where several claim one use: first of all that of a layer which the user declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfac_fx
from kfac_fx import AmbiguousRegistrationError, FisherEstimator, LayerCollection
from kfac_fx.passes.ir import Program
from kfac_fx.passes.layers import Layer, as_rows, layer
from kfac_fx.passes.resolve import resolve
from tests.compiler.toy import Toy, before, found


def dropped(program: Program) -> list[tuple[str, str]]:
    return [(note.subject, note.reason) for note in program.dropped]


class Looked(nn.Module):
    """A table that is looked up by an index, under a layer of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(6, 3)), nn.Linear(3, 4)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.tanh(torch.index_select(self.table, 0, ids)))
        return scores


def lookup(name: str, **options: Any) -> Layer:
    @layer(
        name=name,
        rows=lambda ids, attrs: torch.atleast_1d(ids).unsqueeze(1),
        grad_rows=as_rows,
        layouts={"weight": "i o -> o i"},
        example=lambda: (Looked(), torch.randint(6, (4,))),
        **options,
    )
    def form(ids: Tensor, *, weight: Tensor) -> Tensor:
        return torch.index_select(weight, 0, ids)

    return form


@layer(rows=as_rows, grad_rows=as_rows, default="diagonal", example=lambda: (nn.Linear(3, 4), torch.randn(2, 3)))
def dense(x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def test_one_s_own_layer_wins_over_one_of_ours_of_the_same_form() -> None:
    mine = lookup("lookup", default="kron_in_diag")
    for declared, taken in (
        ([mine], {"table": "lookup", "out.weight": "linear"}),
        ([dense], {"table": "embedding", "out.weight": "dense"}),
        ([dense, mine], {"table": "lookup", "out.weight": "dense"}),
    ):
        program = resolve(before("resolve", Looked(), layers=declared))
        assert {registration.parameters[0]: registration.layer for registration in program.registrations} == taken
        assert all(len(registration.uses) == 1 for registration in program.registrations)
        if dense in declared:
            reason = "dense(out.weight, out.bias) is of a layer of your own, which wins"
            assert ("linear(out.weight, out.bias)", reason) in dropped(program)


def test_its_statistics_are_proved_and_those_of_the_embedding_and_the_report_says_which_it_is() -> None:
    ids, y, model = torch.tensor([0, 5, 5, 2]), torch.tensor([0, 1, 2, 3]), Looked()
    found: list[Any] = []
    for declared in ((), (lookup("lookup", default="kron_in_diag"),)):
        net = kfac_fx.compile(model, (ids,), loss="categorical", layers=declared)
        est = FisherEstimator(net, estimation_mode="empirical")
        est.update_covariances(ids, targets=y)
        found.append(est.blocks[("table",)].full_fisher_block())
    torch.testing.assert_close(*found)
    assert net.report.to_dict()["dropped"] == [
        {"subject": "embedding(table)", "reason": "lookup(table) is of a layer of your own, which wins"}
    ]
    assert "lookup" in str(net.report)


def test_one_s_own_lookup_is_tied_to_an_output_layer_wherever_it_stands() -> None:
    """Its rows are ids, so that it is the linear layer whose sides change."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 3))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return F.linear(x, self.table)[:, :3] * torch.index_select(self.table, 0, ids)

    inputs = torch.randn(4, 3), torch.randint(6, (4,))
    found: list[Any] = []
    for declared in ((), (lookup("lookup", default="kron_in_diag"),)):
        net = kfac_fx.compile(found[0].net.model if found else Backwards(), inputs, loss="normal", layers=declared)
        est = FisherEstimator(net, estimation_mode="exact")
        est.update_covariances(*inputs)
        assert [use.transposed for use in net.registrations[0].uses] == [True, False]
        found.append(est)
    first, second = (est.blocks["table",].full_fisher_block() for est in found)
    torch.testing.assert_close(first, second)


def test_ours_stays_where_it_explains_more_of_the_graph() -> None:
    @layer(rows=as_rows, grad_rows=as_rows, layouts={"weight": "i o -> o i"}, example=lambda: (Toy(half), X), name="h")
    def bare(x: Tensor, *, weight: Tensor) -> Tensor:
        return torch.matmul(x, weight)

    program = resolve(before("resolve", Toy(lambda x, w, b: x @ w + b, w=(3, 3), b=(3,)), layers=[bare]))
    assert found(program) == [("linear", ("w", "b"), 1)]
    assert ("h(w)", "contained in linear(w, b), which is kept") in dropped(program)


X = torch.randn(2, 3)


def half(x: Tensor) -> Tensor:
    return x


def test_two_layers_of_one_s_own_at_one_use_are_refused_with_both_places() -> None:
    first, second = lookup("first"), lookup("second")
    with pytest.raises(AmbiguousRegistrationError) as failure:
        resolve(before("resolve", Looked(), layers=[first, second]))
    use = f"index_select (test_resolve_claims.py:{Looked.forward.__code__.co_firstlineno + 1})"
    assert str(failure.value).splitlines() == [
        "1 use is claimed by two layers:",
        f"  table  at {use}: first ({first.location}) and second ({second.location})",
        "Leave one of them out of layers=[...], or let its `where` refuse what is not meant.",
    ]


def test_by_hand_one_s_own_layer_is_found_first_too() -> None:
    captured = kfac_fx.capture(Looked(), (torch.randint(6, (4,)),), layers=[dense])
    lc = LayerCollection(captured)
    block = kfac_fx.fisher_blocks.FisherBlock(lc, ("out.weight", "out.bias"), "diagonal")
    block.register_additional_tower(None, lc.outputs_of("out"))
    assert block.registration.layer == "dense"


def test_a_parameter_in_two_roles_of_one_layer_has_two_uses_and_is_no_business_of_layers() -> None:
    both = Toy(lambda x, g: torch.tanh(x * torch.exp(g) + torch.sin(g)), g=(3,))
    net = kfac_fx.compile(both, (X,), loss="normal")
    assert [
        (registration.layer, registration.parameters, len(registration.uses)) for registration in net.registrations
    ] == [("scale_and_shift", ("g",), 2)]


def test_a_shift_that_is_used_by_itself_too_is_no_bias_and_both_are_exact() -> None:
    def shifted(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ w + b) + b)

    program = resolve(before("resolve", Toy(shifted, w=(3, 3), b=(3,))))
    assert found(program) == [("linear", ("w",), 1), ("scale_and_shift", ("b",), 2)]
    assert ("linear(w, b)", "scale_and_shift(b) by itself") in [
        (s, r.partition(", as")[0]) for s, r in dropped(program)
    ]
    toy = Toy(shifted, w=(3, 3), b=(3,))
    assert not [
        registration for registration in kfac_fx.compile(toy, (X,), loss="normal").registrations if registration.generic
    ]


def test_a_bias_of_two_layers_is_still_a_bias() -> None:
    program = resolve(before("resolve", Toy(lambda x, w, b: torch.tanh(x @ w + b) @ w + b, w=(3, 3), b=(3,))))
    assert found(program) == [("linear", ("w", "b"), 2)]
