"""Names of PEFT that are replaced."""

from flytune.patches.record import BlockPatch, ObjectPatch

_VERSION = "0.21.2"

MAGNITUDES = BlockPatch(
    name="peft.tuners.lora.dora:DoraLinearLayer.update_layer",
    version=_VERSION,
    reason="DoRA measures the base's weights, which are on the meta device until their shards are read",
    upstream=("peft.tuners.lora.dora:DoraLinearLayer.update_layer",),
    remove_when="it makes an empty magnitude for weights on the meta device",
)
TOKEN_ROWS = BlockPatch(
    name="peft.tuners.trainable_tokens:TrainableTokensLayer._collect_token_weights",
    version=_VERSION,
    reason="it puts rows of a table that ZeRO-3 has partitioned on a CUDA device, also in a process that has "
    "none",
    upstream=("peft.tuners.trainable_tokens:TrainableTokensLayer._collect_token_weights",),
    remove_when="it asks the weight for its device",
)
SAVED_TABLES = ObjectPatch(
    name="peft:PeftModel.save_pretrained",
    version=_VERSION,
    reason="PEFT stores the frozen embedding and head in each checkpoint where the base's vocabulary has "
    "grown",
    upstream=("peft.utils.save_and_load:get_peft_model_state_dict", "transformers.trainer:Trainer._save"),
    remove_when="the Trainer hands `save_embedding_layers` on",
)
