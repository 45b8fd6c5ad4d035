"""Build of the wheel: what pyproject.toml cannot say. Its package gets copies of the files that users edit in
a clone."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = (
    "shapes.yaml",
    "cluster.yaml",
    "accelerators.yaml",
    "deepspeed_configs/*.json",
    "chat_templates/*.jinja",
)
"""Files and patterns below this folder that flytune/shipped/ of a wheel has (flytune/files.py reads them
there)."""


class WithShipped(build_py):
    """The command build_py, with flytune/shipped/ except in an editable install, which reads the clone's own
    files."""

    def _shipped(self) -> dict[str, str]:
        found = [file for pattern in SHIPPED for file in sorted(Path().glob(pattern))]
        return {str(Path(self.build_lib, "flytune", "shipped", file)): str(file) for file in found}

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for target, file in self._shipped().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(file, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._shipped()]


setup(cmdclass={"build_py": WithShipped})
