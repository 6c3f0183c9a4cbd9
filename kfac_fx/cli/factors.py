"""The spectrum of a model over the user's batches, written into a folder."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import kfac_fx
from kfac_fx.cli.problem import CommandError, failure, named_object, seed
from kfac_fx.spectrum.model_spectrum import CASE_KINDS
from kfac_fx.spectrum.queries import as_batch

FACTOR_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def add_factors(command: argparse.ArgumentParser) -> None:
    """The arguments of `kfac-fx factors`."""
    command.add_argument("model", metavar="MODEL", help="package.module:Net or path/to/file.py:Net")
    command.add_argument(
        "--data",
        required=True,
        metavar="MODULE:CALLABLE",
        help="a function without arguments that returns a DataLoader or a list of batches, or one of these",
    )
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="the folder; a run resumes in its own")
    command.add_argument("--loss", metavar="NAME", help="the loss on the outputs, such as categorical or normal")
    command.add_argument("--mode", default="gradients", help="the estimation mode; default: %(default)s")
    command.add_argument("--case", choices=CASE_KINDS, help="correct the eigenvalues, case by case")
    command.add_argument("--parts", type=int, default=1, help="record so many parts of the parameters, one by one")
    command.add_argument("--memory", type=float, metavar="GB", help="that the factors of a part may take")
    command.add_argument("--seed", type=seed, default=0, help="of the samples; default: %(default)s")
    command.add_argument("--factors", choices=FACTOR_DTYPES, help="the precision of the factors")
    command.add_argument("--decompositions", choices=FACTOR_DTYPES, help="the precision of the decompositions")


def write_factors(model: torch.nn.Module, options: argparse.Namespace) -> str:
    """Write the spectrum; returns what was written. Raises CommandError."""
    batches = data_of(options.data)
    first = next(iter(batches), None)
    if first is None:
        raise CommandError(f"{options.data} has no batches", status=1)
    try:
        batch = as_batch(first)
        net = kfac_fx.compile(model, batch.args, batch.kwargs, loss=options.loss)
        spectrum = kfac_fx.fit_spectrum(
            net,
            batches,
            mode=options.mode,
            case=options.case,
            parts=options.parts,
            memory=None if options.memory is None else int(options.memory * 1e9),
            folder=options.out,
            seed=options.seed,
            factor_dtype=FACTOR_DTYPES.get(options.factors),
            dtype=FACTOR_DTYPES.get(options.decompositions),
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise failure(error) from error
    numbers = sum(shape.numel() for shape in spectrum.shapes.values())
    return f"{options.out}: {len(spectrum.keys)} blocks of {numbers:,} parameters"


def data_of(spec: str) -> Iterable[Any]:
    """The batches that `--data` names. Raises CommandError."""
    path, colon, name = spec.rpartition(":")
    if not (colon and path and name):
        raise CommandError(f"{spec!r} names no data: write it as package.module:callable or file.py:callable")
    data = named_object(path, name)
    if callable(data):
        try:
            data = data()
        except Exception as error:
            raise CommandError(f"{spec}() failed: {type(error).__name__}: {error}", status=1) from error
    if not isinstance(data, Iterable) or iter(data) is data:
        raise CommandError(f"{spec} is of type {type(data).__name__}, not a DataLoader or a list", status=1)
    return data
