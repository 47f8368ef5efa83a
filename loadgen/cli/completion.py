"""`slackline completion`: a script with which a shell completes commands, options and their values.

The script is made from the parsers of the commands, so it has all of them and nothing else.
"""

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import shtab

from loadgen.cli.main import COMMANDS
from loadgen.load.workload import WORKLOADS
from shared.perf import profile_file as profiles
from shared.policy import registry
from shared.rules.tiers import BUILT_IN

SHELLS = ("bash", "zsh", "fish")
# The names that these options take, beside a file.
KNOWN = {
    "--policy": registry.names(),
    "--profile": profiles.names(),
    "--tiers": [*BUILT_IN],
    "--workload": [*WORKLOADS],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=SHELLS, metavar="|".join(SHELLS), help="the shell that is to complete"
    )
    parser.epilog = (
        "bash: add `source <(slackline completion bash)` to ~/.bashrc; "
        "zsh: add `source <(slackline completion zsh)` to ~/.zshrc, after compinit; "
        "fish: slackline completion fish > ~/.config/fish/completions/slackline.fish"
    )


def run(args: argparse.Namespace) -> int:
    # zsh registers the script by `eval` only; users `source` it
    print(shtab.complete(whole_parser(), args.shell).replace("[-1] == eval", "[-1] == (eval|file)"))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """The parser of all commands; its options say how a shell completes their values."""
    parser = argparse.ArgumentParser(prog="slackline")
    parser.add_argument("--version", action="version", version="")
    choices = parser.add_subparsers()
    for name, (module, line) in COMMANDS.items():
        sub = choices.add_parser(name, help=line)
        import_module(module).add_arguments(sub)
        for action in actions_of(sub):
            if known := KNOWN.get(action.option_strings[0] if action.option_strings else ""):
                action.complete = _names_or_file(known)  # type: ignore[attr-defined]
            elif action.type is Path or "FILE" in str(action.metavar):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The actions of a command and of the commands below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from actions_of(sub)
        else:
            yield action


def _names_or_file(names: list[str]) -> dict[str, str | dict[str, str]]:
    """The way each shell completes a name or a file; zsh and fish offer only the names."""
    words = " ".join(names)
    function = f"_slackline_{names[0]}_or_file".replace("-", "_")
    body = f'{function}() {{\n  compgen -W "{words}" -- $1\n  compgen -f -- $1\n}}'
    return {"bash": function, "zsh": f"({words})", "fish": words, "preamble": {"bash": body}}
