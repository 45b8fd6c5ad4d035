"""DeepSpeed configurations: the keys that the plan reads, with DeepSpeed's defaults (0.19.8), and those that
are passed on.

No key but nvme_path names a place: DeepSpeed makes folders and overwrites files wherever a configuration
tells it to.

DeepSpeed refuses unknown keys of `zero_optimization`, `fp16` and `bf16`, ignores them everywhere else, and
drops every `auto` that nothing has filled in. A key that is not here is therefore refused: nothing would use
it, or the plan would not count it.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, ValidationError, create_model
from pydantic_core import PydanticKnownError

from flytune import limits
from flytune.mistakes import mistakes
from flytune.recipe import Recipe
from flytune.schema import Strict


def _number(value: Any) -> Any:
    if isinstance(value, str) and value != "auto":
        raise PydanticKnownError("float_type")
    return value


Auto = Literal["auto"]
_LARGEST = 10**15
"""Largest number; 1e14 is used for "all parameters" of a threshold."""
Count = Annotated[int, Field(ge=0, le=_LARGEST), BeforeValidator(_number)]
More = Annotated[Count, Field(gt=0)]
Real = Annotated[float, Field(ge=0, le=_LARGEST), BeforeValidator(_number)]
Device = Literal["none", "cpu", "nvme"]
Collective = Literal[
    "broadcast",
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_base",
    "gather",
    "scatter",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_base",
    "all_gather_coalesced",
    "all_to_all",
    "all_to_all_single",
    "send",
    "recv",
    "isend",
    "irecv",
    "barrier",
]
"""Operations of DeepSpeed's communication that its log may be limited to."""
_MOST_SCALE_POWER = 32
"""Largest initial scale of float16, as a power of 2; DeepSpeed's own overflows above 62."""

_UNPLANNED = "the plan does not count what it changes; remove it"
_REMOVED = "DeepSpeed 0.19 has removed it; delete the key"
_OURS = "Flytune does this itself"
_TRACKERS = "write tracking.report_to into the recipe"
_REFUSED = {
    _REMOVED: """
        nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention
        elasticity graph_harvesting curriculum_learning progressive_layer_drop mics_shard_size
        mics_hierarchical_params_gather zeropp_loco_param
        """,
    _UNPLANNED: """
        zenflow zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients super_offload cpuadam_cores_perc ratio legacy_stage1 elastic_checkpoint
        bf16_master_weights_and_grads bf16_optimizer_states fp16_master_weights_and_grads
        immediate_grad_update data_types torch_autocast tensor_parallel expert_parallel hybrid_engine pipeline
        weight_quantization compile stage3_model_persistence_threshold pipeline_loading_checkpoint
        save_muon_momentum_buffer_in_memory leaf_module use_gds
        """,
    _TRACKERS: "tensorboard wandb csv_monitor comet",
}
_ELSEWHERE = {name: advice for advice, names in _REFUSED.items() for name in names.split()} | {
    "activation_checkpointing": "only models that call DeepSpeed's own use it; write "
    "training.activation_checkpointing",
    "checkpoint": f"{_OURS}: write checkpoints into the recipe",
    "data_efficiency": f"{_OURS}: the recipe's data section says which samples are read",
    "autotuning": "run `flytune plan --shape auto` instead",
    "dataloader_drop_last": "no batch is short: the plan's batches divide the samples",
    "bfloat16": "write bf16",
    "cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": "write pin_memory into offload_optimizer and offload_param",
    "stage3_gather_fp16_weights_on_model_save": "write stage3_gather_16bit_weights_on_model_save",
    "auto_cast": "the Trainer casts inputs itself; remove it",
    "output_file": "DeepSpeed would overwrite the file; remove it, and the profile is in the log",
}


def _passed_on(switches: str, counts: str = "", positive: str = "") -> Any:
    """Return a model of keys that DeepSpeed alone reads: their types are checked, and their defaults stay
    DeepSpeed's."""
    fields: dict[str, Any] = dict.fromkeys(switches.split(), (StrictBool, None))
    fields |= dict.fromkeys(counts.split(), (Count, None))
    fields |= dict.fromkeys(positive.split(), (More, None))
    return create_model("PassedOn", __base__=Strict, __module__=__name__, **fields)


class OffloadOptimizer(_passed_on("pin_memory pipeline_read pipeline_write fast_init")):  # type: ignore[misc]
    """Offload of optimizer states."""

    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: More = 4


class OffloadParam(_passed_on("pin_memory")):  # type: ignore[misc]
    """Offload of parameters, of stage 3."""

    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: More = 5
    buffer_size: More = 100_000_000
    max_in_cpu: Count = 1_000_000_000


_ZERO_SWITCHES = """
    contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions
    load_from_fp32_weights stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
    ignore_unused_parameters round_robin_gradients parameter_alignment memory_efficient_linear
    override_module_apply log_trace_cache_warnings enable_sanity_checks
    """
_ZERO_COUNTS = "stage3_max_reuse_distance stage3_module_granularity_threshold"


class ZeroOptimization(_passed_on(_ZERO_SWITCHES, _ZERO_COUNTS)):  # type: ignore[misc]
    """ZeRO's stage and its sizes, in elements."""

    stage: Literal[1, 2, 3]
    reduce_bucket_size: More | Auto = 500_000_000
    allgather_bucket_size: Annotated[Count, Field(multiple_of=2)] = 500_000_000
    overlap_comm: StrictBool | None = None
    compute_grad_norm: StrictBool = True
    offload_param: OffloadParam = OffloadParam()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    sub_group_size: Count = 1_000_000_000
    stage3_prefetch_bucket_size: Count | Auto = 50_000_000
    stage3_param_persistence_threshold: Count | Auto = 100_000
    stage3_max_live_parameters: Count = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: StrictBool | None = None

    @property
    def overlaps(self) -> bool:
        """True if gradients are reduced while backward computes; DeepSpeed's default is stage 3 alone."""
        return self.stage == 3 if self.overlap_comm is None else self.overlap_comm


class Bf16(_passed_on("check_grad_overflow")):  # type: ignore[misc]
    """Computation in bfloat16."""

    enabled: StrictBool | Auto = "auto"


class Fp16(_passed_on("consecutive_hysteresis", "hysteresis", "loss_scale_window min_loss_scale")):  # type: ignore[misc]
    """Computation in float16, with loss scaling."""

    enabled: StrictBool | Auto = "auto"
    loss_scale: Real = 0
    initial_scale_power: Annotated[Count, Field(le=_MOST_SCALE_POWER)] = 16


class NamedBlock(Strict):
    """An optimizer or a schedule: its name and parameters."""

    type: str
    params: dict[str, Any] = Field(default={})


class CommsLogger(_passed_on("enabled prof_all verbose debug")):  # type: ignore[misc]
    """Log of the collectives."""

    prof_ops: list[Collective] = Field(default=[], max_length=limits.LISTED)


class FlopsProfiler(_passed_on("enabled detailed", "profile_step top_modules")):  # type: ignore[misc]
    """Print of the operations of a step. DeepSpeed would overwrite any file that output_file names."""

    recompute_fwd_factor: Real = 0
    module_depth: Annotated[int, Field(ge=-1, le=limits.LISTED), BeforeValidator(_number)] = -1


class Aio(_passed_on("single_submit overlap_events", positive="block_size queue_depth intra_op_parallelism")):  # type: ignore[misc]
    """Asynchronous reads and writes of the NVMe disk."""


_SWITCHES = """
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown dump_state
    """


class DeepSpeedConfig(_passed_on(_SWITCHES)):  # type: ignore[misc]
    """A DeepSpeed configuration. Keys that it leaves out and the recipe decides have the recipe's values."""

    elsewhere: ClassVar = _ELSEWHERE
    train_batch_size: Count | Auto = "auto"
    train_micro_batch_size_per_gpu: Count | Auto = "auto"
    gradient_accumulation_steps: Count | Auto = "auto"
    gradient_clipping: Real | Auto = "auto"
    zero_optimization: ZeroOptimization
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    optimizer: NamedBlock | None = None
    scheduler: NamedBlock | None = None
    aio: Aio = Aio()
    communication_data_type: Literal["fp16", "bf16", "fp32"] | None = None
    gradient_predivide_factor: Annotated[Real, Field(gt=0)] = 1.0
    prescale_gradients: StrictBool = False
    steps_per_print: More | None = None
    comms_logger: CommsLogger = CommsLogger()
    flops_profiler: FlopsProfiler = FlopsProfiler()


_DIVISORS = ("gradient_predivide_factor", "prescale_gradients")
"""Keys that say when the sum of gradients is divided."""
_BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


def problems(content: dict[str, Any], recipe: Recipe, optimizer: str, stage: int) -> list[str]:
    """List what is unknown, wrong or contradicts the recipe in a configuration, a line each.

    Args:
        optimizer: the optimizer of the run, in transformers' spelling.
        stage: the stage that the recipe's sharding names.
    """
    # DeepSpeed and accelerate take an `auto` that nothing fills in as its default.
    try:
        config = DeepSpeedConfig.model_validate(content)
    except ValidationError as error:
        return [f"sharding.config: {line}" for line in mistakes(error, DeepSpeedConfig)]
    training, zero, dtype = recipe.training, config.zero_optimization, recipe.model.dtype
    pairs: list[tuple[str, Any, str, Any]] = [
        ("zero_optimization.stage", zero.stage, f"sharding: {recipe.sharding.name}", stage),
        (
            "train_batch_size",
            config.train_batch_size,
            "training.global_batch_size",
            training.global_batch_size,
        ),
        ("gradient_clipping", config.gradient_clipping, "training.max_grad_norm", training.max_grad_norm),
        ("bf16.enabled", config.bf16.enabled, f"model.dtype: {dtype}", dtype == "bfloat16"),
        ("fp16.enabled", config.fp16.enabled, f"model.dtype: {dtype}", dtype == "float16"),
    ]
    sentences = [
        f"{key}: {_json(theirs)}, but the recipe has {name}"
        + ("" if ": " in name else f": {_json(ours)}")
        + f'; write "auto" for {key}, or change one of them'
        for key, theirs, name, ours in pairs
        if theirs not in ("auto", ours)
    ]
    if zero.stage < 3 and zero.offload_param.device != "none":
        sentences.append(
            f"zero_optimization.offload_param: stage {zero.stage} ignores it; only stage 3 shards parameters"
        )
    if not zero.compute_grad_norm:
        sentences.append(
            "zero_optimization.compute_grad_norm: false turns clipping off, and training.max_grad_norm asks "
            "for it"
        )
    if zero.stage > 1 and zero.reduce_scatter is not False:
        changed = [
            name for name in _DIVISORS if getattr(config, name) != DeepSpeedConfig.model_fields[name].default
        ]
        sentences += [
            f"{name}: DeepSpeed's stage {zero.stage} takes it only with reduce_scatter: false; remove it"
            for name in changed
        ]
    fixed = [name for name in _BATCH_KEYS if getattr(config, name) != "auto"]
    if training.auto_find_batch_size and set(fixed) - {"train_batch_size"}:
        sentences.append(
            f"{', '.join(sorted(fixed))}: a number, but training.auto_find_batch_size may halve the batch; "
            "write auto"
        )
    if (
        zero.stage == 3
        and zero.stage3_gather_16bit_weights_on_model_save is False
        and recipe.checkpoints.save_steps
    ):
        sentences.append(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save: false, but checkpoints.save_steps "
            "writes checkpoints that need the weights; write true, or leave it out"
        )
    return [
        f"sharding.config: {line}"
        for line in [*sentences, *_optimizer(config, recipe, optimizer), *_scheduler(config, recipe)]
    ]


def _json(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _optimizer(config: DeepSpeedConfig, recipe: Recipe, optimizer: str) -> list[str]:
    """List how the optimizer contradicts the recipe's, which trains: the Trainer makes it, and DeepSpeed
    shards its states."""
    if (block := config.optimizer) is None:
        return []
    training = recipe.training
    ours = {
        "lr": ("training.learning_rate", training.learning_rate),
        "weight_decay": ("training.weight_decay", training.weight_decay),
        "betas": ("training.adam_beta1 and training.adam_beta2", [training.adam_beta1, training.adam_beta2]),
        "eps": ("training.adam_epsilon", training.adam_epsilon),
    }
    sentences = []
    if block.type.lower() != "adamw" or "adamw" not in optimizer:
        sentences.append(
            f"optimizer.type: {block.type}, but the recipe's training.optim is {optimizer}; remove one of "
            "them"
        )
    for key, value in block.params.items():
        if key not in ours:
            sentences.append(f"optimizer.params.{key}: unknown; known are {', '.join(ours)}")
        elif value not in ("auto", ours[key][1]):
            name, asked = ours[key]
            sentences.append(
                f'optimizer.params.{key}: {value}, but the recipe has {name}: {asked}; write "auto"'
            )
    return sentences


_SCHEDULES = {
    "WarmupLR": ("constant_with_warmup", "constant"),
    "WarmupDecayLR": ("linear",),
    "WarmupCosineLR": ("cosine",),
}
"""Schedules of transformers that DeepSpeed's are, with a linear warm-up."""


def _scheduler(config: DeepSpeedConfig, recipe: Recipe) -> list[str]:
    """List how the schedule contradicts the recipe's, which trains."""
    if (block := config.scheduler) is None:
        return []
    training, params = recipe.training, block.params
    same = _SCHEDULES.get(block.type)
    has = f"the recipe has training.lr_scheduler_type: {training.lr_scheduler_type}"
    if same is None:
        return [
            f"scheduler.type: {block.type}, but {has}; remove one of them (known are {', '.join(_SCHEDULES)})"
        ]
    sentences = []
    if training.lr_scheduler_type not in same:
        sentences.append(f"scheduler.type: {block.type}, but {has}; write {same[0]}, or remove the scheduler")
    warms = training.warmup_steps > 0 and training.lr_scheduler_type != "constant"
    if warms and params.get("warmup_type", "log") != "linear":
        sentences.append(
            f"scheduler.params.warmup_type: {params.get('warmup_type', 'log')} (log is DeepSpeed's default), "
            f"but the recipe has training.warmup_steps: {training.warmup_steps:g}, which are linear; write "
            '"warmup_type": "linear"'
        )
    steps = {"warmup_num_steps": training.warmup_steps, "total_num_steps": training.max_steps}
    ours = {
        "warmup_min_lr": 0,
        "warmup_max_lr": training.learning_rate,
        "warmup_min_ratio": 0,
        "cos_min_ratio": 0,
    } | steps
    for key, value in params.items():
        if key == "warmup_type":
            continue
        if key not in ours:
            sentences.append(f"scheduler.params.{key}: unknown; known are warmup_type, {', '.join(ours)}")
        elif value not in ("auto", ours[key]):
            sentences.append(
                f'scheduler.params.{key}: {value}, but the recipe\'s is {ours[key]}; write "auto"'
            )
    if block.type == "WarmupCosineLR" and params.get("cos_min_ratio", 1e-4) not in ("auto", 0):
        sentences.append(
            "scheduler.params.cos_min_ratio: 0.0001 by default, but the recipe's schedule ends at 0; write 0"
        )
    return sentences


def filled(content: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return a valid configuration as the Trainer takes it: what the recipe decides is `auto`, which the
    Trainer fills in.

    The optimizer and the schedule are the recipe's, which they equal.
    """
    filled = {name: value for name, value in content.items() if name not in ("optimizer", "scheduler")}
    for name in (*_BATCH_KEYS, "gradient_clipping"):
        filled.setdefault(name, "auto")
    if recipe.sharding.sequence_parallel > 1:
        # DeepSpeed's counts each sample once for each process that shares it; the recipe's has been compared.
        filled["train_batch_size"] = "auto"
    for name in ("bf16", "fp16"):
        filled[name] = {"enabled": "auto"} | filled.get(name, {})
    filled.setdefault("zero_allow_untested_optimizer", True)
    zero = dict(filled["zero_optimization"])
    if zero["stage"] == 3:
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    for part in ("offload_optimizer", "offload_param"):
        if part in zero:
            zero[part] = dict(zero[part])
    # Numbers of elements may be written as 5e8, which DeepSpeed slices tensors with.
    zero = {name: int(value) if isinstance(value, float) else value for name, value in zero.items()}
    return filled | {"zero_optimization": zero}
