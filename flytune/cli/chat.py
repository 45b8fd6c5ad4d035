"""`flytune chat ARTIFACT`."""

import argparse
import sys
from pathlib import Path

from flytune.artifacts import fetch, opening
from flytune.cli import arguments
from flytune.errors import DataError, printable
from flytune.inference.batch import InferenceModel
from flytune.inference.conversation import Conversation
from flytune.models import Generation

_QUESTION = "> "
_IMAGE = "/image "
"""Beginning of a line that names an image file for the next question."""
_HELP = "Ask; /new begins again, Ctrl-C stops an answer, Ctrl-D ends.\n"
_IMAGES = "/image FILE puts an image before the next question.\n"
_ALONE = "The model has no chat template: it continues each text, and remembers none.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_answering(parser, max_new_tokens=1024)
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: that of the training)")


def run(options: argparse.Namespace) -> int:
    """Answer questions from the terminal until it ends; lines of a pipe are answered one by one."""
    generation = Generation(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    artifact = fetch.local_folder(options.artifact)
    sys.stderr.write(f"loading {options.artifact}\n")
    model = InferenceModel(artifact, {}, opening.Consent(options.trust_remote_code, options.base))
    conversation = Conversation(model, generation, options.system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 (input() then has a history, and keys that move in the line)

        sys.stderr.write(_HELP)
        if conversation.format.processor is not None:
            sys.stderr.write(_IMAGES)
    if not conversation.remembers:
        sys.stderr.write(_ALONE)
    while (question := _next(is_terminal)) is not None:
        if question.strip() == "/new":
            conversation.clear()
        elif question.startswith(_IMAGE):
            _add_image(conversation, question)
        elif question.strip():
            _answer(conversation, question)
    return 0


def _next(is_terminal: bool) -> str | None:
    """Return the next question; None at the end."""
    try:
        return input(_QUESTION if is_terminal else "")
    except (EOFError, KeyboardInterrupt):
        if is_terminal:
            sys.stdout.write("\n")
        return None


def _add_image(conversation: Conversation, line: str) -> None:
    try:
        conversation.add_image(Path(line.removeprefix(_IMAGE).strip()))
    except DataError as error:
        sys.stderr.write(f"{printable(str(error))}\n")


def _answer(conversation: Conversation, question: str) -> None:
    try:
        conversation.answer(question, _show)
    except KeyboardInterrupt:
        sys.stderr.write("(stopped; the question is forgotten)")
    except DataError as error:
        sys.stderr.write(printable(str(error)))
    sys.stdout.write("\n")
    sys.stdout.flush()


def _show(text: str) -> None:
    arguments.show_answers(text)
    sys.stdout.flush()
