"""Programs of several submodules, side by side in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_fx.passes.graphs.edit import attribute
from kfac_fx.passes.graphs.operations import LOOKED_UP, op_name
from kfac_fx.passes.ir import Options, Program, Registration, Submodule
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.normalize import normalize
from kfac_fx.passes.pipeline import SUBMODULES, run
from kfac_fx.passes.submodules import find_outputs, give_lookups, graph_of, in_autocast, in_model, join, leave_python
from kfac_fx.passes.trace import named_parameters, trace_model
from tests.compiler.toy import Toy, code, found

X = torch.randn(5, 3)


class Pair(nn.Module):
    """Two submodules, which Python would call."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last


def linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w)


def pair(function: Callable[..., Any] = linear) -> Pair:
    return Pair(Toy(function, w=(3, 3)), Toy(function, w=(3, 3)))


def joined(model: Pair, calls: tuple[int, int] = (1, 1), **options: Any) -> Program:
    parameters, aliases = named_parameters(model)
    given = Options(loss_given=True, **options)
    parts = []
    for (path, module), number in zip(model.named_children(), calls, strict=True):
        traced = trace_model(module, (X,), options=given, layers=LAYERS).program
        parts.append((Submodule(path, number), normalize(in_model(traced, path, parameters, aliases))))
    return join(parts[0][1], parts)


def the_one(program: Program, parameter: str) -> Registration:
    return next(registration for registration in program.registrations if parameter in registration.parameters)


def test_a_program_of_a_submodule_has_the_names_of_the_model() -> None:
    model = pair()
    parameters, aliases = named_parameters(model)
    program = in_model(trace_model(model.last, (X,)).program, "last", parameters, aliases)
    assert [str(node.target) for node in program.graph.nodes if node.op == "get_attr"] == ["last.w"]
    assert program.root.get_parameter("last.w") is model.last.w


def test_a_parameter_has_one_name_in_all_submodules() -> None:
    model = pair()
    model.last.w = model.first.w
    program = joined(model)
    assert [str(node.target) for node in program.graph.nodes if node.op == "get_attr"] == ["first.w"]


def test_graphs_lie_side_by_side_with_inputs_of_their_own() -> None:
    program = joined(pair())
    assert [node.name for node in program.graph.nodes if node.op == "placeholder"] == ["in_first_0_x", "in_last_1_x"]
    assert code(program) == [
        "linear = linear(in_first_0_x, first_w, None)",
        "linear_1 = linear(in_last_1_x, last_w, None)",
    ]
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    assert str(output.args[0]) == "((linear,), (linear_1,))"


def test_constants_of_one_name_and_other_values_are_kept_apart() -> None:
    model = pair(lambda x, w: linear(x, w) + torch.tensor([1.0, 2.0, 3.0]))
    program = joined(model)
    values = {id(value) for name, value in program.root.named_buffers()} | {
        id(program.root.get_buffer(str(node.target)))
        for node in program.graph.nodes
        if node.op == "get_attr" and "lifted" in str(node.target)
    }
    assert len(values) == 2


def test_all_that_submodules_return_may_be_behind_a_loss() -> None:
    model = pair(lambda x, w: (linear(x, w), x.shape[0], linear(x, w).argmax(1)))
    assert [node.name for node in find_outputs(joined(model)).outputs] == ["linear", "linear_2"]


def test_a_weight_of_two_submodules_is_one_registration() -> None:
    model = pair()
    model.last.w = model.first.w
    assert found(run(joined(model), SUBMODULES)) == [("linear", ("first.w",), 2)]


def test_a_part_is_the_graph_of_its_submodule_with_its_own_uses() -> None:
    model = pair(lambda x, w: linear(x, w).tanh())
    model.last.w = model.first.w
    program = run(joined(model), SUBMODULES)
    for number in (0, 1):
        part = graph_of(program, number)
        assert [line.split(" = ")[1].split("(")[0] for line in code(part)] == ["linear", "tanh"]
        (one,) = part.registrations
        assert [use.output.graph for use in one.uses] == [part.graph]
        root = torch.fx.GraphModule(part.root, part.graph)
        (output,) = root(X)
        torch.testing.assert_close(output, linear(X, model.first.w).tanh())


def test_uses_are_as_many_as_the_calls() -> None:
    program = run(joined(pair(), calls=(3, 0)), SUBMODULES)
    assert [use.calls for use in the_one(program, "first.w").uses] == [3]
    assert [use.calls for use in the_one(program, "last.w").uses] == [0]
    assert (the_one(program, "first.w").approximation, the_one(program, "last.w").approximation) == (
        "kron_indep",
        "kron",
    )
    assert all(registration.called for registration in program.registrations)


@pytest.mark.parametrize("approximation", ["diagonal", "kron_reduce"])
def test_several_calls_leave_an_approximation_that_allows_for_them(approximation: str) -> None:
    program = run(joined(pair(), calls=(3, 1), approximations={"*": approximation}), SUBMODULES)
    assert the_one(program, "first.w").approximation == approximation


@pytest.mark.parametrize("shared", [True, False])
def test_a_series_needs_an_order_that_nobody_knows(shared: bool) -> None:
    """A series of a weight in two submodules, or in one that may be called at every step."""
    model = pair()
    if shared:
        model.last.w = model.first.w
    program = run(joined(model, approximations={"first.w": "kron_series_1"}), SUBMODULES)
    one = the_one(program, "first.w")
    assert one.approximation == "kron_indep"
    assert one.reason == "the order of its uses is known at run time only, so not 'kron_series_1'"


def test_what_python_reads_is_generic_with_the_reason() -> None:
    program = run(joined(pair()), SUBMODULES[:-2])
    assert program.registrations and not any(registration.generic for registration in program.registrations)
    left = leave_python(program.but(python={"first.w": "read at model.py:3"}))
    assert the_one(left, "first.w").reason == "first.w is read at model.py:3"
    assert the_one(left, "first.w").generic and not the_one(left, "last.w").generic


def test_what_only_python_reads_is_generic_and_not_unused() -> None:
    model = pair()
    model.scale = nn.Parameter(torch.ones(3))
    program = run(joined(model).but(python={"scale": "read at model.py:3"}), SUBMODULES)
    assert the_one(program, "scale").reason == "scale is read at model.py:3"
    assert program.unused == ()


def test_parameters_in_regions_of_autocast_are_told() -> None:
    def cast(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = x @ w
        return low.float() @ v

    program = trace_model(Toy(cast, w=(3, 3), v=(3, 3)), (X,)).program
    assert in_autocast(program) == ["w"]


def test_constants_of_two_captures_of_one_submodule_stay_apart() -> None:
    model = pair()
    parameters, aliases = named_parameters(model)
    parts = []
    for number in (1.0, 2.0):
        model.first.function = lambda x, w, number=number: linear(x, w) + torch.tensor([number] * 3)
        traced = trace_model(model.first, (X,), options=Options(loss_given=True), layers=LAYERS).program
        parts.append((Submodule("first", 1), normalize(in_model(traced, "first", parameters, aliases))))
    program = join(parts[0][1], parts)
    held = [attribute(program.root, str(node.target)) for node in program.graph.nodes if node.op == "get_attr"]
    assert sorted(float(value[0]) for value in held if value.shape == (3,)) == [1.0, 2.0]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_returned_lookup_is_an_embedding_unless_its_table_is_read_elsewhere(elsewhere: bool) -> None:
    def looked_up(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x @ w if elsewhere else x * 2, nn.functional.embedding(torch.tensor([0, 2]), w)

    program = give_lookups(find_outputs(joined(Pair(Toy(looked_up, w=(3, 3)), Toy(linear, w=(3, 3))))))
    (lookup,) = (node for node in program.graph.nodes if op_name(node) == "embedding")
    assert (LOOKED_UP in lookup.meta) is not elsewhere


@pytest.mark.parametrize(
    "spread",
    [
        lambda number, x: number * x.new_ones(x.shape[0]),
        lambda number, x: torch.ones(x.shape[0]) * number,
        lambda number, x: torch.zeros_like(x[:, 0]) + number,
        lambda number, x: number.expand(x.shape[0]),
    ],
)
def test_a_number_of_parameters_that_every_case_gets_is_a_use(spread: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The logarithm of a determinant, as a normalizing flow returns it next to its output."""

    def flow(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return linear(x, w), spread(torch.linalg.slogdet(w)[1], x)

    program = run(joined(pair(flow)), SUBMODULES)
    assert [len(the_one(program, name).uses) for name in ("first.w", "last.w")] == [2, 2]
