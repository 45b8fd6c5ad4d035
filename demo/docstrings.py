"""Instruction pairs from the docstrings of the installed Python standard library: from a signature to its
description.

The sources are parsed, never imported. The same Python release always gives the same pairs in the same order.
"""

import ast
import inspect
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune.files import written_atomically

# Not library code, not public, or not written in plain English sentences.
SKIPPED_FOLDERS = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "pydoc_data",
    "__pycache__",
}
SHORTEST, LONGEST = 20, 600
"""Limits of the characters of an output; shorter ones have no content ("See above."), longer ones are
manuals."""
QUESTIONS = 24
"""Number of modules in the harness's task."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Node = _Function | ast.ClassDef


@dataclass(frozen=True)
class Documented:
    """A module, class, function or method that has a docstring."""

    module: str
    kind: str
    """module, class, function or method."""
    signature: str
    docstring: str


def pairs() -> Iterator[dict[str, str]]:
    """Yield rows of instruction, input (the signature) and output (the docstring's first paragraph on one
    line), all unique."""
    seen: set[tuple[str, str]] = set()
    for item in documented():
        if item.kind == "module":
            continue
        output = _first_paragraph(item.docstring)
        if not SHORTEST <= len(output) <= LONGEST or (item.signature, output) in seen:
            continue
        seen.add((item.signature, output))
        instruction = f"Describe this Python {item.kind} of the module `{item.module}`."
        yield {"instruction": instruction, "input": item.signature, "output": output}


def preferences(seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield rows of prompt, chosen and rejected: a description of a signature, and one of another part of the
    same module.

    Both are the first sentences of docstrings; parts whose module has no other sentence are left out.
    """
    draw = random.Random(seed)
    by_module: dict[str, list[tuple[str, str]]] = {}
    for pair in pairs():
        sentence = pair["output"].partition(". ")[0].rstrip(".") + "."
        by_module.setdefault(pair["instruction"], []).append((pair["input"], sentence))
    for instruction, parts in by_module.items():
        sentences = sorted({sentence for _, sentence in parts})
        for signature, chosen in parts:
            others = [sentence for sentence in sentences if sentence != chosen]
            if others and len(chosen) >= SHORTEST:
                prompt = f"{instruction}\n\n{signature}"
                yield {"prompt": prompt, "chosen": chosen, "rejected": draw.choice(others)}


def labelled() -> Iterator[dict[str, str]]:
    """Yield rows of text, the first sentence of a docstring, and label, the kind of what it describes: as
    many of each kind."""
    by_kind: dict[str, list[str]] = {"class": [], "function": []}
    for item in documented():
        sentence = _first_paragraph(item.docstring).partition(". ")[0].rstrip(".") + "."
        if item.kind in by_kind and SHORTEST <= len(sentence) <= LONGEST:
            by_kind[item.kind].append(sentence)
    distinct = {kind: list(dict.fromkeys(sentences)) for kind, sentences in by_kind.items()}
    for of_kinds in zip(*distinct.values(), strict=False):
        for kind, sentence in zip(distinct, of_kinds, strict=True):
            yield {"text": sentence, "label": kind}


def searched() -> Iterator[dict[str, str]]:
    """Yield rows of query, the first sentence of a docstring, and positive, the module and signature of what
    it describes; all sentences are different."""
    seen: set[str] = set()
    for item in documented():
        sentence = _first_paragraph(item.docstring).partition(". ")[0].rstrip(".") + "."
        if item.kind == "module" or not SHORTEST <= len(sentence) <= LONGEST or sentence in seen:
            continue
        seen.add(sentence)
        yield {"query": sentence, "positive": f"{item.module}: {item.signature}"}


def write(path: Path) -> int:
    """Write all pairs to `path` as JSON Lines; return their number."""
    return _write(path, pairs())


def write_preferences(path: Path) -> int:
    """Write all preferences to `path` as JSON Lines, as messages; return their number."""
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    rows = (
        {name: [{"role": roles[name], "content": text}] for name, text in row.items()}
        for row in preferences()
    )
    return _write(path, rows)


def write_labelled(path: Path) -> int:
    """Write all texts with labels to `path` as JSON Lines; return their number."""
    return _write(path, labelled())


def write_searched(path: Path) -> int:
    """Write all sentences with signatures to `path` as JSON Lines; return their number."""
    return _write(path, searched())


def write_choices(path: Path) -> int:
    """Write all choices to `path` as JSON Lines; return their number."""
    return _write(path, choices())


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    with written_atomically(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def choices(number: int = QUESTIONS, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows of question, four choices and the index of the correct one: the sentence that describes a
    module.

    None of the answers is trained on: no pair is about a module, and sentences that are also in pairs are not
    used.
    """
    found = [
        (item.module, _first_paragraph(item.docstring)) for item in documented() if item.kind == "module"
    ]
    trained = {pair["output"] for pair in pairs()}
    usable = [(module, text) for module, text in found if text.endswith(".") and text not in trained]
    short = [(module, text) for module, text in usable if SHORTEST <= len(text) <= 80]
    draw = random.Random(seed)
    for module, text in draw.sample(short, number):
        others = draw.sample(sorted({other for _, other in short} - {text}), 3)
        answer = draw.randrange(4)
        question = f"Describe this Python module.\n\nimport {module}"
        yield {"question": question, "choices": [*others[:answer], text, *others[answer:]], "answer": answer}


def plain_text() -> Iterator[str]:
    """Yield complete docstrings, with those of modules, for pre-training; all unique."""
    yield from dict.fromkeys(item.docstring for item in documented() if len(item.docstring) >= SHORTEST)


@cache
def documented() -> tuple[Documented, ...]:
    """Return all parts of the standard library with a docstring, by module and line."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Documented] = []
    for path in tqdm(sorted(root.rglob("*.py")), desc="reading docstrings", unit="file", delay=1):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            module = ".".join(parts).removesuffix(".__init__")
            tree = ast.parse(path.read_bytes())
            if docstring := ast.get_docstring(tree):
                found.append(Documented(module, "module", f"import {module}", docstring))
            found.extend(_documented(tree, module, inside=""))
    return tuple(found)


def _documented(parent: ast.AST, module: str, inside: str) -> Iterator[Documented]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.If | ast.Try):
            yield from _documented(node, module, inside)
        if not isinstance(node, _Node):
            continue
        name = f"{inside}.{node.name}" if inside else node.name
        if docstring := ast.get_docstring(node):
            yield Documented(module, _kind(node, inside), _signature(node, name), docstring)
        if isinstance(node, ast.ClassDef):
            yield from _documented(node, module, name)


def _kind(node: _Node, inside: str) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    return "method" if inside else "function"


def _signature(node: _Node, name: str) -> str:
    """Return the first line of a definition without its body: `def dumps(obj, *, indent=None)`."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {name}({bases})" if bases else f"class {name}"
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{word} {name}({ast.unparse(node.args)}){returns}"


def _first_paragraph(docstring: str) -> str:
    paragraph = inspect.cleandoc(docstring).split("\n\n", 1)[0]
    return " ".join(paragraph.split())
