"""Every way in which real models use parameters has a model in the zoo, and is structured in a library's, too."""

from __future__ import annotations

import re

import pytest

from benchmarks.zoo import OUT, results
from kfac_fx.passes.layers import LAYERS
from tests.models import ZOO
from tests.zoo.patterns import SHARED, USES, Pattern

MEASURED = results(OUT)


@pytest.mark.parametrize("pattern", [*USES, *SHARED], ids=lambda case: case.use)
def test_the_zoo_has_it(pattern: Pattern) -> None:
    """`tests/whole/test_zoo.py` compiles all of these models and proves what they expect."""
    if not pattern.case:
        assert LAYERS[pattern.layer].forms[0].examples
        return
    case = ZOO[pattern.case]
    if pattern.layer == "generic":
        assert pattern.parameter in case.generic
        return
    (uses,) = (n for layer, names, n in case.expected if layer == pattern.layer and pattern.parameter in names)
    assert uses > 1 or pattern in USES


@pytest.mark.parametrize("pattern", [case for case in (*USES, *SHARED) if case.real], ids=lambda case: case.use)
def test_a_real_model_has_it_in_a_structured_block(pattern: Pattern) -> None:
    """As measured last: python -m benchmarks.zoo."""
    found = MEASURED[pattern.real]
    assert found["status"] == "works" and found["layers"].get(pattern.layer)
    assert not [names for names, _, _ in found["generic"] if re.search(pattern.names, names)]
