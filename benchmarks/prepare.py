"""Preparing data: ours (read, render, tokenize, mask, split, store) beside TRL's own preparation of the same rows.

TRL prepares prompt/completion chats with its completion mask; it neither splits nor stores. Same tokenizer, one process each,
alternating, on the demo's docstring pairs.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo import inputs
from flytune import data
from flytune.recipe import DataRequest
from flytune.sections import Data, Model

HOME = Path(".demo")
ROUNDS = 3


def ours(rows: Path, model: Path) -> float:
    """Seconds for one preparation."""
    request = DataRequest(model=Model(name_or_path=str(model)), data=Data(path=str(rows), max_length=256), fingerprint="bench")
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        data.prepare(request, Path(folder) / "dataset")
        return time.perf_counter() - started


def trl(rows: Path, model: Path) -> float:
    """Seconds that SFTTrainer takes to prepare the same rows, its map's cache switched off."""
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_caching()
    read = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    chats = datasets.Dataset.from_list([_chat(row) for row in read])
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    arguments = {"completion_only_loss": True, "max_length": 256, "report_to": "none", "use_cpu": True, "bf16": False}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        SFTTrainer(tiny, SFTConfig(folder, **arguments), train_dataset=chats, processing_class=tokenizer)
        return time.perf_counter() - started


def _chat(row: dict[str, Any]) -> dict[str, Any]:
    prompt = [{"role": "user", "content": row["instruction"] + (f"\n\n{row['input']}" if row["input"] else "")}]
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": row["output"]}]}


def main() -> None:
    """Makes the demo's inputs if need be, then measures both in turn."""
    inputs.make(HOME)
    rows, model = HOME / "data" / "docstrings.jsonl", HOME / "models" / "smollm2-135m-instruct"
    ours(rows, model), trl(rows, model)
    pairs = [(ours(rows, model), trl(rows, model)) for _ in range(ROUNDS)]
    table = Table(title=f"Preparing {sum(1 for _ in rows.open())} rows, best of {ROUNDS}", title_justify="left")
    for column in ("who", "seconds", "ratio"):
        table.add_column(column, justify="left" if column == "who" else "right")
    mine, theirs = min(own for own, _ in pairs), min(peer for _, peer in pairs)
    table.add_row("flytune (and splits, stores, hashes)", f"{mine:.1f}", f"{mine / theirs:.2f}")
    table.add_row("TRL's SFTTrainer", f"{theirs:.1f}", "1.00")
    Console().print(table)


if __name__ == "__main__":
    main()
