"""The same in every run, in any order: one seed before each test, nothing compiled yet, and no clock in hypothesis."""

import gc
import logging
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("kfac_fx", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("kfac_fx")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The inputs that a file draws when it is imported are the same in every run, whatever was imported before."""
    if isinstance(collector, pytest.Module):
        torch.default_generator.manual_seed(0)


def pytest_collection_finish() -> None:
    """The garbage collector runs less often and passes over the imports: it took 7 % of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_pycollect_makemodule() -> None:
    gc.disable()  # until all tests are collected


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("forks") is not None and torch.version.cuda is not None:
        pytest.skip("torch's CUDA builds start threads in the first backward, which a fork does not take along")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack for the devices, 10,000 times a run
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """torch.compile counts the graphs of a function over all tests of a process, and gives up at the ninth."""
    if "torch._dynamo" in sys.modules:  # which takes seconds to load
        torch.compiler.reset()


@pytest.fixture
def float64() -> Iterator[None]:
    """Numbers in double precision, unless a test says another: for `pytest.mark.usefixtures("float64")`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def free_memory_is_nan() -> Iterator[None]:
    """New tensors without values, as of `torch.empty`, are NaN: deterministic algorithms fill them."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(before)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """The records from the level "info" on. pytest's own plugin also listens to torch's traces, which are then written
    for every capture: `pyproject.toml` leaves it out."""
    logger, kept = logging.getLogger(), Kept()
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield kept.records
    logger.removeHandler(kept)
    logger.setLevel(level)
