"""Names of torch that are replaced."""

from flytune.patches.record import BlockPatch

_VERSION = "2.13.0"

MODULE_TO = BlockPatch(
    name="torch.nn:Module.to",
    version=_VERSION,
    reason="PEFT moves an adapter to the device of its layer; on the meta device its first values would be "
    "lost",
    upstream=(
        "torch.nn:Module.to",
        "peft.tuners.tuners_utils:BaseTunerLayer._move_adapter_to_device_of_base_layer",
    ),
    remove_when="PEFT can leave the adapter of a layer on the meta device where it is",
)
CHECKPOINT_SAVE = BlockPatch(
    name="torch.distributed.checkpoint:save",
    version=_VERSION,
    reason="accelerate writes sharded checkpoints synchronously, and training would wait for the disk",
    upstream=(
        "torch.distributed.checkpoint.state_dict_saver:async_save",
        "accelerate.utils.fsdp_utils:save_fsdp_model",
        "accelerate.utils.fsdp_utils:save_fsdp_optimizer",
    ),
    remove_when="accelerate saves asynchronously",
)
COMPILE = BlockPatch(
    name="torch:compile",
    version=_VERSION,
    reason="bitsandbytes, and Muon of DeepSpeed, ask for compiled functions when they are imported, and "
    "torch then imports its compiler: 500 modules, half a second of processor time; with Inductor, which "
    "Muon asks for, two seconds",
    upstream=(
        "bitsandbytes.backends.default.ops:_try_torch_compile",
        "deepspeed.runtime.compiler:compile",
        "deepspeed.runtime.zero.utils:is_zero_supported_optimizer",
        "torch:_TorchCompileInductorWrapper.__init__",
    ),
    remove_when="both compile at the first call, or torch imports its compiler then",
)
TERMINATION = BlockPatch(
    name="torch.distributed.elastic.multiprocessing.api:_terminate_process_handler",
    version=_VERSION,
    reason="the process that starts the ranks raises an exception wherever a signal interrupts it, in "
    "logging too, whose lock would stay locked; its thread of heartbeats logs, and would be waited for "
    "without an end",
    upstream=(
        "torch.distributed.elastic.multiprocessing.api:_terminate_process_handler",
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler._stop_heartbeats",
    ),
    remove_when="Python 3.13 is the oldest that runs it, whose logging acquires its locks by `with`",
)
DROPOUT = BlockPatch(
    name="torch.nn.functional:dropout",
    version=_VERSION,
    reason="a dry run counts CUDA's dropout: its mask has a byte for each number, a CPU's has the tensor's "
    "dtype",
    upstream=("torch.nn.functional:dropout",),
    remove_when="dropout on meta tensors makes the mask of the device that is asked for",
)
GROUPED_PRODUCT = BlockPatch(
    name="torch._meta_registrations:_meta_grouped_mm_common",
    version=_VERSION,
    reason="the shape function of experts' products refuses float32, which the kernels compute",
    upstream=(
        "torch._meta_registrations:_meta_grouped_mm_common",
        "torch._meta_registrations:_create_grouped_mm_output_tensor",
    ),
    remove_when="it takes all dtypes that the kernels take",
)
RESIZE = BlockPatch(
    name="torch:UntypedStorage.resize_",
    version=_VERSION,
    reason="FSDP frees and allocates gathered parameters by resizing storages, which no dispatch mode sees",
    upstream=(
        "torch.distributed.fsdp._fully_shard._fsdp_param:alloc_storage",
        "torch.distributed.fsdp._fully_shard._fsdp_param:free_storage",
    ),
    remove_when="a mode or a hook sees resized storages",
)
PROPAGATED_SHAPE = BlockPatch(
    name="torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    version=_VERSION,
    reason="DTensor finds shapes by running operations on fake tensors of the full size, which a dry run "
    "would count",
    upstream=(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    ),
    remove_when="its fake tensors can be told from those of the run",
)
FSDP_MESH = BlockPatch(
    name="torch.distributed.fsdp._fully_shard._fsdp_init:init_device_mesh",
    version=_VERSION,
    reason="fully_shard makes a mesh where it gets none, and the mesh reads ranks that a dry run's fake "
    "group lacks",
    upstream=("torch.distributed.fsdp._fully_shard._fsdp_init:_init_default_fully_shard_mesh",),
    remove_when="a mesh of a fake group reads no tensors; or every unit gets its mesh as an argument",
)
