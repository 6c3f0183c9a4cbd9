"""A captured submodule serves the calls of its kind; reads are captured as submodules are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_fx.passes.divide import CapturedSubmodule, ObservedRead, captured_reads, left_to_python, read_outside, under
from kfac_fx.passes.ir import Options, Submodule
from kfac_fx.passes.layers import LAYERS
from kfac_fx.passes.trace import trace_model
from kfac_fx.passes.tracing.calls import Call
from kfac_fx.passes.tracing.signature import call_key

X = torch.randn(5, 4)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def observed(model: nn.Module, *inputs: Tensor) -> list[ObservedRead]:
    readers = read_outside(model, inputs, {}, [], dict(model.named_parameters()), None)
    return list(readers.observed.values())


def captured(model: nn.Module, *inputs: Tensor) -> CapturedSubmodule:
    traced = trace_model(model, inputs, options=Options(loss_given=True), layers=LAYERS)
    return CapturedSubmodule(Submodule("inner", 1), model, traced, call_key(inputs, {}), (), traced.settings(model))


def test_a_capture_serves_other_sizes_and_no_other_dtype_or_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    one = captured(model, X)
    assert one.serves((X[:3],), {}, call_key((X[:3],), {}))
    assert not one.serves((X.double(),), {}, call_key((X.double(),), {}))
    model.eval()
    assert not one.serves((X,), {}, call_key((X,), {}))


def test_a_capture_without_a_key_serves_all_that_it_holds_for() -> None:
    traced = trace_model(nn.Linear(4, 3), options=Options(loss_given=True), layers=LAYERS)
    assert CapturedSubmodule(Submodule("inner", 0), nn.Linear(4, 3), traced, None).serves((X,), {}, "any key")


def test_effects_say_in_which_submodule_and_leave_out_attributes_that_its_hooks_set() -> None:
    class Caching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return super().forward(x)

    looking = nn.Linear(4, 3)
    looking.register_full_backward_hook(lambda module, before, after: None)
    assert captured(looking, X).effects == ("calls the backward hooks of Linear, in inner",)
    caching = captured(Caching(4, 3), X)
    assert caching.capture.effects == ("sets last",) and caching.effects == ()


def test_equal_reads_are_captured_once_with_the_names_of_the_model() -> None:
    model = Reading()
    reads = observed(model, X) + observed(model, torch.randn(7, 4))
    (one,), reasons = captured_reads(reads, dict(model.named_parameters()), Options(loss_given=True), LAYERS, ())
    assert one.is_read and one.names == {"p0": "weight"} and reasons == {}
    assert one.submodule.calls == 2 and one.submodule.path.startswith("linear of weight (test_divide_captured.py:")


def test_reads_of_earlier_inputs_are_kept() -> None:
    model = Reading()
    parameters, options = dict(model.named_parameters()), Options(loss_given=True)
    earlier, _ = captured_reads(observed(model, X), parameters, options, LAYERS, ())
    again, _ = captured_reads(observed(model, X), parameters, options, LAYERS, earlier)
    assert [submodule.capture for submodule in again] == [submodule.capture for submodule in earlier]


def test_a_parameter_left_to_python_has_its_first_place() -> None:
    (read,) = observed(Reading(), X)
    later = ObservedRead(read.read, read.call, "later.py:1")
    assert left_to_python([read, later]) == {"weight": f"read at {read.where}, in Python that is not captured"}


def test_a_call_is_repeated_under_its_autocast() -> None:
    call = Call((X,), {}, (("cpu", torch.bfloat16),))
    assert under(call, lambda: nn.Linear(4, 3)(X).dtype) == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert under(Call((X,), {}, ()), lambda: nn.Linear(4, 3)(X).dtype) == torch.float32
