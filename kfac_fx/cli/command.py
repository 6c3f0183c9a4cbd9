"""The `kfac-fx` command: its parser, its exit status, and the scripts with which a shell completes it.

Every command declares its arguments beside what it does; those without a module of their own are here. Exit status: 0:
done. 1: the model could not be built, captured or registered, or a package is missing. 2: the command line is wrong.
130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template

import torch

import kfac_fx
from kfac_fx.cli.bench import BENCH
from kfac_fx.cli.demo import DEMO
from kfac_fx.cli.explain import EXPLAIN, PASSES
from kfac_fx.cli.problem import (
    LOSS,
    PROBLEM,
    CommandError,
    Subcommand,
    argument,
    data_of,
    declared_loss,
    failure,
    load,
    read,
    seed,
)
from kfac_fx.estimator.batches import batch_for
from kfac_fx.estimator.model_spectrum import CASE_KINDS
from kfac_fx.passes.errors import nearest
from kfac_fx.recording.model_checks import with_targets
from kfac_fx.recording.progress import working

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
        hints = (
            f" Write --format {word.removeprefix('--')}."
            if options.name == "report" and word.startswith("--") and word[2:] in FORMATS
            else nearest(word.partition("=")[0], names)
            for word in unknown
        )
        near = "".join(dict.fromkeys(hints))
        commands[options.name].error(f"there is no argument {', '.join(map(repr, unknown))}.{near}")
    return options


def parser() -> tuple[argparse.ArgumentParser, dict[str, Command]]:
    """The parser, and the parser of every command."""
    root = argparse.ArgumentParser(prog="kfac-fx", description="K-FAC for unmodified PyTorch models.")
    root.add_argument("--version", action="version", version=f"kfac-fx {kfac_fx.__version__}")
    names = " | ".join(command.name for command in COMMANDS)
    commands = root.add_subparsers(dest="name", required=True, parser_class=Command, metavar=names)
    for command in COMMANDS:
        command.add_to(
            commands.add_parser(
                command.name,
                help=command.help,
                description=command.description,
                epilog=command.epilog,
                formatter_class=argparse.HelpFormatter
                if "\n" not in (command.epilog or "")
                else argparse.RawDescriptionHelpFormatter,
            )
        )
    return root, dict(commands.choices)


# --- completion -------------------------------------------------------------------------------------------------------

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


def complete(options: argparse.Namespace) -> None:
    _, commands = parser()
    print(SHELLS[options.shell](commands), end="")


COMPLETION = Subcommand(
    "completion",
    complete,
    "a script that completes the words of kfac-fx in your shell",
    "Print a script that completes commands, options and their values.",
    [argument("shell", choices=SHELLS)],
    INSTALL,
)


# --- report -----------------------------------------------------------------------------------------------------------


NO_LOSS_HINT = (
    "kfac-fx report: no loss is named, and forward computes none that is known. Name the one that you train, as in "
    "--loss categorical, and the report is of its Fisher."
)


def print_report(options: argparse.Namespace) -> None:
    net = read(options).compiled()
    report = net.report
    formats = {"json": report.to_json, "html": report.to_html, "dot": report.to_dot}
    print(formats[options.format]() if options.format in formats else report.to_text(expand=options.expand))
    if net.knows_no_loss:
        print(NO_LOSS_HINT, file=sys.stderr)


REPORT = Subcommand(
    "report",
    print_report,
    "the Fisher block of every parameter of a model",
    "Print the Fisher block of every parameter of a model, and the reason if it is not the default.",
    [
        *PROBLEM,
        argument("--format", choices=FORMATS, default="text", help="of the output; default: %(default)s"),
        argument("--expand", action="store_true", help="a row for each of several equal layers, and all lines of text"),
    ],
    "example: kfac-fx report torchvision/resnet18 --input 2,3,224,224 --format html > report.html",
)


# --- factors ----------------------------------------------------------------------------------------------------------


def write_factors(options: argparse.Namespace) -> None:
    """Write the spectrum of a model over the user's batches into a folder. Raises CommandError."""
    with working("kfac-fx factors: reading the model and the data", after=0.0):
        model = load(options.model, {})
        batches, loss = data_of(options.data), declared_loss(options.loss)
        first = next(iter(batches), None)
    if first is None:
        raise CommandError(f"{options.data} has no batches", status=1)
    try:
        with working("kfac-fx factors: compiling the model", after=0.0):
            batch = batch_for(model, first, "the first batch")
            kwargs = with_targets(model, batch.args, batch.kwargs, batch.targets, loss is not None)
            net = kfac_fx.compile(model, batch.args, kwargs, loss=loss)
        spectrum = kfac_fx.fit_spectrum(
            net,
            batches,
            mode=options.mode,
            case=options.case,
            parts=options.parts,
            memory=None if options.memory is None else int(options.memory * 1e9),
            folder=options.out,
            save_every=options.save_every,
            seed=options.seed,
            factor_dtype=FACTOR_DTYPES.get(options.factors),
            dtype=FACTOR_DTYPES.get(options.decompositions),
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise failure(error) from error
    numbers = sum(shape.numel() for shape in spectrum.shapes.values())
    print(f"{options.out}: {len(spectrum.keys)} blocks of {numbers:,} parameters")


FACTORS = Subcommand(
    "factors",
    write_factors,
    "the Kronecker factors of a model over your data, decomposed, in a folder",
    "Record the factors of a model, decompose them, correct their eigenvalues, and write a safetensors file for every "
    "block. A run that was stopped resumes.",
    [
        argument("model", metavar="MODEL", help="package.module:Net or path/to/file.py:Net"),
        argument(
            "--data",
            required=True,
            metavar="MODULE:CALLABLE",
            help="a function without arguments that returns a DataLoader or a list of batches, or one of these",
        ),
        argument("--out", required=True, type=Path, metavar="DIR", help="the folder; a run resumes in its own"),
        argument("--save-every", type=int, metavar="N", help="write the sums after every N batches, to resume there"),
        LOSS,
        argument("--mode", default="gradients", help="the estimation mode; default: %(default)s"),
        argument("--case", choices=CASE_KINDS, help="correct the eigenvalues, case by case"),
        argument("--parts", type=int, default=1, help="record so many parts of the parameters, one by one"),
        argument("--memory", type=float, metavar="GB", help="that the factors of a part may take"),
        argument("--seed", type=seed, default=0, help="of the samples; default: %(default)s"),
        argument("--factors", choices=FACTOR_DTYPES, help="the precision of the factors"),
        argument("--decompositions", choices=FACTOR_DTYPES, help="the precision of the decompositions"),
    ],
    "example: kfac-fx factors mine.py:Net --data mine.py:loader --loss categorical --case sequence --parts 4 --out "
    "factors",
)

COMMANDS = (REPORT, EXPLAIN, PASSES, BENCH, FACTORS, DEMO, COMPLETION)
