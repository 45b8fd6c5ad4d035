"""Peak memory from the dry run beside what was measured on GPUs, where a publication says exactly what ran.

`python -m benchmarks.dryrun`. It needs no GPU and no weights; each row is a subprocess, whose seconds include
ten of imports.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flytune import dryrun
from flytune.hardware.shapes import GIB
from flytune.models import config_json
from flytune.recipe import Recipe
from training_estimates.degrees import Degrees

MISTRAL_7B = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
} | {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}
POWERLM_3B = {
    "model_type": "granite",
    "vocab_size": 49152,
    "hidden_size": 2304,
    "intermediate_size": 9216,
} | {
    "num_hidden_layers": 40,
    "num_attention_heads": 36,
    "num_key_value_heads": 36,
    "tie_word_embeddings": True,
}
# fms-acceleration's runs: transformers 4.48 with weights in bfloat16, no autocast, all logits, torch's
# foreach AdamW.
PLAIN = dryrun.Profile(loss="full", weight_dtype="bfloat16", autocast=False)
FOREACH = {"optim": "adamw_torch"}
ATTENTION = {"name": "lora", "r": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
OFFLOADED = {"name": "fsdp", "offload": "cpu"}
FMS = "fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv"

# name, config, sections of the recipe, processes, micro batch, profile, published GiB allocated, where
ROWS: list[tuple[str, Any, dict[str, Any], int, int, dryrun.Profile, float | None, str]] = [
    ("Mistral-7B full", MISTRAL_7B, {"training": FOREACH}, 1, 4, PLAIN, 67.46, FMS),
    ("PowerLM-3b full", POWERLM_3B, {"training": FOREACH}, 1, 4, PLAIN, 32.722, FMS),
    ("PowerLM-3b LoRA", POWERLM_3B, {"training": FOREACH, "method": ATTENTION}, 1, 4, PLAIN, 18.785, FMS),
    (
        "Llama-3.1-405B full, offloaded",
        "meta-llama/Llama-3.1-405B",
        {"sharding": OFFLOADED},
        64,
        1,
        dryrun.Profile(loss="full"),
        49.267,
        "LambdaLabs distributed-training-guide, chapter 5 (52.9 GB)",
    ),
    (
        "the same, as Flytune trains it",
        "meta-llama/Llama-3.1-405B",
        {"sharding": OFFLOADED},
        64,
        1,
        dryrun.Profile(),
        None,
        "",
    ),
    (
        "Llama-3.1-8B LoRA, Flytune",
        "meta-llama/Llama-3.1-8B-Instruct",
        {"sharding": {"name": "fsdp"}, "method": {"name": "lora"}},
        8,
        1,
        dryrun.Profile(),
        None,
        "",
    ),
]


def recipe(sections: dict[str, Any]) -> Recipe:
    """Return a recipe with 4,096 tokens, bfloat16, FlashAttention, checkpointed layers, and the fields of
    `sections`."""
    content: dict[str, Any] = {
        "name": "bench",
        "model": {"name_or_path": "owner/name", "attn_implementation": "flash_attention_2"},
        "data": {"path": "unread.jsonl", "max_length": 4096},
        "method": {"name": "full"},
        "sharding": {"name": "none"},
        "training": {"learning_rate": 1e-5, "global_batch_size": 64},
    }
    for section, fields in sections.items():
        content[section] = content[section] | fields
    return Recipe.model_validate(content)


def main() -> None:
    """Run the rows one after the other, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the second row")
    rows = ROWS[1:2] if parser.parse_args().quick else ROWS
    table = Table(title="Dry run beside published peaks (GiB allocated, one rank)", title_justify="left")
    for column in ("run", "ranks", "predicted", "published", "off by", "seconds", "most of it", "source"):
        table.add_column(column, justify="left" if column in ("run", "most of it", "source") else "right")
    for name, config, sections, world_size, micro_batch, profile, published, source in rows:
        content = config if isinstance(config, dict) else config_json.shipped()[config]["config"]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(content))
            dry = dryrun.run(recipe(sections), Path(folder), Degrees(world_size), micro_batch, profile)
        peak, largest = dry.peak_bytes / GIB, max(dry.kinds, key=lambda kind: dry.kinds[kind])
        off = f"{(peak / published - 1) * 100:+.2f} %" if published else ""
        most = f"{largest} {dry.kinds[largest] / GIB:.1f}, {dry.peak_phase}"
        shown = f"{published:.2f}" if published else ""
        table.add_row(name, str(world_size), f"{peak:.2f}", shown, off, f"{dry.seconds:.0f}", most, source)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
