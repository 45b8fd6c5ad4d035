"""Names of DeepSpeed that are replaced."""

from flytune.patches.record import ObjectPatch, ProcessPatch

_VERSION = "0.19.8"

MANAGEMENT_LIBRARY = ProcessPatch(
    name="deepspeed.accelerator.cuda_accelerator:pynvml",
    version=_VERSION,
    reason="where nvidia-ml-py is installed, DeepSpeed asks it for free memory, and fails for GPUs that are "
    "named by UUID",
    upstream=(
        "deepspeed.accelerator.cuda_accelerator:CUDA_Accelerator._get_nvml_gpu_id",
        "deepspeed.accelerator.cuda_accelerator:CUDA_Accelerator.available_memory",
    ),
    remove_when="`_get_nvml_gpu_id` takes UUIDs",
)
SHARED_MEMORY = ProcessPatch(
    name="deepspeed.ops:__compatible_ops__[deepspeed_shm_comm]",
    version=_VERSION,
    reason="on a CPU each process compiles the operator at its start: 18 s, and a stale lock makes it wait "
    "for ever",
    upstream=("deepspeed.comm.torch:build_shm_op", "deepspeed.comm.torch:TorchBackend.__init__"),
    remove_when="a variable or an argument turns the operator off",
)
ENGINE_STEP = ObjectPatch(
    name="deepspeed:DeepSpeedEngine.step",
    version=_VERSION,
    reason="the engine clips and updates within the Trainer's last backward pass: the time of its update is "
    "measured here",
    upstream=("accelerate.utils.deepspeed:DeepSpeedEngineWrapper.backward",),
    remove_when="accelerate updates where the Trainer calls `optimizer.step`",
)
