"""Inputs of `flyte run`: recipes and a sweep's changes are read as Flytune reads them; files of this machine
are uploaded."""

import logging
import sys
from typing import Any

import click

from flyte2.runtime.uploads import DataProxy
from flytune import patches
from flytune.cluster import code_files, signed_uploads
from flytune.errors import FlytuneError
from flytune.recipe import Recipe, inputs


def install() -> None:
    """Make flyte read its inputs so, show errors as they are, and send of the clone its code alone.

    In other processes, and again, nothing is done.
    """
    if "flyte.cli._run" not in sys.modules or patches.flyte.JSON_INPUT.is_installed:
        return
    patches.flyte.JSON_INPUT.install(_parsing(patches.flyte.JSON_INPUT.original()))
    patches.flyte.DIRECTORY_INPUT.install(_converting(patches.flyte.DIRECTORY_INPUT.original()))
    patches.flyte.CODE_FILES.install(code_files.lister(patches.flyte.CODE_FILES.original()))
    upstream = patches.flyte.ERROR_PANEL.original()

    def panel(title: str, content: Any, output_format: Any = "table") -> Any:
        """Print an error's text as it is, and return nothing more to print; leave all other panels to the
        SDK."""
        if title != "Exception":
            return upstream(title, content, output_format)
        click.echo(content.removeprefix(_FAILED), err=True)
        return ""

    patches.flyte.ERROR_PANEL.install(panel)
    logger = logging.getLogger("flyte")
    # Each enclosing task writes the traceback of an error, which is shown at the end; `flyte -v run` shows
    # them.
    logger.addFilter(
        lambda record: logger.isEnabledFor(logging.INFO) or not record.getMessage().startswith(_LOGGED)
    )


_LOGGED = ("Task failed with error", "Task '")
_FAILED = "[red]✕ Execution failed:[/red] "


def _parsing(upstream: Any) -> Any:
    def parse(self: Any, value: Any, param: Any) -> Any:
        kind = self._python_type
        try:
            content = inputs.read(value, f"--{param.name}", kind, lambda: upstream(self, value, param))
            if kind is Recipe:
                # Its files are uploaded when it is converted (schema.py).
                Recipe.model_validate(content)
            elif kind in inputs.CHANGES and not _is_local():
                content = signed_uploads.of_content(DataProxy(), content)
        except FlytuneError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from None
        return content

    return parse


def _converting(upstream: Any) -> Any:
    def convert(self: Any, value: Any, param: Any, ctx: Any) -> Any:
        try:
            value = value if _is_local() else signed_uploads.of_path(DataProxy(), value, param.name)
        except FlytuneError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from None
        return upstream(self, value, param, ctx)

    return convert


def _is_local() -> bool:
    context = click.get_current_context(silent=True)
    while context is not None:
        if (given := getattr(context.command, "run_args", None)) is not None:
            return bool(given.local)
        context = context.parent
    return True
