"""One reader of JSON and one of YAML from outside, one check of names, one reader of adapters'
configurations."""

import ast
import re

from tests.support.sources import files, name_of, nodes_of

FILES = files("flytune", "training_estimates", "tasks", "workflows")
READS = re.compile(
    r"\bjson\.(?:loads?|JSONDecoder)\b|\byaml\.(?:safe_|full_)?load(?:_all)?\b|^\s*from (?:json|yaml) import|"
    r"\bmodel_validate_json\b",
    re.MULTILINE,
)
EXCEPTIONS = {
    "flytune/json_core.py": "the reader of JSON",
    "flytune/yaml_core.py": "the reader of YAML",
    "flytune/rewards/worker.py": "a process of its own, which imports nothing of the project",
    "flytune/rewards/calls.py": "read by that process too",
    "flytune/rewards/shipped.py": "the same process",
    "flytune/models/chat_templates.py": "the answers of its own second process",
    "flytune/models/tokenizers.py": "of equal keys the last, as the tokenizers library, which reads the "
    "file, takes it",
    "flytune/data/control_tokens.py": "the text that the tokenizers library made in this process a moment "
    "ago",
}


def test_json_and_yaml_are_read_by_one_reader_each():
    """Use flytune.json_core or flytune.yaml_core, or a record's own `parse` instead of pydantic's reader."""
    reading = {name_of(path) for path in FILES if READS.search(path.read_text(encoding="utf-8"))}
    assert reading == set(EXCEPTIONS)


def test_an_adapters_configuration_is_read_by_one_function():
    """Bytes or text of adapter_config.json are handed to flytune.models.adapter_files.read."""
    found = [(path, row) for path in FILES for row in path.read_text(encoding="utf-8").splitlines()]
    assert [
        f"{name_of(path)}: {row.strip()}"
        for path, row in found
        if "adapter_config" in row
        and ("read_text" in row or "read_bytes" in row)
        and "adapter_config.read(" not in row
    ] == []


def test_names_in_records_are_checked_where_they_are_read():
    """A record's field `file` is a FileName, so that no reader of the record can forget the check."""
    fields = [
        (name_of(path), field)
        for path in files("flytune/records")
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == "file"
    ]
    assert len(fields) >= 2
    assert [name for name, field in fields if ast.unparse(field.annotation) != "FileName"] == []


def test_code_from_elsewhere_is_off_unless_named():
    """Without the argument, transformers asks at the keyboard whether code shall run."""
    missing = []
    for path in FILES:
        for node in nodes_of(path):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained")):
                continue
            loader = ast.unparse(node.func)
            if loader.startswith("Auto") and "trust_remote_code" not in {
                keyword.arg for keyword in node.keywords
            }:
                missing.append(f"{name_of(path)}:{node.lineno}: {loader}")
    assert missing == []
