"""`slackline completion`: a script with which a shell completes commands, options and their values.

The script is made from the parsers of the commands, so it has all of them and nothing else.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module

from loadgen.cli.main import COMMANDS
from loadgen.load.workload import WORKLOADS
from shared.perf import profile_file as profiles
from shared.policy import registry
from shared.rules.tiers import BUILT_IN

# The values of options that take a name of ours, or a file.
KNOWN: dict[str, Callable[[], list[str]]] = {
    "--policy": registry.names,
    "--profile": profiles.names,
    "--tiers": lambda: list(BUILT_IN),
    "--workload": lambda: list(WORKLOADS),
}


@dataclass
class Words:
    """The words that may follow a command: options with their help, the values of some of them,
    and words that are no options.
    """

    line: str
    options: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)
    takes: set[str] = field(default_factory=set)  # options that take a value
    others: list[str] = field(default_factory=list)


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
    print(SHELLS[args.shell](words()), end="")
    return 0


def words() -> dict[str, Words]:
    """The words of each command, and those of no command under the empty name."""
    found = {"": Words("", {"--help": "say more", "--version": "say the version"})}
    found[""].others = list(COMMANDS)
    for name, (module, line) in COMMANDS.items():
        parser = argparse.ArgumentParser()
        import_module(module).add_arguments(parser)
        found[name] = Words(line)
        for action in _actions(parser):
            if not action.option_strings:
                found[name].others += map(str, action.choices or ())
                continue
            for option in action.option_strings:
                found[name].options[option] = _first_words(action.help or "")
                if action.nargs != 0:
                    found[name].takes.add(option)
                if option in KNOWN:
                    found[name].values[option] = KNOWN[option]()
                elif action.choices:
                    found[name].values[option] = [str(choice) for choice in action.choices]
    return found


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _actions(sub)


def _first_words(text: str) -> str:
    """The help of an option up to its first pause, without what a shell would read."""
    short = text.partition(" (")[0].partition(";")[0].partition(": ")[0]
    return short.translate(str.maketrans("", "", "'\"`$\\[]:")).replace("%%", "%")


def bash(found: dict[str, Words]) -> str:
    """Options of the command that stands there; values after an option that has a list of them, and
    files after any other.
    """
    cases = []
    for name, of in found.items():
        for option, values in of.values.items():
            or_file = " files=1" if option in KNOWN else ""
            cases.append(f"    '{name} {option}') words='{' '.join(values)}'{or_file} ;;")
        if files := sorted(of.takes - of.values.keys()):
            cases.append("    " + "|".join(f"'{name} {one}'" for one in files) + ") files=1 ;;")
        every = " ".join([*of.others, *of.options])
        cases.append(f"    '{name} '*) words='{every}'; files={1 if name else 0} ;;")
    lines = "\n".join(cases)
    return f"""# bash completion of slackline
_slackline() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} last= name= words= files=0
  if [ "$COMP_CWORD" -gt 1 ]; then
    name=${{COMP_WORDS[1]}}
    last=${{COMP_WORDS[COMP_CWORD-1]}}
  fi
  case "$name $last" in
{lines}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [ "$files" = 1 ] && [ "${{word#-}}" = "$word" ]; then
    COMPREPLY+=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _slackline slackline
"""


def zsh(found: dict[str, Words]) -> str:
    """The same with a line of help beside each."""
    described = "\n".join(
        f"    '{name}:{_first_words(of.line)}'" for name, of in found.items() if name
    )
    cases = []
    for name, of in found.items():
        if not name:
            continue
        specs = []
        for option, text in of.options.items():
            values = of.values.get(option)
            value = f":value:({' '.join(values)})" if values else ":value:_files"
            specs.append(f"        '*{option}[{text}]{value if option in of.takes else ''}'")
        rest = (
            f"        '*:word:({' '.join(of.others)})'" if of.others else "        '*:file:_files'"
        )
        cases.append(f"      {name})\n      _arguments \\\n" + " \\\n".join([*specs, rest]) + " ;;")
    lines = "\n".join(cases)
    return f"""#compdef slackline
_slackline() {{
  local -a commands
  commands=(
{described}
  )
  if (( CURRENT == 2 )); then
    _describe 'command' commands
    _arguments '--help[say more]' '--version[say the version]'
    return
  fi
  local name=$words[2]
  shift words
  (( CURRENT-- ))
  case $name in
{lines}
  esac
}}
compdef _slackline slackline
"""


def fish(found: dict[str, Words]) -> str:
    lines = ["# fish completion of slackline", "complete -c slackline -n __fish_use_subcommand -f"]
    for name, of in found.items():
        if name:
            told = f"-a {name} -d '{_first_words(of.line)}'"
            lines.append(f"complete -c slackline -n __fish_use_subcommand {told}")
        here = f"'__fish_seen_subcommand_from {name}'" if name else "__fish_use_subcommand"
        for option, text in of.options.items():
            short = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = of.values.get(option)
            takes = f" -x -a '{' '.join(values)}'" if values else " -r"
            value = takes if option in of.takes else ""
            lines.append(f"complete -c slackline -n {here} {short}{value} -d '{text}'")
        if name and of.others:
            lines.append(f"complete -c slackline -n {here} -f -a '{' '.join(of.others)}'")
    return "\n".join(lines) + "\n"


SHELLS: dict[str, Callable[[dict[str, Words]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
