"""Conversion of workflow inputs: YAML files are read as Flytune reads them, and a recipe's local files are
uploaded.

Files are uploaded when `pyflyte run --remote` or FlyteRemote converts inputs to Flyte's values; local runs
and pods read paths as they are. The module is imported for its effect, with any workflow.
"""

from types import SimpleNamespace
from typing import Any

import click
from flytekit import FlyteContext
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteEntityAlreadyExistsException
from flytekit.remote.remote_fs import FlyteFS
from flytekit.types.directory import FlyteDirectory

from flytune import patches, yaml_core
from flytune.cluster import code_files, signed_uploads
from flytune.cluster.signed_uploads import SignedUpload
from flytune.recipe import Recipe, inputs
from flytune.written_files import load_yaml
from tasks.runtime.errors import is_pyflyte
from tasks.runtime.schema import ModelTransformer


class RecipeTransformer(ModelTransformer):
    """Transformer for recipes, which uploads their local files when they are sent to a cluster."""

    def __init__(self) -> None:
        super().__init__("Recipe", Recipe)

    def to_literal(self, ctx: FlyteContext, python_val: Any, python_type: Any, expected: Any) -> Any:
        """Convert a recipe like flytekit's transformer, with addresses in place of local paths."""
        remote = _remote(ctx)
        if remote is not None and isinstance(python_val, Recipe):
            # flytekit keeps converted values; an equal recipe must get here again, because its files may have
            # changed.
            key = patches.flytekit.CACHE_KEY.original()
            patches.flytekit.CACHE_KEY.install(
                lambda value, kind: None if isinstance(value, Recipe) else key(value, kind)
            )
            python_val = signed_uploads.of_recipe(_Admin(remote), python_val)
        return super().to_literal(ctx, python_val, python_type, expected)


def _remote(ctx: FlyteContext) -> Any:
    """Return the control plane that a value is converted for; None in pods and local runs."""
    filesystem = ctx.file_access.raw_output_fs
    return filesystem._remote if isinstance(filesystem, FlyteFS) else None


class _Admin:
    """Flyteadmin, which signs uploads."""

    def __init__(self, remote: Any) -> None:
        self._remote = remote
        platform = remote.config.platform
        self.verify = False if platform.insecure_skip_verify else platform.ca_cert_file_path

    def sign(self, root: str, name: str, md5: bytes | None) -> SignedUpload:
        """Sign an upload; an error of flyteadmin, which flytekit wraps, is raised as it is."""
        remote = self._remote
        where = {"project": remote.default_project, "domain": remote.default_domain, "filename_root": root}
        try:
            signed = remote.client.get_upload_signed_url(**where, filename=name, content_md5=md5)
        except RuntimeError as error:
            if isinstance(error.__cause__, FlyteEntityAlreadyExistsException):
                raise signed_uploads.AlreadyStoredError(name) from error
            raise
        headers = remote.get_extra_headers_for_protocol(signed.native_url) | dict(signed.headers)
        return SignedUpload(str(signed.native_url), signed.signed_url, headers)


def _install() -> None:
    """Make pyflyte read YAML as Flytune does, upload a sweep's changes, files and folders, and send no file
    but code."""
    flytekit = patches.flytekit
    flytekit.CODE_FILES.install(code_files.lister(flytekit.CODE_FILES.original()))
    flytekit.INPUTS_FILE.install(SimpleNamespace(safe_load=_inputs_file, YAMLError=yaml_core.YAMLError))
    flytekit.JSON_INPUT.install(_parsing(flytekit.JSON_INPUT.original()))
    flytekit.LISTED_ENTITIES.install(_workflows)
    flytekit.INPUT_OPTION.install(_option(flytekit.INPUT_OPTION.original()))
    for patch in (flytekit.DIRECTORY_INPUT, flytekit.FILE_INPUT, flytekit.DATASET_INPUT):
        patch.install(_converting(patch.original()))


def _workflows(entities: Any) -> list[str]:
    """Return the workflows and launch plans of a file, the commands of `pyflyte run FILE`."""
    return [*entities.workflows, *(name for name, _ in entities.launch_plans)]


def _option(upstream: Any) -> Any:
    from flytekit.interaction.click_types import JsonParamType

    def make(*args: Any, **kwargs: Any) -> click.Option:
        option: click.Option = upstream(*args, **kwargs)
        if isinstance(option.type, JsonParamType):
            option.help = "a YAML or JSON file, or JSON"
        if option.required and option.default is None:
            option.default = click.Option(["--without-default"]).default
        return option

    return make


def _inputs_file(file: Any) -> Any:
    """Return the content of --inputs-file; flytekit itself fails on one that is not YAML."""
    return load_yaml(file.name) if hasattr(file, "name") else yaml_core.load(file)


def _parsing(upstream: Any) -> Any:
    def parse(self: Any, value: Any, param: Any) -> Any:
        name, kind = f"--{param.name}" if param is not None else "input", self._python_type
        content = inputs.read(value, name, kind, lambda: upstream(self, value, param))
        remote = _submitting()
        if remote is not None and kind in inputs.CHANGES:
            return signed_uploads.of_content(_Admin(remote), content)
        if remote is not None and kind == dict[str, FlyteDirectory]:
            admin = _Admin(remote)
            return {
                name: signed_uploads.of_path(admin, path, f"{param.name}.{name}")
                for name, path in content.items()
            }
        return content

    return parse


def _converting(upstream: Any) -> Any:
    def convert(self: Any, value: Any, param: Any, ctx: Any) -> Any:
        remote = _submitting()
        # flytekit's own upload would flatten subfolders.
        return upstream(
            self,
            value if remote is None else signed_uploads.of_path(_Admin(remote), value, param.name),
            param,
            ctx,
        )

    return convert


def _submitting() -> Any:
    """Return the control plane of a `pyflyte run --remote`; None in other commands."""
    context = click.get_current_context(silent=True)
    return (
        context.obj.remote_instance()
        if context is not None and getattr(context.obj, "is_remote", False)
        else None
    )


TypeEngine.register(RecipeTransformer())
if is_pyflyte():  # which asks the workflows for nothing else before it reads its arguments
    _install()
