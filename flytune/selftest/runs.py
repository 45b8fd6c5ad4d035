"""Runs of the self-test: one tiny deterministic training run, in any layout over processes."""

import os
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flytune.hardware import Shape
from flytune.models import loading
from flytune.planning import planner
from flytune.recipe import Hardware, Recipe
from flytune.records import TrainingResult
from flytune.selftest import dataset as selftest_dataset
from flytune.selftest import processes as selftest_processes
from flytune.selftest import shapes, tiny_model, tiny_vision
from flytune.selftest.processes import Nodes, Share
from flytune.training import loop, reference
from training_estimates.degrees import Degrees

# Warm-up from learning rate 0, the peak, and a cosine decay, over two epochs with different orders. The first
# epoch is SHORT chats too short for its third step, which takes them from the second epoch.
STEPS, STEPS_PER_EPOCH, SHORT = 4, 3, 3
# Samples of a step for each process.
SAMPLES_OF_A_PROCESS = 4

ObjectiveRows = Literal["dpo", "kto", "reward", "grpo", "classify", "distill", "on-policy", "embed"]
Rows = Literal["chats", "step", "packed", "images", ObjectiveRows]
OBJECTIVE_ROWS: tuple[Rows, ...] = get_args(ObjectiveRows)
"""Rows of an objective of their name, and on-policy: of distill, with answers that the student draws. All
others are those of sft."""
DRAWN_ROWS: tuple[Rows, ...] = ("grpo", "on-policy")
"""Rows whose answers a run draws and records."""
Model = Literal["dense", "experts", "balance", "vision"]
Parallel = Literal["data", "sp2", "2x2"]

# Names of the files of rows, and the function that writes each.
_FILES: dict[Rows, str] = {
    "chats": "chats",
    "step": "step",
    "packed": "step",
    "images": "images",
    "dpo": "pairs",
    "kto": "labelled",
    "reward": "pairs",
    "grpo": "prompts",
    "classify": "texts",
    "distill": "chats",
    "on-policy": "chats",
    "embed": "queries",
}
_WRITERS = {
    "chats": selftest_dataset.write,
    "step": selftest_dataset.write,
    "images": selftest_dataset.write_images,
    "pairs": selftest_dataset.write_pairs,
    "labelled": selftest_dataset.write_labelled,
    "prompts": selftest_dataset.write_prompts,
    "texts": selftest_dataset.write_texts,
    "queries": selftest_dataset.write_queries,
}
OBJECTIVE_SECTIONS: dict[Rows, dict[str, Any]] = {
    "grpo": {
        "group_size": 2,
        "max_completion_length": 12,
        "rewards": [{"name": "letters", "code": selftest_dataset.REWARD}],
    },
    "classify": {"labels": selftest_dataset.LABELS, "class_weight": {selftest_dataset.LABELS[0]: 2.0}},
    # Two untrained models differ little: at a low temperature the loss is above its rounding.
    "on-policy": {"name": "distill", "on_policy": 0.5, "max_completion_length": 12, "temperature": 0.05},
    "embed": {"negatives": 1, "matryoshka_dims": [16], "temperature": 0.5},
}
"""Fields of objectives whose defaults are not a tiny run's."""


class Pair(NamedTuple):
    """A method and a sharding, with offload and kind of rows."""

    method: str
    sharding: str
    offload: str = "none"
    rows: Rows = "chats"
    """chats: one chat in each row; step: only the chats of one step, the same in each step; packed: those, in
    fewer rows; images: chats about images; dpo and reward: pairs of chats; kto: labelled answers; grpo:
    prompts, with the answers that plain training drew; classify: texts with labels; distill: chats with the
    tokens of the other base; on-policy: the same, half of them with answers that plain training drew; embed:
    queries with two documents."""
    model: Model = "dense"
    """dense: a Llama; experts: a mixture, whose experts get adapters too, with activation checkpointing under
    all shardings but none; balance: the same with the balance loss of the routers; vision: a model that reads
    images, whose tower is frozen, with activation checkpointing as experts."""

    parallel: Parallel = "data"
    """data: each process has samples of its own; sp2: two divide the positions of each sample; 2x2: two
    groups of processes, on a CPU of two each, have all states each."""

    @property
    def is_mixture(self) -> bool:
        return self.model in ("experts", "balance")

    @property
    def sequence_parallel(self) -> int:
        """Processes that divide each sample."""
        return 2 if self.parallel == "sp2" else 1

    @property
    def replicas(self) -> int:
        """Groups of processes that have all states each."""
        return 2 if self.parallel == "2x2" else 1

    def __str__(self) -> str:
        plain = Pair(self.method, self.sharding)
        others = [value for value, default in zip(self[2:], plain[2:], strict=True) if value != default]
        return "/".join([self.method, self.sharding, *others])


class BatchLayout(NamedTuple):
    """One way of dividing the global batch: micro batch x accumulation x processes."""

    micro_batch: int
    accumulation: int
    degrees: Degrees

    def __str__(self) -> str:
        return f"{self.micro_batch}x{self.accumulation}x{self.degrees.data_parallel}"


class FinishedRun(NamedTuple):
    """A finished run: its records, and the folder of exported safetensors."""

    result: TrainingResult
    exported: Path


class Trials:
    """All runs of a self-test, in forked processes, with their files below one folder."""

    def __init__(self, folder: Path, here: list[Shape] | None = None, nodes: Nodes | None = None) -> None:
        self.folder, self.nodes = folder, nodes
        self.shapes = here or shapes.shapes(nodes.count if nodes else 1)
        """Shapes for this machine, and for one process on it."""
        self.global_batch_size = SAMPLES_OF_A_PROCESS * max(2, self.shapes[0].world_size)
        self.references: dict[tuple[Pair, BatchLayout], FinishedRun] = {}
        (folder / "runs").mkdir(parents=True)
        rows_of_an_epoch = STEPS_PER_EPOCH * self.global_batch_size - SHORT
        for name, write in _WRITERS.items():
            write(folder / f"{name}.jsonl", self.global_batch_size if name == "step" else rows_of_an_epoch)
            write(folder / f"heldout-{name}.jsonl", 4, seed=1)
        # In separate processes: threads that torch and Arrow start in this process would not exist in the
        # forks.
        selftest_processes.run(
            1,
            tiny_model.write,
            self.base("dense"),
            tiny_model.SENTENCES,
            self.base("experts"),
            log=folder / "model.log",
        )
        selftest_processes.run(
            1, tiny_vision.write, self.base("vision"), tiny_model.SENTENCES, log=folder / "vision.log"
        )
        # Tokens of a block of packed samples, and blocks of a step; known when a step's data is prepared.
        self.block_length = self.blocks = 1
        self._prepare("chats")
        self.block_length, self.blocks = selftest_dataset.block_length(
            self._prepare("step"), Degrees(self.shapes[0].world_size)
        )
        self._prepare("packed")
        for rows in ("images", *OBJECTIVE_ROWS):
            self._prepare(rows)
        for method in ("lora", "qlora"):
            selftest_processes.run(
                1,
                write_first_adapter,
                self.recipe(Pair(method, "none")),
                self._first_adapter(method),
                log=folder / f"{method}.log",
            )

    def _first_adapter(self, method: str) -> Path:
        """Return the folder of the adapter that plain training of a method on the dense base starts from."""
        return self.folder / f"first-{method}"

    def base(self, model: Model) -> Path:
        """Return the folder of a base model."""
        names = {"dense": "base", "vision": "vision"}
        return self.folder / names.get(model, "mixture")

    def _prepare(self, rows: Rows) -> list[int]:
        """Prepare the data; return the number of tokens of each row."""
        recipe = self.recipe(Pair("full", "none", rows=rows, model="vision" if rows == "images" else "dense"))
        counts: list[int] = selftest_processes.run(
            1, selftest_dataset.prepare, recipe, self.folder / rows, log=self.folder / f"{rows}.log"
        )
        return counts

    def recipe(self, pair: Pair) -> Recipe:
        """Return the run's recipe: with clipping, decay and schedule, where errors could be, and without
        random dropout."""
        method: dict[str, Any] = {"name": pair.method}
        if pair.method != "full":
            method |= {"lora_dropout": 0.0, "r": 8, "lora_alpha": 16, "experts": pair.is_mixture}
        balance: dict[str, float] = {}
        # Packed rows divide into other micro batches, and each has a balance loss of its own; TRL has none
        # for heads of a sequence, nor has distillation.
        if pair.is_mixture and pair.rows not in ("reward", "classify", "distill", "on-policy", "embed"):
            balance["router_aux_loss_coef"] = 0.5 if pair.model == "balance" else 0.0
        model = "" if pair.model == "dense" else f"-{pair.model}"
        return Recipe.model_validate(
            {
                "name": "selftest",
                "model": {"name_or_path": str(self.base(pair.model)), "dtype": "float32"},
                "data": self._data(pair.rows),
                "method": method,
                "sharding": {
                    "name": pair.sharding,
                    "offload": pair.offload,
                    "sequence_parallel": pair.sequence_parallel,
                    "replicas": pair.replicas,
                },
                "training": {
                    "learning_rate": 1e-3,
                    "global_batch_size": self.rows_of_a_step(pair),
                    "num_train_epochs": STEPS,
                    "max_steps": STEPS,
                    "warmup_steps": 2,
                    "weight_decay": 0.1,
                    "max_grad_norm": 0.5,
                    # The 8-bit default of qlora quantizes its states in blocks, which every sharding divides
                    # differently.
                    "optim": "adamw_torch_fused",
                    "activation_checkpointing": pair.model != "dense" and pair != plain_pair(pair),
                    **balance,
                },
                # Answers that plain training has drawn and recorded are those that all runs of the method
                # train.
                "checkpoints": {
                    "folder": str(self.folder / "checkpoints"),
                    "name": f"selftest-{pair.method}-{pair.rows}{model}",
                },
                "objective": {
                    "name": pair.rows if pair.rows in OBJECTIVE_ROWS else "sft",
                    **OBJECTIVE_SECTIONS.get(pair.rows, {}),
                    **self._teacher(pair),
                },
            }
        )

    def _data(self, rows: Rows) -> dict[str, Any]:
        """Return the fields of the data."""
        name = _FILES[rows]
        paths = {"path": f"{self.folder}/{name}.jsonl", "heldout_path": f"{self.folder}/heldout-{name}.jsonl"}
        if rows == "packed":
            return {**paths, "packing": True, "max_length": self.block_length}
        if rows == "images":
            return {**paths, "images": True, "max_length": 512}
        return paths

    def _teacher(self, pair: Pair) -> dict[str, Any]:
        """Return the fields of a teacher: the other base, which has the same tokenizer."""
        if pair.rows not in ("distill", "on-policy"):
            return {}
        other = self.base("experts" if pair.model == "dense" else "dense")
        # A drawn answer has no loss of the data.
        alpha = 0.25 if pair.rows == "distill" else 0.0
        return {"teacher_model_name_or_path": str(other), "loss_top_k": 8, "alpha": alpha, "beta": 0.5}

    def rows_of_a_step(self, pair: Pair) -> int:
        """Return the global batch size in rows."""
        return self.blocks if pair.rows == "packed" else self.global_batch_size

    def layouts(self, pair: Pair, degrees: Degrees) -> list[BatchLayout]:
        """Return layouts with a process's complete share of the batch in one pass, with two rows in a pass,
        and with one.

        With offload, which takes three times as long, there is only the layout with two rows.
        """
        share = degrees.samples(self.rows_of_a_step(pair))
        sizes = (share, 2, 1) if pair.offload == "none" else (2,)
        micro_batches = dict.fromkeys(size for size in sizes if share % size == 0)
        return [BatchLayout(micro_batch, share // micro_batch, degrees) for micro_batch in micro_batches]

    def train(self, pair: Pair, layout: BatchLayout, shape: Shape) -> FinishedRun:
        """Train and export once, on all nodes of the shape; an earlier export of the same pair and layout is
        deleted.

        Raises:
            RankFailed: a rank failed; the message has the traceback of the first.
        """
        if self.nodes is None or shape.nodes == 1:
            return self._train(pair, layout, shape)
        run: FinishedRun = self.nodes.run(
            (pair, layout, shape), lambda share: self._train(pair, layout, shape, share)
        )
        return run

    def follow(self) -> None:
        """Take part in the first node's runs, on this node's own copy of the model and the data."""
        assert self.nodes is not None, "follow() needs several nodes"
        self.nodes.follow(lambda job, share: self._train(job[0], job[1], job[2], share))

    def _train(
        self,
        pair: Pair,
        layout: BatchLayout,
        shape: Shape,
        share: Share | None = None,
        first_adapter: Path | None = None,
    ) -> FinishedRun:
        out = self.folder / "runs" / f"{pair}-{layout}".replace("/", "-")
        shutil.rmtree(out, ignore_errors=True)
        recipe, dataset, log = self.recipe(pair), self.folder / pair.rows, out.with_name(f"{out.name}.log")
        if first_adapter:
            method = recipe.method.model_copy(update={"adapter": str(first_adapter)})
            recipe = recipe.model_copy(update={"method": method})
        of_reference = None
        if reference.is_needed(recipe):
            of_reference = out.with_name(f"{out.name}-reference")
            shutil.rmtree(of_reference, ignore_errors=True)
            selftest_processes.run(1, reference.compute, recipe, dataset, of_reference, log=log)
        result: TrainingResult = selftest_processes.run(
            layout.degrees.world,
            _fit,
            recipe,
            shape,
            layout,
            dataset,
            out,
            of_reference,
            log=log,
            share=share,
        )
        return FinishedRun(result, out / ("model" if pair.method == "full" else "adapter"))

    def reference(self, pair: Pair, micro_batch: int | None = None) -> FinishedRun:
        """Return plain training of the pair's method, which is trained on the first call, with the global
        batch in one pass.

        Its adapter is one that PEFT has made without a trainer, where an adapter can be named: what a trainer
        does to first values would be on both sides otherwise.

        Args:
            micro_batch: that of the run to compare; with a balance loss, which is one of each micro batch, it
                is the plain run's too.
        """
        plain = plain_pair(pair)
        rows = self.rows_of_a_step(plain)
        rows_of_a_pass = micro_batch if pair.model == "balance" and micro_batch else rows
        layout = BatchLayout(rows_of_a_pass, rows // rows_of_a_pass, Degrees())
        if (plain, layout) not in self.references:
            shape = shapes.shape_for(self.recipe(plain), self.shapes)
            assert shape is not None, f"{plain} is one process and runs on any machine"
            is_given = plain.method != "full" and plain.rows not in OBJECTIVE_ROWS and plain.model == "dense"
            first_adapter = self._first_adapter(plain.method) if is_given else None
            self.references[plain, layout] = self._train(plain, layout, shape, first_adapter=first_adapter)
        return self.references[plain, layout]


def plain_pair(pair: Pair) -> Pair:
    """Return the pair that a pair is compared with: the same method and rows, in one process, without
    packing."""
    return Pair(pair.method, "none", rows="step" if pair.rows == "packed" else pair.rows, model=pair.model)


def write_first_adapter(recipe: Recipe, folder: Path) -> None:
    """Write the adapter that PEFT draws for the base as transformers loads it, with the recipe's seed."""
    from peft import get_peft_model
    from transformers import set_seed

    base = loading.base_model(recipe, "float32")
    set_seed(recipe.training.seed)
    get_peft_model(base, loading.peft_config(recipe, base)).save_pretrained(folder)


def _fit(
    recipe: Recipe, shape: Shape, layout: BatchLayout, dataset: Path, out: Path, of_reference: Path | None
) -> TrainingResult:
    """Train in this process; `of_reference` has what a reference model says of the rows, if it is needed."""
    import torch

    if shape.is_gpu and shape.processes == 1:
        # The Trainer would copy the model to every GPU that one process sees (DataParallel).
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # Ranks share the cores, and TF32 keeps only 10 of the 23 bits of a float32.
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    on_shape = recipe.model_copy(update={"hardware": Hardware(shape=shape.name)})
    plan = planner.make(on_shape, [shape])
    batch = {
        "per_device_train_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
    }
    return loop.fit(recipe, plan.model_copy(update=batch), shape, dataset, out, reference=of_reference)
