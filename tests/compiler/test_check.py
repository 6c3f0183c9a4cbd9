"""Uses found equal uses registered, or everything that is missing in one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_fx import RegistrationError
from kfac_fx.passes.check import check, check_registration, uses_in_graph, uses_registered
from kfac_fx.passes.graphs.labels import entries
from kfac_fx.passes.ir import Program
from kfac_fx.passes.parametrizations import functions
from kfac_fx.passes.resolve import resolve
from tests.compiler.toy import Toy, before, found


def three(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    x = torch.tanh(F.linear(x, w, b))
    x = torch.tanh(F.linear(x, w, b))
    x = torch.tanh(w.cumprod(0) @ x.mT).mT  # no layer is known, and the weight is too large for an exact block
    return F.linear(x, v)


@pytest.fixture(autouse=True)
def no_exact_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "LARGEST_JACOBIAN", 0)


LINE = three.__code__.co_firstlineno
SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 3), "b": (3,), "v": (3, 3)}


def program(**options: Any) -> Program:
    return resolve(before("resolve", Toy(three, **SHAPES), **options))


def test_uses_are_counted_without_the_matcher() -> None:
    given = program()
    assert {name: len(edges) for name, edges in uses_in_graph(entries(given)).items()} == {"w": 3, "b": 2, "v": 1}
    assert {name: len(edges) for name, edges in uses_registered(given, entries(given)).items()} == {
        "w": 2,
        "b": 2,
        "v": 1,
    }


def test_a_registration_with_a_use_missing_becomes_generic_and_says_which() -> None:
    checked = check(program())
    assert found(checked) == [("generic", ("w",), 0), ("generic", ("b",), 0), ("linear", ("v",), 1)]
    reason = f"w has 3 uses, 2 of them matched; missing matmul (test_check.py:{LINE + 3})"
    assert [registration.reason for registration in checked.registrations] == [reason, reason, None]


def test_a_reason_names_a_few_of_many_missing_uses() -> None:
    def recurrent(x: Tensor, *, w: Tensor) -> Tensor:
        h = x @ w
        for _ in range(9):
            h = h @ w + torch.logcumsumexp(w, 0).sum() * h
        return h

    reason = check(resolve(before("resolve", Toy(recurrent, w=(3, 3))))).registrations[0].reason
    assert reason is not None and reason.startswith("w has ") and reason.endswith(" and 4 more")
    assert reason.count("test_check.py") == 5


def test_under_strict_it_is_an_error_together_with_all_that_is_generic() -> None:
    with pytest.raises(RegistrationError) as failure:
        check(program(strict=True, approximations={"v": "generic"}))
    reason = f"w has 3 uses, 2 of them matched; missing matmul (test_check.py:{LINE + 3})"
    assert str(failure.value).splitlines() == [
        "2 of 3 trainable parameters are in no structured Fisher block:",
        f"  w  {reason}",
        f"  b  {reason}",
        "Some layers are told by sizes, so give kfac_fx.compile example inputs. Or let them be generic with "
        "compile(..., strict=False), declare a layer of their form with layers=[...], or freeze them with "
        "requires_grad_(False).",
    ]


def test_where_sizes_are_known_no_example_inputs_are_asked_for() -> None:
    sized = before("resolve", Toy(lambda x, w: torch.cdist(x, w), w=(3, 4)), torch.randn(2, 4), strict=True)
    with pytest.raises(RegistrationError, match=r"\nLet them be generic with compile\(\.\.\., strict=False\)"):
        check(resolve(sized))


def test_check_registration_names_every_culprit() -> None:
    given = program()
    given = given.but(registrations=given.registrations[:1])
    with pytest.raises(RegistrationError) as failure:
        check_registration(given)
    assert str(failure.value).splitlines() == [
        "found the following errors with the registration of parameters:",
        "  w has 3 uses in the graph but 2 in its registration linear(w, b):",
        f"    registered   linear (test_check.py:{LINE + 1})",
        f"    registered   linear_1 (test_check.py:{LINE + 2})",
        f"    missing      matmul (test_check.py:{LINE + 3}): it enters matmul",
        f"  v is not registered; it is used in linear_2 (test_check.py:{LINE + 4})",
        "A Fisher that leaves a use out is wrong, not approximate. Register every use, or make the parameter generic.",
    ]


def test_variables_are_all_that_may_be_registered() -> None:
    with pytest.raises(RegistrationError) as failure:
        check_registration(check(program()), ["w", "wv"])
    assert str(failure.value).splitlines()[1:3] == [
        "  'wv' is not a parameter of the model. Did you mean 'w'?",
        "  2 registered parameters were not included in the list: b, v",
    ]


def test_a_variable_that_nothing_uses() -> None:
    model = Toy(lambda x, w, dead: x @ w, w=(3, 3), dead=(3,))
    given = resolve(before("resolve", model))
    check_registration(given)
    with pytest.raises(RegistrationError, match="dead is not registered; the losses do not depend on it"):
        check_registration(given, ["w", "dead"])


def test_generic_counts_for_any_number_of_uses() -> None:
    check_registration(check(program(approximations={"w": "generic"})))


def test_an_alias_is_as_good_as_the_name() -> None:
    model = Toy(lambda x, w: x @ w, w=(3, 3))
    model.register_parameter("again", model.w)
    check_registration(resolve(before("resolve", model)), ["again"])


def test_what_is_no_program_is_refused_with_what_to_write() -> None:
    with pytest.raises(RegistrationError, match=r"takes a Program and got a Toy: .* check_registration\(net.program\)"):
        check_registration(Toy(three, **SHAPES))  # type: ignore[arg-type]
