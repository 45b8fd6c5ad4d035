"""Names of huggingface_hub that are replaced."""

from flytune.patches.record import BlockPatch

OFFLINE = BlockPatch(
    name="huggingface_hub.constants:HF_HUB_OFFLINE",
    version="2.4.0",
    reason="publishing, and the task that runs a teacher, need the hub also in pods that otherwise load "
    "nothing from it; the variable is read at import",
    upstream=(
        "huggingface_hub.constants:is_offline_mode",
        "huggingface_hub.utils._http:hf_request_event_hook",
    ),
    remove_when="HfApi and downloads have an argument for it",
)
