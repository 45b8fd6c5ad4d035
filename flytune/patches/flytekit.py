"""Names of flytekit that are replaced."""

from flytune.patches.record import ObjectPatch, ProcessPatch

_VERSION = "1.16.31"
_TYPES = "flytekit.interaction.click_types"

CACHE_KEY = ProcessPatch(
    name="flytekit.core.type_engine:TypeEngine._get_literal_cache_key",
    version=_VERSION,
    reason="converted recipes are cached by their fields, although their files or the control plane may have "
    "changed",
    upstream=(
        "flytekit.core.type_engine:TypeEngine._get_literal_cache_key",
        "flytekit.core.type_engine:TypeEngine.to_literal",
    ),
    remove_when="a transformer can say that its values are not cached",
)
TRACEBACK = ProcessPatch(
    name="flytekit.bin.entrypoint:get_traceback_str",
    version=_VERSION,
    reason="the text of a failed task begins with the traceback, and flytepropeller cuts its end off",
    upstream=("flytekit.bin.entrypoint:get_traceback_str", "flytekit.bin.entrypoint:_dispatch_execute"),
    remove_when="an error can bring its own text",
)
SHOWN_ERROR = ProcessPatch(
    name="flytekit.clis.sdk_in_container.utils:pretty_print_exception",
    version=_VERSION,
    reason="pyflyte shows a traceback of flytekit's frames for an error that the user must correct",
    upstream=(
        "flytekit.clis.sdk_in_container.utils:pretty_print_exception",
        "flytekit.clis.sdk_in_container.utils:ErrorHandlingCommand.invoke",
    ),
    remove_when="an error of the user's can be shown without a traceback",
)
INPUTS_FILE = ProcessPatch(
    name="flytekit.clis.sdk_in_container.run:yaml",
    version=_VERSION,
    reason="--inputs-file is read as YAML 1.1, with repeated keys; recipes are read as YAML 1.2",
    upstream=("flytekit.clis.sdk_in_container.run:YamlFileReadingCommand.parse_args",),
    remove_when="the reader of --inputs-file can be chosen",
)
_RUN = "flytekit.clis.sdk_in_container.run"
LISTED_ENTITIES = ProcessPatch(
    name=f"{_RUN}:Entities.all",
    version=_VERSION,
    reason="pyflyte's help of a file fails at a task that takes an error, and lists the tasks that the file "
    "uses",
    upstream=(f"{_RUN}:Entities", f"{_RUN}:WorkflowCommand.list_commands"),
    remove_when="a file can say which of its entities are commands",
)
INPUT_OPTION = ProcessPatch(
    name=f"{_RUN}:to_click_option",
    version=_VERSION,
    reason="the help of an input is the JSON schema of its type, and with click 8.3 a required input that is "
    "missing is None",
    upstream=(f"{_RUN}:to_click_option", f"{_RUN}:WorkflowCommand._create_command"),
    remove_when="an input brings its own help, and click asks for required options that have no default",
)
JSON_INPUT = ProcessPatch(
    name=f"{_TYPES}:JsonParamType._parse",
    version=_VERSION,
    reason="recipes and changes of a sweep are read as YAML 1.1, and local files that they name are not "
    "uploaded",
    upstream=(f"{_TYPES}:JsonParamType._parse", f"{_TYPES}:JsonParamType.convert"),
    remove_when="a type can bring its own parameter type for pyflyte",
)
DIRECTORY_INPUT, FILE_INPUT = (
    ProcessPatch(
        name=f"{_TYPES}:{kind}.convert",
        version=_VERSION,
        reason="flytekit's upload flattens subfolders, and sends again what is stored already",
        upstream=(f"{_TYPES}:{kind}.convert",),
        remove_when="its upload keeps subfolders",
    )
    for kind in ("DirParamType", "FileParamType")
)
DATASET_INPUT = ProcessPatch(
    name=f"{_TYPES}:StructuredDatasetParamType.convert",
    version=_VERSION,
    reason="a path of this machine is sent as it is, and no pod has it",
    upstream=(f"{_TYPES}:StructuredDatasetParamType.convert",),
    remove_when="it uploads files and folders, as it does for those types",
)
CODE_FILES = ProcessPatch(
    name="flytekit.tools.script_mode:list_all_files",
    version=_VERSION,
    reason="`--copy all` sends all files that git does not ignore: a person's data and models too",
    upstream=("flytekit.tools.script_mode:list_all_files", "flytekit.tools.script_mode:ls_files"),
    remove_when="a project can list its code",
)
POD = ObjectPatch(
    name="flytekit.core.python_auto_container:PythonAutoContainerTask.get_k8s_pod",
    version=_VERSION,
    reason="the pod of a dynamic task gets the laptop's folder and the address of its git remote, "
    "credentials included",
    upstream=(
        "flytekit.core.python_auto_container:PythonAutoContainerTask.get_k8s_pod",
        "flytekit.core.python_auto_container:PythonAutoContainerTask._get_container",
        "flytekit.configuration:SerializationSettings.with_serialized_context",
    ),
    remove_when="flytekit leaves them out of the serialized context",
)
PROCESS_OF_TASK = ProcessPatch(
    name="flytekit.bin.entrypoint:_run_subprocess",
    version=_VERSION,
    reason="fetching the code and executing the task are two processes, which both import flytekit "
    "(images/fast_execute.py)",
    upstream=("flytekit.bin.entrypoint:_run_subprocess", "flytekit.bin.entrypoint:fast_execute_task_cmd"),
    remove_when="pyflyte-fast-execute executes the task itself where nothing of the project was imported",
)
