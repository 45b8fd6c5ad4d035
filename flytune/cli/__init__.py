"""Plan and run fine-tunes, inspect data, check machines, and manage artifacts.

Each command is a module in this package, with functions `add_arguments` and `run`.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from flytune import addresses, caches, files, process_setup
from flytune.cli import arguments, parser, problems
from flytune.console import error_lines, output
from flytune.errors import FlytuneError, RecipeError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 1 for errors that the user must correct, 130 after a
    Ctrl-C, as in a shell."""
    if sys.stdout is None:
        return error_lines.show(RecipeError("the standard output is closed: open it (>FILE, or >/dev/null)"))
    process_setup.skip_at_exit()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except FlytuneError as error:
        # Libraries are loaded late, so that an error of what they read may be caused by a lack of memory.
        return error_lines.show(problems.memory_error(error.__cause__) or error)
    except ModuleNotFoundError as error:
        if (missing := problems.missing(error)) is None:
            raise
        return error_lines.show(missing)
    except KeyboardInterrupt:  # of a command that says nothing of it, or before one is imported
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of a pipe has ended, such as `head`
        _drop_unwritten()
        return 1
    except OSError as error:
        _drop_unwritten()
        refused = caches.home_error(error) or problems.file_error(error) or problems.memory_error(error)
        if refused is None:
            raise
        return error_lines.show(refused)
    except Exception as error:
        if (refused := problems.memory_error(error)) is not None:
            return error_lines.show(refused)
        # Libraries in Rust raise no OSError.
        if (full := files.full_error(error)) is None:
            raise
        reason = getattr(full, "strerror", None) or " ".join(str(full).split())[:200]
        return error_lines.show(problems.no_room(reason))


def _run(argv: Sequence[str]) -> int:
    top, parsers = parser.parser_of_all()
    name = parser.command_named(argv)
    if name is None:
        _parsed(top, top, argv)  # ends with the help, the version or an error
        raise AssertionError("a command is required")
    try:
        os.getcwd()  # libraries end the process, or find nothing, without one
    except FileNotFoundError:
        raise RecipeError("the working folder was deleted: change to one that exists (cd)") from None
    if name != "schema":
        caches.set_up(in_pod=False)
        process_setup.clear(in_pod=False)
    # Only this command's module is imported, because imports such as selftest's take longer than a plan.
    command = import_module(f"flytune.cli.{name}")
    command.add_arguments(parsers[name])
    options = _parsed(top, parsers[name], argv)
    _refuse_credentials(options)
    arguments.check(options)
    output.install()
    code = int(command.run(options))
    sys.stdout.flush()
    return code


def _parsed(top: parser.Parser, of_command: parser.Parser, argv: Sequence[str]) -> argparse.Namespace:
    try:
        options, unknown = top.parse_known_args(argv)
        if unknown:
            of_command.unknown(unknown)
        return options
    except SystemExit:
        sys.stdout.flush()  # of --help; an error at the exit would be a traceback
        raise


def _drop_unwritten() -> None:
    """Drop text that the standard output does not take; Python would try to write it again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _refuse_credentials(options: argparse.Namespace) -> None:
    """Refuse credentials in arguments: they would go into records, and into the shell's history."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                addresses.check(text, f"flytune {options.command}: {name}", RecipeError)
