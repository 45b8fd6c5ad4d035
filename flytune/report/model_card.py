"""The model card, README.md of an artifact, with code that loads the model as it was evaluated."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flytune import yaml_core
from flytune.errors import StorageError
from flytune.objectives.bound import BoundRecipe
from flytune.recipe import Recipe
from flytune.records import Manifest, Metrics, Plan, TrainingResult
from flytune.records.lineage import Lineage
from flytune.report import page
from flytune.sentences import counted
from flytune.storage import Storage

LICENSE = ("license", "license_name", "license_link")
"""Keys of a card with its license; the last two are used if the first is `other`."""
# Values of vLLM's --max-lora-rank: MaxLoRARanks in its vllm/config/lora.py (0.11 and later).
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class Published(NamedTuple):
    """The repository on the hub that a card is published in."""

    repository: str
    revision: str
    base_license: Mapping[str, str] = {}
    """license, license_name and license_link of the base model's card, as far as it has them."""


def render(
    recipe: Recipe,
    plan: Plan,
    manifest: Manifest,
    training: TrainingResult,
    metrics: Metrics,
    *,
    broken: Sequence[str],
    lineage: Lineage | None = None,
    published: Published | None = None,
) -> str:
    """Return the model card as Markdown with the hub's YAML front matter; for the artifact's folder, unless
    `published`."""
    bound = BoundRecipe(recipe)
    matter = _front_matter(bound, metrics, published.base_license if published else {})
    adapter = recipe.method.name != "full"
    return (
        page.environment(escape=False)
        .get_template("card.md.jinja")
        .render(
            recipe=recipe,
            plan=plan,
            manifest=manifest,
            training=training,
            metrics=metrics,
            broken=broken,
            lineage=lineage.runs if lineage else [],
            published=published,
            adapter=adapter,
            place=published.repository if published else ".",
            base=_base(recipe, published),
            has_id=is_hub_id(recipe.model.name_or_path),
            license=matter.get("license_name", matter.get("license")),
            lora_rank=next((rank for rank in VLLM_RANKS if rank >= recipe.method.largest_rank), None),
            is_plain=not (
                recipe.method.use_dora
                or recipe.method.rank_pattern
                or recipe.method.alpha_pattern
                or trains_tables(recipe)
            ),
            auto_class=bound.head.auto_class,
            head=bound.head,
            about=bound.objective.card_text(),
            arguments="\n".join(f"    {argument}," for argument in _arguments(bound, training)),
            rope=json.dumps(training.rope) if adapter and training.rope else None,
            front_matter=yaml_core.dump(matter).strip(),
            peak=max((step.memory_bytes for step in training.as_planned(plan).steps), default=0),
        )
    )


def _base(recipe: Recipe, published: Published | None) -> str:
    """Return the base model by which the card's code loads it: here, a folder by a path that is right in
    every folder."""
    name = recipe.model.name_or_path
    is_here = published is None and Path(name).expanduser().is_dir()
    return os.path.abspath(Path(name).expanduser()) if is_here else name


def trains_tables(recipe: Recipe) -> bool:
    """Return whether an adapter has rows of embedding and head, or all of them."""
    return bool(
        recipe.model.extra_special_tokens
        or recipe.method.modules_to_save
        or recipe.method.trainable_token_indices
    )


def is_hub_id(name: str) -> bool:
    """Return whether the name of a model or data set is an id on the hub, not a folder."""
    return not Path(name).expanduser().exists() and bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name))


def _arguments(bound: BoundRecipe, training: TrainingResult) -> list[str]:
    """Return the arguments of from_pretrained that load the model as it was evaluated."""
    recipe = bound.recipe
    arguments = [
        f"dtype=torch.{recipe.model.dtype}",
        f'attn_implementation="{recipe.model.attn_implementation}"',
    ]
    arguments += [f"{name}={value!r}" for name, value in bound.head.arguments.items()]
    if recipe.method.name != "full":  # a complete model's config.json has it
        arguments += [f"{name}={value!r}" for name, value in training.rope.items()]
    if recipe.model.trust_remote_code:
        arguments.append("trust_remote_code=True")
    return [*arguments, 'device_map="auto"']


def _front_matter(bound: BoundRecipe, metrics: Metrics, base_license: Mapping[str, str]) -> dict[str, Any]:
    recipe = bound.recipe
    model, adapter = recipe.model.name_or_path, recipe.method.name != "full"
    matter: dict[str, Any] = {
        "library_name": bound.head.library or ("peft" if adapter else "transformers"),
        "pipeline_tag": bound.head.pipeline_tag,
    }
    # The hub requires an id on the hub here, not the path of a folder.
    if is_hub_id(model):
        matter["base_model"] = model
        matter["base_model_relation"] = "adapter" if adapter else "finetune"
    matter |= base_license or _license(model)
    if datasets := _datasets(recipe):
        matter["datasets"] = datasets
    matter["tags"] = ["flytune", recipe.method.name, *(["lora"] if recipe.method.name == "qlora" else [])]
    results = _results(bound, metrics)
    return matter | ({"model-index": [{"name": recipe.name, "results": results}]} if results else {})


def _datasets(recipe: Recipe) -> list[str]:
    named = [source.dataset_name for source in recipe.data.all_sources.values()]
    return sorted({name for name in named if name and is_hub_id(name)})


def _results(bound: BoundRecipe, metrics: Metrics) -> list[dict[str, Any]]:
    """Return the evaluation results for the hub's model-index."""
    tag = bound.head.pipeline_tag
    task = {"type": tag, "name": tag.replace("-", " ").capitalize()}
    # The hub requires a type here: the id of the data set if it is on the hub.
    heldout = {
        "name": "held-out samples of the training data",
        "type": next(iter(_datasets(bound.recipe)), "heldout"),
    }
    figures = [
        (
            figure.name,
            ", ".join(filter(None, [page.capitalized(figure.title), figure.unit])),
            figure.tuned.value,
        )
        for figure in metrics.figures
        if figure.better != "neither"
    ]
    measured = [{"type": kind, "name": name, "value": round(value, 6)} for kind, name, value in figures]
    results: list[dict[str, Any]] = (
        [{"task": task, "dataset": heldout, "metrics": measured}] if measured else []
    )
    for scored in metrics.tasks:
        name = f"{scored.metric}, {scored.num_fewshot}-shot, {counted(scored.documents, 'document')}"
        figure = {"type": scored.metric.partition(",")[0], "name": name, "value": round(scored.tuned, 6)}
        results.append(
            {"task": task, "dataset": {"name": scored.task, "type": scored.task}, "metrics": [figure]}
        )
    return results


def _license(model: str) -> dict[str, str]:
    """Return the license in the card of the base model's folder or address; empty if there is none."""
    try:
        card = Storage(model, "model.name_or_path", retry=False).read("README.md").decode()
        front = re.match(r"---\n(.*?)\n---", card, flags=re.DOTALL)
        matter = yaml_core.load(front[1]) if front else None
    except (StorageError, OSError, UnicodeDecodeError, yaml_core.YAMLError):
        return {}
    named = matter if isinstance(matter, dict) else {}
    return {key: str(named[key]) for key in LICENSE if named.get(key)}
