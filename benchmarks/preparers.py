"""Ways to prepare chats, each run in a process of its own as `python benchmarks/preparers.py WAY JOB`;
prepare.py starts them.

JOB is JSON: rows (a file of chats), warm (a file with the first of them), model and out (folders),
max_length, cores. A way uses its own public entry: first, not measured, on `warm`, so that everything is
imported and compiled; then, measured, on `rows`; afterwards it counts the results. No way imports what
another needs: each may run under an interpreter of its own.
"""

import importlib.machinery
import json
import os
import resource
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Way = tuple[Callable[[str, Path], Any], Callable[[Any], Iterable[Any]]]
"""A function that prepares a file of chats into an empty folder; and one that lists the resulting tables of
input_ids, labels and possibly attention_mask."""


def flytune(job: dict[str, Any]) -> Way:
    """data.prepare: reads, renders, tokenizes, splits off held-out samples, packs, stores, hashes, holds to
    the contract."""
    from flytune import data
    from flytune.data import contract
    from flytune.recipe import Data, DataRequest, Model

    def timed(function: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                TOLD["contract"] = TOLD.get("contract", 0.0) + time.perf_counter() - started

        return run

    contract.enforce = timed(contract.enforce)

    def work(rows: str, out: Path) -> Any:
        section = Data(path=rows, max_length=job["max_length"], packing=True)
        request = DataRequest(model=Model(name_or_path=job["model"]), data=section, fingerprint="benchmark")
        TOLD.clear()
        manifest = data.prepare(request, out)
        return [out / shard.file for shard in (*manifest.train.shards, *manifest.heldout.shards)]

    def tables(shards: Any) -> Iterator[Any]:
        from pyarrow.parquet import ParquetFile

        for shard in shards:
            yield from ParquetFile(shard).iter_batches(1000, columns=["input_ids", "labels"])

    return work, tables


def trl(job: dict[str, Any]) -> Way:
    """SFTTrainer, as it is made: reads through datasets, renders and tokenizes, labels, packs, stores in its
    cache."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    of_data = {
        "max_length": job["max_length"],
        "packing": True,
        "assistant_only_loss": True,
        "dataset_num_proc": job["cores"],
    }

    def work(rows: str, out: Path) -> Any:
        dataset = load_dataset("json", data_files=rows, split="train")
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        settings = SFTConfig(str(out), report_to="none", use_cpu=True, bf16=False, **of_data)
        return SFTTrainer(model, settings, train_dataset=dataset, processing_class=tokenizer).train_dataset

    return work, _of_datasets


def llamafactory(job: dict[str, Any]) -> Way:
    """LLaMA-Factory's get_dataset with neat_packing, which keeps the samples of a block apart, as the others
    do."""
    try:
        import torchaudio
    except (
        ImportError,
        OSError,
    ):  # Imported for audio at the top of its data module; the registry has no build for CPUs.
        torchaudio = types.ModuleType("torchaudio")
        torchaudio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = torchaudio
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
    }
    settings = {
        **{"stage": "sft", "do_train": True, "finetuning_type": "full", "model_name_or_path": job["model"]},
        **{"template": "smollm2", "cutoff_len": job["max_length"], "packing": True, "neat_packing": True},
        **{
            "preprocessing_num_workers": job["cores"],
            "overwrite_cache": True,
            "report_to": "none",
            "use_cpu": True,
        },
    }

    def work(rows: str, out: Path) -> Any:
        out.mkdir()
        chats = {
            "file_name": rows,
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": tags,
        }
        (out / "dataset_info.json").write_text(json.dumps({"chats": chats}), encoding="utf-8")
        folders = {"dataset": "chats", "dataset_dir": str(out), "output_dir": str(out / "trainer")}
        of_model, of_data, of_training, _, _ = get_train_args({**settings, **folders})
        loaded = load_tokenizer(of_model)
        template = get_template_and_fix_tokenizer(loaded["tokenizer"], of_data)
        return get_dataset(template, of_model, of_data, of_training, stage="sft", **loaded)["train_dataset"]

    return work, _of_datasets


def axolotl(job: dict[str, Any]) -> Way:
    """`axolotl preprocess`, called in this process; it packs later, while it trains."""
    from axolotl.cli.preprocess import do_cli
    from datasets import load_from_disk

    source = {"ds_type": "json", "type": "chat_template", "field_messages": "messages"}
    settings = {
        **{"base_model": job["model"], "chat_template": "tokenizer_default", "eot_tokens": ["<|im_end|>"]},
        **{"sequence_len": job["max_length"], "sample_packing": True, "dataset_num_proc": job["cores"]},
        **{"micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1, "learning_rate": 1e-4},
        **{"optimizer": "adamw_torch", "bf16": False, "attn_implementation": "sdpa"},
    }

    def work(rows: str, out: Path) -> Any:
        folders = {"output_dir": str(out / "model"), "dataset_prepared_path": str(out / "prepared")}
        out.mkdir()
        config = out / "axolotl.yaml"  # JSON is YAML.
        config.write_text(
            json.dumps({**settings, **folders, "datasets": [{**source, "path": rows}]}), encoding="utf-8"
        )
        sys.argv = [sys.argv[0]]  # It reads options there.
        do_cli(str(config))
        return out / "prepared"

    def tables(prepared: Any) -> Iterator[Any]:
        for folder in prepared.glob("*/dataset_info.json"):
            yield from _of_datasets(load_from_disk(str(folder.parent)))

    return work, tables


def bare(job: dict[str, Any]) -> Way:
    """The fast tokenizer alone, a thousand texts at a time on all cores; reading and rendering are not on the
    clock."""
    import pyarrow
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    fast = Tokenizer.from_file(f"{job['model']}/tokenizer.json")
    batches = {}
    for rows in (job["warm"], job["rows"]):
        with Path(rows).open(encoding="utf-8") as lines:
            texts = [
                tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines
            ]
        batches[rows] = [texts[start : start + 1000] for start in range(0, len(texts), 1000)]

    def work(rows: str, out: Path) -> Any:
        for batch in batches[rows]:
            fast.encode_batch(batch, add_special_tokens=False)
        return batches[rows]

    def tables(of_rows: Any) -> Iterator[Any]:
        for batch in of_rows:
            ids = [found.ids for found in fast.encode_batch(batch, add_special_tokens=False)]
            yield pyarrow.table({"input_ids": ids, "labels": ids})

    return work, tables


WAYS = {way.__name__: way for way in (flytune, trl, llamafactory, axolotl, bare)}
TOLD: dict[str, Any] = {}


def _of_datasets(dataset: Any) -> Iterator[Any]:
    wanted = [name for name in ("input_ids", "labels", "attention_mask") if name in dataset.column_names]
    yield from dataset.select_columns(wanted).with_format("arrow").iter(1000)


def _count(tables: Iterable[Any], tokenizer_json: Path) -> dict[str, int]:
    """Count without padding: samples (each has one system turn), tokens, trained tokens, and the sum of
    ids."""
    import numpy
    from pyarrow.compute import list_flatten
    from tokenizers import Tokenizer

    opening = (
        Tokenizer.from_file(str(tokenizer_json)).encode("<|im_start|>system", add_special_tokens=False).ids
    )
    samples = tokens = trained = checksum = 0
    for table in tables:
        flat = {name: numpy.asarray(list_flatten(table.column(name))) for name in table.schema.names}
        ids, labels = flat["input_ids"].astype("int64"), flat["labels"]
        kept = flat["attention_mask"] != 0 if "attention_mask" in flat else numpy.ones(len(ids), dtype=bool)
        ids, labels = ids[kept], labels[kept]
        samples += int(((ids[:-1] == opening[0]) & (ids[1:] == opening[1])).sum())
        tokens, trained, checksum = (
            tokens + len(ids),
            trained + int((labels != -100).sum()),
            checksum + int(ids.sum()),
        )
    return {"samples": samples, "tokens": tokens, "trained": trained, "checksum": checksum}


def _processor_seconds() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    """Run one way and write its figures to told.json in the job's folder; times are of the machine's
    monotonic clock."""
    begun, (name, text) = time.perf_counter(), sys.argv[1:]
    job = json.loads(text)
    out = Path(job["out"])
    work, tables = WAYS[name](job)
    work(job["warm"], out / "warm")
    used, started = _processor_seconds(), time.perf_counter()
    made = work(job["rows"], out / "made")
    ended = time.perf_counter()
    TOLD.update(started=started, ended=ended, warming=started - begun, cpu=_processor_seconds() - used)
    TOLD.update(_count(tables(made), Path(job["model"]) / "tokenizer.json"))
    (out / "told.json").write_text(json.dumps(TOLD), encoding="utf-8")
    os._exit(0)  # Some ways leave threads that are slow to end.


if __name__ == "__main__":
    main()
