import csv
import io
import json
from statistics import median

import pytest
from rich.console import Console

from benchmarks import estimates, measured_runs
from benchmarks.frameworks import HF_4_45, LITGPT, TORCHTUNE, TRANSFORMERS, TRANSFORMERS_4_45, with_loss
from flytune.errors import DataError

COLUMNS = """
    id,quality,source,quote,framework,model,params_b,method,lora_r,lora_targets,quant,sharding,offload,nodes,n_gpu,gpu,gpu_gib,
    weight_dtype,mixed,optimizer,seq_len,micro_batch,grad_accum,act_ckpt,attn,ce_kernel,compile,outcome,metric_mem,
    peak_alloc_gib,peak_reserved_gib,mem_note,tok_s_gpu,step_time_s,other,notes
""".replace(",", " ").split()
ROW = {
    "id": "7",
    "quality": "A",
    "source": "fms-acceleration",
    "quote": "row 8",
    "model": "Mistral-7B",
    "params_b": "7.2417",
    "method": "lora",
    "lora_r": "16.0",
    "lora_targets": "q,k,v,o",
    "quant": "",
    "sharding": "none",
    "nodes": "1",
    "n_gpu": "1",
    "gpu": "A100-80",
    "gpu_gib": "80.0",
    "weight_dtype": "bf16",
    "mixed": "bf16",
    "optimizer": "adamw_torch(foreach)",
    "seq_len": "4096.0",
    "micro_batch": "4.0",
    "grad_accum": "1",
    "act_ckpt": "full",
    "attn": "fa2",
    "ce_kernel": "hf",
    "outcome": "ok",
    "metric_mem": "torch.max_memory_allocated + nvidia-smi used",
    "peak_alloc_gib": "67.46",
    "peak_reserved_gib": "75.45",
    "tok_s_gpu": "3062.7",
}


def table(tmp_path, *changes):
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(ROW | change for change in changes)
    return path


def test_a_row_is_read_into_a_workload_with_what_was_measured(tmp_path):
    ((run,), _) = measured_runs.read(table(tmp_path, {}))
    assert (run.row, run.allocated_gib, run.reserved_gib, run.tokens_per_second) == (
        "7",
        67.46,
        75.45,
        3062.7,
    )
    assert run.reserved_on_device
    assert run.outcome == "ok"
    work = run.workload
    assert (work.tokens, work.weight_dtype, work.precision, work.layout.name) == (
        4 * 4096,
        "bfloat16",
        "autocast",
        "none",
    )
    assert work.framework == TRANSFORMERS_4_45
    assert work.framework.loss == HF_4_45
    assert work.optimizer.implementation == "foreach"
    # r x (in + out): q and o are 4096 x 4096, k and v 4096 x 1024, in 32 layers.
    assert work.trained == 32 * 16 * (2 * 8192 + 2 * 5120)


def test_the_optimizers_words_are_read(tmp_path):
    ((run,), _) = measured_runs.read(table(tmp_path, {"optimizer": "PagedAdamW8bit in backward"}))
    optimizer = run.workload.optimizer
    assert (optimizer.state_bytes, optimizer.in_backward, optimizer.paged) == (2.0, True, True)


def test_a_row_without_sizes_has_no_workload(tmp_path):
    ((run,), _) = measured_runs.read(table(tmp_path, {"seq_len": "", "micro_batch": ""}))
    assert run.workload is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"model": "Mistral-9B"},
            "model Mistral-9B (add its config to measured_models.json, or name a folder: --models)",
        ),
        ({"model": ""}, "model (empty) (add its config to measured_models.json, or name a folder: --models)"),
        ({"params_b": "7.0"}, "model Mistral-7B of 7.0000 billion parameters (its config has 7.2417)"),
        ({"act_ckpt": "selective"}, "act_ckpt selective"),
        ({"optimizer": "adafactor"}, "optimizer adafactor"),
        ({"optimizer": "adamw_torch_4bit"}, "optimizer adamw_torch_4bit"),
        ({"quant": "int3"}, "quant int3"),
        ({"sharding": "zero9"}, "sharding zero9"),
        ({"method": "dora"}, "method dora"),
        ({"lora_targets": "all-linear"}, "lora_targets all-linear"),
        ({"attn": "xformers"}, "attn xformers"),
        ({"offload": "tape"}, "offload tape"),
        ({"mixed": "fp8"}, "mixed fp8"),
        ({"weight_dtype": ""}, "weight_dtype (empty)"),
        ({"ce_kernel": "other"}, "ce_kernel other"),
        ({"outcome": "perhaps"}, "outcome perhaps"),
        ({"outcome": "", "peak_alloc_gib": "", "peak_reserved_gib": "", "tok_s_gpu": ""}, "outcome (empty)"),
        ({"method": ""}, "method (empty)"),
        ({"method": "qlora"}, "method qlora with quant (empty)"),
        ({"quant": "nf4"}, "method lora with quant nf4"),
        ({"source": "a page", "framework": "MaxText"}, "framework MaxText"),
        ({"source": "a page", "framework": ""}, "framework (empty)"),
        ({"n_gpu": ""}, "n_gpu (empty)"),
        ({"n_gpu": "eight"}, "n_gpu eight is not a number"),
        ({"n_gpu": "2", "nodes": "4"}, "n_gpu 2 on 4 nodes"),
        ({"micro_batch": "many"}, "micro_batch many is not a number"),
        ({"micro_batch": "0"}, "micro_batch 0 is not a positive number"),
        ({"micro_batch": "1.5"}, "micro_batch 1.5 is not a whole number"),
        ({"seq_len": "-4096"}, "seq_len -4096 is not a positive number"),
        ({"grad_accum": "nan"}, "grad_accum nan is not a positive number"),
        ({"peak_alloc_gib": "67,46"}, "peak_alloc_gib 67,46 is not a number"),
        ({"peak_reserved_gib": "inf"}, "peak_reserved_gib inf is not a positive number"),
        ({"gpu_gib": "80GB"}, "gpu_gib 80GB is not a number"),
        ({"params_b": "7B"}, "params_b 7B is not a number"),
    ],
)
def test_a_row_of_something_unknown_is_left_out_by_name_and_the_others_are_read(tmp_path, change, reason):
    runs, left_out = measured_runs.read(table(tmp_path, {"id": "1"}, {"id": "2"} | change, {"id": "3"}))
    assert [run.row for run in runs] == ["1", "3"]
    assert left_out == [measured_runs.LeftOut("2", reason)]


def test_the_rows_left_out_are_counted_by_reason():
    left_out = [measured_runs.LeftOut(str(row), "act_ckpt selective") for row in range(7)]
    made = measured_runs.left_out_table([measured_runs.LeftOut("9", "quant [int3]"), *left_out], 20)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(made)
    title, _, _, _, selective, other, *_ = console.export_text().splitlines()
    assert title.startswith("8 of 20 rows left out")
    assert [cell.strip() for cell in selective.split("│")[1:-1]] == [
        "act_ckpt selective",
        "7",
        "0, 1, 2, 3, 4 and 2 more",
    ]
    assert [cell.strip() for cell in other.split("│")[1:-1]] == ["quant [int3]", "1", "9"]


def test_numbers_may_be_written_as_floats_and_cells_that_have_a_default_may_be_empty(tmp_path):
    odd = {
        "n_gpu": "2.0",
        "nodes": "",
        "grad_accum": "4.0",
        "params_b": "",
        "quality": "",
        "outcome": "",
        "gpu": " H100-80 ",
    }
    ((run,), left_out) = measured_runs.read(table(tmp_path, odd))
    assert left_out == []
    assert (run.workload.gpus, run.workload.nodes, run.workload.accumulation, run.outcome, run.gpu) == (
        2,
        1,
        4,
        "ok",
        "H100-80",
    )


def test_columns_may_be_missing_others_may_be_added_and_rows_may_be_short_or_long(tmp_path):
    path = tmp_path / "table.csv"
    kept = ["model", "method", "source", "n_gpu", "weight_dtype", "seq_len", "micro_batch", "peak_alloc_gib"]
    values = [ROW[name] for name in kept]
    lines = [[*kept, "colour"], [*values, "red"], values, [*values, "red", "blue"], [""] * 9, values[:5]]
    path.write_text("\ufeff" + "\r\n".join(",".join(line) for line in lines), encoding="utf-8")
    runs, left_out = measured_runs.read(path)
    assert [run.row for run in runs] == ["line 2", "line 3"]
    assert left_out == [
        measured_runs.LeftOut("line 4", "more cells than the table has columns"),
        measured_runs.LeftOut("line 6", "outcome (empty)"),
    ]


@pytest.mark.parametrize(
    ("words", "framework"),
    [
        ("HF SFTTrainer trl", TRANSFORMERS_4_45),
        ("LLaMA-Factory (HF Trainer tf4.45)", TRANSFORMERS_4_45),
        ("axolotl, transformers 5.23", TRANSFORMERS),
        ("litgpt (Fabric)", LITGPT),
        ("torchtune 0.6", TORCHTUNE),
    ],
)
def test_the_framework_of_another_source_is_known_by_its_name(tmp_path, words, framework):
    ((run,), _) = measured_runs.read(table(tmp_path, {"source": "a page", "framework": words}))
    assert run.workload.framework == with_loss(framework, "hf")


def test_models_are_added_by_a_folder_of_config_files(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_runs, "_ADDED", {})
    config = json.loads(measured_runs.MODELS.read_text())["Mistral-7B"]
    (tmp_path / "models" / "owner" / "Mine-7B").mkdir(parents=True)
    (tmp_path / "models" / "owner" / "Mine-7B" / "config.json").write_text(json.dumps(config))
    (tmp_path / "models" / "Other-7B.json").write_text(json.dumps(config))
    (tmp_path / "models" / "Broken-7B.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    measured_runs.use_models(tmp_path / "models")
    changes = [{"id": name, "model": name} for name in ("owner/Mine-7B", "Other-7B", "Broken-7B")]
    runs, left_out = measured_runs.read(table(tmp_path, *changes))
    assert [run.row for run in runs] == ["owner/Mine-7B", "Other-7B"]
    ((name, reason),) = [(one.row, one.reason) for one in left_out]
    assert name == "Broken-7B"
    assert reason.startswith("model Broken-7B: ")
    with pytest.raises(DataError, match="has no <name>.json"):
        measured_runs.use_models(tmp_path / "nothing")


def test_the_table_of_the_repository_is_read_completely_and_each_row_says_where_it_is_from():
    runs, left_out = measured_runs.read()
    assert (len(runs), left_out) == (508, [])
    assert all(run.source and run.quote and run.quality in ("A", "B", "C") for run in runs)
    assert {run.source for run in runs} >= set(measured_runs.FRAMEWORKS)


def test_a_model_that_flytune_ships_is_found_by_its_name():
    assert measured_runs.model("Qwen/Qwen3-8B").parameters == measured_runs.model("Qwen3-8B").parameters > 8e9


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="not a table of measurements: it has no column method, model"):
        measured_runs.read(path)
    path.write_bytes(b"model,method\n\xff\xfe,full\n")
    with pytest.raises(DataError, match="it is not UTF-8 text"):
        measured_runs.read(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        measured_runs.read(tmp_path / "none.csv")


def test_every_model_of_the_file_can_be_read():
    for name in json.loads(measured_runs.MODELS.read_text()):
        assert measured_runs.model(name).parameters > 1e8


def test_the_benchmark_prints_errors_verdicts_peers_and_rows_far_off(tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    monkeypatch.setattr(estimates.estimators, "deepspeed", lambda workload: None)  # Its import takes seconds.
    monkeypatch.setattr(estimates, "TIMED_CALLS", 10)
    full = {"id": "8", "method": "full", "lora_r": "", "lora_targets": "", "outcome": "oom"}
    odd = [
        {"id": "9", "act_ckpt": "selective"},
        {"id": "10", "model": "Unknown-3B"},
        {"id": "11", "seq_len": ""},
    ]
    path = table(tmp_path, {}, full, *odd)
    monkeypatch.setattr("sys.argv", ["estimates", "--table", str(path)])
    estimates.main()
    printed = capsys.readouterr().out
    for words in (
        "allocated memory",
        "reserved memory",
        "verdicts",
        "peers",
        "rows off by more than 20%",
        "microseconds",
        "3 of 5 rows left out",
        "act_ckpt selective",
        "model Unknown-3B",
        "seq_len or micro_batch (empty)",
    ):
        assert words in printed


def test_a_table_without_a_row_that_can_be_judged_still_has_its_rows_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["estimates", "--table", str(table(tmp_path, {"act_ckpt": "selective"}))])
    with pytest.raises(SystemExit, match="no row can be judged"):
        estimates.main()
    assert "act_ckpt selective" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("figure", "middle", "most"), [("allocated", 0.01, 0.051), ("reserved", 0.036, 0.125)]
)
@pytest.mark.parametrize("held_out", [False, True])
def test_errors_of_runs_with_one_shape_stay_what_they_were(figure, middle, most, held_out):
    """Bounds of docs/measured/memory.md, on the rows that constants were fitted on and on those that were
    held out."""
    judged, _ = estimates.estimable(measured_runs.read()[0])
    pairs = [
        estimates.estimates(run, table).get(figure)
        for run, table in judged
        if not run.workload.variable_length and estimates.held_out(run.row) == held_out
    ]
    errors = sorted(estimates.error(pair) for pair in pairs if pair)
    assert median(errors) <= middle
    assert errors[int(0.9 * len(errors))] <= most


def test_a_row_whose_estimate_fails_is_named(tmp_path, monkeypatch):
    def fail(_):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(estimates.memory, "memory", fail)
    runs, _ = measured_runs.read(table(tmp_path, {}))
    assert estimates.estimable(runs) == (
        [],
        [measured_runs.LeftOut("7", "the estimate fails (ZeroDivisionError: division by zero)")],
    )
