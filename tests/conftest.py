"""The same numbers in every run: one seed before each test, and no clock in hypothesis."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("kfac_fx", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("kfac_fx")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def float64() -> Iterator[None]:
    """Numbers in double precision, unless a test says another: for `pytest.mark.usefixtures("float64")`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
