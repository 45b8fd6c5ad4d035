"""Seconds that a checkpoint blocks training, and that storing it takes: `python -m
benchmarks.checkpoints`."""

import argparse
import tempfile
import time
from pathlib import Path

from flytune import data
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.selftest import tiny_model
from flytune.training import loop
from flytune.training.checkpoints import Saver
from tests.support.tiny import tiny_recipe, write_pairs


def large_model(tokenizer):
    """Return a model of about 50M parameters; a checkpoint has 12 bytes of each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, dtype="float32", **sizes)
    )


def watch(saver_class, seconds):
    """Record the seconds of each part of a save: the Trainer's writing, waiting for the save before,
    storing."""

    def timed(name, part):
        function = getattr(saver_class, name)

        def timed_function(*arguments):
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds.setdefault(part, []).append(time.perf_counter() - began)

        setattr(saver_class, name, timed_function)

    timed("_save", "training stops to write")
    timed("_has_room", "training waits for the one before")
    timed("_store", "stored asynchronously")


def main():
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    if not parser.parse_args().quick:
        tiny_model.random_model = large_model
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = tiny_model.write(folder / "model", tiny_model.SENTENCES)
        changes = {"checkpoints.save_steps": 4, "training.max_steps": 12, "training.global_batch_size": 8}
        recipe = Recipe.model_validate(tiny_recipe(base, write_pairs(folder / "pairs.jsonl", 200), changes))
        data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), folder / "dataset")
        watch(Saver, seconds)
        plan = planner.make(recipe)
        result = loop.fit(recipe, plan, shape_named(plan.shape), folder / "dataset", folder / "out")
    step = sum(step.seconds for step in result.steps) / len(result.steps)
    print(f"{result.total_parameters / 1e6:.1f}M parameters, {step:.1f} s a step")  # noqa: T201
    for part, second in seconds.items():
        print(f"{part}: {', '.join(f'{one:.1f}' for one in second)} s")  # noqa: T201


if __name__ == "__main__":
    main()
