"""Rules of English that a program can check: beginnings of docstrings, and banned phrases. CONTRIBUTING.md
has all rules."""

import ast
import re
from itertools import pairwise

import pytest

from tests.support import markdown, sources
from tests.support.sources import files, name_of, nodes_of, tree_of

PACKAGES = ("flytune", "training_estimates", "tasks", "workflows", "flyte2")
FILES = files(*PACKAGES, "images", "demo", "benchmarks", "tests/support", "tests/chaos")
QUESTION = "Who|Whom|Whose|Whoever|What|Whatever|Which|Where|When|Whether|Why|How|That|If"
PARTICLE = "Of|In|As|At|By|On|To|From|With|Within|Without|For|Than|Since|Until|Before|After|Over"
PARTICLE += "|Both|So|Also|And|Or|Its|Their|Not"
NOUNS = "Access|Address|Alias|Axis|Basis|Bias|Class|Loss|Process|Progress|Series|Status|Success"
"""Nouns that end like a verb of the third person."""
STARTS = {
    "a question word": re.compile(rf"({QUESTION})\b"),
    "a preposition, a conjunction or a pronoun": re.compile(rf"({PARTICLE})\b"),
}
THIRD_PERSON = re.compile(rf"(?!({NOUNS})\b)[A-Z][a-z]+s ")
WANTED = {
    "module": "a noun title",
    "class": "a noun phrase",
    "function": "an imperative sentence",
    "property": "a noun phrase",
    "field": "a complete noun phrase",
}
# The phrase, and what to write.
BANNED = {
    r"held against|holds? .{0,40} against": "compared with",
    r"go(es|ne)? on (from|with)": "resumes from, continues with",
    r"stands? (in|beside|apart|at|on|there)|lies? (in|at|beside|on|there)": "is in",
    r"(is|are) told|tells? (what|whether|how|the)": "is reported, says",
    r"whoever": "the function or process by its name",
    r"beside training": "asynchronously",
    r"left out data": "skipped batches",
    r"dies of": "fails with",
    r"is over": "has ended",
    r"no (one|other) than": "only",
    r"has not got": "does not have",
}
ANY_BANNED = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)


def docstrings(node, kind="module"):
    """Yield (line, kind, text) of the docstrings of a module, and of its classes, functions and fields."""
    before = None
    for index, child in enumerate(node.body):
        text = (
            child.value.value
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            else None
        )
        if isinstance(text, str) and (index == 0 or isinstance(before, ast.Assign | ast.AnnAssign)):
            yield child.lineno, "field" if index else kind, text.strip()
        if isinstance(child, ast.ClassDef):
            yield from docstrings(child, "class")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any("property" in ast.unparse(decorator) for decorator in child.decorator_list)
            yield from docstrings(child, "property" if is_property else "function")
        before = child


def faults(path):
    for line, kind, text in docstrings(tree_of(path)):
        wrong = [start for start, pattern in STARTS.items() if pattern.match(text)]
        if kind == "function" and THIRD_PERSON.match(text):
            wrong.append("a verb of the third person")
        for start in wrong:
            first = text.partition("\n")[0]
            yield (
                f"{name_of(path)}:{line}: the docstring of a {kind} begins with {start}; write "
                f"{WANTED[kind]}: {first!r}"
            )


def test_docstrings_are_titles_imperatives_and_noun_phrases():
    assert [fault for path in FILES for fault in faults(path)] == []


EMPTY = {"found", "got", "made", "one", "told"}
"""Names that do not say what a value is."""


def test_names_of_variables_say_what_they_are():
    empty = []
    for path in files(*PACKAGES):
        nodes = nodes_of(path)
        fields = [child for node in nodes if isinstance(node, ast.ClassDef) for child in node.body]
        of_records = {id(field.target) for field in fields if isinstance(field, ast.AnnAssign)}
        for node in nodes:
            is_bound = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if is_bound else node.arg if isinstance(node, ast.arg) else None
            if name in EMPTY and id(node) not in of_records:
                empty.append(f"{name_of(path)}:{node.lineno}: {name}")
    assert empty == []


def test_no_banned_phrase():
    found = [
        f"{name_of(path)}:{number}: {match[0]!r}; write {instead!r}, or another plain phrase: "
        f"{line.strip()[:100]}"
        for path in (*FILES, *markdown.pages())
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if ANY_BANNED.search(line)
        for phrase, instead in BANNED.items()
        if (match := re.search(rf"\b({phrase})\b", line, re.IGNORECASE))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "start"),
    [
        ('"""What a run keeps."""', "question word"),
        ('"""Of a run."""', "preposition"),
        ('def save():\n    """Saves."""\n', None),
        ('def save():\n    """Saves the run."""\n', "third person"),
        ('def save():\n    """Process the run."""\n', None),
        ('@property\ndef saves():\n    """Saves of the run."""\n', None),
        ('KEEP = 1\n"""That are kept."""\n', "question word"),
        ('class Run:\n    kept: int\n    """Without a noun."""\n', "preposition"),
    ],
)
def test_the_rules_find_what_they_are_for(code, start, tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text(code)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    found = list(faults(tmp_path / "module.py"))
    assert len(found) == (start is not None)
    assert start is None or start in found[0]


_NUMBERED = (
    "adapters answers artifacts attempts blocks checks documents entries epochs evaluations files GPUs "
    "labels layers losses mistakes models nodes packages pairs parameters points processes prompts rows runs "
    "samples shapes steps tensors tokens values weights"
)
NUMBERED = re.compile(rf"^ (?:[a-z-]+ )?({_NUMBERED.replace(' ', '|')})\b")
"""A noun of which there may be one, after a number."""
NAMES = (
    "name",
    "label",
    "stage",
    "quantized",
    "answers",
    "exported",
    "points",
    "weights",
    "address",
    "planned.accelerator",
    "' and '.join(PAIR)",
    "', '.join(wrong)",
    "self.name",
)
"""Texts that stand before such a noun, and no numbers."""


def numbers(path):
    """Yield the places of f-strings with a number and a noun in the plural, whatever the number is."""
    for node in nodes_of(path):
        for value, after in pairwise(node.values) if isinstance(node, ast.JoinedStr) else ():
            if not (isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant)):
                continue
            source, form = (
                ast.unparse(value.value),
                ast.unparse(value.format_spec) if value.format_spec else "",
            )
            is_number = not (
                source.strip("_").isupper() or source in NAMES or source.startswith(("counted", "_duration"))
            )
            if is_number and "." not in form and (noun := NUMBERED.match(after.value)):
                yield (
                    f"{name_of(path)}:{value.lineno}: {{{source}}} {noun[1]}: write {{counted({source}, "
                    f"...)}}"
                )


def test_numbers_agree_with_their_nouns():
    assert [number for path in files(*PACKAGES) for number in numbers(path)] == []


def test_the_rule_finds_numbers_that_do_not_agree(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(
        'f"{len(rows)} rows"; f"{count:,} held-out samples of"; f"{hours:.1f} steps"; f"{MOST} rows"'
    )
    assert len(list(numbers(tmp_path / "module.py"))) == 2
