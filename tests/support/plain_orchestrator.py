"""An orchestrator of folders on this machine, without Flyte."""

import shutil
from pathlib import Path


class PlainOrchestrator:
    """Stages run one after the other in this process; what is stored is a copy in a folder."""

    def __init__(self, root: Path) -> None:
        self.root, self._made = root, 0
        root.mkdir(parents=True, exist_ok=True)

    def fetch(self, address: str, target: Path, is_folder: bool = False) -> None:
        if is_folder:
            shutil.copytree(address, target, dirs_exist_ok=True)
        else:
            shutil.copy(address, target)

    def store(self, path: Path, address: str) -> str:
        copy = shutil.copytree if path.is_dir() else shutil.copy
        return str(copy(path, address))

    def new_address(self) -> str:
        return str(self._next("stored"))

    def new_folder(self) -> Path:
        folder = self._next("work")
        folder.mkdir(parents=True)
        return folder

    def shared_address(self, name: str) -> str | None:
        return None

    def execution(self) -> str:
        return ""

    def is_local(self) -> bool:
        return True

    def _next(self, kind: str) -> Path:
        self._made += 1
        return self.root / f"{kind}-{self._made}"
