"""`make proofs PARTS=served`: artifacts in vLLM and llama.cpp's server, and what `flytune verify` says; GRPO
with answers that vLLM draws; embedding models in sentence-transformers and
vLLM.

python -m tests.served                every case
python -m tests.served llama-q8 ...   these cases

Environments and models are made in the folder of the variable FLYTUNE_SERVED, and used again there;
without it, in a temporary folder.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.served import drawing, embedding, environments, servers
from tests.served.cases import CASES, Case, Question
from tests.served.models import Models, flytune


def main() -> int:
    """Run the cases; return 1 if a verdict is another one."""
    functions = drawing.CASES | embedding.CASES
    names = [*(case.name for case in CASES), *functions]
    parser = argparse.ArgumentParser("python -m tests.served", description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(names))
    chosen = parser.parse_args().cases
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"{unknown[0]}: no such case; the cases are {', '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="flytune-served-") as temporary:
        folder = Path(os.environ.get(environments.FOLDER) or temporary).absolute()
        models = Models(folder / "models", folder)
        cases = [case for case in CASES if not chosen or case.name in chosen]
        failed = [case.name for case in cases if not _passes(case, models, folder)]
        called = [name for name in functions if not chosen or name in chosen]
        failed += [name for name in called if not _succeeds(name, functions[name], models, folder)]
    count = len(cases) + len(called)
    sys.stdout.write(f"{count - len(failed)} of {count} cases as expected\n")
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def _passes(case: Case, models: Models, folder: Path) -> bool:
    """Start a case's server and ask it; return whether all verdicts are as expected."""
    log = folder / f"{case.name}.log"
    try:
        words = [str(word) for word in case.words(models)]
        if case.server == "vllm":
            server = servers.vllm(environments.vllm(folder), words, log)
        else:
            server = servers.llama_server(environments.llama_cpp(folder), words, log)
        with server as address:
            verdicts = [_is_as_expected(case, question, models, address) for question in case.asked]
        return all(verdicts)
    except RuntimeError as error:
        _say(case.name, False, str(error))
        return False


def _succeeds(name: str, case: Callable[[Models, Path], str], models: Models, folder: Path) -> bool:
    """Run a case that is a function; return whether it is as expected."""
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    try:
        problem = case(models, place)
    except RuntimeError as error:
        problem = str(error)
    _say(name, not problem, problem or "yes")
    return not problem


def _is_as_expected(case: Case, question: Question, models: Models, address: str) -> bool:
    words = ["verify", address, str(models.artifact(case.artifact)), "--json"]
    if question.model:
        name = str(models.base_of(case.artifact)) if question.model == "BASE" else question.model
        words += ["--model", name]
    if question.bound:
        words += ["--bound", str(question.bound)]
    done = flytune(*words)
    if not done.stdout.startswith("{"):
        _say(case.name, False, done.stdout + done.stderr)
        return False
    result = json.loads(done.stdout)
    problem = "; ".join(result["problems"])
    expected = problem.startswith(question.problem) if question.problem else not problem
    is_right = expected and done.returncode == (1 if question.problem else 0)
    figures = (
        f"{result['difference']:.2g} nats, {result['divergence']:.2g} a token, {result['agreement']:.0%}"
    )
    doubts = "".join(f"; {doubt}" for doubt in result["doubts"])
    _say(case.name, is_right, f"{question.model or ''} {problem or 'yes'} ({figures}){doubts}")
    return is_right


def _say(name: str, is_right: bool, text: str) -> None:
    sys.stdout.write(f"{'ok  ' if is_right else 'FAIL'} {name:<20} {' '.join(text.split())}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
