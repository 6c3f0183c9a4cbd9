"""`kfac-fx completion SHELL`: scripts that complete commands, options and their values.

They are written from the parser. A script that asked Python at every key would wait for the import of torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from string import Template

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


SHELLS: dict[str, Callable[[Commands], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
