"""Parser of the command line: each command declares its arguments in its own module."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from flytune import __version__

COMMANDS = {
    "init": "write a recipe for your own data; asks only what the data does not say",
    "plan": "show whether a recipe fits, on which hardware, and why; starts nothing",
    "run": "run a recipe on this machine, or on a cluster by the command of Flyte, which it prints",
    "convert": "make a recipe of a file of axolotl, LLaMA-Factory or TRL",
    "xray": "show the training data token by token on a page; needs only the tokenizer",
    "selftest": "compare every method and sharding with plain training, on this machine",
    "merge": "merge an artifact's adapter into its base model, and measure the difference",
    "chat": "ask an artifact's model on this machine; answers are shown as it writes them",
    "infer": "answer a file of prompts with an artifact's model on this machine",
    "gguf": "write an artifact's model as a GGUF file, with llama.cpp's converter",
    "verify": "ask a server of models whether it answers as an artifact's model",
    "adapters": "list artifacts with base model, data, held-out figures, time and size",
    "fetch": "download an artifact, or what else an execution has made, into a folder, and verify its files",
    "combine": "combine several adapters on the same base model into one",
    "calibrate": "learn memory factors for later plans from finished runs",
    "accepted": "show the accepted model and the history of decisions; or roll back",
    "approve": "publish or accept an artifact that a run has stored for your approval",
    "debug": "start a pod like that of a stage on a cluster, to look into it",
    "reproduce": "run an artifact's recipe again, and compare the result with it",
    "doctor": "check this machine, or with --remote a cluster, and give advice",
    "schema": "print the JSON schema of recipe files",
    "completion": "print a script by which bash and zsh complete commands and options",
}
"""Commands, each with its line of help; its module has the same name."""


def command_named(argv: Sequence[str]) -> str | None:
    """Return the command that the arguments name; None if there is none, or no such command."""
    word = next((word for word in argv if not word.startswith("-")), None)
    return word if word in COMMANDS else None


class Parser(argparse.ArgumentParser):
    """Parser whose help is an error where it cannot be written; argparse says nothing then, and ends with 0.

    For a word that is no choice, and for an option that is none, it names the nearest one.
    """

    def option_words(self) -> list[str]:
        """Return all options."""
        return list(self._option_string_actions)

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """End with the error of words that the command does not take."""
        options = [word for word in words if word.startswith("-")]
        described = []
        for word in options or words:
            near = difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, n=1)
            described.append(
                f"{word}: unknown; did you mean {near[0]}?"
                if near and word in options
                else f"{word}: unknown"
            )
        self.error("; ".join(described))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(
                str(value), [str(choice) for choice in action.choices or ()], n=1
            )
            if near:
                error.message = f"{value!r}: unknown; did you mean {near[0]}?"
            raise

    def _print_message(self, message: str, file: Any = None) -> None:
        file = file or sys.stderr
        if message and file is not None:
            file.write(message)
            file.flush()


def parser_of_all() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser, and that of each command, as yet without arguments."""
    parser = Parser(
        prog="flytune",
        description="Plan and run fine-tunes, inspect data, check machines, and manage artifacts.",
    )
    parser.add_argument("--version", action="version", version=f"flytune {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    return parser, {
        name: commands.add_parser(name, help=description) for name, description in COMMANDS.items()
    }
