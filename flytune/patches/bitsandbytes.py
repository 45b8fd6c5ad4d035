"""Names of bitsandbytes that are replaced."""

from flytune.patches.record import BlockPatch, ObjectPatch

_VERSION = "0.50.2"
_OPTIMIZER = "bitsandbytes.optim.optimizer:Optimizer8bit"
_FAKE = "the layers of a dry run are on fake tensors"

OPTIMIZER_CLASS = ObjectPatch(
    name=f"{_OPTIMIZER}.__class__",
    version=_VERSION,
    reason="the optimizers cannot update DTensors, and a resume puts states that were paged on the GPU",
    upstream=(
        f"{_OPTIMIZER}.get_state_buffer",
        f"{_OPTIMIZER}.prefetch_state",
        f"{_OPTIMIZER}.load_state_dict",
        f"{_OPTIMIZER}.step",
        "bitsandbytes.optim.optimizer:Optimizer2State.update_step",
    ),
    remove_when="they update DTensors, and load paged states into paged memory",
)
QUANT_STATE = BlockPatch(
    name="bitsandbytes.nn.modules:fix_4bit_weight_quant_state_from_module",
    version=_VERSION,
    reason=f"{_FAKE}, whose weights are no 4-bit parameters",
    upstream=(
        "bitsandbytes.nn.modules:fix_4bit_weight_quant_state_from_module",
        "bitsandbytes.nn.modules:Linear4bit.forward",
    ),
    remove_when="4-bit parameters can be made on the meta device",
)
PRODUCT = BlockPatch(
    name="bitsandbytes:matmul_4bit",
    version=_VERSION,
    reason=f"{_FAKE}: a CPU's product has not the workspace of CUDA's, which is counted",
    upstream=("bitsandbytes:matmul_4bit", "bitsandbytes.nn.modules:Linear4bit.forward"),
    remove_when="the product on meta tensors has the workspace of the device that is asked for",
)
TABLES = BlockPatch(
    name="bitsandbytes.functional:name2qmap",
    version=_VERSION,
    reason=f"{_FAKE}, and tables that were made before would mix real tensors with fake ones",
    upstream=("bitsandbytes.functional:create_dynamic_map", "bitsandbytes.functional:quantize_blockwise"),
    remove_when="the tables are kept apart for fake tensors",
)
