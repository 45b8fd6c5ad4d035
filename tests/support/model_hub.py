"""Mock of the Hugging Face Hub for one model, which records requests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.json_server import JsonHandler

NAME = "owner/tiny"
FIRST, SECOND = "a" * 40, "b" * 40


class ModelHub:
    """Mock hub with owner/tiny, whose files are those of a folder; `main` is at `commit`, which tests may
    change."""

    def __init__(self, folder: Path, address: str = "") -> None:
        self.folder, self.commit, self.address = folder, FIRST, address
        self.asked: list[str] = []
        """Methods and paths of all requests."""
        self.token: str | None = None
        """Authorization header of the last request."""

    def fetched(self, ending: str) -> int:
        """Return the number of downloads of complete files with that ending."""
        return sum(
            line.startswith("GET /") and "/resolve/" in line and line.endswith(ending) for line in self.asked
        )

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment variables of a process that uses this hub."""
        return {"HF_ENDPOINT": self.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", **more}

    def answer(self, path: str) -> tuple[int, Any, dict[str, str]]:
        """Return status, content and headers of the response."""
        if f"/{NAME}" not in path:
            return 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        names = sorted(path.name for path in self.folder.iterdir())
        last = path.rpartition("/")[2]
        if "/resolve/" in path and last in names:
            headers = {
                "X-Repo-Commit": self.commit,
                "ETag": f'"{self.commit[:6]}{last}"',
                "Accept-Ranges": "bytes",
            }
            return 200, (self.folder / last).read_bytes(), headers
        # Any subfolder lists the same files: the tokenizer asks for a folder of additional chat templates.
        if path.startswith(f"/api/models/{NAME}/tree/"):
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            return (
                200,
                [{"type": "file", "path": name, "size": sizes[name], "oid": "1" * 40} for name in names],
                {},
            )
        if path == f"/api/models/{NAME}" or last in ("main", FIRST, SECOND):
            info = {
                "id": NAME,
                "sha": self.commit,
                "private": False,
                "gated": False,
                "disabled": False,
                "downloads": 0,
            }
            return (
                200,
                info | {"likes": 0, "tags": [], "siblings": [{"rfilename": name} for name in names]},
                {},
            )
        if "/revision/" in path:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        return (
            404,
            {"error": "Entry not found"},
            {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit},
        )


@contextmanager
def serving(folder: Path) -> Iterator[ModelHub]:
    """Serve a hub with the model in `folder`."""
    hub = ModelHub(folder)

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            hub.asked.append(f"{self.command}{' part of' if self.headers.get('Range') else ''} {path}")
            hub.token = self.headers.get("Authorization")
            self._send(*hub.answer(path))

        do_POST = do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
