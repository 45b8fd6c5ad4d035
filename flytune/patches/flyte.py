"""Names of Flyte 2's SDK that are replaced."""

from flytune.patches.record import ProcessPatch

JSON_INPUT = ProcessPatch(
    name="flyte.cli._params:JsonParamType._parse",
    version="2.12.1",
    reason="recipes and changes of a sweep are read as YAML 1.1, and may name files that pods do not have",
    upstream=("flyte.cli._params:JsonParamType._parse", "flyte.cli._params:JsonParamType.convert"),
    remove_when="a type can bring its own parameter type for `flyte run`",
)
ERROR_PANEL = ProcessPatch(
    name="flyte.cli._common:get_panel",
    version="2.12.1",
    reason="the message of an error is taken for markup, in which names in brackets disappear, and is "
    "wrapped into a frame",
    upstream=("flyte.cli._common:get_panel", "flyte.cli._run:RunTaskCommand._execute_and_render"),
    remove_when="errors are shown as plain text",
)
DIRECTORY_INPUT = ProcessPatch(
    name="flyte.cli._params:DirParamType.convert",
    version="2.12.1",
    reason="the SDK's upload flattens subfolders, and sends again what is stored already",
    upstream=("flyte.cli._params:DirParamType.convert", "flyte.remote._data:upload_dir"),
    remove_when="its upload keeps subfolders",
)
CODE_FILES = ProcessPatch(
    name="flyte._code_bundle._utils:list_all_files",
    version="2.12.1",
    reason="`--copy-style all` sends all files that git does not ignore: a person's data and models too",
    upstream=("flyte._code_bundle._utils:list_all_files", "flyte._code_bundle._utils:ls_files"),
    remove_when="a project can list its code",
)
