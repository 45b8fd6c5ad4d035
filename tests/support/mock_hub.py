"""Mock of the Hugging Face Hub's model API, with the requests that huggingface_hub needs to upload and
download.

It has repositories with commits, branches and tags; small files are in the commit, large ones use LFS's basic
transfer. It counts requests, and can be made to fail. Its answers are those that huggingface_hub 2.4 reads;
xet is off (HF_HUB_DISABLE_XET).
"""

import base64
import hashlib
import json
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.json_server import JsonHandler

ADDRESS = "hf://ada/sums"
REPOSITORY = "ada/sums"

TOKENS = {
    "hf_ada_writes": {"name": "ada", "type": "user", "orgs": [{"name": "lovelace"}], "role": "write"},
    "hf_ada_reads": {"name": "ada", "type": "user", "orgs": [{"name": "lovelace"}], "role": "read"},
    "hf_bob_writes": {"name": "bob", "type": "user", "orgs": [], "role": "write"},
}
LFS = (".safetensors", ".gguf", ".bin")


class Refusal(Exception):
    """Response with a status other than 200."""

    def __init__(self, status: int, message: str, code: str = "", **body: str) -> None:
        super().__init__(message)
        self.body = {"error": message, **body}
        self.status, self.headers = (
            status,
            {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}),
        )


class Repository:
    """Repository: files by commit, branches and tags."""

    def __init__(self, private: bool) -> None:
        self.private, self.commits, self.tags = private, {}, {}
        self.titles: list[str] = []
        self.card: dict[str, Any] = {}
        self.branches = {
            "main": self.add({".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        }

    def add(self, files: dict[str, bytes], title: str) -> str:
        self.titles.append(title)
        # Always different, as on the hub, whose hash includes the time: clients cache files by commit.
        commit = secrets.token_hex(20)
        self.commits[commit] = files
        return commit

    def commit_of(self, revision: str) -> str:
        found = self.branches.get(revision) or self.tags.get(revision) or revision
        if found not in self.commits:
            raise Refusal(404, "Invalid rev id", "RevisionNotFound")
        return found

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.commit_of(revision)]


def oid(name: str, content: bytes) -> str:
    """Return the hash by which huggingface_hub compares files: sha256 for LFS, git's sha1 for the rest."""
    return hashlib.sha256(content).hexdigest() if name.endswith(LFS) else _git(content)


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(ThreadingHTTPServer):
    """Server. `broken` is called before each answer; it may raise a Refusal, or any other error to cut the
    connection."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """LFS objects by sha256."""
        self.asked: Counter[str] = Counter()
        """Number of requests by route (ROUTES)."""
        self.broken: Callable[[str], None] = lambda route: None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that were cut on purpose."""


class Handler(JsonHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.body = self._body()
        try:
            route, groups = self._route(f"{self.command} {urlsplit(self.path).path}")
            self.server.asked[route] += 1
            self.server.broken(route)
            self._send(200, *getattr(self, route)(*groups))
        except Refusal as refusal:
            self._send(refusal.status, refusal.body, refusal.headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _route(self, line: str) -> tuple[str, list[str]]:
        for pattern, route in ROUTES:
            if match := re.fullmatch(pattern, line):
                return route, [group and unquote(group) for group in match.groups()]
        raise Refusal(404, f"no such route: {line}", "EntryNotFound")

    def whoami(self) -> Any:
        return (self._account(),)

    def create(self) -> Any:
        asked = json.loads(self.body)
        account = self._account()
        owner = asked["organization"] or account["name"]
        name = f"{owner}/{asked['name']}"
        if not self._may_write(owner):
            raise Refusal(403, f"You don't have the rights to create a model under the namespace {owner}")
        if name in self.server.repositories:
            raise Refusal(409, "You already created this model repo", url=f"{self.server.endpoint}/{name}")
        self.server.repositories[name] = Repository(asked.get("visibility") == "private")
        return ({"url": f"{self.server.endpoint}/{name}", "name": name},)

    def info(self, name: str, revision: str = "main") -> Any:
        repository = self._repository(name)
        commit = repository.commit_of(revision)
        files = [{"rfilename": file} for file in sorted(repository.commits[commit])]
        return (
            {
                "id": name,
                "sha": commit,
                "private": repository.private,
                "siblings": files,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            | {"lastModified": "2026-01-01T00:00:00.000Z", "cardData": repository.card},
        )

    def refs(self, name: str) -> Any:
        repository = self._repository(name)
        kinds = {"branches": ("heads", repository.branches), "tags": ("tags", repository.tags)}
        listed = {
            kind: [
                {"name": ref, "ref": f"refs/{place}/{ref}", "targetCommit": commit}
                for ref, commit in found.items()
            ]
            for kind, (place, found) in kinds.items()
        }
        return ({"converts": [], **listed},)

    def tree(self, name: str, revision: str, folder: str | None) -> Any:
        files = self._repository(name).files(revision)
        inside = [file for file in sorted(files) if file.startswith(folder or "")]
        return (
            [
                {"type": "file", "path": file, "size": len(files[file]), "oid": _git(files[file])}
                for file in inside
            ],
        )

    def validate(self) -> Any:
        return ({"warnings": [], "errors": []},)

    def preupload(self, name: str, revision: str) -> Any:
        files = self._writable(name).files(revision)
        asked = json.loads(self.body)["files"]
        modes = {
            file["path"]: "lfs" if file["path"].endswith(LFS) or file["size"] > 10_000_000 else "regular"
            for file in asked
        }
        return (
            {
                "files": [
                    {"path": path, "uploadMode": mode, "shouldIgnore": False}
                    | ({"oid": oid(path, files[path])} if path in files else {})
                    for path, mode in modes.items()
                ]
            },
        )

    def batch(self, name: str) -> Any:
        self._writable(name)
        objects = []
        for asked in json.loads(self.body)["objects"]:
            place = f"{self.server.endpoint}/lfs/{asked['oid']}"
            actions = {
                "upload": {"href": f"{place}?X-Amz-Signature=secret"},
                "verify": {"href": f"{place}/verify"},
            }
            objects.append(asked | ({} if asked["oid"] in self.server.objects else {"actions": actions}))
        return ({"transfer": "basic", "objects": objects},)

    def put(self, sha256: str) -> Any:
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise Refusal(400, "BadDigest")
        self.server.objects[sha256] = self.body
        return ({},)

    def verify(self, sha256: str) -> Any:
        if len(self.server.objects.get(sha256, b"")) != json.loads(self.body)["size"]:
            raise Refusal(404, "not uploaded")
        return ({},)

    def commit(self, name: str, revision: str) -> Any:
        repository = self._writable(name)
        lines = [json.loads(line) for line in self.body.splitlines()]
        header, head = lines[0]["value"], repository.branches.get(revision)
        if head is None:
            raise Refusal(404, "Invalid rev id", "RevisionNotFound")
        if header.get("parentCommit", head) != head:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.commits[head])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.objects:
                    raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
                files[value["path"]] = self.server.objects[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        commit = repository.branches[revision] = repository.add(files, header["summary"])
        return (
            {
                "commitUrl": f"{self.server.endpoint}/{name}/commit/{commit}",
                "commitOid": commit,
                "success": True,
            },
        )

    def branch(self, name: str, branch: str) -> Any:
        repository = self._writable(name)
        if branch in repository.branches:
            raise Refusal(409, "Reference already exists")
        repository.branches[branch] = repository.commit_of(
            json.loads(self.body or b"{}").get("startingPoint", "main")
        )
        return ({},)

    def tag(self, name: str, revision: str) -> Any:
        repository, tag = self._writable(name), json.loads(self.body)["tag"]
        if tag in repository.tags:
            raise Refusal(409, "Reference already exists")
        repository.tags[tag] = repository.commit_of(revision)
        return ({},)

    def resolve(self, name: str, revision: str, file: str) -> Any:
        repository = self._repository(name)
        commit = repository.commit_of(revision)
        if file not in repository.commits[commit]:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        content = repository.commits[commit][file]
        return content, {"X-Repo-Commit": commit, "ETag": f'"{oid(file, content)}"', "Accept-Ranges": "bytes"}

    def _account(self) -> dict[str, Any]:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in TOKENS:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return TOKENS[token]

    def _may_write(self, owner: str) -> bool:
        account = self._account()
        names = [account["name"], *(organization["name"] for organization in account["orgs"])]
        return account["role"] == "write" and owner in names

    def _repository(self, name: str) -> Repository:
        found = self.server.repositories.get(name)
        owner = name.partition("/")[0]
        if found is None or (found.private and owner != self._account()["name"]):
            raise Refusal(
                401 if "Authorization" not in self.headers else 404, "Repository not found", "RepoNotFound"
            )
        return found

    def _writable(self, name: str) -> Repository:
        found = self._repository(name)
        if not self._may_write(name.partition("/")[0]):
            raise Refusal(403, "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
        return found


NAME = "([^/]+/[^/]+)"
ROUTES = [
    ("GET /api/whoami-v2", "whoami"),
    ("POST /api/repos/create", "create"),
    ("POST /api/validate-yaml", "validate"),
    (f"GET /api/models/{NAME}/refs", "refs"),
    (f"GET /api/models/{NAME}/revision/([^/]+)", "info"),
    (f"GET /api/models/{NAME}/tree/([^/]+)(?:/(.+))?", "tree"),
    (f"GET /api/models/{NAME}", "info"),
    (f"POST /api/models/{NAME}/preupload/([^/]+)", "preupload"),
    (f"POST /api/models/{NAME}/commit/([^/]+)", "commit"),
    (f"POST /api/models/{NAME}/branch/([^/]+)", "branch"),
    (f"POST /api/models/{NAME}/tag/([^/]+)", "tag"),
    (f"POST /{NAME}[.]git/info/lfs/objects/batch", "batch"),
    ("PUT /lfs/([0-9a-f]{64})", "put"),
    ("POST /lfs/([0-9a-f]{64})/verify", "verify"),
    (f"(?:GET|HEAD) /{NAME}/resolve/([^/]+)/(.+)", "resolve"),
]


@contextmanager
def running() -> Iterator[Hub]:
    """Run a hub without repositories."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def environment(hub: Hub, home: str, token: str = "hf_ada_writes") -> dict[str, str]:
    """Return the environment of another process that uses this hub, with its own cache."""
    here = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return {**os.environ, **here, "HF_HOME": home, "HF_TOKEN": token}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A mock hub at which huggingface_hub of this process looks."""
    from huggingface_hub import constants

    with running() as server:
        for name, value in {
            "ENDPOINT": server.endpoint,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", "hf_ada_writes")
        monkeypatch.delenv("HF_HUB_OFFLINE")
        yield server
