"""The `kfac-fx` command, and the scripts with which a shell completes it.

Exit status: 0: done. 1: the model could not be built, captured or registered, or a package is missing. 2: the command
line is wrong. 130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template

import torch
from rich.console import Console

import kfac_fx
from kfac_fx.cli import demo
from kfac_fx.cli.bench import bench, fitting_schedule, table_of_times
from kfac_fx.cli.explain import explain, passes
from kfac_fx.cli.problem import CommandError, add_arguments, data_of, failure, load, read, seed
from kfac_fx.estimator.model_spectrum import CASE_KINDS
from kfac_fx.estimator.queries import as_batch
from kfac_fx.passes.errors import nearest

INSTALL = """\
bash: kfac-fx completion bash > ~/.local/share/bash-completion/completions/kfac-fx
zsh:  add to ~/.zshrc: eval "$(kfac-fx completion zsh)"
fish: kfac-fx completion fish > ~/.config/fish/completions/kfac-fx.fish"""

# An option with a free value completes files, as an argument does: `words` is empty and -o default takes over.
BASH = Template(
    """\
_kfac_fx() {
    local word=$${COMP_WORDS[COMP_CWORD]} words=
    if [ "$$COMP_CWORD" -eq 1 ]; then
        words="$commands --help --version"
    else
        case "$${COMP_WORDS[1]} $${COMP_WORDS[COMP_CWORD-1]}" in
$cases
        esac
    fi
    COMPREPLY=($$(compgen -W "$$words" -- "$$word"))
}
complete -o default -F _kfac_fx kfac-fx
"""
)


class Command(argparse.ArgumentParser):
    """A parser that lists what it takes, which argparse's own does for its subclasses only."""

    def options(self) -> Iterator[tuple[str, argparse.Action]]:
        """(name, action) of every option by its long name, and ("", action) of every argument."""
        for action in self._actions:
            for name in action.option_strings or [""]:
                if name.startswith("--") or not name:
                    yield name, action


Commands = Mapping[str, Command]


def choice_words(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))


def bash(commands: Commands) -> str:
    cases = []
    for name, command in commands.items():
        for option, action in command.options():
            if option and action.nargs != 0:
                cases.append(f'            "{name} {option}") words="{choice_words(action)}" ;;')
        words = [option or choice_words(action) for option, action in command.options()]
        cases.append(f'            "{name} "*) words="{" ".join(filter(None, words))}" ;;')
    return BASH.substitute(commands=" ".join(commands), cases="\n".join(cases))


def zsh(commands: Commands) -> str:
    """The script of bash. A ~/.zshrc without `compinit` has no completion at all, so the script starts it."""
    start = "autoload -U +X compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"
    return start + bash(commands)


def fish(commands: Commands) -> str:
    lines = []
    for name, command in commands.items():
        lines.append(f"complete -c kfac-fx -n __fish_use_subcommand -f -a {name}")
        for option, action in command.options():
            words = [f"complete -c kfac-fx -n '__fish_seen_subcommand_from {name}'"]
            words += [f"-l {option[2:]}"] if option else []
            words += (
                [f"-x -a '{choice_words(action)}'"]
                if action.choices
                else ["-r"]
                if option and action.nargs != 0
                else []
            )
            if len(words) > 1:
                lines.append(" ".join(words))
    return "\n".join(lines) + "\n"


# They are written from the parser. A script that asked Python at every key would wait for the import of torch.
SHELLS: dict[str, Callable[[Commands], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


# --- the parser -------------------------------------------------------------------------------------------------------


FORMATS = ("text", "json", "html", "dot")
FACTOR_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. arguments: without the program's name; None: those of the process."""
    options = parsed(sys.argv[1:] if arguments is None else arguments)
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


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; exits with the usage and, for a word that is nearly right, with the right one."""
    root, commands = parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        near = nearest(arguments[0], commands)
        root.error(f"there is no command {arguments[0]!r}.{near} The commands are {', '.join(commands)}.")
    options, unknown = root.parse_known_args(arguments)
    if unknown:
        names = [name for name, _ in commands[options.name].options()]
        near = "".join(nearest(word.partition("=")[0], names) for word in unknown)
        commands[options.name].error(f"there is no argument {', '.join(map(repr, unknown))}.{near}")
    return options


def parser() -> tuple[argparse.ArgumentParser, dict[str, Command]]:
    """The parser, and the parser of every command."""
    root = argparse.ArgumentParser(prog="kfac-fx", description="K-FAC for unmodified PyTorch models.")
    root.add_argument("--version", action="version", version=f"kfac-fx {kfac_fx.__version__}")
    commands = root.add_subparsers(
        dest="name",
        required=True,
        parser_class=Command,
        metavar="report | explain | passes | bench | factors | demo | completion",
    )

    report = commands.add_parser(
        "report",
        help="the Fisher block of every parameter of a model",
        description="Print the Fisher block of every parameter of a model, and the reason if it is not the default.",
        epilog="example: kfac-fx report torchvision/resnet18 --input 2,3,224,224",
    )
    add_arguments(report)
    report.add_argument("--format", choices=FORMATS, default="text", help="of the output; default: %(default)s")
    report.set_defaults(command=report_command)

    why = commands.add_parser(
        "explain",
        help="every use of one parameter, its block, and what to write for another",
        description="Print every use of one parameter with its line and its layer, the layers that nearly match, the "
        "parameter's Fisher block, and what to write for another one.",
        epilog="example: kfac-fx explain mine.py:Net encoder.0.weight --input 2,64",
    )
    add_arguments(why)
    why.add_argument("parameter", metavar="PARAMETER", help="a name of model.named_parameters()")
    why.set_defaults(command=explain_command)

    steps = commands.add_parser(
        "passes",
        help="the captured graph of a model, and the changes of every pass",
        description="Print the captured graph of a model, and the lines that every pass of the compiler changes.",
        epilog="example: kfac-fx passes mine.py:Net --input 2,64 --pass normalize",
    )
    add_arguments(steps)
    steps.add_argument("--pass", dest="only", metavar="NAME", help="print the whole graph before and after this pass")
    steps.set_defaults(command=passes_command)

    timed = commands.add_parser(
        "bench",
        help="the time and memory of a training step of a model, beside SGD and AdamW",
        description="Time training steps of a model with SGD, AdamW and K-FAC, on a CPU thread or a GPU, and print a "
        "schedule of statistics and inverses that stays within an overhead.",
        epilog="example: kfac-fx bench timm/resnet18 --input 8,3,96,96 --loss categorical --overhead 0.5",
    )
    add_arguments(timed)
    timed.add_argument("--rounds", type=step_count, default=10, help="steps of every method; default: %(default)s")
    timed.add_argument(
        "--overhead", type=float, default=0.5, help="over a step of AdamW; 0.5 is 50 percent; default: %(default)s"
    )
    add_device(timed)
    timed.set_defaults(command=bench_command)

    fit = commands.add_parser(
        "factors",
        help="the Kronecker factors of a model over your data, decomposed, in a folder",
        description="Record the factors of a model, decompose them, correct their eigenvalues, and write a safetensors "
        "file for every block. A run that was stopped resumes.",
        epilog="example: kfac-fx factors mine.py:net --data mine.py:loader --loss categorical --case sequence "
        "--parts 4 --out factors",
    )
    fit.add_argument("model", metavar="MODEL", help="package.module:Net or path/to/file.py:Net")
    fit.add_argument(
        "--data",
        required=True,
        metavar="MODULE:CALLABLE",
        help="a function without arguments that returns a DataLoader or a list of batches, or one of these",
    )
    fit.add_argument("--out", required=True, type=Path, metavar="DIR", help="the folder; a run resumes in its own")
    fit.add_argument("--loss", metavar="NAME", help="the loss on the outputs, such as categorical or normal")
    fit.add_argument("--mode", default="gradients", help="the estimation mode; default: %(default)s")
    fit.add_argument("--case", choices=CASE_KINDS, help="correct the eigenvalues, case by case")
    fit.add_argument("--parts", type=int, default=1, help="record so many parts of the parameters, one by one")
    fit.add_argument("--memory", type=float, metavar="GB", help="that the factors of a part may take")
    fit.add_argument("--seed", type=seed, default=0, help="of the samples; default: %(default)s")
    fit.add_argument("--factors", choices=FACTOR_DTYPES, help="the precision of the factors")
    fit.add_argument("--decompositions", choices=FACTOR_DTYPES, help="the precision of the decompositions")
    fit.set_defaults(command=factors_command)

    show = commands.add_parser(
        "demo",
        help="K-FAC beside SGD and AdamW on two small problems, in minutes",
        description="Train a deep autoencoder and a deep network without skips and norms with SGD and AdamW, whose "
        "learning rates are tuned, and with K-FAC, which has no settings.",
    )
    length = show.add_mutually_exclusive_group()
    length.add_argument("--steps", type=step_count, help="training steps of SGD and AdamW; K-FAC takes a fifth of them")
    length.add_argument(
        "--quick", action="store_true", help=f"take 1/{demo.QUICK} of the steps, to see whether it runs"
    )
    show.add_argument("--seed", type=seed, default=0, help="of the initial models and batches; default: %(default)s")
    add_device(show)
    show.add_argument(
        "--png", type=Path, metavar="FILE", default=Path("kfac-fx-demo.png"), help="the figure; default: %(default)s"
    )
    show.add_argument("--json", type=Path, metavar="FILE", help="write the numbers of the tables to this file")
    show.add_argument("--no-progress", action="store_true", help="do not show progress bars")
    show.set_defaults(command=demo_command)

    script = commands.add_parser(
        "completion",
        help="a script that completes the words of kfac-fx in your shell",
        description="Print a script that completes commands, options and their values.",
        epilog=INSTALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    script.add_argument("shell", choices=SHELLS)
    script.set_defaults(command=completion_command)
    return root, dict(commands.choices)


# --- models ---------------------------------------------------------------------------------------------------------


def report_command(options: argparse.Namespace) -> None:
    report = read(options).compiled().report
    formats = {"json": report.to_json, "html": report.to_html, "dot": report.to_dot}
    print(formats[options.format]() if options.format in formats else report)


def explain_command(options: argparse.Namespace) -> None:
    print(explain(read(options).compiled().program, options.parameter))


def passes_command(options: argparse.Namespace) -> None:
    for text in passes(read(options), options.only):
        print(text)


def bench_command(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    contestants = bench(read(options).on(options.device), options.rounds)
    console = Console()
    console.print(table_of_times(contestants))
    console.print(fitting_schedule(contestants, options.overhead), soft_wrap=True)


def completion_command(options: argparse.Namespace) -> None:
    _, commands = parser()
    print(SHELLS[options.shell](commands), end="")


def factors_command(options: argparse.Namespace) -> None:
    """Write the spectrum of a model over the user's batches into a folder. Raises CommandError."""
    model = load(options.model, {})
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
    print(f"{options.out}: {len(spectrum.keys)} blocks of {numbers:,} parameters")


# --- demo -----------------------------------------------------------------------------------------------------------


def demo_command(options: argparse.Namespace) -> None:
    missing = demo.missing_packages()
    if missing:
        raise CommandError(f"needs {' and '.join(missing)}: pip install 'kfac_fx[demo]'", status=1)
    for path in (options.png, options.json):
        if path is not None:
            refuse_unwritable(path)
    demo.run_demo(
        demo.DemoOptions(
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


def refuse_unwritable(path: Path) -> None:
    """Raises CommandError for a path that no file can be written to, before a program has run for minutes."""
    if path.is_dir():
        raise CommandError(f"{str(path)!r} is a folder: name a file in it")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise CommandError(f"there is no folder {str(path.parent)!r} to write {path.name} into")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise CommandError(f"{str(path)!r} may not be written to")


def step_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", type=device, default=torch.device("cpu"), help="where to train, such as cuda; default: %(default)s"
    )


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
