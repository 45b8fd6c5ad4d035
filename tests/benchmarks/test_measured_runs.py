import csv
import json

import pytest

from benchmarks import estimates, measured_runs
from benchmarks.frameworks import HF_4_45, TRANSFORMERS_4_45
from flytune.errors import DataError

COLUMNS = """
    id,quality,source,quote,model,params_b,method,lora_r,lora_targets,quant,sharding,offload,nodes,n_gpu,gpu,gpu_gib,
    weight_dtype,mixed,optimizer,seq_len,micro_batch,grad_accum,act_ckpt,attn,ce_kernel,compile,outcome,metric_mem,
    peak_alloc_gib,peak_reserved_gib,mem_note,tok_s_gpu,step_time_s,other,notes
""".replace(",", " ").split()
ROW = {
    "id": "7", "quality": "A", "source": "fms-acceleration", "quote": "row 8", "model": "Mistral-7B", "params_b": "7.2417",
    "method": "lora", "lora_r": "16.0", "lora_targets": "q,k,v,o", "quant": "", "sharding": "none", "nodes": "1", "n_gpu": "1",
    "gpu": "A100-80", "gpu_gib": "80.0", "weight_dtype": "bf16", "mixed": "bf16", "optimizer": "adamw_torch(foreach)",
    "seq_len": "4096.0", "micro_batch": "4.0", "grad_accum": "1", "act_ckpt": "full", "attn": "fa2", "ce_kernel": "hf",
    "outcome": "ok", "metric_mem": "torch.max_memory_allocated + nvidia-smi used", "peak_alloc_gib": "67.46",
    "peak_reserved_gib": "75.45", "tok_s_gpu": "3062.7",
}  # fmt: skip


def table(tmp_path, *changes):
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(ROW | change for change in changes)
    return path


def test_a_row_is_read_into_a_workload_with_what_was_measured(tmp_path):
    ((run,), _) = measured_runs.read(table(tmp_path, {}))
    assert (run.row, run.allocated_gib, run.reserved_gib, run.tokens_per_second) == ("7", 67.46, 75.45, 3062.7)
    assert run.reserved_on_device
    assert run.outcome == "ok"
    work = run.workload
    assert (work.tokens, work.weight_dtype, work.precision, work.layout.name) == (4 * 4096, "bfloat16", "autocast", "none")
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
    ("change", "words"),
    [
        ({"micro_batch": "many"}, "could not convert string to float: 'many'"),
        ({"peak_alloc_gib": "67,46"}, "peak_alloc_gib is '67,46', not a number"),
    ],
)
def test_a_broken_row_is_named_with_its_line(tmp_path, change, words):
    with pytest.raises(DataError) as raised:
        measured_runs.read(table(tmp_path, {}, {"id": "8"} | change))
    assert f"{tmp_path}/table.csv:3: row 8: " in str(raised.value)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "Mistral-9B"}, "model Mistral-9B (add its config to measured_models.json)"),
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
    ],
)
def test_a_row_of_something_unknown_is_left_out_by_name_and_the_others_are_read(tmp_path, change, reason):
    runs, left_out = measured_runs.read(table(tmp_path, {"id": "1"}, {"id": "2"} | change, {"id": "3"}))
    assert [run.row for run in runs] == ["1", "3"]
    assert left_out == [measured_runs.LeftOut("2", reason)]


def test_the_rows_left_out_are_counted_by_reason():
    left_out = [measured_runs.LeftOut(str(row), "act_ckpt selective") for row in range(7)]
    assert measured_runs.describe([measured_runs.LeftOut("9", "quant int3"), *left_out], 20).splitlines() == [
        "8 of 20 rows left out, because the benchmark does not know their",
        "  act_ckpt selective: 7 (row 0, 1, 2, 3, 4 and 2 more)",
        "  quant int3: 1 (row 9)",
    ]
    assert measured_runs.describe([], 20) == ""


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
    with pytest.raises(DataError, match="not a table of measurements: it has no column id, method"):
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
    path = table(tmp_path, {}, full, {"id": "9", "act_ckpt": "selective"})
    monkeypatch.setattr("sys.argv", ["estimates", "--measurements", str(path)])
    monkeypatch.setenv("COLUMNS", "160")
    estimates.main()
    printed = capsys.readouterr().out
    for words in (
        "allocated memory",
        "reserved memory",
        "verdicts",
        "peers",
        "rows off by more than 20%",
        "microseconds",
        "act_ckpt selective: 1",
    ):
        assert words in printed
