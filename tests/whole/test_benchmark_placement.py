"""`benchmarks.placement`: the layers of its models, its placements, and the page that it writes."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

import kfac_fx
from benchmarks import messages, placement
from benchmarks.decoder import Decoder
from benchmarks.placement import MODELS, RANKS, Layer, Machine, everyone, kaisa, owned, shares
from kfac_fx.fisher.placement import longest_processing_time, makespan


@pytest.mark.parametrize("model", MODELS)
def test_the_makespan_of_owners_is_at_most_that_of_kaisa(model: str) -> None:
    costs = [layer.cost for layer in MODELS[model][0]()]
    for ranks in (*RANKS, 3, 6, 12, 24, 48, 96):
        ours = makespan(costs, longest_processing_time(costs, ranks), ranks)
        for workers in (n for n in range(1, ranks + 1) if ranks % n == 0):
            assert ours <= makespan(costs, kaisa(costs, ranks, workers), ranks), (ranks, workers)


def test_kaisa_puts_a_layer_into_the_group_with_the_least_work_and_there_on_the_process_with_the_least() -> None:
    """Two groups, {0, 2} and {1, 3}. 9 goes to process 0, 5 to 1; group {1, 3} has less until 5 + 3 + 2."""
    assert kaisa([9, 5, 3, 2, 1], 4, 2) == (0, 1, 3, 3, 2)


def test_the_layers_have_the_parameters_of_the_models() -> None:
    """ResNet-50 has 25,557,032, of which 53,120 are those of norms; GPT-2 small has 124,439,808, of which 38,400 are;
    Llama 7B has 6,738,415,616, of which 266,240 are."""
    parameters = {name: sum(layer.parameters for layer in make()) for name, (make, _) in MODELS.items()}
    assert parameters == {
        "ResNet-50": 25_557_032 - 53_120,
        "GPT-2 small": 124_439_808 - 38_400,
        "transformer 7B": 6_738_415_616 - 266_240,
    }


def test_the_sides_are_those_of_the_blocks_that_kfac_fx_makes() -> None:
    width = 8
    net = kfac_fx.compile(Decoder(width, 2), (torch.randn(2, 3, width),), loss="normal")
    matrices = {r.matrix.shape for r in net.registrations if r.matrix is not None and r.layer == "linear"}
    ours = [layer for layer in placement.gpt2(1, width) if not layer.is_table]
    assert matrices == {(1, layer.outputs, layer.inputs) for layer in ours}
    assert Layer("wide", 4096, 11008, 1).sides == (1376,) * 8 + (4096,)


def test_one_process_gains_nothing_and_sends_nothing() -> None:
    layers, machine = placement.resnet50(), Machine()
    for name, share in shares(layers, 1):
        times = placement.seconds(layers, 32, share, 1, machine)
        sending = [times[part] for part in times if part.startswith("sending")]
        assert sending == [0, 0, 0] and placement.sent(share, machine) == 0, name
        assert share.decompositions == sum(side**3 for layer in layers for side in layer.sides)


def test_the_shares_of_two_equal_layers_on_two_processes() -> None:
    """Two layers 3 x 2: triangles 6 + 3, squares 9 + 4 twice, and 6 parameters each, 4 bytes a number."""
    layers = [Layer("a", 3, 2, 1), Layer("b", 3, 2, 1)]
    share = owned(layers, (0, 1), 2)
    assert (share.statistics, share.updates, share.memory) == (4 * 18 / 2, 4 * 12 / 2, 4 * (2 * 13 + 4 * 6))
    assert (share.decompositions, share.products) == (8 + 27, 4 * 6 * 5)
    alone = everyone(layers, 2)
    assert (alone.statistics, alone.updates, alone.memory) == (4 * 18, 0, 2 * 4 * (2 * 13 + 4 * 6))


def test_the_page_shows_the_committed_results_and_they_are_those_of_the_command() -> None:
    record = json.loads(placement.OUT.read_text())
    assert record["results"] == placement.run(Machine(**record["machine"]))
    assert placement.page() == placement.DOCS.read_text(encoding="utf-8"), (
        "run python -m benchmarks.placement --write-docs"
    )


def test_the_state_of_a_layer_is_what_the_default_keeps_of_it() -> None:
    """Up to eigenvalues and numbers. The parameters of the last check and the gradient are no part of a block."""
    width, vocabulary = 8, 40
    model, ids = messages.Language(1, width, vocabulary, 4), torch.randint(vocabulary, (2, 4))
    net = kfac_fx.compile(model, (ids,), loss="categorical", in_place=True)
    opt = kfac_fx.KFAC(net, seed=0)
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    opt.step()
    layers = [layer for layer in placement.gpt2(1, width) if not layer.is_table]
    layers.append(Layer("tokens", width, vocabulary, 4, diagonal=vocabulary))
    by_shape = {(layer.outputs, layer.inputs): layer for layer in layers}
    seen = 0
    for group in opt.estimator.groups:
        if (layer := by_shape.get(group.shape[1:])) is not None:
            seen += len(group.registrations)
            of_block = layer.state - 2 * layer.parameters
            others = group.elements / len(group.registrations) - of_block
            assert 0 <= others <= 2 * (layer.outputs + layer.inputs), (layer, others)
    assert seen == 5


def test_messages_are_counted_and_owners_of_replicas_send_every_parameter_once() -> None:
    rows = {row["due"]: row for row in messages.steps(1, 4, "owners")}
    sent = sum(rows["nothing"]["P"].values())
    assert sent == pytest.approx(1.0, abs=0.01) and rows["nothing"]["messages"]["broadcast"] <= 4
    assert rows["statistics"]["messages"]["reduce"] and rows["a check"]["P"]["broadcast"] == pytest.approx(3, abs=0.01)
