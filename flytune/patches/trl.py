"""Names of TRL that are replaced."""

from flytune.patches.record import BlockPatch, ObjectPatch, ProcessPatch

_VERSION = "1.16.0"
_KERNELS = "trl.kernels.chunked_logprob"

LOSS_TILE = ProcessPatch(
    name=f"{_KERNELS}:TOKEN_CHUNK_SIZE",
    version=_VERSION,
    reason="4,096 tokens are meant for a GPU kernel; on a CPU their logits take 4.3 GiB for a vocabulary of "
    "32,768 and more",
    upstream=(f"{_KERNELS}:ChunkedLogProbFunction",),
    remove_when="the number of tokens is an argument, or is small where torch's own operations compute the "
    "tile",
)
_TRAINERS = {
    "trl.trainer.sft_trainer": "SFTTrainer",
    "trl.trainer.dpo_trainer": "DPOTrainer",
    "trl.trainer.kto_trainer": "KTOTrainer",
    "trl.trainer.grpo_trainer": "GRPOTrainer",
    "trl.trainer.reward_trainer": "RewardTrainer",
}
NEW_ADAPTERS = {
    module: BlockPatch(
        name=f"{module}:get_peft_model",
        version=_VERSION,
        reason="the first values of a quantized base's adapter are rounded to bfloat16, whatever the "
        "recipe's dtype",
        upstream=("peft:get_peft_model", f"{module}:{trainer}.__init__"),
        remove_when="a trainer leaves the adapter of a quantized model in the dtype that PEFT made it in",
    )
    for module, trainer in _TRAINERS.items()
}
"""Patches by the module of the trainer that makes the adapter."""
FUSED_HEADS = {
    module: BlockPatch(
        name=f"{module}:add_fused_lm_head",
        version=_VERSION,
        reason="the chunked loss ignores heads, caps and multipliers that it does not know, and adapted or "
        "quantized heads",
        upstream=("trl.trainer.utils:add_fused_lm_head", f"{module}:{trainer}.__init__"),
        remove_when="a trainer takes the function that adds the head, or leaves such models their own logits",
    )
    for module, trainer in _TRAINERS.items()
    if trainer != "RewardTrainer"
}
"""Patches by the module of the trainer that adds the head; a reward model has none."""
OWN_FORWARD = ObjectPatch(
    name="transformers:PreTrainedModel.forward",
    version=_VERSION,
    reason="TRL's trainers ask a model's forward for log-probabilities, and TRL replaces it in the same way",
    upstream=("trl.trainer.utils:add_fused_lm_head", "trl.trainer.utils:FusedCausalLMOutput"),
    remove_when="the replaced `add_fused_lm_head` is not needed any more",
)
GATHERED_HEAD = ProcessPatch(
    name="trl.trainer.utils:maybe_gather_lm_head_ctx",
    version=_VERSION,
    reason="a head of which PEFT trains rows computes its weight: it is complete, and ZeRO-3 fails to gather "
    "it",
    upstream=("trl.trainer.utils:maybe_gather_lm_head_ctx", f"{_KERNELS}:ChunkedLogProbFunction.backward"),
    remove_when="it leaves out parameters without `ds_status`",
)
REFERENCE_MODEL = BlockPatch(
    name="trl.trainer.dpo_trainer:create_model_from_path",
    version=_VERSION,
    reason="DPOTrainer loads a reference model although the rows have the reference's log-probabilities",
    upstream=("trl.trainer.dpo_trainer:DPOTrainer.__init__",),
    remove_when="DPOTrainer takes log-probabilities that its rows have, without loading or hashing a model",
)
REFERENCE_OF_DRAWN = BlockPatch(
    name="trl.trainer.grpo_trainer:create_model_from_path",
    version=_VERSION,
    reason="GRPOTrainer loads a reference model itself, by the name in the trained one's configuration and "
    "in another dtype",
    upstream=("trl.trainer.grpo_trainer:GRPOTrainer.__init__",),
    remove_when="GRPOTrainer takes a reference model, as DPOTrainer does",
)
_TRITON = "a dry run counts the allocations of the GPU's Triton kernels, which do not run on fake tensors"
_NO_TRITON = "the Triton kernels run on fake tensors, or the dry run has another way to count them"
FORWARD_TILE, BACKWARD_TILE, ADD_PRODUCT = (
    BlockPatch(
        name=f"{_KERNELS}:{function}",
        version=_VERSION,
        reason=_TRITON,
        upstream=(f"{_KERNELS}:{function}", f"{_KERNELS}:ChunkedLogProbFunction"),
        remove_when=_NO_TRITON,
    )
    for function in ("_forward_tile", "_backward_tile", "_addmm_fp32")
)
SELECTED_LOSS = BlockPatch(
    name="trl.trainer.utils:_ChunkedLogProbFunction",
    version=_VERSION,
    reason="a dry run counts a copy of all positions where the trained ones depend on values, which fake "
    "tensors lack",
    upstream=("trl.trainer.utils:add_fused_lm_head",),
    remove_when=_NO_TRITON,
)
