"""Names of transformers that are replaced."""

from flytune.patches.record import BlockPatch, ObjectPatch, ProcessPatch

_VERSION = "5.23.0"

CHAT_TEMPLATES = ProcessPatch(
    name="transformers.tokenization_utils_base:render_jinja_template",
    version=_VERSION,
    reason="a chat template may compute for ever or fill the memory: it is rendered in a process with limits",
    upstream=(
        "transformers.tokenization_utils_base:PreTrainedTokenizerBase.apply_chat_template",
        "transformers.utils.chat_template_utils:render_jinja_template",
        "transformers.utils.chat_template_utils:_compile_jinja_template",
    ),
    remove_when="transformers limits the time and memory of a template, or lets a tokenizer choose what "
    "renders it",
)
ATTENTION = BlockPatch(
    name="transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS[sdpa]",
    version=_VERSION,
    reason="a dry run counts FlashAttention's allocations on a CPU without its package, and on fake tensors",
    upstream=(
        "transformers.integrations.sdpa_attention:sdpa_attention_forward",
        "transformers.modeling_utils:AttentionInterface",
    ),
    remove_when="FlashAttention has a kernel for meta tensors",
)
MASKS = BlockPatch(
    name="transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[sdpa]",
    version=_VERSION,
    reason="FlashAttention gets no mask, and a dry run with its allocations runs as sdpa, for which "
    "transformers makes one",
    upstream=(
        "transformers.masking_utils:create_causal_mask",
        "transformers.masking_utils:AttentionMaskInterface",
    ),
    remove_when="FlashAttention has a kernel for meta tensors",
)
PACKED_SAMPLES = BlockPatch(
    name="transformers.masking_utils:find_packed_sequence_indices",
    version=_VERSION,
    reason="on fake tensors it takes all positions for packed ones, and a dry run would count a mask that "
    "training has not",
    upstream=(
        "transformers.masking_utils:find_packed_sequence_indices",
        "transformers.masking_utils:_preprocess_mask_arguments",
    ),
    remove_when="it is not called for positions that are not packed",
)
ATTENTION_OF_PARTS = BlockPatch(
    name="transformers.modeling_utils:AttentionInterface.get_interface",
    version=_VERSION,
    reason="processes that share samples exchange positions for heads around the model's own attention",
    upstream=("transformers.modeling_utils:AttentionInterface",),
    remove_when="transformers or accelerate divides samples with the masks of packed ones and of windows, "
    "without DeepSpeed",
)
MASK_ARGUMENTS = BlockPatch(
    name="transformers.masking_utils:_preprocess_mask_arguments",
    version=_VERSION,
    reason="a process that computes a part of each sample attends to all of it: masks are those of complete "
    "samples",
    upstream=(
        "transformers.masking_utils:_preprocess_mask_arguments",
        "transformers.masking_utils:create_causal_mask",
        "transformers.masking_utils:create_sliding_window_causal_mask",
        "transformers.masking_utils:create_chunked_causal_mask",
    ),
    remove_when="the functions that make masks take a length",
)
PACKED_MASK = BlockPatch(
    name="transformers.masking_utils:packed_sequence_compatibility_function",
    version=_VERSION,
    reason="the same of packed samples, whose masks also follow from their positions",
    upstream=("transformers.masking_utils:packed_sequence_compatibility_function",),
    remove_when="the functions that make masks take a length",
)
ZERO_GRAD = ObjectPatch(
    name="torch.nn:Module.zero_grad",
    version=_VERSION,
    reason="the Trainer frees gradients in page-locked memory after each step, and allocating them again is "
    "slow",
    upstream=("transformers.trainer:Trainer._inner_training_loop", "transformers.trainer:Trainer._run_epoch"),
    remove_when="the Trainer has an argument for `set_to_none`",
)
SAVED_NAMES = ObjectPatch(
    name="transformers.modeling_utils:PreTrainedModel.save_pretrained",
    version=_VERSION,
    reason="the Trainer saves a checkpoint in the published layout (experts one by one, other names), and "
    "reads it as the model's own: converted weights would keep the base's values in a resumed run",
    upstream=(
        "transformers.trainer:Trainer._save",
        "transformers.trainer:Trainer._load_from_checkpoint",
        "transformers.modeling_utils:PreTrainedModel.save_pretrained",
    ),
    remove_when="Trainer._load_from_checkpoint converts what save_pretrained has converted",
)
PIXTRAL_IMAGES = BlockPatch(
    name="sys:modules[transformers.models.pixtral.image_processing_pixtral]",
    version=_VERSION,
    reason="Pixtral's processor imports a function from the module that needs torchvision, and Pillow's has "
    "the same",
    upstream=("transformers.models.pixtral.image_processing_pil_pixtral:get_resize_output_image_size",),
    remove_when="it imports the function from a module without torchvision",
)
NUMBER_WORDS = BlockPatch(
    name="transformers.models.smolvlm.processing_smolvlm:num2words",
    version=_VERSION,
    reason="SmolVLM's processor of images asks for a library that it needs for videos alone",
    upstream=("transformers.models.smolvlm.processing_smolvlm:SmolVLMProcessor.__init__",),
    remove_when="it asks for the library where it reads a video",
)
