"""The `kfac-fx` command.

Exit status: 0: done. 1: the model could not be built, captured or registered, or a package is missing. 2: the command
line is wrong. 130: interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import kfac_fx
from kfac_fx import demo
from kfac_fx.passes.errors import nearest

FORMATS = ("text", "json", "html", "dot")


class CommandError(Exception):
    """Ends the command with a sentence and an exit status."""

    def __init__(self, text: str, status: int = 2) -> None:
        super().__init__(text)
        self.status = status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. arguments: without the program's name; None: those of the process."""
    options = parser().parse_args(arguments)
    try:
        options.command(options)
    except CommandError as error:
        print(f"kfac-fx {options.name}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print(f"kfac-fx {options.name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="kfac-fx", description="K-FAC for unmodified PyTorch models.")
    root.add_argument("--version", action="version", version=f"kfac-fx {kfac_fx.__version__}")
    commands = root.add_subparsers(dest="name", required=True, metavar="report | demo")

    report = commands.add_parser(
        "report",
        help="the Fisher block of every parameter of a model",
        description="Print the Fisher block of every parameter of a model, and the reason if it is not the default.",
        epilog="example: kfac-fx report torchvision.models:resnet18 --input 2,3,224,224",
    )
    report.add_argument("model", metavar="MODULE:CALLABLE", help="the function that builds it without arguments")
    report.add_argument(
        "--input",
        dest="inputs",
        metavar="SHAPE[:DTYPE]",
        type=example_input,
        action="append",
        required=True,
        help="an example input, such as 2,3,224,224 or 2,16:int64 (zeros); repeat it for every positional input",
    )
    report.add_argument("--format", choices=FORMATS, default="text", help="of the output; default: %(default)s")
    report.set_defaults(command=report_command)

    show = commands.add_parser(
        "demo",
        help="K-FAC beside SGD and AdamW on two small problems, in minutes",
        description="Train an autoencoder and a classifier of handwritten digits with SGD, AdamW and K-FAC.",
    )
    show.add_argument("--steps", type=step_count, help="training steps of SGD and AdamW; K-FAC takes a fifth of them")
    show.add_argument("--quick", action="store_true", help=f"take 1/{demo.QUICK} of the steps, to see whether it runs")
    show.add_argument("--seed", type=int, default=0, help="of the initial models and batches; default: %(default)s")
    show.add_argument(
        "--device", type=device, default=torch.device("cpu"), help="where to train, such as cuda; default: %(default)s"
    )
    show.add_argument(
        "--png", type=Path, metavar="FILE", default=Path("kfac-fx-demo.png"), help="the figure; default: %(default)s"
    )
    show.add_argument("--json", type=Path, metavar="FILE", help="write the numbers of the tables to this file")
    show.add_argument("--no-progress", action="store_true", help="do not show progress bars")
    show.set_defaults(command=demo_command)
    return root


# --- report ---------------------------------------------------------------------------------------------------------


def report_command(options: argparse.Namespace) -> None:
    model = load(options.model)
    try:
        report = kfac_fx.compile(model, tuple(options.inputs)).report
    except (ValueError, RuntimeError) as error:
        raise CommandError(f"{type(error).__name__}: {error}", status=1) from error
    formats = {"json": report.to_json, "html": report.to_html, "dot": report.to_dot}
    print(formats[options.format]() if options.format in formats else report)


def load(path: str) -> nn.Module:
    """Import `"package.module:callable"` and call it. The current folder is searched first, as with `python -m`."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise CommandError(f"{path!r} does not name a model: write it as package.module:callable")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise CommandError(f"importing {module_name} failed: {error}", status=1) from error
        raise CommandError(f"there is no module {error.name!r}") from error
    except Exception as error:
        raise CommandError(f"importing {module_name} failed: {type(error).__name__}: {error}", status=1) from error
    finally:
        sys.path.pop(0)
    if not hasattr(module, name):
        raise CommandError(f"module {module_name!r} has no {name!r}.{nearest(name, dir(module))}")
    make = getattr(module, name)
    if not callable(make):
        raise CommandError(f"{path} is of type {type(make).__name__}, not a callable that builds a model")
    try:
        model = make if isinstance(make, nn.Module) else make()
    except Exception as error:
        raise CommandError(f"{path}() failed: {type(error).__name__}: {error}", status=1) from error
    if not isinstance(model, nn.Module):
        raise CommandError(f"{path}() returned something of type {type(model).__name__}, not an nn.Module")
    return model


def example_input(text: str) -> Tensor:
    """A tensor from a text such as `"2,16:int64"`: random numbers for floating-point dtypes, otherwise zeros."""
    shape_text, colon, dtype_text = text.partition(":")
    try:
        shape = [int(size) for size in shape_text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write sizes as in 2,3,224,224") from None
    if min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a size below 1")
    dtype = getattr(torch, dtype_text, None) if colon else torch.float32
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{dtype_text!r} is not a dtype of torch.{nearest(dtype_text, DTYPES)}")
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


DTYPES = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]


# --- demo -----------------------------------------------------------------------------------------------------------


def demo_command(options: argparse.Namespace) -> None:
    missing = demo.missing()
    if missing:
        raise CommandError(f"needs {' and '.join(missing)}: pip install 'kfac_fx[demo]'", status=1)
    for path in (options.png, options.json):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(f"there is no folder {str(path.parent)!r} to write {path.name} into")
    demo.run(
        demo.Options(
            steps=options.steps,
            quick=options.quick,
            seed=options.seed,
            device=options.device,
            png=options.png,
            json=options.json,
            progress=not options.no_progress,
        ),
        Console(),
    )


def step_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def device(text: str) -> torch.device:
    """A device of this machine."""
    try:
        result = torch.device(text)
        torch.empty(0, device=result)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"no device {text!r}: {reason}") from None
    return result


if __name__ == "__main__":
    sys.exit(main())
