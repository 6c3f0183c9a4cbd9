"""The same numbers in every run: one seed before each test, and no clock in hypothesis."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("kfac_fx", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("kfac_fx")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
