# Needs python3 and make. Everything goes into .venv, with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
TORCH ?= 2.11.0
TESTS ?= tests/errors tests/compiler
export OMP_NUM_THREADS ?= 1
# Compiled modules are kept, whatever the shell says: every process of the tests imports torch.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help demo test quick slow trainers guards cuda bench site format clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' Makefile | sed 's/:[^#]*## /\t/' | expand -t 10

# pip takes packages from the index that it is set to. Where that has torch's CUDA builds alone, they run on a CPU, too.
# Python compiles the modules that are imported; that pip compiles all of them would take a minute.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable ".[test,demo]"
	touch $@

demo: .venv/installed ## train the demo and print its report
	$(BIN)/kfac-fx demo

# torch keeps the shapes that it works out while it captures a model. For models of one layer each, as those of most
# tests, that takes longer than to work them out again: a seventh of the time of the tests.
test quick: export TORCH_FAKE_TENSOR_DISPATCH_CACHE = 0

# The tests of a file run in one worker, so that the processes, environments and trainings of a file start once.
test: .venv/installed ## format, lint, types and all quick tests
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/pytest -q -n auto --dist loadfile -m "not slow and not cuda"

quick: .venv/installed ## the same with some tests only: make quick TESTS=tests/runtime/test_step.py
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/pytest -q -n auto --dist loadfile -m "not slow and not cuda" $(TESTS)

slow: .venv/installed ## the tests that take minutes
	$(BIN)/pytest -q -n auto --dist loadfile -m "slow and not cuda"

trainers: .venv/installed ## the loops of Hugging Face, Accelerate and Lightning
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[trainers]"
	$(BIN)/pytest -q -n auto --dist loadfile tests/trainers

guards: ## the compiler, with another torch: make guards TORCH=2.11.0, or TORCH=newest
	$(PYTHON) -m venv --clear .venv-torch
	.venv-torch/bin/pip install --quiet --disable-pip-version-check --editable . \
		$(if $(filter newest,$(TORCH)),torch,torch==$(TORCH)) numpy pytest pytest-xdist hypothesis
	.venv-torch/bin/python -m pytest -q -n auto --dist loadfile tests/compiler tests/contract/test_every_layer.py

cuda: ## the CUDA tests and the demo, with the python3 of a GPU machine
	PYTHON=$(PYTHON) tests/run_cuda.sh

bench: .venv/installed ## step times and memory, next to the cost model's floor
	$(BIN)/python -m benchmarks

site: .venv/installed ## the documentation as web pages, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: .venv/installed ## rewrite the sources as `make test` wants them
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

clean: ## remove everything that make and the tools made
	rm -rf .venv .venv-torch build dist out site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
