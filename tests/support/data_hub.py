"""Mock of the Hugging Face Hub's data set API."""

import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from tests.support.json_server import JsonHandler

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"instruction": f"ask {n}", "output": f"say {n}"} for n in range(50)]
FILE = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
HELDOUT = "".join(
    json.dumps({"instruction": f"try {n}", "output": f"tell {n}"}) + "\n" for n in range(7)
).encode()
FILES = {"train.jsonl": FILE, "validation.jsonl": HELDOUT}
ENTRIES = [
    {"type": "file", "path": name, "size": len(content), "oid": str(number) * 40}
    for number, (name, content) in enumerate(FILES.items(), 1)
]
INFO = {
    "id": "owner/pairs",
    "sha": COMMIT,
    "private": False,
    "gated": False,
    "disabled": False,
    "downloads": 0,
    "likes": 0,
    "tags": [],
    "siblings": [{"rfilename": name} for name in FILES],
    "lastModified": "2026-01-01T00:00:00.000Z",
}


class Hub(JsonHandler):
    """Mock hub with owner/pairs (two splits at one commit) and the gated owner/closed."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if "owner/closed" in path:
            self._send(
                403,
                {"error": "Access is restricted"},
                {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"},
            )
        elif "owner/pairs" not in path:
            self._send(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif "/revision/" in path and not path.endswith(("/main", COMMIT)):
            self._send(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        elif "/resolve/" + COMMIT in path and (name := path.rpartition("/")[2]) in FILES:
            self._send(
                200, FILES[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"', "Accept-Ranges": "bytes"}
            )
        elif "/tree/" in path:
            self._send(200, ENTRIES)
        elif "/paths-info/" in path:
            body = self._body()
            self._send(200, [entry for entry in ENTRIES if str(entry["path"]).encode() in body])
        elif path.startswith("/api/datasets/owner/pairs") and path.endswith(("pairs", "/main", COMMIT)):
            self._send(200, INFO)
        else:
            self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})

    do_POST = do_HEAD = do_GET

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
