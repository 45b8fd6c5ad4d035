"""Names of lm-evaluation-harness that are replaced."""

from flytune.patches.record import ObjectPatch, ProcessPatch

_VERSION = "0.4.13"

YAML_LOADER = ProcessPatch(
    name="lm_eval.tasks._yaml_loader:_make_loader",
    version=_VERSION,
    reason="it reads YAML 1.1, in which `no` is false; a user's tasks are read as recipes are",
    upstream=("lm_eval.tasks._yaml_loader:_make_loader", "lm_eval.tasks._yaml_loader:load_yaml"),
    remove_when="TaskManager takes the loader, or parsed tasks with their includes and functions",
)
TASK_CONFIG = ObjectPatch(
    name="lm_eval.tasks._factory:TaskFactory._load_full_config",
    version=_VERSION,
    reason="the harness looks for a task's local data in the working directory only, and not beside its file",
    upstream=("lm_eval.tasks._factory:TaskFactory._load_full_config",),
    remove_when="data_files are relative to the task's file",
)
