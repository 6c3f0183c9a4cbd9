"""A command and its arguments, and the problem that most commands take: a model, its inputs, data and declarations.

The command line names a model in one of these ways:

    package.module:Net    a class, a function or a module of an installed package, or of the working folder
    path/to/file.py:Net   the same of a file
    timm/resnet18         a model of timm or torchvision by its name there, with random weights
    transformers/GPT2LMHeadModel   a class of transformers with its default configuration, and random weights
    transformers/FOLDER   the model that a configuration file names, with random weights

`--arg name=value` passes arguments, to the callable or to the configuration.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import kfac_fx
from kfac_fx.linalg.arguments import a_seed
from kfac_fx.passes.errors import first_line, nearest
from kfac_fx.passes.layers import Layer
from kfac_fx.passes.torch_private import pytree

MODEL_LIBRARIES = ("timm", "torchvision", "transformers")
MODEL_FORMS = (
    "package.module:Net, path/to/file.py:Net, timm/NAME, torchvision/NAME, transformers/CLASS or transformers/FOLDER"
)
DTYPES = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]

# torch's words for numbers with a fraction instead of ids, of an embedding and of an index
NOT_LONG = "scalar types: Long"
NO_INDEX = "tensors used as indices must be long"
WHOLE_NUMBERS = "\nIds are whole numbers: write --input 2,16:int64:1000 for random ones below 1000."
LOSS_HINT = "\nHere: --loss categorical, or, if forward computes its loss from labels, --input labels=2,16:int64:1000."
OWN_LOSS_HINT = "\nHere: --loss FILE:NAME, the name of such a function of the outputs in a file."
NOT_STRICT = "strict=False"  # our words where `--strict` refuses a parameter
STRICT_HINT = "\nHere: leave --strict out, or name a declared layer with --layer FILE:NAME."
ARGUMENTS_HINT = " Write the model's arguments as --arg NAME=VALUE."


class CommandError(Exception):
    """Ends the command with a sentence and an exit status."""

    def __init__(self, text: str, status: int = 2) -> None:
        super().__init__(text)
        self.status = status


Argument = tuple[tuple[str, ...], dict[str, Any]]


def argument(*names: str, **settings: Any) -> Argument:
    """An argument of a command, as `argparse.ArgumentParser.add_argument` takes it."""
    return names, settings


@dataclass(frozen=True)
class Subcommand:
    """One command.

    Attributes:
        run: does it, with the options of the command line.
        help, description, epilog: for the list of all commands, and for the page of this one.
        arguments: in the order of the page; of those in a list, the command line may have one.
    """

    name: str
    run: Callable[[argparse.Namespace], None]
    help: str
    description: str
    arguments: Sequence[Argument | Sequence[Argument]]
    epilog: str | None = None

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        for entry in self.arguments:
            group = [entry] if isinstance(entry, tuple) else entry
            target = parser if isinstance(entry, tuple) else parser.add_mutually_exclusive_group()
            for names, settings in group:
                target.add_argument(*names, **settings)
        parser.set_defaults(command=self.run)


@dataclass(frozen=True)
class Problem:
    """A model with one batch of inputs, and the arguments of `kfac_fx.compile`."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Any
    strict: bool
    layers: tuple[Layer, ...] = ()

    def on(self, device: torch.device) -> Problem:
        """The same problem on another device. The model itself moves."""
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), (self.args, dict(self.kwargs)))
        return replace(self, model=self.model.to(device), args=args, kwargs=kwargs)

    def compiled(self) -> kfac_fx.CompiledModule:
        """The compiled model. Raises CommandError if it cannot be captured or registered."""
        try:
            return kfac_fx.compile(
                self.model, self.args, self.kwargs, loss=self.loss, strict=self.strict, layers=self.layers
            )
        except (ValueError, RuntimeError) as error:
            raise failure(error, self.loss) from error


def failure(error: Exception, loss: Any = None) -> CommandError:
    """The error as one of the command, with what to write on the command line. loss: that of the command line."""
    hints = {NOT_LONG: WHOLE_NUMBERS, NO_INDEX: WHOLE_NUMBERS, NOT_STRICT: STRICT_HINT}
    by_words = (hint for words, hint in hints.items() if words in str(error))
    of_loss = LOSS_HINT if loss is None else OWN_LOSS_HINT * isinstance(loss, str)
    hint = next(by_words, of_loss if isinstance(error, kfac_fx.LossError) else "")
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return CommandError(f"{type(error).__name__}: {error}{notes}{hint}", status=1)


def read(options: argparse.Namespace) -> Problem:
    """The problem that the command line names. Raises CommandError."""
    named = [name for name, _ in options.inputs]
    if repeated := sorted({name for name in named if name and named.count(name) > 1}):
        raise CommandError(f"--input names {', '.join(repeated)} twice")
    if options.inputs and options.file:
        raise CommandError("give the inputs with --input or in the file of --inputs, not both")
    if not options.inputs and not options.file:
        raise CommandError(
            "there are no inputs: write --input 2,3,224,224 for every input, 2,16:int64:1000 for ids, or --inputs FILE"
        )
    model = load(options.model, dict(options.arguments))
    if options.training is not None:
        model.train(options.training)
    if options.file:
        args, kwargs = inputs_of(options.file)
    else:
        args = tuple(value for name, value in options.inputs if name is None)
        kwargs = {name: value for name, value in options.inputs if name is not None}
    layers = tuple(map(declared_layer, options.layers))
    return Problem(model, args, kwargs, declared_loss(options.loss), options.strict, layers)


# --- models -----------------------------------------------------------------------------------------------------------


def load(spec: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The model that `spec` names; see the module's docstring. Raises CommandError."""
    library, slash, name = spec.partition("/")
    if slash and name and library in MODEL_LIBRARIES and ":" not in spec:
        return model_of_library(library, name, arguments)
    path, colon, name = spec.rpartition(":")
    if not (colon and path and name):
        if spec.endswith(".py"):
            raise CommandError(f"{spec!r} is a file: name the model in it, as in {spec}:Net")
        raise CommandError(f"{spec!r} does not name a model: write it as {MODEL_FORMS}")
    make = named_object(path, name)
    if isinstance(make, nn.Module):
        if arguments:
            raise CommandError(f"{spec} is a model already, so it takes no --arg")
        return make
    if not callable(make):
        raise CommandError(f"{spec} is of type {type(make).__name__}, not a callable that builds a model")
    return built(spec, lambda: make(**arguments))


def declared_layer(spec: str) -> Layer:
    """The layer that `spec` names, as in file.py:name. Raises CommandError."""
    path, _, name = spec.rpartition(":")
    layer = named_object(path, name) if path and name else None
    if not isinstance(layer, Layer):
        raise CommandError(f"--layer {spec}: write file.py:name, the name of a function below @kfac_fx.layer(...)")
    return layer


def declared_loss(spec: str | None) -> Any:
    """The loss that `spec` names: a function of the outputs, as in file.py:name, or a name of a loss. Raises
    CommandError."""
    if spec is None or ":" not in spec:
        return spec
    path, _, name = spec.rpartition(":")
    loss = named_object(path, name) if path and name else None
    if not callable(loss):
        raise CommandError(f"--loss {spec}: write file.py:name, the name of a function of the model's outputs")
    return loss


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


def named_object(path: str, name: str) -> Any:
    """An attribute of a module or a file. Raises CommandError. A file is run once."""
    if not path.endswith(".py") and not all(part.isidentifier() for part in path.split(".")):
        raise CommandError(f"{path!r} is no name of a module: write {path}.py:{name} for a file")
    loaded = sys.modules.get(Path(path).stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(Path(path).absolute()):
        module = loaded
    else:
        module = module_of_file(Path(path)) if path.endswith(".py") else module_by_name(path)
    if not hasattr(module, name):
        hint = ARGUMENTS_HINT if "(" in name else nearest(name, dir(module))
        if path in MODEL_LIBRARIES:
            hint = f" A model of {path} is written {path}/{name}."
        raise CommandError(f"module {path!r} has no {name!r}.{hint}")
    return getattr(module, name)


def module_by_name(name: str) -> ModuleType:
    """Import a module. The current folder is searched first, as with `python -m`."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise CommandError(f"importing {name} failed: {error}", status=1) from error
        hint = f": pip install {error.name}" if error.name in MODEL_LIBRARIES else ""
        raise CommandError(f"there is no module {error.name!r}{hint}") from error
    except Exception as error:
        raise CommandError(f"importing {name} failed: {type(error).__name__}: {error}", status=1) from error
    finally:
        sys.path.pop(0)


def module_of_file(path: Path) -> ModuleType:
    """Run a file as a module. Its folder is searched first for what it imports, as with `python FILE`."""
    if not path.is_file():
        raise CommandError(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"bug in kfac_fx: no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as an import does: classes look up their module by name
    sys.path.insert(0, str(path.absolute().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CommandError(f"running {path} failed: {type(error).__name__}: {error}", status=1) from error
    finally:
        sys.path.pop(0)
    return module


def model_of_library(library: str, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A model of timm, torchvision or transformers with random weights."""
    module = module_by_name("torchvision.models" if library == "torchvision" else library)
    if library == "transformers":
        try:  # it imports its modules when they are asked for
            return model_of_transformers(module, name, arguments)
        except (ImportError, OSError) as error:
            raise CommandError(f"{library}/{name} failed: {type(error).__name__}: {error}", status=1) from error
    if library == "timm":
        names, make = module.list_models(), module.create_model
    else:
        names, make = module.list_models(), module.get_model
    if name not in names:
        raise CommandError(f"{library} has no model {name!r}.{nearest(name, names)}")
    return built(f"{library}/{name}", lambda: make(name, **arguments))


def model_of_transformers(transformers: Any, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A class by its name, or the class that the configuration in a folder names."""
    if hasattr(transformers, name):
        make = getattr(transformers, name)
        if not hasattr(make, "config_class"):
            raise CommandError(f"transformers.{name} is no model")
        refuse_ignored(make.config_class, arguments)
        return built(f"transformers/{name}", lambda: make(make.config_class(**arguments)))
    if not Path(name).is_dir():
        raise CommandError(
            f"transformers has no class {name!r}, and there is no folder of this name with a config.json."
            f"{nearest(name, dir(transformers))}"
        )
    config = transformers.AutoConfig.from_pretrained(name, local_files_only=True, **arguments)
    if not config.architectures:
        raise CommandError(f"the configuration in {name!r} names no class under 'architectures'")
    make = getattr(transformers, config.architectures[0])
    return built(f"transformers/{name}", lambda: make(config))


def refuse_ignored(config_class: Any, arguments: Mapping[str, Any]) -> None:
    """Raises CommandError for arguments that no attribute of the configuration has. It would take and ignore them."""
    known = dir(config_class()) + list(config_class.attribute_map)
    wrong = [name for name in arguments if not {name, f"_{name}"} & set(known)]
    if wrong:
        near = "".join(nearest(name, known) for name in wrong)
        raise CommandError(f"{config_class.__name__} has no {', '.join(map(repr, wrong))}.{near}")


def built(spec: str, make: Any) -> nn.Module:
    """The model that `make()` returns. Raises CommandError if it fails, or returns something else."""
    try:
        model = make()
    except Exception as error:
        hint = f".{ARGUMENTS_HINT}" if isinstance(error, TypeError) else ""
        raise CommandError(f"{spec}() failed: {type(error).__name__}: {error}{hint}", status=1) from error
    if not isinstance(model, nn.Module):
        raise CommandError(f"{spec}() returned something of type {type(model).__name__}, not an nn.Module")
    return model


# --- arguments and inputs ---------------------------------------------------------------------------------------------


def named_value(text: str) -> tuple[str, Any]:
    """`"width=64"` -> `("width", 64)`. Text that is no Python literal stays text."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, as in width=64")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def seed(text: str) -> int:
    """A seed that torch takes."""
    try:
        a_seed("the seed", int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from -2**63 and below 2**64") from None
    return int(text)


def example_input(text: str) -> tuple[str | None, Tensor]:
    """The name, if any, and a tensor from a text such as `"ids=2,16:int64:1000"`.

    Floating-point and complex tensors are random; integers are random below the last number, or zeros without one.
    """
    name, equals, rest = text.rpartition("=")
    if equals and not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{name!r} is not the name of an argument")
    shape_text, colon, dtype_text = rest.partition(":")
    dtype_text, below_colon, below_text = dtype_text.partition(":")
    try:
        shape = [int(size) for size in shape_text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write sizes as in 2,3,224,224") from None
    if min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a size below 1")
    dtype = getattr(torch, dtype_text, None) if colon else torch.float32
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{dtype_text!r} is not a dtype of torch.{nearest(dtype_text, DTYPES)}")
    continuous = dtype.is_floating_point or dtype.is_complex
    if below_colon and (continuous or not below_text.isdecimal() or int(below_text) < 1):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in a bound for integers, as in 2,16:int64:1000")
    try:
        return name or None, tensor(shape, dtype, int(below_text) if below_colon else 1)
    except RuntimeError as error:  # no memory, or a dtype without random numbers
        raise argparse.ArgumentTypeError(f"no tensor {text!r} can be made: {first_line(error)}") from None


def tensor(shape: list[int], dtype: torch.dtype, below: int) -> Tensor:
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(below, shape).to(dtype)


def inputs_of(path: Path) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """(args, kwargs) from a file of torch.save or numpy.savez. No code in it is executed."""
    if not path.is_file():
        raise CommandError(f"there is no file {str(path)!r}")
    try:
        value = arrays_of(path) if path.suffix in (".npy", ".npz") else torch.load(path, weights_only=True)
    except Exception as error:
        raise CommandError(f"reading {path} failed: {type(error).__name__}: {error}", status=1) from error
    if isinstance(value, dict):
        return (), value
    return (tuple(value) if isinstance(value, (list, tuple)) else (value,)), {}


def arrays_of(path: Path) -> Any:
    """The tensors of a NumPy file: by the names in an .npz, in order if they have none."""
    import numpy as np

    loaded = np.load(path, allow_pickle=False)
    if path.suffix == ".npy":
        return torch.from_numpy(loaded)
    named = {name: torch.from_numpy(loaded[name]) for name in loaded.files}
    unnamed = [named[f"arr_{number}"] for number in range(len(named)) if f"arr_{number}" in named]
    return unnamed if len(unnamed) == len(named) else named


def step_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def part(text: str) -> float:
    """A part of a whole, as 0.2 or as 20%."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 0.2 or 20%")
    return value


def device(text: str) -> torch.device:
    """A device of this machine."""
    try:
        result = torch.device(text)
        torch.empty(0, device=result)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"no device {text!r}: {reason}") from None
    if result.type == "meta":
        raise argparse.ArgumentTypeError("the meta device has no values to train")
    return result


# --- arguments that several commands have -----------------------------------------------------------------------------

LOSS = argument(
    "--loss",
    metavar="NAME",
    help="the loss on the outputs, such as categorical or normal, or FILE:NAME for a function of the outputs",
)
DEVICE = argument(
    "--device", type=device, default=torch.device("cpu"), help="where to train, such as cuda; default: %(default)s"
)
PROBLEM: tuple[Argument | Sequence[Argument], ...] = (  # that `read` reads
    argument("model", metavar="MODEL", help=MODEL_FORMS),
    argument(
        "--arg",
        dest="arguments",
        metavar="NAME=VALUE",
        type=named_value,
        action="append",
        default=[],
        help="an argument for the callable or the configuration, such as --arg width=64; repeat it for more",
    ),
    argument(
        "--input",
        dest="inputs",
        metavar="[NAME=]SHAPE[:DTYPE[:BELOW]]",
        type=example_input,
        action="append",
        default=[],
        help="an example input, such as 2,3,224,224, ids=2,16:int64 (zeros) or 2,16:int64:1000 (random numbers below "
        "1000); repeat it for every input",
    ),
    argument(
        "--inputs",
        dest="file",
        metavar="FILE",
        type=Path,
        help="example inputs that torch.save or numpy.savez wrote: a tensor, a tuple, or a dictionary by argument name",
    ),
    LOSS,
    argument(
        "--layer",
        dest="layers",
        metavar="FILE:NAME",
        action="append",
        default=[],
        help="a layer that kfac_fx.layer declares, such as mine.py:circulant; repeat it for more",
    ),
    argument("--strict", action="store_true", help="fail if a parameter has no structured block"),
    [
        argument("--train-mode", dest="training", action="store_const", const=True, help="call model.train()"),
        argument("--eval-mode", dest="training", action="store_const", const=False, help="call model.eval()"),
    ],
)
