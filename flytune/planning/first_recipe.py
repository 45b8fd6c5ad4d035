"""The first recipe for a person's own data, of its rows and of what the planner chooses."""

import logging
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flytune import data, yaml_core
from flytune.data import formats, image_rows
from flytune.data.columns import REFERENCES, TURNS, NamedRow, likely_names
from flytune.data.rows import classified, queries
from flytune.errors import DataError, DoesNotFit, RecipeError
from flytune.hardware import Shape, load_shapes, this_machine
from flytune.models import model_types, vectors
from flytune.planning import planner, sample_count
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import DataRequest, Recipe
from flytune.records import Plan
from flytune.sentences import counted
from training_estimates.meta_model import ENCODERS
from training_estimates.sizes import Geometry

Aim = Literal["price", "time", "quality"]
AIMS: tuple[Aim, ...] = get_args(Aim)
"""Aims of a person, the default first."""
ROWS = 500
"""First rows that are looked at."""
LONGEST = 4096
"""Largest data.max_length that is written; longer samples are a decision of their own."""
_ORDER = ["name", "model", "data", "objective", "method", "sharding", "training", "checkpoints", "hardware"]
"""Sections in the order in which they are written."""
_HELD_OUT = 50
"""Held-out samples that are aimed at: with fewer, intervals of scores say little."""
_FEW = 200
"""Samples below which a step has few of them."""
OBJECTIVES = {
    "sft": "samples to imitate",
    "dpo": "pairs of a chosen and a rejected answer",
    "kto": "answers with a label",
    "reward": "pairs that a reward model learns to score",
    "grpo": "questions whose answers the model draws itself, judged by rewards",
    "classify": "texts with a label",
    "embed": "queries with documents, for a search",
}
"""Kinds of samples by the objective that trains them."""
_EPOCHS = {"sft": 3, "dpo": 1, "kto": 1, "reward": 1, "grpo": 1, "classify": 3, "embed": 1}
_SHARE_OF_STEPS = 0.25
"""Share of all steps between two checkpoints of a run of one epoch."""
# Customary rates: LoRA's and full training's on answers (QLoRA's paper, Tulu 3), DPO's and KTO's a tenth and
# less, TRL's defaults for reward models and GRPO; classifiers and embedding models have the rates of reward
# models.
_RATES = {
    "sft": (1e-5, 2e-4),
    "dpo": (5e-7, 2e-5),
    "kto": (5e-7, 2e-5),
    "reward": (1e-5, 1e-4),
    "grpo": (1e-6, 1e-5),
    "classify": (1e-5, 1e-4),
    "embed": (1e-5, 1e-4),
}
"""Learning rates by the objective: of all weights, and of adapters."""
_GRPO: dict[str, Any] = {
    "name": "grpo",
    "rewards": ["exact_answer"],
    "group_size": 8,
    "max_completion_length": 256,
}
"""Section of objective grpo."""


class Asked(NamedTuple):
    """Decisions that data cannot show."""

    data: str
    """Path, address, or name of a data set on the hub."""
    base: str
    """Base model: a hub id or a folder."""
    on: str
    """`this-machine`, a row of shapes.yaml, or `auto`: the cheapest row of shapes.yaml."""
    aim: Aim
    objective: str | None = None
    """Objective, where it is not the one that the columns show."""


class Looked(NamedTuple):
    """Findings of the first rows."""

    rows: int
    objective: str
    form: str
    """Format of the rows."""
    columns: dict[str, str]
    """Columns of the rows by our names, where no format has theirs."""
    fields: dict[str, Any]
    """Fields of the objective that the rows show: labels of texts; empty of others."""
    images: dict[str, bool]
    """Field data.images, where rows have some; empty of others."""
    chat_template: str | None
    """Shipped chat template, where the rows are chats and the base has none."""
    longest: int
    """Tokens of the longest sample."""
    kept: int
    """Tokens of data.max_length."""


class _Choice(NamedTuple):
    recipe: Recipe
    plan: Plan
    way: str
    """Reason for its method."""


def default_base(named: str) -> str:
    """Return the base model that this machine trains in a short time on the data of that name.

    Raises:
        DataError: the data cannot be read, or has no row.
    """
    has_gpu = this_machine.rows()[0].is_gpu
    if _has_images(_first_rows(named, 1)):
        return "Qwen/Qwen2.5-VL-3B-Instruct" if has_gpu else "HuggingFaceTB/SmolVLM-256M-Instruct"
    return "Qwen/Qwen2.5-1.5B-Instruct" if has_gpu else "HuggingFaceTB/SmolLM2-135M-Instruct"


def source_of(named: str) -> dict[str, str]:
    """Return the fields of the recipe's data section that name the data."""
    on_hub = (
        re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", named) and not Path(named).exists() and not Path(named).suffix
    )
    return {"dataset_name": named} if on_hub else {"path": named}


def look(asked: Asked) -> Looked:
    """Return what the first rows of the data say, prepared as a run prepares them.

    Raises:
        DataError: they cannot be read, or prepared with the base's tokenizer; the words are those of the
            preparation.
        RecipeError: nothing in the rows can judge the answers of objective grpo.
    """
    rows = _first_rows(asked.data, ROWS)
    images = {"images": True} if _has_images(rows) else {}
    objective = asked.objective or _objective(rows[0])
    if objective == "grpo" and not set(REFERENCES) & set(rows[0]):
        raise RecipeError(
            f"{asked.data}: --objective grpo: its rows have no column {', '.join(REFERENCES)} to judge an "
            "answer by: write a recipe with a reward of your own (docs/objectives.md)"
        )
    fields_of = {"classify": classified.fields_of, "embed": queries.fields_of}.get(objective)
    fields = fields_of(rows) if fields_of else {}
    if objective == "classify" and len(fields["labels"]) < 2:
        raise DataError(
            f"{asked.data}: --objective classify: the first {counted(len(rows), 'row')} have "
            f"{counted(len(fields['labels']), 'label')} in their column label or labels, and a classifier "
            "tells two apart at least"
        )
    columns = {} if _is_read(rows[0], objective) else likely_names(rows[0])
    section: dict[str, Any] = {"max_samples": ROWS, "columns": columns, **images}
    longest, form, template = 0, "", None
    try:
        longest, form = _prepared(_draft(asked, objective, section, fields))
    except DataError as error:
        if "chat template" not in str(error):
            raise
        template = "chatml"
        section |= {"chat_template": template}
        longest, form = _prepared(_draft(asked, objective, section, fields))
    if objective == "grpo":
        longest += _GRPO["max_completion_length"]
    # A quarter more than the longest of the first rows, in whole blocks of 64.
    kept = min(LONGEST, -(-max(64, longest + longest // 4) // 64) * 64)
    return Looked(len(rows), objective, form, columns, fields, images, template, longest, kept)


def _first_rows(named: str, count: int) -> list[dict[str, Any]]:
    draft = _draft(Asked(named, "any", "", "price"), "sft", {})
    stored = data.readers.rows_of(draft.data, "data", most=count)
    rows = [row for row, _ in stored if isinstance(row, dict)]
    if not rows:
        raise DataError(f"{named}: has no row; name a file with samples")
    return rows


def _has_images(rows: Sequence[dict[str, Any]]) -> bool:
    return any(image_rows.extracted(row, {}, "")[1] for row in rows)


def _objective(row: dict[str, Any]) -> str:
    named = NamedRow(row, {}, "").with_aliases()
    if named.is_pair:
        return "dpo"
    has_answer = any(map(named.has, ("completion", *TURNS)))
    if has_answer and formats.label_column(row):
        return "kto"
    if queries.are_in(row):
        return "embed"
    return "classify" if "text" in row and set(classified.LABELS) & row.keys() else "sft"


def _is_read(row: dict[str, Any], objective: str) -> bool:
    """Return whether the names of a row's columns are known; other objectives than sft know those of other
    tools."""
    named = NamedRow(row, {}, "")
    return objective != "sft" or bool(formats.fitting(named)) or named.is_pair


def _prepared(draft: Recipe) -> tuple[int, str]:
    """Return the tokens of the longest of a recipe's prepared samples, and their format.

    Warnings of the contract are of a split that no run has, and are left to the run.
    """
    with tempfile.TemporaryDirectory(prefix="flytune-init-") as temporary, _quiet(data.contract.__name__):
        folder = Path(temporary) / "dataset"
        manifest = data.prepare(DataRequest.of(draft, "init"), folder, processes=1)
        kind = data.row_kind(draft.objective.row_kind)
        lengths = [
            kind.longest(data.load(folder, split))
            for split in ("train", "heldout")
            if getattr(manifest, split).rows
        ]
        return max(int(length.max()) for length in lengths), manifest.format


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a logger from warning within the block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _draft(
    asked: Asked, objective: str, section: dict[str, Any], fields: dict[str, Any] | None = None
) -> Recipe:
    limits = {"max_length": 32 * LONGEST, "contract": "warn", "heldout_fraction": 0.3}
    return Recipe.model_validate(
        {
            "name": "draft",
            "model": {"name_or_path": asked.base},
            "data": source_of(asked.data) | limits | section,
            "method": "lora",
            "objective": {"name": objective} | (fields or {}),
            "training": {"learning_rate": 1e-4, "global_batch_size": 16},
        }
    )


def recipe_text(asked: Asked) -> str:
    """Return a new recipe, whose comments say why each value is as it is.

    Raises:
        FlytuneError: the data or the base cannot be read, or nothing fits where it is to run.
    """
    looked, geometry = look(asked), read_geometry(_draft(asked, "sft", {}).model)
    positions = geometry.positions or looked.kept
    looked = looked._replace(kept=min(looked.kept, positions))
    if looked.objective == "embed" and geometry.model_type in ENCODERS:
        own = vectors.published_pooling(_draft(asked, "sft", {}).model)
        looked = looked._replace(fields=looked.fields | {"pooling": own or "mean"})
    count = sample_count.counted(_draft(asked, looked.objective, {"heldout_fraction": 0}))
    chosen = _chosen(asked, looked, count.samples, geometry)
    return _written(asked, looked, count, chosen)


def _chosen(asked: Asked, looked: Looked, samples: int | None, geometry: Geometry) -> _Choice:
    """Return the recipe with the method, sharding and shape that serve the aim best.

    Raises:
        DoesNotFit: no method fits.
    """
    here = this_machine.rows()
    shapes: Sequence[Shape] = here if asked.on == this_machine.NAME else load_shapes()
    on_gpu = any(shape.is_gpu for shape in shapes if asked.on in ("auto", shape.name))
    plans: dict[str, tuple[Recipe, Plan]] = {}
    refusals = list[str]()
    for method in ("full", "lora", "qlora") if on_gpu else ("full", "lora"):
        try:
            plans[method] = planner.decide(
                _recipe(asked, looked, samples, method, shapes, geometry), shapes, geometry, samples
            )
        except (DoesNotFit, RecipeError) as error:
            refusals.append(str(error))
    if not plans:
        raise DoesNotFit(refusals[-1])
    well = [method for method in plans if plans[method][1].verdict == "fits"] or list(plans)
    timed = [method for method in well if plans[method][1].tokens_per_second]
    if asked.aim == "quality":
        best, way = well[0], "all weights are trained where they fit, else adapters on 16 bits, else on 4"
    elif not timed:
        best = "lora" if "lora" in well else well[0]
        way = "adapters take the least memory and time; speeds on this hardware are not estimated"
    elif asked.aim == "time":
        best = max(timed, key=lambda method: plans[method][1].tokens_per_second[1])
        way = "of the methods that fit, the fastest by the plan's estimate"
    else:
        best = min(
            timed,
            key=lambda method: (plans[method][1].price_per_billion_tokens or 0.0, timed.index(method) != 1),
        )
        way = "of the methods that fit, the cheapest by the plan's estimate"
    recipe, plan = plans[best]
    # Written as a row, so that a later plan and the run are of the same machine.
    named = recipe.hardware.model_copy(update={"shape": plan.shape})
    return _Choice(recipe.model_copy(update={"hardware": named}), plan, way)


def _recipe(
    asked: Asked,
    looked: Looked,
    samples: int | None,
    method: str,
    shapes: Sequence[Shape],
    geometry: Geometry,
) -> Recipe:
    of_all_weights, of_adapters = _RATES[looked.objective]
    possible = [
        shape for shape in shapes if asked.on in ("auto", shape.name) and (shape.is_gpu or asked.on != "auto")
    ]
    dtype = "bfloat16" if any(shape.bf16 and shape.is_gpu for shape in possible) else "float16"
    if not any(shape.is_gpu for shape in possible):
        dtype = "float32"
    batch = 4 if samples is not None and samples < _FEW else 16
    if looked.objective == "embed":
        batch *= 4
    # Each process gets as many samples of a step, and each prompt all answers of its group.
    unit = 1 if asked.on == "auto" else max(shape.world_size for shape in possible)
    if looked.objective == "grpo":
        batch, unit = 2 * _GRPO["group_size"], math.lcm(unit, _GRPO["group_size"])
    batch = -(-batch // unit) * unit
    section: dict[str, Any] = source_of(asked.data) | looked.images | {"max_length": looked.kept}
    section["heldout_fraction"] = (
        0.02 if samples is None else round(min(0.2, max(0.02, _HELD_OUT / samples)), 3)
    )
    if looked.columns:
        section["columns"] = looked.columns
    if looked.chat_template:
        section["chat_template"] = looked.chat_template
    model: dict[str, Any] = {"name_or_path": asked.base, "dtype": dtype}
    training = {
        "learning_rate": of_all_weights if method == "full" else of_adapters,
        "global_batch_size": batch,
        "num_train_epochs": _EPOCHS[looked.objective],
    }
    kind = geometry.tried_as or geometry.model_type
    if model_types.attention_problem(kind, "sdpa", trust_remote_code=False):
        model["attn_implementation"] = "eager"
    if model_types.checkpointing_problem(kind, trust_remote_code=False):
        training["activation_checkpointing"] = False
    return Recipe.model_validate(
        {
            "name": _name(asked.data),
            "model": model,
            "data": section,
            "method": method,
            "objective": _objective_section(looked),
            "training": training,
            "checkpoints": {"save_steps": "epoch" if _EPOCHS[looked.objective] > 1 else _SHARE_OF_STEPS},
            "hardware": {"shape": asked.on},
        }
    )


def _objective_section(looked: Looked) -> dict[str, Any]:
    if looked.objective == "grpo":
        return _GRPO
    return {"name": looked.objective, **looked.fields}


def _name(named: str) -> str:
    stem = re.sub(r"[^a-z0-9]+", "-", Path(named).name.partition(".")[0].lower()).strip("-")
    return stem[:60] or "first"


def _written(asked: Asked, looked: Looked, count: sample_count.SampleCount, chosen: _Choice) -> str:
    recipe, plan = chosen.recipe, chosen.plan
    reasons = {line.partition(":")[0].partition(",")[0].split()[0]: line for line in reversed(plan.reasons)}
    form = f"{looked.form}: " if looked.form else ""
    rows = count.origin.rpartition(": ")[2]
    why: dict[str, str] = {
        "name": "of the data's file",
        "model.name_or_path": "the base, as asked",
        "model.dtype": f"what {plan.shape} computes in",
        "model.attn_implementation": "transformers has no sdpa for a base of this type",
        "data.path": f"{form}by the first {counted(looked.rows, 'row')}",
        "data.dataset_name": f"{form}by the first {counted(looked.rows, 'row')}",
        "data.max_length": f"tokens; the longest of the first rows has {looked.longest:,}; data.too_long is "
        "for longer ones",
        "data.heldout_fraction": f"{_HELD_OUT} samples to score with, a fifth at most; {rows}",
        "data.columns": "the rows' own names of what the format needs",
        "data.chat_template": "the base has none; a shipped one",
        "data.images": "the rows have some (docs/images.md)",
        "objective": f"{OBJECTIVES[looked.objective]}, {'as asked' if asked.objective else 'by the columns'}",
        "objective.labels": f"those of the first {counted(looked.rows, 'row')}; names say more than numbers",
        "objective.pooling": "vector of a text: as the base's own, or the mean where it has none",
        "objective.negatives": f"as many as each of the first {counted(looked.rows, 'row')} has",
        "objective.rewards": "1 where the final number, or what follows ####, is that of the row",
        "objective.group_size": "answers to each question, compared with each other",
        "objective.max_completion_length": "tokens of an answer; fewer are faster",
        "method": f"{asked.aim}: {chosen.way}",
        "sharding": reasons.get("sharding", "").partition(": ")[2] or "chosen by the plan",
        "training.learning_rate": "customary for this objective and method; the first to try others of",
        "training.global_batch_size": "samples of a step, as many for each process; few for little data"
        + ("; their documents are the negatives" if looked.objective == "embed" else ""),
        "training.num_train_epochs": "customary for this objective",
        "training.activation_checkpointing": "transformers has none for a base of this type",
        "checkpoints.save_steps": "a run that is ended resumes after its last epoch"
        if _EPOCHS[looked.objective] > 1
        else "share of all steps between checkpoints, from which a run that is ended resumes",
        "hardware.shape": reasons.get("shape", "").partition(": ")[2]
        if asked.on == "auto"
        else "where it runs, as asked",
    }
    lines = ["# Made by `flytune init`. `flytune plan` says what it needs, `flytune run` trains it."]
    content = recipe.model_dump(mode="json", exclude_defaults=True) | {
        "objective": _objective_section(looked)
    }
    for section, value in sorted(content.items(), key=lambda item: _ORDER.index(item[0])):
        is_name = isinstance(value, dict) and set(value) == {"name"}
        if isinstance(value, dict) and not is_name:
            lines.append(f"{section}:")
            lines += [
                _line(f"  {field}", entry, why.get(f"{section}.{field}") or why.get(section, ""))
                for field, entry in value.items()
            ]
        else:
            lines.append(_line(section, value["name"] if is_name else value, why.get(section, "")))
    return "\n".join(lines) + "\n"


def _line(field: str, value: Any, why: str) -> str:
    written = (
        yaml_core.dump({field.strip(): value}, in_one_line=True).strip().removeprefix("{").removesuffix("}")
    )
    comment = " ".join(why.split())
    return f"{field[: len(field) - len(field.strip())]}{written}" + (f"  # {comment}" if comment else "")
