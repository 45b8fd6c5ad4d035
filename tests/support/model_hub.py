"""A small server on this machine that answers as the Hugging Face hub does for one model, and counts what it is asked."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAME = "owner/tiny"
FIRST, SECOND = "a" * 40, "b" * 40


class ModelHub:
    """owner/tiny, whose files are those of a folder; `main` is at `commit`, and can be moved."""

    def __init__(self, folder: Path, address: str = "") -> None:
        self.folder, self.commit, self.address = folder, FIRST, address
        self.asked: list[str] = []
        """Method and path of all requests."""
        self.token: str | None = None
        """That the last request came with."""

    def fetched(self, ending: str) -> int:
        """How often files of that ending were downloaded."""
        return sum(line.startswith("GET") and "/resolve/" in line and line.endswith(ending) for line in self.asked)

    def environment(self, **more: str) -> dict[str, str]:
        """For a process that sees this hub."""
        return {"HF_ENDPOINT": self.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", **more}

    def answer(self, path: str) -> tuple[int, Any, dict[str, str]]:
        """Status, content and headers."""
        if f"/{NAME}" not in path:
            return 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        names = sorted(path.name for path in self.folder.iterdir())
        last = path.rpartition("/")[2]
        if "/resolve/" in path and last in names:
            headers = {"X-Repo-Commit": self.commit, "ETag": f'"{self.commit[:6]}{last}"', "Accept-Ranges": "bytes"}
            return 200, (self.folder / last).read_bytes(), headers
        # The folder of additional chat templates too: the tokenizer is one with such a folder.
        if path.startswith(f"/api/models/{NAME}/tree/"):
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            return 200, [{"type": "file", "path": name, "size": sizes[name], "oid": "1" * 40} for name in names], {}
        if path == f"/api/models/{NAME}" or last in ("main", FIRST, SECOND):
            info = {"id": NAME, "sha": self.commit, "private": False, "gated": False, "disabled": False, "downloads": 0}
            return 200, info | {"likes": 0, "tags": [], "siblings": [{"rfilename": name} for name in names]}, {}
        if "/revision/" in path:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit}


@contextmanager
def serving(folder: Path) -> Iterator[ModelHub]:
    """A hub with the model in `folder`, while the block runs."""
    hub = ModelHub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            hub.asked.append(f"{self.command} {path}")
            hub.token = self.headers.get("Authorization")
            status, content, headers = hub.answer(path)
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_POST = do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
