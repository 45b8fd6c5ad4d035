"""README.md of an artifact: the model card, with code that loads the model as it was measured."""

import re
from pathlib import Path

import yaml

from flytune import guards, report
from flytune.plans import Plan
from flytune.recipe import Recipe
from flytune.records import Manifest, Metrics, TrainingResult


def render(recipe: Recipe, plan: Plan, manifest: Manifest, training: TrainingResult, metrics: Metrics) -> str:
    """The model card as Markdown with the hub's YAML front matter."""
    matter = _front_matter(recipe)
    return report.environment(escape=False).get_template("card.md.jinja").render(
        recipe=recipe,
        plan=plan,
        manifest=manifest,
        training=training,
        metrics=metrics,
        broken=guards.broken(recipe, metrics),
        adapter=recipe.method.name != "full",
        has_id="base_model" in matter,
        arguments="\n".join(f"    {argument}," for argument in _arguments(recipe)),
        front_matter=yaml.safe_dump(matter, sort_keys=False).strip(),
        peak=max((step.memory_bytes for step in training.steps), default=0),
    )  # fmt: skip


def _arguments(recipe: Recipe) -> list[str]:
    """What from_pretrained must be told to load the model as it was measured."""
    arguments = [f"dtype=torch.{recipe.model.dtype}", f'attn_implementation="{recipe.model.attn_implementation}"']
    if recipe.model.trust_remote_code:
        arguments.append("trust_remote_code=True")
    return [*arguments, 'device_map="auto"']


def _front_matter(recipe: Recipe) -> dict[str, object]:
    model, adapter = recipe.model.name_or_path, recipe.method.name != "full"
    folder = Path(model).expanduser()
    matter: dict[str, object] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    # The hub wants an id of its own there; a folder's path is none.
    if not folder.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        matter["base_model"] = model
        matter["base_model_relation"] = "adapter" if adapter else "finetune"
    if license_name := _license(folder):
        matter["license"] = license_name
    return matter | {"tags": ["flytune", recipe.method.name, *(["lora"] if recipe.method.name == "qlora" else [])]}


def _license(folder: Path) -> str | None:
    """What the card in the base model's folder names, if there is one."""
    try:
        front = re.match(r"---\n(.*?)\n---", (folder / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
        matter = yaml.safe_load(front[1]) if front else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return str(matter["license"]) if isinstance(matter, dict) and matter.get("license") else None
