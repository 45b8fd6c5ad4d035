"""What is replaced still needs it: each fault is shown without the replacement. Where one fails, a record may
go."""

import base64
import gzip
import inspect
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flytune.errors import RecipeError
from tests.support.patches import RECORDS

pytestmark = pytest.mark.filterwarnings("ignore:The '__version__' attribute is deprecated:DeprecationWarning")


def upstream(key):
    record = RECORDS[key]
    return record.original() if hasattr(record, "original") else record.current()


def without_a_terminal_a_bar_writes_carriage_returns():
    from tqdm.std import tqdm

    class Plain(tqdm):
        __init__ = upstream("tqdm.BAR")

    log = io.StringIO()
    for _ in Plain(range(3), file=log, mininterval=0):
        pass
    assert "\r" in log.getvalue()


def chunks_are_large():
    assert upstream("trl.LOSS_TILE") > 1024


def a_computed_head_is_gathered(monkeypatch):
    import torch
    from transformers.integrations import deepspeed

    # Imported first: what imports the name meanwhile would keep it.
    gather = upstream("trl.GATHERED_HEAD")
    monkeypatch.setattr(deepspeed, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(AttributeError, match="ds_status"):
        gather(torch.ones(1))


def adapters_follow_their_layer_to_meta():
    import torch
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    added = get_peft_model(model, LoraConfig(target_modules=["0"], r=2))
    assert all(parameter.is_meta for name, parameter in added.named_parameters() if "lora" in name)


def rows_go_to_a_cuda_device():
    assert "cuda" in inspect.getsource(upstream("peft.TOKEN_ROWS"))


def dora_measures_meta_weights():
    import torch
    from peft.tuners.lora.dora import DoraLinearLayer

    meta = torch.nn.Linear(4, 4, device="meta")
    layer = DoraLinearLayer(fan_in_fan_out=False)
    layer.update_layer(base_layer=meta, lora_A=meta.weight, lora_B=meta.weight, scaling=1.0)
    assert layer.weight.is_meta


def tables_are_saved_by_default():
    from peft.utils.save_and_load import get_peft_model_state_dict

    assert inspect.signature(get_peft_model_state_dict).parameters["save_embedding_layers"].default == "auto"


def products_of_experts_refuse_float32():
    import torch

    matrices = torch.empty(2, 16, 16, device="meta")
    with pytest.raises(Exception, match=r"(?i)bf16|bfloat16"):
        torch._grouped_mm(matrices, matrices)


def a_mode_sees_no_resized_storage():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.operations = []

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            self.operations.append(str(operation))
            return operation(*args, **kwargs or {})

    tensor = torch.ones(4)
    with Seen() as seen:
        tensor.untyped_storage().resize_(0)
    assert seen.operations == []


def fake_positions_count_as_packed():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    find = upstream("transformers.PACKED_SAMPLES")
    assert find(torch.arange(4)[None]) is None
    with FakeTensorMode():
        assert find(torch.arange(4)[None]) is not None


def the_trainer_frees_gradients():
    from transformers import Trainer

    assert "model.zero_grad()" in inspect.getsource(Trainer)


def shards_without_rows_have_one_address():
    import torch

    assert torch.empty(0).data_ptr() == torch.empty(0).data_ptr()


def a_uuid_is_no_number(monkeypatch):
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a1b,GPU-9c2d")
    with pytest.raises(ValueError, match="GPU-8a1b"):
        CUDA_Accelerator._get_nvml_gpu_id(object.__new__(CUDA_Accelerator), 0)


def the_hub_s_variable_is_read_at_import(monkeypatch):
    from huggingface_hub import is_offline_mode

    before = is_offline_mode()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0" if before else "1")
    assert is_offline_mode() is before


def the_cache_s_variable_is_read_at_import(monkeypatch, tmp_path):
    import datasets  # noqa: F401 (before the variable is set)

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    assert str(upstream("datasets.CACHE")) != str(tmp_path)


def the_harness_reads_no_as_false():
    import yaml

    assert yaml.load("answer: no", Loader=upstream("lm_eval.YAML_LOADER")(Path(), resolve_funcs=False)) == {
        "answer": False
    }


def equal_values_have_one_key():
    first, second = (upstream("flytekit.CACHE_KEY")({"a": 1}, dict) for _ in range(2))
    assert first == second is not None


def a_text_begins_with_the_traceback():
    assert upstream("flytekit.TRACEBACK")(ValueError("mistake")).startswith("Trace")


def a_mistake_is_shown_with_frames(capsys):
    try:
        raise RecipeError("mistake")
    except RecipeError as error:
        upstream("flytekit.SHOWN_ERROR")(error, 0)
    assert "Traceback" in capsys.readouterr().out


def an_input_is_read_as_yaml_1_1(tmp_path):
    from flytekit.interaction.click_types import JsonParamType

    (tmp_path / "recipe.yaml").write_text("answer: no\n")
    assert upstream("flytekit.JSON_INPUT")(JsonParamType(dict), str(tmp_path / "recipe.yaml"), None) == {
        "answer": False
    }


def flyte_2_reads_an_input_as_yaml_1_1(tmp_path):
    from flyte.cli._params import JsonParamType

    (tmp_path / "recipe.yaml").write_text("answer: no\n")
    assert upstream("flyte.JSON_INPUT")(JsonParamType(dict), str(tmp_path / "recipe.yaml"), None) == {
        "answer": False
    }


def flyte_2_frames_an_error():
    assert type(upstream("flyte.ERROR_PANEL")("Exception", "data[0]: gone")).__name__ == "Panel"


def flyte_2_replaces_file_systems():
    # A process of its own: other tests of this one take the replacement back.
    found = "import flyte.storage, fsspec; print(fsspec.get_filesystem_class('s3').__module__)"
    shown = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[-1] == "obstore.fsspec"


def inputs_are_read_as_yaml_1_1():
    assert upstream("flytekit.INPUTS_FILE").safe_load("answer: no") == {"answer": False}


def a_path_of_a_dataset_is_sent():
    from flytekit.interaction.click_types import StructuredDatasetParamType

    assert (
        upstream("flytekit.DATASET_INPUT")(StructuredDatasetParamType(), "rows.parquet", None, None).uri
        == "rows.parquet"
    )


def the_laptop_s_folder_is_sent():
    from flytekit.configuration import ImageConfig, SerializationSettings

    settings = SerializationSettings(
        ImageConfig.auto_default_image(), "p", "d", git_repo="git.example", source_root="/laptop"
    )
    sent = json.loads(gzip.decompress(base64.b64decode(settings.serialized_context)))
    assert (sent["git_repo"], sent["source_root"]) == ("git.example", "/laptop")


def plain_weights_are_refused():
    import torch

    layer = SimpleNamespace(weight=torch.nn.Parameter(torch.ones(4, 4)))
    with pytest.raises((AssertionError, AttributeError)):
        upstream("bitsandbytes.QUANT_STATE")(layer)


FAULTS = {
    "tqdm.BAR": without_a_terminal_a_bar_writes_carriage_returns,
    "trl.LOSS_TILE": chunks_are_large,
    "trl.GATHERED_HEAD": a_computed_head_is_gathered,
    "torch.MODULE_TO": adapters_follow_their_layer_to_meta,
    "torch.GROUPED_PRODUCT": products_of_experts_refuse_float32,
    "torch.RESIZE": a_mode_sees_no_resized_storage,
    "peft.TOKEN_ROWS": rows_go_to_a_cuda_device,
    "peft.MAGNITUDES": dora_measures_meta_weights,
    "peft.SAVED_TABLES": tables_are_saved_by_default,
    "transformers.PACKED_SAMPLES": fake_positions_count_as_packed,
    "transformers.ZERO_GRAD": the_trainer_frees_gradients,
    "accelerate.EMPTY_SHARD": shards_without_rows_have_one_address,
    "deepspeed.MANAGEMENT_LIBRARY": a_uuid_is_no_number,
    "huggingface_hub.OFFLINE": the_hub_s_variable_is_read_at_import,
    "datasets.CACHE": the_cache_s_variable_is_read_at_import,
    "lm_eval.YAML_LOADER": the_harness_reads_no_as_false,
    "flytekit.CACHE_KEY": equal_values_have_one_key,
    "flytekit.TRACEBACK": a_text_begins_with_the_traceback,
    "flytekit.SHOWN_ERROR": a_mistake_is_shown_with_frames,
    "flytekit.JSON_INPUT": an_input_is_read_as_yaml_1_1,
    "flytekit.INPUTS_FILE": inputs_are_read_as_yaml_1_1,
    "flytekit.DATASET_INPUT": a_path_of_a_dataset_is_sent,
    "flyte.JSON_INPUT": flyte_2_reads_an_input_as_yaml_1_1,
    "flyte.ERROR_PANEL": flyte_2_frames_an_error,
    "fsspec.IMPLEMENTATIONS": flyte_2_replaces_file_systems,
    "flytekit.POD": the_laptop_s_folder_is_sent,
    "bitsandbytes.QUANT_STATE": plain_weights_are_refused,
}
"""By the places of records in the code; the faults of others take a GPU or ranks, and test_table.py compares
the code alone."""


@pytest.mark.parametrize("key", FAULTS)
def test_the_fault_is_still_there(key, request):
    assert key in RECORDS
    show = FAULTS[key]
    show(**{name: request.getfixturevalue(name) for name in inspect.signature(show).parameters})
