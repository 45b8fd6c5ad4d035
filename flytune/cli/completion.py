"""`flytune completion`: a script for bash and zsh."""

import argparse
import sys
from importlib import import_module

from flytune.cli.parser import parser_of_all

_SCRIPT = """\
# eval "$(flytune completion)" in ~/.bashrc or ~/.zshrc
if [ -n "${{ZSH_VERSION:-}}" ]; then autoload -U +X compinit bashcompinit && compinit && bashcompinit; fi
_flytune() {{
  local words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _flytune flytune
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command, which has none."""


def run(options: argparse.Namespace) -> int:
    """Print the script; where no word fits, the shell completes names of files."""
    _, parsers = parser_of_all()
    cases = []
    for name, of_command in parsers.items():
        import_module(f"flytune.cli.{name}").add_arguments(of_command)
        words = " ".join(word for word in of_command.option_words() if word.startswith("--"))
        cases.append(f'      {name}) words="{words}" ;;')
    sys.stdout.write(_SCRIPT.format(commands=" ".join(parsers), cases="\n".join(cases)))
    return 0
