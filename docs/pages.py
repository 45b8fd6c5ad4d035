"""Pages of the site, in .site/pages: the Markdown files, what they link to, an index of recipe keys, names of
other tools.

`make docs` runs it, with the packages of requirements-docs.lock alone; mkdocs.yml then builds .site/html, and
`--finish` makes the search of these pages work without a network.
"""

import json
import re
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / ".site" / "pages"
WORKER = "file_worker.js"
THEMES_WORKER = re.compile(r'https://[^"]+/iframe-worker/shim')
"""Address of the theme's script by which workers run in pages that are opened as files."""
MARKDOWN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md", "docs/")
"""Files, and folders of files, that are pages of the site."""
LINK = re.compile(r"(?<!`)\]\((?!https?:|#)([^()\s#]+)")
EXPLAINED = {
    "name": "recipes.md#all-fields",
    "description": "recipes.md#all-fields",
    "model.rope_scaling": "long-sequences.md#positions",
    "model": "recipes.md#all-fields",
    "model.extra_special_tokens": "data.md#added-tokens",
    "data": "data.md",
    "data.chat_template": "recipes.md#all-fields",
    "data.dataset_config": "recipes.md#all-fields",
    "data.dataset_split": "recipes.md#all-fields",
    "data.revision": "recipes.md#all-fields",
    "data.sources": "data.md#several-sources",
    "data.pad_token": "recipes.md#all-fields",
    "data.packing": "equality.md",
    "data.images": "images.md",
    "data.max_pixels": "images.md",
    "model.vision": "images.md",
    "data.contract": "xray.md#the-contract",
    "data.max_dropped_fraction": "xray.md#the-contract",
    "data.max_truncated_fraction": "xray.md#the-contract",
    "data.min_trained_fraction": "xray.md#the-contract",
    "method": "recipes.md#all-fields",
    "method.use_dora": "export.md#kinds-of-adapters",
    "method.use_rslora": "export.md#kinds-of-adapters",
    "method.init_lora_weights": "export.md#kinds-of-adapters",
    "method.rank_pattern": "export.md#kinds-of-adapters",
    "method.alpha_pattern": "export.md#kinds-of-adapters",
    "method.target_modules": "models.md#what-all-linear-adapts",
    "method.modules_to_save": "data.md#added-tokens",
    "method.trainable_token_indices": "data.md#added-tokens",
    "sharding.replicas": "long-sequences.md#many-nodes",
    "sharding.sequence_parallel": "long-sequences.md#samples-over-several-gpus",
    "sharding": "recipes.md#all-fields",
    "training": "recipes.md#all-fields",
    "training.optim": "recipes.md#optimizers",
    "training.master_dtype": "recipes.md#optimizers",
    "training.lr_scheduler_type": "recipes.md#schedules",
    "training.lr_scheduler_kwargs": "recipes.md#schedules",
    "training.auto_find_batch_size": "failures.md#memory",
    "training.hang_minutes": "failures.md#hangs",
    "training.ddp_timeout": "failures.md#hangs",
    "training.max_loss_jump": "failures.md#bad-losses",
    "training.on_bad_loss": "failures.md#bad-losses",
    "training.logging_steps": "tracking.md",
    "objective": "objectives.md",
    "objective.negatives": "objectives.md#embedding-models",
    "objective.pooling": "objectives.md#embedding-models",
    "objective.matryoshka_dims": "objectives.md#embedding-models",
    "objective.query_prompt": "objectives.md#embedding-models",
    "objective.document_prompt": "objectives.md#embedding-models",
    "objective.teacher_model_name_or_path": "objectives.md#distillation",
    "objective.teacher_model_revision": "objectives.md#distillation",
    "objective.loss_top_k": "objectives.md#distillation",
    "objective.alpha": "objectives.md#distillation",
    "objective.on_policy": "objectives.md#answers-of-the-student",
    "objective.drawing_temperature": "objectives.md#answers-of-the-student",
    "objective.labels": "objectives.md#classifiers",
    "objective.problem_type": "objectives.md#classifiers",
    "objective.class_weight": "objectives.md#classifiers",
    "evaluation": "evaluate.md",
    "evaluation.eval_steps": "tracking.md#scores-during-training",
    "evaluation.early_stopping_patience": "checkpoints.md#the-best-checkpoint",
    "evaluation.early_stopping_threshold": "checkpoints.md#the-best-checkpoint",
    "evaluation.batch_size": "recipes.md#all-fields",
    "evaluation.max_new_tokens": "recipes.md#all-fields",
    "evaluation.sample_answers": "recipes.md#all-fields",
    "hardware": "recipes.md#all-fields",
    "hardware.shape": "plan.md",
    "hardware.max_hours": "schedules.md#budgets",
    "hardware.max_price": "schedules.md#budgets",
    "checkpoints": "checkpoints.md",
    "tracking": "tracking.md#trackers",
    "publish": "publish.md",
    "notify": "recipes.md#all-fields",
    "notify.on": "workflows.md#failures",
    "notify.webhook": "workflows.md#failures",
}
"""Page, with its heading, that explains a key; a key that is not here has its section's."""


def keys(schema: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the dotted keys of a recipe with their schemas; a list that has items with keys is followed by
    `[]`.

    A key of several alternative sections (objective.beta of dpo and kto) has a schema of each.
    """
    found: dict[str, list[dict[str, Any]]] = {}

    def walk(part: dict[str, Any], prefix: str) -> None:
        needed = part.get("required", ())
        for name, field in part["properties"].items():
            if sections := _sections(schema, field):
                for section in sections:
                    walk(section, f"{prefix}{name}.")
            else:
                found.setdefault(prefix + name, []).append(field | {"required": name in needed})
                items = next((one["items"] for one in [field, *field.get("anyOf", ())] if "items" in one), {})
                for section in _sections(schema, items):
                    walk(section, f"{prefix}{name}[].")

    walk(schema, "")
    return found


def _sections(schema: dict[str, Any], field: dict[str, Any]) -> list[dict[str, Any]]:
    found = [schema["$defs"][field["$ref"].rpartition("/")[2]]] if "$ref" in field else []
    for one in [*field.get("anyOf", ()), *field.get("oneOf", ())]:
        found += _sections(schema, one)
    return found


def type_of(field: dict[str, Any]) -> str:
    """Return the type of a key in words: the names that it may have, or its kind."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(type_of(one) for one in field["anyOf"] if one.get("type") != "null"))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{_value(one)}`" for one in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        items = field.get("items", {})
        return (
            f"list of {items['$ref'].rpartition('/')[2]}" if "$ref" in items else f"list of {type_of(items)}"
        )
    names = {"integer": "whole number", "boolean": "true, false", "string": "text", "object": "mapping"}
    return names.get(field.get("type", ""), field.get("type", "any"))


def explained(key: str) -> str:
    """Return the page, and its heading, that explains a key."""
    plain = key.replace("sources[].", "").replace("[]", "")
    while plain and plain not in EXPLAINED:
        plain = plain.rpartition(".")[0]
    return EXPLAINED[plain]


def index_of_keys(schema: dict[str, Any]) -> str:
    """Return the page with all keys of a recipe."""
    rows = [
        "# All keys",
        "",
        "Every key of a recipe, made from the code's schema. Keys of list items have `[]`.",
        "",
    ]
    for section, group in groupby(
        sorted(keys(schema).items()), key=lambda row: row[0].partition(".")[0].partition("[")[0]
    ):
        rows += [f"## {section}", "", "| key | type | default | meaning | page |", "|---|---|---|---|---|"]
        for key, fields in group:
            kinds = ", ".join(dict.fromkeys(type_of(field) for field in fields))
            defaults = ", ".join(dict.fromkeys(_default(field) for field in fields))
            said = " ".join(dict.fromkeys(field.get("description", "") for field in fields))
            page = explained(key)
            link = f"[{page.partition('.md')[0]}]({page})"
            rows.append(f"| `{key}` | {_cell(kinds)} | {defaults} | {_cell(said)} | {link} |")
        rows.append("")
    return "\n".join(rows)


def names_of_others(tools: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the page with the keys for the names of other tools, made of flytune/recipe/peers.yaml."""
    rows = [
        "# Names of other tools",
        "",
        "The recipe's key for each name, and what changes. `flytune convert` uses it.",
        "",
    ]
    headings = {
        "refused": "Names for which a file of {} is refused",
        "without": "Names of {} without a counterpart",
    }
    for tool, groups in tools.items():
        rows += [f"## {tool}", "", "| name | key of the recipe | change |", "|---|---|---|"]
        for name, row in groups["keys"].items():
            key, _, change = row.partition("; ")
            rows.append(f"| `{name}` | `{key}` | {_cell(change)} |")
        for group, heading in headings.items():
            if group in groups:
                rows += ["", f"{heading.format(tool)}:", ""]
            for reason, names in groups.get(group, {}).items():
                # Of `name=VALUE`, the name: the value is that which changes nothing.
                shown = ", ".join(f"`{entry.partition('=')[0]}`" for entry in names.split())
                rows.append(f"- {shown}: {_cell(reason)}")
        rows.append("")
    return "\n".join(rows)


def _default(field: dict[str, Any]) -> str:
    return "required" if field["required"] else f"`{_value(field.get('default'))}`"


def _value(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) and value else json.dumps(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def pages() -> list[str]:
    """List the repository's files that are pages."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "*.md"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in files if name.startswith(MARKDOWN) and (ROOT / name).exists()]


def write() -> None:
    """Write .site/pages anew."""
    shutil.rmtree(OUT, ignore_errors=True)
    linked = set()
    for name in pages():
        text = (ROOT / name).read_text(encoding="utf-8")
        place = OUT / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
        linked |= {((ROOT / name).parent / target).resolve() for target in LINK.findall(text)}
    for path in sorted(linked):
        name = path.relative_to(ROOT)
        if path.is_file() and not (OUT / name).exists():
            (OUT / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, OUT / name)
    for name in ("site.css", WORKER):
        shutil.copy(ROOT / "docs" / name, OUT / name)
    schema = json.loads((ROOT / "recipes/recipe.schema.json").read_text(encoding="utf-8"))
    (OUT / "docs/keys.md").write_text(index_of_keys(schema), encoding="utf-8")
    tools = yaml.safe_load((ROOT / "flytune/recipe/peers.yaml").read_text(encoding="utf-8"))
    (OUT / "docs/names.md").write_text(names_of_others(tools), encoding="utf-8")


def finish(site: Path) -> None:
    """Let the built pages of a folder load the site's own file_worker.js, where the theme has the address of
    a server: search works without a network, and nothing is loaded from elsewhere."""
    texts = {page: page.read_text(encoding="utf-8") for page in sorted(site.rglob("*.html"))}
    if not any(THEMES_WORKER.search(text) for text in texts.values()):
        raise SystemExit(
            f"{site}: no page has iframe-worker/shim: look at how zensical searches in files now"
        )
    for page, text in texts.items():
        above = "../" * (len(page.relative_to(site).parts) - 1)
        page.write_text(THEMES_WORKER.sub(above + WORKER, text), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--finish"]:
        finish(OUT.parent / "html")
    else:
        write()
