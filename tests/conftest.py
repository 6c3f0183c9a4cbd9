"""The same in every run, in any order: one seed before each test, nothing compiled yet, and no clock in hypothesis."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch

ALONE = "KFAC_FX_TEST_ALONE"  # in the environment of a test that runs in a process of its own

hypothesis.settings.register_profile("kfac_fx", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("kfac_fx")


def pytest_collection_finish() -> None:
    """The garbage collector runs less often and passes over the imports: it took 7 % of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def backward_runs_after_a_fork() -> bool:
    """False once a backward inside of another one has started threads of torch's, which a fork does not take along."""
    process = os.fork()
    if process == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
            os._exit(0)
        except RuntimeError:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that forks runs in a new process, if an earlier test has started threads in this one."""
    if pyfuncitem.get_closest_marker("forks") is None or ALONE in os.environ or backward_runs_after_a_fork():
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    run = subprocess.run(
        command,
        cwd=pyfuncitem.config.rootpath,
        env=os.environ | {ALONE: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return True


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
